"""One tick's work at 64 ranks: our kernels against tslearn and stumpy, and the whole judge. Writes results/replay.json."""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import stumpy
from provenance import provenance
from tslearn.metrics import cdist_dtw

from eagleeye.clock import monotonic_s
from eagleeye.detectors.knn_dtw import KnnDtw, distances_RRM
from eagleeye.detectors.matrix_profile import KnnMatrixProfile, left_profile_RM
from eagleeye.online.judge import Judge, Settings
from eagleeye.online.scorer import warm_up
from eagleeye.window import Window

RANKS, METRICS, COLUMNS, STEP_S, PAIRS = 64, 11, 360, 5.0, 7
REPEATS = 20
RESULT = Path(__file__).parent / "results" / "replay.json"


def main() -> int:
    """Measure, print and write."""
    generator = np.random.default_rng(0)
    values_RMT = generator.normal(100.0, 1.0, size=(RANKS, METRICS, COLUMNS)).astype(np.float32)
    dtw, profile = KnnDtw(), KnnMatrixProfile()
    recent, past = values_RMT[:, :, -dtw.points :], values_RMT[:, :, -120:]
    groups = ("all",) * RANKS
    series = past.reshape(-1, past.shape[2]).astype(float)
    m, k = profile.points, profile.neighbours

    def tslearn_dtw() -> None:
        for column in range(METRICS):
            cdist_dtw(recent[:, column, :, None], global_constraint="sakoe_chiba", sakoe_chiba_radius=dtw.band)

    def stumpy_profile() -> None:
        for one in series:
            stumpy.stump(one[-m:], m, one[:-m], ignore_trivial=False, normalize=False, k=k)

    warm_up_s = warm_up()
    results = {
        **provenance(),
        "shape": f"{RANKS} ranks x {METRICS} metrics",
        "kernel_warm_up_s": round(warm_up_s, 2),
        "dtw_tslearn_over_ours": ratios(tslearn_dtw, lambda: distances_RRM(recent, groups, dtw.band)),
        "profile_stumpy_over_ours": ratios(stumpy_profile, lambda: left_profile_RM(past, m, k)),
        "judge_ticks_per_second": ticks_per_second(values_RMT),
    }
    RESULT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))
    return 0


def ratios(theirs: Callable[[], object], ours: Callable[[], object]) -> dict[str, float | int]:
    """Return median, least and largest of theirs / ours over interleaved pairs, both warm."""
    theirs(), ours()
    found = []
    for pair in range(PAIRS):
        print(f"pair {pair + 1} of {PAIRS}", file=sys.stderr)
        # ours takes well under a millisecond: repeated, so that the clock and the scheduler do not decide
        found.append(seconds(theirs) / (seconds(lambda: [ours() for _ in range(REPEATS)]) / REPEATS))
    return {
        "median": round(statistics.median(found), 1),
        "least": round(min(found), 1),
        "largest": round(max(found), 1),
        "pairs": PAIRS,
    }


def ticks_per_second(values_RMT: np.ndarray) -> dict[str, float | int]:
    """Return the ticks a second of the judge, once it has learned, over `PAIRS` runs of 100 ticks."""
    ranks = tuple(range(RANKS))
    nodes, metrics = tuple(f"n{r // 8}" for r in ranks), tuple(f"metric_{i}" for i in range(METRICS))
    window = Window("bench", ranks, nodes, ("all",) * RANKS, metrics, COLUMNS * STEP_S, STEP_S, values_RMT)
    judge = Judge(Settings(learn_s=600.0))
    for column in range(0, COLUMNS - 100):
        judge.judge(window.before((column + 1) * STEP_S).last(judge.length_s(STEP_S)))
    found = []
    for _ in range(PAIRS):
        start_s = monotonic_s()
        for column in range(COLUMNS - 100, COLUMNS):
            judge.judge(window.before((column + 1) * STEP_S).last(judge.length_s(STEP_S)))
        found.append(100 / (monotonic_s() - start_s))
    return {"median": round(statistics.median(found)), "least": round(min(found)), "largest": round(max(found)), "runs": PAIRS}


def seconds(work: Callable[[], object]) -> float:
    """Return how long `work` takes."""
    start_s = monotonic_s()
    work()
    return monotonic_s() - start_s


if __name__ == "__main__":
    sys.exit(main())
