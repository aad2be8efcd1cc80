"""Public sets as traces: real telemetry that nobody made for this project, in the one format that everything here is judged on.

    python datasets/public.py --data ../shared/data --out DIR                     those with several ranks, as trace folders
    python datasets/public.py --data ../shared/data --out DIR --sets asd nab      these alone
    python datasets/public.py --data ../shared/data --points                      point scorers on ASD, SMD and NAB, by VUS-PR

A loader is a function from the folder of a set to whole jobs: one `Window` and its labels each. Values are in base units. A
metric has the catalogue's name where it means the same, else one that says what the source says. Sources that tell no date start
at `EPOCH_S`. Nothing of a set is kept in this project; its folder tells where it is from and under which licence.

Shape suffixes: R ranks, M metrics, T columns; N rows of a file.
"""

import argparse
import json
import re
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from eagleeye.detectors.base import Detector
from eagleeye.detectors.lof import Lof
from eagleeye.detectors.matrix_profile import KnnMatrixProfile
from eagleeye.errors import DataError, EagleEyeError, EnvironmentLacks, NoData, UsageError
from eagleeye.files import write_whole
from eagleeye.metrics import check_unit
from eagleeye.offline.point_series import vus_pr
from eagleeye.source.trace import Label, write_trace
from eagleeye.window import Window

EPOCH_S = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
"""Where a source that tells no date begins. A date of its own would be invented, too."""

STRAGGLER_RATIO = 1.25
"""A mini-batch this much longer than the median of the other workers' is a straggler's. In job_1 nobody else reaches it, ever."""
MINIBATCH_S = 10.0
"""Samples are 10 time units apart and the source does not say of what; a second is what makes 2988 of them a training job."""
ST_BIN_S = 1.0
"""Bins of 0.05 s are joined to this: no scraper samples faster, and within a step ranks of different stages alternate."""
MIB = 2.0**20
KIB = 1024.0


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One job of a public set: all of it, and what is known to have happened in it."""

    name: str
    window: Window
    labels: tuple[Label, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PointSeries:
    """One machine with a label for each point.

    `window` has one rank and T columns, `label_T` (T,) says whether a column is anomalous. The first `learn` columns are there to
    learn from; they are never judged.
    """

    name: str
    window: Window
    label_T: NDArray[np.bool_]
    learn: int

    @property
    def values_MT(self) -> NDArray[np.float32]:
        """(M, T) the values."""
        return np.asarray(self.window.values_RMT[0])


def bytedance_straggler(folder: Path) -> list[Trace]:
    """Return the ByteDance job ST twice: by time (`bytedance_st`), and step by step (`bytedance_st_steps`).

    DP2 x PP4: `group` is the pipeline stage, so every rank has one peer. The last stage has too much to do, in every step and by
    construction of the job (labelled benign); no machine is at fault. Which ranks share a machine is not told: each is its own
    node.

    32 of a thousand steps were traced; they are laid end to end, as the source does, and the time between them is cut out.
    `bytedance_st`: shares of `ST_BIN_S` in compute and in communication operations (waiting for a peer included).
    `bytedance_st_steps`: a column for each traced step, all as long as the mean step; operations overlap, so their seconds add up
    to more than the step.
    """
    path = folder / "dev" / "ST_per_step.csv.gz"
    measured = {
        "compute_s": "train_compute_seconds",
        "step_len_s": "train_step_seconds",
        "collective_s": "collective_seconds",
        "p2p_s": "point_to_point_seconds",
        "fwd_mean_s": "forward_mean_seconds",
        "bwd_mean_s": "backward_mean_seconds",
    }
    steps = _table(path, ["step", "rank", "stage", *measured], keys=("step", "rank", "stage", "step_len_s"))
    stage_of = steps.groupby("rank")["stage"].first()
    ranks = [int(rank) for rank in stage_of.index]
    groups = [f"stage-{int(stage)}" for stage in stage_of]
    numbers, column_N = np.unique(steps["step"].to_numpy(), return_inverse=True)
    values_RMT = _cube(path, np.searchsorted(ranks, steps["rank"]), column_N, steps[list(measured)], len(ranks), len(numbers))
    mean_s = float(steps.groupby("step")["step_len_s"].first().mean())
    nodes = [f"rank-{rank}" for rank in ranks]
    by_step = _window("bytedance_st_steps", nodes, groups, dict.fromkeys(measured.values(), "seconds"), mean_s, values_RMT)

    path = folder / "dev" / "ST_rank_time.csv.gz"
    kinds = {"compute": "compute_ratio", "comm": "communication_ratio"}
    columns = [f"r{rank}_{kind}" for rank in ranks for kind in kinds]
    bins = _table(path, ["t_s", *columns], keys=("t_s",))
    joined = round(ST_BIN_S / _step_s(path, bins["t_s"]))
    T = len(bins) // joined
    if T == 0:
        raise DataError(f"{path} holds less than {ST_BIN_S:g} s; it is cut off; fetch it again")
    mean_TC = bins[columns].to_numpy()[: T * joined].reshape(T, joined, -1).mean(axis=1)
    values_RMT = mean_TC.reshape(T, len(ranks), len(kinds)).transpose(1, 2, 0)
    by_time = _window("bytedance_st", nodes, groups, dict.fromkeys(kinds.values(), "1"), ST_BIN_S, values_RMT)
    last = [r for r, group in enumerate(groups) if group == max(groups)]
    return [
        Trace(w.job, w, (_label(w, 0, w.values_RMT.shape[2] - 1, "benign", "heavy_pipeline_stage", last, nameable=False),))
        for w in (by_time, by_step)
    ]


def alibaba_minibatch_2020(folder: Path) -> list[Trace]:
    """Return job_1 and job_2 of the Alibaba PAI mini-batch times, ten workers each, as `alibaba_job_1` and `alibaba_job_2`.

    The one metric is `minibatch_time_ratio`: the time of the newest mini-batch as a share of the longest that the job ever had,
    since the source scaled it to 0-1000 and tells no unit. It is no step time: workers of a job differ for ever, by up to a third
    in job_2, which is no fault. Columns are `MINIBATCH_S` apart; a worker's last sample is rounded up to the next. job_2 ends
    with worker 0 alone, as its file does.

    The source says of job_1 that worker 6 becomes a straggler in the middle of the training, and no more. Its label goes from the
    first to the last sample at which worker 6 takes more than `STRAGGLER_RATIO` times the median of the others.
    """
    traces = []
    for number in (1, 2):
        path = folder / "dev" / f"job_{number}_norm.csv"
        rows = _table(path, ["worker", "time", "batch_time_norm"], keys=("worker", "time", "batch_time_norm"))
        workers, row_N = np.unique(rows["worker"].to_numpy().astype(int), return_inverse=True)
        column_N = np.ceil((rows["time"].to_numpy() - 1) / MINIBATCH_S).astype(int)
        ratio = rows[["batch_time_norm"]] / 1000.0
        values_RMT = _cube(path, row_N, column_N, ratio, len(workers), int(column_N.max()) + 1)
        nodes = [f"worker-{worker}" for worker in workers]
        window = _window(f"alibaba_job_{number}", nodes, None, {"minibatch_time_ratio": "1"}, MINIBATCH_S, values_RMT)
        labels: tuple[Label, ...] = ()
        if number == 1:
            if "worker-6" not in nodes:
                raise DataError(f"{path} lacks worker 6, the straggler; it is cut off; fetch it again")
            r = nodes.index("worker-6")
            (slow_T,) = np.nonzero(times_others_T(values_RMT[:, 0], r) > STRAGGLER_RATIO)
            if not slow_T.size:
                raise DataError(
                    f"{path}: worker 6 never falls behind, so this is not the job_1 that was published; fetch it again"
                )
            labels = (_label(window, int(slow_T[0]), int(slow_T[-1]), "fault", "straggler", [r], nameable=True),)
        traces.append(Trace(window.job, window, labels))
    return traces


def times_others_T(values_RT: NDArray[np.float32], r: int) -> NDArray[np.float64]:
    """Return (T,) how many times the median of the other rows the values of row `r` are; NaN where there is none."""
    others_T = pd.DataFrame(np.delete(values_RT, r, axis=0)).median(axis=0).to_numpy()
    return np.asarray(values_RT[r] / others_T, dtype=np.float64)


def alibaba_gentd26(folder: Path) -> list[Trace]:
    """Return the GenTD26 inference pods as one job, `alibaba_gentd26`, a pod being a rank and a node, labelled not_training.

    The GPU's duty cycle comes in percent; half of all cells are exact zeros and a quarter is absent, as pods come and go. GPU
    memory is in bytes, host memory a share of the pod's own. Pods that no duty cycle is known of are left out; so are the rates
    and queue of the gateway, which belong to no pod.
    """
    files = {
        "gpu_utilization_ratio": ("pod_gpu_duty_cycle_anon_wide.csv.gz", 100.0, "1"),
        "gpu_memory_used_bytes": ("pod_gpu_memory_used_bytes_anon_wide.csv.gz", 1.0, "bytes"),
        "host_memory_used_ratio": ("pod_memory_util_anon_wide.csv.gz", 1.0, "1"),
    }
    tables = {metric: _table(folder / name, ["t"], keys=("t",), all_numbers=True) for metric, (name, _, _) in files.items()}
    first = tables["gpu_utilization_ratio"]
    pods = [column for column in first.columns if re.fullmatch("[0-9a-f]{6}", str(column))]
    step_s = _step_s(folder / files["gpu_utilization_ratio"][0], first["t"])
    values_RMT = np.full((len(pods), len(files), len(first)), np.nan, dtype=np.float32)
    for m, (metric, (name, divisor, _)) in enumerate(files.items()):
        table = tables[metric]
        if not np.array_equal(table["t"], first["t"]):
            raise DataError(f"{folder / name} has other times than the duty cycles; one of them is cut off; fetch both again")
        for r, pod in enumerate(pods):
            if pod in table:
                values_RMT[r, m] = table[pod].to_numpy() / divisor
    if not pods:
        raise DataError(f"{folder / files['gpu_utilization_ratio'][0]} holds no pod; fetch it again")
    if (values_RMT[:, 0] > 1).any():
        raise DataError(f"{folder / files['gpu_utilization_ratio'][0]}: a duty cycle above 100 percent; fetch it again")
    units = {metric: unit for metric, (_, _, unit) in files.items()}
    window = _window("alibaba_gentd26", [f"pod-{pod}" for pod in pods], None, units, step_s, values_RMT)
    return [Trace(window.job, window, (_label(window, 0, len(first) - 1, "not_training", "inference", [], nameable=False),))]


def exathlon_normal(folder: Path) -> list[Trace]:
    """Return each undisturbed Spark run of Exathlon as `exathlon_RUN`: four nodes, one rank each, once a second, no label.

    Units of nmon: percent of all CPUs, KiB/s, MiB. Network and disk are sums over all adapters and disks of a node, so what is a
    part of another counts twice and `disk_busy_ratio` goes above 1; whether loopback is among them is not told. A row of
    negative values means that nmon missed that second: not observed. So are seconds without a row. The nodes do not have equal
    roles, and nothing tells which do what: they are one group.
    """
    measured = {
        "cpu_user": ("cpu_user_ratio", "1", 0.01),
        "cpu_sys": ("cpu_system_ratio", "1", 0.01),
        "cpu_wait": ("cpu_wait_ratio", "1", 0.01),
        "net_read": ("network_receive_bytes_per_second", "bytes/s", KIB),
        "net_write": ("network_transmit_bytes_per_second", "bytes/s", KIB),
        "mem_free": ("memory_free_bytes", "bytes", MIB),
        "mem_active": ("memory_active_bytes", "bytes", MIB),
        "disk_read": ("disk_read_bytes_per_second", "bytes/s", KIB),
        "disk_write": ("disk_write_bytes_per_second", "bytes/s", KIB),
        "disk_busy": ("disk_busy_ratio", "1", 0.01),
        "runq": ("run_queue_length", "1", 1.0),
        "ctxsw": ("context_switches_per_second", "1/s", 1.0),
    }
    traces = []
    for path in _files(folder / "dev", "*_nodes.csv.gz"):
        rows = _table(path, ["t", "node", *measured], keys=("t", "node"), words=("node",))
        nodes, row_N = np.unique(rows["node"].to_numpy().astype(str), return_inverse=True)
        values = rows[list(measured)] * np.array([factor for _, _, factor in measured.values()])
        values = values.where(values >= 0)
        values_RMT = _cube(path, row_N, rows["t"].to_numpy().astype(int), values, len(nodes), int(rows["t"].max()) + 1)
        name = f"exathlon_{path.name.removesuffix('_nodes.csv.gz')}"
        units = {metric: unit for metric, unit, _ in measured.values()}
        traces.append(Trace(name, _window(name, list(nodes), None, units, 1.0, values_RMT), ()))
    return traces


def asd(folder: Path) -> list[Trace]:
    """Return the Application Server Dataset as one job, `asd`: 12 servers x 19 unnamed metrics in 0..1, every 5 minutes.

    Servers are aligned in time. The part for training comes first and runs on into the part for testing; where it is shorter
    (omi-12) the beginning is what lacks. Each labelled stretch of a server is a fault of that server; many servers have theirs at
    once.
    """
    servers = asd_series(folder)
    T = max(series.label_T.size for series in servers)
    values_RMT = np.full((len(servers), len(servers[0].window.metrics), T), np.nan, dtype=np.float32)
    for r, series in enumerate(servers):
        if series.window.metrics != servers[0].window.metrics:
            raise DataError(
                f"{folder}: {series.name} has {len(series.values_MT)} metrics, {servers[0].name} {len(values_RMT[0])}"
            )
        values_RMT[r, :, T - series.label_T.size :] = series.values_MT
    units = {metric: servers[0].window.unit(metric) for metric in servers[0].window.metrics}
    window = _window("asd", [series.name.removeprefix("asd_") for series in servers], None, units, 300.0, values_RMT)
    labels = [
        _label(window, T - series.label_T.size + a, T - series.label_T.size + b - 1, "fault", "unknown", [r], nameable=True)
        for r, series in enumerate(servers)
        for a, b in stretches(series.label_T)
    ]
    return [Trace("asd", window, tuple(sorted(labels, key=lambda label: label.start_s)))]


def asd_series(folder: Path) -> list[PointSeries]:
    """Return each ASD server by itself, in order of numbers; learning uses its part for training."""
    return [_machine(path, "asd", 300.0) for path in _files(folder / "dev", "omi-*.npz")]


def smd_series(folder: Path) -> list[PointSeries]:
    """Return each machine of the Server Machine Dataset: 38 unnamed metrics in 0..1, every minute.

    Machines were recorded at different times: never compare them. The part for training comes first and is taken to run on.
    """
    return [_machine(path, "smd", 60.0) for path in _files(folder / "dev", "machine-*.npz")]


def nab_series(folder: Path) -> list[PointSeries]:
    """Return each series of the Numenta Anomaly Benchmark: one metric, as the source has it, labelled by its windows.

    Rows are taken as 5 minutes apart; in a third of the series a few are not (rows lack, or two have one time). The first 15 %
    are what NAB calls probation: learned from, never judged. Some series have no label at all.
    """
    path = folder / "dev" / "combined_windows.json"
    try:
        windows = json.loads(path.read_text(encoding="utf-8"))
        spans = {str(name): [(pd.Timestamp(a), pd.Timestamp(b)) for a, b in pairs] for name, pairs in windows.items()}
    except FileNotFoundError:
        raise _absent(path) from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no list of windows by series ({error}); fetch it again") from None
    found = []
    for file in _files(folder / "dev", "*/*.csv.gz"):
        key = f"{file.parent.name}/{file.name.removesuffix('.gz')}"
        if key not in spans:
            raise DataError(f"{path} says nothing of {key}; an empty list would say that nothing happened")
        rows = _table(file, ["timestamp", "value"], keys=("timestamp", "value"), words=("timestamp",))
        try:
            at_N = pd.to_datetime(rows["timestamp"], format="ISO8601").to_numpy()
        except ValueError as error:
            raise DataError(f"{file}: a timestamp breaks the format: {error}") from None
        label_T = np.zeros(len(rows), dtype=bool)
        for a, b in spans[key]:
            label_T |= (at_N >= a.to_datetime64()) & (at_N <= b.to_datetime64())
        name = f"nab_{file.name.removesuffix('.csv.gz')}"
        start_s = float(at_N[0].astype("datetime64[us]").astype(np.int64)) / 1e6
        values_RMT = rows["value"].to_numpy(dtype=np.float32)[None, None]
        window = _window(name, [name], None, {"nab_value": "1"}, 300.0, values_RMT, start_s)
        found.append(PointSeries(name, window, label_T, int(0.15 * len(rows))))
    return found


def alone(series: PointSeries) -> Trace:
    """Return a series as a job of one rank. Nobody is there to compare it to, so its faults are not nameable."""
    spans = stretches(series.label_T)
    labels = (_label(series.window, a, b - 1, "fault", "unknown", [0], nameable=False) for a, b in spans)
    return Trace(series.name, series.window, tuple(labels))


TRACES: Mapping[str, Callable[[Path], list[Trace]]] = {
    "bytedance_straggler": bytedance_straggler,
    "alibaba_minibatch_2020": alibaba_minibatch_2020,
    "alibaba_gentd26": alibaba_gentd26,
    "exathlon_normal": exathlon_normal,
    "asd": asd,
    "smd": lambda folder: [alone(series) for series in smd_series(folder)],
    "nab": lambda folder: [alone(series) for series in nab_series(folder)],
}
"""Loaders by the name of the set's folder."""

SERIES: Mapping[str, Callable[[Path], list[PointSeries]]] = {"asd": asd_series, "smd": smd_series, "nab": nab_series}
"""Sets that are judged point by point."""

SEVERAL_RANKS = tuple(name for name in TRACES if name not in ("smd", "nab"))


def stretches(label_T: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the first index and the one behind the last of each run of labelled points."""
    edges = np.diff(label_T.astype(np.int8), prepend=0, append=0)
    return [(int(a), int(b)) for a, b in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True)]


def write(trace: Trace, out: Path) -> Path:
    """Write `out/NAME` with its labels; it appears whole or not at all.

    Raises
    ------
    UsageError
        `out/NAME` exists already.
    EnvironmentLacks
        The place cannot be written.
    """
    folder = out / trace.name
    if folder.exists():
        raise UsageError(f"{folder} exists already; remove it, or name another --out")
    entries = [
        {
            "start": _utc(label.start_s),
            "end": _utc(label.end_s),
            "kind": label.kind,
            "category": label.category,
            "nodes": list(label.nodes),
            "ranks": list(label.ranks),
            "infrastructure": label.infrastructure,
            "nameable": label.nameable,
        }
        for label in trace.labels
    ]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{trace.name}.", dir=out) as spool:
            whole = Path(spool) / trace.name
            write_trace(whole, [trace.window])
            write_whole(whole / "labels.json", json.dumps(entries, indent=1) + "\n")
            whole.rename(folder)
    except OSError as error:
        raise EnvironmentLacks(
            f"cannot write {folder}: {error.strerror or error}; free some space or name another --out"
        ) from None
    return folder


# Point scorers: (M, T) values, of which the first `learn` are learned from -> (T - learn,) scores, higher = more anomalous.
# None sees a label, and none a point later than the one that it scores.

Scorer = Callable[[NDArray[np.float32], int], NDArray[np.float64]]

LAGS = 8
"""Points that PCA sees at once: in a series of one metric a single point has nothing to be inconsistent with."""
KEPT_RATIO = 0.9
"""Share of the variance that PCA's components hold."""
PAST = 1000
"""Points of its own past that the matrix profile compares a stretch with; all of it would cost the square of the length."""
LONGEST_BUFFER = 100
_AT_ONCE = 250


def robust_z(values_MT: NDArray[np.float32], learn: int) -> NDArray[np.float64]:
    """Distance from the learned median in robust standard deviations, that of the worst metric."""
    return np.asarray(np.abs(_standard_MT(values_MT, learn)[:, learn:]).max(axis=0), dtype=np.float64)


def pca(values_MT: NDArray[np.float32], learn: int) -> NDArray[np.float64]:
    """Squared distance of the last `LAGS` points from the hyperplane that holds `KEPT_RATIO` of the learned variance."""
    vectors_TF = _lagged(_standard_MT(values_MT, learn), LAGS)
    past_NF = vectors_TF[: learn - LAGS + 1].astype(np.float64)
    mean_F = past_NF.mean(axis=0)
    variance_F, axes_FF = np.linalg.eigh(np.cov(past_NF - mean_F, rowvar=False))
    # ascending: the first ones are what is left out
    rest = int(np.searchsorted(np.cumsum(variance_F), (1 - KEPT_RATIO) * variance_F.sum()))
    left_FK = axes_FF[:, : max(1, rest)]
    return np.asarray((((vectors_TF[learn - LAGS + 1 :] - mean_F) @ left_FK) ** 2).sum(axis=1))


def lof(values_MT: NDArray[np.float32], learn: int) -> NDArray[np.float64]:
    """The product's LOF, each point being a rank of its own."""
    standard_MT = _standard_MT(values_MT, learn)
    return _by_detector(Lof(), standard_MT, learn, 1)


def left_profile(values_MT: NDArray[np.float32], learn: int) -> NDArray[np.float64]:
    """The product's left matrix profile over the last `PAST` points, each point being a rank of its own."""
    standard_MT = _standard_MT(values_MT, learn)
    return _by_detector(KnnMatrixProfile(), standard_MT, learn, min(PAST, learn))


SCORERS: Mapping[str, Scorer] = {"robust_z": robust_z, "pca": pca, "lof": lof, "left_profile": left_profile}


def point_scores(series: PointSeries, scorers: Mapping[str, Scorer] = SCORERS) -> dict[str, float]:
    """Return VUS-PR of each scorer. The largest buffer is the median length of the series' anomalies, `LONGEST_BUFFER` at most.

    Raises NoData when no point that is judged is labelled: there is no recall of nothing.
    """
    label_T = series.label_T[series.learn :]
    if not label_T.any():
        raise NoData(f"{series.name}: nothing is labelled, so that there is no recall; leave it out")
    buffer = min(LONGEST_BUFFER, round(float(np.median([b - a for a, b in stretches(label_T)]))))
    return {name: vus_pr(scorer(series.values_MT, series.learn), label_T, buffer) for name, scorer in scorers.items()}


def _standard_MT(values_MT: NDArray[np.float32], learn: int) -> NDArray[np.float32]:
    """Return robust standard deviations from what was learned. A metric that never moved there is left in its own units."""
    past_ML = values_MT[:, :learn].astype(np.float64)
    centre_M = np.median(past_ML, axis=1)
    spread_M = 1.4826 * np.median(np.abs(past_ML - centre_M[:, None]), axis=1)
    deviation_M = past_ML.std(axis=1)
    spread_M = np.where(spread_M > 0, spread_M, np.where(deviation_M > 0, deviation_M, 1.0))
    return np.asarray((values_MT - centre_M[:, None]) / spread_M[:, None], dtype=np.float32)


def _lagged(values_MT: NDArray[np.float32], lags: int) -> NDArray[np.float32]:
    """Return (T - lags + 1, M x lags), row t ending at column t + lags - 1."""
    views = np.lib.stride_tricks.sliding_window_view(values_MT, lags, axis=1)
    return views.transpose(1, 0, 2).reshape(views.shape[1], -1)


def _by_detector(detector: Detector, values_MT: NDArray[np.float32], learn: int, points: int) -> NDArray[np.float64]:
    """Return what a detector says of every point after `learn`, from the `points` columns up to it."""
    views_TMP = np.lib.stride_tricks.sliding_window_view(values_MT, points, axis=1).transpose(1, 0, 2)

    def windows(views: NDArray[np.float32]) -> list[Window]:
        metrics = tuple(f"metric_{m:02d}" for m in range(len(values_MT)))
        parts = [views[i : i + _AT_ONCE] for i in range(0, len(views), _AT_ONCE)]
        return [
            Window("points", tuple(range(len(p))), ("",) * len(p), ("",) * len(p), metrics, EPOCH_S, 1.0, np.array(p))
            for p in parts
        ]

    # a detector's threshold is a constant of the series here, but for the profile's, which weighs metrics against each other
    normal = windows(views_TMP[: learn - points + 1][-_AT_ONCE:])
    past = windows(views_TMP[: learn - points + 1]) if points == 1 else normal
    model = detector.fit(past, normal)
    return np.concatenate([detector.score(model, w).score_R for w in windows(views_TMP[learn - points + 1 :])])


# Reading


def _absent(path: Path) -> NoData:
    return NoData(f"{path} is absent; --data must name the folder that holds the public sets, each in its own folder")


def _files(folder: Path, pattern: str) -> list[Path]:
    """Return the files in the order of the numbers in their names; raises NoData when there is none."""
    found = sorted(folder.glob(pattern), key=lambda path: [int(w) if w.isdigit() else w for w in re.split(r"(\d+)", path.name)])
    if not found:
        raise _absent(folder / pattern)
    return found


def _table(
    path: Path, columns: Sequence[str], keys: Sequence[str], words: Sequence[str] = (), all_numbers: bool = False
) -> pd.DataFrame:
    """Return a CSV that has `columns`, complete in those of `keys`; numbers are numbers, but in `words`."""
    try:
        table = pd.read_csv(path, dtype=dict.fromkeys(words, str))
    except FileNotFoundError:
        raise _absent(path) from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(
            f"{path} cannot be read, it is cut off or no CSV ({str(error).splitlines()[0]}); fetch it again"
        ) from None
    lacking = [column for column in columns if column not in table]
    if lacking:
        raise DataError(f"{path} lacks the column {lacking[0]!r}; it is another file than the one that was published")
    if table.empty:
        raise DataError(f"{path} holds no row; it is cut off; fetch it again")
    for column in table.columns if all_numbers else columns:
        if column not in words and not pd.api.types.is_numeric_dtype(table[column]):
            raise DataError(f"{path}: the column {column!r} holds something that is no number; fetch it again")
    for key in keys:
        if table[key].isna().any():
            row = int(np.flatnonzero(table[key].isna())[0])
            raise DataError(f"{path}: row {row + 1} has no {key}; it is cut off; fetch it again")
    return table


def _machine(path: Path, prefix: str, step_s: float) -> PointSeries:
    """Return the machine in an .npz of train (N, M), test (N, M) and label (N,). Objects are refused: they would be pickles."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            train, test, label = stored["train"], stored["test"], stored["label"]
    except FileNotFoundError:
        raise _absent(path) from None
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        what = str(error).splitlines()[0]
        raise DataError(
            f"{path} cannot be read, it is cut off or not an .npz of train, test and label ({what}); fetch it again"
        ) from None
    fits = train.ndim == test.ndim == 2 and train.shape[1] == test.shape[1] and label.shape == test.shape[:1]
    if not fits or not all(part.dtype.kind in "fiub" for part in (train, test, label)):
        raise DataError(f"{path}: train {train.shape}, test {test.shape} and label {label.shape} do not fit; fetch it again")
    name = f"{prefix}_{path.stem}"
    values_MT = np.concatenate([train, test]).T.astype(np.float32)
    if not np.isfinite(values_MT).all():
        raise DataError(f"{path} holds values that are not finite; fetch it again")
    units = {f"{prefix}_metric_{m:02d}_ratio": "1" for m in range(1, len(values_MT) + 1)}
    label_T = np.concatenate([np.zeros(len(train), dtype=bool), label.astype(bool)])
    return PointSeries(name, _window(name, [path.stem], None, units, step_s, values_MT[None]), label_T, len(train))


def _step_s(path: Path, times: "pd.Series[float]") -> float:
    """Return what lies between two times; raises DataError unless it is always the same."""
    steps = np.unique(np.diff(times.to_numpy()).round(6))
    if steps.size != 1 or steps[0] <= 0:
        raise DataError(f"{path}: its times are not equally spaced, or there is one alone; fetch it again")
    return float(steps[0])


def _cube(
    path: Path, row_N: NDArray[np.int64], column_N: NDArray[np.int64], values: pd.DataFrame, R: int, T: int
) -> NDArray[np.float32]:
    """Return (R, M, T) from rows; NaN where there is none. Of two rows for one place the later one in the file counts."""
    if column_N.min() < 0 or 1000 + 100 * np.unique(column_N).size < T:
        raise DataError(f"{path}: its times cannot be one job's; fetch it again")
    values_RMT = np.full((R, values.shape[1], T), np.nan, dtype=np.float32)
    values_RMT[row_N, :, column_N] = values.to_numpy()
    return values_RMT


def _window(
    job: str, nodes: Sequence[str], groups: Sequence[str] | None, units: Mapping[str, str], step_s: float,
    values_RMT: NDArray[np.floating], start_s: float = EPOCH_S,
) -> Window:  # fmt: skip
    for metric, unit in units.items():
        check_unit(metric, unit, job)
    R, _, T = values_RMT.shape
    return Window(
        job, tuple(range(R)), tuple(nodes), tuple(groups or ("",) * R), tuple(units), start_s + (T - 1) * step_s, step_s,
        values_RMT.astype(np.float32), dict(units),
    )  # fmt: skip


def _label(window: Window, first: int, last: int, kind: str, category: str, rows: Sequence[int], *, nameable: bool) -> Label:
    """Return a label from the beginning of column `first` to the end of column `last`."""
    nodes, ranks = tuple(window.nodes[r] for r in rows), tuple(window.ranks[r] for r in rows)
    start_s, end_s = window.stamps_T[first] - window.step_s, window.stamps_T[last]
    return Label(float(start_s), float(end_s), kind, category, nodes, ranks, kind == "fault", nameable)


def _utc(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _chosen(names: Sequence[str], known: Sequence[str]) -> list[str]:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"there is no set {unknown[0]!r} here; there are {', '.join(known)}")
    return list(dict.fromkeys(names))


def _points(data: Path, names: Sequence[str]) -> None:
    """Print VUS-PR by series, and the mean of each set."""
    print("VUS-PR (`labelled`: share of labelled points, which is about what a random score reaches)")
    head = ["series", "points", "labelled", *SCORERS]
    print(" ".join([f"{head[0]:44}", *(f"{word:>12}" for word in head[1:])]))
    for name in names:
        rows, silent = [], []
        for series in SERIES[name](data / name):
            try:
                scores = point_scores(series)
            except NoData:
                silent.append(series.name)
                continue
            label_T = series.label_T[series.learn :]
            rows.append([float(label_T.mean()), *scores.values()])
            print(" ".join([f"{series.name:44}", f"{label_T.size:12d}", *(f"{x:12.3f}" for x in rows[-1])]), flush=True)
        if rows:
            print(
                " ".join([f"{name + ', mean of ' + str(len(rows)):44}", " " * 12, *(f"{x:12.3f}" for x in np.mean(rows, axis=0))])
            )
        if silent:
            print(f"{name}: {len(silent)} series without a label are not judged: {', '.join(silent)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write traces, or print the table of point scores; return the exit code."""
    parser = argparse.ArgumentParser(description="Public sets as traces, and point scorers on those with a label for each point.")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds the sets, each in its own folder")
    parser.add_argument("--out", type=Path, help="where the trace folders go")
    parser.add_argument("--sets", nargs="+", metavar="NAME", help=f"of {', '.join(TRACES)}; without it those with several ranks")
    parser.add_argument("--points", action="store_true", help=f"score {', '.join(SERIES)} point by point and print VUS-PR")
    options = parser.parse_args(arguments)
    try:
        if options.points == (options.out is not None):
            raise UsageError("say either --out DIR, to write traces, or --points, to score point by point")
        if not options.data.is_dir():
            raise NoData(f"{options.data} is no folder; --data must name the folder that holds the public sets")
        if options.points:
            _points(options.data, _chosen(options.sets or list(SERIES), list(SERIES)))
            return 0
        # everything is read before anything is written
        names = _chosen(options.sets or SEVERAL_RANKS, list(TRACES))
        traces = [trace for name in names for trace in TRACES[name](options.data / name)]
        there = [trace.name for trace in traces if (options.out / trace.name).exists()]
        if there:
            raise UsageError(f"{options.out / there[0]} exists already; remove it, or name another --out")
        for trace in traces:
            R, M, T = trace.window.values_RMT.shape
            faults = sum(label.kind == "fault" for label in trace.labels)
            print(f"{write(trace, options.out)}: {R} ranks x {M} metrics x {T} x {trace.window.step_s:g} s, {faults} faults")
    except EagleEyeError as error:
        print(f"public: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
