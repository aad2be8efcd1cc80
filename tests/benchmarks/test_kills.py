"""The campaign of kills: its oracle on logs that are wrong on purpose, and a short one on real processes."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kills
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Lines = list[dict[str, Any]]


def saved(rank: int, nonce: str, step: int, *levels: str) -> Lines:
    """What a rank writes down about one save that reached some levels."""
    save = {"event": "save", "nonce": nonce, "step": step, "sha256": f"{nonce} {step} {rank}"}
    return [save, *({"event": level, "nonce": nonce, "step": step} for level in levels)]


def restored(rank: int, nonce: str, origin: str, step: int, **changes: object) -> Lines:
    """What a rank writes down when it restores in the attempt `nonce` what the attempt `origin` saved."""
    content = f"{origin} {step} {rank}"
    line = {
        "event": "restored",
        "nonce": nonce,
        "generation": f"{origin}-{step}",
        "step": step,
        "sha256": content,
        "into": content,
    }
    return [line | changes]


def before(*levels: str) -> tuple[Lines, Lines]:
    """Two ranks that saved steps 1 to 3 in attempt a: 1 and 2 reached all that is named, 3 nothing."""
    first, second = (
        [line for step in (1, 2) for line in saved(rank, "a", step, *levels)] + saved(rank, "a", 3) for rank in (0, 1)
    )
    return first, second


def test_the_oracle_accepts_any_step_that_is_not_older_than_the_newest_safe_one() -> None:
    for step in (2, 3):
        logs = [log + restored(rank, "b", "a", step) for rank, log in enumerate(before("cached", "replicated"))]
        finding = kills.judge(logs, ["a", "b"], "replicated")
        assert (finding.problems, finding.step, finding.lost) == ([], step, 0)


def test_what_one_rank_alone_replicated_may_be_lost() -> None:
    first, second = before("replicated")
    logs = [first + saved(0, "a", 4, "replicated") + restored(0, "b", "a", 2), second + restored(1, "b", "a", 2)]
    assert kills.judge(logs, ["a", "b"], "replicated").problems == []


def test_a_lost_step_is_found_also_when_it_was_saved_an_attempt_before() -> None:
    logs = [log + restored(rank, "b", "a", 1) for rank, log in enumerate(before("replicated"))]
    finding = kills.judge(logs, ["a", "b"], "replicated")
    assert finding.lost == 1
    assert finding.problems == ["step 2 of attempt 0 was replicated on all ranks and is lost; restored was step 1 of attempt 0"]
    # the same step number of an older attempt is an older state
    logs = [
        log + restored(rank, "b", "a", 2) + saved(rank, "b", 2, "replicated") + restored(rank, "c", "a", 2)
        for rank, log in enumerate(before("replicated"))
    ]
    assert kills.judge(logs, ["a", "b", "c"], "replicated").lost == 1


def test_a_job_that_begins_anew_has_lost_everything() -> None:
    logs = [[*log, {"event": "nothing", "nonce": "b"}] for log in before("replicated")]
    finding = kills.judge(logs, ["a", "b"], "replicated")
    assert finding.lost == 2
    assert "the job began anew" in finding.problems[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"sha256": "a 3 1", "into": "a 3 1"},  # the bytes of another step
        {"sha256": "nobody", "into": "nobody"},  # bytes that nobody saved
        {"sha256": "a 2 0", "into": "a 2 0"},  # the bytes of the other rank
        {"into": "a 1 1"},  # the right bytes were returned, others were put into the state
    ],
)
def test_wrong_bytes_are_found(changes: dict[str, str]) -> None:
    first, second = before("replicated")
    logs = [first + restored(0, "b", "a", 2), second + restored(1, "b", "a", 2, **changes)]
    finding = kills.judge(logs, ["a", "b"], "replicated")
    assert finding.wrong == 1
    assert "rank 1 restored step 2 with bytes that it never saved as that" in finding.problems


def test_ranks_that_go_on_from_different_generations_are_found() -> None:
    first, second = before("replicated")
    logs = [first + restored(0, "b", "a", 2), second + restored(1, "b", "a", 3)]
    assert kills.judge(logs, ["a", "b"], "replicated").mixed == 1
    # the same step of two attempts
    logs = [log + saved(rank, "b", 3) + restored(rank, "c", "ab"[rank], 3) for rank, log in enumerate(before("replicated"))]
    assert kills.judge(logs, ["a", "b", "c"], "replicated").mixed == 1


def test_a_rank_that_does_not_tell_is_a_problem() -> None:
    first, second = before("replicated")
    assert kills.judge([first + restored(0, "b", "a", 2), second], ["a", "b"], "replicated").problems == [
        "rank 1 restored 0 times"
    ]


def test_a_line_that_was_torn_by_a_kill_is_left_out() -> None:
    whole = json.dumps({"event": "save", "nonce": "a", "step": 1})
    assert kills.parse(f"\n{whole}\n{whole[:20]}\n{whole}\n".encode()) == [json.loads(whole)] * 2


def test_every_byte_of_a_state_tells_attempt_step_and_rank() -> None:
    def content(nonce: str, step: int, rank: int) -> tuple[str, bytes]:
        state = kills.empty_state()
        kills.fill(state, nonce, step, rank)
        return kills.digest(state), bytes(state["model"]["weight"].numpy()) + bytes(state["optimizer"]["moment"].numpy())

    digest, data = content("a", 1, 0)
    assert content("a", 1, 0) == (digest, data)
    assert len(data) == kills.STATE_BYTES
    for other in (("b", 1, 0), ("a", 2, 0), ("a", 1, 1)):
        assert content(*other)[0] != digest
        assert equal_bytes(content(*other)[1], data) < len(data) * 0.15


def equal_bytes(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(a == b for a, b in zip(one[::97], other[::97], strict=True)) * 97


@pytest.mark.slow
def test_a_short_campaign_finds_nothing(tmp_path: Path) -> None:
    out = tmp_path / "kills.json"
    command = [sys.executable, str(BENCHMARKS / "kills.py"), "--kills", "6", "--seed", "3", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["violations"] == []
    assert sum(row["kills"] for row in result["victims"].values()) == 6
    sources = sum(
        row[f"ranks restored from {source}"] for row in result["victims"].values() for source in ("local", "neighbour", "storage")
    )
    assert sources == 6 * result["ranks"]
