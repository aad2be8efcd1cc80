"""The demo: a real training job on a small cluster, watched, broken on one node, judged, healed, and a report of it all.

Scorer, remediator, caches and launchers are the product's own commands in processes of their own; this script tells them where to
find each other and nothing else. It knows what was broken only to say at the end whether they were right, and compares the healed
job with one that nobody broke.
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

from cluster import Cluster, Node, end, exporter_program, free_port
from faults import FAULTS, NET_MODES, Fault, inject
from recovery import newest, recovery, trained_on, unbroken

from eagleeye.actions.journal import Journal
from eagleeye.clock import SystemClock, monotonic_s
from eagleeye.errors import EagleEyeError, EnvironmentLacks
from eagleeye.files import write_whole
from eagleeye.records import ActionKind, Incident, Outcome, Plan, Result, Verdict, from_json, operation_of
from eagleeye.report import Recovery, Report, Truth, render
from eagleeye.source.base import Settings, open_source
from eagleeye.window import Window
from remediation.launcher.store import FolderStore

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
RECOVER_TIMEOUT_S = 120.0
"""From the verdict until the job has gone on for a while; the report says how long it really took."""


@dataclass(slots=True)
class Story:
    """What happened, as far as this script has seen it."""

    started_s: float
    verdicts: dict[float, Verdict] = field(default_factory=dict)
    fault: Fault | None = None
    blamed: Verdict | None = None
    blamed_seen_s: float = 0.0
    recovered: bool = False

    def add(self, verdict: Verdict, seen_s: float) -> None:
        """Take one more verdict; the first that names a suspect is what counts."""
        self.verdicts.setdefault(verdict.to_s, verdict)
        if self.blamed is None and verdict.suspects:
            self.blamed, self.blamed_seen_s = verdict, seen_s


def main() -> int:
    """Run the demo; return 0 when what was broken, and only that, was blamed and taken out, and the job went on unharmed."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--fault", choices=(*FAULTS, "none"), default="slow", help="what to break; default %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="chooses the node and the network fault; default %(default)s")
    parser.add_argument("--net-mode", choices=NET_MODES, help="which network fault; default by --seed")
    parser.add_argument("--nodes", type=int, default=4, help="nodes of the job; default %(default)s")
    parser.add_argument("--observe", action="store_true", help="plan only: nothing is evicted and nothing restarted")
    parser.add_argument(
        "--learn", type=float, default=60.0, metavar="S", help="seconds of normal work to learn; default %(default)s"
    )
    parser.add_argument(
        "--after", type=float, default=1.0, metavar="S", help="seconds to watch on once the job goes on; default %(default)s"
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
    cluster = Cluster(RUN_DIR, options.nodes, spares=1, namespaces=False if options.no_namespaces else None)
    with cluster:
        setup = cluster.describe()
        say(story, setup)
        targets = [node.exporter_url for node in cluster.nodes]
        acting = [] if options.observe else ["--act", "--backend", "local", "--rendezvous", str(cluster.rendezvous)]
        with watchers(targets, prometheus, options.learn, acting) as (scorer_url, recorded, processes):
            say(story, f"verdicts are served on {scorer_url}/api/v1/jobs/{cluster.job} while the demo runs")
            watch(story, clock, scorer_url, cluster, options)
            known = [from_json(Incident, item) for item in (ask(scorer_url, "incidents") or {}).get("incidents", [])]
            # exporters see every process of this machine, so another job that runs here is watched, too
            incidents = [incident for incident in known if incident.job == cluster.job]
            for item in (ask(scorer_url, f"jobs/{cluster.job}/verdicts?last=2000") or {}).get("verdicts", []):
                story.add(from_json(Verdict, item), clock.now_s())
            end(processes)
            window = whole_run(cluster.job, recorded, story, clock)
        plans, outcomes = written({incident.id for incident in incidents}, acted=not options.observe)
        round_s = started_s(cluster)
        nodes = list(cluster.nodes)
    healed = None
    if story.fault and story.blamed and not options.observe:
        healed = heal(nodes, cluster.ranks, story, outcomes, round_s)
    return tell(options, story, setup, incidents, plans, outcomes, window, healed)


def written(ids: set[str], acted: bool) -> tuple[list[Plan], list[Outcome]]:
    """Return the plans about these incidents, and how their actions ended, from the remediator's journal."""
    journal = Journal(RUN_DIR / "journal.db")
    plans = [plan for plan in journal.plans(acted=acted) if plan.incident_id in ids]
    outcomes = [o for o in journal.outcomes() if (named := operation_of(o.operation_id)) and named[0] in ids]
    journal.close()
    return plans, outcomes


def started_s(cluster: Cluster) -> float:
    """Return when the ranks were started last, seconds since the epoch."""
    told = FolderStore(cluster.rendezvous / cluster.job).get("job")
    return float(told[1].get("started_s") or 0.0) if told else 0.0


def heal(nodes: list[Node], ranks: int, story: Story, outcomes: list[Outcome], round_s: float) -> Recovery | None:
    """Return how the job went on, compared with an unbroken run; None when it did not go on."""
    fault = story.fault
    done = [(o.started_s, named[1]) for o in outcomes if o.result is Result.DONE and (named := operation_of(o.operation_id))]
    evicted = [(at_s, action.target) for at_s, action in done if action.kind is ActionKind.EVICT]
    if not evicted or fault is None:
        return None
    evict_s, node = evicted[0]
    after = newest(nodes, evict_s, ranks)
    if not after:
        return None
    last_step = max(max(stretch.losses, default=0) for stretch in after)
    say(story, f"comparing with an unbroken run of the same job up to step {last_step}")
    steady = unbroken(last_step, ranks, RUN_DIR)
    return recovery(nodes, ranks, node, fault.at_s, story.blamed_seen_s, evict_s, round_s, steady)


@contextmanager
def watchers(
    targets: list[str], prometheus: str | None, learn_s: float, acting: list[str]
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
    remediate = [
        "remediate",
        "--scorer",
        f"http://127.0.0.1:{port}",
        "--journal",
        str(RUN_DIR / "journal.db"),
        "--interval",
        "1",
        *acting,
    ]
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
    normal, last_line, told_s, waiting = 0, "", monotonic_s(), False
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
        if story.blamed is not None and story.fault and not waiting:
            waiting, until_s = True, monotonic_s() + (RECOVER_TIMEOUT_S if not options.observe else 14.0)
        if waiting and not story.recovered and trained_on(newest(cluster.nodes, story.blamed_seen_s, cluster.ranks)):
            story.recovered, until_s = True, monotonic_s() + options.after
            say(story, "the job goes on")
        if story.fault is None and all(node.launcher and node.launcher.poll() is not None for node in cluster.nodes):
            raise EnvironmentLacks(f"the job ended before anything was broken; see the logs in {RUN_DIR}")
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


def tell(
    options: argparse.Namespace,
    story: Story,
    setup: str,
    incidents: list[Incident],
    plans: list[Plan],
    outcomes: list[Outcome],
    window: Window,
    healed: Recovery | None,
) -> int:
    """Write the report, print the timeline and the result; return the exit code."""
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
            recovery=healed,
        )
    )
    write_whole(REPORT, page)
    print(file=sys.stderr)
    for outcome in outcomes:
        say(story, f"{outcome.result.value}: {outcome.detail}", at_s=outcome.started_s)
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
    if healed:
        same = "IDENTICAL to" if healed.identical else "DIFFERENT from"
        took = ", ".join(f"{name} {took_s:.1f} s" for name, took_s in healed.phases)
        say(story, f"{healed.evicted} is out, {healed.spare} took its place: {took}")
        say(story, f"the job went on from step {healed.restored_step}, {same} an unbroken run in every loss and parameter")
    elif fault and not options.observe:
        say(story, "NOT HEALED: the job did not go on")
    say(story, f"report: {REPORT}")
    mended = healed is not None and healed.identical and fault is not None and healed.evicted == fault.node
    code = 0 if right and (mended or options.observe or not fault) else 1
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
            **recovered(healed, fault),
            "report": str(REPORT),
            "exit": code,
        }
        print(json.dumps(result), flush=True)
    return code


def recovered(healed: Recovery | None, fault: Fault | None) -> dict[str, Any]:
    """Return what JSON tells of the recovery, None in every place when there was none."""
    if healed is None or fault is None:
        return dict.fromkeys(
            ("restart_s", "restore_s", "mttr_s", "phases_s", "restored_from", "restored_step", "loss_identical", "param_hash")
        )
    took_s = dict(healed.phases)
    whole_s = sum(took_s.values())
    sources = {str(restore.rank): restore.source for restore in healed.restores}
    return {
        "restart_s": round(whole_s - took_s["detect"], 1),
        "restore_s": round(max(restore.restore_s for restore in healed.restores), 3),
        "mttr_s": round(whole_s, 1),
        "phases_s": {name: round(s, 1) for name, s in healed.phases},
        "restored_from": sources[str(fault.rank)],
        "restored_from_by_rank": sources,
        "restored_step": healed.restored_step,
        "loss_identical": healed.identical,
        "param_hash": next((digest for _, digest, known in reversed(healed.saves) if known), None),
    }


def say(story: Story, text: str, at_s: float | None = None) -> None:
    """Print one line of the timeline."""
    passed_s = (SystemClock().now_s() if at_s is None else at_s) - story.started_s
    print(f"[{passed_s:6.1f} s] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
