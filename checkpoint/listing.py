"""What a cache holds, as a table for people; read from its index, so that it also works when no cache runs."""

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
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for row in found:
        kept = ("yes" if row["in_memory"] else "no", str(row["replica"] or "-"), "yes" if row["stored"] else "no")
        told = (str(row[name]) for name in ("job", "step", "rank", "origin", "nbytes"))
        rows.append((*told, *kept, str(row["error"] or "-")))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
