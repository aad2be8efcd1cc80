"""`eagleeye launch` from the command line: what it refuses, and what does not end it."""

import subprocess
import sys
from pathlib import Path

import pytest

VERB = "from eagleeye.cli import main; raise SystemExit(main())"


def command(folder: Path, *words: str, job: str = "j") -> list[str]:
    where = ["--rendezvous", str(folder), "--node", "n0", "--address", "127.0.0.1"]
    return [sys.executable, "-c", VERB, "launch", "--job", job, "--nodes", "1", *where, *words]


def launch(folder: Path, *words: str, job: str = "j") -> tuple[int, str]:
    done = subprocess.run(command(folder, *words, job=job), capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize("job", ["x y/z", "..", "new\nline", "l" * 129, "ü", b"bad\xffname".decode(errors="surrogateescape")])
def test_a_name_that_the_cache_would_refuse_is_refused_before_anything_starts(tmp_path: Path, job: str) -> None:
    status, errors = launch(tmp_path, "--", "true", job=job)
    assert status == 2
    assert "is no name for a job: use 1 to 128 letters" in errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_more_ranks_than_a_node_can_hold(tmp_path: Path) -> None:
    status, errors = launch(tmp_path, "--ranks-per-node", "999999999999", "--", "true")
    assert (status, "at most 1024" in errors) == (2, True)


def test_no_command(tmp_path: Path) -> None:
    assert launch(tmp_path) == (
        2,
        "eagleeye launch: what should be launched? write it after two dashes: eagleeye launch --nodes 4 -- python train.py\n",
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_below_the_log_does_not_end_the_job(tmp_path: Path) -> None:
    made = tmp_path / "made"
    with open("/dev/full", "w") as full:
        words = ["--", sys.executable, "-c", f"open({str(made)!r}, 'w').close()"]
        (tmp_path / "meeting").mkdir()
        process = subprocess.Popen(command(tmp_path / "meeting", *words), stdout=full, stderr=full)
        process.wait(60)
    assert made.exists()
