"""The judge's desk: recorded traces and the verdicts on them in, a table, JSON and plots out.

Reads `DIR/trace.json`, `DIR/labels.json` and `OUT/NAME.jsonl` (NAME = the folder's name), as `eagleeye score --replay` writes it.
What counts as what is decided in `judging`.
"""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from eagleeye import models
from eagleeye.errors import DataError, NoData, UsageError
from eagleeye.models import Settings
from eagleeye.offline import intervals, judging
from eagleeye.offline.judging import Result, Tick, Totals
from eagleeye.offline.plots import figure
from eagleeye.records import Decision
from eagleeye.source.trace import labels

BARS = ("recall", "culprit", "blame_precision")
"""Shares that a bar may be set for."""


def evaluate(folders: Sequence[Path], verdicts: Path) -> list[Result]:
    """Return how the verdicts on each trace fared.

    Raises
    ------
    NoData
        A trace without labels, or without verdicts.
    DataError
        A line that breaks the format; the sentence names file and line.
    UsageError
        Two folders of the same name, whose verdicts would be one file.
    """
    names = [folder.resolve().name for folder in folders]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UsageError(f"two traces are called {twice}, but {verdicts / twice}.jsonl can belong to one only; rename one")
    return [
        judging.judge(name, _rank_count(folder), labels(folder), read_ticks(verdicts / f"{name}.jsonl"))
        for name, folder in zip(names, folders, strict=True)
    ]


def read_ticks(path: Path) -> list[Tick]:
    """Return the verdicts of one file in the order of time. Raises as `evaluate` does."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NoData(f"{path} is absent: replay the trace first, with `eagleeye score --replay`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    ticks = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                ticks.append(_tick(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path}, line {number} is no verdict: {type(error).__name__}: {error}") from None
    if not ticks:
        raise NoData(f"{path} holds no verdict")
    return sorted(ticks, key=lambda tick: tick.at_s)


def _tick(entry: Any) -> Tick:
    moment = datetime.fromisoformat(entry["time"])
    if moment.tzinfo is None:
        raise ValueError(f"the time {entry['time']!r} has no zone")
    return Tick(moment.timestamp(), Decision(entry["decision"]), tuple(str(suspect["node"]) for suspect in entry["suspects"]))


def _rank_count(folder: Path) -> int:
    path = folder / "trace.json"
    try:
        return len(json.loads(path.read_text(encoding="utf-8"))["ranks"])
    except FileNotFoundError:
        raise NoData(f"{path} is absent, so {folder} is no trace") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def below(totals: Totals, bars: Sequence[str]) -> list[str]:
    """Return a sentence for each bar (``recall=0.9``) that the totals miss.

    Raises
    ------
    UsageError
        No such share, or no number between 0 and 1.
    """
    shares = {name: (count, of) for name, count, of in _shares(totals)}
    missed = []
    for bar in bars:
        name, _, text = bar.partition("=")
        try:
            least = float(text)
        except ValueError:
            least = math.nan
        if name not in BARS or not 0 <= least <= 1:
            raise UsageError(f"{bar!r} is no bar; write NAME=SHARE with a NAME among {', '.join(BARS)} and a SHARE from 0 to 1")
        count, of = shares[name]
        if of == 0 or count / of < least:
            missed.append(f"{name} is {count} of {of}, below the bar of {least:g}")
    return missed


def _shares(totals: Totals) -> tuple[tuple[str, int, int], ...]:
    return (
        ("recall", totals.detected, totals.faults),
        ("culprit", totals.culprits_right, totals.faults),
        ("blame_precision", totals.culprits_right, totals.blames),
    )


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Return everything as JSON types: totals, classes, traces."""
    return {
        "total": _summary(judging.total(results)),
        "classes": {kind: _summary(part) for kind, part in judging.by_class(results).items()},
        "traces": [
            {
                "name": r.name,
                "kind": r.kind,
                "ranks": r.ranks,
                "hours": r.hours,
                "faults": [
                    {"category": f.category, "nameable": f.nameable, "delay_s": f.delay_s, "culprit_right": f.culprit_right}
                    for f in r.faults
                ],
                "wrong_blames_s": list(r.wrong_blames_s),
                "false_alarms_s": list(r.false_alarms_s),
                "alarmed_while_not_training": r.alarmed_while_not_training,
            }
            for r in results
        ],
    }


def _summary(totals: Totals) -> dict[str, Any]:
    found: dict[str, Any] = {"traces": totals.traces, "job_hours": totals.hours, "gpu_days": totals.gpu_days}
    for name, count, of in _shares(totals):
        found[name] = {"count": count, "of": of, "interval_95": intervals.share(count, of)}
    for name, count, days in _rates(totals):
        low, high = intervals.rate(count, days)
        found[name] = {"count": count, "interval_95": [low, high if math.isfinite(high) else None]}
    found["not_training_alarmed"] = {"count": totals.not_training_alarmed, "of": totals.not_training}
    found["delay_s"] = delay_summary(totals.delays_s)
    return found


def _rates(totals: Totals) -> tuple[tuple[str, int, float], ...]:
    return (
        ("wrong_blames_per_job_day", totals.wrong_blames, totals.hours / 24),
        ("false_alarms_per_gpu_day", totals.false_alarms, totals.gpu_days),
    )


def delay_summary(delays_s: Sequence[float]) -> dict[str, float] | None:
    """Return median, quartiles, 90th percentile and largest delay in seconds, or None."""
    if not delays_s:
        return None
    low, median, high, late = (float(v) for v in np.percentile(delays_s, (25, 50, 75, 90)))
    return {"median": median, "quartile_1": low, "quartile_3": high, "percentile_90": late, "largest": max(delays_s)}


def table(results: Sequence[Result]) -> str:
    """Return the report as text."""
    heads = ("class", "traces", "hours", "detected", "culprit", "wrong", "false", "delay s: median (quartiles)")
    rows = [(kind, *_cells(part)) for kind, part in judging.by_class(results).items()]
    totals = judging.total(results)
    rows.append(("total", *_cells(totals)))
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (heads, *rows)]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines.insert(-1, lines[1])
    lines.append("")
    for name, count, of in _shares(totals):
        low, high = intervals.share(count, of)
        lines.append(
            f"{name.replace('_', ' '):26}{count} of {of}" + (f" = {count / of:.3f} [{low:.3f}, {high:.3f}]" if of else "")
        )
    for name, count, days in _rates(totals):
        low, high = intervals.rate(count, days)
        per = f"{count / days:.3g} [{low:.3g}, {high:.3g}]" if days else "no time judged"
        lines.append(f"{name.replace('_', ' '):26}{per}: {count} in {days:.3g} days")
    lines.append(f"{'not training, but alarmed':26}{totals.not_training_alarmed} of {totals.not_training}")
    delay = delay_summary(totals.delays_s)
    if delay:
        lines.append(
            f"{'delay':26}median {delay['median']:.0f} s, quartiles {delay['quartile_1']:.0f} and {delay['quartile_3']:.0f} s, "
            f"90th percentile {delay['percentile_90']:.0f} s, largest {delay['largest']:.0f} s"
        )
    lines.append("Intervals are 95 %: Wilson for shares, Byar for rates, rule of three for zero counts.")
    return "\n".join(lines)


def _cells(totals: Totals) -> tuple[str, ...]:
    delay = delay_summary(totals.delays_s)
    shares = []
    for count in (totals.detected, totals.culprits_right):
        low, high = intervals.share(count, totals.faults)
        shares.append(f"{count}/{totals.faults} [{low:.2f}, {high:.2f}]" if totals.faults else "")
    when = f"{delay['median']:.0f} ({delay['quartile_1']:.0f} to {delay['quartile_3']:.0f})" if delay else ""
    return str(totals.traces), f"{totals.hours:.1f}", *shares, str(totals.wrong_blames), str(totals.false_alarms), when


def track(results: Sequence[Result], settings: Settings, verdicts: Path) -> str:
    """Log figures, table and plots as a run of MLflow; return its id. Raises SourceUnavailable."""
    totals = judging.total(results)
    metrics = {name: count / of for name, count, of in _shares(totals) if of}
    metrics |= {name: count / days for name, count, days in _rates(totals) if days}
    metrics |= {"job_hours": totals.hours, "faults": totals.faults, "not_training_alarmed": totals.not_training_alarmed}
    metrics |= {f"delay_{name}_s": value for name, value in (delay_summary(totals.delays_s) or {}).items()}
    with tempfile.TemporaryDirectory() as folder:
        plot(results, Path(folder))
        (Path(folder) / "table.txt").write_text(table(results) + "\n", encoding="utf-8")
        (Path(folder) / "judged.json").write_text(json.dumps(as_json(results), indent=1) + "\n", encoding="utf-8")
        return models.track(settings, {"verdicts": str(verdicts), "traces": len(results)}, metrics, Path(folder))


def plot(results: Sequence[Result], folder: Path) -> None:
    """Write `delays.png` (share of faults detected within a time) and `classes.png` (detected and culprit right by class)."""
    folder.mkdir(parents=True, exist_ok=True)
    totals = judging.total(results)
    drawing = figure(6, 3.5)
    axes = drawing.subplots()
    if totals.faults:
        found = np.arange(1, len(totals.delays_s) + 1) / totals.faults
        axes.step([0.0, *totals.delays_s], [0.0, *found], where="post", color="tab:blue")
    axes.set(
        title=f"From onset to alarm: {totals.detected} of {totals.faults} faults",
        xlabel="seconds after the onset",
        ylabel="share detected",
    )
    axes.set_ylim(0, 1.02)
    drawing.savefig(folder / "delays.png", dpi=110)

    classes: Mapping[str, Totals] = {k.removeprefix("fault "): t for k, t in judging.by_class(results).items() if t.faults}
    drawing = figure(max(4.0, 1.1 * len(classes)), 3.5)
    axes = drawing.subplots()
    for shift, label, counts in (
        (-0.2, "detected", [t.detected for t in classes.values()]),
        (0.2, "culprit right", [t.culprits_right for t in classes.values()]),
    ):
        of = [t.faults for t in classes.values()]
        shares = np.array([c / n for c, n in zip(counts, of, strict=True)])
        spans = np.array([intervals.share(c, n) for c, n in zip(counts, of, strict=True)]).reshape(-1, 2)
        errors = np.clip(np.stack([shares - spans[:, 0], spans[:, 1] - shares]), 0.0, None)
        axes.bar(np.arange(len(of)) + shift, shares, 0.38, yerr=errors, capsize=3, label=label)
    axes.set_xticks(range(len(classes)), [f"{k}\n(n={t.faults})" for k, t in classes.items()], fontsize=8)
    axes.set(title="By class of fault, with 95 % intervals", ylabel="share")
    axes.set_ylim(0, 1.05)
    axes.legend(fontsize=8)
    drawing.savefig(folder / "classes.png", dpi=110)
