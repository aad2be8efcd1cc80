"""Storage that is slower than the saves, at every node by another measure: generations become whole in it all the same."""

import time
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from checkpoint.client import Client


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write_s", "every_s", "at_least"),
    [
        ((0.01, 0.3, 0.7), 0.1, 2),
        ((0.15, 0.25, 0.4), 0.1, 3),
        ((0.01, 0.01, 1.5), 0.2, 1),
        ((0.5, 0.5, 0.5), 0.1, 2),
    ],
)
def test_generations_are_committed_at_the_pace_of_the_slowest(
    cluster: Any, poll: Any, write_s: tuple[float, ...], every_s: float, at_least: int
) -> None:
    nodes = cluster(3, "--memory-bytes", "64MiB", write_s=write_s)
    state = {"w": torch.zeros(1 << 18)}
    committed: set[str] = set()
    with ExitStack() as stack:
        ranks = [stack.enter_context(node.client("job", i, 3, timeout_s=10.0)) for i, node in enumerate(nodes.nodes)]
        for rank in ranks:
            rank._connected(10.0)
            rank._start = (1_800_000_000, "abcdef00")
        until_s = time.monotonic() + 8.0
        step = 0
        while time.monotonic() < until_s:
            step += 1
            for rank in ranks:
                rank.save(step, state).wait("cached", 10)
            committed |= {path.parent.name for path in nodes.storage.glob("job/*/committed")}
            time.sleep(every_s)
        assert len(committed) >= at_least
        # the last one is always the one that counts
        newest = f"{1_800_000_000:010d}-{step:012d}-abcdef00"
        poll(lambda: (nodes.storage / "job" / newest / "committed").exists())
    for node in nodes.nodes:
        assert "Traceback" not in node.said


@pytest.mark.slow
def test_a_generation_that_others_began_is_not_forgotten(cluster: Any) -> None:
    """While a node writes for seconds, it keeps what its peers began meanwhile, and memory stays bounded."""
    nodes = cluster(2, "--memory-bytes", "24MiB", write_s=(0.01, 1.0))
    state = {"w": torch.zeros(1 << 18)}
    with ExitStack() as stack:
        ranks: list[Client] = [stack.enter_context(node.client("job", i, 2, timeout_s=5.0)) for i, node in enumerate(nodes.nodes)]
        for rank in ranks:
            rank._connected(10.0)
            rank._start = (1_800_000_000, "abcdef00")
        for step in range(60):
            for rank in ranks:
                rank.save(step, state).wait("cached", 10)
            time.sleep(0.05)
        held = [sum(path.stat().st_size for path in node.slabs()) for node in nodes.nodes]
    assert max(held) <= 24 << 20
    assert list(nodes.storage.rglob("committed"))
