"""Peer deviation: does this rank lie off the others, now or on average over a while?

Source: median + k * MAD with a floor of magnitude (EROICA, arXiv 2506.08528), metrics fused by the largest (Minder, arXiv
2411.01791, section 4: concatenation and sums hide a single sick metric). *Differs*: permanent differences between boards are
removed before, only the side of the peers counts on which sick ranks lie (`Metric.worse`), and means over several horizons
make small lasting deviations visible that no single instant shows.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eagleeye.detectors.base import Model, Score, abstain
from eagleeye.detectors.peers import MIN_PEERS
from eagleeye.detectors.thresholds import threshold_M
from eagleeye.metrics import BY_COLUMN
from eagleeye.window import Window

LONGEST_S = 240.0
"""No horizon is longer."""

CLIP = 6.0
"""Larger deviations count as this many robust standard deviations in a mean."""


class PeerDeviation:
    """Distance of a rank's mean over each of `horizons` (instants) to its peers, by its worst metric and horizon.

    `floors` are least thresholds in robust standard deviations, one a horizon: with the scale's floor of one percent of the usual
    peak, five mean five percent.
    """

    name = "peer_deviation"
    memory_points = 5

    def __init__(self, horizons: Sequence[int] = (1, 6, 24), floors: Sequence[float] = (6.0, 5.0, 4.0)) -> None:
        self.horizons, self.floors = tuple(horizons), tuple(floors)

    def fit(self, windows: Sequence[Window], normal: Sequence[Window]) -> Model:
        """Set the (M,) threshold of each horizon from held-out `normal` windows."""
        rows = [self._means_HRM(w) for w in normal]
        return {
            f"threshold_{h}_M": threshold_M([row[i] for row in rows], floor)
            for i, (h, floor) in enumerate(zip(self.horizons, self.floors, strict=True))
        }

    def score(self, model: Model, window: Window) -> Score:
        """Score every rank by its worst metric; abstains with fewer than `MIN_PEERS` ranks in every group."""
        if max(window.groups.count(g) for g in set(window.groups)) < MIN_PEERS:
            return abstain(self.name, window, f"needs {MIN_PEERS} ranks that do the same work")
        thresholds_HM = np.stack([model[f"threshold_{h}_M"] for h in self.horizons])
        ratio_HRM = self._means_HRM(window) / thresholds_HM[:, None, :]
        return Score.by_worst_metric(self.name, np.fmax.reduce(ratio_HRM, axis=0), window.metrics)

    def _means_HRM(self, window: Window) -> NDArray[np.float64]:
        """(H, R, M) absolute means over the newest instants; NaN where the newest is unknown or the window is too short."""
        R, M, T = window.values_RMT.shape
        out_HRM = np.full((len(self.horizons), R, M), np.nan)
        sides = {"high": 1.0, "low": -1.0, None: 0.0}
        worse_M = np.array([sides[BY_COLUMN[m].worse if m in BY_COLUMN else None] for m in window.metrics], dtype=np.float32)
        for i, most in enumerate(self.horizons):
            # where samples are rare, many of them reach back to what is long over
            horizon = min(most, max(1, round(LONGEST_S / window.step_s)))
            if horizon <= T:
                newest_RMT = window.values_RMT[:, :, -horizon:]
                if horizon > 1:
                    # a burst, however large, is no lasting deviation once it is over
                    newest_RMT = np.clip(newest_RMT, -CLIP, CLIP)
                mean_RM = newest_RMT.mean(axis=2, dtype=np.float64)
                # what is over must not pass for what lasts
                half_RM = 2 * newest_RMT[:, :, -max(1, horizon // 2) :].mean(axis=2, dtype=np.float64)
                mean_RM = np.where(np.abs(half_RM) < np.abs(mean_RM), half_RM, mean_RM)
                # a lower temperature than the others' is no sickness
                out_HRM[i] = np.where(mean_RM * worse_M < 0, 0.0, np.abs(mean_RM))
        return out_HRM
