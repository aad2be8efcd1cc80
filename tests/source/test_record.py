"""`eagleeye record`: a live job becomes a trace; stopping, full disks and mistakes leave nothing half-written."""

import os
import re
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from eagleeye.clock import SystemClock
from eagleeye.errors import NoData
from eagleeye.source.base import Settings
from eagleeye.source.exporters import ExporterSource
from eagleeye.source.record import record
from eagleeye.source.trace import TraceSource


@pytest.fixture(scope="module")
def node(exporters):
    exporter = exporters("n0")
    started = time.time()
    for rank in range(2):
        exporter.rank(rank, gpu=str(rank), group=f"pp{rank}")
        exporter.set("gpu_power_watts", lambda: time.time() - started, gpu=str(rank), uuid=f"u{rank}")
        exporter.set("process_cpu_seconds_total", lambda: 2 * time.time(), training_job="llm", rank=str(rank))
    exporter.set("log_window_errors", 2.0, **{"class": "hardware"})
    return exporter


def run(*arguments, limit_bytes=None, cwd=None):
    def limited():
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    return subprocess.Popen(
        [sys.executable, "-c", "import sys; from eagleeye.cli import main; sys.exit(main())", "record", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limited,
        cwd=cwd,
    )


def test_the_trace_holds_the_windows_that_were_seen(node, tmp_path):
    source = ExporterSource(Settings(targets=(node.address,), interval_s=0.1))
    told: list[tuple[float, int, int]] = []
    done_s = record(source, SystemClock(), "llm", 7.0, tmp_path / "t", lambda *args: told.append(args))
    assert done_s == pytest.approx(7.0)
    assert len(told) == 70
    assert told[-1][1:] == (2, 4)
    trace = TraceSource(tmp_path / "t")
    assert (trace.job, trace.nodes, trace.groups) == ("llm", ("n0", "n0"), ("pp0", "pp1"))
    assert len(trace.stamps_s) == 70
    end_s = float(trace.stamps_s[-1])
    live = source.window("llm", end_s, 7.0)
    again = trace.window("llm", end_s, 7.0)
    assert again.metrics == live.metrics
    assert "log_hardware_errors" in again.metrics
    np.testing.assert_array_equal(again.values_RMT, live.values_RMT)
    assert np.isfinite(again.values_RMT).all()
    source.close()


def test_it_ends_when_nobody_tells_of_the_job_any_more(exporters, tmp_path):
    exporter = exporters("n1")
    exporter.rank(0, "short")
    exporter.set("gpu_power_watts", 1.0, gpu="0", uuid="u")
    source = ExporterSource(Settings(targets=(exporter.address,), interval_s=0.1, forget_s=0.3))

    def tell(done_s, ranks, metrics):
        if done_s > 0.45:
            exporter.rank(0, "short", value=None)

    done_s = record(source, SystemClock(), "short", 60.0, tmp_path / "t", tell)
    assert 0.5 < done_s < 2.0
    assert TraceSource(tmp_path / "t").ranks == (0,)
    source.close()


def test_an_unknown_job_is_said_at_once_and_leaves_nothing(node, tmp_path):
    source = ExporterSource(Settings(targets=(node.address,)))
    with pytest.raises(NoData, match="there are llm"):
        record(source, SystemClock(), "lmm", 60.0, tmp_path / "t")
    assert list(tmp_path.iterdir()) == []
    source.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_what_it_has(node, tmp_path, number):
    arguments = ("--targets", node.address, "--job", "llm", "--duration", "10m", "--interval", "100ms", "--out", "t")
    process = run(*arguments, cwd=tmp_path)
    assert process.stderr is not None
    for _ in range(5):
        line = process.stderr.readline()
        assert "of 600 s, 2 ranks, 4 metrics" in line
    assert [p.name[:3] for p in tmp_path.iterdir()] == [".t."]
    os.kill(process.pid, number)
    _, rest = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in rest
    assert [p.name for p in tmp_path.iterdir()] == ["t"]
    assert len(TraceSource(tmp_path / "t").stamps_s) >= 5


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--job", "nope"), 1, "job 'nope': no exporter told of a rank in the last 300 s; there are llm"),
        (("--job", "llm", "--out", "."), 2, "exists already; name a new folder"),
        (("--job", "llm", "--duration", "soon"), 2, "'soon' is no duration"),
        (("--job", "llm", "--targets", "nothing at all:x"), 2, "is no exporter; write HOST:PORT"),
    ],
)
def test_mistakes_are_one_sentence(node, tmp_path, arguments, code, words):
    given = {"--targets": node.address, "--duration": "10m", "--interval": "100ms", "--out": "t"}
    given |= dict(zip(arguments[::2], arguments[1::2], strict=True))
    process = run(*(part for pair in given.items() for part in pair), cwd=tmp_path)
    _, said = process.communicate(timeout=20)
    assert process.returncode == code
    assert words in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_sentence(node, tmp_path):
    arguments = ("--targets", node.address, "--job", "llm", "--duration", "500ms", "--interval", "100ms", "--out", "t")
    process = run(*arguments, cwd=tmp_path, limit_bytes=500)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 3
    assert re.search(r"^eagleeye record: cannot write the trace t: .*File too large$", said, re.MULTILINE)
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []
