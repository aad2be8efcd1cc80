"""Records: what is written as JSON is read back as the same record, and anything else is refused in one sentence."""

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagleeye import records
from eagleeye.errors import DataError
from eagleeye.records import (
    Action,
    ActionKind,
    Category,
    Decision,
    Incident,
    IncidentState,
    JobView,
    Outcome,
    Plan,
    Result,
    Sample,
    Scope,
    Suspect,
    Verdict,
    from_json,
    to_json,
)

numbers = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(max_size=12)
ranks = st.integers(0, 20_000)
suspects = st.builds(Suspect, rank=ranks, node=texts, score=numbers, evidence=texts)
actions = st.builds(Action, kind=st.sampled_from(ActionKind), target=texts)


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    decision = draw(st.sampled_from(Decision))
    scope = draw(st.none() | st.sampled_from(Scope)) if decision is Decision.ANOMALOUS else None
    blamed = decision is Decision.ANOMALOUS and scope is not Scope.JOB
    return Verdict(
        job=draw(texts),
        from_s=draw(numbers),
        to_s=draw(numbers),
        decision=decision,
        reason=draw(texts),
        scope=scope,
        category=draw(st.none() | st.sampled_from(Category)),
        suspects=tuple(draw(st.lists(suspects, max_size=3))) if blamed else (),
        votes=draw(st.dictionaries(texts, st.none() | st.booleans(), max_size=3)),
        rule=draw(st.none() | texts),
        model=draw(texts),
    )


EVERY = {
    Sample: st.builds(Sample, series=texts, labels=st.dictionaries(texts, texts, max_size=3), value=numbers),
    Suspect: suspects,
    Verdict: verdicts(),
    Incident: st.builds(
        Incident,
        id=texts,
        job=texts,
        nodes=st.lists(texts, max_size=3).map(tuple),
        ranks=st.lists(ranks, max_size=3).map(tuple),
        opened_s=numbers,
        last_anomalous_s=numbers,
        state=st.sampled_from(IncidentState),
        category=st.sampled_from(Category),
        reason=texts,
        verdict_count=st.integers(1, 10**6),
        closed_s=st.none() | numbers,
    ),
    Action: actions,
    Plan: st.builds(
        Plan, incident_id=texts, job=texts, actions=st.lists(actions, max_size=4).map(tuple), reason=texts.filter(bool)
    ),
    Outcome: st.builds(
        Outcome, operation_id=texts, result=st.sampled_from(Result), detail=texts, started_s=numbers, ended_s=numbers
    ),
    JobView: st.builds(
        JobView,
        job=texts,
        nodes=st.lists(texts, max_size=3).map(tuple),
        spares=st.lists(texts, max_size=3).map(tuple),
        excluded=st.lists(texts, max_size=3).map(tuple),
        min_nodes=st.integers(0, 9),
        running_since_s=st.none() | numbers,
    ),
}


def test_every_record_is_covered() -> None:
    defined = {kind for kind in vars(records).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    assert set(EVERY) == defined


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_round_trip_through_text(kind: type[Any], data: st.DataObject) -> None:
    record = data.draw(EVERY[kind])
    read = from_json(kind, json.loads(json.dumps(to_json(record))))
    assert read == record
    assert [type(v) for v in dataclasses.astuple(read)] == [type(v) for v in dataclasses.astuple(record)]


INCIDENT = Incident("a1", "llm", ("n1",), (3,), 10.0, 20.0, IncidentState.OPEN, Category.GPU, "why", 2, None)
VERDICT = Verdict(
    "llm", 0.0, 60.0, Decision.ANOMALOUS, "why", Scope.RANK, Category.GPU, (Suspect(3, "n1", 2.5, "power"),), {"lof": None}
)


def test_what_is_written_is_plain_json() -> None:
    assert to_json(VERDICT) == {
        "job": "llm",
        "from_s": 0.0,
        "to_s": 60.0,
        "decision": "anomalous",
        "reason": "why",
        "scope": "rank",
        "category": "gpu",
        "suspects": [{"rank": 3, "node": "n1", "score": 2.5, "evidence": "power"}],
        "votes": {"lof": None},
        "rule": None,
        "model": "",
    }


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_unknown_and_missing_fields_are_named(kind: type[Any], data: st.DataObject) -> None:
    plain = to_json(data.draw(EVERY[kind]))
    with pytest.raises(DataError, match=f"^{kind.__name__}: unknown field 'colour'; was it written by a newer version\\?$"):
        from_json(kind, plain | {"colour": 1})
    needed = [
        f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    for name in needed:
        with pytest.raises(DataError, match=f"^{kind.__name__}: field '{name}' is missing$"):
            from_json(kind, {k: v for k, v in plain.items() if k != name})


@pytest.mark.parametrize(
    ("kind", "record", "change", "sentence"),
    [
        (Incident, INCIDENT, {"ranks": ["3"]}, "Incident.ranks[0]: '3' is not a int"),
        (Incident, INCIDENT, {"ranks": [True]}, "Incident.ranks[0]: True is not a int"),
        (Incident, INCIDENT, {"ranks": 3}, "Incident.ranks: a list was expected, got 3"),
        (Incident, INCIDENT, {"nodes": "n1"}, "Incident.nodes: a list was expected, got 'n1'"),
        (Incident, INCIDENT, {"opened_s": "10"}, "Incident.opened_s: '10' is not a float"),
        (Incident, INCIDENT, {"opened_s": None}, "Incident.opened_s: None is not a float"),
        (Incident, INCIDENT, {"opened_s": True}, "Incident.opened_s: True is not a float"),
        (Incident, INCIDENT, {"state": "asleep"}, "Incident.state: 'asleep' is not one of ['open', 'closed']"),
        (Incident, INCIDENT, {"verdict_count": 1.5}, "Incident.verdict_count: 1.5 is not a int"),
        (Incident, INCIDENT, {"closed_s": "late"}, "Incident.closed_s: 'late' is not one of float | None"),
        (Verdict, VERDICT, {"suspects": [5]}, "Verdict.suspects[0]: an object was expected, got int"),
        (Verdict, VERDICT, {"suspects": [{"rank": 1}]}, "Verdict.suspects[0]: field 'evidence' is missing"),
        (
            Verdict,
            VERDICT,
            {"suspects": [{"rank": "x", "node": "n", "score": 1, "evidence": ""}]},
            "Verdict.suspects[0].rank: 'x' is not a int",
        ),
        (Verdict, VERDICT, {"votes": []}, "Verdict.votes: an object was expected, got []"),
        (Verdict, VERDICT, {"votes": {"lof": "yes"}}, "Verdict.votes.lof: 'yes' is not one of bool | None"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_wrong_types_name_the_path(kind: type[Any], record: Any, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError) as raised:
        from_json(kind, to_json(record) | change)
    assert str(raised.value) == sentence


@pytest.mark.parametrize("data", [None, [], "incident", 3])
def test_something_else_than_an_object(data: Any) -> None:
    with pytest.raises(DataError, match=r"^Incident: an object was expected, got "):
        from_json(Incident, data)


def test_a_record_that_breaks_an_invariant_is_refused_when_read() -> None:
    with pytest.raises(DataError, match=r"^Verdict: a normal verdict cannot blame anybody$"):
        from_json(Verdict, to_json(VERDICT) | {"decision": "normal"})
    with pytest.raises(DataError, match=r"^Plan: a plan must say why$"):
        from_json(Plan, {"incident_id": "a1", "job": "llm", "actions": [], "reason": ""})


@pytest.mark.parametrize("decision", [Decision.NORMAL, Decision.UNSURE, Decision.NOT_APPLICABLE])
def test_only_an_anomaly_blames(decision: Decision) -> None:
    with pytest.raises(ValueError, match=f"a {decision} verdict cannot blame anybody"):
        Verdict("llm", 0, 1, decision, "why", suspects=VERDICT.suspects)
    with pytest.raises(ValueError, match="cannot blame"):
        Verdict("llm", 0, 1, decision, "why", scope=Scope.JOB)
    assert Verdict("llm", 0, 1, decision, "why").suspects == ()


def test_nobody_is_a_suspect_when_everybody_is_concerned() -> None:
    with pytest.raises(ValueError, match="whole job cannot name suspects"):
        Verdict("llm", 0, 1, Decision.ANOMALOUS, "why", scope=Scope.JOB, suspects=VERDICT.suspects)
    assert Verdict("llm", 0, 1, Decision.ANOMALOUS, "why", scope=Scope.JOB).scope is Scope.JOB


def test_a_plan_says_why_also_when_it_does_nothing() -> None:
    with pytest.raises(ValueError, match="a plan must say why"):
        Plan("a1", "llm", (), "")
    assert Plan("a1", "llm", (), "nothing helps").actions == ()


def test_records_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        INCIDENT.job = "other"  # type: ignore[misc]


def test_whole_numbers_become_floats_but_infinity_survives() -> None:
    read = from_json(Sample, {"series": "s", "labels": {}, "value": 3})
    assert (read.value, type(read.value)) == (3.0, float)
    assert math.isnan(from_json(Sample, json.loads(json.dumps(to_json(Sample("s", {}, math.nan))))).value)
