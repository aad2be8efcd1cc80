"""VUS-PR against areas computed by hand, and against what any such measure must do."""

import numpy as np
import pytest

from eagleeye.offline.point_series import vus_pr


@pytest.fixture
def label():
    label_T = np.zeros(1000, dtype=int)
    label_T[300:340] = label_T[700:750] = 1
    return label_T


@pytest.mark.parametrize(
    ("score", "labels", "buffer", "area"),
    [
        # marked first: precision 1 until recall 1
        ([1, 3, 2], [0, 1, 0], 0, 1.0),
        # marked second: recall 1 at precision 1/2
        ([3, 2, 1], [0, 1, 0], 0, 0.5),
        # a buffer of 1 has half a sample on either side, which is none
        ([3, 2, 1], [0, 1, 0], 1, 0.5),
        # a buffer of 2 gives its neighbours r = sqrt(1/2): of (1 + 1 + 2r) / 2 = 1 + r positives r, then 1 + r are marked, at
        # precision r and (1 + r) / 2: area (r * r + (1 + r) / 2) / (1 + r) = 1 - r / 2 + ... = .79289; trapezoids over 0, 1, 2
        ([3, 2, 1], [0, 1, 0], 2, (0.5 + (0.5 + 0.7928932188134525) / 2) / 2),
        # two anomalies: recall is halved until the second exists: (.25, 1), (.25, .5), (1, 2/3)
        ([4, 3, 2, 1], [1, 0, 1, 0], 0, 0.25 * 1 + 0.75 * 2 / 3),
        # equal scores are one threshold: recall 1 at precision 1/3
        ([1, 1, 1], [0, 1, 0], 0, 1 / 3),
    ],
)
def test_by_hand(score, labels, buffer, area):
    assert vus_pr(score, labels, buffer) == pytest.approx(area, abs=1e-12)


def test_a_perfect_score_reaches_nearly_one(label):
    assert vus_pr(label, label, 0) == 1.0
    assert vus_pr(label, label, 20) > 0.9
    # a score that tapers off as the tolerance does gets everything
    distance_T = np.min(np.abs(np.arange(1000)[:, None] - np.flatnonzero(label)), axis=1)
    assert vus_pr(-distance_T, label, 20) > 0.999


def test_a_score_without_information_reaches_the_share_of_anomalies(label):
    rng = np.random.default_rng(0)
    reached = np.mean([vus_pr(rng.random(1000), label, 0) for _ in range(200)])
    # recall with the existence reward is a little below plain recall, precision at few marks a little noisy
    assert reached == pytest.approx(label.mean(), abs=0.02)


def test_a_late_score_is_worse_the_later_it_is(label):
    rng = np.random.default_rng(0)
    noise = 0.01 * rng.random(1000)
    reached = [vus_pr(np.roll(label, lag) + noise, label, 20) for lag in (0, 2, 5, 10, 20, 40)]
    assert reached == sorted(reached, reverse=True)
    assert reached[0] > 0.9
    assert reached[-1] < 0.2


def test_no_point_adjustment(label):
    """One marked point of each anomaly would be full marks under point adjustment."""
    once = np.zeros(1000)
    once[[310, 720]] = 1
    assert vus_pr(once, label, 20) < 0.25


def test_a_small_lag_costs_less_the_larger_the_buffer(label):
    late = np.roll(label, 3)
    assert vus_pr(late, label, 20) > vus_pr(late, label, 0)


def test_only_the_order_of_scores_counts(label):
    score_T = np.random.default_rng(1).random(1000) + label
    assert vus_pr(score_T, label, 10) == vus_pr(np.exp(3 * score_T), label.astype(bool), 10)


def test_a_buffer_longer_than_the_series():
    assert 0 < vus_pr([1, 2, 3], [0, 0, 1], 50) <= 1


@pytest.mark.parametrize(
    ("score", "labels", "buffer", "why"),
    [
        ([1, 2], [1], 0, "do not fit"),
        ([1, np.nan], [1, 0], 0, "not finite"),
        ([1, 2], [0, 0], 0, "nothing is labelled"),
        ([1, 2], [0, 1], -1, "negative"),
    ],
)
def test_what_cannot_be_judged(score, labels, buffer, why):
    with pytest.raises(ValueError, match=why):
        vus_pr(score, labels, buffer)
