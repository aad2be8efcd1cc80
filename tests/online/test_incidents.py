"""Incidents: verdicts of many ticks become one trouble with a beginning and an end."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagleeye.actions.policy import Settings, plan
from eagleeye.online.incidents import QUIET_S, RELAPSE_S, advance, close_unwatched, incident_id
from eagleeye.records import Category, Decision, Incident, IncidentState, Scope, Suspect, Verdict


def verdict(to_s: float, *nodes: str, job: str = "llm", decision: Decision = Decision.ANOMALOUS, why: str = "why") -> Verdict:
    anomalous = decision is Decision.ANOMALOUS
    return Verdict(
        job,
        to_s - 60,
        to_s,
        decision,
        why,
        (Scope.NODE if nodes else Scope.JOB) if anomalous else None,
        Category.GPU if nodes else None,
        tuple(Suspect(int(node[1:]), node, 2.0, "power") for node in nodes),
    )


def after(*verdicts: Verdict) -> tuple[Incident, ...]:
    incidents: tuple[Incident, ...] = ()
    for one in verdicts:
        incidents = advance(incidents, one)
    return incidents


def test_open() -> None:
    (incident,) = after(verdict(100, "n3"))
    assert incident == Incident(
        incident_id("llm", ["n3"], 100), "llm", ("n3",), (3,), 100, 100, IncidentState.OPEN, Category.GPU, "why", 1, None
    )


@pytest.mark.parametrize("decision", [Decision.NORMAL, Decision.UNSURE, Decision.NOT_APPLICABLE])
def test_nothing_anomalous_opens_nothing(decision: Decision) -> None:
    assert after(verdict(100, decision=decision)) == ()


def test_continue() -> None:
    first = after(verdict(100, "n3"))[0]
    (incident,) = after(verdict(100, "n3"), verdict(105, "n3", why="later"), verdict(110, "n4", "n3"))
    assert incident == replace(first, last_anomalous_s=110, verdict_count=3)


def test_a_node_that_is_learned_later() -> None:
    first = after(verdict(100))[0]
    assert (first.nodes, first.ranks, first.category) == ((), (), Category.UNKNOWN)
    (incident,) = after(verdict(100), verdict(102), verdict(105, "n3", why="clear now"), verdict(110))
    assert incident.id == first.id
    assert (incident.nodes, incident.ranks, incident.category, incident.reason) == (("n3",), (3,), Category.GPU, "clear now")
    assert (incident.verdict_count, incident.opened_s, incident.last_anomalous_s) == (1, 105, 105), "only one verdict spoke so"
    assert advance((incident,), verdict(115, "n3"))[0].verdict_count == 2


def test_a_verdict_that_names_nobody_is_no_evidence_against_a_node() -> None:
    (incident,) = after(verdict(100, "n3"), verdict(105), verdict(110), verdict(115, "n3"))
    assert (incident.nodes, incident.verdict_count, incident.last_anomalous_s) == (("n3",), 2, 115)
    (nameless,) = after(verdict(100), verdict(105), verdict(110))
    assert (nameless.nodes, nameless.verdict_count) == ((), 3)


def test_a_fault_of_everybody_does_not_prove_the_patience_of_an_older_suspicion() -> None:
    """Blamed twice in five seconds; a minute later the network of all is slow, and nobody is named."""
    (incident,) = after(verdict(100, "n3"), verdict(105, "n3"), verdict(125, decision=Decision.UNSURE), verdict(160))
    assert (incident.verdict_count, incident.last_anomalous_s) == (2, 105)
    assert plan(incident, Settings()) is None


def test_a_fault_of_everybody_that_fades_last_on_one_node_does_not_count_against_it() -> None:
    (incident,) = after(verdict(100), verdict(160), verdict(165, "n3"), verdict(170, "n3"))
    assert plan(incident, Settings()) is None
    assert plan(advance((incident,), verdict(175, "n3"))[0], Settings()) is not None


@pytest.mark.parametrize(
    "changes", [{"category": Category.USER_CODE, "rule": "process_lost"}, {"category": Category.UNKNOWN, "rule": "log_burst"}]
)
def test_what_may_be_the_users_code_is_no_evidence_for_an_older_suspicion(changes: dict[str, Any]) -> None:
    incidents = after(verdict(100, "n3"))
    assert advance(incidents, replace(verdict(130, "n3"), **changes)) == incidents
    own = advance((), replace(verdict(100, "n3"), **changes))
    assert advance(own, replace(verdict(105, "n3"), **changes))[0].verdict_count == 2


def test_two_odd_moments_with_a_good_while_between_are_two_incidents() -> None:
    well = [verdict(s, decision=Decision.NORMAL) for s in (105, 130, 135)]
    first, second = after(verdict(100, "n3"), *well, verdict(140, "n3"), verdict(145, "n3"))
    assert (first.state, first.closed_s, second.opened_s) == (IncidentState.CLOSED, 100 + RELAPSE_S, 140)
    assert plan(second, Settings()) is None
    soon = after(verdict(100, "n3"), verdict(105, decision=Decision.NORMAL), verdict(110, "n3"))
    assert len(soon) == 1


def test_other_nodes_are_another_incident() -> None:
    one, two = after(verdict(100, "n3"), verdict(105, "n5"), verdict(110, "n3"))
    assert (one.nodes, one.verdict_count, two.nodes, two.verdict_count) == (("n3",), 2, ("n5",), 1)
    assert one.id != two.id


def test_several_ranks_of_one_node_name_it_once() -> None:
    two = (Suspect(6, "n3", 2.0, ""), Suspect(7, "n3", 2.0, ""))
    (incident,) = after(replace(verdict(100, "n3"), suspects=two))
    assert (incident.nodes, incident.ranks) == (("n3",), (6, 7))


@pytest.mark.parametrize(
    ("decision", "closes"), [(Decision.NORMAL, True), (Decision.NOT_APPLICABLE, True), (Decision.UNSURE, False)]
)
def test_close_only_after_quiet_and_only_when_well(decision: Decision, closes: bool) -> None:
    opened = replace(verdict(100, "n3"), rule="process_lost")
    assert after(opened, verdict(100 + QUIET_S - 1, decision=decision))[0].state is IncidentState.OPEN
    (incident,) = after(opened, verdict(100 + QUIET_S, decision=decision))
    assert (incident.state, incident.closed_s) == ((IncidentState.CLOSED, 220) if closes else (IncidentState.OPEN, None))


def test_the_same_trouble_again_is_a_new_incident() -> None:
    old, new = after(verdict(100, "n3"), verdict(300, decision=Decision.NORMAL), verdict(400, "n3"))
    assert (old.state, old.closed_s, new.state) == (IncidentState.CLOSED, 300, IncidentState.OPEN)
    assert old.id != new.id


def test_ids_are_the_same_in_every_run() -> None:
    assert incident_id("llm", ["n3"], 1_770_000_000.1234) == incident_id("llm", ("n3",), 1_770_000_000.1231)
    ids = {incident_id(job, nodes, s) for job in ("a", "b") for nodes in ((), ("n1",), ("n1", "n2")) for s in (1.0, 2.0)}
    assert len(ids) == 12
    assert all(len(one) == 12 for one in ids)
    assert incident_id("llm", (), 0.0) == "9ad372bce614"


steps = st.tuples(
    st.sampled_from(["a", "b"]),
    st.sampled_from(Decision),
    st.lists(st.sampled_from(["n1", "n2", "n3"]), unique=True, max_size=2),
    st.sampled_from([1.0, 30.0, 119.0, 120.0, 500.0]),
)


@settings(deadline=None)
@given(st.lists(steps, max_size=25))
def test_no_state_is_skipped_and_other_jobs_are_left_alone(sequence: list[tuple[str, Decision, list[str], float]]) -> None:
    incidents: tuple[Incident, ...] = ()
    now_s = 1000.0
    for job, decision, nodes, passed_s in sequence:
        now_s += passed_s
        said = verdict(now_s, *(nodes if decision is Decision.ANOMALOUS else ()), job=job, decision=decision)
        before, incidents = incidents, advance(incidents, said)
        assert len({i.id for i in incidents}) == len(incidents)
        assert [i for i in incidents if i.job != job] == [i for i in before if i.job != job]
        assert [i.id for i in incidents[: len(before)]] == [i.id for i in before]
        added = incidents[len(before) :]
        assert len(added) <= (decision is Decision.ANOMALOUS)
        assert all(i.state is IncidentState.OPEN and i.opened_s == now_s for i in added)
        for old, new in zip(before, incidents, strict=False):
            if old.state is IncidentState.CLOSED:
                assert new == old
            continued = new.last_anomalous_s != old.last_anomalous_s
            if new.nodes != old.nodes:
                assert (continued, new.verdict_count, new.opened_s) == (True, 1, now_s)
            else:
                assert new.verdict_count - old.verdict_count == continued
                assert not continued or said.suspects or not old.nodes
            assert (new.closed_s is not None) == (new.state is IncidentState.CLOSED)
            assert old.nodes in ((), new.nodes)
        assert all(i.verdict_count == 1 for i in added)
        silenced = [i for i in before if i.job == job and i.state is IncidentState.OPEN][:1]
        silenced = [i for i in silenced if i.nodes]
        touched = [new for new in incidents if new.last_anomalous_s == now_s]
        assert len(touched) == (decision is Decision.ANOMALOUS and bool(said.suspects or not silenced))


def test_a_job_that_nobody_reports_any_more_closes_after_quiet() -> None:
    opened = after(verdict(100, "n3"))
    assert close_unwatched(opened, (opened[0].job,), 1e6) == opened, "still watched"
    assert close_unwatched(opened, (), 100.0 + QUIET_S - 1) == opened, "not quiet for long enough"
    (closed,) = close_unwatched(opened, (), 100.0 + QUIET_S)
    assert (closed.state, closed.closed_s) == (IncidentState.CLOSED, 100.0 + QUIET_S)
