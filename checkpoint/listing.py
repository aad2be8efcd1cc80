"""What a cache holds, as a table for people; read from its index, so that it also works when no cache runs."""

import fcntl
import json
import os
import sqlite3
from pathlib import Path

from checkpoint import index, place
from checkpoint.errors import CannotRun

_HEADINGS = ("job", "step", "rank", "saved on", "bytes", "memory", "copy on", "storage", "trouble")


def table(run_dir: Path) -> str:
    """Return one line for each shard, newest generation first.

    Raises
    ------
    CannotRun
        No cache ever ran there, or its index cannot be read.
    """
    try:
        found = index.rows(run_dir / place.INDEX)
    except (OSError, sqlite3.Error) as error:
        raise CannotRun(f"nothing can be listed in {run_dir}: {error}; name the cache's folder by --run-dir") from None
    if not found:
        return "nothing is held"
    runs, here = _runs(run_dir), _node(run_dir)
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for row in found:
        # a node that holds a copy does not know what the owner has written to storage
        stored = "yes" if row["stored"] else "no" if row["origin"] == here or not here else "-"
        kept = ("yes" if row["in_memory"] and runs else "no", str(row["replica"] or "-"), stored)
        told = (str(row[name]) for name in ("job", "step", "rank", "origin", "nbytes"))
        rows.append((*told, *kept, str(row["error"] or "-")))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *([] if runs else ["no cache runs here now: what its memory held is gone"])])


def _runs(run_dir: Path) -> bool:
    """Whether a cache holds the lock of the folder."""
    try:
        lock = os.open(run_dir / place.LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _node(run_dir: Path) -> str:
    """Return the name of the node whose cache was here last, empty when it is not known any more."""
    try:
        return str(json.loads((run_dir / place.INFO).read_text(encoding="utf-8"))["node"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
