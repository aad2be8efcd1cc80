"""Bytes through plain sockets between two processes: what a copy to a neighbour can at best reach on this machine."""

import argparse
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

PIECE_BYTES = 4 << 20


@contextlib.contextmanager
def pump(nbytes: int, connections: int) -> Iterator[Callable[[], float]]:
    """Yield a function that sends `nbytes` bytes to another process over `connections` and returns how long that took, in s.

    Both sides use memory that was touched before; the bytes are there when the other side says so.
    """
    words = [sys.executable, __file__, "--bytes", str(nbytes), "--connections", str(connections)]
    sink = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert sink.stdout is not None
    try:
        port = int(sink.stdout.readline())
        with contextlib.ExitStack() as opened, ThreadPoolExecutor(connections) as threads:
            socks = [opened.enter_context(_connected(port)) for _ in range(connections)]
            parts = [memoryview(bytearray(b"x" * length)) for length in shares(nbytes, connections)]

            def send() -> float:
                began_s = time.perf_counter()
                for done in [threads.submit(_send, sock, part) for sock, part in zip(socks, parts, strict=True)]:
                    done.result()
                return time.perf_counter() - began_s

            yield send
    finally:
        sink.kill()
        sink.wait()
        sink.stdout.close()


def shares(nbytes: int, count: int) -> list[int]:
    """Return how many bytes each of `count` connections takes."""
    return [nbytes * (i + 1) // count - nbytes * i // count for i in range(count)]


def _connected(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _send(sock: socket.socket, part: memoryview) -> None:
    for start in range(0, len(part), PIECE_BYTES):
        sock.sendall(part[start : start + PIECE_BYTES])
    if sock.recv(1) != b".":
        raise SystemExit("the other end of the pump is gone")


def _sink(nbytes: int, connections: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(connections) as threads:
        print(listener.getsockname()[1], flush=True)
        for length in shares(nbytes, connections):
            threads.submit(_receive, listener.accept()[0], memoryview(bytearray(b"y" * length)))


def _receive(sock: socket.socket, room: memoryview) -> None:
    at = 0
    while count := sock.recv_into(room[at : at + PIECE_BYTES]):
        at += count
        if at == len(room):
            sock.sendall(b".")
            at = 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--connections", type=int, required=True)
    options = parser.parse_args()
    _sink(options.bytes, options.connections)
