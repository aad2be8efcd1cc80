"""Shards between the caches of two nodes, over TCP: the side that asks. The side that answers is in `checkpoint.server`."""

import socket
from collections.abc import Callable, Iterable
from typing import NamedTuple

from checkpoint.errors import Corrupt, PeerError
from checkpoint.manifest import Generation, Key, Manifest, decode, generation, verify
from checkpoint.protocol import Message, receive, receive_bytes, send, send_bytes
from checkpoint.restore import Copy

CONNECT_S = 2.0
SILENCE_S = 15.0
"""A peer that sends and takes nothing for so long is given up."""


class Inventory(NamedTuple):
    """What a cache tells of a job: the shards in its memory, what it began to store last, which generations it knows to exist."""

    copies: list[Copy]
    storing: set[Generation]
    existing: set[Generation]


def inventory(address: str, job: str) -> Inventory:
    """Return what the cache at ``host:port`` tells of a job.

    Raises
    ------
    PeerError
        It does not answer, or answers nonsense.
    """
    with _Call(address) as call:
        answer = call.ask({"op": "inventory", "job": job}, "inventory")
        try:
            copies = [
                Copy(generation(g), int(rank), int(world), str(answer["node"]), str(origin))
                for g, rank, world, origin in answer["shards"]
            ]
            return Inventory(copies, {generation(g) for g in answer["storing"]}, {generation(g) for g in answer["existing"]})
        except Corrupt as error:
            raise ValueError(error) from None


def put(address: str, manifest: Manifest, data: memoryview, existing: Iterable[Generation]) -> None:
    """Have the cache at `address` hold a copy, and tell it which generations are known to exist.

    Raises
    ------
    PeerError
        It does not answer, has no room, or got other bytes than were sent.
    """
    with _Call(address) as call:
        question = {"op": "put", "manifest": manifest.encode(), "existing": [str(g) for g in existing]}
        if call.ask(question, "go", "have")["op"] == "go":
            send_bytes(call.sock, data)
            call.answer("held")


def get(address: str, key: Key, room: Callable[[Manifest], memoryview]) -> Manifest:
    """Fetch a shard from the cache at `address` into the memory that `room` gives for it, and verify it.

    Raises
    ------
    Corrupt
        The bytes that came are not those that were saved.
    PeerError
        It does not answer, or does not hold that shard any more.
    """
    with _Call(address) as call:
        answer = call.ask({"op": "get", "job": key.job, "generation": str(key.generation), "rank": key.rank}, "shard")
        manifest = decode(answer["manifest"])
        if manifest.key != key:
            raise Corrupt(f"the cache at {address} answered with another shard")
        data = room(manifest)
        receive_bytes(call.sock, data)
    verify(manifest, data)
    return manifest


class _Call:
    """One connection to a peer; whatever breaks in it becomes a PeerError that names the peer."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> "_Call":
        host, _, port = self._address.rpartition(":")
        try:
            self.sock = socket.create_connection((host, int(port)), timeout=CONNECT_S)
        except (OSError, ValueError) as error:
            raise PeerError(f"the cache at {self._address} does not answer ({error})") from None
        self.sock.settimeout(SILENCE_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.sock.close()
        if isinstance(error, OSError):
            raise PeerError(f"the cache at {self._address} broke off ({error})") from None
        if isinstance(error, KeyError | TypeError | ValueError):
            raise PeerError(f"what answers at {self._address} is no checkpoint cache ({error})") from None

    def ask(self, message: Message, *expected: str) -> Message:
        """Send a message and return the answer, which must be one of `expected`."""
        send(self.sock, message)
        return self.answer(*expected)

    def answer(self, *expected: str) -> Message:
        """Return the next message, which must be one of `expected`."""
        got = receive(self.sock)
        if got is None:
            raise PeerError(f"the cache at {self._address} closed the connection")
        if got[0]["op"] not in expected:
            raise PeerError(f"the cache at {self._address} answers {got[0]['op']}: {got[0].get('why', 'no reason given')}")
        return got[0]
