"""Ranks are started with torchrun's environment and leave nothing behind, however they or their launcher end."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from eagleeye.clock import monotonic_s
from eagleeye.errors import NoData
from remediation.launcher.rounds import Job, Phase
from remediation.launcher.worker import Background, Process, Worker, environment

JOB = Job(
    "llm", 3, 3, 2, round=4, phase=Phase.RUNNING, members={"n0": 0, "n5": 1, "n2": 2}, master_address="10.0.0.1", master_port=4711
)

STUBBORN = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "child").write_text(f"{os.getpid()} ")
    time.sleep(600)
while not (folder / "child").exists(): time.sleep(0.01)
(folder / "rank").write_text(f"{os.getpid()} ")
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.01)


def ended(process: Process) -> bool:
    process.poll(monotonic_s())
    return process.exit_code is not None


def numbers(folder: Path) -> list[int]:
    wait_for(lambda: (folder / "rank").exists() and (folder / "rank").read_text().endswith(" "))
    return [int((folder / name).read_text()) for name in ("rank", "child")]


def test_the_environment_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("EAGLEEYE_CHECKPOINT__PEERS", "old=h:1")
    monkeypatch.setenv("KEPT", "yes")
    environ = environment(JOB, "n5", 1, max_restarts=3)
    expected = {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3",
        "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "6", "ROLE_NAME": "default", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711",
        "TORCHELASTIC_RUN_ID": "llm", "TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_MAX_RESTARTS": "3",
        "EAGLEEYE_JOB": "llm", "EAGLEEYE_NODE": "n5", "KEPT": "yes",
    }  # fmt: skip
    assert {name: environ.get(name) for name in expected} == expected
    assert "TORCHELASTIC_USE_AGENT_STORE" not in environ
    assert "EAGLEEYE_CHECKPOINT__PEERS" not in environ
    with_caches = replace(JOB, peers={"n0": "10.0.0.1:9480", "n9": "10.0.0.9:9480"})
    assert environment(with_caches, "n5", 0, 3)["EAGLEEYE_CHECKPOINT__PEERS"] == "n0=10.0.0.1:9480,n9=10.0.0.9:9480"


@pytest.mark.parametrize(
    ("program", "code"), [("pass", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_exit_codes(program: str, code: int) -> None:
    process = Process([sys.executable, "-c", program], dict(os.environ), 1.0)
    wait_for(lambda: ended(process))
    assert process.exit_code == code
    assert not process.stuck


def test_arguments_and_streams_pass_through_unchanged(tmp_path: Path) -> None:
    code = """
import os, sys
from remediation.launcher.worker import Process
rank = "import sys; print(sys.argv[1:], repr(sys.stdin.read()))"
process = Process([sys.executable, "-c", rank, "a b", "$HOME", "'"], dict(os.environ), 1.0)
while process.exit_code is None: process.poll(0.0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, input="not for the rank")
    assert done.stdout == "['a b', '$HOME', \"'\"] ''\n"


def test_a_stop_in_order_takes_along_a_child_that_refuses(tmp_path: Path) -> None:
    process = Process([sys.executable, "-c", STUBBORN, str(tmp_path)], dict(os.environ), 30.0)
    rank, child = numbers(tmp_path)
    assert rank == process.pid
    process.stop(monotonic_s())
    wait_for(lambda: ended(process))
    assert process.exit_code == -signal.SIGTERM
    assert not alive(child), "it was to be gone before the rank was reaped"
    assert not Path(f"/proc/{rank}").exists()


def test_a_rank_that_refuses_is_killed_after_the_grace(tmp_path: Path) -> None:
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STUBBORN
    process = Process([sys.executable, "-c", program, str(tmp_path)], dict(os.environ), 0.3)
    _, child = numbers(tmp_path)
    began_s = monotonic_s()
    wait_for(lambda: [process.stop(monotonic_s()), ended(process)][1])  # a repetition does not put it off
    assert process.exit_code == -signal.SIGKILL
    assert 0.3 <= monotonic_s() - began_s < 2
    assert not alive(child)


def test_a_stopped_rank_can_be_stopped_in_order(tmp_path: Path) -> None:
    program = "import os, signal; signal.signal(signal.SIGTERM, lambda *_: os._exit(5))\n" + STUBBORN
    process = Process([sys.executable, "-c", program, str(tmp_path)], dict(os.environ), 30.0)
    numbers(tmp_path)
    os.kill(process.pid, signal.SIGSTOP)
    process.stop(monotonic_s())
    wait_for(lambda: ended(process))
    assert process.exit_code == 5


def test_what_a_dead_rank_leaves_is_killed_before_it_counts_as_dead(tmp_path: Path) -> None:
    process = Process([sys.executable, "-c", STUBBORN, str(tmp_path)], dict(os.environ), 30.0)
    rank, child = numbers(tmp_path)
    os.kill(rank, signal.SIGKILL)
    wait_for(lambda: ended(process))
    assert not alive(child)
    assert process.exit_code == -signal.SIGKILL


LAUNCHER = """
import os, sys, time
from remediation.launcher.worker import Process
process = Process([sys.executable, "-c", sys.argv[1], sys.argv[2]], dict(os.environ), 30.0)
time.sleep(600)
"""


def test_a_killed_launcher_takes_its_ranks_along(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, STUBBORN, str(tmp_path)])
    rank, child = numbers(tmp_path)
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not alive(rank) and not alive(child), seconds=1.0)


def test_a_launcher_killed_before_the_rank_has_its_keeper_starts_nothing(tmp_path: Path) -> None:
    code = """
import os, signal, sys, subprocess
import remediation.launcher.worker as worker
real = subprocess.Popen
class Popen(real):
    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        print(self.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
subprocess.Popen = Popen
worker.Process(["touch", sys.argv[1]], dict(os.environ), 1.0)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "begun")], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    wait_for(lambda: not alive(int(done.stdout)), seconds=2.0)
    assert not (tmp_path / "begun").exists()


def test_the_pipe_to_a_keeper_is_held_by_the_launcher_alone(tmp_path: Path) -> None:
    """A rank that held it, or the keeper of another rank, would keep a keeper from noticing the launcher's end."""
    worker = Worker(JOB, "n5", [sys.executable, "-c", "import time; time.sleep(600)"], 1.0, 3)
    pipes = {os.readlink(f"/proc/self/fd/{process._pipe}") for process in worker._processes}
    others = [process._keeper.pid for process in worker._processes] + list(worker.pids)
    wait_for(lambda: all(Path(f"/proc/{pid}/comm").read_text() != "sh\n" for pid in worker.pids))
    for pid in others:
        writing = []
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # it opens and closes files meanwhile
                flags = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().split("flags:")[1].split()[0]
                writing += [fd] if os.readlink(f"/proc/{pid}/fd/{fd}") in pipes and int(flags, 8) & os.O_ACCMODE else []
        assert writing == []
    worker.stop(0.0)
    wait_for(lambda: [worker.poll(), worker.pids] == [None, ()])
    assert set(worker.exit_codes) == {"0", "1"}
    assert set(worker.exit_codes.values()) <= {-signal.SIGTERM, -signal.SIGKILL}
    assert worker.stuck == ()


HOOKED = """
import sys, time
from eagleeye.collect import progress
progress.step(int(sys.argv[1]))
time.sleep(600)
"""


def test_the_step_is_that_of_these_ranks_and_not_of_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLEEYE_RUN_DIR", str(tmp_path))
    first = Worker(JOB, "n5", [sys.executable, "-c", HOOKED, "41"], 1.0, 3)
    wait_for(lambda: first.step() == 41)
    first.stop()
    wait_for(lambda: [first.poll(), first.pids] == [None, ()])
    assert first.step() == 41, "the last step of a dead rank is the one that counts"
    time.sleep(0.02)  # the kernel tells when a process started in hundredths of a second
    second = Worker(JOB, "n5", [sys.executable, "-c", "import time; time.sleep(600)"], 1.0, 3)
    assert second.step() is None
    second.stop(0.0)
    wait_for(lambda: [second.poll(), second.pids] == [None, ()])


def test_work_in_the_background() -> None:
    slow = Background(lambda: time.sleep(0.2) or 5)
    assert not slow.wait(0.0)
    assert slow.wait(5.0)
    assert slow.result() == 5

    def fails() -> int:
        raise NoData("nothing here")

    broken = Background(fails)
    broken.wait(5.0)
    with pytest.raises(NoData, match="nothing here"):
        broken.result()
