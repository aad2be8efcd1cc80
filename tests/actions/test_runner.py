"""The runner: every action once, in order, and none after the first that did not work."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from eagleeye.actions.journal import Journal
from eagleeye.actions.policy import Settings, plan
from eagleeye.actions.runner import carry_out, respond
from eagleeye.clock import ManualClock
from eagleeye.errors import AmbiguousError, BackendError, PermanentError, TransientError
from eagleeye.records import Action, ActionKind, Category, Incident, IncidentState, Plan, Result

INCIDENT = Incident("a1", "llm", ("n3",), (3,), 100, 110, IncidentState.OPEN, Category.GPU, "why", 2)
IDS = ["a1-notify-llm", "a1-cordon-n3", "a1-evict-n3", "a1-restart-llm"]


class Hands:
    """Notes what it is asked; `fails` maps a kind of action to what it raises."""

    name = "hands"

    def __init__(self, fails: dict[ActionKind, BackendError] | None = None, clock: ManualClock | None = None) -> None:
        self.fails, self.clock, self.asked = fails or {}, clock, list[tuple[str, str]]()

    def perform(self, operation_id: str, action: Action) -> tuple[Result, str]:
        self.asked.append((operation_id, action.target))
        if self.clock:
            self.clock.sleep_s(3.0)
        if action.kind in self.fails:
            raise self.fails[action.kind]
        return Result.DONE, f"{action.kind.value} {action.target}"


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path / "journal.db")
    yield made
    made.close()


def test_everything_in_order(journal: Journal) -> None:
    clock = ManualClock(1000.0)
    hands = Hands(clock=clock)
    ((made, outcomes),) = respond([INCIDENT], Settings(), hands, journal, clock)
    assert hands.asked == list(zip(IDS, ["llm", "n3", "n3", "llm"], strict=True))
    assert [(o.operation_id, o.result, o.started_s, o.ended_s) for o in outcomes] == [
        (name, Result.DONE, 1000.0 + 3 * i, 1003.0 + 3 * i) for i, name in enumerate(IDS)
    ]
    assert journal.plans() == [made]
    assert journal.outcomes() == outcomes


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (TransientError("busy"), Result.TRANSIENT),
        (PermanentError("no such node"), Result.PERMANENT),
        (AmbiguousError("no answer"), Result.AMBIGUOUS),
        (BackendError("odd"), Result.PERMANENT),
    ],
)
def test_it_stops_at_the_first_failure(journal: Journal, error: BackendError, result: Result) -> None:
    hands = Hands({ActionKind.CORDON: error})
    ((_, outcomes),) = respond([INCIDENT], Settings(), hands, journal, ManualClock())
    assert [name for name, _ in hands.asked] == IDS[:2]
    assert [(o.result, o.detail) for o in outcomes] == [(Result.DONE, "notify llm"), (result, str(error))]
    assert journal.outcomes() == outcomes
    assert respond([INCIDENT], Settings(), hands, journal, ManualClock()) == []
    assert len(hands.asked) == 2


def test_nothing_is_done_twice(journal: Journal) -> None:
    hands = Hands()
    respond([INCIDENT], Settings(), hands, journal, ManualClock())
    for changed in (INCIDENT, replace(INCIDENT, verdict_count=9), replace(INCIDENT, reason="said in other words")):
        assert respond([changed], Settings(), hands, journal, ManualClock()) == []
    assert len(hands.asked) == 4


def test_a_node_that_is_learned_later_is_planned_for(journal: Journal) -> None:
    hands = Hands()
    respond([replace(INCIDENT, nodes=(), ranks=())], Settings(), hands, journal, ManualClock())
    assert [name for name, _ in hands.asked] == IDS[:1]
    respond([INCIDENT], Settings(), hands, journal, ManualClock())
    assert [name for name, _ in hands.asked] == IDS, "the owner is told once"


def test_a_plan_that_a_crash_interrupted_goes_on(journal: Journal) -> None:
    made = plan(INCIDENT, Settings())
    assert made is not None
    journal.record(made, 1.0)
    hands = Hands()
    respond([INCIDENT], Settings(), hands, journal, ManualClock())
    assert [name for name, _ in hands.asked] == IDS


def test_a_step_that_was_begun_and_never_ended_stops_the_plan(journal: Journal) -> None:
    made = plan(INCIDENT, Settings())
    assert made is not None
    journal.record(made, 1.0)
    journal.claim(IDS[0], 1.0)
    hands = Hands()
    assert respond([INCIDENT], Settings(), hands, journal, ManualClock()) == []
    assert hands.asked == []


def test_a_new_incident_of_the_same_node_is_answered_again(journal: Journal) -> None:
    hands = Hands()
    respond([INCIDENT, replace(INCIDENT, id="b2")], Settings(), hands, journal, ManualClock())
    assert [name.partition("-")[0] for name, _ in hands.asked] == ["a1"] * 4 + ["b2"] * 4


def test_closed_incidents_and_young_ones_are_left_alone(journal: Journal) -> None:
    hands = Hands()
    closed = replace(INCIDENT, state=IncidentState.CLOSED, closed_s=300.0)
    young = replace(INCIDENT, id="b2", verdict_count=1)
    assert respond([closed, young], Settings(), hands, journal, ManualClock()) == []
    assert (hands.asked, journal.plans()) == ([], [])
    ((made, _),) = respond([closed, replace(young, verdict_count=2)], Settings(), hands, journal, ManualClock())
    assert made.incident_id == "b2"


def test_an_operation_that_somebody_else_began_is_left_to_him(journal: Journal) -> None:
    journal.claim(IDS[1], 1.0)
    hands = Hands()
    made = Plan("a1", "llm", (Action(ActionKind.NOTIFY, "llm"), Action(ActionKind.CORDON, "n3")), "why")
    assert [o.operation_id for o in carry_out(made, hands, journal, ManualClock())] == IDS[:1]
    assert [name for name, _ in hands.asked] == IDS[:1]


def test_a_bug_of_a_backend_leaves_its_claim(journal: Journal) -> None:
    class Broken(Hands):
        def perform(self, operation_id: str, action: Action) -> tuple[Result, str]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        respond([INCIDENT], Settings(), Broken(), journal, ManualClock())
    assert not journal.claim(IDS[0], 2.0)
    assert journal.outcomes() == []
