"""The whole job against its own past: hangs and slow-downs of everybody are told, phases and larger batches are not."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from eagleeye.detectors import whole_job
from eagleeye.detectors.base import Score
from eagleeye.detectors.whole_job import FLAT_TOGETHER, JOB_CHANGE, SILENCE, Past
from eagleeye.window import Window

R, STEP_S, LEARNED, NOW = 6, 5.0, 120, 24
GPU = {
    "gpu_utilization_ratio": 0.95,
    "gpu_power_watts": 600.0,
    "gpu_tensor_active_ratio": 0.4,
    "ib_transmit_bytes_per_second": 2e10,
}
CPU = {"process_cpu_ratio": 1.9, "network_transmit_bytes_per_second": 4e8, "network_receive_bytes_per_second": 4e8}


def work(levels: Mapping[str, float], points: int = LEARNED + NOW, step_s: float = STEP_S, seed: int = 3) -> Window:
    """Steady work with two percent of noise that all ranks share, and one of their own."""
    rng = np.random.default_rng(seed)
    shared_MT, own_RMT = rng.standard_normal((len(levels), points)), rng.standard_normal((R, len(levels), points))
    values_RMT = np.array(list(levels.values()))[None, :, None] * (1 + 0.02 * shared_MT + 0.01 * own_RMT)
    nodes, groups = tuple(f"n{r}" for r in range(R)), ("",) * R
    stamp_s = 1_700_000_000.0 + step_s * points
    return Window("j", tuple(range(R)), nodes, groups, tuple(levels), stamp_s, step_s, values_RMT.astype(np.float32))


def learned(window: Window) -> Past:
    return whole_job.learn(window.before(window.end_s - NOW * window.step_s))


def bent(window: Window, factors: Mapping[str, float], points: int = NOW) -> Window:
    """The window whose last `points` instants are multiplied by a factor for each metric, on every rank."""
    values_RMT = window.values_RMT.copy()
    for metric, factor in factors.items():
        values_RMT[:, window.metrics.index(metric), values_RMT.shape[2] - points :] *= factor
    return replace(window, values_RMT=values_RMT)


def said(window: Window, past: Past | None = None) -> dict[str, Score]:
    return {s.detector: s for s in whole_job.scores(past or learned(window), window)}


HANG = {"gpu_utilization_ratio": 1.05, "gpu_power_watts": 0.35, "gpu_tensor_active_ratio": 0.0, "ib_transmit_bytes_per_second": 0}
SLOW = {"gpu_power_watts": 0.9, "gpu_tensor_active_ratio": 0.7, "ib_transmit_bytes_per_second": 0.7}
PAUSE = HANG | {"gpu_utilization_ratio": 0.02}
EVALUATION = {"gpu_utilization_ratio": 0.8, "gpu_tensor_active_ratio": 0.7, "ib_transmit_bytes_per_second": 0.01}


@pytest.mark.parametrize("levels", [GPU, CPU])
def test_usual_work_is_nothing(levels: dict[str, float]) -> None:
    for seed in range(5):
        window = work(levels, seed=seed)
        found = said(window)
        assert found[JOB_CHANGE].fired is False
        assert (found[FLAT_TOGETHER].fired, found[SILENCE].fired) == (None, None)
        assert whole_job.phase(learned(window), window) is None
        assert whole_job.unfamiliar(learned(window), window) == {}


def test_ranks_that_spin_without_work_hang_together() -> None:
    for points in (1, 2, 3, NOW):
        score = said(bent(work(GPU), HANG, points))[FLAT_TOGETHER]
        np.testing.assert_allclose(score.score_R, points / 2)
        assert score.fired is (points > 2)


@pytest.mark.parametrize("part", ["gpu_power_watts", "gpu_tensor_active_ratio", "ib_transmit_bytes_per_second"])
def test_who_takes_power_computes_or_sends_does_not_hang(part: str) -> None:
    found = said(bent(work(GPU), HANG | {part: 1.0}))[FLAT_TOGETHER]
    assert found.fired is None
    assert found.abstained in ("the job does not spin", "the job computes or sends")


def test_a_pause_is_no_hang() -> None:
    window = bent(work(GPU), PAUSE)
    assert said(window)[FLAT_TOGETHER].abstained == "the job does not spin"
    assert said(window)[JOB_CHANGE].abstained == "the job pauses, or did a moment ago"
    assert str(whole_job.phase(learned(window), window)).startswith("the job pauses: GPUs are used 2% of what is usual")


def test_a_job_that_was_flat_before_must_be_flat_for_twice_as_long() -> None:
    past = learned(bent(work(GPU), HANG, NOW + 5))
    assert past.flat_points == 5
    for points in (10, 11):
        window = bent(work(GPU), HANG, points)
        np.testing.assert_allclose(said(window, past)[FLAT_TOGETHER].score_R, points / 10)


@pytest.mark.parametrize("factor", [0.5, 0.7, 0.85])
def test_everybody_slower_is_a_change_of_the_job(factor: float) -> None:
    rates = {"gpu_tensor_active_ratio": factor, "ib_transmit_bytes_per_second": factor}
    found = said(bent(work(GPU), {"gpu_power_watts": 0.9} | rates))
    assert found[JOB_CHANGE].fired is True
    assert len(set(found[JOB_CHANGE].score_R)) == 1, "it tells no rank from another"
    assert found[FLAT_TOGETHER].fired is None


def test_what_is_smaller_than_the_past_can_tell_is_left_alone() -> None:
    """A past of 600 s knows nothing of less than 0.06."""
    assert learned(work(GPU)).least_change == pytest.approx(0.3 * whole_job.YOUNG_S / 600)
    assert said(bent(work(GPU), dict.fromkeys(SLOW, 0.97)))[JOB_CHANGE].fired is False


def test_faster_is_no_slow_down() -> None:
    assert said(bent(work(GPU), dict.fromkeys(SLOW, 1.5)))[JOB_CHANGE].fired is False


def test_only_what_falls_together_is_a_slower_pace() -> None:
    """A larger batch computes as much as before and sends less."""
    assert said(bent(work(GPU), {"ib_transmit_bytes_per_second": 0.6}))[JOB_CHANGE].fired is False
    apart = {"ib_transmit_bytes_per_second": 0.1, "gpu_tensor_active_ratio": 0.5}
    job = bent(work(GPU, points=LEARNED + 60), apart, 60)
    past = whole_job.learn(job.before(job.end_s - 60 * STEP_S))
    assert said(job, past)[JOB_CHANGE].fired is False, "both fell, but not by one ratio"


def test_a_slow_down_that_is_over_is_told_no_more() -> None:
    """At the latest when the newest half of the longest horizon knows nothing of it."""
    healthy, still = work(GPU, points=LEARNED + 80), whole_job.HORIZONS[-1] // 2
    past = whole_job.learn(healthy.before(healthy.end_s - 80 * STEP_S))
    values_RMT = healthy.values_RMT.copy()
    for metric in SLOW:
        values_RMT[:, healthy.metrics.index(metric), LEARNED : LEARNED + 16] *= SLOW[metric]
    job = replace(healthy, values_RMT=values_RMT)
    fired = [said(job.before(job.end_s - (80 - t) * STEP_S), past)[JOB_CHANGE].fired for t in range(81)]
    assert fired[16]
    assert not any(fired[:1])
    assert not any(fired[16 + still :])


def test_an_evaluation_is_a_phase_and_no_alarm() -> None:
    window = bent(work(GPU), EVALUATION)
    past = learned(window)
    assert str(whole_job.phase(past, window)).startswith(
        "the job seems to evaluate: GPUs are used 81% of what is usual, ib_trans"
    )
    found = said(window, past)
    assert (found[FLAT_TOGETHER].fired, found[JOB_CHANGE].fired) == (None, False)
    assert whole_job.phase(past, bent(work(GPU), SLOW)) is None, "a slow job is in no phase of its own"


def test_without_gpus_nobody_can_tell_a_phase() -> None:
    window = bent(work(CPU), dict.fromkeys(CPU, 0.01))
    assert whole_job.phase(learned(window), window) is None
    assert said(window)[FLAT_TOGETHER].abstained == "needs utilization and a rate of work"


def test_on_processors_a_larger_batch_is_told_from_waiting() -> None:
    traffic = {"network_transmit_bytes_per_second": 0.6, "network_receive_bytes_per_second": 0.6}
    assert said(bent(work(CPU), traffic))[JOB_CHANGE].fired is False
    assert said(bent(work(CPU), traffic | {"process_cpu_ratio": 1.05}))[JOB_CHANGE].fired is False
    assert said(bent(work(CPU), traffic | {"process_cpu_ratio": 0.9}))[JOB_CHANGE].fired is False
    assert said(bent(work(CPU), traffic | {"process_cpu_ratio": 0.6}))[JOB_CHANGE].fired is True


def test_longer_steps_are_a_slower_pace() -> None:
    levels = {"gpu_utilization_ratio": 0.95, "train_step_seconds": 2.0}
    assert said(bent(work(levels), {"train_step_seconds": 1.5}))[JOB_CHANGE].fired is True
    assert said(bent(work(levels), {"train_step_seconds": 0.7}))[JOB_CHANGE].fired is False


def silenced(window: Window, ranks: int, points: int) -> Window:
    values_RMT = window.values_RMT.copy()
    values_RMT[:ranks, :, -points:] = math.nan
    return replace(window, values_RMT=values_RMT)


def test_who_fell_silent_is_told_only_while_the_job_stands_still() -> None:
    standing, working = bent(work(GPU), HANG, 4), work(GPU)
    past = learned(working)
    found = said(silenced(standing, 1, 4), past)[SILENCE]
    assert found.score_R[0] == 2.0
    assert np.isnan(found.score_R[1:]).all()
    assert found.evidence == ("silent", "", "", "", "", "")
    assert said(silenced(working, 1, 4), past)[SILENCE].fired is False, "an exporter that broke"
    assert said(silenced(standing, 0, 4), past)[SILENCE].fired is None
    assert said(silenced(standing, 4, 4), past)[SILENCE].abstained == "nobody fell silent, or too many did"
    assert said(silenced(standing, 1, 100), past)[SILENCE].fired is None, "it was hardly heard before"


def test_levels_that_were_never_seen_are_unfamiliar_and_say_how_much_they_grew() -> None:
    window = bent(work(GPU), {"gpu_power_watts": 1.5, "ib_transmit_bytes_per_second": 0.1})
    found = whole_job.unfamiliar(learned(window), window)
    assert set(found) == {"gpu_power_watts", "ib_transmit_bytes_per_second"}
    assert found["gpu_power_watts"] == pytest.approx(1.5 / 1.05, rel=0.05), "by its learned high"
    assert found["ib_transmit_bytes_per_second"] == 1.0, "what fell did not grow"
    nothing = silenced(window, R, 3)
    assert whole_job.unfamiliar(learned(window), nothing) == {}


def test_what_was_not_measured_is_not_guessed() -> None:
    window = work({"gpu_temperature_celsius": 60.0})
    past = learned(window)
    found = said(window, past)
    assert found[JOB_CHANGE].abstained == "no rate of work was measured for long enough"
    assert found[FLAT_TOGETHER].abstained == "needs utilization and a rate of work"
    assert whole_job.phase(past, window) is None
    short = work(GPU, points=NOW + 8)
    assert said(short)[JOB_CHANGE].fired is None
    unseen = silenced(work(GPU), R, 60)
    assert said(unseen, learned(work(GPU)))[JOB_CHANGE].fired is None


def test_processors_that_nobody_saw_prove_no_waiting() -> None:
    window = bent(work(CPU), {"network_transmit_bytes_per_second": 0.6, "network_receive_bytes_per_second": 0.6})
    values_RMT = window.values_RMT.copy()
    values_RMT[:, 0, -4:] = math.nan
    assert said(replace(window, values_RMT=values_RMT), learned(window))[JOB_CHANGE].fired is False


def test_a_burst_is_no_slow_down_and_what_lasts_is() -> None:
    window = work(GPU)
    for points in (6, 12):
        burst = window.values_RMT.copy()
        at = burst.shape[2] - points
        burst[:, 1:, at : at + 2] *= 0.5
        late = said(replace(window, values_RMT=burst), learned(window))[JOB_CHANGE].score_R
        assert np.nanmax(late) < 1.0, points
    lasting = said(bent(window, SLOW, points=12), learned(window))[JOB_CHANGE].score_R
    assert np.nanmin(lasting) > 1.0


def test_a_slow_down_must_go_beyond_the_slowest_moments_of_the_past() -> None:
    window = work(GPU)
    uneven = window.values_RMT.copy()
    for at in range(10, LEARNED - 10, 20):
        uneven[:, 1:, at : at + 6] *= 0.8
    past = learned(replace(window, values_RMT=uneven))
    now = bent(window, dict.fromkeys(SLOW, 0.85), points=6)
    assert np.nanmax(said(now, learned(window))[JOB_CHANGE].score_R) > 1.0
    assert np.nanmax(said(now, past)[JOB_CHANGE].score_R) < 1.0


def test_the_time_of_the_last_step_does_not_hide_a_hang() -> None:
    """It is told until the next one has ended, however long that takes."""
    window = bent(work(GPU | {"train_step_seconds": 2.0}), HANG)
    assert np.nanmin(said(window)[FLAT_TOGETHER].score_R) > 1.0
