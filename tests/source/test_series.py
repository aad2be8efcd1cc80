"""Raw samples -> columns: rates, ages, joins, ranks that move or fall silent."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagleeye.errors import NoData
from eagleeye.metrics import PREFIX
from eagleeye.source.series import Block, assemble, at_stamps, block_up, jobs_in

NAN = np.nan


def info(node: str, rank: int, job: str = "llm", gpu: str = "0", pid: str = "1") -> tuple[str, dict[str, str]]:
    labels = {"node": node, "training_job": job, "rank": str(rank), "gpu": gpu, "group": "pp0", "pid": pid}
    return PREFIX + "rank_info", labels


def series(name: str, at: list[float], values: list[float], **labels: str):
    return PREFIX + name, labels, np.array(at, dtype=float), np.array(values, dtype=float)


def told(node: str, rank: int, at: list[float], **more: str):
    name, labels = info(node, rank, **more)
    return name, labels, np.array(at, dtype=float), np.ones(len(at))


def column(values: list[float], kind: str, at: list[float] | None = None, step_s: float = 5.0, end_s: float | None = None):
    at_N = np.array(at if at is not None else [step_s * (n + 1) for n in range(len(values))])
    end = at_N[-1] if end_s is None else end_s
    stamps_T = end - step_s * np.arange(len(values) - 1, -1, -1)
    return at_stamps(np.array([values], dtype=float), at_N, stamps_T, kind, step_s)[0]


def test_gauge_is_taken_as_it_is_and_a_missed_scrape_is_nan():
    np.testing.assert_array_equal(column([1, NAN, 3, 4], "gauge"), [1, NAN, 3, 4])


def test_gauge_of_a_scrape_out_of_phase_is_held_but_not_for_long():
    got = column([7, 8], "gauge", at=[1.0, 6.0], end_s=8.0)
    np.testing.assert_array_equal(got, [7, 8])
    assert np.isnan(column([7, 8], "gauge", at=[1.0, 6.0], end_s=14.0)[-1])


def test_later_samples_are_never_used():
    before = column([1, 2, 3, 4], "gauge", end_s=20.0)
    changed = column([1, 2, 3, 999], "gauge", end_s=20.0)
    np.testing.assert_array_equal(before[:3], changed[:3])
    np.testing.assert_array_equal(column([1, 5], "gauge", at=[5.0, 11.0], end_s=10.0), [1, 1])


def test_counter_is_a_rate_and_starts_from_zero_after_a_reset():
    np.testing.assert_allclose(column([100, 150, 20, 70], "counter"), [NAN, 10, 4, 10])


def test_counter_makes_no_rate_across_a_gap():
    np.testing.assert_allclose(column([100, 150, NAN, 250, 300], "counter"), [NAN, 10, NAN, NAN, 10])


def test_counter_scraped_oftener_than_the_step_is_averaged_over_the_column():
    at = [float(s) for s in range(1, 11)]
    got = at_stamps(np.array([[s * s for s in at]]), np.array(at), np.array([5.0, 10.0]), "counter", 5.0)[0]
    assert got[1] == pytest.approx((100 - 25) / 5)


def test_timestamp_becomes_an_age_and_zero_means_never():
    np.testing.assert_array_equal(column([3, 3, 0, NAN], "timestamp"), [2, 7, NAN, NAN])
    assert column([7], "timestamp")[0] == 0.0, "a clock that runs ahead makes no negative age"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.just(NAN), st.floats(0, 1e12)), min_size=2, max_size=20),
    st.lists(st.floats(0.5, 12), min_size=20, max_size=20),
)
def test_rates_are_finite_and_never_negative_and_add_up(rises, gaps):
    values = np.cumsum(np.nan_to_num(np.array(rises)))
    values[np.isnan(rises)] = NAN
    at = np.cumsum(gaps[: len(rises)])
    stamps = at[-1] - 5.0 * np.arange(9, -1, -1)
    rate = at_stamps(values[None], at, stamps, "counter", 5.0)[0]
    known = rate[np.isfinite(rate)]
    assert (known >= 0).all()
    shortest = np.min(gaps[: len(rises)])
    assert (known <= (np.nanmax(values, initial=0.0) + 1) / shortest * (1 + 1e-9)).all()


@settings(max_examples=200, deadline=None)
@given(st.floats(0.01, 1e6), st.floats(-0.4, 0.4), st.integers(3, 30))
def test_a_steady_counter_has_its_rate_whatever_the_phase(rate, phase, count):
    at = 5.0 * np.arange(1, count + 1) + phase
    got = at_stamps((rate * at)[None], at, 5.0 * np.arange(3, count + 1), "counter", 5.0)[0]
    np.testing.assert_allclose(got, rate, rtol=1e-6)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=20), st.floats(0, 4))
def test_ages_are_never_negative_and_grow_by_the_step_while_nothing_happens(steps, phase):
    at = 5.0 * np.arange(1, len(steps) + 1)
    happened = np.minimum(np.cumsum(steps) + 1e-3, at)
    age = at_stamps(happened[None], at, at + phase / 10, "timestamp", 5.0)[0]
    assert (age >= 0).all()
    still = np.diff(happened) == 0
    np.testing.assert_allclose(np.diff(age)[still], 5.0)


AT = [5.0, 10.0, 15.0, 20.0]


def test_series_of_gpu_node_and_rank_reach_their_ranks():
    blocks = block_up(
        [
            told("n0", 0, AT, gpu="0"),
            told("n0", 1, AT, gpu="1"),
            told("n1", 2, AT, gpu="GPU-c"),
            series("gpu_power_watts", AT, [300, 301, 302, 303], node="n0", gpu="0", uuid="GPU-a"),
            series("gpu_power_watts", AT, [400, 401, 402, 403], node="n0", gpu="1", uuid="GPU-b"),
            series("gpu_power_watts", AT, [500, 501, 502, 503], node="n1", gpu="0", uuid="GPU-c"),
            series("infiniband_port_data_transmitted_bytes_total", AT, [0, 50, 100, 150], node="n0", device="a", port="1"),
            series("infiniband_port_data_transmitted_bytes_total", AT, [0, 5, 10, 15], node="n0", device="b", port="1"),
            series("infiniband_port_up", AT, [1, 1, 1, 1], node="n0", device="a", port="1"),
            series("infiniband_port_up", AT, [1, 1, 0, 0], node="n0", device="b", port="1"),
            series("train_step_timestamp_seconds", AT, [4, 9, 14, 14], node="n1", training_job="llm", rank="2"),
            series("train_step_timestamp_seconds", AT, [1, 1, 1, 1], node="n1", training_job="other", rank="2"),
        ]
    )
    window = assemble("llm", blocks, 20.0, 20.0, 5.0)
    assert (window.ranks, window.nodes, window.groups) == ((0, 1, 2), ("n0", "n0", "n1"), ("pp0",) * 3)
    np.testing.assert_array_equal(window.column_RT("gpu_power_watts")[:, -1], [303, 403, 503])
    np.testing.assert_allclose(window.column_RT("ib_transmit_bytes_per_second")[:, -1], [11, 11, NAN])
    np.testing.assert_array_equal(window.column_RT("ib_port_up")[0], [1, 1, 0, 0])
    np.testing.assert_array_equal(window.column_RT("train_step_age_seconds")[2], [1, 1, 1, 6])
    assert np.isnan(window.column_RT("train_step_age_seconds")[:2]).all()
    assert window.values_RMT.dtype == np.float32


def test_error_lines_are_summed_and_told_apart_by_class():
    counts = {"hardware": 1.0, "communication": 2.0, "error": 4.0}
    blocks = block_up(
        [told("n0", 0, AT), *(series("log_window_errors", AT, [n] * 4, node="n0", **{"class": c}) for c, n in counts.items())]
    )
    window = assemble("llm", blocks, 20.0, 5.0, 5.0)
    got = {name: float(window.column_RT(name)[0, -1]) for name in window.metrics}
    assert got == {"log_errors": 7.0, "log_hardware_errors": 1.0, "log_communication_errors": 2.0}


def test_a_rank_that_moves_takes_each_column_from_where_it_was():
    power = [
        series("gpu_power_watts", AT, [100.0] * 4, node="n0", gpu="0", uuid="a"),
        series("gpu_power_watts", AT, [200.0] * 4, node="n1", gpu="0", uuid="b"),
    ]
    moved = assemble("llm", block_up([told("n0", 0, AT[:2]), told("n1", 0, AT[2:]), *power]), 20.0, 20.0, 5.0)
    assert moved.nodes == ("n1",)
    np.testing.assert_array_equal(moved.column_RT("gpu_power_watts")[0], [100, 100, 200, 200])
    # the old node still lists the dead process
    both = assemble("llm", block_up([told("n0", 0, AT), told("n1", 0, AT[2:]), *power]), 20.0, 20.0, 5.0)
    assert both.nodes == ("n1",)
    np.testing.assert_array_equal(both.column_RT("gpu_power_watts")[0], [100, 100, 200, 200])


@pytest.mark.parametrize("swap", [False, True])
def test_the_old_node_that_still_tells_of_a_dead_process_does_not_win(swap):
    """Both are told of during the whole window, so only `process_up` says which is the living one."""
    nodes = ("n1", "n0") if swap else ("n0", "n1")
    parts = []
    for node, up in zip(nodes, (0.0, 1.0), strict=True):
        parts += [told(node, 0, AT), series("process_up", AT, [up] * 4, node=node, training_job="llm", rank="0")]
    window = assemble("llm", block_up(parts), 20.0, 20.0, 5.0)
    assert window.nodes == (nodes[1],)
    np.testing.assert_array_equal(window.column_RT("process_up"), [[1, 1, 1, 1]])


def test_a_rank_that_died_and_nowhere_else_began_keeps_its_place():
    up = series("process_up", AT, [1, 1, 0, 0], node="n0", training_job="llm", rank="0")
    window = assemble("llm", block_up([told("n0", 0, AT), up]), 20.0, 20.0, 5.0)
    np.testing.assert_array_equal(window.column_RT("process_up"), [[1, 1, 0, 0]])


def test_a_rank_whose_exporter_fell_silent_stays_with_nan():
    at = [5.0 * n for n in range(1, 13)]
    blocks = block_up(
        [
            told("n0", 0, at),
            told("n1", 1, at[:3]),
            series("gpu_power_watts", at, [300.0] * 12, node="n0", gpu="0", uuid="a"),
            series("gpu_power_watts", at[:3], [300.0] * 3, node="n1", gpu="0", uuid="b"),
        ]
    )
    window = assemble("llm", blocks, 60.0, 20.0, 5.0, forget_s=60.0)
    assert window.nodes == ("n0", "n1")
    assert np.isnan(window.column_RT("gpu_power_watts")[1]).all()
    assert np.isfinite(window.column_RT("gpu_power_watts")[0]).all()
    assert assemble("llm", blocks, 60.0, 20.0, 5.0, forget_s=30.0).ranks == (0,)


def test_order_of_series_does_not_matter_and_what_comes_after_the_end_neither():
    parts = [
        told("n0", 0, AT),
        told("n1", 1, AT),
        series("gpu_power_watts", AT, [1, 2, 3, 4], node="n0", gpu="0", uuid="a"),
        series("process_cpu_seconds_total", AT, [1, 2, 3, 4], node="n1", training_job="llm", rank="1"),
    ]
    one = assemble("llm", block_up(parts), 15.0, 10.0, 5.0)
    two = assemble("llm", block_up(parts[::-1]), 15.0, 10.0, 5.0)
    early = assemble("llm", block_up([(n, lab, at[:3], v[:3]) for n, lab, at, v in parts]), 15.0, 10.0, 5.0)
    for other in (two, early):
        assert (one.ranks, one.metrics) == (other.ranks, other.metrics)
        np.testing.assert_array_equal(one.values_RMT, other.values_RMT)


def test_an_unknown_job_is_one_sentence_that_names_the_others():
    blocks = block_up([told("n0", 0, AT, job="llm"), told("n0", 1, AT, job="vit")])
    with pytest.raises(NoData, match=r"'lllm'.*; there are llm, vit"):
        assemble("lllm", blocks, 20.0, 20.0, 5.0)
    with pytest.raises(NoData, match="is an exporter running"):
        assemble("llm", [], 20.0, 20.0, 5.0)
    assert jobs_in(blocks) == ("llm", "vit")
    assert jobs_in(blocks, after_s=20.0) == ()


def test_block_up_puts_equal_instants_together():
    blocks = block_up([told("a", 0, AT), told("b", 1, AT), told("c", 2, AT[:2])])
    assert sorted(len(b.names) for b in blocks) == [1, 2]
    assert all(isinstance(b, Block) and b.values_SN.shape == (len(b.names), b.at_N.size) for b in blocks)
