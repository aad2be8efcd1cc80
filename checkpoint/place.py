"""Where the cache of this node is found: a run folder with its socket, its lock and `cache.json`."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOCKET, LOCK, INFO, INDEX = "cache.sock", "cache.lock", "cache.json", "index.db"


def run_dir(configured: str = "") -> Path:
    """Return the run folder: as configured, else ``$EAGLEEYE_CHECKPOINT__RUN_DIR``, else one of this user's own."""
    chosen = configured or os.environ.get("EAGLEEYE_CHECKPOINT__RUN_DIR", "")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "eagleeye-cache" if base else Path(tempfile.gettempdir()) / f"eagleeye-cache-{os.getuid()}"


@contextmanager
def socket_address(folder: Path) -> Iterator[str]:
    """Yield the address of the socket in a run folder: through a descriptor, as a socket's own path may have 107 letters only."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{SOCKET}"
    finally:
        os.close(handle)


def local_cache(configured: str = "") -> str:
    """Return ``host:port`` at which other nodes reach this node's cache, empty when there is none."""
    try:
        told = json.loads((run_dir(configured) / INFO).read_text(encoding="utf-8"))
        return f"{told['address']}:{int(told['port'])}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def peers(text: str) -> dict[str, str]:
    """Return node -> ``host:port`` of ``node0=10.0.0.1:9480,node1=...``. Raises ValueError when it is malformed."""
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        node, equals, address = part.partition("=")
        host, colon, port = address.rpartition(":")
        if not (node and equals and host and colon and port.isdigit()):
            raise ValueError(f"{part!r} is no peer; write NODE=HOST:PORT,NODE=HOST:PORT")
        found[node] = address
    return found
