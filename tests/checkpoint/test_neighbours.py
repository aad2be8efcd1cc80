"""Several copies, in several racks, under a key: real caches that lose each other, and what is left of what they held."""

import contextlib
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import questions
from checkpoint.errors import CannotRun, PeerError
from checkpoint.manifest import CHUNK_BYTES, Generation, Key, made_of
from checkpoint.memory import Slab
from checkpoint.protocol import FRAME
from checkpoint.server import Cache, Settings
from checkpoint.tcp import Security, Tcp

STATE = {"w": torch.arange(4_500_000.0)}  # 5 chunks


def saved(client: Any, step: int, *levels: str) -> str:
    handle = client.save(step, STATE | {"step": step})
    for level in levels or ("cached", "replicated"):
        handle.wait(level, 30)
    return str(handle.generation)


def intact(restored: Any, step: int) -> bool:
    return bool(restored.step == step == restored.state["step"] and torch.equal(restored.state["w"], STATE["w"]))


def with_racks(cluster: Any, racks: list[str], *flags: str, **options: Any) -> Any:
    """Start caches of which each knows the rack of all."""
    nodes = cluster(len(racks), *flags, peers=False, **options)
    peers = ",".join(f"{node.name}=127.0.0.1:{node.port}@{rack}" for node, rack in zip(nodes.nodes, racks, strict=True))
    for node in nodes.nodes:
        node.kill()
        node.flags += ["--peers", peers]
        node.start().ready()
    return nodes


def holders(nodes: Any, job: str = "job") -> dict[str, list[int]]:
    """Return which steps lie in whose memory."""
    return {
        node.name: sorted(c.generation.step for c in questions.inventory(Tcp(), f"127.0.0.1:{node.port}", job).copies)
        for node in nodes.nodes
        if node.process.poll() is None
    }


def flip(node: Any, at: int) -> None:
    """Flip a bit of the shard in a cache's memory."""
    for path in node.slabs():
        # the cache may let go of one meanwhile that nobody reads
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
            if os.fstat(file.fileno()).st_size >= 18_000_000:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 0x10]))


def test_two_copies_lie_in_two_racks_and_two_nodes_may_die(cluster: Any) -> None:
    nodes = with_racks(cluster, ["r0", "r0", "r1", "r2"], "--replicas", "2", storage=None)
    with nodes[0].client() as client:
        saved(client, 1)
    assert holders(nodes) == {"node0": [1], "node1": [], "node2": [1], "node3": [1]}
    nodes[0].kill()
    nodes[2].kill()
    with nodes[1].client(timeout_s=5) as client:
        restored = client.load()
    assert intact(restored, 1)
    assert (restored.source, restored.holder) == ("neighbour", "node3")


def test_each_holder_gives_what_is_good_of_its_copy(cluster: Any) -> None:
    """Both copies are damaged, each elsewhere; together they are whole."""
    nodes = with_racks(cluster, ["r0", "r1", "r2", "r3"], "--replicas", "2", storage=None)
    with nodes[0].client() as client:
        saved(client, 1)
    nodes[0].kill()
    flip(nodes[1], 100)
    flip(nodes[2], 2 * CHUNK_BYTES + 100)
    with nodes[3].client(timeout_s=5) as client:
        restored = client.load()
    assert intact(restored, 1)
    assert restored.source == "neighbour"
    assert set(restored.holder.split(" and ")) == {"node1", "node2"}
    bad = [f"the bytes from {at} to {at + CHUNK_BYTES} are not those that were saved" for at in (0, 2 * CHUNK_BYTES)]
    told = [note for note in restored.notes if "not those" in note]
    # who was asked for his bad chunk is named; the other may have been faster
    assert set(told) <= {f"node1: {bad[0]}", f"node2: {bad[1]}"}


def test_what_no_holder_has_comes_from_storage_and_all_are_named(cluster: Any, poll: Any) -> None:
    nodes = with_racks(cluster, ["r0", "r1", "r2", "r3"], "--replicas", "2")
    with nodes[0].client() as client:
        generation = saved(client, 1, "cached", "replicated", "persistent")
    poll((nodes.storage / "job" / generation / "committed").exists)
    nodes[0].kill()
    flip(nodes[1], 100)
    flip(nodes[2], 100)
    with nodes[3].client(timeout_s=5) as client:
        restored = client.load()
    assert intact(restored, 1)
    assert restored.source == "storage"
    assert "storage" in restored.holder.split(" and ")
    bad = f"the bytes from 0 to {CHUNK_BYTES} are not those that were saved"
    assert {note for note in restored.notes if "not those" in note} == {f"node1: {bad}", f"node2: {bad}"}


def test_every_rank_has_its_copy_in_the_other_rack(cluster: Any, unheard: Any) -> None:
    nodes = with_racks(cluster, ["r0", "r0", "r1", "r1"], storage=None)
    ranks = [node.client(rank=rank, world_size=4) for rank, node in enumerate(nodes.nodes)]
    for rank in ranks:
        rank._agreement = unheard
    for handle in [rank.save(1, STATE | {"step": 1}) for rank in ranks]:
        handle.wait("replicated", 30)
    told = {node.name: questions.inventory(Tcp(), f"127.0.0.1:{node.port}", "job").copies for node in nodes.nodes}
    held = {name: sorted(copy.rank for copy in copies) for name, copies in told.items()}
    assert held == {"node0": [0, 2], "node1": [1, 3], "node2": [0, 2], "node3": [1, 3]}


@pytest.mark.slow
def test_a_holder_that_lost_its_memory_gets_the_copy_again(cluster: Any, poll: Any) -> None:
    """Nothing is saved meanwhile, and its address is the same."""
    nodes = cluster(2, storage=None)
    with nodes[0].client() as client:
        saved(client, 1)
        nodes[1].kill()
        nodes[1].start().ready()
        assert holders(nodes)["node1"] == []
        poll(lambda: holders(nodes)["node1"] == [1], 40)


def test_who_has_the_key_holds_copies_and_who_has_none_is_told(cluster: Any, poll: Any, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789abcdef\n")
    nodes = cluster(3, storage=None)
    for node in nodes.nodes[:2]:
        node.kill()
        node.flags += ["--key-file", str(key)]
        node.start().ready()
    with nodes[0].client() as client:
        saved(client, 1)
    ours = Tcp(Security(key_file=str(key)))
    assert [c.generation.step for c in questions.inventory(ours, f"127.0.0.1:{nodes[1].port}", "job").copies] == [1]
    sentence = "one has a key and the other has none; give every node the same [checkpoint] key_file"
    with pytest.raises(PeerError, match="does not let us in: one has a key"):
        questions.inventory(Tcp(), f"127.0.0.1:{nodes[1].port}", "job")
    poll(lambda: f"a cache at 127.0.0.1 was not let in: {sentence}" in nodes[2].said)
    assert "Traceback" not in "".join(node.said for node in nodes.nodes)


class Stingy(Tcp):
    """Lets go of so many chunks, and then of none until it is given more."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0
        self.sent: list[int] = []
        self._counting = threading.Lock()

    def _give(self, sock: socket.socket) -> None:
        sock.settimeout(5)
        while head := sock.recv(FRAME.size, socket.MSG_WAITALL):
            region, number = FRAME.unpack(head)[3], FRAME.unpack(head)[9]
            with self._counting:
                if not self.left:
                    return
                self.left -= 1
                self.sent.append(number)
            manifest, data, _ = self._lent[region]
            start, stop = manifest.bounds(number)
            # what is said is whole even when the connection ends next
            sock.sendall(answer(head) + bytes(data[start:stop]))


def answer(asked: bytes) -> bytes:
    fields = list(FRAME.unpack(asked))
    fields[2] = 2
    return FRAME.pack(*fields)


def test_a_put_that_broke_off_goes_on_where_it_was(three: Any, lending: Any) -> None:
    data = memoryview(bytes(range(256)) * 16384 * 8)
    key = Key("resumed", Generation(5, 5, "abcdef00"), 0)
    manifest = made_of(key, 1, "node7", {}, data)
    address = f"127.0.0.1:{three[0].port}"
    ours = Stingy()
    with lending(ours) as port:
        ours.left = 5
        with pytest.raises(PeerError, match=f"the cache at {address} answers corrupt: node7: "):
            questions.put(ours, address, port, manifest, data)
        assert questions.inventory(ours, address, "resumed").copies == []
        first = list(ours.sent)
        assert len(first) == 5
        ours.left = 100
        questions.put(ours, address, port, manifest, data)
    # a chunk that was under way when the connection ended may have been lost with it, no other goes twice
    assert len(ours.sent) <= 8 + 4
    assert [c.generation for c in questions.inventory(ours, address, "resumed").copies] == [key.generation]
    room = bytearray(len(data))
    landing, notes = questions.get(ours, {"node0": address}, key, lambda found: memoryview(room))
    assert landing is not None
    assert (landing.missing, notes, room) == (set(), [], data)


class Asker:
    """The other end of a link, which hears what it is told."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.heard.append(message)


def test_nobody_waits_for_the_memory_that_a_copy_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new slab takes seconds; meanwhile ranks save."""
    cache = Cache(Settings(node="node0", address="127.0.0.1", port=0, run_dir=str(tmp_path), memory_bytes=64 << 20))
    free: list[bool] = []

    def ask() -> None:
        free.append(cache.changed.acquire(timeout=1))
        if free[-1]:
            cache.changed.release()

    def take(owner: str, nbytes: int) -> Slab:
        asking = threading.Thread(target=ask)
        asking.start()
        asking.join()
        raise CannotRun("that is all this test wants to know")

    monkeypatch.setattr(cache.slabs, "take", take)
    manifest = made_of(Key("job", Generation(1, 1, "abcdef00"), 0), 1, "node1", {}, memoryview(bytes(1000)))
    asker = Asker()
    cache.neighbours._take_copy(asker, {"manifest": manifest.encode(), "region": 1, "port": 1, "existing": []})
    assert free == [True]
    assert [message["op"] for message in asker.heard] == ["refused"]
    cache.doors.close()
    cache.index.close()
