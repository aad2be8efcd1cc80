from hypothesis import given
from hypothesis import strategies as st

from checkpoint.ring import natural, successors

names = st.sets(st.integers(0, 99).map(lambda i: f"node{i}"), min_size=1, max_size=12)


def test_nodes_are_ordered_as_people_count() -> None:
    assert successors("node2", ["node10", "node1", "node2", "node3"]) == ["node3", "node10", "node1"]
    assert successors("b", ["a", "c"]) == ["c", "a"]
    assert successors("alone", []) == []


def test_names_that_look_alike_have_one_order() -> None:
    mixed = ["node10", "node2", "a10b2", "a10b10", "a9", "node02", "10", "9"]
    in_order = ["9", "10", "a9", "a10b2", "a10b10", "node02", "node2", "node10"]
    for order in (mixed, mixed[::-1]):
        assert sorted(order, key=natural) == in_order
    assert successors("node02", ["node2"]) == ["node2"]


@given(names)
def test_all_others_are_asked_and_each_is_somebodys_next(nodes: set[str]) -> None:
    for node in nodes:
        assert sorted(successors(node, nodes)) == sorted(nodes - {node})
    if len(nodes) > 1:
        assert {successors(node, nodes)[0] for node in nodes} == nodes
