"""Who is in a job and what happens next. Pure: documents in, documents out; no clock, no file, no process.

A round is one start of all ranks. The leader calls `advance`, every launcher calls `duty`.
"""

import enum
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from checkpoint.placement import natural

NO_RESTART = 93
"""Exit code of a launcher whose job must not be started again: it would fail at the same step."""
TAKEN_OUT = 94
"""Exit code of a launcher whose node was taken out of the job."""


class State(enum.StrEnum):
    """Of a launcher. BROKEN, EXCLUDED and LEFT are the last words of one that has ended."""

    WARMING = "warming"
    READY = "ready"
    RUNNING = "running"
    STOPPING = "stopping"
    FAILED = "failed"
    DONE = "done"
    BROKEN = "broken"
    EXCLUDED = "excluded"
    LEFT = "left"


LAST_WORDS = (State.BROKEN, State.EXCLUDED, State.LEFT)


class Phase(enum.StrEnum):
    """Of a job. RESTARTING: the next round is decided, and ranks of an earlier one are still being stopped."""

    FORMING = "forming"
    RESTARTING = "restarting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Agent:
    """The document ``agents/NODE``, written by the launcher of that node only.

    `id` tells it from earlier launchers of the node. `round` is the round of its ranks; when READY, the newest one of which it
    knows, and it holds no rank of an earlier one. `pids` are the ranks that exist, `exit_codes` those that ended (by local rank),
    `step` is the newest step of any of them. `cache` is "host:port" or empty.
    """

    id: str
    pid: int
    address: str
    free_port: int = 0
    spare: bool = False
    cache: str = ""
    state: State = State.WARMING
    round: int = 0
    pids: tuple[int, ...] = ()
    exit_codes: Mapping[str, int] = field(default_factory=dict)
    step: int | None = None
    why: str = ""
    beat: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    """Why the ranks of `round` were stopped, and the newest step that they told of.

    `vacated` is the node rank whose holder was taken out for it, None when nobody was.
    """

    round: int
    reason: str
    step: int | None
    vacated: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """The document ``job``, written by the leader of `term` only.

    `members` are node ranks by node and `ids` their launchers; `peers` are the addresses of all checkpoint caches. `started_s`
    is when the last member of a round had started its ranks or failed to; None until then.
    """

    job: str
    nodes: int
    min_nodes: int
    ranks_per_node: int
    term: int = 0
    round: int = 0
    phase: Phase = Phase.FORMING
    members: Mapping[str, int] = field(default_factory=dict)
    ids: Mapping[str, str] = field(default_factory=dict)
    spares: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    cordoned: tuple[str, ...] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)
    peers: Mapping[str, str] = field(default_factory=dict)
    master_address: str = ""
    master_port: int = 0
    started_s: float | None = None
    reason: str = ""
    restarts: tuple[Restart, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """The document ``requests/OPERATION_ID``.

    `round` is the round that the request wants to end; an eviction counts for no later one. `taken` is the term of the leader
    that has seen it; until then it may be `withdrawn`.
    """

    kind: str
    target: str
    reason: str
    round: int
    taken: int = 0
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The document ``answers/OPERATION_ID``. `result` is ``done`` or ``permanent``."""

    result: str
    detail: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What the leader sees at this moment.

    `lost` are launchers that are silent, `watched` tells whether somebody is there who may ask for an eviction, and
    `broken_for_s` for how long `broken` has named somebody.
    """

    agents: Mapping[str, Agent]
    lost: frozenset[str] = frozenset()
    watched: bool = False
    broken_for_s: float = 0.0
    now_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a verdict is waited for, and how many restarts in a row may get no further."""

    verdict_wait_s: float
    max_restarts: int


class Duty(enum.Enum):
    """What a launcher has to do about its ranks."""

    WAIT = 0
    START = 1
    STOP = 2
    LEAVE = 3


def duty(job: Job, node: str, own_id: str, started: int, at_work: bool) -> Duty:
    """Return what the launcher of `node` has to do.

    Parameters
    ----------
    started : the round for which it last started ranks, 0 for none
    at_work : whether any of them still exist
    """
    if node in job.excluded or job.phase in (Phase.DONE, Phase.FAILED):
        return Duty.LEAVE
    wanted = job.phase is Phase.RUNNING and job.ids.get(node) == own_id
    if at_work and not (wanted and started == job.round):
        return Duty.STOP
    return Duty.START if wanted and started < job.round else Duty.WAIT


def assign(kept: Mapping[str, int], fresh: Iterable[str], size: int) -> dict[str, int]:
    """Return `size` node ranks: members keep theirs, vacant ones go to members beyond `size`, then to `fresh` nodes in order."""
    ranks = {node: rank for node, rank in kept.items() if rank < size}
    movers = [*sorted((node for node in kept if node not in ranks), key=kept.__getitem__), *fresh]
    vacant = [rank for rank in range(size) if rank not in ranks.values()]
    return ranks | dict(zip(movers, vacant, strict=False))


def fruitless(steps: Iterable[int | None]) -> int:
    """Return how many rounds in a row, up to the last one, got no further than an earlier one.

    A round that tells of no step got no further; the very first round cannot be compared.
    """
    best, count = None, -1
    for step in steps:
        if step is not None and (best is None or step > best):
            best, count = step, 0
        else:
            count += 1
    return max(count, 0)


def advance(job: Job, seen: Seen, requests: Mapping[str, Request], limits: Limits) -> tuple[Job, dict[str, Answer]]:
    """Return the job as it should be now, and the answers to give once it is written down.

    Parameters
    ----------
    requests : those that have no answer yet, by operation
    """
    answers = {}
    for operation_id, request in sorted(requests.items()):
        job, answer = _respond(job, seen, request, limits)
        if answer is not None:
            answers[operation_id] = answer
    job = _go_on(job, seen, limits)
    if job.phase is Phase.RESTARTING and not _stopping(job, seen):
        job = _start(job, seen)
    return replace(job, spares=tuple(_spares(job, seen)), lost=tuple(sorted(seen.lost, key=natural))), answers


def broken(job: Job, seen: Seen) -> tuple[str, ...]:
    """Return the members that keep the present round from going on: gone, or with a failed rank."""
    if job.phase is not Phase.RUNNING:
        return ()
    return tuple(node for node in _by_rank(job) if not _finished(job, seen, node) and _trouble(job, seen, node))


def at_work(job: Job, agent: Agent) -> bool:
    """Whether a launcher has started the ranks of the present round, and none of them failed."""
    return agent.round == job.round and agent.state in (State.RUNNING, State.DONE)


def forming(job: Job, seen: Seen) -> str:
    """Return one sentence about what a job waits for that has too few nodes."""
    ready = len(_kept(job, seen)) + len(_spares(job, seen))
    needed = job.min_nodes if job.round else job.nodes
    why = f" ({job.reason})" if job.reason else ""
    return f"job {job.job} waits for nodes: {ready} of {needed} are ready{why}"


def _stopping(job: Job, seen: Seen) -> list[str]:
    """Return the nodes that may still hold a rank of an earlier round, or start one because they do not know better yet."""
    clean = (State.WARMING, *LAST_WORDS)
    return [n for n, a in seen.agents.items() if n not in seen.lost and a.state not in clean and a.round != job.round]


def _by_rank(job: Job) -> list[str]:
    return sorted(job.members, key=job.members.__getitem__)


def _here(job: Job, seen: Seen, node: str) -> bool:
    """Whether a node may hold ranks: its launcher is alive and nothing is held against it."""
    agent = seen.agents.get(node)
    out = (State.WARMING, *LAST_WORDS)
    return agent is not None and node not in seen.lost and node not in job.excluded and agent.state not in out


def _kept(job: Job, seen: Seen) -> dict[str, int]:
    """Return those members that go on with their node ranks."""
    return {n: r for n, r in job.members.items() if _here(job, seen, n) and seen.agents[n].id == job.ids.get(n)}


def _spares(job: Job, seen: Seen) -> list[str]:
    """Return the nodes that could take a vacant rank, best first. A member whose launcher began anew is one."""
    kept = _kept(job, seen)
    free = [n for n in seen.agents if n not in kept and n not in job.cordoned and _here(job, seen, n)]
    return sorted(free, key=lambda node: (not seen.agents[node].spare, natural(node)))


def _finished(job: Job, seen: Seen, node: str) -> bool:
    agent = seen.agents.get(node)
    return agent is not None and (agent.state, agent.round, agent.id) == (State.DONE, job.round, job.ids.get(node))


def _trouble(job: Job, seen: Seen, node: str) -> str:
    """Return what is wrong with a member, in words; nothing when it is starting or running."""
    agent = seen.agents.get(node)
    if node in seen.lost or agent is None:
        return f"the launcher of {node} is silent"
    if agent.id != job.ids.get(node):
        return f"the launcher of {node} was started anew"
    if agent.state in LAST_WORDS:
        return f"{node} left the job: {agent.why or agent.state}"
    if agent.state is not State.FAILED or agent.round != job.round:
        return ""
    for local_rank, code in agent.exit_codes.items():
        if code:
            rank = job.members[node] * job.ranks_per_node + int(local_rank)
            return f"rank {rank} on {node} {_ending(code)}"
    return f"{node} could not start its ranks: {agent.why}"


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _settled(job: Job, seen: Seen) -> bool:
    """Whether no replacement is under way: every member runs the present round, or will not."""
    return job.phase is Phase.FORMING or (
        job.phase is Phase.RUNNING and all(_trouble(job, seen, node) or at_work(job, seen.agents[node]) for node in job.members)
    )


def _respond(job: Job, seen: Seen, request: Request, limits: Limits) -> tuple[Job, Answer | None]:
    node, name = request.target, job.job
    if request.kind != "restart":
        if node in job.excluded:
            return job, Answer("done", f"{node} is already out of job {name}")
        if node not in seen.agents and node not in job.members:
            return job, Answer("permanent", f"{node} is no node of job {name}")
    if request.kind == "cordon":
        cordoned = tuple(sorted({*job.cordoned, node}, key=natural))
        return replace(job, cordoned=cordoned), Answer("done", f"{node} gets no new ranks of job {name}")
    again = request.round < job.round and all(m in seen.agents and at_work(job, seen.agents[m]) for m in job.members)
    if request.kind == "restart" and again and job.phase in (Phase.RUNNING, Phase.DONE):
        return job, Answer("done", f"job {name} runs again, in round {job.round}")
    if job.phase in (Phase.DONE, Phase.FAILED):
        return job, Answer("permanent", f"job {name} has ended: {job.reason or job.phase.value}")
    if request.kind == "evict":
        if _settled(job, seen) or request.round < job.round:
            return _evict(job, seen, node, request)
        return job, None
    if job.phase is Phase.RUNNING and request.round >= job.round:
        return _restart(job, seen, request.reason, limits), None
    return job, None


def _evict(job: Job, seen: Seen, node: str, request: Request) -> tuple[Job, Answer]:
    why_not = _why_it_stays(job, seen, node, request)
    if why_not:  # what prepared the eviction is taken back, or a healthy node could never hold ranks again
        return replace(job, cordoned=tuple(n for n in job.cordoned if n != node)), Answer("permanent", why_not)
    before, job = job, replace(job, excluded={**job.excluded, node: request.reason})
    detail = f"{node} was taken out of job {job.job}"
    if node in before.members and before.phase is Phase.RUNNING:
        noted = _noted(job, seen, f"{node} was taken out: {request.reason}", vacated=job.members[node])
        job = _form(noted, seen)
        heirs = [new for new in _by_rank(job) if new not in before.members]
        detail += f"; {', '.join(heirs) or 'nobody'} takes its place in round {job.round}"
    return job, Answer("done", detail)


def _why_it_stays(job: Job, seen: Seen, node: str, request: Request) -> str | None:
    """Return why a node is not taken out, None when it is: never for what is past, nor beside another loss, nor in vain."""
    if request.round < job.round:
        return f"job {job.job} was restarted since {node} was blamed, and what was found before counts no more"
    if _finished(job, seen, node):
        return f"the ranks of {node} have finished in order"
    kept = _kept(job, seen)
    gone = [other for other in _by_rank(job) if other != node and other not in kept]
    if gone and job.phase is Phase.RUNNING:
        return f"{', '.join(gone)} is gone, too, and what {node} is blamed for may come from that"
    step = _newest_step(job, seen)
    before = [
        restart.step for restart in job.restarts if restart.vacated is not None and restart.vacated == job.members.get(node)
    ]
    if any(step is None or (at is not None and step <= at) for at in before):
        return f"{node} got no further than the node in whose place it is, so another one would not help"
    rest = {*kept, *_spares(job, seen)} - {node}
    if len(rest) < job.min_nodes:
        return f"no spare left: without {node} job {job.job} has {len(rest)} of the {job.min_nodes} nodes that it needs"
    return None


def _go_on(job: Job, seen: Seen, limits: Limits) -> Job:
    if job.phase is Phase.FORMING:
        return _form(job, seen)
    if job.phase is Phase.RESTARTING:
        return job if len(_kept(job, seen)) == len(job.members) else _form(job, seen)
    if job.phase is not Phase.RUNNING:
        return job
    if job.started_s is None and _settled(job, seen):
        job = replace(job, started_s=seen.now_s)
    if all(_finished(job, seen, node) for node in job.members):
        return replace(job, phase=Phase.DONE, reason="")
    nodes = broken(job, seen)
    if not nodes:
        return job
    # A node that said good-bye needs no verdict; about one that fell silent or failed somebody may know more than we do.
    said = any(n in seen.agents and seen.agents[n].state in LAST_WORDS for n in nodes)
    if seen.watched and not said and seen.broken_for_s < limits.verdict_wait_s:
        return job
    more = f", and {len(nodes) - 1} more" if len(nodes) > 1 else ""
    first = min(nodes, key=lambda node: _likely_after_another(job, seen, node))
    return _restart(job, seen, _trouble(job, seen, first) + more, limits)


def _likely_after_another(job: Job, seen: Seen, node: str) -> int:
    """Return how likely a member's trouble only follows from another's: nobody falls silent or is killed because a peer did."""
    agent = seen.agents.get(node)
    if agent is None or node in seen.lost or agent.id != job.ids.get(node) or agent.state in LAST_WORDS:
        return 0
    return 1 if any(code < 0 and code != -signal.SIGABRT for code in agent.exit_codes.values()) else 2


def _restart(job: Job, seen: Seen, reason: str, limits: Limits) -> Job:
    job = _noted(job, seen, reason)
    steps = [restart.step for restart in job.restarts]
    if fruitless(steps) >= limits.max_restarts:
        best = max((step for step in steps if step is not None), default=None)
        where = f"than step {best}" if best is not None else "than the start (no rank told of a step)"
        reason = f"{limits.max_restarts} restarts in a row got no further {where}; last: {reason}"
        return replace(job, phase=Phase.FAILED, started_s=None, reason=reason)
    return _form(job, seen)


def _noted(job: Job, seen: Seen, reason: str, vacated: int | None = None) -> Job:
    ended = Restart(job.round, reason, _newest_step(job, seen), vacated)
    return replace(job, reason=reason, restarts=(*job.restarts, ended))


def _newest_step(job: Job, seen: Seen) -> int | None:
    """Return the newest step that any member tells of in the present round."""
    at = [a.step for n, a in seen.agents.items() if n in job.members and a.round == job.round and a.step is not None]
    return max(at, default=None)


def _form(job: Job, seen: Seen) -> Job:
    """Return the job with its next round decided, or forming while there are too few nodes."""
    spares = _spares(job, seen)
    kept = _kept(job, seen) | {node: job.members[node] for node in spares if node in job.members}
    spares = [node for node in spares if node not in kept]
    if not job.round:
        chosen = [node for node in spares if not seen.agents[node].spare]
        given_up = [
            node
            for node, agent in seen.agents.items()
            if not agent.spare and node not in chosen and (agent.state is not State.WARMING or node in seen.lost)
        ]
        if len(chosen) + len(given_up) >= job.nodes:
            chosen += [node for node in spares if seen.agents[node].spare]
        spares = chosen
    size = min(job.nodes, len(kept) + len(spares))
    if size < (job.min_nodes if job.round else job.nodes):
        members = {node: rank for node, rank in job.members.items() if node not in job.excluded}
        return replace(job, phase=Phase.FORMING, members=members, started_s=None)
    members = assign(kept, spares, size)
    ids = {node: seen.agents[node].id for node in members}
    return replace(job, phase=Phase.RESTARTING, round=job.round + 1, members=members, ids=ids, started_s=None)


def _start(job: Job, seen: Seen) -> Job:
    first = seen.agents[_by_rank(job)[0]]
    peers = {n: a.cache for n, a in sorted(seen.agents.items()) if a.cache and (n in job.members or n in _spares(job, seen))}
    return replace(
        job,
        phase=Phase.RUNNING,
        peers=peers,
        master_address=first.address,
        master_port=first.free_port,
    )
