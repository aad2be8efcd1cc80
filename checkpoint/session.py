"""The connection of one rank to the cache of its node: what it asks for, and which memory is its own."""

import socket
import struct
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from checkpoint.errors import CannotRun, CheckpointError, UsageError
from checkpoint.manifest import Key, check_job, generation
from checkpoint.memory import Slab
from checkpoint.protocol import VERSION, Message, receive, send

if TYPE_CHECKING:
    from checkpoint.server import Cache, Shard


class Client:
    """The connection of one rank."""

    def __init__(self, cache: "Cache", sock: socket.socket) -> None:
        self._cache, self._sock = cache, sock
        # a stopped process must not stop the cache: what it does not take in time ends its connection
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 2, 0))
        self._writing = threading.Lock()
        self._known: dict[int, Slab] = {}
        self._filling: dict[int, Slab] = {}
        self._reading: dict[int, list[Shard]] = {}
        self._layouts: dict[int, Any] = {}
        self._sealed_bytes = self._prepared_bytes = 0
        self._left = False
        self.job, self.rank, self.world_size = "", 0, 0
        self.saved_bytes = 0
        """How much one generation of this rank takes, 0 while it did not tell."""

    @property
    def _owner(self) -> str:
        return f"{self.job}/{self.rank}/{id(self)}"

    def serve(self, hello: Message) -> None:
        """Answer a rank that says hello until it closes its connection or dies."""
        try:
            if hello["op"] != "hello" or hello["version"] != VERSION:
                raise UsageError(
                    f"this cache speaks version {VERSION} and the client {hello.get('version')}; use the same release"
                )
            self.job, self.rank, self.world_size = check_job(hello["job"]), int(hello["rank"]), int(hello["world_size"])
            if not 0 <= self.rank < self.world_size:
                raise UsageError(f"there is no rank {self.rank} among {self.world_size}")
            self._cache.hello(self, int(hello["born"]), hello["peers"])
        except UsageError as error:
            self.send({"op": "refused", "why": str(error)})
            return
        try:
            while (got := receive(self._sock)) is not None:
                {
                    "reserve": self._reserve,
                    "layout": self._layout,
                    "seal": self._seal,
                    "choose": self._choose,
                    "fetch": self._fetch,
                    "release": self._release,
                }[got[0]["op"]](got[0])
        finally:
            self._leave()

    def show_out(self) -> None:
        """Close the connection of a process that may still run."""
        self._hang_up()

    def _leave(self) -> None:
        """Clean up. The process may still run and keeps its mappings, so its slabs are never used again."""
        self._cache.goodbye(self)
        for shards in self._reading.values():
            for shard in shards:
                self._cache.unpin(shard)
        self._left = True
        with self._cache.changed:
            for slab in self._known.values():
                slab.reusable = False
            for slab in self._filling.values():
                self._cache.slabs.give(self._owner, slab)
            self._cache.slabs.forget(self._owner)

    def send(self, message: Message, files: Iterable[int] = ()) -> None:
        """Send a message from any thread. A rank that is gone or takes nothing is no error here: its own thread notices."""
        with self._writing:
            try:
                send(self._sock, message, tuple(files))
            except OSError:
                self._hang_up()

    def _hang_up(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _reserve(self, message: Message) -> None:
        nbytes = int(message["nbytes"])
        try:
            if nbytes != self.saved_bytes:
                self._expect(nbytes)
            # one at a time: what was reserved before and not sealed is not wanted any more
            with self._cache.changed:
                for number in list(self._filling):
                    self._cache.slabs.give(self._owner, self._filling.pop(number))
            slab = self._cache.take(self._owner, nbytes, self.job, drop=bool(message.get("drop")))
        except CannotRun as error:
            never = nbytes > self._cache.slabs.limit_bytes
            self.send({"op": "full", "why": str(error), "never": never, "gone": self._gone()})
            return
        new = slab.number not in self._known
        self._known[slab.number] = self._filling[slab.number] = slab
        answer = {"op": "slab", "slab": slab.number, "nbytes": slab.size_bytes, "gone": self._gone()}
        self.send(answer, [slab.file] if new else [])
        if self._prepared_bytes != nbytes == self._sealed_bytes:
            self._prepared_bytes = nbytes
            threading.Thread(target=self._prepare, args=(nbytes,), daemon=True, name="prepare").start()

    def _expect(self, nbytes: int) -> None:
        self.saved_bytes = nbytes
        try:
            self._cache.expect(self)
        except CannotRun:
            self.saved_bytes = 0
            raise

    def _prepare(self, nbytes: int) -> None:
        """Make the slabs that this rank will need, before it needs them."""
        with suppress(CannotRun):  # it shows again when it matters, and is told then
            self._cache.slabs.prepare(self._owner, nbytes, self._cache.settings.generations + 2, lambda: not self._left)
        with self._cache.changed:
            self._cache.changed.notify_all()

    def _gone(self) -> list[int]:
        """Return which slabs the rank should let go of."""
        gone = [number for number, slab in self._known.items() if slab.discarded]
        for number in gone:
            del self._known[number]
        return gone

    def _layout(self, message: Message) -> None:
        # the newest alone: a state whose form changes at each save must not fill the memory with the forms it had
        self._layouts = {message["layout"]: message["items"]}

    def _seal(self, message: Message) -> None:
        key = Key(self.job, generation(message["generation"]), self.rank)
        content = {"items": self._layouts[message["layout"]], "values": message["values"]}
        slab = self._filling[message["slab"]]
        try:
            self._cache.seal(key, self.world_size, int(message["nbytes"]), slab, self._owner, content)
        except UsageError as error:
            self.send({"op": "state", "generation": message["generation"], "level": "cached", "error": str(error)})
        else:
            del self._filling[message["slab"]]
            self._sealed_bytes = int(message["nbytes"])

    def _choose(self, message: Message) -> None:
        exclude = {generation(text) for text in message["exclude"]}
        self.send({"op": "chosen", "request": message["request"]} | self._cache.choose(self.job, self.world_size, exclude))

    def _fetch(self, message: Message) -> None:
        answer: Message = {"op": "fetched", "request": message["request"]}
        try:
            key = Key(self.job, generation(message["generation"]), self.rank)
            shard, source, holder, tried = self._cache.fetch(key, check=bool(message.get("check", True)))
        except CheckpointError as error:
            self.send(answer | {"error": str(error)})
            return
        assert shard.manifest is not None
        self._reading.setdefault(shard.slab.number, []).append(shard)
        answer |= {"slab": shard.slab.number, "source": source, "holder": holder, "tried": tried}
        self.send(answer | {"manifest": shard.manifest.encode()}, [shard.slab.file])

    def _release(self, message: Message) -> None:
        for shard in self._reading.pop(message["slab"], []):
            self._cache.unpin(shard)
