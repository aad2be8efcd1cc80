"""A fleet: launchers as real processes on one machine, each taken for a node, with ranks that do as a test says."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagleeye.records import from_json
from remediation.launcher.rounds import Agent, Job
from remediation.launcher.store import FolderStore

LAUNCH = """
import json, sys
from eagleeye.errors import EagleEyeError
from remediation.launcher.agent import Settings, launch
try:
    sys.exit(launch(Settings(**json.loads(sys.argv[1])), sys.argv[2:]))
except EagleEyeError as error:
    print(f"eagleeye launch: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""

RANK = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
round_ = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
me = f"round{round_}-rank{os.environ['RANK']}"
beside = folder / f".{me}"
beside.write_text("\\n".join([str(os.getpid()), *(f"{k}={v}" for k, v in sorted(os.environ.items()))]))
beside.rename(folder / me)
"""
"""A rank leaves a file ``roundN-rankM`` with its process number and environment; what it does then follows."""

FOREVER = "time.sleep(600)"


class Fleet:
    """Launchers of one job; everything that they started ends with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rendezvous = folder / "rendezvous"
        self.rendezvous.mkdir()
        self.store = FolderStore(self.rendezvous / "j")
        self.launchers: dict[str, subprocess.Popen[str]] = {}
        self.ended: list[subprocess.Popen[str]] = []

    def start(self, node: str, then: str = FOREVER, **more: Any) -> "subprocess.Popen[str]":
        """Start the launcher of a node; by default one of three nodes, quick to notice everything."""
        settings = {
            "job": "j",
            "rendezvous": str(self.rendezvous),
            "node": node,
            "address": "127.0.0.1",
            "nodes": 3,
            "lease_s": 1.0,
            "agent_lost_s": 1.5,
            "period_s": 0.05,
            "grace_s": 1.0,
            **more,
        }
        command = [sys.executable, "-c", RANK + then, str(self.folder)]
        with (self.folder / f"{node}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, json.dumps(settings), *command],
                env={**os.environ, "EAGLEEYE_RUN_DIR": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        if node in self.launchers:
            self.ended.append(self.launchers[node])
        self.launchers[node] = process
        return process

    def start_all(self, then: str = FOREVER, spares: int = 1, **more: Any) -> None:
        """Start node0, node1, node2, and spares node3, ...; return when the first round runs."""
        for n in range(3 + spares):
            self.start(f"node{n}", then, spare=n > 2, **more)
        self.wait_for_round(1, spares)

    def wait_for_round(self, number: int, spares: int = 0) -> Job:
        """Return the job once all ranks of a round have begun."""
        self.wait_for(lambda: all((self.folder / f"round{number}-rank{rank}").exists() for rank in range(3)))
        self.wait_for(lambda: len(self.job().spares) >= spares)
        return self.job()

    def job(self) -> Job:
        """Return the job's document."""
        found = self.store.get("job")
        return from_json(Job, found[1]) if found else Job("j", 3, 3, 1)

    def agent(self, node: str) -> Agent:
        """Return the document of a launcher."""
        found = self.store.get(f"agents/{node}")
        assert found is not None
        return from_json(Agent, found[1])

    def pid(self, number: int, rank: int) -> int:
        """Return the process number of a rank."""
        return int((self.folder / f"round{number}-rank{rank}").read_text().splitlines()[0])

    def environ(self, number: int, rank: int) -> dict[str, str]:
        """Return the environment of a rank."""
        lines = (self.folder / f"round{number}-rank{rank}").read_text().splitlines()[1:]
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def leader(self) -> str:
        """Return the node that holds the lease."""
        found = self.store.get("leader")
        return str(found[1]["holder"]) if found else ""

    def log(self, node: str) -> str:
        """Return what a launcher and its ranks wrote."""
        return (self.folder / f"{node}.log").read_text()

    def codes(self, *nodes: str, seconds: float = 15.0) -> list[int]:
        """Return the exit codes of launchers once they have ended."""
        end_s = time.monotonic() + seconds
        return [self.launchers[node].wait(max(0.1, end_s - time.monotonic())) for node in nodes]

    def wait_for(self, condition: Callable[[], object], seconds: float = 15.0) -> None:
        """Return as soon as `condition` holds; fail when it does not hold in time."""
        end_s = time.monotonic() + seconds
        while not condition():
            told = "\n".join(self.log(node) for node in self.launchers)
            assert time.monotonic() < end_s, f"waited in vain\n{told}"
            time.sleep(0.02)

    def close(self) -> None:
        for process in (*self.launchers.values(), *self.ended):
            # The launcher is killed, not asked: its keepers end the ranks.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        pids = [int(path.read_text().splitlines()[0]) for path in self.folder.glob("round*-rank*")]
        self.wait_for(lambda: not any(self.alive(pid) for pid in pids))

    @staticmethod
    def alive(pid: int) -> bool:
        """Whether a process exists that is no zombie."""
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.close()
