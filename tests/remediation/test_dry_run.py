"""The backend without hands says what it would do, and touches nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from eagleeye import plugins
from eagleeye.actions.policy import Settings
from eagleeye.records import Action, ActionKind, Result
from remediation.dryrun import DryRun


@pytest.mark.parametrize(
    ("kind", "target", "sentence"),
    [
        (ActionKind.NOTIFY, "llm", "would tell the owner of job llm"),
        (ActionKind.CORDON, "n3", "would keep new work away from node n3"),
        (ActionKind.EVICT, "n3", "would take node n3 out of the job"),
        (ActionKind.RESTART, "llm", "would restart job llm on the remaining nodes"),
    ],
)
def test_what_it_says(kind: ActionKind, target: str, sentence: str) -> None:
    for _ in range(2):
        assert DryRun().perform("a1-0", Action(kind, target), "llm", "why") == (Result.OBSERVED, sentence)


def test_it_sees_no_jobs() -> None:
    assert DryRun().observe("llm") is None


def test_it_is_what_acts_by_default() -> None:
    assert plugins.load("backend", Settings().backend) is DryRun


WATCHED = """
import sys
from eagleeye.records import Action, ActionKind
from remediation.dryrun import DryRun
backend = DryRun()
forbidden = []
sys.addaudithook(lambda event, arguments: forbidden.append(event))
for kind in ActionKind:
    backend.perform("a1-0", Action(kind, "{n3}"), "llm", "why")
backend.observe("llm")
seen = [e for e in forbidden if e.split(".")[0] in ("open", "os", "socket", "subprocess", "shutil", "sqlite3", "urllib")]
print(seen)
"""


def test_it_opens_nothing_starts_nothing_and_talks_to_nobody(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "[]\n"
    assert list(tmp_path.iterdir()) == []
