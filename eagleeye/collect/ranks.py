"""Which processes of this node are ranks, now and lately: found in procfs, watched until they vanish, and remembered for a while.

A rank process is one whose launcher's variables say so, or one that writes a progress file. Many processes inherit those
variables: the shell around the rank, an outer launcher, data-loader workers. `choose` tells which of them is the rank.
"""

import fcntl
import os
import random
import select
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from eagleeye.clock import monotonic_s
from eagleeye.collect import progress
from eagleeye.collect.base import MeanSinceTaken, Site
from eagleeye.collect.environment import Identity, identify, run_dirs, visible_gpu

Key = tuple[str, int]
"""Job and rank."""

# fmt: off
WRAPPERS = frozenset({
    "sh", "bash", "dash", "zsh", "ksh", "fish", "tcsh", "csh", "busybox", "env", "timeout", "nice", "ionice", "chrt",
    "numactl", "taskset", "nohup", "setsid", "stdbuf", "time", "tee", "xargs", "script", "sudo", "su", "runuser", "setpriv",
    "unshare", "nsenter", "ip", "chroot", "tini", "dumb-init", "catatonit", "docker-init", "srun", "sbatch", "slurmstepd",
    "slurm_script", "mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "orterun", "orted", "prterun", "prted", "prte",
    "torchrun", "accelerate", "deepspeed", "strace", "ltrace", "gdb", "perf", "nsys", "ncu", "py-spy",
})
# fmt: on
"""Commands that start a rank and are none."""

_STOPPED = "TtD"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3


class Process(NamedTuple):
    """A process as /proc/PID/stat shows it; `start_ticks` since boot tells it from a later one with the same number."""

    pid: int
    parent: int
    command: str
    state: str
    start_ticks: int


class Candidate(NamedTuple):
    """A process that may be a rank. `file` is its own progress file, if it writes one."""

    process: Process
    identity: Identity
    gpu: str
    file: Path | None = None


@dataclass
class Rank:
    """One rank of this node.

    `exited_s` is None while its process exists; `exit_status` is None while nobody knows it; `stopped` is the share of looks that
    found the process stopped or in uninterruptible sleep.
    """

    identity: Identity
    gpu: str
    process: Process
    file: Path | None = None
    exited_s: float | None = None
    exit_status: int | None = None
    exit_ticks: float = float("inf")
    stopped: MeanSinceTaken = field(default_factory=MeanSinceTaken, repr=False)
    pidfd: int | None = field(default=None, repr=False)


def parse_stat(pid: int, line: bytes) -> Process:
    """Return the process that a /proc/PID/stat line describes. Raises ValueError when it is truncated."""
    text = os.fsdecode(line)
    begin, end = text.find("("), text.rfind(")")
    fields = text[end + 2 :].split()
    if begin < 0 or len(fields) < 20:
        raise ValueError("a truncated stat line")
    return Process(pid, int(fields[1]), text[begin + 1 : end], fields[0], int(fields[19]))


def choose(candidates: Iterable[Candidate], parents: Mapping[int, int]) -> dict[Key, Candidate]:
    """Return the process of each rank among all that carry a rank's variables.

    A process that writes a progress file is the rank. Else: shells and launchers are none, nor is a process with a descendant
    that is another rank or the same one by an inner launcher; of the rest the topmost, and of several the eldest.

    Parameters
    ----------
    candidates : every process with an identity
    parents : parent of every process of the node
    """
    kin = {c.process.pid: c for c in candidates if c.file or c.process.command not in WRAPPERS}
    above = {pid: [up for up in _ancestors(pid, parents) if up in kin] for pid in kin}
    launchers = {up for pid, ups in above.items() for up in ups if not kin[up].file and _role(kin[up]) != _role(kin[pid])}
    chosen: dict[Key, Candidate] = {}
    for c in sorted(kin.values(), key=lambda c: (c.file is None, c.process.start_ticks, c.process.pid)):
        pid = c.process.pid
        helper = any(_key(kin[up]) == _key(c) for up in above[pid] if up not in launchers)
        if c.file or not (helper or pid in launchers):
            chosen.setdefault(_key(c), c)
    return chosen


def _key(c: Candidate) -> Key:
    return c.identity.job, c.identity.rank


def _role(c: Candidate) -> tuple[str, int, str]:
    return c.identity.job, c.identity.rank, c.identity.launcher


def _ancestors(pid: int, parents: Mapping[int, int]) -> list[int]:
    found: list[int] = []
    while (pid := parents.get(pid, 0)) > 1 and pid not in found:
        found.append(pid)
    return found


class RankTable:
    """The ranks of one node. Two threads keep it: one looks for new processes, one notices exits and stopped processes."""

    SCAN_S = 1.0
    LOOK_S = 0.1
    """Mean time between two looks at a process's state; the looks are irregular, lest they beat with a duty cycle."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lock = threading.Lock()
        self._ranks: dict[Key, Rank] = {}
        self._same_pids = site.same_pids
        self.scan()
        site.background(self._scan_again)
        site.background(self._watch)

    def ranks(self) -> tuple[Rank, ...]:
        """Return the ranks that exist or vanished lately, in order."""
        with self._lock:
            return tuple(self._ranks[key] for key in sorted(self._ranks))

    def scan(self) -> None:
        """Look for the ranks' processes now."""
        processes, candidates = self._find()
        parents = {p.pid: p.parent for p in processes.values()}
        chosen = choose(candidates, parents)
        telling = {candidate.process.pid for candidate in candidates}
        now_s = self._site.clock.now_s()
        with self._lock:
            for key, rank in list(self._ranks.items()):
                alive = processes.get(rank.process.pid)
                if rank.exited_s is None and (alive is None or not _same(alive, rank.process)):
                    self._vanish(rank, now_s)
                elif rank.exited_s is None and key not in chosen and rank.process.pid in telling:
                    # A process that is dying tells nothing any more and stays. This one does: it was taken for a rank until
                    # its children showed that it only launches them.
                    self._forget(key)
                elif rank.exited_s is not None and now_s - rank.exited_s > self._site.settings.remember_s:
                    self._forget(key)
            for key, candidate in chosen.items():
                self._take(key, candidate)

    def _take(self, key: Key, candidate: Candidate) -> None:
        before = self._ranks.get(key)
        if before is not None and before.process.pid == candidate.process.pid and _same(before.process, candidate.process):
            before.file = candidate.file or before.file
            return
        vanished = before is not None and before.exited_s is not None
        if before is not None and vanished and not candidate.file and candidate.process.start_ticks < before.exit_ticks:
            # What was born before the rank died is an orphan of it (a data-loader worker, say), not its successor.
            return
        rank = Rank(candidate.identity, candidate.gpu, candidate.process, candidate.file)
        rank.stopped.look(candidate.process.state in _STOPPED)
        if self._same_pids:
            rank.pidfd = _open_pidfd(self._site.proc, rank.process)
        if before is not None:
            self._forget(key)
        self._ranks[key] = rank

    def _find(self) -> tuple[dict[int, Process], list[Candidate]]:
        settings, own = self._site.settings, os.getpid()
        processes: dict[int, Process] = {}
        environs: dict[int, dict[str, str]] = {}
        for name in _numbers(self._site.proc):
            process = self._stat(int(name))
            if process is None or process.state in "ZX":
                continue
            processes[process.pid] = process
            if process.parent != 2 and process.pid != own:
                environ = _environ(self._site.proc / name / "environ")
                if environ:
                    environs[process.pid] = environ
        identities = {pid: identify(environ, settings.job) for pid, environ in environs.items()}
        files = self._files(environs)
        candidates: list[Candidate] = []
        for pid, environ in environs.items():
            process, identity = processes[pid], identities[pid]
            known = files.get((pid, process.start_ticks))
            if known is not None:
                path, state = known
                identity = state.identity
                if settings.job and "EAGLEEYE_JOB" not in environ:
                    identity = identity._replace(job=settings.job)
                candidate = Candidate(process, identity, state.gpu, path)
            elif identity is not None:
                candidate = Candidate(process, identity, visible_gpu(environ, identity.local_rank))
            else:
                continue
            if candidate.identity.node in (None, self._site.node):
                candidates.append(candidate)
        return processes, candidates

    def _files(self, environs: Mapping[int, Mapping[str, str]]) -> dict[tuple[int, int], tuple[Path, progress.State]]:
        """Return the progress files by process id and start."""
        own = self._site.settings.run_dir
        folders = {Path(own)} if own else set(run_dirs(os.environ, os.getuid()))
        for pid, environ in environs.items():
            if "EAGLEEYE_RUN_DIR" in environ:
                folders.add(Path(environ["EAGLEEYE_RUN_DIR"]))
            elif not own and ("RANK" in environ or "EAGLEEYE_JOB" in environ):
                try:
                    folders.update(run_dirs(environ, os.stat(self._site.proc / str(pid)).st_uid))
                except OSError:
                    continue
        found: dict[tuple[int, int], tuple[Path, progress.State]] = {}
        for folder in folders:
            try:
                names = [name for name in os.listdir(folder) if name.endswith(".progress")]
            except OSError:
                continue
            for path in (folder / name for name in sorted(names)[:1024]):
                state = progress.read(path)
                if state is not None:
                    found[state.pid, state.start_ticks] = (path, state)
        return found

    def _stat(self, pid: int) -> Process | None:
        try:
            return parse_stat(pid, (self._site.proc / str(pid) / "stat").read_bytes())
        except (OSError, ValueError):
            return None

    def _scan_again(self) -> float:
        began_s = monotonic_s()
        self.scan()
        # Where thousands of processes run, looking through them may cost two percent of a CPU, not more.
        return max(self.SCAN_S, 50 * (monotonic_s() - began_s))

    def _watch(self) -> float:
        """Wait for exits until the next look is due, then look at every process once."""
        with self._lock:
            watched = {rank.pidfd: rank for rank in self._ranks.values() if rank.pidfd is not None and rank.exited_s is None}
            poll = select.poll()
            for descriptor in watched:
                poll.register(descriptor, select.POLLIN)
        due_s = monotonic_s() + random.uniform(0.5, 1.5) * self.LOOK_S
        exited = poll.poll(1000 * (due_s - monotonic_s()))
        now_s = self._site.clock.now_s()
        with self._lock:
            for descriptor, events in exited:
                # A descriptor that the other thread closed meanwhile is no exit.
                if events & select.POLLIN and watched[descriptor].pidfd == descriptor:
                    self._vanish(watched[descriptor], now_s)
            for rank in self._ranks.values():
                if rank.exited_s is None and not exited:
                    self._look(rank, now_s)
        return 0.0

    def _look(self, rank: Rank, now_s: float) -> None:
        process = self._stat(rank.process.pid)
        if process is None or process.state in "ZX" or not _same(process, rank.process):
            self._vanish(rank, now_s)
            return
        rank.stopped.look(process.state in _STOPPED)

    def _vanish(self, rank: Rank, now_s: float) -> None:
        if rank.exited_s is None:
            rank.exited_s = now_s
            rank.exit_ticks = (time.clock_gettime(time.CLOCK_BOOTTIME) - 0.2) * _TICKS_PER_S
            rank.exit_status = _zombie_status(self._site.proc, rank.process)

    def learn_status(self, rank: Rank) -> int | None:
        """Return the exit status of a vanished rank as wait(2) gives it, or None where the kernel does not tell strangers."""
        with self._lock:
            if rank.exit_status is None and rank.exited_s is not None and rank.pidfd is not None:
                rank.exit_status = _pidfd_status(rank.pidfd)
            return rank.exit_status

    def _forget(self, key: Key) -> None:
        rank = self._ranks.pop(key)
        if rank.pidfd is not None:
            os.close(rank.pidfd)
            rank.pidfd = None


def _numbers(proc: Path) -> list[str]:
    try:
        return [name for name in os.listdir(proc) if name.isdigit()]
    except OSError:
        return []


def _same(one: Process, other: Process) -> bool:
    return one.start_ticks == other.start_ticks


def _environ(path: Path) -> dict[str, str]:
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in data.split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs}


def _open_pidfd(proc: Path, process: Process) -> int | None:
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return None
    try:
        if _same(parse_stat(process.pid, (proc / str(process.pid) / "stat").read_bytes()), process):
            return descriptor
    except (OSError, ValueError):
        pass
    os.close(descriptor)
    return None


def _zombie_status(proc: Path, process: Process) -> int | None:
    """Return the exit status of a process that its parent has not waited for yet."""
    try:
        line = (proc / str(process.pid) / "stat").read_bytes()
        now = parse_stat(process.pid, line)
    except (OSError, ValueError):
        return None
    fields = line[line.rfind(b")") + 2 :].split()
    return int(fields[49]) if now.state == "Z" and _same(now, process) and len(fields) >= 50 else None


def _pidfd_status(descriptor: int) -> int | None:
    """Return the exit status of a process that was waited for: kernels from 6.15 on keep it for those who hold a pidfd."""
    info = bytearray(64)
    struct.pack_into("<Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info, True)
    except OSError:
        return None
    known = struct.unpack_from("<Q", info, 0)[0] & _PIDFD_INFO_EXIT
    return int(struct.unpack_from("<i", info, 60)[0]) if known else None
