"""Verdicts of many ticks -> incidents with a beginning and an end. Pure."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace

from eagleeye.records import Category, Decision, Incident, IncidentState, Verdict

QUIET_S = 120.0
"""An incident ends after this long without an anomalous verdict, and only on a verdict that says the job is well or over."""

RELAPSE_S = 30.0
"""The same for one that rests on a vote about a node: two odd moments with a good while between them are not one that lasts."""


def advance(incidents: Sequence[Incident], verdict: Verdict, quiet_s: float = QUIET_S) -> tuple[Incident, ...]:
    """Return the incidents after one more verdict: opened, continued or closed; those of other jobs are left alone.

    A verdict continues an open incident of its job when they share a node, or when one of them names nobody: the same trouble
    is often seen before it is understood. An incident that named nobody takes the nodes of the first verdict that does.
    A verdict that names nobody is no further evidence against a node, nor is one about the user's code or an unknown cause.
    """
    if verdict.decision is not Decision.ANOMALOUS:
        well = verdict.decision in (Decision.NORMAL, Decision.NOT_APPLICABLE)
        return tuple(
            replace(i, state=IncidentState.CLOSED, closed_s=verdict.to_s)
            if i.job == verdict.job and i.state is IncidentState.OPEN and well and _quiet(i, verdict.to_s, quiet_s)
            else i
            for i in incidents
        )
    nodes = tuple(dict.fromkeys(s.node for s in verdict.suspects))
    ranks = tuple(s.rank for s in verdict.suspects)
    for place, incident in enumerate(incidents):
        if incident.job != verdict.job or incident.state is not IncidentState.OPEN:
            continue
        if incident.nodes and nodes and not set(incident.nodes) & set(nodes):
            continue
        learned = bool(nodes) and not incident.nodes
        if not learned and not _speaks_against(incident, verdict):
            return tuple(incidents)
        continued = replace(
            incident,
            nodes=nodes if learned else incident.nodes,
            ranks=ranks if learned else incident.ranks,
            # what nobody could be blamed for says nothing of how long these nodes have been bad
            opened_s=verdict.to_s if learned else incident.opened_s,
            reason=verdict.reason if learned else incident.reason,
            category=(verdict.category or Category.UNKNOWN) if learned else incident.category,
            rule=verdict.rule if learned else incident.rule,
            last_anomalous_s=verdict.to_s,
            verdict_count=1 if learned else incident.verdict_count + 1,
        )
        return (*incidents[:place], continued, *incidents[place + 1 :])
    opened = Incident(
        id=incident_id(verdict.job, nodes, verdict.to_s),
        job=verdict.job,
        nodes=nodes,
        ranks=ranks,
        opened_s=verdict.to_s,
        last_anomalous_s=verdict.to_s,
        state=IncidentState.OPEN,
        category=verdict.category or Category.UNKNOWN,
        reason=verdict.reason,
        rule=verdict.rule,
    )
    return (*incidents, opened)


def _quiet(incident: Incident, at_s: float, quiet_s: float) -> bool:
    voted = bool(incident.nodes) and incident.rule is None
    return at_s - incident.last_anomalous_s >= (min(quiet_s, RELAPSE_S) if voted else quiet_s)


def _speaks_against(incident: Incident, verdict: Verdict) -> bool:
    """Whether a verdict is further evidence for what an incident says."""
    if not incident.nodes:
        return True
    return bool(verdict.suspects) and (_blames(verdict) or not _blames(incident))


def _blames(said: Verdict | Incident) -> bool:
    """Whether it says that a node is to blame, not only where something happened."""
    return said.category is not Category.USER_CODE and not (said.rule and said.category is Category.UNKNOWN)


def close_unwatched(
    incidents: Sequence[Incident], jobs: Collection[str], now_s: float, quiet_s: float = QUIET_S
) -> tuple[Incident, ...]:
    """Return the incidents after those of jobs that nobody reports any more are closed, once they were quiet for long enough."""
    return tuple(
        replace(i, state=IncidentState.CLOSED, closed_s=now_s)
        if i.state is IncidentState.OPEN and i.job not in jobs and now_s - i.last_anomalous_s >= quiet_s
        else i
        for i in incidents
    )


def incident_id(job: str, nodes: Sequence[str], opened_s: float) -> str:
    """Return a short name that is the same whenever the same verdict opens the incident, also in a replay."""
    return hashlib.sha256(f"{job}|{','.join(nodes)}|{opened_s:.3f}".encode()).hexdigest()[:12]
