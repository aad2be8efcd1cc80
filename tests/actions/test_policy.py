"""The policy: which incidents take a node out, and which are only told."""

from dataclasses import replace

import pytest

from eagleeye.actions.policy import Settings, plan
from eagleeye.records import Action, ActionKind, Category, Incident, IncidentState

TELL = [("notify", "llm")]


def incident(nodes: tuple[str, ...] = ("n3",), category: Category = Category.GPU, verdicts: int = 2) -> Incident:
    return Incident("a1b2", "llm", nodes, (3,) if nodes else (), 100, 110, IncidentState.OPEN, category, "why", verdicts)


def out(*nodes: str) -> list[tuple[str, str]]:
    return [*TELL, *((kind, node) for node in nodes for kind in ("cordon", "evict")), ("restart", "llm")]


@pytest.mark.parametrize(
    ("nodes", "category", "verdicts", "max_nodes", "expected", "reason"),
    [
        (("n3",), Category.GPU, 2, 1, out("n3"), "why"),
        (("n3",), Category.UNKNOWN, 9, 1, out("n3"), "why"),
        (("n3",), Category.HANG, 2, 1, out("n3"), "why"),
        (("n3",), Category.GPU, 1, 1, None, None),  # one verdict is not enough
        ((), Category.NETWORK, 9, 1, TELL, "nobody is to blame, so nobody is taken out: why"),
        ((), Category.NETWORK, 1, 1, TELL, "nobody is to blame, so nobody is taken out: why"),
        (("n3",), Category.USER_CODE, 9, 1, TELL, "the job's own code failed, another node would not help: why"),
        ((), Category.USER_CODE, 9, 1, TELL, "nobody is to blame, so nobody is taken out: why"),
        (("n3", "n4"), Category.GPU, 9, 1, TELL, "2 nodes are suspected and at most 1 may be taken out: why"),
        (("n3", "n4"), Category.GPU, 9, 2, out("n3", "n4"), "why"),
        (("n3", "n4"), Category.USER_CODE, 9, 2, TELL, "the job's own code failed, another node would not help: why"),
    ],
)
def test_truth_table(
    nodes: tuple[str, ...],
    category: Category,
    verdicts: int,
    max_nodes: int,
    expected: list[tuple[str, str]] | None,
    reason: str | None,
) -> None:
    made = plan(incident(nodes, category, verdicts), Settings(max_nodes=max_nodes))
    assert (made and [(a.kind.value, a.target) for a in made.actions], made and made.reason) == (expected, reason)
    if made:
        assert (made.incident_id, made.job) == ("a1b2", "llm")


def test_lines_of_a_log_alone_take_nobody_out() -> None:
    made = plan(replace(incident(("n3",), Category.UNKNOWN, 9), rule="log_burst"), Settings())
    assert made is not None
    assert [a.kind for a in made.actions] == [ActionKind.NOTIFY]
    assert made.reason == "lines of a log alone take nobody out: why"


def test_more_verdicts_may_be_asked_for() -> None:
    assert plan(incident(verdicts=4), Settings(min_verdicts=5)) is None
    assert plan(incident(verdicts=5), Settings(min_verdicts=5)) is not None


@pytest.mark.parametrize(
    ("rule", "last_s", "patience_s", "planned"),
    [
        (None, 110.0, 10.0, True),
        (None, 109.9, 10.0, False),
        (None, 110.0, 30.0, False),
        (None, 130.0, 30.0, True),
        ("hardware_error", 100.0, 10.0, True),  # a fact needs no patience
        ("stalled", 101.0, 30.0, True),
    ],
)
def test_the_detectors_must_go_on_blaming(rule: str | None, last_s: float, patience_s: float, planned: bool) -> None:
    one = replace(incident(verdicts=9), rule=rule, last_anomalous_s=last_s)
    made = plan(one, Settings(patience_s=patience_s))
    assert (made and [(a.kind.value, a.target) for a in made.actions]) == (out("n3") if planned else None)


def test_patience_is_ten_seconds_and_telling_needs_none() -> None:
    assert Settings().patience_s == 10.0
    fresh = replace(incident(()), last_anomalous_s=100)
    made = plan(fresh, Settings())
    assert made is not None
    assert [a.kind for a in made.actions] == [ActionKind.NOTIFY]


@pytest.mark.parametrize("category", Category)
def test_no_plan_takes_out_more_than_it_may(category: Category) -> None:
    for count in range(5):
        for limit in range(1, 4):
            made = plan(incident(tuple(f"n{i}" for i in range(count)), category, 9), Settings(max_nodes=limit))
            assert made is not None
            evicted = {a.target for a in made.actions if a.kind is ActionKind.EVICT}
            assert len(evicted) <= limit
            assert evicted == {a.target for a in made.actions if a.kind is ActionKind.CORDON}
            assert made.actions[0] == Action(ActionKind.NOTIFY, "llm")


def test_settings_that_make_no_sense() -> None:
    for settings in ({"max_nodes": 0}, {"min_verdicts": 0}):
        with pytest.raises(ValueError, match="max_nodes and min_verdicts must be at least 1"):
            Settings(**settings)
