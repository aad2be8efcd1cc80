"""How far each rank's training is: from the hook's files, or from step numbers in its log where the job has no hook."""

import math
import os
import re
import threading
from collections.abc import Iterable

from eagleeye.collect import progress
from eagleeye.collect.base import Site
from eagleeye.collect.logs import LogTail
from eagleeye.collect.ranks import Process, Rank, RankTable
from eagleeye.errors import NoData
from eagleeye.metrics import PREFIX
from eagleeye.records import Sample

_PREFIX_RANK = re.compile(r"(?i)\[\s*rank[ :_-]?(\d+)\s*\]")
_FILE_RANK = re.compile(r"(?i)(?:rank[_-]?|_)(\d+)\.\w+$")


class StepLog:
    """Step counter and step seconds of each rank, read from log lines.

    Parameters
    ----------
    pattern : regular expression whose one group is the step
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)
        self._newest: dict[int | None, tuple[int, float, float]] = {}

    def add(self, path: str, at_s: float, text: str) -> None:
        """Take in a line. Its rank: a ``[rank12]`` prefix, else the file's name (``rank3.log``, ``job_3.log``), else unknown."""
        match = self._pattern.search(text)
        if not match:
            return
        named = _PREFIX_RANK.search(text) or _FILE_RANK.search(os.path.basename(path))
        rank = int(named.group(1)) if named else None
        step = int(match.group(1))
        before = self._newest.get(rank)
        if before is None or step < before[0]:
            self._newest[rank] = (step, at_s, math.nan)
        elif step > before[0]:
            self._newest[rank] = (step, at_s, max(0.0, at_s - before[1]) / (step - before[0]))

    def newest(self, rank: int, lowest: bool) -> tuple[int, float, float] | None:
        """Return step, its time and its seconds (NaN when unknown); lines of no known rank belong to the node's lowest rank."""
        found = self._newest.get(rank)
        return self._newest.get(None) if found is None and lowest else found


class ProgressCollector:
    """Steps, phase and heartbeat of each rank of this node."""

    name = "progress"

    def __init__(self, site: Site) -> None:
        self._table = site.shared(RankTable)
        self._steps = StepLog(site.settings.step_pattern)
        self._lock = threading.Lock()
        self._tail = site.shared(LogTail)
        self._tail.listen(self._take)
        self._states: dict[Process, progress.State] = {}

    def _take(self, path: str, at_s: float, text: str) -> None:
        with self._lock:
            self._steps.add(path, at_s, text)

    def supported(self) -> bool:
        """Processes exist everywhere."""
        return True

    def collect(self, now_s: float) -> Iterable[Sample]:
        """Return what is known of each rank that exists or vanished lately; nothing is made up for the others."""
        self._tail.poll()
        ranks = self._table.ranks()
        known = {rank.process: self._state(rank) for rank in ranks}
        self._states = {process: state for process, state in known.items() if state is not None}
        lowest = min((rank.identity.rank for rank in ranks), default=-1)
        samples = [
            Sample(PREFIX + name, {"training_job": rank.identity.job, "rank": str(rank.identity.rank)}, value)
            for rank in ranks
            for name, value in self._values(rank, known[rank.process], rank.identity.rank == lowest)
            if not math.isnan(value)
        ]
        if not samples:
            raise NoData("no rank of this node writes a progress file or step numbers into a watched log")
        return samples

    def _state(self, rank: Rank) -> progress.State | None:
        state = progress.read(rank.file) if rank.file else None
        if state and (state.pid, state.start_ticks) == (rank.process.pid, rank.process.start_ticks):
            return state
        # The file is torn beyond use or belongs to a successor already: what was read last still holds.
        return self._states.get(rank.process)

    def _values(self, rank: Rank, state: progress.State | None, lowest: bool) -> Iterable[tuple[str, float]]:
        status = self._table.learn_status(rank) if rank.exited_s is not None else None
        if state is not None:
            if state.step >= 0:
                yield "train_steps", float(state.step)
                yield "train_step_timestamp_seconds", state.step_at_s
            yield "train_step_seconds", state.step_s
            yield "train_compute_seconds", state.compute_s
            yield "train_collective_ratio", math.nan if state.in_collective is None else float(state.in_collective)
            yield "train_heartbeat_timestamp_seconds", state.heartbeat_s
        else:
            with self._lock:
                newest = self._steps.newest(rank.identity.rank, lowest)
            if newest is not None:
                yield "train_steps", float(newest[0])
                yield "train_step_timestamp_seconds", newest[1]
                yield "train_step_seconds", newest[2]
        # Only an exit with status 0 is an end; a program that left by sys.exit(1) also ran its exit handlers.
        if status == 0 or (state is not None and state.finished and status is None):
            yield "train_phase", float(progress.PHASES.index("finished"))
        elif state is not None:
            yield "train_phase", float(state.phase)
