"""Small windows and streams for everything that judges."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from eagleeye.window import Window

Columns = Mapping[str, Sequence[float] | Sequence[Sequence[float]]]


def _facts(
    columns: Columns, nodes: Sequence[str] | None = None, step_s: float = 5.0, T: int = 6, end_s: float = 1000.0
) -> Window:
    R = len(next(iter(columns.values())))
    names = tuple(columns)
    values_RMT = np.full((R, len(names), T), math.nan, dtype=np.float32)
    for m, name in enumerate(names):
        for r, given in enumerate(columns[name]):
            values_RMT[r, m] = given
    places = tuple(nodes or [f"n{r}" for r in range(R)])
    return Window("llm", tuple(range(R)), places, ("all",) * R, names, end_s, step_s, values_RMT)


@pytest.fixture
def facts() -> Callable[..., Window]:
    """Return a function that makes a window out of one value a rank, or T values a rank, for each column."""
    return _facts


class Stream:
    """A healthy job of `R` ranks whose columns a test bends; `window(t)` ends with column t."""

    def __init__(self, R: int = 8, T: int = 400, step_s: float = 1.0, per_node: int = 2, seed: int = 0) -> None:
        noise = np.random.default_rng(seed)
        self.job, self.step_s, self.start_s = "llm", step_s, 1_770_000_000.0
        self.ranks = tuple(range(R))
        self.nodes = tuple(f"n{r // per_node}" for r in range(R))
        self.columns: dict[str, NDArray[np.float32]] = {
            name: (level * (1 + spread * noise.standard_normal((R, T)))).astype(np.float32)
            for name, level, spread in (
                ("gpu_utilization_ratio", 0.95, 0.01),
                ("gpu_power_watts", 600.0, 0.01),
                ("gpu_sm_clock_hertz", 1.4e9, 0.005),
                ("ib_transmit_bytes_per_second", 2e10, 0.02),
            )
        }

    def window(self, t: int, length_s: float = math.inf) -> Window:
        count = int(min(t + 1, length_s // self.step_s))
        values_RMT = np.stack([column[:, t + 1 - count : t + 1] for column in self.columns.values()], axis=1)
        groups = ("all",) * len(self.ranks)
        return Window(
            self.job, self.ranks, self.nodes, groups, tuple(self.columns), self.start_s + t * self.step_s, self.step_s, values_RMT
        )


@pytest.fixture(scope="session")
def stream() -> Callable[..., Stream]:
    """Return the class of healthy jobs."""
    return Stream
