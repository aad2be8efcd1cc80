"""What goes wrong inside a process of the chaos campaign: its disk, its clock, its neighbours, its life.

The campaign tells each process what shall go wrong through numbers in memory that they share (`Control`); `install` puts the
faults below the engine, into the functions of `os`, `io`, `time` and `socket` that it calls, so that the engine has no hooks.
"""

import ctypes
import errno
import io
import mmap
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

STORAGE_FAULTS = ("none", "full", "short write", "write error", "sync error", "rename error", "read error")
NETWORK_FAULTS = ("none", "refused", "reset", "half-open", "delayed", "flipped", "duplicated")
_FIELDS = ("storage", "network", "die_at", "clock_offset_s", "calls", "began_s")
_BLOCK_BYTES = 4096
_PR_SET_PDEATHSIG = 1


class Control:
    """Numbers that several processes share: a row for each process, by name of what they mean (`_FIELDS`)."""

    def __init__(self, file: int) -> None:
        self._map = mmap.mmap(file, mmap.PAGESIZE)
        self._numbers = memoryview(self._map).cast("q")

    @classmethod
    def make(cls) -> tuple[int, "Control"]:
        """Return new numbers, all zero, and the file by which other processes reach them."""
        file = os.memfd_create("chaos-control", 0)
        os.ftruncate(file, mmap.PAGESIZE)
        made = cls(file)
        made.set(0, "began_s", int(time.time()))
        return file, made

    def get(self, row: int, name: str) -> int:
        """Return one number."""
        return self._numbers[row * len(_FIELDS) + _FIELDS.index(name)]

    def set(self, row: int, name: str, number: int) -> None:
        """Set one number."""
        self._numbers[row * len(_FIELDS) + _FIELDS.index(name)] = number


def install(control: Control, row: int, storage: str, speed: float) -> None:
    """Make this process's disk, clock and life obey a row of `control`.

    Parameters
    ----------
    storage : the folder below which files can have the faults of `STORAGE_FAULTS`
    speed : how many times as fast all waiting is; real time is 1
    """
    end_with_parent()
    _Disk(control, row, storage).install()
    _install_sockets(control, row)
    real_s, began_s = time.time, control.get(0, "began_s")
    time.time = lambda: began_s + (real_s() - began_s) * speed + control.get(row, "clock_offset_s")
    if speed != 1.0:
        _install_speed(speed)


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def edge(control: Control, row: int) -> None:
    """Die here if this is the call at which this process shall die."""
    # each number has one writer: this process counts, the campaign says at which count it dies
    calls = control.get(row, "calls") + 1
    control.set(row, "calls", calls)
    if 0 < control.get(row, "die_at") <= calls:
        os.kill(os.getpid(), signal.SIGKILL)


class _Disk:
    def __init__(self, control: Control, row: int, storage: str) -> None:
        self._control, self._row, self._storage = control, row, storage

    def install(self) -> None:
        for name in ("write", "writev", "pwrite", "pwritev"):
            setattr(os, name, self._writing(getattr(os, name)))
        for name in ("fsync", "fdatasync"):
            setattr(os, name, self._of_file(getattr(os, name), "sync error"))
        for name in ("read", "readv", "pread", "preadv"):
            setattr(os, name, self._of_file(getattr(os, name), "read error"))
        for name in ("replace", "rename"):
            setattr(os, name, self._renaming(getattr(os, name)))
        opened = io.open

        def open_(file: Any, *arguments: Any, **options: Any) -> Any:
            if self._storage and self._fault() == "read error" and str(file).startswith(self._storage):
                raise _error(errno.EIO)
            return opened(file, *arguments, **options)

        io.open = open_  # that of pathlib

    def _fault(self) -> str:
        return STORAGE_FAULTS[self._control.get(self._row, "storage")]

    def _is_storage(self, file: int) -> bool:
        try:
            return bool(self._storage) and os.readlink(f"/proc/self/fd/{file}").startswith(self._storage)
        except OSError:
            return False

    def _writing(self, real: Callable[..., int]) -> Callable[..., int]:
        def write(file: int, data: Any, *place: int) -> int:
            if not self._is_storage(file):
                return real(file, data, *place)
            edge(self._control, self._row)
            fault = self._fault()
            if fault == "write error":
                raise _error(errno.EIO)
            if fault == "full":
                raise _error(errno.ENOSPC)
            if fault == "short write":
                several = isinstance(data, list | tuple)
                first = memoryview(data[0] if several else data).cast("B")
                half = len(first) // 2
                # where files bypass the page cache, what is written ends at a block
                first = first[: half - half % _BLOCK_BYTES or half or 1]
                return real(file, [first] if several else first, *place)
            return real(file, data, *place)

        return write

    def _of_file(self, real: Callable[..., Any], fault: str) -> Callable[..., Any]:
        def call(file: Any, *arguments: Any) -> Any:
            if isinstance(file, int) and self._is_storage(file):
                edge(self._control, self._row)
                if self._fault() == fault:
                    raise _error(errno.EIO)
            return real(file, *arguments)

        return call

    def _renaming(self, real: Callable[..., None]) -> Callable[..., None]:
        def rename(source: Any, target: Any, **folders: Any) -> None:
            if self._storage and str(target).startswith(self._storage):
                edge(self._control, self._row)
                if self._fault() == "rename error":
                    raise _error(errno.EIO)
            real(source, target, **folders)

        return rename


def _install_sockets(control: Control, row: int) -> None:
    for name in ("sendall", "recv_into", "sendmsg"):
        real = getattr(socket.socket, name)

        def call(self: socket.socket, *arguments: Any, _real: Callable[..., Any] = real) -> Any:
            edge(control, row)
            return _real(self, *arguments)

        setattr(socket.socket, name, call)


def _install_speed(speed: float) -> None:
    monotonic, sleep, wait, settimeout = time.monotonic, time.sleep, threading.Condition.wait, socket.socket.settimeout

    def quick(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, timeout=None: real(self, None if timeout is None else timeout / speed)

    time.monotonic = threading._time = lambda: monotonic() * speed
    time.sleep = lambda seconds: sleep(seconds / speed)
    threading.Condition.wait = quick(wait)
    socket.socket.settimeout = quick(settimeout)


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


# ---- the network


def relay(control: Control, listeners: Sequence[tuple[int, socket.socket, tuple[str, int]]], seed: str) -> None:
    """Stand between caches for ever: pass on what comes at each listener, or do to it what its row of `control` says.

    Parameters
    ----------
    listeners : of each cache its row, where its neighbours ask for it, and where it listens itself
    """
    end_with_parent()
    for row, listener, target in listeners:
        threading.Thread(
            target=_accept, args=(control, row, listener, target, random.Random(f"{seed} {row}")), daemon=True
        ).start()
    threading.Event().wait()


def _accept(control: Control, row: int, listener: socket.socket, target: tuple[str, int], chance: random.Random) -> None:
    while True:
        near, _ = listener.accept()
        fault = NETWORK_FAULTS[control.get(row, "network")]
        after_bytes = chance.choice((0, 3, 100, 1000, 30_000))
        threading.Thread(target=_carry, args=(near, target, fault, after_bytes, chance.random()), daemon=True).start()


def _carry(near: socket.socket, target: tuple[str, int], fault: str, after_bytes: int, luck: float) -> None:
    with near:
        if fault == "refused":
            _reset(near)
            return
        if fault == "half-open":
            time.sleep(1.0)
            return
        if fault == "delayed":
            # each connection another time, so that they come in another order
            time.sleep(0.3 * luck)
        try:
            far = socket.create_connection(target, timeout=5.0)
        except OSError:
            _reset(near)
            return
        with far:
            far.settimeout(None)
            asked = _Pump(near, far, fault if luck < 0.5 else "none", after_bytes)
            told = _Pump(far, near, fault if luck >= 0.5 else "none", after_bytes)
            back = threading.Thread(target=told.run, daemon=True)
            back.start()
            asked.run()
            back.join()
    if fault == "duplicated":
        with suppress(OSError), socket.create_connection(target, timeout=5.0) as again:
            again.sendall(asked.seen)
            again.shutdown(socket.SHUT_WR)
            while again.recv(1 << 16):
                pass


class _Pump:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, target: socket.socket, fault: str, after_bytes: int) -> None:
        self._source, self._target, self._fault, self._after_bytes = source, target, fault, after_bytes
        self.seen = bytearray()

    def run(self) -> None:
        passed = 0
        try:
            while data := self._source.recv(1 << 16):
                self.seen += data
                if self._fault in ("reset", "flipped") and passed + len(data) > self._after_bytes >= passed:
                    at = self._after_bytes - passed
                    if self._fault == "reset":
                        self._target.sendall(data[:at])
                        _reset(self._source)
                        _reset(self._target)
                        return
                    data = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
                self._target.sendall(data)
                passed += len(data)
            self._target.shutdown(socket.SHUT_WR)
        except OSError:
            for sock in (self._source, self._target):
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


def _reset(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # a close while another thread reads it would wait for that thread
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file, or of a process's memory through its descriptor."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        if byte:
            file.seek(at)
            file.write(bytes([byte[0] ^ 0x10]))
