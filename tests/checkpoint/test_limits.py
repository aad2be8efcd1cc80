"""How much a cache may take on machines with either version of control groups, and what it forecasts."""

from pathlib import Path

import pytest

from checkpoint.errors import CannotRun
from checkpoint.limits import Forecast, Limit, allowed, cap, size

GIB = 1 << 30
NO_LIMIT_V1 = 9223372036854771712
"""What version 1 says where nothing is limited."""


def machine(root: Path, memberships: str, **files: object) -> Path:
    """Write the files of a machine with 64 GiB as the kernel shows them; ``__`` in a name stands for a slash."""
    told = {"proc/meminfo": "MemTotal:       67108864 kB\nMemFree:         1000000 kB\n", "proc/self/cgroup": memberships} | files
    for name, content in told.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def test_a_machine_without_limits(tmp_path: Path) -> None:
    assert allowed(machine(tmp_path, "0::/user.slice")) == Limit(64 * GIB, "the machine's memory")


def test_version_2_counts_every_group_on_the_way_up(tmp_path: Path) -> None:
    root = machine(
        tmp_path, "0::/kubepods.slice/pod1/cache",
        **{
            "sys/fs/cgroup/kubepods.slice/memory.max": 40 * GIB,
            "sys/fs/cgroup/kubepods.slice/pod1/memory.max": 16 * GIB,
            "sys/fs/cgroup/kubepods.slice/pod1/cache/memory.max": "max",
            "sys/fs/cgroup/kubepods.slice/pod1/cache/memory.high": "max",
        },
    )  # fmt: skip
    where = tmp_path / "sys/fs/cgroup/kubepods.slice/pod1/memory.max"
    assert allowed(root) == Limit(16 * GIB, f"the limit in {where}")


def test_version_2_slows_whoever_passes_high_down_so_that_it_counts_as_a_limit(tmp_path: Path) -> None:
    root = machine(
        tmp_path, "0::/job",
        **{"sys/fs/cgroup/job/memory.max": 16 * GIB, "sys/fs/cgroup/job/memory.high": 12 * GIB},
    )  # fmt: skip
    assert allowed(root).nbytes == 12 * GIB


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    """The path in /proc/self/cgroup is the host's then, or a bare slash."""
    for memberships in ("0::/", "0::/kubepods.slice/pod1/cache"):
        assert allowed(machine(tmp_path, memberships, **{"sys/fs/cgroup/memory.max": 8 * GIB})).nbytes == 8 * GIB


def test_version_1_beside_an_empty_version_2(tmp_path: Path) -> None:
    root = machine(
        tmp_path, "12:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/docker/abc\n0::/docker/abc",
        **{
            "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
            "sys/fs/cgroup/memory/docker/memory.limit_in_bytes": NO_LIMIT_V1,
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": 6 * GIB,
        },
    )  # fmt: skip
    assert allowed(root).nbytes == 6 * GIB


def test_version_1_without_a_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, "4:memory:/", **{"sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1})
    assert allowed(root) == Limit(64 * GIB, "the machine's memory")


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match=r"proc/meminfo does not tell how much memory there is; set \[checkpoint\] memory_bytes"):
        allowed(tmp_path)


def test_this_machine() -> None:
    assert 1 << 28 < allowed().nbytes < 1 << 50


def test_the_cap_is_half_of_what_is_allowed_or_what_is_configured() -> None:
    most = Limit(16 * GIB, "the limit in /sys/fs/cgroup/memory.max")
    assert cap(0, most) == Limit(8 * GIB, "half of the limit in /sys/fs/cgroup/memory.max")
    assert cap(16 * GIB, most) == Limit(16 * GIB, "memory_bytes")
    with pytest.raises(CannotRun) as told:
        cap(16 * GIB + 1, most)
    assert str(told.value) == (
        "[checkpoint] memory_bytes is 17179869185 and the limit in /sys/fs/cgroup/memory.max is 17179869184; "
        "set memory_bytes to less than that, or raise the limit"
    )


def test_the_forecast_counts_ranks_generations_and_copies() -> None:
    forecast = Forecast((GIB, GIB, 2 * GIB), copies=1, generations=2, cap_bytes=64 * GIB)
    assert (forecast.generation_bytes, forecast.most_bytes) == (4 * GIB, 4 * GIB * 4 * 2)
    forecast.check()
    assert str(forecast) == (
        "memory forecast: 32.0 GiB of at most 64.0 GiB (3 ranks x 4 generations, and as much for copies of 1 other node)"
    )
    alone = Forecast((GIB,), copies=0, generations=3, cap_bytes=2 * GIB)
    assert str(alone) == (
        "memory forecast: 5.0 GiB of at most 2.0 GiB (1 rank x 5 generations); older generations are let go of earlier"
    )
    tight = Forecast((GIB,), copies=0, generations=2, cap_bytes=2 * GIB - 1)
    tight.check()
    assert str(tight).endswith("; there is room for one generation alone, so only the first save is kept: raise memory_bytes")


def test_a_cap_below_one_generation_is_refused_with_what_to_set() -> None:
    with pytest.raises(CannotRun) as told:
        Forecast((600, 500), copies=1, generations=2, cap_bytes=1099).check()
    assert str(told.value) == (
        "one generation of this node's 2 ranks takes 1100 bytes and the cache may take 1099; "
        "raise [checkpoint] memory_bytes to 8800, or to 2200 at least"
    )


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (3 << 19, "1.5 MiB"), (5 << 30, "5.0 GiB")]
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
