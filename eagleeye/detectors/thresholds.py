"""How a raw distance becomes a score: divided by what held-out normal windows reach.

Never a contamination quantile: that would flag a fixed share of healthy ranks by construction.
"""

from collections.abc import Sequence

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
