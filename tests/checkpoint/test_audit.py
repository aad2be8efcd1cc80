"""`eagleeye cache verify` and `list` beside a running cache, and what that one says about its memory."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.listing import table
from checkpoint.memory import can_collapse

VERB = "import sys; from eagleeye.cli import main; sys.exit(main(sys.argv[1:]))"


def command(*words: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", VERB, "cache", *map(str, words)],
        env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def flip(path: Path, at: int) -> None:
    """Flip a bit of a cache's memory through its descriptor."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_every_byte_in_memory_and_storage_is_read(cluster: Any) -> None:
    nodes = cluster(2)
    with nodes[0].client() as client:
        handle = client.save(7, {"w": torch.arange(3_000_000.0)})
        for level in ("replicated", "persistent"):
            handle.wait(level, 20)
        for node, held in zip(nodes.nodes, ("memory node0", "memory node1"), strict=True):
            done = command("verify", "--run-dir", node.run_dir, "--storage", nodes.storage)
            assert (done.returncode, done.stderr) == (0, "")
            assert [line.split()[0] + " " + line.split()[-1] for line in done.stdout.splitlines()[:2]] == [
                "storage intact", "memory intact",
            ]  # fmt: skip
            assert held in done.stdout
            assert done.stdout.splitlines()[2] == "2 shards verified, 0 damaged"
        assert "0 shards verified, 0 damaged" in command("verify", "--run-dir", nodes[0].run_dir, "--job", "other").stdout
        for path in nodes[0].slabs():
            if path.stat().st_size >= 12_000_000:
                flip(path, 4 << 20)
        done = command("verify", "--run-dir", nodes[0].run_dir)
        assert (done.returncode, done.stderr) == (1, "")
        assert done.stdout.splitlines()[0].split(maxsplit=8) == [
            "memory", "node0", "job", "step", "7", "rank", "0", "11.4",
            "MiB  DAMAGED: the bytes from 4194304 to 8388608 are not those that were saved",
        ]  # fmt: skip
        restored = client.load()
        assert restored.source == "neighbour"
        assert torch.equal(restored.state["w"], torch.arange(3_000_000.0))


def test_what_is_still_to_be_done_is_listed(cluster: Any, poll: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nodes = cluster(2, storage=tmp_path / "file")
    nodes[1].kill()
    with nodes[0].client() as client:
        client.save(7, {"w": torch.arange(1000.0)}).wait("cached", 20)
        poll(lambda: "  -        no       replicate, store  " in table(Path(nodes[0].run_dir)))
        nodes[1].start().ready()
        poll(lambda: "  node1    no       store  " in table(Path(nodes[0].run_dir)))


def lines(node: Any) -> list[str]:
    return table(Path(node.run_dir)).splitlines()


def test_the_next_saves_find_their_memory_made(cluster: Any, poll: Any) -> None:
    """After the first save of a form the cache makes all that the rank will ever need."""
    node = cluster(1, storage=None)[0]
    with node.client() as client:
        client.save(1, {"w": torch.zeros(1_000_000)}).wait("cached", 20)
        poll(lambda: len(node.slabs()) >= 4)
        before = {path.stat().st_ino for path in node.slabs() if path.stat().st_size >= 4_000_000}
        for step in range(2, 12):
            client.save(step, {"w": torch.zeros(1_000_000)}).wait("cached", 20)
            # until what is not needed any more was let go of
            poll(lambda step=step: [line.split()[1] for line in lines(node)[1:]] == [str(step), str(step - 1)])
        assert {path.stat().st_ino for path in node.slabs() if path.stat().st_size >= 4_000_000} == before


def test_the_forecast_is_told_and_older_generations_go_when_memory_is_short(cluster: Any) -> None:
    node = cluster(1, "--memory-bytes", "8500000", storage=None)[0]
    told = node.folder / "stdout"
    assert "at most 8.1 MiB (memory_bytes) in pages of" in told.read_text()
    with node.client(timeout_s=20.0) as client:
        for step in range(1, 8):
            client.save(step, {"w": torch.full((1_000_000,), float(step))}).wait("cached", 20)
        restored = client.load()
    assert (restored.step, restored.state["w"].unique().tolist()) == (7, [7.0])
    assert [line for line in told.read_text().splitlines() if line.startswith("memory forecast")] == [
        "memory forecast: 15.3 MiB of at most 8.1 MiB (1 rank x 4 generations); older generations are let go of earlier"
    ]


CLOCK_GOES_BACK = """
import itertools, time
past = itertools.count(2_000_000_000, -3600)
time.time = lambda: float(next(past))
"""


def test_a_clock_that_goes_back_all_the_time_is_not_noticed(cluster: Any, trainer: Any, poll: Any) -> None:
    """The server orders by the generations' numbers alone, and a client numbers its start after all that exist."""
    node = cluster(1)[0]
    node.end()
    node.start(CLOCK_GOES_BACK).ready()
    for start, clock in enumerate((1_900_000_000, 1_500_000_000, 1)):
        process = trainer(
            f"time.time = lambda: {clock}.0\n" + """
client = Client("job", run_dir=run_dir)
restored = client.load()
step = restored.step if restored else 0
for _ in range(5):
    step += 1
    client.save(step, {"w": torch.full((1000,), float(step))}).wait("persistent", 20)
pipe.send((restored and restored.step, step))
time.sleep(60)
""",
            run_dir=node.run_dir,
        )  # fmt: skip
        assert process.tells() == (5 * start or None, 5 * start + 5)
        process.kill()
    stored = Path(node.flags[node.flags.index("--storage") + 1]) / "job"
    poll(lambda: sorted(int(path.name.split("-")[1]) for path in stored.glob("*-*")) == [13, 14, 15])


@pytest.mark.skipif(not can_collapse(), reason="this kernel does not collapse memory files into large pages (Linux 6.1 does)")
def test_in_which_pages_the_memory_lies_is_told(cluster: Any, poll: Any) -> None:
    node = cluster(1, storage=None)[0]
    told = node.folder / "stdout"
    assert "in pages of 2 MiB, collapsed once they are filled, no storage" in told.read_text()
    with node.client() as client:
        for step in range(6):
            client.save(step, {"w": torch.full((2_000_000,), float(step))}).wait("cached", 20)
            poll(lambda step=step: any(line.split()[1] == str(step) for line in lines(node)[1:]))
        poll(lambda: re.search(r"^memory: (\d\d+) of \d+ MiB in pages of 2 MiB$", told.read_text(), re.MULTILINE))
        restored = client.load()
    assert restored.state["w"].unique().tolist() == [5.0]
