"""The simulator of traces: its format, its physics, and that its labels claim no more than its data show."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import simulate

from eagleeye.source.trace import TraceSource

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "traces"


def _familiar(kind: str, groups: int, seed: int = 0) -> Any:
    """The first familiar trace of a kind with so many pipeline stages."""
    for number in range(seed, seed + 40):
        trace = simulate.simulate(kind, number, 0.7, True)
        if len({place["group"] for place in trace.about["ranks"]}) == groups:
            return trace
    raise AssertionError("no such trace among 40")


def _column(trace: Any, metric: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One metric (R, T)."""
    column: np.ndarray[Any, np.dtype[np.float64]] = trace.values_RMT[:, list(trace.about["metrics"]).index(metric)].astype(float)
    return column


def _around(trace: Any) -> tuple[slice, slice, list[int], list[int]]:
    """Rows before and well inside the fault, its ranks, and all others."""
    label = trace.labels[0]
    interval = trace.about["interval_seconds"]
    culprits = label["ranks"]
    others = [r for r in range(len(trace.about["ranks"])) if r not in culprits]
    return slice(6, int(label["start"] / interval)), slice(int(label["start"] / interval) + 2, None), culprits, others


def _change(trace: Any, metric: str) -> tuple[float, float]:
    """Mean of the fault over mean before: of its ranks, and of all others."""
    before, after, culprits, others = _around(trace)
    x = _column(trace, metric)
    return tuple(float(np.nanmean(x[ranks, after]) / np.nanmean(x[ranks, before])) for ranks in (culprits, others))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", simulate.KINDS)
def test_every_kind_keeps_the_format_and_the_rules_of_labels(kind: str, tmp_path: Path) -> None:
    trace = simulate.simulate(kind, 11, 0.3)
    simulate.write(trace, tmp_path / "some-3")
    about = json.loads((tmp_path / "some-3" / "trace.json").read_text())
    labels = json.loads((tmp_path / "some-3" / "labels.json").read_text())
    rows = pq.read_table(tmp_path / "some-3" / "metrics.parquet")
    source = TraceSource(tmp_path / "some-3")

    assert about["job"] == "some-3"
    assert source.metrics[: len(about["metrics"])] == tuple(about["metrics"])
    assert rows.column_names == ["time", "rank", *about["metrics"]]
    assert [str(t) for t in rows.schema.types] == ["timestamp[us, tz=UTC]", "int32"] + ["float"] * len(about["metrics"])
    assert rows.num_rows == np.isfinite(trace.stamps_RT).sum()
    nodes = {place["node"] for place in about["ranks"]}
    assert {path.stem for path in (tmp_path / "some-3").glob("logs/*.log")} <= nodes
    assert [label["kind"] for label in labels if label["kind"] != "benign"] == {
        True: ["fault"] * (2 if kind == "two_faults" else 1),
        False: ["not_training"] * (kind in simulate.NOT_TRAINING),
    }[kind in simulate.FAULTS]
    length_s = 0.3 * 3600
    for label in trace.labels:
        assert 0 <= label["start"] < label["end"] <= length_s
        assert set(label["nodes"]) == {about["ranks"][r]["node"] for r in label["ranks"]}
        assert label["kind"] != "fault" or label["start"] >= 0.4 * length_s
        assert not (label["nameable"] and label["kind"] != "fault")
        assert label["infrastructure"] == (label["kind"] == "fault" and kind != "user_error")


def test_same_seed_same_files_other_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        arguments = ["--out", str(tmp_path / name), "--count", "3", "--seed", seed, "--hours", "0.35"]
        assert simulate.main([*arguments, "--kinds", "hang", "slow_cpu", "harmless_lines"]) == 0
    contents = [
        {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*") if path.is_file()}
        for name in "abc"
    ]
    assert contents[0] == contents[1]
    folders = {path.parts[0] for path in contents[0]}
    assert folders == {"hang-0", "slow_cpu-0", "harmless_lines-0"}
    assert all(contents[0][Path(f) / "metrics.parquet"] != contents[2][Path(f) / "metrics.parquet"] for f in folders)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("kind", ["slow_gpu", "silent_slow", "nic_degraded", "slow_cpu", "pcie_degraded"])
def test_one_slow_rank_lowers_everybodys_traffic_alike(kind: str, groups: int) -> None:
    trace = _familiar(kind, groups)
    for metric in ("ib_transmit_bytes_per_second", "ib_receive_bytes_per_second"):
        culprit, others = _change(trace, metric)
        assert others < 0.95
        assert culprit == pytest.approx(others, rel=0.03)


def test_a_slow_gpu_shows_in_clock_power_heat_and_the_waits_of_others() -> None:
    trace = _familiar("slow_gpu", 1)
    before, after, culprits, others = _around(trace)
    clock, others_clock = _change(trace, "gpu_sm_clock_hertz")
    assert 0.55 <= clock <= 0.78
    assert others_clock == pytest.approx(1.0, abs=1e-3)
    power, others_power = _change(trace, "gpu_power_watts")
    assert power < 0.95 * others_power
    warmer = _column(trace, "gpu_temperature_celsius")
    assert warmer[culprits, after].mean() > warmer[culprits, before].mean()
    assert warmer[others, after].mean() < warmer[others, before].mean()
    tensor, others_tensor = _change(trace, "gpu_tensor_active_ratio")
    assert tensor > 1 > others_tensor


def test_a_bad_link_shows_at_its_own_port_only() -> None:
    trace = _familiar("nic_degraded", 1)
    waits, others_waits = _change(trace, "ib_transmit_wait_ratio")
    assert waits > 20 * others_waits
    culprit, others = _change(trace, "gpu_power_watts")
    assert culprit == pytest.approx(others, rel=0.02)


def test_bytes_a_step_do_not_depend_on_how_slow_the_step_is() -> None:
    trace = simulate.simulate("network_congested", 1, 1.0, True, ("ib_transmit_bytes_per_second", "train_step_seconds"))
    before, after, _, everybody = _around(trace)
    per_step = [
        np.nanmean(_column(trace, "ib_transmit_bytes_per_second")[everybody, rows])
        * np.nanmean(_column(trace, "train_step_seconds")[everybody, rows])
        for rows in (before, after)
    ]
    steps = [np.nanmean(_column(trace, "train_step_seconds")[everybody, rows]) for rows in (before, after)]
    assert steps[1] > 1.15 * steps[0]
    assert per_step[1] == pytest.approx(per_step[0], rel=0.03)


def test_a_hang_leaves_the_dead_idle_and_the_others_busy_waiting() -> None:
    trace = _familiar("hang", 1)
    _, after, culprits, others = _around(trace)
    for metric, dead, waiting, within in (
        ("gpu_utilization_ratio", 0.0, 1.0, 0.02),
        ("gpu_tensor_active_ratio", 0.0, 0.0, 1e-3),
        ("gpu_power_watts", 62.0, 156.0, 3.0),
        ("ib_transmit_bytes_per_second", 2e4, 2e4, 1e3),
    ):
        x = _column(trace, metric)
        assert x[culprits, after].mean() == pytest.approx(dead, abs=within)
        assert x[others, after].mean() == pytest.approx(waiting, abs=within)


def test_temperature_follows_power_within_about_a_minute() -> None:
    trace = _familiar("hang", 1)
    start = trace.labels[0]["start"]
    step = trace.about["interval_seconds"]
    heat = _column(trace, "gpu_temperature_celsius")[trace.labels[0]["ranks"][0]]
    hot, cold = heat[int(start / step) - 30 : int(start / step)].mean(), heat[-30:].mean()
    share_left = (heat[int((start + 45) / step)] - cold) / (hot - cold)
    assert 0.2 < share_left < 0.55


def test_a_lost_node_stops_reporting_and_a_silent_exporter_stops_nobody() -> None:
    lost = simulate.simulate("node_lost", 3, 1.0, True)
    _, after, culprits, others = _around(lost)
    assert np.isnan(lost.stamps_RT[culprits, after]).all()
    assert not np.isnan(lost.stamps_RT[others]).any()
    assert _column(lost, "gpu_tensor_active_ratio")[others, after].max() == 0

    silent = simulate.simulate("exporter_silent", 3, 1.0, True)
    label = next(label for label in silent.labels if label["category"] == "exporter_silent")
    rows = slice(int(label["start"] / silent.about["interval_seconds"]) + 1, int(label["end"] / silent.about["interval_seconds"]))
    dark_R = np.isnan(silent.stamps_RT[:, rows]).all(axis=1)
    assert dark_R.sum() == 8
    traffic = _column(silent, "ib_transmit_bytes_per_second")[~dark_R]
    assert np.nanmean(traffic[:, rows]) == pytest.approx(np.nanmean(traffic[:, : rows.start]), rel=0.15)


def test_rows_average_exactly_over_their_interval() -> None:
    edges = np.array([0.0, 5.0, 10.0, 12.0])
    got = simulate._averages(edges, np.array([0.0, 4.0, 6.0, 20.0]), np.array([1.0, 0.0, 3.0]))
    assert got == pytest.approx([0.8, 2.4, 3.0])


def test_work_takes_longer_while_slow_and_for_ever_when_dead() -> None:
    done = simulate._done(np.array([1.0, 0.5, 0.5, 1.0, 0.0]))
    assert simulate._advance(done, 0.5, 1.0) == pytest.approx(2.0)
    assert simulate._advance(done, 0.0, 3.0) == pytest.approx(4.0)
    assert simulate._advance(done, 0.0, 3.1) == np.inf
    assert simulate._advance(None, 7.0, 2.5) == 9.5


def test_noise_does_not_stand_out_but_a_shift_and_a_new_spread_do() -> None:
    values = 100 + np.random.default_rng(0).standard_normal((16, 400))
    mine = np.arange(16) == 5
    assert not simulate._apart(values, 200, 400, mine, ~mine)
    shifted, wild, slight = values.copy(), values.copy(), values.copy()
    shifted[5, 200:] += 4
    wild[5, 200::2] += 8
    wild[5, 201::2] -= 8
    slight[5, 200:] += 1  # many deviations of a mean of 200, and yet only 1 % of the level
    silent = values.copy()
    silent[5, 200:] = np.nan
    assert [simulate._apart(x, 200, 400, mine, ~mine) for x in (shifted, wild, slight, silent)] == [True, True, False, True]


def test_nobody_is_nameable_where_all_are_alike() -> None:
    for kind in ("hang_flat", "network_congested", "storage_slow_for_all"):
        trace = simulate.simulate(kind, 2, 1.0, True)
        label = trace.labels[0]
        assert not label["nameable"]
        before, after, _, _ = _around(trace)
        for metric in ("gpu_power_watts", "gpu_utilization_ratio", "ib_transmit_bytes_per_second"):
            x = _column(trace, metric)
            change_R = x[:, after].mean(axis=1) / x[:, before].mean(axis=1)
            assert change_R.max() / change_R.min() < 1.15
            assert change_R.mean() != pytest.approx(1.0, abs=0.01)


def test_the_mixture_has_the_shares_it_promises() -> None:
    kinds = simulate.mixture(200, 4)
    share = [sum(kind in group for kind in kinds) for group in (simulate.FAULTS, simulate.ODDITIES, simulate.NOT_TRAINING)]
    assert share == [110, 70, 20]
    assert set(kinds) == set(simulate.KINDS)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--count", "1", "--seed", "1", "--kinds", "gremlins"], "no kind 'gremlins'"),
        (["--count", "0", "--seed", "1"], "--count must be at least 1"),
        (["--count", "1", "--seed", "1", "--hours", "0.01"], "--hours 0.01 is outside"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate.main(["--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sleep-0").mkdir()
    (tmp_path / "sleep-0" / "mine").write_text("keep")
    assert simulate.main(["--out", str(tmp_path), "--count", "1", "--seed", "1", "--hours", "0.35", "--kinds", "sleep"]) == 3
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["sleep-0", "mine"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/traces here")
@pytest.mark.parametrize("kind", ["slow_gpu", "nic_degraded", "hang"])
def test_familiar_traces_have_the_levels_of_the_development_set(kind: str) -> None:
    source = TraceSource(SHARED / f"{kind}-1")
    groups = len(set(source.groups))
    ours = _familiar(kind, groups)
    labels = json.loads((SHARED / f"{kind}-1" / "labels.json").read_text())
    theirs = {r for label in labels for r in label["ranks"]}
    window = source.window(source.job, float(source.stamps_s[-1]), float(source.stamps_s[-1] - source.stamps_s[0]))
    rows = window.values_RMT.shape[2]
    before, _, _, others = _around(ours)
    peers = [r for r in range(len(source.ranks)) if r not in theirs]
    for metric, rel in (
        ("gpu_utilization_ratio", 0.02),
        ("gpu_tensor_active_ratio", 0.05),
        ("gpu_power_watts", 0.05),
        ("gpu_temperature_celsius", 0.05),
        ("ib_transmit_bytes_per_second", 0.1),
        ("ib_transmit_wait_ratio", 0.1),
    ):
        given = np.nanmean(window.values_RMT[peers, window.metrics.index(metric), 6 : int(0.4 * rows)])
        assert _column(ours, metric)[others, before].mean() == pytest.approx(given, rel=rel), metric
