"""Whether a node is fit: ok, bad, or could not be measured, which is nobody's fault."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagleeye.errors import NoData
from remediation.launcher import checks
from remediation.launcher.checks import Finding, Result


def test_this_machine_is_fit(tmp_path: Path) -> None:
    found = checks.run(checks.all_checks(tmp_path, "127.0.0.1"), 30.0)
    assert [finding.check for finding in found] == ["shared folder", "disk", "memory", "clock", "network", "gpu"]
    assert [finding for finding in found if finding.result is Result.BAD] == []
    assert {finding.result for finding in found[:-1]} == {Result.OK}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    result, sentence = checks.disk(tmp_path / "absent")
    assert (result, sentence) == (Result.BAD, f"{tmp_path}/absent cannot be written and read: No such file or directory")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_full_disk(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from remediation.launcher.checks import disk; print(*disk(Path(sys.argv[1])))"
    script = f'mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"no mount here: {done.stderr.strip()}")
    assert done.stdout == f"bad {tmp_path} cannot be written and read: No space left on device\n"


def test_a_clock_that_is_behind(tmp_path: Path) -> None:
    assert checks.clock(tmp_path)[0] is Result.OK
    (tmp_path / "a").touch()
    assert checks.clock(tmp_path)[0] is Result.OK
    os.utime(tmp_path / "a", (0, time.time() + 600))
    result, sentence = checks.clock(tmp_path)
    assert result is Result.BAD
    assert sentence.startswith("the clock is 59") or sentence.startswith("the clock is 600 s behind")
    assert checks.clock(tmp_path / "absent")[0] is Result.COULD_NOT_RUN


def test_an_address_of_somebody_else() -> None:
    result, sentence = checks.network("203.0.113.7")
    assert result is Result.BAD
    assert sentence == "this node cannot serve on 203.0.113.7: Cannot assign requested address; give its own --address"


def test_a_check_that_hangs_or_cannot_run_keeps_nobody_out() -> None:
    def hangs() -> tuple[Result, str]:
        time.sleep(5)
        return Result.BAD, "too late"

    def cannot() -> tuple[Result, str]:
        raise NoData("there is nothing to measure")

    began_s = time.monotonic()
    found = checks.run({"slow": hangs, "quick": checks.memory, "none": cannot}, 0.5)
    assert time.monotonic() - began_s < 2
    assert found[0] == Finding("slow", Result.COULD_NOT_RUN, "no result after 0.5 s")
    assert found[1].result is Result.OK
    assert found[2] == Finding("none", Result.COULD_NOT_RUN, "there is nothing to measure")
