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
from eagleeye.errors import EagleEyeError
from eagleeye.online import explain
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


@dataclass(frozen=True, slots=True)
class JobState:
    """What is known of one job after its newest tick."""

    verdict: Verdict
    ranks: tuple[tuple[int, str, str], ...]
    """(rank, node, group)"""
    scores: tuple[Score, ...]
    grounds: Grounds
    """What the verdict rests on; explained only when somebody asks."""


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
    that job alone.
    """

    def __init__(
        self, settings: Settings, source: Source, clock: Clock, model: Ensemble | None = None, model_name: str = "own past"
    ) -> None:
        self._settings, self._source, self._clock = settings, source, clock
        self._model, self._model_name = model, model_name
        self._judges: dict[str, Judge] = {}
        self._last_seen_s: dict[str, float] = {}
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
            jobs[name] = JobState(verdict, places, tuple(judge.scores), explain.keep(judge, window, verdict))
            self._last_seen_s[name] = now_s
            judged.add(name)
            with self._lock:
                self._verdicts.setdefault(name, deque(maxlen=KEPT_VERDICTS)).append(verdict)
        for name in set(jobs) - judged:
            # what was true before the source fell silent is not known to be true now
            why = failures.get(f"job {name}") or failures.get("source") or "no source reports this job any more"
            unknown = _unknown(jobs[name].verdict, now_s, why)
            jobs[name] = replace(jobs[name], verdict=unknown, scores=(), grounds=explain.lost(jobs[name].grounds, unknown))
        if "source" not in failures:
            self._forget(jobs, names)
        self._snapshot = replace(
            snapshot, at_s=now_s, tick_s=monotonic_s() - started_s, jobs=jobs, incidents=_kept(incidents),
            failures=failures, windows_total=totals, errors_total=errors,
        )  # fmt: skip

    def run(self) -> None:
        """Tick every `tick_s` until the clock is stopped; a tick that takes longer delays the next, none is made up for."""
        while not getattr(self._clock, "stopped", False):
            now_s = self._clock.now_s()
            self.tick(now_s)
            self._clock.sleep_s(self._settings.tick_s - (self._clock.now_s() - now_s))

    def _announce(self, verdict: Verdict, before: tuple[Incident, ...], after: tuple[Incident, ...]) -> None:
        """Log one line when the judgement of a job changes, never one a tick."""
        said = (verdict.decision.value, ",".join(s.node for s in verdict.suspects))
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
            self._last_seen_s.pop(name, None)
            self._sentence.pop(name, None)
            with self._lock:
                self._verdicts.pop(name, None)


def _unknown(before: Verdict, now_s: float, why: str) -> Verdict:
    return Verdict(before.job, before.to_s, now_s, Decision.UNSURE, why, votes=dict.fromkeys(before.votes), model=before.model)


def _kept(incidents: tuple[Incident, ...]) -> tuple[Incident, ...]:
    """Drop the oldest closed incidents above `KEPT_INCIDENTS`; an open one is never dropped."""
    closed = [i for i in incidents if i.state is IncidentState.CLOSED]
    dropped = {i.id for i in closed[: max(0, len(incidents) - KEPT_INCIDENTS)]}
    return tuple(i for i in incidents if i.id not in dropped)
