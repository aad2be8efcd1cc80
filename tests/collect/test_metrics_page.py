"""The whole page of one recorded node, byte for byte, and what Prometheus' own checker says of it."""

import shutil
import subprocess
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

import pytest

from eagleeye.clock import ManualClock
from eagleeye.collect.exporter import Exporter
from eagleeye.collect.identity import IdentityCollector
from eagleeye.collect.infiniband import InfinibandCollector
from eagleeye.collect.logs import LogCollector
from eagleeye.collect.network import NetworkCollector
from eagleeye.collect.nvml import NvmlCollector
from eagleeye.collect.process import ProcessCollector
from eagleeye.collect.progress_reader import ProgressCollector

GOLDEN = Path(__file__).parents[1] / "golden" / "metrics_page.txt"


class OneGpu:
    """An object like the module `pynvml`, with one board that has a memory sensor only."""

    NVMLError = LookupError
    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> "OneGpu":
        return self

    def nvmlDeviceGetUUID(self, gpu: "OneGpu") -> str:
        return "GPU-aa"

    def nvmlDeviceGetMemoryInfo(self, gpu: "OneGpu") -> "OneGpu":
        return self

    used = 1 << 30

    def absent(self, *_: object) -> float:
        raise LookupError

    nvmlDeviceGetUtilizationRates = nvmlDeviceGetPowerUsage = nvmlDeviceGetTemperature = nvmlDeviceGetClockInfo = absent


@pytest.fixture
def text(bench) -> str:
    site = bench.site(
        ManualClock(datetime(2026, 3, 2, 8, 30, tzinfo=UTC).timestamp()),
        address="127.0.0.1",
        port=0,
        proc_root=str(bench.files / "proc"),
        sys_root=str(bench.files / "sys"),
        logs=(str(bench.files / "logs" / "*.log"),),
    )
    others = (InfinibandCollector, NetworkCollector, ProcessCollector, ProgressCollector, IdentityCollector, LogCollector)
    exporter = Exporter(site.settings, [NvmlCollector(site, OneGpu()), *(kind(site) for kind in others)], site)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics") as answer:
            return answer.read().decode()
    finally:
        exporter.close()


def test_page_of_the_recorded_node(text: str) -> None:
    said = [line for line in text.splitlines() if not line.startswith("eagleeye_exporter_collector_duration_seconds{")]
    assert said == GOLDEN.read_text().splitlines()


def test_promtool_accepts_the_page(text: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not on PATH")
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=30)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
