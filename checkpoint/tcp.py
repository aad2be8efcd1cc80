"""Caches over TCP: the default transport. Plain sockets and threads; the bytes go from slab to slab with no copy between.

With a shared key both sides prove that they have it, by HMAC over numbers that both draw anew, so nothing that was heard can be
said again. That keeps strangers out; against who can change what is on the wire, and for secrecy, use TLS.
"""

import hmac
import secrets
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from checkpoint import place
from checkpoint.errors import CannotRun, PeerError
from checkpoint.manifest import CHUNK_BYTES, Manifest
from checkpoint.protocol import (
    DATA,
    FRAME,
    GONE,
    PEER_VERSION,
    READ,
    Message,
    chunk_frame,
    exactly,
    receive,
    receive_bytes,
    send,
)
from checkpoint.transport import CONNECT_S, SILENCE_S, WHOLE_S, WINDOW, Answer, Link, Pace, Reader, naming

_HELLO_BYTES = 4096
_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Security:
    """What the caches of a cluster share to know each other: files, each may be empty."""

    key_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""


_OPEN = Security()


class Tcp:
    """Fills `transport.Transport`. Connections that others open go to `attend`.

    Raises
    ------
    CannotRun
        A file of `security` cannot be used.
    """

    def __init__(self, security: Security = _OPEN) -> None:
        self._key = _key(security.key_file)
        self._client = _context(security, ssl.PROTOCOL_TLS_CLIENT)
        self._server = _context(security, ssl.PROTOCOL_TLS_SERVER)
        self._lock = threading.Lock()
        self._lent: dict[int, tuple[Manifest, memoryview, Pace]] = {}

    @contextmanager
    def call(self, address: str) -> Iterator[Link]:
        """Open a link; see `transport.Transport`."""
        with naming(address), self._connect(address, "link") as sock:
            yield _SocketLink(sock)

    @contextmanager
    def reader(self, address: str, region: int, manifest: Manifest) -> Iterator[Reader]:
        """Open a way to a region; see `transport.Transport`."""
        with naming(address), self._connect(address, "reader") as sock:
            yield _SocketReader(sock, region, manifest)

    def lend(self, manifest: Manifest, data: memoryview, pace: Pace | None = None) -> int:
        """Let others read a shard; see `transport.Transport`."""
        region = secrets.randbits(64)
        with self._lock:
            self._lent[region] = manifest, data, pace or Pace(0)
        return region

    def take_back(self, region: int) -> None:
        """Let nobody read it any more; see `transport.Transport`."""
        with self._lock:
            self._lent.pop(region, None)

    def attend(self, sock: socket.socket, answer: Answer) -> None:
        """Serve a connection that another cache opened, until it ends: by `answer` if it is a link.

        Raises
        ------
        PeerError
            It is let in for no reason that is known here; the other side was told, too.
        OSError
            It broke off or fell silent.
        """
        _tune(sock)
        with self._wrapped(sock) as secured:
            kind = self._let_in(secured)
            if kind == "link":
                answer(_SocketLink(secured))
            else:
                _leave_to_the_kernel(secured)
                self._give(secured)

    def _give(self, sock: socket.socket) -> None:
        """Send the chunks that are asked for."""
        while head := sock.recv(FRAME.size):
            asked = head + exactly(sock, FRAME.size - len(head), WHOLE_S)
            _, _, _, region, *_, number, _, _, _ = FRAME.unpack(asked)
            with self._lock:
                lent = self._lent.get(region)
            if lent is None or number >= len(lent[0].digests) or asked != chunk_frame(READ, region, lent[0], number):
                sock.sendall(_gone(asked))
                continue
            manifest, data, pace = lent
            sock.sendall(chunk_frame(DATA, region, manifest, number))
            start, stop = manifest.bounds(number)
            # at least ten pieces a second, so that who reads hears from us however slow the pace
            piece = min(CHUNK_BYTES, pace.bytes_per_s // 10) or CHUNK_BYTES
            for at in range(start, stop, piece):
                pace.spend(min(piece, stop - at))
                sock.sendall(data[at : min(at + piece, stop)])

    @contextmanager
    def _connect(self, address: str, kind: str) -> Iterator[socket.socket]:
        try:
            host, port, _ = place.split(address)
            sock = socket.create_connection((host, port), timeout=CONNECT_S)
        except (OSError, ValueError, OverflowError) as error:
            raise PeerError(f"the cache at {address} does not answer ({error})") from None
        with sock:
            _tune(sock)
            try:
                secured = self._client.wrap_socket(sock) if self._client else sock
                self._greet(secured, address, kind)
            except (ssl.SSLError, ConnectionError) as error:  # the other side may look at our certificate after the handshake
                if self._client is None:
                    why = f"hung up at the greeting ({_reason(error)}); if it wants TLS, give this node a certificate"
                    raise PeerError(f"the cache at {address} {why}") from None
                raise PeerError(
                    f"the cache at {address} cannot be reached by TLS ({_reason(error)}); "
                    "give every node the same [checkpoint] tls_ca and a certificate of it, or none of them any"
                ) from None
            with secured:
                if kind == "reader":
                    _leave_to_the_kernel(secured)
                yield secured

    @contextmanager
    def _wrapped(self, sock: socket.socket) -> Iterator[socket.socket]:
        if self._server is None:
            yield sock
            return
        try:
            secured = self._server.wrap_socket(sock, server_side=True)
        except ssl.SSLError as error:
            why = f"it shows no certificate that counts here ({_reason(error)})"
            raise PeerError(f"a cache at {_host(sock)} was not let in: {why}") from None
        with secured:
            yield secured

    def _greet(self, sock: socket.socket, address: str, kind: str) -> None:
        mine = secrets.token_hex(16)
        send(sock, {"op": "hello", "version": PEER_VERSION, "kind": kind, "nonce": mine, "keyed": bool(self._key)})
        got = _told(sock, address)
        if self._key:
            if got["op"] == "welcome":
                raise PeerError(f"the cache at {address} has no key; give every node the same [checkpoint] key_file")
            send(sock, {"op": "proof", "proof": self._proof("client", kind, mine, str(got["nonce"]))})
            welcome = _told(sock, address)
            if not hmac.compare_digest(str(welcome["proof"]), self._proof("server", kind, mine, str(got["nonce"]))):
                raise PeerError(
                    f"what answers at {address} does not have our key; give every node the same [checkpoint] key_file"
                )

    def _let_in(self, sock: socket.socket) -> str:
        """Return what a connection is for."""
        got = receive(sock, at_most_bytes=_HELLO_BYTES, within_s=WHOLE_S)
        if got is None:
            raise ConnectionError("closed before it said anything")
        hello = got[0]
        kind, theirs, mine = str(hello.get("kind")), str(hello.get("nonce")), secrets.token_hex(16)
        if hello["op"] != "hello" or hello.get("version") != PEER_VERSION:
            versions = f"one cache speaks version {PEER_VERSION} and the other {hello.get('version')}"
            raise _refused(sock, f"{versions}; use the same release on every node")
        if kind not in ("link", "reader"):
            raise _refused(sock, f"{kind!r} is nothing that a checkpoint cache is for")
        if not self._key:
            if hello.get("keyed"):
                raise _refused(sock, "one has a key and the other has none; give every node the same [checkpoint] key_file")
            send(sock, {"op": "welcome"})
            return kind
        if not hello.get("keyed"):
            raise _refused(sock, "one has a key and the other has none; give every node the same [checkpoint] key_file")
        send(sock, {"op": "challenge", "nonce": mine})
        proof = receive(sock, at_most_bytes=_HELLO_BYTES, within_s=WHOLE_S)
        shown = "" if proof is None else str(proof[0].get("proof"))
        if not hmac.compare_digest(shown.encode(), self._proof("client", kind, theirs, mine).encode()):
            raise _refused(sock, "their keys differ; give every node the same [checkpoint] key_file")
        send(sock, {"op": "welcome", "proof": self._proof("server", kind, theirs, mine)})
        return kind

    def _proof(self, side: str, kind: str, client: str, server: str) -> str:
        return hmac.digest(self._key, "\n".join(("eagleeye cache", side, kind, client, server)).encode(), "sha256").hex()


class _SocketLink:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @property
    def host(self) -> str:
        return _host(self._sock)

    def send(self, message: Message) -> None:
        send(self._sock, message)

    def receive(self) -> Message | None:
        got = receive(self._sock, within_s=WHOLE_S)
        return None if got is None else got[0]


class _SocketReader:
    def __init__(self, sock: socket.socket, region: int, manifest: Manifest) -> None:
        self._sock, self._region, self._manifest = sock, region, manifest

    def read(self, numbers: Iterator[int], data: memoryview) -> Iterator[int]:
        asked: deque[int] = deque()
        while True:
            for number in islice(numbers, WINDOW - len(asked)):
                self._sock.sendall(chunk_frame(READ, self._region, self._manifest, number))
                asked.append(number)
            if not asked:
                return
            self._land(asked[0], data)
            yield asked.popleft()

    def _land(self, number: int, data: memoryview) -> None:
        head = exactly(self._sock, FRAME.size, WHOLE_S)
        # it must be the chunk that was asked for, so that no byte can land in another place
        if head != chunk_frame(DATA, self._region, self._manifest, number):
            if head == _gone(chunk_frame(READ, self._region, self._manifest, number)):
                raise PeerError("it lends these bytes no longer")
            raise PeerError("it answered with another chunk than was asked for")
        start, stop = self._manifest.bounds(number)
        receive_bytes(self._sock, data[start:stop], WHOLE_S)


def _gone(asked: bytes) -> bytes:
    fields = list(FRAME.unpack(asked))
    fields[2] = GONE
    return FRAME.pack(*fields)


def _told(sock: socket.socket, address: str) -> Message:
    try:
        got = receive(sock, at_most_bytes=_HELLO_BYTES, within_s=WHOLE_S)
    except PeerError:
        raise PeerError(
            f"what answers at {address} is no checkpoint cache, or wants TLS and this one has no certificate"
        ) from None
    if got is None:
        raise PeerError(f"the cache at {address} closed the connection")
    if got[0]["op"] == "refused":
        raise PeerError(f"the cache at {address} does not let us in: {got[0].get('why', 'no reason given')}")
    if got[0]["op"] not in ("welcome", "challenge"):
        raise ValueError(f"it answers {got[0]['op']}")
    return got[0]


def _refused(sock: socket.socket, why: str) -> PeerError:
    """Tell the other side why it is not let in, and return what is said here."""
    send(sock, {"op": "refused", "why": why})
    return PeerError(f"a cache at {_host(sock)} was not let in: {why}")


def _tune(sock: socket.socket) -> None:
    sock.settimeout(SILENCE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _leave_to_the_kernel(sock: socket.socket) -> None:
    """Have the kernel watch over the time, so that one call moves a whole chunk. What encrypts needs Python's own watch."""
    if not isinstance(sock, ssl.SSLSocket):
        sock.settimeout(None)
        for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, way, struct.pack("ll", int(SILENCE_S), int(SILENCE_S % 1 * 1e6)))


def _host(sock: socket.socket) -> str:
    return str(sock.getpeername()[0])


def _reason(error: OSError) -> str:
    return str(getattr(error, "reason", None) or error.strerror or error)


def _key(file: str) -> bytes:
    if not file:
        return b""
    try:
        key = Path(file).read_bytes().strip()
    except OSError as error:
        raise CannotRun(f"cannot read the key file {file}: {error.strerror or error}") from None
    if len(key) < _KEY_BYTES:
        raise CannotRun(f"the key in {file} has {len(key)} bytes and needs {_KEY_BYTES} at least: openssl rand -hex 32 > {file}")
    return key


def _context(security: Security, protocol: int) -> ssl.SSLContext | None:
    files = (security.tls_cert, security.tls_key, security.tls_ca)
    if not any(files):
        return None
    if not all(files):
        raise CannotRun("TLS between caches needs all of [checkpoint] tls_cert, tls_key and tls_ca")
    context = ssl.SSLContext(protocol)
    # who has a certificate of this authority is a cache of ours, whatever its address
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(security.tls_cert, security.tls_key)
        context.load_verify_locations(security.tls_ca)
    except OSError as error:
        raise CannotRun(f"cannot use {', '.join(files)} for TLS: {_reason(error)}") from None
    return context
