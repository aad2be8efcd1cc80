"""The rank's process from outside: does it exist, does it run, what does it use. From procfs only."""

import os
from collections.abc import Iterable
from pathlib import Path

from eagleeye.collect.base import Site
from eagleeye.collect.ranks import Process, Rank, RankTable
from eagleeye.errors import NoData
from eagleeye.metrics import PREFIX
from eagleeye.records import Sample

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessCollector:
    """Life, CPU, run-queue wait and memory of each rank's process."""

    name = "process"

    def __init__(self, site: Site) -> None:
        self._table = site.shared(RankTable)
        self._proc = site.proc
        self._waits: dict[Process, _WaitCounter] = {}

    def supported(self) -> bool:
        """Processes exist everywhere."""
        return True

    def collect(self, now_s: float) -> Iterable[Sample]:
        """Return the series of each rank; a vanished one has only `process_up` 0 and the time of its end."""
        ranks = self._table.ranks()
        if not ranks:
            raise NoData("no process of this node is a rank of a training job")
        alive = {rank.process for rank in ranks if rank.exited_s is None}
        self._waits = {process: counter for process, counter in self._waits.items() if process in alive}
        for rank in ranks:
            labels = {"training_job": rank.identity.job, "rank": str(rank.identity.rank)}
            for name, value in self._values(rank):
                yield Sample(PREFIX + name, labels, value)

    def _values(self, rank: Rank) -> Iterable[tuple[str, float]]:
        exited_s = rank.exited_s
        yield "process_up", float(exited_s is None)
        if exited_s is not None:
            yield "process_exit_timestamp_seconds", exited_s
            return
        stopped_ratio = rank.stopped.take()
        if stopped_ratio is not None:
            yield "process_stopped_ratio", stopped_ratio
        folder = self._proc / str(rank.process.pid)
        try:
            line = (folder / "stat").read_bytes()
            fields = line[line.rfind(b")") + 2 :].split()
            yield "process_cpu_seconds_total", (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
            yield "process_resident_memory_bytes", float(int(fields[21]) * _PAGE_BYTES)
            yield "process_run_wait_seconds_total", self._waits.setdefault(rank.process, _WaitCounter()).read_s(folder / "task")
        except (OSError, ValueError, IndexError):
            # It vanished while it was read: the table notices by itself.
            return


class _WaitCounter:
    """Sum of the run-queue waits of a process's threads, which does not fall when a thread ends."""

    def __init__(self) -> None:
        self._total_ns = 0
        self._last_ns: dict[str, int] = {}

    def read_s(self, task: Path) -> float:
        now_ns: dict[str, int] = {}
        for name in os.listdir(task):
            try:
                # run time, time on the run queue (both in ns), slices
                now_ns[name] = int((task / name / "schedstat").read_bytes().split()[1])
            except (OSError, IndexError):
                continue
        if not now_ns:
            raise OSError(f"no schedstat below {task}")
        for name, wait_ns in now_ns.items():
            last_ns = self._last_ns.get(name, 0)
            # A smaller value than before is another thread that got the same number.
            self._total_ns += wait_ns - last_ns if wait_ns >= last_ns else wait_ns
        self._last_ns = now_ns
        return self._total_ns / 1e9
