"""The live loop: scrape, judge every job, keep incidents, publish. One thread works; readers get immutable snapshots."""

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from eagleeye.clock import Clock, monotonic_s
from eagleeye.detectors import ensemble
from eagleeye.detectors.base import Score
from eagleeye.detectors.ensemble import Ensemble
from eagleeye.detectors.thresholds import Tail
from eagleeye.errors import EagleEyeError
from eagleeye.online import explain, vote
from eagleeye.online.explain import Grounds
from eagleeye.online.incidents import advance, close_unwatched
from eagleeye.online.judge import Judge, Settings
from eagleeye.records import Decision, Incident, IncidentState, Verdict
from eagleeye.source.base import Source
from eagleeye.window import Window

log = logging.getLogger(__name__)

KEPT_VERDICTS = 2000
KEPT_INCIDENTS = 1000
KEPT_JOBS = 256

DRIFT_MEAN_S = 3600.0
"""Time constant of the mean that tells whether a model still fits."""

DRIFT_RATIO, DRIFT_STAYS_S = 0.05, 600.0
"""A model fits no longer when its share of strange rank-ticks lies above the first for the second."""


@dataclass(frozen=True, slots=True)
class Drift:
    """How often a job that is well lies outside of all held-out normal work.

    Attributes
    ----------
    ratio : share of rank-ticks whose raw majority lies above `Tail.START` while the verdict is normal, an exponential mean over
        `DRIFT_MEAN_S` of such ticks that starts at 0: a model fits until the opposite is seen
    above_s : for how long of such ticks it has lain above `DRIFT_RATIO`
    """

    ratio: float = 0.0
    above_s: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether the model still fits the job."""
        return self.above_s < DRIFT_STAYS_S

    def after(self, judge: Judge, verdict: Verdict, passed_s: float) -> "Drift":
        """Return the drift after one more tick of `passed_s` seconds; a verdict other than normal tells nothing of the model."""
        weights = judge.settings.voting.weights
        of_ranks = [s for s in judge.scores if s.detector in weights]
        if verdict.decision is not Decision.NORMAL or not of_ranks:
            return self
        strength_R = vote.majority_R(of_ranks, weights, min(2.0, sum(weights[s.detector] for s in of_ranks)))
        known_R = strength_R[np.isfinite(strength_R)]
        if not len(known_R):
            return self
        ratio = self.ratio + -np.expm1(-passed_s / DRIFT_MEAN_S) * (
            float((known_R + judge.wander > Tail.START).mean()) - self.ratio
        )
        return Drift(float(ratio), self.above_s + passed_s if ratio > DRIFT_RATIO else 0.0)


@dataclass(frozen=True, slots=True)
class Shadow:
    """What a candidate model says of a job: counted and shown, and nothing follows from it.

    `verdict` is None where the candidate could not judge the newest tick, and `failure` tells why. `agrees` compares decision and
    blamed nodes with the live verdict of the same tick.
    """

    model: str
    verdict: Verdict | None = None
    failure: str = ""
    agrees: bool = True
    verdicts_total: Mapping[str, int] = field(default_factory=dict)
    """By decision."""
    disagreements_total: int = 0


@dataclass(frozen=True, slots=True)
class JobState:
    """What is known of one job after its newest tick."""

    verdict: Verdict
    ranks: tuple[tuple[int, str, str], ...]
    """(rank, node, group)"""
    scores: tuple[Score, ...]
    grounds: Grounds
    """What the verdict rests on; explained only when somebody asks."""
    drift: Drift = Drift()
    shadow: Shadow | None = None
    """None without a candidate."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the service shows. Replaced as a whole after each tick, never changed."""

    ready: bool = False
    warm_up_s: float = 0.0
    tick_s: float = 0.0
    """How long the newest tick took."""
    at_s: float = 0.0
    model: str = "own past"
    jobs: Mapping[str, JobState] = field(default_factory=dict)
    incidents: tuple[Incident, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    windows_total: Mapping[str, int] = field(default_factory=dict)
    errors_total: int = 0


def warm_up() -> float:
    """Compile and run every kernel once on made-up numbers; return how long that took, in seconds."""
    started_s = monotonic_s()
    numbers = np.random.default_rng(0).normal(size=(4, 2, 64)).astype(np.float32)
    window = Window("warm-up", (0, 1, 2, 3), ("a", "b", "c", "d"), ("all",) * 4, ("x", "y"), 64.0, 1.0, numbers)
    fitted = ensemble.fit([window])
    fitted.score(window, fitted.job_offsets(window))
    return monotonic_s() - started_s


class Scorer:
    """Watches every job of a source.

    `tick` is called by one thread. A source that does not answer, or a job whose window cannot be judged, costs that tick or
    that job alone. A `candidate` judges in the shadow of the model: after the live verdicts are out, in what is left of the tick.
    """

    def __init__(
        self, settings: Settings, source: Source, clock: Clock, model: Ensemble | None = None, model_name: str = "own past",
        candidate: Ensemble | None = None, candidate_name: str = "candidate",
    ) -> None:  # fmt: skip
        self._settings, self._source, self._clock = settings, source, clock
        self._model, self._model_name = model, model_name
        self._candidate, self._candidate_name = candidate, candidate_name
        self._judges: dict[str, Judge] = {}
        self._shadows: dict[str, Judge] = {}
        self._last_seen_s: dict[str, float] = {}
        self._shadow_s: dict[str, float] = {}
        self._verdicts: dict[str, deque[Verdict]] = {}
        self._sentence: dict[str, tuple[str, str]] = {}
        self._lock = threading.Lock()
        self._snapshot = Snapshot(model=model_name)

    @property
    def snapshot(self) -> Snapshot:
        """The state after the newest tick."""
        return self._snapshot

    def verdicts(self, job: str, last: int = KEPT_VERDICTS) -> list[Verdict]:
        """Return the newest verdicts of a job, oldest first; empty for a job that is not known."""
        with self._lock:
            return list(self._verdicts.get(job, ()))[-last:]

    def warm_up(self) -> None:
        """Compile the kernels; `snapshot.ready` is false until then."""
        self._snapshot = replace(self._snapshot, ready=True, warm_up_s=warm_up())

    def tick(self, now_s: float) -> None:
        """Look once at everything."""
        started_s = monotonic_s()
        snapshot = self._snapshot
        jobs, incidents, errors = dict(snapshot.jobs), snapshot.incidents, snapshot.errors_total
        totals = dict(snapshot.windows_total)
        failures: dict[str, str] = {}
        judged: set[str] = set()
        windows: dict[str, Window] = {}
        try:
            self._source.scrape(now_s)
            names = self._source.jobs(now_s)
            failures.update(self._source.failures())
            incidents = close_unwatched(incidents, names, now_s)
        except EagleEyeError as error:
            names, failures["source"] = (), str(error)
        for name in names:
            try:
                judge = self._judges.setdefault(name, Judge(self._settings, self._model, self._model_name))
                window = self._source.window(name, now_s, judge.length_s(self._source.step_s))
                verdict = judge.judge(window)
                old = jobs.get(name)
                drift = self._drift(judge, verdict, old.drift if old else Drift(), now_s)
            except EagleEyeError as error:
                failures[f"job {name}"] = str(error)
                continue
            except Exception:  # one job must never end the watch over the others
                log.exception("job %s: the tick failed", name)
                errors += 1
                continue
            before = incidents
            incidents = advance(incidents, verdict)
            self._announce(verdict, before, incidents)
            totals[verdict.decision.value] = totals.get(verdict.decision.value, 0) + 1
            places = tuple(zip(window.ranks, window.nodes, window.groups, strict=True))
            jobs[name] = JobState(
                verdict, places, tuple(judge.scores), explain.keep(judge, window, verdict), drift, old.shadow if old else None
            )
            self._last_seen_s[name] = now_s
            judged.add(name)
            if self._candidate is not None:
                windows[name] = window
            with self._lock:
                self._verdicts.setdefault(name, deque(maxlen=KEPT_VERDICTS)).append(verdict)
        for name in set(jobs) - judged:
            # what was true before the source fell silent is not known to be true now
            why = failures.get(f"job {name}") or failures.get("source") or "no source reports this job any more"
            unknown = _unknown(jobs[name].verdict, now_s, why)
            shadow = jobs[name].shadow
            jobs[name] = replace(
                jobs[name], verdict=unknown, scores=(), grounds=explain.lost(jobs[name].grounds, unknown),
                shadow=replace(shadow, verdict=None, failure=why) if shadow else None,
            )  # fmt: skip
        if "source" not in failures:
            self._forget(jobs, names)
        self._snapshot = replace(
            snapshot, at_s=now_s, tick_s=monotonic_s() - started_s, jobs=jobs, incidents=_kept(incidents),
            failures=failures, windows_total=totals, errors_total=errors,
        )  # fmt: skip
        if self._candidate is not None:
            self._judge_in_shadow(windows, now_s, started_s + self._settings.tick_s)

    def run(self) -> None:
        """Tick every `tick_s` until the clock is stopped; a tick that takes longer delays the next, none is made up for."""
        while not getattr(self._clock, "stopped", False):
            now_s = self._clock.now_s()
            self.tick(now_s)
            self._clock.sleep_s(self._settings.tick_s - (self._clock.now_s() - now_s))

    def _drift(self, judge: Judge, verdict: Verdict, before: Drift, now_s: float) -> Drift:
        """Return the drift after this tick, and say so once when the model stops fitting."""
        # a pause in the watching is nothing that was watched
        most_s = 2 * max(self._source.step_s, self._settings.tick_s)
        after = before.after(judge, verdict, min(now_s - self._last_seen_s.get(verdict.job, now_s), most_s))
        if before.fits and not after.fits:
            log.warning(
                "job %s: the model (%s) no longer fits this job: %.0f %% of what was judged normal lately lies above all normal "
                "work that it was calibrated on; train again (`eagleeye train`)",
                verdict.job, self._model_name, 100 * after.ratio,
            )  # fmt: skip
        return after

    def _judge_in_shadow(self, windows: Mapping[str, Window], now_s: float, until_s: float) -> None:
        """Let the candidate judge what the model judged, those first that waited longest; no live tick is ever late for it."""
        jobs = dict(self._snapshot.jobs)
        for name in sorted(windows, key=lambda name: self._shadow_s.get(name, -np.inf)):
            if monotonic_s() > until_s:
                break
            self._shadow_s[name] = now_s
            live, shadow = jobs[name].verdict, jobs[name].shadow or Shadow(self._candidate_name)
            try:
                judge = self._shadows.setdefault(name, Judge(self._settings, self._candidate, self._candidate_name))
                length_s, window = judge.length_s(self._source.step_s), windows[name]
                if length_s > window.end_s - window.start_s + window.step_s:
                    window = self._source.window(name, now_s, length_s)
                verdict = judge.judge(window)
            except Exception as error:  # whatever it is, it is the candidate's alone
                if shadow.failure != (failure := f"{type(error).__name__}: {error}"):
                    log.warning("job %s: %s could not judge it in shadow: %s", name, self._candidate_name, failure)
                jobs[name] = replace(jobs[name], shadow=replace(shadow, verdict=None, failure=failure))
                continue
            agrees = _said(verdict) == _said(live)
            if agrees != shadow.agrees:
                log.info(
                    "job %s: %s, in shadow, %s: %s (%s); live: %s",
                    name, self._candidate_name, "agrees again" if agrees else "disagrees",
                    verdict.decision.value, verdict.reason, live.decision.value,
                )  # fmt: skip
            totals = dict(shadow.verdicts_total)
            totals[verdict.decision.value] = totals.get(verdict.decision.value, 0) + 1
            jobs[name] = replace(
                jobs[name],
                shadow=Shadow(self._candidate_name, verdict, "", agrees, totals, shadow.disagreements_total + (not agrees)),
            )
        self._snapshot = replace(self._snapshot, jobs=jobs)

    def _announce(self, verdict: Verdict, before: tuple[Incident, ...], after: tuple[Incident, ...]) -> None:
        """Log one line when the judgement of a job changes, never one a tick."""
        said = _said(verdict)
        if self._sentence.get(verdict.job) != said:
            self._sentence[verdict.job] = said
            log.info("job %s: %s: %s", verdict.job, verdict.decision.value, verdict.reason)
        known = {i.id: i for i in before}
        for incident in after:
            old = known.get(incident.id)
            if old is None or old.state is not incident.state or old.nodes != incident.nodes:
                log.info(
                    "incident %s %s, %s: %s",
                    incident.id,
                    incident.state.value,
                    ",".join(incident.nodes) or "whole job",
                    incident.reason,
                )

    def _forget(self, jobs: dict[str, JobState], alive: Sequence[str]) -> None:
        """Drop the jobs that ended longest ago, above `KEPT_JOBS`; one that is alive is never dropped."""
        gone = sorted((name for name in jobs if name not in alive), key=lambda name: self._last_seen_s.get(name, 0.0))
        for name in gone[: max(0, len(jobs) - KEPT_JOBS)]:
            del jobs[name]
            self._judges.pop(name, None)
            self._shadows.pop(name, None)
            self._shadow_s.pop(name, None)
            self._last_seen_s.pop(name, None)
            self._sentence.pop(name, None)
            with self._lock:
                self._verdicts.pop(name, None)


def _said(verdict: Verdict) -> tuple[str, str]:
    return verdict.decision.value, ",".join(s.node for s in verdict.suspects)


def _unknown(before: Verdict, now_s: float, why: str) -> Verdict:
    return Verdict(before.job, before.to_s, now_s, Decision.UNSURE, why, votes=dict.fromkeys(before.votes), model=before.model)


def _kept(incidents: tuple[Incident, ...]) -> tuple[Incident, ...]:
    """Drop the oldest closed incidents above `KEPT_INCIDENTS`; an open one is never dropped."""
    closed = [i for i in incidents if i.state is IncidentState.CLOSED]
    dropped = {i.id for i in closed[: max(0, len(incidents) - KEPT_INCIDENTS)]}
    return tuple(i for i in incidents if i.id not in dropped)
