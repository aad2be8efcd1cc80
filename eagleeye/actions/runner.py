"""Plan -> outcomes: the only place that performs actions, each once, in order, and stops at the first that did not work."""

from collections.abc import Sequence

from eagleeye.actions.backend import RemediationBackend
from eagleeye.actions.journal import Journal
from eagleeye.actions.policy import Settings, plan
from eagleeye.clock import Clock
from eagleeye.errors import AmbiguousError, BackendError, TransientError
from eagleeye.records import Action, Incident, IncidentState, Outcome, Plan, Result

ABANDONED_S = 300.0
"""Whoever began an operation this long ago and has not told its end died at it."""


def respond(
    incidents: Sequence[Incident], settings: Settings, backend: RemediationBackend, journal: Journal, clock: Clock
) -> list[tuple[Plan, list[Outcome]]]:
    """Plan for each open incident, carry out what nobody began before, and return the plans in which something was new."""
    answered = []
    for incident in incidents:
        if incident.state is not IncidentState.OPEN:
            continue
        made = plan(incident, settings)
        if made is None:
            continue
        new = journal.record(made, clock.now_s())
        # a plan that a crash interrupted goes on: what was done is known by its operation
        outcomes = carry_out(made, backend, journal, clock)
        if new or outcomes:
            answered.append((made, outcomes))
    return answered


def carry_out(made: Plan, backend: RemediationBackend, journal: Journal, clock: Clock) -> list[Outcome]:
    """Perform those of the plan's actions that nobody began before; return how they ended.

    Stops at the first that did not work, and at one that was begun and has no outcome: somebody is at it, or died at it.
    """
    outcomes = []
    for action in made.actions:
        operation_id = f"{made.incident_id}-{action.kind.value}-{action.target}"
        started_s = clock.now_s()
        if journal.claim(operation_id, started_s):
            outcome = _perform(operation_id, action, backend, started_s, clock)
            journal.finish(outcome)
            outcomes.append(outcome)
        else:
            known = journal.outcome(operation_id)
            began_s = journal.begun_s(operation_id)
            if known is None and (began_s is None or started_s - began_s < ABANDONED_S):
                break
            if known is None:
                detail = "it was begun and never ended, so whether it was done is not known: look before it is repeated"
                known = Outcome(operation_id, Result.AMBIGUOUS, detail, began_s or started_s, started_s)
                journal.finish(known)
                outcomes.append(known)
            outcome = known
        if outcome.result not in (Result.DONE, Result.OBSERVED):
            break
    return outcomes


def _perform(operation_id: str, action: Action, backend: RemediationBackend, started_s: float, clock: Clock) -> Outcome:
    try:
        result, detail = backend.perform(operation_id, action)
    except TransientError as error:
        result, detail = Result.TRANSIENT, str(error)
    except AmbiguousError as error:
        result, detail = Result.AMBIGUOUS, str(error)
    except BackendError as error:
        result, detail = Result.PERMANENT, str(error)
    return Outcome(operation_id, result, detail, started_s, clock.now_s())
