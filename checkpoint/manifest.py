"""What one saved shard is: which generation and rank, how long, and the digest of every chunk. Pure but for hashing."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from checkpoint.errors import Corrupt, UsageError

VERSION = 1
CHUNK_BYTES = 4 << 20


class Generation(NamedTuple):
    """One checkpoint of the whole job; ordered from old to new.

    `attempt` numbers the starts of the job in order, `token` is drawn at each start. Without them the step 150 of before a
    restart and that of after it would look alike, and shards of both could be mixed.
    """

    attempt: int
    step: int
    token: str

    def __str__(self) -> str:
        return f"{self.attempt:010d}-{self.step:012d}-{self.token}"


def generation(text: str) -> Generation:
    """Return the generation that `str()` made `text` of. Raises Corrupt when it is none."""
    match = re.fullmatch(r"(\d{10})-(\d{12})-([0-9a-f]{8})", text)
    if not match:
        raise Corrupt(f"{text!r} is no generation")
    return Generation(int(match[1]), int(match[2]), match[3])


class Key(NamedTuple):
    """What a shard is found by."""

    job: str
    generation: Generation
    rank: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One rank's part of one generation.

    `node` is where it was saved. `digests` are the xxh3-128 of each `CHUNK_BYTES` of the `nbytes` bytes, in hex. `content`
    belongs to the client: how the bytes become a state again.
    """

    key: Key
    world_size: int
    node: str
    nbytes: int
    digests: tuple[str, ...]
    content: Mapping[str, Any]

    def bounds(self, number: int) -> tuple[int, int]:
        """Return where chunk `number` begins and ends in the shard's bytes."""
        return number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, self.nbytes)

    def fits(self, number: int, chunk: memoryview) -> bool:
        """Whether `chunk` is chunk `number` as it was saved."""
        return xxhash.xxh3_128_hexdigest(chunk) == self.digests[number]

    def encode(self) -> str:
        """Return the manifest as JSON that carries its own digest."""
        body = {
            "version": VERSION,
            "job": self.key.job,
            "generation": str(self.key.generation),
            "rank": self.key.rank,
            "world_size": self.world_size,
            "node": self.node,
            "nbytes": self.nbytes,
            "digests": list(self.digests),
            "content": self.content,
        }
        return json.dumps(body | {"digest": _digest(body)})


def decode(text: str | bytes) -> Manifest:
    """Return the manifest that `Manifest.encode` wrote.

    Raises
    ------
    Corrupt
        It is truncated, was changed, or was written by a newer version.
    """
    try:
        body = dict(json.loads(text))
        told = body.pop("digest")
        if body["version"] != VERSION:
            raise Corrupt(f"a manifest of version {body['version']}; this program reads version {VERSION}")
        if told != _digest(body):
            raise Corrupt("a manifest does not match its own digest")
        key = Key(body["job"], generation(body["generation"]), int(body["rank"]))
        digests = tuple(str(digest) for digest in body["digests"])
        made = Manifest(key, int(body["world_size"]), body["node"], int(body["nbytes"]), digests, body["content"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"no manifest: {error}") from None
    well_formed = all(re.fullmatch("[0-9a-f]{32}", digest) for digest in digests)
    if not (0 <= key.rank < made.world_size and made.nbytes >= 0 and len(digests) == _chunks(made.nbytes) and well_formed):
        raise Corrupt("a manifest contradicts itself")
    return made


def made_of(key: Key, world_size: int, node: str, content: Mapping[str, Any], data: memoryview) -> Manifest:
    """Return the manifest of the shard whose bytes are `data`, reading all of them once."""
    digests = tuple(xxhash.xxh3_128_hexdigest(chunk) for chunk in _split(data))
    return Manifest(key, world_size, node, len(data), digests, content)


def verify(manifest: Manifest, data: memoryview) -> None:
    """Read all of `data` and compare. Raises Corrupt and names the first wrong chunk."""
    if len(data) != manifest.nbytes:
        raise Corrupt(f"{len(data)} bytes instead of {manifest.nbytes}")
    for number in range(len(manifest.digests)):
        start, stop = manifest.bounds(number)
        if not manifest.fits(number, data[start:stop]):
            raise Corrupt(f"the bytes from {start} to {stop} are not those that were saved")


def check_job(name: str) -> str:
    """Return `name` if it can be the name of a job. Raises UsageError."""
    if not re.fullmatch(r"[\w.:@=+-]{1,128}", name, re.ASCII) or name.startswith("."):
        raise UsageError(f"{name!r} is no name for a job: use 1 to 128 letters, digits or any of _ . : @ = + -")
    return name


def _split(data: memoryview) -> list[memoryview]:
    return [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]


def _chunks(nbytes: int) -> int:
    return -(-nbytes // CHUNK_BYTES)


def _digest(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
