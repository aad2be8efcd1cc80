"""`eagleeye launch --watch DIR`: what a script saves into a folder of its node is kept in the checkpoint cache, and put back.

The script is not changed: it writes files as it likes and resumes from what it finds. During a round a thread looks at the folder
and saves the files of each step, once they are complete, as this node's shard of a generation. Before each round the launchers
agree on the newest generation of which every node's shard is intact, and each makes its folder hold that and nothing newer.
"""

import contextlib
import fnmatch
import os
import re
import secrets
import stat
import threading
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

from checkpoint import connection, place
from checkpoint.errors import CacheGone, CannotRun, CheckpointError
from checkpoint.errors import UsageError as CannotBe
from checkpoint.files import TEMPORARY, Changed, Entry, Fetched, FolderClient, Held, entries, signature, write
from checkpoint.manifest import Generation, check_job, generation
from eagleeye.clock import SystemClock, monotonic_s
from eagleeye.errors import DataError, EagleEyeError, EnvironmentLacks, UsageError
from eagleeye.records import from_json, to_json
from remediation.launcher.rounds import Job, Phase
from remediation.launcher.store import Store
from remediation.launcher.worker import Worker

T = TypeVar("T")

LOOK_S = 0.5
STABLE_S = 1.0
"""A file that stayed the same for so long, and that no rank has open for writing, is complete."""
ODD_TIMES = 6
"""A step whose files are not those that earlier steps had is waited for so many times `quiet_s`."""
ANSWER_S = connection.ANSWER_S
"""How long the other nodes may take to fetch their shards."""
ROOM_S = 5.0
"""How long the cache may have no room for a step before it is tried again later."""
SAVE_S = 60.0
"""How long the next round waits for a step that is just being saved."""
ASIDE = ".not-restored"
UNFINISHED = (".*", "*.tmp", "*.part", "*.partial", "*.incomplete")
LOGS = ("*.log", "*.out", "*.err", "*tfevents*")
FINISHED = (".metadata",)
"""What begins with a dot and is saved all the same: torch.distributed.checkpoint cannot do without."""
Signature = tuple[int, ...]
Found = dict[str, os.stat_result]


class NotFit(EnvironmentLacks):
    """This node lacks what every node of the job needs: a cache, or room in the folder. Another node may take its place."""


@dataclass(frozen=True, slots=True)
class Restore:
    """The document ``restore``, written by the first node of `round`: what all nodes do before their ranks start.

    `attempt` and `token` are those of the generations that this round will save. Each node fetches its shard of `generation` and
    tells so; when all have, it is `final`, and they put it into their folders. None, and final, when there is nothing to restore;
    `problem` says why when nobody may go on.
    """

    round: int
    attempt: int = 0
    token: str = ""
    generation: str | None = None
    final: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Told:
    """The document ``watch/NODE``, written by the launcher of that node only.

    `fetched` is the generation that it was told to fetch last, and `problem` what went wrong with it. `steps` are those that it
    has saved in `round`; `spoiled` are generations, of any round, of which its shard turned out later not to be all.
    """

    round: int = 0
    fetched: str = ""
    problem: str = ""
    steps: tuple[int, ...] = ()
    spoiled: tuple[str, ...] = ()


class FolderWatch:
    """Keeps what a script writes into one folder of this node. `before_round` is a hook of the launcher.

    Parameters
    ----------
    folder : made when it is absent
    step_pattern : regular expression with one group, the step, searched in the name of a file or folder
    quiet_s : see ``watch_quiet_s`` of the launcher's settings
    store : one of its own, as it is used by other threads than the launcher's
    say : prints one line

    Raises
    ------
    UsageError
        The folder, the pattern or the name of the job is impossible.
    NotFit
        No cache runs on this node.
    """

    def __init__(
        self, folder: Path, step_pattern: str, quiet_s: float, job: str, node: str, store: Store, say: Callable[[str], None]
    ) -> None:
        self.folder, self.quiet_s, self._node, self._store, self._print = folder, quiet_s, node, store, say
        try:
            self.pattern = re.compile(step_pattern)
            self._job = check_job(f"{job}.files")
        except (re.error, CannotBe) as error:
            raise UsageError(f"--watch: {error}") from None
        if self.pattern.groups != 1:
            raise UsageError(f"--watch: the pattern {step_pattern!r} must have one group, the step")
        try:
            connection.reach(place.run_dir())
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _mark(node)).touch()
        except CacheGone as error:
            raise NotFit(f"--watch keeps files in the cache of this node, and {error}") from None
        except OSError as error:
            raise UsageError(f"--watch: {folder} cannot be used as a folder: {error.strerror or error}") from None
        self._said: set[str] = set()
        self._told = Told()
        self._first: dict[str, Signature] | None = None
        """What lay in the folder when this launcher began its first round."""
        self._client: FolderClient | None = None
        self._saving: _Saving | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    # --- before a round

    def before_round(self, number: int, members: Mapping[str, int]) -> None:
        """Put the folder right for a round, together with the other nodes.

        Raises
        ------
        NotFit
            The cache of this node is gone, or the folder cannot be written.
        DataError
            Nobody may go on, or the round was given up.
        """
        self._end_thread()
        self._said.clear()
        if self._first is None:
            self._first = {path: signature(status) for path, status in _listed(self.folder).items()}
        peers = self._running(number).peers
        try:
            self._client = FolderClient(self._job, members[self._node], len(members), peers=dict(peers) or None)
            self._client.connect()
            # what any launcher ever found spoiled is so for good
            spoiled = dict.fromkeys((*self._marked(), *(text for told in self.others().values() for text in told.spoiled)))
            self.tell(Told(number, spoiled=tuple(spoiled)))
            if members[self._node] == 0:
                plan, fetched = self._lead(number, members)
            else:
                plan, fetched = self._follow(number)
            if strangers := [node for node in members if node != self._node and (self.folder / _mark(node)).exists()]:
                raise NotFit(
                    f"{self.folder} is watched by {strangers[0]}, too; --watch needs a folder that each node has for itself"
                )
            if plan.problem:
                raise DataError(f"the folder {self.folder} is not put right: {plan.problem}")
            if fetched is not None:
                self._put_right(fetched, f"{number}-{plan.token}")
                self._client.release()
            else:
                self._put_back(f"{number}-{plan.token}")
        except (CacheGone, CannotRun) as error:
            raise NotFit(str(error)) from None
        except CheckpointError as error:
            raise DataError(f"the folder {self.folder} is not put right: {error}") from None
        except OSError as error:
            raise NotFit(f"the folder {self.folder} cannot be used: {error.strerror or error} ({error.filename})") from None
        self._saving = _Saving(self, self._client, plan, entries(fetched.manifest) if fetched else None, frozenset(members))

    def _lead(self, number: int, members: Mapping[str, int]) -> tuple[Restore, Fetched | None]:
        """Find the newest generation that every node can fetch; return it, and this node's shard."""
        assert self._client is not None
        for node in members:
            self._wait(number, partial(self._arrived, node, number))
        spoiled = {text for told in self.others().values() for text in told.spoiled}
        failed: dict[str, str] = {}
        plan = Restore(number, token=secrets.token_hex(4))
        until_s = monotonic_s() + connection.CONNECT_S
        while not plan.final:
            chosen = self._client.choose(spoiled | failed.keys())
            plan = replace(plan, attempt=chosen.attempt, generation=chosen.generation)
            is_newest = chosen.generation is not None and chosen.generation >= (chosen.existed or "")
            if chosen.unreached and not is_newest and monotonic_s() < until_s:
                SystemClock().sleep_s(LOOK_S)  # a cache that is just starting
                continue
            if chosen.generation is None:
                existed = max(filter(None, (chosen.existed, *failed)), default=None)
                plan = replace(plan, final=True, problem=_why_nothing(existed, [*chosen.passed_over, *failed.values()]))
                if not plan.problem and chosen.unreached:
                    plan = replace(plan, problem=f"not all caches could be asked ({'; '.join(chosen.unreached)}); start them")
                self._announce(plan)
                return plan, None
            for note in chosen.passed_over:
                self.say_once(f"passed over: {note}")
            self._announce(plan)
            fetched, problem = self._fetch(number, chosen.generation)
            problems = [problem] if problem else []
            for node in members:
                if node != self._node:
                    told = self._wait(number, partial(self._answer, node, plan))
                    problems += [f"{node}: {told.problem}"] if told.problem else []
            if problems:
                failed[chosen.generation] = f"step {generation(chosen.generation).step}: {'; '.join(problems)}"
                self.say(f"passed over: {failed[chosen.generation]}")
                continue
            plan = replace(plan, final=True)
            self._announce(plan)
        return plan, fetched

    def _follow(self, number: int) -> tuple[Restore, Fetched | None]:
        """Do as the first node says, until it says what is final."""
        fetched, last = None, ""
        while True:
            plan = self._wait(number, partial(self._news, number, last))
            if plan.generation is not None and plan.generation != last:
                last = plan.generation
                fetched, _ = self._fetch(number, last)
            if plan.final:
                return plan, fetched if plan.generation is not None else None

    def _news(self, number: int, last: str) -> Restore | None:
        found = self._store.get("restore")
        plan = None if found is None else from_json(Restore, found[1])
        return plan if plan is not None and plan.round == number and (plan.final or plan.generation != last) else None

    def _arrived(self, node: str, number: int) -> Told | None:
        told = self.others().get(node)
        return told if told is not None and told.round == number else None

    def _answer(self, node: str, plan: Restore) -> Told | None:
        told = self.others().get(node)
        return told if told is not None and (told.round, told.fetched) == (plan.round, plan.generation) else None

    def _announce(self, plan: Restore) -> None:
        found = self._store.get("restore")
        if found is not None and from_json(Restore, found[1]).round > plan.round:
            raise DataError(f"round {plan.round} was given up")
        if not self._store.put("restore", to_json(plan), found[0] if found is not None else 0):
            raise DataError(f"another launcher takes this node for its own in round {plan.round}")

    def _fetch(self, number: int, wanted: str) -> tuple[Fetched | None, str]:
        """Fetch this node's shard and tell how it went."""
        assert self._client is not None
        fetched, problem = None, ""
        try:
            fetched = self._client.fetch(wanted)
        except CacheGone:
            raise
        except CheckpointError as error:
            problem = str(error)
        self.tell(replace(self._told, fetched=wanted, problem=problem))
        return fetched, problem

    def _running(self, number: int) -> Job:
        found = self._store.get("job")
        job = None if found is None else from_json(Job, found[1])
        if job is None or job.round != number or job.phase is not Phase.RUNNING:
            raise DataError(f"round {number} was given up")
        return job

    def _wait(self, number: int, look: Callable[[], T | None]) -> T:
        """Return what `look` finds, while the round has not been given up."""
        until_s = monotonic_s() + ANSWER_S
        while (found := look()) is None:
            self._running(number)
            if monotonic_s() > until_s:
                raise DataError(f"another node has not said for {ANSWER_S:g} s whether it has its files")
            SystemClock().sleep_s(0.1)
        return found

    def _put_right(self, fetched: Fetched, aside: str) -> None:
        """Make the folder hold a generation and nothing newer. What stands in the way is moved aside, never deleted."""
        step = fetched.manifest.key.generation.step
        wanted = entries(fetched.manifest)
        taken: list[str] = []

        def put_aside(path: str) -> None:
            self._set_aside([path], aside)
            taken.append(path)

        for path in _listed(self.folder, unfinished=True):
            if PurePosixPath(path).name.startswith(TEMPORARY):  # of a launcher that was killed
                (self.folder / path).unlink(missing_ok=True)
        written = write(fetched.manifest, fetched.data, self.folder, put_aside)
        replaced, kept = len(taken), {entry.path for entry in wanted}
        steps = {path: self.step(path) for path in _listed(self.folder) if path not in kept}
        newer = {path: its for path, its in steps.items() if its is not None and its >= step}
        self._set_aside(newer, aside)
        self.say(_account(fetched, written, self.folder, f"{ASIDE}/{aside}", replaced, newer))

    def _put_back(self, aside: str) -> None:
        """Make the folder what it was before the job, as no step counts: else the ranks of this node would go on from one."""
        assert self._first is not None
        found = {path: self.step(path) for path, s in _listed(self.folder).items() if self._first.get(path) != signature(s)}
        steps = {path: step for path, step in found.items() if step is not None}
        if steps:
            self._set_aside(found, aside)
            self.say(f"no step was ever saved by every node{_newer(steps, f'{ASIDE}/{aside}')}")
        elif left := _listed(self.folder):
            self.say(f"no step was ever saved by every node; {self.folder} is left as it is ({_count(left)})")

    def _set_aside(self, paths: Iterable[str], aside: str) -> None:
        for path in paths:
            # not by its name: a script that looks into all folders for *.pt must not find it there
            to = self.folder.joinpath(ASIDE, aside, *(f"{part}~" for part in PurePosixPath(path).parts))
            to.parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).rename(to)

    # --- during a round

    def begin(self, worker: Worker) -> None:
        """Save what these ranks write, in a thread, until `end` or the next round."""
        assert self._saving is not None
        saving, self._saving, self._ended = self._saving, None, threading.Event()
        self._thread = threading.Thread(target=self._look, args=(saving, worker, self._ended), daemon=True, name="watch")
        self._thread.start()

    def end(self) -> None:
        """Save nothing any more."""
        self._ended.set()
        if self._client is not None:
            self._client.close()

    def _end_thread(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(SAVE_S)  # what it is saving at this moment counts
        self.end()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _look(self, saving: "_Saving", worker: Worker, ended: threading.Event) -> None:
        wait_s = LOOK_S
        while not ended.wait(wait_s):
            began_s = monotonic_s()
            try:
                saving.look(worker)
            except (EagleEyeError, CheckpointError, OSError) as error:
                if not ended.is_set():
                    self.say_once(f"{error}; it is tried again")
            # a folder of very many files must not keep a processor busy
            wait_s = max(LOOK_S, 20 * (monotonic_s() - began_s))

    # --- what is shared

    def step(self, path: str) -> int | None:
        """Return the step that a file belongs to: the number in the first part of its path that has one; None when none has.

        What follows the word ``rank`` is no step, nor is what belongs to the suffix of a file (``.h5``).
        """
        *folders, name = PurePosixPath(path).parts
        for part in (*folders, re.sub(r"\.[A-Za-z]\w*$", "", name)):
            match = self.pattern.search(re.sub(r"(?i)rank[-_=.]?\d+", "", part))
            if match and match[1] and match[1].isdecimal() and int(match[1]) < 10**12:
                return int(match[1])
        return None

    def tell(self, told: Told) -> None:
        """Write this node's document."""
        if told.spoiled != self._told.spoiled:
            # also into the folder: before a job is started again by hand, the documents are removed
            self.folder.mkdir(parents=True, exist_ok=True)
            beside = self.folder / f"{TEMPORARY}{secrets.token_hex(8)}"
            beside.write_text("\n".join(told.spoiled), encoding="utf-8")
            beside.replace(self.folder / _mark(self._node))
        key = f"watch/{self._node}"
        found = self._store.get(key)
        if not self._store.put(key, to_json(told), found[0] if found is not None else 0):
            raise DataError(f"another launcher takes this node, {self._node}, for its own")
        self._told = told

    def _marked(self) -> list[str]:
        """Return the generations that earlier launchers of this node knew as spoiled."""
        try:
            text = (self.folder / _mark(self._node)).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []  # the script may do with its folder as it likes
        return re.findall(r"^\d{10}-\d{12}-[0-9a-f]{8}$", text, re.MULTILINE)

    @property
    def told(self) -> Told:
        """What this node has told last."""
        return self._told

    def others(self) -> dict[str, Told]:
        """Return what every node, this one too, has told last."""
        return {node: from_json(Told, document) for node, (_, document) in self._store.find("watch").items()}

    def say(self, text: str) -> None:
        """Print a line."""
        self._print(f"watch: {text}")

    def say_once(self, text: str) -> None:
        """Print a line, once a round."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)


class _Saving:
    """What is known of the folder in one round.

    Parameters
    ----------
    restored : the files that were put right before it; None when nothing was
    """

    def __init__(
        self, watch: FolderWatch, client: FolderClient, plan: Restore, restored: list[Entry] | None, members: frozenset[str]
    ) -> None:
        self._watch, self._client, self._plan, self._members = watch, client, plan, members
        found = _listed(watch.folder, unfinished=True)
        self._kept = set() if restored is None else {entry.path for entry in restored}
        # Nobody knows whether what lies there from before is complete, but for what was put there.
        self._before = {path: signature(s) for path, s in found.items()}
        self._seen: dict[str, tuple[Signature, float]] = {}
        self._heard: dict[int, float] = {}
        self._tried: dict[int, dict[str, Signature]] = {}
        """The files of a step when it was first given to the cache: those that it has when the answer is lost."""
        self._saved: dict[int, dict[str, Signature]] = {}
        self._spoiled: set[int] = set()
        self._forms: frozenset[str] | None = None
        """Names of a step's files on this node, ``#`` for the step; empty when it writes none; None when that is not known."""
        if restored is not None and plan.generation is not None:
            step = generation(plan.generation).step
            self._forms = _forms([path for path in self._kept if watch.step(path) is not None], step)

    def look(self, worker: Worker) -> None:
        """Look at the folder and at what others tell; save what is due."""
        now_s, found = monotonic_s(), _listed(self._watch.folder, unfinished=True)
        for path, status in found.items():
            if self._seen.get(path, ((), 0.0))[0] != signature(status):
                self._seen[path] = (signature(status), now_s)
        self._seen = {path: known for path, known in self._seen.items() if path in found}
        fresh = {path: s for path, s in found.items() if self._before.get(path) != signature(s)}
        steps: dict[int, Found] = {}
        for path, status in fresh.items():
            if (step := self._watch.step(path)) is not None:
                steps.setdefault(step, {})[path] = status
        self._notice_changes(steps)
        self._tell_and_hear(now_s)
        known = {*steps, *self._heard, *self._saved}
        for step in sorted(known - self._saved.keys()):
            files = {path: s for path, s in steps.get(step, {}).items() if not _unfinished(path)}
            if (files or step in self._heard) and self._due(
                step, steps.get(step, {}), files, now_s, step < max(known), len(worker.pids)
            ):
                self._save(step, files, self._companions(found), worker)
                self._tell_and_hear(now_s)
        if not known and any(not _unfinished(path) and self._age_s(path, now_s) > self._watch.quiet_s for path in fresh):
            self._watch.say_once(
                f"the names of the files in {self._watch.folder} have no number that could be a step, so nothing is kept"
            )

    def _tell_and_hear(self, now_s: float) -> None:
        """Exchange news with the other nodes. A store that fails must not keep this node from saving what it has."""
        try:
            told = self._watch.told
            spoiled = dict.fromkeys((*told.spoiled, *(str(self._generation(step)) for step in sorted(self._spoiled))))
            news = replace(told, steps=tuple(sorted(self._saved)), spoiled=tuple(spoiled))
            if news != told:
                self._watch.tell(news)
            for node, told in self._watch.others().items():
                if node in self._members and told.round == self._plan.round:
                    for step in told.steps:
                        self._heard.setdefault(step, now_s)
        except (EnvironmentLacks, DataError) as error:
            self._watch.say_once(f"{error}; the other nodes are told later")

    def _age_s(self, path: str, now_s: float) -> float:
        return now_s - self._seen[path][1]

    def _due(self, step: int, of_step: Found, files: Found, now_s: float, passed: bool, ranks: int) -> bool:
        """Whether this node's part of a step is as it will stay, as far as names and times can tell."""
        quiet_s = min([self._age_s(path, now_s) for path in of_step] or [now_s - self._heard.get(step, now_s)])
        forms = _forms(files, step)
        if self._forms is None:
            # A rank that hangs before it writes must not look like one that never does: then a later step shows it.
            needed_s = self._watch.quiet_s if len(files) >= ranks or passed else float("inf")
        elif forms == self._forms:
            needed_s = STABLE_S if files else self._watch.quiet_s
        elif files:
            needed_s = ODD_TIMES * self._watch.quiet_s
        else:
            needed_s = float("inf")
            if quiet_s > ODD_TIMES * self._watch.quiet_s:
                self._watch.say_once(f"step {step} does not count: other nodes saved it, and here no file of it was written")
        return quiet_s >= max(needed_s, STABLE_S if files else 0.0)

    def _companions(self, found: Found) -> Found:
        """Return the files of no step, a ``latest`` say, that are complete: they are kept with each step as they are then."""
        return {
            path: status
            for path, status in found.items()
            if self._watch.step(path) is None
            and not _unfinished(path)
            and (path in self._kept or self._before.get(path) != signature(status))
        }

    def _save(self, step: int, files: Found, companions: Found, worker: Worker) -> None:
        """Save a step if all its files are complete; if not, a later look will find them so."""
        folder, now_s = self._watch.folder, monotonic_s()
        pids = worker.pids
        open_now = _open_for_writing(pids) if files else set()
        together = {**files, **(companions if files else {})}
        busy = {p for p, s in together.items() if self._age_s(p, now_s) < STABLE_S or (s.st_dev, s.st_ino) in open_now}
        busy |= {p for p, s in together.items() if p not in busy and not _whole(folder / p, s)}
        waited_s = now_s - max((self._seen[path][1] for path in files), default=now_s)
        if busy & files.keys() or (busy and waited_s < STABLE_S + self._watch.quiet_s):
            return
        for path in busy:
            self._watch.say_once(f"{path} is left out: it is being written all the time")
            del together[path]
        # Only now: whoever was killed before this moment may have left behind what looks complete.
        if not _at_work(worker, pids):
            return
        given = {path: signature(status) for path, status in files.items()}
        tried = self._tried.setdefault(step, given)
        try:
            self._client.save(self._generation(step), folder, together, ROOM_S)
        except Changed:
            return
        except Held:
            given = tried  # the answer was lost with the connection; what came since is late
        self._saved[step] = given
        self._forms = _forms(files, step)

    def _generation(self, step: int) -> Generation:
        return Generation(self._plan.attempt, step, self._plan.token)

    def _notice_changes(self, steps: Mapping[int, Found]) -> None:
        for step, saved in list(self._saved.items()):
            here = {path: s for path, s in steps.get(step, {}).items() if not _unfinished(path)}
            late = sorted(here.keys() - saved.keys())
            if late and step not in self._spoiled:
                self._forms = _forms(here, step)
                self._spoiled.add(step)
                self._watch.say(f"step {step} does not count: {late[0]} came when the rest was saved; raise watch_quiet_s")
            elif any(saved[path] != signature(status) for path, status in here.items() if path in saved):
                self._watch.say_once(f"a file of step {step} was changed after it was saved; what is kept stays as it was first")


def _listed(folder: Path, unfinished: bool = False) -> Found:
    """Return files and links below a folder that may be of a checkpoint; if asked also those not finished, but never logs."""
    found: Found = {}
    left = [""]
    while left:
        above = left.pop()
        try:
            listing = list(os.scandir(folder / above))
        except FileNotFoundError:
            continue
        for item in listing:
            path = f"{above}{item.name}"
            if any(fnmatch.fnmatchcase(item.name, pattern) for pattern in (*LOGS, _mark("*"))):
                continue
            if item.is_dir(follow_symlinks=False):
                if not _unfinished(item.name) and not item.name.startswith("tmp"):
                    left.append(f"{path}/")
            elif unfinished or not _unfinished(item.name):
                with contextlib.suppress(FileNotFoundError):
                    status = item.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                        found[path] = status
    return found


def _mark(node: str) -> str:
    """Return the name of the file that tells who watches a folder: it shows when nodes share one. It holds what is spoiled."""
    return f".watched-by-{node}"


def _unfinished(path: str) -> bool:
    name = PurePosixPath(path).name
    return name not in FINISHED and any(fnmatch.fnmatchcase(name, pattern) for pattern in UNFINISHED)


def _whole(path: Path, status: os.stat_result) -> bool:
    """Whether a file has the end that belongs to its beginning: what torch.save writes is a ZIP file, and those tell."""
    if not stat.S_ISREG(status.st_mode):
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) != b"PK\x03\x04" or zipfile.is_zipfile(file)
    except OSError:
        return False


def _forms(paths: Iterable[str], step: int) -> frozenset[str]:
    return frozenset(re.sub(r"\d+", lambda found: "#" if int(found[0]) == step else found[0], path) for path in paths)


def _open_for_writing(groups: tuple[int, ...]) -> set[tuple[int, int]]:
    """Return (device, inode) of what the processes of these groups have open for writing."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getpgid(int(pid)) not in groups:
                continue
            numbers = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue  # it has ended
        for number in numbers:
            with contextlib.suppress(OSError, IndexError, ValueError):
                flags = int(Path(f"/proc/{pid}/fdinfo/{number}").read_text().partition("flags:")[2].split()[0], 8)
                if flags & os.O_ACCMODE != os.O_RDONLY:
                    status = os.stat(f"/proc/{pid}/fd/{number}")
                    found.add((status.st_dev, status.st_ino))
    return found


def _at_work(worker: Worker, pids: tuple[int, ...]) -> bool:
    """Whether no rank has died that was there before: all live, or have ended well."""

    def lives(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] not in b"ZX"
        except OSError:
            return False

    return not any(worker.exit_codes.values()) and (worker.pids == pids) and all(map(lives, pids))


def _why_nothing(existed: str | None, notes: list[str]) -> str:
    if existed is None:
        return ""
    had = f"there was a checkpoint of step {generation(existed).step} and nothing can be restored ({'; '.join(notes)})"
    return f"{had}; bring its holders back, or give the job another name to start anew"


def _account(fetched: Fetched, written: list[str], folder: Path, aside: str, replaced: int, newer: Mapping[str, int]) -> str:
    """Return one sentence about what was done."""
    files = entries(fetched.manifest)
    step = f"step {fetched.manifest.key.generation.step}"
    if not files:
        text = f"{step}: this node has no files of it"
    elif not written:
        text = f"{step} is in {folder} as it was saved ({_count(files)}, {_size(fetched.manifest.nbytes)})"
    else:
        where = {"local": "this node's memory", "neighbour": f"neighbour {fetched.holder}", "storage": "storage"}[fetched.source]
        nbytes = sum(entry.nbytes for entry in files if entry.path in set(written))
        text = f"{step} restored from {where} ({_count(written)}, {_size(nbytes)})"
    if fetched.tried:
        text += f", as elsewhere it is not intact: {'; '.join(fetched.tried)}"
    if replaced:
        text += f"; {_count(range(replaced))} set aside in {aside}, because their content was another"
    return text + _newer(newer, aside)


def _newer(files: Mapping[str, int], aside: str) -> str:
    steps = ", ".join(map(str, sorted(set(files.values()))))
    return f"; {_count(files)} of step {steps} set aside in {aside}, because not every node has that step" if files else ""


def _count(files: "Iterable[object]") -> str:
    number = len(list(files))
    return f"{number} file" if number == 1 else f"{number} files"


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"
