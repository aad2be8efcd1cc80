"""What the launchers of a job know together: small JSON documents with versions, changed by compare-and-set.

The first store is a folder that all nodes share. It needs no lock, because whoever is stopped while it holds one would stop
everybody: each version of a document is a file of its own, and the hard link that gives it its name can be made only once.
"""

import contextlib
import errno
import json
import os
import secrets
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote

from eagleeye.errors import DataError, EnvironmentLacks

Document = dict[str, Any]


class Store(Protocol):
    """Documents by key; a key is a name, or a folder and a name: ``job``, ``agents/node1``. Versions count from 1.

    Every method raises EnvironmentLacks when the store cannot be reached or is full, and DataError for a broken document; then
    nothing was changed that a later call could not see.
    """

    def get(self, key: str) -> tuple[int, Document] | None:
        """Return (version, document), None when there is none. The caller does not change the document."""
        ...

    def put(self, key: str, value: Document, expected_version: int) -> bool:
        """Write the version after `expected_version` (0: none yet); False when another writer was there before.

        Also False, rarely, when this version was written and at once followed by another writer's: look before a repetition.
        """
        ...

    def find(self, folder: str) -> dict[str, tuple[int, Document]]:
        """Return (version, document) of every document of a folder, by name without the folder."""
        ...


class FolderStore:
    """Documents in a folder of a shared POSIX file system that knows hard links (NFS does). They are there whole or not at all.

    Parameters
    ----------
    folder : made when it is absent; the one above it must exist
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cache: dict[Path, tuple[int, Document]] = {}

    def get(self, key: str) -> tuple[int, Document] | None:
        """Return (version, document), None when there is none."""
        folder, name = self._place(key)
        return self._read(folder, name, self._versions(folder))

    def put(self, key: str, value: Document, expected_version: int) -> bool:
        """Write the version after `expected_version`; False when another writer was there before."""
        folder, name = self._place(key)
        if self._versions(folder).get(name, 0) != expected_version:
            return False
        path = folder / f"{name}@{expected_version + 1}"
        # The name tells of what it is a version, so that the next writers remove what a killed one left.
        temporary = folder / f".{path.name}.{secrets.token_hex(4)}"
        try:
            for made in (self._folder, folder):  # but not what is above: an unmounted folder must not come back as a local one
                made.mkdir(exist_ok=True)
            try:
                temporary.write_text(json.dumps(value), encoding="utf-8")
                os.link(temporary, path)
            except (FileExistsError, FileNotFoundError):  # the latter: a later writer took this one for dead and tidied up
                return False
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise EnvironmentLacks(
                f"cannot write {path}: {error.strerror}; free some space, or choose a shared folder that this user may write to "
                "and that knows hard links"
            ) from None
        # A writer that slept since it looked may have made a version that was superseded and removed: nobody sees it.
        return self._remove_old(folder, name) == expected_version + 1

    def find(self, folder: str) -> dict[str, tuple[int, Document]]:
        """Return (version, document) of every document of a folder."""
        place = self._folder / folder
        versions = self._versions(place)
        found = {unquote(name): self._read(place, name, versions) for name in versions}
        return {name: document for name, document in found.items() if document is not None}

    def _place(self, key: str) -> tuple[Path, str]:
        folder, slash, name = key.partition("/")
        return (self._folder / folder, quoted(name)) if slash else (self._folder, quoted(key))

    @staticmethod
    def _versions(folder: Path) -> dict[str, int]:
        versions: dict[str, int] = {}
        for entry in _names(folder):
            name, at, version = entry.partition("@")
            if at and version.isdigit() and not entry.startswith("."):
                versions[name] = max(versions.get(name, 0), int(version))
        return versions

    def _read(self, folder: Path, name: str, versions: dict[str, int]) -> tuple[int, Document] | None:
        while version := versions.get(name, 0):
            known = self._cache.get(folder / name)
            if known is not None and known[0] == version:
                return known
            path = folder / f"{name}@{version}"
            try:
                value = json.loads(path.read_text(encoding="utf-8"))
                if not isinstance(value, dict):
                    raise ValueError("it is no JSON object")
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{path} is broken ({error}); end all launchers of this job, then remove {self._folder}"
                ) from None
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise EnvironmentLacks(f"cannot read {path}: {error.strerror}; is the shared folder mounted?") from None
                versions = self._versions(folder)  # two newer versions were written since the folder was listed
                continue
            self._cache[folder / name] = (version, value)
            return version, value
        return None

    @staticmethod
    def _remove_old(folder: Path, name: str) -> int:
        """Remove all but the two newest versions, and what killed writers left; return the newest version.

        The one before the newest stays, lest somebody who has just listed the folder finds nothing.
        """
        entries = []
        for entry in _names(folder):
            stem, at, rest = entry.removeprefix(".").partition("@")
            number = rest.partition(".")[0]
            if at and stem == name and number.isdigit():
                entries.append((int(number), entry))
        newest = max((version for version, entry in entries if not entry.startswith(".")), default=0)
        for old, entry in entries:
            if old < newest - 1:
                with contextlib.suppress(OSError):
                    os.unlink(folder / entry)
        return newest


def quoted(name: str) -> str:
    """Return a name as a file name that holds neither a dot nor an at sign nor a slash."""
    return quote(name, safe="").replace(".", "%2E")


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise EnvironmentLacks(f"cannot read {folder}: {error.strerror}; is the shared folder mounted?") from None
