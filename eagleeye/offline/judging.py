"""What verdicts are worth, given what really happened. Pure: labels and ticks in, counts out.

No accuracy (healthy ticks outnumber all others) and no point adjustment (it makes random scores look good: arXiv 2109.05257).
A fault counts as active until `GRACE_S` after its end, for detection and for blame alike. Events less than `APART_S` apart
count once, for wrong blames and for false alarms alike.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eagleeye.records import Decision
from eagleeye.source.trace import Label

GRACE_S = 120.0
APART_S = 600.0
FINE_S = 5.0
"""Where sampling is at least this fine delays are held against seconds, otherwise against samples."""


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
    """How one fault fared. `delay_s` is None when it was not detected within the `watched_s` in which it could have been."""

    category: str
    nameable: bool
    delay_s: float | None
    culprit_right: bool
    watched_s: float
    step_s: float

    @property
    def delay_samples(self) -> float | None:
        """The delay in sampling intervals."""
        return None if self.delay_s is None else self.delay_s / self.step_s


@dataclass(frozen=True, slots=True)
class Result:
    """How one trace fared. `wrong_blames_s` and `false_alarms_s` are the times at which each event began.

    `healthy_hours` are those in which the job worked and no fault was active, `healthy_wrong_blames_s` the events in them.
    """

    name: str
    kind: str
    ranks: int
    hours: float
    healthy_hours: float
    faults: tuple[Found, ...]
    wrong_blames_s: tuple[float, ...]
    healthy_wrong_blames_s: tuple[float, ...]
    false_alarms_s: tuple[float, ...]
    alarmed_while_not_training: bool

    @property
    def not_training(self) -> bool:
        """Whether nothing in this trace should ever be anomalous."""
        return self.kind.startswith("not_training")


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over some traces, and over the faults in `found`."""

    traces: int
    hours: float
    healthy_hours: float
    gpu_days: float
    found: tuple[Found, ...]
    wrong_blames: int
    healthy_wrong_blames: int
    false_alarms: int
    not_training: int
    not_training_alarmed: int

    @property
    def faults(self) -> int:
        """How many faults there were."""
        return len(self.found)

    @property
    def detected(self) -> int:
        """How many of them raised an alarm in time."""
        return sum(f.delay_s is not None for f in self.found)

    @property
    def culprits_right(self) -> int:
        """How many of them were put down to the right node, or rightly to none."""
        return sum(f.culprit_right for f in self.found)

    @property
    def blames(self) -> int:
        """What blame precision is a share of."""
        return self.culprits_right + self.wrong_blames + self.false_alarms

    @property
    def delays_s(self) -> tuple[float, ...]:
        """Delays of the faults that were detected, ascending."""
        return tuple(sorted(f.delay_s for f in self.found if f.delay_s is not None))


@dataclass(frozen=True, slots=True)
class Onset:
    """One point of the onset-to-alarm curve: of `faults`, `alarmed` were alarmed within `after_s`, `censored` watched for less.

    `share` counts a fault that ended without an alarm as missed for ever. `survival_share` (one minus Kaplan and Meier's
    estimate, 10.1080/01621459.1958.10501452) takes it out of the denominator when its watching ended, so it says what would be if
    faults lasted.
    """

    after_s: float
    alarmed: int
    censored: int
    faults: int
    survival_share: float

    @property
    def share(self) -> float:
        """Share of all faults."""
        return self.alarmed / self.faults


def judge(name: str, ranks: int, step_s: float, labels: Sequence[Label], ticks: Sequence[Tick]) -> Result:
    """Return how the verdicts of one trace fared.

    Parameters
    ----------
    ranks : how many the job has
    step_s : its sampling interval
    labels : what happened; may be empty
    ticks : in the order of time, at least one; the first and last are the hours that were judged
    """
    faults = [label for label in labels if label.kind == "fault"]
    resting = [label for label in labels if label.kind == "not_training"]
    ill = [(fault.start_s, fault.end_s + GRACE_S) for fault in faults] + [(label.start_s, label.end_s) for label in resting]
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
    first_s, last_s = ticks[0].at_s, ticks[-1].at_s
    return Result(
        name,
        _kind(labels),
        ranks,
        (last_s - first_s) / 3600,
        (last_s - first_s - _covered_s(ill, first_s, last_s)) / 3600,
        tuple(_found(fault, faults, step_s, ticks) for fault in faults),
        _events(wrong),
        _events([at_s for at_s in wrong if not any(start_s <= at_s <= end_s for start_s, end_s in ill)]),
        _events(false),
        any(tick.anomalous and _active(label, tick.at_s, 0.0) for label in resting for tick in ticks),
    )


def total(results: Sequence[Result]) -> Totals:
    """Return the sums."""
    return _sums(results, (fault for result in results for fault in result.faults))


def by_class(results: Sequence[Result]) -> dict[str, Totals]:
    """Return the sums by what happened: ``fault gpu_slow``, ``benign restart``, ``nothing``.

    A fault is of its own class. The hours and the errors of a trace with several labels belong to the class of its first fault.
    """
    found = [fault for result in results for fault in result.faults]
    kinds = {result.kind for result in results} | {f"fault {fault.category}" for fault in found}
    return {
        kind: _sums([r for r in results if r.kind == kind], (f for f in found if f"fault {f.category}" == kind))
        for kind in sorted(kinds)
    }


def onset_to_alarm(found: Sequence[Found], after_s: Iterable[float]) -> list[Onset]:
    """Return the curve at each of `after_s`, ascending; empty without faults."""
    if not found:
        return []
    seen = sorted((f.watched_s if f.delay_s is None else f.delay_s, f.delay_s is None) for f in found)
    points, silent = [], 1.0
    at_risk, taken = len(seen), 0
    for limit_s in after_s:
        # of several at one time the alarms come first: who was watched until then was at risk then
        while taken < len(seen) and seen[taken][0] <= limit_s:
            if not seen[taken][1]:
                silent *= 1 - 1 / at_risk
            at_risk, taken = at_risk - 1, taken + 1
        alarmed = sum(not missed for _, missed in seen[:taken])
        points.append(Onset(limit_s, alarmed, taken - alarmed, len(seen), 1 - silent))
    return points


def _sums(results: Sequence[Result], found: Iterable[Found]) -> Totals:
    return Totals(
        traces=len(results),
        hours=sum(r.hours for r in results),
        healthy_hours=sum(r.healthy_hours for r in results),
        gpu_days=sum(r.hours * r.ranks for r in results) / 24,
        found=tuple(found),
        wrong_blames=sum(len(r.wrong_blames_s) for r in results),
        healthy_wrong_blames=sum(len(r.healthy_wrong_blames_s) for r in results),
        false_alarms=sum(len(r.false_alarms_s) for r in results),
        not_training=sum(r.not_training for r in results),
        not_training_alarmed=sum(r.alarmed_while_not_training for r in results),
    )


def _kind(labels: Sequence[Label]) -> str:
    for kind in ("fault", "not_training", "benign"):
        for label in labels:
            if label.kind == kind:
                return f"{kind} {label.category}"
    return "nothing"


def _active(label: Label, at_s: float, grace_s: float) -> bool:
    return label.start_s <= at_s <= label.end_s + grace_s


def _found(fault: Label, faults: Sequence[Label], step_s: float, ticks: Sequence[Tick]) -> Found:
    watched_s = max(0.0, min(fault.end_s + GRACE_S, ticks[-1].at_s) - fault.start_s)
    alarms = []
    for tick in ticks:
        if not (tick.anomalous and _active(fault, tick.at_s, GRACE_S)):
            continue
        alone = not any(other is not fault and _active(other, tick.at_s, 0.0) for other in faults)
        if alone or not fault.nodes or set(tick.nodes) & set(fault.nodes):
            alarms.append(tick)
    if not alarms:
        return Found(fault.category, fault.nameable, None, False, watched_s, step_s)
    naming = [tick for tick in alarms if tick.nodes]

    def guilty(tick: Tick) -> set[str]:
        return {node for other in faults if other is fault or _active(other, tick.at_s, GRACE_S) for node in other.nodes}

    if fault.nameable:
        right = bool(naming) and naming[0].nodes[0] in guilty(naming[0])
    else:
        right = all(set(tick.nodes) <= guilty(tick) for tick in naming)
    return Found(fault.category, fault.nameable, alarms[0].at_s - fault.start_s, right, watched_s, step_s)


def _events(times_s: Sequence[float]) -> tuple[float, ...]:
    """Return the first time of each run of times less than `APART_S` from one to the next."""
    return tuple(t for i, t in enumerate(times_s) if i == 0 or t - times_s[i - 1] >= APART_S)


def _covered_s(spans: Sequence[tuple[float, float]], first_s: float, last_s: float) -> float:
    """Return how much of the time from `first_s` to `last_s` lies in at least one span."""
    covered_s, until_s = 0.0, first_s
    for start_s, end_s in sorted(spans):
        start_s, end_s = max(start_s, until_s), min(end_s, last_s)
        if end_s > start_s:
            covered_s, until_s = covered_s + end_s - start_s, end_s
    return covered_s
