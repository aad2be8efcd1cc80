"""What others would do: methods from the literature behind the protocol that ours are judged by.

A method takes an open trace and yields one verdict for each instant that it has rows of, from nothing stamped later. All but
`RoughPage` share one frame, so that they differ in nothing but their score: a job that does not work is not applicable; those
that learn do so from the job's first `LEARN_POINTS` instants of work and are unsure until then; a node is blamed when one of its
ranks scored above 1 in every tick of `LASTING_S`; when more than half of the nodes did, the job is anomalous and none is blamed.
None knows logs or rules. Thresholds are published ones and named where they stand; what is ours says so.
"""

import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import IsolationForest
from sklearn.neighbors import LocalOutlierFactor

from eagleeye.detectors.peers import MIN_PEERS, compared
from eagleeye.offline.evaluate import Method
from eagleeye.records import Decision, Scope, Suspect, Verdict
from eagleeye.source.trace import TraceSource
from eagleeye.window import Window

LEARN_POINTS, LEARN_S, LEAST_POINTS = 60, 600.0, 20
"""Instants that are learned from: at most ten minutes, but at least so many. Less than 40 % of a recorded job of some minutes."""
IDLE_RATIO, IDLE_POINTS = 0.05, 6
"""A job whose median rank used its GPU less than this for so many instants does not train."""
LASTING_S, LEAST_TICKS = 60.0, 3
"""Ours: the minute that alert rules often wait for. On the development traces robust z blames 3 times wrongly, without it 40."""
MAD = 1.4826
"""Makes the median absolute deviation of a normal distribution its standard deviation."""


class Scorer(Protocol):
    """How far each rank is from normal: above 1 = anomalous, NaN = cannot be judged."""

    def learn(self, past: Window) -> None:
        """Learn from a window of normal work of the same job."""

    def score_R(self, window: Window) -> NDArray[np.float64]:
        """Return (R,) the scores at the end of a window."""
        ...


@dataclass(frozen=True, slots=True)
class Baseline:
    """One row of the table: a score, how many instants of past it looks at, and for how long it must last.

    `ticks` and `lasting_s` both must have passed since a node's first score above 1 of the present run.
    """

    name: str
    make: Callable[[], Scorer]
    points: int = 1
    ticks: int = LEAST_TICKS
    lasting_s: float = LASTING_S
    learns: bool = True

    def __call__(self, source: TraceSource) -> Iterator[Verdict]:
        """Yield a verdict for each instant of the trace."""
        scorer, learn = self.make(), learn_points(source.step_s) if self.learns else 0
        worked, learned = 0, not self.learns
        runs: dict[str, tuple[int, float]] = {}
        for stamp_s in source.stamps_s:
            window = source.window(source.job, float(stamp_s), max(learn, self.points, IDLE_POINTS) * source.step_s)
            window = window.select(compared(window))
            if idle(window):
                worked, runs = worked if learned else 0, {}
                yield _say(window, Decision.NOT_APPLICABLE, "the job is idle")
                continue
            worked += 1
            if not learned:
                if worked >= learn:
                    scorer.learn(window)
                    learned = True
                yield _say(window, Decision.UNSURE, f"learning: {worked} of {learn} instants")
                continue
            score_R = scorer.score_R(window.last(self.points * window.step_s))
            runs = _running(runs, window, score_R)
            yield self._verdict(window, score_R, runs)

    def _verdict(self, window: Window, score_R: NDArray[np.float64], runs: dict[str, tuple[int, float]]) -> Verdict:
        votes = {self.name: bool((score_R > 1).any()) if np.isfinite(score_R).any() else None}
        if votes[self.name] is None:
            return _say(window, Decision.UNSURE, "no rank could be judged", votes)
        sure = {
            node for node, (ticks, since_s) in runs.items() if ticks >= self.ticks and window.end_s - since_s >= self.lasting_s
        }
        return blame(window, score_R, sure, votes, self.name)


def learn_points(step_s: float) -> int:
    """Return how many instants of work are learned from at a sampling interval."""
    return max(LEAST_POINTS, min(LEARN_POINTS, round(LEARN_S / step_s)))


def idle(window: Window) -> bool:
    """Return whether the job uses its GPUs too little to be compared. A job that does not tell is taken to work."""
    if not window.has("gpu_utilization_ratio"):
        return False
    recent = window.column_RT("gpu_utilization_ratio")[:, -IDLE_POINTS:]
    seen = np.isfinite(recent).any(axis=1)
    return bool(seen.any() and np.median(np.nanmean(recent[seen], axis=1)) < IDLE_RATIO)


def blame(window: Window, score_R: NDArray[np.float64], sure: set[str], votes: dict[str, bool | None], name: str) -> Verdict:
    """Return the verdict when the nodes in `sure` are the culprits: each by its worst rank, the worst first."""
    if not sure:
        return _say(window, Decision.NORMAL, "nothing lasted", votes)
    if len(sure) > max(1.0, len(set(window.nodes)) / 2):
        return _say(window, Decision.ANOMALOUS, f"{len(sure)} nodes at once", votes, Scope.JOB)
    worst: dict[str, int] = {}
    for i in np.argsort(-np.nan_to_num(score_R), kind="stable"):
        if window.nodes[i] in sure:
            worst.setdefault(window.nodes[i], int(i))
    suspects = tuple(Suspect(window.ranks[i], node, float(np.nan_to_num(score_R[i])), name) for node, i in worst.items())
    return _say(window, Decision.ANOMALOUS, f"{suspects[0].node} differs", votes, Scope.RANK, suspects)


def _say(
    window: Window, decision: Decision, reason: str, votes: dict[str, bool | None] | None = None, scope: Scope | None = None,
    suspects: tuple[Suspect, ...] = (),
) -> Verdict:  # fmt: skip
    return Verdict(window.job, window.start_s, window.end_s, decision, reason, scope, None, suspects, votes or {})


def _running(runs: dict[str, tuple[int, float]], window: Window, score_R: NDArray[np.float64]) -> dict[str, tuple[int, float]]:
    """Return for each node that scores above 1 for how many ticks it has done so, and since when."""
    above = {node for node, score in zip(window.nodes, score_R, strict=True) if score > 1}
    return {node: (runs.get(node, (0, 0.0))[0] + 1, runs.get(node, (0, window.end_s))[1]) for node in above}


def _groups(window: Window) -> list[NDArray[np.int64]]:
    names = np.array(window.groups)
    return [np.flatnonzero(names == group) for group in dict.fromkeys(window.groups)]


def _median(values: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Median that ignores NaN, and is NaN where there is nothing else."""
    known = np.isfinite(values).sum(axis=axis, keepdims=True)
    ordered = np.sort(values, axis=axis)  # NaN last
    low = np.take_along_axis(ordered, np.maximum((known - 1) // 2, 0), axis)
    high = np.take_along_axis(ordered, np.minimum(known // 2, values.shape[axis] - 1), axis)
    return np.where(known > 0, (low + high) / 2, np.nan).squeeze(axis)


class RobustZ:
    """Median and k median absolute deviations over the peers, instant by instant; nothing is learned, nothing is remembered.

    k = 5 as in EROICA (arXiv 2506.08528). *Differs* from any careful use: boards' permanent differences are not removed and
    magnitudes not looked at, beyond a spread of at least one percent of the median, as a metric without spread has no z.
    """

    K, LEAST_RATIO = 5.0, 0.01

    def learn(self, past: Window) -> None:
        """Nothing to learn."""

    def score_R(self, window: Window) -> NDArray[np.float64]:
        """Return the worst metric's z over k."""
        now_RM = window.values_RMT[:, :, -1].astype(np.float64)
        z_RM = np.full(now_RM.shape, np.nan)
        for members in _groups(window):
            if len(members) >= MIN_PEERS:
                centre_M = _median(now_RM[members], 0)
                spread_M = MAD * _median(np.abs(now_RM[members] - centre_M), 0)
                z_RM[members] = np.abs(now_RM[members] - centre_M) / np.maximum(
                    spread_M, np.maximum(self.LEAST_RATIO * np.abs(centre_M), 1e-9)
                )
        return _worst(z_RM) / self.K


def _worst(score_RM: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (R,) the largest of each row that is known, NaN where none is."""
    known = np.isfinite(score_RM)
    return np.where(known.any(axis=1), np.where(known, score_RM, -np.inf).max(axis=1, initial=-np.inf), np.nan)


class _OnVectors(abc.ABC):
    """Base of those that see a rank's newest values as one point, standardised by what was learned; NaN is the median."""

    POINTS = 2000
    """Vectors that are learned from, evenly drawn."""

    def learn(self, past: Window) -> None:
        """Standardise and fit."""
        vectors_NM = np.moveaxis(past.values_RMT, 1, 2).reshape(-1, len(past.metrics)).astype(np.float64)
        seen_M = np.asarray(np.isfinite(vectors_NM).any(axis=0))
        self.metrics = tuple(m for m, seen in zip(past.metrics, seen_M, strict=True) if seen)
        vectors_NM = vectors_NM[:, seen_M]
        self.centre_M = _median(vectors_NM, 0)
        spread_M = MAD * _median(np.abs(vectors_NM - self.centre_M), 0)
        self.spread_M = np.maximum(spread_M, np.maximum(0.01 * np.abs(self.centre_M), 1e-9))
        vectors_NM = vectors_NM[np.isfinite(vectors_NM).any(axis=1)]
        kept = np.linspace(0, len(vectors_NM) - 1, min(self.POINTS, len(vectors_NM))).round().astype(int)
        self.ready = bool(len(kept) > LEAST_POINTS)
        if self.ready:
            self.fit(self._standard(vectors_NM[kept]))

    def score_R(self, window: Window) -> NDArray[np.float64]:
        """Return the score of each rank's newest vector."""
        if not self.ready:
            return np.full(len(window.ranks), np.nan)
        now_RM = window.select(self.metrics).values_RMT[:, :, -1].astype(np.float64)
        return np.where(np.isfinite(now_RM).any(axis=1), self.score(self._standard(now_RM)), np.nan)

    def _standard(self, vectors_NM: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.nan_to_num((vectors_NM - self.centre_M) / self.spread_M)

    @abc.abstractmethod
    def fit(self, vectors_NM: NDArray[np.float64]) -> None:
        """Learn from standardised vectors."""

    @abc.abstractmethod
    def score(self, vectors_NM: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (N,) scores, above 1 = anomalous."""


def _path_length(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the average path of an unsuccessful search in a binary tree of so many points (equation 1 of Liu et al.)."""
    more = np.maximum(counts, 3).astype(np.float64)
    return np.where(counts > 2, 2 * (np.log(more - 1) + np.euler_gamma) - 2 * (more - 1) / more, np.maximum(counts - 1, 0))


class Forest(_OnVectors):
    """Isolation Forest: vectors that few random cuts set apart.

    Source: Liu et al. (10.1109/ICDM.2008.17): 100 trees of 256 points; scores above 0.6 are their potential anomalies.

    Trees are grown by scikit-learn and read here: its own `score_samples` costs ten times as much for the few ranks of a tick.
    """

    THRESHOLD = 0.6

    def fit(self, vectors_NM: NDArray[np.float64]) -> None:
        """Grow the trees; the seed is fixed, so that a replay repeats itself."""
        points = min(256, len(vectors_NM))
        self.forest = IsolationForest(n_estimators=100, max_samples=points, random_state=0).fit(vectors_NM)
        self.usual = 100 * _path_length(np.array([points]))
        self.trees = [(one.tree_, self._depths(one.tree_)) for one in self.forest.estimators_]

    def score(self, vectors_NM: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the paper's score over its threshold."""
        vectors = vectors_NM.astype(np.float32)
        return np.asarray(2 ** (-sum(depths[tree.apply(vectors)] for tree, depths in self.trees) / self.usual) / self.THRESHOLD)

    @staticmethod
    def _depths(tree: Any) -> NDArray[np.float64]:
        """Return how long the path to each node is, with what it would be on average if its points were set apart, too."""
        depths = np.zeros(tree.node_count)
        for left, right, depth in zip(tree.children_left, tree.children_right, depths, strict=True):  # parents come first
            if left >= 0:
                depths[[left, right]] = depth + 1
        return depths + _path_length(tree.n_node_samples)


class PlainLof(_OnVectors):
    """Local outlier factor as it comes: no differences to peers, no calibration.

    Source: Breunig et al. (10.1145/342009.335388); 20 neighbours and the threshold 1.5 are scikit-learn's for novelties.
    """

    NEIGHBOURS, THRESHOLD = 20, 1.5

    def fit(self, vectors_NM: NDArray[np.float64]) -> None:
        """Keep the vectors that differ: equal ones are infinitely dense."""
        vectors_NM = np.unique(vectors_NM.round(3), axis=0)
        self.lof = LocalOutlierFactor(n_neighbors=min(self.NEIGHBOURS, len(vectors_NM) - 1), novelty=True).fit(vectors_NM)

    def score(self, vectors_NM: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the factor over the threshold."""
        return np.asarray(-self.lof.score_samples(vectors_NM) / self.THRESHOLD)


class Pca(_OnVectors):
    """Squared distance from the hyperplane in which normal vectors lie.

    Source: Lakhina et al. (10.1145/1015467.1015492), with the limit of Jackson and Mudholkar (10.1080/00401706.1979.10489779) at
    their confidence of 99.9 %. *Differs*: components are kept until they hold 90 % of the variance.
    """

    KEPT_RATIO, CONFIDENCE = 0.9, 0.999

    def fit(self, vectors_NM: NDArray[np.float64]) -> None:
        """Find the hyperplane and the limit."""
        self.mean_M = vectors_NM.mean(axis=0)
        _, singular_M, axes_MM = np.linalg.svd(vectors_NM - self.mean_M, full_matrices=False)
        variance_M = singular_M**2 / max(1, len(vectors_NM) - 1)
        kept = min(
            int(np.searchsorted(np.cumsum(variance_M), self.KEPT_RATIO * variance_M.sum())) + 1, max(1, len(variance_M) - 1)
        )
        self.axes_KM, rest = axes_MM[:kept], variance_M[kept:]
        one, two, three = (float((rest**power).sum()) for power in (1, 2, 3))
        if two == 0:
            self.limit = 1e-9
            return
        h = 1 - 2 * one * three / (3 * two**2)
        c = NormalDist().inv_cdf(self.CONFIDENCE)
        self.limit = one * (c * np.sqrt(2 * two * h**2) / one + 1 + two * h * (h - 1) / one**2) ** (1 / h)

    def score(self, vectors_NM: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the squared distance over the limit."""
        centred = vectors_NM - self.mean_M
        residual = centred - centred @ self.axes_KM.T @ self.axes_KM
        return np.asarray((residual**2).sum(axis=1) / self.limit)


class Minder:
    """Distances of short windows between the members of a job, metric by metric.

    Source: Deng et al., NSDI 2025 (arXiv 2411.01791): windows of 8 samples, each metric scaled to its range, the sum of a
    machine's Euclidean distances to all others, normalised over the machines, the largest against a similarity threshold; an
    alarm when one machine stays the candidate for 4 minutes. *Differs*: windows as they are instead of a variational
    autoencoder's reconstruction; the largest over all metrics instead of a learned order of them; ranks of one group instead of
    machines, since of n machines none can lie more than sqrt(n - 1) standard deviations out, 1.7 for four; the threshold, for
    which no number is known to us, is 3, or the largest that was seen while learning if that is more.
    """

    WINDOW_POINTS, LEAST_THRESHOLD, CONTINUITY_S = 8, 3.0, 240.0

    def learn(self, past: Window) -> None:
        """Keep each metric's range, and the largest normal score of its own."""
        self.metrics = past.metrics
        values_MN = np.moveaxis(past.values_RMT, 1, 0).reshape(len(past.metrics), -1).astype(np.float64)
        known = np.isfinite(values_MN)
        self.low_M = np.where(known, values_MN, np.inf).min(axis=1)
        self.range_M = np.maximum(np.where(known, values_MN, -np.inf).max(axis=1) - self.low_M, 1e-9)
        largest_M = np.zeros(len(past.metrics))
        for end in range(self.WINDOW_POINTS, past.values_RMT.shape[2] + 1):
            z_RM = self._normal_RM(past, past.values_RMT[:, :, end - self.WINDOW_POINTS : end])
            largest_M = np.maximum(largest_M, np.nan_to_num(z_RM).max(axis=0))
        self.threshold_M = np.maximum(largest_M, self.LEAST_THRESHOLD)

    def score_R(self, window: Window) -> NDArray[np.float64]:
        """Return the largest normal score over its threshold; only the candidate of each metric has one."""
        picked = window.select(self.metrics)
        z_RM = self._normal_RM(picked, picked.values_RMT[:, :, -self.WINDOW_POINTS :]) / self.threshold_M
        top_M = np.nan_to_num(z_RM, nan=-np.inf).max(axis=0)
        return _worst(np.where(z_RM >= top_M, z_RM, np.minimum(z_RM, 1.0)))

    def _normal_RM(self, window: Window, values_RMW: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return (R, M) each rank's summed distances in standard deviations over its group."""
        scaled = (values_RMW.astype(np.float64) - self.low_M[:, None]) / self.range_M[:, None]
        out = np.full(scaled.shape[:2], np.nan)
        for members in _groups(window):
            if len(members) < MIN_PEERS:
                continue
            here = np.moveaxis(scaled[members], 1, 0)
            known = np.isfinite(here)
            # as the paper fills gaps from the nearest sample, a window with gaps stands for itself by what it has
            filled = np.where(known, here, np.nan_to_num(_median(here, 2))[:, :, None])
            squares = (filled**2).sum(axis=2)
            products = filled @ np.swapaxes(filled, 1, 2)
            distance = np.sqrt(np.maximum(squares[:, :, None] + squares[:, None, :] - 2 * products, 0.0))
            seen = known.any(axis=2)
            total_MR = (distance * seen[:, None, :]).sum(axis=2)
            total_MR[~seen] = np.nan
            enough = seen.sum(axis=1) >= MIN_PEERS
            if enough.any():
                centre = np.nanmean(total_MR[enough], axis=1, keepdims=True)
                spread = np.nanstd(total_MR[enough], axis=1, keepdims=True)
                out[np.ix_(members, np.flatnonzero(enough))] = ((total_MR[enough] - centre) / np.maximum(spread, 1e-9)).T
        return out


class RoughPage:
    """What an afternoon gives: differences to the peers without permanent ones, silence, hangs, a test of the whole job.

    Not published anywhere; its constants are round numbers, set after one look at the development traces. It shows how far a page
    of code gets, in trust above all. One object replays one trace.
    """

    RECENT_POINTS, TICKS = 3, 2
    MARGIN, LEAST_RATIO, LEAST_CHANGE_RATIO, HANG_RATIO = 2.0, 0.05, 0.2, 0.5
    FLAT = ("gpu_power_watts", "gpu_tensor_active_ratio", "ib_transmit_bytes_per_second", "ib_receive_bytes_per_second")

    def verdicts(self, source: TraceSource) -> Iterator[Verdict]:
        """Yield a verdict for each instant of the trace."""
        learn, worked = learn_points(source.step_s), 0
        runs: dict[str, tuple[int, float]] = {}
        changed = hanging = 0
        for stamp_s in source.stamps_s:
            window = source.window(source.job, float(stamp_s), learn * source.step_s)
            if idle(window):
                runs, changed, hanging = {}, 0, 0
                yield _say(window, Decision.NOT_APPLICABLE, "the job is idle")
                continue
            worked += 1
            if worked <= learn:
                if worked == learn:
                    self._learn(window)
                yield _say(window, Decision.UNSURE, f"learning: {worked} of {learn} instants")
                continue
            now = window.last(self.RECENT_POINTS * source.step_s).select(self.metrics)
            apart_RMT, level_MT = self._steady(now)
            score_R = _worst(np.abs(apart_RMT[:, :, -1] - self.offset_RM) / self.apart_limit_M)
            silent_R = ~np.isfinite(now.values_RMT).any(axis=(1, 2))
            if silent_R.mean() < 0.5:
                score_R[silent_R] = np.nanmax(score_R, initial=self.MARGIN) + 1
            change_M = level_MT[:, -1] - self.level_M
            runs = _running(runs, window, score_R)
            changed = changed + 1 if np.nanmax(np.abs(change_M) / self.level_limit_M, initial=0.0) > 1 else 0
            fallen = [-change_M[m] > (1 - self.HANG_RATIO) * self.level_M[m] for m in self.flat]
            used = [_median(now.column_RT(m)[:, -1].astype(np.float64), 0) > 0.9 for m in self.use]
            hanging = hanging + 1 if used and fallen and all((*used, *fallen)) else 0
            sure = {node for node, (ticks, _) in runs.items() if ticks >= self.TICKS}
            votes: dict[str, bool | None] = {"peers": bool(sure), "hang": hanging >= self.TICKS, "level": changed >= self.TICKS}
            if not (np.isfinite(score_R).any() or np.isfinite(change_M).any()):
                yield _say(window, Decision.UNSURE, "nothing was observed", votes)
            elif sure:
                top = window.nodes[int(np.argmax([s if n in sure else -1.0 for n, s in zip(window.nodes, score_R, strict=True)]))]
                yield blame(window, score_R, {top}, votes, "peers")
            elif votes["hang"] or votes["level"]:
                what = "the job hangs" if votes["hang"] else "the whole job changed"
                yield _say(window, Decision.ANOMALOUS, what, votes, Scope.JOB)
            else:
                yield _say(window, Decision.NORMAL, "nothing lasted", votes)

    def _learn(self, past: Window) -> None:
        """Keep where ranks and job lie, and how far from there they came."""
        self.metrics = compared(past)
        apart_RMT, level_MT = self._steady(past.select(self.metrics))
        self.offset_RM, self.level_M = _median(apart_RMT, 2), _median(level_MT, 1)
        size_M = np.fmax(np.nan_to_num(np.abs(self.level_M)), 1e-6)
        reached_M = np.nan_to_num(np.abs(apart_RMT - self.offset_RM[:, :, None])).max(axis=(0, 2))
        self.apart_limit_M = np.maximum(self.MARGIN * reached_M, self.LEAST_RATIO * size_M)
        reached_M = np.nan_to_num(np.abs(level_MT - self.level_M[:, None])).max(axis=1)
        self.level_limit_M = np.maximum(self.MARGIN * reached_M, self.LEAST_CHANGE_RATIO * size_M)
        self.use = tuple(m for m in self.metrics if m == "gpu_utilization_ratio")
        self.flat = [self.metrics.index(m) for m in self.FLAT if m in self.metrics]

    def _steady(self, window: Window) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (R, M, T') differences to the peers and (M, T') levels of the job, medians of the newest instants."""
        values_RMT = window.values_RMT.astype(np.float64)
        apart_RMT = np.full(values_RMT.shape, np.nan)
        for members in _groups(window):
            if len(members) >= MIN_PEERS:
                apart_RMT[members] = values_RMT[members] - _median(values_RMT[members], 0)
        recent = np.lib.stride_tricks.sliding_window_view
        return (
            _median(recent(apart_RMT, self.RECENT_POINTS, axis=2), 3),
            _median(recent(_median(values_RMT, 0), self.RECENT_POINTS, axis=1), 2),
        )


def rough_page(source: TraceSource) -> Iterator[Verdict]:
    """Yield a verdict for each instant of the trace, as `RoughPage` does."""
    return RoughPage().verdicts(source)


BASELINES: dict[str, Method] = {
    "robust_z": Baseline("robust_z", RobustZ, learns=False),
    "isolation_forest": Baseline("isolation_forest", Forest),
    "pca": Baseline("pca", Pca),
    "lof_plain": Baseline("lof_plain", PlainLof),
    "minder": Baseline("minder", Minder, points=Minder.WINDOW_POINTS, ticks=Minder.WINDOW_POINTS, lasting_s=Minder.CONTINUITY_S),
    "minder_hasty": Baseline("minder_hasty", Minder, points=Minder.WINDOW_POINTS, ticks=Minder.WINDOW_POINTS, lasting_s=0.0),
    "rough_page": rough_page,
}
"""By the names that `eagleeye evaluate --methods` knows."""
