"""The chaos campaign proves something only if its oracle finds what is wrong: here it is, oracle first, then a broken engine."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import chaos_faults
import chaos_oracle
import chaos_plan
import pytest
from chaos_oracle import LOST, UNBOUNDED, WRONG, Oracle, Point, Told

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NBYTES = 64


# ---- the oracle


def saved(*steps: int, level: str = "persistent", world: int = 2, stored: int = 2, start: int = 1) -> Oracle:
    """Return an oracle of a job of which every rank was told that these steps reached a level."""
    oracle = Oracle("seed", stored)
    for step in steps:
        add(oracle, Point(start, step), level, world)
    return oracle


def add(oracle: Oracle, point: Point, level: str, world: int = 2) -> None:
    for rank in range(world):
        oracle.save(point, world, rank, node=rank, nbytes=NBYTES)
        oracle.named(point, f"g{point.start}.{point.step}")
        for reached in chaos_oracle.LEVELS[: chaos_oracle.LEVELS.index(level) + 1] if level else ():
            oracle.reached(point, rank, reached)


def restored(rank: int, step: int, start: int = 1, why: str = "") -> Told:
    sha256 = hashlib.sha256(chaos_oracle.content("seed", start, step, rank, NBYTES)).hexdigest()
    return Told("restored", f"g{start}.{step}", step, (start, step, rank), sha256, "local", why)


def both(step: int, **more: Any) -> list[Told]:
    return [restored(rank, step, **more) for rank in range(2)]


def kinds(oracle: Oracle, told: list[Told], *, healed: bool = True) -> list[str]:
    return [violation.kind for violation in oracle.judge(told, healed=healed)[1]]


def test_the_newest_with_its_own_bytes_is_right() -> None:
    assert saved(1, 2).judge(both(2), healed=True) == ("restored the newest", [])


@pytest.mark.parametrize(
    "changes",
    [
        {"sha256": "0" * 64},
        {"content": (1, 1, 1)},  # the bytes of another step
        {"content": (1, 2, 0)},  # those of another rank
        {"content": (2, 2, 1)},  # those of a start that never saved it
        {"generation": "g1.1"},  # another generation's name
        {"step": 1},
    ],
)
def test_wrong_bytes_are_found(changes: dict[str, Any]) -> None:
    assert WRONG in kinds(saved(1, 2), [restored(0, 2), restored(1, 2)._replace(**changes)])


def test_ranks_that_go_on_from_different_generations_are_found() -> None:
    assert kinds(saved(1, 2), [restored(0, 2), restored(1, 1)]) == [WRONG]
    assert kinds(saved(1, 2), [restored(0, 2), Told("nothing")]) == [WRONG]


def test_an_older_one_is_wrong_without_a_reason_and_lost_once_nothing_is_out_of_reach() -> None:
    assert kinds(saved(1, 2), both(1), healed=False) == [WRONG]
    assert kinds(saved(1, 2), both(1, why="node1 does not answer"), healed=False) == []
    assert kinds(saved(1, 2), both(1, why="node1 does not answer"), healed=True) == [LOST]


def test_a_persistent_one_survives_the_loss_of_all_memory() -> None:
    oracle = saved(1)
    oracle.lost(0)
    oracle.lost(1)
    assert kinds(oracle, [Told("failed", why="nothing is left")] * 2) == [LOST]
    assert kinds(oracle, [Told("nothing")] * 2) == [LOST]
    assert kinds(oracle, [Told("nothing")] * 2, healed=False) == [WRONG]
    oracle.damaged("g1.1")
    assert kinds(oracle, [Told("failed", why="nothing is left")] * 2) == []


def test_what_one_loss_must_leave_and_two_need_not() -> None:
    for level, losses, survives in (
        ("cached", [], True),
        ("cached", [2], True),  # a node that no rank was on
        ("cached", [0], False),
        ("replicated", [0], True),
        ("replicated", [0, 0], True),
        ("replicated", [0, 1], False),
    ):
        oracle = saved(1, level=level)
        for node in losses:
            oracle.lost(node)
        assert (oracle.promise(2) is not None) is survives, (level, losses)


def test_a_level_that_one_rank_was_not_told_of_promises_nothing() -> None:
    oracle = saved(1)
    oracle.save(Point(1, 2), 2, 0, node=0, nbytes=NBYTES)
    oracle.save(Point(1, 2), 2, 1, node=1, nbytes=NBYTES)
    oracle.reached(Point(1, 2), 0, "persistent")
    assert oracle.promise(2) == (Point(1, 1), "persistent")
    assert kinds(oracle, both(2)) == []  # it may be there all the same


def test_retention_may_take_what_is_old_but_not_the_newest_that_is_whole() -> None:
    oracle = saved(1, 2, 3, stored=2)
    for node in (0, 1):
        oracle.lost(node)
    oracle.damaged("g1.3")
    assert oracle.promise(2) == (Point(1, 2), "persistent")
    oracle.damaged("g1.2")
    assert oracle.promise(2) is None  # retention kept two
    oracle = saved(1, stored=1)
    for step in (2, 3, 4):
        add(oracle, Point(1, step), "")
    for node in (0, 1):
        oracle.lost(node)
    assert oracle.promise(2) == (Point(1, 1), "persistent")  # none of the newer ones is known to be whole


def test_a_job_of_another_size_is_promised_nothing_and_may_not_take_anything() -> None:
    oracle = saved(1, 2)
    assert kinds(oracle, [Told("failed", why="saved by 2 ranks")]) == []
    assert kinds(oracle, [restored(0, 2)]) == [WRONG]


def test_a_restore_that_does_not_end() -> None:
    assert kinds(saved(1), [restored(0, 1), Told("silent")]) == [UNBOUNDED]


# ---- plans and faults


def test_a_plan_follows_from_its_seed_and_survives_being_printed() -> None:
    plans = [chaos_plan.draw(3, index, real=False) for index in range(300)]
    assert plans == [chaos_plan.draw(3, index, real=False) for index in range(300)]
    assert plans != [chaos_plan.draw(4, index, real=False) for index in range(300)]
    assert all(chaos_plan.read(plan.text()) == plan for plan in plans)
    assert len({name for plan in plans for name, _ in plan.ops}) == 18


def test_faults_of_a_disk(tmp_path: Path) -> None:
    code = """
import errno, os, sys
from pathlib import Path
import chaos_faults
file, control = chaos_faults.Control.make()
chaos_faults.install(control, 3, sys.argv[1] + "/storage", 1.0)
def tried(fault, do):
    control.set(3, "storage", chaos_faults.STORAGE_FAULTS.index(fault))
    try:
        return do()
    except OSError as error:
        return errno.errorcode[error.errno]
os.mkdir(sys.argv[1] + "/storage")
ours, others = (os.open(sys.argv[1] + name, os.O_CREAT | os.O_RDWR) for name in ("/storage/a", "/other"))
print(tried("none", lambda: os.write(ours, b"x" * 100)), tried("short write", lambda: os.write(ours, b"x" * 100)),
      tried("short write", lambda: os.pwrite(ours, memoryview(b"x" * 10000), 0)),
      tried("short write", lambda: os.writev(ours, [b"x" * 10])))
print(tried("full", lambda: os.write(ours, b"x")), tried("full", lambda: os.write(others, b"x")),
      tried("write error", lambda: os.pwrite(ours, b"x", 0)), tried("sync error", lambda: os.fsync(ours)),
      tried("rename error", lambda: os.replace(sys.argv[1] + "/storage/a", sys.argv[1] + "/storage/b")),
      tried("read error", lambda: os.pread(ours, 1, 0)), tried("read error", lambda: Path(sys.argv[1] + "/storage/a").open()))
"""
    done = run(code, str(tmp_path))
    assert done.stdout.splitlines() == ["100 50 4096 5", "ENOSPC 1 EIO EIO EIO EIO EIO"], done.stderr


def test_a_process_dies_at_the_call_at_which_it_shall(tmp_path: Path) -> None:
    code = """
import os, sys
import chaos_faults
file, control = chaos_faults.Control.make()
chaos_faults.install(control, 0, sys.argv[1], 1.0)
control.set(0, "die_at", 3)
file = os.open(sys.argv[1] + "/a", os.O_CREAT | os.O_WRONLY)
while True:
    os.write(file, b"x")
"""
    assert run(code, str(tmp_path)).returncode == -signal.SIGKILL
    assert (tmp_path / "a").read_bytes() == b"xx"


def test_a_clock_that_jumps_and_one_that_is_fast(tmp_path: Path) -> None:
    code = """
import sys, threading, time
before_s, monotonic, wall = time.time(), time.monotonic, time.time
import chaos_faults
file, control = chaos_faults.Control.make()
chaos_faults.install(control, 0, sys.argv[1], 1000.0)
control.set(0, "clock_offset_s", -86400)
began_s, fast_s = monotonic(), time.monotonic()
time.sleep(50)
threading.Event().wait(50)
print(time.time() < before_s - 80000, time.monotonic() - fast_s >= 100, monotonic() - began_s < 50)
"""
    assert run(code, str(tmp_path)).stdout.split() == ["True"] * 3


def test_a_flipped_bit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    chaos_faults.flip(tmp_path / "a", 7)
    assert sum(bin(byte).count("1") for byte in (tmp_path / "a").read_bytes()) == 1
    with pytest.raises(FileNotFoundError) as missing:
        chaos_faults.flip(tmp_path / "b", 0)
    assert missing.value.errno == errno.ENOENT


# ---- the campaign


def run(code: str, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run code among the scripts of the campaign, in a process of its own, as it forks."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=os.environ | {"PYTHONPATH": str(BENCHMARKS)} | env,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


BROKEN = """
import json
import chaos, chaos_plan
from chaos_plan import Plan
def change():
    {change}
plan = {{"seed": "test", "real": False, "nodes": 2, "world": 2, "stored": 2, "kept": 2, "relayed": False}} | {more}
campaign = chaos.Campaign(0, [Plan(**plan, ops={ops})], {changed})
campaign.run()
print("\\n".join(line for outcome in campaign.failed for line in outcome.log))
print(json.dumps(campaign.last_line() | {{"errors": campaign.errors}}))
"""
VERIFY_ACCEPTS_ALL = """
    import sys
    import checkpoint.manifest
    real = checkpoint.manifest.verify
    for name, module in list(sys.modules.items()):
        if name.startswith("checkpoint") and getattr(module, "verify", None) is real:
            module.verify = lambda *_: None
    checkpoint.manifest.Manifest.fits = lambda *_: True
"""
DISK_KEEPS_NOTHING = """
    import os
    real = os.replace
    os.replace = lambda source, target, **folders: None if "/storage/" in str(target) else real(source, target, **folders)
"""
FLIPPED = [["save", {"count": 1, "nbytes": 300_000, "until": "replicated"}]] + [
    ["flip memory", {"node": node, "luck": 0.5, "bits": 300}] for node in (0, 1)
]
SAVED = [["save", {"count": 2, "nbytes": 4096, "until": "persistent"}]]


def campaign(ops: list[Any], change: str = "", **more: Any) -> dict[str, Any]:
    changed = "change" if change else "None"
    done = run(BROKEN.format(change=change.strip() or "pass", ops=ops, changed=changed, more=more))
    assert done.stdout, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told.pop("errors") == []
    return told


def test_flipped_bits_do_no_harm_to_the_engine_and_are_found_in_one_that_does_not_verify() -> None:
    assert campaign(FLIPPED, stored=0)["wrong_restores"] == 0
    assert campaign(FLIPPED, VERIFY_ACCEPTS_ALL, stored=0)["wrong_restores"] > 0


def test_saves_survive_and_their_loss_is_found_where_the_disk_keeps_nothing() -> None:
    assert campaign(SAVED)["lost_durable"] == 0
    assert campaign(SAVED, DISK_KEEPS_NOTHING)["lost_durable"] > 0


def test_a_wait_without_end_is_found() -> None:
    ops = [["save", {"count": 1, "nbytes": 64, "until": "cached"}], ["stop", {"victim": "rank", "of": 0, "stop_ms": 1e9}], *SAVED]
    assert campaign(ops, "import chaos_schedule; chaos_schedule.BOUND_S = 2.0")["unbounded_waits"] > 0


def test_a_short_campaign_finds_nothing() -> None:
    done = run("import chaos; raise SystemExit(chaos.main())", CHAOS_SEED="5", CHAOS_N="8")
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last == {"seed": 5, "schedules": 8, "real": 3, "wrong_restores": 0, "lost_durable": 0, "unbounded_waits": 0}


def test_one_schedule_again() -> None:
    done = run("import chaos; raise SystemExit(chaos.main())", CHAOS_SEED="5", CHAOS_ONLY="3")
    assert done.returncode == 0, done.stdout + done.stderr
    plan, *log, last = done.stdout.splitlines()
    assert chaos_plan.read(plan) == chaos_plan.draw(5, 3, real=False)
    assert any("start 1: began anew" in line for line in log)
    assert json.loads(last)["schedules"] == 1
