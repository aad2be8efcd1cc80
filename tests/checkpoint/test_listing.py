"""What `eagleeye cache list` prints of memory, with and without a cache that runs."""

import fcntl
import json
import os
import re
from pathlib import Path

import pytest

from checkpoint import place
from checkpoint.errors import CannotRun
from checkpoint.index import Index, newest_step
from checkpoint.listing import table
from checkpoint.manifest import Generation, Key


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    index = Index(tmp_path / place.INDEX)
    index.put(Key("llm", Generation(7, 100, "aaaaaaaa"), 0), "node0", 4096, in_memory=True, replica="node1", stored=True)
    index.put(
        Key("llm", Generation(7, 150, "aaaaaaaa"), 3),
        "node3",
        4096,
        in_memory=True,
        pending="replicate, store",
        error="store: no space",
    )
    index.close()
    (tmp_path / place.INFO).write_text(json.dumps({"node": "node0", "address": "a", "port": 1}))
    return tmp_path


def test_while_the_cache_runs(run_dir: Path) -> None:
    lock = os.open(run_dir / place.LOCK, os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        assert [re.split("  +", line) for line in table(run_dir).splitlines()[1:]] == [
            ["llm", "150", "3", "node3", "4096", "yes", "-", "-", "replicate, store", "store: no space"],
            ["llm", "100", "0", "node0", "4096", "yes", "node1", "yes", "-", "-"],
        ]
    finally:
        os.close(lock)


def test_a_dead_cache_holds_nothing_in_memory(run_dir: Path) -> None:
    lines = table(run_dir).splitlines()
    assert [re.split("  +", line)[5] for line in lines[1:3]] == ["no", "no"]
    assert [re.split("  +", line)[8] for line in lines[1:3]] == ["-", "-"]  # nobody is left to do it
    assert lines[3] == "no cache runs here now: what its memory held is gone"


def test_nothing_to_list(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match=r"nothing can be listed in .*; name the cache's folder by --run-dir"):
        table(tmp_path)
    Index(tmp_path / place.INDEX).close()
    assert table(tmp_path) == "nothing is held"


def test_the_newest_step_of_a_job(run_dir: Path, tmp_path: Path) -> None:
    assert newest_step(run_dir / place.INDEX, "llm") == 150
    assert newest_step(run_dir / place.INDEX, "other") is None
    assert newest_step(tmp_path / "absent.db", "llm") is None
    (tmp_path / "broken.db").write_bytes(b"no database" * 100)
    assert newest_step(tmp_path / "broken.db", "llm") is None
