"""What verdicts are worth, given what really happened. Pure: labels and ticks in, counts out.

No accuracy (healthy ticks outnumber all others) and no point adjustment (it makes random scores look good: arXiv 2109.05257).
A fault counts as active until `GRACE_S` after its end, for detection and for blame alike. Events less than `APART_S` apart
count once, for wrong blames and for false alarms alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from eagleeye.records import Decision
from eagleeye.source.trace import Label

GRACE_S = 120.0
APART_S = 600.0


@dataclass(frozen=True, slots=True)
class Tick:
    """One verdict: seconds since the epoch, and the nodes of its suspects, most suspicious first."""

    at_s: float
    decision: Decision
    nodes: tuple[str, ...] = ()

    @property
    def anomalous(self) -> bool:
        """Whether it raises an alarm at all."""
        return self.decision is Decision.ANOMALOUS


@dataclass(frozen=True, slots=True)
class Found:
    """How one fault fared. `delay_s` is None when it was not detected."""

    category: str
    nameable: bool
    delay_s: float | None
    culprit_right: bool


@dataclass(frozen=True, slots=True)
class Result:
    """How one trace fared. `wrong_blames_s` and `false_alarms_s` are the times at which each event began."""

    name: str
    kind: str
    ranks: int
    hours: float
    faults: tuple[Found, ...]
    wrong_blames_s: tuple[float, ...]
    false_alarms_s: tuple[float, ...]
    alarmed_while_not_training: bool

    @property
    def not_training(self) -> bool:
        """Whether nothing in this trace should ever be anomalous."""
        return self.kind.startswith("not_training")


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over some traces."""

    traces: int
    hours: float
    gpu_days: float
    faults: int
    detected: int
    culprits_right: int
    wrong_blames: int
    false_alarms: int
    not_training: int
    not_training_alarmed: int
    delays_s: tuple[float, ...]

    @property
    def blames(self) -> int:
        """What blame precision is a share of."""
        return self.culprits_right + self.wrong_blames + self.false_alarms


def judge(name: str, ranks: int, labels: Sequence[Label], ticks: Sequence[Tick]) -> Result:
    """Return how the verdicts of one trace fared.

    Parameters
    ----------
    ranks : how many the job has
    labels : what happened; may be empty
    ticks : in the order of time, at least one; the first and last are the hours that were judged
    """
    faults = [label for label in labels if label.kind == "fault"]
    wrong, false = [], []
    for tick in ticks:
        if not tick.anomalous:
            continue
        active = [fault for fault in faults if _active(fault, tick.at_s, GRACE_S)]
        guilty = {node for fault in active for node in fault.nodes}
        if set(tick.nodes) - guilty:
            wrong.append(tick.at_s)
        stopped = any(label.category == "restart" and _active(label, tick.at_s, 0.0) for label in labels)
        if not tick.nodes and not active and not stopped:
            false.append(tick.at_s)
    resting = [label for label in labels if label.kind == "not_training"]
    return Result(
        name,
        _kind(labels),
        ranks,
        (ticks[-1].at_s - ticks[0].at_s) / 3600,
        tuple(_found(fault, faults, ticks) for fault in faults),
        _events(wrong),
        _events(false),
        any(tick.anomalous and _active(label, tick.at_s, 0.0) for label in resting for tick in ticks),
    )


def total(results: Sequence[Result]) -> Totals:
    """Return the sums."""
    found = [fault for result in results for fault in result.faults]
    return Totals(
        traces=len(results),
        hours=sum(r.hours for r in results),
        gpu_days=sum(r.hours * r.ranks for r in results) / 24,
        faults=len(found),
        detected=sum(f.delay_s is not None for f in found),
        culprits_right=sum(f.culprit_right for f in found),
        wrong_blames=sum(len(r.wrong_blames_s) for r in results),
        false_alarms=sum(len(r.false_alarms_s) for r in results),
        not_training=sum(r.not_training for r in results),
        not_training_alarmed=sum(r.alarmed_while_not_training for r in results),
        delays_s=tuple(sorted(f.delay_s for f in found if f.delay_s is not None)),
    )


def by_class(results: Sequence[Result]) -> dict[str, Totals]:
    """Return the sums by what happened in the traces: ``fault gpu_slow``, ``benign restart``, ``nothing``.

    A trace with several labels is of the class of its first fault; its hours count once.
    """
    return {kind: total([r for r in results if r.kind == kind]) for kind in sorted({r.kind for r in results})}


def _kind(labels: Sequence[Label]) -> str:
    for kind in ("fault", "not_training", "benign"):
        for label in labels:
            if label.kind == kind:
                return f"{kind} {label.category}"
    return "nothing"


def _active(label: Label, at_s: float, grace_s: float) -> bool:
    return label.start_s <= at_s <= label.end_s + grace_s


def _found(fault: Label, faults: Sequence[Label], ticks: Sequence[Tick]) -> Found:
    alarms = []
    for tick in ticks:
        if not (tick.anomalous and _active(fault, tick.at_s, GRACE_S)):
            continue
        alone = not any(other is not fault and _active(other, tick.at_s, 0.0) for other in faults)
        if alone or not fault.nodes or set(tick.nodes) & set(fault.nodes):
            alarms.append(tick)
    if not alarms:
        return Found(fault.category, fault.nameable, None, False)
    naming = [tick for tick in alarms if tick.nodes]

    def guilty(tick: Tick) -> set[str]:
        return {node for other in faults if other is fault or _active(other, tick.at_s, GRACE_S) for node in other.nodes}

    if fault.nameable:
        right = bool(naming) and naming[0].nodes[0] in guilty(naming[0])
    else:
        right = all(set(tick.nodes) <= guilty(tick) for tick in naming)
    return Found(fault.category, fault.nameable, alarms[0].at_s - fault.start_s, right)


def _events(times_s: Sequence[float]) -> tuple[float, ...]:
    """Return the first time of each run of times less than `APART_S` from one to the next."""
    return tuple(t for i, t in enumerate(times_s) if i == 0 or t - times_s[i - 1] >= APART_S)
