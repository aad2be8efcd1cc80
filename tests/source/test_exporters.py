"""Scraping real HTTP exporters into the ring, and the Parquet history."""

import logging
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from eagleeye.clock import ManualClock, SystemClock
from eagleeye.collect import base as collect
from eagleeye.collect.exporter import Exporter
from eagleeye.config import settings as configured
from eagleeye.errors import ConfigError, DataError, NoData
from eagleeye.source.base import Settings, open_source
from eagleeye.source.exporters import ExporterSource
from eagleeye.source.exposition import identified, parsed

T0 = 1_750_000_000.0
PAGE = b'eagleeye_rank_info{node="n9",training_job="llm",rank="9",gpu="0",group="pp0",pid="1"} 1\n'


def pair(exporters, job="llm"):
    nodes = [exporters("n0"), exporters("n1")]
    for rank, node in enumerate(nodes):
        node.rank(rank, job)
        node.set("gpu_power_watts", 300.0 + rank, gpu="0", uuid=f"u{rank}")
        node.set("process_cpu_seconds_total", 0.0, training_job=job, rank=str(rank))
    return nodes


def test_a_window_of_two_exporters(exporters):
    nodes = pair(exporters)
    source = open_source(Settings(targets=tuple(n.address for n in nodes)), ManualClock())
    assert source.jobs(T0) == ()
    for tick in range(4):
        nodes[0].set("process_cpu_seconds_total", 5.0 * tick, training_job="llm", rank="0")
        source.scrape(T0 + 5 * tick)
    assert source.failures() == {}
    assert source.jobs(T0 + 15) == ("llm",)
    window = source.window("llm", T0 + 15, 20)
    assert (window.ranks, window.nodes, window.values_RMT.shape[2]) == ((0, 1), ("n0", "n1"), 4)
    np.testing.assert_array_equal(window.column_RT("gpu_power_watts"), [[300] * 4, [301] * 4])
    np.testing.assert_array_equal(window.column_RT("process_cpu_ratio"), [[np.nan, 1, 1, 1], [np.nan, 0, 0, 0]])
    with pytest.raises(NoData, match="there are llm"):
        source.window("vit", T0 + 15, 20)
    source.close()


def test_a_dead_exporter_is_nan_from_the_first_miss_and_stays_in_the_window(exporters):
    nodes = pair(exporters)
    source = ExporterSource(Settings(targets=tuple(n.address for n in nodes)))
    source.scrape(T0)
    nodes[1].close()
    source.scrape(T0 + 5)
    assert list(source.failures()) == [nodes[1].address]
    assert "refused" in source.failures()[nodes[1].address]
    window = source.window("llm", T0 + 5, 10)
    np.testing.assert_array_equal(window.column_RT("gpu_power_watts"), [[300, 300], [301, np.nan]])
    source.close()


def test_every_bad_target_is_one_sentence_and_costs_only_itself(exporters, raw_server, http_answer, caplog):
    good = pair(exporters)[0]
    bad = {
        raw_server(None).address: "did not answer within 0.4 s",
        raw_server(http_answer("503 Service Unavailable", b"busy")).address: "answered 503",
        raw_server(http_answer("200 OK", PAGE, length=len(PAGE) + 500)).address: "half a page|IncompleteRead",
        raw_server(http_answer("200 OK", PAGE[:-9])).address: "cut off",
        raw_server(http_answer("200 OK", b"<html>hello</html>\n")).address: "no series of ours",
        raw_server(http_answer("200 OK", b"\xff\xfe\n")).address: "no UTF-8",
        raw_server(http_answer("200 OK", b"eagleeye_gpu_power_watts{node= 3\n")).address: "is no series",
        raw_server(http_answer("200 OK", b"eagleeye_gpu_power_watts{} lots\n")).address: "line 1 .* is no sample",
        raw_server(b"not http at all\r\n\r\n").address: "cannot be scraped",
        "127.0.0.1:1": "refused",
    }
    source = ExporterSource(Settings(targets=(*bad, good.address), timeout_s=0.4))
    with caplog.at_level(logging.WARNING):
        began = time.monotonic()
        source.scrape(T0)
        assert time.monotonic() - began < 2.5
        source.scrape(T0 + 5)
    failures = source.failures()
    assert set(failures) == set(bad)
    for address, words in bad.items():
        assert re.search(words, failures[address]), failures[address]
        assert address in failures[address]
    assert len(caplog.records) == len(bad), "one line per change of mind, not per tick"
    assert source.window("llm", T0 + 5, 5).ranks == (0,)
    source.close()


def test_a_trickling_exporter_is_given_up_at_the_deadline(exporters):
    good = pair(exporters)[0]
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def trickle():
        connection, _ = listener.accept()
        connection.recv(65536)
        with connection:
            try:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not stop.wait(0.05):
                    connection.sendall(b"# x\n")
            except OSError:
                pass

    thread = threading.Thread(target=trickle)
    thread.start()
    slow = f"127.0.0.1:{listener.getsockname()[1]}"
    source = ExporterSource(Settings(targets=(slow, good.address), timeout_s=0.4))
    began = time.monotonic()
    source.scrape(T0)
    assert time.monotonic() - began < 2.0
    assert "within 0.4 s" in source.failures()[slow]
    thread.join(3)
    assert not thread.is_alive(), "the connection was left open"
    stop.set()
    listener.close()
    source.close()


def test_the_ring_is_bounded_in_time_and_in_series(exporters):
    node = exporters("n0")
    node.rank(0)
    source = ExporterSource(Settings(targets=(node.address,), ring_s=300.0))
    for tick in range(80):
        for old in range(5):
            node.set("gpu_power_watts", None, gpu="0", uuid=f"u{5 * (tick - 1) + old}")
            node.set("gpu_power_watts", float(tick), gpu="0", uuid=f"u{5 * tick + old}")
        source.scrape(T0 + 30 * tick)
    (target,) = source._targets
    assert len(target._rows) == 11
    assert len(target._series) < 200
    np.testing.assert_array_equal(source.window("llm", T0 + 30 * 79, 5).column_RT("gpu_power_watts"), [[5 * 79.0]])
    source.close()


def test_history_is_read_back_as_the_windows_that_were_seen(exporters, tmp_path):
    nodes = pair(exporters)
    options = Settings(targets=tuple(n.address for n in nodes), history_dir=str(tmp_path / "kept"), history_file_s=20.0)
    source = ExporterSource(options)
    for tick in range(13):
        nodes[0].set("process_cpu_seconds_total", float(tick**2), training_job="llm", rank="0")
        source.scrape(T0 + 5 * tick)
    live = [source.window("llm", T0 + 20, 20), source.window("llm", T0 + 40, 20), source.window("llm", T0 + 60, 20)]
    source.close()
    files = sorted((tmp_path / "kept").iterdir())
    assert len(files) == 4
    assert all(f.suffix == ".parquet" for f in files)
    shares: list[float] = []
    reader = ExporterSource(Settings(history_dir=str(tmp_path / "kept")))
    again = list(reader.history(T0, T0 + 60, 20, shares.append))
    assert shares[-1] == 1.0
    assert [w.end_s for w in again] == [T0 + 20, T0 + 40, T0 + 60]
    for one, other in zip(live, again, strict=True):
        assert (one.ranks, one.nodes, one.metrics) == (other.ranks, other.nodes, other.metrics)
        np.testing.assert_array_equal(one.values_RMT, other.values_RMT)


def test_a_broken_history_file_is_skipped_with_one_warning(exporters, tmp_path, caplog):
    nodes = pair(exporters)
    source = ExporterSource(Settings(targets=tuple(n.address for n in nodes), history_dir=str(tmp_path), history_file_s=20.0))
    for tick in range(13):
        source.scrape(T0 + 5 * tick)
    source.close()
    files = sorted(tmp_path.glob("*.parquet"))
    files[1].write_bytes(files[1].read_bytes()[:200])
    (tmp_path / "notes.parquet").write_text("not ours")
    with caplog.at_level(logging.WARNING):
        windows = list(source.history(T0, T0 + 60, 20)) + list(source.history(T0, T0 + 60, 20))
    assert [r.message.split(" is skipped")[0] for r in caplog.records] == [str(files[1])]
    lost = windows[1].column_RT("gpu_power_watts")
    assert np.isnan(lost).any()
    assert np.isfinite(windows[2].column_RT("gpu_power_watts")[:, 1:]).all()


def test_old_history_is_deleted(exporters, tmp_path):
    node = pair(exporters)[0]
    source = ExporterSource(
        Settings(targets=(node.address,), history_dir=str(tmp_path), history_file_s=10.0, history_keep_s=100.0)
    )
    for tick in range(60):
        source.scrape(T0 + 5 * tick)
    source.close()
    first = min(int(f.stem.split("-")[0]) for f in tmp_path.glob("*.parquet"))
    assert first / 1000 > T0 + 5 * 59 - 120


def test_a_full_disk_is_one_failure_and_scraping_goes_on(exporters, tmp_path):
    node = pair(exporters)[0]
    source = ExporterSource(Settings(targets=(node.address,), history_dir=str(tmp_path), history_file_s=5.0))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # as a full disk: no file grows beyond 100 bytes
    try:
        source.scrape(T0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot write the history" in source.failures()[str(tmp_path)]
    assert list(tmp_path.iterdir()) == []
    assert source.window("llm", T0, 5).ranks == (0,)
    source.scrape(T0 + 5)
    assert source.failures() == {}
    (kept,) = tmp_path.glob("*.parquet")
    assert kept.stem.startswith(f"{int(T0 * 1000):014d}"), "what could not be written is written later"
    source.close()


def test_history_without_a_folder_says_what_to_set(exporters):
    with pytest.raises(ConfigError, match="history_dir is not set"):
        list(ExporterSource(Settings(targets=("127.0.0.1:1",))).history(T0, T0 + 60, 20))


@pytest.mark.parametrize("target", ["ftp://host:1/x", "host:notaport", "http://", "host:99999999"])
def test_a_target_that_is_none(target):
    with pytest.raises(ConfigError, match="is no exporter; write HOST:PORT"):
        ExporterSource(Settings(targets=(target,)))


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="either targets or prometheus"):
        configured(Settings, "source", {"source": {"targets": ["a:1"], "prometheus": "http://b"}})
    with pytest.raises(ConfigError, match="history_file_s"):
        configured(Settings, "source", {"source": {"ring_s": "1m"}})
    with pytest.raises(ConfigError, match="names nothing to read"):
        open_source(Settings(), ManualClock())
    with pytest.raises(ConfigError, match="is no URL"):
        open_source(Settings(prometheus="myhost:9090"), ManualClock())


def test_exposition_with_awkward_labels_and_numbers():
    page = (
        "# HELP eagleeye_gpu_power_watts x\n"
        'eagleeye_gpu_power_watts{node="a b\\"c\\\\,}{",gpu="0"} 1e3\n'
        'eagleeye_gpu_power_watts{node="x",gpu="1"} +Inf\n'
        "process_cpu_seconds_total garbage that is somebody else's\n"
        "eagleeye_not_in_the_catalogue 4\n"
    )
    values = dict(parsed(page, "t"))
    assert len(values) == 2
    (first, second) = values
    assert values[first] == 1000.0
    assert np.isnan(values[second])
    assert identified(first, "t") == ("eagleeye_gpu_power_watts", {"node": 'a b"c\\,}{', "gpu": "0"})
    with pytest.raises(DataError, match="is no series"):
        identified('eagleeye_gpu_power_watts{node="x"} 3', "t")


@pytest.mark.slow
def test_a_real_exporter_of_a_real_process(tmp_path):
    """From a process with the variables of a rank, through `eagleeye export`, to a window."""
    environment = os.environ | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "EAGLEEYE_JOB": "real", "MASTER_ADDR": "x"}
    worker = subprocess.Popen([sys.executable, "-c", "while True: pass"], env=environment)
    settings = collect.Settings(node="here", address="127.0.0.1", port=0, job="real", run_dir=str(tmp_path))
    exporter = Exporter(settings)
    try:
        source = ExporterSource(Settings(targets=(f"127.0.0.1:{exporter.port}",), interval_s=0.5))
        clock = SystemClock()
        start_s = clock.now_s()
        for tick in range(6):
            clock.sleep_s(start_s + tick * 0.5 - clock.now_s())
            source.scrape(start_s + tick * 0.5)
        assert source.failures() == {}
        window = source.window("real", start_s + 2.5, 2.5)
        assert (window.ranks, window.nodes) == ((3,), ("here",))
        assert window.column_RT("process_up")[0, -1] == 1.0
        assert window.column_RT("process_cpu_ratio")[0, -4:].mean() > 0.2
        source.close()
    finally:
        worker.kill()
        worker.wait()
        exporter.close()


def test_a_history_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="there is no folder"):
        open_source(Settings(history_dir=str(tmp_path / "nowhere")), ManualClock())
