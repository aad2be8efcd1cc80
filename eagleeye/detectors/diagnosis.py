"""From numbers to words: what kind of fault the evidence speaks for, and one sentence that a person can check."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

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


def describe(window: Window, rank: int, metrics: Sequence[str], points: int = 2) -> str:
    """Return what the rank at index `rank` does differently, for example ``gpu_sm_clock_hertz 945 MHz (peers 1.41 GHz)``."""
    parts = []
    peers = [i for i, group in enumerate(window.groups) if group == window.groups[rank] and i != rank]
    for metric in dict.fromkeys(m for m in metrics if m and window.has(m)):
        recent = window.column_RT(metric)[:, -points:]
        own, others = recent[rank], recent[peers]
        if np.isfinite(own).any() and np.isfinite(others).any() and len(peers) >= MIN_PEERS - 1:
            mine, theirs = (quantity(float(np.nanmedian(v)), window.unit(metric)) for v in (own, others))
            parts.append(f"{metric} {mine} (peers {theirs})")
    return ", ".join(parts)
