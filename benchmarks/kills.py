"""A campaign of random SIGKILLs against a job that saves, judged by an oracle that knows nothing of the engine.

Three nodes on loopback are three ``eagleeye cache`` processes; the ranks are real processes that agree over gloo. One victim is
killed at a time, a random moment after a save began: a trainer, the cache of its node, or the neighbour's cache that holds its
copies. The job starts again, and the oracle compares what each rank restored with what the ranks themselves wrote down before.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from provenance import provenance

from checkpoint import place
from checkpoint.client import LEVELS, Client
from checkpoint.errors import CheckpointError
from eagleeye.clock import monotonic_s

NODES, RANKS = 3, 2
"""Rank i runs on node i; the last node runs none and holds copies only."""
JOB = "campaign"
VICTIMS = ("trainer", "cache", "neighbour")
SOURCES = ("local", "neighbour", "storage")
EVENTS = ("save", *LEVELS)
WEIGHT, MOMENT = (1024, 1024), (512, 1024)
STATE_BYTES = 4 * 1024 * 1024 + 8 * 512 * 1024
VERB = "from eagleeye.cli import main; raise SystemExit(main())"
POLL_S = 0.003
PATIENCE_S = 60.0
"""A job that does not save, copy or restore for so long has failed."""
RESULT = Path(__file__).parent / "results" / "kills.json"

Record = Mapping[str, Any]


def main() -> int:
    """Run the campaign, print and write; 1 when anything was violated, and then the folder stays."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT, help="where the result is written")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="eagleeye-kills-"))
    start_s = monotonic_s()
    campaign = Campaign(folder, options.seed)
    try:
        campaign.run(options.kills)
    except JobFailed as failed:
        campaign.problems.append(str(failed))
    finally:
        campaign.end()
    minutes = round((monotonic_s() - start_s) / 60, 1)
    result: dict[str, Any] = {**provenance(), "seed": options.seed, "minutes": minutes, **campaign.result()}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result["victims"]))
    if campaign.problems:
        print(f"{len(campaign.problems)} violations; logs, indices and storage are in {folder}:", *campaign.problems, sep="\n  ")
        return 1
    shutil.rmtree(folder)
    return 0


# ---- the job


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the job. The nonce makes the bytes of two attempts differ where step and rank are the same."""

    nonce: str
    port: int
    every: int
    """Every how many steps it saves."""
    pause_s: float
    """How long a step computes."""


def empty_state() -> dict[str, Any]:
    """Return a state of `STATE_BYTES` before the first step."""
    model = {"weight": torch.zeros(WEIGHT)}
    return {"model": model, "optimizer": {"moment": torch.zeros(MOMENT, dtype=torch.int64)}, "step": 0, "nonce": ""}


def fill(state: dict[str, Any], nonce: str, step: int, rank: int) -> None:
    """Make every byte of the state one of this attempt, step and rank."""
    seed = int.from_bytes(hashlib.sha256(f"{nonce} {step} {rank}".encode()).digest()[:7], "big")
    generator = torch.Generator().manual_seed(seed)
    state["model"]["weight"].view(torch.int64).random_(generator=generator)
    state["optimizer"]["moment"].random_(generator=generator)
    state["step"], state["nonce"] = step, nonce


def digest(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all that a state holds."""
    made = hashlib.sha256(f"{state['step']} {state['nonce']}".encode())
    for tensor in (state["model"]["weight"], state["optimizer"]["moment"]):
        made.update(tensor.view(torch.uint8).numpy())
    return made.hexdigest()


class Log:
    """What one rank tells the oracle: JSON lines, appended whole and synced."""

    def __init__(self, path: Path, nonce: str) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        self._nonce = nonce
        os.write(self._file, b"\n")  # a process before may have died within a line

    def write(self, event: str, **facts: object) -> None:
        """Append one line; it is on disk when this returns."""
        line = json.dumps({"event": event, "nonce": self._nonce} | facts)
        os.write(self._file, f"{line}\n".encode())
        os.fsync(self._file)


def train(folder: Path, rank: int, attempt: Attempt) -> None:
    """Be one rank: restore, tell what, and save until killed."""
    output = os.open(folder / f"rank{rank}.out", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    parent = os.getppid()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{attempt.port}", rank=rank, world_size=RANKS)
    log = Log(folder / f"rank{rank}.jsonl", attempt.nonce)
    state = empty_state()
    client = Client(JOB, rank, RANKS, run_dir=str(folder / f"node{rank}"))
    start_s = monotonic_s()
    try:
        restored = client.load(into=state)
    except CheckpointError as error:
        log.write("failed", why=str(error))
        sys.exit(1)
    seconds = round(monotonic_s() - start_s, 3)
    if restored is None:
        log.write("nothing")
    else:
        log.write(
            "restored", generation=restored.generation, step=restored.step, sha256=digest(restored.state), into=digest(state),
            source=restored.source, seconds=seconds, notes=restored.notes,
        )  # fmt: skip
    step = 0 if restored is None else restored.step
    while os.getppid() == parent:
        step += 1
        fill(state, attempt.nonce, step, rank)
        dist.all_reduce(torch.zeros(1))
        time.sleep(attempt.pause_s)
        if step % attempt.every == 0:
            log.write("save", step=step, sha256=digest(state))
            handle = client.save(step, state)
            for level in LEVELS:
                getattr(handle, level).add_done_callback(_reached(log, level, step))


def _reached(log: Log, level: str, step: int) -> Callable[["Future[None]"], None]:
    def tell(future: "Future[None]") -> None:
        if future.exception() is None:
            log.write(level, step=step)

    return tell


# ---- the oracle


@dataclass(slots=True)
class Finding:
    """What the oracle says about one restart. `problems` are sentences; without any all is well."""

    wrong: int = 0
    mixed: int = 0
    lost: int = 0
    """Steps that had to survive and are newer than the restored one."""
    step: int = 0
    problems: list[str] = field(default_factory=list)


def judge(logs: Sequence[Sequence[Record]], nonces: Sequence[str], level: str) -> Finding:
    """Compare what every rank restored in the newest attempt with what all ranks wrote down before.

    Parameters
    ----------
    logs : the lines of each rank, in order
    nonces : the attempts in order; the last one is judged
    level : what must survive is each step of which every rank logged this level in an attempt before
    """
    finding = Finding()
    order = {nonce: i for i, nonce in enumerate(nonces)}
    saved = [{r["sha256"]: (order[r["nonce"]], r["step"]) for r in log if r["event"] == "save"} for log in logs]
    restores = [[r for r in log if r["nonce"] == nonces[-1] and r["event"] in ("restored", "nothing")] for log in logs]
    safe = set.intersection(
        *({(order[r["nonce"]], r["step"]) for r in log if r["event"] == level and r["nonce"] != nonces[-1]} for log in logs)
    )
    origins = set()
    for rank, told in enumerate(restores):
        if len(told) != 1:
            finding.problems.append(f"rank {rank} restored {len(told)} times")
        elif told[0]["event"] == "restored":
            origin = saved[rank].get(told[0]["sha256"])
            origins.add(origin)
            if origin is None or origin[1] != told[0]["step"] or told[0]["into"] != told[0]["sha256"]:
                finding.wrong += 1
                finding.problems.append(f"rank {rank} restored step {told[0]['step']} with bytes that it never saved as that")
        else:
            origins.add((-1, 0))
    if len(origins) > 1 or len({r.get("generation") for told in restores for r in told}) > 1:
        finding.mixed = 1
        finding.problems.append(f"the ranks restored different generations: {[told[0] for told in restores if told]}")
    if len(origins) == 1 and (origin := origins.pop()) is not None:
        lost = sorted(one for one in safe if one > origin)
        finding.step, finding.lost = origin[1], len(lost)
        if lost:
            finding.problems.append(
                f"step {lost[-1][1]} of attempt {lost[-1][0]} was {level} on all ranks and is lost; restored was "
                + (f"step {origin[1]} of attempt {origin[0]}" if origin[0] >= 0 else "nothing: the job began anew")
            )
    return finding


# ---- the campaign


class JobFailed(Exception):
    """The job cannot go on, so the campaign ends."""


class Campaign:
    """The nodes, the ranks, and the one who kills them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.problems: list[str] = []
        self._folder = folder
        self._random = random.Random(seed)
        self._ports = free_ports(NODES)
        peers = ",".join(f"node{i}=127.0.0.1:{port}" for i, port in enumerate(self._ports))
        os.environ["EAGLEEYE_CHECKPOINT__PEERS"] = peers
        self._caches: dict[int, subprocess.Popen[bytes]] = {}
        self._trainers: list[ForkProcess] = []
        self._attempts: list[Attempt] = []
        self._logs: list[list[Record]] = [[] for _ in range(RANKS)]
        self._read_bytes = [0] * RANKS
        self._counts = {victim: Counter[str]() for victim in VICTIMS}
        self._longest_s = dict.fromkeys(VICTIMS, 0.0)
        self._edges: Counter[str] = Counter()
        self._cycles_s: list[float] = []

    def run(self, kills: int) -> None:
        """Kill so often."""
        for node in range(NODES):
            self._start_cache(node)
        # the very first start insists on asking all of them whether there is a checkpoint
        run_dirs = [str(self._folder / f"node{node}") for node in range(NODES)]
        self._wait(lambda: all(place.local_cache(run_dir) for run_dir in run_dirs), "not every cache started")
        self._start_trainers()
        self._wait(lambda: self._common("replicated"), "no step was replicated")
        for number in range(1, kills + 1):
            start_s = monotonic_s()
            victim, rank = self._random.choice(VICTIMS), self._random.randrange(RANKS)
            told = self._kill_one(victim, rank)
            finding, sources, restore_s = self._restart(victim)
            self._cycles_s.append(monotonic_s() - start_s)
            counts = self._counts[victim]
            counts.update({"kills": 1, "wrong": finding.wrong, "mixed": finding.mixed, "lost": finding.lost})
            counts.update(sources)
            self._longest_s[victim] = max(self._longest_s[victim], restore_s)
            self.problems += [f"kill {number}, {told}: {problem}" for problem in finding.problems]
            back = f"step {finding.step} is back from {', '.join(sources)} in {restore_s:.2f} s"
            print(f"{number}/{kills} {told}: {back}; {self._cycles_s[-1]:.1f} s", *finding.problems, sep="\n  ", flush=True)

    def result(self) -> dict[str, Any]:
        """Return the counts as they are written down."""
        victims = {}
        for victim, counts in self._counts.items():
            row: dict[str, float] = {"kills": counts["kills"]}
            row |= {f"ranks restored from {source}": counts[source] for source in SOURCES}
            row |= {"wrong bytes": counts["wrong"], "mixed generations": counts["mixed"], "steps lost": counts["lost"]}
            victims[victim] = row | {"longest restore s": round(self._longest_s[victim], 2)}
        return {
            "nodes": NODES,
            "ranks": RANKS,
            "state_bytes_per_rank": STATE_BYTES,
            "saves": sum(record["event"] == "save" for record in self._logs[0]),
            "victims": victims,
            "newest save of the victim's rank when it was killed": dict(self._edges.most_common()),
            "median_cycle_s": round(sorted(self._cycles_s)[len(self._cycles_s) // 2], 1) if self._cycles_s else None,
            "violations": self.problems,
        }

    def end(self) -> None:
        """Leave nothing running."""
        self._kill_trainers()
        for cache in self._caches.values():
            cache.kill()
            cache.wait()

    # ---- one kill

    def _kill_one(self, victim: str, rank: int) -> str:
        """Kill at a random moment, and then all ranks, as a launcher does; return what was done."""
        if victim == "trainer":
            first = self._random.randint(1, 5)
            self._wait(lambda: self._saves(rank) >= first, "no rank saves")
        else:
            # the kill before may have taken one of two copies: until there is a second again, another kill may take the last
            self._wait(lambda: self._common("replicated"), "no step was replicated")
        begun = self._saves(rank)
        self._wait(lambda: self._saves(rank) > begun, "no rank saves")
        # half of them soon after, where the copy is made; half of them over all that comes later
        delay_s = self._random.uniform(0.0, self._random.choice((0.02, 0.3)))
        time.sleep(delay_s)
        told = f"{victim} of rank {rank} killed {delay_s * 1000:.0f} ms after a save began"
        if victim == "trainer":
            self._trainers[rank].kill()
            edge = self._edge(rank)
            time.sleep(self._random.uniform(0.0, 0.1))
            self._kill_trainers()
        else:
            node = rank if victim == "cache" else (rank + 1) % NODES
            self._caches[node].kill()
            edge = self._edge(rank)
            self._caches[node].wait()
            if self._random.random() < 0.5:
                time.sleep(self._random.uniform(0.0, 0.05))
                self._kill_trainers()
                self._start_cache(node)
            else:
                told += ", training went on"
                time.sleep(self._random.uniform(0.0, 0.5))
                self._start_cache(node)
                time.sleep(self._random.uniform(0.0, 2.0))
                self._look()
                self._kill_trainers()
        self._edges[edge] += 1
        return f"{told} ({edge})"

    def _restart(self, victim: str) -> tuple[Finding, Counter[str], float]:
        """Start the job again; return the oracle's finding, how many ranks restored from where, and the longest restore."""
        self._start_trainers()
        nonce = self._attempts[-1].nonce
        ends = ("restored", "nothing")
        self._wait(lambda: all(any(r["nonce"] == nonce and r["event"] in ends for r in log) for log in self._logs), "no restore")
        # a crash of the trainers alone must not even cost what only their own caches hold
        finding = judge(self._logs, [a.nonce for a in self._attempts], "cached" if victim == "trainer" else "replicated")
        told = [r for log in self._logs for r in log if r["nonce"] == nonce and r["event"] == "restored"]
        return finding, Counter(r["source"] for r in told), max((r["seconds"] for r in told), default=0.0)

    # ---- processes

    def _start_cache(self, node: int) -> None:
        run_dir = self._folder / f"node{node}"
        command = [
            sys.executable, "-c", VERB, "cache", "--node", f"node{node}", "--address", "127.0.0.1",
            "--port", str(self._ports[node]), "--run-dir", str(run_dir), "--storage", str(self._folder / "storage"),
        ]  # fmt: skip
        with (self._folder / f"cache{node}.out").open("ab") as output:
            self._caches[node] = subprocess.Popen(command, stdout=output, stderr=output)

    def _start_trainers(self) -> None:
        # forked, as importing torch takes longer than all else; this process has no second thread
        nonce = f"{len(self._attempts)}-{self._random.getrandbits(64):016x}"
        pause_s = self._random.choice((0.0, 0.02, 0.1))
        attempt = Attempt(nonce, free_port(), self._random.choice((1, 2)), pause_s)
        self._attempts.append(attempt)
        context = multiprocessing.get_context("fork")
        self._trainers = [context.Process(target=train, args=(self._folder, r, attempt), daemon=True) for r in range(RANKS)]
        for trainer in self._trainers:
            trainer.start()

    def _kill_trainers(self) -> None:
        for trainer in self._trainers:
            trainer.kill()
        for trainer in self._trainers:
            trainer.join()
        self._read()

    # ---- what the ranks wrote

    def _read(self) -> None:
        for rank, log in enumerate(self._logs):
            path = self._folder / f"rank{rank}.jsonl"
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read_bytes[rank])
                text = file.read()
            whole = text.rfind(b"\n") + 1
            self._read_bytes[rank] += whole
            log += parse(text[:whole])

    def _of_attempt(self, rank: int) -> list[Record]:
        nonce = self._attempts[-1].nonce
        found = []
        for record in reversed(self._logs[rank]):
            if record["nonce"] != nonce:
                break
            found.append(record)
        return found

    def _saves(self, rank: int) -> int:
        return sum(record["event"] == "save" for record in self._of_attempt(rank))

    def _common(self, level: str) -> bool:
        """Whether every rank reached a level with one and the same step of this attempt."""
        return bool(set.intersection(*({r["step"] for r in self._of_attempt(k) if r["event"] == level} for k in range(RANKS))))

    def _edge(self, rank: int) -> str:
        """Say how far the newest save of a rank has come."""
        self._read()
        records = self._of_attempt(rank)
        newest = max(record["step"] for record in records if record["event"] == "save")
        reached = {record["event"] for record in records if record.get("step") == newest}
        return " and ".join(event for event in LEVELS if event in reached) or "begun"

    def _wait(self, condition: Callable[[], bool], otherwise: str) -> None:
        until_s = monotonic_s() + PATIENCE_S
        while True:
            self._read()
            if condition():
                return
            self._look()
            if monotonic_s() > until_s:
                raise JobFailed(f"{otherwise} within {PATIENCE_S:g} s")
            time.sleep(POLL_S)

    def _look(self) -> None:
        """Raise JobFailed when a process that should run does not."""
        self._read()
        for rank, trainer in enumerate(self._trainers):
            if trainer.exitcode is not None:
                why = [r["why"] for r in self._of_attempt(rank) if r["event"] == "failed"]
                raise JobFailed(f"rank {rank} ended by itself with code {trainer.exitcode}: {why or 'see its output'}")
        for node, cache in self._caches.items():
            if cache.poll() is not None:
                raise JobFailed(f"the cache of node{node} ended by itself with code {cache.returncode}")


def parse(text: bytes) -> list[Record]:
    """Return the records of a log. A line that a SIGKILL tore is none: what it announces had not begun."""
    found = []
    for line in text.splitlines():
        if line.startswith(b"{") and line.endswith(b"}"):
            found.append(json.loads(line))
    return found


def table(victims: Mapping[str, Mapping[str, float]]) -> str:
    """Return the counts as text, one line for each kind of victim."""
    headings = ["victim", *next(iter(victims.values()))]
    rows = [[victim, *(f"{number:g}" for number in row.values())] for victim, row in victims.items()]
    widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [headings, *rows])


def free_port() -> int:
    """Return a TCP port that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def free_ports(count: int) -> list[int]:
    """Return ports that stay free while their server is dead: outside of the range from which connections take theirs."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(10_000, 32_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        found.append(port)
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
