"""The demo: a real training job on a small cluster, watched, broken on one node, judged, and a report of it all.

The scorer and the remediator are the product's own commands in processes of their own; this script tells them where the
exporters are and nothing else. It knows what was broken only to say at the end whether they were right.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import Cluster, end, exporter_program, free_port
from faults import FAULTS, NET_MODES, Fault, inject

from eagleeye.actions.journal import Journal
from eagleeye.clock import SystemClock, monotonic_s
from eagleeye.errors import EagleEyeError, EnvironmentLacks
from eagleeye.files import write_whole
from eagleeye.records import ActionKind, Incident, Verdict, from_json
from eagleeye.report import Report, Truth, render
from eagleeye.source.base import Settings, open_source
from eagleeye.window import Window

HERE = Path(__file__).parent
RUN_DIR = HERE / "run"
REPORT = HERE / "report.html"
INTERVAL_S = 1.0
START_TIMEOUT_S = 150.0
NORMAL_TICKS = 5
"""This many normal verdicts in a row show that the job is learned and well; only then is it broken."""
DETECT_TIMEOUT_S = 90.0
QUIET_S = 60.0
"""How long a job that nobody breaks is watched."""
AFTER_S = 14.0
"""Watched on after the verdict, for the curves and for the plan, which waits for more verdicts."""


@dataclass(slots=True)
class Story:
    """What happened, as far as this script has seen it."""

    started_s: float
    verdicts: dict[float, Verdict] = field(default_factory=dict)
    fault: Fault | None = None
    blamed: Verdict | None = None
    blamed_seen_s: float = 0.0

    def add(self, verdict: Verdict, seen_s: float) -> None:
        """Take one more verdict; the first that names a suspect is what counts."""
        self.verdicts.setdefault(verdict.to_s, verdict)
        if self.blamed is None and verdict.suspects:
            self.blamed, self.blamed_seen_s = verdict, seen_s


def main() -> int:
    """Run the demo; return 0 when what was broken, and nothing else, was blamed."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--fault", choices=(*FAULTS, "none"), default="slow", help="what to break; default %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="chooses the node and the network fault; default %(default)s")
    parser.add_argument("--net-mode", choices=NET_MODES, help="which network fault; default by --seed")
    parser.add_argument("--nodes", type=int, default=4, help="nodes of the job; default %(default)s")
    parser.add_argument(
        "--learn", type=float, default=60.0, metavar="S", help="seconds of normal work to learn; default %(default)s"
    )
    parser.add_argument("--prometheus", action="store_true", help="put a real Prometheus between exporters and scorer")
    parser.add_argument("--no-namespaces", action="store_true", help="all nodes on loopback, even where rights allow more")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    try:
        return run(options)
    except EagleEyeError as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def run(options: argparse.Namespace) -> int:
    """Make the cluster, watch it, break it, and tell."""
    prometheus = shutil.which("prometheus") if options.prometheus else None
    if options.prometheus and not prometheus:
        raise EnvironmentLacks("--prometheus needs the program prometheus on PATH: apt-get install prometheus")
    shutil.rmtree(RUN_DIR, ignore_errors=True)
    RUN_DIR.mkdir(parents=True)
    clock = SystemClock()
    story = Story(clock.now_s())
    cluster = Cluster(RUN_DIR, options.nodes, namespaces=False if options.no_namespaces else None)
    with cluster:
        setup = cluster.describe()
        say(story, setup)
        targets = [node.exporter_url for node in cluster.nodes]
        with watchers(targets, prometheus, options.learn) as (scorer_url, recorded, processes):
            say(story, f"verdicts are served on {scorer_url}/api/v1/jobs/{cluster.job} while the demo runs")
            watch(story, clock, scorer_url, cluster, options)
            known = [from_json(Incident, item) for item in (ask(scorer_url, "incidents") or {}).get("incidents", [])]
            # exporters see every process of this machine, so another job that runs here is watched, too
            incidents = [incident for incident in known if incident.job == cluster.job]
            for item in (ask(scorer_url, f"jobs/{cluster.job}/verdicts?last=2000") or {}).get("verdicts", []):
                story.add(from_json(Verdict, item), clock.now_s())
            end(processes)
            window = whole_run(cluster.job, recorded, story, clock)
    return tell(options, story, setup, incidents, window)


@contextmanager
def watchers(
    targets: list[str], prometheus: str | None, learn_s: float
) -> Iterator[tuple[str, Settings, list[subprocess.Popen[bytes]]]]:
    """Start the scorer and the remediator, with a Prometheus before them if asked.

    Yield the scorer's URL, where to read all that was scraped once the scorer has ended, and the two processes.
    """
    port = free_port()
    processes: list[subprocess.Popen[bytes]] = []
    recorded = Settings(history_dir=str(RUN_DIR / "history"), interval_s=INTERVAL_S)
    source, environment = ["--targets", ",".join(targets)], {"EAGLEEYE_SOURCE__HISTORY_DIR": recorded.history_dir}
    if prometheus:
        recorded = Settings(prometheus=start_prometheus(prometheus, targets, processes), interval_s=INTERVAL_S)
        source, environment = ["--prometheus", recorded.prometheus], {}
    score = ["score", *source, "--interval", f"{INTERVAL_S:g}", "--tick", f"{INTERVAL_S:g}", "--learn", f"{learn_s:g}"]
    remediate = ["remediate", "--scorer", f"http://127.0.0.1:{port}", "--journal", str(RUN_DIR / "journal.db"), "--interval", "1"]
    try:
        processes.append(start("scorer", [exporter_program(), *score, "--model", "none", "--port", str(port)], environment))
        processes.append(start("remediator", [exporter_program(), *remediate]))
        yield f"http://127.0.0.1:{port}", recorded, processes[-2:]
    finally:
        end(processes)


def start(name: str, command: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start one of our processes in a group of its own, its words in ``run/NAME.log``."""
    with (RUN_DIR / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=RUN_DIR,
            env=os.environ | (environment or {}),
            process_group=0,
        )


def start_prometheus(program: str, targets: list[str], processes: list[subprocess.Popen[bytes]]) -> str:
    """Start a Prometheus that scrapes the exporters every second; return its URL."""
    hosts = [target.split("//")[1].split("/")[0] for target in targets]
    settings = RUN_DIR / "prometheus.yml"
    settings.write_text(
        f"global: {{scrape_interval: {INTERVAL_S:g}s, scrape_timeout: {INTERVAL_S:g}s}}\n"
        f"scrape_configs: [{{job_name: eagleeye, static_configs: [{{targets: {json.dumps(hosts)}}}]}}]\n",
        encoding="utf-8",
    )
    port = free_port()
    data = ["--storage.tsdb.path", str(RUN_DIR / "prometheus"), "--web.listen-address", f"127.0.0.1:{port}"]
    processes.append(start("prometheus", [program, "--config.file", str(settings), *data]))
    return f"http://127.0.0.1:{port}"


def watch(story: Story, clock: SystemClock, scorer_url: str, cluster: Cluster, options: argparse.Namespace) -> None:
    """Follow the verdicts; break the node once the job is well; return when it was blamed, or not in time."""
    normal, last_line, told_s = 0, "", monotonic_s()
    until_s = told_s + START_TIMEOUT_S + options.learn
    while True:
        clock.sleep_s(0.5)
        known = ask(scorer_url, f"jobs/{cluster.job}")
        if known:
            verdict = from_json(Verdict, known["verdict"])
            fresh = verdict.to_s not in story.verdicts
            story.add(verdict, clock.now_s())
            normal = normal + fresh if verdict.decision.value == "normal" else 0
            line = f"{verdict.decision.value}: {verdict.reason}"
            # what changes with every tick is told every ten seconds, what is new at once
            if fresh and (line.split(": ")[:2] != last_line.split(": ")[:2] or monotonic_s() - told_s > 10):
                say(story, line)
                last_line, told_s = line, monotonic_s()
        elif monotonic_s() - told_s > 10:
            say(story, "waiting for the job's first step, and for the kernels (compiled once, up to two minutes)")
            told_s = monotonic_s()
        if story.fault is None and normal >= NORMAL_TICKS:
            if options.fault == "none":
                until_s, normal = monotonic_s() + QUIET_S, -(10**9)
                say(story, f"the job is learned and well; nothing is broken, watching for {QUIET_S:.0f} s more")
            else:
                story.fault = inject(cluster, options.fault, options.seed, mode=options.net_mode)
                until_s = monotonic_s() + DETECT_TIMEOUT_S
                say(story, f"BROKEN: {story.fault.how}")
        if story.blamed is not None and until_s > monotonic_s() + AFTER_S:
            until_s = monotonic_s() + AFTER_S
        if monotonic_s() > until_s:
            if not known and story.fault is None:
                raise EnvironmentLacks(f"the job did not begin to train in {START_TIMEOUT_S:.0f} s; see the logs in {RUN_DIR}")
            return


def ask(scorer_url: str, path: str) -> dict[str, Any] | None:
    """Return what the scorer says, None while it is not there or does not know the job yet."""
    try:
        with urllib.request.urlopen(f"{scorer_url}/api/v1/{path}", timeout=5) as answer:
            return dict(json.load(answer))
    except (OSError, urllib.error.URLError, ValueError):
        return None


def whole_run(job: str, recorded: Settings, story: Story, clock: SystemClock) -> Window:
    """Return everything that was scraped of the job, from the first verdict to the last, as one window."""
    first_s, last_s = min(story.verdicts, default=story.started_s), max(story.verdicts, default=clock.now_s())
    length_s = max(last_s - first_s, 10 * INTERVAL_S)
    source = open_source(recorded, clock)
    for window in source.history(last_s - length_s, last_s, length_s):
        if window.job == job:
            return window
    raise EnvironmentLacks(f"nothing was recorded of the job; see the logs in {RUN_DIR}")


def tell(options: argparse.Namespace, story: Story, setup: str, incidents: list[Incident], window: Window) -> int:
    """Write the report, print the timeline and the result; return the exit code."""
    journal = Journal(RUN_DIR / "journal.db")
    ids = {incident.id for incident in incidents}
    plans = [plan for plan in journal.plans() if plan.incident_id in ids]
    outcomes = [outcome for outcome in journal.outcomes() if outcome.operation_id.partition("-")[0] in ids]
    journal.close()
    fault, blamed = story.fault, story.blamed
    culprit = blamed.suspects[0] if blamed else None
    right = (culprit.node if culprit else None) == (fault.node if fault else None)
    detect_s = round(story.blamed_seen_s - fault.at_s, 1) if fault and blamed else None
    decided = {action.kind for plan in plans for action in plan.actions}
    decision = next((kind.value for kind in (ActionKind.EVICT, ActionKind.NOTIFY) if kind in decided), "none")
    truth = Truth("none", how="Nothing was broken on purpose.")
    if fault:
        truth = Truth(fault.fault, fault.node, fault.rank, fault.how, fault.at_s)
    notes = [
        "The signals are counters of the ranks' processes, of the nodes' networks, and the job's own progress; no GPU is used."
    ]
    page = render(
        Report(
            title=f"Demo: {options.fault}",
            setup=setup,
            window=window,
            verdicts=[story.verdicts[t] for t in sorted(story.verdicts)],
            incidents=incidents,
            plans=plans,
            outcomes=outcomes,
            truth=truth,
            notes=notes,
        )
    )
    write_whole(REPORT, page)
    print(file=sys.stderr)
    for outcome in outcomes:
        say(story, f"observed only: {outcome.detail}", at_s=outcome.started_s)
    if fault and blamed:
        verdict = "RIGHT" if right else "WRONG"
        say(story, f"{verdict}: {fault.node} was broken, {culprit.node if culprit else 'nobody'} was blamed {detect_s} s later")
    elif fault:
        say(story, f"MISSED: {fault.node} was broken and nobody was blamed in {DETECT_TIMEOUT_S:.0f} s")
    else:
        say(
            story,
            "RIGHT: nothing was broken and nobody was blamed" if right else f"FALSE ALARM: {blamed.reason if blamed else ''}",
        )
    say(story, f"report: {REPORT}")
    code = 0 if right else 1
    if options.json:
        result = {
            "fault": options.fault,
            "seed": options.seed,
            "node_broken": fault.node if fault else None,
            "node_blamed": culprit.node if culprit else None,
            "detect_s": detect_s,
            "decision": decision,
            "scope": blamed.scope if blamed else None,
            "category": blamed.category if blamed else None,
            "rule": blamed.rule if blamed else None,
            "votes": dict(blamed.votes) if blamed else None,
            "reason": blamed.reason if blamed else None,
            "how": fault.how if fault else None,
            "report": str(REPORT),
            "exit": code,
        }
        print(json.dumps(result), flush=True)
    return code


def say(story: Story, text: str, at_s: float | None = None) -> None:
    """Print one line of the timeline."""
    passed_s = (SystemClock().now_s() if at_s is None else at_s) - story.started_s
    print(f"[{passed_s:6.1f} s] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
