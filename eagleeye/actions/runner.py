"""Plan -> outcomes: the only place that performs actions, each once, in order, and stops at the first that did not work."""

from collections.abc import Sequence

from eagleeye.actions.backend import RemediationBackend
from eagleeye.actions.journal import Journal
from eagleeye.actions.policy import Settings, plan
from eagleeye.clock import Clock
from eagleeye.errors import AmbiguousError, BackendError, TransientError
from eagleeye.records import Incident, IncidentState, Outcome, Plan, Result


def respond(
    incidents: Sequence[Incident], settings: Settings, backend: RemediationBackend, journal: Journal, clock: Clock
) -> list[tuple[Plan, list[Outcome]]]:
    """Plan for each open incident that has no plan yet, and carry the plans out; return what was new."""
    answered = []
    for incident in incidents:
        if incident.state is not IncidentState.OPEN:
            continue
        made = plan(incident, settings)
        if made and journal.record(made, clock.now_s()):
            answered.append((made, carry_out(made, backend, journal, clock)))
    return answered


def carry_out(made: Plan, backend: RemediationBackend, journal: Journal, clock: Clock) -> list[Outcome]:
    """Perform the plan's actions; an operation that somebody claimed before is left to him."""
    outcomes = []
    for step, action in enumerate(made.actions):
        operation_id = f"{made.incident_id}-{step}-{action.kind.value}"
        started_s = clock.now_s()
        if not journal.claim(operation_id, started_s):
            continue
        try:
            result, detail = backend.perform(operation_id, action)
        except BackendError as error:
            kind = (
                Result.TRANSIENT
                if isinstance(error, TransientError)
                else Result.AMBIGUOUS
                if isinstance(error, AmbiguousError)
                else Result.PERMANENT
            )
            result, detail = kind, str(error)
        outcome = Outcome(operation_id, result, detail, started_s, clock.now_s())
        journal.finish(outcome)
        outcomes.append(outcome)
        if result not in (Result.DONE, Result.OBSERVED):
            break
    return outcomes
