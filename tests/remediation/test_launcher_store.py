"""Documents are changed by one writer at a time and are never seen half written, whatever happens to the writers."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagleeye.errors import DataError, EnvironmentLacks
from remediation.launcher.store import FolderStore


def test_versions_and_compare_and_set(tmp_path: Path) -> None:
    one, other = FolderStore(tmp_path / "j"), FolderStore(tmp_path / "j")
    assert one.get("job") is None
    assert other.put("job", {"a": 1}, 0)
    assert not one.put("job", {"a": 2}, 0)
    assert one.get("job") == (1, {"a": 1})
    assert one.put("job", {"a": 3}, 1)
    assert other.get("job") == (2, {"a": 3})
    for n in range(2, 9):
        assert not one.put("job", {}, n - 1)
        assert other.put("job", {"n": n}, n)
    assert one.get("job") == (9, {"n": 8})
    assert sorted(path.name for path in (tmp_path / "j").iterdir()) == ["job@8", "job@9"]


@given(st.dictionaries(st.text(min_size=1, max_size=20), st.integers(), max_size=5))
@settings(max_examples=30, deadline=None)
def test_any_name_finds_its_document_again(tmp_path_factory: pytest.TempPathFactory, values: dict[str, int]) -> None:
    store = FolderStore(tmp_path_factory.mktemp("names"))
    for name, value in values.items():
        assert store.put(f"agents/{name}", {"value": value}, 0)
    assert store.find("agents") == {name: (1, {"value": value}) for name, value in values.items()}
    assert all(store.get(f"agents/{name}") == (1, {"value": value}) for name, value in values.items())
    assert store.find("requests") == {}


def test_a_writer_that_slept_changes_nothing(tmp_path: Path) -> None:
    """It looked, slept, and meanwhile the version that it wants to make came, was superseded and removed."""
    store = FolderStore(tmp_path / "j")
    for n in range(5):
        store.put("job", {"n": n}, n)

    class Sleeper(FolderStore):
        looked = False

        @classmethod
        def _versions(cls, folder: Path) -> dict[str, int]:
            if not cls.looked:
                cls.looked = True
                return {"job": 1}
            return FolderStore._versions(folder)

    assert not Sleeper(tmp_path / "j").put("job", {"n": "stale"}, 1)
    assert store.get("job") == (5, {"n": 4})
    assert store.put("job", {"n": 5}, 5)
    assert sorted(path.name for path in (tmp_path / "j").iterdir()) == ["job@5", "job@6"]


@pytest.mark.parametrize("content", ['{"a": ', "", "[1]", "\udcff"])
def test_a_broken_document_is_one_sentence(tmp_path: Path, content: str) -> None:
    store = FolderStore(tmp_path / "j")
    store.put("job", {"a": 1}, 0)
    (tmp_path / "j" / "job@1").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=r"job@1 is broken .*remove .*/j$"):
        store.get("job")
    with pytest.raises(DataError, match="job@1"):
        store.find("")


def test_the_folder_above_is_never_made(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentLacks, match="No such file"):
        FolderStore(tmp_path / "unmounted" / "j").put("job", {}, 0)
    assert not (tmp_path / "unmounted").exists()


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from pathlib import Path
from eagleeye.errors import EnvironmentLacks
from remediation.launcher.store import FolderStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
store = FolderStore(Path(sys.argv[1]))
assert store.put("job", {"a": 1}, 0)
try:
    store.put("job", {"a": "x" * 5000}, 1)
except EnvironmentLacks as error:
    print(error)
print(store.get("job"))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "j")], capture_output=True, text=True, check=True)
    sentence, document = done.stdout.splitlines()
    assert sentence.startswith(f"cannot write {tmp_path}/j/job@2: File too large; free some space")
    assert document == "(1, {'a': 1})"
    assert [path.name for path in (tmp_path / "j").iterdir()] == ["job@1"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000


WRITER = """
import os, sys
from pathlib import Path
from remediation.launcher.store import FolderStore
store, me = FolderStore(Path(sys.argv[1])), sys.argv[2]
print("here", flush=True)
n = 0
while n < int(sys.argv[3]):
    version, value = store.get("book") or (0, {"lines": [], "pad": ""})
    line = f"{me}-{n}"
    if line in value["lines"]:
        n += 1
    elif store.put("book", {"lines": [*value["lines"], line], "pad": "x" * 4000}, version):
        n += 1
"""


def writer(folder: Path, name: str, lines: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), name, str(lines)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    writers = [writer(tmp_path / "j", f"w{n}", 40) for n in range(4)]
    for process in writers:
        process.communicate(timeout=60)
        assert process.returncode == 0
    found = FolderStore(tmp_path / "j").get("book")
    assert found is not None
    assert sorted(found[1]["lines"]) == sorted(f"w{n}-{i}" for n in range(4) for i in range(40))
    assert found[0] == 160


def test_writers_killed_and_stopped_at_any_instant(tmp_path: Path) -> None:
    """One writer is left in peace, others are killed or stopped anywhere: it never waits, and nobody sees half a document."""
    store, rng = FolderStore(tmp_path / "j"), random.Random(5)
    steady = writer(tmp_path / "j", "steady", 120)
    victims: list[subprocess.Popen[str]] = []
    end_s = time.monotonic() + 60
    for n in range(12):
        victim = writer(tmp_path / "j", f"v{n}", 10**6)
        assert victim.stdout is not None
        victim.stdout.readline()
        time.sleep(rng.uniform(0.005, 0.05))
        os.kill(victim.pid, signal.SIGSTOP if n % 3 == 0 else signal.SIGKILL)
        victims.append(victim)
        found = store.get("book")
        assert found is None or len(found[1]["pad"]) == 4000
    try:
        while steady.poll() is None:
            assert time.monotonic() < end_s, "a dead or stopped writer holds up the others"
            found = store.get("book")
            assert found is None or len(found[1]["pad"]) == 4000
            time.sleep(0.01)
        for victim in victims[::3]:
            os.kill(victim.pid, signal.SIGCONT)
        time.sleep(0.05)
    finally:
        for process in (steady, *victims):
            process.kill()
            process.communicate()
    found = store.get("book")
    assert found is not None
    lines = found[1]["lines"]
    assert len(lines) == len(set(lines)) == found[0]
    assert {f"steady-{n}" for n in range(120)} <= set(lines)
    assert store.put("book", {}, found[0])
    assert store.put("book", {}, found[0] + 1)
    assert store.put("book", {}, found[0] + 2)
    assert len(list((tmp_path / "j").iterdir())) == 2, "what killed writers left is removed"
    assert json.loads((tmp_path / "j" / f"book@{found[0] + 3}").read_text()) == {}
