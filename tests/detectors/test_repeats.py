"""What an exporter tells again and again was not measured; a rank that hangs, and exporters slower than scrapes, were."""

import numpy as np
import pytest
from numpy.typing import NDArray

from eagleeye.detectors.applicability import REPEATS, without_repeats
from eagleeye.window import Window

R, T, STALE = 8, 30, 3
METRICS = ("gpu_utilization_ratio", "ib_transmit_bytes_per_second")


def window(values_RMT: NDArray[np.float32]) -> Window:
    nodes = tuple(f"n{r // 2}" for r in range(R))
    return Window("j", tuple(range(R)), nodes, ("",) * R, METRICS, 1000.0, 5.0, values_RMT)


def lively() -> NDArray[np.float32]:
    return np.random.default_rng(4).uniform(0.2, 0.8, (R, len(METRICS), T)).astype(np.float32)


def lost(values_RMT: NDArray[np.float32]) -> NDArray[np.bool_]:
    return np.asarray(~np.isfinite(without_repeats(window(values_RMT)).values_RMT))


def test_what_repeats_while_others_change_is_missing_from_the_first_repetition_on() -> None:
    values_RMT = lively()
    values_RMT[STALE, :, 20:] = values_RMT[STALE, :, 19:20]
    assert not lost(values_RMT)[np.arange(R) != STALE].any()
    assert lost(values_RMT)[STALE].any(axis=0).tolist() == [False] * 20 + [True] * 10


def test_missing_rows_between_do_not_hide_it() -> None:
    values_RMT = lively()
    values_RMT[STALE, :, 20:] = values_RMT[STALE, :, 19:20]
    values_RMT[STALE, :, [22, 25]] = np.nan
    assert lost(values_RMT)[STALE, :, 20:].all()


def test_once_is_chance() -> None:
    values_RMT = lively()
    values_RMT[STALE, :, 20 : 19 + REPEATS] = values_RMT[STALE, :, 19:20]
    assert not lost(values_RMT).any()


@pytest.mark.parametrize("level", [0.0, 1.0])
def test_a_rank_that_stands_still_is_no_exporter_that_does(level: float) -> None:
    values_RMT = lively()
    values_RMT[STALE, :, 20:] = level
    assert not lost(values_RMT).any()


def test_one_metric_that_changes_shows_that_it_is_measured() -> None:
    values_RMT = lively()
    values_RMT[STALE, 0, 20:] = values_RMT[STALE, 0, 19]
    assert not lost(values_RMT).any()


def test_exporters_that_are_slower_than_scrapes_are_no_fault() -> None:
    """Each tells a value three times, and all at times of their own."""
    slow_RMT = lively()
    for r in range(R):
        for t in range(T):
            slow_RMT[r, :, t] = slow_RMT[r, :, max(0, t - (t + r) % 3)]
    assert not lost(slow_RMT).any()
