"""GPU load, memory, power, temperature and clock, from NVIDIA's management library."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from eagleeye.clock import monotonic_s
from eagleeye.collect.base import Site
from eagleeye.errors import NoData
from eagleeye.metrics import PREFIX
from eagleeye.records import Sample


class NvmlCollector:
    """One set of samples a GPU. A GPU that does not answer loses its own samples only.

    Calls into a sick driver may never return: the exporter runs this in a thread of its own and goes on without it.

    Parameters
    ----------
    nvml : the module `pynvml`, or an object like it
    """

    name = "nvml"
    RETRY_S = 30.0
    """How long a machine without a driver is believed to have none."""

    def __init__(self, site: Site, nvml: Any = None) -> None:
        self._nvml = nvml
        self._ready = False
        self._absent_until_s = -math.inf

    def supported(self) -> bool:
        """Whether it makes sense to ask for a driver now."""
        return monotonic_s() >= self._absent_until_s

    def collect(self, now_s: float) -> Iterable[Sample]:
        """Return the readings of every GPU.

        Raises
        ------
        NoData
            No driver, or no GPU.
        OSError
            There is a driver, and it or all of its GPUs fail.
        """
        nvml = self._begin()
        failures: list[str] = []
        samples: list[Sample] = []
        try:
            count = int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            self._ready = False
            raise OSError(f"NVML lost its driver: {error}") from None
        if count == 0:
            raise NoData("the driver knows no GPU")
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = nvml.nvmlDeviceGetUUID(handle)
            except nvml.NVMLError as error:
                failures.append(f"GPU {index}: {error}")
                continue
            labels = {"gpu": str(index), "uuid": uuid.decode() if isinstance(uuid, bytes) else str(uuid)}
            for name, read in _readings(nvml, handle):
                try:
                    samples.append(Sample(PREFIX + name, labels, float(read())))
                except nvml.NVMLError:
                    # Not every board has every sensor.
                    continue
        if not samples:
            self._ready = False
            raise OSError("; ".join(failures) or "no GPU answers any question")
        return samples

    def _begin(self) -> Any:
        if self._nvml is None:
            try:
                import pynvml
            except ImportError:
                self._absent_until_s = math.inf
                raise NoData("the package nvidia-ml-py is not installed") from None
            self._nvml = pynvml
        nvml = self._nvml
        if not self._ready:
            try:
                nvml.nvmlInit()
            except nvml.NVMLError as error:
                absent = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
                if error.value in absent:
                    self._absent_until_s = monotonic_s() + self.RETRY_S
                    raise NoData(f"no NVIDIA driver: {error}") from None
                raise OSError(f"NVML does not start: {error}") from None
            self._ready = True
        return nvml


def _readings(nvml: Any, handle: Any) -> tuple[tuple[str, Callable[[], float]], ...]:
    return (
        ("gpu_utilization_ratio", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
        ("gpu_memory_used_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
        ("gpu_power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        ("gpu_temperature_celsius", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        ("gpu_sm_clock_hertz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6),
    )
