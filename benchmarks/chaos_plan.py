"""What a schedule of the chaos campaign does, drawn from a seed. Pure: a plan is JSON that can be kept, cut and run again."""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from chaos_faults import NETWORK_FAULTS, STORAGE_FAULTS
from chaos_oracle import LEVELS

Op = list[Any]
"""The name of what is done and its particulars: ``["save", {"count": 2, ...}]``."""
SIZES_BYTES = (64, 4096, 70_000, 300_000)
LARGE_BYTES = 9_000_000
"""More than two chunks; rare, as it takes its time."""


@dataclass
class Plan:
    """One schedule: the cluster, and what is done to it in order. What cannot be done when its turn comes is passed over."""

    seed: str
    real: bool
    """Whether caches are started by the command and clocks run as shipped."""
    nodes: int
    world: int
    stored: int
    """Generations that storage keeps; 0 is no storage."""
    kept: int
    """Generations that memory keeps."""
    relayed: bool
    """Whether a relay stands between the caches."""
    ops: list[Op] = field(default_factory=list)

    def text(self) -> str:
        """Return the plan as one line of JSON."""
        return json.dumps(asdict(self))


def read(text: str) -> Plan:
    """Return the plan that `Plan.text` wrote."""
    return Plan(**json.loads(text))


def draw(seed: int, index: int, *, real: bool) -> Plan:
    """Return schedule `index` of campaign `seed`."""
    chance = random.Random(f"{seed} {index}")
    nodes = chance.choice((1, 2, 2, 3, 3, 4) if not real else (2, 2, 3))
    plan = Plan(
        seed=f"{seed} {index}",
        real=real,
        nodes=nodes,
        world=chance.choice((1, 2, 2, min(3, nodes + 1))),
        stored=chance.choice((0, 1, 2, 3, 3)),
        kept=chance.choice((1, 2, 2, 3)),
        relayed=nodes > 1 and chance.random() < 0.35,
    )
    draws, weights = zip(*_DRAWS, strict=True)
    plan.ops.append(["save", {"count": chance.randint(1, 3), "nbytes": _size(chance), "until": chance.choice(_UNTIL)}])
    for _ in range(chance.randint(2, 8) if not real else chance.randint(2, 6)):
        op: Op | None = chance.choices(draws, weights)[0](plan, chance)
        if op is not None:
            plan.ops.append(op)
    return plan


def _size(chance: random.Random) -> int:
    return LARGE_BYTES if chance.random() < 0.03 else chance.choice(SIZES_BYTES)


_UNTIL = ("", "cached", "replicated", "persistent", "persistent")


def _save(plan: Plan, chance: random.Random) -> Op:
    count = chance.choice((1, 1, 2, 3, 5))
    part = chance.random() < 0.1 and plan.world > 1
    how = {"until": chance.choice(_UNTIL), "part": part, "overlap": chance.random() < 0.25}
    return ["save", {"count": count, "nbytes": _size(chance)} | how]


def _restart(plan: Plan, chance: random.Random) -> Op:
    return ["restart job", {"kill": chance.random() < 0.85, "shift": chance.randrange(plan.nodes), "into": chance.random() < 0.3}]


def _resize(plan: Plan, chance: random.Random) -> Op:
    return ["resize", {"world": chance.choice([w for w in (1, 2, 3) if w != plan.world])}]


def _kill_cache(plan: Plan, chance: random.Random) -> Op:
    back_ms = chance.choice((0, 30, 300, 3000))
    return ["kill cache", {"node": chance.randrange(plan.nodes), "back_ms": back_ms, "politely": chance.random() < 0.15}]


def _kill_all_caches(plan: Plan, chance: random.Random) -> Op:
    return ["kill all caches", {}]


def _kill_at(plan: Plan, chance: random.Random) -> Op:
    victim = chance.choice(("cache", "cache", "rank"))
    what = {"victim": victim, "of": chance.randrange(plan.nodes if victim == "cache" else plan.world)}
    if chance.random() < 0.5:
        return ["kill at call", what | {"calls": chance.randint(1, 60), "back_ms": chance.choice((30, 300))}]
    edge = {"level": chance.choice(LEVELS), "rank": chance.randrange(plan.world)}
    return ["kill at level", what | edge | {"delay_ms": chance.choice((0, 0, 1, 5, 20)), "back_ms": chance.choice((30, 300))}]


def _stop(plan: Plan, chance: random.Random) -> Op:
    victim = chance.choice(("cache", "rank"))
    of = chance.randrange(plan.nodes if victim == "cache" else plan.world)
    return ["stop", {"victim": victim, "of": of, "stop_ms": chance.choice((5, 50, 400))}]


def _flip_memory(plan: Plan, chance: random.Random) -> Op:
    return ["flip memory", {"node": chance.randrange(plan.nodes), "luck": chance.random(), "bits": chance.choice((1, 3, 20))}]


def _damage_file(plan: Plan, chance: random.Random) -> Op | None:
    how = chance.choice(("flip", "flip", "truncate", "remove", "garbage"))
    return ["damage file", {"how": how, "luck": chance.random(), "at": chance.random()}] if plan.stored else None


def _storage_fault(plan: Plan, chance: random.Random) -> Op | None:
    node = chance.choice((None, chance.randrange(plan.nodes)))
    return ["storage fault", {"fault": chance.choice(STORAGE_FAULTS[1:]), "node": node}] if plan.stored else None


def _network_fault(plan: Plan, chance: random.Random) -> Op | None:
    node = chance.randrange(plan.nodes)
    return ["network fault", {"fault": chance.choice(NETWORK_FAULTS[1:]), "node": node}] if plan.relayed else None


def _index(plan: Plan, chance: random.Random) -> Op:
    how = chance.choice(("remove", "garbage"))
    return ["lose index", {"node": chance.randrange(plan.nodes), "how": how, "kill": chance.random() < 0.5}]


def _replace_cache(plan: Plan, chance: random.Random) -> Op:
    return ["replace cache", {"node": chance.randrange(plan.nodes)}]


def _second_cache(plan: Plan, chance: random.Random) -> Op:
    return ["second cache", {"node": chance.randrange(plan.nodes)}]


def _clock(plan: Plan, chance: random.Random) -> Op:
    return ["clock jump", {"offset_s": chance.choice((-86_400 * 365, -3600, -5, 5, 3600, 86_400 * 365))}]


def _foreign(plan: Plan, chance: random.Random) -> Op | None:
    return ["foreign file", {"luck": chance.random()}] if plan.stored else None


def _heal(plan: Plan, chance: random.Random) -> Op:
    return ["heal", {}]


_DRAWS: list[tuple[Callable[[Plan, random.Random], Op | None], float]] = [
    (_save, 6),
    (_restart, 3),
    (_resize, 0.3),
    (_kill_cache, 2),
    (_kill_all_caches, 0.4),
    (_kill_at, 3),
    (_stop, 1.2),
    (_flip_memory, 1.2),
    (_damage_file, 1.2),
    (_storage_fault, 1.2),
    (_network_fault, 2),
    (_index, 0.6),
    (_replace_cache, 0.8),
    (_second_cache, 0.4),
    (_clock, 0.6),
    (_foreign, 0.3),
    (_heal, 1),
]
