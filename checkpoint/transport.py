"""How caches reach each other: the seam. `checkpoint.tcp` and `checkpoint.inprocess` fill it.

Questions go over links. Bytes go apart from them and are pulled: the side that has them lends a region, which a question names,
and the side that wants them reads chunks of it straight into their places, owns the order, and checks each after it landed. So
the same seam fits one-sided reads of registered memory: a region then names a place in memory that was registered once, at the
first lending of the slab that it lies in (`data.obj`), and a reader stands for a queue pair.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from checkpoint.errors import PeerError
from checkpoint.manifest import Manifest
from checkpoint.protocol import Message

CONNECT_S = 2.0
SILENCE_S = 15.0
"""A peer that sends and takes nothing for so long is given up."""
WHOLE_S = 60.0
"""So is one of whose message or chunk something comes now and then, and after so long not all."""
WINDOW = 4
"""So many chunks are asked for before the first of them is there, on each reader."""


class Link(Protocol):
    """Messages to and from one other cache. Both methods raise OSError when it is gone or silent for `SILENCE_S`."""

    @property
    def host(self) -> str:
        """Where the other side is, to build an address of with the port that it tells."""

    def send(self, message: Message) -> None:
        """Send one message."""

    def receive(self) -> Message | None:
        """Return the next message, None when the other side closed."""


class Reader(Protocol):
    """One way on which the bytes of a region come; several may read the same region at once."""

    def read(self, numbers: Iterator[int], data: memoryview) -> Iterator[int]:
        """Pull chunks into their places in `data`, the shard's memory here; yield each number when its bytes have landed.

        `numbers` are taken as they are wanted, up to `WINDOW` ahead. Nothing is checked but that the bytes are said to be those
        of that chunk, and nothing is written elsewhere. Raises OSError or PeerError when it breaks; what was not yielded must be
        pulled again.
        """


class Transport(Protocol):
    """One cache's way to others and theirs to it. All methods may be called from any thread."""

    def call(self, address: str) -> AbstractContextManager[Link]:
        """Open a link to the cache at an address. Raises PeerError when it does not answer or does not let us in."""

    def reader(self, address: str, region: int, manifest: Manifest) -> AbstractContextManager[Reader]:
        """Open a way to the bytes of a region, which the cache at an address lent. Raises PeerError, as `call` does."""

    def lend(self, manifest: Manifest, data: memoryview, pace: "Pace | None" = None) -> int:
        """Let others read a shard's bytes, which must not change, and return by which number; `pace` limits how fast."""

    def take_back(self, region: int) -> None:
        """Let nobody begin to read a region any more. Who is just reading may get other bytes, which their digests tell."""


class Pace:
    """A token bucket for any number of threads: no more than `bytes_per_s` in the long run, 0 for no limit."""

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def spend(self, nbytes: int) -> None:
        """Wait until `nbytes` more may go."""
        if not self.bytes_per_s:
            return
        with self._lock:
            now_s = time.monotonic()
            begin_s = max(now_s, self._free_s)
            self._free_s = begin_s + nbytes / self.bytes_per_s
        time.sleep(begin_s - now_s)


@contextmanager
def naming(address: str) -> Iterator[None]:
    """Make whatever breaks while one talks with a cache a PeerError that names it."""
    try:
        yield
    except OSError as error:
        raise PeerError(f"the cache at {address} broke off ({error})") from None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise PeerError(f"what answers at {address} is no checkpoint cache ({error})") from None


def ask(link: Link, address: str, question: Message, *expected: str) -> Message:
    """Send a question and return the answer, which must be one of `expected`. Raises PeerError."""
    link.send(question)
    return answer(link, address, *expected)


def answer(link: Link, address: str, *expected: str) -> Message:
    """Return the next message, which must be one of `expected`. Raises PeerError."""
    got = link.receive()
    if got is None:
        raise PeerError(f"the cache at {address} closed the connection")
    if got["op"] not in expected:
        raise PeerError(f"the cache at {address} answers {got['op']}: {got.get('why', 'no reason given')}")
    return got


def region_of(message: Message) -> int:
    """Return the region that a message names. Raises ValueError when that can be none."""
    region = int(message["region"])
    if not 0 <= region < 1 << 64:
        raise ValueError(f"{region} is no region")
    return region


Answer = Callable[[Link], None]
"""What a cache does with a link that another one opened."""
