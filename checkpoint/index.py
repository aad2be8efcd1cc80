"""What a cache holds, as rows of SQLite: for people and tools to read, also when no cache runs. Never the only truth.

The memory's rows are those of the running cache; the storage's rows are rebuilt from the manifests in the folder.
"""

import sqlite3
import threading
from pathlib import Path

from checkpoint.manifest import Key

_VERSION = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS shards (
    job TEXT NOT NULL, generation TEXT NOT NULL, rank INTEGER NOT NULL,
    step INTEGER NOT NULL, origin TEXT NOT NULL, nbytes INTEGER NOT NULL,
    in_memory INTEGER NOT NULL, replica TEXT NOT NULL, stored INTEGER NOT NULL, pending TEXT NOT NULL, error TEXT NOT NULL,
    changed_s INTEGER NOT NULL DEFAULT (unixepoch()),
    PRIMARY KEY (job, generation, rank)
);
"""
COLUMNS = (
    "job", "generation", "rank", "step", "origin", "nbytes", "in_memory", "replica", "stored", "pending", "error", "changed_s",
)  # fmt: skip


class Index:
    """One file. An unusable one is moved aside and begun anew: nothing is lost by that.

    Raises
    ------
    sqlite3.Error, OSError
        The disk is full or the folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.moved = ""
        self._lock = threading.Lock()
        try:
            self._db = self._open(path)
        except sqlite3.OperationalError:
            raise  # a full or locked disk says nothing about the file
        except sqlite3.DatabaseError:
            broken = path.with_suffix(".broken")
            path.replace(broken)
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            self.moved = f"{path} was no usable index and lies in {broken} now; a new one is made"
            self._db = self._open(path)

    @staticmethod
    def _open(path: Path) -> sqlite3.Connection:
        db = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")  # what a power cut takes is made again
            if db.execute("PRAGMA user_version").fetchone()[0] > _VERSION:
                raise sqlite3.DatabaseError("a newer version")
            # memory does not outlive the cache that held it, nor do its rows
            db.executescript("DROP TABLE IF EXISTS shards;" + _SCHEMA)
            db.execute(f"PRAGMA user_version={_VERSION}")
        except BaseException:
            db.close()
            raise
        return db

    def put(
        self,
        key: Key,
        origin: str,
        nbytes: int,
        *,
        in_memory: bool,
        replica: str = "",
        stored: bool = False,
        pending: str = "",
        error: str = "",
    ) -> None:
        """Write what is true of one shard now; `pending` names the steps that are still to be done."""
        names = (key.job, str(key.generation), key.rank, key.generation.step)
        row = (*names, origin, nbytes, in_memory, replica, stored, pending, error)
        with self._lock:
            self._db.execute(f"INSERT OR REPLACE INTO shards ({', '.join(COLUMNS[:-1])}) VALUES (?,?,?,?,?,?,?,?,?,?,?)", row)

    def drop(self, key: Key) -> None:
        """Forget a shard."""
        with self._lock:
            self._db.execute(
                "DELETE FROM shards WHERE job = ? AND generation = ? AND rank = ?", (key.job, str(key.generation), key.rank)
            )

    def close(self) -> None:
        """Release the file."""
        with self._lock:
            self._db.close()


def newest_step(path: Path, job: str) -> int | None:
    """Return the newest step of a job that a cache holds, None when there is none or nobody can tell."""
    try:
        db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=1.0)
        try:
            found = db.execute("SELECT MAX(step) FROM shards WHERE job = ?", (job,)).fetchone()
        finally:
            db.close()
    except sqlite3.Error:
        return None
    return None if found[0] is None else int(found[0])


def rows(path: Path) -> list[dict[str, object]]:
    """Return all rows of an index that may be in use, newest generation first. Raises sqlite3.Error or OSError."""
    if not path.exists():
        raise FileNotFoundError(2, "there is no index", str(path))
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5.0)
    try:
        found = db.execute(f"SELECT {', '.join(COLUMNS)} FROM shards ORDER BY job, generation DESC, rank").fetchall()
    finally:
        db.close()
    return [dict(zip(COLUMNS, row, strict=True)) for row in found]
