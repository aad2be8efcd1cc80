"""Peer deviation: the side that counts, bursts, horizons, and when it says nothing."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from eagleeye.detectors.base import Model
from eagleeye.detectors.peer_deviation import CLIP, PeerDeviation
from eagleeye.window import Window

SICK = 2
FLAT: Model = {"threshold_1_M": np.full(1, 6.0), "threshold_6_M": np.full(1, 5.0), "threshold_24_M": np.full(1, 4.0)}


def deviations(values_T: Sequence[float], metric: str = "gpu_power_watts", R: int = 4, groups: Sequence[str] = ()) -> Window:
    """A prepared window (robust standard deviations from the peers) in which only rank SICK shows anything."""
    values_RMT = np.zeros((R, 1, len(values_T)), np.float32)
    values_RMT[min(SICK, R - 1), 0] = values_T
    nodes = tuple(f"n{r}" for r in range(R))
    return Window("j", tuple(range(R)), nodes, tuple(groups) or ("",) * R, (metric,), 1000.0, 5.0, values_RMT)


def score(window: Window) -> NDArray[np.float64]:
    return PeerDeviation().score(FLAT, window).score_R


@pytest.mark.parametrize(
    ("metric", "high", "low"),
    [
        ("gpu_temperature_celsius", True, False),
        ("gpu_sm_clock_hertz", False, True),
        ("ib_transmit_bytes_per_second", False, True),
        ("ib_port_errors_per_second", True, False),
        ("network_retransmits_per_second", True, False),
        ("process_run_wait_ratio", True, False),
        ("collective_wait_ratio", False, True),
        ("gpu_power_watts", True, True),
        ("gpu_utilization_ratio", True, True),
        ("a_metric_that_nobody_knows", True, True),
    ],
)
def test_only_the_side_of_the_peers_counts_on_which_sick_ranks_lie(metric: str, high: bool, low: bool) -> None:
    for sign, counts in ((1.0, high), (-1.0, low)):
        score_R = score(deviations([9.0 * sign] * 30, metric))
        assert score_R[SICK] == (pytest.approx(9.0 / 6.0) if counts else 0.0)
        np.testing.assert_array_equal(np.delete(score_R, SICK), 0.0)


def test_each_horizon_is_a_mean_over_so_many_newest_instants() -> None:
    lasting = [0.0] * 6 + [4.8] * 24
    assert score(deviations(lasting))[SICK] == pytest.approx(4.8 / 4.0), "the longest horizon is the strictest on what lasts"
    assert score(deviations([0.0] * 24 + [4.8] * 6))[SICK] == pytest.approx(4.8 / 5.0)
    assert score(deviations([0.0] * 29 + [4.8]))[SICK] == pytest.approx(4.8 / 6.0)
    assert score(deviations([4.8] * 6))[SICK] == pytest.approx(4.8 / 5.0), "a window too short for a horizon has the others"
    assert score(deviations([5.0] * 6 + [0.0] * 24))[SICK] == 0.0, "what is over is over"


def test_ups_and_downs_cancel_in_a_mean_of_a_metric_whose_sides_both_count() -> None:
    assert score(deviations([4.8, -4.8] * 15))[SICK] == pytest.approx(4.8 / 6.0)


def test_a_burst_however_large_is_no_lasting_deviation() -> None:
    over = score(deviations([0.0] * 24 + [1e6] * 2 + [0.0] * 4))[SICK]
    assert over == pytest.approx(2 * CLIP / 24 / 4.0), "the newest half of the six instants is well again"
    assert score(deviations([0.0] * 29 + [1e6]))[SICK] == pytest.approx(1e6 / 6.0), "while it is there it is told"


def test_ups_and_downs_cancel_also_where_one_side_counts() -> None:
    assert score(deviations([-4.8, 4.8] * 15, "ib_transmit_bytes_per_second"))[SICK] == 0.0


def test_no_horizon_is_longer_than_four_minutes() -> None:
    over = deviations([4.8] * 22 + [0.0] * 8)
    assert score(over)[SICK] > 0.0, "at 5 s the mean of the newest 24 knows of it"
    assert score(replace(over, step_s=30.0))[SICK] == 0.0, "at 30 s it is four minutes ago"


def test_the_worst_metric_speaks() -> None:
    both = np.zeros((4, 2, 30), np.float32)
    both[SICK, 0], both[SICK, 1] = 3.0, -9.0
    metrics = ("gpu_power_watts", "gpu_sm_clock_hertz")
    window = Window("j", (0, 1, 2, 3), ("a", "b", "c", "d"), ("",) * 4, metrics, 1000.0, 5.0, both)
    model = {name: np.repeat(value, 2) for name, value in FLAT.items()}
    said = PeerDeviation().score(model, window)
    assert (said.score_R[SICK], said.evidence[SICK]) == (pytest.approx(1.5), "gpu_sm_clock_hertz")


def test_a_rank_that_is_not_observed_now_is_not_judged() -> None:
    score_R = score(deviations([9.0] * 29 + [math.nan]))
    assert math.isnan(score_R[SICK])
    assert np.isfinite(np.delete(score_R, SICK)).all()


def test_two_ranks_of_a_role_cannot_say_who_is_right() -> None:
    for window in (deviations([9.0] * 30, R=2), deviations([9.0] * 30, groups=("a", "a", "b", "b"))):
        said = PeerDeviation().score(FLAT, window)
        assert (said.fired, said.abstained) == (None, "needs 3 ranks that do the same work")
        assert np.isnan(said.score_R).all()
    assert PeerDeviation().score(FLAT, deviations([9.0] * 30, R=3)).fired


def test_thresholds_are_twice_what_held_out_work_reached_and_never_below_the_floor() -> None:
    quiet, loud = deviations([0.5] * 30), deviations([7.0] * 30)
    assert {k: v.tolist() for k, v in PeerDeviation().fit([], [quiet]).items()} == {k: v.tolist() for k, v in FLAT.items()}
    model = PeerDeviation().fit([], [quiet, loud])
    assert model["threshold_1_M"].tolist() == [14.0]
    assert model["threshold_24_M"].tolist() == [2 * CLIP]
    assert PeerDeviation().score(model, loud).score_R[SICK] == pytest.approx(0.5), "what is normal stays at half"
