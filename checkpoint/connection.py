"""The socket to the cache of this node, a thread that reads it, and the memory that came over it. Free of torch."""

import ctypes
import mmap
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from pathlib import Path
from typing import Any

from checkpoint import place
from checkpoint.errors import CacheGone, CannotRun, CheckpointError, PeerError, UsageError
from checkpoint.protocol import MAX_FRAME_BYTES, VERSION, Message, receive, send

CONNECT_S = 10.0
ANSWER_S = 1800.0
"""A cache that reads a large shard from slow storage may take so long to answer; one that dies is noticed at once."""
SEND_S = 60.0
FULL_AGAIN_S = 0.05
WHEN_FULL = ("wait", "raise", "drop_oldest_unflushed")
"""What is done when there is no memory for a save: wait for it, tell so at once, or wait and let go of an older generation."""
LARGE_PAGE = 2 << 20
_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class Connection:
    """One living connection; when it is lost it stays lost, and a new one must be made.

    Parameters
    ----------
    run_dir : run folder of the cache
    hello : job, rank, world_size, born and peers of the message `hello`
    heard : called with every message `state` and `late`, in the thread that reads
    ended : called once with the reason when the connection is lost, in whichever thread notices
    forgot : called with the number of a slab that nobody needs any more, so that its memory is free once no view is left

    Raises
    ------
    CacheGone
        No cache answers there.
    UsageError
        The cache refuses.
    """

    def __init__(
        self,
        run_dir: Path,
        hello: Message,
        heard: Callable[[Message], None],
        ended: Callable[[str], None],
        forgot: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.run_dir = run_dir
        self.lost = ""
        self._heard, self._ended, self._forgot = heard, ended, forgot
        self._changed = threading.Condition()
        self._requests: dict[int, Future[tuple[Message, list[int]]]] = {}
        self._asked = 0
        self._slabs: dict[int, memoryview] = {}
        self._ready: int | None = None
        self._full, self._never = "", False
        self._reserved_bytes: int | None = None
        self._sending = threading.Lock()
        try:
            self._sock = socket.socket(socket.AF_UNIX)
        except OSError as error:
            raise CacheGone(_nobody(run_dir, error)) from None
        try:
            _connect(self._sock, run_dir)
            send(self._sock, {"op": "hello", "version": VERSION} | hello)
            got = receive(self._sock)
            if got is None:
                raise PeerError("it closed the connection")
            self._sock.settimeout(None)
            # a stopped cache must not stop this process for good
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_S), 0))
        except (OSError, PeerError) as error:
            self._sock.close()
            raise CacheGone(_nobody(run_dir, error)) from None
        if got[0]["op"] != "welcome":
            self._sock.close()
            raise UsageError(f"the cache in {run_dir} refuses: {got[0].get('why', got[0]['op'])}")
        threading.Thread(target=self._read, daemon=True, name="checkpoint").start()

    def ask(self, message: Message, expected: str) -> tuple[Message, list[int]]:
        """Send a question; return its answer and the files that came with it. Raises CacheGone."""
        future: Future[tuple[Message, list[int]]] = Future()
        with self._changed:
            if self.lost:
                raise CacheGone(self.lost)
            self._asked += 1
            number = self._asked
            self._requests[number] = future
        self.send(message | {"request": number})
        try:
            answer, files = future.result(ANSWER_S)
        except FutureTimeout:
            self.lose(f"the cache did not answer in {ANSWER_S:g} s")
            raise CacheGone(self.lost) from None
        if answer["op"] != expected:
            raise CacheGone(f"the cache answers {answer['op']} instead of {expected}")
        return answer, files

    def send(self, message: Message, at_most_bytes: int = MAX_FRAME_BYTES) -> None:
        """Send a message. Raises CacheGone; UsageError when it is too long, and then nothing was sent."""
        try:
            with self._sending:
                send(self._sock, message, at_most_bytes=at_most_bytes)
        except OSError as error:
            self.lose(f"the cache in {self.run_dir} went away ({error})")
            raise CacheGone(self.lost) from None

    def reserve(self, nbytes: int, drop: bool = False) -> None:
        """Ask for a slab that `room` will give out; whoever saves again and again finds its memory waiting. Raises CacheGone.

        With `drop` the cache may let go of an older generation that storage waits for.
        """
        with self._changed:
            self._ready, self._full, self._reserved_bytes = None, "", nbytes
        self.send({"op": "reserve", "nbytes": nbytes} | ({"drop": True} if drop else {}))

    def room(self, nbytes: int, timeout_s: float, when_full: str = "wait") -> tuple[int, memoryview]:
        """Return a slab of at least `nbytes` bytes to fill, and its number. `when_full` is one of `WHEN_FULL`.

        Raises
        ------
        CacheGone
            The connection is lost.
        CannotRun
            There was no memory for `timeout_s`, or none at once if that is to be told.
        """
        until_s = time.monotonic() + timeout_s
        if self._reserved_bytes is not None:
            self._wait_for_slab(until_s)
        # that there was no memory when it was asked for may have been long ago
        if self._reserved_bytes is None or self._reserved_bytes < nbytes or self._ready is None:
            self.reserve(nbytes)
            self._wait_for_slab(until_s)
        while self._ready is None:
            if self._never:
                self._reserved_bytes = None
                raise CannotRun(f"the cache can never hold a save of {nbytes} bytes: {self._full}")
            if when_full == "raise" or time.monotonic() >= until_s:
                self._reserved_bytes = None  # the next one asks anew
                waited = "" if when_full == "raise" else f" for {timeout_s:g} s"
                raise CannotRun(f"the cache has had no memory for a save of {nbytes} bytes{waited}: {self._full}")
            time.sleep(FULL_AGAIN_S)
            self.reserve(nbytes, drop=when_full == "drop_oldest_unflushed")
            self._wait_for_slab(until_s)
        number, self._ready, self._reserved_bytes = self._ready, None, None
        return number, self._slabs[number]

    def lose(self, why: str) -> None:
        """Give up: whoever waits for anything is told."""
        with self._changed:
            if self.lost:
                return
            self.lost = why
            requests, self._requests = list(self._requests.values()), {}
            self._changed.notify_all()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        for request in requests:
            request.set_exception(CacheGone(why))
        self._ended(why)

    def unmap(self) -> None:
        """Let go of all slabs; no save may be under way."""
        for number in list(self._slabs):
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._slabs.pop(number, None)
        self._forgot(number)

    def _wait_for_slab(self, until_s: float) -> None:
        with self._changed:
            answered = self._changed.wait_for(
                lambda: self._ready is not None or self._full or self.lost, max(1.0, until_s - time.monotonic())
            )
            if self.lost:
                raise CacheGone(self.lost)
            if not answered:
                raise CannotRun("the cache does not answer; is it stopped?")

    def _read(self) -> None:
        why = f"the cache in {self.run_dir} ended"
        try:
            while (got := receive(self._sock, max_files=1)) is not None:
                self._take(*got)
        except (OSError, CheckpointError) as error:
            why = f"{why} ({error})"
        self.lose(why)
        self._sock.close()

    def _take(self, message: Message, files: list[int]) -> None:
        kind = message["op"]
        expected = "slab" in message and (kind == "fetched" or message["slab"] not in self._slabs)
        if expected and not files:  # the kernel drops what a process has no room for, and says nothing
            raise PeerError("its memory did not arrive: this process may open no more files; raise `ulimit -n`")
        if kind in ("state", "late"):
            self._heard(message)
        elif kind in ("slab", "full"):
            for number in message["gone"]:
                self._forget(number)
            if files:
                self._slabs[message["slab"]] = mapped(files.pop(), message["nbytes"])
            with self._changed:
                if kind == "slab":
                    self._ready = message["slab"]
                else:
                    self._full, self._never = message["why"], bool(message.get("never"))
                self._changed.notify_all()
        elif "request" in message:
            with self._changed:
                request = self._requests.pop(message["request"], None)
            if request is not None:
                request.set_result((message, files))
                return
        for file in files:
            os.close(file)


def mapped(file: int, nbytes: int) -> memoryview:
    """Return the memory of a file that the cache sent, and close the file. It is unmapped when nobody views it any more.

    It begins at a multiple of 2 MiB, as the module mmap cannot ask for: only then are pages of 2 MiB mapped as such, and a fresh
    mapping costs next to nothing.
    """
    # memory of the machine's reserve of large pages is mapped in whole ones
    length = -(-nbytes // LARGE_PAGE) * LARGE_PAGE + LARGE_PAGE
    try:
        if os.fstat(file).st_size < nbytes:
            raise PeerError("the memory that the cache sent is smaller than it says")
        reserved = _libc.mmap(None, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        address = -(-(reserved or 0) // LARGE_PAGE) * LARGE_PAGE
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE | _MAP_FIXED
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if reserved == _FAILED or _libc.mmap(address, nbytes, access, flags, file, 0) != address:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
    finally:
        os.close(file)
    # a class of its own, as one of the module ctypes takes no weak references
    kind: Any = type("Mapped", (ctypes.c_char * nbytes,), {})
    array = kind.from_address(address)
    weakref.finalize(array, _libc.munmap, reserved, length).atexit = False
    return memoryview(array).cast("B")


def reach(run_dir: Path) -> None:
    """Raise CacheGone when no cache listens in a run folder."""
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            _connect(sock, run_dir)
        except OSError as error:
            raise CacheGone(_nobody(run_dir, error)) from None


def _connect(sock: socket.socket, run_dir: Path) -> None:
    sock.settimeout(CONNECT_S)
    with place.socket_address(run_dir) as address:
        sock.connect(address)


def _nobody(run_dir: Path, error: Exception) -> str:
    return f"no cache answers in {run_dir} ({getattr(error, 'strerror', None) or error}); start `eagleeye cache` on this node"
