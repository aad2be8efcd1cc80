"""A new cache takes over from the one that runs: its memory files, what it knows of them, its sockets and its lock.

The new one asks over the UNIX socket of the run folder. Only verified shards are handed over. Nothing is final before the last
word: until then the old one goes on if the new one dies, is stopped, or finds something wrong::

    new                         old
    --------------------------  ----------------------------------------------------------------------------------
    take-over: version          offer: node, port, nbytes; or refused: why
    more                        shard: manifest, size_bytes + its file; one after the other, while training goes on
    more                        rest: what it knows, + lock, TCP and UNIX socket; from now on it answers nobody
    serving                     yours; it ends, and touches nothing
"""

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint import place
from checkpoint.doors import Doors
from checkpoint.errors import CannotRun, PeerError
from checkpoint.manifest import Key, Manifest, decode
from checkpoint.protocol import VERSION, Message, receive, send

if TYPE_CHECKING:
    from checkpoint.server import Cache, Shard

SILENCE_S = 15.0
"""Whoever of the two says nothing for so long is given up."""
STILL_S = 60.0
"""The old one waits so long for what its ranks and neighbours are in the middle of."""


def give(cache: "Cache", sock: socket.socket, message: Message) -> None:
    """Hand everything over to the cache that asks. It either takes all, or this one goes on as before."""
    if message.get("version") != VERSION:
        why = f"it speaks version {VERSION} and this one {message.get('version')}; stop it and start this one without --take-over"
        send(sock, {"op": "refused", "why": why})
        return
    sock.settimeout(SILENCE_S)
    send(sock, {"op": "offer", "node": cache.node, "port": cache.port, "nbytes": cache.held_bytes})
    given: set[Key] = set()
    still = False
    try:
        while (got := receive(sock)) is not None:
            if got[0]["op"] == "serving" and still:
                send(sock, {"op": "yours"})
                cache.leave()
                return
            if got[0]["op"] != "more":
                raise PeerError(f"{got[0]['op']!r} is nothing that a cache says that takes over")
            shard = _next(cache, given)
            if shard is None and not still:
                still = True
                if not cache.hold_still(sock, STILL_S):
                    why = f"its ranks or neighbours have been in the middle of a restore or a copy for {STILL_S:g} s; try again"
                    send(sock, {"op": "refused", "why": why})
                    return
                shard = _next(cache, given)
            if shard is None:
                send(sock, {"op": "rest"} | cache.knowledge(), cache.doors.files)
                continue
            assert shard.manifest is not None
            given.add(shard.key)
            try:
                answer = {"op": "shard", "manifest": shard.manifest.encode(), "size_bytes": shard.slab.size_bytes}
                send(sock, answer, [shard.slab.file])
            finally:
                cache.unpin(shard)
    finally:
        cache.go_on()


def _next(cache: "Cache", given: set[Key]) -> "Shard | None":
    """Return a verified shard that was not given yet, pinned."""
    with cache.changed:
        key = next((key for key in cache.verified() if key not in given), None)
        return None if key is None else cache.pinned(key)


class Estate:
    """What is taken over from the cache in `run_dir`.

    When that one breaks off, what came until then is good, and `doors` is None: then the new one starts as any does, and is kept
    out by the lock should the old one still run.

    Parameters
    ----------
    check : called with the offer; it raises CannotRun to leave everything to the old cache

    Raises
    ------
    CannotRun
        The old cache refuses, or `check` does.
    OSError
        No cache runs there.
    """

    def __init__(self, run_dir: Path, check: Callable[[Message], None]) -> None:
        self.shards: list[tuple[Manifest, int, int]] = []
        """Manifest, memory file and its size."""
        self.knowledge: Message = {}
        self.doors: Doors | None = None
        self._run_dir = run_dir
        self._sock = socket.socket(socket.AF_UNIX)
        try:
            self._sock.settimeout(SILENCE_S + STILL_S)
            with place.socket_address(run_dir) as address:
                self._sock.connect(address)
            self._say({"op": "take-over", "version": VERSION})
            try:
                check(self._hear("offer")[0])
                while self.doors is None:
                    self._say({"op": "more"})
                    self._take(*self._hear("shard", "rest"))
            except (OSError, PeerError):
                pass  # it broke off
        except BaseException:
            self._sock.close()
            raise

    def enter(self) -> bool:
        """Say that this cache is ready to serve, and return whether the old one has left it the doors; else they are closed."""
        with self._sock, suppress(OSError, PeerError):
            self._say({"op": "serving"})
            self._hear("yours")
            return True
        self.close()
        return False

    def close(self) -> None:
        """Let go of the doors: the old cache keeps them, or is dead."""
        if self.doors is not None:
            self.doors.close()
            self.doors = None
        self._sock.close()

    def _say(self, message: Message) -> None:
        send(self._sock, message)

    def _hear(self, *expected: str) -> tuple[Message, list[int]]:
        got = receive(self._sock, max_files=3)
        if got is None:
            raise PeerError("it ended")
        message, files = got
        if message["op"] not in expected:
            why = message.get("why", f"it answers {message['op']}")
            raise CannotRun(f"the cache in {self._run_dir} hands nothing over: {why}")
        return message, files

    def _take(self, message: Message, files: list[int]) -> None:
        if message["op"] == "rest":
            if len(files) < 3:
                raise CannotRun(f"the sockets of the cache in {self._run_dir} did not arrive; raise `ulimit -n`")
            self.knowledge = message
            lock, tcp, unix = files
            self.doors = Doors(lock, socket.socket(fileno=tcp), socket.socket(fileno=unix))
        elif not files:
            raise CannotRun(f"the memory of the cache in {self._run_dir} did not arrive; raise `ulimit -n`")
        else:
            self.shards.append((decode(message["manifest"]), files[0], int(message["size_bytes"])))
