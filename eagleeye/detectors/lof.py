"""LOF over metrics: is this rank's mix of values like any mix seen in normal work?

Source: TRANSOM, section IV; Breunig et al., LOF (10.1145/342009.335388). *Differs*: novelty mode on robustly scaled
differences to the peers, and a threshold from held-out normal windows, never a contamination quantile.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.neighbors import LocalOutlierFactor

from eagleeye.detectors.base import Model, Score, abstain
from eagleeye.detectors.peers import MIN_PEERS
from eagleeye.detectors.thresholds import MARGIN
from eagleeye.window import Window

LEAST_THRESHOLD = 2.0
"""A local outlier factor below this is ordinary, however even the normal work was."""

FOLDS = 4
"""Groups of jobs, each calibrated by what the others taught."""


class Lof:
    """Local outlier factor of a rank's newest values, one feature a metric.

    The model keeps the (N, F) training vectors, not a pickled estimator; fitting them again takes milliseconds and happens once.
    """

    name = "lof"

    def __init__(self, neighbours: int = 20, vectors: int = 1000) -> None:
        self.neighbours, self.vectors = neighbours, vectors
        self._fitted: tuple[NDArray[np.float64], LocalOutlierFactor] | None = None

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
        evidence = tuple(window.metrics[m] if np.isfinite(s) else "" for m, s in zip(furthest_R, score_R, strict=True))
        if not np.isfinite(score_R).any():
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
        if self._fitted is None or self._fitted[0] is not vectors_NF:
            k = min(self.neighbours, len(vectors_NF) - 1)
            self._fitted = (vectors_NF, LocalOutlierFactor(n_neighbors=k, novelty=True).fit(vectors_NF))
        newest_RM = window.values_RMT[:, :, -1].astype(np.float64)
        factor_R = -self._fitted[1].score_samples(np.nan_to_num(newest_RM))
        factor_R[np.isnan(newest_RM).all(axis=1)] = np.nan
        return np.asarray(factor_R)


def _too_few(vectors_NF: NDArray[np.float64]) -> bool:
    return len(vectors_NF) <= 2 * MIN_PEERS


def _vectors(values_RMT: NDArray[np.float32]) -> NDArray[np.float64]:
    R, M, T = values_RMT.shape
    return np.moveaxis(values_RMT, 1, 2).reshape(R * T, M).astype(np.float64)
