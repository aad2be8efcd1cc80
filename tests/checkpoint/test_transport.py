"""One contract for every transport; then what TCP adds: who is let in, what breaks on the wire, and what strangers say."""

import contextlib
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from checkpoint import questions, tcp
from checkpoint.errors import CannotRun, CheckpointError, PeerError
from checkpoint.inprocess import Exchange, InProcess
from checkpoint.landing import Landing
from checkpoint.manifest import CHUNK_BYTES, Generation, Key, Manifest, made_of
from checkpoint.protocol import FRAME, PEER_VERSION, READ, chunk_frame, receive, send
from checkpoint.tcp import Security, Tcp
from checkpoint.transport import Answer, Link, Pace, Transport, ask

KEY = Key("llm", Generation(7, 100, "abcdef01"), 3)


def shard(nbytes: int, key: Key = KEY, seed: int = 1) -> tuple[Manifest, memoryview]:
    data = memoryview(random.Random(seed).randbytes(nbytes))
    return made_of(key, 8, "node0", {"what": "a test"}, data), data


@contextlib.contextmanager
def listening(transport: Tcp, answer: Answer, complaints: list[str]) -> Iterator[str]:
    """Serve a transport as a cache does; yield its address."""
    threads: list[threading.Thread] = []

    def attend(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            try:
                transport.attend(sock, answer)
            except CheckpointError as error:
                complaints.append(str(error))

    def accept(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                threads.append(threading.Thread(target=attend, args=(server.accept()[0],)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        accepting = threading.Thread(target=accept, args=(server,))
        accepting.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    for thread in [accepting, *threads]:
        thread.join(20)
        assert not thread.is_alive()


Pair = Callable[[Answer], contextlib.AbstractContextManager[tuple[Transport, Transport, str]]]
"""Two transports, of which the second is at an address and answers."""


@contextlib.contextmanager
def over_tcp(answer: Answer, *, ours: Security, theirs: Security) -> Iterator[tuple[Transport, Transport, str]]:
    there = Tcp(theirs)
    with listening(there, answer, []) as address:
        yield Tcp(ours), there, address


@contextlib.contextmanager
def in_process(answer: Answer) -> Iterator[tuple[Transport, Transport, str]]:
    exchange = Exchange()
    yield InProcess(exchange, "a:1"), InProcess(exchange, "b:1", answer), "b:1"


@pytest.fixture(params=["tcp", "tcp with a key", "in process"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    if request.param == "in process":
        return in_process
    security = Security()
    if request.param == "tcp with a key":
        file = tmp_path_factory.mktemp("key") / "key"
        file.write_text("0123456789abcdef\n")
        security = Security(key_file=str(file))
    return partial(over_tcp, ours=security, theirs=security)


def nobody(link: Link) -> None:
    """Answer nothing."""


def echo(link: Link) -> None:
    while (message := link.receive()) is not None:
        link.send({"op": "heard", "host": link.host, "what": message})


def everything(manifest: Manifest) -> Iterator[int]:
    return iter(range(len(manifest.digests)))


def test_questions_are_answered_in_order(pair: Pair) -> None:
    with pair(echo) as (ours, _, address), ours.call(address) as link:
        for number in range(5):
            told = ask(link, address, {"op": "ask", "number": number, "text": "ü" * 100_000 * number}, "heard")
            assert told["what"] == {"op": "ask", "number": number, "text": "ü" * 100_000 * number}
        assert told["host"]
        with pytest.raises(PeerError, match=f"the cache at {address} answers heard: no reason given"):
            ask(link, address, {"op": "ask"}, "something else")


def test_who_hangs_up_is_noticed(pair: Pair) -> None:
    ended = threading.Event()

    def answer(link: Link) -> None:
        echo(link)
        ended.set()

    with pair(answer) as (ours, _, address):
        with ours.call(address) as link:
            ask(link, address, {"op": "ask"}, "heard")
            assert not ended.is_set()
        assert ended.wait(5)
    with pair(nobody) as (ours, _, address), ours.call(address) as link:
        assert link.receive() is None


def test_what_breaks_in_a_talk_names_the_other_side(pair: Pair) -> None:
    with pair(echo) as (ours, _, address):
        for wrong in (OSError("broken"), KeyError("missing"), ValueError("nonsense"), TypeError("wrong")):
            with pytest.raises(PeerError, match=f"at {address} "), ours.call(address):
                raise wrong


@pytest.mark.parametrize("nbytes", [1, 4096, CHUNK_BYTES, 5 * CHUNK_BYTES + 12345])
def test_every_chunk_lands_in_its_place(pair: Pair, nbytes: int) -> None:
    manifest, data = shard(nbytes)
    room = bytearray(b"\xaa" * (nbytes + 20))
    with pair(nobody) as (ours, theirs, address):
        region = theirs.lend(manifest, data)
        with ours.reader(address, region, manifest) as reader:
            landed = list(reader.read(everything(manifest), memoryview(room)[10:-10]))
    assert landed == list(range(len(manifest.digests)))
    assert room[10:-10] == data
    assert room[:10] + room[-10:] == b"\xaa" * 20


def test_only_what_is_asked_for_is_written_in_any_order(pair: Pair) -> None:
    manifest, data = shard(6 * CHUNK_BYTES + 1)
    room = bytearray(len(data))
    with pair(nobody) as (ours, theirs, address), ours.reader(address, theirs.lend(manifest, data), manifest) as reader:
        assert list(reader.read(iter([6, 2, 4]), memoryview(room))) == [6, 2, 4]
        for number in range(7):
            start, stop = manifest.bounds(number)
            assert room[start:stop] == (data[start:stop] if number in (2, 4, 6) else bytes(stop - start))
        assert list(reader.read(iter([0]), memoryview(room))) == [0]  # the way is still open
        assert room[:CHUNK_BYTES] == data[:CHUNK_BYTES]


def test_numbers_are_taken_as_they_are_wanted(pair: Pair) -> None:
    manifest, data = shard(12 * CHUNK_BYTES)
    taken = []

    def numbers() -> Iterator[int]:
        for number in range(12):
            taken.append(number)
            yield number

    with pair(nobody) as (ours, theirs, address), ours.reader(address, theirs.lend(manifest, data), manifest) as reader:
        landed = reader.read(numbers(), memoryview(bytearray(len(data))))
        assert next(landed) == 0
        assert taken == [0, 1, 2, 3]
        assert next(landed) == 1
        assert taken == [0, 1, 2, 3, 4]
        assert list(landed) == list(range(2, 12))


def test_several_readers_share_the_work(pair: Pair) -> None:
    manifest, data = shard(9 * CHUNK_BYTES + 7)
    landing = Landing(manifest, memoryview(bytearray(len(data))))
    with pair(nobody) as (ours, theirs, address):
        region = theirs.lend(manifest, data)
        landing.draw("b", lambda: ours.reader(address, region, manifest), 3, lambda: None)
    assert (landing.missing, landing.given, landing.notes, landing.data) == (set(), {"b": 10}, [], data)


def test_what_is_not_lent_is_not_given(pair: Pair) -> None:
    manifest, data = shard(CHUNK_BYTES + 1)
    other, _ = shard(CHUNK_BYTES + 1, Key("llm", Generation(7, 101, "abcdef01"), 3))
    longer, _ = shard(3 * CHUNK_BYTES, seed=2)
    room = bytearray(longer.nbytes)
    with pair(nobody) as (ours, theirs, address):
        region = theirs.lend(manifest, data)
        for asked, number in ((other, 0), (longer, 0), (longer, 2)):
            with pytest.raises(PeerError), ours.reader(address, region, asked) as reader:
                next(reader.read(iter([number]), memoryview(room)))
        with pytest.raises(PeerError, match="no longer"), ours.reader(address, region + 1, manifest) as reader:
            next(reader.read(iter([0]), memoryview(room)))
        theirs.take_back(region)
        with pytest.raises(PeerError, match="no longer"), ours.reader(address, region, manifest) as reader:
            next(reader.read(iter([0]), memoryview(room)))
    assert room == bytes(len(room))


def test_what_is_taken_back_while_it_is_read(pair: Pair) -> None:
    manifest, data = shard(12 * CHUNK_BYTES)
    with pair(nobody) as (ours, theirs, address):
        region = theirs.lend(manifest, data)
        with ours.reader(address, region, manifest) as reader:
            landed = reader.read(everything(manifest), memoryview(bytearray(len(data))))
            assert next(landed) == 0
            theirs.take_back(region)
            with pytest.raises(PeerError, match="no longer"):
                list(landed)


def test_the_pace_is_kept(pair: Pair) -> None:
    """Never faster than is allowed; no test of how fast it is."""
    manifest, data = shard(2 * CHUNK_BYTES)
    with pair(nobody) as (ours, theirs, address):
        region = theirs.lend(manifest, data, Pace(16 << 20))
        began_s = time.monotonic()
        landing = Landing(manifest, memoryview(bytearray(len(data))))
        landing.draw("b", lambda: ours.reader(address, region, manifest), 2, lambda: None)
        took_s = time.monotonic() - began_s
    assert landing.data == data
    # the first piece may go at once, each other waits for those before it
    assert took_s >= (2 * CHUNK_BYTES - CHUNK_BYTES) / (16 << 20)


def test_nobody_there(pair: Pair) -> None:
    manifest, _ = shard(1)
    with pair(nobody) as (ours, _, _address):
        for address in ("127.0.0.1:1", "no.such.host.invalid:9480", "nonsense"):
            with pytest.raises(PeerError, match=f"the cache at {address} does not answer"), ours.call(address):
                pass
            with pytest.raises(PeerError, match=f"the cache at {address} does not answer"), ours.reader(address, 1, manifest):
                pass


def lender(transport: Transport, manifest: Manifest, data: memoryview) -> Answer:
    """Return what answers `get` as a cache does."""

    def answer(link: Link) -> None:
        while (message := link.receive()) is not None:
            if message["op"] == "get":
                link.send({"op": "shard", "manifest": manifest.encode(), "region": transport.lend(manifest, data)})

    return answer


def test_a_shard_comes_from_all_that_hold_it(pair: Pair) -> None:
    manifest, data = shard(20 * CHUNK_BYTES)
    bad = bytearray(data)
    bad[3 * CHUNK_BYTES + 77] ^= 1
    later: list[Answer] = []

    def answer(link: Link) -> None:
        later[0](link)

    with pair(answer) as (ours, theirs, address):
        later.append(lender(theirs, manifest, memoryview(bad)))
        room = bytearray(len(data))
        landing, notes = questions.get(ours, {"node1": address}, KEY, lambda found: memoryview(room))
        assert landing is not None
        assert landing.missing == {3}
        assert notes == ["node1: the bytes from 12582912 to 16777216 are not those that were saved"]
        later[0] = lender(theirs, manifest, data)
        landing.draw("node2", lambda: ours.reader(address, theirs.lend(manifest, data), manifest), 2, lambda: None)
        assert (landing.missing, room) == (set(), data)
        assert landing.given == {"node1": 19, "node2": 1}


# ---- TCP: who is let in

SAME = "give every node the same [checkpoint] key_file"


def key_file(folder: Path, secret: str) -> Security:
    file = folder / f"key-{secret}"
    file.write_text(secret + "\n")
    return Security(key_file=str(file))


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        ("", "k" * 16, "one has a key and the other has none"),
        ("k" * 16, "", "one has a key and the other has none"),
        ("k" * 16, "l" * 16, "their keys differ"),
    ],
)  # fmt: skip
def test_who_does_not_have_the_key_is_not_let_in(tmp_path: Path, ours: str, theirs: str, why: str) -> None:
    one, other = (Tcp(key_file(tmp_path, secret) if secret else Security()) for secret in (ours, theirs))
    manifest, data = shard(100)
    complaints: list[str] = []
    with listening(other, echo, complaints) as address:
        region = other.lend(manifest, data)
        with pytest.raises(PeerError) as told, one.call(address):
            pass
        assert str(told.value) == f"the cache at {address} does not let us in: {why}; {SAME}"
        with pytest.raises(PeerError, match="does not let us in"), one.reader(address, region, manifest):
            pass
    assert complaints == [f"a cache at 127.0.0.1 was not let in: {why}; {SAME}"] * 2


def test_who_only_pretends_to_have_the_key_is_found_out(tmp_path: Path) -> None:
    """A stranger that takes our proof and claims to be content does not get our questions."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard: list[Any] = []

        def pretend(*answers: dict[str, str]) -> None:
            sock, _ = server.accept()
            with sock:
                for answer in answers:
                    heard.append(receive(sock))
                    send(sock, answer)
                heard.append(receive(sock))

        address = f"127.0.0.1:{server.getsockname()[1]}"
        ours = Tcp(key_file(tmp_path, "k" * 16))
        for answers, words in (
            (({"op": "challenge", "nonce": "1"}, {"op": "welcome", "proof": "0" * 64}), f"does not have our key; {SAME}"),
            (({"op": "welcome"},), f"has no key; {SAME}"),
        ):
            thread = threading.Thread(target=pretend, args=answers)
            thread.start()
            with pytest.raises(PeerError) as told, ours.call(address):
                pass
            thread.join()
            assert words in str(told.value)
            assert heard[-1] is None


def test_what_was_heard_cannot_be_said_again(tmp_path: Path) -> None:
    """Somebody records a whole greeting and says the same once more."""
    theirs = Tcp(key_file(tmp_path, "k" * 16))
    complaints: list[str] = []
    said: list[bytes] = []
    with listening(theirs, echo, complaints) as address, socket.create_server(("127.0.0.1", 0)) as tap:
        host, port = address.split(":")

        def record() -> None:
            here, _ = tap.accept()
            there = socket.create_connection((host, int(port)))
            with here, there:
                answers = threading.Thread(target=pump, args=(there, here, []))
                answers.start()
                pump(here, there, said)
                there.shutdown(socket.SHUT_WR)
                answers.join()

        def pump(source: socket.socket, sink: socket.socket, copy: list[bytes]) -> None:
            while data := source.recv(1 << 16):
                copy.append(data)
                sink.sendall(data)

        recording = threading.Thread(target=record)
        recording.start()
        with Tcp(key_file(tmp_path, "k" * 16)).call(f"127.0.0.1:{tap.getsockname()[1]}") as link:
            ask(link, address, {"op": "ask"}, "heard")
        recording.join()
        assert complaints == []
        with socket.create_connection((host, int(port)), timeout=5) as sock:
            sock.sendall(b"".join(said))
            sock.shutdown(socket.SHUT_WR)
            assert receive(sock)[0]["op"] == "challenge"  # type: ignore[index]
            assert receive(sock)[0]["op"] == "refused"  # type: ignore[index]
    assert complaints == [f"a cache at 127.0.0.1 was not let in: their keys differ; {SAME}"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot read the key file {}: No such file or directory"),
        ("short", "the key in {} has 5 bytes and needs 16 at least"),
    ],
)
def test_a_key_that_is_none(tmp_path: Path, content: str | None, sentence: str) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content)
    with pytest.raises(CannotRun) as told:
        Tcp(Security(key_file=str(file)))
    assert str(told.value).startswith(sentence.format(file))


def test_another_version_is_told_so() -> None:
    complaints: list[str] = []
    with listening(Tcp(), echo, complaints) as address:
        host, port = address.split(":")
        for hello, theirs in (
            ({"op": "hello", "version": 3, "kind": "link"}, 3),
            ({"op": "inventory", "job": "a release that knew no hello"}, None),
        ):
            with socket.create_connection((host, int(port)), timeout=5) as sock:
                send(sock, hello)
                got = receive(sock)
                assert got is not None
                sentence = f"one cache speaks version {PEER_VERSION} and the other {theirs}; use the same release on every node"
                assert got[0] == {"op": "refused", "why": sentence}
                assert receive(sock) is None
            assert complaints.pop() == f"a cache at 127.0.0.1 was not let in: {sentence}"


class Flaky(Tcp):
    """Ends each connection after some chunks, or gives one that is damaged on the wire."""

    def __init__(self, after: int, how: str) -> None:
        super().__init__()
        self.after, self.how = after, how
        self.sent: list[int] = []

    def _give(self, sock: socket.socket) -> None:
        for _ in range(self.after):
            asked = b""
            while len(asked) < FRAME.size:
                if not (more := sock.recv(FRAME.size - len(asked))):
                    return
                asked += more
            region, number = FRAME.unpack(asked)[3], FRAME.unpack(asked)[9]
            manifest, data, _ = self._lent[region]
            assert asked == chunk_frame(READ, region, manifest, number)
            start, stop = manifest.bounds(number)
            sock.sendall(chunk_frame(tcp.DATA, region, manifest, number))
            self.sent.append(number)
            wire = bytearray(data[start:stop])
            if self.how == "damages" and self.sent.count(number) == 1 and number % 3 == 0:
                wire[100] ^= 4
            sock.sendall(wire)
        if self.how == "resets":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            sock.close()


@pytest.mark.parametrize("how", ["ends", "resets"])
@pytest.mark.parametrize("after", [1, 3])
def test_a_broken_connection_costs_what_was_under_way(how: str, after: int) -> None:
    manifest, data = shard(16 * CHUNK_BYTES)
    there = Flaky(after, how)
    landing = Landing(manifest, memoryview(bytearray(len(data))))
    with listening(there, nobody, []) as address:
        landing.draw("b", partial(Tcp().reader, address, there.lend(manifest, data), manifest), 2, lambda: None)
    assert landing.data == data
    assert landing.given["b"] == 16
    # what was sent and not read yet may go with the connection and is sent once more
    assert len(there.sent) < 40


def test_what_is_damaged_on_the_wire_is_asked_for_again() -> None:
    manifest, data = shard(7 * CHUNK_BYTES)
    there = Flaky(100, "damages")
    landing = Landing(manifest, memoryview(bytearray(len(data))))
    with listening(there, nobody, []) as address:
        landing.draw("b", partial(Tcp().reader, address, there.lend(manifest, data), manifest), 2, lambda: None)
    assert (landing.data, sorted(there.sent)) == (data, [0, 0, 1, 2, 3, 3, 4, 5, 6, 6])
    assert len(landing.notes) == 3


def test_who_gives_nothing_is_given_up() -> None:
    manifest, data = shard(4 * CHUNK_BYTES)
    there = Flaky(0, "ends")
    landing = Landing(manifest, memoryview(bytearray(len(data))))
    with listening(there, nobody, []) as address:
        landing.draw("b", partial(Tcp().reader, address, there.lend(manifest, data), manifest), 2, lambda: None)
    assert landing.missing == {0, 1, 2, 3}
    assert there.sent == []


def test_a_silent_peer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "SILENCE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:  # it takes connections and says nothing: half-open
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(PeerError, match="broke off"), Tcp().call(address):
            pass


def test_a_peer_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "WHOLE_S", 0.5)
    ended = threading.Event()

    def trickle(server: socket.socket) -> None:
        sock, _ = server.accept()
        with sock, contextlib.suppress(OSError):
            receive(sock)
            sock.sendall(b"\x00\x00\x00\x40")
            while not ended.wait(0.1):
                sock.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=trickle, args=(server,))
        thread.start()
        with pytest.raises(PeerError, match=r"of 64 bytes came in 0\.5 s"), Tcp().call(f"127.0.0.1:{server.getsockname()[1]}"):
            pass
        ended.set()
        thread.join()


def test_a_neighbour_that_hangs_does_not_hold_up_one_that_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the connection and says nothing; all comes from the other, and nobody waits for the first."""
    manifest, data = shard(5 * CHUNK_BYTES)
    theirs = Tcp()
    room = bytearray(len(data))
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent, listening(theirs, lender(theirs, manifest, data), []) as address:
        holders = {"node1": f"127.0.0.1:{silent.getsockname()[1]}", "node2": address}

        def get() -> None:
            landing, notes = questions.get(Tcp(), holders, KEY, lambda found: memoryview(room))
            assert landing is not None
            assert (landing.missing, landing.given, notes) == (set(), {"node2": 5}, [])
            ended.set()

        thread = threading.Thread(target=get, daemon=True)
        thread.start()
        assert ended.wait(10)  # and not after `SILENCE_S`
    assert room == data


def test_two_holders_of_different_shards_are_not_mixed() -> None:
    one, other = shard(3 * CHUNK_BYTES, seed=1), shard(3 * CHUNK_BYTES, seed=2)
    first, second = Tcp(), Tcp()
    room = bytearray(3 * CHUNK_BYTES)
    with (
        listening(first, lender(first, *one), []) as here,
        listening(second, lender(second, *other), []) as there,
    ):
        landing, notes = questions.get(Tcp(), {"node1": here, "node2": there}, KEY, lambda found: memoryview(room))
    assert landing is not None
    assert room in (one[1], other[1])
    assert len(landing.given) == 1
    assert all("holds another shard under that name than the others" in note for note in notes)


# ---- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Security]:
    """Certificates of two authorities, made by openssl: ``certificates("ours")``."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the program openssl")
    folder = tmp_path_factory.mktemp("tls")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True)

    for name in ("ours", "strangers"):
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        run("req", "-x509", *curve, "-keyout", f"{name}-ca.key", "-out", f"{name}-ca.pem", "-subj", f"/CN={name}", "-days", "2")
        run("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", "/CN=node")
        signed_by = ("-CA", f"{name}-ca.pem", "-CAkey", f"{name}-ca.key", "-CAcreateserial")
        run("x509", "-req", "-in", f"{name}.csr", *signed_by, "-out", f"{name}.pem", "-days", "2")

    def made(name: str) -> Security:
        return Security("", str(folder / f"{name}.pem"), str(folder / f"{name}.key"), str(folder / f"{name}-ca.pem"))

    return made


def test_a_shard_goes_over_tls(certificates: Callable[[str], Security]) -> None:
    manifest, data = shard(5 * CHUNK_BYTES + 3)
    theirs = Tcp(certificates("ours"))
    room = bytearray(len(data))
    with listening(theirs, lender(theirs, manifest, data), []) as address:
        landing, notes = questions.get(Tcp(certificates("ours")), {"node1": address}, KEY, lambda found: memoryview(room))
    assert landing is not None
    assert (landing.missing, notes, room) == (set(), [], data)


@pytest.mark.parametrize(("ours", "theirs"), [("ours", "strangers"), ("ours", ""), ("", "ours")])
def test_who_shows_no_certificate_that_counts_is_not_let_in(
    certificates: Callable[[str], Security], ours: str, theirs: str
) -> None:
    one, other = (Tcp(certificates(name) if name else Security()) for name in (ours, theirs))
    complaints: list[str] = []
    answered: list[str] = []
    with listening(other, lambda link: answered.append("answered"), complaints) as address:
        with pytest.raises(PeerError) as told, one.call(address) as link:
            link.receive()
        assert address in str(told.value)
        assert "TLS" in str(told.value)
    assert answered == []
    assert len(complaints) <= 1


@pytest.mark.parametrize(
    ("security", "sentence"),
    [
        (Security(tls_cert="cert.pem"), "TLS between caches needs all of [checkpoint] tls_cert, tls_key and tls_ca"),
        (
            Security("", "cert.pem", "key.pem", "ca.pem"),
            "cannot use cert.pem, key.pem, ca.pem for TLS: No such file or directory",
        ),
    ],
)
def test_tls_files_that_are_none(security: Security, sentence: str) -> None:
    with pytest.raises(CannotRun) as told:
        Tcp(security)
    assert str(told.value) == sentence


# ---- strangers


def requests() -> Iterator[bytes]:
    manifest, _ = shard(2 * CHUNK_BYTES)
    good = bytearray(chunk_frame(READ, 1, manifest, 0))
    for at in range(0, FRAME.size, 3):
        bent = bytearray(good)
        bent[at] ^= 0xFF
        yield bytes(bent)


def test_a_request_that_is_bent_anywhere_gets_no_byte() -> None:
    manifest, data = shard(2 * CHUNK_BYTES)
    there = Tcp()
    there._lent[1] = manifest, data, tcp.Pace(0)
    with listening(there, nobody, []) as address:
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), timeout=5) as sock:
            send(sock, {"op": "hello", "version": PEER_VERSION, "kind": "reader", "nonce": "", "keyed": False})
            assert receive(sock) == ({"op": "welcome"}, [])
            for bent in requests():
                sock.sendall(bent)
                assert FRAME.unpack(tcp.exactly(sock, FRAME.size))[2] == tcp.GONE
            sock.sendall(chunk_frame(READ, 1, manifest, 1))
            assert tcp.exactly(sock, FRAME.size) == chunk_frame(tcp.DATA, 1, manifest, 1)
            assert tcp.exactly(sock, CHUNK_BYTES) == data[CHUNK_BYTES:]


def test_an_answer_that_is_bent_anywhere_writes_no_byte() -> None:
    manifest, data = shard(2 * CHUNK_BYTES)
    room = bytearray(len(data))
    good = bytearray(chunk_frame(tcp.DATA, 1, manifest, 0))
    for at in range(FRAME.size):
        bent = bytearray(good)
        bent[at] ^= 1
        ours, theirs = socket.socketpair()
        with ours, theirs:
            reader = tcp._SocketReader(ours, 1, manifest)
            theirs.sendall(bytes(bent) + b"\xee" * 100)
            with pytest.raises(PeerError):
                next(reader.read(iter([0]), memoryview(room)))
    assert room == bytes(len(room))
