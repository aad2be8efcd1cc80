"""Pieces of history -> clean stretches -> fitted detectors -> a registered candidate.

Some jobs are set aside before anything is fitted. The model never sees them, so their scores tell how it does on work that is new
to it: a largest score below 1 means no false vote by that detector in all that time.
"""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagleeye import models
from eagleeye.clock import monotonic_s
from eagleeye.detectors import ensemble, peers
from eagleeye.detectors.ensemble import Ensemble
from eagleeye.errors import ModelMismatch
from eagleeye.models import Settings
from eagleeye.offline.corpus import Corpus, Piece, collect
from eagleeye.offline.plots import figure
from eagleeye.window import Window

KERNEL_TOLERANCE = 1e-4
"""Largest relative difference to tslearn and stumpy that a model may be registered with."""

_SAMPLE_RANKS, _SAMPLE_METRICS = 4, 3


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """What came out. `kernels` and `metrics` are what the registry shows too; `unseen` says what the scores were measured on."""

    version: str
    corpus: Corpus
    kernels: Mapping[str, float]
    metrics: Mapping[str, float]
    unseen: str


def train(pieces: Iterable[Piece], settings: Settings, tell: Callable[[str], None]) -> Trained:
    """Fit on the pieces and register the result as ``candidate``.

    Nothing reaches the registry before everything else succeeded.

    Raises
    ------
    NoData
        Nothing normal to learn from.
    ModelMismatch
        A kernel of ours disagrees with the library that it replaces.
    SourceUnavailable
        The registry does not answer.
    """
    corpus = collect(pieces, settings)
    tell(corpus.told())
    learn, unseen, what = set_aside(corpus.stretches, settings.unseen_ratio)
    began_s = monotonic_s()
    fitted = ensemble.fit(learn, settings.detectors)
    fit_s = monotonic_s() - began_s
    tell(f"fitted on {len(learn)} stretches of {len({w.job for w in learn})} jobs in {fit_s:.1f} s")
    kernels = check_kernels(fitted, learn[0])
    tell(
        "kernels agree with " + ", ".join(f"{name} (largest relative difference {worst:.1e})" for name, worst in kernels.items())
    )
    scores = measure(fitted, unseen or learn)
    metrics = {
        "windows": corpus.kept,
        "windows_dropped": sum(corpus.dropped.values()),
        "jobs": len(corpus.jobs),
        "job_hours": corpus.hours,
        "fit_seconds": fit_s,
        **{f"kernel_difference_{name}": worst for name, worst in kernels.items()},
        **{f"{name}_largest_score": float(np.max(score_N, initial=0.0)) for name, score_N in scores.items()},
        **{
            f"{name}_share_above_1": float(np.mean(score_N > 1.0)) if len(score_N) else np.nan for name, score_N in scores.items()
        },
        **thresholds(fitted),
    }
    with tempfile.TemporaryDirectory() as folder:
        _plot_scores(scores, what, Path(folder) / "scores.png")
        _plot_window(fitted, (unseen or learn)[0], Path(folder) / "window.png")
        (Path(folder) / "corpus.txt").write_text(corpus.told() + "\n", encoding="utf-8")
        params = {
            "detectors": ",".join(fitted.detectors),
            "metrics": ",".join(fitted.scale.metrics),
            "step_s": fitted.step_s,
            "window_s": settings.window_s,
            "scores_measured_on": what,
        }
        version = models.register(settings, fitted, params, metrics, Path(folder))
    return Trained(version, corpus, kernels, metrics, what)


def set_aside(stretches: Sequence[Window], ratio: float) -> tuple[list[Window], list[Window], str]:
    """Return (stretches to learn from, stretches that the model never sees, what the latter are).

    Whole jobs where there are several; the newest stretches of the only job where it has at least four; else nothing.
    """
    jobs = sorted({w.job for w in stretches})
    if ratio > 0 and len(jobs) > 1:
        every = max(2, round(1 / ratio))
        # a metric that no other job has must stay with the learners
        aside = [job for job in jobs[1::every] if _metrics_of(stretches, {job}) <= _metrics_of(stretches, set(jobs) - {job})]
        if aside:
            learn = [w for w in stretches if w.job not in aside]
            return learn, [w for w in stretches if w.job in aside], f"{len(aside)} jobs that the model never saw"
    if ratio > 0 and len(stretches) >= 4 and len(jobs) == 1:
        last = max(1, round(ratio * len(stretches)))
        return list(stretches[:-last]), list(stretches[-last:]), f"the newest {last} stretches of the only job"
    return list(stretches), [], "the held-out halves that also set the thresholds, for want of other jobs"


def _metrics_of(stretches: Sequence[Window], jobs: set[str]) -> set[str]:
    return {m for w in stretches if w.job in jobs for m in w.metrics}


def check_kernels(fitted: Ensemble, stretch: Window) -> dict[str, float]:
    """Return library -> largest relative difference between our kernel and it, on a sample of `stretch`.

    Raises
    ------
    ModelMismatch
        A difference above `KERNEL_TOLERANCE`.
    """
    prepared = peers.prepare(ensemble.half(stretch), fitted.scale, fitted.job_offsets(ensemble.half(stretch)))
    values_RMT = np.nan_to_num(prepared.values_RMT[:_SAMPLE_RANKS, :, -ensemble.PAST_POINTS :])
    liveliest_M = np.argsort(-values_RMT.std(axis=(0, 2)), kind="stable")[:_SAMPLE_METRICS]
    sample_RMT = np.ascontiguousarray(values_RMT[:, liveliest_M])
    found: dict[str, float] = {}
    if "knn_dtw" in fitted.detectors:
        from eagleeye.detectors import knn_dtw

        dtw: Any = fitted.detectors["knn_dtw"]
        found["tslearn"] = knn_dtw.check_kernel(sample_RMT[:, :, -dtw.points :], dtw.band)
    if "matrix_profile" in fitted.detectors:
        from eagleeye.detectors import matrix_profile

        profile: Any = fitted.detectors["matrix_profile"]
        if sample_RMT.shape[2] >= profile.min_points:
            found["stumpy"] = matrix_profile.check_kernel(sample_RMT, profile.points, profile.neighbours)
    for library, worst in found.items():
        if not worst <= KERNEL_TOLERANCE:
            raise ModelMismatch(
                f"our kernel differs from {library} by {worst:.1e} of the value on these data; nothing is registered"
            )
    return found


def measure(fitted: Ensemble, stretches: Sequence[Window]) -> dict[str, NDArray[np.float64]]:
    """Return detector -> (N,) scores of all ranks at the ticks of the second halves; offsets are learned from the first."""
    found: dict[str, list[NDArray[np.float64]]] = {name: [np.empty(0)] for name in fitted.detectors}
    for stretch in stretches:
        offset_RM = fitted.job_offsets(ensemble.half(stretch))
        for end in ensemble.held_out_ends(stretch):
            for score in fitted.score(ensemble.until(stretch, end), offset_RM):
                found[score.detector].append(score.score_R[np.isfinite(score.score_R)])
    return {name: np.concatenate(parts) for name, parts in found.items()}


def thresholds(fitted: Ensemble) -> dict[str, float]:
    """Return the thresholds as flat names: ``knn_dtw_threshold.gpu_power_watts``, in robust standard deviations."""
    flat: dict[str, float] = {}
    for name, model in fitted.models.items():
        if "threshold" in model:
            flat[f"{name}_threshold"] = float(model["threshold"])
        if "threshold_M" in model:
            flat |= {f"{name}_threshold.{m}": float(t) for m, t in zip(fitted.scale.metrics, model["threshold_M"], strict=True)}
    return flat


def _plot_scores(scores: Mapping[str, NDArray[np.float64]], what: str, path: Path) -> None:
    drawing = figure(3.2 * len(scores), 3)
    for axes, (name, score_N) in zip(drawing.subplots(1, len(scores), squeeze=False)[0], scores.items(), strict=True):
        axes.hist(score_N, bins=40, range=(0, max(1.2, float(np.max(score_N, initial=0.0)))), log=True, color="tab:blue")
        axes.axvline(1.0, color="tab:red", label="threshold")
        axes.set(title=name, xlabel="score", ylabel="ranks x ticks")
    drawing.suptitle(f"Scores of normal work: {what}", fontsize=9)
    drawing.savefig(path, dpi=110)


def _plot_window(fitted: Ensemble, stretch: Window, path: Path) -> None:
    prepared = peers.prepare(stretch, fitted.scale, fitted.job_offsets(ensemble.half(stretch)))
    size_RMT = np.abs(np.nan_to_num(prepared.values_RMT))
    drawing = figure(8, 4)
    axes = drawing.subplots()
    image = axes.imshow(
        size_RMT.max(axis=1), aspect="auto", interpolation="nearest", cmap="magma",
        extent=(0, size_RMT.shape[2] * stretch.step_s / 60, len(stretch.ranks) - 0.5, -0.5),
    )  # fmt: skip
    axes.set(title=f"Normal work of {stretch.job}", xlabel="minutes", ylabel="rank (index)")
    drawing.colorbar(image, label="furthest metric, robust standard deviations from peers")
    drawing.savefig(path, dpi=110)
