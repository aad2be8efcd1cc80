"""Our kernels against obvious code, and against the libraries that they replace."""

import math

import numpy as np
import pytest

from eagleeye.detectors import knn_dtw, matrix_profile


def naive_dtw(a, b, band):
    """The textbook recursion over a full table."""
    cost = {(-1, -1): 0.0}
    for i in range(len(a)):
        for j in range(len(b)):
            if abs(i - j) <= band:
                before = min(cost.get((i - 1, j), math.inf), cost.get((i, j - 1), math.inf), cost.get((i - 1, j - 1), math.inf))
                cost[i, j] = (a[i] - b[j]) ** 2 + before
    return math.sqrt(cost[len(a) - 1, len(b) - 1])


def naive_left_profile(series, m, k):
    """Sort the distances to all earlier stretches that do not overlap the last one."""
    query = series[len(series) - m :]
    distances = sorted(float(np.linalg.norm(series[i : i + m] - query)) for i in range(len(series) - 2 * m + 1))
    return distances[k - 1]


@pytest.fixture
def values_RMT():
    return np.random.default_rng(3).normal(0, 2, (5, 3, 40)).astype(np.float32)


@pytest.mark.parametrize("band", [0, 2, 5])
def test_distances_equal_the_textbook_recursion(values_RMT, band):
    found_RRM = knn_dtw.distances_RRM(values_RMT[:, :, :12], ("g",) * 5, band)
    for i in range(5):
        for j in range(5):
            for m in range(3):
                if i != j:
                    a, b = values_RMT[i, m, :12].astype(float), values_RMT[j, m, :12].astype(float)
                    assert found_RRM[i, j, m] == pytest.approx(naive_dtw(a, b, band), rel=1e-12)


def test_ranks_of_other_groups_are_infinitely_far(values_RMT):
    found_RRM = knn_dtw.distances_RRM(values_RMT, ("a", "a", "b", "b", "b"), 2)
    assert np.isinf(found_RRM[0, 2]).all()
    assert np.isfinite(found_RRM[0, 1]).all()
    assert np.isfinite(found_RRM[2, 4]).all()


def test_a_rank_of_nan_is_infinitely_far(values_RMT):
    values_RMT[1, 2, 5] = np.nan
    found_RRM = knn_dtw.distances_RRM(values_RMT, ("g",) * 5, 2)
    assert np.isinf(found_RRM[1, :, 2]).all()
    assert np.isfinite(found_RRM[1, 0, 1])
    assert np.isfinite(found_RRM[0, 2]).all()


@pytest.mark.parametrize(("m", "k"), [(6, 1), (6, 3), (4, 7)])
def test_left_profile_equals_sorted_distances(values_RMT, m, k):
    found_RM = matrix_profile.left_profile_RM(values_RMT, m, k)
    expected = [[naive_left_profile(values_RMT[r, c].astype(float), m, k) for c in range(3)] for r in range(5)]
    np.testing.assert_allclose(found_RM, expected, rtol=1e-12)


def test_left_profile_of_a_gap_is_unknown(values_RMT):
    values_RMT[2, 1, 0] = np.nan
    found_RM = matrix_profile.left_profile_RM(values_RMT, 6, 3)
    assert np.isnan(found_RM[2, 1])
    assert np.isfinite(np.delete(found_RM.ravel(), 2 * 3 + 1)).all()


@pytest.mark.jit
@pytest.mark.slow
def test_dtw_equals_tslearn(values_RMT):
    assert knn_dtw.check_kernel(values_RMT[:, :, :12], 2) < 1e-12


@pytest.mark.jit
@pytest.mark.slow
def test_left_profile_equals_stumpy(values_RMT):
    assert matrix_profile.check_kernel(values_RMT, 6, 3) < 1e-7
