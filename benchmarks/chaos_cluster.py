"""The processes of one schedule of the chaos campaign: caches, ranks and the relay between caches. Real processes, all of them.

Caches run what is shipped: those of a `real` plan are started by the command ``eagleeye cache``, the others are forked from this
process, which has imported it already, and their clocks run `FAST` times as fast.
"""

import contextlib
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import chaos_faults
from chaos_plan import Plan
from chaos_ranks import ROWS, Birth, Nursery, fork

import checkpoint.errors
import checkpoint.server

FAST = 10.0
BOUND_S = 60.0
"""No operation may take longer. The engine's own limits on a wait are shorter."""
_COMMAND = """
import sys
sys.path[:] = {path!r}
import chaos_faults
chaos_faults.install(chaos_faults.Control({file}), {row}, {storage!r}, 1.0)
from eagleeye.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Broken(Exception):
    """A cache does not start although nothing is wrong any more."""


# ---- caches


@dataclass
class Cache:
    """The cache of one node, started as often as a schedule likes."""

    number: int
    folder: Path
    settings: checkpoint.server.Settings
    control: tuple[int, chaos_faults.Control]
    real: bool
    pid: int = 0
    stopped: bool = False
    commands: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    """Kept, as a `Popen` that is collected waits for its process, which `alive` does."""

    @property
    def run_dir(self) -> str:
        """Its run folder."""
        return self.settings.run_dir

    @property
    def errors(self) -> Path:
        """The file of what it says."""
        return self.folder / "stderr"

    def launch(self, *more: str) -> tuple[int, int]:
        """Start a process; return its pid and the file on which it says that it is ready."""
        self.folder.mkdir(exist_ok=True)
        ours, theirs = os.pipe()
        if self.real:
            code = _COMMAND.format(path=sys.path, file=self.control[0], row=self.number, storage=self.settings.storage)
            usual = asdict(checkpoint.server.Settings())
            told = {
                f"EAGLEEYE_CHECKPOINT__{name.upper()}": str(value)
                for name, value in asdict(self.settings).items()
                if value != usual[name]
            }
            with self.errors.open("ab") as errors:
                started = subprocess.Popen(
                    [sys.executable, "-c", code, "cache", *more],
                    cwd=self.folder, env={"PATH": os.environ["PATH"]} | told, stdout=theirs, stderr=errors,
                    pass_fds=[self.control[0]],
                )  # fmt: skip
            self.commands.append(started)
            pid = started.pid
        else:
            pid = fork(lambda: self._run(theirs, more), [theirs, self.control[0]], self.errors)
        os.close(theirs)
        return pid, ours

    def _run(self, out: int, more: tuple[str, ...]) -> None:
        os.dup2(out, 1)
        os.close(out)
        os.chdir(self.folder)
        sys.stdout = os.fdopen(1, "w")
        chaos_faults.install(self.control[1], self.number, self.settings.storage, FAST)
        try:
            os._exit(checkpoint.server.serve(self.settings, take_over="--take-over" in more))
        except checkpoint.errors.CheckpointError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(error.exit_code)

    def start(self) -> bool:
        """Start it and return whether it serves; it does not when it dies or is stopped at once."""
        if self.pid:
            return True
        self.pid, out = self.launch()
        self.stopped = False
        try:
            return bool(select.select([out], [], [], BOUND_S)[0] and os.read(out, 4096))
        finally:
            os.close(out)

    def replace(self) -> bool:
        """Have a new process take over what this one holds, which stays if the new one fails; return whether nothing was lost."""
        pid, out = self.launch("--take-over")
        serves = bool(select.select([out], [], [], BOUND_S)[0] and os.read(out, 4096))
        os.close(out)
        if not serves:
            exit_code(pid, BOUND_S)
            return True
        before, self.pid = self.pid, pid
        return exit_code(before, BOUND_S) == 0

    def alive(self) -> bool:
        """Whether it runs."""
        if self.pid:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self.pid, os.WNOHANG)[0]:
                    self.pid = 0
        return self.pid != 0

    def signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self.pid:
            os.kill(self.pid, number)

    def kill(self, *, politely: bool = False) -> bool:
        """End it and wait for that; return whether it could be done in the way that was asked for."""
        if not self.alive():
            return True
        pid, self.pid = self.pid, 0
        if politely:
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGTERM)
            return exit_code(pid, BOUND_S) is not None
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return True

    def memory(self) -> list[Path]:
        """Return the memory files that it holds."""
        found = {}
        for path in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(path).startswith("/memfd:") and "chaos-control" not in os.readlink(path):
                    found[path.stat().st_ino] = path
        return [found[inode] for inode in sorted(found)]


def exit_code(pid: int, patience_s: float) -> int | None:
    """Return how a process ended, None when it still runs, and then it is killed."""
    until_s = time.monotonic() + patience_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.005)


class Cluster:
    """All processes of a plan but its ranks. Leave it as a context."""

    def __init__(self, plan: Plan, folder: Path, network: str) -> None:
        self.plan = plan
        self.folder = folder
        self.storage = folder / "storage"
        self.file, self.control = chaos_faults.Control.make()
        self._relay = 0
        addresses = [f"{network}.{node + 1}" for node in range(plan.nodes)]
        near = 9481 if plan.relayed else 9480
        peers = ",".join(f"node{node}={address}:{near}" for node, address in enumerate(addresses))
        common = checkpoint.server.Settings(
            port=9480,
            memory_bytes=256 << 20,
            peers=peers,
            generations=plan.kept,
            stored_generations=plan.stored or 1,
            storage=str(self.storage) if plan.stored else "",
        )
        self.caches = []
        for node, address in enumerate(addresses):
            home = folder / f"node{node}"
            settings = replace(common, node=f"node{node}", address=address, run_dir=str(home / "run"))
            self.caches.append(Cache(node, home, settings, (self.file, self.control), plan.real))

    def __enter__(self) -> "Cluster":
        self.folder.mkdir(parents=True)
        if self.plan.relayed:
            listeners = [
                (cache.number, socket.create_server((cache.settings.address, 9481), backlog=64), (cache.settings.address, 9480))
                for cache in self.caches
            ]
            keep = [self.file, *(listener.fileno() for _, listener, _ in listeners)]
            self._relay = fork(
                lambda: chaos_faults.relay(self.control, listeners, self.plan.seed), keep, self.folder / "relay.stderr"
            )
            for _, listener, _ in listeners:
                listener.close()
        return self

    def __exit__(self, *_: object) -> None:
        for cache in self.caches:
            cache.kill()
        if self._relay:
            os.kill(self._relay, signal.SIGKILL)
            os.waitpid(self._relay, 0)
        os.close(self.file)

    def heal(self) -> list[int]:
        """Take all faults away and start what does not run; return the nodes whose caches had died. Raises Broken."""
        for cache in self.caches:
            if self.control.get(cache.number, "die_at"):
                cache.kill()  # it may be dying already, and would be found dead only later
        for row in range(ROWS + 8):
            for name in ("storage", "network", "die_at", "clock_offset_s"):
                self.control.set(row, name, 0)
        died = [cache.number for cache in self.caches if not cache.alive()]
        for cache in self.caches:
            if cache.stopped:
                cache.signal(signal.SIGCONT)
                cache.stopped = False
        for number in died:
            if not self.caches[number].start():
                raise Broken(f"the cache of node {number} does not start again: {self.caches[number].errors.read_text()[-300:]}")
        return died


# ---- ranks


@dataclass
class Rank:
    """One training process and what it told last."""

    start: int
    number: int
    world: int
    node: int
    pid: int
    end: int
    """A file that can be read when it has ended."""
    pipe: Connection
    stopped: bool = False
    answers: list[tuple[Any, ...]] = field(default_factory=list)

    def alive(self) -> bool:
        """Whether it runs."""
        return self.end >= 0 and not select.select([self.end], [], [], 0)[0]

    def kill(self) -> None:
        """End it as a broken machine does."""
        if self.alive():
            signal.pidfd_send_signal(self.end, signal.SIGKILL)
            select.select([self.end], [], [])

    def close(self) -> None:
        """Kill it and forget it."""
        self.kill()
        self.pipe.close()
        os.close(self.end)
        self.end = -1

    def ask(self, *words: Any) -> bool:
        """Tell it to do something; return whether it could be told."""
        try:
            self.pipe.send(words)
        except OSError:
            return False
        return True


def start_ranks(cluster: Cluster, nursery: Nursery, start: int, world: int, shift: int) -> list[Rank]:
    """Start the ranks of a job, rank r on node r + shift."""
    plan = cluster.plan
    wires = [multiprocessing.Pipe() for _ in range(world)]
    hub = [multiprocessing.Pipe() for _ in range(world - 1)]
    ranks = []
    for number in range(world):
        node = (number + shift) % plan.nodes
        cache = cluster.caches[node]
        birth = Birth(
            plan.seed, start, number, world, cache.run_dir, str(cluster.storage), 1.0 if plan.real else FAST,
            str(cluster.folder / f"rank{number}.stderr"),
        )  # fmt: skip
        hubs = [near for near, _ in hub] if number == 0 else [hub[number - 1][1]]
        pid = nursery.bear(birth, [cluster.file, wires[number][1].fileno(), *(end.fileno() for end in hubs)])
        ranks.append(Rank(start, number, world, node, pid, os.pidfd_open(pid), wires[number][0]))
    for end in [*(theirs for _, theirs in wires), *(end for pair in hub for end in pair)]:
        end.close()
    return ranks
