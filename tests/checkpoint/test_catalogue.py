"""What lies in a storage folder, as `eagleeye cache list`, `verify`, `pin` and `unpin` see it, and what is wrong there."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from checkpoint import catalogue
from checkpoint.errors import CannotRun, UsageError
from checkpoint.manifest import CHUNK_BYTES, Generation, Key, made_of
from checkpoint.storage import Folder
from eagleeye.cli import main

SIZE = 2 * CHUNK_BYTES + 1000


def gen(step: int, attempt: int = 7) -> Generation:
    return Generation(attempt, step, "aaaaaaaa")


def store(path: Path, job: str, wanted: Generation, ranks: int = 2, of: int = 2) -> Path:
    """Write a generation as caches do; return its folder."""
    folder = Folder(path)
    path.mkdir(exist_ok=True)
    for rank in range(ranks):
        data = memoryview(bytes([rank + 1]) * SIZE)
        folder.write(made_of(Key(job, wanted, rank), of, "node0", {}, data), data)
    folder.commit(job, wanted, of)
    return path / job / str(wanted)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Run an action of ``eagleeye cache``."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Done:
        code = main(["cache", *map(str, words)])
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Two jobs: of one steps 100 and 150, and of step 200 one rank of two; of the other step 7."""
    for step in (100, 150):
        store(tmp_path / "s", "llm", gen(step))
    store(tmp_path / "s", "llm", gen(200), ranks=1)
    store(tmp_path / "s", "other", gen(7))
    return tmp_path / "s"


def test_the_list_is_read_from_the_manifests(storage: Path, tmp_path: Path, command: Any) -> None:
    done = command("list", "--storage", storage, "--run-dir", tmp_path / "run")
    assert (done.returncode, done.stderr) == (0, "")
    head, empty, *rows = done.stdout.splitlines()
    assert (head, empty) == (f"no cache ever ran in {tmp_path / 'run'}", "")
    assert [row.split() for row in rows] == [
        ["job", "step", "ranks", "size", "state", "latest", "pinned", "trouble"],
        ["llm", "200", "1", "of", "2", "8.0", "MiB", "unfinished", "-", "-", "-"],
        ["llm", "150", "2", "of", "2", "16.0", "MiB", "committed", "yes", "-", "-"],
        ["llm", "100", "2", "of", "2", "16.0", "MiB", "committed", "-", "-", "-"],
        ["other", "7", "2", "of", "2", "16.0", "MiB", "committed", "yes", "-", "-"],
    ]


def test_all_is_well(storage: Path, tmp_path: Path, command: Any) -> None:
    done = command("verify", "--storage", storage, "--run-dir", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("intact") == 7
    assert done.stdout.splitlines()[-2:] == [
        f"no cache runs in {tmp_path}, so no memory was verified",
        "7 shards verified, 0 damaged",
    ]
    assert command("verify", "--storage", storage, "--run-dir", tmp_path, "--job", "other").stdout.count("intact") == 2


def test_what_is_damaged_is_named_by_file_rank_and_bytes(storage: Path, tmp_path: Path, command: Any) -> None:
    old, new = storage / "llm" / str(gen(100)), storage / "llm" / str(gen(150))
    flip(old / "rank-00000.shard", 5)
    flip(old / "rank-00000.shard", CHUNK_BYTES + 5)
    os.truncate(old / "rank-00001.shard", SIZE - 1)
    (new / "rank-00000.shard").unlink()
    flip(new / "rank-00001.json", 30)
    (storage / "other" / str(gen(7)) / "rank-00001.json").unlink()
    done = command("verify", "--storage", storage, "--run-dir", tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    damaged = [line.partition("DAMAGED: ") for line in done.stdout.splitlines() if "DAMAGED" in line]
    assert {what for _, _, what in damaged} == {
        f"{old}/rank-00000.shard: the bytes from 0 to {2 * CHUNK_BYTES} are not those that were saved",
        f"{old}/rank-00001.shard: {SIZE - 1} bytes instead of {SIZE}",
        f"{new}/rank-00000.shard: No such file or directory",
        f"{new}/rank-00001.json: a manifest does not match its own digest",
        f"{storage}/other/{gen(7)}/rank-00001.json is not there, though the generation is committed",
    }
    assert {tuple(where.split()[1:5]) for where, _, _ in damaged} == {
        ("llm", "step", "100", "rank"), ("llm", "step", "150", "rank"), ("other", "step", "7", "rank"),
    }  # fmt: skip
    assert sorted(where.split()[5] for where, _, _ in damaged) == ["0", "0", "1", "1", "1"]
    assert done.stdout.splitlines()[-1] == "7 shards verified, 5 damaged"
    listed = command("list", "--storage", storage, "--run-dir", tmp_path).stdout
    assert listed.count("  damaged  ") == 3
    assert "8388608" not in listed  # only `verify` reads the bytes


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda s: (s / "notes.txt").touch(), "{s}/notes.txt is no job's folder and was passed over"),
        (lambda s: (s / "a job").mkdir(), "{s}/a job is no job's folder and was passed over"),
        (lambda s: (s / "llm/step-7.pt").touch(), "{s}/llm/step-7.pt is no generation and was passed over"),
        (lambda s: (s / "llm" / str(gen(100)) / "README").touch(),
         "{s}/llm/{g}/README is none of a checkpoint's files and was passed over"),
        (lambda s: (s / "llm" / str(gen(100)) / "rank-1.json").touch(),
         "{s}/llm/{g}/rank-1.json is none of a checkpoint's files and was passed over"),
        (lambda s: (s / "llm/latest").write_text("nonsense"),
         "{s}/llm/latest names 'nonsense', which does not lie there; the newest committed one is used"),
        (lambda s: (s / "llm/latest").write_bytes(b"\xff\xfe"), ""),
        (lambda s: (s / "llm" / str(gen(100)) / ".writing-x").touch(), ""),
        (lambda s: shutil.move(s / "llm" / str(gen(100)), s / "llm" / str(gen(100, attempt=8))),
         "{s}/llm/{h}/rank-00000.json: it is the manifest of another shard"),
    ],
)  # fmt: skip
def test_what_is_strange_is_one_sentence_and_ends_nothing(
    storage: Path, tmp_path: Path, make: object, sentence: str, command: Any
) -> None:
    make(storage)  # type: ignore[operator]
    sentence = sentence.format(s=storage, g=gen(100), h=gen(100, attempt=8))
    for verb in ("list", "verify"):
        done = command(verb, "--storage", storage, "--run-dir", tmp_path)
        assert (done.returncode, done.stderr) == (int(verb == "verify" and "another shard" in sentence), "")
        assert sentence in done.stdout
        assert "150" in done.stdout


def test_a_pinned_generation_stays_when_newer_ones_are_there(storage: Path, command: Any) -> None:
    kept = storage / "llm" / str(gen(100))
    done = command("pin", "llm", 100, "--storage", storage)
    assert (done.returncode, done.stdout) == (0, f"{kept} stays for good\n")
    assert (kept / "pinned").exists()
    for step in (300, 400, 500):
        store(storage, "llm", gen(step))
    Folder(storage).retain("llm", 2)
    assert [stored.generation.step for stored in catalogue.scan(storage, "llm")[0] if stored.committed] == [500, 400, 100]
    assert [stored.generation.step for stored in catalogue.scan(storage, "llm")[0] if stored.pinned] == [100]
    assert command("unpin", "llm", 100, "--storage", storage).returncode == 0
    Folder(storage).retain("llm", 2)
    assert not kept.exists()


def test_the_newest_committed_generation_of_a_step_is_pinned(storage: Path) -> None:
    newer = store(storage, "llm", gen(100, attempt=9))
    store(storage, "llm", gen(100, attempt=10), ranks=1)
    assert [stored.folder for stored in catalogue.pin(storage, "llm", 100)] == [newer]


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["pin", "llm", "7"], 2, "no committed generation of step 7 of job 'llm' lies in"),
        (["pin", "llm", "200"], 2, "no committed generation of step 200 of job 'llm' lies in"),
        (["unpin", "llm", "100"], 2, "no generation of step 100 of job 'llm' in"),
        (["pin", "../llm", "100"], 2, "'../llm' is no name for a job"),
        (
            ["verify", "--storage", "/absent"],
            3,
            "the storage folder /absent cannot be read: No such file or directory; name it",
        ),
        (["list", "--storage", "/absent"], 3, "the storage folder /absent cannot be read: No such file or directory; name it"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(storage: Path, words: list[str], code: int, sentence: str, command: Any) -> None:
    done = command("--storage", storage, "--run-dir", storage / "run", *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("eagleeye cache: ")
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_any_folder(command: Any) -> None:
    done = command("pin", "llm", "7")
    assert (done.returncode, done.stderr) == (
        2, "eagleeye cache: where does the generation lie? name the storage folder by --storage\n",
    )  # fmt: skip
    done = command("verify", "--run-dir", "/absent")
    assert done.returncode == 3
    assert "no cache runs in /absent, so no memory was verified; name its folder by --run-dir, or a storage folder" in done.stderr


def test_a_folder_that_cannot_be_written_is_not_pinned_in_silence(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "touch", _read_only)
    with pytest.raises(CannotRun, match=r"pinned cannot be written: Read-only file system"):
        catalogue.pin(storage, "llm", 100)
    with pytest.raises(UsageError):
        catalogue.unpin(storage, "llm", 100)


def _read_only(*_: object) -> None:
    raise OSError(30, "Read-only file system")


def test_a_pipe_in_place_of_a_manifest_is_named_and_not_waited_for(tmp_path: Path) -> None:
    manifest = store(tmp_path, "llm", gen(1)) / "rank-00001.json"
    manifest.unlink()
    os.mkfifo(manifest)
    found, _ = catalogue.scan(tmp_path)
    assert [problem for each in found for problem in each.problems.values()] == [f"{manifest}: it is no file"]
