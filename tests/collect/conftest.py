"""A bench: sites of the real machine or of files, and processes that really run."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from eagleeye.clock import Clock
from eagleeye.collect.base import Collector, Settings, Site


class Bench:
    """What a test of collectors needs; everything ends with the test."""

    def __init__(self, folder: Path) -> None:
        self.files = Path(__file__).parents[1] / "fixtures" / "node"
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        self._sites: list[Site] = []
        self._processes: list[subprocess.Popen[str]] = []

    def site(self, clock: Clock | None = None, **settings: object) -> Site:
        """Make a site; by default of the real machine, with a run folder of the test's own."""
        site = Site(Settings(**{"node": "n1", "run_dir": str(self.run_dir), **settings}), clock)  # type: ignore[arg-type]
        self._sites.append(site)
        return site

    def spawn(self, program: str, environ: Mapping[str, str] | None = None, *arguments: str) -> "subprocess.Popen[str]":
        """Start a Python program with an environment of its own."""
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env={"PATH": os.environ["PATH"], "EAGLEEYE_RUN_DIR": str(self.run_dir), **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        for site in self._sites:
            site.close()

    @staticmethod
    def rank(rank: int, **more: str) -> dict[str, str]:
        """Return what torchrun gives a rank of four."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "0",
            "EAGLEEYE_JOB": "test-job",
            "EAGLEEYE_NODE": "n1",
            **more,
        }

    @staticmethod
    def values(collector: Collector, now_s: float | None = None) -> dict[str, dict[tuple[str, ...], float]]:
        """Return what a collector says, by series without prefix, then by label values in the order of their names.

        The label `training_job` is left out.
        """
        found: dict[str, dict[tuple[str, ...], float]] = {}
        for sample in collector.collect(time.time() if now_s is None else now_s):
            key = tuple(value for name, value in sorted(sample.labels.items()) if name != "training_job")
            found.setdefault(sample.series.removeprefix("eagleeye_"), {})[key] = sample.value
        return found

    @staticmethod
    def wait_for(condition: Callable[[], object], seconds: float = 5.0) -> None:
        """Return as soon as `condition` holds; fail when it does not hold in time."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.02)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()
