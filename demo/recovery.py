"""How the job went on, read from what its ranks printed, and the unbroken run that it is compared with."""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from cluster import TRAIN, Node, end, free_port, loopback

from eagleeye.clock import SystemClock, monotonic_s
from eagleeye.errors import EnvironmentLacks
from eagleeye.files import write_whole
from eagleeye.report import Recovery, Restore

UNBROKEN = Path(__file__).with_name("unbroken")
"""Unbroken runs, by what decides their numbers: program, library, machine. One serves every demo on the same machine."""
SAVES_AFTER = 2
"""Saves after the restore that are compared."""
UNBROKEN_TIMEOUT_S = 600.0

_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+)Z (.*)")
_START = re.compile(r"rank (\d+) of \d+, ")
_STEP = re.compile(r"step (\d+) loss (\S+)")
_SAVED = re.compile(r"saved step (\d+), parameters (\w+)")
_RESTORED = re.compile(r"restored step (\d+) from (\w+) (\S+) in (\S+) s, parameters (\w+)")


@dataclass(slots=True)
class Stretch:
    """What one process of one rank printed: from its start to its end. Times are seconds since the epoch."""

    node: str
    rank: int
    started_s: float
    restore: Restore | None = None
    restored_s: float = 0.0
    losses: dict[int, float] = field(default_factory=dict)
    steps_s: dict[int, float] = field(default_factory=dict)
    saves: dict[int, str] = field(default_factory=dict)


def stretches(log: Path, node: str) -> list[Stretch]:
    """Return what the ranks that ran on a node printed, one after the other."""
    found: list[Stretch] = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        stamped = _LINE.fullmatch(line)
        if not stamped:
            continue
        at_s, text = datetime.fromisoformat(stamped[1] + "+00:00").timestamp(), stamped[2]
        if match := _START.match(text):
            found.append(Stretch(node, int(match[1]), at_s))
        elif not found:
            continue
        elif match := _STEP.fullmatch(text):
            found[-1].losses[int(match[1])], found[-1].steps_s[int(match[1])] = float(match[2]), at_s
        elif match := _SAVED.fullmatch(text):
            found[-1].saves[int(match[1])] = match[2]
        elif match := _RESTORED.fullmatch(text):
            found[-1].restore = Restore(found[-1].rank, node, match[2], match[3], int(match[1]), float(match[4]))
            found[-1].restored_s = at_s
    return found


def newest(nodes: Sequence[Node], since_s: float, ranks: int) -> list[Stretch]:
    """Return the newest stretch of each rank that began after `since_s`, by rank; empty until all of them have restored."""
    by_rank: dict[int, Stretch] = {}
    for node in nodes:
        for stretch in stretches(node.log, node.name):
            if stretch.started_s > since_s and stretch.restore:
                known = by_rank.get(stretch.rank)
                if known is None or known.started_s < stretch.started_s:
                    by_rank[stretch.rank] = stretch
    return [by_rank[rank] for rank in range(ranks)] if len(by_rank) == ranks else []


def trained_on(after: Sequence[Stretch]) -> bool:
    """Whether every rank has gone on and saved often enough since its restore for a comparison."""
    return bool(after) and all(len(stretch.saves) >= SAVES_AFTER for stretch in after)


def recovery(
    nodes: Sequence[Node],
    ranks: int,
    evicted: str,
    fault_s: float,
    verdict_s: float,
    evict_s: float,
    started_s: float,
    unbroken: "Unbroken",
) -> Recovery | None:
    """Return how the job went on after `evicted` was taken out, None when it did not.

    Parameters
    ----------
    fault_s, verdict_s, evict_s, started_s : when the node was broken, blamed, ordered out, and when the ranks were started again
    """
    after = newest(nodes, evict_s, ranks)
    if not after or not all(stretch.steps_s for stretch in after):
        return None
    restores = [stretch.restore for stretch in after if stretch.restore]
    restored_step = restores[0].step
    earlier = [s for node in nodes for s in stretches(node.log, node.name) if s.started_s < evict_s]
    before = {step: loss for s in earlier for step, loss in s.losses.items()}
    loss = {step: value for step, value in before.items() if step <= restored_step} | after[0].losses
    saves = [(step, digest, unbroken.saves.get(step, "")) for step, digest in sorted(after[0].saves.items())]
    same = [s.losses == {step: unbroken.losses.get(step) for step in s.losses} for s in after]
    same += [digest == unbroken.saves.get(step, digest) for s in after for step, digest in s.saves.items()]
    identical = all(same) and all(r.step == restored_step for r in restores) and any(known for _, _, known in saves)
    moments = [
        ("detect", verdict_s),
        ("plan", evict_s),
        ("stop", started_s),
        ("start", max(stretch.started_s for stretch in after)),
        ("restore", max(stretch.restored_s for stretch in after)),
        ("first step", max(min(stretch.steps_s.values()) for stretch in after)),
    ]
    phases, last_s = [], fault_s
    for name, at_s in moments:
        phases.append((name, max(0.0, at_s - last_s)))
        last_s = max(last_s, at_s)
    spare = next((restore.node for restore in restores if any(n.spare and n.name == restore.node for n in nodes)), "")
    lost = max(before) - restored_step
    return Recovery(evicted, spare, restored_step, lost, phases, restores, loss, unbroken.losses, saves, identical)


@dataclass(frozen=True, slots=True)
class Unbroken:
    """An unbroken run of the same job: losses and hashes of the parameters by step."""

    losses: dict[int, float]
    saves: dict[int, str]


def unbroken(steps: int, ranks: int, run_dir: Path) -> Unbroken:
    """Return an unbroken run of at least `steps` steps, kept from an earlier demo or made now.

    Raises
    ------
    EnvironmentLacks
        It did not get so far.
    """
    decides = [TRAIN.read_text(encoding="utf-8"), version("torch"), platform.processor(), platform.node(), str(ranks)]
    kept = UNBROKEN / f"{hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]}.json"
    known = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {"losses": {}, "saves": {}}
    if len(known["losses"]) < steps:
        made = _run_unbroken(-(-steps // 100) * 100 + 100, ranks, run_dir)
        known = {"losses": made.losses, "saves": made.saves}
        write_whole(kept, json.dumps(known))
    return Unbroken({int(step): loss for step, loss in known["losses"].items()}, {int(s): d for s, d in known["saves"].items()})


def _run_unbroken(steps: int, ranks: int, run_dir: Path) -> Unbroken:
    logs = [run_dir / f"unbroken-{rank}.log" for rank in range(ranks)]
    port = str(free_port())
    processes = []
    try:
        for rank, log in enumerate(logs):
            meeting = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = os.environ | meeting | {"GLOO_SOCKET_IFNAME": loopback(), "EAGLEEYE_JOB": "unbroken"}
            command = [sys.executable, "-u", str(TRAIN), "--no-cache", "--steps", str(steps)]
            with log.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, process_group=0
                    )
                )
        deadline_s, told_s = monotonic_s() + UNBROKEN_TIMEOUT_S, monotonic_s()
        while any(process.poll() is None for process in processes):
            SystemClock().sleep_s(0.5)
            if monotonic_s() > deadline_s or any(process.poll() for process in processes):
                raise EnvironmentLacks(f"the unbroken run did not reach step {steps}; see {logs[0]}")
            if monotonic_s() - told_s > 10:
                told_s = monotonic_s()
                done = stretches(logs[0], "")
                print(f"          unbroken run: step {max(done[0].losses, default=0) if done else 0} of {steps}", file=sys.stderr)
    finally:
        end(processes)
    made = stretches(logs[0], "")[0]
    return Unbroken(made.losses, made.saves)
