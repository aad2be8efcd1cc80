import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import placement as module
from checkpoint.placement import natural, odds, odds_table, placement, survived_domains

labels = st.sampled_from(["rack0", "rack1", "rack2"])
domain = st.lists(labels, max_size=2).map(tuple)
clusters = st.dictionaries(st.integers(0, 40).map(lambda i: f"node{i}"), domain, min_size=1, max_size=10)


def racks(*sizes: int) -> dict[str, tuple[str, ...]]:
    """Return nodes of racks of these sizes: node0, node1, ... of rack0, then those of rack1."""
    return {f"node{i}": (rack,) for i, rack in enumerate(f"rack{r}" for r, size in enumerate(sizes) for _ in range(size))}


def first(domains: dict[str, tuple[str, ...]], copies: int) -> dict[str, list[str]]:
    return {node: placement(node, domains, copies)[:copies] for node in domains}


def test_without_domains_the_next_node_holds_the_copy_and_nodes_are_ordered_as_people_count() -> None:
    nodes = dict.fromkeys(["node10", "node1", "node2", "node3"], ())
    assert placement("node2", nodes, 1) == ["node3", "node10", "node1"]
    assert placement("node10", nodes, 2) == ["node1", "node2", "node3"]
    assert placement("b", {"a": (), "c": ()}, 1) == ["c", "a"]
    assert placement("alone", {}, 1) == []


def test_names_that_look_alike_have_one_order() -> None:
    mixed = ["node10", "node2", "a10b2", "a10b10", "a9", "node02", "10", "9"]
    in_order = ["9", "10", "a9", "a10b2", "a10b10", "node02", "node2", "node10"]
    for order in (mixed, mixed[::-1]):
        assert sorted(order, key=natural) == in_order
    assert placement("node02", {"node2": ()}, 1) == ["node2"]


def test_a_copy_lies_in_another_rack_and_all_nodes_hold_as_many() -> None:
    assert first(racks(2, 2), 1) == {"node0": ["node2"], "node1": ["node3"], "node2": ["node0"], "node3": ["node1"]}
    assert first(racks(2, 2, 2), 2)["node3"] == ["node5", "node1"]


def test_power_supplies_of_one_rack_are_told_apart() -> None:
    nodes = {f"node{i}": ("rack0", f"psu{i % 2}") for i in range(4)}
    assert first(nodes, 1) == {"node0": ["node1"], "node2": ["node3"], "node1": ["node0"], "node3": ["node2"]}
    # another rack is better than another supply
    nodes["node9"] = ("rack1", "psu0")
    assert placement("node0", nodes, 1)[0] == "node9"


def test_a_second_copy_lies_apart_from_the_first() -> None:
    nodes = racks(1, 2, 1)
    assert placement("node0", nodes, 2) == ["node1", "node3", "node2"]


@given(clusters, st.integers(1, 3))
def test_all_others_are_in_the_order_once_whatever_the_cluster(nodes: dict[str, tuple[str, ...]], copies: int) -> None:
    for node in nodes:
        found = placement(node, nodes, copies)
        assert sorted(found) == sorted(nodes.keys() - {node})
        assert found == placement(node, dict(reversed(nodes.items())), copies)


@given(clusters, st.integers(1, 3))
def test_no_copy_is_nearer_than_it_must_be(nodes: dict[str, tuple[str, ...]], copies: int) -> None:
    """As long as there is a rack without the shard, the next copy goes there."""
    for node in nodes:
        apart = {nodes[other][0] if nodes[other] else other for other in nodes}
        used = [nodes[name][0] if nodes[name] else name for name in (node, *placement(node, nodes, copies)[:copies])]
        assert len(set(used)) == min(len(used), len(apart))


@given(st.integers(2, 5), st.integers(1, 6), st.integers(1, 3))
def test_racks_of_one_size_share_the_copies_equally(count: int, size: int, copies: int) -> None:
    nodes = racks(*[size] * count)
    copies = min(copies, count - 1)
    load = Counter(itertools.chain.from_iterable(first(nodes, copies).values()))
    assert set(load.values()) == {copies}


@given(st.lists(st.integers(1, 6), min_size=2, max_size=5))
def test_no_node_holds_many_more_than_its_share(sizes: list[int]) -> None:
    nodes = racks(*sizes)
    load = Counter(itertools.chain.from_iterable(first(nodes, 1).values()))
    others = sum(sizes) - max(sizes)
    assert max(load.values()) <= -(-max(sizes) // others) + len(sizes) - 1


@settings(deadline=None)
@given(clusters, st.integers(1, 2), st.integers(1, 4))
def test_the_odds_are_those_of_trying_every_loss(nodes: dict[str, tuple[str, ...]], copies: int, lost: int) -> None:
    chance, exact = odds(nodes, copies, lost)
    if lost >= len(nodes):
        assert (chance, exact) == (0.0, True)
        return
    where = {node: {node, *placement(node, nodes, copies)[:copies]} for node in nodes}
    outcomes = [all(not holders <= set(away) for holders in where.values()) for away in itertools.combinations(nodes, lost)]
    assert exact
    assert chance == pytest.approx(sum(outcomes) / len(outcomes))


def test_large_clusters_are_drawn_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = dict.fromkeys((f"node{i}" for i in range(12)), ())
    exactly, _ = odds(nodes, 1, 3)
    monkeypatch.setattr(module, "_COUNTED", 10)
    drawn, exact = odds(nodes, 1, 3)
    assert not exact
    assert drawn == pytest.approx(exactly, abs=0.01)
    assert "(of 100000 draws)" in odds_table(nodes, 1)


def test_the_loss_of_a_rack_is_survived_if_there_is_another() -> None:
    assert survived_domains(racks(2, 2), 1, 0) == (["rack0", "rack1"], [])
    assert survived_domains(racks(3), 2, 0) == ([], ["rack0"])
    mixed = {"node0": ("rack0",), "node1": ()}
    assert survived_domains(mixed, 1, 0) == (["rack0"], [])
    assert survived_domains(mixed, 1, 1) == ([], [])


def test_the_table() -> None:
    assert odds_table(racks(2, 2), 1).splitlines() == [
        "node   domain  copies on",
        "node0  rack0   node2",
        "node1  rack0   node3",
        "node2  rack1   node0",
        "node3  rack1   node1",
        "",
        "lost at once       every shard survives in memory",
        "1 node             100 %",
        "2 nodes            66.6667 %",
        "3 nodes            0 %",
        "a domain, level 1  2 of 2",
    ]
    assert odds_table({"node0": ()}, 1).splitlines()[1] == "node0  -       nobody"
    assert odds_table(racks(3), 1).splitlines()[-1] == "a domain, level 1  0 of 1; not rack0"
