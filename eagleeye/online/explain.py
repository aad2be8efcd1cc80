"""Why this rank was blamed, and why that one was not: the grounds of one verdict in numbers and sentences.

`keep` takes from a judge what its newest verdict rests on, cheaply, at every tick; `explain` makes an `Explanation` of that when
somebody asks, and `text` writes it for people. All are pure. Nothing is judged a second time: scores and evidence are the
verdict's own.
"""

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagleeye.detectors import diagnosis, whole_job
from eagleeye.detectors.base import Score
from eagleeye.detectors.ensemble import Ensemble
from eagleeye.detectors.peers import MIN_PEERS, compared
from eagleeye.detectors.thresholds import Tail
from eagleeye.errors import DataError, NoData, SourceUnavailable, UsageError
from eagleeye.online import vote
from eagleeye.online.judge import Judge, Settings
from eagleeye.online.replay import windows
from eagleeye.quantities import number, quantity
from eagleeye.records import Decision, Scope, Verdict, from_json
from eagleeye.source.trace import TraceSource
from eagleeye.window import Window

KEPT_POINTS = 3
"""Newest instants that are kept of a window: whoever is missing in all of them is unknown to the detectors."""


RUNNERS_UP = 2
METRICS = 4
"""Metrics that are told of a rank, unless its judges name more."""

APART_SPREADS = 3.0
"""A fact that differs by so many robust standard deviations is told."""

NEGLIGIBLE_RATIO = 0.1
"""A permanent difference below this share of the spread between peers is not worth telling."""

TIMEOUT_S = 10.0

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MemberView:
    """What one member of the vote says of the whole job.

    `vote` is None when it abstained, and `abstained` tells why. `rank` is the one that it holds for the strangest, None for a
    member that speaks of the job alone; `score` and `evidence` are that rank's.
    """

    name: str
    weight: float
    of_job: bool
    vote: bool | None
    abstained: str
    rank: int | None
    score: float | None
    evidence: float | None


@dataclass(frozen=True, slots=True)
class Opinion:
    """What one member says of one rank, by its worst metric: `score` now and `evidence` so far, above 1 = anomalous, enough."""

    member: str
    score: float | None
    evidence: float | None
    metric: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of a rank beside its peers, in base units of `unit`.

    `peers` and `spread` are their median and robust standard deviation now, without the rank; `usual` is the permanent
    difference to them that was learned. `deviations`: how far off the rank is beyond that, signed, in learned robust standard
    deviations of healthy ranks. None = unknown.
    """

    metric: str
    unit: str
    own: float | None
    peers: float | None
    spread: float | None
    usual: float | None
    deviations: float | None


@dataclass(frozen=True, slots=True)
class RankView:
    """Why one rank was blamed or not; `score` and `evidence` are what a majority of its judges reaches, None where too few do."""

    rank: int
    node: str
    group: str
    peers: int
    blamed: bool
    score: float | None
    evidence: float | None
    opinions: tuple[Opinion, ...]
    metrics: tuple[Comparison, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The grounds of one verdict. `false_alarms` per 1000 GPU-days and member is what `evidence` was gathered for."""

    verdict: Verdict
    policy: str
    false_alarms: float
    ranks_total: int
    members: tuple[MemberView, ...]
    ranks: tuple[RankView, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Grounds:
    """What a verdict rests on: the newest instants of its window, what the members said, what had been learned, if anything."""

    verdict: Verdict
    window: Window
    settings: Settings
    scores: tuple[Score, ...]
    evidence: tuple[Score, ...]
    own: Ensemble | None = None
    offset_RM: NDArray[np.float32] | None = None
    past: whole_job.Past | None = None
    held: tuple[int, ...] = ()
    """Indices of the ranks that were blamed at the tick before."""
    spared: Mapping[int, str] = field(default_factory=dict)
    """Index -> why a rank with a majority against it is not named."""


def keep(judge: Judge, window: Window, verdict: Verdict) -> Grounds:
    """Return the grounds of the verdict that `judge` gave of `window` just now: copies a few instants, computes nothing."""
    newest = window.last(KEPT_POINTS * window.step_s)
    newest = replace(newest, values_RMT=newest.values_RMT.copy())
    scores, evidence, lesson = tuple(judge.scores), tuple(judge.evidence), judge.lesson
    grounds = Grounds(verdict, newest, judge.settings, scores, evidence, held=judge.held, spared=dict(judge.spared))
    return replace(grounds, own=lesson.own, offset_RM=lesson.offset_RM, past=lesson.past) if lesson else grounds


def lost(grounds: Grounds, verdict: Verdict) -> Grounds:
    """Return the grounds of a verdict given without a look at the job: nothing of the tick before is known to be true now."""
    nothing = replace(grounds.window, values_RMT=np.full_like(grounds.window.values_RMT, np.nan))
    return replace(grounds, verdict=verdict, window=nothing, scores=(), evidence=(), held=(), spared={})


def replayed(source: TraceSource, judge: Judge) -> Iterator[Grounds]:
    """Yield the grounds of each verdict of a replay, the same verdicts as `replay.verdicts`."""
    for window in windows(source, judge):
        yield keep(judge, window, judge.judge(window))


def tick_s(source: TraceSource, end_s: float) -> float:
    """Return the stamp of the last tick of a trace at or before `end_s`.

    Raises
    ------
    UsageError
        `end_s` lies outside of the trace.
    """
    stamps_s = source.stamps_s
    count = int(np.searchsorted(stamps_s, end_s + 1e-3, side="right"))
    if count == 0 or end_s >= stamps_s[-1] + source.step_s:
        span = f"from {_utc(stamps_s[0])} to {_utc(stamps_s[-1])}"
        raise UsageError(f"{source.folder} goes {span}; the time to explain lies outside of that")
    return float(stamps_s[count - 1])


def at(source: TraceSource, judge: Judge, end_s: float | None = None) -> Grounds:
    """Replay a trace up to `end_s`, else to the first anomalous verdict or its end; return the grounds of the last verdict.

    Raises as `tick_s` does.
    """
    stop_s = np.inf if end_s is None else tick_s(source, end_s)
    for stamp_s, grounds in zip(source.stamps_s, replayed(source, judge), strict=True):
        if stamp_s >= stop_s or (end_s is None and grounds.verdict.decision is Decision.ANOMALOUS):
            break
    return grounds


# ---- numbers


@dataclass(frozen=True, slots=True, eq=False)
class _Count:
    """The vote of one verdict, counted as the judge did."""

    of_ranks: tuple[Score, ...]
    held: tuple[Score, ...]
    """Evidence of the same members; none for a policy that does not gather any, nor where a rule was first."""
    weights: dict[str, float]
    strength_R: Floats
    decided_R: Floats
    agreed: tuple[int, ...]
    """Indices of the ranks against which there is a majority, furthest out first."""


def _count(grounds: Grounds) -> _Count:
    policy = grounds.settings.voting
    of_ranks = tuple(s for s in grounds.scores if s.detector in policy.weights)
    held = tuple(s for s in grounds.evidence if s.detector in policy.weights)
    nobody_R = np.full(len(grounds.window.ranks), np.nan)
    weights = {s.detector: policy.weights[s.detector] for s in of_ranks}
    if not of_ranks:
        return _Count((), (), weights, nobody_R, nobody_R, ())
    if policy.by_task and not held:
        ballot = vote.by_task(of_ranks)
        return _Count(of_ranks, (), weights, ballot.strength_R, nobody_R, ballot.suspects)
    least = min(2.0, sum(weights.values()))
    ballot = vote.tally(of_ranks, weights, held or None, least, grounds.held)
    decided_R = vote.majority_R(held, weights, least) if held else nobody_R
    return _Count(of_ranks, held, weights, ballot.strength_R, decided_R, ballot.suspects if held else ())


def explain(grounds: Grounds, ranks: Sequence[int] = ()) -> Explanation:
    """Explain a verdict, with `ranks` in particular; without any: the suspects and the two that lie out furthest after them.

    Raises
    ------
    UsageError
        The job has no such rank.
    """
    window, verdict = grounds.window, grounds.verdict
    check_ranks(window.job, window.ranks, ranks)
    count = _count(grounds)
    suspects = [s.rank for s in verdict.suspects]
    if not ranks:
        order = np.argsort(np.where(np.isfinite(count.strength_R), -count.strength_R, np.inf), kind="stable")
        others = [window.ranks[i] for i in order if np.isfinite(count.strength_R[i]) and window.ranks[i] not in suspects]
        ranks = [*suspects, *others[:RUNNERS_UP]]
    newest_RM = diagnosis.newest_RM(window)
    doubtful = whole_job.unfamiliar(grounds.past, window) if grounds.past else {}
    return Explanation(
        verdict,
        grounds.settings.policy,
        grounds.settings.false_alarms,
        len(window.ranks),
        _members(grounds),
        tuple(_rank(grounds, count, newest_RM, doubtful, window.ranks.index(rank)) for rank in dict.fromkeys(ranks)),
    )


def check_ranks(job: str, known: Sequence[int], asked: Sequence[int]) -> None:
    """Raise UsageError when somebody asks for a rank that the job does not have."""
    for rank in asked:
        if rank not in known:
            raise UsageError(f"job {job} has no rank {rank}; there are {_ranges(known)}")


def _members(grounds: Grounds) -> tuple[MemberView, ...]:
    policy = grounds.settings.voting
    said, held = ({s.detector: s for s in scores} for scores in (grounds.scores, grounds.evidence))
    out = []
    for name, its_vote in grounds.verdict.votes.items():
        of_job = name in policy.job_weights
        score = said.get(name)
        rank, value, evidence, abstained = None, None, None, "was not asked"
        if score is not None and score.abstained is None:
            i = int(np.nanargmax(score.score_R))
            rank, value, abstained = None if of_job else grounds.window.ranks[i], _known(score.score_R[i]), ""
            evidence = _known(held[name].score_R[i]) if name in held else None
        elif score is not None:
            abstained = str(score.abstained)
        weight = policy.job_weights[name] if of_job else policy.weights.get(name, 1.0)
        out.append(MemberView(name, weight, of_job, its_vote, abstained, rank, value, evidence))
    return tuple(out)


def _rank(grounds: Grounds, count: _Count, newest_RM: Floats, doubtful: Mapping[str, float], i: int) -> RankView:
    window, peers_R = grounds.window, diagnosis.peers_R(grounds.window, i)
    held = {s.detector: s for s in count.held}
    opinions = [
        Opinion(
            s.detector,
            _known(s.score_R[i]),
            _known(held[s.detector].score_R[i]) if s.detector in held else None,
            s.evidence[i],
        )
        for s in count.of_ranks
    ]
    by_strength = sorted((o for o in opinions if o.score is not None), key=lambda o: -(o.score or 0.0))
    named = [o.metric for o in by_strength if window.has(o.metric)]
    every = {m: _comparison(grounds, newest_RM, peers_R, doubtful, i, m) for m in window.metrics}
    furthest = sorted((m for m in every if every[m].deviations is not None), key=lambda m: -abs(every[m].deviations or 0.0))
    # rules speak of facts, which no member compares
    facts = [m for m in every if m not in compared(window) and _apart(every[m])] if grounds.verdict.rule else []
    chosen = list(dict.fromkeys([*facts, *named, *furthest]))[: max(METRICS, len({*facts, *named}))]
    return RankView(
        window.ranks[i],
        window.nodes[i],
        window.groups[i],
        int(peers_R.sum()),
        window.ranks[i] in [s.rank for s in grounds.verdict.suspects],
        _known(count.strength_R[i]),
        _known(count.decided_R[i]),
        tuple(opinions),
        tuple(every[m] for m in chosen),
        _why(grounds, count, i),
    )


def _comparison(
    grounds: Grounds, newest_RM: Floats, peers_R: NDArray[np.bool_], doubtful: Mapping[str, float], i: int, metric: str
) -> Comparison:
    window, own = grounds.window, grounds.own
    m = window.metrics.index(metric)
    value = newest_RM[i, m]
    means = newest_RM[peers_R, m]
    means = means[np.isfinite(means)]
    if len(means) < MIN_PEERS - 1:
        return Comparison(metric, window.unit(metric), _known(value), None, None, None, None)
    # of means, not of all values: where everybody changes between two instants, their median would lie on either side
    middle = np.median(means)
    spread = 1.4826 * np.median(np.abs(means - middle))
    usual = deviations = np.nan
    if own is not None and grounds.offset_RM is not None and metric in own.scale.metrics:
        known = own.scale.metrics.index(metric)
        usual = float(grounds.offset_RM[i, known])
        beyond = value - middle - usual
        if metric in doubtful:
            # as in Ensemble.score: where permanent differences may not hold, the smaller of both readings counts
            bare = value - middle
            beyond = 0.0 if bare * beyond < 0 else min(bare, beyond, key=abs)
        deviations = beyond / own.scale.scale_M[known]
    return Comparison(
        metric, window.unit(metric), _known(value), _known(middle), _known(spread), _known(usual), _known(deviations)
    )


def _apart(fact: Comparison) -> bool:
    """Whether a fact plainly differs from the peers'."""
    if fact.own is None or fact.peers is None or fact.spread is None:
        return False
    return abs(fact.own - fact.peers) > APART_SPREADS * fact.spread


def _known(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


# ---- sentences


def _why(grounds: Grounds, count: _Count, i: int) -> str:
    """Return one sentence on why the rank at index `i` was blamed or not, the reason that decided first."""
    window, verdict, policy = grounds.window, grounds.verdict, grounds.settings.voting
    place = {s.rank: k for k, s in enumerate(verdict.suspects)}
    rank, strength, decided = window.ranks[i], count.strength_R[i], count.decided_R[i]
    if verdict.rule:
        if rank in place:
            return f"Blamed by the rule {verdict.rule}, without a vote: {verdict.reason}."
        others = f"names {_named(verdict)}" if verdict.suspects else "names nobody"
        return f"Not blamed: the rule {verdict.rule} decided without a vote and {others}; {_vote_on(grounds, count, i)}."
    if rank in place:
        return _why_blamed(grounds, count, i, place[rank])
    if verdict.decision is Decision.NOT_APPLICABLE:
        return f"Not blamed: {verdict.reason}, and nobody is compared meanwhile."
    if not _observed(window, i):
        return (
            f"Not blamed: nothing was observed of it in the last {number(KEPT_POINTS * window.step_s)} s, "
            "and what is missing is neither normal nor a fault of its own."
        )
    peers = int(diagnosis.peers_R(window, i).sum())
    if peers < MIN_PEERS - 1:
        ours = f"of its role ({window.groups[i]})" if window.groups[i] else "that do the same work"
        return f"Not blamed: there {_are(peers + 1, 'rank')} {ours}, and with fewer than {MIN_PEERS} nobody can say who is right."
    if not count.of_ranks:
        return f"Not judged: {verdict.reason}."
    if verdict.scope is Scope.JOB:
        if i in count.agreed:
            return f"Not blamed although a majority finds it anomalous: {verdict.reason}."
        return f"Not blamed: the job as a whole changed, so nobody is named; {_vote_on(grounds, count, i)}."
    if not np.isfinite(strength):
        return f"Not judged: too few members could say anything of it; {verdict.reason}."
    unsure = f"; the verdict is unsure besides ({verdict.reason})" if verdict.decision is Decision.UNSURE else ""
    if policy.by_task and not count.held:
        return f"Not blamed: {_vote_on(grounds, count, i)}{unsure}."
    if decided > 1.0 and strength > Tail.START:
        return f"Not blamed: {_next_to_another(grounds, count, i)}{unsure}."
    return f"Not blamed: {_vote_on(grounds, count, i)}{unsure}."


def _why_blamed(grounds: Grounds, count: _Count, i: int, place: int) -> str:
    first = grounds.verdict.suspects[0].rank
    if grounds.settings.voting.by_task:
        fired = [name for name, its_vote in grounds.verdict.votes.items() if its_vote]
        return f"Blamed: {_do(fired, 'fires', 'fire')}, more than half of the members, and no rank is stranger on average."
    for_it = [s.detector for s in count.held if s.score_R[i] > 1.0]
    where = "no rank lies out further"
    if place:
        share = count.strength_R[i] / count.strength_R[grounds.window.ranks.index(first)]
        where = f"it deviates {share:.2f} times as far as rank {first}, too much for a mere victim"
    return f"Blamed: {_do(for_it, 'has', 'have')} enough evidence against it ({_votes(count, i, for_it)}), and {where}."


def _next_to_another(grounds: Grounds, count: _Count, i: int) -> str:
    """Say why there is a majority against a rank, and somebody else is blamed or nobody."""
    ranks, strength_R = grounds.window.ranks, count.strength_R
    if i in grounds.spared:
        return grounds.spared[i]
    top = max(count.agreed, key=lambda k: strength_R[k], default=i)
    if strength_R[i] < vote.SHADOW_RATIO * strength_R[top]:
        return (
            f"it lies in the shadow of rank {ranks[top]}: it deviates {strength_R[i] / strength_R[top]:.2f} times as far, "
            f"and below {vote.SHADOW_RATIO:g} it is taken for a victim of that one"
        )
    furthest = ranks[int(np.nanargmax(strength_R))]
    return f"the evidence against it suffices, but rank {furthest} lies out further, is not sure yet and may be the cause"


def _vote_on(grounds: Grounds, count: _Count, i: int) -> str:
    """Say how far a rank is from a majority against it."""
    strength, decided = count.strength_R[i], count.decided_R[i]
    if not np.isfinite(strength):
        return "the members could not judge it"
    above = [s.detector for s in count.of_ranks if s.score_R[i] > 1.0]
    if not count.held:
        said = f"{_do(above, 'finds', 'find')} it anomalous" if above else "no member finds it anomalous"
        if grounds.settings.voting.by_task and count.agreed:
            return f"{said}, and this policy names the strangest rank alone, which is {grounds.window.ranks[count.agreed[0]]}"
        return said
    if strength <= Tail.START:
        said = (
            f"most of its judges see it at {strength:.2f} or below, where normal work reaches {Tail.START:g} and 1 is anomalous"
        )
        if decided > 1.0:
            return f"{said}; what it did before does not count any more"
        return f"{said}; {_do(above, 'alone makes', 'alone make')} no majority ({_votes(count, i, above)})" if above else said
    enough = [s.detector for s in count.held if s.score_R[i] > 1.0]
    score = f"its score is {strength:.2f}, where 1 is anomalous"
    lacks = f"the evidence is not enough yet: {max(decided, 0.0):.2f} of the 1 needed"
    who = (
        f"; {_do(enough, 'alone has', 'alone have')} enough, which is no majority ({_votes(count, i, enough)})" if enough else ""
    )
    return f"{score}, but {lacks} for {_rate(grounds.settings.false_alarms)}{who}"


def _votes(count: _Count, i: int, members: Sequence[str]) -> str:
    """``3 of 5 votes`` of those that judge the rank at index `i`."""
    judging = [s.detector for s in count.of_ranks if np.isfinite(s.score_R[i])]
    mine, total = (sum(count.weights[m] for m in judging if m in among) for among in (members, judging))
    return f"{mine:g} of {total:g} votes"


def _observed(window: Window, i: int) -> bool:
    signals = [window.metrics.index(m) for m in compared(window)]
    return bool(np.isfinite(window.values_RMT[i, signals]).any())


def _named(verdict: Verdict) -> str:
    return _list([f"rank {s.rank} on {s.node}" for s in verdict.suspects])


def _do(members: Sequence[str], one: str, several: str) -> str:
    """``lof has``, ``lof and knn_dtw have``."""
    return f"{_list(members)} {one if len(members) == 1 else several}"


def _list(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else (words[0] if words else "nobody")


def _are(count: int, what: str) -> str:
    return f"is 1 {what}" if count == 1 else f"are {count} {what}s"


def _rate(false_alarms: float) -> str:
    return f"at most {_are(1, 'false alarm')[3:] if false_alarms == 1 else f'{false_alarms:g} false alarms'} per 1000 GPU-days"


def _ranges(ranks: Sequence[int]) -> str:
    """``0 to 3, 7, 9``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    shown = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(shown[:20]) + (" and more" if len(shown) > 20 else "")


def _utc(at_s: float) -> str:
    told = datetime.fromtimestamp(round(at_s, 3), UTC)
    return told.isoformat(timespec="milliseconds" if told.microsecond else "seconds").replace("+00:00", "Z")


# ---- for people


def text(explanation: Explanation) -> str:
    """Return an explanation as lines that a person reads."""
    verdict = explanation.verdict
    rule = f", by the rule {verdict.rule}" if verdict.rule else ""
    lines = [
        f"job {verdict.job}, {_are(explanation.ranks_total, 'rank').split(' ', 1)[1]}, at {_utc(verdict.to_s)}: "
        f"{verdict.decision.value.replace('_', ' ')}{rule}: {verdict.reason}",
        "",
        *_table([("member", "weight", "vote", "strangest", "now", "evidence"), *(_member_cells(m) for m in explanation.members)]),
        "",
        _needed(explanation),
    ]
    for rank in explanation.ranks:
        lines += ["", *_rank_lines(rank)]
    return "\n".join(lines) + "\n"


def _needed(explanation: Explanation) -> str:
    if vote.POLICIES[explanation.policy].by_task:
        return (
            f"Policy {explanation.policy}: more than half of the members must fire, which they do above 1; none gathers evidence."
        )
    return (
        f"Policy {explanation.policy}: a rank is blamed when the evidence of members with more than half of the weight that "
        f"judges it reaches 1 ({_rate(explanation.false_alarms)} each). A score now above 1 is anomalous."
    )


def _member_cells(member: MemberView) -> tuple[str, ...]:
    said = {True: "yes", False: "no", None: "–"}[member.vote]
    about = member.abstained or ("the job" if member.of_job else f"rank {member.rank}")
    return (member.name, f"{member.weight:g}", said, about, _two(member.score), _two(member.evidence))


def _rank_lines(rank: RankView) -> list[str]:
    group = f" of {rank.group}" if rank.group else ""
    lines = [f"rank {rank.rank} on {rank.node}, {_are(rank.peers, 'peer').split(' ', 1)[1]}{group}", f"  {rank.why}"]
    judges = [o for o in rank.opinions if o.score is not None]
    if judges:
        rows = [(o.member, _two(o.score), _two(o.evidence), o.metric) for o in judges]
        rows.append(("majority", _two(rank.score), _two(rank.evidence), ""))
        lines += ["", *(f"  {line}" for line in _table([("member", "now", "evidence", "worst metric"), *rows]))]
    if rank.metrics:
        cells = [_comparison_cells(c) for c in rank.metrics]
        lines += ["", *(f"  {line}" for line in _table([("metric", "own", "peers", "usually apart", "deviations"), *cells]))]
    return lines


def _comparison_cells(c: Comparison) -> tuple[str, ...]:
    own, middle, spread = (quantity(np.nan if v is None else v, c.unit) for v in (c.own, c.peers, c.spread))
    usual = "–"
    if c.usual is not None:
        slight = abs(c.usual) <= NEGLIGIBLE_RATIO * (c.spread or 0.0)
        usual = "no" if slight else f"{'+' if c.usual >= 0 else '-'}{quantity(abs(c.usual), c.unit)}"
    off = "–" if c.deviations is None else f"{round(c.deviations, 1) + 0.0:+.1f}"
    return (c.metric, own, middle if c.peers is None else f"{middle} ± {spread}", usual, off)


def _two(value: float | None) -> str:
    return "–" if value is None else f"{round(value, 2) + 0.0:.2f}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


# ---- from a live scorer


def ask(scorer_url: str, job: str, ranks: Sequence[int] = ()) -> Explanation:
    """Return the explanation of a job's newest verdict that the scorer at `scorer_url` gives.

    Raises
    ------
    NoData
        It does not watch that job, or the job has no such rank.
    SourceUnavailable
        It does not answer, or what it says is no explanation.
    """
    query = urllib.parse.urlencode([("rank", rank) for rank in ranks])
    url = f"{scorer_url.rstrip('/')}/api/v1/jobs/{urllib.parse.quote(job, safe='')}/explain{'?' if query else ''}{query}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return from_json(Explanation, json.load(answer))
    except urllib.error.HTTPError as error:
        with error:
            raise _refused(url, error) from None
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", error)
        raise SourceUnavailable(
            f"the scorer at {scorer_url} does not answer ({why}); is `eagleeye score` running there?"
        ) from None
    except (ValueError, DataError) as error:
        raise SourceUnavailable(f"{url} gives no explanation ({error}); is it `eagleeye score` of this version?") from None


def _refused(url: str, error: urllib.error.HTTPError) -> NoData | SourceUnavailable:
    try:
        return NoData(str(json.load(error)["error"]))
    except (OSError, ValueError, KeyError, TypeError):
        return SourceUnavailable(f"{url} answers with status {error.code} and no reason; is it the service of `eagleeye score`?")
