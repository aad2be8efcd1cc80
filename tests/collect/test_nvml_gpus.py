"""GPUs behind an object like the module `pynvml`: healthy, lost, without a sensor, without a driver."""

from types import SimpleNamespace

import pytest

from eagleeye.collect.nvml import NvmlCollector
from eagleeye.errors import NoData


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class FakeNvml:
    """Two boards; `broken` maps a function's name, with or without the board's index, to an error."""

    NVMLError = NVMLError
    NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_GPU_IS_LOST = 9, 12, 15
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    def __init__(self, **broken: int) -> None:
        self.broken = broken
        self.starts = 0

    def _ask(self, name: str, gpu: object = "") -> None:
        for key in (name, f"{name}{gpu}"):
            if key in self.broken:
                raise NVMLError(self.broken[key])

    def nvmlInit(self) -> None:
        self.starts += 1
        self._ask("init")

    def nvmlDeviceGetCount(self) -> int:
        self._ask("count")
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._ask("handle", index)
        return index

    def nvmlDeviceGetUUID(self, gpu: int) -> str | bytes:
        return "GPU-aa" if gpu == 0 else b"GPU-bb"

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:
        self._ask("utilization", gpu)
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(total=80 << 30, free=10 << 30, used=70 << 30)

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        self._ask("power", gpu)
        return 412_500

    def nvmlDeviceGetTemperature(self, gpu: int, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 61 + gpu

    def nvmlDeviceGetClockInfo(self, gpu: int, clock: int) -> int:
        assert clock == self.NVML_CLOCK_SM
        return 1410


ONE, TWO = ("0", "GPU-aa"), ("1", "GPU-bb")


def test_base_units(bench) -> None:
    assert bench.values(NvmlCollector(bench.site(), FakeNvml())) == {
        "gpu_utilization_ratio": {ONE: 0.97, TWO: 0.97},
        "gpu_memory_used_bytes": {ONE: 70.0 * 2**30, TWO: 70.0 * 2**30},
        "gpu_power_watts": {ONE: 412.5, TWO: 412.5},
        "gpu_temperature_celsius": {ONE: 61.0, TWO: 62.0},
        "gpu_sm_clock_hertz": {ONE: 1.41e9, TWO: 1.41e9},
    }


def test_a_lost_gpu_and_a_missing_sensor_lose_only_themselves(bench) -> None:
    found = bench.values(NvmlCollector(bench.site(), FakeNvml(handle1=15, power0=3)))
    assert {key for series in found.values() for key in series} == {ONE}
    assert "gpu_power_watts" not in found
    assert len(found) == 4


def test_no_driver_is_no_data_and_is_not_asked_at_every_scrape(bench) -> None:
    nvml = FakeNvml(init=12)
    collector = NvmlCollector(bench.site(), nvml)
    assert collector.supported()
    with pytest.raises(NoData, match="no NVIDIA driver"):
        list(collector.collect(0.0))
    assert not collector.supported()
    assert nvml.starts == 1


@pytest.mark.parametrize("broken", [{"init": 999}, {"count": 999}, {"handle0": 15, "handle1": 15}])
def test_a_sick_driver_is_a_failure_and_is_started_anew(bench, broken: dict[str, int]) -> None:
    nvml = FakeNvml(**broken)
    collector = NvmlCollector(bench.site(), nvml)
    with pytest.raises(OSError, match="NVML error"):
        list(collector.collect(0.0))
    nvml.broken = {}
    assert len(list(collector.collect(0.0))) == 10
    assert nvml.starts == 2


def test_the_real_library_on_this_machine(bench) -> None:
    collector = NvmlCollector(bench.site())
    try:
        found = bench.values(collector)
    except NoData:
        pytest.skip("this machine has no NVIDIA driver")
    assert found["gpu_memory_used_bytes"]
