"""Files that are there whole or not at all, also after a power cut."""

import os
import tempfile
from pathlib import Path

from eagleeye.errors import EnvironmentLacks


def write_whole(path: Path, text: str) -> None:
    """Write `text` to a temporary name beside `path`, sync it, and rename it. The folder is made when it is absent.

    Raises
    ------
    EnvironmentLacks
        The disk is full, or rights are missing; what was at `path` before is still there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                os.fchmod(handle, 0o644)
                file.write(text)
                file.flush()
                os.fsync(handle)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        sync_folder(path.parent)
    except OSError as error:
        reason = error.strerror or error
        raise EnvironmentLacks(f"cannot write {path}: {reason}; free some space or choose another place") from None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut, as `fsync` does for the contents of a file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
