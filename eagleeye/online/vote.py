"""The vote: scores of several members -> whom a majority holds for anomalous. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagleeye.detectors.base import Score
from eagleeye.detectors.thresholds import Tail

SHADOW_RATIO = 0.6
"""A rank that deviates less than this share of the worst one is in its shadow: a sick link also disturbs its neighbour."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Who votes, with what weight, and on what.

    Attributes
    ----------
    weights : of the members that speak of single ranks
    job_weights : of those that speak of the job as a whole, and of nobody in it
    by_task : whether members vote on the task by the scores of this tick, after which its strangest rank is named, instead of on
        each rank by evidence that accumulates from tick to tick
    """

    weights: Mapping[str, float]
    job_weights: Mapping[str, float]
    by_task: bool = False


POLICIES = {
    "default": Policy(
        {"peer_deviation": 3.0, "knn_dtw": 1.0, "matrix_profile": 1.0, "lof": 1.0, "silence": 2.0},
        {"flat_together": 2.0, "job_change": 1.0},
    ),
    "transom": Policy({"knn_dtw": 1.0, "matrix_profile": 1.0, "lof": 1.0}, {}, by_task=True),
}
"""`default` is ours (docs/detection.md; its ablation is still to be measured);
`transom` is the majority of three of the paper, section IV."""


@dataclass(frozen=True, slots=True, eq=False)
class Ballot:
    """What the members agreed on.

    Attributes
    ----------
    votes : each member's own vote on whether anybody is anomalous; None = it abstained
    strength_R : (R,) how far a rank lies out at this tick: the largest value that a weighted majority of those who judge it
        reaches. NaN = too few could judge
    suspects : indices of ranks with a majority, furthest out first, without those in the shadow of the furthest
    """

    votes: dict[str, bool | None]
    strength_R: NDArray[np.float64]
    suspects: tuple[int, ...]

    @property
    def judged(self) -> bool:
        """Whether enough members judged at least one rank."""
        return bool(np.isfinite(self.strength_R).any())


def majority_R(scores: Sequence[Score], weights: Mapping[str, float], least_weight: float = 2.0) -> NDArray[np.float64]:
    """Return (R,) the largest value that members with more than half of the judging weight reach.

    A member without a weight counts one; NaN is no vote for either side. NaN where members of less than `least_weight` judge a
    rank.

    Raises
    ------
    ValueError
        No scores, or scores of different windows.
    """
    if not scores or len({len(s.score_R) for s in scores}) != 1:
        raise ValueError("a vote needs scores of one and the same window")
    stacked_DR = np.stack([s.score_R for s in scores])
    known_DR = np.isfinite(stacked_DR)
    weight_DR = known_DR * np.array([weights.get(s.detector, 1.0) for s in scores])[:, None]
    order_DR = np.argsort(np.where(known_DR, -stacked_DR, np.inf), axis=0, kind="stable")
    reached_DR = np.cumsum(np.take_along_axis(weight_DR, order_DR, axis=0), axis=0)
    judging_R = weight_DR.sum(axis=0)
    deciding_R = np.argmax(reached_DR > judging_R / 2, axis=0)
    value_R = np.take_along_axis(np.take_along_axis(stacked_DR, order_DR, axis=0), deciding_R[None], axis=0)[0]
    return np.where((judging_R >= least_weight) & (judging_R > 0), value_R, np.nan)


def tally(
    scores: Sequence[Score],
    weights: Mapping[str, float],
    evidence: Sequence[Score] | None = None,
    least_weight: float = 2.0,
    held: Collection[int] = (),
) -> Ballot:
    """Count the votes rank by rank.

    Source: TRANSOM section IV, majority of three. *Differs*: the paper votes on the task and then looks for the node; we vote
    on every rank, because a task-level vote blames nobody.

    Parameters
    ----------
    scores : what the members say at this tick
    evidence : the same, accumulated over ticks; it decides where it is given, and `scores` only tell who lies out furthest
    held : ranks blamed at the last tick; they stay blamed until they look as well as in normal work

    Raises
    ------
    ValueError
        No scores, or scores of different windows.
    """
    strength_R = majority_R(scores, weights, least_weight)
    decided_R = majority_R(evidence, weights, least_weight) if evidence else strength_R
    # a rank that looks well at this tick is not to blame for it, whatever it did before
    least_R = np.where(np.isin(np.arange(len(strength_R)), list(held)), Tail.START, 1.0)
    anomalous = np.flatnonzero((decided_R > 1.0) & (strength_R > least_R))
    furthest = strength_R[anomalous].max() if len(anomalous) else 0.0
    suspects = sorted((i for i in anomalous if strength_R[i] >= SHADOW_RATIO * furthest), key=lambda i: (-strength_R[i], i))
    return Ballot({s.detector: s.fired for s in evidence or scores}, strength_R, tuple(int(i) for i in suspects))


def by_task(scores: Sequence[Score]) -> Ballot:
    """Count the votes on the task, as TRANSOM section IV does: more than half fire on anybody, and the strangest rank is named.

    *Differs*: the paper then names the node whose log shows the first error, if any; here that is a rule and comes before the
    vote.
    """
    votes = {s.detector: s.fired for s in scores}
    strength_R = np.nan_to_num(np.stack([s.score_R for s in scores])).sum(axis=0) / len(scores)
    agreed = 2 * sum(vote is True for vote in votes.values()) > len(votes)
    return Ballot(votes, strength_R, (int(np.argmax(strength_R)),) if agreed else ())
