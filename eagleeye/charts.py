"""Pictures of an incident as inline SVG: decisions per tick, deviations per rank, curves, phases of a recovery, losses by step.

Text and numbers in, markup out; nothing here knows what a verdict is. Colours are CSS classes that `report.html` defines for
light, dark and paper, and whatever a colour says is said a second time by shape, pattern or word. Shape suffixes: R ranks,
T columns of the window, C columns of the picture.
"""

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagleeye.quantities import number, quantity

WIDTH = 1080
"""Width of every full picture in its own units; the page scales it."""

LEVELS = (3.0, 6.0, 12.0, 25.0)
"""Robust standard deviations at which the heat map changes its colour."""

LEVEL_WORDS = ("below 3", "3 to 6", "6 to 12", "12 to 25", "25 and more")
UNCOMPARED, MISSING = len(LEVEL_WORDS), len(LEVEL_WORDS) + 1

_COLUMNS = 360
_CURVE_POINTS = 8000
_DRAWN_PEERS = 96
_TREND_COLUMNS = 180
_LOSS_COLUMNS = 440
_PHASE_COLOURS = 6
_TINY = 16.0
"""A piece of a bar that is narrower than this has its number below the bar."""

_DRAWABLE = 1e30
"""Larger values are drawn as if they were infinite: their differences would be."""

_TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


def esc(text: object) -> str:
    """Return `text` safe between tags and between double quotes."""
    return html.escape(str(text), quote=True)


def tag(name: str, content: str = "", /, **attributes: object) -> str:
    """Return one element. `content` is markup; attribute values are escaped, ``class_`` means class and ``_`` a hyphen."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{esc(f"{value:.15g}" if isinstance(value, float) else value)}"'
        for key, value in attributes.items()
    )
    return f"<{name}{told}>{content}</{name}>"


def words(text: object, x: float, y: float, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text in a picture, its baseline at `y`."""
    return tag("text", esc(text), x=round(x, 1), y=round(y, 1), class_=kind, text_anchor=anchor)


def clock(duration_s: float) -> str:
    """Return minutes:seconds, or hours:minutes:seconds from one hour and a half on."""
    sign, whole = "-" if round(duration_s) < 0 else "", abs(round(duration_s))
    if whole < 5400:
        return f"{sign}{whole // 60}:{whole % 60:02d}"
    return f"{sign}{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


@dataclass(frozen=True, slots=True)
class Axis:
    """Where a number lies between `left` and `right`, in picture units. `start` is below `end`."""

    start: float
    end: float
    left: float
    right: float

    def x(self, value: float) -> float:
        """Return the place of `value`, at the edge when it lies outside."""
        share = (value - self.start) / (self.end - self.start)
        return self.left + min(max(share, 0.0), 1.0) * (self.right - self.left)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return about `most` round whole numbers, each with its label."""
        return [(value, f"{value:.0f}") for value in _round_numbers(self.start, self.end, most, least=1.0)]

    def draw(self, top: float, bottom: float, most: int = 9) -> str:
        """Return grid lines from `top` to `bottom` with their labels below."""
        parts = []
        for value, label in self.ticks(most):
            x = self.x(value)
            parts.append(f'<path class="grid" d="M{x:.1f} {top:g}V{bottom:g}"/>')
            parts.append(words(label, x, bottom + 14, "tick", "middle"))
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class DurationAxis(Axis):
    """An axis of seconds after something."""

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return about `most` round durations, each with its label."""
        return [(value, quantity(value, "seconds")) for value in _round_numbers(self.start, self.end, most)]


@dataclass(frozen=True, slots=True)
class TimeAxis(Axis):
    """An axis of seconds since the epoch, labelled with the time since its start."""

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return at most `most` + 1 instants at round durations since the start, each with its label."""
        span_s = self.end - self.start
        step_s = next((s for s in _TIME_STEPS_S if span_s / s <= most), span_s / most)
        return [(self.start + k * step_s, clock(k * step_s)) for k in range(int(span_s / step_s + 1e-9) + 1)]

    @property
    def data(self) -> dict[str, object]:
        """Attributes by which the page's script turns a place back into a time."""
        return {
            "data_left": round(self.left, 1),
            "data_right": round(self.right, 1),
            "data_start": round(self.start, 3),
            "data_span": round(self.end - self.start, 3),
        }


def _round_numbers(low: float, high: float, most: int, least: float = 0.0) -> list[float]:
    """Return about `most` equally spaced round numbers from `low` to `high`, at least `least` apart."""
    rough = max((high - low) / most, least)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 2.5, 5, 10) if power * k >= rough * 0.999 and (power * k) % (least or power * k) == 0)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line through a picture: ``fault`` (what was broken), ``verdict`` (what was said) or ``restored``.

    `at` is a place on the picture's axis: seconds since the epoch, or a step.
    """

    at: float
    kind: str
    label: str


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a lane. `kind` is its CSS class; `label` is written where there is room, `told` appears on hovering."""

    from_s: float
    to_s: float
    kind: str
    told: str
    label: str = ""


def picture(width: float, height: float, name: str, described: str, content: str, **attributes: object) -> str:
    """Return an SVG with its text alternative."""
    return tag(
        "svg", f"<title>{esc(name)}</title><desc>{esc(described)}</desc>{content}",
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=f"{name}. {described}",
        **attributes,
    )  # fmt: skip


def timeline(
    name: str, described: str, axis: TimeAxis, lanes: Sequence[tuple[str, Sequence[Span]]], marks: Sequence[Mark]
) -> str:
    """Return one horizontal lane for each (name, spans), under the labels of the marks."""
    top, lane_height = 8 + 18 * len(marks), 34
    bottom = top + lane_height * len(lanes)
    parts = [axis.draw(top, bottom)]
    for row, (lane, spans) in enumerate(lanes):
        y = top + row * lane_height
        parts.append(words(lane, axis.left - 12, y + 21, "lane", "end"))
        for span in spans:
            x, width = axis.x(span.from_s), max(axis.x(span.to_s) - axis.x(span.from_s), 4.0)
            shape = tag("title", esc(span.told))
            parts.append(
                tag("rect", shape, class_=span.kind, x=round(x, 1), y=y + 5, width=round(width, 1), height=lane_height - 10)
            )
            if span.label:
                parts.append(_label(span.label, x, width, axis.right, y + 21))
    parts.append(_marks(marks, axis, top, bottom, labelled=True))
    return picture(WIDTH, bottom + 22, name, described, "".join(parts), **axis.data)


def _label(text: str, x: float, width: float, right: float, y: float) -> str:
    """Inside the bar where it fits, else beside it."""
    needed = 16 + 6.8 * len(text)
    if needed <= width:
        return words(text, x + 8, y, "inbar")
    return words(text, x + width + 6, y, "lane") if x + width + needed <= right else words(text, x - 6, y, "lane", "end")


def _marks(marks: Sequence[Mark], axis: Axis, top: float, bottom: float, labelled: bool) -> str:
    lines, labels = [], []
    for row, mark in enumerate(marks):
        x, y = axis.x(mark.at), 14.0 + 18 * row
        lines.append(f'<path class="mark {mark.kind}" d="M{x:.1f} {y - 8 if labelled else top:g}V{bottom:g}"/>')
        if labelled:
            fits = x + 6.8 * len(mark.label) + 8 < axis.right
            labels.append(words(mark.label, x + 6 if fits else x - 6, y, f"note {mark.kind}", "start" if fits else "end"))
    return "".join(lines + labels)


@dataclass(frozen=True, slots=True)
class Row:
    """A rank in the heat map: its number, node, and CSS class and words when it is marked."""

    rank: int
    node: str
    kind: str = ""
    label: str = ""


def levels_RT(deviation_RT: NDArray[np.float32], observed_RT: NDArray[np.bool_]) -> NDArray[np.int8]:
    """Return (R, C) colour levels, C at most 360: the largest deviation in each bin, `MISSING` or `UNCOMPARED`.

    A bin in which anything is missing is never drawn as normal.
    """
    T = deviation_RT.shape[1]
    edges = np.linspace(0, T, min(T, _COLUMNS) + 1).astype(int)[:-1]
    worst = np.fmax.reduceat(np.abs(deviation_RT), edges, axis=1)
    gap = ~np.logical_and.reduceat(observed_RT, edges, axis=1)
    level = np.digitize(np.nan_to_num(worst), LEVELS)
    level[~np.isfinite(worst)] = UNCOMPARED
    level[gap & ((level == 0) | (level == UNCOMPARED))] = MISSING
    return np.asarray(level, dtype=np.int8)


def heatmap(
    name: str, described: str, axis: TimeAxis, rows: Sequence[Row], level_RC: NDArray[np.int8], marks: Sequence[Mark]
) -> str:
    """Return ranks by time, one path per level. `rows` and the first axis of `level_RC` go together, ranks of a node in a row."""
    R, C = level_RC.shape
    height = 26.0 if R <= 8 else 15.0 if R <= 40 else 11.0 if R <= 72 else 5.0
    top, y = 8.0 + 18 * len(marks), 0.0
    tops: list[float] = []
    blocks: list[tuple[str, float, float]] = []
    y = top
    for r, row in enumerate(rows):
        if r and row.node != rows[r - 1].node:
            y += min(4.0, height / 3)
        if not r or row.node != rows[r - 1].node:
            blocks.append((row.node, y, y + height))
        else:
            blocks[-1] = (row.node, blocks[-1][1], y + height)
        tops.append(y)
        y += height
    bottom = y
    x_C = axis.left + (axis.right - axis.left) * np.arange(C + 1) / C
    parts = []
    kinds = [f"heat{k}" for k in range(len(LEVEL_WORDS))] + ["uncompared", "missing"]
    told = [f"{w} standard deviations from its peers" for w in LEVEL_WORDS] + ["nobody to compare with", "no data"]
    drawn = height - (0.6 if height > 6 else 0.0)
    for level, kind in enumerate(kinds):
        runs = _runs(level_RC == level, x_C, tops, drawn)
        if runs:
            parts.append(f'<path class="{kind}" data-told="{esc(told[level])}" d="{runs}"/>')
    parts.append(axis.draw(bottom, bottom + 4))
    room = -1e9
    for node, a, b in blocks:
        middle = (a + b) / 2 + 4
        if middle - room >= 11:
            parts.append(words(_short(node, 13), axis.left - 34, middle, "lane", "end"))
            room = middle
    for row, y in zip(rows, tops, strict=True):
        if height >= 9:
            parts.append(words(row.rank, axis.left - 8, y + height / 2 + 3.5, f"rank {row.kind}", "end"))
        if row.kind:
            parts.append(
                tag("rect", x=round(axis.left - 1.5, 1), y=round(y - 1.5, 1), width=round(axis.right - axis.left + 3, 1),
                    height=round(height + 2.4, 1), class_=f"frame {row.kind}")
            )  # fmt: skip
    parts.append(_row_labels(rows, tops, height, axis.right + 8))
    parts.append(_marks(marks, axis, top, bottom, labelled=True))
    places = json.dumps([[round(y, 1), row.rank, row.node] for row, y in zip(rows, tops, strict=True)], ensure_ascii=False)
    return picture(WIDTH, bottom + 24, name, described, "".join(parts), data_rows=places, data_height=height, **axis.data)


def _row_labels(rows: Sequence[Row], tops: Sequence[float], height: float, x: float) -> str:
    parts, room = [], -1e9
    for row, y in zip(rows, tops, strict=True):
        middle = y + height / 2 + 4
        if row.label and middle - room >= 12:
            parts.append(words(f"◀ {row.label}", x, middle, f"rank {row.kind}"))
            room = middle
    return "".join(parts)


def _runs(here_RC: NDArray[np.bool_], x_C: NDArray[np.float64], tops: Sequence[float], height: float) -> str:
    """Neighbouring cells of one level become one rectangle, so that a calm job is a small file."""
    parts = []
    for here_C, y in zip(here_RC, tops, strict=True):
        edges = np.flatnonzero(np.diff(np.concatenate(([False], here_C, [False])).astype(np.int8)))
        for a, b in zip(edges[::2], edges[1::2], strict=True):
            x, width = round(float(x_C[a]), 1), round(float(x_C[b] - x_C[a]), 1)
            parts.append(f"M{x:g} {round(y, 1):g}h{width:g}v{height:g}h-{width:g}z")
    return "".join(parts)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def curves(
    name: str, unit: str, axis: TimeAxis, values_RT: NDArray[np.float32], median_T: NDArray[np.float32],
    marked: Mapping[int, str], marks: Sequence[Mark],
) -> str:  # fmt: skip
    """Return one metric: every rank a thin line, `median_T` dashed, the ranks at the indices in `marked` in their CSS class."""
    width, height, top, bottom = 530.0, 214.0, 30.0, 184.0
    low, high, cut = _range(values_RT, list(marked))
    scale = _Scale(low, high, top, bottom)
    parts = [words(name, axis.left, 17, "name"), axis.draw(top, bottom, 6)]
    for value in scale.ticks():
        y = scale.y(value)
        parts.append(f'<path class="grid" d="M{axis.left:g} {y:.1f}H{axis.right:g}"/>')
        parts.append(words(quantity(value, unit), axis.left - 7, y + 4, "tick", "end"))
    if cut:
        parts.append(words(f"{cut} values beyond the axis", axis.right, 17, "tick", "end"))
    peers = [r for r in range(len(values_RT)) if r not in marked]
    if len(peers) > _DRAWN_PEERS:
        peers = peers[:: math.ceil(len(peers) / _DRAWN_PEERS)]
    lines = "".join(_line(values_RT[r], axis, scale, _CURVE_POINTS // max(len(peers), 1)) for r in peers)
    # Half a unit is fine enough for the eye, and whole numbers make a small file.
    shapes = [f'<path class="line peer" d="{lines}"/>', f'<path class="line median" d="{_trend(median_T, axis, scale)}"/>']
    for r, kind in marked.items():
        gap = ~np.isfinite(values_RT[r])
        x_T = np.linspace(axis.left, axis.right, len(gap) + 1)
        parts.append(
            f'<path class="missing" data-told="no data of the marked rank" d="{_runs(gap[None], x_T, [bottom - 6], 6)}"/>'
        )
        if len(gap) > _TREND_COLUMNS:
            shapes.append(f'<path class="line extent {kind}" d="{_line(values_RT[r], axis, scale, 360)}"/>')
        shapes.append(f'<path class="line {kind}" d="{_trend(values_RT[r], axis, scale)}"/>')
    parts.append(tag("g", "".join(shapes), transform="scale(.5)"))
    parts.append(_marks(marks, axis, top, bottom, labelled=False))
    last = {kind: quantity(_newest(values_RT[r]), unit) for r, kind in marked.items()}
    described = ", ".join(f"the {kind} ends at {value}" for kind, value in last.items())
    described = f"{described or 'nobody is marked'}; the median of the peers ends at {quantity(_newest(median_T), unit)}"
    return picture(width, height, name, described, "".join(parts), **axis.data)


CURVE_BOX = (68.0, 508.0)
"""Left and right end of the time axis of `curves`."""


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    top: float
    bottom: float

    def y(self, value: float) -> float:
        return self.bottom - (value - self.low) / (self.high - self.low) * (self.bottom - self.top)

    def ticks(self) -> list[float]:
        return _round_numbers(self.low, self.high, 4)


def _range(values_RT: NDArray[np.float32], marked: Sequence[int]) -> tuple[float, float, int]:
    """Return lowest, highest and how many values lie outside: a single outlier must not flatten everything else."""
    seen = values_RT[np.isfinite(values_RT)].astype(np.float64)
    if not seen.size:
        return 0.0, 1.0, 0
    low, high = float(seen.min()), float(seen.max())
    own = values_RT[marked]
    kept = np.concatenate([np.quantile(seen, (0.005, 0.995)), np.quantile(own[np.isfinite(own)], (0.01, 0.99))
                           if np.isfinite(own).any() else []])  # fmt: skip
    if (high - low) > 3 * (kept.max() - kept.min()) > 0:
        low, high = float(kept.min()), float(kept.max())
    low, high = _padded(low, high)
    return low, high, int(((seen < low) | (seen > high)).sum())


def _padded(low: float, high: float) -> tuple[float, float]:
    """Return a little more than the range, from zero on where that costs little of the picture."""
    if 0 < low < 0.6 * high:
        low = 0.0
    pad = (high - low) * 0.06 or max(abs(high) * 0.05, 1e-3)
    return (low if low == 0 else low - pad), high + pad


def _line(values_T: NDArray[np.float32], axis: TimeAxis, scale: _Scale, points: int) -> str:
    """Return path data; a stretch of many columns keeps its lowest and its highest value."""
    T = len(values_T)
    bins = min(T, max(60, points))
    edges = np.linspace(0, T, bins + 1).astype(int)[:-1]
    x_C = 2 * (axis.left + (axis.right - axis.left) * (edges + 1) / T)
    return _path(x_C, np.fmin.reduceat(values_T, edges), np.fmax.reduceat(values_T, edges), scale)


def _path(x_C: NDArray[np.float64], low_C: NDArray[np.floating], high_C: NDArray[np.floating], scale: _Scale) -> str:
    """Return path data on a grid of half units, through the lowest and the highest value of each column; NaN breaks the line."""
    parts: list[str] = []
    here: tuple[int, int] | None = None
    for x, a, b in zip(x_C, low_C, high_C, strict=True):
        if not math.isfinite(a):
            here = None
            continue
        ends = [round(2 * min(max(scale.y(float(v)), scale.top - 4), scale.bottom + 4)) for v in ((a,) if a == b else (a, b))]
        if here is not None and len(ends) == 2 and abs(ends[1] - here[1]) < abs(ends[0] - here[1]):
            ends.reverse()
        for y in ends:
            # h0 gives a lone point a round cap, so that one observed value between two gaps is seen
            parts.append(f"M{round(x)} {y}h0" if here is None else f"l{round(x) - here[0]} {y - here[1]}")
            here = (round(x), y)
    return "".join(parts)


def _trend(values_T: NDArray[np.float32], axis: TimeAxis, scale: _Scale) -> str:
    """Return path data of the mean of each bin: what a line that swings faster than a picture can show is doing all the same."""
    T = len(values_T)
    edges = np.linspace(0, T, min(T, _TREND_COLUMNS) + 1).astype(int)[:-1]
    count = np.add.reduceat(np.isfinite(values_T).astype(np.float32), edges)
    total = np.add.reduceat(np.nan_to_num(values_T).astype(np.float64), edges)
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(np.float32)
    return _line(mean, axis, scale, _TREND_COLUMNS)


def _newest(values_T: NDArray[np.float32]) -> float:
    seen = values_T[np.isfinite(values_T)]
    return float(seen[-1]) if seen.size else math.nan


def phases(name: str, described: str, parts: Sequence[tuple[str, float]]) -> str:
    """Return consecutive (name, seconds) as one bar, each with its number, counted from one, and with its words where they fit.

    A piece takes its CSS class from `phase_kind`. Seconds that are negative or no number take no room.
    """
    lengths_s = [_length_s(length_s) for _, length_s in parts]
    total_s = sum(lengths_s) or 1.0
    axis = DurationAxis(0.0, total_s, 24.0, WIDTH - 24.0)
    top, height = 6.0, 36.0
    pieces, tiny, done_s = [], [], 0.0
    for k, ((phase, told_s), length_s) in enumerate(zip(parts, lengths_s, strict=True)):
        x, width = axis.x(done_s), axis.x(done_s + length_s) - axis.x(done_s)
        done_s += length_s
        value = quantity(told_s, "seconds")
        pieces.append(
            tag("rect", tag("title", esc(f"{k + 1} {phase}, {value}")), class_=phase_kind(k), x=round(x, 1), y=top,
                width=round(max(width - 1.5, 1.0), 1), height=height)
        )  # fmt: skip
        label = next((text for text in (f"{k + 1} {phase}, {value}", f"{k + 1} {phase}") if 20 + 7.2 * len(text) <= width), "")
        if width < _TINY:
            tiny.append((k + 1, x + width / 2))
        elif label:
            pieces.append(words(label, x + 9, top + height / 2 + 4, "onbar"))
        else:
            pieces.append(words(k + 1, x + width / 2 - 0.7, top + height / 2 + 4, "onbar", "middle"))
    bottom = top + height
    for (number_, x), place in zip(tiny, _spread([x for _, x in tiny], _TINY, axis.left, axis.right), strict=True):
        pieces.append(f'<path class="lead" d="M{x:.1f} {top + height:g}L{place:.1f} {top + height + 9:g}"/>')
        pieces.append(words(number_, place, top + height + 20, "lane", "middle"))
        bottom = top + height + 24
    return picture(WIDTH, bottom + 24, name, described, axis.draw(top, bottom + 4) + "".join(pieces))


def phase_kind(index: int) -> str:
    """Return the CSS class of a piece of `phases`; colours come again, which is why pieces also have numbers."""
    return f"phase{index % _PHASE_COLOURS}"


def _length_s(duration_s: float) -> float:
    return duration_s if math.isfinite(duration_s) and duration_s > 0 else 0.0


def _spread(places: Sequence[float], apart: float, left: float, right: float) -> list[float]:
    """Return increasing places moved as little as needed to lie `apart`, closer only where there is no room for that."""
    apart = min(apart, (right - left) / max(len(places), 1))
    moved: list[float] = []
    for x in places:
        moved.append(max(x, moved[-1] + apart if moved else left))
    limit = right
    for k in range(len(moved) - 1, -1, -1):
        moved[k] = min(moved[k], limit)
        limit = moved[k] - apart
    return moved


def losses(
    name: str, described: str, axis: Axis, loss: Mapping[int, float], steady: Mapping[int, float], restored: int, lost: int
) -> str:
    """Return losses by step: those of the unbroken run as a wide line, those of the broken job upon it, cut to the axis.

    Up to the step `restored` the job's line is what was computed before the fault; the `lost` steps after it, which a band marks,
    were computed once more, and the rest after that. Where there are more steps than the picture has columns, a line is the mean
    of each column, with its lowest and highest value behind. What is infinite or no number is a hatched strip at the bottom.
    """
    width, height, top, bottom = 530.0, 256.0, 66.0, 234.0
    fault = restored + lost
    stretches = [
        ("before", _Steps.of(loss, axis, -math.inf, restored)),
        ("again", _Steps.of(loss, axis, restored, fault)),
        ("after", _Steps.of(loss, axis, fault, math.inf)),
    ]
    stretches = [(kind, steps) for kind, steps in stretches if steps.x_C.size]
    if steady:
        stretches.insert(0, ("steady", _Steps.of(steady, axis, -math.inf, math.inf)))
    # every mean is seen, so that no change is hidden, and all but the rarest of the values behind
    seen = [end for _, steps in stretches for end in steps.ends()]
    scale = _Scale(*(_padded(min(seen), max(seen)) if seen else (0.0, 1.0)), top, bottom)
    parts = [words(name, axis.left, 17, "name")]
    first, last = axis.x(restored), axis.x(fault)
    if lost > 0:
        parts.append(
            tag("rect", class_="lost", x=round(first, 1), y=top, width=round(max(last - first, 1.5), 1), height=bottom - top)
        )
    parts.append(axis.draw(top, bottom, 6))
    ticks = scale.ticks()
    for value, label in zip(ticks, _labels(ticks), strict=True):
        y = scale.y(value)
        parts.append(f'<path class="grid" d="M{axis.left:g} {y:.1f}H{axis.right:g}"/>')
        parts.append(words(label, axis.left - 7, y + 4, "tick", "end"))
    shapes, gaps = [], ""
    for kind, steps in stretches:
        if kind != "steady":
            gaps += "".join(f"M{x:.1f} {bottom - 6:g}h1.5v6h-1.5z" for x in steps.x_C[steps.gap_C] - 0.7)
            if steps.thinned:
                shapes.append(f'<path class="line extent {kind}" d="{_path(2 * steps.x_C, steps.low_C, steps.high_C, scale)}"/>')
        shapes.append(f'<path class="line {kind}" d="{_path(2 * steps.x_C, steps.mean_C, steps.mean_C, scale)}"/>')
    parts.append(tag("g", "".join(shapes), transform="scale(.5)"))
    if gaps:
        parts.append(f'<path class="missing" d="{gaps}"/>')
    marks = [Mark(restored, "restored", f"restored, step {restored}"), Mark(fault, "fault", f"fault after step {fault}")]
    parts.append(tag("g", _marks(marks, axis, top - 20, bottom - 20, labelled=True), transform="translate(0 20)"))
    return picture(width, height, name, described, "".join(parts))


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """Values by step in the columns of a picture: (C,) places, mean, lowest and highest value, and whether one cannot be drawn.

    `thinned`: some column holds several steps.
    """

    x_C: NDArray[np.float64]
    mean_C: NDArray[np.float64]
    low_C: NDArray[np.float64]
    high_C: NDArray[np.float64]
    gap_C: NDArray[np.bool_]
    thinned: bool

    @classmethod
    def of(cls, values: Mapping[int, float], axis: Axis, after: float, until: float) -> "_Steps":
        """Return what lies on the axis in (after, until], and the step `after` itself where others follow: lines have no holes.

        Steps need not be equally spaced; where many are absent, a column without a value breaks the line.
        """
        steps = sorted(step for step in values if max(after, axis.start) <= step <= min(until, axis.end))
        if not steps or steps[-1] == after:
            return cls(*(np.empty(0),) * 4, np.empty(0, dtype=bool), False)
        steps_N = np.array(steps, dtype=np.float64)
        values_N = np.array([values[step] for step in steps], dtype=np.float64)
        gap_N = ~(np.abs(values_N) < _DRAWABLE)
        values_N[gap_N] = np.nan
        apart_N = np.diff(steps_N)
        holes = np.flatnonzero(apart_N > 2.5 * np.median(apart_N)) if apart_N.size > 1 else np.empty(0, dtype=np.intp)
        values_N, gap_N = np.insert(values_N, holes + 1, np.nan), np.insert(gap_N, holes + 1, False)
        steps_N = np.insert(steps_N, holes + 1, (steps_N[holes] + steps_N[holes + 1]) / 2)
        column_N = ((steps_N - axis.start) / (axis.end - axis.start) * _LOSS_COLUMNS).astype(np.int64)
        edges = np.flatnonzero(np.diff(column_N, prepend=-1))
        known_C = np.add.reduceat(np.isfinite(values_N).astype(np.float64), edges)
        total_C = np.add.reduceat(np.nan_to_num(values_N), edges)
        return cls(
            axis.left + (axis.right - axis.left) * (steps_N[edges] - axis.start) / (axis.end - axis.start),
            np.where(known_C > 0, total_C / np.maximum(known_C, 1), np.nan),
            np.fmin.reduceat(values_N, edges),
            np.fmax.reduceat(values_N, edges),
            np.logical_or.reduceat(gap_N, edges),
            bool(known_C.max() > 1),
        )

    def ends(self) -> list[float]:
        """Return the numbers that a scale must hold: the lowest and highest mean, and what nearly all values lie between."""
        known_C = np.isfinite(self.mean_C)
        if not known_C.any():
            return []
        mean_C, low_C, high_C = self.mean_C[known_C], self.low_C[known_C], self.high_C[known_C]
        return [float(v) for v in (mean_C.min(), mean_C.max(), np.quantile(low_C, 0.02), np.quantile(high_C, 0.98))]


def _labels(ticks: Sequence[float]) -> list[str]:
    """Return numbers without a unit with as many digits as tell them apart."""
    apart = abs(ticks[1] - ticks[0]) if len(ticks) > 1 else 0.0
    largest = max((abs(tick) for tick in ticks), default=0.0)
    digits = 2 + math.floor(math.log10(largest)) - math.floor(math.log10(apart)) if apart and largest else 3
    return [number(tick) if digits <= 3 else f"{tick:.{digits}g}" for tick in ticks]
