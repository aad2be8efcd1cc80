"""Small synthetic jobs: steady ranks with permanent differences of their own, and faults that are put into them."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from eagleeye.window import Window

METRICS = ("gpu_power_watts", "gpu_sm_clock_hertz", "ib_transmit_bytes_per_second")
LEVELS = (400.0, 1.4e9, 2e10)


def make_job(ranks: int = 8, points: int = 160, seed: int = 0, per_node: int = 2, job: str = "j") -> Window:
    """A busy job: noise of half a percent around levels that differ by two percent from rank to rank, for ever."""
    rng = np.random.default_rng(seed)
    levels_M = np.array(LEVELS)
    values_RMT = levels_M[None, :, None] * (
        1 + 0.02 * rng.standard_normal((ranks, 3, 1)) + 0.005 * rng.standard_normal((ranks, 3, points))
    )
    nodes = tuple(f"n{r // per_node}" for r in range(ranks))
    return Window(
        job, tuple(range(ranks)), nodes, ("",) * ranks, METRICS, 1_700_000_000.0 + 5 * points, 5.0, values_RMT.astype(np.float32)
    )


def altered(window: Window, change: Callable[[np.ndarray], None]) -> Window:
    """The window with `change` applied to a copy of its values."""
    values_RMT = window.values_RMT.copy()
    change(values_RMT)
    return dataclasses.replace(window, values_RMT=values_RMT)


@pytest.fixture(scope="session")
def job() -> Callable[..., Window]:
    return make_job


@pytest.fixture(scope="session")
def alter() -> Callable[[Window, Callable[[np.ndarray], None]], Window]:
    return altered
