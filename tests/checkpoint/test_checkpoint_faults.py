"""What a broken machine, a broken neighbour, a stranger or a mistyped flag does to a cache: one sentence, and nothing wrong."""

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import questions
from checkpoint.client import Client
from checkpoint.errors import CannotRun, CheckpointError, PeerError
from checkpoint.landing import Landing
from checkpoint.manifest import Generation, Key, decode, made_of
from checkpoint.protocol import DATA, FRAME, chunk_frame
from checkpoint.tcp import Tcp
from checkpoint.transport import Link

STATE = {"w": torch.arange(1_000_000.0), "word": "x"}


def saved(client: Client, step: int, *levels: str) -> str:
    handle = client.save(step, STATE | {"step": step})
    for level in levels or ("cached", "replicated", "persistent"):
        handle.wait(level, 20)
    return handle.generation


def intact(restored: Any, step: int) -> bool:
    return bool(restored.step == step == restored.state["step"] and torch.equal(restored.state["w"], STATE["w"]))


def slow(*names: str) -> list[Any]:
    """Return parameters for `make test-slow`: each starts caches of its own."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def flip(path: Path, at: int = 2_000_000) -> None:
    """Flip a bit of a file, or of a cache's memory through its descriptor."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def written(storage: Path, pattern: str = "*.shard") -> list[Path]:
    return sorted(storage.rglob(pattern))


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A small file system of its own; needs root."""
    folder.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# ---- at the start


def command(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    code = "import sys; from eagleeye.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, "cache", *arguments],
        cwd=folder, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def test_a_second_cache_on_a_node(cluster: Any, tmp_path: Path) -> None:
    node = cluster(1)[0]
    done = command(tmp_path, "--port", "0", "--run-dir", node.run_dir)
    assert (done.returncode, done.stdout) == (3, "")
    sentence = f"a cache (pid {node.pid}) runs in {node.run_dir} already; one serves all jobs of a node"
    assert done.stderr == f"eagleeye cache: {sentence}\n"
    with node.client() as client:
        saved(client, 1, "cached")


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = command(tmp_path, "--address", "127.0.0.1", "--port", str(port), "--run-dir", "run")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"eagleeye cache: the cache cannot listen on 127.0.0.1, port {port}: Address already in use")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--peers", "node0"], 2, "'node0' is no peer; write NODE=HOST:PORT,NODE=HOST:PORT"),
        (["--port", "70000"], 2, "port 70000 does not exist; use 0 to 65535"),
        (["--memory-bytes", "many"], 2, "many"),
        (["--replicas", "0"], 2, "replicas and connections must be at least 1"),
        (["--domain", "rack1//psu"], 2, "'rack1//psu' is no failure domain; write RACK or RACK/POWER"),
        (["--key-file", "nowhere"], 3, "cannot read the key file nowhere: No such file or directory"),
        (["--address", "no.such.host.invalid"], 3, "the cache cannot listen on no.such.host.invalid, port 0: "),
        (["--address", "x" * 300], 3, "the cache cannot listen on x"),
        (["--run-dir", "file/run"], 3, "the cache cannot use file/run: [Errno 20] Not a directory: 'file/run'; give another"),
        (["--run-dir", "file"], 3, "the cache cannot use file: [Errno 17] File exists: 'file'; give another --run-dir or --port"),
        (["list"], 3, "nothing can be listed in run: [Errno 2] there is no index: 'run/index.db'; name the cache's"),
    ],
)  # fmt: skip
def test_what_is_mistyped_is_one_sentence(tmp_path: Path, arguments: list[str], code: int, sentence: str) -> None:
    (tmp_path / "file").touch()
    done = command(tmp_path, "--port", "0", "--run-dir", "run", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("eagleeye cache: ")


def test_a_run_folder_on_a_read_only_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "ro", "size=1m,ro") as folder:
        done = command(tmp_path, "--port", "0", "--run-dir", str(folder / "run"))
    assert done.returncode == 3
    assert f"the cache cannot use {folder}/run: [Errno 30] Read-only file system" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_run_folder_with_a_very_long_name(cluster: Any) -> None:
    long = "/".join(["x" * 100] * 3)
    node = cluster(1, "--run-dir", long)[0]
    with Client("job", run_dir=str(node.folder / long)) as client:
        saved(client, 1, "cached", "persistent")


def test_the_list_of_what_is_held_also_when_no_cache_runs(cluster: Any, tmp_path: Path) -> None:
    nodes = cluster(2)
    with nodes[0].client("llama") as client:
        saved(client, 7)
        head, row = command(tmp_path, "list", "--run-dir", nodes[0].run_dir).stdout.splitlines()
        assert head.split() == [
            "job", "step", "rank", "saved", "on", "bytes", "memory", "copy", "on", "storage", "to", "do", "trouble",
        ]  # fmt: skip
        assert row.split() == ["llama", "7", "0", "node0", "4000000", "yes", "node1", "yes", "-", "-"]
    for end in (nodes[0].kill, lambda: nodes[1].end()):
        end()
    for node, replica in zip(nodes.nodes, ("node1", "-"), strict=True):
        done = command(tmp_path, "list", "--run-dir", node.run_dir)
        assert done.stderr == ""
        assert done.stdout.splitlines()[1].split()[6] == replica


@pytest.mark.parametrize("how", ["garbage", *slow("truncated", "newer")])
def test_a_broken_index_is_moved_aside(cluster: Any, how: str) -> None:
    node = cluster(1)[0]
    with node.client() as client:
        saved(client, 1, "cached", "persistent")
    node.kill()
    index = Path(node.run_dir) / "index.db"
    if how == "newer":
        code = "import sqlite3, sys; d = sqlite3.connect(sys.argv[1]); d.execute('PRAGMA user_version=99'); d.close()"
        subprocess.run([sys.executable, "-c", code, str(index)], check=True)
    else:
        index.write_bytes(b"no database at all " * 1000 if how == "garbage" else index.read_bytes()[:5000])
        for suffix in ("-wal", "-shm"):
            Path(f"{index}{suffix}").unlink(missing_ok=True)
    node.start().ready()
    sentence = f"{index} was no usable index and lies in {index.with_suffix('.broken')} now; a new one is made"
    assert (sentence in node.said) == (how != "truncated")  # its first page is a whole, empty database
    with node.client() as client:
        restored = client.load()
        assert intact(restored, 1)
        saved(client, 2, "cached", "persistent")


def test_a_removed_index_disturbs_nothing(cluster: Any) -> None:
    node = cluster(1)[0]
    with node.client() as client:
        saved(client, 1, "cached", "persistent")
        for path in Path(node.run_dir).glob("index.db*"):
            path.unlink()
        saved(client, 2, "cached", "persistent")
        assert intact(client.load(), 2)
    assert node.end() == 0
    assert "Traceback" not in node.said


# ---- storage


def test_a_full_disk_stops_nothing_and_is_used_when_it_has_room(cluster: Any, tmp_path: Path, poll: Any) -> None:
    with mounted(tmp_path / "small", "size=10m") as folder:  # two generations fit
        (folder / "rubbish").write_bytes(b"x" * (9 << 20))
        nodes = cluster(2, storage=folder)
        with nodes[0].client() as client:
            handles = [client.save(step, STATE | {"step": step}) for step in (1, 2, 3)]
            handles[-1].wait("replicated", 10)
            sentence = f"store of step 3, rank 0: storage {folder}: No space left on device; it is tried again"
            poll(lambda: sentence in nodes[0].said)
            assert not handles[-1].persistent.done()
            assert list(folder.rglob(".writing-*")) == []
            (folder / "rubbish").unlink()
            handles[-1].wait("persistent", 30)
            # three may be kept, and only two have room: older ones make room for the new
            for step in (4, 5):
                client.save(step, STATE | {"step": step}).wait("persistent", 30)
        for node in nodes.nodes:
            node.kill()
        nodes.start()
        with nodes[1].client() as client:
            assert intact(client.load(), 5)
        assert "Traceback" not in nodes[0].said


def test_memory_is_bounded_while_storage_takes_nothing(cluster: Any, tmp_path: Path, poll: Any) -> None:
    with mounted(tmp_path / "full", "size=64k") as folder:
        nodes = cluster(2, "--memory-bytes", str(48 << 20), storage=folder)
        clients = [nodes[rank].client("job", rank, 2, timeout_s=5.0) for rank in (0, 1)]
        with contextlib.ExitStack() as stack:
            for client in clients:
                stack.enter_context(client)._connected(10.0)
                client._start = (7, "00000007")
            for step in range(30):
                for client in clients:
                    client.save(step, STATE).wait("replicated", 10)
        poll(lambda: "No space left on device" in nodes[0].said and "No space left on device" in nodes[1].said)


@pytest.mark.parametrize("what", ["file", "read-only"])
def test_storage_that_cannot_be_written(cluster: Any, tmp_path: Path, poll: Any, what: str) -> None:
    with contextlib.ExitStack() as stack:
        if what == "file":
            storage = tmp_path / "file"
            storage.touch()
            sentence = f"storage {storage}: Not a directory"
        else:
            storage = stack.enter_context(mounted(tmp_path / "ro", "size=1m,ro"))
            sentence = f"storage {storage}: Read-only file system"
        nodes = cluster(2, storage=storage)
        with nodes[0].client() as client:
            handle = client.save(1, STATE | {"step": 1})
            handle.wait("replicated", 10)
            poll(lambda: f"store of step 1, rank 0: {sentence}; it is tried again" in nodes[0].said)
            assert not handle.persistent.done()
            with pytest.raises(CheckpointError) as told:
                handle.wait("persistent", 1.0)
            assert str(told.value) == f"step 1 is not persistent after 1 s: store of step 1, rank 0: {sentence}"
            restored = client.load()
        assert intact(restored, 1)
        assert nodes[0].said.count("store of step 1") == 1
        assert "Traceback" not in nodes[0].said


def test_nothing_is_started_anew_while_somebody_who_may_know_cannot_be_asked(cluster: Any, tmp_path: Path) -> None:
    nodes = cluster(2, storage=None)
    with nodes[0].client() as client:
        saved(client, 5, "replicated")
    for node in nodes.nodes:
        node.kill()
    nodes[0].start().ready()
    with nodes[0].client() as client, pytest.raises(CheckpointError) as told:
        client.load()
    assert re.fullmatch(
        r"no checkpoint of job job was found, but not all could be asked \(node1: the cache at 127\.0\.0\.1:\d+ does not answer "
        r"\(\[Errno 111\] Connection refused\)\); bring them back, or leave them out to start anew",
        str(told.value),
    )


def test_a_job_that_cannot_be_restored_is_not_started_anew(cluster: Any, capfd: pytest.CaptureFixture[str]) -> None:
    nodes = cluster(1)
    with nodes[0].client() as client:
        saved(client, 5, "cached", "persistent")
    (shard,) = written(nodes.storage)
    flip(shard)
    nodes[0].kill()
    nodes[0].start().ready()
    for _ in range(2):  # nor at the next try
        with nodes[0].client() as client, pytest.raises(CheckpointError) as told:
            client.load()
        assert str(told.value).startswith(
            "job job had a checkpoint of step 5 and nothing can be restored (step 5 of rank 0 cannot be "
        )
        assert "the bytes from 0 to 4000000 are not those that were saved" in str(told.value)


@pytest.mark.parametrize(
    "what", ["flipped shard", "truncated manifest", *slow("truncated shard", "flipped manifest", "no shard", "empty")]
)
def test_damage_in_storage_leads_to_the_generation_before(cluster: Any, what: str) -> None:
    nodes = cluster(1)
    with nodes[0].client() as client:
        saved(client, 1, "cached", "persistent")
        newest = saved(client, 2, "cached", "persistent")
    nodes[0].kill()
    shard, manifest = written(nodes.storage / "job" / newest)[0], written(nodes.storage / "job" / newest, "*.json")[0]
    match what:
        case "flipped shard":
            flip(shard)
        case "flipped manifest":
            flip(manifest, manifest.stat().st_size // 2)
        case "truncated shard":
            os.truncate(shard, 100)
        case "truncated manifest":
            os.truncate(manifest, 100)
        case "no shard":
            shard.unlink()
        case "empty":
            os.truncate(shard, 0)
            os.truncate(manifest, 0)
    nodes[0].start().ready()
    with nodes[0].client() as client:
        restored = client.load()
        assert intact(restored, 1)
        saved(client, 3, "cached", "persistent")
        assert intact(client.load(), 3)
    assert "Traceback" not in nodes[0].said


def test_rubbish_in_storage_disturbs_nothing(cluster: Any) -> None:
    nodes = cluster(1)
    with nodes[0].client() as client:
        saved(client, 1, "cached", "persistent")
    nodes[0].kill()
    job = nodes.storage / "job"
    (job / "latest").write_bytes(b"\x00garbage")
    (job / "9999999999-000000000001-abcdef00").touch()
    (job / "9999999999-000000000002-abcdef00").mkdir()
    (job / "9999999999-000000000002-abcdef00" / "rank-00000.json").mkdir()
    (job / "9999999999-000000000003-abcdef00").symlink_to("nowhere")
    (job / "notes.txt").write_text("mine")
    (job / "mine").mkdir()
    (next(job.glob("*-000000000001-*/rank-00000.json")).parent / "why.txt").write_text("mine")
    nodes[0].start().ready()
    with nodes[0].client() as client:
        assert intact(client.load(), 1)
        for step in range(2, 7):
            saved(client, step, "cached", "persistent")
        assert intact(client.load(), 6)
    assert (job / "notes.txt").read_text() == "mine"
    assert (job / "mine").is_dir()
    # its generation was removed, the stranger in it was not
    (why,) = job.glob("*/why.txt")
    assert [path.name for path in why.parent.iterdir()] == ["why.txt"]
    assert "Traceback" not in nodes[0].said


def test_storage_keeps_the_newest_and_nothing_else(cluster: Any, poll: Any) -> None:
    nodes = cluster(1)
    with nodes[0].client() as client:
        kept = [saved(client, step, "cached", "persistent") for step in range(8)][-3:]
    poll(lambda: (nodes.storage / "job" / "latest").read_text().strip() == kept[-1])
    poll(lambda: sorted(path.name for path in (nodes.storage / "job").iterdir()) == [*kept, "latest"])
    assert sorted(path.name for path in (nodes.storage / "job" / kept[0]).iterdir()) == [
        "committed", "rank-00000.json", "rank-00000.shard",
    ]  # fmt: skip


def test_sigterm_finishes_what_storage_wants(cluster: Any) -> None:
    nodes = cluster(1)
    state = {"w": torch.ones(30_000_000), "step": 1}
    with nodes[0].client() as client:
        client.save(1, state).wait("cached", 10)
        assert nodes[0].end() == 0
    assert not (Path(nodes[0].run_dir) / "cache.sock").exists()
    assert nodes[0].said == ""
    nodes[0].start().ready()
    with nodes[0].client() as client:
        restored = client.load()
    assert (restored.step, restored.source) == (1, "storage")
    assert (restored.state["w"] == 1).all()


# ---- memory and neighbours


def test_bits_that_flip_in_this_nodes_memory(cluster: Any, poll: Any) -> None:
    nodes = cluster(2)
    with nodes[0].client() as client:
        saved(client, 4)
    for slab in nodes[0].slabs():
        with suppress(FileNotFoundError):  # it was let go of meanwhile
            flip(slab)
    with nodes[0].client() as client:
        restored = client.load()
    assert intact(restored, 4)
    assert (restored.source, restored.holder) == ("neighbour", "node1")
    assert restored.notes == ("node0: the bytes from 0 to 4000000 are not those that were saved",)
    with nodes[0].client() as client:  # the good copy took the place of the bad one
        again = client.load()
    assert intact(again, 4)
    assert (again.source, again.notes) == ("local", ())


def test_bits_that_flip_in_a_neighbours_memory(cluster: Any) -> None:
    nodes = cluster(3)
    with nodes[0].client() as client:
        saved(client, 4)
    nodes[0].kill()
    for slab in nodes[1].slabs():
        flip(slab)
    with nodes[2].client() as client:
        restored = client.load()
    assert intact(restored, 4)
    assert restored.source == "storage"
    assert restored.notes[-1] == "node1: the bytes from 0 to 4000000 are not those that were saved"


class BreaksOff(Tcp):
    """Gives the first half of a chunk."""

    def _give(self, sock: socket.socket) -> None:
        asked = sock.recv(FRAME.size)
        manifest, data, _ = self._lent[FRAME.unpack(asked)[3]]
        sock.sendall(chunk_frame(DATA, FRAME.unpack(asked)[3], manifest, 0))
        sock.sendall(data[: len(data) // 2])
        sock.shutdown(socket.SHUT_RDWR)


class Evil(threading.Thread):
    """A neighbour that speaks the protocol and lies."""

    def __init__(self, how: str) -> None:
        super().__init__(daemon=True)
        self.how = how
        self.transport = BreaksOff() if how == "breaks off" else Tcp()
        self.server = socket.create_server(("127.0.0.1", 0))
        self.held: dict[str, tuple[str, bytes]] = {}
        self.served = 0
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.getsockname()[1]}"

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.server.accept()
                threading.Thread(target=self.attend, args=(sock,), daemon=True).start()

    def attend(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, CheckpointError):
            if self.how == "http" and len(self.held) == 3:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                return
            self.transport.attend(sock, self.answer)

    def answer(self, link: Link) -> None:
        while (message := link.receive()) is not None:
            self.tell(link, message)

    def tell(self, link: Link, message: dict[str, Any]) -> None:
        newer = f"{max((int(held[:10]) for held in self.held), default=0) + 1:010d}-{1:012d}-abcdef00"
        match message["op"]:
            case "put":
                manifest = decode(message["manifest"])
                landing = Landing(manifest, memoryview(bytearray(manifest.nbytes)))
                address = f"{link.host}:{message['port']}"
                landing.draw("them", lambda: self.transport.reader(address, message["region"], manifest), 1, lambda: None)
                self.held[str(manifest.key.generation)] = (message["manifest"], bytes(landing.data))
                link.send({"op": "held"})
            case "get":
                self.served += 1
                text, data = next(iter(self.held.values()))
                manifest = decode(text)
                match self.how:
                    case "flips a bit":
                        data = data[:77] + bytes([data[77] ^ 1]) + data[78:]
                    case "another shard":
                        data = b"other"
                        manifest = made_of(Key("job", Generation(1, 1, "abcdef00"), 0), 1, "evil", {}, memoryview(data))
                        text = manifest.encode()
                    case "no manifest":
                        text = text[:-20]
                link.send({"op": "shard", "manifest": text, "region": self.transport.lend(manifest, memoryview(data))})
            case "inventory":
                shards: Any = [[generation, 0, 1, "node0"] for generation in self.held]
                match self.how:
                    case "invents":
                        shards += [[newer, 0, 1, "node0"]]
                    case "bad generation":
                        shards = [["nonsense", 0, 1, "node0"]]
                    case "bad types":
                        shards = [[newer, "zero", {}, None]]
                    case "no list":
                        shards = 7
                told = {"op": "inventory", "attempt": 0, "node": "evil", "storing": [], "existing": [], "shards": shards}
                link.send(told if self.how != "nothing" else {"op": "inventory"})


@pytest.fixture
def evil() -> Iterator[Any]:
    made: list[Evil] = []

    def start(how: str) -> Evil:
        made.append(Evil(how))
        return made[-1]

    yield start
    for one in made:
        one.server.shutdown(socket.SHUT_RDWR)
        one.server.close()
        one.join()


@pytest.mark.parametrize("how", ["flips a bit", "invents", *slow("breaks off", "another shard", "no manifest")])
def test_a_neighbour_that_lies_about_a_shard(cluster: Any, evil: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = cluster(1)
    liar = evil(how)
    monkeypatch.setenv("EAGLEEYE_CHECKPOINT__PEERS", f"node1={liar.address}")
    with nodes[0].client() as client:
        saved(client, 3)
    nodes[0].kill()
    nodes[0].start().ready()
    with nodes[0].client() as client:
        restored = client.load()
    assert intact(restored, 3)
    assert liar.served >= 1
    if how != "invents":
        assert restored.source == "storage"
        assert restored.notes[0].startswith("node1: ")
    else:
        assert restored.source == "neighbour"
        assert restored.notes[0].startswith("step 1 of rank 0 cannot be restored: node1: ")
    assert "Traceback" not in nodes[0].said


@pytest.mark.parametrize("how", ["bad generation", *slow("bad types", "no list", "nothing", "http")])
def test_a_neighbour_that_talks_nonsense(cluster: Any, evil: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = cluster(1)
    liar = evil(how)
    monkeypatch.setenv("EAGLEEYE_CHECKPOINT__PEERS", f"node1={liar.address}")
    with nodes[0].client() as client:
        for step in (1, 2, 3):
            saved(client, step)
        restored = client.load()
    assert intact(restored, 3)
    assert len(restored.notes) == 1
    assert restored.notes[0].startswith("not reached: node1: what ")
    assert "Traceback" not in nodes[0].said


def test_strangers_at_the_door(three: Any) -> None:
    port = three[0].port
    frame = struct.Struct(">I")
    deep = b'{"op":' + b"[" * 100_000
    for words in (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00",
        b"",
        frame.pack(0),
        frame.pack(5) + b"12",
        frame.pack(2) + b"{}",
        frame.pack(4) + b"null",
        frame.pack(4) + b"\xff\xfe\xfd\xfc",
        frame.pack(len(deep)) + deep,
        *(
            frame.pack(len(body)) + body
            for body in (
                b'{"op": "delete"}', b'{"op": "inventory"}', b'{"op": "inventory", "attempt": 0, "job": ["a"]}',
                b'{"op": "put", "manifest": 1}', b'{"op": "get", "job": "j", "generation": "x", "rank": 0}',
                b'{"op": "get", "job": "j", "generation": 7, "rank": 0}',
            )
        ),
        *(
            frame.pack(len(hello)) + hello + more
            for hello in (b'{"op": "hello", "version": 2, "kind": "link", "nonce": "", "keyed": false}',)
            for more in (b"", b"\xff" * 200, frame.pack(15) + b'{"op": "delete"', *(
                frame.pack(len(body)) + body
                for body in (
                    b'{"op": "delete"}', b'{"op": "inventory"}', b'{"op": "inventory", "attempt": 0, "job": ["a"]}',
                    b'{"op": "put", "manifest": 1, "region": 1}', b'{"op": "put", "manifest": "{}", "region": -1}',
                    b'{"op": "get", "job": "j", "generation": "x", "rank": 0}',
                    b'{"op": "get", "job": "j", "generation": 7, "rank": 0}',
                )
            ))
        ),
        *(
            frame.pack(len(hello)) + hello + more
            for hello in (b'{"op": "hello", "version": 2, "kind": "reader", "nonce": "", "keyed": false}',)
            for more in (b"", b"\xff" * FRAME.size, b"\x00" * FRAME.size, b"EECC")
        ),
    ):  # fmt: skip
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            sock.sendall(words)
            sock.shutdown(socket.SHUT_WR)  # it may have hung up already
            while sock.recv(4096):
                pass
    with three[0].client("strangers") as client:
        saved(client, 1)
        assert intact(client.load(), 1)
    assert "Traceback" not in three[0].said
    assert three[0].said.count("what was received is no message of a checkpoint cache") == 1


def test_a_put_that_breaks_off_or_lies_is_not_kept(three: Any, lending: Any) -> None:
    data = bytes(range(256)) * 1000
    key = Key("lies", Generation(5, 5, "abcdef00"), 0)
    manifest = made_of(key, 1, "node7", {}, memoryview(data))
    address = f"127.0.0.1:{three[0].port}"
    for ours, lent in ((BreaksOff(), data), (Tcp(), data[:-1] + b"x")):
        with lending(ours) as port, pytest.raises(PeerError):
            questions.put(ours, address, port, manifest, memoryview(lent))
        assert questions.inventory(ours, address, "lies").copies == []
    ours = Tcp()
    with lending(ours) as port:
        questions.put(ours, address, port, manifest, memoryview(data))
        questions.put(ours, address, port, manifest, memoryview(data))
        other = made_of(key, 1, "node7", {}, memoryview(b"other"))
        with pytest.raises(PeerError, match="refused: it holds another shard under that name; every job needs a name of its own"):
            questions.put(ours, address, port, other, memoryview(b"other"))
    assert [copy.generation for copy in questions.inventory(ours, address, "lies").copies] == [key.generation]
    room = bytearray(len(data))
    landing, notes = questions.get(ours, {"node0": address}, key, lambda found: memoryview(room))
    assert landing is not None
    assert (landing.manifest, landing.missing, notes, room) == (manifest, set(), [], data)


def test_two_nodes_of_one_name(cluster: Any, poll: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = cluster(1)[0], cluster(1)[0]
    monkeypatch.setenv("EAGLEEYE_CHECKPOINT__PEERS", f"node0=127.0.0.1:{one.port},node1=127.0.0.1:{two.port}")
    with one.client() as client:
        handle = client.save(1, STATE)
        handle.wait("persistent", 10)
        sentence = "it is called node0, too; every node needs a name of its own; it is tried again"
        poll(lambda: sentence in one.said)
        assert not handle.replicated.done()


def test_too_little_memory(cluster: Any) -> None:
    node = cluster(1, "--memory-bytes", "10MiB")[0]
    with node.client(timeout_s=0.5) as client:
        with pytest.raises(CannotRun) as told:
            client.save(1, {"w": torch.ones(3_000_000)})
        assert str(told.value) == (
            "the cache can never hold a save of 12000000 bytes: one generation of this node's 1 rank takes "
            "12000000 bytes and the cache may take 10485760; raise [checkpoint] memory_bytes to 48000000, or to 24000000 at least"
        )
        saved(client, 1, "cached", "persistent")


def test_a_save_waits_for_memory_and_goes_on_when_there_is_some(cluster: Any, tmp_path: Path) -> None:
    """Two generations and the one that is being saved: what a third one needs is free once the first is surplus."""
    node = cluster(1, "--memory-bytes", "13MiB")[0]
    with node.client(timeout_s=10.0) as client:
        for step in range(10):
            saved(client, step, "cached")
        assert intact(client.load(), 9)


def test_a_cache_that_stands_still_is_one_sentence(cluster: Any) -> None:
    nodes = cluster(1)
    with nodes[0].client(timeout_s=0.3) as client:
        saved(client, 1, "cached", "persistent")
        os.kill(nodes[0].pid, signal.SIGSTOP)
        client.save(2, STATE)  # its memory was waiting
        with pytest.raises(CannotRun, match="the cache does not answer; is it stopped"):
            client.save(3, STATE).wait()
        os.kill(nodes[0].pid, signal.SIGCONT)
        saved(client, 9, "cached", "persistent")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_below_the_log_stops_no_replication(tmp_path: Path) -> None:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [server.getsockname()[1] for server in held]
    for server in held:
        server.close()
    peers = f"a=127.0.0.1:{ports[0]},b=127.0.0.1:{ports[1]}"

    def start(node: str, port: int) -> "subprocess.Popen[bytes]":
        words = [
            "--node",
            node,
            "--address",
            "127.0.0.1",
            "--port",
            str(port),
            "--run-dir",
            str(tmp_path / node),
            "--peers",
            peers,
        ]
        with open("/dev/full", "wb") as full:
            verb = "from eagleeye.cli import main; raise SystemExit(main())"
            return subprocess.Popen([sys.executable, "-c", verb, "cache", *words], stdout=full, stderr=full)

    processes = [start("a", ports[0])]
    try:
        with Client("job", 0, 1, run_dir=str(tmp_path / "a")) as client:
            client._connected(20.0)
            client._start = (7, "00000007")
            first = client.save(1, STATE)
            first.wait("cached", 10)
            time.sleep(1.0)  # by now the other node was looked for, and its absence could not be told
            processes.append(start("b", ports[1]))
            client.save(2, STATE).wait("replicated", 30)
    finally:
        for process in processes:
            process.kill()
            process.wait()
