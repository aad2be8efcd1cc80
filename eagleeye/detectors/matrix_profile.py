"""KNN matrix profile: is this rank like itself earlier?

Source: TRANSOM, section IV; Yeh et al., Matrix Profile I (10.1109/ICDM.2016.0179) for the profile; the k-th instead of the
first neighbour so that an anomaly that happened once before does not excuse itself. *Differs*: subsequences are not z-normalised
(a normalised profile cannot see a level shift or a constant stretch, and these are what faults look like), only earlier
subsequences count (left profile), and the series is the rank's difference to its peers.
"""

import importlib
from collections.abc import Sequence

import numba
import numpy as np
from numpy.typing import NDArray

from eagleeye.detectors.base import Model, Score, abstain
from eagleeye.detectors.peers import plain, use_threads
from eagleeye.detectors.thresholds import threshold_M
from eagleeye.window import Window


@numba.njit(cache=True, parallel=True)
def _left_profile(values_RMT, m, k):  # type: ignore[no-untyped-def]
    """(R, M) distance of the last m points of each series to its k-th nearest earlier, non-overlapping subsequence; NaN where the
    series has any, or is too short.
    """
    R, M, T = values_RMT.shape
    starts = max(T - 2 * m + 1, 0)
    out_RM = np.full((R, M), np.nan)
    for r in numba.prange(R):
        squared = np.empty(starts)
        nearest = np.empty(k)
        for column in range(M):
            series = values_RMT[r, column]
            squared[:] = 0.0
            for i in range(m):
                newest = np.float64(series[T - m + i])
                for start in range(starts):
                    step = series[start + i] - newest
                    squared[start] += step * step
            nearest[:] = np.inf
            for start in range(starts):
                place = k - 1
                if squared[start] < nearest[place]:
                    while place > 0 and nearest[place - 1] > squared[start]:
                        nearest[place] = nearest[place - 1]
                        place -= 1
                    nearest[place] = squared[start]
            if nearest[k - 1] < np.inf and not np.isnan(np.sum(series)):
                out_RM[r, column] = np.sqrt(nearest[k - 1])
    return out_RM


def left_profile_RM(values_RMT: NDArray[np.float32], m: int, k: int) -> NDArray[np.float64]:
    """Return (R, M): how far the last m points lie from their k-th nearest predecessor; NaN in, NaN out.

    Only the newest column of the left profile is computed, in O(m T) a series, which is all that a stream asks for.
    """
    use_threads(values_RMT.size)
    return np.asarray(_left_profile(plain(values_RMT), m, k))


class KnnMatrixProfile:
    """Distance of a rank's last `points` instants to the k-th nearest stretch of its own past."""

    name = "matrix_profile"

    def __init__(self, points: int = 6, neighbours: int = 3) -> None:
        self.points, self.neighbours = points, neighbours

    @property
    def memory_points(self) -> int:
        """See `Detector`."""
        return self.points

    @property
    def min_points(self) -> int:
        """Fewest instants for k neighbours that do not overlap the query."""
        return 2 * self.points + self.neighbours - 1

    def fit(self, windows: Sequence[Window], normal: Sequence[Window]) -> Model:
        """Set the (M,) threshold from held-out `normal` windows; the past itself comes with each window."""
        profiles = [left_profile_RM(w.values_RMT, self.points, self.neighbours) for w in normal]
        return {"threshold_M": threshold_M(profiles, floor=3.0 * np.sqrt(self.points))}

    def score(self, model: Model, window: Window) -> Score:
        """Score every rank by its worst metric; abstains while the past is too short."""
        if window.values_RMT.shape[2] < self.min_points:
            return abstain(self.name, window, f"needs {self.min_points} points of the rank's own past")
        profile_RM = left_profile_RM(window.values_RMT, self.points, self.neighbours)
        return Score.by_worst_metric(self.name, profile_RM / model["threshold_M"], window.metrics)


def check_kernel(values_RMT: NDArray[np.float32], m: int, k: int) -> float:
    """Return the largest relative difference between this module's kernel and stumpy on the same series.

    `eagleeye train` records it. stumpy is not used online: it joins one series at a time, and a tick holds hundreds.
    """
    import stumpy
    from stumpy import cache

    # stumpy compiles for half a minute in every process unless it is told to cache
    for module, function in cache.get_njit_funcs():
        getattr(importlib.import_module(f"stumpy.{module}"), function).enable_caching()
    R, M, T = values_RMT.shape
    ours_RM = left_profile_RM(values_RMT, m, k)
    worst = 0.0
    for r in range(R):
        for column in range(M):
            series = values_RMT[r, column].astype(float)
            join = stumpy.stump(series[T - m :], m, series[: T - m], ignore_trivial=False, normalize=False, k=k)
            theirs = float(join[0, k - 1])
            worst = max(worst, abs(float(ours_RM[r, column]) - theirs) / max(theirs, 1e-9))
    return worst
