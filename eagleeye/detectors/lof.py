"""LOF over metrics: is this rank's mix of values like any mix seen in normal work?

Source: TRANSOM, section IV; Breunig et al., LOF (10.1145/342009.335388). *Differs*: novelty mode on robustly scaled
differences to the peers, and a threshold from held-out normal windows, never a contamination quantile.
"""

from collections.abc import Sequence

import numba
import numpy as np
from numpy.typing import NDArray

from eagleeye.detectors.base import Model, Score, abstain
from eagleeye.detectors.peers import MIN_PEERS, use_threads
from eagleeye.detectors.thresholds import MARGIN
from eagleeye.window import Window

LEAST_THRESHOLD = 2.0
"""A local outlier factor below this is ordinary, however even the normal work was."""

FOLDS = 4
"""Groups of jobs, each calibrated by what the others taught."""


@numba.njit(cache=True, parallel=True)
def _neighbours(query_QF, known_FN, k, itself):  # type: ignore[no-untyped-def]
    """(Q, k) squared distances to the k nearest known vectors, nearest first, and their indices; without the q-th if `itself`."""
    Q, F = query_QF.shape
    N = known_FN.shape[1]
    squared_QK, index_QK = np.empty((Q, k)), np.empty((Q, k), dtype=np.int64)
    for q in numba.prange(Q):
        squared_N = np.zeros(N)
        for f in range(F):
            for n in range(N):
                step = known_FN[f, n] - query_QF[q, f]
                squared_N[n] += step * step
        nearest, index = squared_QK[q], index_QK[q]
        nearest[:], index[:] = np.inf, 0
        for n in range(N):
            place = k - 1
            if squared_N[n] < nearest[place] and not (itself and n == q):
                while place > 0 and nearest[place - 1] > squared_N[n]:
                    nearest[place], index[place] = nearest[place - 1], index[place - 1]
                    place -= 1
                nearest[place], index[place] = squared_N[n], n
    return squared_QK, index_QK


class Known:
    """Normal vectors and how dense they lie: what a query's density is compared with.

    Differs from scikit-learn only where several vectors are equally far: which of them are the nearest is chance here as there.
    """

    def __init__(self, vectors_NF: NDArray[np.float64], neighbours: int) -> None:
        """Measure the density around each of the vectors, of which there must be at least two."""
        self.vectors_NF = vectors_NF
        self._known_FN = np.ascontiguousarray(vectors_NF.T, dtype=np.float64)
        self._k = min(neighbours, len(vectors_NF) - 1)
        distance_NK, index_NK = self._nearest(vectors_NF, itself=True)
        self._reach_N = distance_NK[:, -1]
        self._density_N = self._density(distance_NK, index_NK)

    def factor_Q(self, query_QF: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (Q,) local outlier factors: the mean density around a query's neighbours over the density around the query."""
        distance_QK, index_QK = self._nearest(query_QF, itself=False)
        return np.asarray(self._density_N[index_QK].mean(axis=1) / self._density(distance_QK, index_QK))

    def _nearest(self, query_QF: NDArray[np.float64], itself: bool) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        use_threads(len(query_QF) * self._known_FN.size // 4)
        squared_QK, index_QK = _neighbours(np.ascontiguousarray(query_QF, dtype=np.float64), self._known_FN, self._k, itself)
        return np.sqrt(squared_QK), index_QK

    def _density(self, distance_QK: NDArray[np.float64], index_QK: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return (Q,) local reachability densities; 1e-10 as in scikit-learn, so that equal vectors are dense, not infinitely."""
        return np.asarray(1.0 / (np.maximum(distance_QK, self._reach_N[index_QK]).mean(axis=1) + 1e-10))


class Lof:
    """Local outlier factor of a rank's newest values, one feature a metric.

    The model keeps the (N, F) training vectors, not a pickled estimator; measuring them again takes milliseconds, once.
    """

    name = "lof"
    memory_points = 3
    """The newest instant, which `peers.prepare` makes of three."""

    def __init__(self, neighbours: int = 20, vectors: int = 1000) -> None:
        self.neighbours, self.vectors = neighbours, vectors
        self._known: Known | None = None

    def fit(self, windows: Sequence[Window], normal: Sequence[Window]) -> Model:
        """Keep an even sample of at most `vectors` instants of `windows`; set the threshold from `normal`.

        A job's normal windows are measured against what the other jobs taught, so that the threshold holds for a job never seen.
        """
        vectors_NF = self._sample_NF(windows)
        model: Model = {"vectors_NF": vectors_NF, "threshold": LEAST_THRESHOLD}
        if _too_few(vectors_NF):
            return model
        fold_of = {job: i % FOLDS for i, job in enumerate(sorted({w.job for w in windows}))}
        largest = 0.0
        for fold in sorted(set(fold_of.values())):
            others_NF = self._sample_NF([w for w in windows if fold_of[w.job] != fold])
            known = model if _too_few(others_NF) else {"vectors_NF": others_NF}
            for window in normal:
                if fold_of.get(window.job) == fold:
                    factor_R = self._factor_R(known, window)
                    largest = max(largest, float(np.max(factor_R, initial=0.0, where=np.isfinite(factor_R))))
        return {**model, "threshold": max(MARGIN * largest, LEAST_THRESHOLD)}

    def score(self, model: Model, window: Window) -> Score:
        """Score every rank; the evidence is the metric that lies furthest out. A metric that one rank lacks counts as
        ordinary.
        """
        if _too_few(model["vectors_NF"]):
            return abstain(self.name, window, "too few normal instants were learned")
        score_R = self._factor_R(model, window) / model["threshold"]
        newest_RM = np.nan_to_num(np.abs(window.values_RMT[:, :, -1]))
        furthest_R = np.argmax(newest_RM, axis=1)
        judged_R = np.isfinite(score_R)
        evidence = tuple(window.metrics[m] if ok else "" for m, ok in zip(furthest_R.tolist(), judged_R.tolist(), strict=True))
        if not judged_R.any():
            return abstain(self.name, window, "no rank was observed")
        return Score(self.name, score_R, None, evidence)

    def _sample_NF(self, windows: Sequence[Window]) -> NDArray[np.float64]:
        if not windows:
            return np.empty((0, 0))
        thin = max(1, sum(len(w.ranks) * w.values_RMT.shape[2] for w in windows) // (50 * self.vectors))
        vectors_NF = np.concatenate([_vectors(w.values_RMT)[::thin] for w in windows])
        # equal vectors are infinitely dense to LOF, and everything else would then look infinitely far
        vectors_NF = np.unique(np.nan_to_num(vectors_NF[np.isfinite(vectors_NF).any(axis=1)]).round(2), axis=0)
        kept = np.linspace(0, len(vectors_NF) - 1, min(self.vectors, len(vectors_NF))).round().astype(int)
        return np.asarray(vectors_NF[kept])

    def _factor_R(self, model: Model, window: Window) -> NDArray[np.float64]:
        vectors_NF = model["vectors_NF"]
        if self._known is None or self._known.vectors_NF is not vectors_NF:
            self._known = Known(vectors_NF, self.neighbours)
        newest_RM = window.values_RMT[:, :, -1].astype(np.float64)
        factor_R = self._known.factor_Q(np.nan_to_num(newest_RM))
        factor_R[np.isnan(newest_RM).all(axis=1)] = np.nan
        return factor_R


def _too_few(vectors_NF: NDArray[np.float64]) -> bool:
    return len(vectors_NF) <= 2 * MIN_PEERS


def _vectors(values_RMT: NDArray[np.float32]) -> NDArray[np.float64]:
    R, M, T = values_RMT.shape
    return np.moveaxis(values_RMT, 1, 2).reshape(R * T, M).astype(np.float64)


def check_kernel(vectors_NF: NDArray[np.float64], query_QF: NDArray[np.float64], neighbours: int) -> float:
    """Return the largest relative difference between this module's factors and scikit-learn's for the same vectors.

    scikit-learn is not used online: its import takes a second, and most of a small query's time goes into checking arguments.
    """
    from sklearn.neighbors import LocalOutlierFactor

    k = min(neighbours, len(vectors_NF) - 1)
    theirs_Q = -LocalOutlierFactor(n_neighbors=k, novelty=True).fit(vectors_NF).score_samples(query_QF)
    ours_Q = Known(vectors_NF, neighbours).factor_Q(query_QF)
    return float(np.max(np.abs(ours_Q - theirs_Q) / np.abs(theirs_Q)))
