"""Lines of logs -> error classes, windows, and files that rotate, shrink, flood or hold junk."""

import os
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path

import pytest

from eagleeye.clock import ManualClock
from eagleeye.collect.logs import ErrorWindow, LogCollector, LogTail, classify, stamp_s
from eagleeye.errors import NoData

NOW_S = datetime(2026, 3, 2, 8, 30, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    "text",
    [
        "kernel: NVRM: Xid (PCI:0000:0f:00): 79, pid=48213, name=python, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:2f:00): 48, pid='<unknown>', name=<unknown>, An uncorrectable double bit error (DBE) has been",
        "NVRM: Xid (0000:3b:00): 119, Timeout waiting for RPC from GSP!",
        "[rank5]: RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "mce: [Hardware Error]: Machine check events logged",
        "mce: [Hardware Error]: Uncorrected error, action required",
        "pcieport 0000:00:01.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
        "NVRM: Xid (PCI:0000:0f:00): 94, pid=77, Contained error, corrected by a reset",
        "EDAC MC0: uncorrectable error on DIMM 0",
        "uncorrectable ECC errors: 2",
        "nvidia: GPU 3: thermal shutdown",
    ],
)
def test_hardware(text: str) -> None:
    assert classify(text) == "hardware"


@pytest.mark.parametrize(
    "text",
    [
        "[rank24]:[E ProcessGroupNCCL.cpp:616] [Rank 24] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8974, "
        "OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600041 milliseconds before timing out.",
        "[rank8]: torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:41722",
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
        "RuntimeError: [gloo/transport/tcp/pair.cc:589] Read error [10.0.0.2]:5: Connection reset by peer",
        "node7:77:99 [0] NCCL WARN Call to recv from 10.0.0.7<4711> failed : Connection timed out",
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "error: 104 (Connection reset by peer)",
    ],
)
def test_communication(text: str) -> None:
    assert classify(text) == "communication"


@pytest.mark.parametrize(
    "text",
    [
        "Traceback (most recent call last):",
        "RuntimeError: shape mismatch",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "2026-03-02 08:00:00,123 - trainer - ERROR - loss became NaN",
        "[2026-03-02 08:00:00] [FATAL] cannot open checkpoint",
        "ERROR: 5 ranks are missing",
        "kernel: nfs: server 10.0.0.5 not responding, timed out",
        "NVRM: Xid (PCI:0000:0f:00): 31, pid=48213, name=python, MMU Fault",
        "NVRM: Xid (PCI:0000:0f:00): 13, pid=48213, Graphics Exception",
        "Segmentation fault (core dumped)",
        "E0302 08:00:00.000000 77 trainer.cc:12] bad batch",
        "train.py: error: unrecognized arguments: --lr",
    ],
)
def test_error(text: str) -> None:
    assert classify(text) == "error"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "step 120 loss 2.31",
        "finished with 0 errors",
        "no errors found, all ranks well",
        "errors: 0",
        "error_count=0 retries=1",
        "error_rate=0.1",
        "validation error: 0.123",
        "mean squared error = 0.25",
        "word error rate 7.1",
        "0 uncorrectable ECC errors",
        "ECC uncorrectable 0",
        "Uncorrectable ECC errors none",
        "uncorrectable errors: none",
        "Uncorrectable ECC errors: 0",
        "ECC uncorrectable : 0",
        "INFO: will retry after ConnectionError: connection reset",
        "node7:77:99 [0] NCCL INFO [Service thread] Connection closed by localRank 3",
        "[2026-03-02 08:00:00] [DEBUG] Traceback (most recent call last):",
        "UserWarning: the error handler is deprecated",
        "set log level to ERROR",
        "NCCL_ASYNC_ERROR_HANDLING=1",
        "backend=gloo timeout=1800",
        "EDAC MC0: 1 corrected error on DIMM_A1",
        "pcieport 0000:00:01.0: PCIe Bus Error: severity=Corrected, type=Physical Layer",
        "mce: [Hardware Error]: Corrected error, no action required.",
        "{1}[Hardware Error]: event severity: corrected",
        "[Hardware Error]: It has been found to be a Correctable memory event",
        "mlx5_core 0000:b1:00.0 ib0: Link up",
        # what a machine, a driver or a cable does at any time; the link itself is seen by its carrier
        "mlx5_core 0000:b1:00.0 ib0: Link down",
        "ixgbe 0000:01:00.0 eth0: NIC Link is Down",
        "blk_update_request: I/O error, dev nvme0n1, sector 1234",
        "thermal thermal_zone0: thermal trip point 1 reached",
        "nvidia: NVLink failed to enable peer access between GPU 0 and GPU 1",
        "\x00\x01\ufffd\ufffd",
    ],
)
def test_no_error(text: str) -> None:
    assert classify(text) is None


def test_time_of_a_line() -> None:
    assert stamp_s("2026-03-02T08:29:50.250Z text", NOW_S) == NOW_S - 9.75
    assert stamp_s("[2026-03-02T09:29:50+01:00] text", NOW_S) == NOW_S - 10
    assert stamp_s("2026-03-02 08:29:50,500 - trainer - text", NOW_S) == NOW_S - 9.5
    assert stamp_s("2026-13-45T08:29:50Z text", NOW_S) is None
    assert stamp_s("text 2026-03-02T08:29:50Z", NOW_S) is None


def test_window_slides_and_never_looks_ahead() -> None:
    window = ErrorWindow(300.0)
    assert window.at(NOW_S).first_s is None
    window.add(NOW_S, "RuntimeError: one")
    window.add(NOW_S + 1, "step 3")
    window.add(NOW_S + 2, "Connection reset by peer")
    window.add(NOW_S + 1, "Connection reset by peer")
    assert window.at(NOW_S + 0.5).by_class == {"hardware": 0, "communication": 0, "error": 1}
    assert window.at(NOW_S + 2) == ({"hardware": 0, "communication": 2, "error": 1}, NOW_S)
    assert window.at(NOW_S + 300) == ({"hardware": 0, "communication": 2, "error": 0}, NOW_S + 1)
    assert window.at(NOW_S + 302) == ({"hardware": 0, "communication": 0, "error": 0}, None)


def test_window_is_bounded() -> None:
    window = ErrorWindow(300.0, limit=10)
    for n in range(100):
        window.add(NOW_S + n, "RuntimeError: again")
    assert window.at(NOW_S + 99) == ({"hardware": 0, "communication": 0, "error": 10}, NOW_S)
    window.add(NOW_S + 400, "RuntimeError: later")
    assert window.at(NOW_S + 400).by_class["error"] == 1


class Lines:
    """A tail of one glob, polled by the test."""

    def __init__(self, bench, monkeypatch: pytest.MonkeyPatch, glob: str) -> None:
        monkeypatch.setattr(LogTail, "LOOK_S", 0.0)
        monkeypatch.setattr(LogTail, "POLL_S", 3600.0)
        self.seen: list[str] = []
        self.site = bench.site(logs=(glob,))
        self.tail = self.site.shared(LogTail)
        self.tail.listen(lambda path, at_s, text: self.seen.append(text))

    def new(self) -> list[str]:
        # the first poll finds new files, the second reads them
        self.tail.poll()
        self.tail.poll()
        seen, self.seen = self.seen, []
        return seen


def append(path: Path, text: str | bytes) -> None:
    with path.open("ab") as file:
        file.write(text.encode() if isinstance(text, str) else text)


def test_old_lines_are_old_and_new_lines_new(bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "a.log"
    append(log, "RuntimeError: old\n")
    lines = Lines(bench, monkeypatch, str(tmp_path / "*.log"))
    assert lines.new() == []
    append(log, "one\ntw")
    assert lines.new() == ["one"]
    append(log, "o\n")
    assert lines.new() == ["two"]
    append(tmp_path / "b.log", "three\n")
    assert lines.new() == ["three"]


def test_an_old_file_that_appears_later_is_old(bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines(bench, monkeypatch, str(tmp_path / "*.log"))
    append(tmp_path / "hidden", "RuntimeError: old\n")
    os.utime(tmp_path / "hidden", (0, 0))
    (tmp_path / "hidden").rename(tmp_path / "b.log")
    assert lines.new() == []


def test_rotation_by_renaming(bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "a.log"
    append(log, "old\n")
    lines = Lines(bench, monkeypatch, str(tmp_path / "a.log*"))
    append(log, "last of the first\n")
    log.rename(tmp_path / "a.log.1")
    append(log, "first of the second\n")
    assert lines.new() == ["last of the first", "first of the second"]
    assert lines.new() == []


def test_rotation_to_a_name_outside_the_glob(bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "a.log"
    append(log, "old\n")
    lines = Lines(bench, monkeypatch, str(log))
    append(log, "last\n")
    log.rename(tmp_path / "gone")
    append(log, "first\n")
    assert lines.new() == ["last", "first"]


def test_truncation(bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "a.log"
    append(log, "a long line of the past\n")
    lines = Lines(bench, monkeypatch, str(log))
    log.write_text("new\n")
    assert lines.new() == ["new"]


def test_junk_and_endless_lines(bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "a.log"
    append(log, "")
    lines = Lines(bench, monkeypatch, str(log))
    append(log, bytes(range(256)) * 40_000)
    append(log, b"x" * 3_000_000 + b"\nRuntimeError: after the junk\r\n")
    seen = [text for _ in range(10) for text in lines.new()]
    assert seen[-1] == "RuntimeError: after the junk"
    assert max(map(len, seen)) <= LogTail.LINE_BYTES


def test_flood_takes_bounded_memory(bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogTail, "CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(LogTail, "BEHIND_BYTES", 1 << 18)
    log = tmp_path / "a.log"
    append(log, "")
    lines = Lines(bench, monkeypatch, str(log))
    append(log, b"RuntimeError: again\n" * 500_000 + b"RuntimeError: last\n")
    tracemalloc.start()
    seen = lines.new()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen[-1] == "RuntimeError: last"
    assert 3000 < len(seen) < 3500
    assert peak_bytes < 2 << 20


def test_fifo_and_folder_are_no_logs(bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "folder.log").mkdir()
    lines = Lines(bench, monkeypatch, str(tmp_path / "*.log"))
    assert lines.new() == []
    assert lines.tail.paths == ()


def test_collector_on_recorded_logs(bench) -> None:
    collector = LogCollector(bench.site(ManualClock(NOW_S), logs=(str(bench.files / "logs" / "*.log"),)))
    found = bench.values(collector, NOW_S)
    assert found["log_window_errors"] == {("hardware",): 2.0, ("communication",): 1.0, ("error",): 0.0}
    assert found["log_first_error_timestamp_seconds"] == {(): NOW_S - 12}


def test_collector_without_files(bench, tmp_path: Path) -> None:
    assert not LogCollector(bench.site()).supported()
    with pytest.raises(NoData, match=r"no file matches .*nothing"):
        list(LogCollector(bench.site(logs=(str(tmp_path / "nothing*"),))).collect(0.0))


@pytest.mark.parametrize(
    "line",
    [
        "eagleeye launch [node1]: round 2 starts, because rank 0 on node0 was killed by SIGKILL; here from rank 1 of 4",
        "eagleeye cache: a connection was closed: fatal error of a peer",
        "checkpoint: rank 1: store of step 3: storage /s: No space left on device; it is tried again",
    ],
)
def test_what_our_own_programs_say_of_others_is_no_error_of_this_rank(line: str) -> None:
    assert classify(line) is None
    assert classify(f"RuntimeError: {line}") is not None
