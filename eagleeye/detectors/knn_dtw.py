"""KNN-DTW: is this rank like the others now?

Source: TRANSOM, section IV (anomaly detection across the ranks of a task). *Differs*: one distance for each metric, fused by the
largest (concatenation hides a single sick metric); only ranks of one peer group are compared; a Sakoe-Chiba band; a threshold
from held-out normal windows instead of a fixed one; in large groups every rank is compared with reference ranks only.

No lower bounds: on the development traces LB_Keogh rules out 40 to 75 % of the pairs, while a pair costs a seventh when 64 are
computed side by side, one instruction for many, which bounds that differ from pair to pair forbid.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from eagleeye.detectors.base import Model, Score, abstain
from eagleeye.detectors.peers import MIN_PEERS, numbered, spread_over_nodes, use_threads
from eagleeye.detectors.thresholds import threshold_M
from eagleeye.window import Window

EXACT_RANKS = 512
"""Up to this many ranks of one group each is compared with each."""

REFERENCES = 128
"""Ranks that stand for a larger group, so that cost is linear in its size and distances do not shrink as it grows."""

_LANES = 64
"""Series that one query is compared with at a time: enough to fill vector instructions, few enough for the first cache."""


@numba.njit(cache=True)
def _squared_dtw(query_T, others_TL, band, above, row):  # type: ignore[no-untyped-def]
    """Squared DTW of one series to each column of `others_TL`, all columns side by side; `above` and `row` are scratch."""
    T, L = others_TL.shape
    above[:] = np.inf
    above[0] = 0.0
    for i in range(T):
        first, end = max(0, i - band), min(T, i + band + 1)
        row[first] = np.inf
        for j in range(first, end):
            for lane in range(L):
                step = query_T[i] - others_TL[j, lane]
                best = above[j + 1, lane] if above[j + 1, lane] < row[j, lane] else row[j, lane]
                best = best if best < above[j, lane] else above[j, lane]
                row[j + 1, lane] = step * step + best
        if end < T:
            row[end + 1] = np.inf
        above, row = row, above
    return above[T]


@numba.njit(cache=True, parallel=True)
def _distances(values_QMT, others_BMTL, band):  # type: ignore[no-untyped-def]
    """(Q, B * L, M) DTW distances of Q ranks to B blocks of L others, metric by metric."""
    Q, M, T = values_QMT.shape
    B, L = others_BMTL.shape[0], others_BMTL.shape[3]
    out_QNM = np.empty((Q, B * L, M))
    for q in numba.prange(Q):
        above, row = np.empty((T + 1, L)), np.empty((T + 1, L))
        for b in range(B):
            for m in range(M):
                out_QNM[q, b * L : (b + 1) * L, m] = np.sqrt(_squared_dtw(values_QMT[q, m], others_BMTL[b, m], band, above, row))
    return out_QNM


@numba.njit(cache=True, parallel=True)
def _nearest(values_QMT, others_BMTL, rank_Q, rank_N, node_Q, node_N, elsewhere_Q, k_Q, band):  # type: ignore[no-untyped-def]
    """(Q, M) distance to the k-th nearest of N others: not to itself nor, where `elsewhere_Q`, to others on its node."""
    Q, M, T = values_QMT.shape
    B, L = others_BMTL.shape[0], others_BMTL.shape[3]
    out_QM = np.empty((Q, M))
    for q in numba.prange(Q):
        above, row, nearest = np.empty((T + 1, L)), np.empty((T + 1, L)), np.empty(k_Q[q])
        for m in range(M):
            nearest[:] = np.inf
            for b in range(B):
                if nearest[-1] == 0.0:
                    break
                squared_L = _squared_dtw(values_QMT[q, m], others_BMTL[b, m], band, above, row)
                for lane in range(min(L, len(rank_N) - b * L)):
                    n, place = b * L + lane, len(nearest) - 1
                    # NaN is not less than anything either
                    if not squared_L[lane] < nearest[place] or rank_N[n] == rank_Q[q]:
                        continue
                    if elsewhere_Q[q] and node_N[n] == node_Q[q]:
                        continue
                    while place > 0 and nearest[place - 1] > squared_L[lane]:
                        nearest[place] = nearest[place - 1]
                        place -= 1
                    nearest[place] = squared_L[lane]
            out_QM[q, m] = np.sqrt(nearest[-1]) if nearest[-1] < np.inf else np.nan
    return out_QM


def distances_RRM(values_RMT: NDArray[np.float32], groups: Sequence[str], band: int) -> NDArray[np.float64]:
    """Return (R, R, M) DTW distances between ranks of one group; infinite between groups and where a rank is NaN."""
    R = len(values_RMT)
    ids = numbered(groups)
    use_threads(R * values_RMT.size)
    out_RRM = _distances(values_RMT.astype(np.float64), _side_by_side(values_RMT), band)[:, :R]
    out_RRM[(ids[:, None] != ids) | np.eye(R, dtype=bool)] = np.inf
    out_RRM[np.isnan(out_RRM)] = np.inf
    return np.asarray(out_RRM)


def _side_by_side(values_NMT: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Return (B, M, T, L): N ranks as blocks of L, the same instant of a block's ranks side by side; NaN fills the last block."""
    N, M, T = values_NMT.shape
    L = min(_LANES, -(-N // 8) * 8)
    filled_NMT = np.full((-(-N // L) * L, M, T), np.nan)
    filled_NMT[:N] = values_NMT
    return np.ascontiguousarray(filled_NMT.reshape(-1, L, M, T).transpose(0, 2, 3, 1))


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Whom the Q ranks of one group are compared with: N references, for each rank those `elsewhere` if enough, else all others.

    All are indices into the window or, for nodes, numbers of their own.
    """

    ranks_Q: NDArray[np.int64]
    references_N: NDArray[np.int64]
    node_R: NDArray[np.int64]
    elsewhere_Q: NDArray[np.bool_]
    k_Q: NDArray[np.int64]


@lru_cache(maxsize=16)
def comparisons(
    ranks: tuple[int, ...], nodes: tuple[str, ...], groups: tuple[str, ...], neighbours: int
) -> tuple[Comparison, ...]:
    """Return one comparison for each group of at least `MIN_PEERS` ranks.

    Groups of more than `EXACT_RANKS` have `REFERENCES`, spread over nodes. The k-th nearest of them decides, so a few sick ones
    mislead nobody.
    """
    node_R, group_R = numbered(nodes), numbered(groups)
    found = []
    for group in range(group_R.max() + 1):
        ranks_Q = references_N = np.flatnonzero(group_R == group)
        if len(ranks_Q) < MIN_PEERS:
            continue
        if len(ranks_Q) > EXACT_RANKS:
            references_N = ranks_Q[spread_over_nodes([ranks[r] for r in ranks_Q], node_R[ranks_Q], REFERENCES)]
        here_R = np.bincount(node_R[references_N], minlength=len(ranks))
        elsewhere_Q = len(references_N) - here_R[node_R[ranks_Q]] >= MIN_PEERS - 1
        others_Q = len(references_N) - np.where(elsewhere_Q, here_R[node_R[ranks_Q]], np.isin(ranks_Q, references_N))
        found.append(Comparison(ranks_Q, references_N, node_R, elsewhere_Q, np.minimum(neighbours, (others_Q + 1) // 2)))
    return tuple(found)


class KnnDtw:
    """Distance to the k-th nearest peer over the last `points` instants.

    `neighbours` is 3 where the group is large enough, else half of the peers: with three peers the second nearest decides, so
    that one sick rank cannot make a healthy one look far from everybody.
    """

    name = "knn_dtw"

    def __init__(self, points: int = 12, band: int = 2, neighbours: int = 3) -> None:
        self.points, self.band, self.neighbours = points, band, neighbours

    @property
    def memory_points(self) -> int:
        """See `Detector`."""
        return self.points

    def fit(self, windows: Sequence[Window], normal: Sequence[Window]) -> Model:
        """Set the (M,) threshold from the distances in held-out `normal` windows; nothing else is learned."""
        return {"threshold_M": threshold_M([self.neighbour_RM(w) for w in normal], floor=5.0)}

    def score(self, model: Model, window: Window) -> Score:
        """Score every rank by its worst metric; abstains with fewer than `MIN_PEERS` ranks in every group."""
        if max(Counter(window.groups).values()) < MIN_PEERS:
            return abstain(self.name, window, f"needs {MIN_PEERS} ranks that do the same work")
        if window.values_RMT.shape[2] < self.points:
            return abstain(self.name, window, f"needs {self.points} points")
        return Score.by_worst_metric(self.name, self.neighbour_RM(window) / model["threshold_M"], window.metrics)

    def neighbour_RM(self, window: Window) -> NDArray[np.float64]:
        """Return (R, M) the distance to the k-th nearest peer; on other nodes where there are some, since a sick node's ranks
        resemble each other.
        """
        values_RMT = window.values_RMT[:, :, -self.points :].astype(np.float64)
        out_RM = np.full(values_RMT.shape[:2], np.nan)
        for group in comparisons(window.ranks, window.nodes, window.groups, self.neighbours):
            Q, N = group.ranks_Q, group.references_N
            use_threads(len(N) * values_RMT[Q].size)
            out_RM[Q] = _nearest(
                values_RMT[Q], _side_by_side(values_RMT[N]), Q, N, group.node_R[Q], group.node_R[N],
                group.elsewhere_Q, group.k_Q, self.band,
            )  # fmt: skip
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
