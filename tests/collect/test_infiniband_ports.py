"""Ports as sysfs shows them, healthy, half readable and absent."""

import shutil
from pathlib import Path

import pytest

from eagleeye.collect.infiniband import InfinibandCollector
from eagleeye.errors import NoData


def test_recorded_ports(bench) -> None:
    # mlx5_0/2 is a free socket; a counter of mlx5_1/1 cannot be read, the others can
    found = bench.values(InfinibandCollector(bench.site(sys_root=str(bench.files / "sys"))))
    good, bad = ("mlx5_0", "1"), ("mlx5_1", "1")
    assert found == {
        "infiniband_port_data_transmitted_bytes_total": {good: 4_000_000.0},
        "infiniband_port_data_received_bytes_total": {good: 8_000_000.0, bad: 2_000.0},
        "infiniband_port_transmit_wait_total": {good: 345.0},
        "infiniband_port_errors_total": {good: 10.0, bad: 7.0},
        "infiniband_port_up": {good: 1.0, bad: 0.0},
    }


def test_a_port_that_cannot_be_read_loses_only_itself(bench, tmp_path: Path) -> None:
    shutil.copytree(bench.files / "sys", tmp_path / "sys")
    broken = tmp_path / "sys" / "class" / "infiniband" / "mlx5_1" / "ports" / "1"
    shutil.rmtree(broken)
    broken.mkdir()
    found = bench.values(InfinibandCollector(bench.site(sys_root=str(tmp_path / "sys"))))
    assert set(found["infiniband_port_errors_total"]) == {("mlx5_0", "1")}


def test_ports_of_which_none_can_be_read_are_a_failure(bench, tmp_path: Path) -> None:
    (tmp_path / "class" / "infiniband" / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    with pytest.raises(OSError, match="none of the 1 ports"):
        list(InfinibandCollector(bench.site(sys_root=str(tmp_path))).collect(0.0))


def test_no_device(bench, tmp_path: Path) -> None:
    collector = InfinibandCollector(bench.site(sys_root=str(tmp_path)))
    assert not collector.supported()
    with pytest.raises(NoData):
        list(collector.collect(0.0))
