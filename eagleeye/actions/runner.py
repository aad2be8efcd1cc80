"""Plan -> outcomes: the only place that performs actions and the only one that repeats them."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from eagleeye.actions import policy
from eagleeye.actions.backend import RemediationBackend
from eagleeye.actions.journal import Journal, Operation
from eagleeye.clock import Clock
from eagleeye.errors import AmbiguousError, BackendError, TransientError
from eagleeye.records import Action, ActionKind, Incident, IncidentState, JobView, Outcome, Plan, Result, operation_id

ATTEMPTS = 5
"""How often one operation is tried before a human must look."""
LONGEST_WAIT_S = 30.0
"""The waits between attempts double from one second up to this."""
_WAIT = (Result.TRANSIENT, "the job restarts or has just restarted, and not because of us: one thing at a time")


class Runner:
    """Answers incidents: at most one plan of a job at a time, each action once and in order, none after one that failed.

    Parameters
    ----------
    settings : what may be planned
    eyes : the backend whose view of a job the plans must fit
    hands : the backend that performs; the same as `eyes` when the journal is an acting one
    journal : where every step is written down before and after it is done; an acting one, or not
    clock : the time of attempts, and so of their repetition
    tell : takes one line at a time: a plan, or how an action ended
    """

    def __init__(
        self,
        settings: policy.Settings,
        eyes: RemediationBackend,
        hands: RemediationBackend,
        journal: Journal,
        clock: Clock,
        tell: Callable[[str], None],
    ) -> None:
        self._settings, self._eyes, self._hands = settings, eyes, hands
        self._journal, self._clock, self._tell = journal, clock, tell
        self._unseen: dict[str, str] = {}
        self._open: dict[str, Incident] = {}
        self._rounds: dict[str, tuple[float | None, float]] = {}

    def watch(self, jobs: Sequence[str]) -> None:
        """Let jobs know that somebody acts on their incidents. Jobs that the backend does not know are no concern of ours."""
        for job in jobs:
            with suppress(BackendError):
                self._hands.watch(job)

    def respond(self, incidents: Sequence[Incident]) -> None:
        """Go on with the plans that were begun, also when nobody tells of their incident any more, then answer open incidents.

        Never waits: what is to be repeated later is repeated by a later call.
        """
        self._open = {incident.id: incident for incident in incidents if incident.state is IncidentState.OPEN}
        busy = {begun.job for begun in self._journal.unfinished() if not self._carry_out(begun)}
        for incident in incidents:
            if incident.id not in self._open or incident.job in busy or self._answered(incident):
                continue
            made = self._plan(incident)
            if made is not None and self._journal.record(made, self._clock.now_s()):
                self._tell(_headline(made))
                if not self._carry_out(made, announced=True):
                    busy.add(made.job)

    def _answered(self, incident: Incident) -> bool:
        """Whether a node of the incident was taken out for it: what else is said of it is about the past."""
        steps = (operation_id(incident.id, Action(ActionKind.EVICT, node)) for node in incident.nodes)
        return any(self._journal.done_since_s(step) is not None for step in steps)

    def _plan(self, incident: Incident) -> Plan | None:
        """Plan for what is seen of the job now. Who acts must not plan blindly when the look fails; who observes may."""
        job = incident.job
        try:
            view = self._observe(job)
        except BackendError as error:
            if not self._journal.acting:
                return policy.plan(incident, self._settings)
            if self._unseen.get(job) != str(error):
                self._unseen[job] = str(error)
                self._tell(f"incident {incident.id} of job {job}: nothing is planned, for the job cannot be looked at: {error}")
            return None
        self._unseen.pop(job, None)
        if self._journal.acting:
            evicted_s = self._evicted_s(job)
            if view is not None and view.running_since_s is not None and view.running_since_s <= evicted_s:
                view = replace(view, running_since_s=None)  # the round that we broke is about to end
            settled_s = evicted_s + self._settings.settle_s + self._settings.patience_s
            if view is None and incident.nodes and incident.last_anomalous_s < settled_s:
                return None
        return policy.plan(incident, self._settings, view)

    def _observe(self, job: str) -> JobView | None:
        """Look at a job. A round that began while we watched began no earlier than it was seen, whatever other clocks say."""
        view = self._eyes.observe(job)
        if view is None:
            return None
        told_s, known = view.running_since_s, self._rounds.get(job)
        if known is None or known[0] != told_s:
            seen_s = self._clock.now_s() if known is not None else float("-inf")
            self._rounds[job] = known = told_s, seen_s
        return view if told_s is None else replace(view, running_since_s=max(told_s, known[1]))

    def _evicted_s(self, job: str) -> float:
        """Return when a node of the job was taken out last; long ago when none was."""
        steps = (
            self._journal.done_since_s(operation_id(made.incident_id, action))
            for made in self._journal.plans(acted=True)
            if made.job == job
            for action in made.actions
            if action.kind is ActionKind.EVICT
        )
        return max((begun_s for begun_s in steps if begun_s is not None), default=float("-inf"))

    def _carry_out(self, made: Plan, announced: bool = False) -> bool:
        """Go on with a plan where it stands; return whether it is over."""
        evicted_s = None
        for action in made.actions:
            name = operation_id(made.incident_id, action)
            operation = self._journal.operation(name)
            if operation is None or not operation.over:
                if operation is not None and self._early(operation):
                    return False
                unclear = operation is not None and _unclear(operation)
                known = None if unclear else self._look(action, made, evicted_s)
                if known is _WAIT:
                    return False
                if not announced:
                    self._tell(_headline(made))
                    announced = True
                operation = self._attempt(name, action, made, operation, unclear, known)
            assert operation.outcome is not None
            if not operation.over:
                return False
            if operation.outcome.result not in (Result.DONE, Result.OBSERVED):
                break
            if action.kind is ActionKind.EVICT:
                evicted_s = operation.begun_s
        self._journal.end(made, self._clock.now_s())
        return True

    def _early(self, operation: Operation) -> bool:
        """Whether its next attempt is not due yet. A clock that was set back must not make it wait for longer than was meant."""
        return operation.next_try_s is not None and 0 < operation.next_try_s - self._clock.now_s() <= LONGEST_WAIT_S

    def _look(self, action: Action, made: Plan, evicted_s: float | None) -> tuple[Result, str] | None:
        """Look at the job once more before it is touched; return what comes of the action without doing it, None to do it.

        `evicted_s` is when this plan began to take out a node, None when it has not.
        """
        if not self._journal.acting or action.kind is ActionKind.NOTIFY:
            return None
        try:
            view = self._observe(made.job)
        except TransientError as error:
            return Result.TRANSIENT, str(error)
        except BackendError as error:
            return Result.PERMANENT, str(error)
        if view is None:
            return None
        obstacle = policy.obstacle(action, view)
        if obstacle:
            return Result.PERMANENT, obstacle
        if evicted_s is None:
            if view.running_since_s is None:
                return _WAIT
            return self._look_again(made, view) if view.running_since_s > self._journal.planned_s(made) else None
        anew = view.running_since_s is not None and view.running_since_s > evicted_s
        if action.kind is ActionKind.RESTART and anew and not any(step.target in view.nodes for step in made.actions):
            return Result.DONE, f"job {made.job} was already started anew"
        return None

    def _look_again(self, made: Plan, view: JobView) -> tuple[Result, str] | None:
        """Return what comes of a plan whose job was started anew before it was touched: it needs evidence of the new round."""
        incident = self._open.get(made.incident_id)
        if incident is None:
            return (
                Result.PERMANENT,
                f"job {made.job} was started anew since this was planned, and nothing is found there any more",
            )
        again = policy.plan(incident, self._settings, view)
        if again is None:
            return _WAIT
        return None if again.actions == made.actions else (Result.PERMANENT, again.reason)

    def _attempt(
        self,
        operation_id: str,
        action: Action,
        made: Plan,
        before: Operation | None,
        unclear: bool,
        known: tuple[Result, str] | None,
    ) -> Operation:
        """Make one attempt, write down how it ended and when the next is due; how it ends may be `known` without doing it."""
        started_s = self._clock.now_s()
        attempt, begun_s = (before.attempts + 1, before.begun_s) if before else (1, started_s)
        interrupted = before is not None and before.outcome is None
        if interrupted and attempt > ATTEMPTS:
            known = Result.AMBIGUOUS, "it was begun again and again and never ended, so look whether it was done"
        elif interrupted:
            self._tell(f"  again: {action.kind.value} {action.target} was begun before and its end is not known")
        if known is None:
            self._journal.write(operation_id, Operation(begun_s, attempt, unclear, None, None))
            known = self._perform(operation_id, action, made)
        result, detail = known
        ended_s, next_try_s = self._clock.now_s(), None
        if result in (Result.TRANSIENT, Result.AMBIGUOUS):
            if attempt < ATTEMPTS:
                wait_s = min(2.0 ** (attempt - 1), LONGEST_WAIT_S)
                next_try_s, detail = ended_s + wait_s, f"{detail}; attempt {attempt} of {ATTEMPTS}, the next in {wait_s:g} s"
            else:
                detail = f"{detail}; given up after {ATTEMPTS} attempts"
        elif interrupted:
            detail = f"{detail} (repeated after an interruption)"
        outcome = Outcome(operation_id, result, detail, started_s, ended_s)
        ended = Operation(begun_s, attempt, unclear, next_try_s, outcome)
        self._journal.write(operation_id, ended)
        self._tell(f"  {result.value}: {detail}")
        return ended

    def _perform(self, operation_id: str, action: Action, made: Plan) -> tuple[Result, str]:
        try:
            return self._hands.perform(operation_id, action, made.job, made.reason)
        except TransientError as error:
            return Result.TRANSIENT, str(error)
        except AmbiguousError as error:
            return Result.AMBIGUOUS, str(error)
        except BackendError as error:
            return Result.PERMANENT, str(error)


def _unclear(operation: Operation) -> bool:
    """Whether an earlier attempt may have done it; then a look at the job says nothing: the node may be gone because of us."""
    return operation.unclear or operation.outcome is None or operation.outcome.result is Result.AMBIGUOUS


def _headline(made: Plan) -> str:
    return f"incident {made.incident_id} of job {made.job}: {made.reason}"
