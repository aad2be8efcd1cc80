"""The backend of jobs that `eagleeye launch` runs: it asks their leader, through the folder that the launchers share."""

from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint.placement import natural
from eagleeye.clock import SystemClock, monotonic_s
from eagleeye.errors import AmbiguousError, ConfigError, DataError, EnvironmentLacks, PermanentError, TransientError
from eagleeye.records import Action, ActionKind, JobView, Result, from_json, operation_of, to_json
from remediation.launcher import election
from remediation.launcher.rounds import LAST_WORDS, Agent, Answer, Job, Phase, Request
from remediation.launcher.store import FolderStore, Store, quoted

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Settings:
    """Section ``[remediation.local]``: where the launchers of the jobs meet."""

    rendezvous: str = ""
    """The folder that the launchers share, as in `eagleeye launch --rendezvous`."""
    answer_timeout_s: float = 60.0
    """How long to wait until the leader of a job has done what it is asked for."""

    def __post_init__(self) -> None:
        if self.answer_timeout_s <= 0:
            raise ValueError("answer_timeout_s must be above 0")


class Local:
    """Asks the leader of a job. A request is a document named by its operation, so that a repetition finds it and its answer."""

    name = "local"

    def __init__(self, settings: Settings) -> None:
        if not settings.rendezvous:
            raise ConfigError("the local backend needs the folder in which the launchers meet: --rendezvous DIR, as they have it")
        if not Path(settings.rendezvous).is_dir():
            raise ConfigError(f"there is no folder {settings.rendezvous}; give the one that `eagleeye launch --rendezvous` has")
        self._settings = settings
        self._clock = SystemClock()

    def observe(self, job: str) -> JobView | None:
        """Return the job as its leader sees it.

        Raises
        ------
        TransientError
            The folder cannot be read.
        PermanentError
            There is no such job in it.
        """
        store = self._store(job)
        try:
            told = _job(store, job, self._settings.rendezvous)
            agents = {node: from_json(Agent, document) for node, (_, document) in store.find("agents").items()}
        except (EnvironmentLacks, DataError) as error:
            raise TransientError(str(error)) from None
        alive = {node for node, agent in agents.items() if node not in told.lost and agent.state not in LAST_WORDS}
        over = told.phase in (Phase.DONE, Phase.FAILED)
        return JobView(
            job,
            nodes=() if over else tuple(node for node in sorted(told.members, key=told.members.__getitem__) if node in alive),
            spares=() if over else tuple(node for node in told.spares if node in alive),
            excluded=tuple(sorted(told.excluded, key=natural)),
            min_nodes=told.min_nodes,
            # also while one of its ranks is dead: that is what a verdict may be about
            running_since_s=told.started_s if told.phase is Phase.RUNNING else None,
        )

    def watch(self, job: str) -> None:
        """Beat for the leader of `job`, which then waits for a verdict when a rank fails.

        Raises
        ------
        TransientError
            The folder cannot be used.
        PermanentError
            There is no such job in it.
        """
        store = self._store(job)
        try:
            _job(store, job, self._settings.rendezvous)
            version, watcher = store.get("watcher") or (0, {"beat": 0})
            store.put("watcher", {"beat": int(watcher["beat"]) + 1}, version)
        except (EnvironmentLacks, DataError) as error:
            raise TransientError(str(error)) from None

    def perform(self, operation_id: str, action: Action, job: str, reason: str) -> tuple[Result, str]:
        """Ask the leader of `job` and return its answer; a notification is only said.

        Raises
        ------
        TransientError
            The folder cannot be used, or nobody leads the job: nothing was done.
        PermanentError
            The leader refused; its sentence says why.
        AmbiguousError
            The leader has seen the request and has not answered yet.
        """
        if action.kind is ActionKind.NOTIFY:
            return Result.DONE, f"for the owner of job {job}: {reason}"
        store = self._store(job)
        try:
            self._ask(store, operation_id, action, job, reason)
        except (EnvironmentLacks, DataError) as error:
            raise TransientError(str(error)) from None
        try:
            answer = self._wait(store, operation_id, job)
        except (EnvironmentLacks, DataError) as error:
            raise AmbiguousError(str(error)) from None
        if answer.result == "permanent":
            raise PermanentError(answer.detail)
        return Result.DONE, answer.detail

    def _store(self, job: str) -> Store:
        return FolderStore(Path(self._settings.rendezvous) / quoted(job))

    def _ask(self, store: Store, operation_id: str, action: Action, job: str, reason: str) -> None:
        key = f"requests/{operation_id}"
        told = _job(store, job, self._settings.rendezvous)
        found = store.get(key)
        if found is None:
            if told.phase in (Phase.DONE, Phase.FAILED):
                raise PermanentError(f"job {job} has ended: {told.reason or told.phase.value}")
            # An eviction for the same incident has restarted the job already: then a restart means the round before that.
            ours = operation_of(operation_id)
            siblings = [
                from_json(Request, document).round
                for name, (_, document) in store.find("requests").items()
                if action.kind is ActionKind.RESTART and ours and (other := operation_of(name)) and other[0] == ours[0]
            ]
            request = Request(action.kind.value, action.target, reason, min([told.round, *siblings]))
            store.put(key, to_json(request), 0)
        elif found[1].get("withdrawn"):
            store.put(key, to_json(replace(from_json(Request, found[1]), withdrawn=False, round=told.round)), found[0])

    def _wait(self, store: Store, operation_id: str, job: str) -> Answer:
        changes, end_s = election.Changes(), monotonic_s() + self._settings.answer_timeout_s
        while True:
            answer = store.get(f"answers/{operation_id}")
            if answer is not None:
                return from_json(Answer, answer[1])
            version, lease = election.look(store)
            alone_s = changes.age_s(election.KEY, version, monotonic_s())
            nobody = alone_s > 2 * max(lease.lease_s, 2 * _POLL_S)
            if nobody and self._withdraw(store, operation_id):
                raise TransientError(f"no launcher of job {job} is alive to lead it; start them, or end this job")
            if nobody or monotonic_s() > end_s:
                since = "nobody leads it any more" if nobody else f"no answer came within {self._settings.answer_timeout_s:g} s"
                raise AmbiguousError(f"the launchers of job {job} have the request {operation_id}, and {since}")
            self._clock.sleep_s(_POLL_S)

    @staticmethod
    def _withdraw(store: Store, operation_id: str) -> bool:
        """Return whether the request was taken back before any leader saw it."""
        version, document = store.get(f"requests/{operation_id}") or (0, {})
        request = from_json(Request, document)
        return not request.taken and store.put(f"requests/{operation_id}", to_json(replace(request, withdrawn=True)), version)


def _job(store: Store, job: str, rendezvous: str) -> Job:
    found = store.get("job")
    if found is None:
        raise PermanentError(f"there is no job {job} in {rendezvous}; is it started by `eagleeye launch`?")
    return from_json(Job, found[1])
