"""The vote: scores of several detectors -> whom a majority holds for anomalous. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagleeye.detectors.base import Score
from eagleeye.window import Window

SHADOW_RATIO = 0.6
"""A rank that deviates less than this share of the worst one is in its shadow: a sick link also disturbs its neighbour."""


@dataclass(frozen=True, slots=True, eq=False)
class Ballot:
    """What the detectors agreed on.

    Attributes
    ----------
    votes : each detector's own vote on whether anybody is anomalous; None = it abstained
    strength_R : (R,) the largest value that at least `quorum` detectors reach; above 1 means a majority. NaN = too few could
    judge
    suspects : indices of ranks with a majority, strongest first, without those in the shadow of the strongest
    """

    votes: dict[str, bool | None]
    strength_R: NDArray[np.float64]
    suspects: tuple[int, ...]

    @property
    def judged(self) -> bool:
        """Whether enough detectors judged at least one rank."""
        return bool(np.isfinite(self.strength_R).any())


def tally(scores: Sequence[Score], quorum: int = 2) -> Ballot:
    """Count the votes rank by rank.

    Source: TRANSOM section IV, majority of three. *Differs*: the paper votes on the task and then looks for the node; we vote
    on every rank, because a task-level vote blames nobody. An abstention is no vote for either side.

    Raises
    ------
    ValueError
        No scores, or scores of different windows.
    """
    if not scores or len({len(s.score_R) for s in scores}) != 1:
        raise ValueError("a vote needs scores of one and the same window")
    stacked_DR = np.stack([s.score_R for s in scores])
    judges_R = np.isfinite(stacked_DR).sum(axis=0)
    ordered_DR = np.sort(np.where(np.isfinite(stacked_DR), stacked_DR, -np.inf), axis=0)[::-1]
    strength_R = np.full(stacked_DR.shape[1], np.nan)
    if len(scores) >= quorum:
        strength_R = np.where(judges_R >= quorum, ordered_DR[quorum - 1], np.nan)
    anomalous = np.flatnonzero(strength_R > 1.0)
    strongest = strength_R[anomalous].max() if len(anomalous) else 0.0
    suspects = sorted((i for i in anomalous if strength_R[i] >= SHADOW_RATIO * strongest), key=lambda i: (-strength_R[i], i))
    return Ballot({s.detector: s.fired for s in scores}, strength_R, tuple(int(i) for i in suspects))


def suspected_since_s(before: Mapping[str, float], ballot: Ballot, window: Window) -> dict[str, float]:
    """Return node -> since when every tick suspected it, for the nodes that this ballot suspects; `before` is the last tick's."""
    return {window.nodes[i]: before.get(window.nodes[i], window.end_s) for i in ballot.suspects}
