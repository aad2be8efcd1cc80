"""The detectors together: what they learned from normal work, stored as plain numbers, and their scores for one window."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
from numpy.typing import NDArray

from eagleeye import plugins
from eagleeye.detectors import whole_job
from eagleeye.detectors.applicability import not_applicable
from eagleeye.detectors.base import Detector, Model, Score
from eagleeye.detectors.peers import Scale, fit_scale, jumps_GM, offsets_RM, prepare
from eagleeye.detectors.thresholds import Tail, fit_tail
from eagleeye.errors import ModelMismatch, NoData
from eagleeye.window import Window

FORMAT = 2
"""Version of what `to_parts` returns; a model of another format is refused, never guessed at."""

DETECTORS = ("knn_dtw", "matrix_profile", "lof", "peer_deviation")
"""Members of the vote that compare ranks and are fitted."""

MEMBERS = (*DETECTORS, *whole_job.MEMBERS)
"""All members of the vote."""
SHIPPED_METRICS = ("gpu_utilization_ratio", "gpu_power_watts", "gpu_sm_clock_hertz")
SHIPPED_SCALE_RATIO = 0.1
SHIPPED_POINTS = 6
SHIPPED_FLOOR = 2.5
"""Shipped defaults for the first minutes of an unknown job: a rank must lie off by half of what the others show, on average
(scores of the first minutes are halved)."""

PAST_POINTS = 120
"""Instants of a rank's own past that a tick looks at."""
TICK_POINTS = 30
"""Held-out normal work is cut into ticks this many instants apart when it calibrates thresholds."""


@dataclass(frozen=True, slots=True, eq=False)
class Ensemble:
    """Fitted detectors. `step_s` is the sampling interval that they were fitted at, `tails` how rare their scores are."""

    scale: Scale
    step_s: float
    models: Mapping[str, Model]
    detectors: Mapping[str, Detector]
    tails: Mapping[str, Tail]

    @property
    def memory(self) -> dict[str, int]:
        """By detector, how many instants one of its scores depends on."""
        return {name: detector.memory_points for name, detector in self.detectors.items()}

    def score(
        self,
        window: Window,
        offset_RM: NDArray[np.float32],
        unfamiliar: Mapping[str, float] | None = None,
        jump_GM: NDArray[np.float32] | None = None,
    ) -> list[Score]:
        """Score the last instants of `window` by every detector.

        Parameters
        ----------
        window : as read from a source; metrics that the model does not know are ignored, those that are missing are NaN
        offset_RM : (R, M) of the scale's metrics, from `job_offsets`
        unfamiliar : from `whole_job.unfamiliar`: metrics whose level was never seen while permanent differences were learned,
            so that these may not hold: a deviation counts as far as it is there with and without them, by the growth of the
            level less
        jump_GM : (G, M) from `job_jumps`; without it every change of the whole group is taken for usual

        Raises
        ------
        ModelMismatch
            The window carries none of the metrics that the model was fitted on.
        """
        if not set(window.metrics) & set(self.scale.metrics):
            known = ", ".join(self.scale.metrics)
            raise ModelMismatch(f"job {window.job} has none of the model's metrics ({known}); train on such jobs")
        if not 0.5 <= window.step_s / self.step_s <= 2.0:
            raise ModelMismatch(
                f"job {window.job} is sampled every {window.step_s:g} s and the model was fitted at {self.step_s:g} s; "
                "train on such jobs, or score with --model none"
            )
        recent = window.last(PAST_POINTS * window.step_s)
        prepared = prepare(recent, self.scale, offset_RM, jump_GM)
        doubtful_M = np.array([metric in (unfamiliar or {}) for metric in self.scale.metrics])
        if doubtful_M.any():
            bare_RM = np.where(doubtful_M[None], 0.0, offset_RM).astype(np.float32)
            bare = prepare(recent, self.scale, bare_RM, jump_GM).values_RMT
            agreed = np.where(np.abs(bare) < np.abs(prepared.values_RMT), bare, prepared.values_RMT)
            growth_M = np.array([(unfamiliar or {}).get(metric, 1.0) for metric in self.scale.metrics], dtype=np.float32)
            agreed = np.where(bare * prepared.values_RMT < 0, np.float32(0), agreed) / growth_M[None, :, None]
            prepared = replace(prepared, values_RMT=agreed.astype(np.float32))
        return [detector.score(self.models[name], prepared) for name, detector in self.detectors.items()]

    def job_offsets(self, window: Window) -> NDArray[np.float32]:
        """Return (R, M) the permanent differences between a job's ranks, learned from a stretch of its own normal work."""
        return offsets_RM(window.select(self.scale.metrics))

    def job_jumps(self, window: Window) -> NDArray[np.float32]:
        """Return (G, M) the largest change of a group's median within one instant in a stretch of a job's own normal work."""
        return jumps_GM(window.select(self.scale.metrics))

    def to_parts(self) -> tuple[dict[str, object], dict[str, NDArray[np.float64]]]:
        """Return what a model store keeps: JSON values and named arrays."""
        facts: dict[str, object] = {"format": FORMAT, "metrics": list(self.scale.metrics), "step_s": self.step_s}
        facts |= {"detectors": list(self.models), "models": {}}
        facts["tails"] = {name: [tail.share, tail.slope] for name, tail in self.tails.items()}
        arrays = {"scale_M": self.scale.scale_M}
        for name, model in self.models.items():
            for key, value in model.items():
                if isinstance(value, np.ndarray):
                    arrays[f"{name}.{key}"] = value
                else:
                    facts["models"][f"{name}.{key}"] = value  # type: ignore[index]
        return facts, arrays


def from_parts(facts: Mapping[str, object], arrays: Mapping[str, NDArray[np.float64]]) -> Ensemble:
    """Return the ensemble that `to_parts` took apart.

    Raises
    ------
    ModelMismatch
        Written by another format, or something is missing.
    """
    if facts.get("format") != FORMAT:
        raise ModelMismatch(
            f"the model has format {facts.get('format')}, this program reads format {FORMAT}: train it again with this version"
        )
    try:
        models: dict[str, dict[str, object]] = {str(name): {} for name in facts["detectors"]}  # type: ignore[attr-defined]
        scalars: Mapping[str, object] = facts["models"]  # type: ignore[assignment]
        for key, value in [*scalars.items(), *((k, v) for k, v in arrays.items() if "." in k)]:
            name, _, part = key.partition(".")
            models[name][part] = value
        scale = Scale(tuple(str(m) for m in facts["metrics"]), arrays["scale_M"])  # type: ignore[attr-defined]
        step_s = float(facts["step_s"])  # type: ignore[arg-type]
        tails = {name: Tail(float(share), float(slope)) for name, (share, slope) in facts["tails"].items()}  # type: ignore[attr-defined]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelMismatch(f"the stored model is damaged ({error}): train it again") from None
    if len(scale.metrics) != len(scale.scale_M):
        raise ModelMismatch("the stored model is damaged (metrics and scales differ in number): train it again")
    return Ensemble(scale, step_s, models, {name: plugins.load("detector", name)() for name in models}, tails)


def fit(normal: Sequence[Window], detectors: Sequence[str] = DETECTORS) -> Ensemble:
    """Learn from stretches of normal work of one or many jobs, each an uninterrupted window of at least `least_points()`.

    The first half of each window gives offsets, scales and the vectors of LOF; the second half is held out and calibrates the
    thresholds, so that a healthy rank stays below 1 in work that was not learned from. Where there are several jobs, LOF, which
    alone remembers them, is calibrated on each job by what it learned from the others. Metrics and sampling intervals may differ
    between jobs; detectors count instants, not seconds.

    Raises
    ------
    NoData
        Too little normal work, or no ranks that can be compared.
    """
    normal = [w for w in normal if w.values_RMT.shape[2] >= least_points()]
    if not normal:
        raise NoData(f"nothing to learn from: no job was watched for {least_points()} samples in a row")
    scale = fit_scale([half(w) for w in normal])
    offsets = [offsets_RM(half(window).select(scale.metrics)) for window in normal]
    learned = [prepare(half(window), scale, offset_RM) for window, offset_RM in zip(normal, offsets, strict=True)]
    held_out = HeldOut(normal, offsets, scale)
    made: dict[str, Detector] = {name: plugins.load("detector", name)() for name in detectors}
    models = {name: detector.fit(learned, held_out) for name, detector in made.items()}
    reached: dict[str, list[NDArray[np.float64]]] = {name: [] for name in made}
    for tick in held_out:
        for name, detector in made.items():
            reached[name].append(detector.score(models[name], tick).score_R)
    tails = {name: fit_tail(np.concatenate(scores), made[name].memory_points) for name, scores in reached.items()}
    return Ensemble(scale, normal[0].step_s, models, made, tails)


def shipped(window: Window) -> Ensemble | None:
    """Return what judges a job that nobody knows yet, None where nothing can: dead GPUs among busy ones, and nothing finer.

    Compares only metrics in which nearly all ranks are at work and agree now; processes differ while they start, and idle
    ranks always.
    """
    level: dict[str, float] = {}
    for metric in SHIPPED_METRICS:
        if window.has(metric):
            values_RT = window.column_RT(metric)[:, -SHIPPED_POINTS:]
            known = values_RT[np.isfinite(values_RT)]
            low, middle, high = np.quantile(known, (0.2, 0.5, 0.8)) if len(known) else (0.0, 0.0, 1.0)
            busy = middle > 0.5 if metric == SHIPPED_METRICS[0] else metric != SHIPPED_METRICS[0] and bool(level)
            if busy and high - low < 0.2 * middle:
                level[metric] = float(middle)
    if not level:
        return None
    scale = Scale(tuple(level), np.array([SHIPPED_SCALE_RATIO * middle for middle in level.values()]))
    detector = plugins.load("detector", "peer_deviation")(horizons=(SHIPPED_POINTS,), floors=(SHIPPED_FLOOR,))
    model = {f"threshold_{SHIPPED_POINTS}_M": np.full(len(level), SHIPPED_FLOOR)}
    return Ensemble(scale, window.step_s, {detector.name: model}, {detector.name: detector}, {detector.name: Tail()})


class HeldOut(Sequence[Window]):
    """The second halves of `windows` as ticks, prepared one by one when asked for: together they are too large for memory."""

    def __init__(self, windows: Sequence[Window], offsets: Sequence[NDArray[np.float32]], scale: Scale) -> None:
        self._windows, self._offsets, self._scale = windows, offsets, scale
        self._ticks = [(i, end) for i, window in enumerate(windows) for end in held_out_ends(window)]
        if not self._ticks:
            raise NoData("nothing to calibrate with: the jobs did not work in the second half of what was watched")

    def __len__(self) -> int:
        return len(self._ticks)

    @overload
    def __getitem__(self, index: int) -> Window: ...
    @overload
    def __getitem__(self, index: slice) -> list[Window]: ...
    def __getitem__(self, index: int | slice) -> Window | list[Window]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i, end = self._ticks[index]
        return prepare(until(self._windows[i], end), self._scale, self._offsets[i])


def held_out_ends(window: Window) -> list[int]:
    """Return the ends of a stretch's held-out ticks as counts of its instants, without those at which nobody would be judged."""
    T = window.values_RMT.shape[2]
    stride = max(1, min(TICK_POINTS, (T - T // 2) // 20))
    first = T - (T - T // 2 - 1) // stride * stride
    return [end for end in range(first, T + 1, stride) if not not_applicable(until(window, end))]


def least_points() -> int:
    """Fewest instants that `fit` can learn from: both halves must feed the matrix profile."""
    return 40


def half(window: Window) -> Window:
    """Return the first half of a stretch: what is learned from."""
    return window.before(window.end_s - (window.values_RMT.shape[2] - window.values_RMT.shape[2] // 2) * window.step_s)


def until(window: Window, count: int) -> Window:
    """Return what a tick after the first `count` instants of a stretch looks at."""
    end_s = window.end_s - (window.values_RMT.shape[2] - count) * window.step_s
    return window.before(end_s).last(PAST_POINTS * window.step_s)
