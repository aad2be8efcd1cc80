"""What may be learned from: stretches of normal work, out of months of history or recorded traces.

Windows ("pieces") come in, one after the other; those that were idle, broken, gappy or known to be faulty are dropped and
counted; the rest is joined into stretches. Memory is bounded by `Settings.corpus_bytes` plus the stretches that still grow,
however long the history: beyond it the job that takes most gives up a stretch, drawn by a hash, so that an even sample of every
job remains.
"""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from eagleeye.detectors import ensemble, rules
from eagleeye.detectors.applicability import not_applicable
from eagleeye.detectors.peers import MIN_PEERS, compared
from eagleeye.errors import NoData
from eagleeye.models import Settings
from eagleeye.source.base import Progress, Source
from eagleeye.source.trace import Label, TraceSource, labels
from eagleeye.window import Window

AFTER_FAULT_S = 600.0
"""Work this soon after a labelled fault is not held for normal: counters and error windows still show it."""

CHECKS = 10
"""Instants of a piece at which the rules look at it."""

Piece = tuple[Window, str | None]
"""A window, and why it must not be learned from if that is known beforehand."""


@dataclass(slots=True)
class Corpus:
    """Stretches of normal work in the order of job and time, and what was left out.

    `dropped` counts pieces by reason; `sampled_out` stretches that were normal but did not fit into memory.
    """

    stretches: list[Window] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    sampled_out: int = 0

    @property
    def jobs(self) -> tuple[str, ...]:
        """Names of the jobs in it, sorted."""
        return tuple(sorted({w.job for w in self.stretches}))

    @property
    def hours(self) -> float:
        """Job hours in it."""
        return sum(_length_s(w) for w in self.stretches) / 3600

    def told(self) -> str:
        """Return one sentence about what was kept and what was dropped."""
        left = ", ".join(f"{count} {why}" for why, count in self.dropped.most_common())
        said = f"{self.kept} windows kept, {sum(self.dropped.values())} dropped" + (f" ({left})" if left else "")
        return said + (f"; {self.sampled_out} stretches sampled out to stay in memory" if self.sampled_out else "")


def from_source(
    source: Source, start_s: float, end_s: float, piece_s: float, progress: Progress | None = None
) -> Iterator[Piece]:
    """Yield the pieces of every job that a source knows between two times."""
    for window in source.history(start_s, end_s, min(piece_s, end_s - start_s), progress):
        yield window, None


def from_traces(folders: Sequence[Path], piece_s: float, progress: Progress | None = None) -> Iterator[Piece]:
    """Yield the pieces of recorded traces; those that labels hold for faulty or not training come with that reason."""
    for done, folder in enumerate(folders):
        source = TraceSource(folder)
        known: tuple[Label, ...] = ()
        with contextlib.suppress(NoData):
            known = labels(folder)
        start_s, end_s = float(source.stamps_s[0]) - source.step_s, float(source.stamps_s[-1])
        # traces may repeat a job's name, and a stretch never goes from one recording into another
        name = f"{source.job}@{folder.resolve().name}"
        for window in source.history(start_s, end_s, min(piece_s, end_s - start_s)):
            yield replace(window, job=name), _labelled(window, known)
        if progress:
            progress((done + 1) / len(folders))


def collect(pieces: Iterable[Piece], settings: Settings) -> Corpus:
    """Return the corpus of the pieces.

    Pieces of one job must come in the order of time; jobs may alternate.

    Raises
    ------
    NoData
        Nothing normal is left; the sentence says what was dropped and why.
    """
    corpus = Corpus()
    growing: dict[str, list[Window]] = {}
    held_bytes: Counter[str] = Counter()
    finished: dict[str, list[Window]] = {}

    def finish(job: str) -> None:
        parts = growing.pop(job, [])
        if not parts:
            return
        stretch = _joined(parts)
        if stretch.values_RMT.shape[2] < ensemble.least_points():
            corpus.dropped["between interruptions, too short to learn from"] += len(parts)
            return
        corpus.kept += len(parts)
        finished.setdefault(job, []).append(stretch)
        held_bytes[job] += stretch.values_RMT.nbytes
        while held_bytes.total() > settings.corpus_bytes and sum(map(len, finished.values())) > 1:
            fattest = max(finished, key=lambda j: (held_bytes[j], j))
            out = min(finished[fattest], key=_lot)
            finished[fattest].remove(out)
            held_bytes[fattest] -= out.values_RMT.nbytes
            corpus.sampled_out += 1

    for window, excluded in pieces:
        why = excluded or unclean(window, settings)
        if why:
            corpus.dropped[why] += 1
            finish(window.job)
            continue
        # the phase is no signal, but tells which instants nobody would judge
        window = window.select([*compared(window), *(m for m in ("train_phase",) if window.has(m))])
        parts = growing.get(window.job, [])
        longest_s = max(settings.stretch_s, 2 * ensemble.least_points() * window.step_s)
        if parts and (not _follows(parts[-1], window) or sum(map(_length_s, parts)) + _length_s(window) > longest_s):
            finish(window.job)
        growing.setdefault(window.job, []).append(window)
    for job in sorted(growing):
        finish(job)
    corpus.stretches = [w for job in sorted(finished) for w in sorted(finished[job], key=lambda w: w.end_s)]
    _drop_outliers(corpus)
    if not corpus.stretches:
        raise NoData(
            f"nothing normal to learn from: {corpus.told()}" if corpus.dropped else "nothing to learn from: no job in that time"
        )
    return corpus


def unclean(window: Window, settings: Settings) -> str | None:
    """Return why a piece must not be learned from, or None."""
    if max(window.groups.count(g) for g in window.groups) < MIN_PEERS:
        return f"of jobs with fewer than {MIN_PEERS} ranks that do the same work"
    signals = window.select(compared(window)).values_RMT
    seen = np.isfinite(signals)
    if not seen.any():
        return "without any value"
    unheard = int((~seen.any(axis=(1, 2))).sum())
    # a metric that nobody has is absent, not missing
    missing_ratio = 1.0 - float(seen[:, seen.any(axis=(0, 2))].mean())
    if missing_ratio > settings.missing_ratio:
        return "in which a rank was never observed" if unheard else "with too much missing"
    T = window.values_RMT.shape[2]
    counts = np.unique(np.linspace(1, T, min(CHECKS, T)).round().astype(int))
    seen_so_far = [window.before(float(window.stamps_T[count - 1])) for count in counts]
    # shorter pauses, for a checkpoint say, stay: what follows them is judged online with the pause in its past
    if sum(not_applicable(until) is not None for until in seen_so_far) > len(counts) / 2:
        return "in which the job did not work"
    finding = next((found for until in seen_so_far if (found := rules.check(until, rules.Limits()))), None)
    return f"with a finding of the rule {finding.rule}" if finding else None


def _labelled(window: Window, known: Sequence[Label]) -> str | None:
    start_s = window.start_s - window.step_s
    for label in known:
        after_s = AFTER_FAULT_S if label.kind == "fault" else 0.0
        if label.start_s <= window.end_s and start_s <= label.end_s + after_s:
            return f"labelled {label.kind}"
    return None


def _drop_outliers(corpus: Corpus) -> None:
    """Drop stretches in which a rank leaves its peers for good: unlabelled faults, which would make the thresholds blind.

    Each stretch is measured by a model of its own first half, so that permanent differences between boards count for nothing. A
    majority of detectors must name the same rank at two ticks in a row.
    """
    normal = []
    for stretch in corpus.stretches:
        if _turns_odd(stretch):
            corpus.dropped["in stretches in which one rank leaves the others"] += 1
            corpus.kept -= 1
        else:
            normal.append(stretch)
    corpus.stretches = normal


def _turns_odd(stretch: Window) -> bool:
    first = ensemble.half(stretch)
    if first.values_RMT.shape[2] < ensemble.least_points():
        return False
    try:
        own = ensemble.fit([first])
    except NoData:
        return False
    offset_RM = own.job_offsets(first)
    odd_before_R = np.zeros(len(stretch.ranks), dtype=bool)
    for end in ensemble.held_out_ends(stretch):
        votes_DR = np.stack([np.nan_to_num(score.score_R) > 1.0 for score in own.score(ensemble.until(stretch, end), offset_RM)])
        odd_R = votes_DR.sum(axis=0) >= 2
        if (odd_R & odd_before_R).any():
            return True
        odd_before_R = odd_R
    return False


def _joined(parts: Sequence[Window]) -> Window:
    metrics = tuple(sorted({m for part in parts for m in part.metrics}))
    values_RMT = np.concatenate([part.select(metrics).values_RMT for part in parts], axis=2)
    return replace(parts[-1], metrics=metrics, values_RMT=values_RMT)


def _follows(before: Window, window: Window) -> bool:
    same = (before.ranks, before.nodes, before.groups, before.step_s) == (
        window.ranks,
        window.nodes,
        window.groups,
        window.step_s,
    )
    return same and abs(window.start_s - before.end_s - window.step_s) < window.step_s / 2


def _length_s(window: Window) -> float:
    return float(window.values_RMT.shape[2] * window.step_s)


def _lot(window: Window) -> bytes:
    return hashlib.sha256(f"{window.job} {window.end_s:.3f}".encode()).digest()
