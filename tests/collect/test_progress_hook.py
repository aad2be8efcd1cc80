"""The one line in the training loop, its file, and what others read in it while the process runs, hangs, fails and ends."""

import math
import os
import signal
import struct
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from eagleeye.clock import ManualClock
from eagleeye.collect import progress
from eagleeye.collect.progress_reader import ProgressCollector, StepLog
from eagleeye.collect.ranks import RankTable
from eagleeye.errors import NoData

LOOP = """
import sys, time
from eagleeye.collect import progress
for n in range(10**9):
    with progress.collective():
        time.sleep(0.02)
    time.sleep(0.02)
    progress.step(n)
    if n == 3: print("going", flush=True)
"""


def run(bench, program: str, environ: dict[str, str] | None = None) -> tuple[int, str, progress.State | None]:
    process = bench.spawn("from eagleeye.collect import progress\n" + program, environ or bench.rank(3))
    _, errors = process.communicate(timeout=20)
    return process.returncode, errors, progress.read(bench.run_dir / "test-job.3.progress")


def test_state_after_some_steps(bench) -> None:
    code, errors, state = run(
        bench,
        """
import time
progress.step(6)
time.sleep(0.2)
with progress.phase("eval"):
    time.sleep(0.3)
with progress.collective():
    time.sleep(0.1)
progress.step(7)
""",
    )
    assert (code, errors) == (0, "")
    assert state is not None
    assert (state.identity.job, state.identity.rank, state.identity.world_size, state.identity.node) == ("test-job", 3, 4, "n1")
    assert (state.step, state.in_collective, state.finished, progress.PHASES[state.phase]) == (7, False, True, "train")
    assert 0.3 <= state.step_s < 0.55
    assert 0.2 <= state.compute_s < 0.4
    assert abs(state.step_at_s - time.time()) < 5
    assert abs(state.heartbeat_s - time.time()) < 5


def test_steps_that_are_told_every_tenth_time(bench) -> None:
    _, _, state = run(bench, "import time\nprogress.step(10); time.sleep(0.2); progress.step(20)")
    assert state is not None
    assert 0.02 <= state.step_s < 0.04
    assert math.isnan(state.compute_s)
    assert state.in_collective is None


@pytest.mark.parametrize(
    ("program", "finished"),
    [
        ("progress.step(1)", True),
        ("progress.step(1); raise SystemExit", True),
        ("progress.step(1); raise ValueError('no')", False),
        ("import sys\nsys.excepthook = lambda *_: None\nprogress.step(1); raise ValueError('no')", False),
        ("import os, signal\nprogress.step(1); os.kill(os.getpid(), signal.SIGTERM)", False),
        ("import os\nprogress.step(1); os._exit(1)", False),
    ],
)
def test_finished_means_a_normal_exit(bench, program: str, finished: bool) -> None:
    _, _, state = run(bench, program)
    assert state is not None
    assert (state.finished, state.step) == (finished, 1)


def test_phases_nest_and_end_with_exceptions(bench) -> None:
    code, errors, state = run(
        bench,
        """
import os
def now(): return progress.PHASES[progress.read(progress._current.path).phase]
seen = []
with progress.phase("load"): seen.append(now())
seen.append(now())
progress.step(1); seen.append(now())
try:
    with progress.phase("eval"):
        with progress.phase("checkpoint"): seen.append(now())
        seen.append(now())
        raise KeyError
except KeyError:
    seen.append(now())
assert seen == ["load", "init", "train", "checkpoint", "eval", "train"], seen
""",
    )
    assert (code, errors) == (0, "")
    assert state is not None


def test_nothing_is_raised_into_the_loop(bench) -> None:
    code, errors, state = run(
        bench,
        "progress.step('three'); progress.step(None); progress.step(10**40); progress.step(2)\n"
        "with progress.phase('nonsense'): pass",
    )
    assert code == 0
    assert errors == "eagleeye: 'three' is no step number\n"
    assert state is not None
    assert state.step == 2


def test_a_folder_that_cannot_be_written_gives_one_warning(bench, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environ = bench.rank(3, EAGLEEYE_RUN_DIR=str(tmp_path / "file"))
    code, errors, _ = run(
        bench, "for n in range(3): progress.step(n)\nwith progress.phase('eval'), progress.collective(): pass", environ
    )
    assert code == 0
    assert len(errors.splitlines()) == 1
    assert "set EAGLEEYE_RUN_DIR to a folder that this process may write" in errors


def test_without_a_launcher_it_is_rank_0_of_1(bench) -> None:
    run(bench, "progress.step(5)", {"EAGLEEYE_JOB": "a/b c"})
    state = progress.read(bench.run_dir / "a_b_c.0.progress")
    assert state is not None
    assert (state.identity.job, state.identity.rank, state.identity.world_size) == ("a/b c", 0, 1)


def test_a_helper_with_its_parents_rank_does_not_write_over_it(bench) -> None:
    program = """
import os, sys
progress.step(5)
pid = os.fork()
if pid == 0:
    progress.step(99)
    sys.exit(0)
os.waitpid(pid, 0)
state = progress.read(progress._current.path)
assert (state.step, state.pid, state.finished) == (5, os.getpid(), False), state
"""
    assert run(bench, program)[:2] == (0, "")


def test_a_spawned_rank_names_itself_after_the_import(bench) -> None:
    program = """
import os
if os.fork() == 0:
    os.environ.update(RANK="3", WORLD_SIZE="4", EAGLEEYE_JOB="test-job")
    progress.step(7)
else: os.wait()
"""
    _, _, state = run(bench, program, {"EAGLEEYE_NODE": "n1"})
    assert state is not None
    assert (state.step, state.identity.rank) == (7, 3)


def test_garbage_and_torn_files_are_recognised(tmp_path: Path, bench) -> None:
    _, _, good = run(bench, "progress.step(6); progress.step(7)")
    assert good is not None
    path = bench.run_dir / "test-job.3.progress"
    data = path.read_bytes()
    newest = max(progress._SLOT_OFFSETS, key=lambda offset: struct.unpack_from("<Q", data, offset)[0])
    torn = bytearray(data)
    torn[newest + 20] ^= 0xFF
    path.write_bytes(torn)
    older = progress.read(path)
    assert older is not None
    assert (older.step, older.finished) == (7, False)
    for offset in progress._SLOT_OFFSETS:
        torn[offset : offset + 40] = b"\xff" * 40
    for content in (
        bytes(torn),
        b"",
        data[:100],
        os.urandom(progress.SIZE_BYTES),
        data[:256] + b"{" * 768,
        data[:256] + b"[]" + bytes(766),
    ):
        path.write_bytes(content)
        assert progress.read(path) is None
    assert progress.read(tmp_path / "absent") is None
    assert progress.read(tmp_path) is None
    os.mkfifo(tmp_path / "pipe")
    assert progress.read(tmp_path / "pipe") is None


def test_cost_of_a_step_and_of_the_import(bench) -> None:
    code, errors, _ = run(
        bench,
        "import sys, time\nheavy = {'numpy', 'pandas', 'torch', 'prometheus_client'} & set(sys.modules)\nassert not heavy\n"
        "progress.step(0)\ncosts = []\n"
        "for n in range(1, 2001):\n    began = time.perf_counter(); progress.step(n); costs.append(time.perf_counter() - began)\n"
        "assert sorted(costs)[1000] < 20e-6, sorted(costs)[1000]",
    )
    assert (code, errors) == (0, "")
    timing = "import time; began = time.perf_counter(); from eagleeye.collect import progress; print(time.perf_counter() - began)"
    took_s = [float(subprocess.run([sys.executable, "-c", timing], capture_output=True, check=True).stdout) for _ in range(5)]
    assert min(took_s) < 0.05


def collector_of(bench, rank: int, **settings: object) -> tuple[ProgressCollector, RankTable]:
    site = bench.site(**settings)
    table = site.shared(RankTable)
    bench.wait_for(lambda: (table.scan(), any(r.identity.rank == rank for r in table.ranks()))[1])
    return ProgressCollector(site), table


def test_a_stopped_process_is_read_without_its_help(bench) -> None:
    process = bench.spawn(LOOP, bench.rank(3))
    assert process.stdout.readline() == "going\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.1)
    collector, table = collector_of(bench, 3)
    bench.wait_for(lambda: (table.scan(), table.ranks()[0].file)[1])
    first = bench.values(collector)
    time.sleep(0.3)
    assert bench.values(collector) == first
    assert first["train_steps"][("3",)] >= 3
    assert 0.03 < first["train_step_seconds"][("3",)] < 0.3
    assert first["train_compute_seconds"][("3",)] < first["train_step_seconds"][("3",)]
    assert first["train_phase"] == {("3",): 1.0}
    process.send_signal(signal.SIGCONT)
    bench.wait_for(lambda: bench.values(collector)["train_steps"][("3",)] > first["train_steps"][("3",)] + 2)
    assert (
        bench.values(collector)["train_heartbeat_timestamp_seconds"][("3",)] > first["train_heartbeat_timestamp_seconds"][("3",)]
    )


def test_a_process_is_a_rank_because_it_writes_progress(bench) -> None:
    # what multiprocessing does: the launcher's variables never show in /proc
    program = "import os\nos.environ.update(RANK='3', WORLD_SIZE='4', EAGLEEYE_JOB='test-job', EAGLEEYE_NODE='n1')\n" + LOOP
    process = bench.spawn(program)
    assert process.stdout.readline() == "going\n"
    _, table = collector_of(bench, 3)
    assert [r.process.pid for r in table.ranks()] == [process.pid]


def test_the_end_of_a_rank(bench) -> None:
    for ending, phase in (("pass", 5.0), ("sys.exit(1)", 1.0), ("raise ValueError", 1.0)):
        program = "import sys, time\nfrom eagleeye.collect import progress\nprogress.step(8)\n"
        program += "print('going', flush=True); time.sleep(1.2)\n"
        process = bench.spawn(program + ending, bench.rank(3))
        assert process.stdout.readline() == "going\n"
        collector, table = collector_of(bench, 3)
        bench.wait_for(lambda table=table: (table.scan(), table.ranks()[0].file)[1])
        assert bench.values(collector)["train_phase"] == {("3",): 1.0}
        bench.wait_for(lambda table=table: table.ranks()[0].exited_s)
        process.wait()
        # who left by sys.exit(1) ran its exit handlers; only the kernel knows better, and only newer ones tell
        if ending != "sys.exit(1)" or table.learn_status(table.ranks()[0]) is not None:
            assert bench.values(collector)["train_phase"] == {("3",): phase}
        assert bench.values(collector)["train_steps"] == {("3",): 8.0}


def test_the_file_of_a_dead_process_is_no_progress(bench) -> None:
    run(bench, "progress.step(8)")
    bench.spawn("import time; time.sleep(60)", bench.rank(3))
    collector, _ = collector_of(bench, 3)
    with pytest.raises(NoData):
        bench.values(collector)


def test_steps_from_logs(bench) -> None:
    now_s = datetime(2026, 3, 2, 8, 30, tzinfo=UTC).timestamp()
    site = bench.site(ManualClock(now_s), proc_root=str(bench.files / "proc"), logs=(str(bench.files / "logs" / "*.log"),))
    found = bench.values(ProgressCollector(site), now_s)
    assert found == {
        "train_steps": {("4",): 120.0},
        "train_step_seconds": {("4",): 20.0},
        "train_step_timestamp_seconds": {("4",): now_s - 20},
    }


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("step 123 loss 1", 123),
        ("iteration 123/1000 | loss", 123),
        ("step: 123, lr 1e-4", 123),
        ("Step=123", 123),
        ("iter [123/1000]", 123),
        ("global_step: 123", 123),
        ("steps per second 12", None),
        ("step time: 0.3", None),
        ("step_time=3", None),
        ("first step 1.5 s", None),
    ],
)
def test_step_pattern(text: str, step: int | None, bench) -> None:
    log = StepLog(bench.site().settings.step_pattern)
    log.add("/logs/x.log", 5.0, text)
    newest = log.newest(0, lowest=True)
    assert (newest and newest[0]) == step


def test_whose_step_a_line_tells(bench) -> None:
    log = StepLog(bench.site().settings.step_pattern)
    log.add("/logs/rank3.log", 5.0, "step 1")
    log.add("/logs/job_4.log", 5.0, "step 2")
    log.add("/logs/all.log", 5.0, "[Rank 5] step 3")
    log.add("/logs/all.log", 5.0, "step 4")
    log.add("/logs/all.log", 7.0, "step 8")
    assert [log.newest(n, n == 2) and log.newest(n, n == 2)[0] for n in (2, 3, 4, 5, 6)] == [8, 1, 2, 3, None]
    assert log.newest(2, lowest=True) == (8, 7.0, 0.5)
    log.add("/logs/all.log", 9.0, "step 1")
    assert log.newest(2, lowest=True)[0] == 1
