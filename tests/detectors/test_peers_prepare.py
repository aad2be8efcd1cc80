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


def naive_median(values):
    seen = sorted(v for v in values if not np.isnan(v))
    if not seen:
        return np.float32(np.nan)
    return np.float32(seen[(len(seen) - 1) // 2] + seen[len(seen) // 2]) / np.float32(2)


def naive_differences(window):
    out_RMT = np.full(window.values_RMT.shape, np.nan, dtype=np.float32)
    for group in set(window.groups):
        members = [r for r, g in enumerate(window.groups) if g == group]
        for m in range(len(window.metrics)):
            for t in range(window.values_RMT.shape[2]):
                middle = naive_median(window.values_RMT[members, m, t])
                if len(members) >= 3:
                    out_RMT[members, m, t] = window.values_RMT[members, m, t] - middle
    return out_RMT


def naive_prepare(window, scale, offset_RM, jump_GM=None):
    """One rank, one metric, one instant after the other."""
    window = window.select(scale.metrics)
    difference_RMT = naive_differences(window)
    order = list(dict.fromkeys(window.groups))
    R, M, T = difference_RMT.shape
    count = 5 if window.step_s < 2.5 else 3
    out_RMT = np.full((R, M, T), np.nan, dtype=np.float32)
    for r in range(R):
        for m in range(M):
            away = difference_RMT[r, m] - offset_RM[r, m]
            if jump_GM is not None:
                members = [i for i, g in enumerate(window.groups) if g == window.groups[r]]
                middle = [naive_median(window.values_RMT[members, m, t]) for t in range(T)]
                for t in range(T):
                    changes = [abs(middle[i] - middle[i - 1]) for i in (t, t + 1) if 0 < i < T]
                    excess = max([c - jump_GM[order.index(window.groups[r]), m] for c in changes if np.isfinite(c)], default=0.0)
                    away[t] = np.sign(away[t]) * max(abs(away[t]) - max(excess, 0.0), 0.0) if np.isfinite(away[t]) else away[t]
            row = away / np.float32(scale.scale_M[m])
            seen = [t for t in range(T) if np.isfinite(row[t])]
            if 2 * len(seen) < T or not any(t >= T - 3 for t in seen):
                continue
            for t in range(T):
                past = [row[i] for i in seen if i <= t][-count:]
                past = [row[seen[0]]] * (count - len(past)) + past
                out_RMT[r, m, t] = sorted(past)[count // 2]
            out_RMT[r, m, : count - 1] = out_RMT[r, m, min(count, T) - 1]
    return out_RMT


@pytest.mark.parametrize("seed", range(40))
def test_everything_equals_the_obvious_code(seed):
    """To the last bit, for jobs of any shape with gaps: that many ranks are sorted side by side must not show."""
    rng = np.random.default_rng(seed)
    R, M, T = int(rng.integers(1, 40)), int(rng.integers(1, 4)), int(rng.integers(1, 40))
    values_RMT = rng.normal(100, 1, (R, M, T)).astype(np.float32).round(seed % 3)
    values_RMT[rng.random((R, M, T)) < (0, 0.05, 0.4, 0.8)[seed % 4]] = np.nan
    metrics = tuple(f"m{m}" for m in range(M))
    groups = tuple(rng.choice(["a", "b", "c"], R))
    step_s = (1.0, 5.0)[seed % 2]
    window = Window("j", tuple(range(R)), ("n",) * R, groups, metrics, 1e9, step_s, values_RMT)
    difference_RMT = naive_differences(window)
    offset_RM = np.array([[naive_median(difference_RMT[r, m]) for m in range(M)] for r in range(R)])
    np.testing.assert_array_equal(peers.differences_RMT(window), difference_RMT)
    np.testing.assert_array_equal(peers.offsets_RM(window), offset_RM)
    names = [*rng.permutation(metrics), "absent"]
    scale = peers.Scale(tuple(str(n) for n in names), rng.random(M + 1) + 0.1)
    offset_RM = peers.offsets_RM(window.select(scale.metrics))
    np.testing.assert_array_equal(peers.prepare(window, scale, offset_RM).values_RMT, naive_prepare(window, scale, offset_RM))


@pytest.mark.parametrize("R", [3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097])
def test_medians_of_any_number_of_ranks(R):
    values_RT = np.random.default_rng(R).normal(0, 1, (R, 3)).astype(np.float32)
    window = tiny(values_RT)
    middle_T = (values_RT - peers.differences_RMT(window)[:, 0])[0]
    np.testing.assert_allclose(middle_T, np.median(values_RT, axis=0), rtol=1e-5, atol=1e-6)


def staged(stages=4, per_stage=16, points=120, seed=0, same_shape=False, noise=1.0):
    """A job whose stages send at moments of their own, or all at once, on nodes of eight ranks."""
    rng = np.random.default_rng(seed)
    stage_R = np.repeat(np.arange(stages), per_stage)
    R = len(stage_R)
    beats_ST = 3 * rng.normal(0, 1, (stages, points))
    shape_RT = beats_ST[0][None] if same_shape else beats_ST[stage_R]
    values_RMT = np.stack(
        [
            200 + 20 * stage_R[:, None] + 5 * rng.normal(0, 1, (R, 1)) + shape_RT + noise * rng.normal(0, 1, (R, points)),
            60 + rng.normal(0, 1, (R, points)),
        ],
        axis=1,
    ).astype(np.float32)
    nodes = tuple(f"n{r // 8}" for r in range(R))
    metrics = ("traffic", "heat")
    return Window("j", tuple(range(R)), nodes, ("",) * R, metrics, 1e9, 5.0, values_RMT), stage_R


def same_partition(names, numbers_R):
    return len(set(zip(names, numbers_R, strict=True))) == len(set(names)) == len(set(numbers_R))


@pytest.mark.parametrize("seed", range(5))
def test_stages_that_work_at_moments_of_their_own_are_roles(seed):
    window, stage_R = staged(seed=seed)
    found = peers.roles(window)
    assert same_partition(found, stage_R)
    assert found[0] == "role 1"


def test_roles_follow_their_ranks_in_any_order():
    window, stage_R = staged()
    order = np.random.default_rng(1).permutation(len(stage_R))
    nodes = tuple(window.nodes[i] for i in order)
    mixed = dataclasses.replace(window, nodes=nodes, values_RMT=window.values_RMT[order])
    assert same_partition(peers.roles(mixed), stage_R[order])


@pytest.mark.parametrize("seed", range(5))
def test_levels_alone_are_no_roles(seed):
    """Boards and stages differ in level for ever; that is what offsets are for."""
    window, _ = staged(seed=seed, same_shape=True)
    assert peers.roles(window) == window.groups


@pytest.mark.parametrize("per_stage", [2, 8])
def test_ranks_of_one_node_are_no_role(per_stage):
    """A sick node must not become a normal of its own."""
    window, _ = staged(stages=4, per_stage=per_stage)
    assert peers.roles(window) == window.groups


def test_a_sick_rank_does_not_hide_the_roles_and_joins_one():
    window, stage_R = staged()
    values_RMT = window.values_RMT.copy()
    values_RMT[5, 0] += np.random.default_rng(3).normal(0, 40, values_RMT.shape[2]).astype(np.float32)
    found = np.array(peers.roles(dataclasses.replace(window, values_RMT=values_RMT)))
    assert same_partition(np.delete(found, 5), np.delete(stage_R, 5))


def test_what_only_half_of_the_stretch_shows_is_no_role():
    window, _ = staged()
    even, _ = staged(same_shape=True)
    values_RMT = np.concatenate([window.values_RMT[:, :, :60], even.values_RMT[:, :, 60:]], axis=2)
    assert peers.roles(dataclasses.replace(window, values_RMT=values_RMT)) == window.groups


def test_roles_of_a_job_that_tells_its_own_are_those():
    window, stage_R = staged()
    told = tuple(f"stage {s // 2}" for s in stage_R)
    assert peers.roles(dataclasses.replace(window, groups=told)) == told


@pytest.mark.parametrize("points", [1, 20])
def test_a_short_stretch_shows_no_roles(points):
    window, _ = staged(points=points)
    assert peers.roles(window) == window.groups


@pytest.mark.parametrize("value", [np.nan, 7.0])
def test_ranks_that_never_differ_have_no_roles(value):
    window, _ = staged()
    assert peers.roles(dataclasses.replace(window, values_RMT=np.full_like(window.values_RMT, value))) == window.groups


def test_roles_of_more_ranks_than_are_compared_in_pairs():
    window, stage_R = staged(stages=4, per_stage=256, points=60)
    assert same_partition(peers.roles(window), stage_R)


def test_silent_ranks_are_no_role():
    window, _ = staged(same_shape=True)
    values_RMT = window.values_RMT.copy()
    values_RMT[8:24] = np.nan
    assert peers.roles(dataclasses.replace(window, values_RMT=values_RMT)) == window.groups


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


def test_a_change_of_everybody_explains_who_is_scraped_a_moment_later():
    """The whole job falls by 60, more than it ever did; one rank shows it an instant later. Another one really differs."""
    late, odd, on_time = [80.0] * 6 + [80.0, 20.0, 20.0], [80.0] * 3 + [65.0] * 6, [80.0] * 6 + [20.0] * 3
    window = tiny([late, on_time, on_time, on_time, on_time])
    no_offset, usual = np.zeros((5, 1), np.float32), np.full((1, 1), 5.0, np.float32)
    assert not peers.prepare(window, unit_scale(), no_offset, usual).values_RMT[:, :, -1].any()
    steady = tiny([odd, *[[80.0] * 9] * 4])
    np.testing.assert_array_equal(peers.prepare(steady, unit_scale(), no_offset, usual).values_RMT[0, 0, -3:], [-15.0] * 3)


@pytest.mark.parametrize("seed", range(3))
def test_jumps_are_the_largest_changes_of_medians(seed):
    values_RT = np.random.default_rng(seed).normal(0, 1, (6, 20)).round(3).astype(np.float32)
    middle_GT = np.stack([np.median(values_RT[:3], axis=0), np.median(values_RT[3:], axis=0)])
    window = tiny(values_RT, groups=("a",) * 3 + ("b",) * 3)
    np.testing.assert_allclose(peers.jumps_GM(window)[:, 0], np.abs(np.diff(middle_GT, axis=1)).max(axis=1), rtol=1e-5)


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
