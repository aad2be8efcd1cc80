"""The journal is a real file: it survives a kill, serves two processes, and says in one sentence what is wrong with its place."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagleeye.actions.journal import Journal
from eagleeye.errors import EnvironmentLacks
from eagleeye.records import Action, ActionKind, Outcome, Plan, Result

PLAN = Plan("a1", "llm", (Action(ActionKind.NOTIFY, "llm"),), "why")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "journal.db"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    made = Journal(path)
    yield made
    made.close()


def outcome(operation_id: str, result: Result = Result.DONE) -> Outcome:
    return Outcome(operation_id, result, "done", 1.0, 2.0)


def test_plans(journal: Journal, path: Path) -> None:
    assert journal.plans() == []
    assert journal.record(PLAN, 10.0)
    assert not journal.record(Plan("a1", "llm", PLAN.actions, "said in other words"), 11.0)
    other = Plan("a1", "llm", (), "other actions")
    assert journal.record(other, 11.0)
    assert journal.record(Plan("a0", "llm", (), "earlier"), 5.0)
    journal.close()
    again = Journal(path)
    assert again.plans() == [Plan("a0", "llm", (), "earlier"), PLAN, other]
    again.close()


def test_operations(journal: Journal) -> None:
    assert journal.claim("a1-0", 1.0)
    assert journal.claim("a1-1", 2.0)
    assert not journal.claim("a1-0", 3.0)
    assert journal.outcomes() == []
    journal.finish(outcome("a1-1"))
    journal.finish(outcome("a1-0", Result.AMBIGUOUS))
    assert [(o.operation_id, o.result) for o in journal.outcomes()] == [("a1-0", Result.AMBIGUOUS), ("a1-1", Result.DONE)]


def test_two_journals_of_one_file_see_each_other(journal: Journal, path: Path) -> None:
    other = Journal(path)
    assert journal.claim("a1-0", 1.0)
    assert not other.claim("a1-0", 1.0)
    journal.finish(outcome("a1-0"))
    assert [o.operation_id for o in other.outcomes()] == ["a1-0"]
    other.close()


CLAIMER = """
import sys
from pathlib import Path
from eagleeye.actions.journal import Journal
journal = Journal(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.readline()
print(sum(journal.claim(f"op-{i}", 1.0) for i in range(200)), flush=True)
sys.stdin.readline()
"""


def claimer(path: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIMER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def test_two_processes_never_claim_the_same_operation(path: Path) -> None:
    both = [claimer(path), claimer(path)]
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    won = []
    for process in both:
        out, _ = process.communicate("end\n", timeout=60)
        assert process.returncode == 0
        won.append(int(out))
    assert sum(won) == 200


def test_a_kill_between_claim_and_finish_leaves_the_claim(path: Path) -> None:
    process = claimer(path)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.stdout.readline() == "200\n"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    journal = Journal(path)
    assert not journal.claim("op-0", 2.0)
    assert not journal.claim("op-199", 2.0)
    assert journal.claim("op-200", 2.0)
    assert journal.outcomes() == []
    journal.close()


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


def test_another_programs_database(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE plans (name TEXT)")
    database.close()
    journal = Journal(path)
    with pytest.raises(EnvironmentLacks, match="cannot use the journal"):
        journal.record(PLAN, 1.0)
    with pytest.raises(EnvironmentLacks, match="cannot use the journal"):
        journal.plans()
    journal.close()


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


def claim_many(journal: Journal) -> None:
    for i in range(1000):
        journal.claim(f"b{i}-{'x' * 500}", 1.0)


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
        assert journal.claim("a1-0", 1.0)
        with pytest.raises(OSError, match="No space left"):
            fill(disk / "ballast")
        with pytest.raises(EnvironmentLacks, match=r"cannot use the journal .*; free some space or set"):
            claim_many(journal)
        (disk / "ballast").unlink()
        assert not journal.claim("a1-0", 2.0), "what was written before is still there"
        assert journal.claim("a1-1", 2.0)
        journal.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)
