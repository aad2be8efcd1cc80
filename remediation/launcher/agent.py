"""`eagleeye launch`: one process a node that starts the ranks, watches them, and does what the leader of the job writes down.

Every launcher does the same; whoever holds the lease also leads. Nothing here waits: a turn looks at the ranks, tells the others,
and reads what they tell. A store that fails is said once and stops nothing that runs.
"""

import contextlib
import math
import os
import re
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from checkpoint import index, place
from checkpoint.errors import CheckpointError
from checkpoint.manifest import check_job
from eagleeye.clock import SystemClock, monotonic_s
from eagleeye.collect.base import this_node
from eagleeye.errors import DataError, EagleEyeError, EnvironmentLacks, UsageError
from eagleeye.records import from_json, to_json
from remediation.launcher import checks, rounds
from remediation.launcher.election import Changes, Election
from remediation.launcher.folder import FolderWatch, NotFit
from remediation.launcher.rounds import LAST_WORDS, Agent, Duty, Job, Limits, Phase, Request, Seen, State
from remediation.launcher.store import Document, FolderStore, Store, quoted
from remediation.launcher.worker import Background, Worker

WATCHED_S = 30.0
"""A remediator that looked at the job within this time is believed to be there."""

D = TypeVar("D")

Hook = Callable[[int, Mapping[str, int]], None]
"""Called by every member with the round and the node ranks, before its ranks start.

May take long, but must end by itself; may raise EagleEyeError, which counts as a failure of the ranks, or NotFit, on which the
launcher leaves the job.
"""


@dataclass(frozen=True, slots=True)
class Settings:
    """Section ``[remediation.launcher]``: how `eagleeye launch` starts the ranks of a job and replaces what fails."""

    job: str = ""
    """Name of the job. A run that goes on from an earlier one's checkpoints has the same name."""
    rendezvous: str = ""
    """Folder that all nodes share, for what the launchers tell each other."""
    node: str = field(default_factory=this_node)
    """Name of this node, as in the exporter's series."""
    address: str = ""
    """Address of this node for the ranks of other nodes. Empty: that of its host name, or 127.0.0.1 for a job of one node."""
    nodes: int = 1
    """Nodes that hold ranks."""
    min_nodes: int = 0
    """Nodes below which the job does not go on; 0 stands for all of them. With less it shrinks when no spare is left."""
    spare: bool = False
    """Whether this node waits to take the place of another one."""
    ranks_per_node: int = 1
    """Ranks that each node holds."""
    cache: str = ""
    """Address host:port of this node's checkpoint cache. Empty: that of the cache which runs here, if one does."""
    max_restarts: int = 3
    """Restarts in a row that may get no further than the step reached before."""
    verdict_wait_s: float = 20.0
    """How long `eagleeye remediate`, where it runs, may take out a failed or silent node before the ranks are restarted."""
    join_timeout_s: float = 600.0
    """How long a launcher waits for enough nodes."""
    grace_s: float = 10.0
    """How long a rank that is asked to end may take before it is killed."""
    check_timeout_s: float = 10.0
    """Time that the checks of a node may take; one that takes longer keeps no node out."""
    lease_s: float = 3.0
    """How long a leader may be silent before another launcher leads."""
    agent_lost_s: float = 5.0
    """How long a launcher may be silent before its node counts as lost."""
    period_s: float = 0.25
    """Time between two looks at the ranks and at what the others tell."""
    watch: str = ""
    """Folder of this node that the script fills: kept in the checkpoint cache and put right before each round. Empty: none."""
    watch_step: str = r"(\d+)(?!.*\d)"
    """Regular expression with one group, the step, for the name of a file in `watch`, or of the folder in it that it lies in."""
    watch_quiet_s: float = 5.0
    """How far apart the files of one step may come, on a node and on different nodes."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks_per_node < 1 or not 0 <= self.min_nodes <= self.nodes:
            raise ValueError("nodes and ranks_per_node must be at least 1, and min_nodes no more than nodes")
        if self.ranks_per_node > 1024:
            raise ValueError(f"ranks_per_node {self.ranks_per_node} is more than a node can hold; at most 1024")
        if self.max_restarts < 0:
            raise ValueError("max_restarts must be at least 0")
        if self.watch and self.min_nodes not in (0, self.nodes):
            raise ValueError("what `watch` keeps is of all nodes, so that min_nodes must be 0")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.node):
            raise ValueError(f"node {self.node!r} is no name: letters, digits, dots, dashes and underscores")
        # A leader that slept for less than its lease must not find the others silent, who slept with it.
        if self.period_s * 4 > self.lease_s or self.lease_s + self.period_s > 0.8 * self.agent_lost_s:
            raise ValueError("lease_s must be at least 4 times period_s, and agent_lost_s 1.25 times their sum")


def launch(settings: Settings, command: Sequence[str], before_round: Sequence[Hook] = ()) -> int:
    """Run the ranks of this node until the job is done; return the exit code.

    0 the job is done, 1 too few nodes came, 3 this node is not fit, 93 a restart would not help, 94 this node was taken out,
    128 + n after signal n.

    Raises
    ------
    UsageError
        Settings that cannot be meant, or that do not fit those of the other launchers; a second launcher for this node.
    EnvironmentLacks, DataError
        The shared folder cannot be used.
    """
    if not settings.job or not settings.rendezvous:
        raise UsageError("a job needs a name and a folder that all nodes share: --job NAME --rendezvous DIR")
    try:
        check_job(settings.job)
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    if not command or shutil.which(command[0]) is None:
        raise UsageError(f"there is no command {command[0]!r} on this node" if command else "give the command of a rank after --")
    if not Path(settings.rendezvous).is_dir():
        raise UsageError(f"there is no folder {settings.rendezvous}; make it, on a file system that all nodes share")
    shared = Path(settings.rendezvous) / quoted(settings.job)
    watch = None
    if settings.watch:
        pattern, quiet_s = settings.watch_step, settings.watch_quiet_s
        say = partial(_say, settings.node)
        # a store of its own, as it works in other threads
        watch = FolderWatch(Path(settings.watch), pattern, quiet_s, settings.job, settings.node, FolderStore(shared), say)
        before_round = (*before_round, watch.before_round)
    return _Launcher(settings, command, before_round, FolderStore(shared), watch).run()


class _Launcher:
    def __init__(
        self, settings: Settings, command: Sequence[str], before_round: Sequence[Hook], store: Store, watch: FolderWatch | None
    ) -> None:
        self._settings, self._command, self._hooks, self._store = settings, command, before_round, store
        self._watch = watch
        self._clock = SystemClock()
        self._key = f"agents/{settings.node}"
        address = settings.address or _own_address(settings.nodes)
        self._port = _hold_port(address)
        # remembered when it ends: ranks that lived with a cache cannot go on here without one
        self._cache = cache = settings.cache or place.local_cache()
        self._me = Agent(secrets.token_hex(4), os.getpid(), address, _port_number(self._port), settings.spare, cache)
        self._told: Agent | None = None
        self._told_s = -math.inf
        self._version = 0
        self._parsed: dict[str, tuple[int, Any]] = {}
        self._worker: Worker | None = None
        self._started = 0
        self._checking: Background[list[checks.Finding]] | None = None
        self._preparing: tuple[int, Background[None]] | None = None
        self._leaving: tuple[int, State, str] | None = None
        self._signals: list[int] = []
        self._said: set[str] = set()
        self._store_failed_s: float | None = None
        self._forming_s = monotonic_s()
        self._election = Election(store, settings.node, settings.lease_s)
        self._changes, self._watcher = Changes(), Changes()
        self._term = 0
        self._broken_s: float | None = None

    def run(self) -> int:
        """Take part until the end; return the exit code."""
        handlers = {n: signal.signal(n, lambda number, _: self._signals.append(number)) for n in (signal.SIGTERM, signal.SIGINT)}
        signal.signal(
            signal.SIGCHLD, signal.SIG_DFL
        )  # where a parent ignored it, the kernel would reap our ranks behind our back
        try:
            self._register()
            if self._signals:
                return 128 + self._signals[0]
            self._check(again=False)
            while (code := self._turn()) is None:
                self._clock.sleep_s(self._settings.period_s)
            return code
        finally:
            self._end_ranks()
            if self._watch is not None:
                self._watch.end()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _end_ranks(self) -> None:
        """Leave no rank behind, also when a bug ends the loop."""
        while self._worker is not None and self._worker.pids:
            self._worker.stop(0.0)
            self._worker.poll()
            self._clock.sleep_s(0.05)

    # --- before the first turn ---

    def _register(self) -> None:
        settings, name = self._settings, self._settings.job
        job = self._read(Job, "job")
        if job is not None:
            ours = (settings.nodes, settings.min_nodes or settings.nodes, settings.ranks_per_node)
            if ours != (job.nodes, job.min_nodes, job.ranks_per_node):
                raise UsageError(
                    f"job {name} in {settings.rendezvous} has {job.nodes} nodes, at least {job.min_nodes}, and "
                    f"{job.ranks_per_node} ranks per node; say the same, or give a new job a new name"
                )
            if job.phase in (Phase.DONE, Phase.FAILED):
                folder = Path(settings.rendezvous) / quoted(name)
                self._say(
                    f"job {name} has ended; to run it again from its checkpoints, remove the folder {folder} and keep the name"
                )
        earlier = self._read(Agent, self._key)
        if earlier is not None:
            before = self._version = self._parsed[self._key][0]
            end_s = monotonic_s() + settings.agent_lost_s
            while earlier.state not in LAST_WORDS and monotonic_s() < end_s and not self._signals:
                self._clock.sleep_s(settings.period_s)
                self._read(Agent, self._key)
                if self._parsed[self._key][0] != before:
                    raise UsageError(
                        f"job {name} has a launcher on {settings.node} already, process {earlier.pid}; end that first"
                    )
        if not self._signals and not self._write():
            raise UsageError(f"job {name} has just got another launcher on {settings.node}; one is enough")

    def _check(self, again: bool) -> None:
        wanted = checks.all_checks(Path(self._settings.rendezvous), self._me.address, self._cache)
        if again:
            del wanted["shared folder"]  # what all nodes share is no fault of this one
        self._checking = Background(lambda: checks.run(wanted, self._settings.check_timeout_s))

    # --- one turn ---

    def _turn(self) -> int | None:
        if self._signals:
            number = signal.Signals(self._signals[0])
            self._leave(128 + number, State.LEFT, f"stopped by {number.name}")
        self._look()
        at_work = self._worker is not None and bool(self._worker.pids)
        try:
            self._tell()
            if self._leaving is None:
                self._lead()
                self._follow()
            else:
                self._election.release()
            self._store_failed_s = None
        except (EnvironmentLacks, DataError) as error:
            now_s = monotonic_s()
            self._say_once(f"{error}; ranks that run go on")
            self._store_failed_s = now_s if self._store_failed_s is None else self._store_failed_s
            if not at_work and now_s - self._store_failed_s > self._settings.join_timeout_s:
                return error.exit_code
        return self._farewell(*self._leaving) if self._leaving is not None and not at_work else None

    def _look(self) -> None:
        """Look at the ranks and at the checks: nothing here needs the store."""
        if self._checking is not None and self._checking.wait(0.0):
            self._judge(self._checking.result())
            self._checking = None
        if self._worker is None:
            return
        if self._leaving is not None:
            self._worker.stop(0.0 if len(self._signals) > 1 else None)
        self._worker.poll()
        pids, codes = self._worker.pids, self._worker.exit_codes
        self._me = replace(
            self._me, pids=pids, exit_codes=codes, step=self._step() if codes != self._me.exit_codes else self._me.step
        )
        if self._worker.stuck:
            text = ", ".join(map(str, self._worker.stuck))
            self._leave(
                EnvironmentLacks.exit_code, State.BROKEN, f"process {text} was killed and does not vanish; look at its device"
            )
        elif self._me.state is State.STOPPING and not pids and self._leaving is None:
            self._me, self._worker = replace(self._me, state=State.READY, exit_codes={}), None
        elif self._me.state is State.RUNNING and any(codes.values()):
            if self._checking is None:
                self._check(again=True)
        elif self._me.state is State.RUNNING and not pids:
            self._me = replace(self._me, state=State.DONE)

    def _judge(self, findings: list[checks.Finding]) -> None:
        bad = [finding.sentence for finding in findings if finding.result is checks.Result.BAD]
        if bad:
            self._leave(EnvironmentLacks.exit_code, State.BROKEN, f"this node is not fit: {'; '.join(bad)}")
        elif self._me.state is State.WARMING:
            told = ", ".join(f"{finding.check} {finding.result}" for finding in findings)
            self._say(f"this node is ready as a {'spare' if self._settings.spare else 'member'}: {told}")
            self._me = replace(self._me, state=State.READY)
        elif self._me.state is State.RUNNING:
            self._say(f"a rank failed, and this node is fit; exit codes by local rank: {dict(self._me.exit_codes)}")
            self._me = replace(self._me, state=State.FAILED)

    def _leave(self, code: int, state: State, why: str) -> None:
        """Begin to end this launcher; its ranks are stopped in order first."""
        if self._leaving is None:
            self._say(why)
            self._leaving = (code, state, why)
            if self._me.state is not State.DONE:
                self._me = replace(self._me, state=State.STOPPING, why=why)

    def _farewell(self, code: int, state: State, why: str) -> int:
        if self._me.state is not State.DONE:
            self._me = replace(self._me, state=state, why=why)
        try:
            self._tell()
        except (EnvironmentLacks, DataError) as error:
            self._say_once(str(error))
        return code

    # --- what this node tells ---

    def _tell(self) -> None:
        """Write this launcher's document when it changed, and from time to time as a sign of life."""
        due = monotonic_s() - self._told_s >= self._settings.agent_lost_s / 5
        if due:
            self._me = replace(self._me, step=self._step(), cache=self._settings.cache or place.local_cache())
            self._cache = self._me.cache or self._cache
        if (due or self._me != self._told) and not self._write():
            earlier = self._read(Agent, self._key)
            if earlier is None:
                raise EnvironmentLacks(
                    f"what the launchers of job {self._settings.job} wrote in {self._settings.rendezvous} is gone"
                )
            if earlier.id != self._me.id:
                self._leave(UsageError.exit_code, State.LEFT, f"process {earlier.pid} has taken this node over")
            else:
                self._version = self._parsed[self._key][0]

    def _step(self) -> int | None:
        """Return the newest step that the ranks tell of or have saved: a job without a progress hook gets on, too."""
        told = [self._worker.step() if self._worker is not None else None, *_saved_steps(self._settings.job)]
        return max((step for step in told if step is not None), default=self._me.step)

    def _write(self) -> bool:
        self._me = replace(self._me, beat=self._me.beat + 1)
        if not self._store.put(self._key, to_json(self._me), self._version):
            return False
        self._version += 1
        self._told, self._told_s = self._me, monotonic_s()
        return True

    def _read(self, kind: type[D], key: str) -> D | None:
        found = self._store.get(key)
        return None if found is None else self._parse(kind, key, *found)

    def _parse(self, kind: type[D], key: str, version: int, document: Document) -> D:
        known = self._parsed.get(key)
        if known is None or known[0] != version:
            self._parsed[key] = known = (version, from_json(kind, document))
        return cast(D, known[1])

    # --- what the leader does ---

    def _lead(self) -> None:
        settings, now_s = self._settings, monotonic_s()
        watcher = self._store.get("watcher")
        watched = watcher is not None and self._watcher.age_s("watcher", watcher[0], now_s) < WATCHED_S
        before, self._term = self._term, self._election.step(now_s)
        if not self._term:
            return
        if self._term != before:  # what it saw before another one led says nothing about who is silent now
            self._changes, self._broken_s = Changes(), None
        job = self._read(Job, "job") or Job(
            settings.job, settings.nodes, settings.min_nodes or settings.nodes, settings.ranks_per_node
        )
        version = self._parsed["job"][0] if "job" in self._parsed else 0
        if job.term > self._term:
            return
        agents, lost = {}, set()
        for node, (agent_version, document) in self._store.find("agents").items():
            agents[node] = self._parse(Agent, f"agents/{node}", agent_version, document)
            silent_s = self._changes.age_s(node, agent_version, now_s)
            if silent_s > settings.agent_lost_s and agents[node].state not in LAST_WORDS:
                lost.add(node)
        seen = Seen(agents, frozenset(lost), watched, now_s=self._clock.now_s())
        self._broken_s = (self._broken_s or now_s) if rounds.broken(job, seen) else None
        seen = replace(seen, broken_for_s=now_s - self._broken_s if self._broken_s else 0.0)
        limits = Limits(settings.verdict_wait_s, settings.max_restarts)
        new, answers = rounds.advance(job, seen, self._requests(), limits)
        new = replace(new, term=self._term)
        if new.phase is Phase.FORMING and (new.round or now_s - self._forming_s > settings.agent_lost_s):
            self._say_once(rounds.forming(new, seen))
        # In a new term this writes even when nothing else changed, and with that bars the leader of the one before.
        if new != job and not self._store.put("job", to_json(new), version):
            return
        for operation_id, answer in answers.items():
            self._store.put(f"answers/{operation_id}", to_json(answer), 0)

    def _requests(self) -> dict[str, Request]:
        """Return the requests without an answer. Each is marked first, so that nobody withdraws what is being done."""
        answered, open_requests = self._store.find("answers"), {}
        for operation_id, (version, document) in self._store.find("requests").items():
            request = self._parse(Request, f"requests/{operation_id}", version, document)
            if operation_id in answered or request.withdrawn:
                continue
            taken = replace(request, taken=self._term)
            if request.taken or self._store.put(f"requests/{operation_id}", to_json(taken), version):
                open_requests[operation_id] = request
        return open_requests

    # --- what every launcher does about the job ---

    def _follow(self) -> None:
        settings, job = self._settings, self._read(Job, "job")
        if job is not None and job.phase is not Phase.FORMING:
            self._forming_s = monotonic_s()
        elif monotonic_s() - self._forming_s > settings.join_timeout_s:
            why = f": {job.reason}" if job is not None and job.reason else ""
            self._leave(1, State.LEFT, f"job {settings.job} waited {settings.join_timeout_s:g} s in vain for enough nodes{why}")
        if job is None or self._leaving is not None:
            return
        at_work = self._worker is not None and bool(self._worker.pids)
        duty = rounds.duty(job, settings.node, self._me.id, self._started, at_work)
        if duty is Duty.LEAVE:
            self._leave(*_last_words(job, settings.node))
        elif duty is Duty.STOP and self._worker is not None:
            self._worker.stop()
            self._me = replace(self._me, state=State.STOPPING)
        elif duty is Duty.START and self._checking is None:
            self._start(job)
        elif duty is Duty.WAIT and not at_work and job.round > self._me.round and self._me.state is not State.WARMING:
            self._me, self._worker = replace(self._me, state=State.READY, round=job.round, exit_codes={}, step=None), None

    def _start(self, job: Job) -> None:
        if self._hooks and (self._preparing is None or self._preparing[0] != job.round):
            if self._preparing is not None and not self._preparing[1].wait(0.0):
                return  # what was begun for an earlier round cannot be stopped
            self._preparing = (job.round, Background(lambda: _call(self._hooks, job)))
        if self._preparing is not None and not self._preparing[1].wait(0.0):
            return
        self._started = job.round
        self._me = replace(self._me, state=State.RUNNING, round=job.round, exit_codes={}, step=None, why="")
        rank, count = job.members[self._settings.node] * job.ranks_per_node, len(job.members) * job.ranks_per_node
        because = f", because {job.reason}" if job.reason else ""
        self._say(f"round {job.round} starts{because}; here from rank {rank} of {count}")
        try:
            if self._preparing is not None:
                self._preparing[1].result()
            if self._port is not None:
                self._port.close()
            self._worker = Worker(job, self._settings.node, self._command, self._settings.grace_s, self._settings.max_restarts)
            if self._watch is not None:
                self._watch.begin(self._worker)
        except NotFit as error:
            self._worker = None
            self._leave(error.exit_code, State.BROKEN, f"this node is not fit: {error}")
        except (EagleEyeError, OSError) as error:
            self._say(f"the ranks cannot be started: {error}")
            self._worker, self._me = None, replace(self._me, state=State.FAILED, why=str(error))
        self._port = _hold_port(self._me.address)
        self._me = replace(self._me, free_port=_port_number(self._port))

    def _say(self, text: str) -> None:
        _say(self._settings.node, text)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)


def _say(node: str, text: str) -> None:
    # a full disk or a broken pipe below the log is no reason to end a job
    with contextlib.suppress(OSError, ValueError):
        print(f"eagleeye launch [{node}]: {text}", file=sys.stderr, flush=True)


def _last_words(job: Job, node: str) -> tuple[int, State, str]:
    if node in job.excluded:
        return rounds.TAKEN_OUT, State.EXCLUDED, f"this node was taken out of job {job.job}: {job.excluded[node]}"
    if job.phase is Phase.DONE:
        return 0, State.LEFT, f"job {job.job} is done"
    return rounds.NO_RESTART, State.LEFT, f"job {job.job} is not started again: {job.reason}"


def _call(hooks: Sequence[Hook], job: Job) -> None:
    for hook in hooks:
        hook(job.round, job.members)


def _own_address(nodes: int) -> str:
    if nodes == 1:
        return "127.0.0.1"
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""
    if not address or address.startswith("127."):
        raise UsageError(f"the host name {name} leads to no address that other nodes can use; give --address")
    return address


def _hold_port(address: str) -> socket.socket | None:
    """Return a socket that keeps a port free until the ranks need it; None where there is none, which a check will tell."""
    try:
        return checks.bound(address)
    except OSError:
        return None


def _port_number(held: socket.socket | None) -> int:
    return int(held.getsockname()[1]) if held is not None else 0


def _saved_steps(job: str) -> list[int | None]:
    path = place.run_dir() / place.INDEX
    return [index.newest_step(path, name) for name in (job, f"{job}.files")]
