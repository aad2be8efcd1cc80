"""What a rank does beyond what its peers do: the common ground that every detector stands on.

In synchronous training one slow rank slows everybody, so values themselves accuse all ranks alike. What separates them is the
difference to the median of the ranks that do the same work (EROICA and Greyhound compare the same way; TRANSOM section IV
compares raw values, which is where we differ). Permanent differences between boards are a job's own and are learned in its first
minutes. Units vanish: 1.0 is one robust standard deviation of healthy ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eagleeye.errors import NoData
from eagleeye.metrics import BY_COLUMN
from eagleeye.window import Window

MIN_PEERS = 3
"""Fewer ranks than this can disagree, but nobody can say who is right."""

MAGNITUDE_FLOOR_RATIO = 0.01
"""A difference far below one percent of the metric's usual peak is never a fault, however steady the metric is."""

ABSOLUTE_FLOOR = {"1": 0.005, "1/s": 0.2, "bytes/s": 1000.0, "bytes": 65536.0, "seconds": 0.01, "celsius": 1.0, "watts": 2.0}
"""The same for metrics that are usually zero, by base unit."""

FINE_S = 2.5
"""Sampling finer than this sees bursts of a second or two as several values."""


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """Spread of healthy ranks around their peers: (M,) robust standard deviations of `metrics`, in their units."""

    metrics: tuple[str, ...]
    scale_M: NDArray[np.float64]


def compared(window: Window) -> tuple[str, ...]:
    """Return the metrics of a window that detectors compare: unknown names too, facts for rules not; sorted."""
    return tuple(sorted(m for m in window.metrics if m not in BY_COLUMN or BY_COLUMN[m].compared))


def differences_RMT(window: Window) -> NDArray[np.float32]:
    """Return (R, M, T) values minus the median of the rank's peers at the same instant; NaN for groups under `MIN_PEERS`."""
    out_RMT = np.full(window.values_RMT.shape, np.nan, dtype=np.float32)
    groups = np.array(window.groups)
    for group in set(window.groups):
        members = np.flatnonzero(groups == group)
        if len(members) >= MIN_PEERS:
            values = window.values_RMT[members]
            out_RMT[members] = values - _nanmedian(values)[None]
    return out_RMT


def _nanmedian(values_RMT: NDArray[np.float32]) -> NDArray[np.float32]:
    """Median over ranks that ignores NaN without numpy's slow path and its warning for columns of nothing but NaN."""
    counts = np.sum(~np.isnan(values_RMT), axis=0)
    ordered = np.sort(values_RMT, axis=0)
    low = np.take_along_axis(ordered, np.maximum((counts - 1) // 2, 0)[None], axis=0)[0]
    high = np.take_along_axis(ordered, np.minimum(counts // 2, len(ordered) - 1)[None], axis=0)[0]
    return np.where(counts > 0, (low + high) / 2, np.nan).astype(np.float32)


def offsets_RM(window: Window) -> NDArray[np.float32]:
    """Return (R, M) how far each rank permanently lies from its peers; NaN where nothing was observed, so nothing is known."""
    return _nanmedian(np.moveaxis(differences_RMT(window), 2, 0))


def fit_scale(windows: Sequence[Window]) -> Scale:
    """Learn the spread of healthy ranks around their peers.

    Parameters
    ----------
    windows : normal windows; a metric that only some of them carry is learned from those

    Raises
    ------
    NoData
        No group has `MIN_PEERS` ranks, or nothing was observed.
    """
    metrics = tuple(sorted({metric for window in windows for metric in compared(window)}))
    scale_M = np.zeros(len(metrics))
    for m, metric in enumerate(metrics):
        parts = []
        sizes = []
        for window in windows:
            one = window.select([metric])
            difference = differences_RMT(one) - offsets_RM(one)[:, :, None]
            parts.append(difference[np.isfinite(difference)])
            sizes.append(np.abs(one.values_RMT[np.isfinite(one.values_RMT)]))
        deviations, size = np.concatenate(parts), np.concatenate(sizes)
        if not len(deviations):
            scale_M[m] = np.nan
            continue
        spread = 1.4826 * float(np.median(np.abs(deviations)))
        scale_M[m] = max(
            spread, MAGNITUDE_FLOOR_RATIO * float(np.quantile(size, 0.9)), max(_noise(metric, w.unit(metric)) for w in windows)
        )
    if not np.isfinite(scale_M).any():
        raise NoData(f"job {windows[0].job}: no group of {MIN_PEERS} ranks that do the same work, so nobody can be compared")
    kept = np.isfinite(scale_M)
    return Scale(tuple(m for m, k in zip(metrics, kept, strict=True) if k), scale_M[kept])


def _noise(metric: str, unit: str) -> float:
    known = BY_COLUMN.get(metric)
    return known.noise if known and known.noise is not None else ABSOLUTE_FLOOR.get(unit, 1e-9)


def prepare(window: Window, scale: Scale, offset_RM: NDArray[np.float32]) -> Window:
    """Return a window of the scale's metrics in robust standard deviations from the peers.

    Every instant becomes the median of the newest three observed values, of five where sampling is finer than `FINE_S`: this
    removes what a single scrape did, and bridges
    gaps. A rank that was observed in less than half of the instants, or in none of the last three, stays NaN.
    """
    picked = window.select(scale.metrics)
    scale_M = scale.scale_M.astype(np.float32)
    scaled: NDArray[np.float32] = (differences_RMT(picked) - offset_RM[:, :, None]) / scale_M[None, :, None]
    return replace(picked, values_RMT=_median_of_newest(scaled, 5 if window.step_s < FINE_S else 3))


def _median_of_newest(values_RMT: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    observed = np.isfinite(values_RMT)
    T = values_RMT.shape[2]
    newest = np.maximum.accumulate(np.where(observed, np.arange(T), -1), axis=2)
    places = [np.where(newest < 0, np.argmax(observed, axis=2)[:, :, None], newest)]
    while len(places) < count:
        places.append(np.take_along_axis(places[0], np.maximum(places[-1] - 1, 0), axis=2))
    stacked = np.sort(np.stack([np.take_along_axis(values_RMT, place, axis=2) for place in places]), axis=0)
    out: NDArray[np.float32] = stacked[count // 2]
    # the first instants have too few values before them, and no single one of them may stand for them
    out[:, :, : count - 1] = out[:, :, min(count, T) - 1, None]
    out[observed.mean(axis=2) < 0.5] = np.nan
    # a rank whose newest instants are missing is unknown now, whatever it did before
    out[~observed[:, :, -min(3, T) :].any(axis=2)] = np.nan
    return out
