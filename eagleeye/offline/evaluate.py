"""The judge's desk: recorded traces and the verdicts on them in, tables, JSON and plots out.

Verdicts are read from `OUT/NAME.jsonl` (NAME = the folder's name), as `eagleeye score --replay` writes them, or made here by
methods, each a function from an open trace to one verdict a tick. What counts as what is decided in `judging`.
"""

import contextlib
import difflib
import json
import math
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from eagleeye import models
from eagleeye.errors import DataError, EnvironmentLacks, NoData, UsageError
from eagleeye.models import Settings
from eagleeye.offline import intervals, judging, plots
from eagleeye.offline.judging import Found, Result, Tick, Totals
from eagleeye.records import Decision, Verdict
from eagleeye.source.trace import Label, TraceSource, labels

Method = Callable[[TraceSource], Iterable[Verdict]]
"""Yields one verdict for each instant of a trace, from nothing stamped later. With several processes it must be picklable."""

Progress = Callable[[int, int, str, str], None]
"""Told how many of how many replays are done, and method and trace of the newest."""

BARS = ("recall", "culprit", "blame_precision")
"""Shares that a bar may be set for."""

CURVE_S = (1, 2, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200, 1800, 3600)
"""Where the onset-to-alarm curve is told."""

TOLD_S = (10, 20, 30, 60, 120, 300)
"""The same in the table."""

_ONE_THREAD = ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def evaluate(folders: Sequence[Path], verdicts: Path) -> list[Result]:
    """Return how the recorded verdicts on each trace fared.

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
        judging.judge(name, *_about(folder), labels(folder), read_ticks(verdicts / f"{name}.jsonl"))
        for name, folder in zip(names, folders, strict=True)
    ]


def chosen(text: str, methods: Sequence[str], groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the methods that a list such as ``default,baselines`` names, each once, in its order.

    Raises
    ------
    UsageError
        There is no such method or group; the sentence names the nearest.
    """
    names: list[str] = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        if word not in methods and word not in groups:
            known = [*groups, *methods]
            near = difflib.get_close_matches(word, known, 1, 0.0)
            raise UsageError(f"there is no method {word!r}, the nearest is {near[0]}; there are {', '.join(known)}")
        names += [name for name in groups.get(word, (word,)) if name not in names]
    if not names:
        raise UsageError(f"no method is named; there are {', '.join([*groups, *methods])}")
    return names


def compare(
    folders: Sequence[Path],
    methods: Mapping[str, Method],
    jobs: int = 1,
    progress: Progress = lambda done, of, method, trace: None,
) -> dict[str, list[Result]]:
    """Replay every trace by every method; return how each fared, in the order of `folders`.

    Parameters
    ----------
    jobs : processes; with more than one each uses one thread, and results are the same

    Raises
    ------
    NoData, DataError
        A trace without labels, or one that breaks the format; known before the first replay.
    EnvironmentLacks
        A process was killed, by the system for want of memory as a rule.
    """
    if jobs < 1:
        raise UsageError(f"jobs must be at least 1, not {jobs}")
    told = [labels(folder) for folder in folders]
    for folder in folders:
        TraceSource(folder)
    tasks = [
        (name, method, folder, truth) for folder, truth in zip(folders, told, strict=True) for name, method in methods.items()
    ]
    found: dict[str, list[Result]] = {name: [] for name in methods}
    done: Generator[Result] = _in_processes(tasks, jobs) if jobs > 1 else (_replayed(*task[1:]) for task in tasks)
    with contextlib.closing(done):
        for count, (task, result) in enumerate(zip(tasks, done, strict=True), 1):
            found[task[0]].append(result)
            progress(count, len(tasks), task[0], result.name)
    return found


_Task = tuple[str, Method, Path, Sequence[Label]]


def _replayed(method: Method, folder: Path, truth: Sequence[Label]) -> Result:
    source = TraceSource(folder)
    ticks = [Tick(v.to_s, v.decision, tuple(suspect.node for suspect in v.suspects)) for v in method(source)]
    if not ticks:
        raise NoData(f"{folder}: no verdict was given, so nothing can be judged")
    return judging.judge(folder.resolve().name, len(source.ranks), source.step_s, truth, ticks)


def _in_processes(tasks: Sequence[_Task], jobs: int) -> Generator[Result]:
    """Yield the results in order. When the caller stops early, or is interrupted, the processes end at once."""
    others = set(multiprocessing.active_children())
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))  # read by numba and BLAS when a process first imports them
    pool = ProcessPoolExecutor(min(jobs, len(tasks)), multiprocessing.get_context("spawn"), _die_quietly)
    try:
        waiting: list[Future[Result]] = [pool.submit(_replayed, *task[1:]) for task in tasks]
        for future, (name, _, folder, _) in zip(waiting, tasks, strict=True):
            try:
                yield future.result()
            except BrokenProcessPool:
                raise EnvironmentLacks(
                    f"a process ended while {name} replayed {folder}, most likely for want of memory: use fewer --jobs"
                ) from None
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _die_quietly() -> None:
    """An interrupt from the terminal reaches every process; a worker has nothing to say about it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


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


def _about(folder: Path) -> tuple[int, float]:
    """Return the number of ranks and the sampling interval in seconds."""
    path = folder / "trace.json"
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        step_s = float(about["interval_seconds"])
        if not (step_s > 0 and math.isfinite(step_s)):
            raise ValueError(f"interval_seconds is {step_s:g}")
        return len(about["ranks"]), step_s
    except FileNotFoundError:
        raise NoData(f"{path} is absent, so {folder} is no trace") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def bars(texts: Sequence[str]) -> dict[str, float]:
    """Return the bars that texts such as ``recall=0.9`` set.

    Raises
    ------
    UsageError
        No such share, or no number between 0 and 1.
    """
    found = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            least = float(number)
        except ValueError:
            least = math.nan
        if name not in BARS or not 0 <= least <= 1:
            raise UsageError(f"{text!r} is no bar; write NAME=SHARE with a NAME among {', '.join(BARS)} and a SHARE from 0 to 1")
        found[name] = least
    return found


def below(totals: Totals, bars: Mapping[str, float]) -> list[str]:
    """Return a sentence for each bar that the totals miss."""
    shares = {name: (count, of) for name, count, of in _shares(totals)}
    return [
        f"{name} is {shares[name][0]} of {shares[name][1]}, below the bar of {least:g}"
        for name, least in bars.items()
        if shares[name][1] == 0 or shares[name][0] / shares[name][1] < least
    ]


def _shares(totals: Totals) -> tuple[tuple[str, int, int], ...]:
    return (
        ("recall", totals.detected, totals.faults),
        ("culprit", totals.culprits_right, totals.faults),
        ("blame_precision", totals.culprits_right, totals.blames),
    )


def _rates(totals: Totals) -> tuple[tuple[str, int, float, str], ...]:
    """Return name, count, exposure in the unit of the name, and the exposure in words."""
    days, healthy = totals.hours / 24, totals.healthy_hours
    return (
        ("wrong_blames_per_job_day", totals.wrong_blames, days, f"{days:.3g} days"),
        ("wrong_blames_per_1000_healthy_job_hours", totals.healthy_wrong_blames, healthy / 1000, f"{healthy:.3g} healthy hours"),
        ("false_alarms_per_gpu_day", totals.false_alarms, totals.gpu_days, f"{totals.gpu_days:.3g} days"),
    )


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Return everything about one method as JSON types: totals, classes, traces."""
    return {
        "total": _summary(judging.total(results)),
        "classes": {kind: _summary(part) for kind, part in judging.by_class(results).items()},
        "traces": [
            {
                "name": r.name,
                "kind": r.kind,
                "ranks": r.ranks,
                "hours": r.hours,
                "healthy_hours": r.healthy_hours,
                "faults": [
                    {
                        "category": f.category,
                        "nameable": f.nameable,
                        "delay_s": f.delay_s,
                        "delay_samples": f.delay_samples,
                        "watched_s": f.watched_s,
                        "culprit_right": f.culprit_right,
                    }
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
    found: dict[str, Any] = {
        "traces": totals.traces,
        "job_hours": totals.hours,
        "healthy_job_hours": totals.healthy_hours,
        "gpu_days": totals.gpu_days,
    }
    for name, count, of in _shares(totals):
        found[name] = {"count": count, "of": of, "interval_95": intervals.share(count, of)}
    for name, count, exposure, _ in _rates(totals):
        low, high = intervals.rate(count, exposure)
        rate = count / exposure if exposure > 0 else None
        found[name] = {"count": count, "rate": rate, "interval_95": [low, high if math.isfinite(high) else None]}
    found["not_training_alarmed"] = {"count": totals.not_training_alarmed, "of": totals.not_training}
    fine, coarse = _by_sampling(totals.found)
    found["delay_s"] = delay_summary(totals.delays_s)
    found["delay_fine_s"] = delay_summary([f.delay_s for f in fine if f.delay_s is not None])
    found["delay_coarse_samples"] = delay_summary([f.delay_samples for f in coarse if f.delay_samples is not None])
    found["onset_to_alarm"] = [
        {
            "after_s": point.after_s,
            "alarmed": point.alarmed,
            "censored": point.censored,
            "of": point.faults,
            "share": point.share,
            "interval_95": intervals.share(point.alarmed, point.faults),
            "survival_share": point.survival_share,
        }
        for point in judging.onset_to_alarm(totals.found, CURVE_S)
    ]
    return found


def _by_sampling(found: Sequence[Found]) -> tuple[list[Found], list[Found]]:
    """Return the faults of traces sampled at least every `FINE_S`, and the others."""
    fine = [f for f in found if f.step_s <= judging.FINE_S]
    return fine, [f for f in found if f.step_s > judging.FINE_S]


def delay_summary(delays: Sequence[float]) -> dict[str, float] | None:
    """Return count, median, quartiles, 90th percentile and largest delay, or None."""
    if not delays:
        return None
    low, median, high, late = (float(v) for v in np.percentile(delays, (25, 50, 75, 90)))
    return {
        "count": len(delays), "median": median, "quartile_1": low, "quartile_3": high, "percentile_90": late,
        "largest": max(delays),
    }  # fmt: skip


def table(results: Sequence[Result]) -> str:
    """Return the report on one method as text."""
    heads = ("class", "traces", "hours", "detected", "culprit", "wrong", "false", "delay s: median (quartiles)")
    rows = [(kind, *_cells(part)) for kind, part in judging.by_class(results).items()]
    totals = judging.total(results)
    rows.append(("total", *_cells(totals)))
    lines = _laid_out([heads, *rows])
    lines.insert(1, _rule(lines))
    lines.insert(-1, lines[1])
    lines.append("")
    for name, count, of in _shares(totals):
        low, high = intervals.share(count, of)
        lines.append(
            f"{name.replace('_', ' '):26}{count} of {of}" + (f" = {count / of:.3f} [{low:.3f}, {high:.3f}]" if of else "")
        )
    for name, count, exposure, words in _rates(totals):
        low, high = intervals.rate(count, exposure)
        per = f"{count / exposure:.3g} [{low:.3g}, {high:.3g}]" if exposure > 0 else "no time judged"
        lines.append(f"{_spoken(name):26}{per}: {count} in {words}")
    lines.append(f"{'not training, but alarmed':26}{totals.not_training_alarmed} of {totals.not_training}")
    fine, coarse = _by_sampling(totals.found)
    for title, unit, delays in (
        ("delay", "s", totals.delays_s),
        (f"  sampled at <= {judging.FINE_S:g} s", "s", [f.delay_s for f in fine if f.delay_s is not None]),
        ("  sampled more rarely", "samples", [f.delay_samples for f in coarse if f.delay_samples is not None]),
    ):
        delay = delay_summary(delays)
        if delay:
            lines.append(
                f"{title:26}median {delay['median']:.3g}, quartiles {delay['quartile_1']:.3g} and {delay['quartile_3']:.3g}, "
                f"90th percentile {delay['percentile_90']:.3g}, largest {delay['largest']:.3g} {unit} (n={delay['count']})"
            )
    points = judging.onset_to_alarm(totals.found, TOLD_S)
    if points:
        lines.append(f"{'alarmed within':26}{', '.join(f'{p.after_s:g} s {p.share:.2f}' for p in points)}")
    lines.append("Intervals are 95 %: Wilson for shares, Byar for rates, rule of three for zero counts.")
    return "\n".join(lines)


def _spoken(name: str) -> str:
    return {"wrong_blames_per_1000_healthy_job_hours": "  per 1000 healthy hours"}.get(name, name.replace("_", " "))


def _cells(totals: Totals) -> tuple[str, ...]:
    delay = delay_summary(totals.delays_s)
    shares = []
    for count in (totals.detected, totals.culprits_right):
        low, high = intervals.share(count, totals.faults)
        shares.append(f"{count}/{totals.faults} [{low:.2f}, {high:.2f}]" if totals.faults else "")
    when = f"{delay['median']:.0f} ({delay['quartile_1']:.0f} to {delay['quartile_3']:.0f})" if delay else ""
    return str(totals.traces), f"{totals.hours:.1f}", *shares, str(totals.wrong_blames), str(totals.false_alarms), when


def comparison(found: Mapping[str, Sequence[Result]]) -> str:
    """Return one row a method as text, and one row a method of what it detected and whom it blamed in each class of fault."""
    totals = {name: judging.total(results) for name, results in found.items()}
    some = next(iter(totals.values()))
    heads: tuple[str, ...] = (
        "method", "recall", "culprit", "precision", "wrong blames", "false alarms", "not training", "delay s: median, 90 %",
        f"<= {judging.FINE_S:g} s", "else samples",
    )  # fmt: skip
    lines = _laid_out([heads, *((name, *_row(part)) for name, part in totals.items())])
    lines.insert(1, _rule(lines))
    lines.append(
        f"{some.traces} traces, {some.hours:.1f} h ({some.healthy_hours:.1f} h healthy), {some.gpu_days:.1f} GPU-days, "
        f"{some.faults} faults. Delays of what was detected; intervals are 95 %."
    )
    classes = {name: {k: t for k, t in judging.by_class(results).items() if t.faults} for name, results in found.items()}
    counts = {kind: part.faults for kind, part in next(iter(classes.values())).items()}
    if counts:
        heads = ("detected, culprit right", *(f"{kind.removeprefix('fault ')} ({count})" for kind, count in counts.items()))
        rows = [(name, *(f"{of[k].detected}, {of[k].culprits_right}" for k in counts)) for name, of in classes.items()]
        more = _laid_out([heads, *rows])
        more.insert(1, _rule(more))
        lines += ["", *more]
    return "\n".join(lines)


def _row(totals: Totals) -> tuple[str, ...]:
    shares = []
    for _, count, of in _shares(totals):
        low, high = intervals.share(count, of)
        shares.append(f"{count / of:.3f} [{low:.2f}, {high:.2f}]" if of else "")
    fine, coarse = _by_sampling(totals.found)
    delays = (
        delay_summary(totals.delays_s),
        delay_summary([f.delay_s for f in fine if f.delay_s is not None]),
        delay_summary([f.delay_samples for f in coarse if f.delay_samples is not None]),
    )
    return (
        *shares,
        str(totals.wrong_blames),
        str(totals.false_alarms),
        f"{totals.not_training_alarmed} of {totals.not_training}",
        *(f"{delay['median']:.3g}, {delay['percentile_90']:.3g}" if delay else "" for delay in delays),
    )


def _laid_out(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _rule(lines: Sequence[str]) -> str:
    return "-" * max(len(line) for line in lines)


def track(found: Mapping[str, Sequence[Result]], settings: Settings, params: Mapping[str, object]) -> str:
    """Log figures, tables, JSON and plots as a run of MLflow; return its id. Raises SourceUnavailable.

    Of several methods each has its figures under its own name: ``pca/recall``.
    """
    metrics: dict[str, float] = {}
    for name, results in found.items():
        totals = judging.total(results)
        own = {share: count / of for share, count, of in _shares(totals) if of}
        own |= {rate: count / exposure for rate, count, exposure, _ in _rates(totals) if exposure > 0}
        own |= {"job_hours": totals.hours, "faults": totals.faults, "not_training_alarmed": totals.not_training_alarmed}
        own |= {f"delay_{part}_s": value for part, value in (delay_summary(totals.delays_s) or {}).items() if part != "count"}
        prefix = f"{plots.file_name(name)}/" if len(found) > 1 else ""
        metrics |= {prefix + key: value for key, value in own.items()}
    with tempfile.TemporaryDirectory() as folder:
        plots.draw(found, Path(folder))
        (Path(folder) / "table.txt").write_text(report(found) + "\n", encoding="utf-8")
        (Path(folder) / "judged.json").write_text(json.dumps(everything(found), indent=1) + "\n", encoding="utf-8")
        return models.track(settings, {**params, "traces": len(next(iter(found.values())))}, metrics, Path(folder))


def report(found: Mapping[str, Sequence[Result]]) -> str:
    """Return the table of the only method, or the comparison of several and the table of the first."""
    first = next(iter(found))
    return table(found[first]) if len(found) == 1 else f"{comparison(found)}\n\n{first}\n{table(found[first])}"


def everything(found: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    """Return everything as JSON types: of the first method at the top, of all under `methods` where there are several."""
    first, *rest = found
    top: dict[str, Any] = {"method": first, **as_json(found[first])}
    return top if not rest else {**top, "methods": {name: as_json(results) for name, results in found.items()}}
