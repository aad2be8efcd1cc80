"""What the scorer knows, over HTTP: /metrics for Prometheus, read-only JSON for people and for `eagleeye remediate`.

GET only; `PATHS` lists them. /healthz answers 503 until the kernels are warm.
"""

import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from eagleeye.errors import EnvironmentLacks, UsageError
from eagleeye.online.explain import explain
from eagleeye.online.scorer import JobState, Scorer, Shadow
from eagleeye.records import Decision, IncidentState, to_json

PATHS = (
    "/healthz, /metrics, /api/v1/jobs, /api/v1/jobs/JOB, /api/v1/jobs/JOB/verdicts, /api/v1/jobs/JOB/explain?rank=R, "
    "/api/v1/incidents"
)

CLIENT_TIMEOUT_S = 10.0
"""A client that says or takes nothing for this long is left."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no event; everything else is printed."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class SnapshotCollector:
    """The scorer's snapshot as Prometheus families; made anew at each scrape, so that a job that is gone leaves no series."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        snapshot = self._scorer.snapshot
        score = GaugeMetricFamily(
            "eagleeye_anomaly_score",
            "Score of a rank; above 1 is anomalous.",
            labels=("detector", "training_job", "rank", "node"),
        )
        votes = GaugeMetricFamily(
            "eagleeye_anomaly_votes", "Detectors that found any rank of the job anomalous.", labels=("training_job",)
        )
        state = GaugeMetricFamily(
            "eagleeye_anomaly_state", "1 for the newest verdict of the job, else 0.", labels=("training_job", "state")
        )
        drift = GaugeMetricFamily(
            "eagleeye_model_drift_ratio",
            "Share of recent rank-ticks judged normal that lie above all normal work that the model was calibrated on.",
            labels=("training_job",),
        )
        shadow_verdicts = CounterMetricFamily(
            "eagleeye_shadow_verdicts", "Verdicts of the candidate model, by decision.", labels=("training_job", "decision")
        )
        disagreements = CounterMetricFamily(
            "eagleeye_shadow_disagreements",
            "Verdicts of the candidate model whose decision or nodes differ from the live ones.",
            labels=("training_job",),
        )
        for job, known in snapshot.jobs.items():
            drift.add_metric((job,), known.drift.ratio)
            if known.shadow:
                disagreements.add_metric((job,), known.shadow.disagreements_total)
                for result, count in known.shadow.verdicts_total.items():
                    shadow_verdicts.add_metric((job, result), count)
            votes.add_metric((job,), sum(1 for vote in known.verdict.votes.values() if vote))
            for decision in Decision:
                state.add_metric((job, decision.value), float(known.verdict.decision is decision))
            for one in known.scores:
                for (rank, node, _), value in zip(known.ranks, one.score_R, strict=True):
                    if np.isfinite(value):
                        score.add_metric((one.detector, job, str(rank), node), float(value))
        yield from (score, votes, state, drift, shadow_verdicts, disagreements)
        opened = GaugeMetricFamily(
            "eagleeye_incident_open",
            "1 for each node of an open incident; node is empty for the whole job.",
            labels=("training_job", "node", "category"),
        )
        for incident in snapshot.incidents:
            if incident.state is IncidentState.OPEN:
                for node in incident.nodes or ("",):
                    opened.add_metric((incident.job, node, incident.category.value), 1.0)
        yield opened
        scored = CounterMetricFamily("eagleeye_scorer_windows_scored", "Windows judged, by decision.", labels=("result",))
        for result, count in snapshot.windows_total.items():
            scored.add_metric((result,), count)
        yield scored
        yield CounterMetricFamily("eagleeye_scorer_errors", "Ticks of a job that failed by a bug.", value=snapshot.errors_total)
        yield GaugeMetricFamily("eagleeye_scorer_ready", "1 once the kernels are warm.", value=float(snapshot.ready))
        yield GaugeMetricFamily(
            "eagleeye_scorer_warm_up_seconds", "Time that compiling the kernels took.", value=snapshot.warm_up_s
        )
        yield GaugeMetricFamily("eagleeye_scorer_tick_duration_seconds", "Duration of the newest tick.", value=snapshot.tick_s)
        yield GaugeMetricFamily("eagleeye_scorer_last_tick_timestamp_seconds", "When the newest tick ran.", value=snapshot.at_s)
        yield GaugeMetricFamily(
            "eagleeye_scorer_failures",
            "Targets and jobs that could not be read in the newest tick.",
            value=len(snapshot.failures),
        )
        model = InfoMetricFamily("eagleeye_scorer_model", "The model in use.")
        model.add_metric((), {"model": snapshot.model})
        yield model


def serve(scorer: Scorer, address: str, port: int) -> ThreadingHTTPServer:
    """Start serving in a thread; `server_port` of the result tells the port. Stop with `shutdown()`.

    Raises
    ------
    EnvironmentLacks
        The port is in use or the address is not this machine's.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(scorer))

    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_TIMEOUT_S

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if url.path == "/metrics":
                return self._answer(200, generate_latest(registry), "text/plain; version=0.0.4; charset=utf-8")
            status, body = _route(scorer, [unquote(p) for p in url.path.strip("/").split("/")], parse_qs(url.query))
            self._answer(status, json.dumps(body).encode(), "application/json")

        def _answer(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: one line a scrape is noise."""

    try:
        server = _Server((address, port), Handler)
    except OSError as error:
        raise EnvironmentLacks(
            f"cannot serve on {address}:{port}: {error.strerror or error}; choose another [online] address or port"
        ) from None
    threading.Thread(target=server.serve_forever, name="service", daemon=True).start()
    return server


def _route(scorer: Scorer, path: list[str], query: dict[str, list[str]]) -> tuple[int, Any]:
    snapshot = scorer.snapshot
    match path:
        case ["healthz"]:
            return (200 if snapshot.ready else 503), {
                "ready": snapshot.ready,
                "at_s": snapshot.at_s,
                "failures": dict(snapshot.failures),
            }
        case ["api", "v1", "jobs"]:
            return 200, {"jobs": [_summary(job, known) for job, known in sorted(snapshot.jobs.items())]}
        case ["api", "v1", "jobs", job] if job in snapshot.jobs:
            return 200, {**_summary(job, snapshot.jobs[job]), "ranks": _ranks(snapshot.jobs[job])}
        case ["api", "v1", "jobs", job, "verdicts"] if job in snapshot.jobs:
            last = query.get("last", ["100"])[0]
            if not re.fullmatch("0*[1-9][0-9]{0,8}", last):
                return 400, {"error": f"last={last!r} must be a number above zero"}
            return 200, {"verdicts": [to_json(v) for v in scorer.verdicts(job, int(last))]}
        case ["api", "v1", "jobs", job, "explain"] if job in snapshot.jobs:
            ranks = query.get("rank", [])
            for rank in ranks:
                if not re.fullmatch("[0-9]{1,9}", rank, re.ASCII):
                    return 400, {"error": f"rank={rank!r} must be a number"}
            try:
                return 200, to_json(explain(snapshot.jobs[job].grounds, [int(rank) for rank in ranks]))
            except UsageError as error:
                return 404, {"error": str(error)}
        case ["api", "v1", "incidents"]:
            return 200, {"incidents": [to_json(i) for i in snapshot.incidents]}
        case ["api", "v1", "jobs", job, *_]:
            return 404, {"error": f"no job {job!r} is being watched; GET /api/v1/jobs lists those that are"}
    return 404, {"error": f"not here; there are {PATHS}"}


def _summary(job: str, known: JobState) -> dict[str, Any]:
    return {
        "job": job,
        "ranks_total": len(known.ranks),
        "nodes": sorted({node for _, node, _ in known.ranks}),
        "verdict": to_json(known.verdict),
        "drift_ratio": round(known.drift.ratio, 4),
        "model_fits": known.drift.fits,
        "shadow": _shadow(known.shadow) if known.shadow else None,
    }


def _shadow(shadow: Shadow) -> dict[str, Any]:
    return {
        "model": shadow.model,
        "verdict": to_json(shadow.verdict) if shadow.verdict else None,
        "failure": shadow.failure,
        "agrees": shadow.agrees if shadow.verdict else None,
        "disagreements_total": shadow.disagreements_total,
    }


def _ranks(known: JobState) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "node": node,
            "group": group,
            "scores": {s.detector: round(float(s.score_R[i]), 3) if np.isfinite(s.score_R[i]) else None for s in known.scores},
        }
        for i, (rank, node, group) in enumerate(known.ranks)
    ]
