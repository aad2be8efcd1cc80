"""Pictures of a recorded stretch as inline SVG: decisions per tick, deviations per rank, curves.

Text and numbers in, markup out; nothing here knows what a verdict is. Colours are CSS classes that `report.html` defines for
light, dark and paper, and whatever a colour says is said a second time by shape, pattern or word. Shape suffixes: R ranks,
T columns of the window, C columns of the picture.
"""

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagleeye.quantities import quantity

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
class TimeAxis:
    """Where an instant lies between `left` and `right`, in picture units."""

    start_s: float
    end_s: float
    left: float
    right: float

    def x(self, at_s: float) -> float:
        """Return the place of `at_s`, at the edge when it lies outside."""
        share = (at_s - self.start_s) / (self.end_s - self.start_s)
        return self.left + min(max(share, 0.0), 1.0) * (self.right - self.left)

    def ticks(self, most: int) -> list[float]:
        """Return at most `most` + 1 round durations since the start."""
        span_s = self.end_s - self.start_s
        step_s = next((s for s in _TIME_STEPS_S if span_s / s <= most), span_s / most)
        return [k * step_s for k in range(int(span_s / step_s + 1e-9) + 1)]

    def draw(self, top: float, bottom: float, most: int = 9) -> str:
        """Return grid lines from `top` to `bottom` with their labels below."""
        parts = []
        for after_s in self.ticks(most):
            x = self.x(self.start_s + after_s)
            parts.append(f'<path class="grid" d="M{x:.1f} {top:g}V{bottom:g}"/>')
            parts.append(words(clock(after_s), x, bottom + 14, "tick", "middle"))
        return "".join(parts)

    @property
    def data(self) -> dict[str, object]:
        """Attributes by which the page's script turns a place back into a time."""
        return {
            "data_left": round(self.left, 1),
            "data_right": round(self.right, 1),
            "data_start": round(self.start_s, 3),
            "data_span": round(self.end_s - self.start_s, 3),
        }


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line through a picture: ``fault`` (what was broken) or ``verdict`` (what was said)."""

    at_s: float
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


def _marks(marks: Sequence[Mark], axis: TimeAxis, top: float, bottom: float, labelled: bool) -> str:
    parts = []
    for row, mark in enumerate(marks):
        x, y = axis.x(mark.at_s), 14.0 + 18 * row
        parts.append(f'<path class="mark {mark.kind}" d="M{x:.1f} {y - 8 if labelled else top:g}V{bottom:g}"/>')
        if labelled:
            fits = x + 6.8 * len(mark.label) + 8 < axis.right
            parts.append(words(mark.label, x + 6 if fits else x - 6, y, f"note {mark.kind}", "start" if fits else "end"))
    return "".join(parts)


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

    def ticks(self) -> Iterable[float]:
        rough = (self.high - self.low) / 4
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * k for k in (1, 2, 2.5, 5, 10) if power * k >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


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
    if 0 < low < 0.6 * high:
        low = 0.0
    pad = (high - low) * 0.06 or max(abs(high) * 0.05, 1e-3)
    low, high = (low if low == 0 else low - pad), high + pad
    return low, high, int(((seen < low) | (seen > high)).sum())


def _line(values_T: NDArray[np.float32], axis: TimeAxis, scale: _Scale, points: int) -> str:
    """Return path data on a grid of half units; a stretch of many columns keeps its lowest and its highest value."""
    T = len(values_T)
    bins = min(T, max(60, points))
    edges = np.linspace(0, T, bins + 1).astype(int)[:-1]
    low, high = np.fmin.reduceat(values_T, edges), np.fmax.reduceat(values_T, edges)
    x_C = 2 * (axis.left + (axis.right - axis.left) * (edges + 1) / T)
    parts: list[str] = []
    here: tuple[int, int] | None = None
    for x, a, b in zip(x_C, low, high, strict=True):
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
