"""Caches that live in one process, without sockets: for simulations and tests of what is above the transport."""

import queue
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice

from checkpoint.errors import PeerError
from checkpoint.manifest import Manifest
from checkpoint.protocol import Message
from checkpoint.transport import SILENCE_S, WINDOW, Answer, Link, Pace, Reader, naming


class Exchange:
    """What connects the transports of a process: who is to be found at which address."""

    def __init__(self) -> None:
        self.there: dict[str, InProcess] = {}


class InProcess:
    """Fills `transport.Transport`: one cache at `address` of an exchange, whose questions go to `answer`."""

    def __init__(self, exchange: Exchange, address: str, answer: Answer | None = None) -> None:
        self._exchange, self._address, self._answer = exchange, address, answer
        self._numbers = count(1)
        self._lent: dict[int, tuple[Manifest, memoryview, Pace]] = {}
        exchange.there[address] = self

    @contextmanager
    def call(self, address: str) -> Iterator[Link]:
        """Open a link; see `transport.Transport`."""
        with naming(address):
            there = self._find(address)
            ours: _Mail = queue.SimpleQueue()
            theirs: _Mail = queue.SimpleQueue()
            if there._answer is None:
                raise PeerError(f"the cache at {address} does not answer")
            link = _QueueLink(address, ours, theirs)
            far = _QueueLink(self._address, theirs, ours)
            threading.Thread(target=_serve, args=(there._answer, far), daemon=True).start()
            try:
                yield link
            finally:
                link.close()

    @contextmanager
    def reader(self, address: str, region: int, manifest: Manifest) -> Iterator[Reader]:
        """Open a way to a region; see `transport.Transport`."""
        with naming(address):
            yield _MemoryReader(self._find(address), region, manifest)

    def lend(self, manifest: Manifest, data: memoryview, pace: Pace | None = None) -> int:
        """Let others read a shard; see `transport.Transport`."""
        region = next(self._numbers)
        self._lent[region] = manifest, data, pace or Pace(0)
        return region

    def take_back(self, region: int) -> None:
        """Let nobody read it any more; see `transport.Transport`."""
        self._lent.pop(region, None)

    def _find(self, address: str) -> "InProcess":
        there = self._exchange.there.get(address)
        if there is None:
            raise PeerError(f"the cache at {address} does not answer")
        return there


_Mail = queue.SimpleQueue[Message | None]


def _serve(answer: Answer, link: "_QueueLink") -> None:
    try:
        answer(link)
    except (OSError, PeerError):
        pass  # the other side is gone, or sees that this one is
    finally:
        link.close()


class _QueueLink:
    def __init__(self, host: str, inbox: _Mail, outbox: _Mail) -> None:
        self.host, self._inbox, self._outbox = host.rpartition(":")[0], inbox, outbox
        self._closed = False

    def send(self, message: Message) -> None:
        if self._closed:
            raise BrokenPipeError("the link is closed")
        self._outbox.put(message)

    def receive(self) -> Message | None:
        if self._closed:
            return None
        try:
            message = self._inbox.get(timeout=SILENCE_S)
        except queue.Empty:
            raise TimeoutError("timed out") from None
        self._closed = message is None
        return message

    def close(self) -> None:
        self._outbox.put(None)


class _MemoryReader:
    def __init__(self, there: InProcess, region: int, manifest: Manifest) -> None:
        self._there, self._region, self._manifest = there, region, manifest

    def read(self, numbers: Iterator[int], data: memoryview) -> Iterator[int]:
        asked: deque[int] = deque()
        while True:
            asked.extend(islice(numbers, WINDOW - len(asked)))
            if not asked:
                return
            lent = self._there._lent.get(self._region)
            if lent is None:
                raise PeerError("it lends these bytes no longer")
            manifest, source, pace = lent
            if manifest.key != self._manifest.key or manifest.digests != self._manifest.digests:
                raise PeerError("it answered with another chunk than was asked for")
            start, stop = manifest.bounds(asked[0])
            pace.spend(stop - start)
            data[start:stop] = source[start:stop]
            yield asked.popleft()
