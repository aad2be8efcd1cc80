"""Who backs up whom. Pure."""

import re
from collections.abc import Iterable


def successors(node: str, nodes: Iterable[str]) -> list[str]:
    """Return the other nodes in the order in which they are asked to hold a copy of what `node` saves.

    The next node first (as in the TRANSOM paper, where rank i backs up to i + 1), then the ones after it, so that any number of
    nodes works and a dead neighbour is passed over. Names are ordered as people count: node2 before node10.
    """
    ordered = sorted({*nodes, node}, key=natural)
    at = ordered.index(node)
    return ordered[at + 1 :] + ordered[:at]


def natural(name: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """Return a key by which node2 is sorted before node10. No two names share one, so that all nodes see the same order."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts), name
