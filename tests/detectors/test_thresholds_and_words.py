"""From distances to scores, and from scores to words."""

import numpy as np
import pytest

from eagleeye.detectors import diagnosis
from eagleeye.detectors.base import Score
from eagleeye.detectors.thresholds import LARGEST_SLOPE, LEAST_SLOPE, Tail, fit_tail, threshold_M
from eagleeye.records import Category


def test_a_threshold_is_twice_the_largest_normal_value():
    found = threshold_M([np.array([[1.0, 9.0], [4.0, np.nan]]), np.array([[2.0, 3.0]])], floor=5.0)
    np.testing.assert_array_equal(found, [8.0, 18.0])


def test_a_threshold_has_a_floor_and_unknown_counts_as_nothing():
    np.testing.assert_array_equal(threshold_M([np.array([[1.0, np.nan]])], floor=5.0), [5.0, 5.0])


def test_the_worst_metric_speaks_for_a_rank():
    score = Score.by_worst_metric("d", np.array([[0.2, 0.9], [np.nan, np.nan], [3.0, np.nan]]), ("a", "b"))
    np.testing.assert_array_equal(score.score_R, [0.9, np.nan, 3.0])
    assert score.evidence == ("b", "", "a")
    assert score.fired is True


@pytest.mark.parametrize(
    ("evidence", "category"),
    [
        (["gpu_sm_clock_hertz", "gpu_power_watts", "ib_transmit_bytes_per_second"], Category.GPU),
        (["ib_transmit_wait_ratio", "ib_transmit_bytes_per_second"], Category.NETWORK),
        (["ib_transmit_bytes_per_second"], Category.NETWORK),
        (["process_cpu_ratio"], Category.NODE),
        (["storage_read_seconds"], Category.STORAGE),
        (["never_seen"], Category.UNKNOWN),
        (["", ""], Category.UNKNOWN),
    ],
)
def test_evidence_points_to_a_category(evidence, category):
    assert diagnosis.category(evidence) is category


def test_words_compare_a_rank_with_its_peers(job, alter):
    window = alter(job(ranks=4), lambda values_RMT: values_RMT[1, 0].fill(100.0))
    words = diagnosis.describe(window, 1, ["gpu_power_watts", "gpu_power_watts", "absent", ""])
    assert words.startswith("gpu_power_watts 100 W (peers ")
    assert words.count("peers") == 1


def test_a_tail_says_how_improbable_a_score_is():
    tail = Tail(share=0.02, slope=0.1)
    log_p = tail.log_p(np.array([-1.0, 0.0, Tail.START, Tail.START + 0.1, Tail.START + 0.3, np.nan]))
    np.testing.assert_allclose(log_p, [0.0, 0.0, 0.0, np.log(0.02) - 1.0, np.log(0.02) - 3.0, np.nan])


def test_a_tail_is_as_long_as_the_largest_tenth_of_normal_scores():
    """Quantile 0.9 of 0 to 0.5 is 0.45, and what lies beyond it lies 0.025 beyond on average: less than is believed."""
    assert fit_tail(np.linspace(0.0, 0.5, 1001), 1).slope == LEAST_SLOPE
    assert fit_tail(np.linspace(0.0, 1.6, 1001), 1).slope == pytest.approx(0.08, abs=1e-6)
    assert fit_tail(np.linspace(0.0, 50.0, 1001), 1).slope == LARGEST_SLOPE


def test_a_tail_knows_how_little_was_seen():
    """One more observation than there were might have exceeded all; scores that share instants are one observation."""
    scores_N = np.linspace(0.0, 0.5, 99)
    assert fit_tail(scores_N, 1).share == pytest.approx(1 / 100)
    assert fit_tail(scores_N, 11).share == pytest.approx(1 / 10)
    assert fit_tail(np.append(scores_N, [np.nan] * 50), 1) == fit_tail(scores_N, 1), "not judged is not seen"
    assert fit_tail(np.full(5, np.nan), 1) == fit_tail(np.empty(0), 4) == Tail()
