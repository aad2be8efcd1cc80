"""What was planned and how each action ended, in SQLite: survives a crash, so that a begun plan goes on where it stood."""

import fcntl
import json
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagleeye.errors import EnvironmentLacks
from eagleeye.records import ActionKind, Outcome, Plan, Result, from_json, to_json

VERSION = 1
"""Of the tables, kept in SQLite's ``user_version``."""

_SCHEMA = (
    "CREATE TABLE plans (plan_id TEXT, acted INTEGER, planned_s REAL NOT NULL, ended_s REAL, plan TEXT NOT NULL,"
    " PRIMARY KEY (plan_id, acted))",
    "CREATE TABLE operations (operation_id TEXT, acted INTEGER, begun_s REAL NOT NULL, attempts INTEGER NOT NULL,"
    " unclear INTEGER NOT NULL, next_try_s REAL, outcome TEXT, PRIMARY KEY (operation_id, acted))",
)
_COLUMNS = {
    0: {"plans": "plan_id planned_s plan", "operations": "operation_id claimed_s outcome"},
    1: {
        "plans": "plan_id acted planned_s ended_s plan",
        "operations": "operation_id acted begun_s attempts unclear next_try_s outcome",
    },
}
_FROM_0 = (
    "ALTER TABLE plans RENAME TO old_plans",
    "ALTER TABLE operations RENAME TO old_operations",
    *_SCHEMA,
    # the older version did not write whether it acted: of plans that is asked anew, of operations their outcome tells it
    "INSERT INTO plans SELECT plan_id, 0, planned_s, planned_s, plan FROM old_plans ORDER BY rowid",
    "INSERT INTO operations SELECT operation_id, coalesce(json_extract(outcome, '$.result'), '') != 'observed', claimed_s, 1, 0,"
    " NULL, outcome FROM old_operations ORDER BY rowid",
    "DROP TABLE old_plans",
    "DROP TABLE old_operations",
)


@dataclass(frozen=True, slots=True)
class Operation:
    """Where one action of a plan stands.

    `begun_s` is when it was first tried. `outcome` is how the newest of its `attempts` ended, None while that is being made or
    when it was interrupted; the next is due at `next_try_s`, None when there is none. `unclear`: an earlier attempt may have
    done it.
    """

    begun_s: float
    attempts: int
    unclear: bool
    next_try_s: float | None
    outcome: Outcome | None

    @property
    def over(self) -> bool:
        """Whether it will not be tried again."""
        return self.outcome is not None and self.next_try_s is None


class Journal:
    """One file. Every write is on disk when the call returns.

    What was only observed and what was acted (`acting`) are kept apart: an observation is no deed, and whoever observes may do so
    beside the one that acts. Of those there is one at a time: `acting` locks ``PATH.lock`` until `close` or the process's end.
    A file of an older version is brought up to date in place.

    Raises
    ------
    EnvironmentLacks
        The file cannot be opened or written, is no journal, or another process acts.
    """

    def __init__(self, path: Path, acting: bool = False) -> None:
        self.acting = acting
        self._path = path
        self._lock = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if acting:
                self._hold(Path(f"{path}.lock"))
            self._db = sqlite3.connect(path, timeout=5.0, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            self._release()
            raise self._unusable(error) from None
        try:
            self._prepare()
        except sqlite3.Error as error:
            self.close()
            raise self._unusable(error) from None

    def record(self, plan: Plan, now_s: float) -> bool:
        """Write a plan; return False when the incident has the same one already, which is then kept.

        Plans are the same when their actions are, whatever the words; one that only tells is the same when its words are, too.
        """
        row = (_plan_id(plan), self.acting, now_s, json.dumps(to_json(plan)))
        return self._write("INSERT OR IGNORE INTO plans VALUES (?, ?, ?, NULL, ?)", *row) == 1

    def planned_s(self, plan: Plan) -> float:
        """Return when a plan was recorded; long ago when it was not."""
        rows = self._read("SELECT planned_s FROM plans WHERE plan_id = ? AND acted = ?", _plan_id(plan), self.acting)
        return float(rows[0][0]) if rows else float("-inf")

    def end(self, plan: Plan, now_s: float) -> None:
        """Write that nothing more is done about a plan."""
        self._write("UPDATE plans SET ended_s = ? WHERE plan_id = ? AND acted = ?", now_s, _plan_id(plan), self.acting)

    def unfinished(self) -> list[Plan]:
        """Return the plans that were not ended, oldest first; when acting, those that are acted on."""
        return self._plans("acted = ? AND ended_s IS NULL", self.acting)

    def plans(self, acted: bool) -> list[Plan]:
        """Return all plans that were acted on, or only observed; oldest first."""
        return self._plans("acted = ?", acted)

    def write(self, operation_id: str, operation: Operation) -> None:
        """Write where an operation stands; `begun_s` stays what it was written first."""
        outcome = json.dumps(to_json(operation.outcome)) if operation.outcome else None
        self._write(
            "INSERT INTO operations VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET attempts = excluded.attempts,"
            " unclear = excluded.unclear, next_try_s = excluded.next_try_s, outcome = excluded.outcome",
            *(operation_id, self.acting, operation.begun_s, operation.attempts, operation.unclear, operation.next_try_s, outcome),
        )

    def operation(self, operation_id: str) -> Operation | None:
        """Return where an operation stands, None when it was never begun."""
        return self._operation(operation_id, self.acting)

    def done_since_s(self, operation_id: str) -> float | None:
        """Return when an operation was begun that was really done; None when it was not, or only observed."""
        operation = self._operation(operation_id, acted=True)
        done = operation is not None and operation.outcome is not None and operation.outcome.result is Result.DONE
        return operation.begun_s if operation is not None and done else None

    def outcomes(self) -> list[Outcome]:
        """Return the newest outcomes of all operations, in the order in which they were begun."""
        rows = self._read("SELECT outcome FROM operations WHERE outcome IS NOT NULL ORDER BY begun_s, rowid")
        return [from_json(Outcome, json.loads(row[0])) for row in rows]

    def close(self) -> None:
        """Release the file and the lock."""
        self._db.close()
        self._release()

    def _plans(self, which: str, *values: object) -> list[Plan]:
        rows = self._read(f"SELECT plan FROM plans WHERE {which} ORDER BY planned_s, rowid", *values)
        return [from_json(Plan, json.loads(row[0])) for row in rows]

    def _operation(self, operation_id: str, acted: bool) -> Operation | None:
        rows = self._read(
            "SELECT begun_s, attempts, unclear, next_try_s, outcome FROM operations WHERE operation_id = ? AND acted = ?",
            *(operation_id, acted),
        )
        if not rows:
            return None
        begun_s, attempts, unclear, next_try_s, text = rows[0]
        outcome = from_json(Outcome, json.loads(text)) if text else None
        return Operation(begun_s, attempts, bool(unclear), next_try_s, outcome)

    def _hold(self, path: Path) -> None:
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._lock, 20, 0).decode(errors="replace").strip() or "unknown"
            self._release()
            raise EnvironmentLacks(
                f"another `eagleeye remediate --act` (pid {pid}) already uses the journal {self._path}; one is enough"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _prepare(self) -> None:
        """Make the tables, or bring those of an older version up to date; another program's database is refused untouched."""
        self._db.execute("PRAGMA synchronous=EXTRA")  # the rollback journal, not WAL: two that turn WAL on at once fail
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            version, tables = int(self._db.execute("PRAGMA user_version").fetchone()[0]), self._tables()
            if tables != _COLUMNS.get(version) and (version, tables) != (0, {}):
                raise sqlite3.DatabaseError("it belongs to another program or to a newer version")
            if version < VERSION:
                for statement in _FROM_0 if tables else _SCHEMA:
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {VERSION}")

    def _tables(self) -> dict[str, str]:
        """Return the names of the columns of each table."""
        rows = self._db.execute(
            "SELECT m.name, c.name FROM sqlite_master m, pragma_table_info(m.name) c WHERE m.type = 'table'"
            " AND m.name NOT LIKE 'sqlite!_%' ESCAPE '!' ORDER BY m.name, c.cid"
        )
        found: dict[str, str] = {}
        for table, column in rows:
            found[table] = f"{found[table]} {column}" if table in found else column
        return found

    def _write(self, sql: str, *values: object) -> int:
        try:
            return self._db.execute(sql, values).rowcount
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def _read(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def _unusable(self, error: Exception) -> EnvironmentLacks:
        return EnvironmentLacks(
            f"cannot use the journal {self._path}: {error}; free some space or set [actions] journal to another file"
        )


def _plan_id(plan: Plan) -> str:
    tells = all(action.kind is ActionKind.NOTIFY for action in plan.actions)
    return "-".join([plan.incident_id, *(f"{a.kind.value}:{a.target}" for a in plan.actions), *([plan.reason] if tells else [])])
