"""From numbers to words: what kind of fault the evidence speaks for, and one sentence that a person can check."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eagleeye.detectors.peers import MIN_PEERS
from eagleeye.quantities import quantity
from eagleeye.records import Category
from eagleeye.window import Window

_PREFIXES = (
    ("ib_", Category.NETWORK), ("network_", Category.NETWORK), ("gpu_", Category.GPU), ("collective_", Category.NODE),
    ("process_", Category.NODE), ("cpu_", Category.NODE), ("train_", Category.NODE), ("storage_", Category.STORAGE),
)  # fmt: skip


def category(evidence: Sequence[str]) -> Category:
    """Return the category that most of the evidence metrics belong to; traffic alone says little, so it decides last."""
    kinds = Counter(
        next((kind for prefix, kind in _PREFIXES if metric.startswith(prefix)), Category.UNKNOWN)
        for metric in evidence
        if metric and metric not in ("ib_transmit_bytes_per_second", "ib_receive_bytes_per_second")
    )
    if not kinds:
        return Category.NETWORK if any(evidence) else Category.UNKNOWN
    return kinds.most_common(1)[0][0]


def newest_RM(window: Window, points: int = 2) -> NDArray[np.float64]:
    """Return (R, M) the mean of what was observed in the newest `points` instants; NaN where nothing was."""
    newest_RMT = window.values_RMT[:, :, -points:].astype(np.float64)
    seen_RMT = np.isfinite(newest_RMT)
    sums_RM, counts_RM = np.where(seen_RMT, newest_RMT, 0.0).sum(axis=2), seen_RMT.sum(axis=2)
    return np.where(counts_RM > 0, sums_RM / np.maximum(counts_RM, 1), np.nan)


def peers_R(window: Window, rank: int) -> NDArray[np.bool_]:
    """Return (R,) who does the same work as the rank at index `rank`, without itself."""
    same_R = np.array(window.groups) == window.groups[rank]
    same_R[rank] = False
    return np.asarray(same_R)


def describe(window: Window, rank: int, metrics: Sequence[str], newest: NDArray[np.float64] | None = None) -> str:
    """Return what the rank at index `rank` does differently, for example ``gpu_sm_clock_hertz 945 MHz (peers 1.41 GHz)``.

    `newest` is what `newest_RM` returned, for whoever describes several ranks. Peers count by the median of their means: where
    everybody changes between two instants, a median of all values would lie on either side.
    """
    parts = []
    means_RM = newest_RM(window) if newest is None else newest
    same_R = peers_R(window, rank)
    for metric in dict.fromkeys(m for m in metrics if m and window.has(m)):
        mean_R = means_RM[:, window.metrics.index(metric)]
        others = mean_R[same_R & np.isfinite(mean_R)]
        if np.isfinite(mean_R[rank]) and len(others) >= MIN_PEERS - 1:
            mine, theirs = (quantity(float(v), window.unit(metric)) for v in (mean_R[rank], np.median(others)))
            parts.append(f"{metric} {mine} (peers {theirs})")
    return ", ".join(parts)
