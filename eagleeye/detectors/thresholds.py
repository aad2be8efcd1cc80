"""How a raw distance becomes a score, and how unlikely a score is in normal work.

A score is a distance divided by what held-out normal windows reach. Never a contamination quantile: that would flag a fixed
share of healthy ranks by construction.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MARGIN = 2.0
"""A score of 1 lies this factor above the largest value seen in normal work."""


def threshold_M(normal_RM: Sequence[NDArray[np.float64]], floor: float) -> NDArray[np.float64]:
    """Return (M,) thresholds: `MARGIN` times the largest value of held-out normal windows, at least `floor`.

    Parameters
    ----------
    normal_RM : (R, M) distances, one array a window; NaN = not judged
    floor : least threshold, in robust standard deviations
    """
    stacked = np.concatenate(list(normal_RM), axis=0)
    largest = np.max(np.where(np.isfinite(stacked), stacked, 0.0), axis=0)
    return np.asarray(np.maximum(MARGIN * largest, floor))


@dataclass(frozen=True, slots=True)
class Tail:
    """How improbable scores are in normal work: p(score) = share * exp(-(score - START) / slope) above `START`, 1 below.

    Source: peaks over a threshold with an exponential tail (Pickands, 10.1214/aos/1176343003, shape 0). `START` is the largest
    score of held-out normal work by construction, so nothing below it is evidence.
    """

    share: float = 1e-2
    slope: float = 0.1

    START = 1.0 / MARGIN

    def log_p(self, score_R: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (R,) the natural logarithm of p; 0 at and below `START`, NaN where the score is."""
        beyond_R = np.maximum(score_R - self.START, 0.0)
        return np.where(
            score_R > self.START, np.log(self.share) - beyond_R / self.slope, np.where(np.isnan(score_R), np.nan, 0.0)
        )


LEAST_SLOPE, LARGEST_SLOPE = 0.05, 0.12
"""A few minutes of quiet work prove no thin tail, and where little was seen the exponential must not grow fat."""


def fit_tail(scores_N: NDArray[np.float64], memory_points: int) -> Tail:
    """Return the tail of a detector's scores in held-out normal work.

    Parameters
    ----------
    scores_N : scores of all ranks at all held-out ticks; NaN = not judged
    memory_points : instants that a score depends on; scores closer than that are one observation
    """
    known_N = scores_N[np.isfinite(scores_N)]
    if not len(known_N):
        return Tail()
    start = float(np.quantile(known_N, 0.9))
    slope = float(np.mean(known_N[known_N >= start] - start))
    return Tail(1.0 / (1.0 + len(known_N) / memory_points), min(max(slope, LEAST_SLOPE), LARGEST_SLOPE))
