"""Frames: a length, a JSON object, over a UNIX socket also open files. What follows a frame on TCP is raw bytes.

Client and the cache of its node (UNIX socket ``cache.sock``), one connection a rank; the cache may speak at any time:

client says                                                      cache answers
---------------------------------------------------------------  ------------------------------------------------------------
hello: version, job, rank, world_size, born, peers or null       welcome: node; or refused: why
reserve: nbytes [, drop: true: rather let go of an older         slab: slab, nbytes, gone [+ its file, the first time];
generation that storage waits for than refuse]                   or full: why, never, gone; the slabs `gone` are let go of
layout: layout, items                                            nothing; what later seals mean by that layout
seal: slab, generation, layout, values, nbytes                   state: generation, level (cached, replicated, persistent)
                                                                 [, error], one for each level as it is reached;
                                                                 late: generation, level, why, when one has to wait
choose: request, exclude                                         chosen: request, generation, attempt, existed, passed_over
fetch: request, generation [, check: false: the client verifies  fetched: request, slab, manifest, source, holder, tried
what this node's memory holds]                                   + file; or fetched: request, error
release: slab                                                    nothing; fetched bytes are no longer read
verify: job, instead of hello                                    verified: node, job, step, rank, nbytes, problem, for each
                                                                 shard; then end
take-over, instead of hello                                      see `checkpoint.handover`

Between caches there are links, for questions, and readers, for bytes. On TCP both begin with ``hello: version, kind, nonce,
keyed``, answered by ``welcome``, by ``refused: why``, or, where both have a key, by ``challenge: nonce``; then ``proof: proof``
is answered by ``welcome: proof``. On a link one question follows the other:

question                    answer
--------------------------  -----------------------------------------------------------------------------------------------------
inventory: job              inventory: node, storing, existing, shards [[generation, rank, world_size, origin], ...]
put: manifest, existing,    have; or refused: why; or landing: chunks, again and again while the other side reads the region at
port, region                that port, then held or corrupt: why
get: job, generation, rank  absent: why; or shard: manifest, region, which is lent while `reading` comes again and again

By a reader chunks are pulled: for each goes a frame of `FRAME` there, and the same with another kind comes back, then the bytes.
"""

import json
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import xxhash

from checkpoint.errors import PeerError, UsageError
from checkpoint.manifest import Manifest

VERSION = 1
PEER_VERSION = 2
"""Of what caches say among themselves; they speak one version only."""
MAX_FRAME_BYTES = 128 << 20
MAX_STATE_BYTES = MAX_FRAME_BYTES // 4
"""A state's description and its plain values may take so much, each; a manifest that holds both still fits into a frame."""
PIECE_BYTES = 4 << 20
_LENGTH = struct.Struct(">I")
FRAME = struct.Struct(">4sHHQQQQ4sIIIQ16s")
"""magic, version, kind, region, hash of the job, attempt, step, token, rank, chunk, length, offset, xxh3-128 of the bytes."""
READ, DATA, GONE = 1, 2, 3
"""Kinds of frames: a chunk is asked for; it follows; it is not lent any more."""

Message = dict[str, Any]


def send(sock: socket.socket, message: Message, files: Sequence[int] = (), at_most_bytes: int = MAX_FRAME_BYTES) -> None:
    """Send one frame, with open files on a UNIX socket.

    Raises
    ------
    UsageError
        The message is longer than allowed; nothing was sent.
    OSError
        The other side is gone.
    """
    body = json.dumps(message).encode()
    if len(body) > at_most_bytes:
        raise UsageError(
            f"the {message['op']} of a state takes {len(body)} bytes and may take {at_most_bytes}; put long lists into tensors"
        )
    frame = _LENGTH.pack(len(body)) + body
    if files:
        sent = socket.send_fds(sock, [frame], list(files))
        frame = frame[sent:]
    sock.sendall(frame)


def chunk_frame(kind: int, region: int, manifest: Manifest, number: int) -> bytes:
    """Return the frame that asks for, or announces, one chunk of a shard. Equal frames mean equal bytes at an equal place."""
    key, (start, stop) = manifest.key, manifest.bounds(number)
    return FRAME.pack(
        b"EECC", PEER_VERSION, kind, region, xxhash.xxh3_64_intdigest(key.job.encode()),
        key.generation.attempt, key.generation.step, bytes.fromhex(key.generation.token), key.rank,
        number, stop - start, start, bytes.fromhex(manifest.digests[number]),
    )  # fmt: skip


def receive(
    sock: socket.socket, max_files: int = 0, at_most_bytes: int = MAX_FRAME_BYTES, within_s: float | None = None
) -> tuple[Message, list[int]] | None:
    """Return the next frame and the files that came with it; None when the other side closed between two frames.

    Once it began it must be there after `within_s`.

    Raises
    ------
    PeerError
        It closed within a frame, or what it sent is no frame.
    OSError
        The connection broke or timed out.
    """
    files: list[int] = []
    if max_files:
        head, files, _, _ = socket.recv_fds(sock, _LENGTH.size, max_files)
        for file in files:
            os.set_inheritable(file, False)
    else:
        head = sock.recv(_LENGTH.size)
    if not head:
        return None
    if len(head) < _LENGTH.size:
        head += exactly(sock, _LENGTH.size - len(head), within_s)
    (length,) = _LENGTH.unpack(head)
    if length > at_most_bytes:
        raise PeerError("what was received is no message of a checkpoint cache")
    try:
        message = json.loads(exactly(sock, length, within_s))
        if not isinstance(message, dict) or not isinstance(message.get("op"), str):
            raise ValueError
    except (ValueError, RecursionError):
        raise PeerError("what was received is no message of a checkpoint cache") from None
    return message, files


def receive_bytes(sock: socket.socket, data: memoryview, within_s: float | None = None) -> None:
    """Fill `data` with raw bytes, straight into memory.

    Raises
    ------
    PeerError
        The other side closed before.
    TimeoutError
        Not all were there after `within_s`, so that who sends a byte now and then is given up, too.
    """
    at, began_s = 0, time.monotonic()
    flags = socket.MSG_WAITALL if sock.gettimeout() is None else 0
    while at < len(data):
        try:
            # on a socket that blocks the kernel waits for all of it, and nothing of ours runs meanwhile
            count = sock.recv_into(data[at:], 0, flags)
        except BlockingIOError:
            raise TimeoutError("timed out") from None
        if not count:
            raise PeerError(f"the other side closed after {at} of {len(data)} bytes")
        at += count
        if within_s is not None and at < len(data) and time.monotonic() - began_s > within_s:
            raise TimeoutError(f"{at} of {len(data)} bytes came in {within_s:g} s")


def exactly(sock: socket.socket, count: int, within_s: float | None = None) -> bytes:
    """Return the next `count` bytes; fails as `receive_bytes` does."""
    buffer = bytearray(count)
    receive_bytes(sock, memoryview(buffer), within_s)
    return bytes(buffer)
