"""What happens between two messages: memory let go while it is read, caches that come late, starts of one job that overlap."""

import contextlib
import gc
import os
import re
import resource
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import questions
from checkpoint.client import LEVELS, Client
from checkpoint.errors import CacheGone, CannotRun, CheckpointError, Superseded, UsageError
from checkpoint.manifest import Generation, Key, made_of
from checkpoint.server import Cache, Settings
from checkpoint.tcp import Tcp

NEW = (4_000_000_000, "abcdef00")
"""A start that was numbered by a clock that went far ahead."""


def saved(client: Client, step: int, *levels: str, **more: Any) -> str:
    handle = client.save(step, {"w": torch.full((1000,), float(step)), **more})
    for level in levels:
        handle.wait(level, 20)
    return handle.generation


def copies(port: int, job: str) -> list[int]:
    """Return the steps of a job that a cache holds in memory."""
    return sorted(copy.generation.step for copy in questions.inventory(Tcp(), f"127.0.0.1:{port}", job).copies)


def test_what_a_rank_falls_back_to_stays_while_it_is_read_and_is_let_go_once(tmp_path: Path) -> None:
    """It is older than all that a node needs to hold. Let go twice, its memory would be given to two shards."""
    cache = Cache(Settings(node="n0", address="127.0.0.1", port=0, run_dir=str(tmp_path / "run"), storage=str(tmp_path / "s")))
    try:
        older, newer = (Generation(5, step, "abcdef00") for step in (2, 6))
        cache._safe["j"], cache._complete["j"] = newer, {newer}
        key, data = Key("j", older, 0), memoryview(b"x" * 5000)
        assert cache.storage is not None
        cache.storage.write(made_of(key, 1, "n0", {}, data), data)
        shard = cache.fetch(key)[0]
        assert (shard.pins, shard.dropped) == (1, False)
        assert cache.take("copies", 5000, "other") is not shard.slab
        assert shard.data == data
        cache.unpin(shard)
        assert cache.take("copies", 5000, "other") is shard.slab
        assert cache.take("copies", 5000, "other") is not shard.slab
    finally:
        cache.index.close()
        cache.doors.close()


@contextlib.contextmanager
def late(port: int, delay_s: float) -> Iterator[str]:
    """An address at which the cache that listens at `port` answers only after a while."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))

        def pump(source: socket.socket, sink: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)

        def serve() -> None:
            time.sleep(delay_s)
            sock.listen()
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                while True:
                    here = stack.enter_context(sock.accept()[0])
                    there = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                    for ends in ((here, there), (there, here)):
                        threading.Thread(target=pump, args=ends, daemon=True).start()

        server = threading.Thread(target=serve)
        server.start()
        yield f"127.0.0.1:{sock.getsockname()[1]}"
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        server.join()


def test_a_newer_generation_in_a_cache_that_is_just_starting_is_waited_for(
    cluster: Any, poll: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster(2)
    with nodes[1].client() as client:
        saved(client, 1, *LEVELS)
        newest = saved(client, 2, *LEVELS)
    poll((nodes.storage / "job" / newest / "committed").exists)
    nodes[0].kill()
    (nodes.storage / "job" / newest / "rank-00000.json").unlink()
    nodes[0].start().ready()
    with late(nodes[1].port, 1.0) as address:
        monkeypatch.setenv("EAGLEEYE_CHECKPOINT__PEERS", f"node1={address}")
        with nodes[0].client() as client:
            restored = client.load()
    assert restored is not None
    assert (restored.step, restored.source) == (2, "neighbour")


def test_a_generation_of_which_nothing_is_left_is_said_and_stays_the_older_one(cluster: Any, poll: Any) -> None:
    nodes = cluster(1)
    with nodes[0].client() as client:
        saved(client, 1, "persistent")
        client._start = NEW
        newest = saved(client, 2, "persistent")
    poll((nodes.storage / "job" / newest / "committed").exists)
    nodes[0].kill()
    (nodes.storage / "job" / newest / "rank-00000.json").unlink()
    nodes[0].start().ready()
    with nodes[0].client() as client:
        restored = client.load()
        assert restored is not None
        assert restored.step == 1
        assert restored.notes[0] == "step 2 existed and no copy of it is left"
        assert saved(client, 2, "persistent") > newest  # should it come back, it is not taken for newer


def test_storage_that_is_not_there_is_no_first_start(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = cluster(1)
    monkeypatch.setattr("checkpoint.client.CONNECT_S", 1.0)
    shutil.rmtree(nodes.storage)
    with nodes[0].client() as client, pytest.raises(CheckpointError, match=r"not all could be asked .*No such file or directory"):
        client.load()


def test_a_first_start_is_said(three: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with three[0].client("anew") as client:
        assert client.load() is None
    assert capfd.readouterr().err == "checkpoint: no checkpoint of job anew exists; it starts anew\n"


def test_no_training_is_ended_by_a_save_that_fails_later(cluster: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with cluster(1, "--memory-bytes", "10MiB", storage=None)[0].client(timeout_s=0.3) as client:
        saved(client, 1, "cached")
        handles = [client.save(2, {"w": torch.ones(3_000_000)}), client.save(3, {"text": "x" * (40 << 20)})]
        for handle, kind in zip(handles, (CannotRun, UsageError), strict=True):
            for level in LEVELS:
                with pytest.raises(kind):
                    handle.wait(level, 0.1)
        assert capfd.readouterr().err.count("is saved nowhere: ") == 2
        saved(client, 4, "cached")
        restored = client.load()
    assert restored is not None
    assert restored.step == 4


def test_a_process_that_may_open_no_more_files_goes_on(three: Any, poll: Any, capfd: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with three[0].client("files") as client, contextlib.ExitStack() as held:
        client._connected(10.0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with contextlib.suppress(OSError):
            while True:
                held.callback(os.close, os.dup(0))
        client._start = NEW
        with pytest.raises(CacheGone, match="went away during the save of step 1"):
            client.save(1, {"w": torch.ones(1000)}).wait("cached", 10)
        held.close()
        assert "this process may open no more files; raise `ulimit -n`" in capfd.readouterr().err
        poll(lambda: client.save(2, {"w": torch.ones(1000)}).cached.exception(10) is None)


def test_what_the_cache_refuses_reaches_no_level(three: Any) -> None:
    for again in (False, True):
        with three[0].client("refusing") as client:
            client._connected(10.0)
            client._start = NEW
            if not again:
                saved(client, 1, *LEVELS)
                continue
            handle = client.save(1, {})
            for level in LEVELS:
                with pytest.raises(Superseded, match="step 1 was saved already by rank 0"):
                    handle.wait(level, 10)


def test_a_state_that_changes_its_form_at_each_save_fills_no_memory(cluster: Any) -> None:
    node = cluster(1, storage=None)[0]

    def resident_kb() -> int:
        found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{node.pid}/status").read_text())
        assert found is not None
        return int(found[1])

    with node.client() as client:
        resident_after_kb = []
        for step in range(80):
            saved(client, step, "cached", **{f"{step}-" + "k" * (1 << 20): step})
            resident_after_kb.append(resident_kb())
        assert resident_after_kb[-1] - resident_after_kb[15] < 30_000


def test_memory_of_a_cache_that_died_is_let_go(cluster: Any) -> None:
    node = cluster(1, storage=None)[0]
    gc.collect()
    gc.disable()  # as training loops do
    try:
        with node.client() as client:
            saved(client, 1, "cached")
            assert "eagleeye-slab" in Path("/proc/self/maps").read_text()
            node.kill()
            client.save(2, {})
            client.save(3, {})
            assert "eagleeye-slab" not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


def test_only_as_much_of_ended_jobs_is_let_go_as_is_needed(cluster: Any) -> None:
    node = cluster(1, "--memory-bytes", "13MiB")[0]
    for job in ("first", "second", "third"):
        with node.client(job) as client:
            saved(client, 1, "persistent", big=torch.ones(1_000_000))
    with node.client("fourth") as client:
        saved(client, 1, "cached", big=torch.ones(500_000))
    assert [copies(node.port, job) for job in ("first", "second", "third", "fourth")] == [[], [1], [1], [1]]


def test_a_process_of_an_earlier_start_does_not_tell_who_the_others_are(
    cluster: Any, poll: Any, monkeypatch: pytest.MonkeyPatch, unheard: Any
) -> None:
    nodes = cluster(3, storage=None, peers=False)
    clients = []
    for rank, peer in enumerate((1, 2)):
        monkeypatch.setenv("EAGLEEYE_CHECKPOINT__PEERS", f"node{peer}=127.0.0.1:{nodes[peer].port}")
        clients.append(nodes[0].client("job", rank, 2))
        clients[-1]._agreement = unheard
        clients[-1]._connected(10.0)
    old, new = clients
    old._connection.lose("it was stopped")
    old._connected(10.0)
    saved(new, 1, "replicated")
    assert (copies(nodes[1].port, "job"), copies(nodes[2].port, "job")) == ([], [1])
