"""Evidence against a rank: its arithmetic, its patience, its knob, and how seldom it errs where nothing is wrong."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from eagleeye.detectors.base import Score
from eagleeye.detectors.thresholds import Tail
from eagleeye.online.evidence import FORGET_TICKS, Evidence, needed

NAME = "peer_deviation"
TAIL = Tail(share=0.01, slope=0.1)


def add(
    evidence: Evidence, values: Sequence[float], tail: Tail = TAIL, lanes: int = 1, tick_s: float = 5.0, patience: float = 1.0
) -> NDArray[np.float64]:
    said = Score(NAME, np.array(values, dtype=np.float64), None, ("",) * len(values))
    return evidence.add([said], {NAME: tail}, {NAME: lanes}, tick_s, patience)[0].score_R


def ticks_until(
    value: float,
    *,
    false_alarms: float = 1.0,
    confirm_s: float = 10.0,
    tick_s: float = 5.0,
    patience: float = 1.0,
    lanes: int = 1,
) -> int:
    evidence = Evidence(false_alarms, confirm_s)
    return next(
        (tick for tick in range(1, 1000) if add(evidence, [value], lanes=lanes, tick_s=tick_s, patience=patience)[0] > 1.0), 0
    )


def test_what_is_needed_is_the_number_of_looks_between_two_false_alarms() -> None:
    assert needed(1.0, 5.0) == pytest.approx(math.log(1000 * 86400 / 5))
    assert needed(10.0, 5.0) == pytest.approx(needed(1.0, 5.0) - math.log(10))
    assert needed(1.0, 1.0) > needed(1.0, 5.0), "who looks oftener errs oftener"


def test_one_tick_by_hand() -> None:
    """p = 0.01 exp(-0.2 / 0.1), e = 0.3 p^-0.7."""
    log_p = math.log(0.01) - 2.0
    expected = (math.log(0.3) - 0.7 * log_p) / needed(1.0, 5.0)
    assert 0.2 < expected < 1 / 3, "below what a single tick may add, so that the arithmetic shows"
    evidence = Evidence(1.0, 10.0)
    assert add(evidence, [0.7])[0] == pytest.approx(expected)
    assert add(evidence, [0.7])[0] == pytest.approx(2 * expected)


def test_several_products_count_by_their_mean() -> None:
    """Of two lanes one has e and the other 1, then both have e."""
    gain = math.log(0.3) - 0.7 * (math.log(0.01) - 2.0)
    evidence = Evidence(1.0, 10.0)
    first = add(evidence, [0.7], lanes=2)[0]
    second = add(evidence, [0.7], lanes=2)[0]
    assert first == pytest.approx(math.log((math.exp(gain) + 1) / 2) / needed(1.0, 5.0))
    assert second == pytest.approx(gain / needed(1.0, 5.0))


def test_what_normal_work_shows_too_is_no_evidence_however_long_it_lasts() -> None:
    evidence = Evidence(1e6, 0.0)
    for _ in range(500):
        found = add(evidence, [Tail.START, 0.0])
    np.testing.assert_array_equal(found, [0.0, 0.0])
    assert ticks_until(Tail.START + 0.01) > 0, "what lies just beyond is"


@pytest.mark.parametrize(
    ("confirm_s", "tick_s", "ticks"),
    [(10.0, 5.0, 3), (10.0, 10.0, 2), (10.0, 30.0, 2), (0.0, 5.0, 2), (30.0, 5.0, 7), (10.0, 1.0, 11)],
)
def test_even_a_dead_rank_is_confirmed(confirm_s: float, tick_s: float, ticks: int) -> None:
    """From the first tick that shows it, `confirm_s` go by, and never a single tick is enough."""
    assert ticks_until(1e9, confirm_s=confirm_s, tick_s=tick_s) == ticks


def test_patience_is_so_many_times_the_confirmation() -> None:
    assert [ticks_until(9.0, patience=patience) for patience in (1.0, 3.0)] == [3, 7]


def test_mild_evidence_needs_more_ticks_than_strong() -> None:
    ticks = [ticks_until(value) for value in (0.55, 0.8, 9.0)]
    assert ticks[0] > ticks[1] > ticks[2] == 3
    assert ticks_until(0.55, lanes=4) > ticks_until(0.55), "what its neighbours in time repeat counts once"


def test_the_knob_trades_false_alarms_for_time() -> None:
    ticks = [ticks_until(0.52, false_alarms=rate) for rate in (1e-3, 1.0, 1e3, 1e6)]
    assert ticks == sorted(ticks, reverse=True)
    assert ticks[0] > ticks[-1] >= 2
    assert {ticks_until(9.0, false_alarms=rate) for rate in (1e-3, 1.0, 1e6)} == {3}, "a dead rank waits for none of it"


def test_an_alarm_ends_soon_after_its_cause_and_what_was_held_is_let_go() -> None:
    evidence = Evidence(1.0, 10.0)
    for _ in range(1000):
        held = add(evidence, [9.0])
    assert held[0] > 1.0
    after = [add(evidence, [0.0])[0] for _ in range(2 * FORGET_TICKS)]
    assert after[1] <= 1.0 < held[0], "two ticks"
    assert after[FORGET_TICKS + 1] == 0.0


def test_who_is_not_heard_is_neither_accused_nor_forgotten() -> None:
    evidence = Evidence(1.0, 10.0)
    before = add(evidence, [0.7, 0.7])
    for _ in range(20):
        silent = add(evidence, [math.nan, 0.0])
    assert math.isnan(silent[0])
    assert silent[1] == 0.0
    after = add(evidence, [0.7, 0.0])
    assert after[0] == pytest.approx(2 * before[0])


def test_forgetting_and_another_set_of_ranks_start_anew() -> None:
    evidence = Evidence(1.0, 10.0)
    first = add(evidence, [0.7])
    add(evidence, [0.7])
    evidence.forget()
    np.testing.assert_allclose(add(evidence, [0.7]), first)
    np.testing.assert_allclose(add(evidence, [0.7, 0.7]), [first[0]] * 2)


RANKS, LOOKS = 4000, 20
RATE = 2e5
"""So many false alarms are allowed here that some must be seen: one in 86 looks at a rank."""


def alarmed_share(repeats: int, lanes: int, inflated: float = 1.0) -> float:
    """Share of ranks ever blamed in LOOKS ticks of nothing; each p is uniform, and shown for `repeats` ticks."""
    noise, evidence, tail = np.random.default_rng(7), Evidence(RATE, 0.0), Tail(share=1.0, slope=0.1)
    ever = np.zeros(RANKS, dtype=bool)
    for look in range(LOOKS):
        if look % repeats == 0:
            p_R = noise.random(RANKS) / inflated
        ever |= add(evidence, list(tail.START - tail.slope * np.log(p_R)), tail, lanes) > 1.0
    return float(ever.mean())


@pytest.mark.parametrize(("repeats", "lanes"), [(1, 1), (4, 4), (1, 4)])
def test_where_nothing_is_wrong_alarms_stay_below_the_stated_rate(repeats: int, lanes: int) -> None:
    allowed = LOOKS * math.exp(-needed(RATE, 5.0))
    assert allowed == pytest.approx(0.231, abs=0.001)
    assert alarmed_share(repeats, lanes) <= allowed


def test_the_rate_is_no_empty_promise() -> None:
    """The same simulation does alarm, and breaks its promise where scores are rarer than the tail says."""
    allowed = LOOKS * math.exp(-needed(RATE, 5.0))
    assert alarmed_share(1, 1) > 0.0
    assert alarmed_share(1, 1, inflated=50.0) > allowed
    assert alarmed_share(4, 1) > alarmed_share(4, 4), "products of scores that share samples are no products of e-values"


def test_a_detector_may_need_more_patience_than_the_others() -> None:
    evidence = Evidence(1.0, 10.0)
    names = ("peer_deviation", "job_change")
    both = [Score(name, np.array([9.0]), None, ("",)) for name in names]
    first: dict[str, int] = {}
    for tick in range(1, 30):
        for score in evidence.add(both, dict.fromkeys(names, TAIL), {}, 5.0, patience={"job_change": 3.0}):
            if score.score_R[0] > 1.0:
                first.setdefault(score.detector, tick)
    assert first == {"peer_deviation": 3, "job_change": 7}, "10 s and 30 s"
