"""What a cache and a storage folder hold, as tables for people; read from index and manifests, so that no cache need run."""

import fcntl
import json
import os
import sqlite3
from pathlib import Path

from checkpoint import catalogue, index, place
from checkpoint.errors import CannotRun
from checkpoint.limits import size

_HEADINGS = ("job", "step", "rank", "saved on", "bytes", "memory", "copy on", "storage", "to do", "trouble")
_STORED = ("job", "step", "ranks", "size", "state", "latest", "pinned", "trouble")


def held(run_dir: Path, storage: Path | None) -> str:
    """Return the table of a cache's memory and that of a storage folder, when there is one. Raises as they do."""
    if storage is None:
        return table(run_dir)
    if not (run_dir / place.INDEX).exists():
        return f"no cache ever ran in {run_dir}\n\n{stored(storage)}"
    return f"{table(run_dir)}\n\n{stored(storage)}"


def stored(storage: Path) -> str:
    """Return one line for each generation in a storage folder, newest first, and one for each thing there that is none.

    Raises
    ------
    CannotRun
        The folder cannot be read.
    """
    found, strange = catalogue.scan(storage)
    rows: list[tuple[str, ...]] = [_STORED]
    for one in found:
        state = "damaged" if one.problems else "committed" if one.committed else "unfinished"
        ranks = f"{len(one.shards)} of {one.world_size or '?'}"
        marks = ("yes" if one.latest else "-", "yes" if one.pinned else "-", "; ".join(one.problems.values()) or "-")
        rows.append((one.job, str(one.generation.step), ranks, size(one.nbytes), state, *marks))
    return "\n".join([*(_lines(rows) if found else [f"{storage} holds no generation"]), *strange])


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
        rows.append((*told, *kept, str((runs and row["pending"]) or "-"), str(row["error"] or "-")))
    return "\n".join([*_lines(rows), *([] if runs else ["no cache runs here now: what its memory held is gone"])])


def _lines(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


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
