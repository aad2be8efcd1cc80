"""How a cache is reached: the lock that keeps a second one out of its run folder, its two sockets, and who is connected."""

import fcntl
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from checkpoint import place
from checkpoint.errors import CannotRun

AGAIN_S = 1.0
"""A process that may open no more files waits so long before it takes the next connection."""


class Doors:
    """Lock, TCP socket and UNIX socket, as open files that another cache can take over."""

    def __init__(self, lock: int, tcp: socket.socket, unix: socket.socket) -> None:
        self.lock, self.tcp, self.unix = lock, tcp, unix
        for listener in (tcp, unix):
            listener.setblocking(False)  # another cache that has the same socket may be faster
        self._changed = threading.Condition()
        self._inside: set[socket.socket] = set()
        self._shut = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def port(self) -> int:
        """The port of the TCP socket."""
        return int(self.tcp.getsockname()[1])

    @property
    def files(self) -> tuple[int, int, int]:
        """The open files of which these doors are made."""
        return self.lock, self.tcp.fileno(), self.unix.fileno()

    def announce(self, run_dir: Path, info: Mapping[str, object]) -> None:
        """Write down who serves in a run folder. Raises OSError."""
        os.truncate(self.lock, 0)
        os.pwrite(self.lock, str(os.getpid()).encode(), 0)
        temporary = run_dir / f".{place.INFO}"
        temporary.write_text(json.dumps(dict(info) | {"port": self.port, "pid": os.getpid()}), encoding="utf-8")
        temporary.replace(run_dir / place.INFO)

    def accept(self, listener: socket.socket, attend: Callable[[socket.socket], None], say: Callable[[str], None]) -> None:
        """Have everybody who comes through one of the sockets attended in a thread of its own, for ever."""
        ready = select.poll()
        ready.register(listener, select.POLLIN)
        ready.register(self._wake, select.POLLIN)
        while True:
            ready.poll()
            try:
                with self._changed:
                    self._changed.wait_for(lambda: not self._shut)
                    sock, _ = listener.accept()
                    self._inside.add(sock)
            except BlockingIOError:
                continue
            except OSError as error:
                # out of descriptors, say: those who ask are told by the silence, and asked again a moment later
                say(f"cannot take a connection: {error}")
                time.sleep(AGAIN_S)
                continue
            threading.Thread(target=self._attend, args=(sock, attend), daemon=True).start()

    def shut(self, but: socket.socket, patience_s: float) -> bool:
        """Let nobody in and show everybody out but one; return whether the others are gone."""
        with self._changed:
            self._shut = True
            os.eventfd_write(self._wake, 1)
            for sock in self._inside - {but}:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            return self._changed.wait_for(lambda: self._inside == {but}, patience_s)

    def reopen(self) -> None:
        """Let people in again after `shut`."""
        with self._changed:
            self._shut = False
            os.eventfd_read(self._wake)
            self._changed.notify_all()

    def close(self) -> None:
        """Let go of everything; who else holds the files is not disturbed."""
        self.tcp.close()
        self.unix.close()
        os.close(self.lock)
        os.close(self._wake)

    def _attend(self, sock: socket.socket, attend: Callable[[socket.socket], None]) -> None:
        try:
            attend(sock)
        finally:
            with self._changed:
                self._inside.discard(sock)
                self._changed.notify_all()
            sock.close()


def opened(run_dir: Path, address: str, port: int) -> Doors:
    """Return doors of one's own.

    Raises
    ------
    CannotRun
        Another cache has the run folder, or the port is in use.
    OSError
        The folder cannot be written.
    """
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with ExitStack() as undo:
        lock = os.open(run_dir / place.LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        undo.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(lock, 32).decode(errors="replace") or "unknown"
            raise CannotRun(f"a cache (pid {pid}) runs in {run_dir} already; one serves all jobs of a node") from None
        try:
            tcp = undo.enter_context(socket.create_server((address, port), backlog=128))
        except (OSError, OverflowError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise CannotRun(f"the cache cannot listen on {address or 'all addresses'}, port {port}: {why}") from None
        (run_dir / place.SOCKET).unlink(missing_ok=True)
        unix = undo.enter_context(socket.socket(socket.AF_UNIX))
        with place.socket_address(run_dir) as at:
            unix.bind(at)
        unix.listen(128)
        undo.pop_all()
    return Doors(lock, tcp, unix)
