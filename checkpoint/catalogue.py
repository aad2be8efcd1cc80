"""What lies in a storage folder, read from the manifests there, so that no cache need run; and which of it stays for good."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from checkpoint.errors import CannotRun, Corrupt, UsageError
from checkpoint.manifest import Generation, Manifest, check_job, generation
from checkpoint.storage import DAMAGED, PINNED, intact, sync_folder

_OURS = ("committed", PINNED, DAMAGED)
_PASSING = "."
"""What begins so is being written or removed, or was when its writer died."""


@dataclass(slots=True)
class Stored:
    """One generation in a storage folder.

    `shards` are those whose manifest is intact and whose bytes are as many as it says, `problems` what is wrong with others.
    """

    job: str
    generation: Generation
    folder: Path
    world_size: int = 0
    shards: dict[int, Manifest] = field(default_factory=dict)
    committed: bool = False
    pinned: bool = False
    latest: bool = False
    problems: dict[int, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """All shards together."""
        return sum(shard.nbytes for shard in self.shards.values())

    def file(self, rank: int, suffix: str = ".shard") -> Path:
        """Return where a rank's bytes lie, or its manifest, ``.json``."""
        return self.folder / f"rank-{rank:05d}{suffix}"

    def is_there(self) -> bool:
        """Whether it still lies there as it was found; old ones are removed while newer ones come."""
        return (self.folder / "committed" if self.committed else self.folder).exists()


def scan(storage: Path, job: str = "") -> tuple[list[Stored], list[str]]:
    """Return the generations in a folder, newest of each job first, and one sentence about each thing that is none.

    Raises
    ------
    CannotRun
        The folder cannot be read.
    """
    found: list[Stored] = []
    strange: list[str] = []
    try:
        folders = sorted(storage.iterdir())
    except OSError as error:
        raise CannotRun(f"the storage folder {storage} cannot be read: {error.strerror or error}; name it by --storage") from None
    for folder in folders:
        if (job and folder.name != job) or folder.name.startswith(_PASSING):
            continue
        if not folder.is_dir() or not _is_job(folder.name):
            strange.append(f"{folder} is no job's folder and was passed over")
            continue
        try:
            found += _of_job(folder, strange)
        except OSError as error:
            strange.append(f"{folder} cannot be read: {error.strerror or error}")
    return found, strange


def pin(storage: Path, job: str, step: int) -> list[Stored]:
    """Keep the newest committed generation of a step for good; return it alone.

    Raises
    ------
    UsageError
        There is none.
    CannotRun
        The folder cannot be read or written.
    """
    candidates = [stored for stored in _of_step(storage, job, step) if stored.committed]
    if not candidates:
        raise UsageError(f"no committed generation of step {step} of job {job!r} lies in {storage}; see `eagleeye cache list`")
    with _lasting(candidates[0].folder / PINNED) as path:
        path.touch()
    return candidates[:1]


def unpin(storage: Path, job: str, step: int) -> list[Stored]:
    """Keep no generation of a step for good any longer; return those that were. Raises as `pin` does."""
    pinned = [stored for stored in _of_step(storage, job, step) if stored.pinned]
    if not pinned:
        raise UsageError(f"no generation of step {step} of job {job!r} in {storage} is pinned; see `eagleeye cache list`")
    for stored in pinned:
        with _lasting(stored.folder / PINNED) as path:
            path.unlink(missing_ok=True)
    return pinned


@contextmanager
def _lasting(path: Path) -> Iterator[Path]:
    """Make what is done to a file last, or say in one sentence that it was not done."""
    try:
        yield path
        sync_folder(path.parent)
    except OSError as error:
        raise CannotRun(f"{path} cannot be written: {error.strerror or error}") from None


def _of_step(storage: Path, job: str, step: int) -> list[Stored]:
    return [stored for stored in scan(storage, check_job(job))[0] if stored.generation.step == step]


def _of_job(folder: Path, strange: list[str]) -> Iterator[Stored]:
    latest = ""
    with suppress(OSError, UnicodeDecodeError):
        latest = (folder / "latest").read_text(encoding="utf-8").strip()
    names = sorted((path.name for path in folder.iterdir()), reverse=True)
    if latest and latest not in names:
        strange.append(f"{folder / 'latest'} names {latest[:60]!r}, which does not lie there; the newest committed one is used")
    for name in names:
        if name == "latest" or name.startswith(_PASSING):
            continue
        try:
            wanted = generation(name)
        except Corrupt:
            strange.append(f"{folder / name} is no generation and was passed over")
            continue
        stored = Stored(folder.name, wanted, folder / name, latest=name == latest)
        about: list[str] = []
        try:
            _look(stored, about)
        except OSError as error:
            about.append(f"{stored.folder} cannot be read: {error.strerror or error}")
        if stored.is_there():
            strange += about
            yield stored


def _look(stored: Stored, strange: list[str]) -> None:
    names = {path.name for path in stored.folder.iterdir()}
    stored.committed, stored.pinned = "committed" in names, PINNED in names
    for name in sorted(names):
        match = re.fullmatch(r"rank-(\d{5})\.(json|shard)", name)
        if match and match[2] == "json":
            rank = int(match[1])
            try:
                manifest = intact(stored.folder / name, stored.job, stored.generation)
            except Corrupt as error:
                stored.problems[rank] = str(error)
            except OSError as error:
                stored.problems[rank] = f"{error.filename}: {error.strerror}"
            else:
                stored.shards[rank], stored.world_size = manifest, manifest.world_size
        elif not match and name not in _OURS and not name.startswith(_PASSING):
            strange.append(f"{stored.folder / name} is none of a checkpoint's files and was passed over")
    if stored.committed:
        # where no manifest is left nobody knows how many there were: at least one
        for rank in set(range(stored.world_size or 1)) - set(stored.shards) - set(stored.problems):
            stored.problems[rank] = f"{stored.file(rank, '.json')} is not there, though the generation is committed"


def _is_job(name: str) -> bool:
    try:
        check_job(name)
    except UsageError:
        return False
    return True
