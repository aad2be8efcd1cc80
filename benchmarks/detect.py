"""What scoring and training cost: a tick of 64 to 16384 ranks, our kernels against the libraries, a replay, a month of history.

A tick is one look at 15 minutes of 8 metrics sampled every 5 s by the whole judge: rules, phases, every member on every rank,
evidence and vote. Each size runs in a process of its own, so that its peak of memory is its own. All ranks form one group, which
is the dearest case. Writes results/detect.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from provenance import provenance

from eagleeye.clock import monotonic_s
from eagleeye.detectors import ensemble, knn_dtw, matrix_profile, whole_job
from eagleeye.detectors.peers import fit_scale, offsets_RM, prepare
from eagleeye.online.judge import Judge, Settings
from eagleeye.records import Decision
from eagleeye.window import Window

SIZES = (64, 512, 4096, 16384)
STEP_S, TICK_S, WINDOW_S = 5.0, 10.0, 900.0
POINTS = round(WINDOW_S / STEP_S)
REPEATS, PAIRS = 7, 5
FAULTY_TICKS = 6
TRAINED_DAYS, TRAINED_STEP_S = 30, 15.0
RESULT = Path(__file__).parent / "results" / "detect.json"

METRICS = {
    "gpu_power_watts": (550.0, 0.02),
    "gpu_sm_clock_hertz": (1.7e9, 0.005),
    "gpu_temperature_celsius": (62.0, 0.01),
    "gpu_tensor_active_ratio": (0.45, 0.05),
    "gpu_utilization_ratio": (0.97, 0.005),
    "ib_receive_bytes_per_second": (2e10, 0.05),
    "ib_transmit_bytes_per_second": (2e10, 0.05),
    "ib_transmit_wait_ratio": (0.1, 0.1),
}
"""Usual level and relative noise."""


def job(ranks: int, points: int, seed: int = 0) -> Window:
    """Return a healthy job: boards differ by two percent for ever, all beat together, one value in a hundred is missing."""
    generator = np.random.default_rng(seed)
    level_M, noise_M = (np.array(column, dtype=np.float32) for column in zip(*METRICS.values(), strict=True))
    values_RMT = generator.standard_normal((ranks, len(METRICS), points), dtype=np.float32)
    values_RMT *= noise_M[:, None]
    values_RMT += 1 + 0.02 * generator.standard_normal((ranks, len(METRICS), 1), dtype=np.float32)
    values_RMT += 0.02 * np.sin(np.arange(points, dtype=np.float32))
    values_RMT *= level_M[:, None]
    values_RMT.reshape(-1)[generator.integers(0, values_RMT.size, values_RMT.size // 100)] = np.nan
    numbers, nodes = tuple(range(ranks)), tuple(f"node-{r // 8}" for r in range(ranks))
    return Window("bench", numbers, nodes, ("all",) * ranks, tuple(METRICS), points * STEP_S, STEP_S, values_RMT)


def tick(ranks: int, repeats: int = REPEATS) -> dict[str, Any]:
    """Return what one tick of a job of that many ranks costs, and the peak of memory of this process.

    `seconds` is the whole judge on a healthy job, `members_seconds` the part in which the members score, `faulty_seconds` the
    dearest tick after a whole node fell ill, when somebody is to be named.
    """
    ensemble.PAST_POINTS = POINTS  # a member may look at all of the 15 minutes
    fitted = ensemble.fit([job(64, 2 * POINTS)])
    # the judge learns from as little as it may
    settings = Settings(learn_s=ensemble.least_points() * STEP_S, tick_s=TICK_S)
    healthy_ticks = 1 + round(settings.learn_s / TICK_S) + repeats + 1
    columns = round(TICK_S / STEP_S)
    history = job(ranks, POINTS + (healthy_ticks + FAULTY_TICKS) * columns, seed=1)
    ill = range(ranks // 2, ranks // 2 + 8)
    history.values_RMT.flags.writeable = True  # a copy would count as memory of the judge
    history.values_RMT[ill.start : ill.stop, :2, POINTS + healthy_ticks * columns :] *= 0.7

    judge = Judge(settings, fitted, "bench")
    judged_s, busy_s, faulty_s, named = [], [], [], set[int]()
    for i in range(healthy_ticks + FAULTY_TICKS):
        seen = history.before((POINTS + (i + 1) * columns) * STEP_S).last(judge.length_s(STEP_S))
        began_s = time.process_time()
        started_s = monotonic_s()
        verdict = judge.judge(seen)
        took_s = monotonic_s() - started_s
        if i >= healthy_ticks:
            faulty_s.append(took_s)
            named |= {s.rank for s in verdict.suspects}
        elif i >= healthy_ticks - repeats:
            judged_s.append(took_s)
            busy_s.append(time.process_time() - began_s)
            if verdict.decision is not Decision.NORMAL:
                raise SystemExit(f"a healthy job of {ranks} ranks is {verdict.decision}: {verdict.reason}")
            unheard = sorted(set(ensemble.MEMBERS) - {s.detector for s in judge.scores if not s.abstained})
    if named != set(ill):
        raise SystemExit(f"of {ranks} ranks {ill} fell ill, and {sorted(named)} are named")

    window = history.before((POINTS + healthy_ticks * columns) * STEP_S).last(WINDOW_S)
    offset_RM, jump_GM, past = fitted.job_offsets(window), fitted.job_jumps(window), whole_job.learn(window)

    def score() -> None:
        fitted.score(window, offset_RM, whole_job.unfamiliar(past, window), jump_GM)
        whole_job.scores(past, window)

    score()
    return {
        "ranks": ranks,
        **spread("seconds", judged_s),
        **spread("processor_seconds", busy_s),
        **spread("members_seconds", [seconds(score) for _ in range(repeats)]),
        "faulty_seconds": significant(max(faulty_s)),
        "abstained": unheard,
        "peak_rss_mib": peak_rss_mib(),
    }


def growth_exponent(ranks: Sequence[int], seconds: Sequence[float]) -> float:
    """Return b of seconds ~ ranks ** b, least squares of logarithms."""
    return float(np.polyfit(np.log(ranks), np.log(seconds), 1)[0])


RECENT = slice(-20, None)
FAULTS: dict[str, Callable[[NDArray[np.float32]], None]] = {
    "slow GPU": lambda values_RMT: values_RMT[100, :2, RECENT].__imul__(0.85),
    "slow node": lambda values_RMT: values_RMT[200:208, 5:7, RECENT].__imul__(0.7),
    "hot board": lambda values_RMT: values_RMT[300, 2, RECENT].__iadd__(15.0),
    "mild straggler": lambda values_RMT: values_RMT[17, 0, RECENT].__imul__(0.93),
    "congested port": lambda values_RMT: values_RMT[41, 7, RECENT].__imul__(3.0),
}
"""What happens to a job of at least 512 ranks in its last 100 seconds."""


def faulty(ranks: int, change: Callable[[NDArray[np.float32]], None], seed: int) -> Window:
    """Return what the detectors see of a job with a fault at its end."""
    healthy = job(ranks, 2 * POINTS, seed)
    learned = ensemble.half(healthy)
    scale = fit_scale([learned])
    values_RMT = healthy.values_RMT.copy()
    change(values_RMT)
    recent = replace(healthy, values_RMT=values_RMT).last(WINDOW_S)
    return prepare(recent, scale, offsets_RM(learned.select(scale.metrics)))


def all_pairs_RRM(window: Window, dtw: knn_dtw.KnnDtw) -> NDArray[np.float64]:
    """Return (R, R, M) distances of all pairs by tslearn, metric by metric, with the same band."""
    from tslearn.metrics import cdist_dtw

    recent_RMT = window.values_RMT[:, :, -dtw.points :].astype(np.float64)
    return np.stack(
        [
            cdist_dtw(recent_RMT[:, m, :, None], global_constraint="sakoe_chiba", sakoe_chiba_radius=dtw.band)
            for m in range(recent_RMT.shape[1])
        ],
        axis=2,
    )


def suspicion_R(distance_RRM: NDArray[np.float64], nodes: Sequence[str], neighbours: int) -> NDArray[np.float64]:
    """Return (R,) the distance to the k-th nearest rank on another node, of the worst metric."""
    elsewhere_RR = np.array(nodes)[:, None] != np.array(nodes)
    sorted_RRM = np.sort(np.where(elsewhere_RR[:, :, None], distance_RRM, np.inf), axis=1)
    return np.asarray(sorted_RRM[:, neighbours - 1].max(axis=1))


def agreement(ours_R: NDArray[np.float64], theirs_R: NDArray[np.float64]) -> tuple[float, bool]:
    """Return Spearman's correlation of two suspicions without ties, and whether both name the same ten first, in order."""
    top = [np.argsort(-suspicion_R, kind="stable")[:10].tolist() for suspicion_R in (ours_R, theirs_R)]
    order = [np.argsort(np.argsort(suspicion_R, kind="stable"), kind="stable") for suspicion_R in (ours_R, theirs_R)]
    return float(np.corrcoef(*order)[0, 1]), top[0] == top[1]


def against_tslearn(ranks: int = 512, windows: int = PAIRS) -> dict[str, Any]:
    """Return speed and agreement with all pairs by tslearn, on windows with a fault each; both take turns."""
    dtw = knn_dtw.KnnDtw()
    ratios, correlations, same = [], [], []
    for i, (fault, change) in enumerate([*FAULTS.items()][:windows]):
        print(f"tslearn: {fault}", file=sys.stderr)
        window = faulty(ranks, change, seed=i)
        if i == 0:
            # both compiled before the clock starts
            all_pairs_RRM(replace(window, values_RMT=window.values_RMT[:, :, -dtw.points :][:, :1], metrics=("one",)), dtw)
            dtw.neighbour_RM(window)
        started_s = monotonic_s()
        distance_RRM = all_pairs_RRM(window, dtw)
        theirs_s = monotonic_s() - started_s
        ratios.append(theirs_s / (seconds(dtw.neighbour_RM, window, times=5) / 5))
        ours_R = dtw.neighbour_RM(window).max(axis=1)
        correlation, equal = agreement(ours_R, suspicion_R(distance_RRM, window.nodes, dtw.neighbours))
        correlations.append(correlation)
        same.append(equal)
    return {
        **spread(f"dtw_speedup_{ranks}", ratios),
        f"dtw_rank_correlation_{ranks}": round(min(correlations), 6),
        f"dtw_top10_identical_{ranks}": all(same),
    }


def against_ourselves(ranks: int = 2048, windows: int = PAIRS) -> dict[str, Any]:
    """Return how well comparison with references agrees with that of all pairs, which tslearn would need minutes for."""
    dtw, exact = knn_dtw.KnnDtw(), knn_dtw.EXACT_RANKS
    correlations, same = [], []
    for i, change in enumerate([*FAULTS.values()][:windows]):
        window = faulty(ranks, change, seed=i)
        found = []
        for largest in (exact, ranks):
            knn_dtw.EXACT_RANKS = largest
            knn_dtw.comparisons.cache_clear()
            found.append(dtw.neighbour_RM(window).max(axis=1))
        correlations.append(agreement(*found)[0])
        same.append(int(found[0].argmax()) == int(found[1].argmax()))
    knn_dtw.EXACT_RANKS = exact
    knn_dtw.comparisons.cache_clear()
    return {
        f"reference_rank_correlation_{ranks}": round(min(correlations), 6),
        f"reference_top1_identical_{ranks}": all(same),
    }


def against_stumpy(ranks: int = 64, pairs: int = PAIRS) -> dict[str, Any]:
    """Return how much faster our newest column is than a whole profile of the window by stumpy at every tick; both take turns."""
    import stumpy

    profile = matrix_profile.KnnMatrixProfile()
    values_RMT = np.nan_to_num(job(ranks, POINTS).values_RMT)
    series = values_RMT.reshape(-1, POINTS).astype(np.float64)

    def theirs() -> None:
        for one in series:
            stumpy.stump(one, profile.points, normalize=False, k=profile.neighbours)

    def ours() -> None:
        matrix_profile.left_profile_RM(values_RMT, profile.points, profile.neighbours)

    stumpy.stump(series[0], profile.points, normalize=False, k=profile.neighbours)
    ours()
    ratios = []
    for pair in range(pairs):
        print(f"stumpy: pair {pair + 1} of {pairs}", file=sys.stderr)
        ratios.append(seconds(theirs) / (seconds(ours, times=20) / 20))
    return spread("profile_speedup", ratios)


def replays(ranks: int = 64, points: int = 720, runs: int = PAIRS) -> dict[str, Any]:
    """Return ticks per second of the judge over a whole hour of a job that it does not know, learning included."""
    window = job(ranks, points)
    rates, unshared = [], []
    for _ in range(runs + 1):
        judge = Judge(Settings(model="none"))
        started_s, busy_s = monotonic_s(), time.process_time()
        for column in range(points):
            judge.judge(window.before((column + 1) * STEP_S).last(judge.length_s(STEP_S)))
        rates.append(points / (monotonic_s() - started_s))
        unshared.append(points / (time.process_time() - busy_s))
    # the first run loads the compiled kernels
    return {**spread("replay_ticks_per_second", rates[1:]), **spread("replay_ticks_per_processor_second", unshared[1:])}


def month(ranks: int, days: float, piece_s: float) -> Iterator[tuple[Window, None]]:
    """Yield a job's history piece by piece, as a source does; none is kept here. Pieces repeat, with other noise each time."""
    points = round(piece_s / TRAINED_STEP_S)
    level_RM1 = job(ranks, 1).values_RMT
    level_RM1 = np.where(np.isfinite(level_RM1), level_RM1, np.nanmedian(level_RM1, axis=0))
    noise_M1 = np.array([noise for _, noise in METRICS.values()], dtype=np.float32)[:, None]
    generator = np.random.default_rng(0)
    form = job(ranks, points)
    for i in range(round(days * 86400 / piece_s)):
        values_RMT = level_RM1 * (1 + noise_M1 * generator.standard_normal(form.values_RMT.shape, dtype=np.float32))
        yield replace(form, step_s=TRAINED_STEP_S, end_s=(i + 1) * piece_s, values_RMT=values_RMT), None


def training(ranks: int = 64, days: float = TRAINED_DAYS) -> dict[str, Any]:
    """Return what training costs from the first piece to the registered candidate, check against the libraries included."""
    from eagleeye import models
    from eagleeye.offline.train import train

    with tempfile.TemporaryDirectory() as folder:
        settings = models.Settings(tracking_uri=f"sqlite:///{folder}/mlflow.db")
        os.chdir(folder)
        started_s = monotonic_s()
        trained = train(month(ranks, days, settings.piece_s), settings, lambda line: print(line, file=sys.stderr))
        return {
            "ranks": ranks,
            "days": days,
            "step_s": TRAINED_STEP_S,
            "source": "synthetic pieces made on the fly",
            "seconds": significant(monotonic_s() - started_s),
            "windows": trained.corpus.kept,
            "hours_held": significant(trained.corpus.hours),
            "stretches_sampled_out": trained.corpus.sampled_out,
            "corpus_mib": settings.corpus_bytes >> 20,
            "peak_rss_mib": peak_rss_mib(),
        }


def alone(*options: str) -> Any:
    """Return what this program prints with these options in a process of its own."""
    done = subprocess.run([sys.executable, __file__, *options], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def seconds(work: Callable[..., object], *arguments: object, times: int = 1) -> float:
    """Return how long `times` calls of `work` take."""
    started_s = monotonic_s()
    for _ in range(times):
        work(*arguments)
    return monotonic_s() - started_s


def spread(name: str, values: Sequence[float]) -> dict[str, Any]:
    """Return the median under `name`, and how many values there were between which ends."""
    ends = {"least": significant(min(values)), "largest": significant(max(values)), "runs": len(values)}
    return {name: significant(statistics.median(values)), f"{name}_spread": ends}


def significant(value: float) -> float:
    """Return `value` with four significant digits."""
    return float(f"{value:.4g}")


def peak_rss_mib() -> float:
    """Return the most memory that this process ever held; a child's `ru_maxrss` would begin with its parent's."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise SystemExit("this system does not tell the peak of memory (no VmHWM in /proc/self/status)")


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tick", type=int, metavar="RANKS", help="print what one tick of that many ranks costs, and stop")
    parser.add_argument("--train", type=float, metavar="DAYS", help="print what training on that many days costs, and stop")
    options = parser.parse_args()
    if options.tick:
        print(json.dumps(tick(options.tick)))
        return 0
    if options.train:
        print(json.dumps(training(days=options.train)))
        return 0
    load = os.getloadavg()[0]
    ticks = []
    for ranks in SIZES:
        print(f"tick of {ranks} ranks", file=sys.stderr)
        ticks.append(alone("--tick", str(ranks)))
    results = {
        **provenance(),
        "shape": f"{len(METRICS)} metrics, {POINTS} instants, one group",
        "ticks": ticks,
        "growth_exponent": significant(growth_exponent(SIZES, [t["seconds"] for t in ticks])),
        "processor_growth_exponent": significant(growth_exponent(SIZES, [t["processor_seconds"] for t in ticks])),
        **replays(),
        **against_tslearn(),
        **against_ourselves(),
        **against_stumpy(),
        "train": alone("--train", str(TRAINED_DAYS)),
        # half as much history must not take half as much memory
        "train_half": alone("--train", str(TRAINED_DAYS / 2)),
        "load_average": [round(load, 2), round(os.getloadavg()[0], 2)],
    }
    RESULT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
