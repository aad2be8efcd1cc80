"""The policy: which incidents take a node out, and which are only told."""

from dataclasses import replace

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleeye.actions.policy import Settings, obstacle, plan
from eagleeye.records import Action, ActionKind, Category, Incident, IncidentState, JobView

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


@pytest.mark.parametrize("rule", ["process_lost", "stalled"])
@pytest.mark.parametrize(("category", "goes"), [(Category.NODE, True), (Category.UNKNOWN, False), (Category.USER_CODE, False)])
def test_a_fact_of_unknown_cause_takes_nobody_out(rule: str, category: Category, goes: bool) -> None:
    made = plan(replace(incident(("n3",), category, 9), rule=rule), Settings(), SEEN)
    assert made is not None
    assert [(a.kind.value, a.target) for a in made.actions] == (out("n3") if goes else TELL)


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


SEEN = JobView("llm", ("n1", "n2", "n3"), ("n9",), (), 3, 50.0)
"""Started at 50, settled at 60; the incident opened at 100."""


def test_a_job_that_is_seen_and_has_a_spare() -> None:
    made = plan(incident(), Settings(), SEEN)
    assert made is not None
    assert [(a.kind.value, a.target) for a in made.actions] == out("n3")
    assert made.reason == "why"


@pytest.mark.parametrize(
    ("nodes", "changes", "sentence"),
    [
        (("n3",), {"excluded": ("n3",), "nodes": ("n1", "n2", "n9")}, "n3 was already taken out"),
        (("n3",), {"excluded": ("n3",), "nodes": (), "running_since_s": None}, "n3 was already taken out"),
        (("n3",), {"excluded": ("n3",)}, "n3 was already taken out"),  # a view that still holds both
        (("n3",), {"nodes": ("n1", "n2")}, "n3 is no longer part of job llm"),
        (("n9",), {}, "n9 is no longer part of job llm"),  # a spare holds no rank
        (("n4", "n5"), {}, "n4 and n5 are no longer part of job llm"),
        (("n3",), {"spares": ()}, "no spare is left and job llm needs 3 nodes, so n3 stays"),
        (("n3", "n2"), {}, "too few spares are left and job llm needs 3 nodes, so n3 and n2 stay"),
    ],
)
def test_what_is_seen_of_a_job_may_leave_only_telling(nodes: tuple[str, ...], changes: dict[str, object], sentence: str) -> None:
    made = plan(incident(nodes), Settings(max_nodes=2), replace(SEEN, **changes))  # type: ignore[arg-type]
    assert made is not None
    assert ([(a.kind.value, a.target) for a in made.actions], made.reason) == (TELL, f"{sentence}: why")


@pytest.mark.parametrize("changes", [{"nodes": ("n1", "n2", "n4")}, {"excluded": ("n3",)}])
def test_of_several_suspects_only_those_that_are_still_there(changes: dict[str, object]) -> None:
    made = plan(incident(("n3", "n2")), Settings(max_nodes=2), replace(SEEN, **changes))  # type: ignore[arg-type]
    assert made is not None
    assert [(a.kind.value, a.target) for a in made.actions] == out("n2")


@pytest.mark.parametrize(
    ("nodes", "spares", "min_nodes", "goes"),
    [
        (("n1", "n3"), (), 2, False),
        (("n1", "n3"), (), 1, True),  # an elastic job shrinks
        (("n1", "n3"), ("n9",), 2, True),
        (("n1", "n3"), ("n9",), 3, False),
        (("n3",), (), 1, False),
        (("n3",), ("n9",), 1, True),
    ],
)
def test_the_budget(nodes: tuple[str, ...], spares: tuple[str, ...], min_nodes: int, goes: bool) -> None:
    view = replace(SEEN, nodes=nodes, spares=spares, min_nodes=min_nodes)
    made = plan(incident(), Settings(), view)
    assert made is not None
    assert [(a.kind.value, a.target) for a in made.actions] == (out("n3") if goes else TELL)


@pytest.mark.parametrize(
    ("rule", "opened_s", "last_s", "started_s", "goes"),
    [
        (None, 100.0, 110.0, 50.0, True),
        (None, 100.0, 110.0, 90.0, True),  # settled when it opened
        (None, 100.0, 110.0, 91.0, False),
        (None, 100.0, 111.0, 91.0, True),
        (None, 100.0, 500.0, 490.0, False),  # blamed for long, but not by this round
        (None, 100.0, 509.9, 490.0, False),
        (None, 100.0, 510.0, 490.0, True),
        (None, 100.0, 110.0, None, False),
        ("vanished", 100.0, 105.0, 89.5, True),  # samples and clocks are sure to tell of this round
        ("vanished", 100.0, 105.0, 90.0, False),
        ("vanished", 100.0, 105.0, 99.5, False),  # right after the start they may tell of the ranks before
        ("vanished", 100.0, 119.5, 99.5, True),  # unless it goes on
        ("vanished", 100.0, 120.9, 101.0, False),  # it was found before this round, which may have cured it
        ("vanished", 100.0, 121.0, 101.0, True),  # and goes on in it
        ("vanished", 100.0, 900.0, None, False),
    ],
)
def test_only_evidence_of_the_present_round_counts(
    rule: str | None, opened_s: float, last_s: float, started_s: float | None, goes: bool
) -> None:
    one = replace(incident(), rule=rule, opened_s=opened_s, last_anomalous_s=last_s)
    made = plan(one, Settings(), replace(SEEN, running_since_s=started_s))
    assert (made and [(a.kind.value, a.target) for a in made.actions]) == (out("n3") if goes else None)


def test_how_long_a_job_settles_may_be_set() -> None:
    one = replace(incident(), last_anomalous_s=500.0)
    assert plan(one, Settings(settle_s=30.0), replace(SEEN, running_since_s=461.0)) is None
    assert plan(one, Settings(settle_s=29.0), replace(SEEN, running_since_s=461.0)) is not None


def test_a_user_is_told_while_his_job_is_down() -> None:
    down = replace(SEEN, running_since_s=None)
    for one in (incident(()), incident(category=Category.USER_CODE)):
        made = plan(one, Settings(), down)
        assert made is not None
        assert made == plan(one, Settings())


NAMES = st.sampled_from([f"n{i}" for i in range(6)])
FEW = st.lists(NAMES, unique=True, max_size=5).map(tuple)
INSTANT = st.integers(0, 300).map(float)


@st.composite
def incidents(draw: st.DrawFn) -> Incident:
    opened_s = 150 + draw(INSTANT)
    nodes = draw(st.lists(NAMES, unique=True, min_size=draw(st.sampled_from([0, 1, 1, 1])), max_size=3).map(tuple))
    rule = draw(st.sampled_from([None, "vanished"]))
    last_s, count = opened_s + draw(INSTANT), draw(st.sampled_from([1, 2, 3, 9]))
    category = draw(st.sampled_from([Category.GPU, Category.GPU, Category.GPU, Category.USER_CODE]))
    return Incident("a1", "llm", nodes, (), opened_s, last_s, IncidentState.OPEN, category, "why", count, None, rule)


MANY = st.lists(NAMES, unique=True, min_size=3).map(tuple)
OUT = st.just(()) | st.lists(NAMES, unique=True, max_size=2).map(tuple)
START = st.sampled_from([None, 0.0, 100.0]) | INSTANT
VIEWS = st.builds(JobView, st.just("llm"), MANY, FEW, OUT, st.sampled_from([1, 1, 2, 3, 4]), START)
LIMITS = st.builds(Settings, max_nodes=st.integers(1, 3), patience_s=st.floats(0.1, 60), settle_s=st.floats(0.1, 60))


@hypothesis.settings(max_examples=400)
@given(incidents(), LIMITS, VIEWS)
def test_no_plan_ever_breaks_its_bounds(one: Incident, limits: Settings, view: JobView) -> None:
    made = plan(one, limits, view)
    if made is None:
        return
    assert made.actions[0] == Action(ActionKind.NOTIFY, "llm")
    evicted = [a.target for a in made.actions if a.kind is ActionKind.EVICT]
    assert evicted == [a.target for a in made.actions if a.kind is ActionKind.CORDON]
    if not evicted:
        assert len(made.actions) == 1
        return
    assert made.actions[-1] == Action(ActionKind.RESTART, "llm")
    assert len(evicted) == len(set(evicted)) <= limits.max_nodes
    assert set(evicted) <= set(view.nodes) & set(one.nodes)
    assert not set(evicted) & set(view.excluded)
    assert len((set(view.nodes) | set(view.spares)) - set(evicted)) >= view.min_nodes
    assert view.running_since_s is not None
    assert one.last_anomalous_s > view.running_since_s
    settled_s = view.running_since_s + limits.settle_s
    assert (one.rule is not None and one.opened_s > settled_s) or one.last_anomalous_s >= settled_s + limits.patience_s


@given(incidents(), VIEWS)
def test_as_set_by_default_one_node_at_a_time(one: Incident, view: JobView) -> None:
    made = plan(one, Settings(), view)
    assert made is None or sum(a.kind is ActionKind.EVICT for a in made.actions) <= 1


@given(incidents(), LIMITS, VIEWS)
def test_a_view_never_makes_a_plan_bolder(one: Incident, limits: Settings, view: JobView) -> None:
    seen, blind = plan(one, limits, view), plan(one, limits)
    if seen is not None and len(seen.actions) > 1:
        assert blind is not None
        assert set(seen.actions) <= set(blind.actions)


EVICT, CORDON, RESTART = Action(ActionKind.EVICT, "n3"), Action(ActionKind.CORDON, "n3"), Action(ActionKind.RESTART, "llm")


@pytest.mark.parametrize(
    ("action", "changes", "sentence"),
    [
        (CORDON, {}, None),
        (EVICT, {}, None),
        (RESTART, {}, None),
        (EVICT, {"nodes": ("n1", "n2")}, "n3 is no longer part of job llm"),
        (CORDON, {"excluded": ("n3",)}, "n3 was already taken out"),
        (EVICT, {"excluded": ("n3",), "running_since_s": None}, "n3 was already taken out"),
        (EVICT, {"nodes": (), "running_since_s": None}, None),  # down: only the backend knows
        (EVICT, {"spares": ()}, "no spare is left and job llm needs 3 nodes, so n3 stays"),
        (RESTART, {"nodes": ("n1", "n2"), "excluded": ("n3",)}, None),
        (RESTART, {"nodes": ("n1", "n2"), "spares": ()}, "no spare is left and job llm needs 3 nodes and has 2"),
        (RESTART, {"nodes": ("n1", "n2"), "spares": (), "running_since_s": None}, None),
    ],
)
def test_what_stops_a_plan_that_was_begun(action: Action, changes: dict[str, object], sentence: str | None) -> None:
    assert obstacle(action, replace(SEEN, **changes)) == sentence  # type: ignore[arg-type]
