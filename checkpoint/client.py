"""The training process's side: save a state in the time of a copy, restore the newest one that all ranks have.

::

    client = Client()
    restored = client.load(into=state)              # None at the very first start
    ...
    client.save(step, state)                        # returns after the copy; the rest happens in the node's cache

Or, when the copy shall not stall training either::

    client.guard(optimizer)                         # `fence` before each step of the optimizer
    client.save(step, state, overlap=True)          # returns at once; the copy is made while the next step computes
"""

import mmap
import os
import random
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from checkpoint import place
from checkpoint.agreement import Agreement, agreement
from checkpoint.connection import CONNECT_S, WHEN_FULL, Connection, mapped
from checkpoint.errors import CacheGone, CannotRun, CheckpointError, Corrupt, Superseded, UsageError
from checkpoint.manifest import Generation, Key, Manifest, check_job, decode, generation
from checkpoint.protocol import MAX_STATE_BYTES, Message
from checkpoint.state import Flat, Place, Source, Stateful, Target, Walker, misfit, places, put_into, unflatten, views

LEVELS = ("cached", "replicated", "persistent")
TIERS = ("local", "neighbour", "storage")
AGAIN_S = 1.0
SAMPLE_SHARE = 0.01
"""So much of each copy is compared with what it was made of."""
LATE_BYTES = 64 << 10
"""Smaller tensors are copied at once also in an overlapped save: they cost nothing, and many change in the next forward pass."""
VERIFIERS = 8
_FINE, _BAD_COPY, _FATAL = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Handle:
    """One rank's part of one save. Each level is a `concurrent.futures.Future`: ``handle.persistent.result(timeout=60)``.

    `cached`: the node's cache has it, a crash of the training process cannot harm it. `replicated`: another node has a copy.
    `persistent`: it is in the storage folder. A level that will not be reached raises a `CheckpointError` that says why. No level
    of an overlapped save is reached before `Client.fence`.
    """

    step: int
    generation: str
    cached: "Future[None]" = field(default_factory=Future)
    replicated: "Future[None]" = field(default_factory=Future)
    persistent: "Future[None]" = field(default_factory=Future)
    _fence: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    _late: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Level -> why it is not reached yet."""

    def wait(self, level: str = "cached", timeout_s: float | None = None) -> None:
        """Return when `level` is reached; of an overlapped save, pass the fence before.

        Raises
        ------
        CheckpointError
            It will not be reached, or not in time.
        """
        if level not in LEVELS:
            raise UsageError(f"there is no level {level!r}; there are {', '.join(LEVELS)}")
        self._fence()
        try:
            getattr(self, level).result(timeout_s)
        except FutureTimeout:
            why = f": {self._late[level]}" if level in self._late else ""
            raise CheckpointError(f"step {self.step} is not {level} after {timeout_s:g} s{why}") from None

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

    `state` is what was filled, else all that was saved, in memory of its own. `notes` tell which newer generations or nearer
    copies were passed over, and why. `shards` are (source, holder) of every rank's, in their order.
    """

    step: int
    generation: str
    source: str
    holder: str
    seconds: float
    state: Any
    notes: tuple[str, ...] = ()
    shards: tuple[tuple[str, str], ...] = ()


class Client:
    """One rank's connection to the cache of its node. Use one per process, from one thread.

    Parameters
    ----------
    job, rank, world_size : default from EAGLEEYE_JOB (else TORCHELASTIC_RUN_ID), RANK and WORLD_SIZE
    run_dir : run folder of the cache; default as the cache chooses it
    when_full : what `save` does when the cache has no free memory, because storage or the neighbour is slow. ``wait``: it waits;
        ``raise``: it raises; ``drop_oldest_unflushed``: the cache lets go of an older generation that storage is still to have,
        if a newer one is complete
    timeout_s : how long `save` waits for free memory before it raises; meanwhile training stands still, and nothing is skipped

    Raises
    ------
    UsageError
        Rank, world size, the job's name or `when_full` are impossible.
    """

    def __init__(
        self,
        job: str = "",
        rank: int | None = None,
        world_size: int | None = None,
        *,
        run_dir: str = "",
        when_full: str = "wait",
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
        if when_full not in WHEN_FULL:
            raise UsageError(f"there is no way {when_full!r} to do when memory is full; there are {', '.join(WHEN_FULL)}")
        self._when_full = when_full
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
        self._pending: _Pending | None = None
        self._split: _Split | None = None
        self._restless: set[str] = set()
        """Where tensors are that changed before a fence: from then on they are copied at once."""
        self._draw = random.Random()
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
        self.fence()
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
            if worst == _FINE and fetched is not None:
                break
            if fetched is not None:
                fetched.release()
            if worst == _FATAL:
                raise UsageError(problem or f"the checkpoint of step {generation(chosen).step} does not fit on another rank")
            notes.append(problem or f"step {generation(chosen).step}: another rank found no intact copy")
            excluded.append(chosen)
        answer = fetched.answer
        if into is not None:
            put_into(into, fetched.state)
        fetched.release()
        self._begin(together, choice["attempt"])
        notes += answer["tried"]
        step = generation(chosen).step
        seconds = time.monotonic() - began_s
        shards = tuple((source, holder) for source, holder in together.gather([answer["source"], answer["holder"]]))
        state = fetched.state if into is None else into
        restored = Restored(step, chosen, answer["source"], answer["holder"], seconds, state, tuple(notes), shards)
        for note in notes:
            _say(f"rank {self.rank}: {note}")
        _say(f"rank {self.rank} restored step {step} from {_place(restored)} in {restored.seconds:.2f} s")
        if self.rank == 0 and len(shards) > 1:
            tiers = Counter(source for source, _ in shards)
            _say(f"step {step}, {len(shards)} shards: " + ", ".join(f"{tiers[t]} {t}" for t in TIERS if tiers[t]))
        return restored

    def save(self, step: int, state: Any, *, overlap: bool = False) -> Handle:
        """Save this rank's part of the state after `step` and return as soon as it is copied.

        With `overlap` it returns at once and large tensors are copied meanwhile: call `fence`, by `guard` or yourself, before
        anything changes them. What changed before was copied no one knows when, and is not saved: torch counts changes. Those
        that it does not see, made through numpy or ``.data``, are seen only by the sample that is compared.

        While the node's cache is gone the handle's levels raise `CacheGone` and training goes on; it is looked for meanwhile.
        Saving the same step again returns the same handle; to go back to an older step, `load` first.

        Raises
        ------
        UsageError
            The state holds something that cannot be saved, or `step` is no step or is older than the last one.
        CannotRun
            The cache had no memory free for `timeout_s` at the first save, or at any when memory is full and `when_full` is
            ``raise``. Otherwise this ends no training later: the handle's levels raise it, and saves do not wait for long until
            one succeeds.
        """
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**12:
            raise UsageError(f"{step!r} is no step to save")
        self.fence()
        if self._start is None:
            together = self._together()
            self._begin(together, together.largest(self._next_attempt()))
        assert self._start is not None
        attempt, token = self._start
        wanted = str(Generation(attempt, step, token))
        if self._last is not None and self._last.generation == wanted:
            return self._last
        if self._last is not None and wanted < self._last.generation and generation(self._last.generation).token == token:
            raise UsageError(f"step {step} cannot be saved after step {self._last.step}; load an older state before")
        flat = self._walker.flatten(state)
        if self._split is not None and self._split.source is not flat.source:
            self._split = None
        handle = Handle(step, wanted, _fence=self.fence) if overlap else Handle(step, wanted)
        connection = self._connection_or_none(0.0)
        if self._used is not None and self._used is not connection:
            self._used.unmap()  # a dead cache's memory is free when nobody maps it any more
        self._used = connection
        if connection is None:
            return self._failed(handle, CacheGone(f"{self._gone}; step {step} is saved nowhere"))
        if self._layout is None or not self._layout.fits(flat):
            self._layouts += 1
            self._layout = _Layout(self._layouts, flat)
        with self._not_ending_training(handle, connection):
            patience_s = min(self._timeout_s, AGAIN_S) if self._short else self._timeout_s
            number, target = connection.room(self._layout, patience_s)
            pending = _Pending(handle, connection, self._layout, number, target, flat)
            if overlap:
                self._split = self._split or _Split(flat, self._restless)
                pending.start(self._split)
                self._pending = pending
            else:
                target.fill(flat.source)
                self._seal(pending)
        return handle

    def fence(self) -> None:
        """Wait until an overlapped save is copied, and hand it to the cache if nothing changed before; else do nothing.

        It costs nothing when no overlapped save is under way.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with self._not_ending_training(pending.handle, pending.connection):
            changed, problem = pending.finish()
            if changed:
                self._restless.update(changed)
                self._split = None
                names = f"{changed[0]} and {len(changed) - 1} more" if len(changed) > 1 else changed[0]
                raise Corrupt(f"{names} changed before the fence; call client.fence() before what changes a state that is saved")
            if problem:
                raise Corrupt(f"its copy failed: {problem}")
            self._seal(pending)

    def guard(self, optimizer: torch.optim.Optimizer) -> Any:
        """Call `fence` before each step of an optimizer. Returns a handle with a method `remove`."""
        return optimizer.register_step_pre_hook(lambda *_: self.fence())

    def _seal(self, pending: "_Pending") -> None:
        """Hand a copy to the cache, after a sample of it was found to be what it was made of."""
        wrong = pending.target.differs(pending.flat.tensors, pending.compared, SAMPLE_SHARE, self._draw)
        if wrong is not None:
            name = pending.flat.names[pending.flat.homes.index(wrong)]
            raise Corrupt(f"the copy of {name} is not what it was made of; is this machine's memory sound?")
        pending.connection.seal(pending.handle, pending.layout, pending.number, pending.flat.values)
        self._last, self._short = pending.handle, False

    @contextmanager
    def _not_ending_training(self, handle: Handle, connection: "_Session") -> Iterator[None]:
        """Make a save that fails a handle whose levels raise, but for what shows at the first save or is to be raised."""
        step = handle.step
        try:
            yield
        except (OSError, CacheGone) as error:
            connection.lose(f"the cache in {self._run_dir} went away ({error})")
            self._failed(handle, CacheGone(f"the cache in {self._run_dir} went away during the save of step {step}"))
        except Corrupt as error:
            connection.give_back()
            self._fail_aloud(handle, Corrupt(f"step {step} is saved nowhere: {error}"))
        except (CannotRun, UsageError) as error:
            # a cache or a state that is ill-sized shows at the first save; what is in training already is not ended by it
            if self._last is None or (isinstance(error, CannotRun) and self._when_full == "raise"):
                self._failed(handle, error)
                raise
            self._short = isinstance(error, CannotRun)
            self._fail_aloud(handle, type(error)(f"step {step} is saved nowhere: {error}"))

    def _fail_aloud(self, handle: Handle, error: CheckpointError) -> None:
        _say(f"rank {self.rank}: {error}; training goes on")
        self._failed(handle, error)

    def _failed(self, handle: Handle, error: CheckpointError) -> Handle:
        for level in LEVELS:
            handle._reach(level, error)
        return handle

    def close(self) -> None:
        """Pass the fence, end the connection and let go of the shared memory. What was saved stays in the cache."""
        self.fence()
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

    def _next_attempt(self) -> int:
        """Return the number that the cache gives to this start, 0 when it is not there."""
        connection = self._connection_or_none(CONNECT_S)
        with suppress(CheckpointError):
            if connection is not None:
                return int(connection.ask({"op": "choose", "exclude": []}, "chosen")["attempt"])
        return 0

    def _begin(self, together: Agreement, attempt: int) -> None:
        """Give the generations of this start a number and a token that no other start has, the same on every rank.

        The cache gives the number, above all that were given before; without one it is the time.
        """
        self._start = tuple(together.tell([attempt or int(time.time()), secrets.token_hex(4)]))

    def _fetch(self, connection: "_Session", chosen: str, into: Any) -> "tuple[int, str, _Fetched | None]":
        """Return (how it went, what is wrong, the state and where it came from)."""
        step = generation(chosen).step
        try:
            fetched = connection.fetch(chosen, own=into is None)
            if into is not None and (why := misfit(into, fetched.state)):
                fetched.release()
                return _FATAL, f"the checkpoint of step {step} does not fit: {why}", None
        except (KeyError, TypeError) as error:
            return _BAD_COPY, f"step {step}: its description is broken ({error})", None
        except (CheckpointError, OSError) as error:
            return _BAD_COPY, str(error), None
        return _FINE, "", fetched

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

    def __init__(self, number: int, flat: Flat) -> None:
        self.number = number
        self.skeleton = flat.skeleton
        self.places, self.nbytes = places(flat.tensors)
        self._forms = [(t.dtype, t.shape) for t in flat.tensors]

    def fits(self, flat: Flat) -> bool:
        """Whether this is the layout of a state."""
        if self.skeleton is flat.skeleton:
            return True
        return self.skeleton == flat.skeleton and self._forms == [(t.dtype, t.shape) for t in flat.tensors]


class _Split:
    """Which tensors of a state an overlapped save copies at once: small ones, and those that are `restless`. The others follow.

    Made once for a state that stays where it is. It keeps the memory of the others, whatever becomes of the tensors themselves.
    """

    def __init__(self, flat: Flat, restless: set[str]) -> None:
        self.source = flat.source
        # tensors of inference mode have no version by which a change could be told
        early = {
            home
            for home, leaf, name in zip(flat.homes, flat.leaves, flat.names, strict=True)
            if flat.tensors[home].nbytes < LATE_BYTES or name in restless or leaf.is_inference()
        }
        self.early = Source(flat.tensors, early)
        self.late = {i: tensor.detach() for i, tensor in enumerate(flat.tensors) if i not in early}
        self.names = [name for home, name in zip(flat.homes, flat.names, strict=True) if home in self.late]
        self._leaves = [leaf for home, leaf in zip(flat.homes, flat.leaves, strict=True) if home in self.late]

    def versions(self) -> list[int]:
        """Return of each of the state's tensors that follow later how often it was changed."""
        return [leaf._version for leaf in self._leaves]


class _Pending:
    """One save between the memory that it got and the message that it is whole."""

    def __init__(self, handle: Handle, connection: "_Session", layout: _Layout, number: int, target: Target, flat: Flat) -> None:
        self.handle, self.connection, self.layout = handle, connection, layout
        self.number, self.target, self.flat = number, target, flat
        self.compared: Sequence[int] = range(len(flat.tensors))
        """Which tensors still are what was saved."""
        self._problem = ""

    def start(self, split: _Split) -> None:
        """Copy a part now and the rest meanwhile."""
        self._split, self._versions, self.compared = split, split.versions(), list(split.late)
        self.target.fill(split.early)
        self._thread = threading.Thread(target=self._copy, daemon=True, name="checkpoint copy")
        self._thread.start()

    def finish(self) -> tuple[list[str], str]:
        """Wait for the copy. Return where tensors are that changed since the save, and how the copy failed."""
        self._thread.join()
        versions = zip(self._split.names, self._split.versions(), self._versions, strict=True)
        return [name for name, now, then in versions if now != then], self._problem

    def _copy(self) -> None:
        try:
            self.target.copy(self._split.late)
        except (RuntimeError, MemoryError) as error:
            self._problem = str(error) or type(error).__name__


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A state as it was saved, verified, and what the cache tells of its origin; good until `release`."""

    state: Any
    answer: Message
    release: Callable[[], None]


class _Session:
    """One connection, the saves that are under way on it, and what its slabs look like as tensors."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._handles: dict[str, Handle] = {}
        self._targets: dict[tuple[int, int], Target] = {}
        self._layout_sent = self._filling_bytes = 0
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

    def fetch(self, chosen: str, own: bool) -> _Fetched:
        """Return a state, verified, in the memory of the cache, which keeps it until `release`, or in memory of its `own`."""
        try:
            return self._fetch(chosen, own, check=False)
        except Corrupt:
            # the cache, when it finds the same, takes another copy
            return self._fetch(chosen, own, check=True)

    def _fetch(self, chosen: str, own: bool, check: bool) -> _Fetched:
        answer, files = self._connection.ask({"op": "fetch", "generation": chosen, "check": check}, "fetched")
        if "error" in answer:
            raise CheckpointError(answer["error"])
        whole = False
        try:
            manifest = decode(answer["manifest"])
            data = mapped(files.pop(), manifest.nbytes) if manifest.nbytes else memoryview(b"")
            if own and manifest.nbytes:
                data = _own(data)
            _verify(manifest, data)
            if manifest.key != Key(self._client.job, generation(chosen), self._client.rank):
                raise Corrupt(f"the cache gave another shard than that of step {generation(chosen).step}")
            items = manifest.content["items"]
            tensors = views(data, [Place(*item) for item in items["places"]])
            state = unflatten(items["skeleton"], tensors, manifest.content["values"])
            whole = True
        finally:
            for file in files:
                os.close(file)
            if own or not whole:
                self._release(answer)
        return _Fetched(state, answer, (lambda: None) if own else lambda: self._release(answer))

    def _release(self, answer: Message) -> None:
        with suppress(CacheGone):  # then there is nobody left who would keep it
            self._connection.send({"op": "release", "slab": answer["slab"]})

    def room(self, layout: _Layout, timeout_s: float) -> tuple[int, Target]:
        """Return a slab to fill with a state, and its number. Raises CacheGone, CannotRun, UsageError."""
        if layout.number != self._layout_sent:
            items = {"skeleton": layout.skeleton, "places": layout.places}
            self._connection.send({"op": "layout", "layout": layout.number, "items": items}, MAX_STATE_BYTES)
            self._layout_sent = layout.number
            self._targets.clear()
        self._filling_bytes = layout.nbytes
        number, slab = self._connection.room(layout.nbytes, timeout_s, self._client._when_full)
        target = self._targets.get((number, layout.number))
        if target is None:
            target = self._targets[number, layout.number] = Target(slab, layout.places)
        return number, target

    def seal(self, handle: Handle, layout: _Layout, number: int, values: list[Any]) -> None:
        """Hand a filled slab to the cache."""
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

    def give_back(self) -> None:
        """Let a slab that was filled in vain be filled again."""
        with suppress(CacheGone):
            self._connection.reserve(self._filling_bytes)

    def unmap(self) -> None:
        """Let go of all slabs; no save may be under way."""
        self._connection.unmap()

    def _heard(self, message: Message) -> None:
        handle = self._handles.get(message["generation"])
        if handle is not None and message["op"] == "late":
            handle._late[message["level"]] = message["why"]
        elif handle is not None:
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
        for known in list(self._targets):
            if known[0] == number:
                self._targets.pop(known, None)


def _own(data: memoryview) -> memoryview:
    """Return a copy in memory of our own: optimizers keep what they are given, and the cache uses its memory again."""
    buffer = mmap.mmap(-1, len(data), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        buffer.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(buffer, dtype=torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))
    return memoryview(buffer)


def _verify(manifest: Manifest, data: memoryview) -> None:
    """Prove every byte, in several threads. Raises Corrupt and names the first wrong chunk."""

    def fits(number: int) -> bool:
        start, stop = manifest.bounds(number)
        return manifest.fits(number, data[start:stop])

    with ThreadPoolExecutor(min(VERIFIERS, len(os.sched_getaffinity(0)))) as threads:
        for number, good in enumerate(threads.map(fits, range(len(manifest.digests)))):
            if not good:
                start, stop = manifest.bounds(number)
                raise Corrupt(f"the bytes from {start} to {stop} are not those that were saved")


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
