"""Isolated nodes and what can be broken of them: disk, memory, a neighbour on the CPU. All of it real."""

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from eagleeye.errors import EnvironmentLacks

DEMO = Path(__file__).parents[2] / "demo"

WRITER = """
import os, sys, time
folder = os.path.join(sys.argv[1], os.environ["EAGLEEYE_NODE"])
held = bytearray(os.urandom(96 << 20))
while True:
    began = time.monotonic()
    with open(os.path.join(folder, "data"), "wb") as file:
        file.write(os.urandom(32768))
        file.flush()
        os.fdatasync(file.fileno())
    wrote = time.monotonic()
    sum(held[: 8 << 20 : 4096])
    sum(range(100_000))
    with open(os.path.join(sys.argv[2], os.environ["EAGLEEYE_NODE"]), "w") as file:
        file.write(f"{wrote - began} {time.monotonic() - wrote}")
    time.sleep(0.02)
"""


def load(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, DEMO / f"{name}.py")
        assert spec
        assert spec.loader
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


cluster = load("cluster")
faults = load("faults")
WHY_NOT = cluster.why_no_namespaces()
needs_isolation = pytest.mark.skipif(
    WHY_NOT is not None
    or not all(cluster.cgroup_v1_root(c) for c in cluster.ISOLATING)
    or not Path("/dev/loop-control").exists(),
    reason="needs network namespaces, cgroups of version 1 for memory and blkio, and loop devices",
)


def wait_for(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("isolated")
    script = folder / "writer.py"
    script.write_text(WRITER)
    told = folder / "told"
    told.mkdir()
    words = [str(folder / "run" / "disks"), str(told)]
    it = cluster.Cluster(folder / "run", 2, script=script, script_args=words, exporters=False, caches=False, isolated=True)
    with it:
        wait_for(lambda: all((told / node.name).exists() for node in it.nodes))
        yield SimpleNamespace(cluster=it, told=told)
    assert cluster.mounts_below(folder) == []
    assert not list((folder / "run" / "disks").glob("*.img"))
    for controller in cluster.ISOLATING:
        assert not list(cluster.cgroup_v1_root(controller).glob(f"*{it.id}*"))


def rounds(running: SimpleNamespace, number: int, seconds: float) -> int:
    """How often the rank of a node goes round in that time."""
    file, seen = running.told / running.cluster.nodes[number].name, set()
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        seen.add(file.stat().st_mtime_ns)
        time.sleep(0.005)
    return len(seen) - 1


@needs_isolation
@pytest.mark.slow
def test_each_rank_writes_to_its_own_disk_in_its_own_cgroups(running: SimpleNamespace) -> None:
    devices = {node.disk.stat().st_dev for node in running.cluster.nodes}
    assert len(devices) == 2
    assert os.stat("/").st_dev not in devices
    for node in running.cluster.nodes:
        assert (node.disk / "data").stat().st_size <= 32768
        pid = str(running.cluster.pid(node))
        for cgroup in (node.memory_cgroup, node.blkio_cgroup):
            assert pid in (cgroup / "cgroup.procs").read_text().split()


@needs_isolation
@pytest.mark.slow
def test_a_frozen_disk_stops_one_rank_until_it_thaws(running: SimpleNamespace) -> None:
    node = running.cluster.nodes[0]
    fault = faults.stall_disk(running.cluster, node)
    try:
        assert (fault.node, fault.rank) == (node.name, 0)
        stat = Path(f"/proc/{running.cluster.pid(node)}/stat")
        wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "D")
        assert rounds(running, 0, 1.0) == 0
        assert rounds(running, 1, 1.0) > 2
    finally:
        fault.undo()
    assert rounds(running, 0, 1.5) > 2


@needs_isolation
@pytest.mark.slow
def test_a_slow_disk_takes_as_long_as_its_rate_says(running: SimpleNamespace) -> None:
    node = running.cluster.nodes[1]
    fault = faults.stall_disk(running.cluster, node, 32_000)
    try:
        assert "32 kB/s" in fault.how
        assert rounds(running, 1, 4.0) in (2, 3, 4), "32 KiB at 32 kB/s take a second"
    finally:
        fault.undo()
    assert rounds(running, 1, 1.5) > 2


@needs_isolation
@pytest.mark.slow
def test_a_noisy_neighbour_shares_the_cpu_and_goes(running: SimpleNamespace) -> None:
    node = running.cluster.nodes[0]
    before = faults._cpu_s(running.cluster, node)
    fault = faults.crowd(running.cluster, node, 0.1, hogs=3)
    procs = node.cgroup / "cgroup.procs"
    try:
        wait_for(lambda: len(procs.read_text().split()) == 4)
        time.sleep(2.0)
    finally:
        fault.undo()
    assert faults._cpu_s(running.cluster, node) - before < 0.25
    assert procs.read_text().split() == [str(running.cluster.pid(node))]
    assert int((node.cgroup / "cpu.cfs_quota_us").read_text()) == -1


@needs_isolation
@pytest.mark.slow
@pytest.mark.skipif(len(Path("/proc/swaps").read_text().splitlines()) < 2, reason="needs swap space")
def test_a_squeezed_rank_is_swapped_out_and_gets_its_memory_back(running: SimpleNamespace) -> None:
    node = running.cluster.nodes[1]
    swapped = lambda: swapped_kb(running.cluster.pid(node))  # noqa: E731
    assert swapped() == 0
    fault = faults.squeeze_memory(running.cluster, node, 0.5)
    try:
        wait_for(lambda: swapped() > 10_000)
        used = int((node.memory_cgroup / "memory.usage_in_bytes").read_text())
        assert used <= int((node.memory_cgroup / "memory.limit_in_bytes").read_text()) < 120_000_000
    finally:
        fault.undo()
    assert rounds(running, 1, 2.0) > 2


def swapped_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmSwap"))


@needs_isolation
@pytest.mark.slow
def test_a_node_without_memory_loses_its_rank(running: SimpleNamespace) -> None:
    node = running.cluster.nodes[0]
    pid = running.cluster.pid(node)
    fault = faults.exhaust_memory(running.cluster, node)
    try:
        wait_for(lambda: not Path(f"/proc/{pid}").exists())
    finally:
        fault.undo()
    wait_for(lambda: running.cluster.pid(node) not in (None, pid), 40.0)


def test_nodes_that_are_not_isolated_cannot_be_broken_so() -> None:
    node = cluster.Node("n0", 0, False, Path("n0.log"), "127.0.0.1", "127.0.0.1", 1, 2)
    for break_it in (
        lambda: faults.stall_disk(None, node),
        lambda: faults.squeeze_memory(None, node, 0.5),
        lambda: faults.exhaust_memory(None, node),
    ):
        with pytest.raises(EnvironmentLacks, match="n0 has no"):
            break_it()
