"""The ranks of one node as processes: started with torchrun's environment, watched, and ended without leaving anything behind.

Each rank leads a process group of its own. A keeper, a small shell, waits at the other end of a pipe that only the launcher
holds: when the launcher is killed outright, the pipe ends, and the keeper kills the group. The number of a group cannot pass to
strangers while its leader is not reaped, so that a leader is reaped last, after the group and its keeper are dead. What a rank
moves to another session (``setsid``) escapes all this.
"""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from eagleeye.clock import monotonic_s
from eagleeye.collect import progress
from eagleeye.collect.environment import run_dirs, start_ticks
from eagleeye.errors import EagleEyeError
from remediation.launcher.rounds import Job

T = TypeVar("T")

KILL_S = 10.0
"""How long a killed process may take to vanish; the kernel holds one that is in the middle of a device call."""

# The rank begins only once its keeper is there: without a word from the launcher nothing is started.
_GATE = 'read -r go && exec "$@" </dev/null'
_KEEPER = 'read -r end; kill -9 "-$1"'


class Process:
    """One rank: a process group, its leader and its keeper.

    Parameters
    ----------
    grace_s : from the first signal of `stop` to the second, which cannot be refused
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], grace_s: float) -> None:
        self._grace_s = grace_s
        self._kill_at_s = self._give_up_at_s = float("inf")
        self.exit_code: int | None = None
        """As of a `Popen`: below zero it is a signal. None while anything of the group exists."""
        self._leader = subprocess.Popen(
            ["/bin/sh", "-c", _GATE, "sh", *command], stdin=subprocess.PIPE, env=environ, process_group=0
        )
        self.pid = self._leader.pid
        gone, self._pipe = os.pipe()
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", _KEEPER, "sh", str(self.pid)],
            stdin=gone,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        os.close(gone)
        self.start_ticks = start_ticks(Path(f"/proc/{self.pid}/stat").read_bytes())
        assert self._leader.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._leader.stdin.write(b"go\n")
            self._leader.stdin.close()

    def poll(self, now_s: float) -> None:
        """Notice an end, and carry on with a stop that was begun."""
        if self.exit_code is not None:
            return
        if now_s >= self._kill_at_s:
            self._signal(signal.SIGKILL)
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            if now_s >= self._give_up_at_s:
                self.exit_code = -signal.SIGKILL
            return
        self._signal(signal.SIGKILL)
        self._give_up_at_s = min(self._give_up_at_s, now_s + KILL_S)
        if _alive(self.pid) and now_s < self._give_up_at_s:
            return
        self._keeper.kill()
        self._keeper.wait()
        os.close(self._pipe)
        self.exit_code = self._leader.wait()

    def stop(self, now_s: float, grace_s: float | None = None) -> None:
        """Ask the group to end; `poll` kills it after the grace. A repetition can only shorten that."""
        grace_s = self._grace_s if grace_s is None else grace_s
        if self.exit_code is None and now_s + grace_s < self._kill_at_s:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)
            self._kill_at_s = now_s + grace_s
            self._give_up_at_s = self._kill_at_s + KILL_S

    @property
    def stuck(self) -> bool:
        """Whether it was given up: it was killed and exists all the same."""
        return self.exit_code is not None and self._leader.returncode is None

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Worker:
    """The ranks of one node in one round.

    Parameters
    ----------
    job : running; `node` is a member
    """

    def __init__(self, job: Job, node: str, command: Sequence[str], grace_s: float, max_restarts: int) -> None:
        self.round = job.round
        environs = [environment(job, node, local_rank, max_restarts) for local_rank in range(job.ranks_per_node)]
        self._files = [
            (folder / progress.file_name(job.job, int(environ["RANK"])), local_rank)
            for local_rank, environ in enumerate(environs)
            for folder in run_dirs(environ, os.getuid())
        ]
        self._processes: list[Process] = []
        try:
            for environ in environs:
                self._processes.append(Process(command, environ, grace_s))
        except BaseException:
            self.stop(grace_s=0.0)
            raise

    def poll(self) -> None:
        """Notice ends, and carry on with a stop that was begun."""
        for process in self._processes:
            process.poll(monotonic_s())

    def stop(self, grace_s: float | None = None) -> None:
        """Ask all ranks to end; `poll` sees to it."""
        for process in self._processes:
            process.stop(monotonic_s(), grace_s)

    @property
    def pids(self) -> tuple[int, ...]:
        """The ranks that exist, by local rank."""
        return tuple(process.pid for process in self._processes if process.exit_code is None)

    @property
    def exit_codes(self) -> dict[str, int]:
        """The ranks that ended: exit code by local rank."""
        return {str(local): p.exit_code for local, p in enumerate(self._processes) if p.exit_code is not None}

    @property
    def stuck(self) -> tuple[int, ...]:
        """Ranks that were killed and exist all the same."""
        return tuple(process.pid for process in self._processes if process.stuck)

    def step(self) -> int | None:
        """Return the newest step that any of these ranks tells of, None when none does."""
        steps = []
        for path, local_rank in self._files:
            state = progress.read(path)
            # An earlier round wrote under the same name.
            if state is not None and state.step >= 0 and state.start_ticks >= self._processes[local_rank].start_ticks:
                steps.append(state.step)
        return max(steps, default=None)


class Background(Generic[T]):
    """A function at work in a thread that nobody waits for: a hung disk must not silence the launcher."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._result: T
        self._error: EagleEyeError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except EagleEyeError as error:
            self._error = error

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has ended, after at most `timeout_s` seconds."""
        self._thread.join(max(timeout_s, 0.0))
        return not self._thread.is_alive()

    def result(self) -> T:
        """Return what the function returned, once it has ended; raise the EagleEyeError that it raised."""
        if self._error is not None:
            raise self._error
        return self._result


def environment(job: Job, node: str, local_rank: int, max_restarts: int) -> dict[str, str]:
    """Return the environment of a rank: this process's, torchrun's variables, and ours."""
    node_rank, nodes = job.members[node], len(job.members)
    rank, world_size = node_rank * job.ranks_per_node + local_rank, nodes * job.ranks_per_node
    inherited = {k: v for k, v in os.environ.items() if k not in ("TORCHELASTIC_USE_AGENT_STORE", "EAGLEEYE_CHECKPOINT__PEERS")}
    peers = ",".join(f"{name}={address}" for name, address in job.peers.items())
    return {
        **inherited,
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(job.ranks_per_node),
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": job.master_address,
        "MASTER_PORT": str(job.master_port),
        "TORCHELASTIC_RUN_ID": job.job,
        "TORCHELASTIC_RESTART_COUNT": str(job.round - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "EAGLEEYE_JOB": job.job,
        "EAGLEEYE_NODE": node,
        **({"EAGLEEYE_CHECKPOINT__PEERS": peers} if peers else {}),
    }


def _alive(group: int) -> bool:
    """Whether a process of the group exists that is no zombie."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b") ")[2].split()
                if int(fields[2]) == group and fields[0] not in (b"Z", b"X"):
                    return True
    return False
