"""Where the cache of this node is found: a run folder with its socket, its lock and `cache.json`."""

import json
import os
import re
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
    """Return the address at which other nodes reach this node's cache, empty when there is none."""
    try:
        told = json.loads((run_dir(configured) / INFO).read_text(encoding="utf-8"))
        return f"{told['address']}:{int(told['port'])}" + (f"@{told['domain']}" if told.get("domain") else "")
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def peers(text: str) -> dict[str, str]:
    """Return node -> address of ``node0=10.0.0.1:9480,node1=...``. Raises ValueError when it is malformed."""
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        node, equals, address = part.partition("=")
        try:
            split(address)
        except ValueError:
            equals = ""
        if not (node and equals):
            raise ValueError(
                f"{part!r} is no peer; write NODE=HOST:PORT,NODE=HOST:PORT, each with @RACK or @RACK/POWER if you like"
            )
        found[node] = address
    return found


def split(address: str) -> tuple[str, int, tuple[str, ...]]:
    """Return host, port and failure domain, outermost label first, of ``10.0.0.1:9480@rack1/psu2``.

    Raises
    ------
    ValueError
        It is malformed.
    """
    reach, at, told = address.partition("@")
    host, colon, port = reach.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit()):
        raise ValueError(f"{address!r} is no address; write HOST:PORT or HOST:PORT@RACK")
    return host, int(port), domain(told) if at else ()


def domain(text: str) -> tuple[str, ...]:
    """Return the labels of ``rack1/psu2``, none for an empty text. Raises ValueError when it is malformed."""
    labels = tuple(text.split("/")) if text else ()
    if not all(re.fullmatch(r"[\w.-]+", label, re.ASCII) for label in labels):
        raise ValueError(
            f"{text!r} is no failure domain; write RACK or RACK/POWER, outermost first, of letters, digits or any of _ . -"
        )
    return labels
