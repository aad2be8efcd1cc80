"""Files of a folder as a shard and back, for programs that know nothing of the cache. Free of torch.

A shard's bytes are its files one after the other, of a symbolic link what it points to; the manifest tells where each begins.
"""

import os
import secrets
import stat
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from checkpoint import place
from checkpoint.connection import ANSWER_S, CONNECT_S, Connection, mapped
from checkpoint.errors import CacheGone, CannotRun, CheckpointError, Corrupt, UsageError
from checkpoint.manifest import Generation, Manifest, check_job, decode, verify
from checkpoint.protocol import MAX_STATE_BYTES, PIECE_BYTES, Message
from checkpoint.storage import sync_folder

TEMPORARY = ".eagleeye-"
"""What the names of files begin with that are being written."""
_LAYOUT = 1
_KIND = "files"


class Changed(CheckpointError):
    """A file is no longer what it was when it was found complete; nothing was saved."""


class Held(UsageError):
    """The cache holds this node's shard of that generation already, and a generation never changes."""


class Entry(NamedTuple):
    """One file of a shard: its path below the folder, where its bytes lie, and its mode as of `stat`."""

    path: str
    offset: int
    nbytes: int
    mode: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """The answer of the cache: a generation or None, a number for the start that asks, and what it knows besides.

    `existed` is the newest generation, of those not excluded, that is known to have existed, `passed_over` tells why newer ones
    are not chosen, and `unreached` who could not be asked.
    """

    generation: str | None
    attempt: int
    existed: str | None
    passed_over: tuple[str, ...]
    unreached: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A verified shard in memory that the cache keeps until `release`, the next `fetch`, or `close`.

    `source` is ``local``, ``neighbour`` or ``storage``, `holder` the node that held the copy.
    """

    manifest: Manifest
    data: memoryview
    source: str
    holder: str
    tried: tuple[str, ...]


class FolderClient:
    """One node's connection to its cache for the files of a job. Use it from one thread.

    Parameters
    ----------
    job : as the cache shall call it
    rank, world_size : of this node among the nodes of the job
    run_dir : run folder of the cache; default as the cache chooses it
    peers : addresses of the caches of all nodes; None leaves them as the cache was told at its start

    Raises
    ------
    UsageError
        Job or rank are impossible.
    """

    def __init__(self, job: str, rank: int, world_size: int, run_dir: str = "", peers: Mapping[str, str] | None = None) -> None:
        if not 0 <= rank < world_size:
            raise UsageError(f"there is no rank {rank} among {world_size}")
        self._run_dir = place.run_dir(run_dir)
        # who came later is the rank; all processes of a node see the same monotonic clock
        self._hello: Message = {"job": check_job(job), "rank": rank, "world_size": world_size, "born": time.monotonic_ns()}
        self._hello["peers"] = None if peers is None else dict(peers)
        self._connection: Connection | None = None
        self._sealed: dict[str, Future[None]] = {}
        self._reading: int | None = None

    def connect(self, patience_s: float = CONNECT_S) -> None:
        """Return once the cache answers.

        Raises
        ------
        CacheGone
            It does not, for `patience_s`.
        UsageError
            It refuses.
        """
        until_s = time.monotonic() + patience_s
        while self._connection is None or self._connection.lost:
            try:
                self._connection = Connection(self._run_dir, self._hello, self._heard, self._lost)
                self._reading = None
                self._connection.send({"op": "layout", "layout": _LAYOUT, "items": _KIND})
            except CacheGone:
                if time.monotonic() >= until_s:
                    raise
                time.sleep(0.1)

    def save(self, wanted: Generation, folder: Path, files: Mapping[str, os.stat_result], timeout_s: float = 60.0) -> None:
        """Save files as this node's part of a generation; return when the cache has it.

        Parameters
        ----------
        files : paths below `folder`, each with the `lstat` with which it was found complete; none make an empty shard
        timeout_s : how long free memory is waited for

        Raises
        ------
        Changed
            A file is not what it was, or is gone.
        CacheGone
            The cache does not answer.
        CannotRun
            It has no memory.
        Held
            It holds a shard of that generation already.
        UsageError
            A path is none below the folder, or the cache refuses this client.
        """
        self.connect(0.0)
        assert self._connection is not None
        listed, at = [], 0
        for path, found in sorted(files.items()):
            listed.append(Entry(checked(path), at, found.st_size, found.st_mode))
            at += found.st_size
        number, slab = self._connection.room(at, timeout_s)
        with memoryview(slab) as room:
            for entry in listed:
                with room[entry.offset : entry.offset + entry.nbytes] as part:
                    _read(folder / entry.path, files[entry.path], part)
        sealed = self._sealed[str(wanted)] = Future()
        seal = {"op": "seal", "slab": number, "generation": str(wanted), "layout": _LAYOUT, "nbytes": at}
        try:
            self._connection.send(seal | {"values": listed}, MAX_STATE_BYTES)
            sealed.result(ANSWER_S)
        except FutureTimeout:
            raise CacheGone(f"the cache in {self._run_dir} does not say whether it has step {wanted.step}") from None
        finally:
            self._sealed.pop(str(wanted), None)

    def choose(self, exclude: Collection[str] = ()) -> Chosen:
        """Return the newest generation of which the shard of every node is somewhere. Raises CacheGone."""
        self.connect()
        assert self._connection is not None
        answer, _ = self._connection.ask({"op": "choose", "exclude": sorted(exclude)}, "chosen")
        lists = tuple(answer["passed_over"]), tuple(answer["unreached"])
        return Chosen(answer["generation"], int(answer["attempt"]), answer["existed"], *lists)

    def fetch(self, generation: str) -> Fetched:
        """Return this node's shard of a generation.

        Raises
        ------
        CacheGone
            The cache does not answer.
        CheckpointError
            No copy is intact, or it is no shard of files.
        """
        self.connect()
        assert self._connection is not None
        self.release()
        answer, files = self._connection.ask({"op": "fetch", "generation": generation}, "fetched")
        if "error" in answer:
            raise CheckpointError(answer["error"])
        self._reading = answer["slab"]
        try:
            manifest = decode(answer["manifest"])
            data = memoryview(mapped(files.pop(), manifest.nbytes) if manifest.nbytes else b"")
        finally:
            for file in files:
                os.close(file)
        verify(manifest, data)
        entries(manifest)
        return Fetched(manifest, data, answer["source"], answer["holder"], tuple(answer["tried"]))

    def release(self) -> None:
        """Let the cache have the memory of what was fetched; it is not read any more."""
        if self._reading is not None and self._connection is not None:
            self._connection.send({"op": "release", "slab": self._reading})
        self._reading = None

    def close(self) -> None:
        """End the connection. What was saved stays in the cache."""
        if self._connection is not None:
            self._connection.lose("the client was closed")

    def _heard(self, message: Message) -> None:
        sealed = self._sealed.get(message["generation"])
        if sealed is not None and message["op"] == "state" and message["level"] == "cached":
            with suppress(InvalidStateError):
                if "error" in message:
                    sealed.set_exception(Held(message["error"]))
                else:
                    sealed.set_result(None)

    def _lost(self, why: str) -> None:
        for sealed in list(self._sealed.values()):
            with suppress(InvalidStateError):
                sealed.set_exception(CacheGone(why))


def signature(found: os.stat_result) -> tuple[int, ...]:
    """Return what tells one content of a file from another without reading it."""
    return found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns


def checked(path: str) -> str:
    """Return a path if it leads to something below a folder, and to nothing else. Raises UsageError."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or str(PurePosixPath(path)) != path or "\0" in path:
        raise UsageError(f"{path!r} is no path of a file below a folder")
    return path


def entries(manifest: Manifest) -> list[Entry]:
    """Return the files of a shard. Raises Corrupt when it is no shard of files, or one that would lead out of its folder."""
    try:
        if manifest.content["items"] != _KIND:
            raise Corrupt("it holds no files: it was saved by another client")
        found = [Entry(checked(str(path)), int(at), int(n), int(mode)) for path, at, n, mode in manifest.content["values"]]
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise Corrupt(f"the description of the files is broken ({error})") from None
    paths = {entry.path for entry in found}
    above = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
    if len(paths) != len(found) or paths & above:
        raise Corrupt("the description of the files names one twice")
    for entry in found:
        if not 0 <= entry.offset <= entry.offset + entry.nbytes <= manifest.nbytes:
            raise Corrupt(f"{entry.path} does not fit into {manifest.nbytes} bytes")
        if not (stat.S_ISREG(entry.mode) or stat.S_ISLNK(entry.mode)):
            raise Corrupt(f"{entry.path} is neither a file nor a link")
    return found


def write(manifest: Manifest, data: memoryview, folder: Path, put_aside: Callable[[str], None]) -> list[str]:
    """Put a shard's files into a folder; return the paths of those that were absent or differed.

    Each is written to a temporary name, synced, and renamed once all are written and the shard's bytes are verified once more.
    What stood in its place goes to `put_aside`, which must move it away.

    Raises
    ------
    CannotRun
        The folder cannot be written: the disk is full, say. No file was touched.
    Corrupt
        The bytes are not those that were saved. No file was touched.
    """
    wanted = entries(manifest)
    written: list[tuple[Entry, Path]] = []
    made: list[Path] = []
    at = folder
    try:
        for entry in wanted:
            at = folder / entry.path
            part = data[entry.offset : entry.offset + entry.nbytes]
            if not _same(at, entry, part):
                _make(at.parent, folder, made)
                temporary = at.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
                written.append((entry, temporary))
                _write(temporary, entry, part)
        # the cache may have given the memory to another shard if the connection was lost meanwhile
        verify(manifest, data)
    except (OSError, CheckpointError) as error:
        for _, temporary in written:
            temporary.unlink(missing_ok=True)
        for parent in reversed(made):
            with suppress(OSError):
                parent.rmdir()
        if not isinstance(error, OSError):
            raise
        raise CannotRun(f"cannot write {at}: {error.strerror or error}; make {folder} writable, with room for it") from None
    try:
        for entry, temporary in written:
            at = folder / entry.path
            if os.path.lexists(at):
                put_aside(entry.path)
            temporary.rename(at)
        for parent in {*(new.parent for new in made), *((folder / entry.path).parent for entry, _ in written)}:
            sync_folder(parent)
    except OSError as error:
        raise CannotRun(f"cannot put {at} in place: {error.strerror or error}; make {folder} writable") from None
    return [entry.path for entry, _ in written]


def _read(path: Path, found: os.stat_result, room: memoryview) -> None:
    try:
        if stat.S_ISLNK(found.st_mode):
            target = os.fsencode(os.readlink(path))
            same = len(target) == len(room) and signature(path.lstat()) == signature(found)
            room[:] = target if same else bytes(len(room))
        else:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                at = 0
                while at < len(room) and (count := os.preadv(file, [room[at : at + PIECE_BYTES]], at)):
                    at += count
                # also by its name, lest it was replaced while it was read
                same = at == len(room) and signature(os.fstat(file)) == signature(found) == signature(path.lstat())
            finally:
                os.close(file)
    except OSError as error:
        raise Changed(f"{path} cannot be read any more: {error.strerror or error}") from None
    if not same:
        raise Changed(f"{path} was changed while it was being saved")


def _same(path: Path, entry: Entry, data: memoryview) -> bool:
    try:
        found = path.lstat()
        if stat.S_IFMT(found.st_mode) != stat.S_IFMT(entry.mode) or found.st_size != entry.nbytes:
            return False
        if stat.S_ISLNK(entry.mode):
            return os.fsencode(os.readlink(path)) == data
        with path.open("rb", buffering=0) as file:
            for start in range(0, len(data), PIECE_BYTES):
                part = data[start : start + PIECE_BYTES]
                piece = b""
                while len(piece) < len(part) and (more := file.read(len(part) - len(piece))):
                    piece += more
                if piece != bytes(part):  # of bytes, as views are compared one by one
                    return False
    except OSError:
        return False  # whatever it is, it is not what was saved
    return True


def _make(wanted: Path, folder: Path, made: list[Path]) -> None:
    """Make a folder and those above it, and add them to `made`. A link on the way could lead anywhere, so none is taken."""
    for parent in [*reversed([p for p in wanted.parents if p.is_relative_to(folder)]), wanted]:
        if parent == folder:
            parent.mkdir(parents=True, exist_ok=True)
        elif parent.is_symlink():
            raise NotADirectoryError(0, f"{parent} is a link")
        elif not parent.is_dir():
            parent.mkdir()
            made.append(parent)


def _write(path: Path, entry: Entry, data: memoryview) -> None:
    if stat.S_ISLNK(entry.mode):
        os.symlink(os.fsdecode(bytes(data)), path)
        return
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        at = 0
        while at < len(data):
            at += os.write(file, data[at : at + PIECE_BYTES])
        os.fchmod(file, stat.S_IMODE(entry.mode) & 0o777)
        os.fsync(file)
    finally:
        os.close(file)
