"""Who holds the copies of whom, so that what fails together does not hold the same. Pure."""

import itertools
import math
import random
import re
from collections.abc import Mapping

Domain = tuple[str, ...]
"""What a node fails together with, outermost first: ``("rack1", "psu2")``. Empty where nothing is known: the node alone."""

_COUNTED = 2_000_000
"""So many sets of lost nodes are counted one by one; of more, so many are drawn."""
_DRAWN = 100_000


def placement(node: str, domains: Mapping[str, Domain], copies: int) -> list[str]:
    """Return the other nodes in the order in which they are asked to hold a copy of what `node` saves.

    The first `copies` are those that are meant to, the rest take the place of who refuses. They lie in as many domains as there
    are, and every node holds about as much as every other: the i-th node of a domain begins with the i-th node outside of it.
    Without domains that is the next node (as in the TRANSOM paper, where rank i backs up to i + 1), then the ones after it, so
    that any number of nodes works. All nodes that know of the same nodes see the same order.
    """
    order = _from_far_to_near(node, {**domains, node: domains.get(node, ())}, 0)
    place = {name: _place(name, domains.get(name, ())) for name in (*order, node)}
    chosen = [node]
    for _ in range(min(copies, len(order))):
        chosen.append(
            min(
                (name for name in order if name not in chosen),
                key=lambda name: sorted((_shared(place[name], place[other]) for other in chosen), reverse=True),
            )
        )
    return chosen[1:] + [name for name in order if name not in chosen]


def _from_far_to_near(node: str, domains: Mapping[str, Domain], level: int) -> list[str]:
    """Return the others: first those that differ at the outermost label, in turn, then those that differ at the next."""
    ordered = sorted(domains, key=lambda name: (_labels(domains[name]), natural(name)))
    own = _place(node, domains[node])[: level + 1]
    inside = [name for name in ordered if _place(name, domains[name])[: level + 1] == own]
    at = ordered.index(node)
    after = ordered[at + 1 :] + ordered[:at]
    apart = [
        list(group)
        for label, group in itertools.groupby(after, key=lambda name: _place(name, domains[name])[: level + 1])
        if label != own
    ]
    # the i-th node of a domain takes the i-th of all that are outside of it, and from there on the same place in each domain
    turn = inside.index(node) % max(1, sum(map(len, apart)))
    while apart and turn >= len(apart[0]):
        turn -= len(apart[0])
        apart.append(apart.pop(0))
    outside = [name for group in apart for name in group[turn % len(group) :] + group[: turn % len(group)]]
    near = _from_far_to_near(node, {name: domains[name] for name in inside}, level + 1) if len(inside) > 1 else []
    return outside + near


def _place(name: str, domain: Domain) -> tuple[str, ...]:
    """Return where a node is; no two nodes are at the same place."""
    return (*domain, f"={name}")


def _labels(domain: Domain) -> tuple[object, ...]:
    return tuple(natural(label) for label in domain)


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """Return how many labels two places have in common, from the outermost on."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def odds(domains: Mapping[str, Domain], copies: int, lost: int) -> tuple[float, bool]:
    """Return the chance that all shards survive when `lost` nodes drawn at random are lost at once, and if it is exact."""
    nodes = sorted(domains, key=natural)
    if lost >= len(nodes):
        return 0.0, True
    groups = {frozenset((node, *placement(node, domains, copies)[:copies])) for node in nodes}
    groups = {group for group in groups if len(group) <= lost}
    total = math.comb(len(nodes), lost)
    if sum(math.comb(len(nodes) - len(group), lost - len(group)) for group in groups) <= _COUNTED:
        fatal = {
            group.union(more)
            for group in groups
            for more in itertools.combinations([node for node in nodes if node not in group], lost - len(group))
        }
        return 1 - len(fatal) / total, True
    draw = random.Random(0)
    kept = sum(not any(group <= set(away) for group in groups) for away in (draw.sample(nodes, lost) for _ in range(_DRAWN)))
    return kept / _DRAWN, False


def survived_domains(domains: Mapping[str, Domain], copies: int, level: int) -> tuple[list[str], list[str]]:
    """Return which domains of a level can be lost as a whole with every shard surviving, and which cannot."""
    members: dict[Domain, set[str]] = {}
    for node, domain in domains.items():
        if len(domain) > level:
            members.setdefault(domain[: level + 1], set()).add(node)
    kept: list[str] = []
    lost: list[str] = []
    for domain in sorted(members, key=_labels):
        away = members[domain]
        fatal = any({node, *placement(node, domains, copies)[:copies]} <= away for node in away)
        (lost if fatal else kept).append("/".join(domain))
    return kept, lost


def odds_table(domains: Mapping[str, Domain], copies: int) -> str:
    """Return who holds the copies of whom, and what that survives in memory alone, as lines for people."""
    nodes = sorted(domains, key=natural)
    rows = [("node", "domain", "copies on")]
    rows += [(n, "/".join(domains[n]) or "-", ", ".join(placement(n, domains, copies)[:copies]) or "nobody") for n in nodes]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    lines = [f"{one:<{widths[0]}}  {two:<{widths[1]}}  {three}" for one, two, three in rows]
    lines += ["", "lost at once       every shard survives in memory"]
    for lost in range(1, min(3, len(nodes)) + 1):
        chance, exact = odds(domains, copies, lost)
        how = "" if exact else f" (of {_DRAWN} draws)"
        lines.append(f"{f'{lost} node' + 's' * (lost > 1):<17}  {100 * chance:.6g} %{how}")
    for level in range(max((len(domain) for domain in domains.values()), default=0)):
        kept, fatal = survived_domains(domains, copies, level)
        named = f"; not {', '.join(fatal[:8])}" + (" and more" if len(fatal) > 8 else "") if fatal else ""
        lines.append(f"{f'a domain, level {level + 1}':<17}  {len(kept)} of {len(kept) + len(fatal)}{named}")
    return "\n".join(lines)


def natural(name: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """Return a key by which node2 is sorted before node10. No two names share one, so that all nodes see the same order."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts), name
