"""The scorer over real HTTP: what it knows is served, and what fails costs only itself."""

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.server import ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from eagleeye.clock import ManualClock
from eagleeye.errors import EnvironmentLacks, NoData, SourceUnavailable
from eagleeye.online import scorer as scorer_module
from eagleeye.online.judge import Settings
from eagleeye.online.scorer import Scorer
from eagleeye.online.service import serve
from eagleeye.records import Decision, Incident, IncidentState, Verdict, from_json
from eagleeye.window import Window

pytestmark = pytest.mark.jit

LEARN_S = 100.0
MEMBERS = {"peer_deviation", "knn_dtw", "matrix_profile", "lof", "silence", "flat_together", "job_change"}


class MemorySource:
    """Streams by job, cut at the time that is asked for; `broken` jobs raise what is set, `down` is the whole source."""

    step_s = 1.0

    def __init__(self, streams: Mapping[str, Any]) -> None:
        self.streams = dict(streams)
        self.broken: dict[str, Exception] = {}
        self.down: Exception | None = None
        self.silent: dict[str, str] = {}

    def scrape(self, now_s: float) -> None:
        if self.down:
            raise self.down

    def failures(self) -> Mapping[str, str]:
        return self.silent

    def jobs(self, now_s: float) -> tuple[str, ...]:
        return tuple(sorted(self.streams))

    def window(self, job: str, end_s: float, length_s: float) -> Window:
        if job in self.broken:
            raise self.broken[job]
        made = self.streams[job]
        made.job = job
        return made.window(round(end_s - made.start_s), length_s)  # type: ignore[no-any-return]

    def history(self, start_s: float, end_s: float, length_s: float, progress: object = None) -> Iterator[Window]:
        yield from ()

    def close(self) -> None:
        """Nothing is held."""


START_S = 1_770_000_000.0


class Served:
    """A scorer, its service and its clock."""

    def __init__(self, source: MemorySource) -> None:
        self.source, self.clock = source, ManualClock(START_S)
        self.scorer = Scorer(Settings(learn_s=LEARN_S), source, self.clock)
        self.server: ThreadingHTTPServer = serve(self.scorer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def ticks(self, start: int, stop: int, step: int = 5) -> None:
        for t in range(start, stop, step):
            self.clock.advance_to(START_S + t)
            self.scorer.tick(self.clock.now_s())

    def get(self, path: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as answer:
            page = answer.read().decode()
        return {
            (s.name, tuple(sorted(s.labels.items()))): s.value
            for family in text_string_to_metric_families(page)
            for s in family.samples
        }

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def started() -> Iterator[Callable[[MemorySource], Served]]:
    made: list[Served] = []

    def start(source: MemorySource) -> Served:
        made.append(Served(source))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def watched(stream: Callable[..., Any]) -> Iterator[Served]:
    """Job `sick`, whose rank 5 on n2 fell behind, and job `well`, watched for 240 s."""
    sick, well = stream(), stream(R=4, seed=1)
    sick.columns["gpu_power_watts"][5, 210:] *= 0.6
    sick.columns["gpu_sm_clock_hertz"][5, 210:] *= 0.6
    one = Served(MemorySource({"sick": sick, "well": well}))
    one.ticks(0, 240)
    yield one
    one.close()


def test_not_ready_until_the_kernels_are_warm(started: Callable[[MemorySource], Served]) -> None:
    one = started(MemorySource({}))
    assert one.get("/healthz") == (503, {"ready": False, "at_s": 0.0, "failures": {}})
    assert one.metrics()["eagleeye_scorer_ready", ()] == 0
    one.scorer.warm_up()
    assert one.get("/healthz")[0] == 200
    assert one.metrics()["eagleeye_scorer_ready", ()] == 1
    assert one.metrics()["eagleeye_scorer_warm_up_seconds", ()] > 0


def test_jobs(watched: Served) -> None:
    status, body = watched.get("/api/v1/jobs")
    assert status == 200
    assert [(j["job"], j["ranks_total"], j["nodes"]) for j in body["jobs"]] == [
        ("sick", 8, ["n0", "n1", "n2", "n3"]),
        ("well", 4, ["n0", "n1"]),
    ]
    verdicts = [from_json(Verdict, j["verdict"]) for j in body["jobs"]]
    assert [v.decision for v in verdicts] == [Decision.ANOMALOUS, Decision.NORMAL]
    assert [s.node for s in verdicts[0].suspects] == ["n2"]


def test_one_job(watched: Served) -> None:
    status, body = watched.get("/api/v1/jobs/sick")
    assert status == 200
    assert [(r["rank"], r["node"]) for r in body["ranks"]] == [(r, f"n{r // 2}") for r in range(8)]
    assert set(body["ranks"][5]["scores"]) == MEMBERS
    assert body["ranks"][5]["scores"]["knn_dtw"] > 1 > body["ranks"][0]["scores"]["knn_dtw"]


def test_verdicts(watched: Served) -> None:
    status, body = watched.get("/api/v1/jobs/sick/verdicts?last=3")
    verdicts = [from_json(Verdict, v) for v in body["verdicts"]]
    assert (status, [v.to_s - START_S for v in verdicts]) == (200, [225, 230, 235])
    assert len(watched.get("/api/v1/jobs/sick/verdicts")[1]["verdicts"]) == 48
    assert len(watched.get("/api/v1/jobs/sick/verdicts?last=99999")[1]["verdicts"]) == 48


@pytest.mark.parametrize("last", ["0", "-1", "x", "1.5", "%C2%B2", "9" * 5000], ids=lambda last: last[:8])
def test_a_query_that_means_nothing(watched: Served, last: str) -> None:
    status, body = watched.get(f"/api/v1/jobs/sick/verdicts?last={last}")
    assert status == 400
    assert body["error"].endswith("must be a number above zero")


@pytest.mark.parametrize("path", ["/api/v1/jobs/nobody", "/api/v1/jobs/nobody/verdicts"])
def test_an_unknown_job(watched: Served, path: str) -> None:
    sentence = "no job 'nobody' is being watched; GET /api/v1/jobs lists those that are"
    assert watched.get(path) == (404, {"error": sentence})


@pytest.mark.parametrize("path", ["/api/v2/jobs", "/api/v1/secrets", "/etc/passwd", "/api/v1/incidents/1"])
def test_an_unknown_path(watched: Served, path: str) -> None:
    status, body = watched.get(path)
    assert status == 404
    assert "/api/v1/incidents" in body["error"]


def test_nothing_can_be_changed_from_outside(watched: Served) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        request = urllib.request.Request(f"{watched.url}/api/v1/incidents", method=method, data=b"{}")
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(request, timeout=10)
        assert raised.value.code == 501
        raised.value.close()


def test_incidents(watched: Served) -> None:
    status, body = watched.get("/api/v1/incidents")
    (incident,) = [from_json(Incident, i) for i in body["incidents"]]
    assert (status, incident.job, incident.nodes, incident.ranks) == (200, "sick", ("n2",), (5,))
    assert (incident.state, incident.last_anomalous_s) == (IncidentState.OPEN, START_S + 235)
    assert START_S + 210 < incident.opened_s <= START_S + 225
    assert (incident,) == watched.scorer.snapshot.incidents


def test_the_metrics_page(watched: Served) -> None:
    page = watched.metrics()
    assert page["eagleeye_anomaly_state", (("state", "anomalous"), ("training_job", "sick"))] == 1
    assert page["eagleeye_anomaly_state", (("state", "normal"), ("training_job", "sick"))] == 0
    assert page["eagleeye_anomaly_state", (("state", "normal"), ("training_job", "well"))] == 1
    assert page["eagleeye_anomaly_votes", (("training_job", "sick"),)] >= 2
    assert page["eagleeye_anomaly_votes", (("training_job", "well"),)] == 0
    labels = (("detector", "knn_dtw"), ("node", "n2"), ("rank", "5"), ("training_job", "sick"))
    assert page["eagleeye_anomaly_score", labels] > 1
    assert page["eagleeye_incident_open", (("category", "gpu"), ("node", "n2"), ("training_job", "sick"))] == 1
    assert sum(v for (name, _), v in page.items() if name == "eagleeye_scorer_windows_scored_total") == 96
    assert page["eagleeye_scorer_errors_total", ()] == 0
    assert page["eagleeye_scorer_last_tick_timestamp_seconds", ()] == START_S + 235
    assert page["eagleeye_scorer_model_info", (("model", "own past"),)] == 1


def test_prometheus_own_checker_likes_the_page(watched: Served) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no `promtool` on PATH")
    with urllib.request.urlopen(watched.url + "/metrics", timeout=10) as answer:
        page = answer.read()
    checked = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr, checked.stdout) == (0, b"", b"")


def test_a_source_that_does_not_answer_costs_only_that_tick(
    started: Callable[[MemorySource], Served], stream: Callable[..., Any]
) -> None:
    one = started(MemorySource({"llm": stream(R=4)}))
    one.ticks(0, 10)
    one.source.down = SourceUnavailable("the server at http://x does not answer")
    one.ticks(10, 15)
    assert one.get("/healthz")[1]["failures"] == {"source": "the server at http://x does not answer"}
    assert one.metrics()["eagleeye_scorer_failures", ()] == 1
    assert len(one.scorer.verdicts("llm")) == 2
    assert [j["job"] for j in one.get("/api/v1/jobs")[1]["jobs"]] == ["llm"]
    one.source.down = None
    one.ticks(15, 20)
    assert one.get("/healthz")[1]["failures"] == {}
    assert len(one.scorer.verdicts("llm")) == 3


def test_what_was_normal_before_the_source_fell_silent_is_unsure(
    started: Callable[[MemorySource], Served], stream: Callable[..., Any]
) -> None:
    def states(one: Served) -> dict[str, float]:
        page = one.metrics()
        return {d.value: page["eagleeye_anomaly_state", (("state", d.value), ("training_job", "llm"))] for d in Decision}

    nothing = dict.fromkeys((d.value for d in Decision), 0.0)
    made = stream(R=4)
    one = started(MemorySource({"llm": made}))
    one.ticks(0, 115)
    assert states(one) == nothing | {"normal": 1}
    assert any(name == "eagleeye_anomaly_score" for name, _ in one.metrics())

    said = "the server at http://x does not answer"
    one.source.down = SourceUnavailable(said)
    one.ticks(115, 120)
    verdict = from_json(Verdict, one.get("/api/v1/jobs/llm")[1]["verdict"])
    assert (verdict.decision, verdict.reason, verdict.to_s, verdict.suspects) == (Decision.UNSURE, said, START_S + 115, ())
    assert verdict.votes == dict.fromkeys(MEMBERS)
    assert states(one) == nothing | {"unsure": 1}
    page = one.metrics()
    assert page["eagleeye_anomaly_votes", (("training_job", "llm"),)] == 0
    assert not any(name == "eagleeye_anomaly_score" for name, _ in page)
    assert len(one.scorer.verdicts("llm")) == 23, "nothing was judged"

    one.source.down, one.source.streams = None, {}
    one.ticks(120, 125)
    assert one.scorer.snapshot.jobs["llm"].verdict.reason == "no source reports this job any more"
    assert states(one) == nothing | {"unsure": 1}

    one.source.streams, one.source.broken = {"llm": made}, {"llm": NoData("job llm: nothing was seen")}
    one.ticks(125, 130)
    assert one.scorer.snapshot.jobs["llm"].verdict.reason == "job llm: nothing was seen"
    one.source.broken = {}
    one.ticks(130, 135)
    assert states(one) == nothing | {"normal": 1}, "what was learned before is still known"


def test_a_source_that_is_down_ends_no_incident(watched: Served, started: Callable[[MemorySource], Served]) -> None:
    one = started(MemorySource(watched.source.streams))
    one.ticks(0, 240)
    (before,) = one.scorer.snapshot.incidents
    one.source.down = SourceUnavailable("the server at http://x does not answer")
    one.ticks(240, 600, 60)
    assert one.scorer.snapshot.incidents == (before,)
    assert {job.verdict.decision for job in one.scorer.snapshot.jobs.values()} == {Decision.UNSURE}


def test_a_job_that_cannot_be_read_costs_only_itself(
    started: Callable[[MemorySource], Served], stream: Callable[..., Any]
) -> None:
    one = started(MemorySource({"a": stream(R=4), "b": stream(R=4)}))
    one.source.silent = {"n7:9470": "no answer within 2 s"}
    one.source.broken = {"a": NoData("job a: nothing was seen")}
    one.ticks(0, 5)
    assert one.get("/healthz")[1]["failures"] == {"job a": "job a: nothing was seen", "n7:9470": "no answer within 2 s"}
    assert [j["job"] for j in one.get("/api/v1/jobs")[1]["jobs"]] == ["b"]
    assert one.metrics()["eagleeye_scorer_errors_total", ()] == 0


def test_a_bug_costs_only_its_job_and_is_counted(
    started: Callable[[MemorySource], Served], stream: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    one = started(MemorySource({"a": stream(R=4), "b": stream(R=4)}))
    one.source.broken = {"a": ZeroDivisionError("division by zero")}
    one.ticks(0, 15)
    assert [j["job"] for j in one.get("/api/v1/jobs")[1]["jobs"]] == ["b"]
    assert len(one.scorer.verdicts("b")) == 3
    assert one.metrics()["eagleeye_scorer_errors_total", ()] == 3
    assert "job a: the tick failed" in caplog.text
    one.source.broken = {}
    one.ticks(15, 20)
    assert len(one.scorer.verdicts("a")) == 1


def test_a_change_of_mind_is_logged_once(
    started: Callable[[MemorySource], Served], stream: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    made = stream(R=6, per_node=1)
    made.columns["log_hardware_errors"] = np.zeros((6, 400), np.float32)
    made.columns["log_hardware_errors"][4, 20:] = 1
    one = started(MemorySource({"llm": made}))
    with caplog.at_level("INFO", logger="eagleeye.online.scorer"):
        one.ticks(0, 60)
    lines = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[1].strip() for text in lines if text.startswith("job llm")] == ["unsure", "anomalous"]
    assert len([text for text in lines if text.startswith("incident ")]) == 1


def test_a_job_of_any_name(started: Callable[[MemorySource], Served], stream: Callable[..., Any]) -> None:
    name = 'team/llm "α"\n?x=1'
    one = started(MemorySource({name: stream(R=4)}))
    one.ticks(0, 5)
    quoted = urllib.parse.quote(name, safe="")
    assert one.get(f"/api/v1/jobs/{quoted}")[1]["job"] == name
    assert len(one.get(f"/api/v1/jobs/{quoted}/verdicts")[1]["verdicts"]) == 1
    assert one.metrics()["eagleeye_anomaly_votes", (("training_job", name),)] == 0


def test_old_jobs_are_forgotten(
    started: Callable[[MemorySource], Served], stream: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer_module, "KEPT_JOBS", 3)
    made = stream(R=4)
    one = started(MemorySource({"a": made, "b": made, "c": made}))
    one.ticks(0, 5)
    one.source.streams = {"d": made, "b": made}
    one.ticks(5, 10)
    assert [j["job"] for j in one.get("/api/v1/jobs")[1]["jobs"]] == ["b", "c", "d"]
    assert one.get("/api/v1/jobs/a")[0] == 404
    assert one.scorer.verdicts("a") == []
    assert ("training_job", "a") not in {label for _, labels in one.metrics() for label in labels}


def test_every_live_job_is_judged_however_many(stream: Callable[..., Any]) -> None:
    names = [f"job-{n:03d}" for n in range(300)]
    assert len(names) > scorer_module.KEPT_JOBS
    one = Scorer(Settings(learn_s=LEARN_S), MemorySource(dict.fromkeys(names, stream(R=3))), ManualClock(START_S))
    for t in (0, 5, 10):
        one.tick(START_S + t)
        assert sorted(one.snapshot.jobs) == names
    assert {len(one.verdicts(name)) for name in names} == {3}
    # the time watched adds up, so no job was forgotten and begun anew
    assert {job.verdict.reason for job in one.snapshot.jobs.values()} == {"learning what is normal for this job: 11 of 100 s"}


def test_a_source_that_is_down_makes_no_live_job_forgotten(stream: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer_module, "KEPT_JOBS", 1)
    source = MemorySource(dict.fromkeys("abc", stream(R=3)))
    one = Scorer(Settings(learn_s=LEARN_S), source, ManualClock(START_S))
    one.tick(START_S)
    source.down = SourceUnavailable("the server at http://x does not answer")
    one.tick(START_S + 5)
    assert sorted(one.snapshot.jobs) == ["a", "b", "c"]
    assert {job.verdict.decision for job in one.snapshot.jobs.values()} == {Decision.UNSURE}


def test_a_port_in_use(started: Callable[[MemorySource], Served]) -> None:
    one = started(MemorySource({}))
    port = one.server.server_port
    with pytest.raises(EnvironmentLacks, match=f"cannot serve on 127.0.0.1:{port}: Address already in use; choose another"):
        serve(one.scorer, "127.0.0.1", port)
    with pytest.raises(EnvironmentLacks, match=r"cannot serve on 192\.0\.2\.1:0: "):
        serve(one.scorer, "192.0.2.1", 0)
    for number in (-1, 65536):
        with pytest.raises(ValueError, match=f"port {number} does not exist; use 0 to 65535"):
            Settings(port=number)


def test_two_scorers_side_by_side(started: Callable[[MemorySource], Served], stream: Callable[..., Any]) -> None:
    one, two = started(MemorySource({"a": stream(R=4)})), started(MemorySource({"b": stream(R=4)}))
    one.ticks(0, 5)
    two.ticks(0, 10)
    assert [j["job"] for j in one.get("/api/v1/jobs")[1]["jobs"]] == ["a"]
    assert [j["job"] for j in two.get("/api/v1/jobs")[1]["jobs"]] == ["b"]


def test_the_loop_ticks_until_its_clock_stops(stream: Callable[..., Any]) -> None:
    class StoppingClock(ManualClock):
        @property
        def stopped(self) -> bool:
            return self.now_s() >= START_S + 30

    clock = StoppingClock(START_S)
    watching = Scorer(Settings(learn_s=LEARN_S, tick_s=10.0), MemorySource({"llm": stream(R=4)}), clock)
    watching.run()
    assert [v.to_s - START_S for v in watching.verdicts("llm")] == [0, 10, 20]
