"""What was planned and how each action ended, in SQLite: survives a crash, and keeps two remediators from doing one
thing twice.
"""

import json
import sqlite3
from pathlib import Path

from eagleeye.errors import EnvironmentLacks
from eagleeye.records import Outcome, Plan, from_json, to_json

_SCHEMA = """
CREATE TABLE IF NOT EXISTS plans (plan_id TEXT PRIMARY KEY, planned_s REAL NOT NULL, plan TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS operations (operation_id TEXT PRIMARY KEY, claimed_s REAL NOT NULL, outcome TEXT);
"""


class Journal:
    """One file. Every write is on disk when the call returns.

    Raises
    ------
    EnvironmentLacks
        The file cannot be opened or written, or is no journal.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=5.0, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from None

    def record(self, plan: Plan, now_s: float) -> bool:
        """Write a plan; return False when the incident has one with the same actions already, which is then kept.

        An incident may get a second plan with other actions: once it is known which node is to blame.
        """
        plan_id = "-".join([plan.incident_id, *(f"{action.kind.value}:{action.target}" for action in plan.actions)])
        return self._write("INSERT OR IGNORE INTO plans VALUES (?, ?, ?)", plan_id, now_s, json.dumps(to_json(plan))) == 1

    def claim(self, operation_id: str, now_s: float) -> bool:
        """Say that an operation begins; return False when somebody began it before."""
        return self._write("INSERT OR IGNORE INTO operations VALUES (?, ?, NULL)", operation_id, now_s) == 1

    def finish(self, outcome: Outcome) -> None:
        """Write how a claimed operation ended."""
        self._write(
            "UPDATE operations SET outcome = ? WHERE operation_id = ?", json.dumps(to_json(outcome)), outcome.operation_id
        )

    def plans(self) -> list[Plan]:
        """Return all plans, oldest first."""
        return [from_json(Plan, json.loads(row[0])) for row in self._read("SELECT plan FROM plans ORDER BY planned_s, rowid")]

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of all operations that ended, in the order in which they began."""
        rows = self._read("SELECT outcome FROM operations WHERE outcome IS NOT NULL ORDER BY claimed_s, rowid")
        return [from_json(Outcome, json.loads(row[0])) for row in rows]

    def begun_s(self, operation_id: str) -> float | None:
        """Return when an operation was claimed, None when nobody did."""
        rows = self._read("SELECT claimed_s FROM operations WHERE operation_id = ?", operation_id)
        return float(rows[0][0]) if rows else None

    def outcome(self, operation_id: str) -> Outcome | None:
        """Return how an operation ended, None while it has not."""
        rows = self._read("SELECT outcome FROM operations WHERE operation_id = ? AND outcome IS NOT NULL", operation_id)
        return from_json(Outcome, json.loads(rows[0][0])) if rows else None

    def close(self) -> None:
        """Release the file."""
        self._db.close()

    def _write(self, sql: str, *values: object) -> int:
        try:
            return self._db.execute(sql, values).rowcount
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def _read(self, sql: str, *values: object) -> list[tuple[str]]:
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def _unusable(self, error: Exception) -> EnvironmentLacks:
        return EnvironmentLacks(
            f"cannot use the journal {self._path}: {error}; free some space or set [actions] journal to another file"
        )
