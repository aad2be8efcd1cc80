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


def safe(copies: Iterable[Copy], holders: int) -> set[Generation]:
    """Return the generations of which every rank's shard lies in at least `holders` places."""
    where: dict[tuple[Generation, int], dict[int, set[str]]] = {}
    for copy in copies:
        where.setdefault((copy.generation, copy.world_size), {}).setdefault(copy.rank, set()).add(copy.holder)
    return {
        generation
        for (generation, world_size), ranks in where.items()
        if len(ranks) == world_size and all(len(places) >= holders for places in ranks.values())
    }


def choose(copies: Collection[Copy], world_size: int, exclude: Collection[Generation] = ()) -> Choice:
    """Return the newest complete generation of a job with `world_size` ranks that is not in `exclude`."""
    ours = [copy for copy in copies if copy.world_size == world_size]
    existing = complete(ours)
    reasons: list[str] = []
    for generation in sorted({copy.generation for copy in copies} - set(exclude), reverse=True):
        if generation in existing:
            return Choice(generation, tuple(reasons))
        if found := {copy.rank for copy in ours if copy.generation == generation}:
            missing = sorted(set(range(world_size)) - found)
            reasons.append(f"of step {generation.step} the shard of rank {_listed(missing)} is nowhere")
        else:
            saved_by = next(copy.world_size for copy in copies if copy.generation == generation)
            reasons.append(f"step {generation.step} was saved by {saved_by} ranks and this job has {world_size}")
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


def surplus(
    held: Collection[Generation],
    complete: Collection[Generation],
    newest_safe: Generation | None,
    asked: Collection[Generation],
    keep: int,
    replicated: Collection[Generation] = (),
) -> set[Generation]:
    """Return which generations a memory that holds `held` may forget.

    The `keep` newest that were `complete` when others were asked last stay. So does the newest of which every shard is known to
    lie in two places: it is what is left when a cache dies. Of those that are newer, which other ranks may still be saving, the
    `keep` newest stay, and all that are not in `asked`: they may be complete, and nobody here has heard of it yet. Those that
    are `replicated` stay, too: each may be the next of which every shard lies in two places.
    """
    good = sorted(set(held) & set(complete), reverse=True)
    newer = sorted((g for g in set(held) if newest_safe is None or g > newest_safe), reverse=True)
    unheard = {g for g in newer if g not in asked}
    return set(held) - set(good[:keep]) - set(newer[:keep]) - (set(newer) & set(replicated)) - unheard - {newest_safe}


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
