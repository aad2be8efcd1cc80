"""Real caches, each a process of its own, and training processes that are killed and stopped as real ones are."""

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from checkpoint.client import Client
from checkpoint.tcp import Tcp

EAGLEEYE = "import sys; from eagleeye.cli import main; sys.exit(main(sys.argv[1:]))"
SLOW_STORAGE = """
import time
from checkpoint.storage import Folder
write = Folder.write
def slowly(*arguments):
    time.sleep({write_s})
    write(*arguments)
Folder.write = slowly
"""
TRAINERS = multiprocessing.get_context("forkserver")
TRAINERS.set_forkserver_preload(["torch", "torch.distributed", "checkpoint.client"])


def free_ports(count: int) -> list[int]:
    """Return TCP ports that nobody uses now."""
    with contextlib.ExitStack() as held:
        socks = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in socks]


def poll(condition: Callable[[], Any], patience_s: float = 20.0) -> Any:
    """Return the first true value of `condition`."""
    until_s = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < until_s, "it never happened"
        time.sleep(0.02)
    return value


@dataclass
class Node:
    """One node's cache: started by the real command, killed as often as a test likes."""

    name: str
    folder: Path
    port: int
    flags: list[str]
    write_s: float = 0.0
    """How much longer than it takes a write to storage takes."""
    process: "subprocess.Popen[bytes] | None" = None
    clients: list[Client] = field(default_factory=list)

    @property
    def run_dir(self) -> str:
        return str(self.folder / "run")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def said(self) -> str:
        """All that the caches of this node ever wrote to standard error."""
        return (self.folder / "stderr").read_text()

    def start(self, before: str = "") -> "Node":
        """Start the process; `before` is code that it runs first."""
        self.folder.mkdir(parents=True, exist_ok=True)
        code = (SLOW_STORAGE.format(write_s=self.write_s) if self.write_s else before) + EAGLEEYE
        with (self.folder / "stderr").open("ab") as errors, (self.folder / "stdout").open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "cache", "--node", self.name, "--address", "127.0.0.1", "--port", str(self.port),
                 "--run-dir", self.run_dir, *self.flags],
                cwd=self.folder, env={"PATH": os.environ["PATH"]}, stdout=out, stderr=errors,
            )  # fmt: skip
        return self

    def ready(self) -> "Node":
        assert self.process is not None
        process = self.process
        poll(lambda: "cache of " in (self.folder / "stdout").read_text() or process.poll() is not None)
        assert process.poll() is None, self.said
        return self

    def kill(self) -> None:
        """End the process as a broken machine ends it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Ask the process to end and return its exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout=20)

    def client(self, job: str = "job", rank: int = 0, world_size: int = 1, **options: Any) -> Client:
        made = Client(job, rank, world_size, run_dir=self.run_dir, **options)
        self.clients.append(made)
        return made

    def close_clients(self) -> None:
        while self.clients:
            self.clients.pop().close()

    def slabs(self) -> list[Path]:
        """Return the memory files of this cache, through which a test can flip bits."""
        found = {}
        for path in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if "eagleeye-slab" in os.readlink(path):
                    found[path.stat().st_ino] = path
        return list(found.values())


@dataclass
class Cluster:
    """Caches that know each other, and the storage folder that they share."""

    nodes: list[Node]
    storage: Path

    def __getitem__(self, at: int) -> Node:
        return self.nodes[at]

    def start(self) -> "Cluster":
        for node in self.nodes:
            node.start()
        for node in self.nodes:
            node.ready()
        return self

    def end(self) -> None:
        for node in self.nodes:
            node.close_clients()
            if node.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(node.pid, signal.SIGCONT)
                node.kill()


def build(
    folder: Path,
    count: int,
    *flags: str,
    storage: Path | str | None = "storage",
    peers: bool = True,
    write_s: tuple[float, ...] = (),
) -> Cluster:
    """Return a cluster that is not started yet. `storage` is a path, a name in `folder`, or None."""
    ports = free_ports(count)
    shared = [] if storage is None else ["--storage", str(folder / storage)]
    if storage is not None and not Path(folder / storage).exists():
        Path(folder / storage).mkdir(parents=True)
    others = ["--peers", ",".join(f"node{i}=127.0.0.1:{port}" for i, port in enumerate(ports))] if peers else []
    nodes = [Node(f"node{i}", folder / f"node{i}", port, [*shared, *others, *flags]) for i, port in enumerate(ports)]
    for node, slowness_s in zip(nodes, write_s, strict=False):
        node.write_s = slowness_s
    return Cluster(nodes, folder / (storage or "nowhere"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Start `count` caches of this test's own: ``cluster(3, "--memory-bytes", "64MiB", storage=None)``."""
    made: list[Cluster] = []

    def start(count: int, *flags: str, **options: Any) -> Cluster:
        made.append(build(tmp_path / f"cluster{len(made)}", count, *flags, **options))
        return made[-1].start()

    yield start
    for one in made:
        one.end()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three caches for all tests of a file that kill none; every test uses a job of its own."""
    made = build(tmp_path_factory.mktemp("three"), 3).start()
    yield made
    made.end()


@pytest.fixture(name="poll")
def _poll() -> Callable[..., Any]:
    return poll


@pytest.fixture(autouse=True)
def no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", *(name for name in os.environ if name.startswith("EAGLEEYE_"))):
        monkeypatch.delenv(name, raising=False)


@dataclass
class Trainer:
    """A training process and what it tells."""

    process: BaseProcess
    pipe: Connection

    def tells(self, patience_s: float = 60.0) -> Any:
        """Return the next thing that it tells; how it failed if it does."""
        assert self.pipe.poll(patience_s), "the training process tells nothing"
        return self.pipe.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


PRELUDE = """
import os, sys, time
import torch
from checkpoint.client import Client
from checkpoint.errors import CheckpointError
sys.stderr = open(os.devnull, "w") if quiet else sys.stderr
torch.set_num_threads(1)
"""


@pytest.fixture
def trainer() -> Iterator[Callable[..., Trainer]]:
    """Start a training process that runs `code`, in which `tell(...)` reports to the test; keywords are names in it."""
    made: list[Trainer] = []

    def start(code: str, **names: Any) -> Trainer:
        ours, theirs = TRAINERS.Pipe()
        process = TRAINERS.Process(target=exec, args=(PRELUDE + code, {"pipe": theirs, "quiet": True, **names}))
        process.start()
        theirs.close()
        made.append(Trainer(process, ours))
        return made[-1]

    yield start
    for one in made:
        with contextlib.suppress(ProcessLookupError):
            one.signal(signal.SIGCONT)
        one.kill()
        one.pipe.close()
        one.process.close()


class Unheard:
    """Ranks that run in one process: each hears itself alone."""

    def largest(self, number: int) -> int:
        return number

    def tell(self, words: Any) -> Any:
        return [7, "00000007"] if isinstance(words, list) else words

    def gather(self, words: Any) -> list[Any]:
        return [words]


@pytest.fixture
def unheard() -> Unheard:
    return Unheard()


@contextlib.contextmanager
def _lending(transport: Tcp) -> Iterator[int]:
    """Yield the port at which others read what a transport lends."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def attend(sock: socket.socket) -> None:
            with sock, contextlib.suppress(OSError):
                transport.attend(sock, lambda link: None)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=attend, args=(server.accept()[0],), daemon=True).start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        accepting.join()


@pytest.fixture
def lending() -> Callable[[Tcp], AbstractContextManager[int]]:
    return _lending
