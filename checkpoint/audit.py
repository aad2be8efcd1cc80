"""Reads every byte that is held, in storage and in a running cache's memory, and tells which are not those that were saved."""

import errno
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint import catalogue, place
from checkpoint.errors import CannotRun, PeerError
from checkpoint.limits import size
from checkpoint.manifest import CHUNK_BYTES, Manifest
from checkpoint.protocol import Message, receive, send

if TYPE_CHECKING:
    from checkpoint.server import Cache

SILENCE_S = 600.0
"""A cache that tells of no further shard for so long is given up; a shard of some hundred GB takes part of that."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What reading one shard told: `problem` is empty when all its bytes are those that were saved."""

    where: str
    job: str
    step: int
    rank: int
    nbytes: int
    problem: str

    def __str__(self) -> str:
        what = f"{self.where:16} {self.job:16} step {self.step:<8} rank {self.rank:<5} {size(self.nbytes):>10}"
        return f"{what}  {'DAMAGED: ' + self.problem if self.problem else 'intact'}"


def in_storage(storage: Path, job: str, progress: Callable[[int, int], None]) -> Iterator[Finding | str]:
    """Verify what lies in a storage folder; yield a sentence about each thing there that is no checkpoint.

    `progress` is called with how many bytes were just read and how many there are. Raises CannotRun when there is no folder.
    """
    found, strange = catalogue.scan(storage, job)
    yield from strange
    total = sum(stored.nbytes for stored in found)
    for stored in found:
        for rank, manifest in sorted(stored.shards.items()):
            problem = _in_file(stored.file(rank), manifest, lambda n: progress(n, total))
            if problem and not stored.is_there():
                break  # it was removed meanwhile, because newer ones are there
            yield Finding("storage", stored.job, stored.generation.step, rank, manifest.nbytes, problem)
        else:
            for rank, problem in sorted(stored.problems.items()):
                yield Finding("storage", stored.job, stored.generation.step, rank, 0, problem)


def in_memory(run_dir: Path, job: str) -> Iterator[Finding]:
    """Have the cache of a run folder verify what it holds.

    Raises
    ------
    ConnectionError, FileNotFoundError
        No cache runs there.
    PeerError
        It went away meanwhile.
    """
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(SILENCE_S)
        with place.socket_address(run_dir) as address:
            sock.connect(address)
        send(sock, {"op": "verify", "job": job})
        while (got := receive(sock)) is not None and got[0]["op"] == "verified":
            told = got[0]
            where = f"memory {told['node']}"
            yield Finding(where, told["job"], told["step"], told["rank"], told["nbytes"], told["problem"])
        if got is None or got[0]["op"] != "end":
            raise PeerError(f"the cache in {run_dir} broke off: {'it ended' if got is None else got[0].get('why', got[0]['op'])}")


def report(run_dir: Path, storage: Path | None, job: str) -> int:
    """Verify what is held and print one line for each shard as soon as it is read; return how many are damaged.

    Raises
    ------
    CannotRun
        The storage folder cannot be read, or there is none and no cache runs.
    PeerError
        The cache went away meanwhile.
    """
    counts: Counter[bool] = Counter()
    line, read = sys.stderr.isatty(), 0

    def progress(nbytes: int, total: int) -> None:
        nonlocal read
        read += nbytes
        if line:
            print(f"\rread {size(read)} of {size(total)}\033[K", end="", file=sys.stderr, flush=True)

    def tell(finding: Finding | str) -> None:
        if line:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        print(finding, flush=True)
        if isinstance(finding, Finding):
            counts[bool(finding.problem)] += 1

    if storage is not None:
        for one in in_storage(storage, job, progress):
            tell(one)
    try:
        for finding in in_memory(run_dir, job):
            tell(finding)
    except (ConnectionError, FileNotFoundError):
        nobody = f"no cache runs in {run_dir}, so no memory was verified"
        if storage is None:
            raise CannotRun(f"{nobody}; name its folder by --run-dir, or a storage folder by --storage") from None
        print(nobody)
    print(f"{counts.total()} shards verified, {counts[True]} damaged")
    return counts[True]


def answer(cache: "Cache", sock: socket.socket, message: Message) -> None:
    """Verify what a cache holds in memory and tell it, shard after shard."""
    with cache.changed:
        keys = sorted(cache.verified(message["job"]))
    for key in keys:
        shard = cache.pinned(key)
        if shard is None or shard.manifest is None:
            continue  # it was let go of meanwhile
        try:
            problem = _in_slab(shard.manifest, shard.data)
        finally:
            cache.unpin(shard)
        where = {"node": cache.node, "job": key.job, "step": key.generation.step, "rank": key.rank, "nbytes": shard.nbytes}
        send(sock, {"op": "verified", "problem": problem} | where)
    send(sock, {"op": "end"})


def damage(manifest: Manifest, read: Callable[[int, int], memoryview]) -> str:
    """Say which bytes of a shard, read by ``read(start, stop)``, are not those that were saved; empty when all are."""
    wrong: list[tuple[int, int]] = []
    for number in range(len(manifest.digests)):
        start, stop = manifest.bounds(number)
        if not manifest.fits(number, read(start, stop)):
            joins = wrong and wrong[-1][1] == start
            wrong.append((wrong.pop()[0] if joins else start, stop))
    if not wrong:
        return ""
    ranges = ", ".join(f"{start} to {stop}" for start, stop in wrong[:8]) + (" and more" if len(wrong) > 8 else "")
    return f"the bytes from {ranges} are not those that were saved"


def _in_slab(manifest: Manifest, data: memoryview) -> str:
    return damage(manifest, lambda start, stop: data[start:stop])


def _in_file(path: Path, manifest: Manifest, progress: Callable[[int], None]) -> str:
    """Say what is wrong with a shard's file; empty when nothing is."""
    buffer = memoryview(bytearray(min(CHUNK_BYTES, manifest.nbytes)))
    try:
        with path.open("rb", buffering=0) as file:
            if (length := os.fstat(file.fileno()).st_size) != manifest.nbytes:
                return f"{path}: {length} bytes instead of {manifest.nbytes}"

            def read(start: int, stop: int) -> memoryview:
                at = start
                while at < stop:
                    count = os.preadv(file.fileno(), [buffer[at - start : stop - start]], at)
                    if not count:
                        raise OSError(errno.EIO, f"it ends after {at} bytes")
                    at += count
                progress(stop - start)
                return buffer[: stop - start]

            wrong = damage(manifest, read)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return wrong and f"{path}: {wrong}"
