"""KNN-DTW: is this rank like the others now?

Source: TRANSOM, section IV (anomaly detection across the ranks of a task). *Differs*: one distance for each metric, fused by the
largest (concatenation hides a single sick metric); only ranks of one peer group are compared; a Sakoe-Chiba band; a threshold
from held-out normal windows instead of a fixed one.
"""

import os
from collections.abc import Sequence

import numba
import numpy as np
from numpy.typing import NDArray

from eagleeye.detectors.base import Model, Score, abstain
from eagleeye.detectors.peers import MIN_PEERS
from eagleeye.detectors.thresholds import threshold_M
from eagleeye.window import Window


@numba.njit(cache=True, parallel=True, fastmath={"contract", "reassoc"})
def _pair_distances(values_RMT, band, first_P, second_P):  # type: ignore[no-untyped-def]
    """DTW of P pairs of ranks for each metric -> (P, M); squared differences inside, root outside, as tslearn has it."""
    P, M, T = first_P.shape[0], values_RMT.shape[1], values_RMT.shape[2]
    out_PM = np.empty((P, M), dtype=np.float64)
    for p in numba.prange(P):
        above = np.empty(T + 1)
        row = np.empty(T + 1)
        for m in range(M):
            a = values_RMT[first_P[p], m]
            b = values_RMT[second_P[p], m]
            above[:] = np.inf
            above[0] = 0.0
            for i in range(T):
                row[:] = np.inf
                for j in range(max(0, i - band), min(T, i + band + 1)):
                    step = a[i] - b[j]
                    best = min(above[j + 1], row[j], above[j])
                    row[j + 1] = step * step + best
                above, row = row, above
                above[0] = np.inf
            out_PM[p, m] = np.sqrt(above[T])
    return out_PM


def distances_RRM(values_RMT: NDArray[np.float32], groups: Sequence[str], band: int) -> NDArray[np.float64]:
    """Return (R, R, M) DTW distances between ranks of one group; infinite between groups and where a rank is NaN.

    Cost grows with the square of a group's size: 64 ranks x 11 metrics x 12 points take about 10 ms on two cores.
    """
    R, M, _ = values_RMT.shape
    ids = np.unique(np.array(groups), return_inverse=True)[1]
    first_P, second_P = np.triu_indices(R, 1)
    same = ids[first_P] == ids[second_P]
    first_P, second_P = first_P[same], second_P[same]
    out_RRM = np.full((R, R, M), np.inf)
    if len(first_P):
        pairs_PM = _pair_distances(np.ascontiguousarray(values_RMT, dtype=np.float64), band, first_P, second_P)
        pairs_PM[np.isnan(pairs_PM)] = np.inf
        out_RRM[first_P, second_P] = pairs_PM
        out_RRM[second_P, first_P] = pairs_PM
    return out_RRM


class KnnDtw:
    """Distance to the k-th nearest peer over the last `points` instants.

    `neighbours` is 3 where the group is large enough, else half of the peers: with three peers the second nearest decides, so
    that one sick rank cannot make a healthy one look far from everybody.
    """

    name = "knn_dtw"

    def __init__(self, points: int = 12, band: int = 2, neighbours: int = 3) -> None:
        self.points, self.band, self.neighbours = points, band, neighbours

    def fit(self, windows: Sequence[Window], normal: Sequence[Window]) -> Model:
        """Set the (M,) threshold from the distances in held-out `normal` windows; nothing else is learned."""
        return {"threshold_M": threshold_M([self._neighbour_RM(w) for w in normal], floor=5.0)}

    def score(self, model: Model, window: Window) -> Score:
        """Score every rank by its worst metric; abstains with fewer than `MIN_PEERS` ranks in every group."""
        if max(window.groups.count(g) for g in window.groups) < MIN_PEERS:
            return abstain(self.name, window, f"needs {MIN_PEERS} ranks that do the same work")
        if window.values_RMT.shape[2] < self.points:
            return abstain(self.name, window, f"needs {self.points} points")
        return Score.by_worst_metric(self.name, self._neighbour_RM(window) / model["threshold_M"], window.metrics)

    def _neighbour_RM(self, window: Window) -> NDArray[np.float64]:
        """(R, M) distance to the k-th nearest peer; on other nodes where there are some, since a sick node's ranks resemble
        each other.
        """
        values_RMT = window.values_RMT[:, :, -self.points :]
        distances = distances_RRM(values_RMT, window.groups, self.band)
        out_RM = np.full(values_RMT.shape[:2], np.nan)
        groups, nodes = np.array(window.groups), np.array(window.nodes)
        for r in range(len(groups)):
            peers = groups == groups[r]
            if peers.sum() < MIN_PEERS:
                continue
            elsewhere = peers & (nodes != nodes[r])
            peers[r] = False
            chosen = np.flatnonzero(elsewhere if elsewhere.sum() >= MIN_PEERS - 1 else peers)
            k = min(self.neighbours, (len(chosen) + 1) // 2)
            out_RM[r] = np.partition(distances[r, chosen], k - 1, axis=0)[k - 1]
        out_RM[np.isinf(out_RM)] = np.nan
        return out_RM


def check_kernel(values_RMT: NDArray[np.float32], band: int) -> float:
    """Return the largest relative difference between this module's kernel and tslearn on the same ranks.

    `eagleeye train` records it. tslearn is not used online: its import takes seconds and hundreds of megabytes, and it compares
    one metric of one pair at a time.
    """
    from tslearn.metrics import dtw

    R, M, _ = values_RMT.shape
    ours_RRM = distances_RRM(values_RMT, ("all",) * R, band)
    worst = 0.0
    for i in range(R):
        for j in range(i + 1, R):
            for m in range(M):
                theirs = dtw(
                    values_RMT[i, m].astype(float),
                    values_RMT[j, m].astype(float),
                    global_constraint="sakoe_chiba",
                    sakoe_chiba_radius=band,
                )
                worst = max(worst, abs(ours_RRM[i, j, m] - theirs) / max(theirs, 1e-9))
    return worst


def use_threads(count: int | None = None) -> None:
    """Let the kernels use `count` threads, by default every CPU that this process may run on."""
    numba.set_num_threads(min(count or len(os.sched_getaffinity(0)), numba.config.NUMBA_NUM_THREADS))
