"""What one cache asks of another, over any transport. The answers are in `checkpoint.neighbours`."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

from checkpoint.errors import CheckpointError, Corrupt, PeerError
from checkpoint.landing import TICK_S, Landing
from checkpoint.manifest import Generation, Key, Manifest, decode, generation
from checkpoint.restore import Copy
from checkpoint.transport import SILENCE_S, Link, Pace, Transport, answer, ask, naming, region_of


class Inventory(NamedTuple):
    """What a cache tells of a job: the shards in its memory, what it began to store last, which generations it knows to exist.

    `attempt` is the newest number that it gave to a start of the job.
    """

    copies: list[Copy]
    storing: set[Generation]
    existing: set[Generation]
    attempt: int


def inventory(transport: Transport, address: str, job: str) -> Inventory:
    """Return what the cache at an address tells of a job.

    Raises
    ------
    PeerError
        It does not answer, or answers nonsense.
    """
    with naming(address), transport.call(address) as link:
        told = ask(link, address, {"op": "inventory", "job": job}, "inventory")
        try:
            copies = [
                Copy(generation(g), int(rank), int(world), str(told["node"]), str(origin))
                for g, rank, world, origin in told["shards"]
            ]
            storing, existing = ({generation(g) for g in told[name]} for name in ("storing", "existing"))
            return Inventory(copies, storing, existing, int(told["attempt"]))
        except Corrupt as error:
            raise ValueError(error) from None


def put(
    transport: Transport,
    address: str,
    port: int,
    manifest: Manifest,
    data: memoryview,
    existing: Iterable[Generation] = (),
    pace: Pace | None = None,
) -> None:
    """Have the cache at `address` hold a copy, which it pulls from our `port`; tell it which generations are known to exist.

    Raises
    ------
    PeerError
        It does not answer, has no room, or got other bytes than were saved.
    """
    region = transport.lend(manifest, data, pace)
    try:
        with naming(address), transport.call(address) as link:
            question = {"op": "put", "manifest": manifest.encode(), "existing": [str(g) for g in existing]}
            told = ask(link, address, question | {"port": port, "region": region}, "landing", "have", "held")
            landed, since = -1, 0
            while told["op"] == "landing":
                landed, since = int(told["chunks"]), 0 if int(told["chunks"]) > landed else since + 1
                if since * TICK_S > 2 * SILENCE_S:
                    raise PeerError(f"the cache at {address} has got nothing of it for {2 * SILENCE_S:g} s")
                told = answer(link, address, "landing", "have", "held")
    finally:
        transport.take_back(region)


def get(
    transport: Transport,
    holders: Mapping[str, str],
    key: Key,
    room: Callable[[Manifest], memoryview],
    connections: int = 2,
) -> tuple[Landing | None, list[str]]:
    """Pull a shard from all its holders (node -> address) at once into the memory that `room` gives for it.

    What came is checked, chunk by chunk. Returns what became of it, in which chunks that nobody could give are `missing`, None
    when nobody gave any; and who failed, and how.

    Raises
    ------
    CheckpointError
        What `room` raised.
    """
    drawing, ended = _Drawing(key, room), SimpleQueue[None]()

    def draw(node: str, address: str) -> None:
        try:
            drawing.draw(transport, node, address, connections)
        finally:
            ended.put(None)

    for holder in holders.items():
        threading.Thread(target=draw, args=holder, daemon=True).start()
    for _ in holders:
        ended.get()
        if drawing.landing is not None and not drawing.landing.missing:
            break  # who hangs is not waited for: what is missing nowhere is nobody's to write
    if drawing.failed is not None:
        raise drawing.failed
    return drawing.landing, drawing.notes + (drawing.landing.notes if drawing.landing else [])


class _Drawing:
    """One shard that several holders give; all must hold the same."""

    def __init__(self, key: Key, room: Callable[[Manifest], memoryview]) -> None:
        self._key, self._room = key, room
        self._lock = threading.Lock()
        self.landing: Landing | None = None
        self.failed: CheckpointError | None = None
        self.notes: list[str] = []

    def draw(self, transport: Transport, node: str, address: str, connections: int) -> None:
        """Pull from one holder what it can give; whatever goes wrong is noted."""
        given = -1
        while self._given(node) > given:
            given = self._given(node)
            try:
                with _lease(transport, address, self._key) as (link, manifest, region):
                    landing = self._agreed(manifest, address)
                    reader = partial(transport.reader, address, region, manifest)
                    landing.draw(node, reader, connections, partial(link.send, {"op": "reading"}))
                    link.send({"op": "read"})
                return
            except PeerError as error:
                self._note(node, error)  # and once more, if it gave anything
            except Corrupt as error:
                self._note(node, error)
                return
            except CheckpointError as error:
                self.failed = error
                return

    def _given(self, node: str) -> int:
        return self.landing.given[node] if self.landing else 0

    def _note(self, node: str, error: CheckpointError) -> None:
        with self._lock:
            self.notes.append(f"{node}: {error}")

    def _agreed(self, manifest: Manifest, address: str) -> Landing:
        with self._lock:
            if self.landing is None:
                self.landing = Landing(manifest, self._room(manifest))
            if manifest != self.landing.manifest:
                raise Corrupt(f"the cache at {address} holds another shard under that name than the others")
            return self.landing


@contextmanager
def _lease(transport: Transport, address: str, key: Key) -> Iterator[tuple[Link, Manifest, int]]:
    with naming(address), transport.call(address) as link:
        question = {"op": "get", "job": key.job, "generation": str(key.generation), "rank": key.rank}
        told = ask(link, address, question, "shard")
        manifest, region = decode(told["manifest"]), region_of(told)
        if manifest.key != key:
            raise Corrupt(f"the cache at {address} answered with another shard")
        yield link, manifest, region
