"""Incident -> plan. Pure: no clock, no cluster, no side effect."""

from dataclasses import dataclass

from eagleeye.records import Action, ActionKind, Category, Incident, Plan

LOG_BURST = "log_burst"
"""The rule that rests on error lines alone, which the user's own code may write."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Section ``[actions]``: what may be planned."""

    max_nodes: int = 1
    """Nodes that one plan may take out. An incident with more is told to a human."""
    min_verdicts: int = 2
    """Anomalous verdicts that an incident needs before anything but a notification is planned."""
    patience_s: float = 10.0
    """How long the detectors must go on blaming a node, after the first verdict, before it is taken out; rules need no
    such time.
    """
    journal: str = "eagleeye-data/journal.db"
    """SQLite file that records plans and outcomes."""
    backend: str = "dryrun"
    """Whose hands carry out a plan."""

    def __post_init__(self) -> None:
        if self.max_nodes < 1 or self.min_verdicts < 1:
            raise ValueError("max_nodes and min_verdicts must be at least 1")


def plan(incident: Incident, settings: Settings) -> Plan | None:
    """Return what should be done about an open incident, or None while more verdicts are needed.

    A node is taken out only when the incident names at most `max_nodes` nodes and the cause is not the user's code. Everything
    else is a notification: a fault of everybody is nobody's eviction.
    """
    notify = Action(ActionKind.NOTIFY, incident.job)
    if not incident.nodes:
        return Plan(incident.id, incident.job, (notify,), f"nobody is to blame, so nobody is taken out: {incident.reason}")
    if incident.category is Category.USER_CODE:
        return Plan(
            incident.id, incident.job, (notify,), f"the job's own code failed, another node would not help: {incident.reason}"
        )
    if incident.rule == LOG_BURST:
        return Plan(incident.id, incident.job, (notify,), f"lines of a log alone take nobody out: {incident.reason}")
    if len(incident.nodes) > settings.max_nodes:
        reason = f"{len(incident.nodes)} nodes are suspected and at most {settings.max_nodes} may be taken out: {incident.reason}"
        return Plan(incident.id, incident.job, (notify,), reason)
    if incident.verdict_count < settings.min_verdicts:
        return None
    if incident.rule is None and incident.last_anomalous_s - incident.opened_s < settings.patience_s:
        return None
    steps = [notify]
    for node in incident.nodes:
        steps += [Action(ActionKind.CORDON, node), Action(ActionKind.EVICT, node)]
    steps.append(Action(ActionKind.RESTART, incident.job))
    return Plan(incident.id, incident.job, tuple(steps), incident.reason)
