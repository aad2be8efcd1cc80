"""A new cache takes over from the one that runs: nothing that memory holds is lost, whoever of the two dies on the way."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.errors import CacheGone
from checkpoint.handover import SILENCE_S
from checkpoint.listing import table
from checkpoint.protocol import VERSION

VERB = "import sys; from eagleeye.cli import main; sys.exit(main(sys.argv[1:]))"
STATE = {"w": torch.arange(1_000_000.0)}
AT = """
import os, signal
from checkpoint.handover import Estate
method = Estate.{method}
def at_that_point(self, *arguments):
    if {after}:
        method(self, *arguments)
    os.kill({pid}, signal.{signal})
    if not {after}:
        return method(self, *arguments)
Estate.{method} = at_that_point
"""
"""Kills or stops a process when the new cache is at a certain point."""


def saved(client: Any, step: int, *levels: str) -> None:
    handle = client.save(step, STATE | {"step": step})
    for level in levels or ("cached",):
        handle.wait(level, 20)


def intact(restored: Any, step: int) -> bool:
    return bool(restored.step == step == restored.state["step"] and torch.equal(restored.state["w"], STATE["w"]))


def shards(node: Any) -> set[int]:
    """Return the identities of the memory files that are as large as a shard."""
    return {path.stat().st_ino for path in node.slabs() if path.stat().st_size >= 4_000_000}


def taken_over(node: Any, *flags: str) -> "subprocess.Popen[bytes]":
    """Start a cache in the place of a node's, wait until it serves and the old one has ended, and return the old one."""
    old = node.process
    node.flags += ["--take-over", *flags]
    node.start().ready()
    assert old.wait(20) == 0
    return old


@pytest.fixture
def successor(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start a cache that is to take over from a node's, but runs `before`."""
    made = []

    def start(node: Any, *flags: str, before: str = "") -> "subprocess.Popen[str]":
        usual = ["--address", "127.0.0.1", "--node", node.name, "--port", str(node.port), "--run-dir", node.run_dir]
        process = subprocess.Popen(
            [sys.executable, "-c", before + VERB, "cache", "--take-over", *usual, *flags],
            cwd=tmp_path, env={"PATH": os.environ["PATH"]}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        made.append(process)
        return process

    yield start
    for process in made:
        process.kill()
        process.communicate()


SAVE = """
client = Client("job", run_dir=run_dir)
client.load()
for step in (1, 2, 3):
    client.save(step, {"w": torch.arange(1_000_000.0), "step": step}).wait("cached", 20)
pipe.send("saved")
time.sleep(60)
"""
RESTORE = """
client = Client("job", run_dir=run_dir)
restored = client.load()
same = torch.equal(restored.state["w"], torch.arange(1_000_000.0)) and restored.state["step"] == restored.step
pipe.send((restored.step, restored.source, same))
"""


def test_what_a_killed_trainer_saved_is_restored_from_the_memory_of_the_new_cache(cluster: Any, trainer: Any) -> None:
    node = cluster(1, storage=None)[0]
    process = trainer(SAVE, run_dir=node.run_dir)
    assert process.tells() == "saved"
    before = shards(node)
    taken_over(node)
    process.kill()
    assert len(shards(node) & before) >= 2  # the same memory, not a copy of it
    assert trainer(RESTORE, run_dir=node.run_dir).tells() == (3, "local", True)
    assert "Traceback" not in node.said


def test_training_goes_on_and_every_handle_tells(cluster: Any, poll: Any) -> None:
    node = cluster(1)[0]
    with node.client() as client:
        saved(client, 1, "persistent")
        handles = []
        for restart in range(3):
            taken_over(node)
            adopted = shards(node)
            for step in range(10 * restart + 2, 10 * restart + 12):
                handles.append(client.save(step, STATE | {"step": step}))
            poll(lambda restart=restart: client.save(10 * restart + 12, STATE | {"step": 10 * restart + 12}).cached.done())
        told = [handle.cached.exception(20) for handle in handles]
        assert {type(error) for error in told} <= {CacheGone, type(None)}
        poll(lambda: client._connection is not None and not client._connection.lost)
        for step in range(90, 96):
            saved(client, step, "cached", "persistent")
        assert intact(client.load(), 95)
        poll(lambda: not shards(node) & adopted)  # what was taken over is let go of like everything else


def test_copies_and_storage_are_known_to_the_new_cache(cluster: Any, poll: Any) -> None:
    nodes = cluster(2)
    with nodes[0].client() as client:
        saved(client, 1, "cached", "replicated", "persistent")
    written = {path: path.stat().st_mtime_ns for path in nodes.storage.rglob("rank-*")}
    for node in nodes.nodes:
        taken_over(node)
    rows = [listed(node) for node in nodes.nodes]
    assert rows == [["job", "1", "0", "node0", "4000000", "yes", "node1", "yes", "-", "-"],
                    ["job", "1", "0", "node0", "4000000", "yes", "-", "-", "-", "-"]]  # fmt: skip
    assert {path: path.stat().st_mtime_ns for path in nodes.storage.rglob("rank-*")} == written
    nodes[0].kill()
    nodes[0].flags.remove("--take-over")
    nodes[0].start().ready()
    with nodes[0].client() as client:
        restored = client.load()
        assert (restored.source, restored.holder) == ("neighbour", "node1")
        assert intact(restored, 1)


def listed(node: Any) -> list[str]:
    code = [sys.executable, "-c", VERB, "cache", "list", "--run-dir", node.run_dir]
    done = subprocess.run(code, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.splitlines()[1].split()


def test_nothing_to_take_over_is_said_and_an_ordinary_start(cluster: Any) -> None:
    node = cluster(1)[0]
    with node.client() as client:
        saved(client, 1, "persistent")
    node.kill()
    node.flags.append("--take-over")
    node.start().ready()
    assert f"no cache runs in {node.run_dir}, so there is nothing to take over; this one starts with empty memory" in node.said
    with node.client() as client:
        restored = client.load()
        assert restored.source == "storage"
        assert intact(restored, 1)


@pytest.mark.parametrize(
    ("flags", "before", "sentence"),
    [
        ([], "import checkpoint.protocol; checkpoint.protocol.VERSION = 99\n",
         "hands nothing over: it speaks version {version} and this one 99; stop it and start this one without --take-over"),
        (["--node", "other"], "", "is that of node node0 and this one of other; give it the same --node"),
        (["--port", "1"], "", "listens on port {port} and would go on there; give this one --port {port}"),
        (["--memory-bytes", "1MiB"], "", "holds 4001792 bytes and this one may take 1048576; raise memory_bytes"),
    ],
    ids=["version", "node", "port", "memory"],
)  # fmt: skip
def test_who_cannot_stand_in_is_told_and_the_old_one_goes_on(
    cluster: Any, successor: Any, flags: list[str], before: str, sentence: str
) -> None:
    node = cluster(1, storage=None)[0]
    with node.client() as client:
        saved(client, 1)
        process = successor(node, *flags, before=before)
        _, said = process.communicate(timeout=20)
        assert (process.returncode, len(said.splitlines())) == (3, 1)
        assert sentence.format(version=VERSION, port=node.port) in said
        saved(client, 2)  # its connection was not even closed
        assert intact(client.load(), 2)


@pytest.mark.parametrize(("method", "after"), [("_take", False), ("_take", True), ("enter", False)])
def test_a_new_cache_killed_on_the_way_changes_nothing(cluster: Any, successor: Any, poll: Any, method: str, after: bool) -> None:
    nodes = cluster(2, storage=None)
    with nodes[0].client() as client:
        saved(client, 1, "cached", "replicated")
        before = shards(nodes[0])
        process = successor(nodes[0], before=AT.format(method=method, after=after, pid="os.getpid()", signal="SIGKILL"))
        assert process.wait(20) == -signal.SIGKILL
        assert shards(nodes[0]) & before
        poll(lambda: client.save(2, STATE | {"step": 2}).cached.exception(20) is None)
        saved(client, 3, "cached", "replicated")
        assert intact(client.load(), 3)
    assert table(Path(nodes[0].run_dir)).splitlines()[1].split()[1] == "3"
    assert "Traceback" not in nodes[0].said
    taken_over(nodes[0])  # and it can still be done
    with nodes[0].client() as client:
        assert client.load().source == "local"


def test_an_old_cache_killed_on_the_way_leaves_what_it_has_given(cluster: Any) -> None:
    node = cluster(1, storage=None)[0]
    with node.client() as client:
        saved(client, 1)
    old = node.process
    before = AT.format(method="_take", after=True, pid=node.pid, signal="SIGKILL")
    node.flags.append("--take-over")
    node.start(before).ready()
    assert old.wait(20) == -signal.SIGKILL
    assert "broke off while it handed over; 1 shards were saved" in node.said
    with node.client() as client:
        restored = client.load()
        assert restored.source == "local"
        assert intact(restored, 1)
        saved(client, 2)


@pytest.mark.slow
def test_a_new_cache_that_is_stopped_on_the_way_is_given_up(cluster: Any, successor: Any, poll: Any) -> None:
    node = cluster(1, storage=None)[0]
    with node.client() as client:
        saved(client, 1)
        process = successor(node, before=AT.format(method="enter", after=False, pid="os.getpid()", signal="SIGSTOP"))
        poll(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].startswith("T"))
        poll(lambda: client.save(2, STATE | {"step": 2}).cached.exception(20) is None, SILENCE_S + 20)
        os.kill(process.pid, signal.SIGCONT)
        _, said = process.communicate(timeout=20)
        assert process.returncode == 3
        assert f"a cache (pid {node.pid}) runs in {node.run_dir} already" in said
        saved(client, 3)
        assert intact(client.load(), 3)
