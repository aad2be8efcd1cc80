"""Which generation to restore, and from which copies. Pure."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from checkpoint.manifest import Generation

STORAGE = "storage"
"""The holder of copies that lie in the storage folder."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of one shard: `holder` is a node or `STORAGE`, `origin` the node that saved it."""

    generation: Generation
    rank: int
    world_size: int
    holder: str
    origin: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The generation to restore, None when there is none, and why each newer one cannot be."""

    generation: Generation | None
    passed_over: tuple[str, ...] = ()


def complete(copies: Iterable[Copy]) -> set[Generation]:
    """Return the generations of which every rank's shard exists somewhere. Only these exist at all."""
    ranks: dict[tuple[Generation, int], set[int]] = {}
    for copy in copies:
        ranks.setdefault((copy.generation, copy.world_size), set()).add(copy.rank)
    return {generation for (generation, world_size), found in ranks.items() if len(found) == world_size}


def choose(copies: Collection[Copy], world_size: int, exclude: Collection[Generation] = ()) -> Choice:
    """Return the newest complete generation of a job with `world_size` ranks that is not in `exclude`."""
    existing = complete(copies)
    reasons = []
    for generation in sorted({copy.generation for copy in copies}, reverse=True):
        of_it = [copy for copy in copies if copy.generation == generation]
        saved_by = of_it[0].world_size
        if generation in exclude:
            continue
        if saved_by != world_size:
            reasons.append(f"step {generation.step} was saved by {saved_by} ranks and this job has {world_size}")
        elif generation not in existing:
            missing = sorted(set(range(saved_by)) - {copy.rank for copy in of_it})
            reasons.append(f"of step {generation.step} the shard of rank {_listed(missing)} is nowhere")
        else:
            return Choice(generation, tuple(reasons))
    return Choice(None, tuple(reasons))


def ordered(copies: Iterable[Copy], here: str) -> list[Copy]:
    """Return the copies of one shard in the order in which they are tried: this node's memory, another's, storage."""
    return sorted(copies, key=lambda c: (c.holder == STORAGE, c.holder != here, c.holder))


def source(copy: Copy, here: str) -> str:
    """Say where a copy lies as seen from the node `here`: ``local``, ``neighbour`` or ``storage``.

    A copy that another node had saved is a neighbour's, also when this node happens to hold it.
    """
    if copy.holder == STORAGE:
        return STORAGE
    return "local" if copy.holder == here == copy.origin else "neighbour"


def surplus(held: Collection[Generation], existing: Collection[Generation], keep: int) -> set[Generation]:
    """Return which generations a memory that holds `held` may forget.

    The `keep` newest that exist stay, and of those that are newer than the newest existing one, which other ranks may still be
    saving, the `keep` newest.
    """
    good = sorted(set(held) & set(existing), reverse=True)
    newest = good[0] if good else None
    unfinished = sorted((g for g in set(held) if newest is None or g > newest), reverse=True)
    return set(held) - set(good[:keep]) - set(unfinished[:keep])


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
