"""The cache of one node: holds what its ranks save, copies it to the next node, writes it to storage, and gives it back.

A shard goes one way: sealed (by the rank) -> verified (digests made) -> replicated (a neighbour holds it) and stored (it lies in
the folder). Each step is repeated until it succeeds. A generation exists once every rank's shard does, somewhere.
"""

import errno
import os
import random
import signal
import socket
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint import audit, doors, handover, limits, place, restore
from checkpoint.errors import CannotRun, CheckpointError, Corrupt, UsageError
from checkpoint.index import Index
from checkpoint.landing import Landing
from checkpoint.manifest import Generation, Key, Manifest, generation, made_of, verify
from checkpoint.memory import Slab, Slabs, can_collapse, free_large_pages
from checkpoint.neighbours import Neighbours
from checkpoint.placement import natural
from checkpoint.protocol import Message, receive
from checkpoint.restore import STORAGE, Copy
from checkpoint.session import Client
from checkpoint.storage import Folder
from checkpoint.tcp import Security, Tcp

STEPS = ("verify", "replicate", "store")
"""What is done for each shard, each until it succeeds."""
FIRST_RETRY_S, LAST_RETRY_S = 0.5, 30.0
MAYBE_SAFE, MAYBE_SAFE_SHORT = 12, 2
"""So many replicated generations are held until it is known of a newer one that all its shards are replicated: as many as ranks
may save in a moment, and more only where another rank's cache is long gone. The second when memory is short."""
ALONE_S = 5.0
"""A shard of a generation that is not known to exist after so long goes to storage all the same: peers may be cut off."""
_NONE = Generation(0, 0, "")
"""Older than every generation."""
DRAIN_S = 10.0
"""A cache that is told to end finishes what it has to write for so long."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Section ``[checkpoint]``: the cache of a node."""

    node: str = ""
    """Name of this node; default $EAGLEEYE_NODE, $NODE_NAME, or the host name."""
    address: str = ""
    """Address at which other nodes reach this cache; default that of the host name. Use a private network, a key or TLS."""
    domain: str = ""
    """What this node fails together with, outermost first: ``rack1`` or ``rack1/psu2``. Copies go to other domains."""
    port: int = 9480
    """TCP port for other nodes; 0 takes a free one."""
    run_dir: str = ""
    """Folder of socket, lock and index; default $XDG_RUNTIME_DIR/eagleeye-cache or one of this user's in the temporary folder."""
    storage: str = ""
    """Folder, shared by all nodes, to which generations are written; empty writes none."""
    generations: int = 2
    """Complete generations that stay in memory."""
    stored_generations: int = 3
    """Committed generations that stay in storage."""
    memory_bytes: int = 0
    """Most memory that is taken; 0 is half of the machine's, or of what its control group allows."""
    peers: str = ""
    """``NODE=HOST:PORT,...``: the other nodes' caches, for jobs whose launcher does not tell them; ``HOST:PORT@RACK/POWER``."""
    replicas: int = 1
    """Other nodes that hold a copy of each shard."""
    connections: int = 2
    """TCP connections on which the bytes of one shard come from one node at once; about one for each 10 to 25 Gbit/s."""
    replicate_rate_bytes: int = 0
    """How much copies may send in each second, so that training keeps its network; 0 is no limit. Restores have none."""
    key_file: str = ""
    """File with a secret that all caches of the cluster share; who does not have it is not let in. Empty lets everybody in."""
    tls_cert: str = ""
    """Certificate of this node for TLS between caches (PEM), which signs and encrypts all that goes; empty uses none."""
    tls_key: str = ""
    """Private key of `tls_cert`."""
    tls_ca: str = ""
    """Certificate of the authority that signed those of all nodes."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port {self.port} does not exist; use 0 to 65535")
        if self.generations < 1 or self.stored_generations < 1:
            raise ValueError("generations and stored_generations must be at least 1")
        if self.replicas < 1 or self.connections < 1:
            raise ValueError("replicas and connections must be at least 1")
        if 0 < self.replicate_rate_bytes < 1_000_000:
            raise ValueError("replicate_rate_bytes must be 0, for no limit, or at least 1 MB/s")
        place.domain(self.domain)
        place.peers(self.peers)


@dataclass(eq=False)
class Shard:
    """One rank's part of one generation in this node's memory. `manifest` is None until the digests are made."""

    key: Key
    world_size: int
    origin: str
    nbytes: int
    slab: Slab
    owner: str
    content: dict[str, Any]
    manifest: Manifest | None = None
    replicas: set[str] = field(default_factory=set)
    """The other nodes that hold a copy."""
    stored: bool = False
    wants: set[str] = field(default_factory=set)
    born_s: float = field(default_factory=time.monotonic)
    pins: int = 0
    dropped: bool = False
    tries: dict[str, int] = field(default_factory=dict)
    not_before_s: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    """What went wrong with each step that failed last time."""

    @property
    def data(self) -> memoryview:
        """The shard's bytes."""
        return self.slab.view(self.nbytes)


class Cache:
    """The server. `run()` serves until `stop()`; everything it does for its clients happens in threads of its own.

    With `take_over` it begins with what the cache that runs in the same folder holds, and that one ends.

    Raises
    ------
    CannotRun
        Another cache runs on this node or hands nothing over, the port is in use, or the folder cannot be written.
    """

    def __init__(self, settings: Settings, *, take_over: bool = False) -> None:
        self.settings = settings
        self.node = settings.node or os.environ.get("EAGLEEYE_NODE") or os.environ.get("NODE_NAME") or socket.gethostname()
        self.run_dir = place.run_dir(settings.run_dir)
        self.cap = limits.cap(settings.memory_bytes, limits.allowed())
        self.slabs = Slabs(self.cap.nbytes)
        self.storage = Folder(Path(settings.storage)) if settings.storage else None
        self._shards: dict[Key, Shard] = {}
        self._existing: dict[str, set[Generation]] = {}
        self._attempts: dict[str, int] = {}
        """The newest number that any node is known to have given to a start, of each job."""
        self._complete: dict[str, set[Generation]] = {}
        self._safe: dict[str, Generation] = {}
        self._asked: dict[str, set[Key]] = {}
        self._begun: dict[str, set[Generation]] = {}
        """What other nodes began to write last, of each job."""
        self._storing: dict[str, Generation] = {}
        """What this node began to write last, of each job."""
        self.transport = Tcp(Security(settings.key_file, settings.tls_cert, settings.tls_key, settings.tls_ca))
        self.neighbours = Neighbours(self, self.transport)
        self._clients: dict[tuple[str, int], Client] = {}
        self._born: dict[tuple[str, int], int] = {}
        self._newest_born: dict[str, int] = {}
        self._forecast_bytes = 0
        self.changed = threading.Condition()
        self._stopping = False
        self._still = self._left = False
        self._said: set[str] = set()
        if self.storage:
            self._look_at_storage(self.storage.path)
        estate = self._estate() if take_over else None
        try:
            entered = self._enter(estate) if estate else None
            self.doors = entered or doors.opened(self.run_dir, settings.address, settings.port)
            try:
                if entered is None:
                    self._open_index()
                self._announce()
            except (OSError, sqlite3.Error) as error:
                if entered is None:
                    self.doors.close()
                    raise
                self._say(f"{self.run_dir} cannot be written ({error}), so it still names the cache that was here before")
        except (OSError, sqlite3.Error) as error:
            raise CannotRun(f"the cache cannot use {self.run_dir}: {error}; give another --run-dir or --port") from None

    @property
    def port(self) -> int:
        """Where other nodes reach this cache."""
        return self.doors.port

    def _announce(self) -> None:
        address = self.settings.address or socket.gethostname()
        self.doors.announce(self.run_dir, {"node": self.node, "address": address, "domain": self.settings.domain})

    def _open_index(self) -> None:
        self.index = Index(self.run_dir / place.INDEX)
        if self.index.moved:
            self._say(self.index.moved)
        for shard in self._shards.values():
            self._write_down(shard)

    # ---- taking over and handing over

    def _estate(self) -> handover.Estate | None:
        """Return what the cache that runs here hands over, after adopting its memory; None when none runs."""
        try:
            estate = handover.Estate(self.run_dir, self._check_offer)
        except OSError:
            self._say(f"no cache runs in {self.run_dir}, so there is nothing to take over; this one starts with empty memory")
            return None
        self._adopt(estate.shards, estate.knowledge)
        if estate.doors is None:
            self._say(f"the cache in {self.run_dir} broke off while it handed over; {len(estate.shards)} shards were saved")
        return estate

    def _check_offer(self, offer: Message) -> None:
        """Raise CannotRun when this cache could not stand in for the one that makes the offer."""
        told, port = f"the cache in {self.run_dir}", offer["port"]
        if offer["node"] != self.node:
            raise CannotRun(f"{told} is that of node {offer['node']} and this one of {self.node}; give it the same --node")
        if self.settings.port not in (0, port):
            raise CannotRun(f"{told} listens on port {port} and would go on there; give this one --port {port}")
        if offer["nbytes"] > self.cap.nbytes:
            raise CannotRun(f"{told} holds {offer['nbytes']} bytes and this one may take {self.cap.nbytes}; raise memory_bytes")

    def _adopt(self, shards: list[tuple[Manifest, int, int]], knowledge: Message) -> None:
        for job, told in knowledge.get("jobs", {}).items():
            for name, kept in (("existing", self._existing), ("complete", self._complete), ("begun", self._begun)):
                kept[job] = {generation(text) for text in told[name]}
            for name, newest in (("safe", self._safe), ("storing", self._storing)):
                if told[name]:
                    newest[job] = generation(told[name])
            self.neighbours.meet(job, told["peers"])
            self._newest_born[job], self._attempts[job] = told["newest_born"], told["attempt"]
        self._born = {(job, rank): born for job, rank, born in knowledge.get("born", [])}
        state = {(job, text, rank): told for job, text, rank, told in knowledge.get("shards", [])}
        for manifest, file, size_bytes in shards:
            key = manifest.key
            told = state.get((key.job, str(key.generation), key.rank))
            if state and told is None:
                os.close(file)  # it was let go of meanwhile
                continue
            slab = self.slabs.adopt(file, size_bytes)
            shard = Shard(key, manifest.world_size, manifest.node, manifest.nbytes, slab, "", dict(manifest.content), manifest)
            if told is not None:
                shard.replicas, shard.stored, shard.wants = set(told["replicas"]), told["stored"], set(told["wants"])
            elif manifest.node == self.node:
                shard.wants = {"replicate", "store"}
            if self.storage and manifest.node == self.node and not shard.stored:
                shard.wants.add("store")
            self._shards[key] = shard

    def _enter(self, estate: handover.Estate) -> doors.Doors | None:
        """Return the doors of the cache that hands over, once it has left them; None when it did not."""
        if estate.doors is None:
            return None
        try:
            self._open_index()
        except BaseException:
            estate.close()
            raise
        if not estate.enter():
            self.index.close()
        return estate.doors

    def hold_still(self, but: socket.socket, patience_s: float) -> bool:
        """Answer nobody but one, and begin nothing but verifying; return whether all that others were told is verified now."""
        with self.changed:
            self._still = True
            self.changed.notify_all()
        if not self.doors.shut(but, patience_s):
            return False
        with self.changed:
            return self.changed.wait_for(lambda: all(s.manifest for s in self._shards.values()), patience_s)

    def go_on(self) -> None:
        """Serve again after holding still, unless another cache does now."""
        with self.changed:
            if not self._still or self._left:
                return
            self._still = False
            for shard in self._shards.values():
                self._write_down(shard)
            self.changed.notify_all()
        self.doors.reopen()

    def leave(self) -> None:
        """End without touching anything: another cache serves here now."""
        with self.changed:
            self._left = self._stopping = True
            self.changed.notify_all()

    def knowledge(self) -> Message:
        """Return what is known beside the shards' bytes, for the cache that takes over."""
        with self.changed:
            jobs = {
                job: {
                    "existing": [str(g) for g in self._existing.get(job, ())],
                    "complete": [str(g) for g in self._complete.get(job, ())],
                    "begun": [str(g) for g in self._begun.get(job, ())],
                    "safe": str(self._safe[job]) if job in self._safe else "",
                    "storing": str(self._storing[job]) if job in self._storing else "",
                    "peers": self.neighbours.others(job),
                    "newest_born": self._newest_born.get(job, 0),
                    "attempt": self.attempt(job),
                }
                for job in self._jobs() | set(self._existing) | set(self._newest_born) | set(self._attempts)
            }
            shards = [
                [
                    key.job,
                    str(key.generation),
                    key.rank,
                    {"replicas": sorted(s.replicas), "stored": s.stored, "wants": sorted(s.wants)},
                ]
                for key, s in self._shards.items()
            ]
            return {"jobs": jobs, "shards": shards, "born": [[job, rank, born] for (job, rank), born in self._born.items()]}

    @property
    def held_bytes(self) -> int:
        """The memory of all shards."""
        with self.changed:
            return sum(shard.slab.size_bytes for shard in self._shards.values())

    def verified(self, job: str = "") -> list[Key]:
        """Return the verified shards of a job, or of all; the caller holds the lock."""
        return [key for key, shard in self._shards.items() if shard.manifest and job in ("", key.job)]

    # ---- its life

    def run(self) -> None:
        """Serve until `stop()` is called; then finish what storage still wants, for at most `DRAIN_S`."""
        work: list[tuple[str, Callable[[], None]]] = [
            ("clients", lambda: self.doors.accept(self.doors.unix, self._politely(self._greet), self._say)),
            ("peers", lambda: self.doors.accept(self.doors.tcp, self._politely(self._attend_peer), self._say)),
            ("verify", lambda: self._repeat("verify", self._verify)),
            ("replicate", lambda: self._repeat("replicate", self.neighbours.replicate)),
            ("ask", self.neighbours.ask),
            ("check", self.neighbours.check),
            ("pages", self._enlarge_pages),
        ]
        if self.storage:
            work.append(("store", lambda: self._repeat("store", self._store)))
        for name, do in work:
            threading.Thread(target=do, name=name, daemon=True).start()
        with self.changed:
            self.changed.wait_for(lambda: self._stopping)
            if self._left:
                return
            self.changed.wait_for(lambda: not any("store" in s.wants for s in self._shards.values()), DRAIN_S)
        for name in (place.INFO, place.SOCKET):
            (self.run_dir / name).unlink(missing_ok=True)
        self.index.close()

    def stop(self) -> None:
        """Make `run()` return. For another thread, not for a signal handler, which might hold the lock already."""
        with self.changed:
            self._stopping = True
            self.changed.notify_all()

    # ---- what is done for each shard, in threads of its own

    def _repeat(self, step: str, do: Callable[[Shard], None]) -> None:
        """Do one step for one shard after another, for ever; what fails is tried again later, and later each time."""
        while True:
            with self.changed:
                shard = self._wait_for_work(step)
                shard.pins += 1
            error = ""
            try:
                do(shard)
            except (CheckpointError, OSError, MemoryError) as problem:
                error = f"{step} of step {shard.key.generation.step}, rank {shard.key.rank}: {_words(problem)}"
                self._say(f"{error}; it is tried again")
                self._tell_late(shard.key, step, error)
            with self.changed:
                shard.errors.pop(step, None)
                if error:
                    shard.errors[step] = error
                    tries = shard.tries[step] = shard.tries.get(step, 0) + 1
                    delay_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** (tries - 1)) * random.uniform(0.8, 1.2)
                    shard.not_before_s[step] = time.monotonic() + delay_s
                elif step != "replicate" or not self.neighbours.lacks(shard):
                    shard.wants.discard(step)
                self.unpin(shard)
                self.changed.notify_all()
            self._write_down(shard)

    def _wait_for_work(self, step: str) -> Shard:
        while True:
            now_s, wait_s = time.monotonic(), None
            due = []
            for shard in self._shards.values():
                if step not in shard.wants or (step != "verify" and shard.manifest is None):
                    continue
                delay_s = shard.not_before_s.get(step, 0.0) - now_s
                if step == "store" and not self._may_store(shard):
                    delay_s = max(delay_s, shard.born_s + ALONE_S - now_s)
                if delay_s <= 0:
                    due.append(shard)
                else:
                    wait_s = delay_s if wait_s is None else min(wait_s, delay_s)
            if due and (step == "verify" or not self._still):
                if step == "store":
                    return self._most_urgent(due)
                # what has the fewest copies goes first
                return max(due, key=lambda s: (-len(s.replicas), s.key.generation))
            self.changed.wait(wait_s)

    def _may_store(self, shard: Shard) -> bool:
        job = shard.key.job
        return shard.key.generation in self._existing.get(job, ()) or not self.neighbours.others(job)

    def _is_begun(self, shard: Shard) -> bool:
        job, wanted = shard.key.job, shard.key.generation
        return wanted in self._begun.get(job, ()) or wanted == self._storing.get(job)

    def _most_urgent(self, due: list[Shard]) -> Shard:
        """What a node has begun to write goes first, lest each write other generations and none be whole in storage."""
        begun = [shard for shard in due if self._is_begun(shard)]
        if begun:
            return min(begun, key=lambda s: s.key.generation)
        return max(due, key=lambda s: (s.key.generation in self._existing.get(s.key.job, ()), s.key.generation))

    def _enlarge_pages(self) -> None:
        """Give slabs larger pages, one after the other, while no rank waits for anything."""
        if not can_collapse():
            return
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.slabs.unsettled and all(s.manifest for s in self._shards.values()))
            if self.slabs.settle() and not self.slabs.unsettled:
                self._inform(f"memory: {self.slabs.pages}")

    def _verify(self, shard: Shard) -> None:
        manifest = made_of(shard.key, shard.world_size, shard.origin, shard.content, shard.data)
        with self.changed:
            shard.manifest = manifest

    def _look_at_storage(self, path: Path) -> None:
        """Say what is wrong with the storage folder now; it may come later. One that is absent is made once, never again."""
        try:
            if not path.exists():
                path.mkdir(exist_ok=True)
                self._say(f"storage {path} was not there and was made: if a disk belongs there, it is not mounted")
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            self._say(f"storage {path}: {_words(error)}; nothing is persistent until that is mended")

    def _store(self, shard: Shard) -> None:
        assert shard.manifest is not None
        assert self.storage is not None
        job, wanted = shard.key.job, shard.key.generation
        with self.changed:
            self._storing[job] = wanted
        try:
            self.storage.write(shard.manifest, shard.data)
            with self.changed:
                shard.stored = True
            self.tell(shard.key, "persistent")
            known = self.storage.is_committed(job, wanted)
            if self.storage.commit(job, wanted, shard.world_size):
                with self.changed:
                    self._existing.setdefault(job, set()).add(wanted)
                if not known:  # one node does it, as it reads every rank's manifest
                    self.storage.retain(job, self.settings.stored_generations)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                # room for the new one goes before a third and second old one; the newest good one is never touched
                with suppress(OSError):
                    self.storage.retain(job, 1)
            raise CheckpointError(f"storage {self.storage.path}: {_words(error)}") from None

    def learn(self, job: str, superseded: set[Key]) -> bool:
        """Ask the other nodes about a job, forget what need not be held, and return whether that told anything new."""
        copies, _ = self._copies(job, with_storage=False)
        existing = restore.complete(copies)
        with self.changed:
            known = self._existing.setdefault(job, set())
            learned = not existing <= known
            known |= existing
            self._existing[job] = set(sorted(known)[-16:])
            for found in restore.safe(copies, 2 if self.neighbours.others(job) else 1):
                if found > self._safe.get(job, _NONE):
                    self._safe[job], learned = found, True
            self._complete[job], self._asked[job] = existing, superseded
            self._retain(job)
            self.changed.notify_all()
        return learned

    def _jobs(self) -> set[str]:
        return {key.job for key in self._shards}

    def unknown(self) -> dict[str, set[Key]]:
        """Return the jobs of which it is not known what others hold, each with what can be forgotten once it is.

        The caller holds the lock. What can be forgotten all ranks have saved or never will: two newer ones were saved here since.
        """
        unsafe = {key.job for key, shard in self._shards.items() if key.generation > self._safe.get(key.job, _NONE)}
        jobs = unsafe | {job for job in self._jobs() if self._unasked(job)}
        return {job: {s.key for s in self._surplus(job, None)} for job in jobs}

    def has_unasked(self) -> bool:
        """Whether anything is held only because others were not asked yet; the caller holds the lock."""
        return any(self._unasked(job) for job in self._jobs())

    def _unasked(self, job: str) -> bool:
        """Whether memory is held only because it is not known whether others hold the rest of it."""
        return len(self._surplus(job, None)) > len(self._surplus(job, self._asked.get(job, set())))

    # ---- what is held

    def _copies(self, job: str, *, with_storage: bool = True) -> tuple[list[Copy], list[str]]:
        """Return every copy of the job's shards that can be reached, and why others could not be asked."""
        copies, heard = self.held(job), self.neighbours.hear(job)
        copies += heard.copies
        problems, existing = heard.problems, heard.existing
        if with_storage and self.storage:
            try:
                stored, committed = self.storage.look(job)
                copies += stored
                existing |= set(committed)
            except OSError as error:
                problems.append(f"storage {self.storage.path}: {_words(error)}")
        with self.changed:
            self._begun[job] = heard.storing
            self._existing.setdefault(job, set()).update(existing | restore.complete(copies))
            self._attempts[job] = max(self.attempt(job), heard.attempt)
        return copies, problems

    def held(self, job: str) -> list[Copy]:
        """Return what this node's memory holds of a job."""
        with self.changed:
            # what was sealed a moment ago counts, once its digests are made
            self.changed.wait_for(lambda: all(s.manifest for k, s in self._shards.items() if k.job == job), 10.0)
            return [
                Copy(key.generation, key.rank, shard.world_size, self.node, shard.origin)
                for key, shard in self._shards.items()
                if key.job == job and shard.manifest
            ]

    def _retain(self, job: str) -> None:
        """Forget what is no longer needed; the caller holds the lock."""
        for shard in self._droppable(job):
            self._drop(shard, "a newer one was complete before")

    def _droppable(self, job: str, keep: int | None = None) -> list[Shard]:
        """Return what need not be held and nobody reads; the caller holds the lock. `keep` is given when memory is short."""
        # one that was begun stays until it is written; only one, so that a storage that takes nothing cannot fill the memory
        begun: dict[int, Generation] = {}
        for key, shard in self._shards.items():
            if key.job == job and "store" in shard.wants and self._is_begun(shard):
                begun[key.rank] = min(key.generation, begun.get(key.rank, key.generation))
        surplus = self._surplus(job, self._asked.get(job, set()), keep)
        return [s for s in surplus if s.pins == 0 and s.key.generation != begun.get(s.key.rank)]

    def _surplus(self, job: str, asked: set[Key] | None, keep: int | None = None) -> list[Shard]:
        """Return what need not be held if others were asked about `asked`, None for everything; the caller holds the lock.

        `keep` is how many complete generations stay when memory is short.
        """
        by_rank: dict[int, list[Shard]] = {}
        for key, shard in self._shards.items():
            if key.job == job:
                by_rank.setdefault(key.rank, []).append(shard)
        complete, newest_safe = self._complete.get(job, set()), self._safe.get(job)
        least, maybe_safe = self.settings.generations, MAYBE_SAFE if keep is None else MAYBE_SAFE_SHORT
        found = []
        for shards in by_rank.values():
            held = [s.key.generation for s in shards]
            heard = held if asked is None else [s.key.generation for s in shards if s.key in asked]
            replicated = sorted(s.key.generation for s in shards if "replicate" not in s.wants and s.manifest is not None)
            surplus = restore.surplus(held, complete, newest_safe, heard, keep or least, replicated[-maybe_safe:])
            found += [s for s in shards if s.key.generation in surplus]
        return found

    def _drop(self, shard: Shard, why: str) -> None:
        """Hold a shard no longer; its memory is free when nobody reads it any more. The caller holds the lock."""
        del self._shards[shard.key]
        shard.dropped = True
        if shard.pins == 0:
            self.slabs.give(shard.owner, shard.slab)
        self._write_down(shard)
        step = f"step {shard.key.generation.step}"
        if "store" in shard.wants:
            self._say(f"job {shard.key.job}, rank {shard.key.rank}: {step} was not written to storage: {why}")
            self.tell(shard.key, "persistent", f"{step} was not written to storage: {why}")
        if "replicate" in shard.wants:
            self.tell(shard.key, "replicated", f"{step} was not copied: {why}")
        self.changed.notify_all()

    def _add(self, shard: Shard) -> None:
        """Hold one more shard; the caller holds the lock."""
        self._shards[shard.key] = shard
        shard.slab.filling = False
        if shard.manifest is None:
            shard.wants.add("verify")
        if shard.origin == self.node:
            if self.neighbours.others(shard.key.job):
                shard.wants.add("replicate")
            if self.storage and not shard.stored:
                shard.wants.add("store")
        self._retain(shard.key.job)
        self.changed.notify_all()

    def take(self, owner: str, nbytes: int, job: str, *, drop: bool = False) -> Slab:
        """Return a free slab; when memory is short, let go of jobs that nobody runs here any more, then of older generations.

        With `drop` also of one of this job that storage should have had first, if a newer one is complete.
        """
        while True:
            try:
                return self.slabs.take(owner, nbytes)
            except CannotRun:
                with self.changed:
                    if nbytes > self.slabs.limit_bytes or not self._make_room(job, drop):
                        raise

    def _make_room(self, job: str, drop: bool) -> bool:
        """Let go of one shard for the sake of a job; return whether there was one. The caller holds the lock."""
        living = {name for name, _ in self._clients} | {job}
        ended = [
            s for k, s in self._shards.items() if k.job not in living and s.pins == 0 and (s.stored or s.origin != self.node)
        ]
        if ended:
            # no more than needed, and last of all the newest copies for others: their job may go on elsewhere
            self._drop(min(ended, key=lambda s: (not s.stored, s.born_s)), "memory was short and the job had ended")
            return True
        older = [s for name in self._jobs() for s in self._droppable(name, 1)]
        if drop and not older:
            older = [s for s in self._surplus(job, self._asked.get(job, set()), 1) if s.pins == 0]
        if older:
            self._drop(min(older, key=lambda s: s.born_s), "memory was short and a newer one was complete")
        return bool(older)

    def existing(self, job: str) -> list[Generation]:
        """Return the newest generations that are known to exist; the caller holds the lock."""
        return sorted(self._existing.get(job, ()))[-4:]

    def heard_of(self, job: str, existing: set[Generation]) -> None:
        """Remember which generations exist, as another node told; the caller holds the lock."""
        self._existing.setdefault(job, set()).update(existing)

    def attempt(self, job: str) -> int:
        """Return the newest number that was given to a start of a job, 0 when none was; the caller holds the lock."""
        return self._attempts.get(job, 0)

    def storing(self, job: str) -> list[Generation]:
        """Return what this node began to write last; the caller holds the lock."""
        return [self._storing[job]] if job in self._storing else []

    def pinned(self, key: Key) -> Shard | None:
        """Return a shard, to be unpinned when it is read no longer; None when it is not held or has no digests yet."""
        with self.changed:
            shard = self._shards.get(key)
            if shard is None or shard.manifest is None:
                return None
            shard.pins += 1
            return shard

    def keep(self, manifest: Manifest, slab: Slab, owner: str, *, stored: bool = False) -> Shard:
        """Hold what came from elsewhere and was verified, and return it pinned: what a rank falls back to may be surplus at once.

        Somebody may have been faster: then that one stays.
        """
        with self.changed:
            known = self._shards.get(manifest.key)
            if known is not None:
                self.slabs.give(owner, slab)
                known.pins += 1
                return known
            shard = Shard(
                manifest.key, manifest.world_size, manifest.node, manifest.nbytes, slab, owner, dict(manifest.content),
                manifest, stored=stored, pins=1,
            )  # fmt: skip
            self._add(shard)
        self._write_down(shard)
        return shard

    def unpin(self, shard: Shard) -> None:
        """Say that a shard is no longer read."""
        with self.changed:
            shard.pins -= 1
            if shard.dropped and shard.pins == 0:
                self.slabs.give(shard.owner, shard.slab)
            self._retain(shard.key.job)

    # ---- this node's ranks

    def hello(self, client: "Client", born: int, peers: dict[str, str] | None) -> None:
        """Let a rank in; whoever was that rank before is shown out, and may not come back to disturb its successor.

        Raises
        ------
        UsageError
            This one is the predecessor.
        """
        with self.changed:
            who = (client.job, client.rank)
            if born < self._born.get(who, 0):
                raise UsageError(f"another process has become rank {client.rank} of job {client.job}; this one should end")
            before = self._clients.get(who)
            self._born[who] = born
            self._clients[who] = client
            # within the lock, lest it hear of anything else before
            client.send({"op": "welcome", "node": self.node})
            if before is not None:
                before.show_out()
            # what a process of an earlier start knows of the other nodes is out of date, also when it connects again
            if born >= self._newest_born.get(client.job, 0):
                self._newest_born[client.job] = born
                self._meet(client.job, place.peers(self.settings.peers) if peers is None else peers)
            self.changed.notify_all()

    def _meet(self, job: str, peers: dict[str, str]) -> None:
        """Take over where the other nodes' caches are; the caller holds the lock."""
        lost = self.neighbours.meet(job, peers)
        for shard in self._shards.values():
            if shard.key.job == job and shard.origin == self.node:
                shard.replicas -= lost
                if self.neighbours.lacks(shard):
                    shard.wants.add("replicate")

    def lost(self, shard: Shard, node: str) -> None:
        """Have another node hold a copy, as that one does no longer; the caller holds the lock."""
        shard.replicas.discard(node)
        if not shard.dropped:
            shard.wants.add("replicate")
            self.changed.notify_all()

    def replicated(self) -> dict[tuple[str, str], list[Shard]]:
        """Return which shards that have not been overtaken by a safe one are said to have copies on which (job, node).

        The caller holds the lock.
        """
        found: dict[tuple[str, str], list[Shard]] = {}
        for key, shard in self._shards.items():
            if key.generation >= self._safe.get(key.job, _NONE):
                for node in shard.replicas:
                    found.setdefault((key.job, node), []).append(shard)
        return found

    def goodbye(self, client: "Client") -> None:
        """Forget a rank's connection."""
        with self.changed:
            if self._clients.get((client.job, client.rank)) is client:
                del self._clients[client.job, client.rank]
            self.changed.notify_all()

    def expect(self, client: Client) -> None:
        """Say how much memory the checkpoints of this node will take, now that one more rank tells what it saves.

        Raises
        ------
        CannotRun
            Not even one generation fits.
        """
        with self.changed:
            sizes = tuple(c.saved_bytes for c in self._clients.values() if c.saved_bytes)
            others = max(len(self.neighbours.others(job)) for job, _ in [(client.job, 0), *self._clients])
            copies = min(self.settings.replicas, others)
            forecast = limits.Forecast(sizes, copies, self.settings.generations, self.cap.nbytes)
            forecast.check()
            most = forecast.most_bytes > self._forecast_bytes
            self._forecast_bytes = max(self._forecast_bytes, forecast.most_bytes)
        if most:
            self._inform(str(forecast))

    def seal(self, key: Key, world_size: int, nbytes: int, slab: Slab, owner: str, content: dict[str, Any]) -> None:
        """Take over a filled slab as this rank's part of a generation. From now on it never changes."""
        with self.changed:
            if key in self._shards:
                raise UsageError(f"step {key.generation.step} was saved already by rank {key.rank}; a generation never changes")
            shard = Shard(key, world_size, self.node, nbytes, slab, owner, content)
            self._add(shard)
        self.tell(key, "cached")
        self._write_down(shard)
        with self.changed:
            if not self.neighbours.others(key.job):
                self.tell(key, "replicated", "no other node's cache is known, so there is no second copy")
            if self.storage is None:
                self.tell(key, "persistent", "the cache has no storage folder: start it with --storage DIR")

    def choose(self, job: str, world_size: int, exclude: set[Generation]) -> Message:
        """Return the newest generation that can be restored and why newer ones cannot be, as the message `chosen`.

        `existed` is the newest that is not excluded and of which it is known that it existed, also when it can no longer be
        restored.
        """
        copies, problems = self._copies(job)
        choice = restore.choose(copies, world_size, exclude)
        found = {copy.generation for copy in copies}
        with self.changed:
            existing = set(self._existing[job])
            # also of what is out of reach: it may come back, and must then be older than what is saved from now on; and of starts
            # that saved nothing yet, which may still run. Else it is the time, so that it grows when nothing of all this is left
            known = max((known.attempt for known in found | existing), default=0)
            attempt = self._attempts[job] = max(known + 1, self.attempt(job) + 1, int(time.time()))
        existed = max(existing - exclude, default=None)
        notes = [*choice.passed_over, *(f"not reached: {problem}" for problem in problems)]
        if existed is not None and existed not in found and existed > (choice.generation or _NONE):
            notes.insert(0, f"step {existed.step} existed and no copy of it is left")
        return {
            "generation": None if choice.generation is None else str(choice.generation),
            "attempt": attempt,
            "existed": None if existed is None else str(existed),
            "passed_over": notes,
            "unreached": problems,
        }

    def fetch(self, key: Key, *, check: bool = True) -> tuple[Shard, str, str, list[str]]:
        """Return a rank's shard, verified just now and pinned, where it came from, who held it, and what was tried in vain.

        Without `check` what this node's memory holds is given as it is, to a rank that verifies it itself.

        Raises
        ------
        CheckpointError
            No copy is intact; every copy is named with what is wrong with it.
        """
        found, problems = self._copies(key.job)
        copies = [copy for copy in found if (copy.generation, copy.rank) == (key.generation, key.rank)]
        tried: list[str] = []
        for copy in copies:
            if copy.holder == self.node:
                try:
                    return self._checked(key, check), restore.source(copy, self.node), self.node, tried
                except CheckpointError as error:
                    tried.append(f"{self.node}: {error}")
        gathered = self._gather(key, {copy.holder for copy in copies} - {self.node}, tried)
        if gathered is None:
            why = "; ".join([*tried, *problems] or ["no copy"])
            raise CheckpointError(f"step {key.generation.step} of rank {key.rank} cannot be restored: {why}")
        shard, holders = gathered
        return shard, STORAGE if STORAGE in holders else "neighbour", " and ".join(holders), tried

    def _checked(self, key: Key, check: bool) -> Shard:
        """Return a shard of this node's memory, pinned, and verified just now if it is to be checked."""
        shard = self.pinned(key)
        if shard is None or shard.manifest is None:
            raise CheckpointError("it is not held any more")
        if not check:
            return shard
        try:
            verify(shard.manifest, shard.data)
        except Corrupt:
            with self.changed:
                if not shard.dropped:
                    self._drop(shard, "its bytes changed in memory")
                self.unpin(shard)
            raise
        return shard

    def _gather(self, key: Key, holders: set[str], tried: list[str]) -> tuple[Shard, list[str]] | None:
        """Return a shard out of what other nodes and storage hold of it, pinned, and who gave it; None when some is nowhere."""
        taken: list[Slab] = []

        def room(manifest: Manifest) -> memoryview:
            taken.append(self.take("copies", manifest.nbytes, key.job))
            return taken[-1].view(manifest.nbytes)

        kept: Shard | None = None
        landing: Landing | None = None
        try:
            if others := holders - {STORAGE}:
                landing, notes = self.neighbours.get(others, key, room)
                tried += notes
            if STORAGE in holders and self.storage and (landing is None or landing.missing):
                landing = self.storage.complete(key, landing, room)
                tried += [note for note in landing.notes if note not in tried]
            if landing is not None and not landing.missing:
                kept = self.keep(landing.manifest, taken[-1], "copies", stored=STORAGE in holders)
        except CheckpointError as error:
            tried.append(str(error))
        finally:
            with self.changed:
                for slab in taken[: -1 if kept else None]:
                    self.slabs.give("copies", slab)
        return (kept, [name for name, _ in landing.given.most_common()]) if kept and landing else None

    # ---- small things

    def tell(self, key: Key, level: str, error: str = "") -> None:
        """Tell the rank that saved a shard which level it reached, or why it will not."""
        client = self._clients.get((key.job, key.rank))
        if client is not None:
            client.send({"op": "state", "generation": str(key.generation), "level": level} | ({"error": error} if error else {}))

    def _tell_late(self, key: Key, step: str, why: str) -> None:
        """Tell the rank that saved a shard why a level is not reached yet."""
        client, level = self._clients.get((key.job, key.rank)), {"replicate": "replicated", "store": "persistent"}.get(step)
        if client is not None and level is not None:
            client.send({"op": "late", "generation": str(key.generation), "level": level, "why": why})

    def _write_down(self, shard: Shard) -> None:
        if self._still:
            return  # the rows are another cache's by now, or are written again
        try:
            if shard.dropped:
                self.index.drop(shard.key)
            else:
                self.index.put(
                    shard.key, shard.origin, shard.nbytes,
                    in_memory=True, replica=",".join(sorted(shard.replicas, key=natural)), stored=shard.stored,
                    pending=", ".join(step for step in STEPS if step in shard.wants),
                    error="; ".join(tuple(shard.errors.values())),
                )  # fmt: skip
        except sqlite3.Error as error:
            self._say(f"the index cannot be written ({error}); checkpoints go on without it")

    def _politely(self, serve: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
        """Return `serve`, which whatever the other side does ends with a sentence at most."""

        def attend(sock: socket.socket) -> None:
            try:
                serve(sock)
            except OSError:
                pass  # the other side is gone
            except (CheckpointError, KeyError, TypeError, ValueError, OverflowError, RecursionError, sqlite3.Error) as error:
                self._say(f"a connection was closed: {_words(error)}")

        return attend

    def _attend_peer(self, sock: socket.socket) -> None:
        self.transport.attend(sock, self.neighbours.serve)

    def _greet(self, sock: socket.socket) -> None:
        """Serve whoever connects on this node: a rank, a cache that takes over, or somebody who wants everything verified."""
        got = receive(sock)
        if got is None:
            return
        if got[0]["op"] == "take-over":
            handover.give(self, sock, got[0])
        elif got[0]["op"] == "verify":
            audit.answer(self, sock, got[0])
        else:
            Client(self, sock).serve(got[0])

    def _inform(self, text: str) -> None:
        with suppress(OSError, ValueError):
            print(text, flush=True)

    def _say(self, text: str) -> None:
        """Tell the operator what went wrong, each thing once."""
        if text not in self._said:
            if len(self._said) > 1000:
                self._said.clear()
            self._said.add(text)
            # a full disk or a broken pipe below the log must not end the thread that wanted to tell
            with suppress(OSError, ValueError):
                print(f"eagleeye cache: {text}", file=sys.stderr, flush=True)


def serve(settings: Settings, *, take_over: bool = False) -> int:
    """Run the cache of this node until SIGTERM or SIGINT, or until another one takes over; return the exit code."""
    cache = Cache(settings, take_over=take_over)
    stopped = threading.Thread(target=_stop_at_signal, args=(cache,), daemon=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    stopped.start()
    where = f"storage {settings.storage}" if settings.storage else "no storage: generations live in memory alone"
    with suppress(OSError, ValueError):
        print(
            f"cache of {cache.node}: port {cache.port}, run folder {cache.run_dir}, at most {limits.size(cache.cap.nbytes)} "
            f"({cache.cap.reason}) in {_pages()}, {where}",
            flush=True,
        )
    cache.run()
    return 0


def _stop_at_signal(cache: Cache) -> None:
    signal.sigwait((signal.SIGINT, signal.SIGTERM))
    cache.stop()


def _pages() -> str:
    """Say which pages slabs will get."""
    if free := free_large_pages():
        return f"pages of 2 MiB while the machine's reserve of {free} lasts"
    return "pages of 2 MiB, collapsed once they are filled" if can_collapse() else "pages of 4 KiB"


def _words(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error) or type(error).__name__
