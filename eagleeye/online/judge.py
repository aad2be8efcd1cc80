"""One job, tick by tick: window in, verdict out. The same code judges live jobs and replays."""

import contextlib
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from eagleeye.detectors import applicability, base, diagnosis, ensemble, peers, rules, whole_job
from eagleeye.detectors.base import Score
from eagleeye.detectors.ensemble import Ensemble
from eagleeye.detectors.rules import Limits
from eagleeye.errors import ModelMismatch, NoData
from eagleeye.online import vote
from eagleeye.online.evidence import Evidence
from eagleeye.records import Category, Decision, Scope, Suspect, Verdict
from eagleeye.window import Window


@dataclass(frozen=True, slots=True)
class Settings:
    """Section ``[online]``: how jobs are judged and served."""

    learn_s: float = 600.0
    """A job is compared with itself only after this much normal work; until then the verdict is unsure."""
    policy: str = "default"
    """Who votes and how: ``default``, or ``transom`` for the majority of three of the paper."""
    members: tuple[str, ...] = ()
    """Members of the policy that take part; all when empty. For comparisons."""
    rules: bool = True
    """Whether facts (fatal log lines, lost links, vanished processes) may bypass the vote."""
    false_alarms: float = 1.0
    """False alarms per 1000 GPU-days that one member of the vote may raise. Less means later alarms for small deviations."""
    model: str = "champion"
    """Alias or version in the registry; ``none`` learns each job from its own first minutes alone."""
    tick_s: float = 5.0
    """Time between two looks at a live job."""
    confirm_s: float = 10.0
    """Even the strongest evidence must last this long, and two ticks, before a vote blames anybody."""
    stall_s: float = 10.0
    """No finished step on any rank for this long (and for six usual steps) means that the job stands still."""
    log_lines: int = 10
    """Error lines of one node in its sliding window that make it a suspect."""
    address: str = "127.0.0.1"
    """Where verdicts are served."""
    port: int = 9471
    """Port of the service; 0 picks a free one."""

    def __post_init__(self) -> None:
        if self.policy not in vote.POLICIES:
            raise ValueError(f"no policy is called {self.policy!r}; there are {', '.join(vote.POLICIES)}")
        known = (*self.voting.weights, *self.voting.job_weights)
        for name in self.members:
            if name not in known:
                raise ValueError(f"no member of the policy {self.policy} is called {name!r}; there are {', '.join(known)}")
        if not 0 < self.false_alarms <= 1e6:
            raise ValueError(f"false_alarms must lie between 0 and 1000000, not {self.false_alarms}")
        if self.log_lines < 1:
            raise ValueError(f"log_lines must be at least 1, not {self.log_lines}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port {self.port} does not exist; use 0 to 65535")

    @property
    def voting(self) -> vote.Policy:
        """Who votes and how."""
        return vote.POLICIES[self.policy]

    @property
    def limits(self) -> Limits:
        """When the rules speak."""
        return Limits(stall_s=self.stall_s, log_lines=self.log_lines)


HARD = ("gpu_sm_clock", "ib_", "network_", "gpu_temperature", "silent")
FAR = 6.0
SOFT_PATIENCE = 3.0
"""See `Judge._patience_R`."""

SHARED = ("gpu_tensor_active", "ib_receive", "ib_transmit_bytes", "network_receive", "network_transmit", "collective_wait")
CHANGE_POINTS, CHANGE_RATIO = 6, 1.2
"""See `Judge._who_changed`."""

SECOND_NODE_S = 30.0
"""A further node is named beside the first only after it was suspected without a break for this long."""

STOPPED_S = 120.0
"""A job that worked and then is idle for this long, and twice as long as it paused before, has stopped."""

STOPPED_TOLD_S = 30.0
"""That a job stopped is told for so long; whoever restarts it knows by then."""

LONG_PAUSE_S, WARM_UP_S = 30.0, 180.0
"""After a pause seen for the first length a job may be slow for the second: caches are cold, and batches compile."""

FIRST_S = 60.0
"""After this much work a job is compared with itself for the first time, with double thresholds."""

SUSPICIOUS = 0.2
"""While a member holds this share of the evidence that it needs against anybody, nothing new is taken for normal."""

ONSET_S = 30.0
"""A later lesson ends this long before the present."""

GROWING = (2.0, 4.0)
"""Learned anew after these multiples of `learn_s`."""

WANDER_RATIO = 0.25
"""Share of a threshold by which a permanent difference that was learned from `learn_s` may be wrong; less with a longer past."""

MOVED = 1.0
"""A permanent difference that moves by this many robust standard deviations between two lessons is no permanent one."""


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """What a stretch of a job's own normal work taught.

    Attributes
    ----------
    work_s : length of the stretch
    roles : (R,) groups of ranks that do the same work
    own : the detectors, fitted on it or on other jobs
    offset_RM, jump_GM : permanent differences between ranks, and the largest jumps of their groups, of the metrics of `own`
    past : the job as a whole
    level : metric -> (R,) mean of each rank
    """

    work_s: float
    roles: tuple[str, ...]
    own: Ensemble
    offset_RM: NDArray[np.float32]
    jump_GM: NDArray[np.float32]
    past: whole_job.Past
    level: Mapping[str, NDArray[np.float32]]


@dataclass(slots=True)
class Judge:
    """Remembers of one job what it learned in its first minutes and the evidence so far.

    `model` is a fitted ensemble of other jobs, named `model_name`; without one the job's own first minutes are all there is.
    """

    settings: Settings
    model: Ensemble | None = None
    model_name: str = "own past"
    _members: tuple[tuple[int, str], ...] = ()
    _busy_s: float = 0.0
    _clean_s: float = 0.0
    _apart: str = ""
    _last_s: float | None = None
    _idle_since_s: float | None = None
    _warm_s: float = -np.inf
    _since_s: dict[str, float] = field(default_factory=dict)
    _named: str = ""
    _evidence: Evidence = field(init=False)
    _before: list[Score] = field(default_factory=list)
    _cannot: str = ""
    lesson: Lesson | None = None
    """The newest lesson, None while nothing was learned."""
    blamed: tuple[int, ...] = ()
    """Indices of the ranks with a majority against them at the newest tick."""
    held: tuple[int, ...] = ()
    """The same of the tick before: they stay blamed until they look as well as in normal work."""
    spared: dict[int, str] = field(default_factory=dict)
    """Index -> why a rank with a majority against it is not named."""
    scores: list[Score] = field(default_factory=list)
    """What each member said at the newest tick."""
    evidence: list[Score] = field(default_factory=list)
    """The same, accumulated over ticks: above 1 = the member votes for it."""

    def __post_init__(self) -> None:
        self._evidence = Evidence(self.settings.false_alarms, self.settings.confirm_s)

    @staticmethod
    def longest_s(settings: Settings, step_s: float) -> float:
        """How much past the longest lesson needs."""
        return max(settings.learn_s, ensemble.least_points() * step_s) * GROWING[-1] + ONSET_S + step_s

    def length_s(self, step_s: float) -> float:
        """How much past a window must bring for the next verdict: more when there is something to learn."""
        coming_s = next((s for s in self._lessons_s(step_s) if s > self._work_s), 0.0)
        learning_s = coming_s if self._busy_s + self.settings.tick_s + step_s >= coming_s else 0.0
        return (max(round(learning_s / step_s), ensemble.PAST_POINTS, ensemble.least_points()) + 1) * step_s

    def judge(self, window: Window) -> Verdict:
        """Return the verdict for the end of `window`. Nothing later than the window's end is known or used."""
        self.scores, self.evidence, self._before = [], [], self.evidence
        self.held, self.blamed, self.spared = self.blamed, (), {}
        window = _watched(window)
        members = tuple(zip(window.ranks, window.nodes, strict=True))
        if members != self._members:
            # another set of ranks is another job as far as permanent differences go
            self._members, self.lesson, self.held = members, None, ()
            self._busy_s = self._clean_s = 0.0
            self._evidence.forget()
        window = self._in_roles(window)
        passed_s = window.step_s if self._last_s is None else window.end_s - self._last_s
        self._last_s = window.end_s
        reason = applicability.missing(window)
        if reason:
            return self._say(window, Decision.UNSURE, reason)
        idle = applicability.not_applicable(window) or _begun_again(window)
        if not idle:
            # a pause in the watching is no work that was watched
            self._busy_s += min(passed_s, 2 * max(window.step_s, self.settings.tick_s))
        worked = self._busy_s > 0
        finding = rules.check(window, self.settings.limits) if self.settings.rules and (worked or not idle) else None
        if finding and finding.ranks and not rules.ended(window):
            return self._by_rule(window, finding)
        if idle and finding is None:
            return self._stopped(window, idle) or self._say(window, Decision.NOT_APPLICABLE, idle)
        if self._idle_since_s is not None and window.end_s - self._idle_since_s >= LONG_PAUSE_S:
            self._warm_s = window.end_s + WARM_UP_S
        self._idle_since_s = None
        waiting = self._learn(window)
        window = self._in_roles(window)
        if self._apart:
            return self._say(window, Decision.NOT_APPLICABLE, self._apart)
        verdict = self._by_vote(window, max(passed_s, 1e-3), waiting)
        self._clean_s = 0.0 if verdict.decision is Decision.ANOMALOUS else self._clean_s + passed_s
        if finding and verdict.decision is not Decision.ANOMALOUS:
            return self._by_rule(window, finding)
        silent = applicability.missing(window, share=0.0)
        if silent and verdict.decision is Decision.NORMAL:
            return self._say(window, Decision.UNSURE, silent, votes=dict(verdict.votes))
        return verdict

    @property
    def _work_s(self) -> float:
        """How much work was learned from."""
        return self.lesson.work_s if self.lesson else 0.0

    @property
    def wander(self) -> float:
        """What is taken off every score of a rank: permanent differences wander, and a short past tells little of how much."""
        return WANDER_RATIO * self.settings.learn_s / self._work_s if self._work_s >= self.settings.learn_s else 0.0

    def _in_roles(self, window: Window) -> Window:
        return replace(window, groups=self.lesson.roles) if self.lesson else window

    def _stopped(self, window: Window, idle: str) -> Verdict | None:
        """Say that a job that worked has stopped, with no phase and no end to explain it, for longer than it ever paused."""
        if self._idle_since_s is None:
            self._idle_since_s = window.end_s
        stood_s = window.end_s - self._idle_since_s
        longest_s = self.lesson.past.pause_points * window.step_s if self.lesson else np.inf
        limit_s = max(STOPPED_S, 2 * longest_s)
        explained = rules.ended(window) or window.has("train_phase") or window.has("process_up")
        if explained or not self.settings.rules or self._work_s < self.settings.learn_s:
            return None
        if not limit_s <= stood_s <= limit_s + max(STOPPED_TOLD_S, window.step_s):
            return None
        if applicability.not_applicable(window.last(window.step_s)) is None:
            return None  # it works again
        reason = f"the job stopped working {stood_s:.0f} s ago, longer than it ever paused, and nothing tells why: {idle}"
        return self._say(window, Decision.ANOMALOUS, reason, scope=Scope.JOB, category=Category.UNKNOWN, rule="stopped")

    def _learn(self, window: Window) -> str | None:
        """Learn the job's own normal work as it grows; return why it does not suffice for a verdict yet, or None.

        Nothing is learned anew while somebody is suspected.
        """
        needed_s = max(self.settings.learn_s, ensemble.least_points() * window.step_s)
        watched_s = min(self._busy_s, window.end_s - window.start_s + window.step_s)
        waiting = f"{self._cannot}learning what is normal for this job: {watched_s:.0f} of {needed_s:.0f} s"
        due = [s for s in self._lessons_s(window.step_s) if self._work_s < s <= watched_s + window.step_s / 2]
        suspicious = any(np.nanmax(s.score_R, initial=0.0) > SUSPICIOUS for s in self._before)
        waited = self._busy_s >= 2 * needed_s and self._work_s < needed_s
        if due and (not suspicious or waited) and (self._work_s < needed_s or self._clean_s >= due[-1]):
            # what began a moment ago is not yet seen by anybody, and must not be learned
            before = window.before(window.end_s - ONSET_S) if self._work_s >= needed_s else window
            past = before.last(due[-1])
            past = replace(past, groups=peers.roles(past))
            self._apart = applicability.out_of_step(past) or ""
            if self._apart:
                self._busy_s = 0.0
                return waiting
            try:
                own = self.model or ensemble.fit([past])
            except NoData as error:
                self._busy_s, self._cannot = 0.0, f"{error}; "
                return str(error)
            offset_RM = own.job_offsets(past)
            if self.lesson and self._work_s >= needed_s:
                offset_RM = _kept_where_it_moved(self.lesson.own, self.lesson.offset_RM, own, offset_RM)
            with warnings.catch_warnings(action="ignore"):  # of ranks that were never heard
                level = {m: np.nanmean(past.column_RT(m), axis=1) for m in past.metrics}
            self.lesson = Lesson(due[-1], past.groups, own, offset_RM, own.job_jumps(past), whole_job.learn(past), level)
            self._cannot = ""
            self._evidence.forget()
        return waiting if self._work_s < needed_s - window.step_s / 2 else None

    def _lessons_s(self, step_s: float) -> list[float]:
        """Return after how much work there is something to learn: the first minutes, `learn_s`, and multiples of it."""
        least_s = ensemble.least_points() * step_s
        needed_s = max(self.settings.learn_s, least_s)
        return [max(FIRST_S, least_s), needed_s, *(needed_s * times for times in GROWING)]

    def _heard(self, window: Window) -> tuple[list[Score], list[Score]]:
        """Return what the members say of ranks, and of the job. Raises ModelMismatch."""
        policy, chosen, lesson = self.settings.voting, self.settings.members, self.lesson
        if lesson:
            whole = whole_job.scores(lesson.past, window)
            each = lesson.own.score(window, lesson.offset_RM, whole_job.unfamiliar(lesson.past, window), lesson.jump_GM)
        else:
            own = ensemble.shipped(window)
            unknown_RM = np.zeros((len(window.ranks), len(own.scale.metrics) if own else 0), np.float32)
            each, whole = own.score(window, unknown_RM) if own else [], []
        if self._work_s < self.settings.learn_s:
            # little was seen of this job: whoever is to be blamed must lie out twice as far
            each, whole = ([replace(s, score_R=s.score_R / 2) for s in scores] for scores in (each, whole))
        each = [replace(s, score_R=np.maximum(s.score_R - self.wander, 0.0)) for s in each]
        if window.end_s < self._warm_s:
            warm = base.abstain(whole_job.JOB_CHANGE, window, "the job warms up after a pause")
            whole = [warm if s.detector == whole_job.JOB_CHANGE else s for s in whole]
        taking = [s for s in (*each, *whole) if not chosen or s.detector in chosen]
        return [s for s in taking if s.detector in policy.weights], [s for s in taking if s.detector in policy.job_weights]

    def _by_vote(self, window: Window, passed_s: float, waiting: str | None) -> Verdict:
        """Return the verdict of the vote; while the job is being learned only what lies out far is told."""
        try:
            of_ranks, of_job = self._heard(window)
        except ModelMismatch as error:
            return self._say(window, Decision.UNSURE, str(error))
        policy = self.settings.voting
        self.scores = [*of_ranks, *of_job]
        if policy.by_task and not waiting and of_ranks:
            return self._blame(window, vote.by_task(of_ranks), of_ranks)
        own = self.lesson.own if self.lesson else None
        tails, memory = (own.tails, own.memory | whole_job.MEMORY_POINTS) if own else ({}, {})
        patience_R = self._patience_R(of_ranks) if of_ranks else 1.0
        patience = {whole_job.JOB_CHANGE: SOFT_PATIENCE}
        self.evidence = evidence = self._evidence.add(self.scores, tails, memory, passed_s, patience_R, patience)
        votes = self._nobody() | {s.detector: s.fired for s in evidence}
        least = min(2.0, sum(policy.weights[s.detector] for s in of_ranks))
        ballot = vote.tally(of_ranks, policy.weights, evidence[: len(of_ranks)], least, self.held) if of_ranks else None
        whole = vote.tally(of_job, policy.job_weights, evidence[len(of_ranks) :], 1.0) if of_job else None
        self.blamed = ballot.suspects if ballot else ()
        blame = None
        if ballot and ballot.suspects and not policy.by_task:
            blame = self._blame(window, replace(ballot, votes=votes), of_ranks)
            if blame.decision is Decision.ANOMALOUS:
                return blame
        if whole and whole.suspects:
            return self._whole(window, votes)
        if blame and blame.decision is Decision.UNSURE:
            return blame
        if waiting:
            return self._say(window, Decision.UNSURE, waiting, votes=votes)
        if not (ballot and ballot.judged) and not (whole and whole.judged):
            why = "; ".join(f"{s.detector}: {s.abstained}" for s in self.scores if s.abstained)
            return self._say(window, Decision.UNSURE, why or "too few members could judge", votes=votes)
        doing = whole_job.phase(self.lesson.past, window) if self.lesson else None
        if doing:
            return self._say(window, Decision.NOT_APPLICABLE, doing, votes=votes)
        unjudged = int((~np.isfinite(ballot.strength_R)).sum()) if ballot else 0
        reason = "no rank differs from its peers" + (f"; {unjudged} ranks could not be judged" if unjudged else "")
        return self._say(window, Decision.NORMAL, reason, votes=votes)

    def _patience_R(self, of_ranks: list[Score]) -> NDArray[np.float64]:
        """Return (R,) how many times the usual patience a rank deserves.

        A neighbour on the same machine, or a pause of the program, costs a rank some use, power and time for some seconds; it
        does not lower a clock or fill a port. Whoever lies out very far needs no patience either.
        """
        strength_R = np.nan_to_num(vote.majority_R(of_ranks, self.settings.voting.weights, 0.0))
        worst = next((s for s in of_ranks if s.detector == "peer_deviation"), of_ranks[0])
        hard_R = np.array([name.startswith(HARD) for name in worst.evidence])
        return np.where(hard_R | (strength_R >= FAR), 1.0, SOFT_PATIENCE)

    def _blame(self, window: Window, ballot: vote.Ballot, scores: list[Score]) -> Verdict:
        """Say whom the ballot blames. Whoever lies out furthest must be the sure one: his neighbours only suffer from him."""
        suspects = list(ballot.suspects)
        if not suspects or np.nanmax(ballot.strength_R) > ballot.strength_R[suspects[0]]:
            return self._say(window, Decision.NORMAL, "no rank differs from its peers for sure", votes=ballot.votes)
        suspects = self._who_changed(window, suspects, scores)
        if suspects:
            suspects = self._lasting(window, suspects)
        best = suspects[0] if suspects else ballot.suspects[0]
        nodes = {window.nodes[i] for i in suspects or ballot.suspects}
        agreed = [s.detector for s in scores if ballot.votes.get(s.detector)]
        evidence = [s.evidence[best] for s in scores if s.score_R[best] > 1.0]
        kind = diagnosis.category(evidence)
        if len(nodes) > max(1, len(set(window.nodes)) / 2):
            reason = f"{len(nodes)} of {len(set(window.nodes))} nodes deviate at once, so the cause is not one of them"
            return self._say(window, Decision.ANOMALOUS, reason, scope=Scope.JOB, category=kind, votes=ballot.votes)
        if not suspects:
            reason = "ranks of equal role deviate from each other, and their own past does not tell which of them is well"
            return self._say(window, Decision.UNSURE, reason, votes=ballot.votes)
        newest_RM = diagnosis.newest_RM(window)
        named = tuple(
            Suspect(
                window.ranks[i],
                window.nodes[i],
                round(max(float(ballot.strength_R[i]), 1.01), 2),
                diagnosis.describe(window, i, [s.evidence[i] for s in scores], newest_RM),
            )
            for i in suspects
        )
        top = named[0]
        what = f"differs from its peers: {top.evidence}" if top.evidence else "fell silent when the job came to stand still"
        reason = f"rank {top.rank} on {top.node} {what} ({', '.join(agreed)} agree)"
        whole = min(Counter(window.nodes[i] for i in suspects).values()) > 1
        return self._say(
            window,
            Decision.ANOMALOUS,
            reason,
            scope=Scope.NODE if whole else Scope.RANK,
            category=kind,
            votes=ballot.votes,
            suspects=named,
        )

    def _who_changed(self, window: Window, suspects: list[int], scores: list[Score]) -> list[int]:
        """Return the suspects that changed against their own past, and not only against peers that did.

        Where half of a group is sick, the median lies between the halves and both deviate alike. Metrics that change for
        everybody who waits (tensor activity, traffic, waiting itself) tell nothing here.
        """
        lying_out = next((s for s in scores if s.detector == "peer_deviation"), None)
        if lying_out is None or self.lesson is None:
            return suspects
        change: dict[str, NDArray[np.float32]] = {}
        kept = []
        for i in suspects:
            metric = lying_out.evidence[i]
            if metric not in self.lesson.level or metric.startswith(SHARED):
                kept.append(i)
                continue
            if metric not in change:
                usual_R, newest_RT = self.lesson.level[metric], window.column_RT(metric)[:, -CHANGE_POINTS:]
                change[metric] = np.abs(np.where(np.isfinite(newest_RT), newest_RT, usual_R[:, None]).mean(axis=1) - usual_R)
            others = change[metric][diagnosis.peers_R(window, i)]
            others = others[np.isfinite(others)]
            if len(others) and change[metric][i] < CHANGE_RATIO * np.median(others):
                self.spared[i] = f"its own {metric} changed no more than that of its peers, so that one of them may be the cause"
            else:
                kept.append(i)
        return kept

    def _lasting(self, window: Window, suspects: list[int]) -> list[int]:
        """Return the suspects without those on further nodes that were not suspected for a while: two nodes at once are rare."""
        nodes = {window.nodes[i] for i in suspects}
        self._since_s = {node: self._since_s.get(node, window.end_s) for node in nodes}
        first = window.nodes[suspects[0]]
        if self._since_s[first] > min(self._since_s.values()) and self._named in nodes:
            first = self._named
        self._named = first
        waiting = {n for n in nodes if n != first and self._since_s[n] > window.end_s - SECOND_NODE_S}
        why = f"{first} is blamed, and a second node must be suspected for {SECOND_NODE_S:g} s on end"
        self.spared |= {i: why for i in suspects if window.nodes[i] in waiting}
        return [i for i in suspects if window.nodes[i] not in waiting]

    def _whole(self, window: Window, votes: dict[str, bool | None]) -> Verdict:
        """Say that the job as a whole is in trouble: nobody in it is to blame as far as the data tell."""
        if votes.get(whole_job.FLAT_TOGETHER):
            reason, kind = (
                "the GPUs are in use, but nothing is computed or sent any more, and nothing tells the ranks apart",
                Category.HANG,
            )
        else:
            reason, kind = "the whole job became slower than it was, and nothing tells the ranks apart", Category.UNKNOWN
        return self._say(window, Decision.ANOMALOUS, reason, scope=Scope.JOB, category=kind, votes=votes)

    def _by_rule(self, window: Window, finding: rules.Finding) -> Verdict:
        """A rule speaks without a vote; where it knows the node alone, the rank there with the strongest score stands for it."""
        strength_R = np.zeros(len(window.ranks))
        votes: dict[str, bool | None] = self._nobody()
        if self.lesson:
            with contextlib.suppress(ModelMismatch):
                of_ranks, of_job = self._heard(window)
                self.scores = [*of_ranks, *of_job]
                votes |= {s.detector: s.fired for s in self.scores}
                if of_ranks:
                    strength_R = np.nan_to_num(vote.majority_R(of_ranks, self.settings.voting.weights, 0.0))
        missing_R = ~np.asarray(np.isfinite(window.values_RMT[:, :, -1]).any(axis=1))
        best: dict[str, int] = {}
        for i in sorted(finding.ranks, key=lambda i: (-int(missing_R[i]), -strength_R[i], i)):
            best.setdefault(window.nodes[i], i)
        suspects = tuple(
            Suspect(window.ranks[i], window.nodes[i], round(max(float(strength_R[i]), 1.01), 2), finding.rule)
            for i in best.values()
        )
        return self._say(
            window,
            Decision.ANOMALOUS,
            finding.reason,
            scope=finding.scope,
            category=finding.category,
            suspects=suspects,
            votes=votes,
            rule=finding.rule,
        )

    def _nobody(self) -> dict[str, bool | None]:
        """Return the votes of a tick at which nobody was asked."""
        policy = self.settings.voting
        return {
            m: None for m in (*policy.weights, *policy.job_weights) if not self.settings.members or m in self.settings.members
        }

    def _say(
        self, window: Window, decision: Decision, reason: str, *, scope: Scope | None = None, category: Category | None = None,
        suspects: tuple[Suspect, ...] = (), votes: dict[str, bool | None] | None = None, rule: str | None = None,
    ) -> Verdict:  # fmt: skip
        if votes is None:
            self._evidence.forget()
        return Verdict(
            job=window.job,
            from_s=window.start_s,
            to_s=window.end_s,
            decision=decision,
            reason=reason,
            scope=scope,
            category=category,
            suspects=suspects,
            votes=votes or self._nobody(),
            rule=rule,
            model=self.model_name if self.lesson else "",
        )


def _kept_where_it_moved(
    before: Ensemble, before_RM: NDArray[np.float32], after: Ensemble, after_RM: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the new permanent differences, with the old one where it moved by more than chance: no slow fault is learned."""
    out_RM = after_RM.copy()
    for m, metric in enumerate(after.scale.metrics):
        if metric in before.scale.metrics:
            old_R = before_RM[:, before.scale.metrics.index(metric)]
            moved_R = np.abs(after_RM[:, m] - old_R) > MOVED * after.scale.scale_M[m]
            out_RM[moved_R, m] = old_R[moved_R]
    return out_RM


def _begun_again(window: Window) -> str | None:
    """Return why ranks cannot be compared yet when one came back to life within what the detectors remember, else None."""
    if not window.has("process_up"):
        return None
    up_RT = window.column_RT("process_up")[:, -applicability.MEMORY_POINTS :]
    back_R = (up_RT[:, -1] > 0) & (up_RT == 0).any(axis=1)
    return "ranks were started a moment ago" if back_R.any() else None


def _watched(window: Window) -> Window:
    """Return the window without what was never measured, and without the instants before anything of the job was."""
    window = applicability.without_repeats(window)
    seen_T = np.isfinite(window.values_RMT).any(axis=(0, 1))
    first = int(np.argmax(seen_T)) if seen_T.any() else 0
    return window.last((window.values_RMT.shape[2] - first) * window.step_s)
