"""The training process's side: save a state in the time of a copy, restore the newest one that all ranks have.

::

    client = Client()
    restored = client.load(into=state)              # None at the very first start
    ...
    client.save(step, state)                        # returns after the copy; the rest happens in the node's cache
"""

import mmap
import os
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from checkpoint import place
from checkpoint.agreement import Agreement, agreement
from checkpoint.connection import CONNECT_S, Connection, mapped
from checkpoint.errors import CacheGone, CannotRun, CheckpointError, Corrupt, Superseded, UsageError
from checkpoint.manifest import Generation, Key, Manifest, check_job, decode, generation, verify
from checkpoint.protocol import MAX_STATE_BYTES, Message
from checkpoint.state import Place, Stateful, Walker, misfit, places, put_into, unflatten, views

LEVELS = ("cached", "replicated", "persistent")
AGAIN_S = 1.0
_FINE, _BAD_COPY, _FATAL = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Handle:
    """One rank's part of one save. Each level is a `concurrent.futures.Future`: ``handle.persistent.result(timeout=60)``.

    `cached`: the node's cache has it, a crash of the training process cannot harm it. `replicated`: another node has a copy.
    `persistent`: it is in the storage folder. A level that will not be reached raises a `CheckpointError` that says why.
    """

    step: int
    generation: str
    cached: "Future[None]" = field(default_factory=Future)
    replicated: "Future[None]" = field(default_factory=Future)
    persistent: "Future[None]" = field(default_factory=Future)

    def wait(self, level: str = "cached", timeout_s: float | None = None) -> None:
        """Return when `level` is reached.

        Raises
        ------
        CheckpointError
            It will not be reached, or not in time.
        """
        if level not in LEVELS:
            raise UsageError(f"there is no level {level!r}; there are {', '.join(LEVELS)}")
        try:
            getattr(self, level).result(timeout_s)
        except FutureTimeout:
            raise CheckpointError(f"step {self.step} is not {level} after {timeout_s:g} s") from None

    def _reach(self, level: str, error: CheckpointError | None = None) -> None:
        future: Future[None] = getattr(self, level)
        # what came first counts: a level that was reached stays reached when the cache goes away
        with suppress(InvalidStateError):
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


@dataclass(frozen=True, slots=True)
class Restored:
    """What `Client.load` restored. `source` is ``local``, ``neighbour`` or ``storage``, `holder` the node that held the copy.

    `state` is all that was saved, in memory of its own. `notes` tell which newer generations or nearer copies were passed over,
    and why.
    """

    step: int
    generation: str
    source: str
    holder: str
    seconds: float
    state: Any
    notes: tuple[str, ...] = ()


class Client:
    """One rank's connection to the cache of its node. Use one per process, from one thread.

    Parameters
    ----------
    job, rank, world_size : default from EAGLEEYE_JOB (else TORCHELASTIC_RUN_ID), RANK and WORLD_SIZE
    run_dir : run folder of the cache; default as the cache chooses it
    timeout_s : how long `save` waits for free memory before it raises; meanwhile training stands still, and nothing is skipped

    Raises
    ------
    UsageError
        Rank, world size or the job's name are impossible.
    """

    def __init__(
        self,
        job: str = "",
        rank: int | None = None,
        world_size: int | None = None,
        *,
        run_dir: str = "",
        timeout_s: float = 60.0,
    ) -> None:
        env = os.environ
        named = job or env.get("EAGLEEYE_JOB") or env.get("TORCHELASTIC_RUN_ID", "").removeprefix("none")
        if not named:
            raise UsageError(
                "the job has no name that tells its checkpoints from another job's: say Client('llama') or set EAGLEEYE_JOB"
            )
        self.job = check_job(named)
        self.rank = _number(env, "RANK", 0) if rank is None else rank
        self.world_size = _number(env, "WORLD_SIZE", 1) if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"there is no rank {self.rank} among {self.world_size}; check RANK and WORLD_SIZE")
        try:
            text = env.get("EAGLEEYE_CHECKPOINT__PEERS")
            self._peers = None if text is None else place.peers(text)
        except ValueError as error:
            raise UsageError(f"EAGLEEYE_CHECKPOINT__PEERS: {error}") from None
        self._run_dir = place.run_dir(run_dir)
        self._timeout_s = timeout_s
        self._agreement: Agreement | None = None
        self._start: tuple[int, str] | None = None
        # who came later is the rank; all processes of a node see the same monotonic clock
        self._born = time.monotonic_ns()
        self._gone = f"the cache in {self._run_dir} is gone"
        self._connect_lock = threading.Lock()
        self._look_lock = threading.Lock()
        self._walker = Walker()
        self._layout: _Layout | None = None
        self._layouts = 0
        self._last: Handle | None = None
        self._connection: _Session | None = None
        self._used: _Session | None = None
        self._short = False
        self._connecting: threading.Thread | None = None
        self._closed = False

    def load(self, into: Any = None) -> Restored | None:
        """Restore the newest generation of which every rank's shard is intact; None when nothing was ever saved.

        All ranks call it together and go on from the same generation. `into`, a state as it is given to `save`, is filled in
        place, and only when every rank has verified bytes that fit; without it the state is only returned.

        Raises
        ------
        CacheGone
            A rank has no cache on its node.
        CheckpointError
            A generation existed, or may have existed where nobody answers, and none can be restored: whether to start anew is
            for a human to decide.
        UsageError
            What was saved does not fit into `into`.
        """
        if into is not None and not isinstance(into, Mapping | list | tuple | Tensor | Stateful):
            raise UsageError(f"a state cannot be put into a {type(into).__name__}; give what `save` is given")
        began_s = time.monotonic()
        together = self._together()
        connection, problem = None, ""
        try:
            connection = self._connected(CONNECT_S)
        except CheckpointError as error:
            problem = str(error)
        if together.largest(_FATAL if connection is None else _FINE) or connection is None:
            raise CacheGone(problem or "another rank has no cache on its node, and says so; nobody restores")
        excluded: list[str] = []
        notes: list[str] = []
        while True:
            choice = together.tell(self._choose(connection, excluded, notes) if self.rank == 0 else None)
            if "error" in choice:
                raise CheckpointError(choice["error"])
            chosen = choice["generation"]
            if chosen is None:
                self._begin(together, choice["attempt"])
                for note in notes:
                    _say(f"rank {self.rank}: {note}")
                if self.rank == 0:
                    _say(f"no checkpoint of job {self.job} exists; it starts anew")
                return None
            code, problem, fetched = self._fetch(connection, chosen, into)
            worst = together.largest(code)
            if worst == _FATAL:
                raise UsageError(problem or f"the checkpoint of step {generation(chosen).step} does not fit on another rank")
            if worst == _FINE and fetched is not None:
                break
            notes.append(problem or f"step {generation(chosen).step}: another rank found no intact copy")
            excluded.append(chosen)
        state, answer = fetched
        if into is not None:
            put_into(into, state)
        self._begin(together, choice["attempt"])
        notes += answer["tried"]
        step = generation(chosen).step
        restored = Restored(
            step, chosen, answer["source"], answer["holder"], time.monotonic() - began_s, state, tuple(notes)
        )  # fmt: skip
        for note in notes:
            _say(f"rank {self.rank}: {note}")
        _say(f"rank {self.rank} restored step {step} from {_place(restored)} in {restored.seconds:.2f} s")
        return restored

    def save(self, step: int, state: Any) -> Handle:
        """Save this rank's part of the state after `step` and return as soon as it is copied.

        While the node's cache is gone the handle's levels raise `CacheGone` and training goes on; it is looked for meanwhile.
        Saving the same step again returns the same handle; to go back to an older step, `load` first.

        Raises
        ------
        UsageError
            The state holds something that cannot be saved, or `step` is no step or is older than the last one.
        CannotRun
            The cache had no memory free for `timeout_s` at the first save. Later this ends no training: the handle's levels raise
            it, and saves do not wait for long until one succeeds.
        """
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**12:
            raise UsageError(f"{step!r} is no step to save")
        if self._start is None:
            together = self._together()
            self._begin(together, together.largest(self._newest_attempt()))
        assert self._start is not None
        attempt, token = self._start
        wanted = str(Generation(attempt, step, token))
        if self._last is not None and self._last.generation == wanted:
            return self._last
        if self._last is not None and wanted < self._last.generation and generation(self._last.generation).token == token:
            raise UsageError(f"step {step} cannot be saved after step {self._last.step}; load an older state before")
        flat = self._walker.flatten(state)
        handle = Handle(step, wanted)
        connection = self._connection_or_none(0.0)
        if self._used is not None and self._used is not connection:
            self._used.unmap()  # a dead cache's memory is free when nobody maps it any more
        self._used = connection
        if connection is None:
            return self._failed(handle, CacheGone(f"{self._gone}; step {step} is saved nowhere"))
        if self._layout is None or not self._layout.fits(flat.tensors, flat.skeleton):
            self._layouts += 1
            self._layout = _Layout(self._layouts, flat.tensors, flat.skeleton)
        try:
            patience_s = min(self._timeout_s, AGAIN_S) if self._short else self._timeout_s
            connection.save(handle, self._layout, flat.tensors, flat.values, patience_s)
        except (OSError, CacheGone) as error:
            connection.lose(f"the cache in {self._run_dir} went away ({error})")
            return self._failed(handle, CacheGone(f"the cache in {self._run_dir} went away during the save of step {step}"))
        except (CannotRun, UsageError) as error:
            # a cache or a state that is ill-sized shows at the first save; what is in training already is not ended by it
            if self._last is None:
                raise
            _say(f"rank {self.rank}: step {step} is saved nowhere: {error}; training goes on")
            self._short = isinstance(error, CannotRun)
            return self._failed(handle, error)
        self._last, self._short = handle, False
        return handle

    def _failed(self, handle: Handle, error: CheckpointError) -> Handle:
        for level in LEVELS:
            handle._reach(level, error)
        return handle

    def close(self) -> None:
        """End the connection and let go of the shared memory. What was saved stays in the cache."""
        self._closed = True
        if self._connection is not None:
            self._connection.lose("the client was closed")
            self._connection.unmap()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _together(self) -> Agreement:
        if self._agreement is None:
            self._agreement = agreement(self.world_size)
        return self._agreement

    def _choose(self, connection: "_Session", excluded: list[str], notes: list[str]) -> Message:
        """Return rank 0's choice for all: a generation, or that there is none yet, or why nobody may go on."""
        until_s = time.monotonic() + CONNECT_S
        try:
            answer = connection.ask({"op": "choose", "exclude": excluded}, "chosen")
            while answer["unreached"] and not _is_newest(answer) and time.monotonic() < until_s:
                # the caches of a job that starts come up one after the other
                time.sleep(0.2)
                answer = connection.ask({"op": "choose", "exclude": excluded}, "chosen")
        except CheckpointError as error:
            return {"error": str(error)}
        notes += [note for note in answer["passed_over"] if note not in notes]
        existed = max(filter(None, (answer["existed"], *excluded)), default=None)
        if answer["generation"] is None and existed is not None:
            step, why = generation(existed).step, "; ".join(notes)
            sentence = f"job {self.job} had a checkpoint of step {step} and nothing can be restored ({why})"
            return {"error": f"{sentence}; bring its holders back, or give the job another name to start anew"}
        if answer["generation"] is None and answer["unreached"]:
            sentence = f"no checkpoint of job {self.job} was found, but not all could be asked ({'; '.join(answer['unreached'])})"
            return {"error": f"{sentence}; bring them back, or leave them out to start anew"}
        return {"generation": answer["generation"], "attempt": answer["attempt"]}

    def _newest_attempt(self) -> int:
        """Return the number of the newest start that the cache knows of, 0 when it knows none or is not there."""
        connection = self._connection_or_none(CONNECT_S)
        with suppress(CheckpointError):
            if connection is not None:
                return int(connection.ask({"op": "choose", "exclude": []}, "chosen")["attempt"])
        return 0

    def _begin(self, together: Agreement, newest_attempt: int) -> None:
        """Give the generations of this start a number and a token that no other start has, the same on every rank.

        The number is the time, so that it grows even when no cache is there to tell the last one.
        """
        self._start = tuple(together.tell([max(newest_attempt + 1, int(time.time())), secrets.token_hex(4)]))

    def _fetch(self, connection: "_Session", chosen: str, into: Any) -> tuple[int, str, tuple[Any, Message] | None]:
        """Return (how it went, what is wrong, the state and where it came from)."""
        try:
            manifest, buffer, answer = connection.fetch(chosen)
            content = manifest.content
            where = [Place(*item) for item in content["items"]["places"]]
            state = unflatten(content["items"]["skeleton"], views(buffer, where), content["values"])
        except (KeyError, TypeError) as error:
            return _BAD_COPY, f"step {generation(chosen).step}: its description is broken ({error})", None
        except (CheckpointError, OSError) as error:
            return _BAD_COPY, str(error), None
        if into is not None and (why := misfit(into, state)):
            return _FATAL, f"the checkpoint of step {generation(chosen).step} does not fit: {why}", None
        return _FINE, "", (state, answer)

    def _connected(self, patience_s: float) -> "_Session":
        """Return a living connection, trying for `patience_s`. Raises CheckpointError."""
        until_s = time.monotonic() + patience_s
        with self._connect_lock:
            while self._connection is None or self._connection.lost:
                try:
                    self._connection = _Session(self)
                except CacheGone as error:
                    self._gone = str(error)
                    if time.monotonic() >= until_s:
                        raise
                    time.sleep(0.1)
                except UsageError as error:
                    if str(error) != self._gone:
                        _say(f"rank {self.rank}: {error}; training goes on without checkpoints")
                    self._gone = str(error)
                    raise
            return self._connection

    def _connection_or_none(self, patience_s: float) -> "_Session | None":
        """Return a living connection, or None and look for the cache in the background."""
        if self._connection is not None and not self._connection.lost:
            return self._connection
        if patience_s:
            try:
                return self._connected(patience_s)
            except UsageError:
                pass  # it was said
            except CacheGone as error:
                _say(f"rank {self.rank}: {error}; training goes on without checkpoints until it is there")
        with self._look_lock:
            if self._connecting is None or not self._connecting.is_alive():
                self._connecting = threading.Thread(target=self._look_for_cache, daemon=True)
                self._connecting.start()
        return None

    def _look_for_cache(self) -> None:
        while not self._closed:
            try:
                self._connected(0.0)
            except CheckpointError:
                time.sleep(AGAIN_S)
            else:
                _say(f"rank {self.rank}: the cache is back; checkpoints go on")
                break
        if self._closed and self._connection is not None:
            self._connection.lose("the client was closed")


class _Layout:
    """Where the tensors of a state lie in a shard. Made once, and used as long as the state keeps its form."""

    def __init__(self, number: int, tensors: list[Tensor], skeleton: Any) -> None:
        self.number = number
        self.skeleton = skeleton
        self.places, self.nbytes = places(tensors)
        self._forms = [(t.dtype, t.shape) for t in tensors]

    def fits(self, tensors: list[Tensor], skeleton: Any) -> bool:
        """Whether this is the layout of a state."""
        if self.skeleton is skeleton:
            return True
        return self.skeleton == skeleton and self._forms == [(t.dtype, t.shape) for t in tensors]


class _Session:
    """One connection, the saves that are under way on it, and what its slabs look like as tensors."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._handles: dict[str, Handle] = {}
        self._views: dict[tuple[int, int], list[Tensor]] = {}
        self._layout_sent = 0
        hello: Message = {"job": client.job, "rank": client.rank, "world_size": client.world_size}
        hello |= {"born": client._born, "peers": client._peers}
        self._connection = Connection(client._run_dir, hello, self._heard, self._ended, self._forgot)

    @property
    def lost(self) -> str:
        """Why the connection is lost; empty while it is not."""
        return self._connection.lost

    def ask(self, message: Message, expected: str) -> Message:
        """Send a question and return its answer. Raises CacheGone."""
        return self._connection.ask(message, expected)[0]

    def fetch(self, chosen: str) -> tuple[Manifest, mmap.mmap, Message]:
        """Return a shard's manifest, its bytes in memory of our own, verified, and what the cache tells of their origin."""
        answer, files = self._connection.ask({"op": "fetch", "generation": chosen}, "fetched")
        if "error" in answer:
            raise CheckpointError(answer["error"])
        try:
            manifest = decode(answer["manifest"])
            # optimizers keep the tensors that they are given, so these must not lie in memory that the cache uses again
            buffer = mmap.mmap(-1, max(1, manifest.nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if manifest.nbytes:
                with suppress(OSError):  # a kernel without huge pages
                    buffer.madvise(mmap.MADV_HUGEPAGE)
                shared = mapped(files.pop(), manifest.nbytes)
                torch.frombuffer(buffer, dtype=torch.uint8).copy_(torch.frombuffer(shared, dtype=torch.uint8))
        finally:
            for file in files:
                os.close(file)
            self._connection.send({"op": "release", "slab": answer["slab"]})
        verify(manifest, memoryview(buffer)[: manifest.nbytes])
        if manifest.key != Key(self._client.job, generation(chosen), self._client.rank):
            raise Corrupt(f"the cache gave another shard than that of step {generation(chosen).step}")
        return manifest, buffer, answer

    def save(self, handle: Handle, layout: _Layout, tensors: list[Tensor], values: list[Any], timeout_s: float) -> None:
        """Copy the tensors into a slab and hand it to the cache."""
        if layout.number != self._layout_sent:
            items = {"skeleton": layout.skeleton, "places": layout.places}
            self._connection.send({"op": "layout", "layout": layout.number, "items": items}, MAX_STATE_BYTES)
            self._layout_sent = layout.number
            self._views.clear()
        number, slab = self._connection.room(layout.nbytes, timeout_s)
        into = self._views.get((number, layout.number))
        if into is None:
            into = self._views[number, layout.number] = views(slab, layout.places)
        if tensors:
            with torch.no_grad():
                torch._foreach_copy_(into, tensors)
        self._handles[handle.generation] = handle
        seal = {"op": "seal", "slab": number, "generation": handle.generation, "layout": layout.number}
        try:
            self._connection.send(seal | {"values": values, "nbytes": layout.nbytes}, MAX_STATE_BYTES)
        except UsageError:
            del self._handles[handle.generation]
            raise
        # the next save finds its memory waiting
        self._connection.reserve(layout.nbytes)

    def lose(self, why: str) -> None:
        """Give up: whoever waits for anything is told."""
        self._connection.lose(why)

    def unmap(self) -> None:
        """Let go of all slabs; no save may be under way."""
        self._connection.unmap()

    def _heard(self, message: Message) -> None:
        handle = self._handles.get(message["generation"])
        if handle is not None:
            error = message.get("error")
            # what the cache did not take goes no further
            for level in LEVELS if error and message["level"] == "cached" else (message["level"],):
                handle._reach(level, Superseded(error) if error else None)
            if handle.replicated.done() and handle.persistent.done():
                self._handles.pop(message["generation"], None)

    def _ended(self, why: str) -> None:
        for handle in list(self._handles.values()):
            for level in LEVELS:
                handle._reach(level, CacheGone(f"{why}, so it is not known whether step {handle.step} went further"))
        if not self._client._closed:
            _say(f"rank {self._client.rank}: {why}; it is looked for")
            self._client._connection_or_none(0.0)

    def _forgot(self, number: int) -> None:
        """Let go of a slab that is not needed any more, so that its memory is free."""
        for known in list(self._views):
            if known[0] == number:
                self._views.pop(known, None)


def _is_newest(answer: Message) -> bool:
    """Whether a choice is the newest generation that is known to have existed."""
    return answer["generation"] is not None and answer["generation"] >= (answer["existed"] or "")


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(env.get(name, default))
    except ValueError:
        raise UsageError(f"{name}={env[name]!r} is no number") from None


def _place(restored: Restored) -> str:
    if restored.source == "neighbour":
        return f"neighbour {restored.holder}"
    return "this node's memory" if restored.source == "local" else "storage"


def _say(text: str) -> None:
    # a full disk or a broken pipe below the log is no reason to end a training
    with suppress(OSError, ValueError):
        print(f"checkpoint: {text}", file=sys.stderr, flush=True)
