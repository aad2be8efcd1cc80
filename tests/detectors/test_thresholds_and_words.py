"""From distances to scores, and from scores to words."""

import numpy as np
import pytest

from eagleeye.detectors import diagnosis
from eagleeye.detectors.base import Score
from eagleeye.detectors.thresholds import threshold_M
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
