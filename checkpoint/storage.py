"""The folder in which generations survive the machines' memory.

::

    FOLDER/JOB/GENERATION/rank-00003.shard     the bytes
    FOLDER/JOB/GENERATION/rank-00003.json      the manifest, written after the bytes
    FOLDER/JOB/GENERATION/committed            written when every rank's manifest is there
    FOLDER/JOB/latest                          name of the newest committed generation, moved last
"""

import ctypes
import errno
import fcntl
import os
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from checkpoint.errors import CheckpointError, Corrupt
from checkpoint.landing import Landing
from checkpoint.manifest import CHUNK_BYTES, Generation, Key, Manifest, decode, generation
from checkpoint.restore import STORAGE, Copy

PINNED = "pinned"
"""A generation whose folder has a file of this name stays, whatever else is removed."""
DAMAGED = "damaged"
"""Lies in a generation of which a restore found bytes that are not those that were saved."""
LOOK_S = 60.0
"""A file system that does not tell for so long what lies there is passed over."""
_PIECE_BYTES = 4 * CHUNK_BYTES
_BLOCK_BYTES = 4096
_WRITERS = 2
_READERS = 2
_OURS = (".writing-*", "rank-*.shard", "rank-*.json", DAMAGED, "committed")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class Folder:
    """Generations of any number of jobs in one folder, which all nodes of a job should share. Every write is whole or absent.

    All methods raise OSError when the file system refuses; what was there before is still there then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, manifest: Manifest, data: memoryview) -> None:
        """Write a shard and then its manifest, each to a temporary name, synced, renamed, and the folder synced.

        Each chunk is compared with its digest just before it is written. It is not read back: what a disk made of it is found
        when it is read, and then another copy is taken.

        Raises
        ------
        Corrupt
            The bytes are not those of the manifest; nothing was published.
        """
        folder = self._folder(manifest.key)
        os.stat(self.path)  # never made here: where a disk is not mounted, nothing would be persistent
        if not folder.exists():
            folder.parent.mkdir(exist_ok=True)
            folder.mkdir(exist_ok=True)
            sync_folder(folder.parent)
            sync_folder(self.path)
        stem = _stem(manifest.key.rank)
        # its name need not last before that of the manifest does: without both it is no copy
        with _named(folder / f"{stem}.shard") as file:
            _pour(file, manifest, data)
        _publish(folder / f"{stem}.json", manifest.encode().encode())

    def commit(self, job: str, wanted: Generation, world_size: int) -> bool:
        """Mark a generation as committed and move ``latest`` to it, if every rank's shard is there; return whether it is.

        Any node may do it, also several at once.
        """
        folder = self.path / job / str(wanted)
        if not self.is_committed(job, wanted):
            if any(not (folder / f"{_stem(rank)}.json").exists() for rank in range(world_size)):
                return False
            _publish(folder / "committed", b"%d\n" % world_size)
        told = self._latest(job)  # whoever committed it may have been interrupted before this
        while told != (newest := max(self.committed(job), default=wanted)):  # another node may commit a newer one meanwhile
            _publish(folder.parent / "latest", f"{newest}\n".encode())
            told = newest
        return True

    def is_committed(self, job: str, wanted: Generation) -> bool:
        """Whether every rank's shard of a generation was there once."""
        return (self.path / job / str(wanted) / "committed").exists()

    def _latest(self, job: str) -> Generation | None:
        try:
            return generation((self.path / job / "latest").read_text(encoding="utf-8").strip())
        except (OSError, ValueError, Corrupt):
            return None

    def committed(self, job: str) -> list[Generation]:
        """Return the committed generations of a job, oldest first."""
        return [g for g in self.begun(job) if self.is_committed(job, g)]

    def begun(self, job: str) -> list[Generation]:
        """Return all generations of which anything lies in the folder, oldest first."""
        os.stat(self.path)  # where the folder itself is absent, nothing is known; that is not the same as nothing being there
        return sorted(generation(name) for name in _names(self.path / job) if _is_generation(name))

    def look(self, job: str, patience_s: float = LOOK_S) -> tuple[list[Copy], list[Generation]]:
        """Return `copies` and `committed`. Raises TimeoutError when the file system takes longer than `patience_s` to tell."""
        answers: queue.SimpleQueue[tuple[list[Copy], list[Generation]] | OSError] = queue.SimpleQueue()

        def look() -> None:
            try:
                answers.put((self.copies(job), self.committed(job)))
            except OSError as error:
                answers.put(error)

        threading.Thread(target=look, daemon=True).start()
        try:
            told = answers.get(timeout=patience_s)
        except queue.Empty:
            raise TimeoutError(errno.ETIMEDOUT, f"it has not answered for {patience_s:g} s") from None
        if isinstance(told, OSError):
            raise told
        return told

    def copies(self, job: str) -> list[Copy]:
        """Return every shard of a job whose manifest is intact and whose bytes have the right length."""
        return [copy for wanted in self.begun(job) for copy in self._copies(job, wanted)]

    def _copies(self, job: str, wanted: Generation) -> list[Copy]:
        folder = self.path / job / str(wanted)
        try:
            names = _names(folder)
        except OSError:
            return []  # what is wrong with one generation says nothing about the others
        found = []
        for name in names:
            if not (name.startswith("rank-") and name.endswith(".json")):
                continue
            with suppress(OSError, Corrupt):
                manifest = intact(folder / name, job, wanted)
                found.append(Copy(wanted, manifest.key.rank, manifest.world_size, STORAGE, manifest.node))
        return found

    def _is_whole(self, job: str, wanted: Generation) -> bool:
        if (self.path / job / str(wanted) / DAMAGED).exists():
            return False
        copies = self._copies(job, wanted)
        return bool(copies) and len(copies) == copies[0].world_size

    def complete(self, key: Key, landing: Landing | None, room: Callable[[Manifest], memoryview]) -> Landing:
        """Read what is missing of a shard, all of it if nothing landed or something else did; return what became of it.

        Where nothing landed yet, it is read into the memory that `room` gives for it. What was read is checked, chunk by chunk.

        Raises
        ------
        CheckpointError
            It is not there, or its manifest is damaged.
        """
        path = self._folder(key) / f"{_stem(key.rank)}.shard"
        try:
            manifest = decode(path.with_suffix(".json").read_bytes())
        except OSError as error:
            raise CheckpointError(f"{STORAGE}: cannot read {path}: {error.strerror or error}") from None
        except Corrupt as error:
            raise Corrupt(f"{STORAGE}: {path.with_suffix('.json')}: {error}") from None
        if manifest.key != key:
            raise Corrupt(f"{STORAGE}: another shard lies in {path}")
        if landing is None or landing.manifest != manifest:
            landing = Landing(manifest, room(manifest))
        landing.draw(STORAGE, lambda: _opened(path, manifest), _READERS, lambda: None)
        if landing.gave_bad(STORAGE):
            with suppress(OSError):  # only that it no longer counts as one of those that are kept
                _publish(path.parent / DAMAGED, f"{path.name}\n".encode())
        return landing

    def is_pinned(self, job: str, wanted: Generation) -> bool:
        """Whether a generation stays, whatever else is removed."""
        return (self.path / job / str(wanted) / PINNED).exists()

    def retain(self, job: str, keep: int) -> list[Generation]:
        """Remove what is older than the `keep` newest committed generations; return what was removed.

        Only committed generations of which every shard is there are counted, with a manifest that is intact and as many bytes as
        it says, and none of which a restore found damaged: the last good one is never removed. What is pinned is neither removed
        nor counted. Files that are not ours stay, and the folder with them.
        """
        good: list[Generation] = []
        for candidate in reversed(self.committed(job)):
            if len(good) < keep and not self.is_pinned(job, candidate) and self._is_whole(job, candidate):
                good.append(candidate)
        if len(good) < keep:
            return []
        removed = [g for g in self.begun(job) if g < good[-1] and not self.is_pinned(job, g)]
        for old in removed:
            folder = self.path / job / str(old)
            if not folder.is_symlink():  # what it points to is somebody else's
                self._remove(folder)
        return removed

    def _remove(self, folder: Path) -> None:
        """Remove a generation: first what says that it is one, last the bytes, so that no part of it looks whole on the way."""
        for pattern in reversed(_OURS):
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)  # another node removes the same
        with suppress(OSError):  # something else lies there, too
            folder.rmdir()

    def _folder(self, key: Key) -> Path:
        return self.path / key.job / str(key.generation)


def intact(path: Path, job: str, wanted: Generation) -> Manifest:
    """Return the manifest in a generation's folder if it is intact and the shard beside it has as many bytes as it says.

    Raises
    ------
    Corrupt
        It is not; the sentence begins with the file.
    OSError
        A file cannot be read; it is the error's `filename`.
    """
    if not path.is_file():
        raise Corrupt(f"{path}: it is no file")  # a pipe, say, would be waited for
    try:
        manifest = decode(path.read_bytes())
    except Corrupt as error:
        raise Corrupt(f"{path}: {error}") from None
    if manifest.key != Key(job, wanted, manifest.key.rank) or path.name != f"{_stem(manifest.key.rank)}.json":
        raise Corrupt(f"{path}: it is the manifest of another shard")
    shard = path.with_suffix(".shard")
    if (length := shard.stat().st_size) != manifest.nbytes:
        raise Corrupt(f"{shard}: {length} bytes instead of {manifest.nbytes}")
    return manifest


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


@contextmanager
def _named(path: Path) -> Iterator[int]:
    """Yield a file to be filled, which gets its name, synced, when nothing went wrong, and goes when something did."""
    file, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        try:
            os.fchmod(file, 0o644)
            yield file
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # what went wrong before is what is told
            os.unlink(temporary)
        raise


def _publish(path: Path, data: bytes) -> None:
    with _named(path) as file:
        _write(file, memoryview(data), 0)
    sync_folder(path.parent)


def _pour(file: int, manifest: Manifest, data: memoryview) -> None:
    """Fill a file past the page cache, where the file system can, from several threads."""
    if len(data) != manifest.nbytes:
        raise Corrupt(f"{len(data)} bytes instead of {manifest.nbytes}")
    _reserve(file, len(data))
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    with suppress(OSError):  # this file system cannot
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
    whole = len(data) // _BLOCK_BYTES * _BLOCK_BYTES

    def pour(start: int) -> None:
        stop = min(start + _PIECE_BYTES, len(data))
        for number in range(start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)):
            first, last = manifest.bounds(number)
            if not manifest.fits(number, data[first:last]):
                raise Corrupt(f"the bytes from {first} to {last} are not those that were saved")
        try:
            _write(file, data[start : min(stop, whole)], start)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(file, fcntl.F_SETFL, flags)  # it, or this memory, cannot after all
            _write(file, data[start : min(stop, whole)], start)

    with ThreadPoolExecutor(_WRITERS) as pool:
        pieces = [pool.submit(pour, start) for start in range(0, len(data), _PIECE_BYTES)]
        try:
            for piece in pieces:
                piece.result()
        finally:
            pool.shutdown(cancel_futures=True)
    fcntl.fcntl(file, fcntl.F_SETFL, flags)
    _write(file, data[whole:], whole)


def _reserve(file: int, nbytes: int) -> None:
    """Take the room on the disk now, so that its lack shows before anything is written."""
    if nbytes and _libc.fallocate(file, 0, 0, nbytes) != 0:
        error = ctypes.get_errno()
        if error not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(error, os.strerror(error))


def _write(file: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(file, data, at)
        data, at = data[count:], at + count


@contextmanager
def _opened(path: Path, manifest: Manifest) -> Iterator["_FileReader"]:
    file = os.open(path, os.O_RDONLY)
    try:
        yield _FileReader(file, path, manifest)
    finally:
        os.close(file)


class _FileReader:
    """Fills `transport.Reader` from a file."""

    def __init__(self, file: int, path: Path, manifest: Manifest) -> None:
        self._file, self._path, self._manifest = file, path, manifest

    def read(self, numbers: Iterator[int], data: memoryview) -> Iterator[int]:
        for number in numbers:
            at, stop = self._manifest.bounds(number)
            while at < stop:
                count = os.preadv(self._file, [data[at:stop]], at)
                if not count:
                    raise Corrupt(f"{self._path} is truncated: {at} of {self._manifest.nbytes} bytes")
                at += count
            yield number


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut, as `fsync` does for the contents of a file."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
