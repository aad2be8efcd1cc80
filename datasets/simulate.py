"""Simulated telemetry of synchronous training jobs, with labels: `python datasets/simulate.py --out DIR --count N --seed S`.

Everything written here is SIMULATED, none of it was ever measured. It exists to see whether a detector that was developed on
other traces generalises: other job shapes, sampling intervals, metric sets, faults and oddities. A number obtained on these
folders says how a detector does on this simulator. This module shares no code with the detectors.

What it keeps: an iteration is load, compute, wait for the slowest rank, communicate. Every rank does the same FLOPs and sends the
same bytes in each, so one slow rank or link lowers everybody's averages alike, and who it is shows in shape, waits, clock, power
or counters only. A rank that waits in a collective is busy without tensor activity; a dead one is idle. Boards differ for ever,
pipeline stages by nature; temperature follows power. Rows average exactly over their interval, so iterations beat against the
scrapes as in real life.

What it leaves out: everything below an iteration (micro-batches, overlap of computing and communicating, single collectives), the
network's topology (a slow link slows all ranks alike), expert and tensor parallelism as groups, elastic jobs, several jobs on a
node, noise that is correlated between neighbours except by node, true distributions of fault rates, severities and durations (all
are drawn uniformly, out of proportion to how often they happen), and the log noise of a real cluster.

Labels are honest about what the data can show: a fault is `nameable` only if log lines of its nodes alone tell of it, or if, in
some metric of that trace, a labelled rank left its peers by far more than the peers spread among themselves (`_stands_out`).

Shape suffixes: R ranks, T rows in time, M metrics, P phases, K distinct timelines, S seconds of the job.
"""

import argparse
import json
import shutil
import sys
import tempfile
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eagleeye.errors import EagleEyeError, EnvironmentLacks, UsageError

Array = NDArray[np.float64]
Span = tuple[float, float]

LOAD, COMPUTE, WAIT, COMM, EVAL, SAVE, DOWN, IDLE = range(8)
NEVER = (np.inf, np.inf)

GIVEN = {
    "gpu_utilization_ratio": "1",
    "gpu_tensor_active_ratio": "1",
    "gpu_memory_used_bytes": "bytes",
    "gpu_power_watts": "watts",
    "gpu_temperature_celsius": "celsius",
    "gpu_sm_clock_hertz": "hertz",
    "ib_transmit_bytes_per_second": "bytes/s",
    "ib_receive_bytes_per_second": "bytes/s",
    "ib_transmit_wait_ratio": "1",
    "ib_port_errors_per_second": "1/s",
}
OTHER = {
    "collective_wait_ratio": "1",
    "train_step_seconds": "seconds",
    "cpu_busy_ratio": "1",
    "host_load_ratio": "1",
    "nvlink_bytes_per_second": "bytes/s",
    "gpu_hbm_temperature_celsius": "celsius",
    "input_wait_ratio": "1",
}
UNITS = GIVEN | OTHER
PAPER = ("gpu_utilization_ratio", "ib_transmit_bytes_per_second", "ib_receive_bytes_per_second")


@dataclass
class Effect:
    """What is different about some ranks: arrays with one value a second. Factors are 1 and additions 0 where all is well."""

    clock: Array | float = 1.0
    """Factor of the clock while computing, and so of the speed; power falls with its power of 1.5."""
    duty: Array | float = 1.0
    """Share of the compute phase in which the GPU has work: starved, it is as much slower as it looks less busy."""
    drag: Array | float = 1.0
    """Factor of the speed of a GPU that stays busy at full clock (slow memory): it only does less a second."""
    load_s: Array | float = 0.0
    """Seconds added to the load phase of an iteration that begins in that second."""
    pulses: tuple[Span, ...] = ()
    """(when, seconds): single additions to the load phase."""
    comm: Array | float = 1.0
    """Factor of the speed of the link; the slowest link holds up everybody."""
    errors: Array | float = 0.0
    """Port errors a second."""
    heat: Array | float = 0.0
    """Degrees above what the power explains."""
    memory: Array | float = 1.0
    cpu: Array | float = 0.0
    dead: Span = NEVER
    """The process computes no more; everybody else waits for it."""
    dark: Span = NEVER
    """No telemetry; the job knows nothing of it."""


@dataclass
class Job:
    """One job that is being put together; faults and oddities add to it, `_play` plays it."""

    rng: np.random.Generator
    kind: str
    length_s: int
    interval_s: float
    node_R: NDArray[np.int64]
    gpu_R: NDArray[np.int64]
    stage_R: NDArray[np.int64]
    stages: int
    names: list[str]
    group_names: bool
    iteration_s: float
    load_share: float
    comm_share: float
    jitter: float
    levels: dict[str, float]
    metrics: list[str]
    logged: bool
    chatty: bool
    rough: float
    wander: float
    start: datetime
    familiar: bool
    missing_rows: float = 0.0
    missing_cells: float = 0.0
    stamp_jitter: float = 0.0
    skew_N: Array = field(default_factory=lambda: np.zeros(0))
    effects: list[tuple[NDArray[np.int64], Effect]] = field(default_factory=list)
    pauses: list[tuple[float, float, int]] = field(default_factory=list)
    downs: list[Span] = field(default_factory=list)
    stuck: list[Span] = field(default_factory=list)
    gaps: list[Span] = field(default_factory=list)
    resets: list[tuple[float, int]] = field(default_factory=list)
    frozen: list[tuple[Span, int]] = field(default_factory=list)
    work_S: Array = field(default_factory=lambda: np.zeros(0))
    traffic_S: Array = field(default_factory=lambda: np.zeros(0))
    slow_network_S: Array = field(default_factory=lambda: np.zeros(0))
    slow_load_S: Array = field(default_factory=lambda: np.zeros(0))
    memory_S: Array = field(default_factory=lambda: np.zeros(0))
    hot_R: Array = field(default_factory=lambda: np.zeros(0))
    labels: list[dict[str, Any]] = field(default_factory=list)
    lines: list[tuple[float, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        S = self.length_s + 1
        self.work_S, self.traffic_S, self.slow_network_S, self.memory_S = (np.ones(S) for _ in range(4))
        self.slow_load_S = np.zeros(S)
        self.hot_R = np.zeros(self.node_R.size)
        self.skew_N = np.zeros(len(self.names))

    def during(self, span: Span, value: float, base: float = 1.0, ramp_s: float = 0.0) -> Array:
        """One value a second: `base`, and `value` inside the span (reached within `ramp_s`)."""
        at_S = np.arange(self.length_s + 1, dtype=float)
        share_S = np.clip((at_S - span[0] + 1.0) / max(ramp_s, 1.0), 0.0, 1.0) * (at_S < span[1])
        return base + (value - base) * share_S

    def vary(self, usual: float, low: float, high: float) -> float:
        """The development set's value for a familiar job, else anything between."""
        return usual if self.familiar else float(self.rng.uniform(low, high))

    def of_node(self, node: int) -> NDArray[np.int64]:
        return np.flatnonzero(self.node_R == node)

    def say(self, at_s: float, node: int, text: str) -> None:
        if at_s < self.length_s:
            self.lines.append((float(at_s), int(node), text))

    def first_ranks(self) -> list[int]:
        """The lowest rank of every node: those that log."""
        return [int(self.of_node(node)[0]) for node in range(len(self.names))]

    def label(
        self, span: Span, kind: str, category: str, ranks: Sequence[int] = (), nameable: bool | None = False, ours: bool = True
    ) -> None:
        """Add a label; a fault with `nameable` None is judged when the data are there."""
        nodes = sorted({int(self.node_R[r]) for r in ranks})
        self.labels.append(
            {
                "start": span[0],
                "end": min(span[1], float(self.length_s)),
                "kind": kind,
                "category": category,
                "ranks": [int(r) for r in ranks],
                "nodes": [self.names[n] for n in nodes],
                "infrastructure": kind == "fault" and ours,
                "nameable": nameable,
            }
        )


@dataclass(frozen=True)
class Trace:
    """One simulated job: `values_RMT` was recorded at `stamps_RT` (seconds since the start; NaN: that row was never scraped)."""

    about: dict[str, Any]
    start: datetime
    stamps_RT: Array
    values_RMT: NDArray[np.float32]
    labels: list[dict[str, Any]]
    lines: list[tuple[float, str, str]]


Event = Callable[[Job, Span], None]


# --- faults: (job, span) -> None; each labels itself ------------------------------------------------------------------


def _some_rank(job: Job) -> int:
    taken = {n for label in job.labels if label["kind"] == "fault" for n in label["nodes"]}
    free = [r for r in range(job.node_R.size) if job.names[job.node_R[r]] not in taken]
    return int(job.rng.choice(free))


def _with_node(job: Job, rank: int) -> NDArray[np.int64]:
    return job.of_node(int(job.node_R[rank]))


def _hit(job: Job, ranks: Sequence[int] | NDArray[np.int64], span: Span, category: str, effect: Effect) -> None:
    ranks = np.asarray(ranks)
    job.effects.append((ranks, effect))
    job.label(span, "fault", category, [int(r) for r in ranks], None)


def _slow_gpu(job: Job, span: Span, low: float = 0.55, high: float = 0.78, ramp_s: float = 0.0, hot: float = 0.7) -> None:
    clock = job.rng.uniform(low, high)
    heat = 18.0 * job.during(span, 1.0, 0.0, ramp_s) * (job.familiar or job.rng.random() < hot)
    _hit(job, [_some_rank(job)], span, "gpu_slow", Effect(clock=job.during(span, clock, ramp_s=ramp_s), heat=heat))


def _slow_gpu_mild(job: Job, span: Span) -> None:
    _slow_gpu(job, span, 0.8, 0.9, hot=0.5)


def _throttle_creeping(job: Job, span: Span) -> None:
    _slow_gpu(job, span, 0.5, 0.8, job.rng.uniform(120, 480), hot=1.0)


def _power_brake(job: Job, span: Span) -> None:
    clock = job.rng.uniform(0.3, 0.5)
    _hit(job, _with_node(job, _some_rank(job)), span, "gpu_slow", Effect(clock=job.during(span, clock)))


def _silent_slow(job: Job, span: Span) -> None:
    _hit(job, [_some_rank(job)], span, "gpu_slow", Effect(drag=job.during(span, job.rng.uniform(0.6, 0.85))))


def _slow_cpu(job: Job, span: Span) -> None:
    more_s = job.iteration_s * job.rng.uniform(0.2, 1.0)
    cpu = job.during(span, job.rng.uniform(0.3, 0.6), 0.0)
    ranks = _with_node(job, _some_rank(job))
    _hit(job, ranks, span, "cpu_slow", Effect(load_s=job.during(span, more_s, 0.0), cpu=cpu))


def _pcie_degraded(job: Job, span: Span) -> None:
    more_s = job.iteration_s * job.rng.uniform(0.15, 0.6)
    _hit(job, [_some_rank(job)], span, "pcie_degraded", Effect(load_s=job.during(span, more_s, 0.0)))


def _nic_degraded(job: Job, span: Span, low: float = 0.35, high: float = 0.6) -> None:
    errors = 0.4 if job.familiar or job.rng.random() < 0.75 else 0.0
    effect = Effect(comm=job.during(span, job.rng.uniform(low, high)), errors=job.during(span, errors, 0.0))
    _hit(job, [_some_rank(job)], span, "network_degraded", effect)


def _nic_degraded_mild(job: Job, span: Span) -> None:
    _nic_degraded(job, span, 0.7, 0.85)


def _link_flapping(job: Job, span: Span) -> None:
    every_s = job.rng.uniform(40, 90)
    link = np.ones(job.length_s + 1)
    for at in np.arange(span[0], span[1], every_s):
        link[int(at) : int(at + job.rng.uniform(3, 9))] = 0.0
    _hit(job, [_some_rank(job)], span, "network_degraded", Effect(comm=link, errors=2.0 * (link == 0)))


def _storage_stall(job: Job, span: Span) -> None:
    rank = _some_rank(job)
    duty = job.vary(0.25, 0.2, 0.6)
    _hit(job, _with_node(job, rank), span, "storage", Effect(duty=job.during(span, duty)))
    job.say(span[0] + 5, int(job.node_R[rank]), "kernel: nfs: server 10.0.0.5 not responding, timed out")


def _network_congested(job: Job, span: Span) -> None:
    slower = job.rng.uniform(0.2, 0.7)
    job.slow_network_S *= job.during(span, job.comm_share / (job.comm_share + slower))
    job.label(span, "fault", "network_degraded")


def _storage_slow_for_all(job: Job, span: Span) -> None:
    job.slow_load_S += job.during(span, job.iteration_s * job.rng.uniform(0.2, 0.7), 0.0)
    job.label(span, "fault", "storage")


def _stops(job: Job, at_s: float) -> float:
    """A job that cannot go on hangs to the end, is torn down, or starts again. Returns the end of the hang."""
    fate = job.rng.choice(["hangs", "ends", "restarts"], p=[0.5, 0.25, 0.25])
    end_s = at_s + job.rng.uniform(610, 660)
    if job.familiar or fate == "hangs" or end_s > job.length_s - 60:
        return float(job.length_s)
    _down(job, end_s, end_s + job.rng.uniform(90, 420) if fate == "restarts" else job.length_s)
    return float(end_s)


def _down(job: Job, start_s: float, end_s: float) -> None:
    job.downs.append((start_s, end_s))
    job.label((start_s, end_s), "benign", "restart")


def _watchdog(job: Job, at_s: float) -> None:
    text = (
        "[rank{0}]:[E ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum={1}, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600041 milliseconds before timing out."
    )
    seq = int(job.rng.integers(2_000, 20_000))
    for rank in job.first_ranks():
        job.say(at_s + 600 + job.rng.integers(0, 8), int(job.node_R[rank]), text.format(rank, seq))


def _survivors(job: Job, at_s: float, dead: int) -> None:
    for i, rank in enumerate(r for r in job.first_ranks() if r != dead):
        text = "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"
        job.say(at_s + 9 + 0.3 * i, int(job.node_R[rank]), f"[rank{rank}]: {text}")


def _xid(rank: int, job: Job, number: int, text: str, process: str = "pid='<unknown>', name=<unknown>") -> str:
    return f"kernel: NVRM: Xid (PCI:0000:{7 + 8 * int(job.gpu_R[rank]):02x}:00): {number}, {process}, {text}"


def _hang(job: Job, span: Span) -> None:
    rank = _some_rank(job)
    _watchdog(job, span[0])
    end = _stops(job, span[0])
    _hit(job, [rank], (span[0], end), "hang", Effect(dead=(span[0], end)))


def _hang_unlogged(job: Job, span: Span) -> None:
    job.logged = False
    _hang(job, span)


def _hang_flat(job: Job, span: Span) -> None:
    """Everybody sits in the same collective; nothing separates the ranks, though one of them is to blame."""
    rank = _some_rank(job)
    _watchdog(job, span[0])
    end = _stops(job, span[0])
    job.stuck.append((span[0], end))
    job.label((span[0], end), "fault", "hang", [rank], False)


def _process_killed(job: Job, span: Span) -> None:
    rank = _some_rank(job)
    end = _stops(job, span[0])
    memory = job.during((span[0], end), 0.007)
    _hit(job, [rank], (span[0], end), "process_killed", Effect(dead=(span[0], end), memory=memory))
    if job.rng.random() < 0.5:
        _survivors(job, span[0], rank)


def _node_lost(job: Job, span: Span) -> None:
    ranks = _with_node(job, _some_rank(job))
    end = _stops(job, span[0])
    job.chatty = False
    _hit(job, ranks, (span[0], end), "node_lost", Effect(dead=(span[0], end), dark=(span[0], end)))
    if job.rng.random() < 0.5:
        _survivors(job, span[0], int(ranks[0]))


def _gpu_lost(job: Job, span: Span) -> None:
    rank = _some_rank(job)
    end = _stops(job, span[0])
    _hit(job, [rank], (span[0], end), "gpu_lost", Effect(dead=(span[0], end), dark=(span[0], end)))
    job.say(span[0] + 1, int(job.node_R[rank]), _xid(rank, job, 79, "GPU has fallen off the bus.", "pid=48213, name=python"))


DOUBLE_BIT = "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition 5, subpartition 0."


def _ecc(job: Job, span: Span) -> None:
    rank = _some_rank(job)
    node = int(job.node_R[rank])
    end = _stops(job, span[0])
    _hit(job, [rank], (span[0], end), "gpu_ecc", Effect(dead=(span[0], end)))
    job.say(span[0], node, _xid(rank, job, 48, DOUBLE_BIT))
    job.say(span[0] + 2, node, f"[rank{rank}]: RuntimeError: CUDA error: uncorrectable ECC error encountered")
    _survivors(job, span[0], rank)


def _ecc_contained(job: Job, span: Span) -> None:
    """Uncorrectable errors in the log of a node whose job goes on."""
    rank = _some_rank(job)
    job.logged = True
    job.label(span, "fault", "gpu_ecc", [rank], None)
    job.say(span[0], int(job.node_R[rank]), _xid(rank, job, 48, DOUBLE_BIT))
    for at in job.rng.uniform(span[0], min(span[1], span[0] + 300), 3):
        job.say(at, int(job.node_R[rank]), _xid(rank, job, 94, "Contained: SM (0x1). RST: No, D-RST: No"))


def _memory_leak(job: Job, span: Span) -> None:
    """Host memory of a node runs out: paging slows its ranks first, then the kernel kills one."""
    ranks = _with_node(job, _some_rank(job))
    killed = int(job.rng.choice(ranks))
    kill = min(span[0] + job.rng.uniform(300, 900), job.length_s - 60.0)
    end = _stops(job, kill)
    job.effects.append((np.array([killed]), Effect(dead=(kill, end))))
    duty = job.during((span[0], kill), job.rng.uniform(0.4, 0.8), ramp_s=kill - span[0])
    memory = job.during((span[0], end), 1.07, ramp_s=kill - span[0])
    _hit(job, ranks, (span[0], end), "out_of_memory", Effect(duty=duty, memory=memory, cpu=job.during((span[0], kill), 0.3, 0.0)))
    job.say(kill, int(job.node_R[killed]), "kernel: Out of memory: Killed process 48213 (python) total-vm:1043287012kB")
    _survivors(job, kill, killed)


def _user_error(job: Job, span: Span) -> None:
    """An exception in the training code: on all ranks at once, or on one that takes the others along. No hardware is to blame."""
    text = str(
        job.rng.choice(
            [
                "ValueError: loss is NaN",
                "KeyError: 'input_ids'",
                "RuntimeError: The size of tensor a (4096) must match the size of tensor b (2048) at non-singleton dimension 1",
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
                "IndexError: list index out of range",
            ]
        )
    )
    first = _some_rank(job) if job.rng.random() < 0.5 else None
    for rank in range(job.node_R.size):
        at = span[0] + job.rng.uniform(0, 0.9) if first is None else span[0] + (rank != first) * job.rng.uniform(4, 8)
        if first is None or rank == first:
            node = int(job.node_R[rank])
            job.say(at, node, f"[rank{rank}]: Traceback (most recent call last):")
            job.say(at + 0.001, node, f"[rank{rank}]: {text}")
    if first is not None:
        _survivors(job, span[0], first)
    stop = span[0] + job.rng.uniform(5, 20)
    job.stuck.append((span[0], stop))
    again = stop + job.rng.uniform(180, 600)
    up = again < job.length_s - 60 and job.rng.random() < 0.4
    job.downs.append((stop, again if up else job.length_s))
    if up:
        job.label((stop + 60, again), "benign", "restart")
    job.label(
        (span[0], stop + 60 if up else job.length_s), "fault", "user_code", [] if first is None else [first], False, ours=False
    )


def _two_faults(job: Job, span: Span) -> None:
    some: list[Event] = [_slow_gpu, _nic_degraded, _storage_stall, _slow_cpu, _power_brake]
    two = [some[i] for i in job.rng.integers(0, len(some), 2)]
    later = (min(span[0] + job.rng.uniform(0, 300), span[1] - 120), span[1])
    two[0](job, span)
    two[1](job, later)


# --- oddities that are nobody's fault: (job, span) -> None; the span is only a hint -----------------------------------


def _plain(job: Job, span: Span) -> None:
    pass


def _every(job: Job, first_s: float, every_s: float, lasts_s: float, phase: int) -> None:
    for at in np.arange(first_s, job.length_s, every_s):
        job.pauses.append((float(at), lasts_s * job.rng.uniform(0.95, 1.05), phase))


def _eval(job: Job, span: Span) -> None:
    every = job.vary(900, 400, 1200)
    first = every if job.familiar or job.rng.random() < 0.6 else span[0]
    _every(job, first, every, job.vary(120, 30, 180), EVAL)


def _checkpoint(job: Job, span: Span) -> None:
    every, lasts = job.vary(500, 240, 900), job.vary(45, 30, 120)
    short, alone = (False, False) if job.familiar else job.rng.random(2) < (0.5, 0.25)
    if short:
        lasts = job.rng.uniform(2, 15)
    if alone:
        pulses = tuple((float(at), float(lasts)) for at in np.arange(every, job.length_s, every))
        job.effects.append((np.array([0]), Effect(pulses=pulses)))
    else:
        _every(job, every, every, float(lasts), SAVE)


def _restart(job: Job, span: Span) -> None:
    lasts = job.vary(300, 60, 600)
    up = min(span[0] + lasts, job.length_s)
    _down(job, span[0], up)
    if not job.familiar and job.rng.random() < 0.6:
        slow = job.during((up, up + job.rng.uniform(30, 180)), job.rng.uniform(0.3, 0.8))
        job.effects.append((np.arange(job.node_R.size), Effect(duty=slow)))


def _batch_change(job: Job, span: Span) -> None:
    job.work_S *= job.during((span[0], np.inf), job.rng.choice([job.rng.uniform(0.4, 0.8), job.rng.uniform(1.3, 2.5)]))
    job.memory_S *= job.during((span[0], np.inf), job.rng.uniform(0.85, 1.08))
    job.label((span[0], job.length_s), "benign", "batch_change")


def _drift(job: Job, span: Span) -> None:
    ramp = job.length_s - span[0]
    job.work_S *= job.during((span[0], np.inf), job.rng.choice([0.6, 1.7]), ramp_s=ramp)
    job.traffic_S *= job.during((span[0], np.inf), job.rng.uniform(0.8, 1.2), ramp_s=ramp)
    job.label((span[0], job.length_s), "benign", "drift")


def _noisy_neighbour(job: Job, span: Span) -> None:
    for at in job.rng.uniform(0.1, 0.95, job.rng.integers(1, 4)) * job.length_s:
        ranks = _with_node(job, _some_rank(job))
        short = (at, at + job.rng.uniform(5, 20))
        effect = Effect(duty=job.during(short, job.rng.uniform(0.5, 0.8)), cpu=job.during(short, 0.4, 0.0))
        job.effects.append((ranks, effect))
        job.label(short, "benign", "noisy_neighbour")


def _always_hot(job: Job, span: Span) -> None:
    job.hot_R[_some_rank(job)] += job.rng.uniform(10, 18)


def _always_slow(job: Job, span: Span) -> None:
    clock = np.full(job.length_s + 1, job.rng.uniform(0.85, 0.95))
    job.effects.append((np.array([_some_rank(job)]), Effect(clock=clock)))


def _exporter_silent(job: Job, span: Span) -> None:
    dark = (span[0], span[0] + job.rng.uniform(90, 420))
    job.effects.append((_with_node(job, _some_rank(job)), Effect(dark=dark)))
    job.label(dark, "benign", "exporter_silent")


def _exporter_stale(job: Job, span: Span) -> None:
    stale = (span[0], span[0] + job.rng.uniform(60, 300))
    job.frozen.append((stale, int(job.rng.integers(len(job.names)))))
    job.label(stale, "benign", "exporter_stale")


def _garbage_collection(job: Job, span: Span) -> None:
    """Now this rank pauses, now that one."""
    for rank in job.rng.choice(job.node_R.size, min(12, job.node_R.size), replace=False):
        at = np.sort(job.rng.uniform(0, job.length_s, job.rng.integers(1, 6)))
        job.effects.append((np.array([rank]), Effect(pulses=tuple((float(a), job.rng.uniform(0.5, 4)) for a in at))))


def _clock_skew(job: Job, span: Span) -> None:
    job.skew_N += job.rng.uniform(-4, 4, len(job.names)).round(1)


def _telemetry_gap(job: Job, span: Span) -> None:
    gap = (span[0], span[0] + job.rng.uniform(60, 180))
    job.gaps.append(gap)
    job.label(gap, "benign", "telemetry_gap")


def _harmless_lines(job: Job, span: Span) -> None:
    job.logged = True
    texts = (
        "kernel: EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0",
        "kernel: NVRM: GPU at PCI:0000:17:00: 2 correctable ECC errors in the last hour",
        "UserWarning: the given NumPy array is not writable",
        "kernel: mlx5_core 0000:3b:00.0: Port module event: module 0, Cable plugged",
        "WARNING: retrying download of shard 000431 (attempt 2)",
        "NCCL WARN Call to ibv_modify_qp retried, recovered",
    )
    for at in job.rng.uniform(0.05, 1.0, job.rng.integers(3, 30)) * job.length_s:
        job.say(at, int(job.rng.integers(len(job.names))), str(job.rng.choice(texts)))


def _rack_drift(job: Job, span: Span) -> None:
    few = job.rng.choice(len(job.names), max(1, len(job.names) // 4), replace=False)
    heat = job.rng.uniform(4, 9) * np.sin(np.linspace(0, job.rng.uniform(1.5, 4.5), job.length_s + 1))
    job.effects.append((np.flatnonzero(np.isin(job.node_R, few)), Effect(heat=heat)))


def _counter_reset(job: Job, span: Span) -> None:
    for at in job.rng.uniform(0.1, 0.95, job.rng.integers(1, 5)) * job.length_s:
        job.resets.append((float(at), int(job.rng.integers(len(job.names)))))


# --- jobs that do not train: (job) -> share of time in each phase -----------------------------------------------------


def _bursts(job: Job, share_R: Array, length_s: float, T: int) -> Array:
    """Busy share (R, T) of ranks that switch on and off independently: `share_R` of the time busy, `length_s` seconds a turn."""
    steps = np.arange(T)
    busy_RT = np.empty((share_R.size, T))
    for r, share in enumerate(share_R):
        n = max(4, int(3 * T * job.interval_s / length_s))
        on, off = job.rng.exponential(length_s * max(share, 0.01), n), job.rng.exponential(length_s * (1.01 - share), n)
        edges = np.concatenate([[0.0], np.cumsum(np.column_stack([on, off]).ravel())])
        busy = np.concatenate([[0.0], np.cumsum(np.column_stack([on, np.zeros(n)]).ravel())])
        offset = job.rng.uniform(0, length_s)
        at = np.append(steps * job.interval_s, T * job.interval_s) + offset
        busy_RT[r] = np.diff(np.interp(at, edges, busy)) / job.interval_s
    return np.clip(busy_RT, 0, 1)


def _sleep(job: Job, T: int) -> Array:
    return np.zeros((job.node_R.size, T))


def _inference(job: Job, T: int) -> Array:
    return _bursts(job, job.rng.uniform(0.1, 0.7, job.node_R.size), job.rng.uniform(2, 40), T)


def _notebook(job: Job, T: int) -> Array:
    few_R = (job.rng.random(job.node_R.size) < job.rng.uniform(0.02, 0.2)).astype(float)
    busy_RT: Array = _bursts(job, few_R * job.rng.uniform(0.02, 0.2), job.rng.uniform(60, 400), T) * few_R[:, None]
    return busy_RT


def _data_preparation(job: Job, T: int) -> Array:
    return _bursts(job, np.full(job.node_R.size, 0.05), 20.0, T) * 0.3


FAULTS: dict[str, Event] = {
    "slow_gpu": _slow_gpu,
    "slow_gpu_mild": _slow_gpu_mild,
    "throttle_creeping": _throttle_creeping,
    "power_brake": _power_brake,
    "silent_slow": _silent_slow,
    "slow_cpu": _slow_cpu,
    "pcie_degraded": _pcie_degraded,
    "nic_degraded": _nic_degraded,
    "nic_degraded_mild": _nic_degraded_mild,
    "link_flapping": _link_flapping,
    "storage_stall": _storage_stall,
    "network_congested": _network_congested,
    "storage_slow_for_all": _storage_slow_for_all,
    "hang": _hang,
    "hang_unlogged": _hang_unlogged,
    "hang_flat": _hang_flat,
    "process_killed": _process_killed,
    "node_lost": _node_lost,
    "gpu_lost": _gpu_lost,
    "ecc": _ecc,
    "ecc_contained": _ecc_contained,
    "memory_leak": _memory_leak,
    "user_error": _user_error,
    "two_faults": _two_faults,
}
ODDITIES: dict[str, Event] = {
    "plain": _plain,
    "eval": _eval,
    "checkpoint": _checkpoint,
    "restart": _restart,
    "batch_change": _batch_change,
    "drift": _drift,
    "noisy_neighbour": _noisy_neighbour,
    "always_hot": _always_hot,
    "always_slow": _always_slow,
    "exporter_silent": _exporter_silent,
    "exporter_stale": _exporter_stale,
    "garbage_collection": _garbage_collection,
    "clock_skew": _clock_skew,
    "telemetry_gap": _telemetry_gap,
    "harmless_lines": _harmless_lines,
    "rack_drift": _rack_drift,
    "counter_reset": _counter_reset,
}
NOT_TRAINING: dict[str, Callable[[Job, int], Array]] = {
    "sleep": _sleep,
    "inference": _inference,
    "notebook": _notebook,
    "data_preparation": _data_preparation,
}
KINDS = (*FAULTS, *ODDITIES, *NOT_TRAINING)
BACKGROUND = (
    "eval",
    "checkpoint",
    "batch_change",
    "noisy_neighbour",
    "always_hot",
    "exporter_silent",
    "garbage_collection",
    "clock_skew",
    "harmless_lines",
    "rack_drift",
    "counter_reset",
)
"""Oddities that may also be there beside a fault."""


# --- drawing a job ----------------------------------------------------------------------------------------------------


def _draw(kind: str, rng: np.random.Generator, hours: float | None, familiar: bool) -> Job:
    length_s = int(3600 * (hours if hours is not None else rng.uniform(1 / 3, 2)))
    per_node = 8 if familiar else int(rng.choice([8, 4, 1], p=[0.65, 0.25, 0.1]))
    R = int(rng.choice([32, 64]) if familiar else rng.choice([8, 16, 24, 32, 48, 64, 96, 128, 256, 512], p=RANK_ODDS))
    R = max(R, 3 * per_node) // per_node * per_node
    stages = int(rng.choice([1, 4]) if familiar else rng.choice([1, 2, 4, 8], p=[0.5, 0.2, 0.2, 0.1]))
    while R // stages < 3 or R % stages:
        stages //= 2
    rank_R = np.arange(R)
    inner = not familiar and rng.random() < 0.25
    interval = float(rng.choice([5, 10]) if familiar else rng.choice([1, 2, 5, 10, 15, 30], p=[0.07, 0.13, 0.35, 0.25, 0.1, 0.1]))
    while R * length_s / interval > 300_000:
        interval = {1.0: 2.0, 2.0: 5.0, 5.0: 10.0}.get(interval, 2 * interval)
    metrics = list(GIVEN)
    style = rng.choice(["given", "wait", "paper", "steps", "host", "new"], p=[0.36, 0.26, 0.12, 0.08, 0.09, 0.09])
    if familiar:
        style = rng.choice(["given", "wait"])
    if style == "wait":
        metrics += ["collective_wait_ratio"]
    elif style == "paper":
        metrics = list(PAPER)
    elif style == "steps":
        metrics = [*PAPER, "train_step_seconds"]
    elif style == "host":
        metrics = [m for m in GIVEN if rng.random() < 0.7 or m in PAPER] + ["cpu_busy_ratio"]
    elif style == "new":
        more = [m for m in OTHER if m not in ("train_step_seconds", "cpu_busy_ratio") and rng.random() < 0.5]
        metrics = [m for m in GIVEN if rng.random() < 0.7 or m == PAPER[0]] + (more or ["nvlink_bytes_per_second"])
    scale = 0.0 if familiar else 1.0
    names = {"gpu": "gpu-{:04d}", "dgx": "dgx-a{:02d}", "ip": "ip-10-0-3-{}", "host": "node{:03d}.cluster.local"}
    pattern = names["gpu" if familiar else str(rng.choice(list(names)))]
    return Job(
        rng=rng,
        kind=kind,
        length_s=length_s,
        interval_s=interval,
        node_R=rank_R // per_node,
        gpu_R=rank_R % per_node,
        stage_R=rank_R % stages if inner else rank_R // (R // stages),
        stages=stages,
        names=[pattern.format(n) for n in range(R // per_node)],
        group_names=familiar or stages > 1 or rng.random() < 0.7,
        iteration_s=float(rng.uniform(7, 19) if familiar else np.exp(rng.uniform(np.log(0.5), np.log(45)))),
        load_share=0.028 if familiar else float(rng.uniform(0.01, 0.08)),
        comm_share=0.295 if familiar else float(rng.uniform(0.1, 0.5)),
        jitter=0.005 if familiar else float(rng.uniform(0.002, 0.04)),
        levels={
            "power": 400.0 * (1 + scale * rng.uniform(-0.15, 0.6)),
            "wait_power": 156.0 * (1 + scale * rng.uniform(-0.08, 0.08)),
            "idle_power": 62.0 * (1 + scale * rng.uniform(-0.1, 0.1)),
            "tensor": 0.523 * (1 + scale * rng.uniform(-0.4, 0.4)),
            "utilization": 0.97 - scale * rng.uniform(0, 0.06),
            "traffic": 1.536e10 * (1.0 if familiar else np.exp(rng.uniform(-2, 1))),
            "memory": 7.2e10 * (1 - scale * rng.uniform(0, 0.6)),
            "clock": 1.41e9 if familiar else float(rng.choice([1.41e9, 1.755e9, 1.98e9])),
            "cpu": rng.uniform(0.1, 0.4),
            "settle_s": 45.0 if familiar else rng.uniform(35, 90),
        },
        metrics=metrics,
        logged=familiar or rng.random() < 0.75,
        chatty=not familiar and rng.random() < 0.3,
        rough=1.0 if familiar else float(rng.choice([1.0, rng.uniform(0.7, 2.5)])),
        wander=0.0 if familiar else float(rng.choice([0.0, rng.uniform(0.001, 0.01)])),
        familiar=familiar,
        start=datetime(2026, 3, 2, 8, tzinfo=UTC)
        + scale * timedelta(days=int(rng.integers(0, 200)), seconds=int(rng.integers(0, 86400))),
        missing_rows=scale * float(rng.choice([0.0, rng.uniform(0, 0.02), rng.uniform(0, 0.1)])),
        missing_cells=scale * float(rng.choice([0.0, 0.0, rng.uniform(0, 0.03)])),
        stamp_jitter=scale * float(rng.choice([0.0, 0.0, rng.uniform(0, 0.3)])),
    )


RANK_ODDS = [0.05, 0.12, 0.06, 0.2, 0.08, 0.23, 0.06, 0.12, 0.05, 0.03]


# --- playing it -------------------------------------------------------------------------------------------------------


@dataclass
class _Role:
    """Ranks whose timeline is the same."""

    stage: int
    effects: tuple[int, ...]
    speed: list[float] | None
    """Work done since the start at each second; None: one second a second."""
    load_S: Array
    pulses: list[Span]
    dead: list[Span]


def _advance(done: list[float] | None, at_s: float, work_s: float) -> float:
    """When `work_s` more seconds of work are done that began at `at_s`; infinity if never."""
    if done is None:
        return at_s + work_s
    i = int(at_s)
    if i + 1 >= len(done):
        return np.inf
    target = done[i] + (at_s - i) * (done[i + 1] - done[i]) + work_s
    j = bisect_left(done, target)
    if j == len(done):
        return np.inf
    return max(at_s, j - 1 + (target - done[j - 1]) / (done[j] - done[j - 1])) if j else at_s


def _done(speed_S: Array) -> list[float] | None:
    return None if (speed_S == 1.0).all() else np.concatenate([[0.0], np.cumsum(speed_S)]).tolist()


def _inside(job: Job, spans: Sequence[Span]) -> NDArray[np.bool_]:
    at_S = np.arange(job.length_s + 1)
    inside_S = np.zeros(at_S.size, dtype=bool)
    for a, b in spans:
        inside_S |= (at_S >= a) & (at_S < b)
    return inside_S


def _roles(job: Job) -> tuple[list[_Role], NDArray[np.int64]]:
    keys = [tuple(i for i, (ranks, _) in enumerate(job.effects) if r in ranks) for r in range(job.node_R.size)]
    table: dict[tuple[int, tuple[int, ...]], int] = {}
    role_R = np.array([table.setdefault((int(job.stage_R[r]), key), len(table)) for r, key in enumerate(keys)])
    roles = []
    for stage, key in table:
        mine = [job.effects[i][1] for i in key]
        speed_S = np.ones(job.length_s + 1)
        for effect in mine:
            speed_S = speed_S * effect.clock * effect.duty * effect.drag
        dead = [e.dead for e in mine if e.dead is not NEVER]
        speed_S[_inside(job, dead)] = 0.0
        load_S = job.slow_load_S + sum(np.asarray(e.load_s) * np.ones(job.length_s + 1) for e in mine)
        pulses = sorted(p for e in mine for p in e.pulses)
        roles.append(_Role(stage, key, _done(speed_S), load_S, pulses, dead))
    return roles, role_R


def _stage_work(job: Job) -> Array:
    """Compute of each stage relative to the slowest: the first ones have less to do, the last one also computes the loss."""
    if job.stages == 1:
        return np.ones(1)
    work = np.full(job.stages, 0.924)
    work[0], work[-1] = 0.875, 1.0
    return work


def _link_S(job: Job) -> Array:
    """Speed of communication (S,): that of the slowest link, and none while anybody is dead or everybody stuck."""
    link_S = job.slow_network_S.copy()
    for _, effect in job.effects:
        link_S = np.minimum(link_S, np.asarray(effect.comm) * job.slow_network_S)
    link_S[_inside(job, [e.dead for _, e in job.effects if e.dead is not NEVER] + job.stuck)] = 0.0
    return link_S


def _timelines(job: Job, roles: list[_Role]) -> tuple[list[tuple[Array, NDArray[np.int64]]], Array]:
    """Play all iterations: for each role when each phase begins (and which), and (start, end) of every finished iteration."""
    H = float(job.length_s)
    link = _done(_link_S(job))
    work = _stage_work(job) * job.iteration_s * (1 - job.load_share - job.comm_share)
    pauses, downs = sorted(job.pauses), sorted(job.downs)
    pulses = [list(role.pulses) for role in roles]
    begins: list[list[float]] = [[] for _ in roles]
    rows: list[tuple[float, float, float, int]] = []
    jitter_I2 = np.clip(job.rng.standard_normal((4096, 2)), -3, 3) * job.jitter
    ends: list[Span] = []
    t = 0.0
    i = 0
    while t < H:
        second = int(t)
        jump = 1.0 + jitter_I2[i % 4096]
        i += 1
        compute = []
        for k, role in enumerate(roles):
            load = job.iteration_s * job.load_share + role.load_S[second]
            while pulses[k] and pulses[k][0][0] <= t:
                load += pulses[k].pop(0)[1]
            loaded = t + load
            compute.append((loaded, _advance(role.speed, loaded, work[role.stage] * job.work_S[second] * jump[0])))
        barrier = max(c for _, c in compute)
        end = np.inf
        if barrier < np.inf:
            end = _advance(link, barrier, job.iteration_s * job.comm_share * job.traffic_S[second] * jump[1])
        cut, gap, resume = np.inf, COMM, end
        while downs and downs[0][1] <= t:
            downs.pop(0)
        if downs and downs[0][0] < end:
            cut, resume, gap = max(downs[0][0], t), downs[0][1], DOWN
            downs.pop(0)
        elif end == np.inf:
            resume = H
        else:
            ends.append((t, end))
            while pauses and pauses[0][0] <= end:
                _, lasts, gap = pauses.pop(0)
                resume = max(resume, end) + lasts
                if downs and downs[0][0] < resume:
                    resume = max(downs[0][0], end)
        for k, (loaded, computed) in enumerate(compute):
            begins[k] += [t, loaded, computed]
        rows.append((barrier, end, cut, gap))
        t = max(resume, t + 1e-3)
    barrier_I, end_I, cut_I, gap_I = (np.array(column) for column in zip(*rows, strict=True))
    lines = []
    for k, role in enumerate(roles):
        begin_I3 = np.array(begins[k]).reshape(-1, 3)
        begin_I5 = np.column_stack([begin_I3, barrier_I, end_I])
        begin_I5[:, 1:] = np.minimum(begin_I5[:, 1:], cut_I[:, None])
        at: Array = np.minimum(begin_I5.ravel(), H)
        phase = np.column_stack([np.tile([LOAD, COMPUTE, WAIT, COMM], (len(rows), 1)), gap_I]).astype(np.int64).ravel()
        link_S = _link_S(job)
        halts = np.flatnonzero(np.diff(np.concatenate([[False], link_S == 0, [False]]).astype(np.int8)))
        for a, b in halts.reshape(-1, 2):
            at, phase = _overlay(at, phase, (float(a), float(b)), WAIT, only=COMM)
        for span in role.dead:
            at, phase = _overlay(at, phase, span, IDLE)
        for span in sorted(job.downs):
            at, phase = _overlay(at, phase, span, DOWN)
        lines.append((np.append(at, H + 1), phase))
    return lines, np.array(ends).reshape(-1, 2)


def _overlay(
    at: Array, phase: NDArray[np.int64], span: Span, value: int, only: int | None = None
) -> tuple[Array, NDArray[np.int64]]:
    """Replace the phases inside a span; with `only`, those of that phase alone."""
    cuts = np.array([c for c in span if np.isfinite(c) and c > at[0]])
    where = np.searchsorted(at, cuts, side="right")
    phase = np.insert(phase, where, phase[np.maximum(where - 1, 0)])
    at = np.insert(at, where, cuts)
    inside = (at >= span[0]) & (at < span[1])
    if only is not None:
        inside &= phase == only
    return at, np.where(inside, value, phase)


def _averages(edges: Array, at: Array, value: Array) -> Array:
    """Mean between neighbouring edges of what has `value` from each `at` to the next."""
    total = np.concatenate([[0.0], np.cumsum(value * np.diff(at))])
    return np.asarray(np.diff(np.interp(edges, at, total)) / np.diff(edges), dtype=np.float64)


def _edges(job: Job) -> tuple[Array, Array]:
    """True edges (N, T + 1) of the intervals of each node in seconds, and their stamps (N, T), which skewed clocks shift."""
    T = int(job.length_s // job.interval_s)
    N = len(job.names)
    edges_NT = np.tile(np.arange(T + 1) * job.interval_s, (N, 1))
    if job.stamp_jitter:
        edges_NT[:, 1:] -= (job.rng.uniform(0, job.stamp_jitter, (N, T)) * job.interval_s).round(1)
    return edges_NT, edges_NT[:, 1:] + job.skew_N[:, None]


def _play(job: Job, edges_NT: Array) -> dict[str, Array]:
    """Averages (R, T) of all that a rank does, without noise: `share` (R, T, P) of time in each phase, and the effects."""
    roles, role_R = _roles(job)
    lines, ends = _timelines(job, roles)
    same = bool((edges_NT == edges_NT[0]).all())
    pairs = np.column_stack([role_R, np.zeros_like(role_R) if same else job.node_R])
    distinct_K2, pair_R = np.unique(pairs, axis=0, return_inverse=True)
    T = edges_NT.shape[1] - 1
    share_KTP = np.zeros((len(distinct_K2), T, 8))
    factors, terms = ("clock", "duty", "drag", "comm", "memory"), ("errors", "heat", "cpu", "halted")
    effect_KT = {n: np.full((len(distinct_K2), T), float(n in factors)) for n in factors + terms}
    seconds = np.arange(job.length_s + 2, dtype=float)
    for k, (role, node) in enumerate(distinct_K2):
        at, phase = lines[role]
        for p in np.unique(phase):
            share_KTP[k, :, p] = _averages(edges_NT[node], at, (phase == p).astype(float))
        for i in roles[role].effects:
            effect = job.effects[i][1]
            link = np.asarray(effect.comm) + np.zeros(job.length_s + 1)
            for n in factors + terms:
                # A link that stands still is no slow link: its stalls are phases of waiting.
                value = link == 0 if n == "halted" else np.where(link == 0, 1.0, link) if n == "comm" else getattr(effect, n)
                if not isinstance(value, float):
                    mean = _averages(edges_NT[node], seconds, np.asarray(value, dtype=float))
                    effect_KT[n][k] = effect_KT[n][k] * mean if n in factors else effect_KT[n][k] + mean
    played = {n: v[pair_R.ravel()] for n, v in effect_KT.items()}
    played["share"] = share_KTP[pair_R.ravel()]
    link_S = _link_S(job)
    played["link"] = np.array([_averages(e, seconds, np.where(link_S == 0, 1.0, link_S)) for e in edges_NT])[job.node_R]
    played["memory"] = played["memory"] * np.array([_averages(e, seconds, job.memory_S) for e in edges_NT])[job.node_R]
    step_N = []
    for edges in edges_NT:
        last = np.searchsorted(ends[:, 1], edges[1:], side="right") - 1
        step = np.where(last >= 0, (ends[:, 1] - ends[:, 0])[np.maximum(last, 0)] if len(ends) else np.nan, np.nan)
        step_N.append(step)
    played["step"] = np.where(played["share"][:, :, DOWN] > 0.5, np.nan, np.array(step_N)[job.node_R])
    return played


def _idle(job: Job, edges_NT: Array) -> dict[str, Array]:
    """The same for a job that does not train: phases COMPUTE and DOWN."""
    T = edges_NT.shape[1] - 1
    busy_RT = NOT_TRAINING[job.kind](job, T)
    R = job.node_R.size
    share = np.zeros((R, T, 8))
    share[:, :, COMPUTE], share[:, :, DOWN] = busy_RT, 1 - busy_RT
    ones, zeros = np.ones((R, T)), np.zeros((R, T))
    cpu = zeros + (0.5 if job.kind == "data_preparation" else 0.0)
    return {
        "share": share,
        **dict.fromkeys(("clock", "duty", "drag", "comm", "link", "memory"), ones),
        **dict.fromkeys(("errors", "heat", "halted"), zeros),
        "cpu": cpu,
        "step": np.full((R, T), np.nan),
    }


# --- from what ranks do to what exporters show ------------------------------------------------------------------------


def _metrics(job: Job, played: dict[str, Array]) -> dict[str, Array]:
    """All metrics (R, T) with noise and the permanent differences between boards."""
    rng, iv, lv = job.rng, job.interval_s, job.levels
    R, T = played["clock"].shape
    share = played["share"].copy()
    training = job.kind not in NOT_TRAINING
    white = job.rough / np.sqrt(iv)

    def noise(sigma: float) -> Array:
        factor_RT: Array = 1 + sigma * white * rng.standard_normal((R, T))
        return factor_RT

    def board(sigma: float) -> Array:
        return 1 + sigma * rng.standard_normal((R, 1))

    # Ranks do not enter and leave a phase in the same instant.
    comm, room = share[:, :, COMM], np.minimum(share[:, :, COMM], share[:, :, COMPUTE])
    slip = np.clip(0.07 * white * np.sqrt(np.clip(comm * (1 - comm), 0, None)) * rng.standard_normal((R, T)), -room, room)
    share[:, :, COMM] += slip
    share[:, :, COMPUTE] -= slip
    if job.wander:
        slow = np.empty((R, T))
        keep = np.exp(-iv / 120.0)
        slow[:, 0] = rng.standard_normal(R)
        for t in range(1, T):
            slow[:, t] = keep * slow[:, t - 1] + np.sqrt(1 - keep**2) * rng.standard_normal(R)
        drift = 1 + job.wander * slow
    else:
        drift = np.ones((R, T))

    busy = played["duty"]
    speed = played["clock"] ** 1.5 * busy * (0.5 + 0.5 * played["drag"])
    values: dict[str, Array] = {}
    level = np.array([0.05, lv["utilization"], 0.997, 0.99, 0.6, 0.03, 0.0, 0.0])
    level_RTP = np.broadcast_to(level, (R, T, 8)).copy()
    level_RTP[:, :, COMPUTE] *= busy
    used = np.einsum("rtp,rtp->rt", share, level_RTP) * noise(0.011)
    values["gpu_utilization_ratio"] = np.clip(used.round(2), 0, 1)

    tensor = np.array([0.0, lv["tensor"], 0.0, 0.054 * lv["tensor"], 0.574 * lv["tensor"], 0.0, 0.0, 0.0])
    level_RTP[:] = tensor
    level_RTP[:, :, COMPUTE] *= busy * played["drag"]
    active = np.einsum("rtp,rtp->rt", share, level_RTP) * board(0.001) * noise(0.02) * drift
    values["gpu_tensor_active_ratio"] = np.clip(active, 0, 1)

    idle, top, wait = lv["idle_power"], lv["power"], lv["wait_power"]
    watts = np.array([idle + 3, top, wait, wait + 10, idle + 0.583 * (top - idle), idle + 3, idle, idle]) - idle
    level_RTP[:] = watts
    level_RTP[:, :, COMPUTE] *= speed
    drawn = np.einsum("rtp,rtp->rt", share, level_RTP) * board(0.021) * drift
    values["gpu_power_watts"] = (idle + drawn) * noise(0.0149)

    down = share[:, :, DOWN]
    memory = lv["memory"] * (1 - 0.1 * job.stage_R[:, None] / max(job.stages - 1, 1)) * board(0.0097) * played["memory"]
    low, high = (5e8, memory) if training else (2e9, 2e9 + 0.5 * lv["memory"] * (job.kind == "inference"))
    values["gpu_memory_used_bytes"] = (down * low + (1 - down) * high if training else np.full((R, T), high)) * noise(0.001)

    target = (
        34
        + 0.1 * values["gpu_power_watts"] * (400 / top)
        + job.hot_R[:, None]
        + 3.1 * rng.standard_normal((R, 1))
        + played["heat"]
    )
    heat = np.empty((R, T))
    keep = np.exp(-iv / lv["settle_s"])
    state = target[:, 0] + (rng.uniform(0, 8) if training else 0.0)
    for t in range(T):
        state = keep * state + (1 - keep) * target[:, t]
        heat[:, t] = state
    heat += 0.25 * rng.standard_normal((R, T))
    values["gpu_temperature_celsius"] = heat.round()
    values["gpu_hbm_temperature_celsius"] = (heat * 1.08 + 4).round()

    resting = down + share[:, :, IDLE]
    # The clock is that of the moment, also while waiting: a throttled board stays throttled.
    values["gpu_sm_clock_hertz"] = lv["clock"] * board(0.0066) * (1 - 0.144 * resting) * played["clock"] * noise(0.002)

    first_last = (job.stage_R == 0) | (job.stage_R == job.stages - 1)
    piped = np.where(first_last, 3.5e8, 7e8) if job.stages > 1 else np.zeros(R)
    full = lv["traffic"] * (np.where(first_last, 0.69, 1.06) if job.stages > 1 else np.ones(R))
    rate = np.zeros((R, T, 8))
    rate[:, :, COMPUTE] = (
        piped[:, None] * busy * played["clock"] * played["drag"] * (lv["traffic"] / 1.536e10) if training else 2e8
    )
    rate[:, :, COMM] = full[:, None] * played["link"]
    rate[:, :, WAIT] = rate[:, :, IDLE] = 2e4
    rate[:, :, EVAL] = 3.6e8
    rate[:, :, SAVE] = 4.5e8 * (1 + 0.6 / np.sqrt(iv) * rng.standard_normal((R, T)))
    rate[:, :, DOWN] = 1e4 if training else (3e8 if job.kind == "data_preparation" else 4e4)
    bytes_s = np.maximum(np.einsum("rtp,rtp->rt", share, rate), 0) * drift
    values["ib_transmit_bytes_per_second"] = np.maximum(bytes_s * noise(0.03), 0)
    values["ib_receive_bytes_per_second"] = np.maximum(bytes_s * noise(0.03), 0)

    held = np.where(played["comm"] < 1, 0.92 * (1 - played["comm"]), 0.0135 * (1 - played["link"]))
    everybody = _network_share(job, T)
    held = np.maximum(held, everybody[None, :])
    stall = share[:, :, COMM] * (0.0095 + held) + 0.3 * played["halted"] + 0.0003 * share[:, :, EVAL] * (rng.random((R, T)) < 0.3)
    values["ib_transmit_wait_ratio"] = np.clip(stall * noise(0.18), 0, 1)

    values["ib_port_errors_per_second"] = rng.poisson((2e-4 + played["errors"]) * iv) / iv

    waited = np.array([0.02, 0.02, 0.99, 0.02, 0.05, 0.0, 0.0, 0.0])
    values["collective_wait_ratio"] = np.clip(np.einsum("rtp,p->rt", share, waited) * noise(0.03), 0, 1)
    values["train_step_seconds"] = played["step"] * noise(0.0005)

    node_noise = 1 + 0.1 * white * rng.standard_normal((len(job.names), T))[job.node_R]
    cpu = np.clip((lv["cpu"] * (0.2 + 0.8 * (1 - down)) + played["cpu"]) * node_noise, 0, 1)
    values["cpu_busy_ratio"], values["host_load_ratio"] = cpu, cpu * 1.7
    values["nvlink_bytes_per_second"] = active * 3e11 * noise(0.03)
    values["input_wait_ratio"] = np.clip(share[:, :, LOAD] * noise(0.05), 0, 1)
    return values


def _network_share(job: Job, T: int) -> Array:
    """Waiting for credits (T,) that congestion brings to everybody's port."""
    slow = np.interp((np.arange(T) + 0.5) * job.interval_s, np.arange(job.length_s + 1), job.slow_network_S)
    return np.asarray(0.92 * (1 - slow))


def _stands_out(job: Job, values_RMT: Array, label: dict[str, Any]) -> bool:
    """Whether some metric separates a labelled rank from its peers, in level or in spread.

    Compared are differences from the median of the peers, 10 minutes of the fault against the time before it. They must be 8
    deviations of the peers' and 2 % of the metric's level. Peers are the ranks of the group; where those are too few, all others.
    """
    first, last = int(np.ceil(label["start"] / job.interval_s)), int(min(label["end"], label["start"] + 600) / job.interval_s)
    if last - first < 3 or first < 5:
        return False
    culprit_R = np.isin(np.arange(job.node_R.size), label["ranks"])
    faulty = {node for other in job.labels if other["kind"] == "fault" for node in other["nodes"]}
    healthy_R = ~culprit_R & ~np.isin(job.node_R, [job.names.index(node) for node in faulty])
    for stage in np.unique(job.stage_R[culprit_R]):
        mine_R, peer_R = culprit_R & (job.stage_R == stage), healthy_R & (job.stage_R == stage)
        if peer_R.sum() < 3:
            peer_R = healthy_R
        if peer_R.sum() >= 3 and any(_apart(values_RMT[:, m], first, last, mine_R, peer_R) for m in range(values_RMT.shape[1])):
            return True
    return False


def _apart(values_RT: Array, first: int, last: int, mine_R: NDArray[np.bool_], peer_R: NDArray[np.bool_]) -> bool:
    before, after = values_RT[:, :first], values_RT[:, first:last]
    if np.isnan(after[mine_R]).mean() > 0.8 and np.isnan(after[peer_R]).mean() < 0.5:
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rows that nobody has are all NaN
        floor = 0.02 * np.abs(np.nanmean(before[peer_R]))
        before = before - np.nanmedian(before[peer_R], axis=0)
        after = after - np.nanmedian(after[peer_R], axis=0)
        level = np.nanmean(after, axis=1) - np.nanmean(before, axis=1)
        spread = np.nanstd(after, axis=1) - np.nanstd(before, axis=1)
    for change in (level, spread):
        peers, mine = change[peer_R & ~np.isnan(change)], change[mine_R & ~np.isnan(change)]
        if peers.size >= 3 and mine.size:
            usual = max(1.4826 * np.median(np.abs(peers - np.median(peers))), np.std(peers) / 2, 1e-12)
            if np.abs(mine - np.median(peers)).max() > max(8 * usual, floor):
                return True
    return False


INFO = ("INFO step {} loss 2.31 lr 3.0e-04", "INFO dataloader epoch 0 batch {}", "INFO saved metrics at step {}")


def _chatter(job: Job) -> None:
    for at in np.arange(20, job.length_s, 120):
        for node in range(len(job.names)):
            job.say(at + job.rng.uniform(0, 30), node, str(job.rng.choice(INFO)).format(int(at / job.iteration_s)))


def simulate(
    kind: str, seed: int, hours: float | None = None, familiar: bool = False, metrics: Sequence[str] | None = None
) -> Trace:
    """One job of a kind; the same arguments give the same trace.

    Parameters
    ----------
    kind : one of `KINDS`
    seed : any non-negative integer
    hours : length of the job; drawn from 20 minutes to 2 hours without it
    familiar : shapes, intervals, levels and metrics as in the development set instead of drawing them widely
    metrics : these columns (of `UNITS`) instead of drawn ones
    """
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    job = _draw(kind, rng, hours, familiar)
    if metrics is not None:
        job.metrics = list(metrics)
    H = float(job.length_s)
    start = float(int(rng.uniform(0.44, 0.7) * H))
    lasting = H if familiar or rng.random() < 0.7 else min(H, start + rng.uniform(480, 1200))
    if kind in FAULTS:
        if not familiar and rng.random() < 0.4:
            ODDITIES[str(rng.choice(BACKGROUND))](job, (rng.uniform(0.1, 0.9) * H, H))
        FAULTS[kind](job, (start, lasting))
    elif kind in ODDITIES:
        ODDITIES[kind](job, (float(int(rng.uniform(*(0.5, 0.7) if familiar else (0.15, 0.8)) * H)), H))
    else:
        job.label((0.0, H), "not_training", kind)
    if job.chatty and job.logged:
        _chatter(job)

    edges_NT, stamps_NT = _edges(job)
    played = _idle(job, edges_NT) if kind in NOT_TRAINING else _play(job, edges_NT)
    columns = _metrics(job, played)
    values_RMT = np.stack([columns[m] for m in job.metrics], axis=1)
    stamps_RT = stamps_NT[job.node_R].copy()
    for at, node in job.resets:
        t = min(int(at / job.interval_s), stamps_RT.shape[1] - 1)
        for m, name in enumerate(job.metrics):
            if name.startswith("ib_"):
                values_RMT[job.of_node(node), m, t] *= rng.choice([0.0, np.nan, 8.0])
    for span, node in job.frozen:
        first, last = (min(int(at / job.interval_s), stamps_RT.shape[1]) for at in span)
        values_RMT[job.of_node(node), :, first:last] = values_RMT[job.of_node(node), :, first : first + 1]
    values_RMT[rng.random(values_RMT.shape) < job.missing_cells] = np.nan
    lost_RT = rng.random(stamps_RT.shape) < job.missing_rows
    for ranks, effect in job.effects:
        lost_RT[ranks] |= (stamps_RT[ranks] > effect.dark[0]) & (stamps_RT[ranks] <= effect.dark[1])
    for gap in job.gaps:
        lost_RT |= (stamps_RT > gap[0]) & (stamps_RT <= gap[1])
    stamps_RT[lost_RT] = np.nan
    values_RMT[np.broadcast_to(lost_RT[:, None, :], values_RMT.shape)] = np.nan

    lines = [(at, job.names[node], text) for at, node, text in sorted(job.lines)] if job.logged else []
    for label in job.labels:
        if label["nameable"] is None:
            named = {
                job.names[n] for at, n, text in job.lines if label["start"] <= at <= label["start"] + 8 and "INFO" not in text
            }
            by_log = job.logged and bool(named) and named <= set(label["nodes"])
            label["nameable"] = by_log or _stands_out(job, values_RMT, label)
    places = [
        {"rank": r, "node": job.names[job.node_R[r]], "gpu": int(job.gpu_R[r])}
        | ({"group": f"pp{job.stage_R[r]}"} if job.group_names else {})
        for r in range(job.node_R.size)
    ]
    interval: float = int(job.interval_s) if job.interval_s == int(job.interval_s) else job.interval_s
    about = {"job": kind, "interval_seconds": interval, "metrics": {m: UNITS[m] for m in job.metrics}, "ranks": places}
    return Trace(about, job.start, stamps_RT, values_RMT.astype(np.float32), job.labels, lines)


# --- writing ----------------------------------------------------------------------------------------------------------


def _stamp(trace: Trace, at_s: float) -> str:
    return (trace.start + timedelta(seconds=at_s)).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def write(trace: Trace, folder: Path) -> None:
    """Write one trace folder, whole or not at all.

    Raises
    ------
    EnvironmentLacks
        The folder exists already or cannot be written.
    """
    if folder.exists():
        raise EnvironmentLacks(f"{folder} exists already; choose another --out or remove it")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise EnvironmentLacks(f"cannot write to {folder.parent} ({error.strerror}); choose another --out") from error
    try:
        _fill(trace, draft, folder.name)
        draft.chmod(0o755)
        draft.rename(folder)
    except OSError as error:
        raise EnvironmentLacks(f"cannot write {folder} ({error.strerror}); make room or choose another --out") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _fill(trace: Trace, folder: Path, name: str) -> None:
    stamps_TR = trace.stamps_RT.T
    there_TR = ~np.isnan(stamps_TR)
    micros = int(trace.start.timestamp()) * 1_000_000 + (stamps_TR[there_TR] * 1e6).round().astype(np.int64)
    columns = {
        "time": pa.array(micros, pa.timestamp("us", tz="UTC")),
        "rank": pa.array(np.nonzero(there_TR)[1].astype(np.int32)),
    }
    for m, metric in enumerate(trace.about["metrics"]):
        columns[metric] = pa.array(trace.values_RMT[:, m, :].T[there_TR])
    pq.write_table(pa.table(columns), folder / "metrics.parquet")
    (folder / "trace.json").write_text(json.dumps(trace.about | {"job": name}, indent=1) + "\n", encoding="utf-8")
    labels = [label | {"start": _stamp(trace, label["start"]), "end": _stamp(trace, label["end"])} for label in trace.labels]
    (folder / "labels.json").write_text(json.dumps(labels, indent=1) + "\n", encoding="utf-8")
    if trace.lines:
        (folder / "logs").mkdir()
        for node in {node for _, node, _ in trace.lines}:
            text = "".join(f"{_stamp(trace, at)} {line}\n" for at, where, line in trace.lines if where == node)
            (folder / "logs" / f"{node}.log").write_text(text, encoding="utf-8")


def mixture(count: int, seed: int) -> list[str]:
    """Kinds of `count` traces: 55 % faults, 35 % oddities and plain ones, 10 % not training; as even as possible within each."""
    rng = np.random.default_rng(seed)
    wanted = {"fault": round(0.55 * count), "idle": round(0.1 * count)}
    kinds: list[str] = []
    for group, n in ((FAULTS, wanted["fault"]), (NOT_TRAINING, wanted["idle"]), (ODDITIES, count - sum(wanted.values()))):
        names = list(group)
        while n > 0:
            some = [str(k) for k in rng.permutation(names)[:n]]
            kinds += some
            n -= len(some)
    return kinds


def main(arguments: Sequence[str] | None = None) -> int:
    """Write traces; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Write simulated traces of training jobs with labels. Nothing in them was measured."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder that gets one folder a trace")
    parser.add_argument("--count", type=int, required=True, help="how many traces")
    parser.add_argument("--seed", type=int, required=True, help="the same seed gives the same traces")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help=f"only these, in turn: {', '.join(KINDS)}")
    parser.add_argument("--hours", type=float, help="length of every job; drawn from 20 minutes to 2 hours without it")
    parser.add_argument("--familiar", action="store_true", help="shapes, intervals and metrics as in the development set")
    options = parser.parse_args(arguments)
    try:
        if options.count < 1 or options.seed < 0:
            raise UsageError("--count must be at least 1 and --seed not negative")
        if options.hours is not None and not 0.3 <= options.hours <= 24:
            raise UsageError(f"--hours {options.hours:g} is outside 0.3 to 24")
        for kind in options.kinds or ():
            if kind not in KINDS:
                raise UsageError(f"--kinds: no kind {kind!r}; there are {', '.join(KINDS)}")
        kinds = options.kinds or mixture(options.count, options.seed)
        numbers: dict[str, int] = {}
        for i in range(options.count):
            kind = kinds[i % len(kinds)]
            number = numbers[kind] = numbers.get(kind, -1) + 1
            write(simulate(kind, options.seed * 100_003 + i, options.hours, options.familiar), options.out / f"{kind}-{number}")
    except EagleEyeError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
