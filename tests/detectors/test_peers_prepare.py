"""Differences to peers, permanent offsets, gaps and single scrapes."""

import dataclasses

import numpy as np
import pytest

from eagleeye.detectors import peers
from eagleeye.errors import NoData
from eagleeye.window import Window


def tiny(values_RT, groups=None, metric="gpu_power_watts"):
    values_RT = np.array(values_RT, dtype=np.float32)
    R = len(values_RT)
    return Window(
        "j", tuple(range(R)), tuple(f"n{r}" for r in range(R)), groups or ("",) * R, (metric,), 1e9, 5.0, values_RT[:, None, :]
    )


def unit_scale(metric="gpu_power_watts"):
    return peers.Scale((metric,), np.array([1.0]))


def test_a_difference_is_to_the_median_of_the_peers():
    found = peers.differences_RMT(tiny([[1.0], [2.0], [9.0]]))
    np.testing.assert_array_equal(found[:, 0, 0], [-1.0, 0.0, 7.0])


def test_missing_peers_do_not_shift_the_median():
    found = peers.differences_RMT(tiny([[1.0], [2.0], [np.nan], [9.0]]))
    np.testing.assert_array_equal(found[:, 0, 0], [-1.0, 0.0, np.nan, 7.0])


def test_groups_have_medians_of_their_own_and_small_ones_have_none():
    window = tiny([[1.0], [2.0], [3.0], [100.0], [200.0]], groups=("a", "a", "a", "b", "b"))
    np.testing.assert_array_equal(peers.differences_RMT(window)[:, 0, 0], [-1.0, 0.0, 1.0, np.nan, np.nan])


def test_offsets_are_what_a_rank_always_lies_off():
    window = tiny([[5.0, 5.0, 95.0], [4.0, 4.0, 4.0], [3.0, 3.0, 3.0]])
    np.testing.assert_array_equal(peers.offsets_RM(window)[:, 0], [1.0, 0.0, -1.0])


def test_the_offset_of_what_was_never_observed_is_unknown():
    window = tiny([[5.0] * 3, [4.0] * 3, [np.nan] * 3, [3.0] * 3])
    np.testing.assert_array_equal(peers.offsets_RM(window)[:, 0], [1.0, 0.0, np.nan, -1.0])
    later = tiny([[5.0] * 6, [4.0] * 6, [9.0] * 6, [3.0] * 6])
    prepared = peers.prepare(later, unit_scale(), peers.offsets_RM(window))
    np.testing.assert_array_equal(np.isnan(prepared.values_RMT).any(axis=(1, 2)), [False, False, True, False])


def test_prepared_values_are_free_of_offsets_and_units():
    window = tiny([[5.0] * 6, [4.0] * 6, [3.0] * 6])
    scale = peers.Scale(("gpu_power_watts",), np.array([2.0]))
    np.testing.assert_array_equal(peers.prepare(window, scale, np.zeros((3, 1), np.float32)).values_RMT[:, 0, -1], [0.5, 0, -0.5])
    assert not peers.prepare(window, scale, peers.offsets_RM(window)).values_RMT.any()


def test_a_single_odd_scrape_vanishes_and_two_do_not():
    zero = [0.0] * 9
    once, twice = [0.0] * 6 + [9.0, 0.0, 0.0], [0.0] * 6 + [9.0, 9.0, 0.0]
    no_offset = np.zeros((4, 1), np.float32)
    assert not peers.prepare(tiny([once, zero, zero, zero]), unit_scale(), no_offset).values_RMT.any()
    assert peers.prepare(tiny([twice, zero, zero, zero]), unit_scale(), no_offset).values_RMT[0].max() == 9.0


def test_a_gap_is_bridged_by_what_came_before():
    row = [3.0, 3.0, np.nan, np.nan, 3.0, 3.0]
    zero = [0.0] * 6
    prepared = peers.prepare(tiny([row, zero, zero, zero]), unit_scale(), np.zeros((4, 1), np.float32))
    np.testing.assert_array_equal(prepared.values_RMT[0, 0], [3.0] * 6)


@pytest.mark.parametrize(
    "row",
    [[3.0, np.nan, np.nan, np.nan, np.nan, 3.0], [3.0, 3.0, 3.0, np.nan, np.nan, np.nan]],
    ids=["mostly absent", "absent now"],
)
def test_what_is_mostly_or_now_absent_is_unknown(row):
    zero = [0.0] * 6
    prepared = peers.prepare(tiny([row, zero, zero, zero]), unit_scale(), np.zeros((4, 1), np.float32))
    assert np.isnan(prepared.values_RMT[0]).all()
    assert not np.isnan(prepared.values_RMT[1:]).any()


def test_the_scale_has_a_floor_of_one_percent_of_the_peak():
    steady = tiny(np.full((4, 50), 1000.0))
    assert peers.fit_scale([steady]).scale_M[0] == pytest.approx(10.0)


def test_the_scale_of_a_metric_that_is_zero_has_an_absolute_floor():
    quiet = tiny(np.zeros((4, 50)), metric="ib_port_errors_per_second")
    assert peers.fit_scale([quiet]).scale_M[0] == pytest.approx(0.2)


def test_three_degrees_between_boards_are_noise():
    steady = tiny(np.full((4, 50), 60.0), metric="gpu_temperature_celsius")
    assert peers.fit_scale([steady]).scale_M[0] == pytest.approx(3.0)


def test_the_scale_is_a_robust_standard_deviation():
    noise = np.random.default_rng(0).normal(100.0, 20.0, (40, 500))
    assert peers.fit_scale([tiny(noise)]).scale_M[0] == pytest.approx(20.0, rel=0.05)


def test_facts_for_rules_are_not_compared():
    window = dataclasses.replace(tiny(np.zeros((3, 5))), metrics=("train_step_count",))
    assert peers.compared(window) == ()
    assert peers.compared(dataclasses.replace(window, metrics=("never_seen",))) == ("never_seen",)


@pytest.mark.parametrize(
    ("metric", "is_compared"),
    [
        ("train_step_seconds", False),  # one slow rank slows every rank's step
        ("gpu_memory_used_bytes", False),  # ranks of one job may hold different shards
        ("gpu_sm_clock_hertz", True),
        ("gpu_temperature_celsius", True),
        ("gpu_power_watts", True),
        ("train_compute_seconds", True),
    ],
)
def test_what_sets_healthy_ranks_apart_is_not_compared(metric, is_compared):
    assert peers.compared(tiny(np.zeros((3, 5)), metric=metric)) == ((metric,) if is_compared else ())


@pytest.mark.parametrize("values", [np.zeros((2, 50)), np.full((4, 50), np.nan)], ids=["two ranks", "nothing observed"])
def test_without_peers_or_values_nothing_is_learned(values):
    with pytest.raises(NoData, match="nobody can be compared"):
        peers.fit_scale([tiny(values)])
