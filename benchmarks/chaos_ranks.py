"""The ranks of the chaos campaign: processes that save and restore by the shipped `checkpoint.client.Client`, as they are told.

They are forked from one process, the nursery, that has imported torch once. They agree by pipes instead of torch.distributed.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import chaos_faults
from chaos_oracle import LEVELS, Told, content

ROWS = 16
"""Ranks have the rows of `chaos_faults.Control` from here on, caches those before."""
AGREE_S = 20.0
_MOST_FILES = 16


def fork(run: Callable[[], None], keep: list[int], errors: Path) -> int:
    """Run a function in a process of its own that has no open files but `keep`; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        chaos_faults.end_with_parent()
        file = os.open(errors, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        os.dup2(file, 2)
        os.dup2(file, 1)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in keep:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


@dataclass(frozen=True)
class Birth:
    """What a rank is told at its start."""

    seed: str
    start: int
    rank: int
    world: int
    run_dir: str
    storage: str
    speed: float
    errors: str


class Nursery:
    """The process from which ranks are forked. Leave it as a context; children of this process may use it.

    Parameters
    ----------
    change : called in it before anything else; a test breaks the engine with it
    """

    def __init__(self, change: Callable[[], None] | None = None) -> None:
        self._change = change

    def __enter__(self) -> "Nursery":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("")  # a name that the kernel chooses
        listener.listen(64)
        self._address = listener.getsockname()
        self._pid = fork(lambda: self._serve(listener), [listener.fileno()], Path(os.devnull))
        listener.close()
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def bear(self, birth: Birth, files: list[int]) -> int:
        """Start a rank with these files: those of `chaos_faults.Control`, its orders, its agreement; return its pid."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(60.0)
            sock.connect(self._address)
            socket.send_fds(sock, [json.dumps(birth.__dict__).encode()], files)
            return int(sock.recv(32))

    def _serve(self, listener: socket.socket) -> None:
        import gc

        import torch

        import checkpoint.client  # noqa: F401

        if self._change is not None:
            self._change()
        torch.set_num_threads(1)
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for ranks
        while True:
            sock, _ = listener.accept()
            with sock:
                words, files, _, _ = socket.recv_fds(sock, 1 << 16, _MOST_FILES)
                birth = Birth(**json.loads(words))
                pid = fork(lambda birth=birth, files=files: _be_rank(birth, files), files, Path(birth.errors))
                sock.sendall(str(pid).encode())
            for file in files:
                os.close(file)


class _Agreement:
    """The ranks' agreement by pipes: rank 0 has one to each other rank, they have one to it."""

    def __init__(self, rank: int, pipes: list[Connection]) -> None:
        self._rank, self._pipes = rank, pipes

    def largest(self, number: int) -> int:
        """Return the largest number that any rank gives."""
        if self._rank == 0:
            number = max([number, *(_received(pipe) for pipe in self._pipes)])
        else:
            self._pipes[0].send(number)
        return int(self.tell(number))

    def tell(self, words: Any) -> Any:
        """Return what rank 0 says."""
        if self._rank:
            return _received(self._pipes[0])
        for pipe in self._pipes:
            pipe.send(json.loads(json.dumps(words)))
        return json.loads(json.dumps(words))

    def gather(self, words: Any) -> list[Any]:
        """Return what each rank says."""
        if self._rank:
            self._pipes[0].send(words)
            return list(self.tell(None))
        return list(self.tell([words, *(_received(pipe) for pipe in self._pipes)]))


def _received(pipe: Connection) -> Any:
    if not pipe.poll(AGREE_S):
        raise TimeoutError("another rank does not answer")
    return pipe.recv()


def _be_rank(birth: Birth, files: list[int]) -> None:
    import checkpoint.client

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    chaos_faults.install(chaos_faults.Control(files[0]), ROWS + birth.rank, birth.storage, birth.speed)
    pipe, hub = Connection(files[1]), [Connection(file) for file in files[2:]]
    checkpoint.client.agreement = lambda _: _Agreement(birth.rank, hub)
    client = checkpoint.client.Client("chaos", birth.rank, birth.world, run_dir=birth.run_dir, timeout_s=5.0)
    sending = threading.Lock()

    def tell(*words: Any) -> None:
        with sending, contextlib.suppress(OSError):
            pipe.send(words)

    while True:
        try:
            what, *how = pipe.recv()
        except EOFError:
            return
        if what == "load":
            tell("load", _load(client, *how))
        else:
            _save(client, tell, birth, *how)


def _load(client: Any, into_bytes: int) -> Told:
    try:
        into = state(bytes(into_bytes), (0, 0, 0)) if into_bytes else None
        restored = client.load(into=into)
    except Exception as error:
        return Told("failed", why=f"{type(error).__name__}: {error}")
    if restored is None:
        return Told("nothing")
    held = restored.state if into is None else into
    sha256 = hashlib.sha256(held["a"].numpy().tobytes() + held["b"].numpy().tobytes()).hexdigest()
    who = tuple(restored.state["who"])
    return Told("restored", restored.generation, restored.step, who, sha256, restored.source, "; ".join(restored.notes))


def _save(client: Any, tell: Callable[..., None], birth: Birth, step: int, nbytes: int, overlap: bool) -> None:
    try:
        held = state(content(birth.seed, birth.start, step, birth.rank, nbytes), (birth.start, step, birth.rank))
        handle = client.save(step, held, overlap=overlap)
        if overlap:
            client.fence()
        # what training does with them next must not reach what was saved
        for name in ("a", "b"):
            held[name].fill_(0x55)
    except Exception as error:
        tell("save", step, f"{type(error).__name__}: {error}")
        return

    def reached(level: str) -> Callable[["Future[None]"], None]:
        return lambda future: tell("level", step, level, str(future.exception() or ""))

    tell("named", step, handle.generation)
    for level in LEVELS:
        getattr(handle, level).add_done_callback(reached(level))
    tell("save", step, "")


def state(data: bytes, who: tuple[int, int, int]) -> dict[str, Any]:
    """Return a state that holds these bytes as two tensors."""
    import torch

    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    half = len(data) // 8 * 4
    return {"a": flat[:-half].clone(), "b": flat[-half:].clone().view(torch.int32), "who": list(who)}
