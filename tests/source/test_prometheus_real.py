"""A real Prometheus between exporters and windows: the same as when they are scraped directly."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from eagleeye.clock import ManualClock, SystemClock
from eagleeye.errors import NoData, SourceUnavailable
from eagleeye.source.base import Settings, open_source
from eagleeye.source.exporters import ExporterSource

pytestmark = pytest.mark.slow  # Prometheus scrapes for the first time five seconds after its start

STEP_S = 0.5
TICKS = 14


@pytest.fixture(scope="module")
def scene(exporters, prometheus_server):
    """Two nodes read both ways for some seconds: one counter is reset, one exporter dies, one rank moves."""
    clock = SystemClock()
    nodes = [exporters(f"node.{n}") for n in range(3)]
    start_s = clock.now_s()

    def since():
        return time.time() - start_s

    for rank, node in enumerate(nodes[:2]):
        node.rank(rank, "llm", gpu="0")
        node.set("gpu_power_watts", lambda: 300 + 10 * since(), gpu="0", uuid=f"u{rank}")
        node.set("infiniband_port_data_transmitted_bytes_total", lambda: 1e9 * since(), device="mlx0", port="1")
        node.set("network_errors_total", 0.0, device="eth0")
        node.set("train_step_timestamp_seconds", start_s, training_job="llm", rank=str(rank))
        node.set("log_window_errors", 3.0, **{"class": "error"})
        node.set("log_window_errors", 1.0, **{"class": "hardware"})
    nodes[2].rank(7, "vit")
    server = prometheus_server([n.address for n in nodes], STEP_S)
    ring = ExporterSource(Settings(targets=tuple(n.address for n in nodes), interval_s=STEP_S, forget_s=60.0))
    first_s = clock.now_s()
    for tick in range(TICKS):
        at_s = first_s + tick * STEP_S
        clock.sleep_s(at_s - clock.now_s())
        if tick == 5:
            nodes[1].rank(1, "llm", value=None)
            nodes[2].rank(1, "llm", gpu="0")
            nodes[2].set("gpu_power_watts", 77.0, gpu="0", uuid="u2")
        if tick == 9:
            nodes[0].close()
        ring.scrape(at_s)
    options = Settings(prometheus=server.url, interval_s=STEP_S, forget_s=60.0)
    source = open_source(options, clock)
    yield SimpleNamespace(ring=ring, source=source, end_s=at_s, start_s=start_s, first_s=first_s, server=server)
    ring.close()
    source.close()


def test_both_ways_give_equal_windows(scene):
    one = scene.ring.window("llm", scene.end_s, TICKS * STEP_S)
    other = scene.source.window("llm", scene.end_s, TICKS * STEP_S)
    assert (one.job, one.ranks, one.nodes, one.groups) == (other.job, other.ranks, other.nodes, other.groups)
    assert (one.nodes, one.ranks) == (("node.0", "node.2"), (0, 1))
    assert one.metrics == other.metrics
    assert one.values_RMT.shape == other.values_RMT.shape
    # watts rise by 10 a second, and the scrapes of the two lie less than two steps apart
    for name, tolerance in {
        "gpu_power_watts": 20 * STEP_S,
        "ib_transmit_bytes_per_second": 5e8,
        "train_step_age_seconds": 1e-3,
        "log_errors": 0.0,
        "log_hardware_errors": 0.0,
        "network_errors_per_second": 0.0,
    }.items():
        a_RT, b_RT = one.column_RT(name), other.column_RT(name)
        for rank, columns in ((0, slice(4, 9)), (1, slice(8, None))):
            a, b = a_RT[rank, columns], b_RT[rank, columns]
            np.testing.assert_allclose(a, b, atol=tolerance, rtol=0, err_msg=f"{name} of rank {rank}")
        assert np.isnan(a_RT[0, -2:]).all(), "the exporter was dead then"
        assert np.isnan(b_RT[0, -2:]).all(), "the exporter was dead then"
    assert one.column_RT("gpu_power_watts")[0, 4:9] == pytest.approx(
        [300 + 10 * (scene.first_s + t * STEP_S - scene.start_s) for t in range(4, 9)], abs=5
    )
    np.testing.assert_allclose(one.column_RT("ib_transmit_bytes_per_second")[0, 4:9], 1e9, rtol=0.5)


def test_a_rank_that_moved_is_read_where_it_was(scene):
    power = scene.source.window("llm", scene.end_s, TICKS * STEP_S).column_RT("gpu_power_watts")[1]
    assert (power[:4] > 300).any()
    np.testing.assert_array_equal(power[-5:], 77.0)


def test_jobs_and_an_unknown_one(scene):
    assert scene.source.jobs(scene.end_s) == scene.ring.jobs(scene.end_s) == ("llm", "vit")
    with pytest.raises(NoData, match=r"no exporter told of a rank.*there are llm, vit"):
        scene.source.window("llm\"'}", scene.end_s, 5)
    with pytest.raises(NoData):
        scene.source.window("llm", scene.start_s - 3600, 5)
    assert scene.source.jobs(scene.start_s - 3600) == ()


def test_remote_read_gives_the_same_windows(scene):
    shares: list[float] = []
    length_s = 4 * STEP_S
    windows = list(scene.source.history(scene.first_s, scene.first_s + 3 * length_s, length_s, shares.append))
    assert shares[-1] == 1.0
    assert sorted({w.job for w in windows}) == ["llm", "vit"]
    ours = [w for w in windows if w.job == "llm"]
    assert [w.end_s for w in ours] == pytest.approx([scene.first_s + (k + 1) * length_s for k in range(3)])
    for history in ours:
        direct = scene.source.window("llm", history.end_s, length_s)
        assert set(history.ranks) <= set(direct.ranks)
        for rank in set(history.ranks):
            r, d = history.ranks.index(rank), direct.ranks.index(rank)
            for name in history.metrics:
                np.testing.assert_array_equal(history.column_RT(name)[r], direct.column_RT(name)[d])


def test_a_server_that_is_gone_is_one_sentence(prometheus_server):
    server = prometheus_server([], 1.0)
    clock = ManualClock(100.0)
    source = open_source(Settings(prometheus=server.url), clock)
    assert source.jobs(time.time()) == ()
    server.process.terminate()
    server.process.wait(20)
    with pytest.raises(SourceUnavailable, match=rf"Prometheus at {server.url} cannot be read: .*refused") as caught:
        source.jobs(time.time())
    assert "\n" not in str(caught.value)
    assert clock.now_s() == pytest.approx(100.75), "waited between the three attempts"
