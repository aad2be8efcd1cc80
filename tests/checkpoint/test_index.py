"""The index: rows for people, which a cache makes anew; nothing depends on them."""

import sqlite3
from pathlib import Path

from checkpoint.index import Index, newest_step, rows
from checkpoint.manifest import Generation, Key

KEY = Key("llm", Generation(7, 100, "aaaaaaaa"), 3)


def test_a_row_says_what_is_true_and_what_is_still_to_be_done(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.db")
    index.put(KEY, "node0", 4096, in_memory=True, pending="verify, replicate, store")
    index.put(KEY, "node0", 4096, in_memory=True, replica="node1", pending="store", error="no space")
    (row,) = rows(tmp_path / "index.db")
    assert row.pop("changed_s") > 0
    assert row == {
        "job": "llm", "generation": "0000000007-000000000100-aaaaaaaa", "rank": 3, "step": 100, "origin": "node0", "nbytes": 4096,
        "in_memory": 1, "replica": "node1", "stored": 0, "pending": "store", "error": "no space",
    }  # fmt: skip
    index.drop(KEY)
    assert rows(tmp_path / "index.db") == []
    index.close()


def test_memory_does_not_outlive_its_cache_and_neither_do_its_rows(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.db")
    index.put(KEY, "node0", 4096, in_memory=True)
    index.close()
    Index(tmp_path / "index.db").close()
    assert rows(tmp_path / "index.db") == []


def test_an_older_layout_is_replaced_and_a_newer_one_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "index.db"
    for version in (1, 99):
        with sqlite3.connect(path) as db:
            db.execute("DROP TABLE IF EXISTS shards")
            db.execute("CREATE TABLE shards (job TEXT, step INTEGER)")
            db.execute("INSERT INTO shards VALUES ('llm', 7)")
            db.execute(f"PRAGMA user_version={version}")
        db.close()
        index = Index(path)
        assert bool(index.moved) == (version == 99)
        index.put(KEY, "node0", 1, in_memory=True, pending="store")
        index.close()
        assert newest_step(path, "llm") == 100
    assert newest_step(tmp_path / "index.broken", "llm") == 7  # nothing is thrown away


def test_two_processes_of_one_index_do_not_block_each_other(tmp_path: Path) -> None:
    """A cache that takes over opens the index while the old one has it open."""
    old = Index(tmp_path / "index.db")
    old.put(KEY, "node0", 1, in_memory=True)
    new = Index(tmp_path / "index.db")
    new.put(KEY, "node0", 2, in_memory=True)
    old.put(KEY, "node0", 3, in_memory=True)
    assert [row["nbytes"] for row in rows(tmp_path / "index.db")] == [3]
    old.close()
    new.close()
