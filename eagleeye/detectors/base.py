"""The detector seam. A score above 1 means anomalous, for every detector, always.

A detector learns from windows of normal work (`fit`), and says for one window how far each rank is from that (`score`). It
does no I/O, keeps no state between calls, and abstains rather than guesses: NaN for a rank it cannot judge, `abstained` when it
can judge none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from eagleeye.window import Window

Model = Mapping[str, Any]
"""What a detector learned: numbers, strings, lists and numpy arrays only, so that it is stored as JSON and .npz, not pickled."""


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """What one detector says of one window.

    Attributes
    ----------
    detector : its name
    score_R : (R,) float64; above 1 = anomalous, NaN = this rank cannot be judged
    abstained : why no rank could be judged, or None
    evidence : (R,) the strongest sign for each rank in words ("gpu_power_watts"), "" where there is none
    """

    detector: str
    score_R: NDArray[np.float64]
    abstained: str | None
    evidence: tuple[str, ...]

    @property
    def fired(self) -> bool | None:
        """Whether any rank is anomalous; None when the detector abstained."""
        return None if self.abstained is not None else bool(np.nanmax(self.score_R) > 1.0)

    @classmethod
    def by_worst_metric(cls, detector: str, score_RM: NDArray[np.float64], metrics: Sequence[str]) -> Score:
        """Return the score of each rank's worst metric, with that metric as its evidence.

        `score_RM` is (R, M); NaN = not judged. Ranks with no judged metric are NaN; when that is everybody the detector abstains.
        """
        judged_R = np.asarray(np.isfinite(score_RM).any(axis=1))
        filled_RM = np.where(np.isfinite(score_RM), score_RM, -np.inf)
        score_R = np.where(judged_R, filled_RM.max(axis=1), np.nan)
        evidence = tuple(metrics[m] if ok else "" for m, ok in zip(filled_RM.argmax(axis=1), judged_R, strict=True))
        return cls(detector, score_R, None if judged_R.any() else "no rank was observed", evidence)


class Detector(Protocol):
    """One way to tell a sick rank from a healthy one."""

    name: str

    @property
    def memory_points(self) -> int:
        """How many instants one score depends on: scores closer than that are one observation."""
        ...

    def fit(self, windows: Sequence[Window], normal: Sequence[Window]) -> Model:
        """Learn from `windows`, then set the threshold so that the held-out `normal` windows stay below 1.

        Called by `eagleeye train` and by the scorer in a job's first minutes. Same input, same model.
        """
        ...

    def score(self, model: Model, window: Window) -> Score:
        """Score every rank at the window's end. Order of ranks and metrics must not matter; nothing is modified."""
        ...


def abstain(name: str, window: Window, why: str) -> Score:
    """Return the score of a detector that can judge nobody."""
    R = len(window.ranks)
    return Score(name, np.full(R, np.nan), why, ("",) * R)
