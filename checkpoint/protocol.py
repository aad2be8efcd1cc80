"""Frames: a length, a JSON object, over a UNIX socket also open files. What follows a frame on TCP is raw bytes.

Client and the cache of its node (UNIX socket ``cache.sock``), one connection a rank; the cache may speak at any time:

client says                                                      cache answers
---------------------------------------------------------------  ------------------------------------------------------------
hello: version, job, rank, world_size, born, peers or null       welcome: node; or refused: why
reserve: nbytes                                                  slab: slab, nbytes, gone [+ its file, the first time];
                                                                 or full: why, gone; of the slabs `gone` nobody knows any more
layout: layout, items                                            nothing; what later seals mean by that layout
seal: slab, generation, layout, values, nbytes                   state: generation, level (cached, replicated, persistent)
                                                                 [, error], one for each level as it is reached
choose: request, exclude                                         chosen: request, generation, attempt, existed, passed_over
fetch: request, generation                                       fetched: request, slab, manifest, source, holder, tried
                                                                 + file; or fetched: request, error
release: slab                                                    nothing; fetched bytes are no longer read

Between caches (TCP), one request after the other:

question                    answer
--------------------------  -----------------------------------------------------------------------------------------------------
inventory: job              inventory: node, storing, existing, shards [[generation, rank, world_size, origin], ...]
put: manifest, existing     have; or refused: why; or go, then the bytes, then held or corrupt: why
get: job, generation, rank  absent: why; or shard: manifest, then the bytes
"""

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

from checkpoint.errors import PeerError, UsageError

VERSION = 1
MAX_FRAME_BYTES = 128 << 20
MAX_STATE_BYTES = MAX_FRAME_BYTES // 4
"""A state's description and its plain values may take so much, each; a manifest that holds both still fits into a frame."""
PIECE_BYTES = 4 << 20
_LENGTH = struct.Struct(">I")

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


def receive(sock: socket.socket, max_files: int = 0) -> tuple[Message, list[int]] | None:
    """Return the next frame and the files that came with it; None when the other side closed between two frames.

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
        head += _exactly(sock, _LENGTH.size - len(head))
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise PeerError("what was received is no message of a checkpoint cache")
    try:
        message = json.loads(_exactly(sock, length))
        if not isinstance(message, dict) or not isinstance(message.get("op"), str):
            raise ValueError
    except (ValueError, RecursionError):
        raise PeerError("what was received is no message of a checkpoint cache") from None
    return message, files


def send_bytes(sock: socket.socket, data: memoryview) -> None:
    """Send raw bytes straight from memory."""
    for start in range(0, len(data), PIECE_BYTES):
        sock.sendall(data[start : start + PIECE_BYTES])


def receive_bytes(sock: socket.socket, data: memoryview) -> None:
    """Fill `data` with raw bytes, straight into memory. Raises PeerError when fewer come."""
    at = 0
    while at < len(data):
        count = sock.recv_into(data[at : at + PIECE_BYTES])
        if not count:
            raise PeerError(f"the other side closed after {at} of {len(data)} bytes")
        at += count


def _exactly(sock: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    receive_bytes(sock, memoryview(buffer))
    return bytes(buffer)
