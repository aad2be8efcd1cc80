"""Record the demo's job as labelled traces, most of them with one node broken or with something harmless going on.

    python datasets/record.py --jobs 4                 record whatever is not there yet
    python datasets/record.py --only slow-0,plain-3    these alone
    python datasets/record.py --check                  look again at what is there

Each run is a cluster of its own (demo/cluster.py), broken for real (demo/faults.py) and scraped by the product's own source, once
a second. A run is kept only when it shows what its label says; otherwise it is recorded again. Needs root, tc, nft, fsfreeze,
cgroups of version 1 for memory and block I/O, and for the memory runs swap space, which is made where there is none.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "demo"), str(ROOT)]

import faults  # noqa: E402
from cluster import Cluster, unmount_below  # noqa: E402
from faults import Fault  # noqa: E402

from eagleeye.clock import SystemClock, monotonic_s  # noqa: E402
from eagleeye.collect import progress  # noqa: E402
from eagleeye.errors import DataError, EagleEyeError, EnvironmentLacks, NoData, UsageError  # noqa: E402
from eagleeye.files import write_whole  # noqa: E402
from eagleeye.source.base import Settings, open_source  # noqa: E402
from eagleeye.source.record import record  # noqa: E402
from eagleeye.source.trace import TraceSource  # noqa: E402

RUNS = Path(__file__).with_name("runs")
FILES = ("trace.json", "metrics.parquet", "labels.json", "run.json")
"""What a whole run consists of, `run.json` being the last to be written."""
INTERVAL_S = 1.0
SECONDS = 180.0
START_TIMEOUT_S = 240.0
STAGGER_S = 12.0
"""Between two starts, which cost more CPU time than the rest of a run."""
ATTEMPTS = 3
HEALTHY_SHARE = 0.4
STUCK_S = 25.0
"""No healthy job takes longer over one step, nor over an evaluation or a copy."""
SLOWER = 1.3
EXACT = ("train_step_count", "train_phase", "process_up", "network_up", "train_collective_ratio")
"""Columns whose values are small whole numbers; all others are rounded to `MANTISSA_BITS`."""
MANTISSA_BITS = 11
PRESS_S = 3.0
SWAP_BYTES = 1 << 30

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Run:
    """One run to be recorded. Shares are of the whole length; `lasts` is None for a fault that stays until the end."""

    name: str
    kind: str
    mode: str
    seed: int
    nodes: int
    broken: int
    onset: float
    lasts: float | None
    pace_s: float
    batch_size: int
    width: int
    extra: tuple[str, ...] = ()


FAULTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "kill": ("node", ("restart", "forever") * 3),
    "hang": ("hang", ("",) * 7),
    "slow": ("node", ("",) * 7),
    "limit": ("network", ("",) * 5),
    "loss": ("network", ("",) * 5),
    "cut": ("network", ("",) * 4),
    "disk": ("storage", ("freeze", "throttle") * 4),
    "memory": ("node", ("squeeze", "squeeze", "oom") * 2),
}
"""Kind -> its category, and the mode of each run."""
HARMLESS: dict[str, tuple[str, ...]] = {
    "plain": ("",) * 9,
    "checkpoint": ("told", "untold", "all") * 2,
    "eval": ("told", "untold") * 3,
    "restart": ("",) * 5,
    "batch": ("bigger", "smaller") * 3,
    "neighbour": ("",) * 6,
    "idle": ("sleep", "serve") * 2,
}


def plan() -> list[Run]:
    """Return all runs, in an order that leaves a balanced set whenever it is cut short."""
    wanted = [(kind, modes) for kind, (_, modes) in FAULTS.items()] + list(HARMLESS.items())
    runs = []
    for kind, modes in wanted:
        for number, mode in enumerate(modes):
            draw = random.Random(f"{kind} {number}")
            nodes = 6 if draw.random() < 0.12 else 4
            pace_s = draw.choice((0.35, 0.5, 0.65, 0.8))
            onset = round(draw.uniform(0.45, 0.60), 3)
            lasts = round(draw.uniform(0.15, 0.30), 3) if draw.random() < 0.3 and kind != "kill" else None
            batch_size, width = draw.choice((4, 8, 12)), draw.choice((32, 48, 64))
            broken = draw.randrange(nodes)
            run = Run(f"{kind}-{number}", kind, mode, number, nodes, broken, onset, lasts, pace_s, batch_size, width)
            runs.append((number / len(modes), kind, dataclasses.replace(run, extra=_extra(run, draw))))
    return [run for *_, run in sorted(runs, key=lambda item: item[:2])]


def _extra(run: Run, draw: random.Random) -> tuple[str, ...]:
    """Return the training script's options that make the run what it is; of a batch that changes, its new size."""
    took_s = round(draw.uniform(5.0, 14.0), 1)
    every = round(draw.uniform(28.0, 40.0) / run.pace_s)
    if run.kind == "checkpoint":
        how = {"told": (), "untold": ("--untold",), "all": ("--copy-all",)}[run.mode]
        return ("--copy-every", str(every), "--copy-seconds", str(took_s), *how)
    if run.kind == "eval":
        return ("--eval-every", str(every), "--eval-seconds", str(took_s), *(("--untold",) if run.mode == "untold" else ()))
    if run.kind == "batch":
        size = round(run.batch_size * (draw.uniform(1.5, 2.5) if run.mode == "bigger" else draw.uniform(0.35, 0.6)))
        return ("batch", str(size))
    if run.kind == "idle":
        return ("--idle", run.mode)
    if run.mode == "squeeze":
        return ("--cache-mb", "96")  # otherwise a rank hardly needs what it has
    return ()


# ---- one run


def record_one(run: Run, seconds: float, scratch: Path, out: Path) -> None:
    """Record one run into `out`; the folder appears whole or not at all.

    Raises
    ------
    EagleEyeError
        It could not be recorded, or does not show what it should.
    """
    unmount_below(scratch)  # of an attempt that was killed
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    clock = SystemClock()
    restarts = run.kind in ("kill", "restart") or run.mode == "oom"
    os.environ["EAGLEEYE_REMEDIATION__LAUNCHER__MAX_RESTARTS"] = "0" if run.mode == "forever" else "5"
    words = ["--seed", str(run.seed), "--pace", str(run.pace_s), "--batch-size", str(run.batch_size), "--width", str(run.width)]
    words += ["--depth", "2", "--save-every", "40", "--data-dir", str(scratch / "disks")]
    words += [
        *(["--batch-file", str(batch_file(scratch))] if run.kind == "batch" else run.extra),
        *([] if restarts else ["--no-cache"]),
    ]
    with Cluster(scratch, run.nodes, job=run.name, namespaces=True, script_args=words, caches=restarts, isolated=True) as cluster:
        names = [node.name for node in cluster.nodes]
        _await_start(cluster, run, clock)
        source = open_source(Settings(targets=tuple(n.exporter_url for n in cluster.nodes), interval_s=INTERVAL_S), clock)
        director = Director(cluster, run, seconds, clock)
        try:
            _await_job(source, run, clock)
            load_1m = os.getloadavg()[0]
            director.start()
            record(source, clock, run.name, seconds, scratch / "trace")
        finally:
            director.end()
            source.close()
        unmount_below(scratch / "disks")
    if director.error:
        raise director.error
    about = {
        "run": {key: value for key, value in dataclasses.asdict(run).items() if value is not None},
        "seconds": seconds,
        "how": director.how,
        "load_average": [round(load_1m, 1), round(os.getloadavg()[0], 1)],
        "commit": _commit(),
        "kernel": platform.release(),
        "processors": os.cpu_count(),
    }
    staged = out.with_name(f".{out.name}.new")
    shutil.rmtree(staged, ignore_errors=True)
    publish(scratch / "trace", staged, director.labels(), about)
    _keep_logs(scratch, names, staged / "logs")
    wrong = check(staged, run, seconds)
    if wrong:
        kept = scratch.with_name(f"{scratch.name}.rejected")
        shutil.rmtree(kept, ignore_errors=True)
        shutil.move(staged, kept)
        raise DataError(f"{run.name} is no good: {'; '.join(wrong)} (kept as {kept})")
    shutil.rmtree(out, ignore_errors=True)
    staged.rename(out)
    shutil.rmtree(scratch, ignore_errors=True)


def batch_file(run_dir: Path) -> Path:
    """Return the file that tells every rank the size of its batch, once it is there."""
    return run_dir / "batch"


class Director:
    """Breaks and mends the cluster in a thread while the main one records, and remembers what it did when.

    Parameters
    ----------
    seconds : length of the recording, which begins at `start`
    """

    def __init__(self, cluster: Cluster, run: Run, seconds: float, clock: SystemClock) -> None:
        self._cluster, self._run, self._seconds, self._clock = cluster, run, seconds, clock
        self._node = cluster.nodes[run.broken]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="director", daemon=True)
        self._start_s = self._end_s = self._began_s = clock.now_s()
        self._began_step = 0
        self._acted = False
        self.how = ""
        self.error: EagleEyeError | None = None

    def start(self) -> None:
        """Begin: the recording starts now."""
        self._began_s, self._began_step = self._clock.now_s(), max(newest_steps(self._cluster, self._run), default=0)
        self._thread.start()

    def end(self) -> None:
        """Mend what is still broken and wait until that is done. Safe to call before `start`."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(60.0)
        if not self._acted:
            self._start_s, self._end_s = self._began_s, self._clock.now_s()

    def labels(self) -> list[dict[str, Any]]:
        """Return what to write into `labels.json`."""
        run = self._run
        common = {"infrastructure": False, "nodes": [], "ranks": [], "nameable": False}
        if run.kind in FAULTS:
            told: dict[str, Any] = {"kind": "fault", "category": FAULTS[run.kind][0]}
            named = {"nodes": [self._node.name], "ranks": [self._node.number], "infrastructure": True, "nameable": True}
            common = {**named, "how": self.how}
        elif run.kind == "idle":
            told = {"kind": "not_training", "category": run.mode}
        elif self._acted:
            told = {"kind": "benign", "category": run.kind}
            common["how"] = self.how
        else:
            return []
        return [{"start": _utc(self._start_s), "end": _utc(self._end_s), **told, **common}]

    def _work(self) -> None:
        try:
            self._wait(self._seconds * self._run.onset)
            if not self._over.is_set():
                self._act()
        except EagleEyeError as error:
            self.error = error
        except Exception as error:  # a thread must not die unheard
            self.error = DataError(f"{self._run.name}: {type(error).__name__} {error}")

    def _act(self) -> None:
        run, cluster, node = self._run, self._cluster, self._node
        if run.kind in ("plain", "checkpoint", "eval", "idle"):
            return
        if run.kind == "batch":
            at_s, file, size = self._clock.now_s(), batch_file(cluster.run_dir), run.extra[1]
            write_whole(file, size)
            self._done(at_s, at_s + INTERVAL_S, f"The batch of every rank went from {run.batch_size} to {size}.")
            return
        if run.kind in ("restart", "kill") or run.mode == "oom":
            self._restart()
            return
        if run.kind == "neighbour":
            seconds = random.Random(f"{run.name} long").uniform(4.0, 7.5)
            fault = faults.crowd(cluster, node, 0.2, hogs=4, clock=self._clock)
            self._over.wait(seconds)
        else:
            fault = self._break()
            # Short or long: whoever looks at the whole run must not learn that every fault lasts until the end.
            after_s = self._seconds * (run.onset + run.lasts if run.lasts else 2.0)
            if run.mode == "squeeze":
                fault = dataclasses.replace(fault, how=f"{fault.how} Then a little more or less, so that it stayed short of it.")
                self._press(fault, self._began_s + after_s)
            self._wait(after_s)
        self._start_s, self._acted, self.how = fault.at_s, True, fault.how
        if fault.undo:
            with contextlib.suppress(ProcessLookupError):
                fault.undo()
        self._end_s = self._clock.now_s()

    def _break(self) -> Fault:
        run, cluster, node, clock = self._run, self._cluster, self._node, self._clock
        if run.kind == "hang":
            return faults.break_node(cluster, node, "hang", clock=clock)
        if run.kind == "slow":
            return faults.break_node(cluster, node, "slow", clock=clock)
        if run.kind in ("limit", "loss", "cut"):
            return faults.break_node(cluster, node, "net", mode=run.kind, clock=clock)
        if run.kind == "disk":
            # 32 KiB a step: between one and three seconds for each
            return faults.stall_disk(cluster, node, 0 if run.mode == "freeze" else 14_000 + 4_000 * run.seed, clock)
        return faults.squeeze_memory(cluster, node, 0.35, clock)

    def _press(self, fault: Fault, until_s: float) -> None:
        """Keep the rank short of memory, but not without: what it can do without is not known before it lacks it, and changes."""
        run, cluster = self._run, self._cluster
        step = max(newest_steps(cluster, run))
        before = (step - self._began_step) / (fault.at_s - self._began_s)
        while self._clock.now_s() < until_s and not self._over.wait(PRESS_S):
            made, step = max(newest_steps(cluster, run)) - step, max(newest_steps(cluster, run))
            if made == 0:
                faults.press_memory(self._node, 1.04)
            elif made > PRESS_S * before / 1.7:
                faults.press_memory(self._node, 0.93)

    def _restart(self) -> None:
        """Kill one rank, or ask all to end in order; done when every rank steps again."""
        run, cluster, node = self._run, self._cluster, self._node
        pids = {other.name: cluster.pid(other) for other in cluster.nodes}
        reached = max(newest_steps(cluster, run))
        undo: Callable[[], None] | None = None
        if run.kind == "restart":
            at_s, how = self._clock.now_s(), "All ranks were asked to save and end, and were started again."
            for pid in pids.values():
                if pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
        else:
            fault = (
                faults.exhaust_memory(cluster, node, self._clock)
                if run.mode == "oom"
                else faults.break_node(cluster, node, "kill", clock=self._clock)
            )
            at_s, how, undo = fault.at_s, fault.how, fault.undo
        self._done(at_s, at_s, how)
        if undo:
            self._over.wait(random.Random(run.name).uniform(4.0, 12.0))
            undo()
        while not self._over.wait(0.3):
            states = _states(cluster, run)
            fresh = all(pid and pid != pids[node.name] for node in cluster.nodes for pid in [cluster.pid(node)])
            # restored steps are done again: up to where the job was is part of what the restart costs
            if fresh and len(states) == cluster.ranks and all(s.step >= reached and s.pid not in pids.values() for s in states):
                break
        self._end_s = self._clock.now_s()

    def _done(self, start_s: float, end_s: float, how: str) -> None:
        self._start_s, self._end_s, self.how, self._acted = start_s, end_s, how, True

    def _wait(self, after_s: float) -> None:
        self._over.wait(max(0.0, self._began_s + after_s - self._clock.now_s()))


def _states(cluster: Cluster, run: Run) -> list[progress.State]:
    paths = [cluster.run_dir / "progress" / progress.file_name(run.name, rank) for rank in range(run.nodes)]
    return [state for path in paths if (state := progress.read(path))]


def newest_steps(cluster: Cluster, run: Run) -> list[int]:
    """Return the step that each rank has finished, of those that have any."""
    return [state.step for state in _states(cluster, run) if state.step >= 0]


def _await_start(cluster: Cluster, run: Run, clock: SystemClock) -> None:
    """Return when every rank has taken some steps, or, where it never does, has begun. Raises EnvironmentLacks."""
    until_s = monotonic_s() + START_TIMEOUT_S
    while True:
        if run.kind == "idle":
            begun = all(f"rank {node.number} of".encode() in node.log.read_bytes() for node in cluster.nodes)
        else:
            steps = newest_steps(cluster, run)
            begun = len(steps) == run.nodes and min(steps) >= 4
        if begun:
            return
        if monotonic_s() > until_s:
            raise EnvironmentLacks(f"{run.name} did not begin within {START_TIMEOUT_S:g} s; see the logs in {cluster.run_dir}")
        clock.sleep_s(0.3)


def _await_job(source: Any, run: Run, clock: SystemClock) -> None:
    """Return when the exporters tell of every rank. Raises EnvironmentLacks."""
    until_s, known = monotonic_s() + 60.0, 0
    while known < run.nodes:
        if monotonic_s() > until_s:
            raise EnvironmentLacks(f"{run.name}: the exporters tell of {known} of {run.nodes} ranks")
        clock.sleep_s(INTERVAL_S)
        now_s = clock.now_s()
        source.scrape(now_s)
        with contextlib.suppress(NoData):
            known = len(source.window(run.name, now_s, INTERVAL_S).ranks)


# ---- what is kept of it


def publish(recorded: Path, folder: Path, labels: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Write a recorded trace again, smaller: without columns in which nothing was ever seen, rounded, compressed."""
    table = pq.read_table(recorded / "metrics.parquet")
    told = json.loads((recorded / "trace.json").read_text(encoding="utf-8"))
    columns = {name: table[name].combine_chunks() for name in ("time", "rank")}
    for name in told["metrics"]:
        values = table[name].to_numpy().astype(np.float32)
        if np.isfinite(values).any():
            columns[name] = pa.array(values if name in EXACT else rounded(values), pa.float32(), from_pandas=True)
    metrics = [name for name in columns if name not in ("time", "rank")]
    told["metrics"] = {name: told["metrics"][name] for name in metrics}
    order = np.lexsort((table["time"].to_numpy(), table["rank"].to_numpy()))
    folder.mkdir(parents=True)
    pq.write_table(
        pa.table(columns).take(pa.array(order)),
        folder / "metrics.parquet",
        compression="zstd",
        compression_level=19,
        use_dictionary=False,
        write_statistics=False,
        column_encoding={
            "time": "DELTA_BINARY_PACKED",
            "rank": "DELTA_BINARY_PACKED",
            **dict.fromkeys(metrics, "BYTE_STREAM_SPLIT"),
        },
    )
    for name, content in (("trace.json", told), ("labels.json", labels), ("run.json", about)):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def rounded(values: F32) -> F32:
    """Round to `MANTISSA_BITS` binary digits after the first, a relative error of at most 2 ** -(MANTISSA_BITS + 1)."""
    drop = np.uint32(23 - MANTISSA_BITS)
    bits = values.astype(np.float32).view(np.uint32)
    kept = ((bits + (np.uint32(1) << (drop - np.uint32(1)))) >> drop) << drop
    return np.where(np.isfinite(values), kept.view(np.float32), values)


def _keep_logs(scratch: Path, names: list[str], folder: Path) -> None:
    """Keep what the nodes logged beside their steps, where that is anything."""
    for name in names:
        lines = (scratch / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for line in lines if " loss " not in line and " parameters" not in line]
        if kept:
            folder.mkdir(exist_ok=True)
            # words of gloo may name files and folders of this machine
            text = "\n".join(kept).replace(str(scratch), "RUN").replace(str(ROOT), "PROJECT").replace(sys.prefix, "VENV")
            (folder / f"{name}.log").write_text(text + "\n", encoding="utf-8")


def _commit() -> str:
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _utc(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# ---- is it good?


def whole(folder: Path) -> bool:
    """Whether all files of a run are there."""
    return all((folder / name).is_file() for name in FILES)


def check(folder: Path, run: Run, seconds: float) -> list[str]:
    """Return what is wrong with a recorded run, in sentences; nothing when it shows what its label says.

    Raises
    ------
    EagleEyeError
        It is no trace.
    """
    source = TraceSource(folder)
    labels = json.loads((folder / "labels.json").read_text(encoding="utf-8"))
    window = source.window(source.job, float(source.stamps_s[-1]), seconds)
    T = round(seconds / INTERVAL_S)
    stamps_s = np.asarray(window.stamps_T)
    seen_RT = np.isfinite(window.values_RMT).any(axis=1)
    step_RT, up_RT = (window.select([name]).values_RMT[:, 0] for name in ("train_step_count", "process_up"))
    wrong = []
    if len(window.ranks) != run.nodes:
        wrong.append(f"{len(window.ranks)} ranks instead of {run.nodes}")
    if source.stamps_s.size < 0.97 * T:
        wrong.append(f"only {source.stamps_s.size} of {T} rows")
    if seen_RT.mean() < 0.97:
        wrong.append(f"{1 - seen_RT.mean():.0%} of the cells are missing")
    if run.kind == "idle":
        if np.isfinite(step_RT).any() and np.nanmax(step_RT) > 0:
            wrong.append("an idle job made steps")
        if not (up_RT == 1).mean() > 0.97:
            wrong.append("ranks of an idle job were away")
        spans = [[datetime.fromisoformat(entry[key]).timestamp() for key in ("start", "end")] for entry in labels]
        if not any(start_s <= stamps_s[0] and end_s >= stamps_s[-1] for start_s, end_s in spans):
            wrong.append("the label of an idle job does not cover it")
        return wrong
    job_T = _progress_T(step_RT)
    healthy_until_s = stamps_s[0] + HEALTHY_SHARE * seconds
    start_s = end_s = stamps_s[-1]
    if labels:
        start_s, end_s = (datetime.fromisoformat(labels[0][key]).timestamp() for key in ("start", "end"))
        if start_s < healthy_until_s - 1:
            wrong.append("something happened in the first 40 %")
    quiet_s = start_s if labels else stamps_s[-1]
    longest_s = _longest_stand_s(job_T[stamps_s < quiet_s])
    pauses = run.kind in ("checkpoint", "eval")
    if longest_s > (STUCK_S if pauses else 8.0 * max(run.pace_s, 1.0)):
        wrong.append(f"the healthy job stood still for {longest_s:.0f} s")
    before = _rate(job_T, stamps_s, stamps_s[0], quiet_s)
    if not before > 0.3 / run.pace_s:
        wrong.append(f"the healthy job made only {before:.2f} steps a second")
    if run.kind in ("plain", "checkpoint", "eval"):
        if labels:
            wrong.append("a label where nothing was done")
        if pauses and longest_s < 0.6 * float(run.extra[3]):
            wrong.append(f"the longest pause of {run.kind} is {longest_s:.0f} s")
        return wrong
    if len(labels) != 1:
        return [*wrong, "no label"]
    during = _rate(job_T, stamps_s, start_s + 2.0, min(end_s, stamps_s[-1]))
    node = f"node{run.broken}-"
    if run.kind in FAULTS and not (labels[0]["ranks"] == [run.broken] and labels[0]["nodes"][0].startswith(node)):
        wrong.append("the label names another node than was to be broken")
    in_fault_T = (stamps_s >= start_s) & (stamps_s <= end_s + 2)
    if run.kind in ("hang", "cut") or run.mode == "freeze":
        if not during < 0.1 * before:
            wrong.append(f"the job went on with {during:.2f} of {before:.2f} steps a second")
    elif run.kind in ("slow", "limit", "loss") or run.mode in ("throttle", "squeeze"):
        if not during < before / SLOWER:
            wrong.append(f"the job was hardly slower: {during:.2f} after {before:.2f} steps a second")
        if run.mode == "squeeze" and ((up_RT == 0).any() or (np.diff(step_RT[:, in_fault_T]) < 0).any()):
            wrong.append("the kernel killed the rank that was to swap")
    elif run.kind == "kill" or run.mode == "oom" or run.kind == "restart":
        if _longest_stand_s(job_T[in_fault_T]) < 2.0:
            wrong.append("the job did not stand still")
        if run.mode == "forever" and end_s < stamps_s[-1] - 5:
            wrong.append("the job went on")
        if run.mode != "forever" and end_s > stamps_s[-1] - 5:
            wrong.append("the job did not go on")
    elif run.kind == "batch":
        after = _rate(job_T, stamps_s, end_s, stamps_s[-1])
        factor = before / after if run.mode == "bigger" else after / before
        if not factor > 1.15:
            wrong.append(f"the change of the batch is not seen: {after:.2f} after {before:.2f} steps a second")
    elif run.kind == "neighbour" and not 3.0 < end_s - start_s <= 8.0:
        wrong.append(f"the neighbour stayed for {end_s - start_s:.1f} s")
    return wrong


def _progress_T(step_RT: F32) -> NDArray[np.float64]:
    """Return (T,) the step that the fastest rank has reached so far."""
    newest_T = np.where(np.isfinite(step_RT), step_RT, -1.0).max(axis=0).astype(np.float64)
    return np.maximum.accumulate(newest_T)


def _longest_stand_s(job_T: NDArray[np.float64]) -> float:
    """Return the longest time, in whole rows, in which the job made no step."""
    longest = current = 0
    for moved in np.diff(job_T) > 0:
        current = 0 if moved else current + 1
        longest = max(longest, current)
    return longest * INTERVAL_S


def _rate(job_T: NDArray[np.float64], stamps_s: NDArray[np.float64], start_s: float, end_s: float) -> float:
    """Return steps a second between two times; NaN for less than two rows."""
    chosen = np.flatnonzero((stamps_s >= start_s) & (stamps_s <= end_s))
    if chosen.size < 2:
        return float("nan")
    a, b = chosen[0], chosen[-1]
    return float((job_T[b] - job_T[a]) / (stamps_s[b] - stamps_s[a]))


# ---- all of them


def record_all(runs: list[Run], jobs: int, seconds: float, scratch: Path, out: Path) -> int:
    """Record `runs`, `jobs` side by side, each in a process of its own; return how many could not be recorded."""
    waiting = [(run, 1) for run in runs]
    working: dict[subprocess.Popen[bytes], tuple[Run, int, float]] = {}
    failed: list[str] = []
    done, started_s, clock = 0, -STAGGER_S, SystemClock()
    try:
        while waiting or working:
            if waiting and len(working) < jobs and monotonic_s() - started_s >= STAGGER_S:
                run, attempt = waiting.pop(0)
                command = [sys.executable, str(Path(__file__).resolve()), "--one", run.name, "--seconds", f"{seconds:g}"]
                command += ["--scratch", str(scratch), "--out", str(out)]
                log = scratch / f"{run.name}.out"
                with log.open("wb") as file:
                    process = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, process_group=0, cwd=scratch
                    )
                started_s = monotonic_s()
                working[process] = (run, attempt, started_s)
            for process in [p for p in working if p.poll() is not None]:
                run, attempt, since_s = working.pop(process)
                took_s = monotonic_s() - since_s
                good = process.returncode == 0 and whole(out / run.name)
                done += good
                words = (scratch / f"{run.name}.out").read_text(errors="replace").strip().splitlines()
                told = "recorded" if good else f"attempt {attempt} failed: {words[-1] if words else process.returncode}"
                if not good and attempt < ATTEMPTS:
                    waiting.append((run, attempt + 1))
                elif not good:
                    failed.append(run.name)
                say(f"{run.name}: {told} in {took_s:.0f} s; {done} done, {len(waiting)} wait, {len(working)} run, {_load()}")
            clock.sleep_s(0.5)
    finally:
        for process in working:
            process.terminate()
        for process in working:
            process.wait()
    if failed:
        say(f"given up: {', '.join(failed)}")
    return len(failed)


@contextlib.contextmanager
def swap_space(folder: Path) -> Iterator[None]:
    """Give the machine swap space as long as it has none of its own. Raises EnvironmentLacks."""
    if len(Path("/proc/swaps").read_text(encoding="utf-8").splitlines()) > 1:
        yield
        return
    file = folder / "swap"
    with file.open("wb") as handle:
        os.posix_fallocate(handle.fileno(), 0, SWAP_BYTES)
    file.chmod(0o600)
    faults.run("mkswap", "--quiet", str(file))
    faults.run("swapon", str(file))
    try:
        yield
    finally:
        faults.run("swapoff", str(file))
        file.unlink()


def say(text: str) -> None:
    """Print one line, with the time of day."""
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", flush=True)


def _load() -> str:
    return f"load {os.getloadavg()[0]:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="clusters side by side; default %(default)s")
    parser.add_argument("--only", metavar="NAME[,NAME...]", help="these runs alone, or all of a kind")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="length of a run; default %(default)g")
    parser.add_argument("--out", type=Path, default=RUNS, metavar="DIR", help="where the runs go; default datasets/runs")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="folder for clusters that run; default a temporary one")
    parser.add_argument("--check", action="store_true", help="record nothing, look again at what is there")
    parser.add_argument("--list", action="store_true", help="print the names of all runs")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return command(options)
    except EagleEyeError as error:
        print(f"record: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def command(options: argparse.Namespace) -> int:
    """Do what the command line asks for; return the exit code. Raises EagleEyeError."""
    runs = plan()
    if options.only:
        names = options.only.split(",")
        unknown = [name for name in names if name not in {run.name for run in runs} | {run.kind for run in runs}]
        if unknown:
            raise UsageError(f"there is no run called {unknown[0]!r}; see --list")
        runs = [run for name in names for run in runs if name in (run.name, run.kind)]
    if options.list:
        print("\n".join(run.name for run in runs))
        return 0
    out = options.out.resolve()
    if options.check:
        there = [run for run in runs if whole(out / run.name)]
        wrong = {run.name: check(out / run.name, run, _seconds(out / run.name)) for run in there}
        for name, sentences in wrong.items():
            for sentence in sentences:
                print(f"{name}: {sentence}")
        print(f"{len(there)} of {len(runs)} runs are there, {sum(map(bool, wrong.values()))} of them wrong")
        return int(any(wrong.values()))
    if options.one:
        run = next(run for run in runs if run.name == options.one)
        if not whole(out / run.name):  # another recorder, with an overlapping --only, may have been faster
            record_one(run, options.seconds, options.scratch.resolve() / run.name, out / run.name)
        return 0
    out.mkdir(parents=True, exist_ok=True)
    todo = [run for run in runs if not whole(out / run.name)]
    say(f"{len(runs) - len(todo)} runs are there, {len(todo)} to record, {options.jobs} side by side")
    with contextlib.ExitStack() as stack:
        scratch = options.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eagleeye-record-")))
        scratch = scratch.resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        if any(run.kind == "memory" for run in todo):
            stack.enter_context(swap_space(scratch))
        return int(record_all(todo, options.jobs, options.seconds, scratch, out) > 0)


def _seconds(folder: Path) -> float:
    return float(json.loads((folder / "run.json").read_text(encoding="utf-8"))["seconds"])


if __name__ == "__main__":
    sys.exit(main())
