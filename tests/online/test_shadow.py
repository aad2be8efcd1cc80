"""A candidate judges in shadow and a model that no longer fits is noticed: both are told, and nothing follows from them."""

import json
import logging
import re
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from eagleeye import models
from eagleeye.cli import _candidate
from eagleeye.clock import ManualClock
from eagleeye.detectors import ensemble
from eagleeye.detectors.base import Score
from eagleeye.detectors.ensemble import Ensemble
from eagleeye.errors import SourceUnavailable
from eagleeye.online import scorer as scorer_module
from eagleeye.online.judge import Judge, Settings
from eagleeye.online.scorer import DRIFT_RATIO, DRIFT_STAYS_S, Drift, Scorer, Shadow
from eagleeye.online.service import serve
from eagleeye.records import Decision, Verdict, from_json
from eagleeye.window import Window

START_S = 1_770_000_000.0
SETTINGS = Settings(learn_s=100.0)
ONSET, END = 150, 220


class Streams:
    """A source of jobs in memory; `down` is raised when it is scraped."""

    step_s = 1.0

    def __init__(self, streams: Mapping[str, Any]) -> None:
        self.streams, self.down = dict(streams), ""

    def scrape(self, now_s: float) -> None:
        if self.down:
            raise SourceUnavailable(self.down)

    def failures(self) -> Mapping[str, str]:
        return {}

    def jobs(self, now_s: float) -> tuple[str, ...]:
        return tuple(sorted(self.streams))

    def window(self, job: str, end_s: float, length_s: float) -> Window:
        made = self.streams[job]
        window: Window = made.window(round(end_s - made.start_s), length_s)
        return replace(window, job=job)

    def history(self, start_s: float, end_s: float, length_s: float, progress: object = None) -> Iterator[Window]:
        yield from ()

    def close(self) -> None:
        """Nothing is held."""


def noisier(made: Any, times: float) -> Any:
    for name, column_RT in made.columns.items():
        made.columns[name] = (column_RT.mean() + times * (column_RT - column_RT.mean())).astype(np.float32)
    return made


def sick(made: Any, until: int | None = None) -> Any:
    for name in ("gpu_power_watts", "gpu_sm_clock_hertz"):
        made.columns[name][5, ONSET:until] *= 0.6
    return made


@pytest.fixture(scope="module")
def blind(stream: Callable[..., Any]) -> Ensemble:
    """Return a model of jobs so noisy that it sees nothing in a quiet one."""
    return ensemble.fit([noisier(stream(T=600, seed=9), 40).window(599)])


@pytest.fixture(scope="module")
def broken(blind: Ensemble) -> Ensemble:
    """Return a model without anything learned: it raises whenever it is asked."""
    return replace(blind, models={})


def watched(source: Streams, candidate: Ensemble | None = None, start: int = 0, stop: int = END, **more: Any) -> Scorer:
    one = Scorer(more.pop("settings", SETTINGS), source, ManualClock(START_S), None, "own past", candidate, "candidate v4")
    for t in range(start, stop, 5):
        one.tick(START_S + t)
    return one


def served(one: Scorer) -> tuple[dict[str, Any], dict[tuple[str, tuple[str, ...]], float]]:
    """Return the jobs by name, and the samples of the metrics page by name and label values."""
    server = serve(one, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        with urllib.request.urlopen(f"{url}/api/v1/jobs", timeout=10) as answer:
            jobs = {job["job"]: job for job in json.load(answer)["jobs"]}
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            page = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
    families = text_string_to_metric_families(page)
    return jobs, {(s.name, tuple(s.labels[k] for k in sorted(s.labels))): s.value for f in families for s in f.samples}


@pytest.mark.jit
def test_a_candidate_is_counted_and_shown_and_changes_nothing(
    stream: Callable[..., Any], blind: Ensemble, caplog: pytest.LogCaptureFixture
) -> None:
    source = Streams({"sick": sick(stream()), "well": stream(R=4, seed=1)})
    alone = watched(source)
    with caplog.at_level(logging.INFO, logger="eagleeye.online.scorer"):
        both = watched(source, blind)
    assert both.verdicts("sick") == alone.verdicts("sick")
    assert both.snapshot.incidents == alone.snapshot.incidents
    assert [i.nodes for i in both.snapshot.incidents] == [("n2",)]

    jobs, page = served(both)
    assert jobs["sick"]["shadow"]["model"] == "candidate v4"
    told = from_json(Verdict, jobs["sick"]["shadow"]["verdict"])
    assert (told.decision, told.model, told.to_s) == (Decision.NORMAL, "candidate v4", START_S + END - 5)
    assert (jobs["sick"]["shadow"]["agrees"], jobs["well"]["shadow"]["agrees"]) == (False, True)
    wrong = sum(v.decision is Decision.ANOMALOUS for v in alone.verdicts("sick"))
    assert wrong >= 10
    assert page["eagleeye_shadow_disagreements_total", ("sick",)] == wrong
    assert page["eagleeye_shadow_disagreements_total", ("well",)] == 0
    # labels in the order of their names: decision, training_job
    assert page["eagleeye_shadow_verdicts_total", ("normal", "sick")] == 24
    assert page["eagleeye_shadow_verdicts_total", ("unsure", "sick")] == 20
    assert ("eagleeye_shadow_verdicts_total", ("anomalous", "sick")) not in page
    lines = [r.getMessage() for r in caplog.records if "in shadow" in r.getMessage()]
    assert len(lines) == 1, "one line at each change, none a tick"
    assert lines[0].startswith("job sick: candidate v4, in shadow, disagrees: normal (")
    assert lines[0].endswith("; live: anomalous")


@pytest.mark.jit
def test_without_a_candidate_nothing_is_said_of_one(stream: Callable[..., Any]) -> None:
    jobs, page = served(watched(Streams({"llm": stream(R=4)}), stop=20))
    assert jobs["llm"]["shadow"] is None
    assert not any(name.startswith("eagleeye_shadow") for name, _ in page)


@pytest.mark.jit
def test_an_alarm_of_the_candidate_alone_opens_no_incident(stream: Callable[..., Any], blind: Ensemble) -> None:
    one = Scorer(SETTINGS, Streams({"llm": sick(stream())}), ManualClock(START_S), blind, "champion v3", None)
    other = Scorer(
        SETTINGS, Streams({"llm": sick(stream())}), ManualClock(START_S), blind, "champion v3",
        ensemble.fit([stream(T=600, seed=9).window(599)]), "candidate v4",
    )  # fmt: skip
    for t in range(0, END, 5):
        one.tick(START_S + t)
        other.tick(START_S + t)
    shadow = other.snapshot.jobs["llm"].shadow
    assert shadow is not None
    assert shadow.verdict is not None
    assert shadow.verdict.decision is Decision.ANOMALOUS
    assert [s.rank for s in shadow.verdict.suspects] == [5]
    assert other.snapshot.incidents == one.snapshot.incidents == ()
    assert other.verdicts("llm") == one.verdicts("llm")
    _, page = served(other)
    assert not any(name == "eagleeye_incident_open" for name, _ in page)
    assert page["eagleeye_anomaly_state", ("normal", "llm")] == 1


@pytest.mark.jit
def test_a_candidate_that_fails_costs_no_live_verdict(
    stream: Callable[..., Any], broken: Ensemble, caplog: pytest.LogCaptureFixture
) -> None:
    source = Streams({"sick": sick(stream())})
    alone, both = watched(source), watched(source, broken)
    assert both.verdicts("sick") == alone.verdicts("sick")
    assert both.snapshot.incidents == alone.snapshot.incidents != ()
    assert (both.snapshot.errors_total, dict(both.snapshot.failures)) == (0, {})
    shadow = served(both)[0]["sick"]["shadow"]
    assert (shadow["verdict"], shadow["agrees"]) == (None, None)
    assert shadow["failure"].startswith("KeyError")
    assert len([r for r in caplog.records if "could not judge it in shadow" in r.getMessage()]) == 1


@pytest.mark.jit
def test_a_candidate_of_other_metrics_is_unsure_and_says_why(stream: Callable[..., Any], blind: Ensemble) -> None:
    other = replace(blind, scale=replace(blind.scale, metrics=tuple(f"{m}_of_old" for m in blind.scale.metrics)))
    shadow = watched(Streams({"llm": stream(R=4)}), other, stop=130).snapshot.jobs["llm"].shadow
    assert shadow is not None
    assert shadow.verdict is not None
    assert shadow.verdict.decision is Decision.UNSURE
    assert "train" in shadow.verdict.reason or "learn" in shadow.verdict.reason


@pytest.mark.jit
def test_of_a_source_that_fell_silent_the_candidate_knows_nothing_either(stream: Callable[..., Any], blind: Ensemble) -> None:
    source = Streams({"llm": stream(R=4)})
    one = watched(source, blind, stop=20)
    source.down = "the server at http://x does not answer"
    one.tick(START_S + 20)
    shadow = one.snapshot.jobs["llm"].shadow
    assert shadow == Shadow("candidate v4", None, source.down, True, {"unsure": 4}, 0)


@pytest.mark.jit
def test_a_tick_that_took_long_leaves_the_shadow_out(
    stream: Callable[..., Any], blind: Ensemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Streams({"a": stream(R=4), "b": stream(R=4)})
    one = watched(source, blind, stop=5)
    slow = iter(range(0, 10**6, 4))  # every look at the watch costs four seconds of the five
    monkeypatch.setattr(scorer_module, "monotonic_s", lambda: float(next(slow)))
    for t in range(5, 25, 5):
        one.tick(START_S + t)
    assert {len(one.verdicts(name)) for name in "ab"} == {5}
    assert all(state.shadow and state.shadow.verdicts_total == {"unsure": 1} for state in one.snapshot.jobs.values())


@pytest.mark.parametrize(
    ("decision", "scores", "ratio"),
    [
        (Decision.NORMAL, [0.6, 0.4, 0.6, 0.4], 0.5),
        (Decision.NORMAL, [0.5, 0.5, 0.5, 0.5], 0.0),
        (Decision.NORMAL, [0.9, np.nan, 0.1, np.nan], 0.5),
        (Decision.NORMAL, [np.nan] * 4, 0.0),
        (Decision.ANOMALOUS, [3.0] * 4, 0.0),
        (Decision.UNSURE, [3.0] * 4, 0.0),
    ],
)
def test_the_share_of_strange_ranks_of_one_tick(decision: Decision, scores: list[float], ratio: float) -> None:
    judge = Judge(SETTINGS)
    judge.scores = [
        Score("peer_deviation", np.array(scores), None, ("",) * 4),
        Score("job_change", np.full(4, 9.0), None, ("",) * 4),  # speaks of no rank
    ]
    after = Drift().after(judge, Verdict("j", 0.0, 1.0, decision, "r", votes={}), 3600.0)
    assert after.ratio == pytest.approx(ratio * (1 - np.exp(-1)))


def test_a_model_must_lie_wrong_for_a_while() -> None:
    judge, normal = Judge(SETTINGS), Verdict("j", 0.0, 1.0, Decision.NORMAL, "r", votes={})
    strange, usual = (Score("peer_deviation", np.full(4, value), None, ("",) * 4) for value in (0.9, 0.1))
    drift, judge.scores = Drift(), [strange]
    ticks = 0
    while drift.ratio <= DRIFT_RATIO:
        drift, ticks = drift.after(judge, normal, 5.0), ticks + 1
    # 1 - exp(-t / 3600) exceeds 0.05 after 184.7 s
    assert ticks == 37
    for _ in range(round(DRIFT_STAYS_S / 5) - 2):
        drift = drift.after(judge, normal, 5.0)
    assert drift.fits
    assert not drift.after(judge, normal, 5.0).fits
    judge.scores = [usual]
    while drift.ratio > DRIFT_RATIO:
        drift = drift.after(judge, normal, 5.0)
    assert drift.above_s == 0.0


@pytest.mark.jit
def test_a_model_that_no_longer_fits_is_told_once(stream: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    quiet = ensemble.fit([stream(T=600, seed=seed).window(599) for seed in (100, 101)])
    source = Streams({"changed": noisier(stream(T=2600, seed=5), 3), "same": stream(T=2600, seed=6)})
    one = Scorer(SETTINGS, source, ManualClock(START_S), quiet, "champion v3")
    for t in range(0, 2600, 5):
        one.tick(START_S + t)
    jobs, page = served(one)
    assert page["eagleeye_model_drift_ratio", ("changed",)] > DRIFT_RATIO > 5 * page["eagleeye_model_drift_ratio", ("same",)]
    assert (jobs["changed"]["model_fits"], jobs["same"]["model_fits"]) == (False, True)
    assert jobs["changed"]["drift_ratio"] == pytest.approx(page["eagleeye_model_drift_ratio", ("changed",)], abs=1e-4)
    lines = [r.getMessage() for r in caplog.records if "no longer fits" in r.getMessage()]
    assert len(lines) == 1
    assert re.match(r"job changed: the model \(champion v3\) no longer fits this job: \d+ %", lines[0])
    assert "eagleeye train" in lines[0]


@pytest.mark.slow
def test_who_judges_in_shadow(stream: Callable[..., Any], tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    uri = f"sqlite:///{tmp_path}/store/mlflow.db"
    data, settings = {"offline": {"tracking_uri": uri}}, models.Settings(tracking_uri=uri)
    assert _candidate("champion", data) == (None, "")
    assert list(tmp_path.iterdir()) == [], "asking makes no store"
    (tmp_path / "report").mkdir()
    fitted = ensemble.fit([stream(T=600).window(599)])
    models.register(settings, fitted, {}, {}, tmp_path / "report")
    assert _candidate("champion", data)[1] == "candidate v1", "without a champion the job's own past is live"
    models.promote(settings, "candidate")
    assert _candidate("champion", data) == (None, ""), "what is live needs no shadow"
    models.register(settings, fitted, {}, {}, tmp_path / "report")
    assert _candidate("champion", data)[1] == "candidate v2"
    assert _candidate("none", data) == (None, "")
    for live in ("2", "v2", "candidate"):
        assert _candidate(live, data) == (None, "")
    assert capsys.readouterr().err == ""
    for path in (tmp_path / "store" / "artifacts").rglob("arrays.npz"):
        path.unlink()
    assert _candidate("champion", data) == (None, "")
    assert "the candidate cannot judge in shadow: model v2: arrays.npz is absent" in capsys.readouterr().err
