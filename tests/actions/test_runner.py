"""The runner: every action once, in order, none after one that failed, and never against what is seen of the job."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from eagleeye.actions.journal import Journal
from eagleeye.actions.policy import Settings, plan
from eagleeye.actions.runner import Runner
from eagleeye.clock import ManualClock
from eagleeye.errors import AmbiguousError, BackendError, PermanentError, TransientError
from eagleeye.records import Action, ActionKind, Category, Incident, IncidentState, JobView, Result
from remediation.dryrun import DryRun

INCIDENT = Incident("a1", "llm", ("n3",), (3,), 900, 950, IncidentState.OPEN, Category.GPU, "why", 9)
STEPS = ["notify-llm", "cordon-n3", "evict-n3", "restart-llm"]
IDS = [f"a1-{step}" for step in STEPS]
HEAD = "incident a1 of job llm: why"
VIEW = JobView("llm", ("n1", "n2", "n3"), ("n9",), (), 3, 100.0)
NOW_S = 1000.0


@dataclass
class Cluster:
    """A backend over one job: does each operation once, whoever asks how often.

    `fails` holds what the next attempts at a kind of action raise; an AmbiguousError is raised after it was done.
    """

    clock: ManualClock
    view: JobView | None = VIEW
    fails: dict[ActionKind, list[BackendError]] = field(default_factory=dict)
    blind: list[BackendError] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    watched: list[str] = field(default_factory=list)
    effects: list[str] = field(default_factory=list)
    reasons: set[tuple[str, str]] = field(default_factory=set)
    name: str = "cluster"

    def observe(self, job: str) -> JobView | None:
        if self.blind:
            raise self.blind.pop(0)
        return self.view

    def watch(self, job: str) -> None:
        if job == "strange":
            raise PermanentError("there is no such job")
        self.watched.append(job)

    def perform(self, operation_id: str, action: Action, job: str, reason: str) -> tuple[Result, str]:
        self.asked.append(operation_id)
        self.reasons.add((job, reason))
        self.clock.sleep_s(0.25)
        error = self.fails[action.kind].pop(0) if self.fails.get(action.kind) else None
        if (error is None or isinstance(error, AmbiguousError)) and operation_id not in self.effects:
            self.effects.append(operation_id)
            self._do(action)
        if error is not None:
            raise error
        return Result.DONE, f"{action.kind.value} {action.target}"

    def _do(self, action: Action) -> None:
        if self.view is None:
            return
        if action.kind is ActionKind.EVICT:
            left, excluded = tuple(n for n in self.view.nodes if n != action.target), (*self.view.excluded, action.target)
            self.view = replace(self.view, nodes=left, excluded=excluded, running_since_s=None)
        if action.kind is ActionKind.RESTART:
            nodes = (*self.view.nodes, *self.view.spares)[: self.view.min_nodes]
            spares = tuple(n for n in self.view.spares if n not in nodes)
            self.view = replace(self.view, nodes=nodes, spares=spares, running_since_s=self.clock.now_s())


class Bench:
    """A runner with real journal, and what it said; `restart` is what a new process would start with."""

    def __init__(self, path: Path, acting: bool = True, cluster: Cluster | None = None, settings: Settings | None = None) -> None:
        self.path, self.acting, self.settings = path, acting, settings or Settings()
        self.clock = cluster.clock if cluster else ManualClock(NOW_S)
        self.cluster = cluster or Cluster(self.clock)
        self.lines: list[str] = []
        self.start()

    def start(self) -> None:
        self.journal = Journal(self.path, acting=self.acting)
        hands = self.cluster if self.acting else DryRun()
        self.runner = Runner(self.settings, self.cluster, hands, self.journal, self.clock, self.lines.append)

    def restart(self, acting: bool = True) -> None:
        self.journal.close()
        self.acting = acting
        self.start()

    def turn(self, *incidents: Incident) -> list[str]:
        """Return what one turn says."""
        before = len(self.lines)
        self.runner.respond(incidents)
        return self.lines[before:]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(acting: bool = True, cluster: Cluster | None = None, settings: Settings | None = None) -> Bench:
        made.append(Bench(tmp_path / "journal.db", acting, cluster, settings))
        return made[-1]

    yield make
    for one in made:
        one.journal.close()


def test_everything_once_and_in_order(bench: Callable[..., Bench]) -> None:
    one = bench()
    done = ["notify llm", "cordon n3", "evict n3", "restart llm"]
    assert one.turn(INCIDENT) == [HEAD, *(f"  done: {what}" for what in done)]
    assert one.cluster.asked == one.cluster.effects == IDS
    assert one.cluster.reasons == {("llm", "why")}
    assert [(o.operation_id, o.result, o.started_s, o.ended_s) for o in one.journal.outcomes()] == [
        (name, Result.DONE, NOW_S + 0.25 * i, NOW_S + 0.25 * (i + 1)) for i, name in enumerate(IDS)
    ]
    assert one.journal.plans(acted=True) == [plan(INCIDENT, Settings())]
    assert one.journal.unfinished() == []
    assert one.cluster.view == JobView("llm", ("n1", "n2", "n9"), (), ("n3",), 3, NOW_S + 1.0)


def test_an_incident_that_was_answered_is_the_past(bench: Callable[..., Bench]) -> None:
    """It stays open until the scorer has seen the job well for a while; the node is out, and that is not worth a word."""
    one = bench()
    one.turn(INCIDENT)
    for changed in (INCIDENT, replace(INCIDENT, last_anomalous_s=1100.0, verdict_count=20), replace(INCIDENT, reason="else")):
        one.clock.sleep_s(100.0)
        assert one.turn(changed) == []
    one.restart()
    assert one.turn(INCIDENT) == []
    one.restart(acting=False)
    assert one.turn(INCIDENT) == []
    assert one.cluster.asked == IDS


def test_transient_failures_are_repeated_with_growing_waits(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.cluster.fails = {ActionKind.CORDON: [TransientError("busy")] * 3}
    first = one.turn(INCIDENT)
    assert first == [HEAD, "  done: notify llm", "  transient: busy; attempt 1 of 5, the next in 1 s"]
    tries = {0.0: 1}
    began_s = one.clock.now_s()
    while len(one.cluster.effects) < 4:
        one.clock.sleep_s(0.25)
        passed_s = one.clock.now_s() - began_s
        one.turn(INCIDENT)
        count = one.cluster.asked.count("a1-cordon-n3")
        if count > max(tries.values()):
            tries[passed_s] = count
    assert one.lines[3:] == [
        HEAD, "  transient: busy; attempt 2 of 5, the next in 2 s",
        HEAD, "  transient: busy; attempt 3 of 5, the next in 4 s",
        HEAD, "  done: cordon n3", "  done: evict n3", "  done: restart llm",
    ]  # fmt: skip
    # each attempt took 0.25 s, and its wait begins at its end
    assert tries == {0.0: 1, 1.0: 2, 3.25: 3, 7.5: 4}
    assert one.cluster.effects == IDS
    operation = one.journal.operation("a1-cordon-n3")
    assert operation is not None
    assert (operation.attempts, operation.over) == (4, True)


@pytest.mark.parametrize(("error", "word"), [(TransientError("busy"), "transient"), (AmbiguousError("no answer"), "ambiguous")])
def test_no_operation_is_tried_more_than_five_times(bench: Callable[..., Bench], error: BackendError, word: str) -> None:
    one = bench()
    one.cluster.fails = {ActionKind.CORDON: [error] * 9}
    one.turn(INCIDENT)
    for _ in range(50):
        one.clock.sleep_s(1.0)
        one.turn(replace(INCIDENT, last_anomalous_s=one.clock.now_s()))
    assert one.cluster.asked == [IDS[0], *[IDS[1]] * 5]
    assert one.lines[-1] == f"  {word}: {error}; given up after 5 attempts"
    assert one.journal.unfinished() == []
    one.restart()
    assert one.turn(INCIDENT) == []


def test_an_unclear_answer_is_cleared_by_asking_again(bench: Callable[..., Bench]) -> None:
    """The eviction had worked, so the view no longer shows the node: that must not stop the plan before the restart."""
    one = bench()
    one.cluster.fails = {ActionKind.EVICT: [AmbiguousError("no answer"), TransientError("busy"), AmbiguousError("no answer")]}
    one.turn(INCIDENT)
    assert one.cluster.effects == IDS[:3]
    one.restart()
    for _ in range(20):
        one.clock.sleep_s(1.0)
        one.turn()
    assert one.cluster.asked == [*IDS[:2], *[IDS[2]] * 4, IDS[3]]
    assert one.cluster.effects == IDS
    assert [o.result for o in one.journal.outcomes()] == [Result.DONE] * 4


def test_after_a_transient_failure_the_job_is_looked_at_again(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.cluster.fails = {ActionKind.EVICT: [TransientError("busy")]}
    one.turn(INCIDENT)
    one.cluster.view = replace(VIEW, nodes=("n1", "n2", "n9"), spares=(), excluded=("n3",))  # somebody else took it out
    one.clock.sleep_s(5.0)
    assert one.turn() == [HEAD, "  permanent: n3 was already taken out"]
    assert one.turn(INCIDENT) == ["incident a1 of job llm: n3 was already taken out: why"]
    assert one.cluster.effects == IDS[:2]
    assert one.journal.unfinished() == []


@pytest.mark.parametrize("error", [PermanentError("no such node"), BackendError("odd")])
@pytest.mark.parametrize("step", range(4))
def test_it_stops_at_what_cannot_be_done(bench: Callable[..., Bench], error: BackendError, step: int) -> None:
    one = bench()
    one.cluster.fails = {list(ActionKind)[step]: [error]}
    assert one.turn(INCIDENT)[-1] == f"  permanent: {error}"
    assert one.cluster.asked == IDS[: step + 1]
    for _ in range(3):
        one.clock.sleep_s(60.0)
        one.turn(INCIDENT)
    assert one.cluster.effects == IDS[:step]


def test_it_looks_before_every_step(bench: Callable[..., Bench]) -> None:
    """The spare goes away between cordoning and eviction."""
    one = bench()
    cordon = one.cluster._do

    def lose_the_spare(action: Action) -> None:
        cordon(action)
        if action.kind is ActionKind.CORDON:
            one.cluster.view = replace(VIEW, spares=())

    one.cluster._do = lose_the_spare  # type: ignore[method-assign]
    sentence = "no spare is left and job llm needs 3 nodes, so n3 stays"
    assert one.turn(INCIDENT) == [HEAD, "  done: notify llm", "  done: cordon n3", f"  permanent: {sentence}"]
    assert one.cluster.effects == IDS[:2]
    assert one.turn(INCIDENT) == [f"incident a1 of job llm: {sentence}: why"], "said again as what is planned now"
    one.cluster.view = VIEW
    assert one.turn(INCIDENT) == [], "what was stopped stays stopped for this incident"


def test_a_job_that_vanishes_stops_the_plan(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.cluster.fails = {ActionKind.CORDON: [TransientError("busy")]}
    one.turn(INCIDENT)
    one.cluster.blind = [PermanentError("there is no job llm")]
    one.clock.sleep_s(1.0)
    assert one.turn()[-1] == "  permanent: there is no job llm"
    assert one.journal.unfinished() == []


def test_who_cannot_look_plans_nothing_and_says_so_once(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.cluster.blind = [TransientError("the folder is away")] * 3
    line = "incident a1 of job llm: nothing is planned, for the job cannot be looked at: the folder is away"
    assert one.turn(INCIDENT) == [line]
    assert one.turn(INCIDENT) == one.turn(INCIDENT) == []
    assert one.journal.plans(acted=True) == []
    assert one.turn(INCIDENT)[0] == HEAD
    assert one.cluster.effects == IDS
    one.cluster.blind = [TransientError("the folder is away")]
    assert one.turn(replace(INCIDENT, id="b2")) == [line.replace("a1", "b2")], "it could be looked at in between"


def test_a_look_that_fails_in_the_middle_is_repeated(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.cluster.fails = {ActionKind.CORDON: [TransientError("busy")]}
    one.turn(INCIDENT)
    one.cluster.blind = [TransientError("the folder is away")]
    one.clock.sleep_s(1.0)
    assert one.turn(INCIDENT)[-1] == "  transient: the folder is away; attempt 2 of 5, the next in 2 s"
    assert one.cluster.asked == IDS[:2]
    one.clock.sleep_s(2.0)
    one.turn(INCIDENT)
    assert one.cluster.effects == IDS


@pytest.fixture
def restarted(bench: Callable[..., Bench]) -> Bench:
    """A plan was begun, and nothing was touched yet when the job restarted by itself."""
    one = bench()
    one.cluster.fails = {ActionKind.CORDON: [TransientError("busy")]}
    one.turn(INCIDENT)
    one.cluster.view = replace(VIEW, nodes=(), running_since_s=None)
    for _ in range(100):
        one.clock.sleep_s(1.0)
        assert one.turn(INCIDENT) == []
    one.cluster.view = replace(VIEW, running_since_s=one.clock.now_s())
    return one


def test_a_plan_waits_while_the_job_restarts_by_itself_and_for_evidence_of_the_new_round(restarted: Bench) -> None:
    settled_s = restarted.clock.now_s() + 20.0
    for last_s in (950.0, settled_s - 0.1):
        assert restarted.turn(replace(INCIDENT, last_anomalous_s=last_s)) == []
    assert restarted.cluster.effects == IDS[:1]
    restarted.turn(replace(INCIDENT, last_anomalous_s=settled_s))
    assert restarted.cluster.effects == IDS


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ((), "job llm was started anew since this was planned, and nothing is found there any more"),
        (
            (replace(INCIDENT, state=IncidentState.CLOSED, closed_s=1110.0),),
            "job llm was started anew since this was planned, and nothing is found there any more",
        ),
        ((replace(INCIDENT, nodes=("n7",), last_anomalous_s=1120.0),), "n7 is no longer part of job llm: why"),
    ],
)
def test_a_restart_that_cured_the_job_ends_the_plan(restarted: Bench, told: tuple[Incident, ...], sentence: str) -> None:
    assert f"  permanent: {sentence}" in restarted.turn(*told)
    restarted.clock.sleep_s(60.0)
    assert restarted.turn(*told) == []
    assert restarted.cluster.effects == IDS[:1]


def test_a_job_that_started_anew_is_not_restarted_once_more(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.cluster.fails = {ActionKind.RESTART: [TransientError("busy")]}
    one.turn(INCIDENT)
    one.cluster.view = JobView("llm", ("n1", "n2", "n9"), (), ("n3",), 3, one.clock.now_s())
    one.clock.sleep_s(1.0)
    assert one.turn() == [HEAD, "  done: job llm was already started anew"]
    assert one.cluster.effects == IDS[:3]


def test_a_job_that_started_anew_with_the_node_is_restarted(bench: Callable[..., Bench]) -> None:
    """It restarted by itself while the eviction was under way."""
    one = bench()
    one.cluster.fails = {ActionKind.RESTART: [TransientError("busy")]}
    one.turn(INCIDENT)
    one.cluster.view = replace(VIEW, running_since_s=one.clock.now_s())
    one.clock.sleep_s(1.0)
    assert one.turn() == [HEAD, "  done: restart llm"]


def test_a_job_that_started_anew_before_an_unclear_eviction_was_cleared(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.cluster.fails = {ActionKind.EVICT: [AmbiguousError("no answer")]}
    one.turn(INCIDENT)
    one.cluster.view = JobView("llm", ("n1", "n2", "n9"), (), ("n3",), 3, one.clock.now_s())
    one.clock.sleep_s(1.0)
    assert one.turn() == [HEAD, "  done: evict n3", "  done: job llm was already started anew"]


def test_another_plan_of_the_job_waits_and_other_jobs_do_not(bench: Callable[..., Bench]) -> None:
    one = bench()
    second = replace(INCIDENT, id="b2", nodes=("n2",))
    elsewhere = replace(INCIDENT, id="c3", job="vision", nodes=("n1",))
    one.cluster.fails = {ActionKind.EVICT: [TransientError("busy")]}
    one.turn(INCIDENT, second, elsewhere)
    assert [step.partition("-")[0] for step in one.cluster.asked] == ["a1"] * 3 + ["c3"] * 4
    assert all(made.incident_id != "b2" for made in one.journal.plans(acted=True))


def test_one_node_at_a_time(bench: Callable[..., Bench]) -> None:
    """Two sick nodes, and spares for both: the second goes only on evidence of the round without the first."""
    one = bench()
    one.cluster.view = replace(VIEW, spares=("n8", "n9"))
    second = replace(INCIDENT, id="b2", nodes=("n2",))
    one.turn(INCIDENT, second)
    assert one.cluster.effects == IDS
    started_s = one.cluster.view.running_since_s
    assert started_s == NOW_S + 1.0
    for last_s in (1000.0, 1010.0, started_s + 19.9):
        assert one.turn(INCIDENT, replace(second, last_anomalous_s=last_s)) == []
    one.turn(INCIDENT, replace(second, last_anomalous_s=started_s + 20.0))
    assert one.cluster.effects[4:] == ["b2-notify-llm", "b2-cordon-n2", "b2-evict-n2", "b2-restart-llm"]
    assert set(one.cluster.view.nodes) == {"n1", "n8", "n9"}


def test_the_round_that_was_broken_is_no_evidence_while_it_still_seems_to_run(bench: Callable[..., Bench]) -> None:
    """A backend that only asked for the restart still shows the old round for a moment."""
    one = bench()
    one.cluster._do = lambda action: None  # type: ignore[method-assign]
    one.turn(INCIDENT, replace(INCIDENT, id="b2", nodes=("n2",)))
    assert one.cluster.effects == IDS
    told = one.turn(replace(INCIDENT, id="c3", nodes=(), ranks=()))
    assert told == ["incident c3 of job llm: nobody is to blame, so nobody is taken out: why", "  done: notify llm"]


@pytest.mark.parametrize("told_s", [NOW_S - 20.0, NOW_S + 61.0])
def test_a_leader_whose_clock_is_wrong_makes_no_old_evidence_new(bench: Callable[..., Bench], told_s: float) -> None:
    """The job restarts by itself at 1060; its leader's clock is 80 s behind, or right."""
    one = bench()
    one.cluster.view = replace(VIEW, running_since_s=None)
    lost = replace(INCIDENT, rule="process_lost", category=Category.NODE, opened_s=1050.0, last_anomalous_s=1055.0)
    assert one.turn(lost) == []
    one.clock.sleep_s(61.0)
    one.cluster.view = replace(VIEW, running_since_s=told_s)
    assert one.turn(lost) == []
    one.clock.sleep_s(30.0)
    assert one.turn(replace(lost, last_anomalous_s=1080.9)) == []
    assert one.turn(replace(lost, last_anomalous_s=1081.0)) != []


def test_a_backend_that_sees_no_jobs_takes_its_time_too(bench: Callable[..., Bench]) -> None:
    one = bench(cluster=Cluster(ManualClock(NOW_S), view=None))
    second = replace(INCIDENT, id="b2", nodes=("n2",))
    one.turn(INCIDENT, second)
    assert one.cluster.effects == IDS
    assert one.turn(replace(second, last_anomalous_s=NOW_S + 20.4)) == []
    assert one.turn(replace(second, last_anomalous_s=NOW_S + 20.5)) != [], "settled and patient after the eviction began"


def test_nobody_sees_what_the_scorer_no_longer_tells(bench: Callable[..., Bench]) -> None:
    """The scorer dies in the middle: what was begun goes on, in a new process too."""
    one = bench()
    one.cluster.fails = {ActionKind.EVICT: [TransientError("busy")]}
    one.turn(INCIDENT)
    one.restart()
    one.clock.sleep_s(1.0)
    assert one.turn() == [HEAD, "  done: evict n3", "  done: restart llm"]
    assert one.cluster.effects == IDS


def test_a_clock_that_was_set_back_does_not_hold_a_plan_up(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.cluster.fails = {ActionKind.CORDON: [TransientError("busy")]}
    one.turn(INCIDENT)
    one.clock = one.cluster.clock = ManualClock(NOW_S - 3600)
    one.restart()
    one.turn()
    assert one.cluster.effects == IDS


def test_whoever_observes_touches_nothing(bench: Callable[..., Bench]) -> None:
    one = bench(acting=False)
    would = ["tell the owner of job llm", "keep new work away from node n3", "take node n3 out of the job"]
    would.append("restart job llm on the remaining nodes")
    assert one.turn(INCIDENT) == [HEAD, *(f"  observed: would {what}" for what in would)]
    assert one.turn(INCIDENT) == []
    assert one.cluster.asked == []
    assert [(o.operation_id, o.result) for o in one.journal.outcomes()] == [(name, Result.OBSERVED) for name in IDS]


def test_whoever_observes_plans_by_what_is_seen_if_it_can_be_had(bench: Callable[..., Bench]) -> None:
    one = bench(acting=False)
    one.cluster.view = replace(VIEW, spares=())
    assert one.turn(INCIDENT) == [
        "incident a1 of job llm: no spare is left and job llm needs 3 nodes, so n3 stays: why",
        "  observed: would tell the owner of job llm",
    ]
    one.cluster.view = replace(VIEW, running_since_s=None)
    assert one.turn(replace(INCIDENT, id="b2")) == []
    for error in (TransientError("away"), PermanentError("there is no job llm")):
        one.cluster.blind = [error]
        assert len(one.turn(replace(INCIDENT, id=f"c-{error}"))) == 5


def test_what_was_only_observed_is_acted_on_once_acting_is_switched_on(bench: Callable[..., Bench]) -> None:
    one = bench(acting=False)
    one.turn(INCIDENT)
    one.restart(acting=True)
    assert one.turn() == [], "an observed plan is not begun"
    assert one.turn(INCIDENT)[0] == HEAD
    assert one.cluster.effects == IDS


def test_a_watcher_beside_the_one_that_acts_changes_nothing_for_it(bench: Callable[..., Bench]) -> None:
    acting = bench()
    acting.cluster.fails = {ActionKind.EVICT: [TransientError("busy")]}
    watching = bench(acting=False, cluster=acting.cluster)
    watching.turn(INCIDENT)
    acting.turn(INCIDENT)
    watching.turn(INCIDENT)
    acting.clock.sleep_s(1.0)
    acting.turn(INCIDENT)
    watching.turn(INCIDENT)
    assert acting.cluster.effects == IDS
    assert len(watching.lines) == 5


def test_a_node_that_is_learned_later_is_planned_for(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.turn(replace(INCIDENT, nodes=(), ranks=()))
    assert one.cluster.asked == IDS[:1]
    one.turn(INCIDENT)
    assert one.cluster.asked == IDS, "the owner is told once"


def test_what_stands_in_the_way_is_said_also_after_something_else_was_told(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.cluster.view = replace(VIEW, spares=())
    one.turn(replace(INCIDENT, nodes=(), ranks=()))
    said = "incident a1 of job llm: no spare is left and job llm needs 3 nodes, so n3 stays: why"
    assert one.turn(INCIDENT) == [said]
    assert one.turn(INCIDENT) == []
    one.cluster.view = VIEW
    one.turn(INCIDENT)
    assert one.cluster.effects == IDS, "once a spare is there it is taken out"


def test_closed_incidents_and_young_ones_are_left_alone(bench: Callable[..., Bench]) -> None:
    one = bench()
    closed = replace(INCIDENT, state=IncidentState.CLOSED, closed_s=990.0)
    young = replace(INCIDENT, id="b2", verdict_count=1)
    assert one.turn(closed, young) == []
    assert (one.cluster.asked, one.journal.plans(acted=True)) == ([], [])
    assert one.turn(closed, replace(young, verdict_count=2))[0].startswith("incident b2 ")


def test_a_bug_of_a_backend_is_not_swallowed(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.cluster._do = lambda action: [][0]  # type: ignore[method-assign]
    with pytest.raises(IndexError):
        one.turn(INCIDENT)
    operation = one.journal.operation(IDS[0])
    assert operation is not None
    assert operation.outcome is None, "it was begun, and nobody knows its end"


KILLED = """
import os, signal, sys
from pathlib import Path
from eagleeye.actions.journal import Journal
from eagleeye.actions.policy import Settings
from eagleeye.actions.runner import Runner
from eagleeye.clock import SystemClock
from eagleeye.records import Category, Incident, IncidentState, JobView, Result

folder, hang_at, when = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
effects = folder / "effects"

class Appending:
    name = "appending"

    def observe(self, job):
        out = "a1-evict-n3" in effects.read_text() if effects.exists() else False
        return JobView(job, ("n1", "n2") if out else ("n1", "n2", "n3"), ("n9",), ("n3",) if out else (), 3, 100.0)

    def perform(self, operation_id, action, job, reason):
        if operation_id == hang_at and when == "before":
            self.hang()
        known = effects.read_text().splitlines() if effects.exists() else []
        if operation_id not in known:
            with effects.open("a") as file:
                file.write(operation_id + "\\n")
        if operation_id == hang_at and when == "after":
            self.hang()
        return Result.DONE, operation_id

    def hang(self):
        print("hangs", flush=True)
        signal.pause()

told = [Incident("a1", "llm", ("n3",), (3,), 900, 950, IncidentState.OPEN, Category.GPU, "why", 9)] if hang_at else []
backend = Appending()
journal = Journal(folder / "journal.db", acting=True)
Runner(Settings(), backend, backend, journal, SystemClock(), lambda line: print(line, flush=True)).respond(told)
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", range(4))
def test_a_kill_in_the_middle_of_a_step(tmp_path: Path, step: int, when: str) -> None:
    """SIGKILL before or after the backend did it: the next process repeats the step at once, and everything happens once."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    process = subprocess.Popen([*command, IDS[step], when], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "hangs\n":
        assert line, "it ended before it hung"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    effects = tmp_path / "effects"
    assert (effects.read_text().splitlines() if effects.exists() else []) == IDS[: step + (when == "after")]
    done = subprocess.run([*command, "", ""], capture_output=True, text=True, check=True, timeout=60)
    kind, _, target = STEPS[step].partition("-")
    assert done.stdout.splitlines() == [
        HEAD,
        f"  again: {kind} {target} was begun before and its end is not known",
        f"  done: {IDS[step]} (repeated after an interruption)",
        *(f"  done: {name}" for name in IDS[step + 1 :]),
    ]
    assert effects.read_text().splitlines() == IDS
    assert subprocess.run([*command, "", ""], capture_output=True, text=True, check=True, timeout=60).stdout == ""


def test_a_step_that_kills_its_runner_is_given_up_in_the_end(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.cluster._do = lambda action: [][0] if action.kind is ActionKind.CORDON else None  # type: ignore[method-assign]
    for _ in range(5):
        one.cluster.effects = []
        with pytest.raises(IndexError):
            one.turn(INCIDENT)
        one.restart()
    assert one.turn(INCIDENT)[-1] == (
        "  ambiguous: it was begun again and again and never ended, so look whether it was done; given up after 5 attempts"
    )
    assert one.cluster.asked.count(IDS[1]) == 5
    assert one.turn(INCIDENT) == []


def test_jobs_are_told_that_somebody_acts_and_strangers_are_no_concern(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.runner.watch(["llm", "strange", "other"])
    assert one.cluster.watched == ["llm", "other"]
    assert one.lines == []
