"""What `eagleeye export` and `eagleeye cache` may cost a node, with nothing beyond the base install."""

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

HEAVY = (
    "numpy",
    "scipy",
    "pandas",
    "pyarrow",
    "sklearn",
    "tslearn",
    "stumpy",
    "numba",
    "mlflow",
    "matplotlib",
    "torch",
    "requests",
)
BLOCKED = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {(*HEAVY, "prometheus_api_client", "cramjam", "yaml")!r}:
            print("imported", name, file=sys.stderr, flush=True)
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
from eagleeye.cli import main
sys.exit(main(sys.argv[1:]))
"""


def start(folder: Path) -> tuple["subprocess.Popen[str]", str, float]:
    """Return the exporter, its page's address, and the seconds from its start to its first page."""
    log = folder / "train.log"
    log.write_text("step 1\n" * 1000)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, "export", "--port", "0", "--address", "127.0.0.1", "--logs", str(log)],
        env={"PATH": os.environ["PATH"], "EAGLEEYE_RUN_DIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    url = process.stdout.readline().rpartition(" ")[2].strip()
    assert url, process.communicate()
    scrape(url)
    return process, url, time.monotonic() - began


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def peak_bytes(pid: int) -> int:
    """Return the sum of the peak resident sizes of a process and of all that it started."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    total = int(status["VmHWM"].split()[0]) * 1024
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += sum(peak_bytes(int(child)) for child in (task / "children").read_text().split())
    return total


def test_memory_and_imports_while_scraped(tmp_path: Path) -> None:
    process, url, _ = start(tmp_path)
    for _ in range(50):
        with (tmp_path / "train.log").open("a") as log:
            log.write("RuntimeError: again and again\n" * 1000)
        assert "eagleeye_log_window_errors" in scrape(url)
    time.sleep(0.5)
    used_bytes = peak_bytes(process.pid)
    process.terminate()
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (0, "")
    assert 10e6 < used_bytes < 60e6


def test_best_of_five_starts(tmp_path: Path) -> None:
    took_s = []
    for _ in range(5):
        process, _, start_s = start(tmp_path)
        process.terminate()
        process.communicate(timeout=10)
        took_s.append(start_s)
    assert min(took_s) < 1.0


def cache(folder: Path) -> "subprocess.Popen[str]":
    (folder / "store").mkdir()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            BLOCKED,
            "cache",
            "--port",
            "0",
            "--address",
            "127.0.0.1",
            "--run-dir",
            "run",
            "--storage",
            "store",
        ],
        cwd=folder,
        env={"PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("cache of "), process.communicate()
    return process


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used, in its own code and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_empty_cache_is_small_and_imports_nothing_heavy(tmp_path: Path) -> None:
    process = cache(tmp_path)
    used_bytes = peak_bytes(process.pid)
    process.terminate()
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")
    assert 10e6 < used_bytes < 60e6


@pytest.mark.slow
def test_an_idle_cache_takes_no_processor_time(tmp_path: Path) -> None:
    process = cache(tmp_path)
    began_s, idle_s = cpu_s(process.pid), 5.0
    time.sleep(idle_s)
    used_s = cpu_s(process.pid) - began_s
    process.terminate()
    process.communicate(timeout=20)
    assert used_s < 0.01 * idle_s
