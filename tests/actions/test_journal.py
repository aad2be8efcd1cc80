"""The journal is a real file: it survives a kill, serves two processes, and says in one sentence what is wrong with its place."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from eagleeye.actions.journal import Journal, Operation
from eagleeye.errors import EnvironmentLacks
from eagleeye.records import Action, ActionKind, Outcome, Plan, Result, to_json

PLAN = Plan("a1", "llm", (Action(ActionKind.EVICT, "n3"),), "why")
TOLD = Plan("a1", "llm", (Action(ActionKind.NOTIFY, "llm"),), "nobody is to blame")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "journal.db"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    made = Journal(path)
    yield made
    made.close()


def ended(operation_id: str, result: Result = Result.DONE, next_try_s: float | None = None, attempts: int = 1) -> Operation:
    return Operation(1.0, attempts, False, next_try_s, Outcome(operation_id, result, "so", 1.0, 2.0))


def test_plans(journal: Journal, path: Path) -> None:
    assert journal.plans(acted=False) == []
    assert journal.record(PLAN, 10.0)
    assert not journal.record(replace(PLAN, reason="said in other words"), 11.0)
    other = replace(PLAN, actions=())
    assert journal.record(other, 11.0)
    assert journal.record(replace(other, incident_id="a0"), 5.0)
    journal.close()
    again = Journal(path)
    assert again.plans(acted=False) == [replace(other, incident_id="a0"), PLAN, other]
    assert again.plans(acted=True) == []
    again.close()


def test_what_only_tells_is_another_plan_when_it_tells_something_else(journal: Journal) -> None:
    assert journal.record(TOLD, 1.0)
    assert not journal.record(TOLD, 2.0)
    assert journal.record(replace(TOLD, reason="no spare is left"), 3.0)


def test_unfinished_plans(journal: Journal, path: Path) -> None:
    assert journal.record(TOLD, 2.0)
    assert journal.record(PLAN, 1.0)
    assert journal.unfinished() == [PLAN, TOLD]
    journal.end(PLAN, 3.0)
    assert journal.unfinished() == [TOLD]
    assert not journal.record(PLAN, 4.0), "what was ended is not begun again"
    assert journal.unfinished() == [TOLD]


def test_operations(journal: Journal, path: Path) -> None:
    assert journal.operation("a1-0") is None
    begun = Operation(7.0, 1, False, None, None)
    journal.write("a1-0", begun)
    assert journal.operation("a1-0") == begun
    assert not begun.over
    assert journal.outcomes() == []
    later = replace(ended("a1-0", Result.AMBIGUOUS, 9.0), begun_s=8.0, unclear=True)
    journal.write("a1-0", later)
    assert journal.operation("a1-0") == replace(later, begun_s=7.0), "it was first begun when it was first begun"
    assert not later.over
    journal.write("a1-1", ended("a1-1"))
    assert [(o.operation_id, o.result) for o in journal.outcomes()] == [("a1-1", Result.DONE), ("a1-0", Result.AMBIGUOUS)]
    last = replace(later, begun_s=7.0, attempts=5, next_try_s=None)
    journal.write("a1-0", last)
    assert last.over
    other = Journal(path)
    assert other.operation("a1-0") == last
    other.close()


def test_an_observation_is_no_deed(journal: Journal, path: Path) -> None:
    observed = ended("a1-evict-n3", Result.OBSERVED)
    assert journal.record(PLAN, 1.0)
    journal.write("a1-evict-n3", observed)
    acting = Journal(path, acting=True)
    assert acting.operation("a1-evict-n3") is None
    assert acting.record(PLAN, 2.0)
    assert (acting.unfinished(), acting.plans(acted=True), acting.plans(acted=False)) == ([PLAN], [PLAN], [PLAN])
    acting.write("a1-evict-n3", Operation(3.0, 1, False, None, None))
    assert journal.done_since_s("a1-evict-n3") is None
    acting.write("a1-evict-n3", ended("a1-evict-n3"))
    acting.end(PLAN, 4.0)
    assert (journal.operation("a1-evict-n3"), journal.unfinished()) == (observed, [PLAN])
    assert journal.done_since_s("a1-evict-n3") == acting.done_since_s("a1-evict-n3") == 3.0
    acting.close()


@pytest.mark.parametrize("result", [Result.OBSERVED, Result.TRANSIENT, Result.PERMANENT, Result.AMBIGUOUS])
def test_only_what_is_done_is_done(path: Path, result: Result) -> None:
    acting = Journal(path, acting=True)
    acting.write("a1-evict-n3", ended("a1-evict-n3", result))
    assert acting.done_since_s("a1-evict-n3") is None
    acting.close()


OPENER = """
import sys
from pathlib import Path
from eagleeye.actions.journal import Journal, Operation
from eagleeye.errors import EnvironmentLacks
from eagleeye.records import Plan
print("ready", flush=True)
sys.stdin.readline()
try:
    journal = Journal(Path(sys.argv[1]), acting=sys.argv[2] == "act")
except EnvironmentLacks as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
for i in range(50):
    journal.record(Plan(f"{sys.argv[3]}{i}", "llm", (), "why"), 1.0)
journal.write("begun", Operation(1.0, 1, False, None, None))
print("open", flush=True)
sys.stdin.readline()
"""


def opener(path: Path, mode: str, name: str) -> "subprocess.Popen[str]":
    """Start a process that opens the journal once it is told to."""
    arguments = [sys.executable, "-c", OPENER, str(path), mode, name]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def test_many_that_open_a_new_journal_at_once(path: Path) -> None:
    """They make its tables once, and nobody's plans are lost."""
    all_of_them = [opener(path, "observe", name) for name in "abcd"]
    for process in all_of_them:
        go(process)
    assert [said(process) for process in all_of_them] == ["open"] * 4
    journal = Journal(path)
    assert len(journal.plans(acted=False)) == 200
    journal.close()
    for process in all_of_them:
        process.communicate("end\n", timeout=10)


def test_one_acts_and_others_watch(path: Path) -> None:
    first, second = opener(path, "act", "a"), opener(path, "act", "b")
    go(first)
    assert said(first) == "open"
    go(second)
    told = f"another `eagleeye remediate --act` (pid {first.pid}) already uses the journal {path}; one is enough"
    assert said(second) == told
    second.communicate(timeout=10)
    assert second.returncode == 3
    with pytest.raises(EnvironmentLacks) as raised:
        Journal(path, acting=True)
    assert str(raised.value) == told
    watching = Journal(path)
    assert watching.record(PLAN, 1.0)
    watching.close()
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    acting = Journal(path, acting=True)
    assert len(acting.unfinished()) == 50
    assert acting.operation("begun") == Operation(1.0, 1, False, None, None), "what the dead one had begun is known"
    acting.close()
    Journal(path, acting=True).close()


def test_a_refused_journal_holds_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    path.write_text("Dear diary, " * 100)
    (tmp_path / "folder").mkdir()
    for _ in range(2):
        with pytest.raises(EnvironmentLacks, match="not a database"):
            Journal(path, acting=True)
        with pytest.raises(EnvironmentLacks, match="unable to open"):
            Journal(tmp_path / "folder", acting=True)


OLD = """
CREATE TABLE IF NOT EXISTS plans (plan_id TEXT PRIMARY KEY, planned_s REAL NOT NULL, plan TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS operations (operation_id TEXT PRIMARY KEY, claimed_s REAL NOT NULL, outcome TEXT);
"""


def old_journal(path: Path) -> None:
    """Write what the first version of the journal wrote: one plan, and operations that ended in each way."""
    path.parent.mkdir()
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.executescript(OLD)
    database.execute("INSERT INTO plans VALUES (?, ?, ?)", ("a1-evict:n3", 5.0, json.dumps(to_json(PLAN))))
    for number, result in enumerate(("observed", "done", "permanent")):
        outcome = Outcome(f"a1-{result}", Result(result), 'says "result": "observed"', 1.0, 2.0)
        database.execute("INSERT INTO operations VALUES (?, ?, ?)", (f"a1-{result}", float(number), json.dumps(to_json(outcome))))
    database.execute("INSERT INTO operations VALUES ('a1-cut', 9.0, NULL)")
    database.close()


def test_a_journal_of_the_first_version_is_brought_up_to_date(path: Path) -> None:
    old_journal(path)
    journal = Journal(path)
    assert (journal.plans(acted=False), journal.plans(acted=True), journal.unfinished()) == ([PLAN], [], [])
    assert not journal.record(PLAN, 9.0), "it is known to those who observe"
    assert [o.operation_id for o in journal.outcomes()] == ["a1-observed", "a1-done", "a1-permanent"]
    observed = journal.operation("a1-observed")
    assert observed is not None
    assert (observed.begun_s, observed.attempts, observed.over) == (0.0, 1, True)
    assert journal.operation("a1-done") is None
    journal.close()
    acting = Journal(path, acting=True)
    assert acting.record(PLAN, 9.0), "and new to the one that acts"
    assert acting.operation("a1-observed") is None
    assert acting.done_since_s("a1-done") == 1.0
    assert acting.operation("a1-cut") == Operation(9.0, 1, False, None, None)
    acting.close()
    database = sqlite3.connect(path)
    assert database.execute("PRAGMA user_version").fetchone() == (1,)
    tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
    assert tables == [("operations",), ("plans",)]
    database.close()


def test_many_that_bring_a_journal_up_to_date_at_once(path: Path) -> None:
    old_journal(path)
    all_of_them = [opener(path, "observe", name) for name in "abcd"]
    for process in all_of_them:
        go(process)
    assert [said(process) for process in all_of_them] == ["open"] * 4
    journal = Journal(path)
    assert len(journal.plans(acted=False)) == 201
    assert [o.operation_id for o in journal.outcomes()] == ["a1-observed", "a1-done", "a1-permanent"]
    journal.close()
    for process in all_of_them:
        process.communicate("end\n", timeout=10)


def refused(path: Path) -> str:
    with pytest.raises(EnvironmentLacks) as raised:
        Journal(path)
    text = str(raised.value)
    assert text.startswith(f"cannot use the journal {path}: ")
    assert text.endswith("; free some space or set [actions] journal to another file")
    return text


def test_what_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("Dear diary, " * 100)
    assert "not a database" in refused(path)
    assert path.read_text().startswith("Dear diary")
    assert "unable to open" in refused(tmp_path)
    (tmp_path / "file").write_text("")
    assert re.search("Not a directory|File exists", refused(tmp_path / "file" / "journal.db"))


@pytest.mark.parametrize(
    "script",
    [
        "CREATE TABLE plans (name TEXT)",
        f"{OLD} CREATE TABLE mine (name TEXT)",
        f"{OLD} PRAGMA user_version = 1",
        "PRAGMA user_version = 7",
        "CREATE TABLE things (name TEXT); PRAGMA user_version = 1",
    ],
)
def test_another_programs_database_or_a_later_versions(tmp_path: Path, script: str) -> None:
    path = tmp_path / "other.db"
    database = sqlite3.connect(path)
    database.executescript(script)
    database.close()
    before = path.read_bytes()
    assert "it belongs to another program or to a newer version" in refused(path)
    assert path.read_bytes() == before


AS_NOBODY = """
import os, sys
from pathlib import Path
from eagleeye.actions.journal import Journal
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    Journal(Path(sys.argv[1]))
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_folder_that_may_not_be_written() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "locked"
        folder.mkdir()
        Path(name).chmod(0o755)
        folder.chmod(0o555)
        command = [sys.executable, "-c", AS_NOBODY, str(folder / "journal.db")]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert told.startswith(f"EnvironmentLacks cannot use the journal {folder / 'journal.db'}: unable to open database file")
        assert list(folder.iterdir()) == []
        folder.chmod(0o755)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def write_many(journal: Journal) -> None:
    for i in range(1000):
        journal.write(f"b{i}-{'x' * 500}", Operation(1.0, 1, False, None, None))


def test_a_full_disk(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        journal = Journal(disk / "journal.db")
        journal.write("a1-0", ended("a1-0"))
        with pytest.raises(OSError, match="No space left"):
            fill(disk / "ballast")
        with pytest.raises(EnvironmentLacks, match=r"cannot use the journal .*; free some space or set"):
            write_many(journal)
        (disk / "ballast").unlink()
        assert journal.operation("a1-0") == ended("a1-0"), "what was written before is still there"
        journal.write("a1-1", ended("a1-1"))
        journal.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)
