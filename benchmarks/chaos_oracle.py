"""What the chaos campaign knows of a job, byte for byte, and what must therefore come back. Pure; knows nothing of the engine.

The campaign tells the oracle every save that it orders, every level of which a rank is told, every holder that it destroys and
every stored generation that it damages. When the job starts again, the oracle judges what the ranks restored.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

WRONG, LOST, UNBOUNDED = "wrong_restores", "lost_durable", "unbounded_waits"
KINDS = (WRONG, LOST, UNBOUNDED)
LEVELS = ("cached", "replicated", "persistent")


class Point(NamedTuple):
    """One save of the whole job; ordered from old to new. `start` numbers the starts of the job."""

    start: int
    step: int


class Violation(NamedTuple):
    """One thing that must not happen: one of `KINDS`, and a sentence."""

    kind: str
    what: str


class Told(NamedTuple):
    """How one rank's `load` ended: `how` is ``restored``, ``nothing``, ``failed`` or ``silent`` (it did not end).

    `content` is the start, step and rank that the restored bytes name, `sha256` their digest, `why` the error or the notes.
    """

    how: str
    generation: str = ""
    step: int = -1
    content: tuple[int, int, int] = (-1, -1, -1)
    sha256: str = ""
    source: str = ""
    why: str = ""


@dataclass
class _Saved:
    world: int
    begun_at: int
    homes: dict[int, int] = field(default_factory=dict)
    levels: dict[str, set[int]] = field(default_factory=lambda: {level: set() for level in LEVELS})
    damaged: bool = False

    def reached(self, level: str) -> bool:
        return len(self.levels[level]) == self.world


def content(seed: str, start: int, step: int, rank: int, nbytes: int) -> bytes:
    """Return the bytes that a rank saves: no other start, step or rank has the same."""
    return hashlib.shake_128(f"{seed} {start} {step} {rank}".encode()).digest(nbytes)


class Oracle:
    """The model of one job.

    Parameters
    ----------
    seed : of `content`
    stored : generations that storage keeps
    """

    def __init__(self, seed: str, stored: int) -> None:
        self._seed = seed
        self._stored = stored
        self._saved: dict[Point, _Saved] = {}
        self._sizes: dict[tuple[Point, int], int] = {}
        self._named: dict[str, Point] = {}
        self._lost: list[tuple[int, int]] = []
        self._events = 0
        self._unknown_damage = False

    def save(self, point: Point, world: int, rank: int, node: int, nbytes: int) -> None:
        """A rank on a node is about to be told to save."""
        self._events += 1
        saved = self._saved.setdefault(point, _Saved(world, self._events))
        saved.homes[rank] = node
        self._sizes[point, rank] = nbytes

    def named(self, point: Point, generation: str) -> None:
        """The engine calls a point so."""
        self._named[generation] = point

    def reached(self, point: Point, rank: int, level: str) -> None:
        """A rank was told that its part reached a level."""
        self._saved[point].levels[level].add(rank)

    def lost(self, node: int) -> None:
        """What a node held in memory is gone or was damaged."""
        self._events += 1
        self._lost.append((self._events, node))

    def damaged(self, generation: str) -> None:
        """What lies of a generation in storage was damaged."""
        if generation in self._named:
            self._saved[self._named[generation]].damaged = True
        else:
            self._unknown_damage = True

    def storage_was_full(self) -> None:
        """Storage was full, where all but the newest generation make room."""
        self._stored = 1

    def promise(self, world: int) -> tuple[Point, str] | None:
        """Return the newest point that must be restorable by a job of `world` ranks, and why.

        It must if every rank was told that it is persistent and storage was not damaged since; if every rank was told that it is
        replicated, and one holder was lost since at most; if it is cached, and no holder was.
        """
        for point in sorted(self._saved, reverse=True):
            if why := self._why(point, world):
                return point, why
        return None

    def _why(self, point: Point, world: int) -> str:
        saved = self._saved[point]
        if saved.world != world:
            return ""
        newer = [other for other in self._saved if other > point]
        others = any(self._saved[other].world != world for other in newer)
        if saved.reached("persistent") and not saved.damaged:
            # a newer one may be in storage by now, whoever was told of it, and may have taken the place of this one
            intact = not (others or self._unknown_damage or any(self._saved[other].damaged for other in newer))
            if len(newer) < self._stored or intact:
                return "persistent"
        lost = {node for at, node in self._lost if at > saved.begun_at}
        if others:
            return ""  # memory keeps the newest ones of a job, whatever its size was
        if saved.reached("cached") and not lost & set(saved.homes.values()):
            return "cached"
        if saved.reached("replicated") and len(lost) <= 1:
            return "replicated"
        return ""

    def judge(self, told: Sequence[Told], *, healed: bool) -> tuple[str, list[Violation]]:
        """Return how a restore ended, in two words or three, and what was wrong with it.

        Parameters
        ----------
        told : of each rank, in order
        healed : nothing is out of reach any more, so that what must be restorable must be restored
        """
        world = len(told)
        problems = [
            Violation(UNBOUNDED, f"rank {rank} did not end its restore: {one.why}")
            for rank, one in enumerate(told)
            if one.how == "silent"
        ]
        problems += [v for rank, one in enumerate(told) if one.how == "restored" for v in self._bytes(rank, world, one)]
        back = {(one.generation, one.content[:2]) for one in told if one.how == "restored"}
        hows = {one.how for one in told}
        if len(back) > 1 or {"restored", "nothing"} <= hows:
            problems.append(Violation(WRONG, f"the ranks go on from different generations: {[one[:4] for one in told]}"))
        promise = self.promise(world)
        notes = "; ".join(sorted({one.why for one in told if one.why}))
        if problems:
            return "violation", problems
        if hows == {"restored"}:
            (_, (start, step)) = back.pop()
            if promise is None or Point(start, step) >= promise[0]:
                return "restored the newest" if Point(start, step) == max(self._complete(world)) else "restored", []
            why = f"{_words(*promise)} and restored was {_words(Point(start, step))} ({notes or 'no reason given'})"
            if healed or not notes:
                return "violation", [Violation(LOST if healed else WRONG, why)]
            return "restored an older one, saying why", []
        if promise is None:
            return "began anew" if hows == {"nothing"} else "refused, saying why", []
        if "nothing" in hows:
            return "violation", [Violation(LOST if healed else WRONG, f"{_words(*promise)} and the job began anew")]
        if healed:
            return "violation", [Violation(LOST, f"{_words(*promise)} and nothing was restored ({notes})")]
        return "refused, saying why", []

    def _complete(self, world: int) -> Collection[Point]:
        return [p for p, saved in self._saved.items() if saved.world == world == len(saved.homes)]

    def _bytes(self, rank: int, world: int, told: Told) -> list[Violation]:
        start, step, whose = told.content
        point = Point(start, step)
        nbytes = self._sizes.get((point, rank))
        if nbytes is None or whose != rank or step != told.step or self._saved[point].world != world:
            return [Violation(WRONG, f"rank {rank} of {world} restored {told[1:4]}, which it never saved")]
        if self._named.get(told.generation, point) != point:
            return [Violation(WRONG, f"rank {rank} restored {told.generation} and got the bytes of {point}")]
        if hashlib.sha256(content(self._seed, start, step, rank, nbytes)).hexdigest() != told.sha256:
            return [Violation(WRONG, f"rank {rank} restored step {step} with bytes that it never saved as that")]
        return []


def _words(point: Point, level: str = "") -> str:
    return f"step {point.step} of start {point.start}" + (f" was {level} on all ranks" if level else "")


def summary(violations: Sequence[Violation]) -> Mapping[str, int]:
    """Return how many there are of each kind."""
    return {kind: sum(v.kind == kind for v in violations) for kind in KINDS}
