"""What lies in the folder is whole or absent, whatever the disk does; what is not ours is left alone."""

import contextlib
import errno
import itertools
import mmap
import os
import random
import resource
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from checkpoint import storage
from checkpoint.errors import CannotRun, CheckpointError, Corrupt
from checkpoint.landing import Landing
from checkpoint.manifest import CHUNK_BYTES, Generation, Key, Manifest, made_of
from checkpoint.storage import Folder

SIZES = [0, 1, 4095, 4096, 4097, CHUNK_BYTES, 4 * CHUNK_BYTES, 9 * CHUNK_BYTES + 4096 + 13]


def at(step: int, rank: int = 0, job: str = "llm") -> Key:
    return Key(job, Generation(1, step, "abcdef00"), rank)


def shard(key: Key, nbytes: int = 10_000, world_size: int = 1) -> tuple[Manifest, memoryview]:
    """Return a shard whose bytes lie as a slab's do, at the beginning of a page."""
    memory = mmap.mmap(-1, max(1, nbytes))
    data = memoryview(memory)[:nbytes]
    data[:] = random.Random(key.generation.step).randbytes(nbytes)
    return made_of(key, world_size, "node0", {"items": []}, data), data


def written(folder: Folder, key: Key, nbytes: int = 10_000, *, commit: bool = True) -> memoryview:
    manifest, data = shard(key, nbytes)
    folder.write(manifest, data)
    if commit:
        assert folder.commit(key.job, key.generation, 1)
    return data


def room(manifest: Manifest) -> memoryview:
    return memoryview(bytearray(manifest.nbytes))


def files(path: Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*") if found.is_file())


@contextmanager
def small(folder: Path, nbytes: int, kind: str) -> Iterator[Path]:
    """A file system with room for so much."""
    folder.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", str(folder)]
    else:
        image = folder.with_suffix(".img")
        image.write_bytes(b"")
        os.truncate(image, nbytes)
        made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], capture_output=True, check=False)
        if made.returncode:
            pytest.skip(f"cannot make a file system: {made.stderr.decode().strip()}")
        command = ["mount", "-o", "loop", str(image), str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    if done.returncode:
        pytest.skip(f"mounting a small file system needs root: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_written_is_read(tmp_path: Path, nbytes: int) -> None:
    folder = Folder(tmp_path)
    data = written(folder, at(7), nbytes)
    path = tmp_path / "llm" / str(at(7).generation) / "rank-00000.shard"
    assert path.read_bytes() == data
    landing = folder.complete(at(7), None, room)
    assert (landing.missing, landing.notes, landing.data) == (set(), [], data)
    assert files(tmp_path / "llm") == [
        *(f"{at(7).generation}/{name}" for name in ("committed", "rank-00000.json", "rank-00000.shard")), "latest",
    ]  # fmt: skip
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_disk_that_is_written_past_the_page_cache_gets_the_same(tmp_path: Path, nbytes: int) -> None:
    with small(tmp_path / "disk", 128 << 20, "ext4") as mounted:
        data = written(Folder(mounted), at(7), nbytes)
        assert (mounted / "llm" / str(at(7).generation) / "rank-00000.shard").read_bytes() == data


def test_memory_that_does_not_begin_at_a_page_is_written_all_the_same(tmp_path: Path) -> None:
    whole = memoryview(bytearray(random.Random(1).randbytes(3 * CHUNK_BYTES)))
    for shift in (1, 8, 511):
        key = at(shift)
        data = whole[shift:]
        folder = Folder(tmp_path)
        folder.write(made_of(key, 1, "node0", {}, data), data)
        assert folder.complete(key, None, room).data == data


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, kind: str) -> None:
    with small(tmp_path / "disk", 24 << 20, kind) as mounted:
        folder = Folder(mounted)
        kept = written(folder, at(1), 6 << 20)
        before = files(mounted)
        manifest, data = shard(at(2), 30 << 20)
        with pytest.raises(OSError, match="No space left on device"):
            folder.write(manifest, data)
        assert files(mounted) == before
        assert not folder.commit("llm", at(2).generation, 1)
        assert folder.committed("llm") == [at(1).generation]
        assert folder.complete(at(1), None, room).data == kept
        written(folder, at(3), 6 << 20)  # the room is free again


def test_a_limit_on_the_size_of_files_leaves_nothing_half_written(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    manifest, data = shard(at(1), 6 * CHUNK_BYTES)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * CHUNK_BYTES + 1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            folder.write(manifest, data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(tmp_path) == []
    folder.write(manifest, data)
    assert folder.complete(at(1), None, room).data == data


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace", "open"])
def test_an_error_at_any_call_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    """The n-th call fails, for every n until none does. What is published is whole, and a second try succeeds."""
    folder = Folder(tmp_path)
    older = written(folder, at(1))
    real = getattr(os, call)
    manifest, data = shard(at(2), 5 * CHUNK_BYTES + 5)
    for failing in range(1, 40):
        numbers = itertools.count(1)

        def fail(*arguments: object, numbers: Iterator[int] = numbers, failing: int = failing, **more: object) -> object:
            if next(numbers) == failing:
                raise OSError(error, os.strerror(error))
            return real(*arguments, **more)

        monkeypatch.setattr(os, call, fail)
        survived = False
        with contextlib.suppress(OSError):
            folder.write(manifest, data)
            folder.commit("llm", at(2).generation, 1)
            survived = True
        monkeypatch.setattr(os, call, real)
        assert [name for name in files(tmp_path) if ".writing-" in name] == []
        for copy in folder.copies("llm"):
            expected = older if copy.generation == at(1).generation else data
            assert folder.complete(Key("llm", copy.generation, 0), None, room).data == expected
        assert at(1).generation in folder.committed("llm")
        newest = Generation(*folder.committed("llm")[-1])
        assert (tmp_path / "llm" / "latest").read_text().strip() in (str(at(1).generation), str(newest))
        if survived:
            break
    else:
        pytest.fail("it failed for ever")
    assert failing > 1
    folder.write(manifest, data)
    assert folder.commit("llm", at(2).generation, 1)
    assert folder.complete(at(2), None, room).data == data


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: real(file, data[: max(1, len(data) // 3)], at))
    data = written(Folder(tmp_path), at(1), 2 * CHUNK_BYTES + 77)
    monkeypatch.undo()
    assert Folder(tmp_path).complete(at(1), None, room).data == data


def test_a_file_system_that_reserves_nothing_and_knows_no_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, mode: int, start: int, length: int) -> int:
        storage.ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    def no_direct(file: int, what: int, flags: int = 0) -> int:
        if what == storage.fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return fcntl(file, what, flags)

    fcntl = storage.fcntl.fcntl
    monkeypatch.setattr(storage._libc, "fallocate", refuse)
    monkeypatch.setattr(storage.fcntl, "fcntl", no_direct)
    data = written(Folder(tmp_path), at(1), 2 * CHUNK_BYTES + 77)
    assert Folder(tmp_path).complete(at(1), None, room).data == data


def test_bytes_that_changed_in_memory_are_not_written(tmp_path: Path) -> None:
    manifest, data = shard(at(1), 9 * CHUNK_BYTES)
    data[6 * CHUNK_BYTES + 5] ^= 1
    with pytest.raises(Corrupt, match="the bytes from 25165824 to 29360128 are not those that were saved"):
        Folder(tmp_path).write(manifest, data)
    assert files(tmp_path) == []
    with pytest.raises(Corrupt, match="5 bytes instead of 37748736"):
        Folder(tmp_path).write(manifest, data[:5])


def test_a_generation_is_committed_when_every_rank_is_there_and_latest_never_goes_back(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for rank in range(3):
        assert not folder.commit("llm", at(5).generation, 3)
        folder.write(*shard(at(5, rank), world_size=3))
    assert folder.commit("llm", at(5).generation, 3)
    assert folder.commit("llm", at(5).generation, 3)
    written(folder, at(4))
    assert (tmp_path / "llm" / "latest").read_text() == f"{at(5).generation}\n"
    assert folder.committed("llm") == [at(4).generation, at(5).generation]


def test_latest_is_right_although_two_nodes_commit_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has looked which is the newest; before it writes that down, another commits a newer one."""
    folder = Folder(tmp_path)
    publish = storage._publish
    other: list[int] = []

    def late(path: Path, data: bytes) -> None:
        if path.name == "latest" and not other:
            other.append(1)
            written(Folder(tmp_path), at(2))
        publish(path, data)

    monkeypatch.setattr(storage, "_publish", late)
    written(folder, at(1))
    assert (tmp_path / "llm" / "latest").read_text() == f"{at(2).generation}\n"


# ---- what is removed


def test_only_committed_generations_count_and_the_last_good_one_stays(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for step in (1, 2):
        written(folder, at(step))
    for step in (3, 4, 5):
        written(folder, at(step), commit=False)
    assert folder.retain("llm", 3) == []
    assert folder.retain("llm", 1) == [at(1).generation]
    assert folder.begun("llm") == [at(step).generation for step in (2, 3, 4, 5)]
    written(folder, at(6))
    assert folder.retain("llm", 2) == []
    assert folder.retain("llm", 1) == [at(step).generation for step in (2, 3, 4, 5)]
    assert folder.begun("llm") == [at(6).generation]


@pytest.mark.parametrize("how", ["manifest", "length", "a restore found it"])
def test_what_is_damaged_does_not_count_and_the_last_intact_one_stays(tmp_path: Path, how: str) -> None:
    folder = Folder(tmp_path)
    for step in (1, 2, 3):
        written(folder, at(step))
    for step in (2, 3):
        bytes_of = tmp_path / "llm" / str(at(step).generation) / "rank-00000.shard"
        if how == "manifest":
            bytes_of.with_suffix(".json").write_text("{")
        elif how == "length":
            bytes_of.write_bytes(b"short")
        else:
            bytes_of.write_bytes(bytes(10_000))
            assert folder.complete(at(step), None, room).missing
    written(folder, at(4))
    assert folder.retain("llm", 2) == []
    assert at(1).generation in folder.committed("llm")
    written(folder, at(5))
    assert set(folder.retain("llm", 2)) == {at(step).generation for step in (1, 2, 3)}


def test_the_folder_itself_is_never_made_by_a_write(tmp_path: Path) -> None:
    """Where a disk is not mounted, nothing would be persistent."""
    manifest, data = shard(at(1))
    with pytest.raises(FileNotFoundError):
        Folder(tmp_path / "not-mounted").write(manifest, data)
    assert files(tmp_path) == []


def test_latest_is_moved_by_the_next_one_when_whoever_committed_was_interrupted(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    written(folder, at(1))
    (tmp_path / "llm" / "latest").unlink()
    assert folder.commit("llm", at(1).generation, 1)
    assert (tmp_path / "llm" / "latest").read_text() == f"{at(1).generation}\n"


def test_what_is_pinned_is_neither_removed_nor_counted(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for step in range(1, 6):
        written(folder, at(step))
    for step in (1, 4):
        (tmp_path / "llm" / str(at(step).generation) / "pinned").touch()
    assert folder.retain("llm", 2) == [at(2).generation]
    assert folder.begun("llm") == [at(step).generation for step in (1, 3, 4, 5)]
    (tmp_path / "llm" / str(at(1).generation) / "pinned").unlink()
    assert folder.retain("llm", 2) == [at(1).generation]


def test_what_is_not_ours_is_ignored_and_stays(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "rank-00000.shard").touch()
    for step in (1, 2, 3):
        written(folder, at(step))
    job = tmp_path / "llm"
    strangers = [job / "notes.txt", job / "experiment" / "x", job / str(at(1).generation) / "why.txt"]
    for path in strangers:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (job / str(at(0).generation)).symlink_to(elsewhere)
    assert folder.committed("llm") == [at(step).generation for step in (1, 2, 3)]
    folder.retain("llm", 1)
    assert [path.read_text() for path in strangers] == ["mine"] * 3
    assert files(job / str(at(1).generation)) == ["why.txt"]
    assert files(elsewhere) == ["rank-00000.shard"]
    assert [copy.generation for copy in folder.copies("llm")] == [at(3).generation]
    assert folder.committed("llm") == [at(3).generation]


def test_a_removal_that_is_interrupted_leaves_nothing_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path)
    for step in (1, 2):
        written(folder, at(step))
    unlink = Path.unlink
    for allowed, good in ((0, [1, 2]), (1, [2]), (1, [2])):
        left = iter(range(allowed))

        def stops(path: Path, missing_ok: bool = False, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise OSError(errno.EIO, "Input/output error")
            unlink(path, missing_ok)

        monkeypatch.setattr(Path, "unlink", stops)
        with pytest.raises(OSError, match="Input/output error"):
            folder.retain("llm", 1)
        monkeypatch.undo()
        assert folder.committed("llm") == [at(step).generation for step in good]
    assert folder.retain("llm", 1) == [at(1).generation]
    assert folder.begun("llm") == [at(2).generation]


# ---- what is read


def test_a_damaged_chunk_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    data = written(folder, at(1), 5 * CHUNK_BYTES)
    path = tmp_path / "llm" / str(at(1).generation) / "rank-00000.shard"
    with path.open("r+b") as file:
        file.seek(3 * CHUNK_BYTES + 9)
        file.write(b"\x00\x01\x02\x03")
    landing = folder.complete(at(1), None, room)
    assert landing.missing == {3}
    assert landing.notes == ["storage: the bytes from 12582912 to 16777216 are not those that were saved"]
    start, stop = landing.manifest.bounds(3)
    assert landing.data[:start] == data[:start]
    assert landing.data[stop:] == data[stop:]


def test_what_a_neighbour_could_not_give_is_read_from_storage(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    data = written(folder, at(1), 5 * CHUNK_BYTES)
    manifest, _ = shard(at(1), 5 * CHUNK_BYTES)
    landing = Landing(manifest, room(manifest))
    for number in (0, 1, 3):
        start, stop = manifest.bounds(number)
        landing.data[start:stop] = data[start:stop]
        landing._waiting.remove(number)
        landing._check("node1", number)
    found = folder.complete(at(1), landing, room)
    assert found is landing
    assert (landing.missing, landing.given, landing.data) == (set(), {"node1": 3, "storage": 2}, data)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no manifest", "storage: cannot read {}.shard: No such file or directory"),
        ("damaged manifest", "storage: {}.json: a manifest does not match its own digest"),
        ("another's manifest", "storage: another shard lies in {}.shard"),
        ("no shard", "storage: [Errno 2] No such file or directory: '{}.shard'"),
        ("truncated", "storage: {}.shard is truncated: 4096 of 10000 bytes"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_sentence(tmp_path: Path, how: str, words: str) -> None:
    folder = Folder(tmp_path)
    written(folder, at(1))
    stem = tmp_path / "llm" / str(at(1).generation) / "rank-00000"
    manifest, shard_file = stem.with_suffix(".json"), stem.with_suffix(".shard")
    match how:
        case "no manifest":
            manifest.unlink()
        case "damaged manifest":
            manifest.write_text(manifest.read_text().replace('"node0"', '"node1"'))
        case "another's manifest":
            manifest.write_text(made_of(at(2), 1, "node0", {}, memoryview(b"x")).encode())
        case "no shard":
            shard_file.unlink()
        case "truncated":
            os.truncate(shard_file, 4096)
    try:
        landing = folder.complete(at(1), None, room)
        assert landing.missing == {0}
        told = landing.notes
    except CheckpointError as error:
        told = [str(error)]
    assert told == [words.format(stem)]


def test_no_room_for_what_is_read(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    written(folder, at(1))

    def full(manifest: Manifest) -> memoryview:
        raise CannotRun("no room")

    with pytest.raises(CannotRun, match="no room"):
        folder.complete(at(1), None, full)


def test_a_file_system_that_does_not_answer_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path)
    written(folder, at(1))
    copies, committed = folder.look("llm")
    assert ([copy.generation for copy in copies], committed) == ([at(1).generation], [at(1).generation])
    ended = threading.Event()
    monkeypatch.setattr(Folder, "copies", lambda self, job: ended.wait(20))
    with pytest.raises(TimeoutError, match=r"it has not answered for 0\.2 s"):
        folder.look("llm", 0.2)
    ended.set()
    with pytest.raises(FileNotFoundError):
        Folder(tmp_path / "gone").look("llm")


def test_a_pipe_in_place_of_a_manifest_is_not_waited_for(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    written(folder, at(1))
    os.mkfifo(tmp_path / "llm" / str(at(1).generation) / "rank-00001.json")
    assert [copy.rank for copy in folder.look("llm", 5)[0]] == [0]
