"""The cache of one node: holds what its ranks save, copies it to the next node, writes it to storage, and gives it back.

A shard goes one way: sealed (by the rank) -> verified (digests made) -> replicated (a neighbour holds it) and stored (it lies in
the folder). Each step is repeated until it succeeds. A generation exists once every rank's shard does, somewhere.
"""

import errno
import fcntl
import json
import os
import random
import signal
import socket
import sqlite3
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint import place, restore, transport
from checkpoint.errors import CannotRun, CheckpointError, Corrupt, PeerError, UsageError
from checkpoint.index import Index
from checkpoint.manifest import Generation, Key, Manifest, check_job, decode, generation, made_of, verify
from checkpoint.memory import Slab, Slabs
from checkpoint.protocol import VERSION, Message, receive, receive_bytes, send, send_bytes
from checkpoint.restore import STORAGE, Copy
from checkpoint.ring import successors
from checkpoint.storage import Folder

FIRST_RETRY_S, LAST_RETRY_S = 0.5, 30.0
ALONE_S = 5.0
"""A shard of a generation that is not known to exist after so long goes to storage all the same: peers may be cut off."""
ASK_S, ASK_SLOW_S = 0.1, 2.0
"""Peers are asked what they hold this often while a generation is unfinished; ever more slowly while nothing comes of it."""
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
    """Address at which other nodes reach this cache; default that of the host name. There are no passwords: a private network."""
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
    """Most memory that is taken; 0 is half of the machine's."""
    peers: str = ""
    """``NODE=HOST:PORT,...``: the other nodes' caches, for jobs whose launcher does not tell them."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port {self.port} does not exist; use 0 to 65535")
        if self.generations < 1 or self.stored_generations < 1:
            raise ValueError("generations and stored_generations must be at least 1")
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
    replica: str = ""
    stored: bool = False
    wants: set[str] = field(default_factory=set)
    born_s: float = field(default_factory=time.monotonic)
    pins: int = 0
    dropped: bool = False
    tries: dict[str, int] = field(default_factory=dict)
    not_before_s: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def data(self) -> memoryview:
        """The shard's bytes."""
        return self.slab.view(self.nbytes)


class Cache:
    """The server. `run()` serves until `stop()`; everything it does for its clients happens in threads of its own.

    Raises
    ------
    CannotRun
        Another cache runs on this node, the port is in use, or the folder cannot be written.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.node = settings.node or os.environ.get("EAGLEEYE_NODE") or os.environ.get("NODE_NAME") or socket.gethostname()
        self.run_dir = place.run_dir(settings.run_dir)
        self.slabs = Slabs(settings.memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
        self.storage = Folder(Path(settings.storage)) if settings.storage else None
        self._shards: dict[Key, Shard] = {}
        self._existing: dict[str, set[Generation]] = {}
        self._complete: dict[str, set[Generation]] = {}
        self._safe: dict[str, Generation] = {}
        self._asked: dict[str, set[Key]] = {}
        self._begun: dict[str, set[Generation]] = {}
        """What other nodes began to write last, of each job."""
        self._storing: dict[str, Generation] = {}
        """What this node began to write last, of each job."""
        self._peers: dict[str, dict[str, str]] = {}
        self._clients: dict[tuple[str, int], _Client] = {}
        self._born: dict[tuple[str, int], int] = {}
        self._newest_born: dict[str, int] = {}
        self.changed = threading.Condition()
        self._stopping = False
        self._said: set[str] = set()
        if self.storage:
            with suppress(OSError):  # it may come later
                self.storage.path.mkdir(parents=True, exist_ok=True)
        try:
            self._open()
        except (OSError, sqlite3.Error) as error:
            raise CannotRun(f"the cache cannot use {self.run_dir}: {error}; give another --run-dir or --port") from None

    def _open(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(self.run_dir / place.LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(self._lock, 32).decode() or "unknown"
            os.close(self._lock)
            raise CannotRun(f"a cache (pid {pid}) runs in {self.run_dir} already; one serves all jobs of a node") from None
        os.truncate(self._lock, 0)
        os.write(self._lock, str(os.getpid()).encode())
        self._tcp = _listen(self.settings.address, self.settings.port)
        self.index = Index(self.run_dir / place.INDEX)
        if self.index.moved:
            self._say(self.index.moved)
        (self.run_dir / place.SOCKET).unlink(missing_ok=True)
        self._unix = socket.socket(socket.AF_UNIX)
        with place.socket_address(self.run_dir) as address:
            self._unix.bind(address)
        self._unix.listen(128)
        self.port = int(self._tcp.getsockname()[1])
        info = {
            "node": self.node,
            "address": self.settings.address or socket.gethostname(),
            "port": self.port,
            "pid": os.getpid(),
        }
        temporary = self.run_dir / f".{place.INFO}"
        temporary.write_text(json.dumps(info), encoding="utf-8")
        temporary.replace(self.run_dir / place.INFO)

    def run(self) -> None:
        """Serve until `stop()` is called; then finish what storage still wants, for at most `DRAIN_S`."""
        work: list[tuple[str, Callable[[], None]]] = [
            ("clients", lambda: self._accept(self._unix, lambda s: _Client(self, s).serve())),
            ("peers", lambda: self._accept(self._tcp, self._serve_peer)),
            ("verify", lambda: self._repeat("verify", self._verify)),
            ("replicate", lambda: self._repeat("replicate", self._replicate)),
            ("ask", self._ask_peers),
        ]
        if self.storage:
            work.append(("store", lambda: self._repeat("store", self._store)))
        for name, do in work:
            threading.Thread(target=do, name=name, daemon=True).start()
        with self.changed:
            self.changed.wait_for(lambda: self._stopping)
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
            with self.changed:
                shard.error = error
                if error:
                    tries = shard.tries[step] = shard.tries.get(step, 0) + 1
                    delay_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** (tries - 1)) * random.uniform(0.8, 1.2)
                    shard.not_before_s[step] = time.monotonic() + delay_s
                else:
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
            if due:
                return self._most_urgent(due) if step == "store" else max(due, key=lambda s: s.key.generation)
            self.changed.wait(wait_s)

    def _may_store(self, shard: Shard) -> bool:
        job = shard.key.job
        return shard.key.generation in self._existing.get(job, ()) or not self._others(job)

    def _others(self, job: str) -> dict[str, str]:
        return {node: address for node, address in self._peers.get(job, {}).items() if node != self.node}

    def _is_begun(self, shard: Shard) -> bool:
        job, wanted = shard.key.job, shard.key.generation
        return wanted in self._begun.get(job, ()) or wanted == self._storing.get(job)

    def _most_urgent(self, due: list[Shard]) -> Shard:
        """What a node has begun to write goes first, lest each write other generations and none be whole in storage."""
        begun = [shard for shard in due if self._is_begun(shard)]
        if begun:
            return min(begun, key=lambda s: s.key.generation)
        return max(due, key=lambda s: (s.key.generation in self._existing.get(s.key.job, ()), s.key.generation))

    def _verify(self, shard: Shard) -> None:
        manifest = made_of(shard.key, shard.world_size, shard.origin, shard.content, shard.data)
        with self.changed:
            shard.manifest = manifest

    def _replicate(self, shard: Shard) -> None:
        assert shard.manifest is not None
        with self.changed:
            peers = self._others(shard.key.job)
            existing = sorted(self._existing.get(shard.key.job, ()))[-4:]
        refusals = []
        for node in successors(self.node, peers):
            try:
                transport.put(peers[node], shard.manifest, shard.data, existing)
            except PeerError as error:
                refusals.append(f"{node}: {error}")
                continue
            with self.changed:
                if node not in self._others(shard.key.job):
                    raise PeerError(f"{node} left the job while it took a copy")
                shard.replica = node
            self._tell(shard.key, "replicated")
            return
        raise PeerError("no other node took a copy: " + "; ".join(refusals))

    def _store(self, shard: Shard) -> None:
        assert shard.manifest is not None
        assert self.storage is not None
        job, wanted = shard.key.job, shard.key.generation
        with self.changed:
            self._storing[job] = wanted
        verify(shard.manifest, shard.data)
        try:
            self.storage.write(shard.manifest, shard.data)
            with self.changed:
                shard.stored = True
            self._tell(shard.key, "persistent")
            if self.storage.commit(job, wanted, shard.world_size):
                with self.changed:
                    self._existing.setdefault(job, set()).add(wanted)
                self.storage.retain(job, self.settings.stored_generations)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                # room for the new one goes before a third and second old one; the newest good one is never touched
                with suppress(OSError):
                    self.storage.retain(job, 1)
            raise CheckpointError(f"storage {self.storage.path}: {_words(error)}") from None

    def _ask_peers(self) -> None:
        """Find out which generations exist and which are safe, while there are some of which this is not known."""
        period_s = ASK_S
        while True:
            with self.changed:
                while not (open_jobs := self._jobs_with_open_generations()):
                    period_s = ASK_S
                    self.changed.wait()
                # all ranks have saved these, or never will: two newer ones were saved here since
                superseded = {job: {s.key for s in self._surplus(job, None)} for job in open_jobs}
            learned = False
            for job in open_jobs:
                copies, _ = self._copies(job, with_storage=False)
                existing = restore.complete(copies)
                with self.changed:
                    known = self._existing.setdefault(job, set())
                    learned = learned or not existing <= known
                    known |= existing
                    self._existing[job] = set(sorted(known)[-16:])
                    for found in restore.safe(copies, 2 if self._others(job) else 1):
                        if found > self._safe.get(job, _NONE):
                            self._safe[job], learned = found, True
                    self._complete[job], self._asked[job] = existing, superseded[job]
                    self._retain(job)
                    self.changed.notify_all()
            period_s = ASK_S if learned else min(2 * period_s, ASK_SLOW_S)
            time.sleep(ASK_S)
            with self.changed:
                self.changed.wait_for(lambda: any(self._unasked(job) for job in self._jobs()), period_s - ASK_S)

    def _jobs(self) -> set[str]:
        return {key.job for key in self._shards}

    def _jobs_with_open_generations(self) -> set[str]:
        return {
            key.job
            for key, shard in self._shards.items()
            if shard.origin == self.node and key.generation > self._safe.get(key.job, _NONE)
        } | {job for job in self._jobs() if self._unasked(job)}

    def _unasked(self, job: str) -> bool:
        """Whether memory is held only because it is not known whether others hold the rest of it."""
        return len(self._surplus(job, None)) > len(self._surplus(job, self._asked.get(job, set())))

    # ---- what is held

    def _copies(self, job: str, *, with_storage: bool = True) -> tuple[list[Copy], list[str]]:
        """Return every copy of the job's shards that can be reached, and why others could not be asked."""
        copies, problems = self._held(job), []
        begun: set[Generation] = set()
        existing: set[Generation] = set()
        with self.changed:
            peers = self._others(job)
        if peers:
            with ThreadPoolExecutor(min(16, len(peers))) as pool:
                for node, asked in {n: pool.submit(transport.inventory, a, job) for n, a in peers.items()}.items():
                    try:
                        # by the name under which it was asked, which is the one under which it is found again
                        told = asked.result()
                        copies += [Copy(c.generation, c.rank, c.world_size, node, c.origin) for c in told.copies]
                        begun |= told.storing
                        existing |= told.existing
                    except PeerError as error:
                        problems.append(f"{node}: {error}")
        if with_storage and self.storage:
            try:
                copies += self.storage.copies(job)
                existing |= set(self.storage.committed(job))
            except OSError as error:
                problems.append(f"storage {self.storage.path}: {_words(error)}")
        with self.changed:
            self._begun[job] = begun
            self._existing.setdefault(job, set()).update(existing | restore.complete(copies))
        return copies, problems

    def _held(self, job: str) -> list[Copy]:
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
        # one that was begun stays until it is written; only one, so that a storage that takes nothing cannot fill the memory
        begun: dict[int, Generation] = {}
        for key, shard in self._shards.items():
            if key.job == job and "store" in shard.wants and self._is_begun(shard):
                begun[key.rank] = min(key.generation, begun.get(key.rank, key.generation))
        for shard in self._surplus(job, self._asked.get(job, set())):
            if shard.pins == 0 and shard.key.generation != begun.get(shard.key.rank):
                self._drop(shard, "a newer one was complete before")

    def _surplus(self, job: str, asked: set[Key] | None) -> list[Shard]:
        """Return what need not be held if others were asked about `asked`, None for everything; the caller holds the lock."""
        by_rank: dict[int, list[Shard]] = {}
        for key, shard in self._shards.items():
            if key.job == job:
                by_rank.setdefault(key.rank, []).append(shard)
        complete, newest_safe, keep = self._complete.get(job, set()), self._safe.get(job), self.settings.generations
        found = []
        for shards in by_rank.values():
            held = [s.key.generation for s in shards]
            heard = held if asked is None else [s.key.generation for s in shards if s.key in asked]
            surplus = restore.surplus(held, complete, newest_safe, heard, keep)
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
            self._tell(shard.key, "persistent", f"{step} was not written to storage: {why}")
        if "replicate" in shard.wants:
            self._tell(shard.key, "replicated", f"{step} was not copied: {why}")
        self.changed.notify_all()

    def _add(self, shard: Shard) -> None:
        """Hold one more shard; the caller holds the lock."""
        self._shards[shard.key] = shard
        if shard.manifest is None:
            shard.wants.add("verify")
        if shard.origin == self.node:
            if self._others(shard.key.job):
                shard.wants.add("replicate")
            if self.storage and not shard.stored:
                shard.wants.add("store")
        self._retain(shard.key.job)
        self.changed.notify_all()

    def take(self, owner: str, nbytes: int, job: str) -> Slab:
        """Return a free slab; when memory is short, forget jobs that nobody runs here any more. The caller holds the lock."""
        try:
            return self.slabs.take(owner, nbytes)
        except CannotRun:
            if nbytes > self.slabs.limit_bytes:
                raise  # nothing that is forgotten could make room for it
            living = {name for name, _ in self._clients} | {job}
            ended = [
                s for k, s in self._shards.items() if k.job not in living and s.pins == 0 and (s.stored or s.origin != self.node)
            ]
            # no more than needed, and last of all the newest copies for others: their job may go on elsewhere
            for shard in sorted(ended, key=lambda s: (not s.stored, s.born_s)):
                self._drop(shard, "memory was short and the job had ended")
                with suppress(CannotRun):
                    return self.slabs.take(owner, nbytes)
            raise

    # ---- other nodes

    def _serve_peer(self, sock: socket.socket) -> None:
        sock.settimeout(transport.SILENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (got := receive(sock)) is not None:
            message, _ = got
            answer = {"inventory": self._tell_inventory, "put": self._take_copy, "get": self._give_copy}.get(message["op"])
            if answer is None:
                raise PeerError(f"{message['op']!r} is no question to a checkpoint cache")
            answer(sock, message)

    def _tell_inventory(self, sock: socket.socket, message: Message) -> None:
        shards = [(str(c.generation), c.rank, c.world_size, c.origin) for c in self._held(message["job"])]
        with self.changed:
            storing = [str(self._storing[message["job"]])] if message["job"] in self._storing else []
            existing = [str(known) for known in sorted(self._existing.get(message["job"], ()))[-4:]]
        send(sock, {"op": "inventory", "node": self.node, "storing": storing, "existing": existing, "shards": shards})

    def _take_copy(self, sock: socket.socket, message: Message) -> None:
        manifest = decode(message["manifest"])
        check_job(manifest.key.job)
        if manifest.node == self.node:
            send(sock, {"op": "refused", "why": f"it is called {self.node}, too; every node needs a name of its own"})
            return
        with self.changed:
            self._existing.setdefault(manifest.key.job, set()).update(generation(text) for text in message["existing"])
            if manifest.key in self._shards:
                send(sock, {"op": "have"})
                return
            try:
                slab = self.take("copies", manifest.nbytes, manifest.key.job)
            except CannotRun as error:
                send(sock, {"op": "refused", "why": str(error)})
                return
        try:
            send(sock, {"op": "go"})
            receive_bytes(sock, slab.view(manifest.nbytes))
            verify(manifest, slab.view(manifest.nbytes))
        except BaseException as error:
            with self.changed:
                self.slabs.give("copies", slab)
            if isinstance(error, Corrupt):
                send(sock, {"op": "corrupt", "why": str(error)})
                return
            raise
        self.unpin(self._keep(manifest, slab, "copies"))
        send(sock, {"op": "held"})

    def _give_copy(self, sock: socket.socket, message: Message) -> None:
        key = Key(message["job"], generation(message["generation"]), int(message["rank"]))
        with self.changed:
            shard = self._shards.get(key)
            if shard is None or shard.manifest is None:
                send(sock, {"op": "absent", "why": "it is not held here"})
                return
            shard.pins += 1
        try:
            send(sock, {"op": "shard", "manifest": shard.manifest.encode()})
            send_bytes(sock, shard.data)
        finally:
            self.unpin(shard)

    def _keep(self, manifest: Manifest, slab: Slab, owner: str, *, stored: bool = False) -> Shard:
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

    def hello(self, client: "_Client", born: int, peers: dict[str, str] | None) -> None:
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
        lost = set(self._peers.get(job, {})) - set(peers)
        self._peers[job] = peers
        for shard in self._shards.values():
            if shard.key.job == job and shard.replica in lost:
                # the node that held the copy left the job: another must hold one
                shard.replica = ""
                shard.wants.add("replicate")

    def goodbye(self, client: "_Client") -> None:
        """Forget a rank's connection."""
        with self.changed:
            if self._clients.get((client.job, client.rank)) is client:
                del self._clients[client.job, client.rank]
            self.changed.notify_all()

    def seal(self, key: Key, world_size: int, nbytes: int, slab: Slab, owner: str, content: dict[str, Any]) -> None:
        """Take over a filled slab as this rank's part of a generation. From now on it never changes."""
        with self.changed:
            if key in self._shards:
                raise UsageError(f"step {key.generation.step} was saved already by rank {key.rank}; a generation never changes")
            self._add(Shard(key, world_size, self.node, nbytes, slab, owner, content))
        self._tell(key, "cached")
        with self.changed:
            if not self._others(key.job):
                self._tell(key, "replicated", "no other node's cache is known, so there is no second copy")
            if self.storage is None:
                self._tell(key, "persistent", "the cache has no storage folder: start it with --storage DIR")

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
        # also of what is out of reach: it may come back, and must then be older than what is saved from now on
        attempt = max((known.attempt for known in found | existing), default=0)
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

    def fetch(self, key: Key) -> tuple[Shard, str, str, list[str]]:
        """Return a rank's shard, verified just now and pinned, where it came from, who held it, and what was tried in vain.

        Raises
        ------
        CheckpointError
            No copy is intact; every copy is named with what is wrong with it.
        """
        copies, problems = self._copies(key.job)
        tried: list[str] = []
        for copy in restore.ordered([c for c in copies if (c.generation, c.rank) == (key.generation, key.rank)], self.node):
            try:
                return self._fetch_from(copy, key), restore.source(copy, self.node), copy.holder, tried
            except (CheckpointError, OSError) as error:
                tried.append(f"{copy.holder}: {_words(error)}")
        raise CheckpointError(
            f"step {key.generation.step} of rank {key.rank} cannot be restored: " + "; ".join([*tried, *problems] or ["no copy"])
        )

    def _fetch_from(self, copy: Copy, key: Key) -> Shard:
        if copy.holder == self.node:
            with self.changed:
                shard = self._shards.get(key)
                if shard is None or shard.manifest is None:
                    raise CheckpointError("it is not held any more")
                shard.pins += 1
            try:
                verify(shard.manifest, shard.data)
            except Corrupt:
                with self.changed:
                    if not shard.dropped:
                        self._drop(shard, "its bytes changed in memory")
                    self.unpin(shard)
                raise
            return shard
        taken: list[Slab] = []

        def room(manifest: Manifest) -> memoryview:
            with self.changed:
                taken.append(self.take("copies", manifest.nbytes, key.job))
            return taken[0].view(manifest.nbytes)

        try:
            if copy.holder == STORAGE:
                assert self.storage is not None
                manifest = self.storage.read(key, room)
                verify(manifest, taken[0].view(manifest.nbytes))
            else:
                with self.changed:
                    address = self._peers[key.job][copy.holder]
                manifest = transport.get(address, key, room)
            if manifest.key != key:
                raise Corrupt("another shard lies there")
        except BaseException:
            with self.changed:
                for slab in taken:
                    self.slabs.give("copies", slab)
            raise
        return self._keep(manifest, taken[0], "copies", stored=copy.holder == STORAGE)

    # ---- small things

    def _tell(self, key: Key, level: str, error: str = "") -> None:
        client = self._clients.get((key.job, key.rank))
        if client is not None:
            client.send({"op": "state", "generation": str(key.generation), "level": level} | ({"error": error} if error else {}))

    def _write_down(self, shard: Shard) -> None:
        try:
            if shard.dropped:
                self.index.drop(shard.key)
            else:
                self.index.put(
                    shard.key, shard.origin, shard.nbytes,
                    in_memory=True, replica=shard.replica, stored=shard.stored, error=shard.error,
                )  # fmt: skip
        except sqlite3.Error as error:
            self._say(f"the index cannot be written ({error}); checkpoints go on without it")

    def _accept(self, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                # out of descriptors, say: those who ask are told by the silence, and asked again a moment later
                self._say(f"cannot take a connection: {error}")
                time.sleep(1.0)
                continue
            threading.Thread(target=self._attend, args=(sock, serve), daemon=True).start()

    def _attend(self, sock: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        with sock:
            try:
                serve(sock)
            except OSError:
                pass  # the other side is gone
            except (CheckpointError, KeyError, TypeError, ValueError, OverflowError, RecursionError, sqlite3.Error) as error:
                self._say(f"a connection was closed: {_words(error)}")

    def _say(self, text: str) -> None:
        """Tell the operator, each thing once."""
        if text not in self._said:
            if len(self._said) > 1000:
                self._said.clear()
            self._said.add(text)
            # a full disk or a broken pipe below the log must not end the thread that wanted to tell
            with suppress(OSError, ValueError):
                print(f"eagleeye cache: {text}", file=sys.stderr, flush=True)


class _Client:
    """The connection of one rank."""

    def __init__(self, cache: Cache, sock: socket.socket) -> None:
        self._cache, self._sock = cache, sock
        # a stopped process must not stop the cache: what it does not take in time ends its connection
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 2, 0))
        self._writing = threading.Lock()
        self._known: dict[int, Slab] = {}
        self._filling: dict[int, Slab] = {}
        self._reading: dict[int, list[Shard]] = {}
        self._layouts: dict[int, Any] = {}
        self.job, self.rank, self.world_size = "", 0, 0

    @property
    def _owner(self) -> str:
        return f"{self.job}/{self.rank}/{id(self)}"

    def serve(self) -> None:
        """Answer until the rank closes its connection or dies."""
        got = receive(self._sock)
        if got is None:
            return
        hello = got[0]
        try:
            if hello["op"] != "hello" or hello["version"] != VERSION:
                raise UsageError(
                    f"this cache speaks version {VERSION} and the client {hello.get('version')}; use the same release"
                )
            self.job, self.rank, self.world_size = check_job(hello["job"]), int(hello["rank"]), int(hello["world_size"])
            if not 0 <= self.rank < self.world_size:
                raise UsageError(f"there is no rank {self.rank} among {self.world_size}")
            self._cache.hello(self, int(hello["born"]), hello["peers"])
        except UsageError as error:
            self.send({"op": "refused", "why": str(error)})
            return
        try:
            while (got := receive(self._sock)) is not None:
                {
                    "reserve": self._reserve,
                    "layout": self._layout,
                    "seal": self._seal,
                    "choose": self._choose,
                    "fetch": self._fetch,
                    "release": self._release,
                }[got[0]["op"]](got[0])
        finally:
            self._leave()

    def show_out(self) -> None:
        """Close the connection of a process that may still run."""
        self._hang_up()

    def _leave(self) -> None:
        """Clean up. The process may still run and keeps its mappings, so its slabs are never used again."""
        self._cache.goodbye(self)
        for shards in self._reading.values():
            for shard in shards:
                self._cache.unpin(shard)
        with self._cache.changed:
            for slab in self._known.values():
                slab.reusable = False
            for slab in self._filling.values():
                self._cache.slabs.give(self._owner, slab)
            self._cache.slabs.forget(self._owner)

    def send(self, message: Message, files: Iterable[int] = ()) -> None:
        """Send a message from any thread. A rank that is gone or takes nothing is no error here: its own thread notices."""
        with self._writing:
            try:
                send(self._sock, message, tuple(files))
            except OSError:
                self._hang_up()

    def _hang_up(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _reserve(self, message: Message) -> None:
        try:
            with self._cache.changed:
                # one at a time: what was reserved before and not sealed is not wanted any more
                for number in list(self._filling):
                    self._cache.slabs.give(self._owner, self._filling.pop(number))
                slab = self._cache.take(self._owner, int(message["nbytes"]), self.job)
                new = slab.number not in self._known
                self._known[slab.number] = self._filling[slab.number] = slab
        except CannotRun as error:
            self.send({"op": "full", "why": str(error), "gone": self._gone()})
            return
        answer = {"op": "slab", "slab": slab.number, "nbytes": slab.size_bytes, "gone": self._gone()}
        self.send(answer, [slab.file] if new else [])

    def _gone(self) -> list[int]:
        """Return which slabs the rank should let go of."""
        gone = [number for number, slab in self._known.items() if slab.discarded]
        for number in gone:
            del self._known[number]
        return gone

    def _layout(self, message: Message) -> None:
        # the newest alone: a state whose form changes at each save must not fill the memory with the forms it had
        self._layouts = {message["layout"]: message["items"]}

    def _seal(self, message: Message) -> None:
        key = Key(self.job, generation(message["generation"]), self.rank)
        content = {"items": self._layouts[message["layout"]], "values": message["values"]}
        slab = self._filling[message["slab"]]
        try:
            self._cache.seal(key, self.world_size, int(message["nbytes"]), slab, self._owner, content)
        except UsageError as error:
            self.send({"op": "state", "generation": message["generation"], "level": "cached", "error": str(error)})
        else:
            del self._filling[message["slab"]]

    def _choose(self, message: Message) -> None:
        exclude = {generation(text) for text in message["exclude"]}
        self.send({"op": "chosen", "request": message["request"]} | self._cache.choose(self.job, self.world_size, exclude))

    def _fetch(self, message: Message) -> None:
        answer: Message = {"op": "fetched", "request": message["request"]}
        try:
            key = Key(self.job, generation(message["generation"]), self.rank)
            shard, source, holder, tried = self._cache.fetch(key)
        except CheckpointError as error:
            self.send(answer | {"error": str(error)})
            return
        assert shard.manifest is not None
        self._reading.setdefault(shard.slab.number, []).append(shard)
        answer |= {"slab": shard.slab.number, "source": source, "holder": holder, "tried": tried}
        self.send(answer | {"manifest": shard.manifest.encode()}, [shard.slab.file])

    def _release(self, message: Message) -> None:
        for shard in self._reading.pop(message["slab"], []):
            self._cache.unpin(shard)


def serve(settings: Settings) -> int:
    """Run the cache of this node until SIGTERM or SIGINT; return the exit code."""
    cache = Cache(settings)
    stopped = threading.Thread(target=_stop_at_signal, args=(cache,), daemon=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    stopped.start()
    where = f"storage {settings.storage}" if settings.storage else "no storage: generations live in memory alone"
    with suppress(OSError, ValueError):
        print(
            f"cache of {cache.node}: port {cache.port}, run folder {cache.run_dir}, at most "
            f"{cache.slabs.limit_bytes / (1 << 30):.1f} GiB, {where}",
            flush=True,
        )
    cache.run()
    return 0


def _stop_at_signal(cache: Cache) -> None:
    signal.sigwait((signal.SIGINT, signal.SIGTERM))
    cache.stop()


def _listen(address: str, port: int) -> socket.socket:
    try:
        return socket.create_server((address, port), backlog=128)
    except (OSError, OverflowError, UnicodeError) as error:
        raise CannotRun(f"the cache cannot listen on {address or 'all addresses'}, port {port}: {_words(error)}") from None


def _words(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error) or type(error).__name__
