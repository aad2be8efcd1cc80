"""Scores tick by tick -> accumulated evidence, with one knob: false alarms per 1000 GPU-days.

What a detector says at one tick becomes an e-value (expectation at most 1 in normal work), and e-values multiply: a dead GPU
alarms as soon as the ordinary patience allows, a mild straggler when enough small signs came together. A rank's product starts
anew whenever it falls below 1 (CUSUM), so the mean number of ticks to a false alarm of one detector on one rank is at least the
product that it needs.

Source: e-detectors (Shin, Ramdas and Rinaldo, 10.51387/23-NEJSDS51); p-to-e calibration f(p) = K p^(K - 1) (Vovk and Wang,
10.1214/20-AOS2020). *Differs*: scores of neighbouring ticks share samples, so each detector keeps as many interleaved products
as its memory has instants and their mean counts, which is again an e-value; and the evidence of one tick is bounded, however
large the score, because one odd moment convicts nobody.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from eagleeye.detectors.base import Score
from eagleeye.detectors.thresholds import Tail

DAY_S = 86400.0
CALIBRATOR = 0.3
"""K of the calibration: a small one trusts extreme scores more than many mild ones."""

FORGET_TICKS = 6
"""A detector that no longer sees anything lets go of what it needs to fire within so many ticks."""

MOST_RATIO = 1.2
"""Evidence is kept up to this multiple of what is needed, so that an old alarm ends soon after its cause."""


def needed(false_alarms_per_1000_gpu_days: float, tick_s: float) -> float:
    """Return the evidence (natural logarithm) at which a detector fires, for looks `tick_s` apart."""
    return float(np.log(1000.0 * DAY_S / (false_alarms_per_1000_gpu_days * tick_s)))


@dataclass(slots=True)
class Evidence:
    """What the detectors hold against each rank of one job so far. `add` once a tick.

    Parameters
    ----------
    false_alarms : per 1000 GPU-days and detector; the vote needs several, so its own rate is lower
    confirm_s : even the strongest evidence needs to be there for this long, and at two ticks
    """

    false_alarms: float
    confirm_s: float
    _products: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    _held: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    _ticks: int = 0

    def add(
        self,
        scores: Sequence[Score],
        tails: Mapping[str, Tail],
        memory: Mapping[str, int],
        passed_s: float,
        patience_R: NDArray[np.float64] | float = 1.0,
        patience: Mapping[str, float] = {},
    ) -> list[Score]:
        """Return the scores as accumulated evidence over what is needed: above 1 = the detector fires; NaN stays NaN.

        Parameters
        ----------
        scores : of this tick
        tails, memory : by detector: how improbable its scores are, and how many ticks one of them depends on
        passed_s : since the tick before
        patience_R, patience : how many times `confirm_s` the evidence must be there: against a rank, and of a detector where that
            is said
        """
        self._ticks += 1
        enough = needed(self.false_alarms, passed_s)
        out = []
        for score in scores:
            confirm_R = self.confirm_s * np.broadcast_to(patience.get(score.detector, patience_R), score.score_R.shape)
            most_R = enough * np.minimum(0.5, passed_s / (confirm_R + passed_s)) * (1 + 1e-9)
            R, lanes = len(score.score_R), max(1, memory.get(score.detector, 1))
            products_RL = self._products.get(score.detector)
            if products_RL is None or products_RL.shape != (R, lanes):
                products_RL = np.zeros((R, lanes))
                self._held[score.detector] = np.zeros(R)
            log_p_R = tails.get(score.detector, Tail()).log_p(score.score_R)
            unseen_R = np.where(np.isnan(log_p_R), 0.0, -enough / FORGET_TICKS)
            gain_R = np.where(log_p_R < 0, np.log(CALIBRATOR) + (CALIBRATOR - 1) * log_p_R, unseen_R)
            # what speaks for a rank is one observation among the lanes; that it looks well again counts at once in all of them
            products_RL += np.minimum(gain_R, 0.0)[:, None]
            products_RL[:, self._ticks % lanes] += np.maximum(gain_R, 0.0)
            np.clip(products_RL, 0.0, MOST_RATIO * (enough + np.log(lanes)), out=products_RL)
            total_R = np.logaddexp.reduce(products_RL, axis=1) - np.log(lanes)
            # nothing said of a rank keeps what was said before, but adds nothing
            held_R = np.minimum(total_R, self._held[score.detector] + most_R)
            self._products[score.detector], self._held[score.detector] = products_RL, held_R
            out.append(replace(score, score_R=np.where(np.isnan(score.score_R), np.nan, held_R / enough)))
        return out

    def forget(self) -> None:
        """Start anew: the job was not comparable for a while."""
        self._products, self._held = {}, {}
