"""Window: what a job's ranks did in a stretch of time, as one array.

Shape suffixes in this project: R ranks, M metrics, T time steps, K neighbours, F features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from eagleeye.errors import DataError
from eagleeye.metrics import BY_COLUMN


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Values of `metrics` for `ranks` at T equally spaced instants, the last one at `end_s`.

    Attributes
    ----------
    job : name of the training job
    ranks : (R,) global ranks, strictly increasing
    nodes : (R,) the node that each rank runs on
    groups : (R,) equal-role peer group (pipeline stage); one name for all where the job does not tell
    metrics : (M,) catalogue names, or names that a trace brought with its unit
    end_s : seconds since the epoch of the last column; column t covers the `step_s` seconds before its stamp
    step_s : seconds between columns
    values_RMT : (R, M, T) float32, base units; NaN = not observed, never zero; read-only
    foreign_units : base units of metrics that the catalogue lacks, as far as a trace told them
    """

    job: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    groups: tuple[str, ...]
    metrics: tuple[str, ...]
    end_s: float
    step_s: float
    values_RMT: NDArray[np.float32]
    foreign_units: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (len(self.ranks), len(self.metrics))
        if self.values_RMT.ndim != 3 or self.values_RMT.shape[:2] != shape:
            raise ValueError(f"values of shape {self.values_RMT.shape} do not fit {shape[0]} ranks x {shape[1]} metrics")
        if len(self.nodes) != shape[0] or len(self.groups) != shape[0]:
            raise ValueError("every rank needs a node and a group")
        if any(a >= b for a, b in zip(self.ranks, self.ranks[1:], strict=False)):
            raise ValueError("ranks must strictly increase")
        if len(set(self.metrics)) != shape[1]:
            raise ValueError("a metric occurs twice")
        if not (math.isfinite(self.end_s) and self.step_s > 0):
            raise ValueError("end_s must be finite and step_s positive")
        self.values_RMT.flags.writeable = False

    @property
    def start_s(self) -> float:
        """Stamp of the first column, seconds since the epoch."""
        return float(self.end_s - (self.values_RMT.shape[2] - 1) * self.step_s)

    @property
    def stamps_T(self) -> NDArray[np.float64]:
        """(T,) stamps of the columns, seconds since the epoch."""
        return self.end_s - self.step_s * np.arange(self.values_RMT.shape[2] - 1, -1, -1, dtype=np.float64)

    def unit(self, metric: str) -> str:
        """Return the base unit of a metric, "" where nobody told it."""
        return BY_COLUMN[metric].unit if metric in BY_COLUMN else self.foreign_units.get(metric, "")

    def has(self, metric: str) -> bool:
        """Whether the window carries `metric` at all (it may still be all NaN)."""
        return metric in self.metrics

    def column_RT(self, metric: str) -> NDArray[np.float32]:
        """Return (R, T) values of one metric; raises DataError when the window does not carry it."""
        if metric not in self.metrics:
            raise DataError(f"job {self.job}: no metric {metric!r} here; there are {', '.join(self.metrics)}")
        return self.values_RMT[:, self.metrics.index(metric), :]

    def select(self, metrics: Sequence[str]) -> Window:
        """Return the window with exactly `metrics`, in that order; one that is absent becomes all NaN."""
        R, _, T = self.values_RMT.shape
        values_RMT = np.full((R, len(metrics), T), np.nan, dtype=np.float32)
        for m, metric in enumerate(metrics):
            if metric in self.metrics:
                values_RMT[:, m] = self.column_RT(metric)
        return replace(self, metrics=tuple(metrics), values_RMT=values_RMT)

    def last(self, length_s: float) -> Window:
        """Return the columns of the last `length_s` seconds, at least one."""
        count = max(1, round(length_s / self.step_s))
        return replace(self, values_RMT=self.values_RMT[:, :, -count:])

    def before(self, end_s: float) -> Window:
        """Return the columns stamped at or before `end_s`; raises ValueError when there is none."""
        count = int(np.searchsorted(self.stamps_T, end_s + 1e-6, side="right"))
        if count == 0:
            raise ValueError("nothing lies before that time")
        return replace(self, end_s=float(self.stamps_T[count - 1]), values_RMT=self.values_RMT[:, :, :count])
