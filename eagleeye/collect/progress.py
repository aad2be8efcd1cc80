"""One line in the training loop -> where the rank is, in a small file that others read even while the process is stopped.

    from eagleeye.collect import progress

    for n, batch in enumerate(batches):
        ...
        progress.step(n)

Optional: ``with progress.phase("eval"): ...`` and ``with progress.collective(): dist.all_reduce(...)``. Nothing here raises into
the loop; a folder that cannot be written gives one warning on standard error, and then nothing happens any more.

The file holds two slots. A step writes the older one, with a number and a checksum, so that a reader which meets a half-written
slot, be it because the process was stopped or killed right there, knows it and still has the other.
"""

import atexit
import json
import math
import mmap
import os
import struct
import sys
import threading
import zlib
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from eagleeye.clock import SystemClock, monotonic_s
from eagleeye.collect.environment import Identity, identify, run_dirs, start_ticks, visible_gpu

PHASES = ("init", "train", "eval", "checkpoint", "load", "finished")
HEARTBEAT_S = 0.5

SIZE_BYTES = 1024
_MAGIC = b"EAGLEYE1"
_HEAD = struct.Struct("<8sQQd")
"""Magic, process id, its start in clock ticks since boot, heartbeat."""
_SLOT = struct.Struct("<QqdddBBBx")
"""Number, step, its time stamp, its seconds, those outside collectives, phase, in a collective (2 = never used), finished."""
_SLOT_OFFSETS = (64, 160)
_CHECK = struct.Struct("<I")
_IDENTITY_OFFSET = 256
_HEARTBEAT_WORD = 3

_clock = SystemClock()


class State(NamedTuple):
    """What a progress file says. NaN: not known. Times are seconds since the epoch, `step` is -1 before the first one."""

    identity: Identity
    gpu: str
    pid: int
    start_ticks: int
    heartbeat_s: float
    step: int
    step_at_s: float
    step_s: float
    compute_s: float
    phase: int
    in_collective: bool | None
    finished: bool


_IDENTITY_TYPES = (str, int, int, int, str, str, str)


def read(path: Path) -> State | None:
    """Return the state in a progress file, or None when it holds none: absent, garbage, or of another version."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = os.read(descriptor, SIZE_BYTES)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    if len(data) != SIZE_BYTES or not data.startswith(_MAGIC):
        return None
    _, pid, ticks, heartbeat_s = _HEAD.unpack_from(data)
    slots = [
        _SLOT.unpack_from(data, offset)
        for offset in _SLOT_OFFSETS
        if _CHECK.unpack_from(data, offset + _SLOT.size)[0] == zlib.crc32(data[offset : offset + _SLOT.size])
    ]
    try:
        told = json.loads(data[_IDENTITY_OFFSET:].rstrip(b"\0"))
        gpu = str(told.pop("gpu"))
        identity = Identity(**told)
        if any(type(value) is not kind for value, kind in zip(identity, _IDENTITY_TYPES, strict=True) if value is not None):
            return None
        _, step, step_at_s, step_s, compute_s, phase, collective, finished = max(slots)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if phase >= len(PHASES):
        return None
    in_collective = None if collective == 2 else bool(collective)
    return State(identity, gpu, pid, ticks, heartbeat_s, step, step_at_s, step_s, compute_s, phase, in_collective, bool(finished))


def file_name(job: str, rank: int) -> str:
    """Return the name of a rank's progress file; characters that a file name cannot bear become ``_``."""
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in job[:100]) + f".{rank}.progress"


def step(n: int) -> None:
    """Say that step `n` is finished. Once per iteration, at its end; costs a few microseconds."""
    writer = _writer()
    if writer is not None:
        writer.step(n)


def phase(name: str) -> "_Phase":
    """Return a context in which the rank is in phase ``init``, ``train``, ``eval``, ``checkpoint`` or ``load``.

    Its time does not count as part of a step.
    """
    return _Phase(name)


def collective() -> "_Collective":
    """Return a context in which the rank waits for its peers. What remains of a step is its compute time."""
    return _Collective()


class _Phase:
    def __init__(self, name: str) -> None:
        self._number = PHASES.index(name) if name in PHASES[:-1] else -1
        self._name = name

    def __enter__(self) -> None:
        self._used = _writer()
        if self._number < 0:
            _warn(f"unknown phase {self._name!r} is ignored; use one of {', '.join(PHASES[:-1])}")
            self._used = None
        if self._used is not None:
            self._before = self._used.phase
            self._began_s = monotonic_s()
            self._used.enter_phase(self._number)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._used is not None:
            # Within another phase this time is already part of what the outer one leaves out.
            outer = self._before not in (PHASES.index("init"), PHASES.index("train"))
            self._used.leave_phase(self._before, 0.0 if outer else monotonic_s() - self._began_s)


class _Collective:
    def __enter__(self) -> None:
        self._used = _writer()
        if self._used is not None:
            self._began_s = monotonic_s()
            self._used.enter_collective()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._used is not None:
            self._used.leave_collective(monotonic_s() - self._began_s)


class _Writer:
    """The file of this process. Used by its training thread, and by the heartbeat thread for one word of its own."""

    def __init__(self, path: Path, identity: Identity, gpu: str) -> None:
        self.path = path
        self.phase = 0
        self._number = 0
        self._step = -1
        self._at_s = self._step_s = self._compute_s = math.nan
        self._collective = 2
        self._finished = False
        self._last_s = math.nan
        self._paused_s = self._waited_s = 0.0
        self._lock = threading.Lock()
        told = json.dumps({**identity._asdict(), "gpu": gpu}).encode()
        if _IDENTITY_OFFSET + len(told) > SIZE_BYTES:
            raise ValueError("the names of job, group and node are too long for a progress file")
        content = bytearray(SIZE_BYTES)
        _HEAD.pack_into(content, 0, _MAGIC, os.getpid(), start_ticks(Path("/proc/self/stat").read_bytes()), _clock.now_s())
        content[_IDENTITY_OFFSET : _IDENTITY_OFFSET + len(told)] = told
        # A new inode every time: a reader never sees one file that two processes wrote.
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        with open(beside, "xb") as file:
            file.write(content)
        with open(beside, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE_BYTES)
        self._heartbeat = memoryview(self._map).cast("d")
        self._put()
        os.replace(beside, path)

    def step(self, n: int) -> None:
        now_s = monotonic_s()
        try:
            n = int(n)
            advance = n - self._step
            if not math.isnan(self._last_s) and advance > 0:
                self._step_s = max(0.0, now_s - self._last_s - self._paused_s) / advance
                self._compute_s = math.nan if self._collective == 2 else max(0.0, self._step_s - self._waited_s / advance)
            self._step = n
            if self.phase == 0:
                self.phase = 1
            self._at_s = _clock.now_s()
            self._put()
        except (TypeError, ValueError, OverflowError, RuntimeError, struct.error):
            _warn(f"{n!r} is no step number")
        self._last_s, self._paused_s, self._waited_s = now_s, 0.0, 0.0

    def enter_phase(self, number: int) -> None:
        self.phase = number
        self._put()

    def leave_phase(self, before: int, took_s: float) -> None:
        if before == 0 and self.phase == 1:
            before = 1
        self._paused_s += took_s if self.phase != 1 else 0.0
        self.phase = before
        self._put()

    def enter_collective(self) -> None:
        self._collective = 1
        self._put()

    def leave_collective(self, took_s: float) -> None:
        self._collective = 0
        self._waited_s += took_s
        self._put()

    def finish(self) -> None:
        self._finished = True
        self._put()

    def beat(self) -> None:
        # One aligned word, which no reader can see half written.
        self._heartbeat[_HEARTBEAT_WORD] = _clock.now_s()

    def _put(self) -> None:
        # A signal handler that interrupts this and comes here again loses its update rather than blocking for ever.
        if not self._lock.acquire(timeout=0.01):
            return
        try:
            self._number += 1
            slot = _SLOT.pack(
                self._number,
                self._step,
                self._at_s,
                self._step_s,
                self._compute_s,
                self.phase,
                self._collective,
                self._finished,
            )
            offset = _SLOT_OFFSETS[self._number % 2]
            self._map[offset : offset + _SLOT.size + _CHECK.size] = slot + _CHECK.pack(zlib.crc32(slot))
        finally:
            self._lock.release()


_current: _Writer | None = None
_tried = False
_warned = False
_start = threading.Lock()


def _writer() -> _Writer | None:
    if _tried:
        return _current
    return _begin()


def _begin() -> _Writer | None:
    """Open this process's file, once. Reading the environment waits until here: a launcher may set it after the import."""
    global _current, _tried
    with _start:
        if _tried:
            return _current
        identity = identify(os.environ) or Identity(
            os.environ.get("EAGLEEYE_JOB") or "job",
            0,
            1,
            0,
            os.environ.get("EAGLEEYE_GROUP") or "all",
            os.environ.get("EAGLEEYE_NODE") or None,
            "none",
        )
        try:
            folder = _writable(run_dirs(os.environ, os.getuid()))
            path = folder / file_name(identity.job, identity.rank)
            if not _is_parents(path):
                _current = _Writer(path, identity, visible_gpu(os.environ, identity.local_rank))
        except (OSError, ValueError) as error:
            _warn(f"progress is not recorded: {error}; set EAGLEEYE_RUN_DIR to a folder that this process may write")
        _tried = True
        if _current is not None:
            atexit.register(_at_exit, _current, os.getpid())
            threading.Thread(target=_beat, args=(_current, os.getpid()), daemon=True, name="eagleeye-heartbeat").start()
        return _current


def _writable(folders: tuple[Path, ...]) -> Path:
    """Return the first folder that can be written; the last one is made when it is missing."""
    for folder in folders[:-1]:
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    folder = folders[-1]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if len(folders) > 1 and (folder.is_symlink() or folder.stat().st_uid != os.getuid()):
        raise OSError(f"{folder} belongs to somebody else")
    return folder


def _is_parents(path: Path) -> bool:
    """Whether the file is the parent's: a helper process that inherited its parent's rank must not write over it."""
    state = read(path)
    if state is None or state.pid != os.getppid():
        return False
    try:
        return start_ticks(Path(f"/proc/{state.pid}/stat").read_bytes()) == state.start_ticks
    except (OSError, ValueError):
        return False


def _beat(writer: _Writer, pid: int) -> None:
    forever = threading.Event()
    while os.getpid() == pid:
        writer.beat()
        forever.wait(HEARTBEAT_S)


def _at_exit(writer: _Writer, pid: int) -> None:
    # The interpreter sets sys.last_type when it reports an unhandled exception, also where sys.excepthook was replaced.
    if os.getpid() == pid and not hasattr(sys, "last_type"):
        writer.finish()


def _after_fork() -> None:
    global _current, _tried, _start
    _current, _tried, _start = None, False, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _warn(text: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        print(f"eagleeye: {text}", file=sys.stderr)
