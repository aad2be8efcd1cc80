"""One job, tick by tick: window in, verdict out. The same code judges live jobs and replays."""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from eagleeye.detectors import applicability, diagnosis, ensemble, rules
from eagleeye.detectors.base import Score
from eagleeye.detectors.ensemble import Ensemble
from eagleeye.errors import ModelMismatch, NoData
from eagleeye.online import vote
from eagleeye.records import Category, Decision, Scope, Suspect, Verdict
from eagleeye.window import Window


@dataclass(frozen=True, slots=True)
class Settings:
    """Section ``[online]``: how jobs are judged and served."""

    learn_s: float = 600.0
    """A job is compared with itself only after this much normal work; until then the verdict is unsure."""
    quorum: int = 2
    """Detectors that must agree."""
    model: str = "champion"
    """Alias or version in the registry; ``none`` learns each job from its own first minutes alone."""
    tick_s: float = 5.0
    """Time between two looks at a live job."""
    confirm_s: float = 10.0
    """A node is blamed by vote only when every tick of this long, and at least two, suspected it."""
    stall_s: float = 10.0
    """No finished step on any rank for this long (and for six usual steps) means that the job stands still."""
    log_lines: int = 10
    """Error lines of one node in its sliding window that make it a suspect."""
    address: str = "127.0.0.1"
    """Where verdicts are served."""
    port: int = 9471
    """Port of the service; 0 picks a free one."""

    def __post_init__(self) -> None:
        if not 1 <= self.quorum <= len(ensemble.DETECTORS):
            raise ValueError(f"quorum must lie between 1 and {len(ensemble.DETECTORS)}, not {self.quorum}")
        if self.log_lines < 1:
            raise ValueError(f"log_lines must be at least 1, not {self.log_lines}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port {self.port} does not exist; use 0 to 65535")

    @property
    def limits(self) -> rules.Limits:
        """When the rules speak."""
        return rules.Limits(stall_s=self.stall_s, log_lines=self.log_lines)


STRONG = 2.0
"""Twice the threshold needs no patience beyond `confirm_s`."""


@dataclass(slots=True)
class Judge:
    """Remembers of one job what it learned in its first minutes and what the last tick said.

    `model` is a fitted ensemble of other jobs, named `model_name`; without one the job's own first minutes are all there is.
    """

    settings: Settings
    model: Ensemble | None = None
    model_name: str = "own past"
    _offset_RM: NDArray[np.float32] | None = None
    _members: tuple[tuple[int, str], ...] = ()
    _busy_s: float = 0.0
    _last_s: float | None = None
    _own: Ensemble | None = None
    _since_s: dict[str, float] = field(default_factory=dict)
    _fresh_since_s: dict[str, float] = field(default_factory=dict)
    _cannot: str = ""
    scores: list[Score] = field(default_factory=list)

    def length_s(self, step_s: float) -> float:
        """How much past a window must bring for the next verdict."""
        return (max(round(self.settings.learn_s / step_s), ensemble.PAST_POINTS, ensemble.least_points()) + 1) * step_s

    def judge(self, window: Window) -> Verdict:
        """Return the verdict for the end of `window`. Nothing later than the window's end is known or used."""
        self.scores = []
        window = _watched(window)
        members = tuple(zip(window.ranks, window.nodes, strict=True))
        if members != self._members:
            # another set of ranks is another job as far as permanent differences go
            self._members, self._offset_RM, self._own, self._busy_s, self._since_s = members, None, None, 0.0, {}
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
        finding = rules.check(window, self.settings.limits) if worked or not idle else None
        if finding and finding.ranks and not rules.ended(window):
            return self._by_rule(window, finding)
        if idle and finding is None:
            return self._say(window, Decision.NOT_APPLICABLE, idle)
        waiting = self._learn(window)
        verdict = self._say(window, Decision.UNSURE, waiting) if waiting else self._by_vote(window)
        if finding and verdict.decision is not Decision.ANOMALOUS:
            return self._by_rule(window, finding)
        silent = applicability.missing(window, share=0.0)
        if silent and verdict.decision is Decision.NORMAL:
            return self._say(window, Decision.UNSURE, silent, votes=dict(verdict.votes))
        return verdict

    def _learn(self, window: Window) -> str | None:
        """Learn the job's own normal work once there is enough; return why it is not there yet, or None."""
        if self._offset_RM is not None:
            return None
        needed_s = max(self.settings.learn_s, ensemble.least_points() * window.step_s)
        watched_s = min(self._busy_s, window.end_s - window.start_s + window.step_s)
        if watched_s < needed_s - window.step_s / 2:
            return f"{self._cannot}learning what is normal for this job: {watched_s:.0f} of {needed_s:.0f} s"
        past = window.last(needed_s)
        try:
            self._own = self.model or ensemble.fit([past])
            self._offset_RM = self._own.job_offsets(past)
            self._cannot = ""
        except NoData as error:
            self._busy_s, self._cannot = 0.0, f"{error}; "
            return str(error)
        return None

    def _by_vote(self, window: Window) -> Verdict:
        assert self._own is not None
        assert self._offset_RM is not None
        try:
            self.scores = self._own.score(window, self._offset_RM)
        except ModelMismatch as error:
            return self._say(window, Decision.UNSURE, str(error))
        ballot = vote.tally(self.scores, self.settings.quorum)
        self._since_s = vote.suspected_since_s(self._since_s, ballot, window)
        if not ballot.judged:
            why = "; ".join(f"{s.detector}: {s.abstained}" for s in self.scores if s.abstained)
            return self._say(window, Decision.UNSURE, why or "too few detectors could judge", votes=ballot.votes)
        fresh = replace(ballot, suspects=tuple(i for i in ballot.suspects if self._deviates_now(i)))
        self._fresh_since_s = vote.suspected_since_s(self._fresh_since_s, fresh, window)
        suspects = [i for i in ballot.suspects if self._confirmed(window, window.nodes[i], float(ballot.strength_R[i]))]
        # whoever deviates most must be the one that is sure: his neighbours only suffer from him
        if not suspects or suspects[0] != ballot.suspects[0]:
            unjudged = int((~np.isfinite(ballot.strength_R)).sum())
            reason = "no rank differs from its peers" + (f"; {unjudged} ranks could not be judged" if unjudged else "")
            return self._say(window, Decision.NORMAL, reason, votes=ballot.votes)
        nodes = sorted({window.nodes[i] for i in suspects})
        agreed = [s.detector for s in self.scores if s.score_R[suspects[0]] > 1.0]
        evidence = [s.evidence[suspects[0]] for s in self.scores if s.score_R[suspects[0]] > 1.0]
        kind = diagnosis.category(evidence)
        if len(nodes) > max(1, len(set(window.nodes)) / 2):
            reason = f"{len(nodes)} of {len(set(window.nodes))} nodes deviate at once, so the cause is not one of them"
            return self._say(window, Decision.ANOMALOUS, reason, scope=Scope.JOB, category=kind, votes=ballot.votes)
        named = tuple(
            Suspect(
                window.ranks[i],
                window.nodes[i],
                round(float(ballot.strength_R[i]), 2),
                diagnosis.describe(window, i, [s.evidence[i] for s in self.scores]),
            )
            for i in suspects
        )
        top = named[0]
        reason = f"rank {top.rank} on {top.node} differs from its peers: {top.evidence} ({', '.join(agreed)} agree)"
        whole = all(sum(window.nodes[i] == n for i in suspects) > 1 for n in nodes)
        return self._say(
            window,
            Decision.ANOMALOUS,
            reason,
            scope=Scope.NODE if whole else Scope.RANK,
            category=kind,
            votes=ballot.votes,
            suspects=named,
        )

    def _deviates_now(self, i: int) -> bool:
        """Whether the detector of the newest instant agrees; the others still see what was a while ago."""
        newest = next((s.score_R[i] for s in self.scores if s.detector == "lof"), np.nan)
        return bool(np.isnan(newest) or newest > 1.0)

    def _confirmed(self, window: Window, node: str, strength: float) -> bool:
        """Whether the node was suspected for long enough.

        One odd moment convicts nobody, however long a tick is: a strong deviation must be there in every instant of
        `confirm_s`, and
        any suspicion else must outlive what the detectors remember, or one moment would look like a lasting one.
        """
        remembered_s = max(self.settings.confirm_s, applicability.MEMORY_POINTS * window.step_s)
        if window.end_s - self._since_s[node] >= remembered_s:
            return True
        fresh_s = self._fresh_since_s.get(node, window.end_s)
        return strength >= STRONG and window.end_s - fresh_s >= max(self.settings.confirm_s, 1e-3)

    def _by_rule(self, window: Window, finding: rules.Finding) -> Verdict:
        """A rule speaks without a vote; where it knows the node alone, the rank there with the strongest score stands for it."""
        strength_R = np.zeros(len(window.ranks))
        votes: dict[str, bool | None] = dict.fromkeys(ensemble.DETECTORS)
        if self._own is not None and self._offset_RM is not None:
            try:
                self.scores = self._own.score(window, self._offset_RM)
            except ModelMismatch:
                self.scores = []
            if self.scores:
                ballot = vote.tally(self.scores, self.settings.quorum)
                self._since_s, votes = vote.suspected_since_s(self._since_s, ballot, window), ballot.votes
                strength_R = np.nan_to_num(ballot.strength_R)
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

    def _say(
        self, window: Window, decision: Decision, reason: str, *, scope: Scope | None = None, category: Category | None = None,
        suspects: tuple[Suspect, ...] = (), votes: dict[str, bool | None] | None = None, rule: str | None = None,
    ) -> Verdict:  # fmt: skip
        if votes is None:
            self._since_s, self._fresh_since_s = {}, {}
        return Verdict(
            job=window.job,
            from_s=window.start_s,
            to_s=window.end_s,
            decision=decision,
            reason=reason,
            scope=scope,
            category=category,
            suspects=suspects,
            votes=votes or dict.fromkeys(ensemble.DETECTORS),
            rule=rule,
            model=self.model_name if self._own else "",
        )


def _begun_again(window: Window) -> str | None:
    """Return why ranks cannot be compared yet when one came back to life within what the detectors remember, else None."""
    if not window.has("process_up"):
        return None
    up_RT = window.column_RT("process_up")[:, -applicability.MEMORY_POINTS :]
    back_R = (up_RT[:, -1] > 0) & (up_RT == 0).any(axis=1)
    return "ranks were started a moment ago" if back_R.any() else None


def _watched(window: Window) -> Window:
    """Return the window without the instants before anything of the job was observed."""
    seen_T = np.isfinite(window.values_RMT).any(axis=(0, 1))
    first = int(np.argmax(seen_T)) if seen_T.any() else 0
    return window.last((window.values_RMT.shape[2] - first) * window.step_s)
