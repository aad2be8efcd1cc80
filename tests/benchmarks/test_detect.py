"""The benchmark of detection: its arithmetic, a small run of each part, and the committed figures against the targets."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import detect
import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_growth_exponent_is_the_power(power: float) -> None:
    sizes = np.array([64, 512, 4096])
    assert detect.growth_exponent(sizes, 3e-4 * sizes**power) == pytest.approx(power)


def test_a_spread_shows_the_median_and_both_ends() -> None:
    found = detect.spread("seconds", [3.0, 1.0, 2.00004])
    assert found == {"seconds": 2.0, "seconds_spread": {"least": 1.0, "largest": 3.0, "runs": 3}}


def test_the_job_is_what_the_page_says() -> None:
    window = detect.job(16, 180)
    assert window.values_RMT.shape == (16, 8, 180)
    assert np.isnan(window.values_RMT).mean() == pytest.approx(0.01, rel=0.2)
    levels_M = np.nanmedian(window.values_RMT, axis=(0, 2))
    assert dict(zip(window.metrics, levels_M, strict=True))["gpu_power_watts"] == pytest.approx(550, rel=0.05)


def test_suspicion_is_the_kth_distance_to_other_nodes() -> None:
    distance_RR = np.abs(np.subtract.outer([0.0, 1.0, 2.0, 4.0, 8.0], [0.0, 1.0, 2.0, 4.0, 8.0]))
    found_R = detect.suspicion_R(distance_RR[:, :, None], ("a", "a", "b", "c", "d"), 2)
    np.testing.assert_array_equal(found_R, [4.0, 3.0, 2.0, 3.0, 6.0])


def test_agreement_notices_a_swap_among_the_first_ten() -> None:
    ours_R = np.linspace(1.0, 2.0, 100)
    assert detect.agreement(ours_R, ours_R**3) == (pytest.approx(1.0), True)
    swapped_R = ours_R.copy()
    swapped_R[[91, 92]] = swapped_R[[92, 91]]
    correlation, same = detect.agreement(ours_R, swapped_R)
    assert 0.99 < correlation < 1.0
    assert not same
    assert detect.agreement(ours_R, -ours_R)[0] == pytest.approx(-1.0)


@pytest.mark.jit
def test_one_tick_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "detect.py"), "--tick", "64"], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["ranks"] == 64
    assert found["seconds_spread"]["runs"] >= 5
    assert 0 < found["seconds_spread"]["least"] <= found["seconds"] <= found["seconds_spread"]["largest"]
    assert 50 < found["peak_rss_mib"] < 2048
    # a healthy job keeps to itself what only hangs and lost ranks bring out; everybody else judged every rank
    assert set(found["abstained"]) <= {"flat_together", "silence"}
    assert found["faulty_seconds"] > 0


def test_a_month_comes_in_pieces_that_follow_one_another() -> None:
    pieces = [window for window, excluded in detect.month(ranks=8, days=0.25, piece_s=300.0) if excluded is None]
    assert len(pieces) == 72
    assert {window.values_RMT.shape for window in pieces} == {(8, 8, 20)}
    assert all(b.end_s - a.end_s == 300.0 for a, b in itertools.pairwise(pieces))
    boards_RM = np.stack([window.values_RMT.mean(axis=2) for window in pieces])
    assert np.corrcoef(boards_RM[0, :, 0], boards_RM[-1, :, 0])[0, 1] > 0.8, "boards differ for ever, not anew in each piece"


@pytest.mark.jit
@pytest.mark.slow
def test_training_on_a_day() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "detect.py"), "--train", "1"], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["ranks"], found["days"], found["windows"], found["hours_held"]) == (64, 1.0, 288, 24.0)


@pytest.mark.jit
def test_a_replay_of_some_minutes() -> None:
    found = detect.replays(ranks=8, points=60, runs=2)
    assert found["replay_ticks_per_second"] > 0
    assert found["replay_ticks_per_second_spread"]["runs"] == 2


@pytest.mark.jit
@pytest.mark.slow
def test_ours_and_all_pairs_name_the_same_ten() -> None:
    found = detect.against_tslearn(ranks=320, windows=2)
    assert found["dtw_rank_correlation_320"] == pytest.approx(1.0)
    assert found["dtw_top10_identical_320"] is True
    assert found["dtw_speedup_320"] > 10


@pytest.mark.jit
def test_references_name_whom_all_pairs_name() -> None:
    found = detect.against_ourselves(ranks=600, windows=5)
    assert found["reference_top1_identical_600"] is True
    assert 0.5 < found["reference_rank_correlation_600"] < 1.0


@pytest.mark.jit
@pytest.mark.slow
def test_the_newest_column_is_cheaper_than_a_whole_profile() -> None:
    assert detect.against_stumpy(ranks=4, pairs=2)["profile_speedup"] > 10


def test_the_committed_figures_meet_the_targets() -> None:
    found = json.loads((BENCHMARKS / "results" / "detect.json").read_text(encoding="utf-8"))
    assert {"commit", "machine", "profile_speedup"} <= set(found)
    assert [tick["ranks"] for tick in found["ticks"]] == [64, 512, 4096, 16384]
    assert all(tick["seconds_spread"]["runs"] >= 5 for tick in found["ticks"])
    largest = found["ticks"][-1]
    assert largest["seconds"] <= 10
    assert largest["peak_rss_mib"] <= 2048
    assert found["growth_exponent"] <= 1.1
    assert found["dtw_speedup_512"] >= 50
    assert found["dtw_rank_correlation_512"] >= 0.95
    assert found["dtw_top10_identical_512"] is True
    assert found["replay_ticks_per_second"] >= 50
    assert found["profile_speedup"] > 1
    assert (found["train"]["ranks"], found["train"]["days"]) == (64, 30)
    assert found["train"]["peak_rss_mib"] < 1.25 * found["train_half"]["peak_rss_mib"]
