"""Recorded traces through the live judge, one line of JSON a tick.

Each tick sees the window that ended then; nothing stamped later exists for it, so a truncated trace gives the same lines for
the part that is there.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagleeye.detectors.ensemble import Ensemble
from eagleeye.errors import UsageError
from eagleeye.files import write_whole
from eagleeye.online.judge import Judge, Settings
from eagleeye.records import Verdict
from eagleeye.source.trace import TraceSource
from eagleeye.window import Window


def verdicts(source: TraceSource, judge: Judge) -> Iterator[Verdict]:
    """Yield a verdict for each instant that the trace has rows of."""
    for window in windows(source, judge):
        yield judge.judge(window)


def windows(source: TraceSource, judge: Judge) -> Iterator[Window]:
    """Yield the window that the judge needs next, for each instant that the trace has rows of; ask again when it was judged."""
    for stamp_s in source.stamps_s:
        yield source.window(source.job, float(stamp_s), judge.length_s(source.step_s))


def line(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict in the format that traces are judged in."""
    return {
        "time": datetime.fromtimestamp(round(verdict.to_s, 3), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "decision": verdict.decision.value,
        "scope": verdict.scope.value if verdict.scope else None,
        "suspects": [{"rank": s.rank, "node": s.node, "score": s.score} for s in verdict.suspects],
        "category": verdict.category.value if verdict.category else None,
        "votes": dict(verdict.votes),
        "rule": verdict.rule,
        "model": verdict.model,
        "reason": verdict.reason,
    }


def replay(
    folders: Sequence[Path],
    out_dir: Path,
    settings: Settings,
    model: Ensemble | None = None,
    model_name: str = "own past",
    progress: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """Judge every trace and write ``out_dir/NAME.jsonl``, whole or not at all.

    All traces are opened before the first is judged, so that a broken one is known at once.

    Raises
    ------
    UsageError
        Two folders have one name.
    DataError, NoData
        A trace breaks the format or is empty.
    EnvironmentLacks
        The folder cannot be written.
    """
    names = [folder.resolve().name for folder in folders]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two of the traces are called {name!r} and would overwrite each other; replay them apart")
    for folder in folders:
        TraceSource(folder)
    written = []
    for folder, name in zip(folders, names, strict=True):
        source = TraceSource(folder)
        judge = Judge(settings, model, model_name)
        lines = [json.dumps(line(verdict)) for verdict in verdicts(source, judge)]
        written.append(out_dir / f"{name}.jsonl")
        write_whole(written[-1], "".join(f"{text}\n" for text in lines))
        anomalous = sum('"decision": "anomalous"' in text for text in lines)
        progress(f"{len(written)}/{len(folders)} {name}: {len(lines)} ticks, {anomalous} anomalous")
    return written
