"""One schedule of the chaos campaign: a plan carried out against real processes, with an oracle that watches."""

import contextlib
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import chaos_faults
from chaos_cluster import BOUND_S, FAST, Broken, Cache, Cluster, Rank, exit_code, start_ranks
from chaos_oracle import LEVELS, UNBOUNDED, WRONG, Oracle, Point, Told, Violation
from chaos_plan import Plan
from chaos_ranks import ROWS, Nursery

_RETRIES = 2


@dataclass
class Outcome:
    """What became of one schedule: what was violated, and how its restores ended, by the fault before them."""

    plan: Plan
    violations: list[Violation] = field(default_factory=list)
    restores: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)


class Schedule:
    """One plan, carried out."""

    def __init__(self, plan: Plan, folder: Path, nursery: Nursery) -> None:
        self._plan = plan
        self._nursery = nursery
        self._cluster = Cluster(plan, folder, network())
        self._oracle = Oracle(plan.seed, plan.stored)
        self._ranks: list[Rank] = []
        self._stale: list[Rank] = []
        self._start = 0
        self._world = plan.world
        self._step = 0
        self._sizes: set[int] = set()
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._at_level: dict[tuple[str, int], Callable[[], None]] = {}
        self._open: dict[tuple[Point, int], set[str]] = {}
        """What each rank saved and what it was told of that: levels, and which of them failed with a ``!``."""
        self._faults: list[str] = []
        self._began_s = time.monotonic()
        self.outcome = Outcome(plan)

    def run(self) -> Outcome:
        """Do all of it, then take all faults away and see what is left."""
        with self._cluster:
            try:
                if not all(cache.start() for cache in self._cluster.caches):
                    raise Broken(f"a cache does not start: {self._cluster.caches[0].errors.read_text()[-300:]}")
                self._restart(healed=False)
                for name, how in self._plan.ops:
                    self._say(f"{name} {how}")
                    getattr(self, "_" + name.replace(" ", "_"))(**how)
                self._say("the end")
                self._last_restore()
                if self._plan.stored:
                    self._say("all caches are killed")
                    self._kill_all_caches()
                    self._last_restore()
            except Broken as broken:
                self._violated(Violation(UNBOUNDED, str(broken)))
            finally:
                for rank in [*self._ranks, *self._stale]:
                    rank.close()
        return self.outcome

    def _last_restore(self) -> None:
        """Nothing is wrong any more: what was promised must come back, and the next save must go all the way."""
        self._world = self._plan.world
        self._end_ranks()
        self._heal()
        if not self._restart(healed=True):
            return
        level = "persistent" if self._plan.stored else "cached"
        for _ in range(1 + _RETRIES):
            self._save(1, 4096, level, patience_s=BOUND_S)
            late = {key: told for key, told in self._open.items() if key[0].step == self._step and level not in told}
            if not any(f"!{level}" in told for told in late.values()):
                break
        if late:
            self._violated(Violation(UNBOUNDED, f"a save after all faults is not {level} after {BOUND_S:g} s: {late}"))

    # ---- what a plan can hold

    def _save(
        self, count: int, nbytes: int, until: str, *, part: bool = False, overlap: bool = False, patience_s: float = 0.0
    ) -> None:
        if not self._ranks:
            self._heal()
            if not self._restart(healed=False):
                return
        self._sizes.add(nbytes)
        for _ in range(count):
            self._step += 1
            for rank in [*self._stale, *self._ranks[: 1 if part else None]]:
                point = Point(rank.start, self._step)
                self._oracle.save(point, rank.world, rank.number, rank.node, nbytes)
                self._open[point, rank.number] = set()
                rank.ask("save", self._step, nbytes, overlap)
            for rank in [*self._stale, *self._ranks[: 1 if part else None]]:
                answer = self._answer(rank, "save")
                if answer is not None and answer[1]:
                    self._open[Point(rank.start, self._step), rank.number] |= {f"!{level}" for level in LEVELS}
                    self._say(f"rank {rank.number} could not save: {answer[1]}")
        if until:
            wanted = {until, f"!{until}"}
            newest = [told for (point, _), told in self._open.items() if point == Point(self._start, self._step)]
            patience_s = patience_s or (3.0 if self._plan.real else 0.6)
            self._wait(lambda: all(told & wanted for told in newest) or not self._living(), patience_s)
        if part:
            self._end_ranks()

    def _restart_job(self, kill: bool, shift: int, into: bool) -> None:
        if kill:
            self._end_ranks()
        else:
            # the job goes on somewhere, and somebody starts it a second time
            self._note("two jobs with one name")
            self._end_stale()
            self._stale, self._ranks = self._ranks, []
        self._restart(healed=False, shift=shift, into=into)

    def _resize(self, world: int) -> None:
        self._note("world size changed")
        self._end_ranks()
        self._world = world
        self._restart(healed=False)

    def _kill_cache(self, node: int, back_ms: int, politely: bool) -> None:
        self._note("cache ended" if politely else "cache killed")
        cache = self._cluster.caches[node]
        if not cache.kill(politely=politely):
            self._violated(Violation(UNBOUNDED, f"the cache of node {node} did not end within {BOUND_S:g} s of being asked to"))
        self._oracle.lost(node)
        self._later(back_ms, lambda: self._begin(node))

    def _kill_all_caches(self) -> None:
        self._note("all caches killed")
        for cache in self._cluster.caches:
            cache.kill()
            self._oracle.lost(cache.number)

    def _kill_at_call(self, victim: str, of: int, calls: int, back_ms: int) -> None:
        self._note(f"{victim} killed at a call")
        row = of if victim == "cache" else ROWS + of
        self._cluster.control.set(row, "die_at", self._cluster.control.get(row, "calls") + calls)
        if victim == "cache":
            self._later(back_ms + 200, lambda: self._begin(of))

    def _kill_at_level(self, victim: str, of: int, level: str, rank: int, delay_ms: int, back_ms: int) -> None:
        self._note(f"{victim} killed when {level}")

        def kill() -> None:
            if victim == "rank":
                for one in self._ranks[of : of + 1]:
                    one.kill()
            else:
                self._kill_cache(of, back_ms, False)

        self._at_level[level, rank] = lambda: self._later(delay_ms, kill)

    def _stop(self, victim: str, of: int, stop_ms: int) -> None:
        self._note(f"{victim} stopped")
        for one in self._cluster.caches[of : of + 1] if victim == "cache" else self._ranks[of : of + 1]:
            if one.alive():
                os.kill(one.pid, signal.SIGSTOP)
                one.stopped = True
                self._later(stop_ms, lambda one=one: self._go_on(one))

    def _flip_memory(self, node: int, luck: float, bits: int) -> None:
        cache = self._cluster.caches[node]
        # bytes are proven from the moment at which their digests are made, which every later level waits for
        self._wait(self._settled, 0.3)
        if not self._settled() or cache.stopped or not self._runs(cache):
            return
        chance = random.Random(luck)
        for file in cache.memory():
            self._note("bits flipped in memory")
            for _ in range(bits):
                chaos_faults.flip(file, chance.randrange(max(1, file.stat().st_size)))
        self._oracle.lost(node)

    def _damage_file(self, how: str, luck: float, at: float) -> None:
        files = sorted(path for path in self._stored() if path.is_file() and not path.name.startswith("."))
        if not files:
            return
        path = files[int(luck * len(files))]
        kind = {".shard": "shard", ".json": "manifest"}.get(path.suffix, path.name)
        self._note(f"stored {kind} damaged")
        for part in path.relative_to(self._cluster.storage).parts[1:-1]:
            self._oracle.damaged(part)
        with contextlib.suppress(FileNotFoundError):
            size = path.stat().st_size
            if how == "flip":
                chaos_faults.flip(path, int(at * size))
            elif how == "truncate":
                os.truncate(path, int(at * size))
            elif how == "remove":
                path.unlink()
            else:
                path.write_bytes(random.Random(luck).randbytes(int(at * 200)))

    def _stored(self) -> list[Path]:
        """Return all that lies in storage now, where caches write and remove."""
        return [Path(folder) / name for folder, folders, files in os.walk(self._cluster.storage) for name in folders + files]

    def _storage_fault(self, fault: str, node: int | None) -> None:
        self._note(f"storage: {fault}")
        if fault == "full":
            self._oracle.storage_was_full()
        for cache in self._cluster.caches:
            if node in (None, cache.number):
                self._cluster.control.set(cache.number, "storage", chaos_faults.STORAGE_FAULTS.index(fault))

    def _network_fault(self, fault: str, node: int) -> None:
        self._note(f"network: {fault}")
        self._cluster.control.set(node, "network", chaos_faults.NETWORK_FAULTS.index(fault))

    def _lose_index(self, node: int, how: str, kill: bool) -> None:
        self._note("index lost")
        if kill:
            self._kill_cache(node, 0, False)
        for path in Path(self._cluster.caches[node].run_dir).glob("*.db*"):
            if how == "remove":
                path.unlink()
            else:
                path.write_bytes(b"no database" * 500)
        self._wait(lambda: False, 0.02)

    def _replace_cache(self, node: int) -> None:
        cache = self._cluster.caches[node]
        if not self._runs(cache) or cache.stopped:
            return
        self._note("cache replaced")
        if not cache.replace():
            self._oracle.lost(node)

    def _second_cache(self, node: int) -> None:
        cache = self._cluster.caches[node]
        if not self._runs(cache) or cache.stopped:
            return
        self._note("second cache on a node")
        pid, out = cache.launch()
        os.close(out)
        code = exit_code(pid, BOUND_S / 4)
        if self._runs(cache) and code in (None, 0):
            self._violated(Violation(WRONG, f"a second cache ran on node {node}"))

    def _clock_jump(self, offset_s: int) -> None:
        self._note("clock jump")
        for row in range(ROWS + 8):
            self._cluster.control.set(row, "clock_offset_s", offset_s)

    def _foreign_file(self, luck: float) -> None:
        self._note("foreign file in storage")
        folders = sorted(path for path in self._stored() if path.is_dir()) or [self._cluster.storage]
        with contextlib.suppress(OSError):
            (folders[int(luck * len(folders))] / "rank-00007.json").write_text("{}")

    def _heal(self) -> None:
        self._due.clear()
        self._at_level.clear()
        for node in self._cluster.heal():
            self._oracle.lost(node)
        for rank in [*self._ranks, *self._stale]:
            self._go_on(rank)

    # ---- the job

    def _restart(self, *, healed: bool, shift: int = 0, into: bool = False) -> bool:
        """Start the ranks, have them restore, and judge it; return whether they go on."""
        told = self._load(shift, into)
        ended, violations = self._oracle.judge(told, healed=healed)
        for _ in range(_RETRIES):
            # on a busy machine a cache may not answer in time; what is lost is lost for the next start, too
            if not violations or {one.how for one in told} != {"failed"}:
                break
            self._say(f"start {self._start} failed: {told[0].why}")
            self._end_ranks()
            told = self._load(shift, into)
            ended, violations = self._oracle.judge(told, healed=healed)
        for fault in set(self._faults) or {"none"}:
            self.outcome.restores[f"{fault}|{ended}"] += 1
        for one in told:
            if one.how == "restored":
                self.outcome.restores[f"ranks restored from|{one.source}"] += 1
        self._faults = []
        self._say(f"start {self._start}: {ended}; {[one[:4] for one in told]} {told[0].why}")
        for violation in violations:
            self._violated(violation)
        goes_on = all(one.how in ("restored", "nothing") for one in told) and not violations
        if not goes_on:
            self._end_ranks()
        return goes_on

    def _load(self, shift: int, into: bool) -> list[Told]:
        """Start the ranks and return how the restore of each ended."""
        self._pump(0.0)
        for row in range(ROWS, ROWS + 8):
            self._cluster.control.set(row, "die_at", 0)
        self._start += 1
        self._ranks = start_ranks(self._cluster, self._nursery, self._start, self._world, shift)
        into_bytes = next(iter(self._sizes)) if into and len(self._sizes) == 1 else 0
        for rank in self._ranks:
            rank.ask("load", into_bytes)
        told = []
        for rank in self._ranks:
            answer = self._answer(rank, "load")
            told.append(Told("silent" if rank.alive() else "failed", why="it was killed") if answer is None else answer[0])
        return told

    def _end_ranks(self) -> None:
        self._end_stale()
        for rank in self._ranks:
            rank.kill()
            self._hear(rank)
            rank.close()
        self._ranks = []
        self._open.clear()

    def _end_stale(self) -> None:
        for rank in self._stale:
            rank.close()
        self._stale = []

    def _living(self) -> bool:
        return all(rank.alive() for rank in self._ranks)

    def _settled(self) -> bool:
        return all(told & {"replicated", "persistent"} for told in self._open.values())

    # ---- time passes

    def _answer(self, rank: Rank, what: str) -> tuple[Any, ...] | None:
        """Return what a rank answers, None when it died or says nothing within the bound."""
        if not self._wait(lambda: bool(rank.answers) or not rank.alive(), BOUND_S):
            self._violated(Violation(UNBOUNDED, f"rank {rank.number} did not end its {what} within {BOUND_S:g} s"))
            rank.kill()
        self._hear(rank)
        return rank.answers.pop(0)[1:] if rank.answers else None

    def _wait(self, condition: Callable[[], bool], patience_s: float) -> bool:
        until_s = time.monotonic() + patience_s
        while not condition():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            self._pump(min(left_s, 0.05))
        return True

    def _pump(self, patience_s: float) -> None:
        """Hear what ranks tell, do what is due, and see who died."""
        now_s = time.monotonic()
        if self._due:
            patience_s = max(0.0, min(patience_s, min(at_s for at_s, _ in self._due) - now_s))
        ready = wait([rank.pipe for rank in [*self._ranks, *self._stale] if rank.alive()], patience_s)
        for rank in [*self._ranks, *self._stale]:
            if rank.pipe in ready:
                self._hear(rank)
        for cache in self._cluster.caches:
            self._runs(cache)
        for item in [item for item in self._due if item[0] <= time.monotonic()]:
            self._due.remove(item)
            item[1]()

    def _hear(self, rank: Rank) -> None:
        with contextlib.suppress(EOFError, OSError):
            while rank.pipe.poll():
                what, *how = rank.pipe.recv()
                if what == "named":
                    self._oracle.named(Point(rank.start, how[0]), how[1])
                elif what == "level":
                    step, level, error = how
                    point = Point(rank.start, step)
                    self._open.get((point, rank.number), set()).add(f"!{level}" if error else level)
                    if not error:
                        self._oracle.reached(point, rank.number, level)
                        if rank in self._ranks and (do := self._at_level.pop((level, rank.number), None)):
                            do()
                else:
                    rank.answers.append((what, *how))

    def _later(self, ms: float, do: Callable[[], None]) -> None:
        """Do something when so many milliseconds of the engine's clock are over."""
        self._due.append((time.monotonic() + ms / 1000 / (1.0 if self._plan.real else FAST / 3), do))

    def _begin(self, node: int) -> None:
        cache = self._cluster.caches[node]
        if not self._runs(cache):
            self._cluster.control.set(node, "die_at", 0)
            cache.start()

    def _runs(self, cache: Cache) -> bool:
        """Whether a cache runs; the oracle is told when it does no longer."""
        ran = cache.pid != 0
        if ran and not cache.alive():
            self._oracle.lost(cache.number)
        return cache.pid != 0

    def _go_on(self, one: Any) -> None:
        if one.stopped and one.alive():
            os.kill(one.pid, signal.SIGCONT)
        one.stopped = False

    def _note(self, fault: str) -> None:
        self._faults.append(fault)

    def _violated(self, violation: Violation) -> None:
        self._say(f"VIOLATION {violation.kind}: {violation.what}")
        self.outcome.violations.append(violation)

    def _say(self, text: str) -> None:
        self.outcome.log.append(f"{time.monotonic() - self._began_s:7.3f} s  {text}")


def carry_out(plan: Plan, folder: Path, nursery: Nursery, *, keep: bool = False) -> Outcome:
    """Run one plan in a folder of its own, which is removed unless something was violated and it shall be kept."""
    outcome = Outcome(plan)
    try:
        outcome = Schedule(plan, folder, nursery).run()
    finally:
        if not (keep and outcome.violations):
            shutil.rmtree(folder, ignore_errors=True)
    return outcome


def network() -> str:
    """Return the first three numbers of loopback addresses that no other process uses, so that ports are always free."""
    return f"127.{2 + os.getpid() % 250}.{os.getpid() // 250 % 256}"
