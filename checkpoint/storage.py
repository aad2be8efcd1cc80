"""The folder in which generations survive the machines' memory.

::

    FOLDER/JOB/GENERATION/rank-00003.shard     the bytes
    FOLDER/JOB/GENERATION/rank-00003.json      the manifest, written after the bytes
    FOLDER/JOB/GENERATION/committed            written when every rank's manifest is there
    FOLDER/JOB/latest                          name of the newest committed generation, moved last
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from checkpoint.errors import CheckpointError, Corrupt
from checkpoint.manifest import Generation, Key, Manifest, decode, generation
from checkpoint.restore import STORAGE, Copy

_PIECE_BYTES = 16 << 20
_AWAY = ".removed-"


class Folder:
    """Generations of any number of jobs in one folder, which all nodes of a job should share. Every write is whole or absent.

    All methods raise OSError when the file system refuses; what was there before is still there then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, manifest: Manifest, data: memoryview) -> None:
        """Write a shard and then its manifest, each to a temporary name, synced, renamed, and the folder synced."""
        folder = self._folder(manifest.key)
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
        stem = _stem(manifest.key.rank)
        _publish(folder / f"{stem}.shard", data)
        _publish(folder / f"{stem}.json", memoryview(manifest.encode().encode()))

    def commit(self, job: str, wanted: Generation, world_size: int) -> bool:
        """Mark a generation as committed and move ``latest`` to it, if every rank's shard is there; return whether it is.

        Any node may do it, also several at once.
        """
        folder = self.path / job / str(wanted)
        if (folder / "committed").exists():
            return True
        if any(not (folder / f"{_stem(rank)}.json").exists() for rank in range(world_size)):
            return False
        _publish(folder / "committed", memoryview(b"%d\n" % world_size))
        newest = max(self.committed(job), default=wanted)
        _publish(folder.parent / "latest", memoryview(f"{newest}\n".encode()))
        return True

    def committed(self, job: str) -> list[Generation]:
        """Return the committed generations of a job, oldest first."""
        return [g for g in self.begun(job) if (self.path / job / str(g) / "committed").exists()]

    def begun(self, job: str) -> list[Generation]:
        """Return all generations of which anything lies in the folder, oldest first."""
        os.stat(self.path)  # where the folder itself is absent, nothing is known; that is not the same as nothing being there
        return sorted(generation(name) for name in _names(self.path / job) if _is_generation(name))

    def copies(self, job: str) -> list[Copy]:
        """Return every shard of a job whose manifest is intact and whose bytes have the right length."""
        found = []
        for wanted in self.begun(job):
            folder = self.path / job / str(wanted)
            try:
                names = _names(folder)
            except OSError:
                continue  # what is wrong with one generation says nothing about the others
            for name in names:
                if not (name.startswith("rank-") and name.endswith(".json")):
                    continue
                try:
                    manifest = decode((folder / name).read_bytes())
                    size = (folder / name).with_suffix(".shard").stat().st_size
                except (OSError, Corrupt):
                    continue
                key = Key(job, wanted, manifest.key.rank)
                if manifest.key == key and name == f"{_stem(key.rank)}.json" and size == manifest.nbytes:
                    found.append(Copy(wanted, manifest.key.rank, manifest.world_size, STORAGE, manifest.node))
        return found

    def read(self, key: Key, room: Callable[[Manifest], memoryview]) -> Manifest:
        """Read one shard into the memory that `room` gives for it; return its manifest. The bytes are not verified yet.

        Raises
        ------
        CheckpointError
            It is not there, or its files are shorter than they should be.
        """
        path = self._folder(key) / f"{_stem(key.rank)}.shard"
        try:
            manifest = decode(path.with_suffix(".json").read_bytes())
            data = room(manifest)
            with path.open("rb", buffering=0) as file:
                at = 0
                while at < len(data):
                    count = file.readinto(data[at : at + _PIECE_BYTES])
                    if not count:
                        raise Corrupt(f"{path} is truncated: {at} of {manifest.nbytes} bytes")
                    at += count
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
        return manifest

    def retain(self, job: str, keep: int) -> list[Generation]:
        """Remove what is older than the `keep` newest committed generations; return what was removed.

        Only committed generations are counted, so the last good one is never removed.
        """
        good = self.committed(job)
        if len(good) < keep:
            return []
        for name in _names(self.path / job):
            if name.startswith(_AWAY):  # whoever removed it was interrupted
                shutil.rmtree(self.path / job / name, ignore_errors=True)
        removed = [g for g in self.begun(job) if g < good[-keep]]
        for old in removed:
            # out of sight first: a removal that is interrupted must not leave half a generation in place
            away = Path(tempfile.mkdtemp(dir=self.path / job, prefix=_AWAY))
            with suppress(FileNotFoundError):  # another node removes the same
                os.rename(self.path / job / str(old), away / str(old))
            shutil.rmtree(away, ignore_errors=True)
        return removed

    def _folder(self, key: Key) -> Path:
        return self.path / key.job / str(key.generation)


def _stem(rank: int) -> str:
    return f"rank-{rank:05d}"


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def _is_generation(name: str) -> bool:
    try:
        generation(name)
    except Corrupt:
        return False
    return True


def _publish(path: Path, data: memoryview) -> None:
    file, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        try:
            os.fchmod(file, 0o644)
            at = 0
            while at < len(data):
                at += os.write(file, data[at : at + _PIECE_BYTES])
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut, as `fsync` does for the contents of a file."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
