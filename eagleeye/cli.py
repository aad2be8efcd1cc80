"""The verbs. Each subcommand lives in its own small pair of functions: one adds its options, one runs it and imports inside."""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from eagleeye import __version__
from eagleeye.errors import ConfigError, EagleEyeError, EnvironmentLacks, MissingExtra, UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return its exit code. A user's mistake prints one sentence, never a traceback."""
    parser = argparse.ArgumentParser(prog="eagleeye", description="Which rank of the training job is bad, and why.")
    parser.add_argument("--version", action="version", version=f"eagleeye {__version__}")
    parser.add_argument("--config", metavar="FILE", help="settings; default ./eagleeye.toml when it exists")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, (summary, add_options, run) in VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=summary)
        add_options(verb)
        verb.set_defaults(run=run)
    options = parser.parse_args(argv)
    try:
        return int(options.run(options))
    except EagleEyeError as error:
        print(f"eagleeye {options.verb}: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "eagleeye", "remediation", "checkpoint"):
            raise
        print(f"eagleeye {options.verb}: needs the package {package!r}: pip install 'eagleeye-toolkit[detect]'", file=sys.stderr)
        return MissingExtra.exit_code
    except KeyboardInterrupt:
        return 130


def _file(options: argparse.Namespace) -> dict[str, Any]:
    """Return the parsed settings file that --config names, or the default one."""
    from pathlib import Path

    from eagleeye import config, plugins

    data = config.read(Path(options.config) if options.config else None)
    parts = ("launcher", *plugins.names("backend")) if "remediation" in data else ()
    for part in data.get("remediation", ()):
        if part not in parts:
            raise ConfigError(f"unknown section [remediation.{part}]; there are {', '.join(parts)}")
    return data


def _export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--node", help="name of this node; default $EAGLEEYE_NODE, $NODE_NAME, or the host name")
    parser.add_argument("--address", help="address to serve on; default 0.0.0.0, that is all")
    parser.add_argument("--port", type=int, help="port to serve on; default 9470, 0 takes a free one")
    parser.add_argument("--job", help="name of the job, where its processes do not carry EAGLEEYE_JOB")
    parser.add_argument("--logs", metavar="GLOB", action="append", help="log files to watch; may be repeated")
    parser.add_argument("--run-dir", metavar="DIR", help="folder of the progress files")
    parser.add_argument("--collectors", metavar="NAME[,NAME...]", help="collectors to run; default all")
    parser.add_argument("--proc-root", metavar="DIR", help="where procfs is mounted; default /proc")
    parser.add_argument("--sys-root", metavar="DIR", help="where sysfs is mounted; default /sys")


def _export(options: argparse.Namespace) -> int:

    from eagleeye import config
    from eagleeye.collect.base import Settings
    from eagleeye.collect.exporter import serve

    names = ("node", "address", "port", "job", "logs", "run_dir", "collectors", "proc_root", "sys_root")
    data = _file(options)
    return serve(config.settings(Settings, "collect", data, {name: getattr(options, name) for name in names}))


def _record_options(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--targets", metavar="URL[,URL...]", help="exporters to scrape")
    where.add_argument("--prometheus", metavar="URL", help="a Prometheus server that scrapes the exporters")
    parser.add_argument("--job", required=True, metavar="J", help="the training job")
    parser.add_argument("--duration", required=True, metavar="TIME", help="how long, for example 10m")
    parser.add_argument("--interval", metavar="TIME", help="seconds between columns; default 5s")
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder for the trace")


def _record(options: argparse.Namespace) -> int:
    import signal
    from pathlib import Path

    from eagleeye import config
    from eagleeye.clock import SystemClock
    from eagleeye.source.base import Settings, open_source
    from eagleeye.source.record import record

    duration_s = config.duration_s(options.duration)
    data = _file(options)
    flags: dict[str, object] = {"targets": options.targets, "prometheus": options.prometheus, "interval_s": options.interval}
    if options.targets or options.prometheus:  # the flag replaces whatever the file reads from
        flags |= {"targets": options.targets or "", "prometheus": options.prometheus or ""}
    settings = config.settings(Settings, "source", data, flags | {"history_dir": ""})
    clock = SystemClock()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: clock.stop())
    same_line = sys.stderr.isatty()

    def tell(done_s: float, ranks: int, metrics: int) -> None:
        line = f"recorded {round(done_s, 1):g} of {duration_s:g} s, {ranks} ranks, {metrics} metrics"
        print(line, end="\r" if same_line and done_s < duration_s else "\n", file=sys.stderr, flush=True)

    source = open_source(settings, clock)
    try:
        done_s = record(source, clock, options.job, duration_s, Path(options.out), tell)
    finally:
        source.close()
    print(f"{options.out}: {round(done_s, 1):g} s of job {options.job}", file=sys.stderr)
    return 0


def _score_options(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--replay", metavar="DIR", nargs="+", help="judge recorded traces instead of live jobs")
    where.add_argument("--targets", metavar="URL[,URL...]", help="exporters to scrape")
    where.add_argument("--prometheus", metavar="URL", help="a Prometheus server that scrapes the exporters")
    parser.add_argument("--out-dir", metavar="OUT", help="with --replay: folder for OUT/NAME.jsonl")
    parser.add_argument("--interval", metavar="TIME", help="seconds between columns of a live window; default 5s")
    parser.add_argument("--tick", metavar="TIME", help="seconds between two looks at a live job; default 5s")
    parser.add_argument(
        "--learn", metavar="TIME", help="normal work that a job is watched for before it is compared; default 10m"
    )
    parser.add_argument("--model", metavar="NAME", help="alias or version in the registry, or none; default champion")
    parser.add_argument("--no-shadow", action="store_true", help="do not let the registry's candidate judge live jobs in shadow")
    parser.add_argument("--address", help="address to serve on; default 127.0.0.1")
    parser.add_argument("--port", type=int, help="port to serve on; default 9471, 0 takes a free one")


def _score(options: argparse.Namespace) -> int:
    from pathlib import Path

    from eagleeye import config
    from eagleeye.online.judge import Settings

    data = _file(options)
    flags = {
        "learn_s": options.learn,
        "tick_s": options.tick,
        "model": options.model,
        "address": options.address,
        "port": options.port,
    }
    settings = config.settings(Settings, "online", data, flags)
    if options.replay:
        from eagleeye.online.replay import replay

        if not options.out_dir:
            raise UsageError("--replay needs --out-dir, the folder for the verdicts")
        model, name = _model(settings.model, data)
        tell = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
        replay([Path(folder) for folder in options.replay], Path(options.out_dir), settings, model, name, tell)
        return 0
    return _score_live(options, data, settings)


def _score_live(options: argparse.Namespace, data: dict[str, Any], settings: Any) -> int:
    import logging
    import signal
    from dataclasses import replace

    from eagleeye import config
    from eagleeye.clock import SystemClock
    from eagleeye.online.judge import Judge
    from eagleeye.online.scorer import Scorer
    from eagleeye.online.service import serve
    from eagleeye.source.base import Settings as SourceSettings
    from eagleeye.source.base import open_source

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stderr)
    flags: dict[str, object] = {"interval_s": options.interval}
    if options.targets or options.prometheus:  # the flag replaces whatever the file reads from
        flags |= {"targets": options.targets or "", "prometheus": options.prometheus or ""}
    clock = SystemClock()
    chosen = config.settings(SourceSettings, "source", data, flags)
    # the memory of a source that scrapes must reach as far back as a judge wants to learn
    chosen = replace(chosen, ring_s=max(chosen.ring_s, 1.1 * Judge.longest_s(settings, chosen.interval_s)))
    source = open_source(chosen, clock)
    model, name = _model(settings.model, data)
    shadow, shadow_name = (None, "") if options.no_shadow else _candidate(settings.model, data)
    if shadow:
        logging.info("%s judges in shadow", shadow_name)
    scorer = Scorer(settings, source, clock, model, name, shadow, shadow_name)
    server = serve(scorer, settings.address, settings.port)
    try:
        logging.info("serving on http://%s:%d, warming up", settings.address, server.server_port)
        scorer.warm_up()
        logging.info("ready after %.1f s; model: %s", scorer.snapshot.warm_up_s, name)
        # only now: while kernels compile nothing is to be saved, and a signal ends the process at once
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: clock.stop())
        scorer.run()
    finally:
        server.shutdown()
        source.close()
    return 0


def _model(wanted: str, data: dict[str, Any]) -> tuple[Any, str]:
    """Return (ensemble, name); without a registry or a champion every job learns from its own first minutes, and that is said."""
    if wanted == "none":
        return None, "own past"
    from eagleeye import config, models

    settings = config.settings(models.Settings, "offline", data)
    if wanted == "champion" and not models.exists(settings, wanted):
        print("no champion is registered yet: every job learns from its own first minutes", file=sys.stderr)
        return None, "own past"
    return models.load(settings, wanted)


def _candidate(live: str, data: dict[str, Any]) -> tuple[Any, str]:
    """Return (ensemble, name) of what judges in shadow beside `live`; a candidate that cannot be loaded is only told of."""
    if live == "none":
        return None, ""
    from eagleeye import config, models

    try:
        return models.candidate(config.settings(models.Settings, "offline", data), live) or (None, "")
    except EagleEyeError as error:
        print(f"the candidate cannot judge in shadow: {error}", file=sys.stderr)
        return None, ""


def _explain_options(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--replay", metavar="DIR", help="a recorded trace, judged up to --at")
    where.add_argument("--scorer", metavar="URL", help="where `eagleeye score` serves, for example http://127.0.0.1:9471")
    parser.add_argument("--job", metavar="J", help="with --scorer: the training job")
    parser.add_argument(
        "--at", metavar="TIME",
        help="with --replay: first (anomalous verdict), 2026-03-02T08:31:10Z, or a time since the trace's start such as 25m; "
        "default: the first, else the end",
    )  # fmt: skip
    parser.add_argument(
        "--rank", metavar="R", type=int, action="append", default=[],
        help="the rank to explain; may be repeated; default: the suspects and two that lie out furthest after them",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--learn", metavar="TIME", help="as for score")
    parser.add_argument("--model", metavar="NAME", help="as for score")


def _explain(options: argparse.Namespace) -> int:
    import json

    from eagleeye.online import explain
    from eagleeye.records import to_json

    if options.scorer:
        from eagleeye.actions.scorer_client import check_address

        of_replay = next((f"--{name}" for name in ("at", "learn", "model") if getattr(options, name) is not None), None)
        if of_replay:
            raise UsageError(f"{of_replay} belongs to --replay: a scorer tells of its newest verdict alone")
        if not options.job:
            raise UsageError("--scorer needs --job, the training job")
        check_address(options.scorer)
        found = explain.ask(options.scorer, options.job, options.rank)
    else:
        found = _explain_replay(options)
    print(json.dumps(to_json(found)) if options.json else explain.text(found), end="\n" if options.json else "")
    return 0


def _explain_replay(options: argparse.Namespace) -> Any:
    from eagleeye import config
    from eagleeye.errors import NoData
    from eagleeye.online import explain
    from eagleeye.online.judge import Judge, Settings
    from eagleeye.source.trace import TraceSource

    if options.job:
        raise UsageError("--job belongs to --scorer: a trace is of one job")
    data = _file(options)
    settings = config.settings(Settings, "online", data, {"learn_s": options.learn, "model": options.model})
    source = TraceSource(options.replay)
    explain.check_ranks(source.job, source.ranks, options.rank)
    end_s = None
    if options.at not in (None, "first"):
        end_s = explain.tick_s(source, _instant(options.at, float(source.stamps_s[0])))
    model, name = _model(settings.model, data)
    grounds = explain.at(source, Judge(settings, model, name), end_s)
    if options.at == "first" and grounds.verdict.decision.value != "anomalous":
        raise NoData(f"no verdict on {options.replay} is anomalous; choose another time with --at")
    return explain.explain(grounds, options.rank)


def _instant(text: str, start_s: float) -> float:
    """Return what --at means, in seconds since the epoch; UTC where no zone is told."""
    from datetime import UTC, datetime

    from eagleeye import config

    with suppress(ConfigError):
        return start_s + config.duration_s(text)
    try:
        told = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--at {text!r} is no time; write first, 2026-03-02T08:31:10Z, or 25m after the trace's start") from None
    return (told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp()


def _remediate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scorer", metavar="URL", default="http://127.0.0.1:9471", help="where `eagleeye score` serves; default %(default)s"
    )
    parser.add_argument("--journal", metavar="FILE", help="SQLite file for plans and outcomes; default eagleeye-data/journal.db")
    parser.add_argument(
        "--interval", metavar="TIME", default="5s", help="time between two looks at the incidents; default %(default)s"
    )
    parser.add_argument("--once", action="store_true", help="look once and exit")
    parser.add_argument("--act", action="store_true", help="carry the plans out; without it they are only written down")
    parser.add_argument("--backend", metavar="NAME", help="who sees the jobs and acts on them; default dryrun: nobody")
    parser.add_argument("--rendezvous", metavar="DIR", help="folder in which the nodes of a local job meet (backend local)")


def _remediate(options: argparse.Namespace) -> int:
    import signal
    from contextlib import closing
    from pathlib import Path

    from eagleeye import config, plugins
    from eagleeye.actions.journal import Journal
    from eagleeye.actions.policy import Settings
    from eagleeye.actions.runner import Runner
    from eagleeye.actions.scorer_client import check_address, incidents, jobs
    from eagleeye.clock import SystemClock

    interval_s = config.duration_s(options.interval)
    data = _file(options)
    settings = config.settings(Settings, "actions", data, {"journal": options.journal, "backend": options.backend})
    check_address(options.scorer)
    if options.act and settings.backend == "dryrun":
        raise UsageError("--act needs a backend that can act, and dryrun only writes down; choose one with --backend")
    eyes = _backend(settings.backend, data, {"rendezvous": options.rendezvous})
    hands = eyes if options.act else plugins.load("backend", "dryrun")()
    journal, clock = Journal(Path(settings.journal), acting=options.act), SystemClock()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: clock.stop())
    nodes = "1 node" if settings.max_nodes == 1 else f"{settings.max_nodes} nodes"
    limits = f"at most {nodes} at a time, never below the job's minimum"
    mode = f"ACTING through backend {settings.backend}: {limits}" if options.act else "observe only: nothing is touched"
    _tell(mode, sys.stderr)
    runner = Runner(settings, eyes, hands, journal, clock, _tell)
    with closing(journal):
        silent_since = ""
        while not clock.stopped:
            failure = None
            try:
                runner.watch(jobs(options.scorer) if options.act else ())
                found, silent_since = incidents(options.scorer), ""
            except EagleEyeError as error:
                found, failure = [], error
                if not options.once and str(error) != silent_since:
                    _tell(f"eagleeye remediate: {error}", sys.stderr)
                silent_since = str(error)
            runner.respond(found)  # also when the scorer is silent: what was begun goes on
            if options.once and failure is not None:
                raise failure
            if options.once:
                opened = sum(incident.state.value == "open" for incident in found)
                print(f"open incidents: {opened}", file=sys.stderr)
                break
            clock.sleep_s(interval_s)
    return 0


def _tell(text: str, file: Any = None) -> None:
    """Print, if it can be: a full disk or a broken pipe below the log is no reason to leave a job alone."""
    with suppress(OSError, ValueError):
        print(text, file=file or sys.stdout, flush=True)


def _backend(name: str, data: dict[str, Any], flags: dict[str, Any]) -> Any:
    """Return the backend called `name`, with its settings from ``[remediation.NAME]`` and the flags if it has any."""
    from eagleeye import config, plugins

    kind = plugins.load("backend", name)
    settings = getattr(sys.modules[kind.__module__], "Settings", None)
    if settings is not None:
        return kind(config.settings(settings, f"remediation.{name}", data, flags))
    given = [f"--{flag}" for flag, value in flags.items() if value is not None]
    if given:
        raise UsageError(f"backend {name} knows no {given[0]}")
    return kind()


def _cache_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--node", help="name of this node; default $EAGLEEYE_NODE, $NODE_NAME, or the host name")
    parser.add_argument("--address", help="address at which other nodes reach this cache; default that of the host name")
    parser.add_argument("--port", type=int, help="TCP port for other nodes; default 9480, 0 takes a free one")
    parser.add_argument("--run-dir", metavar="DIR", help="folder of the socket, the lock and the index")
    parser.add_argument("--storage", metavar="DIR", help="folder, shared by all nodes, to which generations are written")
    parser.add_argument(
        "--memory-bytes", metavar="SIZE", help="most memory to take, for example 64GiB; default half of the machine's"
    )
    parser.add_argument("--peers", metavar="NODE=HOST:PORT,...", help="the other nodes' caches, where no launcher tells them")
    parser.add_argument("--replicas", type=int, metavar="N", help="other nodes that hold a copy of each shard; default 1")
    parser.add_argument("--domain", metavar="RACK[/POWER]", help="what this node fails together with; copies go elsewhere")
    parser.add_argument("--key-file", metavar="FILE", help="secret that all caches of the cluster share")
    parser.add_argument("--take-over", action="store_true", help="go on with the memory of the cache that runs here, and end it")
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", title="instead of serving", help="what to do instead of serving"
    )
    for name, summary in (
        ("list", "print what memory and storage hold"),
        ("verify", "read every byte that is held; exit code 1 when some are not those that were saved"),
        ("pin", "keep the newest committed generation of a step in storage for good"),
        ("unpin", "let it go when newer ones are there"),
        ("odds", "print who holds the copies of whom among the --peers, and what losses all shards survive"),
    ):
        action = actions.add_parser(name, help=summary, description=summary)
        # what stands before the action counts, too
        action.add_argument("--storage", metavar="DIR", default=argparse.SUPPRESS, help="storage folder")
        if name == "odds":
            action.add_argument("--peers", metavar="NODE=HOST:PORT,...", default=argparse.SUPPRESS, help="all caches")
            action.add_argument(
                "--replicas", type=int, metavar="N", default=argparse.SUPPRESS, help="copies of each shard; default 1"
            )
        if name in ("list", "verify"):
            action.add_argument("--run-dir", metavar="DIR", default=argparse.SUPPRESS, help="run folder of the cache")
        if name == "verify":
            action.add_argument("--job", default="", help="verify this job alone")
        if name in ("pin", "unpin"):
            action.add_argument("job", metavar="JOB")
            action.add_argument("step", metavar="STEP", type=int)


def _cache(options: argparse.Namespace) -> int:
    from pathlib import Path

    from checkpoint import audit, catalogue, errors, listing, place, placement, server
    from eagleeye import config

    names = (
        "node", "address", "port", "run_dir", "storage", "memory_bytes", "peers", "replicas", "domain", "key_file",
    )  # fmt: skip
    flags = {name: getattr(options, name) for name in names}
    settings = config.settings(server.Settings, "checkpoint", _file(options), flags)
    try:
        run_dir, storage = place.run_dir(settings.run_dir), Path(settings.storage) if settings.storage else None
        if options.action == "list":
            print(listing.held(run_dir, storage))
            return 0
        if options.action == "odds":
            domains = {node: place.split(address)[2] for node, address in place.peers(settings.peers).items()}
            if not domains:
                raise UsageError("of which nodes? name all caches by --peers NODE=HOST:PORT@RACK,...")
            print(placement.odds_table(domains, settings.replicas))
            return 0
        if options.action == "verify":
            return int(audit.report(run_dir, storage, options.job) > 0)
        if options.action in ("pin", "unpin"):
            if storage is None:
                raise UsageError("where does the generation lie? name the storage folder by --storage")
            pinned = options.action == "pin"
            for stored in (catalogue.pin if pinned else catalogue.unpin)(storage, options.job, options.step):
                print(f"{stored.folder} stays {'for good' if pinned else 'as long as it is one of the newest'}")
            return 0
        return server.serve(settings, take_over=options.take_over)
    except errors.UsageError as error:
        raise UsageError(str(error)) from None
    except errors.CheckpointError as error:
        raise EnvironmentLacks(str(error)) from None


def _launch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", help="name of the job; default $EAGLEEYE_JOB")
    parser.add_argument("--nodes", type=int, help="nodes that hold ranks; the job never runs on fewer")
    parser.add_argument("--ranks-per-node", type=int, help="processes on each node; default 1")
    parser.add_argument("--spare", action="store_true", default=None, help="this node waits to replace another")
    parser.add_argument("--rendezvous", metavar="DIR", help="folder that all nodes of the job share")
    parser.add_argument("--node", help="name of this node; default $EAGLEEYE_NODE, $NODE_NAME, or the host name")
    parser.add_argument("--address", help="address at which other nodes reach this one; default that of the host name")
    parser.add_argument("--max-restarts", type=int, help="restarts that may get no further before the job is given up; default 3")
    parser.add_argument(
        "--watch", metavar="DIR", help="folder of this node that the script fills by torch.save: kept in the cache"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD", help="the training script and its arguments")


def _launch(options: argparse.Namespace) -> int:
    from eagleeye import config
    from remediation.launcher import agent

    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError("what should be launched? write it after two dashes: eagleeye launch --nodes 4 -- python train.py")
    names = ("job", "nodes", "ranks_per_node", "spare", "rendezvous", "node", "address", "max_restarts", "watch")
    flags = {name: getattr(options, name) for name in names}
    return agent.launch(config.settings(agent.Settings, "remediation.launcher", _file(options), flags), command)


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE_DIR", help="the recorded trace; its labels.json, if any, is taken as the truth")
    parser.add_argument("--verdicts", required=True, metavar="FILE", help="the .jsonl file that `eagleeye score --replay` wrote")
    parser.add_argument("--out", metavar="FILE", default="report.html", help="where to write the page; default %(default)s")


def _report(options: argparse.Namespace) -> int:
    from pathlib import Path

    from eagleeye import config, report
    from eagleeye.actions import policy
    from eagleeye.files import write_whole
    from eagleeye.online.incidents import advance
    from eagleeye.records import Incident
    from eagleeye.source.trace import TraceSource

    data = _file(options)
    settings = config.settings(policy.Settings, "actions", data)
    source = TraceSource(options.trace)
    first_s, last_s = float(source.stamps_s[0]), float(source.stamps_s[-1])
    window = source.window(source.job, last_s, last_s - first_s + source.step_s)
    verdicts = report.read_verdicts(Path(options.verdicts), source.job)
    if verdicts and not first_s - source.step_s <= verdicts[0].to_s <= verdicts[-1].to_s <= last_s + source.step_s:
        raise UsageError(f"{options.verdicts} holds verdicts of another time than {options.trace}; give the file of this trace")
    incidents: tuple[Incident, ...] = ()
    for verdict in verdicts:
        incidents = advance(incidents, verdict)
    plans = [plan for incident in incidents if (plan := policy.plan(incident, settings))]
    truth, notes = _truth(options.trace)
    notes.append("The verdicts come from a replay of the recorded trace; each used only what had been stamped by then.")
    page = report.render(report.Report(source.job, "", window, verdicts, incidents, plans, truth=truth, notes=notes))
    write_whole(Path(options.out), page)
    print(f"{options.out}: {len(window.ranks)} ranks, {len(verdicts)} verdicts", file=sys.stderr)
    return 0


def _truth(folder: str) -> tuple[Any, list[str]]:
    """Return (what was broken by the labels of a trace or None, what else they say)."""
    from eagleeye.errors import NoData
    from eagleeye.report import Truth
    from eagleeye.source.trace import labels

    try:
        told = labels(folder)
    except NoData:
        return None, ["The trace has no labels, so nobody knows what was really broken."]
    faults = [label for label in told if label.kind == "fault"]
    harmless = [
        f"The labels tell of {label.category} ({label.kind.replace('_', ' ')}), which is no fault."
        for label in told
        if label.kind != "fault"
    ]
    if not faults:
        return Truth("none", how=" ".join(harmless)), []
    notes = [f"The labels tell of {len(faults)} faults; the page compares with the first."] if len(faults) > 1 else []
    first = min(faults, key=lambda label: label.start_s)
    node = first.nodes[0] if first.nodes and first.nameable else ""
    rank = first.ranks[0] if node and len(first.ranks) == 1 else None
    how = "What was really broken is known from the trace's labels."
    return Truth(first.category, node, rank, how, first.start_s), [*notes, *harmless]


def _train_options(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--traces", metavar="DIR", nargs="+", help="learn from recorded traces instead of the source's history")
    where.add_argument("--prometheus", metavar="URL", help="a Prometheus server that scrapes the exporters")
    where.add_argument("--history", metavar="DIR", help="the folder in which a scorer keeps what it scraped")
    parser.add_argument("--window", metavar="TIME", help="how far back to read; default 30d")
    parser.add_argument("--interval", metavar="TIME", help="seconds between columns; default 5s")
    parser.add_argument("--tracking-uri", metavar="URI", help="MLflow's store; default eagleeye-data/mlflow.db")


def _train(options: argparse.Namespace) -> int:
    from pathlib import Path

    from eagleeye import config, models
    from eagleeye.clock import SystemClock
    from eagleeye.offline.corpus import from_source, from_traces
    from eagleeye.offline.train import train
    from eagleeye.source.base import Settings, open_source

    data = _file(options)
    settings = config.settings(
        models.Settings, "offline", data, {"window_s": options.window, "tracking_uri": options.tracking_uri}
    )
    tell = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    same_line = sys.stderr.isatty()

    def progress(share: float) -> None:
        if same_line or share >= 1:
            print(f"read {share:.0%}", end="\n" if share >= 1 else "\r", file=sys.stderr, flush=True)

    if options.traces:
        folders = [Path(folder) for folder in options.traces]
        trained = train(from_traces(folders, settings.piece_s, progress), settings, tell)
    else:
        flags: dict[str, object] = {"interval_s": options.interval}
        if options.prometheus or options.history:
            flags |= {"targets": "", "prometheus": options.prometheus or "", "history_dir": options.history or ""}
        clock = SystemClock()
        source = open_source(config.settings(Settings, "source", data, flags), clock)
        end_s = clock.now_s()
        try:
            trained = train(from_source(source, end_s - settings.window_s, end_s, settings.piece_s, progress), settings, tell)
        finally:
            source.close()
    for name in settings.detectors:
        largest, above = trained.metrics[f"{name}_largest_score"], trained.metrics[f"{name}_share_above_1"]
        print(f"{name:16}largest score {largest:.2f}, {above:.2%} above 1")
    print(f"measured on {trained.unseen}")
    print(f"version {trained.version} is registered as candidate; make it live with: eagleeye promote {trained.version}")
    return 0


def _promote_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "version", metavar="VERSION", nargs="?", help="number of a registered version, or an alias such as candidate"
    )
    parser.add_argument("--rollback", action="store_true", help="make the champion before the champion again")
    parser.add_argument("--tracking-uri", metavar="URI", help="MLflow's store; default eagleeye-data/mlflow.db")


def _promote(options: argparse.Namespace) -> int:
    from eagleeye import config, models

    if (options.version is None) != options.rollback:
        raise UsageError("name either a VERSION, for example candidate, or --rollback")

    data = _file(options)
    settings = config.settings(models.Settings, "offline", data, {"tracking_uri": options.tracking_uri})
    version, before = models.rollback(settings) if options.rollback else models.promote(settings, options.version)
    print(f"version {version} is champion now; before it was " + (f"version {before}" if before else "none"))
    return 0


def _evaluate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", metavar="DIR", nargs="+", help="recorded traces with labels")
    parser.add_argument(
        "--verdicts", metavar="OUT", help="judge the verdicts in this folder, from eagleeye score --replay --out-dir"
    )
    parser.add_argument(
        "--methods", metavar="NAME[,NAME...]",
        help="replay the traces by these instead: default, transom, only:MEMBER, without:MEMBER, without:rules, a baseline, "
        "or the groups ablation, baselines, all; without either option: default",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that replay; default 1")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON, too")
    parser.add_argument("--plots", metavar="DIR", help="write plots, too")
    parser.add_argument("--track", action="store_true", help="log figures, tables and plots to MLflow, too")
    parser.add_argument("--tracking-uri", metavar="URI", help="MLflow's store; default eagleeye-data/mlflow.db")
    parser.add_argument(
        "--at-least", metavar="NAME=SHARE", action="append", default=[],
        help="exit 1 when recall, culprit or blame_precision of the first method lies below; may be repeated",
    )  # fmt: skip


def _evaluate(options: argparse.Namespace) -> int:
    import json
    from pathlib import Path

    from eagleeye import config, models
    from eagleeye.files import write_whole
    from eagleeye.offline import evaluate, judging, plots

    if options.verdicts and options.methods:
        raise UsageError("--verdicts are judged as they are and --methods make new ones; give one of the two")
    folders, data = [Path(folder) for folder in options.traces], _file(options)
    bars = evaluate.bars(options.at_least)
    if options.verdicts:
        found = {"recorded": evaluate.evaluate(folders, Path(options.verdicts))}
    else:
        methods, groups = _methods(data)
        names = evaluate.chosen(options.methods or "default", tuple(methods), groups)
        found = evaluate.compare(folders, {name: methods[name] for name in names}, options.jobs, _replayed)
    missed = evaluate.below(judging.total(next(iter(found.values()))), bars)
    print(evaluate.report(found))
    if options.json:
        write_whole(Path(options.json), json.dumps(evaluate.everything(found), indent=1) + "\n")
    if options.plots:
        plots.draw(found, Path(options.plots))
    if options.track:
        settings = config.settings(models.Settings, "offline", data, {"tracking_uri": options.tracking_uri})
        about = {"methods": ", ".join(found), "verdicts": options.verdicts or "replayed"}
        print(f"run {evaluate.track(found, settings, about)} in {settings.uri}", file=sys.stderr)
    for sentence in missed:
        print(f"eagleeye evaluate: {sentence}", file=sys.stderr)
    return 1 if missed else 0


def _methods(data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return every method that can replay a trace by its name, and the groups of names."""
    from dataclasses import replace
    from functools import partial

    from eagleeye import config
    from eagleeye.detectors.ensemble import MEMBERS
    from eagleeye.offline.baselines import BASELINES
    from eagleeye.online.judge import Settings

    usual = config.settings(Settings, "online", data, {})
    ours = {"default": usual, "transom": replace(usual, policy="transom", members=())}
    ours |= {f"without:{name}": replace(usual, members=tuple(other for other in MEMBERS if other != name)) for name in MEMBERS}
    ours |= {"without:rules": replace(usual, rules=False)}
    ours |= {f"only:{name}": replace(usual, members=(name,), rules=False) for name in MEMBERS}
    methods: dict[str, Any] = {name: partial(_judged, settings) for name, settings in ours.items()}
    return methods | BASELINES, {"all": [*methods, *BASELINES], "ablation": list(methods), "baselines": list(BASELINES)}


def _judged(settings: Any, source: Any) -> Any:
    """Replay a trace as `score --replay --model none` does. A function of the module, so that other processes find it."""
    from eagleeye.online.judge import Judge
    from eagleeye.online.replay import verdicts

    return verdicts(source, Judge(settings))


def _replayed(done: int, of: int, method: str, trace: str) -> None:
    same_line, text = sys.stderr.isatty(), f"replayed {done} of {of}: {method} on {trace}"
    if same_line or done == of or 20 * done // of > 20 * (done - 1) // of:
        print(f"\r{text:78.78}" if same_line else text, end="" if same_line and done < of else "\n", file=sys.stderr, flush=True)


VERBS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
    "export": ("Serve this node's counters to Prometheus.", _export_options, _export),
    "record": ("Record a live job as a trace.", _record_options, _record),
    "score": ("Judge live jobs, or recorded traces with --replay.", _score_options, _score),
    "explain": ("Tell why a rank was blamed, and why another was not.", _explain_options, _explain),
    "remediate": (
        "Plan what should be done about incidents, and write it down; nothing is touched without --act.",
        _remediate_options,
        _remediate,
    ),
    "cache": (
        "Hold this node's checkpoints in memory, copy them to the next node, and write them to storage.",
        _cache_options,
        _cache,
    ),
    "launch": ("Start a training script on this node, restart it, leave out bad nodes.", _launch_options, _launch),
    "train": ("Learn from history or traces, and register a candidate.", _train_options, _train),
    "promote": ("Make a registered version the live one.", _promote_options, _promote),
    "evaluate": ("Judge methods, or recorded verdicts, on labelled traces.", _evaluate_options, _evaluate),
    "report": ("Write one page about a recorded trace and its verdicts.", _report_options, _report),
}
