"""Figures without a screen: matplotlib's state machine and its choice of a backend stay out of it."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagleeye.errors import EnvironmentLacks
from eagleeye.offline import intervals, judging
from eagleeye.offline.judging import Found, Result

LEAST_S, LAST_S, TICKS_S = 1.0, 3600.0, (1, 5, 20, 60, 300, 1800)
"""Where the logarithmic axis of delays begins and ends, and what is written on it."""


def figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure of that size in inches, drawn by Agg."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def file_name(method: str) -> str:
    """Return the name of a method as files and MLflow bear it."""
    return method.replace(":", "-")


def draw(found: Mapping[str, Sequence[Result]], folder: Path) -> None:
    """Write `delays.png` (from onset to alarm) and `classes.png` (detected and culprit right by class); of several methods
    `methods.png` and a `delays.png` of all, and the two of each below its name.

    Raises
    ------
    EnvironmentLacks
        The folder cannot be written.
    """
    if len(found) == 1:
        (results,) = found.values()
        _draw_one(results, folder)
        return
    _save(_methods(found), folder / "methods.png")
    _save(_curves({name: judging.total(results).found for name, results in found.items()}), folder / "delays.png")
    for name, results in found.items():
        _draw_one(results, folder / file_name(name))


def _draw_one(results: Sequence[Result], folder: Path) -> None:
    classes = {k.removeprefix("fault "): t.found for k, t in judging.by_class(results).items() if t.faults}
    _save(_curves({"all faults": judging.total(results).found, **classes}), folder / "delays.png")
    _save(_classes(results), folder / "classes.png")


def _save(drawing: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=".png")
        try:
            with os.fdopen(handle, "wb") as file:
                os.fchmod(handle, 0o644)
                drawing.savefig(file, dpi=110, format="png")
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        reason = error.strerror or error
        raise EnvironmentLacks(f"cannot write {path}: {reason}; free some space or choose another place") from None


def _curves(groups: Mapping[str, Sequence[Found]]) -> Any:
    """Share of faults alarmed within a time, one line a group; the first with its 95 % interval."""
    drawing = figure(7, 4)
    axes = drawing.subplots()
    for number, (name, found) in enumerate(groups.items()):
        if not found:
            continue
        last_s = max(f.watched_s for f in found)
        at_s = np.unique([LEAST_S, *(max(LEAST_S, f.delay_s) for f in found if f.delay_s is not None), max(LEAST_S, last_s)])
        points = judging.onset_to_alarm(found, at_s)
        shares = [point.share for point in points]
        style = {"color": "black", "linewidth": 2} if number == 0 else {"color": f"C{(number - 1) % 10}", "linewidth": 1}
        style["linestyle"] = ("-", "--", ":")[max(0, number - 1) // 10 % 3]
        axes.step(at_s, shares, where="post", label=f"{name}: {points[-1].alarmed} of {len(found)}", **style)
        if number == 0:
            spans = np.array([intervals.share(point.alarmed, point.faults) for point in points])
            axes.fill_between(at_s, spans[:, 0], spans[:, 1], step="post", color="black", alpha=0.1)
    axes.set(title="From onset to alarm", ylabel="share of faults alarmed", ylim=(0, 1.02))
    _seconds(axes, "seconds after the onset")
    if axes.lines:
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return drawing


def _classes(results: Sequence[Result]) -> Any:
    classes = {k.removeprefix("fault "): t for k, t in judging.by_class(results).items() if t.faults}
    drawing = figure(max(4.0, 1.1 * len(classes)), 3.5)
    axes = drawing.subplots()
    of = [t.faults for t in classes.values()]
    for shift, label, counts in (
        (-0.2, "detected", [t.detected for t in classes.values()]),
        (0.2, "culprit right", [t.culprits_right for t in classes.values()]),
    ):
        _bars(axes.bar, np.arange(len(of)) + shift, counts, of, 0.38, label, "yerr")
    axes.set_xticks(range(len(classes)), [f"{k}\n(n={t.faults})" for k, t in classes.items()], fontsize=8)
    axes.set(title="By class of fault, with 95 % intervals", ylabel="share")
    axes.set_ylim(0, 1.05)
    if classes:
        axes.legend(fontsize=8)
    return drawing


def _methods(found: Mapping[str, Sequence[Result]]) -> Any:
    """Recall, right culprit and blame precision of each method, with intervals; beside them what it got wrong, and when."""
    totals = {name: judging.total(results) for name, results in found.items()}
    drawing = figure(10, 1.8 + 0.45 * len(totals))
    left, middle, right = drawing.subplots(1, 3, sharey=True, width_ratios=(3, 1.5, 1.5))
    places = np.arange(len(totals))
    faults = [t.faults for t in totals.values()]
    for shift, label, counts, of in (
        (-0.27, "recall", [t.detected for t in totals.values()], faults),
        (0.0, "culprit right", [t.culprits_right for t in totals.values()], faults),
        (0.27, "blame precision", [t.culprits_right for t in totals.values()], [t.blames for t in totals.values()]),
    ):
        _bars(left.barh, places + shift, counts, of, 0.25, label, "xerr")
    left.set_yticks(places, list(totals), fontsize=8)
    left.invert_yaxis()
    left.set(xlabel="share, with 95 % intervals", xlim=(0, 1.02))
    wrong, false = [t.wrong_blames for t in totals.values()], [t.false_alarms for t in totals.values()]
    middle.barh(places, wrong, 0.6, label="wrong blames", color="tab:red")
    middle.barh(places, false, 0.6, left=wrong, label="false alarms", color="tab:orange")
    middle.set(xlabel="events")
    first = next((place for place, part in zip(places, totals.values(), strict=True) if part.delays_s), None)
    for place, part in zip(places, totals.values(), strict=True):
        if part.delays_s:
            median, late = np.maximum(LEAST_S, np.percentile(part.delays_s, (50, 90)))
            right.plot([median, late], [place, place], color="tab:gray")
            right.plot(median, place, "o", color="black", label="median" if place == first else None)
            right.plot(late, place, "|", color="black", label="90th percentile" if place == first else None)
    _seconds(right, "seconds after the onset")
    for axes in (left, middle, right):
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1))
    return drawing


def _seconds(axes: Any, label: str) -> None:
    axes.set(xlabel=label, xscale="log", xlim=(LEAST_S, LAST_S))
    axes.set_xticks(TICKS_S, [str(at_s) for at_s in TICKS_S], fontsize=8)
    axes.set_xticks([], minor=True)


def _bars(draw: Any, places: Any, counts: Sequence[int], of: Sequence[int], size: float, label: str, error: str) -> None:
    shares = np.array([c / n if n else 0.0 for c, n in zip(counts, of, strict=True)])
    spans = np.array([intervals.share(c, n) if n else (0.0, 0.0) for c, n in zip(counts, of, strict=True)]).reshape(-1, 2)
    errors = np.clip(np.stack([shares - spans[:, 0], spans[:, 1] - shares]), 0.0, None)
    draw(places, shares, size, **{error: errors}, capsize=2, label=label)
