"""One incident as one page: who is blamed, since when, why, what was done, and the data to check it by.

A recorded window and the records made from it come in; a self-contained HTML text goes out, which needs no network and works from
`file://`. Every name in it is data and is escaped. Shape suffixes: R ranks, M metrics, T columns.
"""

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagleeye import __version__, charts
from eagleeye.charts import CURVE_BOX, Axis, Mark, Row, Span, TimeAxis, clock, esc, tag
from eagleeye.detectors import peers
from eagleeye.errors import DataError, NoData
from eagleeye.metrics import BY_COLUMN
from eagleeye.quantities import number, quantity
from eagleeye.records import (
    ActionKind,
    Category,
    Decision,
    Incident,
    Outcome,
    Plan,
    Result,
    Scope,
    Suspect,
    Verdict,
    operation_of,
)
from eagleeye.window import Window

MOST_ROWS = 256
"""Ranks that the heat map draws; of a larger job those that deviate most."""

_MOST_LISTED = 1024
_MOST_RESTORES = 64
_MOST_SAVES = 12
_LEAST_COLUMNS = 8
_AGREE = {True: "fired", False: "did not fire", None: "abstained"}
_SAID = {
    Decision.NORMAL: "normal",
    Decision.ANOMALOUS: "anomalous",
    Decision.UNSURE: "unsure",
    Decision.NOT_APPLICABLE: "not applicable",
}
_PAST = {
    ActionKind.NOTIFY: "notified",
    ActionKind.CORDON: "cordoned",
    ActionKind.EVICT: "evicted",
    ActionKind.RESTART: "restarted",
}


@dataclass(frozen=True, slots=True)
class Truth:
    """What was really broken, where somebody knows.

    `fault` is its kind, ``none`` when nothing was; `node` is empty and `rank` None where no single one was to blame; `how` is a
    sentence; `at_s` seconds since the epoch.
    """

    fault: str
    node: str = ""
    rank: int | None = None
    how: str = ""
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Restore:
    """What one rank restored: its `source` is ``local``, ``neighbour`` or ``storage``, `holder` the node that held the copy."""

    rank: int
    node: str
    source: str
    holder: str
    step: int
    restore_s: float


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a job went on after a node was taken out, and whether it went on as if nothing had happened.

    `evicted` was replaced by `spare`, empty when by nobody. `phases` are (name, seconds), in order, from the fault to the first
    new step. `loss` maps each step to the loss of the job that was broken, `steady_loss` to that of an unbroken run of the same
    job; up to `restored_step` `loss` is what was computed before the fault. `lost_steps` were computed before the fault and had
    to be done again. `saves` are (step, hash of the parameters, the same of the unbroken run or empty).
    """

    evicted: str
    spare: str
    restored_step: int
    lost_steps: int
    phases: Sequence[tuple[str, float]]
    restores: Sequence[Restore]
    loss: Mapping[int, float]
    steady_loss: Mapping[int, float]
    saves: Sequence[tuple[int, str, str]]
    identical: bool


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """Everything that the page tells.

    `setup` is one sentence about the cluster, or empty. `window` is the whole recorded stretch. `verdicts` are in the order of
    their time. `truth` is None where nobody knows. `notes` are sentences about how the data were obtained.
    """

    title: str
    setup: str
    window: Window
    verdicts: Sequence[Verdict]
    incidents: Sequence[Incident] = ()
    plans: Sequence[Plan] = ()
    outcomes: Sequence[Outcome] = ()
    truth: Truth | None = None
    notes: Sequence[str] = ()
    recovery: Recovery | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What the verdicts come to. `alarm` is the first that counts, `named` the first that names somebody.

    `kind` is ``right``, ``wrong``, ``missed``, ``false`` (an alarm without a fault), ``quiet``, ``alarm`` (nobody knows whether
    it is right) or ``unknown`` (nothing could be judged); `check` says it in a sentence.
    """

    kind: str
    check: str
    alarm: Verdict | None
    named: Verdict | None

    @property
    def suspect(self) -> Suspect | None:
        """Whom the page is about, if anybody was named."""
        return self.named.suspects[0] if self.named else None


def render(report: Report) -> str:
    """Return the page."""
    found = judge(report)
    metrics, deviation_RMT = _deviations(report, found)
    page = files("eagleeye").joinpath("report.html").read_text(encoding="utf-8")
    style, script = (page.split(f"<{name}>")[1].split(f"</{name}>")[0] for name in ("style", "script"))
    return Template(page).substitute(
        title=esc(report.title),
        style_hash=_sha256(style),
        script_hash=_sha256(script),
        kind=found.kind,
        hero=_hero(report, found),
        timeline=_timeline(report, found),
        recovery=_recovery(report.recovery) if report.recovery else "",
        heatmap=_heatmap(report, found, metrics, deviation_RMT),
        curves=_curves(report, found, metrics, deviation_RMT),
        votes=_votes(report, found),
        incidents=_incidents(report),
        ranks=_ranks(report, found),
        made=_made(report),
    )


def read_verdicts(path: Path, job: str) -> list[Verdict]:
    """Return the verdicts that a replay wrote, one JSON object a line, in the order of their time.

    Raises
    ------
    NoData
        There is no such file.
    DataError
        A line breaks the format; the sentence says which.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise DataError(f"{path} is no text; give the .jsonl file that `eagleeye score --replay` wrote") from None
    except OSError as error:
        raise NoData(f"cannot read {path}: {error.strerror or error}; `eagleeye score --replay` writes such a file") from None
    verdicts = []
    for at, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            verdicts.append(_verdict(json.loads(line), job))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{path}, line {at} is no verdict ({type(error).__name__}: {error}); write the file again with "
                "`eagleeye score --replay`"
            ) from None
    return sorted(verdicts, key=lambda verdict: verdict.to_s)


def _verdict(data: dict[str, Any], job: str) -> Verdict:
    at = datetime.fromisoformat(str(data["time"]))
    at_s = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    named, votes = data.get("suspects") or [], data.get("votes") or {}
    if not isinstance(named, list) or not isinstance(votes, dict):
        raise TypeError("suspects must be a list and votes an object")
    if not all(vote is None or isinstance(vote, bool) for vote in votes.values()):
        raise TypeError("a vote is true, false or null")
    return Verdict(
        job=job,
        from_s=at_s,
        to_s=at_s,
        decision=Decision(data["decision"]),
        reason=str(data.get("reason") or ""),
        scope=Scope(data["scope"]) if data.get("scope") else None,
        category=Category(data["category"]) if data.get("category") else None,
        suspects=tuple(Suspect(int(s["rank"]), str(s["node"]), float(s.get("score", "nan")), "") for s in named),
        votes=votes,
        rule=str(data["rule"]) if data.get("rule") else None,
        model=str(data.get("model") or ""),
    )


def judge(report: Report) -> Finding:
    """Return what the verdicts come to, compared with the truth where it is known. An alarm before the fault is a false one."""
    truth = report.truth
    alarms = [v for v in report.verdicts if v.decision is Decision.ANOMALOUS]
    broken = truth is not None and truth.fault != "none"
    fault_s = truth.at_s if truth is not None and broken else None
    early = [v for v in alarms if fault_s is not None and v.to_s < fault_s]
    alarms = alarms[len(early) :] or early
    alarm = alarms[0] if alarms else None
    named = next((v for v in alarms if v.suspects), None)
    too_early = f" Before the fault there were {len(early)} false alarms." if early and alarms is not early else ""
    if alarm is None:
        judged = any(v.decision is Decision.NORMAL for v in report.verdicts)
        if truth is None:
            return Finding(
                "quiet" if judged else "unknown",
                "What was really broken is not known here, so nobody can say whether that is right.",
                None,
                None,
            )
        if broken:
            return Finding("missed", f"Missed: {_broken(truth)}, and no alarm was raised.", None, None)
        return Finding(
            "quiet" if judged else "unknown", f"Right: nothing was broken.{f' {truth.how}' if truth.how else ''}", None, None
        )
    if truth is None:
        return Finding(
            "alarm", "What was really broken is not known here, so nobody can say whether that is right.", alarm, named
        )
    if not broken:
        return Finding("false", f"False alarm: nothing was broken.{f' {truth.how}' if truth.how else ''}", alarm, named)
    if fault_s is not None and alarm.to_s < fault_s:
        why = f"False alarm: it came {_duration(fault_s - alarm.to_s)} before the fault, which no later verdict noticed"
        return Finding("false", f"{why}; {_broken(truth)}.", alarm, named)
    delay = f", {_duration(alarm.to_s - fault_s)} after the fault" if fault_s is not None else ""
    if named is None:
        if not truth.node:
            return Finding("right", f"Right{delay}: {_broken(truth)}, and nobody was blamed.{too_early}", alarm, None)
        return Finding("wrong", f"Alarm{delay}, but nobody was named: {_broken(truth)}.{too_early}", alarm, None)
    top = named.suspects[0]
    if top.node != truth.node:
        return Finding("wrong", f"Wrong blame{delay}: {_broken(truth)}, not {top.node}.{too_early}", alarm, named)
    later = f" (named {_duration(named.to_s - alarm.to_s)} later)" if named is not alarm else ""
    other = "" if truth.rank in (None, top.rank) else f" Right node, but rank {truth.rank} was the broken one there."
    return Finding("right", f"Right{delay}{later}: {_broken(truth)}.{other}{too_early}", alarm, named)


def _broken(truth: Truth) -> str:
    what = f" ({truth.fault})"
    if not truth.node:
        return f"no single node was broken{what}"
    return f"{f'rank {truth.rank} on ' if truth.rank is not None else ''}{truth.node} was broken{what}"


def _hero(report: Report, found: Finding) -> str:
    window, alarm, suspect = report.window, found.alarm, found.suspect
    if alarm is None:
        counts = Counter(v.decision for v in report.verdicts)
        last = report.verdicts[-1] if report.verdicts else None
        if last is None:
            sentence, reason = "No verdict was recorded, so nothing can be said.", ""
        elif found.kind == "missed":
            sentence, reason = "No alarm was raised, although something was broken.", last.reason
        elif found.kind == "unknown":
            idle = counts[Decision.NOT_APPLICABLE] >= counts[Decision.UNSURE]
            sentence = "This is no busy training job, so nothing was judged." if idle else "Nothing could be judged."
            reason = last.reason
        else:
            sentence = f"No anomaly in {_duration(window.end_s - window.start_s + window.step_s)}."
            reason = f"{counts[Decision.NORMAL]} of {len(report.verdicts)} verdicts say normal; the last one: {last.reason}."
    else:
        when = f"since {_utc(alarm.to_s)}"
        if suspect is None:
            sentence = f"The whole job is in trouble {when}; no single node is to blame."
        else:
            rest = len({s.node for s in (found.named or alarm).suspects}) - 1
            more = f" and {rest} more {_plural(rest, 'node')}" if rest else ""
            sentence = f"Rank {suspect.rank} on {suspect.node}{more} is the suspect {when}."
        reason = (found.named or alarm).reason
    cards = []
    if alarm is not None:
        told = found.named or alarm
        cards.append(("Since", _utc(alarm.to_s), f"{clock(alarm.to_s - _origin(window))} into the recording"))
        fault_s = report.truth.at_s if report.truth and report.truth.fault != "none" else None
        if fault_s is not None and alarm.to_s >= fault_s:
            cards.append(("After the fault", _duration(alarm.to_s - fault_s), f"fault at {_utc(fault_s)}"))
        agreed = sum(1 for vote in told.votes.values() if vote)
        if told.rule:
            cards.append(("Decided by", f"rule “{told.rule}”", "a fact, without a vote"))
        else:
            cards.append(("Decided by", f"vote, {agreed} of {len(told.votes)}", _abstained(told)))
        cards.append(("Cause", told.category.value if told.category else "unknown", _scope(told)))
    cards.append(_done(report))
    boxes = "".join(
        tag("div", tag("dt", esc(name)) + tag("dd", tag("b", esc(value)) + (tag("span", esc(small)) if small else "")))
        for name, value, small in cards
    )
    check = tag("p", tag("strong", _sign(found, report.truth)) + " " + esc(found.check), class_="check")
    return (
        tag("h1", esc(sentence))
        + (tag("p", esc(reason[0].upper() + reason[1:]), class_="reason") if reason else "")
        + check
        + tag("dl", boxes, class_="cards")
    )


def _sign(found: Finding, truth: Truth | None) -> str:
    if truth is None:
        return "?"
    return "✗" if found.kind in ("wrong", "missed", "false") else "✓"


def _abstained(verdict: Verdict) -> str:
    count = sum(1 for vote in verdict.votes.values() if vote is None)
    return f"{count} abstained" if count else "nobody abstained"


def _scope(verdict: Verdict) -> str:
    return {Scope.JOB: "concerns the whole job", Scope.NODE: "concerns the node", Scope.RANK: "concerns the rank"}.get(
        verdict.scope or Scope.JOB, ""
    )


def _done(report: Report) -> tuple[str, str, str]:
    """Return (heading, what was decided or done, how that went): the card about actions."""
    planned = list(dict.fromkeys(f"{a.kind.value} {a.target}" for plan in report.plans for a in plan.actions))
    acted = [o for o in _newest(report.outcomes) if o.result is not Result.OBSERVED]
    if acted:
        return "What was done", ", ".join(dict.fromkeys(_deed(o) or o.detail for o in acted)), _success(report, acted)
    if not planned:
        return "Decided to do", "nothing", report.plans[0].reason if report.plans else "no plan was made"
    told = "observed only; nothing was touched" if report.outcomes else "planned only; nothing was carried out"
    return "Decided to do", ", ".join(planned), told


def _newest(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return one outcome of each operation. A journal may tell of one twice, observed and acted: a deed counts for more."""
    newest: dict[str, Outcome] = {}
    for outcome in outcomes:
        if outcome.result is not Result.OBSERVED or outcome.operation_id not in newest:
            newest[outcome.operation_id] = outcome
    return list(newest.values())


def _deed(outcome: Outcome) -> str:
    """Return what came of an action in words, empty when its operation has a foreign name."""
    named = operation_of(outcome.operation_id)
    if named is None:
        return ""
    kind, target = named[1].kind, named[1].target
    return {
        Result.OBSERVED: f"would {kind} {target}",
        Result.DONE: f"{_PAST[kind]} {target}",
        Result.TRANSIENT: f"failed to {kind} {target}",
        Result.PERMANENT: f"did not {kind} {target}",
        Result.AMBIGUOUS: f"perhaps {_PAST[kind]} {target}",
    }[outcome.result]


def _success(report: Report, acted: Sequence[Outcome]) -> str:
    """Return why something that was planned was not done, or else what became of the job."""
    failed = next((o for o in acted if o.result is not Result.DONE), None)
    begun = [named for o in acted if (named := operation_of(o.operation_id))]
    tried, incidents = {action for _, action in begun}, {incident for incident, _ in begun}
    rest = [
        f"{a.kind.value} {a.target}"
        for plan in report.plans
        for a in plan.actions
        if plan.incident_id in incidents and a not in tried
    ]
    told = [failed.detail] if failed else []
    told += [f"not tried: {', '.join(dict.fromkeys(rest))}"] if rest else []
    if report.recovery is not None and not told:
        told = [_heir(report.recovery) + _after_fault(report.recovery)]
    return "; ".join(told) or "all that was planned"


def _axis(report: Report, left: float, right: float) -> TimeAxis:
    return TimeAxis(_origin(report.window), report.window.end_s, left, right)


def _origin(window: Window) -> float:
    return window.start_s - window.step_s


def _marks(report: Report, found: Finding) -> list[Mark]:
    marks, truth = [], report.truth
    if truth is not None and truth.fault != "none" and truth.at_s is not None:
        marks.append(Mark(truth.at_s, "fault", f"fault: {truth.fault}, {clock(truth.at_s - _origin(report.window))}"))
    if found.alarm is not None:
        marks.append(
            Mark(found.alarm.to_s, "verdict", f"first anomalous verdict, {clock(found.alarm.to_s - _origin(report.window))}")
        )
    return marks


def _spans(report: Report) -> list[Span]:
    """Decisions as stretches. A verdict holds until the next one; where the next is late, that is missing, not normal."""
    verdicts, end_s = report.verdicts, report.window.end_s
    stamps = [v.to_s for v in verdicts]
    usual_s = float(np.median(np.diff(stamps))) if len(stamps) > 1 else report.window.step_s
    spans: list[Span] = []
    done_s = _origin(report.window)
    for verdict, next_s in zip(verdicts, [*stamps[1:], end_s], strict=False):
        if verdict.to_s - done_s > 1.5 * usual_s:
            spans.append(Span(done_s, verdict.to_s, "missing", "no verdict"))
        kind = verdict.decision.value
        told = f"{_SAID[verdict.decision]} from {_utc(verdict.to_s)}: {verdict.reason}"
        begun = spans.pop() if spans and spans[-1].kind == kind else Span(verdict.to_s, verdict.to_s, kind, told)
        done_s = next_s if next_s - verdict.to_s <= 2.5 * usual_s else verdict.to_s + usual_s
        spans.append(replace(begun, to_s=done_s))
    if end_s - done_s > 1.5 * usual_s:
        spans.append(Span(done_s, end_s, "missing", "no verdict"))
    return spans


def _timeline(report: Report, found: Finding) -> str:
    window, truth = report.window, report.truth
    lanes: list[tuple[str, Sequence[Span]]] = []
    if truth is not None and truth.fault != "none" and truth.at_s is not None:
        what = f"{_broken(truth)}. {truth.how}"
        lanes.append(("truth", [Span(truth.at_s, window.end_s, "truth", what, truth.fault)]))
    lanes.append(("decisions", _spans(report)))
    if report.incidents:
        spans = [
            Span(i.opened_s, i.closed_s if i.closed_s is not None else window.end_s, "incident", i.reason,
                 f"{', '.join(i.nodes) or 'whole job'}, {i.state.value}")
            for i in report.incidents
        ]  # fmt: skip
        lanes.append((_plural(len(spans), "incident"), spans))
    if report.outcomes:
        told = [f"{_deed(o) or o.result.value}: {o.detail}" for o in report.outcomes]
        spans = [Span(o.started_s, o.ended_s, "action", text) for o, text in zip(report.outcomes, told, strict=True)]
        lanes.append(("actions", spans))
    counts = Counter(v.decision for v in report.verdicts)
    summary = ", ".join(f"{counts[d]} {_SAID[d]}" for d in Decision if counts[d]) or "no verdict"
    drawn = charts.timeline(
        "Decisions over time", f"{summary}.", _axis(report, 92, charts.WIDTH - 20), lanes, _marks(report, found)
    )
    present = [d.value for d in Decision if counts[d]]
    keys = [*present, *(["missing"] if any(s.kind == "missing" for s in _spans(report)) else [])]
    names = {d.value: f"{_SAID[d]} ({counts[d]})" for d in Decision} | {"missing": "no verdict"}
    caption = (
        f"{_utc(_origin(window), day=True)} to {_utc(window.end_s, day=True)}; the axis counts minutes:seconds from the start."
    )
    return _figure(drawn, _legend([(k, names[k]) for k in keys]), caption)


def _recovery(recovery: Recovery) -> str:
    kind, sameness = _sameness(recovery)
    back = max(recovery.lost_steps, 0)
    told = f"{_heir(recovery)}; the job went on from step {recovery.restored_step}, "
    told += f"{back} {_plural(back, 'step')} back" if back else "without losing a step"
    told += (f", {_taken(recovery)} after the fault" if recovery.phases else "") + sameness
    parts = [
        tag("h2", "Recovery"),
        tag("p", tag("strong", {"right": "✓", "wrong": "✗", "unknown": "?"}[kind]) + " " + esc(told), class_="check"),
        tag("h3", "From the fault to the first new step"),
        _phases(recovery),
        tag("h3", "Loss by step"),
        _losses(recovery),
        tag("h3", "What was restored"),
        _restores(recovery),
        tag("h3", "Saves compared"),
        _saves(recovery),
    ]
    return tag("section", "".join(parts), class_=f"long {kind}")


def _heir(recovery: Recovery) -> str:
    return f"{recovery.evicted} was taken out and {recovery.spare or 'nobody'} took its place"


def _after_fault(recovery: Recovery) -> str:
    return f"; the job went on {_taken(recovery)} after the fault" if recovery.phases else "; the job went on"


def _taken(recovery: Recovery) -> str:
    return quantity(sum(length_s for _, length_s in recovery.phases), "seconds")


def _sameness(recovery: Recovery) -> tuple[str, str]:
    """Return (``right``, ``wrong`` or ``unknown``, how the job compares with the unbroken run, to follow in a sentence).

    Equality is claimed only of what both runs told of after the restored step; the data count for more than `identical`.
    """
    loss, steady = recovery.loss, recovery.steady_loss
    different = [step for step in loss.keys() & steady.keys() if _distance(loss[step], steady[step])]
    different += [step for step, ours, theirs in recovery.saves if theirs and ours != theirs]
    if different:
        early = ", which is before the restored step" if min(different) <= recovery.restored_step else ""
        return "wrong", f", and differs from the unbroken run from step {min(different)} on{early}"
    if not steady:
        return "unknown", ", and was not compared with an unbroken run"
    if not recovery.identical:
        return "wrong", ", and was not shown to equal the unbroken run"
    equal = ["every loss"] if any(step > recovery.restored_step for step in loss.keys() & steady.keys()) else []
    equal += ["every parameter"] if any(theirs and step > recovery.restored_step for step, _, theirs in recovery.saves) else []
    if not equal:
        return "unknown", ", and was not compared with the unbroken run after that step"
    only = {"every loss": "; parameters were not compared", "every parameter": "; the loss was not compared"}
    return "right", f"; {' and '.join(equal)} equals the unbroken run{only[equal[0]] if len(equal) == 1 else ''}"


def _distance(one: float, other: float) -> float:
    """Return the absolute difference: zero of two that are no number, infinite where only one is none."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    return abs(one - other) if math.isfinite(one) and math.isfinite(other) else math.inf


def _phases(recovery: Recovery) -> str:
    if not recovery.phases:
        return tag("p", "No phase was measured.", class_="empty")
    told = [f"{name}, {quantity(length_s, 'seconds')}" for name, length_s in recovery.phases]
    caption = f"{_taken(recovery)} from the fault to the first new step."
    drawn = charts.phases("Phases of the recovery", f"{caption} In order: {'; '.join(told)}.", recovery.phases)
    return _figure(drawn, _legend([(charts.phase_kind(k), f"{k + 1} {text}") for k, text in enumerate(told)]), caption)


def _losses(recovery: Recovery) -> str:
    loss, steady, restored = recovery.loss, recovery.steady_loss, recovery.restored_step
    lost = max(recovery.lost_steps, 0)
    if not loss and not steady:
        return tag("p", "No loss was told.", class_="empty")
    steps = [*(loss or steady), restored, restored + lost]  # the unbroken run may be longer, which is of no interest
    first, last = min(steps), max(max(steps), min(steps) + 1)
    around = 2 * max(lost, 5)
    near, far = max(restored - around, first), min(restored + lost + around, last)
    whole = ("Loss, the whole run", float(first), float(last))
    close = ("Loss around the restored step", float(near), float(far))
    difference = _difference(recovery)
    which = f"Steps {restored + 1} to {restored + lost} were" if lost > 1 else f"Step {restored + 1} was"
    again = f"{which} computed before the fault, lost, and computed again. " if lost else ""
    described = f"Restored at step {restored}. {again}{difference}"
    figures = [
        tag("figure", charts.losses(name, described, Axis(start, end, *CURVE_BOX), loss, steady, restored, lost))
        for name, start, end in ((whole, close) if near < far else (whole,))
    ]
    keys = [("line-steady", "the unbroken run")] if steady else []
    keys += [("line-before", "before the fault")] if any(step <= restored for step in loss) else []
    keys += [("lost", f"{lost} {_plural(lost, 'step')} lost"), ("line-again", "the same, computed again")] if lost else []
    keys += [("line-after", "new steps")] if any(step > restored + lost for step in loss) else []
    keys += [("line-restored", "restored"), ("line-fault", "fault")]
    keys += [("missing", "infinite or no number")] if not all(math.isfinite(value) for value in loss.values()) else []
    told = tag("p", esc(f"{again}{difference}"), class_="caption")
    return _legend(keys) + tag("div", "".join(figures), class_="grid2") + told


def _difference(recovery: Recovery) -> str:
    """Return the largest absolute difference of the losses, in a sentence."""
    loss, steady = recovery.loss, recovery.steady_loss
    apart = {step: _distance(loss[step], steady[step]) for step in sorted(loss.keys() & steady.keys())}
    if not apart:
        return "No loss of an unbroken run is known." if not steady else "No step was told of by both runs."
    step = max(apart, key=apart.__getitem__)
    over = f"Largest absolute difference over the {len(apart)} {_plural(len(apart), 'step')} that both runs told of:"
    if not apart[step]:
        return f"{over} exactly 0."
    finite = math.isfinite(apart[step])
    what = f"{number(apart[step])}, at step {step}" if finite else f"infinite, for at step {step} only one of them is a number"
    different = [step for step, difference in apart.items() if difference]
    return f"{over} {what}; {len(different)} {_plural(len(different), 'step')} differ, the first is {different[0]}."


def _restores(recovery: Recovery) -> str:
    if not recovery.restores:
        return tag("p", "No rank told what it restored.", class_="empty")
    rows = []
    for restore in sorted(recovery.restores, key=lambda restore: restore.rank)[:_MOST_RESTORES]:
        source = {"local": "this node's memory", "neighbour": f"memory of {restore.holder}"}.get(restore.source, restore.source)
        right = restore.step == recovery.restored_step
        step = str(restore.step) if right else f"{restore.step}, not {recovery.restored_step}"
        rows.append([
            tag("th", str(restore.rank), scope="row"), tag("td", esc(restore.node)), tag("td", esc(source)),
            tag("td", step, class_="num" if right else "num bad"),
            tag("td", quantity(restore.restore_s, "seconds"), class_="num"),
        ])  # fmt: skip
    counts = Counter(restore.source for restore in recovery.restores)
    named = {"local": "their own node's memory", "neighbour": "memory of another node"}
    slowest_s = max(restore.restore_s for restore in recovery.restores)
    told = ", ".join(
        f"{count} {_plural(count, 'rank')} from {named.get(source, source)}" for source, count in sorted(counts.items())
    )
    told = f"{told}; the slowest took {quantity(slowest_s, 'seconds')}."
    left = len(recovery.restores) - len(rows)
    told += f" {left} more {_plural(left, 'rank')} were left out." if left else ""
    return _table(["rank", "node", "from", "step", "took"], rows) + tag("p", esc(told), class_="caption")


def _saves(recovery: Recovery) -> str:
    if not recovery.saves:
        return tag("p", "No save was told.", class_="empty")
    rows = []
    for step, ours, theirs in recovery.saves[-_MOST_SAVES:]:
        same = "not compared" if not theirs else "same" if ours == theirs else "DIFFERENT"
        rows.append([
            tag("th", str(step), scope="row"), tag("td", tag("code", esc(ours))), tag("td", tag("code", esc(theirs or "–"))),
            tag("td", same, class_={"DIFFERENT": "bad", "not compared": "abstained"}.get(same, "")),
        ])  # fmt: skip
    earlier = recovery.saves[:-_MOST_SAVES]
    wrong = sum(1 for _, ours, theirs in earlier if theirs and ours != theirs)
    told = f"{len(earlier)} earlier {_plural(len(earlier), 'save')} left out, {wrong or 'none'} of them different."
    table = _table(["step", "parameters of this job", "of the unbroken run", ""], rows)
    return table + (tag("p", told, class_="caption") if earlier else "")


def _deviations(report: Report, found: Finding) -> tuple[tuple[str, ...], NDArray[np.float32]]:
    """Return (metrics, (R, M, T)) robust standard deviations from the peers, as the detectors see them, NaN where unobserved.

    Scale and permanent offsets come from the stretch before the fault or the first alarm. `peers.prepare` is not used because it
    bridges gaps, which a picture of what was observed must show.
    """
    window = report.window
    before = [mark.at - window.step_s for mark in _marks(report, found)]
    healthy = window
    if before and min(before) - window.start_s >= _LEAST_COLUMNS * window.step_s:
        healthy = window.before(min(before))
    try:
        scale = peers.fit_scale([healthy])
    except NoData:
        return (), np.full((len(window.ranks), 0, window.values_RMT.shape[2]), np.nan, dtype=np.float32)
    picked = window.select(scale.metrics)
    offset_RM = peers.offsets_RM(healthy.select(scale.metrics))
    raw_RMT: NDArray[np.float32] = (peers.differences_RMT(picked) - offset_RM[:, :, None]) / scale.scale_M.astype(np.float32)[
        None, :, None
    ]
    smooth_RMT = raw_RMT.copy()
    if raw_RMT.shape[2] >= 3:
        # like the detectors, so that one odd scrape is not a stripe; next to a gap the value stays as it is
        three = np.sort(np.stack([raw_RMT[:, :, :-2], raw_RMT[:, :, 1:-1], raw_RMT[:, :, 2:]]), axis=0)
        smooth_RMT[:, :, 2:] = np.where(np.isfinite(three[2]) & np.isfinite(raw_RMT[:, :, 2:]), three[1], raw_RMT[:, :, 2:])
    return scale.metrics, smooth_RMT


def _former(report: Report) -> dict[int, str]:
    """Return index of each rank that was placed anew -> the node it was on before; a window tells only the node of the end."""
    window, truth, recovery = report.window, report.truth, report.recovery
    index = {rank: r for r, rank in enumerate(window.ranks)}
    told = [(suspect.rank, suspect.node) for verdict in report.verdicts for suspect in verdict.suspects]
    if truth is not None and truth.rank is not None:
        told.append((truth.rank, truth.node))
    if recovery is not None:
        ends = zip(window.ranks, window.nodes, strict=True)
        told += [(rank, recovery.evicted) for rank, node in ends if node == recovery.spare]
    former: dict[int, str] = {}
    for rank, node in told:
        if node and rank in index and node != window.nodes[index[rank]]:
            former.setdefault(index[rank], node)
    return former


def _places(report: Report) -> list[str]:
    """(R,) the node of each rank in words, with the one before where it was placed anew."""
    former = _former(report)
    return [f"{former[r]}, then {node}" if r in former else node for r, node in enumerate(report.window.nodes)]


def _roles(report: Report, found: Finding) -> dict[int, str]:
    """Return index of each marked rank -> ``suspect`` or ``broken`` (the truth, where somebody else was blamed)."""
    window, truth = report.window, report.truth
    index = {rank: r for r, rank in enumerate(window.ranks)}
    named = found.named.suspects if found.named else ()
    roles = {index[s.rank]: "suspect" for s in named if s.rank in index}
    if truth is not None and truth.fault != "none" and truth.node:
        former = _former(report)
        there = [r for r, node in enumerate(window.nodes) if former.get(r, node) == truth.node]
        if truth.rank is not None or not any(r in there for r in roles):
            roles |= {r: "broken" for r in there if r not in roles and truth.rank in (None, window.ranks[r])}
    return roles


def _largest(deviation_RMT: NDArray[np.float32]) -> NDArray[np.float32]:
    """(R, T) largest absolute deviation over the metrics, NaN where none is known."""
    if not deviation_RMT.shape[1]:
        return np.full((len(deviation_RMT), deviation_RMT.shape[2]), np.nan, dtype=np.float32)
    return np.asarray(np.fmax.reduce(np.abs(deviation_RMT), axis=1), dtype=np.float32)


def _heatmap(report: Report, found: Finding, metrics: Sequence[str], deviation_RMT: NDArray[np.float32]) -> str:
    window = report.window
    worst_RT = _largest(deviation_RMT)
    compared = [window.metrics.index(m) for m in metrics or peers.compared(window)]
    observed_RT = np.asarray(np.isfinite(window.values_RMT[:, compared]).any(axis=1))
    roles = _roles(report, found)
    peak_R = np.fmax.reduce(np.nan_to_num(worst_RT), axis=1)
    kept = sorted(range(len(window.ranks)), key=lambda r: (r not in roles, -peak_R[r], r))[:MOST_ROWS]
    places = _places(report)
    seen = {node: place for place, node in reversed(list(enumerate(places)))}
    kept.sort(key=lambda r: (seen[places[r]], r))
    rows = [Row(window.ranks[r], places[r], roles.get(r, ""), roles.get(r, "")) for r in kept]
    level_RC = charts.levels_RT(worst_RT[kept], observed_RT[kept])
    others = [r for r in range(len(window.ranks)) if r not in roles]
    told = [f"{roles[r]} rank {window.ranks[r]} on {places[r]} reaches {number(peak_R[r])}" for r in list(roles)[:3]]
    if others and metrics:
        told.append(
            f"{'the highest other rank' if roles else 'the highest rank'} reaches {number(max(peak_R[r] for r in others))}"
        )
    gaps = float(1 - observed_RT.mean()) if observed_RT.size else 1.0
    told.append(f"{quantity(gaps, '1')} of the data are missing")
    described = f"Robust standard deviations from the peers: {'; '.join(told)}."
    drawn = charts.heatmap(
        "Deviation of each rank over time",
        described,
        _axis(report, 128, charts.WIDTH - 82),
        rows,
        level_RC,
        _marks(report, found),
    )
    keys = [(f"heat{k}", word) for k, word in enumerate(charts.LEVEL_WORDS)] if metrics else []
    keys += [("missing", "no data")] if (level_RC == charts.MISSING).any() else []
    keys += [("uncompared", "nobody to compare with")] if (level_RC == charts.UNCOMPARED).any() else []
    caption = described
    if len(kept) < len(window.ranks):
        caption += f" Shown are the {len(kept)} ranks that deviate most; {len(window.ranks) - len(kept)} rows were left out."
    if not metrics:
        caption += f" Fewer than {peers.MIN_PEERS} ranks do the same work, so nobody can be compared."
    return _figure(drawn, _legend(keys), caption)


def _chosen(report: Report, found: Finding, metrics: Sequence[str], deviation_RMT: NDArray[np.float32]) -> list[str]:
    """Return up to 6 metrics: facts that set a marked rank apart, then those in which one deviates most since the first mark."""
    window, roles = report.window, _roles(report, found)
    marks = _marks(report, found)
    since_T = window.stamps_T >= min((m.at for m in marks), default=window.start_s) - 1e-6
    focus = _focus(roles)
    others = sorted((m for m in peers.compared(window) if m not in metrics), key=lambda m: -_spread(window.column_RT(m)))
    if not metrics:
        return others[:6]
    recent_RMT = deviation_RMT[:, :, since_T] if since_T.any() else deviation_RMT
    own_RMT = recent_RMT[focus] if focus and np.isfinite(recent_RMT[focus]).any() else recent_RMT
    strength_M = [_high(own_RMT[:, m]) for m in range(len(metrics))]
    ranked = [metrics[m] for m in sorted(range(len(metrics)), key=lambda m: (-strength_M[m], metrics[m]))]
    strong = sum(s >= charts.LEVELS[0] for s in strength_M)
    facts = [m for m in window.metrics if m not in metrics and any(_apart(window, m, r, since_T) for r in focus)][:2]
    return list(dict.fromkeys([*facts, *ranked, *others]))[: 6 if strong + len(facts) > 4 else 4]


def _focus(roles: dict[int, str]) -> list[int]:
    """Return the ranks whose curves stand out: the first suspect, and the first that was really broken where that is another."""
    return [next(r for r in roles if roles[r] == kind) for kind in ("suspect", "broken") if kind in roles.values()]


def _high(values: NDArray[np.float32]) -> float:
    seen = np.abs(values[np.isfinite(values)])
    return float(np.quantile(seen, 0.9)) if seen.size else -1.0


def _spread(values: NDArray[np.float32]) -> float:
    seen = values[np.isfinite(values)].astype(np.float64)
    return float(seen.std() / (abs(seen.mean()) + 1e-9)) if seen.size else -1.0


def _apart(window: Window, metric: str, rank: int, since_T: NDArray[np.bool_]) -> bool:
    """Whether a fact that detectors do not compare (a process is gone, a link is down) sets this rank apart from all others."""
    values_RT = window.column_RT(metric)[:, since_T]
    own, others = values_RT[rank], np.delete(values_RT, rank, axis=0)
    if not np.isfinite(own).any() or not np.isfinite(others).any():
        return False
    size = float(np.nanmax(np.abs(values_RT)))
    return size > 0 and abs(float(np.nanmedian(own)) - float(np.nanmedian(others))) > 0.4 * size


def _curves(report: Report, found: Finding, metrics: Sequence[str], deviation_RMT: NDArray[np.float32]) -> str:
    window = report.window
    roles = _roles(report, found)
    focus = {r: roles[r] for r in _focus(roles)}
    axis = _axis(report, *CURVE_BOX)
    figures = []
    chosen = _chosen(report, found, metrics, deviation_RMT)
    for metric in chosen:
        values_RT = window.column_RT(metric)
        group = window.groups[next(iter(focus))] if focus else None
        members = [r for r in range(len(window.ranks)) if r not in focus and group in (None, window.groups[r])]
        row = BY_COLUMN.get(metric)
        drawn = charts.curves(
            metric, window.unit(metric), axis, values_RT, _median(values_RT[members]), focus, _marks(report, found)
        )
        small = [tag("span", esc(row.help))] if row else []
        if metric in metrics and focus:
            strength = _high(deviation_RMT[next(iter(focus)), metrics.index(metric), -max(1, values_RT.shape[1] // 10) :])
            apart = f"{number(strength)} standard deviations from its peers" if strength >= charts.LEVELS[0] else "Like its peers"
            small += [tag("span", f"{apart} at the end")] if strength >= 0 else []
        figures.append(tag("figure", drawn + tag("figcaption", " ".join(small))))
    if not figures:
        return tag("p", "No metric was observed.", class_="empty")
    keys = [("line-suspect", "suspect")] if "suspect" in focus.values() else []
    keys += [("line-broken", "really broken")] if "broken" in focus.values() else []
    keys += [("line-median", "median of the peers" if focus else "median of all ranks"), ("line-peer", "every other rank")]
    keys += [("line-fault", "fault")] if any(m.kind == "fault" for m in _marks(report, found)) else []
    keys += [("line-verdict", "first anomalous verdict")] if found.alarm else []
    gaps = any(not np.isfinite(window.column_RT(m)[list(focus)]).all() for m in chosen)
    keys += [("missing", "no data of the marked rank")] if gaps else []
    places = _places(report)
    who = [f"{kind}: rank {window.ranks[r]} on {places[r]}" for r, kind in focus.items()]
    text = f"{'; '.join(who) or 'Nobody is suspected; these metrics spread most'}. " + (
        f"0:00 is {_utc(_origin(window), day=True)}, the end is {_utc(window.end_s, day=True)}."
    )
    return (
        _legend(keys) + tag("div", "".join(figures), class_="grid2") + tag("p", esc(text[0].upper() + text[1:]), class_="caption")
    )


def _median(values_RT: NDArray[np.float32]) -> NDArray[np.float32]:
    """Median over ranks without numpy's warning for columns of nothing but NaN."""
    known_T = np.isfinite(values_RT).any(axis=0)
    out_T = np.full(values_RT.shape[1], np.nan, dtype=np.float32)
    out_T[known_T] = np.nanmedian(values_RT[:, known_T], axis=0)
    return out_T


def _votes(report: Report, found: Finding) -> str:
    told = found.named or found.alarm
    parts = []
    if told is not None:
        count = sum(1 for vote in told.votes.values() if vote)
        if told.rule:
            text = f"The rule “{told.rule}” decided without a vote at {_utc(told.to_s)}; the votes are given for comparison."
        else:
            text = f"{count} of {len(told.votes)} detectors agreed at {_utc(told.to_s)}; no rule was involved."
        parts.append(tag("p", esc(text)))
    detectors = list(dict.fromkeys(name for v in report.verdicts for name in v.votes))
    if detectors:
        rows = []
        for name in detectors:
            votes = Counter(v.votes.get(name) for v in report.verdicts)
            cell = _vote(told.votes.get(name)) if told is not None else tag("td", "–")
            rows.append(
                [tag("th", esc(name), scope="row"), cell, *(tag("td", str(votes[v]), class_="num") for v in (True, False, None))]
            )
        head = ["detector", "at this verdict" if told else "at an anomalous verdict", "fired, ticks", "did not fire", "abstained"]
        parts.append(_table(head, rows))
    else:
        parts.append(tag("p", "No detector voted.", class_="empty"))
    named: dict[tuple[int, str], list[Verdict]] = {}
    for verdict in report.verdicts:
        for suspect in verdict.suspects:
            named.setdefault((suspect.rank, suspect.node), []).append(verdict)
    if named:
        rows = []
        for (rank, node), verdicts in sorted(named.items(), key=lambda item: -len(item[1]))[:20]:
            score = max(s.score for v in verdicts for s in v.suspects if (s.rank, s.node) == (rank, node))
            rows.append([
                tag("th", f"rank {rank}", scope="row"), tag("td", esc(node)), tag("td", str(len(verdicts)), class_="num"),
                tag("td", number(score), class_="num"),
                tag("td", _utc(verdicts[0].to_s)), tag("td", _utc(verdicts[-1].to_s)),
            ])  # fmt: skip
        left = f" {len(named) - 20} more were left out." if len(named) > 20 else ""
        parts.append(tag("h3", "Everybody who was named"))
        parts.append(_table(["suspect", "node", "verdicts", "highest score (above 1 = anomalous)", "first", "last"], rows))
        parts.append(tag("p", left, class_="caption") if left else "")
    return "".join(parts)


def _vote(vote: bool | None) -> str:
    sign = {True: "●", False: "○", None: "–"}[vote]
    return tag("td", f'<span aria-hidden="true">{sign}</span> {_AGREE[vote]}', class_=_AGREE[vote].replace(" ", "-"))


def _incidents(report: Report) -> str:
    parts = []
    if report.incidents:
        rows = [
            [tag("th", tag("code", esc(i.id)), scope="row"), tag("td", esc(", ".join(i.nodes) or "whole job")),
             tag("td", esc(i.category.value)), tag("td", _utc(i.opened_s)),
             tag("td", _utc(i.closed_s) if i.closed_s is not None else "still open"),
             tag("td", str(i.verdict_count), class_="num"), tag("td", esc(i.reason))]
            for i in report.incidents
        ]  # fmt: skip
        parts.append(_table(["incident", "nodes", "cause", "opened", "closed", "verdicts", "reason"], rows))
    else:
        parts.append(tag("p", "No incident was opened.", class_="empty"))
    parts.append(tag("h3", "Plan"))
    if report.plans:
        rows = [
            [tag("th", tag("code", esc(p.incident_id)), scope="row"),
             tag("td", esc(", then ".join(f"{a.kind.value} {a.target}" for a in p.actions) or "nothing")),
             tag("td", esc(p.reason))]
            for p in report.plans
        ]  # fmt: skip
        parts.append(_table(["incident", "actions, in order", "reason"], rows))
    else:
        parts.append(tag("p", "Nothing was planned.", class_="empty"))
    parts.append(tag("h3", "Outcomes"))
    if report.outcomes:
        rows = [
            [tag("th", tag("code", esc(o.operation_id)), scope="row"), tag("td", esc(_deed(o) or "–")),
             tag("td", esc(o.result.value), class_="" if o.result in (Result.DONE, Result.OBSERVED) else "bad"),
             tag("td", esc(o.detail)), tag("td", _utc(o.started_s)),
             tag("td", _duration(max(o.ended_s - o.started_s, 0.0)), class_="num")]
            for o in report.outcomes
        ]  # fmt: skip
        parts.append(_table(["operation", "what was done", "result", "detail", "started", "took"], rows))
    else:
        parts.append(tag("p", "Nothing was carried out.", class_="empty"))
    return "".join(parts)


def _ranks(report: Report, found: Finding) -> str:
    window, roles, places = report.window, _roles(report, found), _places(report)
    share_R = np.isfinite(window.values_RMT).any(axis=1).mean(axis=1)
    rows = [
        [tag("th", str(rank), scope="row"), tag("td", esc(places[r])), tag("td", esc(window.groups[r] or "–")),
         tag("td", f"{number(share_R[r] * 100)} %", class_="num"), tag("td", roles.get(r, ""), class_=roles.get(r, ""))]
        for r, rank in enumerate(window.ranks[:_MOST_LISTED])
    ]  # fmt: skip
    table = _table(["rank", "node", "group of equals", "observed", ""], rows)
    left = len(window.ranks) - _MOST_LISTED
    return table + (tag("p", f"{left} more ranks were left out.", class_="caption") if left > 0 else "")


def _made(report: Report) -> str:
    window = report.window
    R, M, T = window.values_RMT.shape
    models = list(dict.fromkeys(v.model for v in report.verdicts if v.model))
    facts = [
        ("Job", window.job),
        ("Recorded", f"{_utc(_origin(window), day=True)} to {_utc(window.end_s, day=True)}"),
        ("Sampling interval", quantity(window.step_s, "seconds")),
        ("Size", f"{R} ranks, {M} metrics, {T} instants, {len(report.verdicts)} verdicts"),
        ("Model", ", ".join(models) or "none was ready"),
        ("Version", f"Eagle Eye {__version__}"),
    ]
    listed = "".join(tag("div", tag("dt", esc(name)) + tag("dd", esc(value))) for name, value in facts)
    said = [text for text in (report.setup, *report.notes) if text]
    if report.truth is not None and report.truth.how:
        said.append(report.truth.how)
    return tag("dl", listed, class_="facts") + (tag("ul", "".join(tag("li", esc(text)) for text in said)) if said else "")


def _figure(drawn: str, legend: str, caption: str) -> str:
    return tag("figure", legend + tag("div", drawn, class_="scroll") + tag("figcaption", esc(caption)))


def _legend(keys: Sequence[tuple[str, str]]) -> str:
    """Return the legend; a key that starts with ``line-`` is drawn as a line, every other as a filled square."""
    items = []
    for kind, word in keys:
        if kind.startswith("line-"):
            name = kind.removeprefix("line-")
            style = f"mark {name}" if name in ("fault", "verdict", "restored") else f"line {name}"
            shape = tag("svg", f'<path class="{style}" d="M1 7H25"/>', width=26, height=14, aria_hidden="true")
        else:
            shape = tag(
                "svg",
                f'<rect class="{kind}" x="1" y="1" width="18" height="12" rx="2"/>',
                width=20,
                height=14,
                aria_hidden="true",
            )
        items.append(tag("li", shape + esc(word)))
    return tag("ul", "".join(items), class_="legend") if items else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = tag("thead", tag("tr", "".join(tag("th", esc(name), scope="col") for name in head)))
    return tag("div", tag("table", top + tag("tbody", "".join(tag("tr", "".join(row)) for row in rows))), class_="scroll")


def _utc(at_s: float, day: bool = False) -> str:
    return datetime.fromtimestamp(round(at_s), UTC).strftime("%Y-%m-%d %H:%M:%S UTC" if day else "%H:%M:%S UTC")


def _duration(duration_s: float) -> str:
    if duration_s < 10:
        return f"{duration_s:.1f} s"
    return (
        f"{duration_s:.0f} s"
        if duration_s < 120
        else f"{duration_s / 60:.3g} min"
        if duration_s < 7200
        else f"{duration_s / 3600:.3g} h"
    )


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"


def _sha256(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
