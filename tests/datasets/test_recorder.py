"""The recorder of labelled runs: what it plans, what it keeps, which runs it refuses, and what it has recorded."""

import json
import random
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import record

from eagleeye.errors import UsageError
from eagleeye.source.trace import TraceSource, labels, write_trace
from eagleeye.window import Window

ROOT = Path(__file__).parents[2]
T0 = datetime(2026, 3, 2, 8, tzinfo=UTC).timestamp()
METRICS = ("train_step_count", "process_up", "process_cpu_ratio", "train_compute_seconds")


PLAN = record.plan()
THERE = [run for run in PLAN if record.whole(record.RUNS / run.name)]


def a_run(kind: str, mode: str = "", **changes):
    run = next(run for run in PLAN if run.kind == kind and mode in ("", run.mode))
    return record.dataclasses.replace(run, nodes=4, broken=1, pace_s=0.5, **changes)


def stored(folder: Path, run, steps_T, labelled=(), *, up_T=None, absent_T=None):
    """Write a run in which all ranks have made `steps_T` steps, as the recorder would."""
    R, T = run.nodes, len(steps_T)
    values_RMT = np.full((R, len(METRICS), T), np.nan, dtype=np.float32)
    values_RMT[:, 0], values_RMT[:, 1] = steps_T, 1.0 if up_T is None else up_T
    values_RMT[:, 2] = np.random.default_rng(0).random((R, T))
    if absent_T is not None:
        values_RMT[:, :, absent_T] = np.nan
    names = tuple(f"node{r}-abc" for r in range(R))
    window = Window(run.name, tuple(range(R)), names, ("all",) * R, METRICS, T0 + T, 1.0, values_RMT)
    raw = folder.with_name(f"{folder.name}.raw")
    write_trace(raw, [window])
    record.publish(raw, folder, list(labelled), {"seconds": T})
    return folder


def label(start_s: float, end_s: float, kind: str = "fault", node: int | None = 1):
    named = [] if node is None else [node]
    return {
        "start": record._utc(T0 + start_s),
        "end": record._utc(T0 + end_s),
        "kind": kind,
        "category": "hang",
        "nodes": [f"node{n}-abc" for n in named],
        "ranks": named,
        "infrastructure": bool(named),
        "nameable": bool(named),
    }


def walked(*stretches: tuple[int, float]) -> np.ndarray:
    """Steps made by the end of each second, for stretches of (seconds, steps a second)."""
    return np.floor(np.cumsum(np.concatenate([np.full(seconds, rate) for seconds, rate in stretches])))


# ---- the plan


def test_the_plan_has_forty_of_each_and_differs_from_run_to_run() -> None:
    broken = [run for run in PLAN if run.kind in record.FAULTS]
    assert len(broken) >= 40
    assert len(PLAN) - len(broken) >= 40
    assert len({run.name for run in PLAN}) == len(PLAN)
    assert {run.kind for run in broken} >= {"kill", "hang", "slow", "limit", "loss", "cut", "disk", "memory"}
    assert {"plain", "checkpoint", "eval", "restart", "batch", "neighbour", "idle"} <= {run.kind for run in PLAN}
    assert all(0.45 <= run.onset <= 0.60 and 0 <= run.broken < run.nodes for run in PLAN)
    for what in ("pace_s", "batch_size", "width", "nodes", "broken"):
        assert len({getattr(run, what) for run in PLAN}) > 1, what
    assert record.plan() == PLAN


def test_any_half_of_the_plan_is_balanced() -> None:
    half = PLAN[: len(PLAN) // 2]
    assert {run.kind for run in half} == {run.kind for run in PLAN}
    assert abs(sum(run.kind in record.FAULTS for run in half) / len(half) - 0.5) < 0.1


# ---- what is kept


def test_rounding_keeps_three_digits_and_what_is_missing() -> None:
    values = np.array([0.0, 1.0, 1 / 3, -np.pi, 1.2345e9, 9.87654e-7, 4095.0, np.nan, np.inf], dtype=np.float32)
    kept = record.rounded(values)
    assert np.isnan(kept[7])
    assert kept[8] == np.inf
    assert kept[0] == 0
    assert kept[6] == 4095
    relative = np.abs(kept[1:7] - values[1:7]) / np.abs(values[1:7])
    assert 0 < relative.max() <= 2.0 ** -(record.MANTISSA_BITS + 1)


def test_a_published_run_reads_back_without_empty_columns_and_with_exact_counts(tmp_path: Path) -> None:
    steps_T = walked((180, 1.9)) + 100_001
    folder = stored(tmp_path / "plain-0", a_run("plain"), steps_T)
    source = TraceSource(folder)
    assert source.metrics == ("process_up", "process_cpu_ratio", "train_step_count") or set(source.metrics) == set(METRICS[:3])
    window = source.window(source.job, T0 + 180, 180)
    assert window.column_RT("train_step_count").tolist() == [steps_T.tolist()] * 4
    expected = np.random.default_rng(0).random((4, 180))
    np.testing.assert_allclose(window.column_RT("process_cpu_ratio"), expected, rtol=2.0**-12)
    assert pq.read_schema(folder / "metrics.parquet").field("process_cpu_ratio").type == "float"
    assert record.whole(folder)
    (folder / "run.json").unlink()
    assert not record.whole(folder)


def test_log_lines_of_steps_and_paths_of_the_machine_are_not_kept(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(f"T rank 0 of 2\nT step 1 loss 5.5\nT saved step 1, parameters ff\nsee {tmp_path}/b\n")
    (tmp_path / "b.log").write_text("T step 1 loss 5.5\n")
    record._keep_logs(tmp_path, ["a", "b"], tmp_path / "logs")
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["a.log"]
    assert (tmp_path / "logs" / "a.log").read_text() == "T rank 0 of 2\nsee RUN/b\n"


# ---- what is refused

STANDS = walked((90, 1.8), (90, 0.0))
GOES_ON = walked((180, 1.8))
SLOWS = walked((90, 1.8), (90, 0.9))
HARDLY = walked((90, 1.8), (90, 1.6))
HICCUP = walked((90, 1.8), (8, 0.0), (82, 1.8))

GOOD = [
    ("hang", "", STANDS, label(90, 180)),
    ("cut", "", STANDS, label(90, 180)),
    ("disk", "freeze", walked((90, 1.8), (40, 0.0), (50, 1.8)), label(90, 130)),
    ("disk", "throttle", SLOWS, label(90, 180)),
    ("slow", "", SLOWS, label(90, 180)),
    ("limit", "", SLOWS, label(90, 180)),
    ("loss", "", SLOWS, label(90, 180)),
    ("memory", "squeeze", SLOWS, label(90, 180)),
    ("kill", "restart", HICCUP, label(90, 98)),
    ("kill", "forever", STANDS, label(90, 180)),
    ("memory", "oom", HICCUP, label(90, 98)),
    ("restart", "", HICCUP, label(90, 98, "benign", None)),
    ("batch", "bigger", SLOWS, label(90, 91, "benign", None)),
    ("batch", "smaller", walked((90, 1.8), (90, 3.0)), label(90, 91, "benign", None)),
    ("neighbour", "", GOES_ON, label(90, 96, "benign", None)),
    ("plain", "", GOES_ON, None),
    ("idle", "sleep", np.zeros(180), label(0, 180, "not_training", None)),
]


@pytest.mark.parametrize(("kind", "mode", "steps_T", "labelled"), GOOD, ids=[f"{k}-{m}" for k, m, *_ in GOOD])
def test_a_run_that_shows_its_label_is_kept(tmp_path: Path, kind, mode, steps_T, labelled) -> None:
    run = a_run(kind, mode)
    folder = stored(tmp_path / run.name, run, steps_T, [labelled] if labelled else [])
    assert record.check(folder, run, 180.0) == []


BAD = [
    ("hang", "", GOES_ON, label(90, 180), "the job went on"),
    ("cut", "", SLOWS, label(90, 180), "the job went on"),
    ("disk", "freeze", SLOWS, label(90, 180), "the job went on"),
    ("disk", "throttle", HARDLY, label(90, 180), "hardly slower"),
    ("slow", "", GOES_ON, label(90, 180), "hardly slower"),
    ("memory", "squeeze", HARDLY, label(90, 180), "hardly slower"),
    ("kill", "restart", GOES_ON, label(90, 98), "did not stand still"),
    ("kill", "restart", STANDS, label(90, 180), "did not go on"),
    ("kill", "forever", HICCUP, label(90, 98), "the job went on"),
    ("batch", "bigger", HARDLY, label(90, 91, "benign", None), "not seen"),
    ("batch", "smaller", SLOWS, label(90, 91, "benign", None), "not seen"),
    ("neighbour", "", GOES_ON, label(90, 120, "benign", None), "stayed for 30.0 s"),
    ("hang", "", STANDS, label(90, 180, node=2), "another node"),
    ("hang", "", walked((40, 1.8), (140, 0.0)), label(40, 180), "first 40 %"),
    ("hang", "", STANDS, None, "no label"),
    ("plain", "", walked((50, 1.8), (30, 0.0), (100, 1.8)), None, "stood still for 30 s"),
    ("plain", "", walked((180, 0.2)), None, "only 0.20 steps a second"),
    ("plain", "", GOES_ON, label(90, 98), "where nothing was done"),
    ("plain", "", GOES_ON[:150], None, "only 150 of 180 rows"),
    ("checkpoint", "told", GOES_ON, None, "longest pause"),
    ("idle", "sleep", GOES_ON, label(0, 180, "not_training", None), "made steps"),
]


@pytest.mark.parametrize(("kind", "mode", "steps_T", "labelled", "sentence"), BAD, ids=[f"{b[0]}-{b[1]}-{b[4]}" for b in BAD])
def test_a_run_that_does_not_show_its_label_is_refused(tmp_path: Path, kind, mode, steps_T, labelled, sentence) -> None:
    run = a_run(kind, mode)
    folder = stored(tmp_path / run.name, run, steps_T, [labelled] if labelled else [])
    assert any(sentence in told for told in record.check(folder, run, 180.0)), record.check(folder, run, 180.0)


def test_missing_cells_and_absent_ranks_are_refused(tmp_path: Path) -> None:
    run = a_run("plain")
    folder = stored(tmp_path / "holes", run, GOES_ON, absent_T=slice(100, 110))
    assert any("are missing" in told for told in record.check(folder, run, 180.0))
    six = record.dataclasses.replace(run, nodes=6)
    assert any("4 ranks instead of 6" in told for told in record.check(folder, six, 180.0))


# ---- the command


def command(*words: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "datasets" / "record.py"
    return subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, check=False)


def test_an_unknown_run_is_one_sentence() -> None:
    done = command("--only", "slow-0,slwo-1")
    assert done.returncode == UsageError.exit_code
    assert done.stderr == "record: there is no run called 'slwo-1'; see --list\n"


def test_whole_runs_are_skipped_and_checked_again(tmp_path: Path) -> None:
    run = next(run for run in PLAN if run.name == "plain-0")
    four = record.dataclasses.replace(run, nodes=run.nodes)
    stored(tmp_path / "plain-0", four, np.floor(np.arange(1, 181) * 0.8 / run.pace_s))
    done = command("--only", "plain-0", "--out", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 runs are there, 0 to record" in done.stdout
    assert command("--check", "--only", "plain-0", "--out", str(tmp_path)).stdout == "1 of 1 runs are there, 0 of them wrong\n"
    stored(tmp_path / "plain-1", next(r for r in PLAN if r.name == "plain-1"), np.zeros(180))
    done = command("--check", "--only", "plain", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "plain-1: the healthy job made only 0.00 steps a second\n" in done.stdout
    assert "2 of 9 runs are there, 1 of them wrong" in done.stdout


# ---- what was recorded


def test_enough_was_recorded_and_it_is_small() -> None:
    if not THERE:
        pytest.skip("no recorded runs in datasets/runs")
    broken = sum(run.kind in record.FAULTS for run in THERE)
    assert broken >= 40
    assert len(THERE) - broken >= 40
    assert sum(path.stat().st_size for path in record.RUNS.rglob("*") if path.is_file()) <= 4_000_000
    assert {path.name for path in record.RUNS.iterdir()} == {run.name for run in THERE}, "remains of a run"


@pytest.mark.parametrize("run", THERE, ids=lambda run: run.name)
def test_recorded_runs_show_their_labels(run) -> None:
    folder = record.RUNS / run.name
    about = json.loads((folder / "run.json").read_text())
    assert about["run"]["name"] == run.name
    assert record.check(folder, run, about["seconds"]) == []
    source = TraceSource(folder)
    told = labels(folder)
    assert {node for entry in told for node in entry.nodes} <= set(source.nodes)
    assert all(entry.start_s < entry.end_s <= source.stamps_s[-1] + 30 for entry in told)
    kinds = {"idle": "not_training", **dict.fromkeys(record.FAULTS, "fault")}
    silent = run.kind in ("plain", "checkpoint", "eval")
    assert [entry.kind for entry in told] == ([] if silent else [kinds.get(run.kind, "benign")])


def test_recorded_runs_name_no_path_of_the_machine() -> None:
    for run in random.Random(0).sample(THERE, min(20, len(THERE))):
        for path in (record.RUNS / run.name).rglob("*"):
            if path.suffix in (".json", ".log"):
                text = path.read_text()
                assert "/work/" not in text, path
                assert "/tmp/" not in text, path
