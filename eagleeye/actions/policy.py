"""Incident -> plan. Pure: no clock, no cluster, no side effect."""

from collections.abc import Collection
from dataclasses import dataclass

from eagleeye.records import Action, ActionKind, Category, Incident, JobView, Plan

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
    settle_s: float = 10.0
    """How long the ranks of a job may work after each start or restart before the detectors' blame counts."""
    journal: str = "eagleeye-data/journal.db"
    """SQLite file that records plans and outcomes."""
    backend: str = "dryrun"
    """Whose eyes see the jobs and, with ``--act``, whose hands carry out a plan."""

    def __post_init__(self) -> None:
        if self.max_nodes < 1 or self.min_verdicts < 1:
            raise ValueError("max_nodes and min_verdicts must be at least 1")


def plan(incident: Incident, settings: Settings, view: JobView | None = None) -> Plan | None:
    """Return what should be done about an open incident, or None while more verdicts are needed or the job restarts.

    A node is taken out only when the incident names at most `max_nodes` nodes and the cause is not the user's code. Everything
    else is a notification: a fault of everybody is nobody's eviction. `view` is what is seen of the job now: it must keep its
    minimum of nodes, and only what was found since its ranks were started counts. None: nobody can see it.
    """
    why_not = _why_nobody(incident, settings) or (_absence(incident.nodes, view) if view else None)
    if why_not:
        return _telling(incident, why_not)
    if incident.verdict_count < settings.min_verdicts or not _proven(incident, settings, view):
        return None
    nodes = _present(incident.nodes, view) if view else incident.nodes
    if view and (why_not := _shortage(nodes, view)):
        return _telling(incident, why_not)
    steps = [Action(ActionKind.NOTIFY, incident.job)]
    for node in nodes:
        steps += [Action(ActionKind.CORDON, node), Action(ActionKind.EVICT, node)]
    steps.append(Action(ActionKind.RESTART, incident.job))
    return Plan(incident.id, incident.job, tuple(steps), incident.reason)


def obstacle(action: Action, view: JobView) -> str | None:
    """Return why a plan that was begun must stop before `action`, or None when it may go on.

    While the job is down nobody can tell from outside who belongs to it: then the backend, which keeps the budget too, decides.
    """
    nodes = (action.target,) if action.kind in (ActionKind.CORDON, ActionKind.EVICT) else ()
    gone = _absence(nodes, view) if nodes else None
    return gone or (None if view.running_since_s is None else _shortage(nodes, view))


def _telling(incident: Incident, why_not: str) -> Plan:
    return Plan(incident.id, incident.job, (Action(ActionKind.NOTIFY, incident.job),), f"{why_not}: {incident.reason}")


def _why_nobody(incident: Incident, settings: Settings) -> str | None:
    """Return why no node is taken out for such an incident, whatever the job looks like; None when one may be."""
    if not incident.nodes:
        return "nobody is to blame, so nobody is taken out"
    if incident.category is Category.USER_CODE:
        return "the job's own code failed, another node would not help"
    if incident.rule == LOG_BURST:
        return "lines of a log alone take nobody out"
    if incident.rule is not None and incident.category is Category.UNKNOWN:
        return "nothing tells whether the node is the cause"
    if len(incident.nodes) > settings.max_nodes:
        return f"{len(incident.nodes)} nodes are suspected and at most {settings.max_nodes} may be taken out"
    return None


def _absence(nodes: Collection[str], view: JobView) -> str | None:
    """Return how it comes that none of the nodes holds ranks of the job, None when one does or while the job is down."""
    names = " and ".join(nodes)
    if all(node in view.excluded for node in nodes):
        return f"{names} {'was' if len(nodes) == 1 else 'were'} already taken out"
    if view.running_since_s is None or _present(nodes, view):
        return None
    return f"{names} {'is' if len(nodes) == 1 else 'are'} no longer part of job {view.job}"


def _present(nodes: Collection[str], view: JobView) -> tuple[str, ...]:
    return tuple(node for node in nodes if node in view.nodes and node not in view.excluded)


def _proven(incident: Incident, settings: Settings, view: JobView | None) -> bool:
    """Whether the evidence suffices; what was found before the present ranks were started counts for nothing."""
    since_s, of_this_round = incident.opened_s, True
    if view is not None:
        if view.running_since_s is None:
            return False
        # right after a start, samples still tell of the ranks before it, and clocks of nodes differ
        settled_s = view.running_since_s + settings.settle_s
        of_this_round = incident.opened_s > settled_s
        since_s = max(since_s, settled_s)
    return (incident.rule is not None and of_this_round) or incident.last_anomalous_s - since_s >= settings.patience_s


def _shortage(nodes: Collection[str], view: JobView) -> str | None:
    """Return why the job cannot do without the nodes, None when it can."""
    left = len({*view.nodes, *view.spares} - {*nodes})
    if left >= view.min_nodes:
        return None
    spares = "too few spares are" if view.spares else "no spare is"
    kept = f", so {' and '.join(nodes)} {'stays' if len(nodes) == 1 else 'stay'}" if nodes else f" and has {left}"
    return f"{spares} left and job {view.job} needs {view.min_nodes} nodes{kept}"
