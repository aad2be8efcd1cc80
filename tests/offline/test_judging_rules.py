"""The judge, rule by rule, on verdicts and labels written by hand. Times are seconds."""

import pytest

from eagleeye.offline import intervals
from eagleeye.offline.judging import Found, Tick, by_class, judge, onset_to_alarm, total
from eagleeye.records import Decision
from eagleeye.source.trace import Label

NORMAL, ANOMALOUS = Decision.NORMAL, Decision.ANOMALOUS


def fault(start_s, end_s, *nodes, nameable=True, category="gpu_slow"):
    return Label(start_s, end_s, "fault", category, nodes, (), True, nameable)


def quiet(kind, category, start_s, end_s):
    return Label(start_s, end_s, kind, category, (), (), False, False)


def judged(labels, *alarms, end_s=7200.0, ranks=8, step_s=5.0):
    """The result for anomalous ticks (time, nodes...) amid normal ones at both ends."""
    ticks = [Tick(0.0, NORMAL), *(Tick(at_s, ANOMALOUS, nodes) for at_s, *nodes in alarms), Tick(end_s, NORMAL)]
    return judge("t", ranks, step_s, labels, [Tick(t.at_s, t.decision, tuple(t.nodes)) for t in ticks])


def test_a_right_blame():
    result = judged([fault(1000, 3000, "a")], (1040, "a"))
    assert result.faults[0].delay_s == 40
    assert result.faults[0].culprit_right
    assert (result.wrong_blames_s, result.false_alarms_s) == ((), ())
    assert result.hours == 2.0


def test_a_miss():
    result = judged([fault(1000, 3000, "a")])
    assert result.faults[0].delay_s is None
    assert not result.faults[0].culprit_right


@pytest.mark.parametrize(
    ("at_s", "delay_s", "wrong"), [(999.0, None, 1), (1000.0, 0.0, 0), (3120.0, 2120.0, 0), (3121.0, None, 1)]
)
def test_an_alarm_counts_from_the_start_until_two_minutes_after_the_end(at_s, delay_s, wrong):
    result = judged([fault(1000, 3000, "a")], (at_s, "a"))
    assert result.faults[0].delay_s == delay_s
    assert len(result.wrong_blames_s) == wrong


def test_the_first_alarm_with_suspects_decides_who_was_blamed():
    result = judged([fault(1000, 3000, "a")], (1010,), (1020, "b", "a"), (1030, "a"))
    assert result.faults[0].delay_s == 10
    assert not result.faults[0].culprit_right
    assert result.wrong_blames_s == (1020,)


def test_an_extra_name_is_a_wrong_blame_although_the_culprit_is_on_top():
    result = judged([fault(1000, 3000, "a")], (1010, "a", "b"))
    assert result.faults[0].culprit_right
    assert result.wrong_blames_s == (1010,)


def test_an_alarm_that_names_nobody_detects_but_finds_no_culprit():
    result = judged([fault(1000, 3000, "a")], (1010,))
    assert result.faults[0].delay_s == 10
    assert not result.faults[0].culprit_right
    assert result.false_alarms_s == ()


def test_an_alarm_before_the_fault_is_wrong_and_no_detection():
    result = judged([fault(1000, 3000, "a")], (500, "a"), (700,), (1300, "a"))
    assert result.faults[0].delay_s == 300
    assert result.wrong_blames_s == (500,)
    assert result.false_alarms_s == (700,)


@pytest.mark.parametrize(
    ("nodes", "alarms", "right"),
    [
        ((), [(1010,)], True),
        ((), [(1010,), (1020, "a")], False),
        (("a", "b"), [(1010, "b")], True),
        (("a", "b"), [(1010, "b", "c")], False),
        ((), [], False),
    ],
)
def test_where_nobody_can_be_named_only_silence_about_names_is_right(nodes, alarms, right):
    assert judged([fault(1000, 3000, *nodes, nameable=False)], *alarms).faults[0].culprit_right is right


def test_of_two_faults_at_once_each_must_be_named():
    both = [fault(1000, 3000, "a"), fault(1500, 3000, "b", category="hang")]
    result = judged(both, (1600,), (1700, "a"), (1800, "a", "b"))
    assert [f.delay_s for f in result.faults] == [700, 300]
    assert [f.culprit_right for f in result.faults] == [True, True]
    assert result.wrong_blames_s == ()


def test_before_the_second_fault_an_alarm_without_names_detects_the_first():
    both = [fault(1000, 3000, "a"), fault(1500, 3000, "b")]
    result = judged(both, (1400,), (1800, "b"))
    assert [f.delay_s for f in result.faults] == [400, 300]


def test_the_minutes_after_a_fault_do_not_hide_the_next_one():
    one_after_the_other = [fault(1000, 2000, "a"), fault(2060, 3000, "b")]
    result = judged(one_after_the_other, (2070,))
    assert [f.delay_s for f in result.faults] == [None, 10]


def test_ticks_less_than_ten_minutes_apart_count_once():
    result = judged([], (100, "a"), (600, "b"), (1199, "a"), (1799, "a"))
    assert result.wrong_blames_s == (100, 1799)
    assert judged([], (100,), (699.9,), (1299.9,)).false_alarms_s == (100, 1299.9)


def test_a_stopped_job_may_be_called_anomalous_but_nobody_blamed():
    restart = [quiet("benign", "restart", 1000, 1300)]
    assert judged(restart, (1010,)).false_alarms_s == ()
    assert judged(restart, (1010, "a")).wrong_blames_s == (1010,)
    assert judged(restart, (1301,)).false_alarms_s == (1301,)
    assert judged([quiet("benign", "power_cap", 1000, 1300)], (1010,)).false_alarms_s == (1010,)


def test_a_job_that_does_not_train_is_never_anomalous():
    asleep = [quiet("not_training", "sleep", 0, 7200)]
    assert judged(asleep, (1010,)).alarmed_while_not_training
    assert not judged(asleep).alarmed_while_not_training
    assert judged(asleep).not_training


def test_other_decisions_are_no_alarms():
    ticks = [Tick(0.0, Decision.UNSURE), Tick(10.0, Decision.NOT_APPLICABLE), Tick(20.0, NORMAL)]
    result = judge("t", 8, 5.0, [fault(0, 20, "a")], ticks)
    assert result.faults[0].delay_s is None
    assert result.false_alarms_s == ()


def test_sums_over_traces():
    results = [
        judged([fault(1000, 3000, "a")], (1040, "a"), ranks=12),
        judged([fault(1000, 3000, "a")], (1060, "b"), ranks=12),
        judged([quiet("not_training", "sleep", 0, 7200)], (50,), ranks=12),
        judged([], ranks=12),
    ]
    sums = total(results)
    assert (sums.traces, sums.hours, sums.gpu_days) == (4, 8.0, 4.0)
    assert (sums.faults, sums.detected, sums.culprits_right) == (2, 2, 1)
    assert (sums.wrong_blames, sums.false_alarms, sums.blames) == (1, 1, 3)
    assert (sums.not_training, sums.not_training_alarmed) == (1, 1)
    assert sums.delays_s == (40, 60)
    assert list(by_class(results)) == ["fault gpu_slow", "not_training sleep", "nothing"]
    assert by_class(results)["fault gpu_slow"].traces == 2


def test_a_trace_with_two_kinds_of_fault_counts_each_fault_in_its_class():
    both = judged([fault(1000, 2000, "a"), fault(4000, 5000, "b", category="hang")], (4010, "b"))
    parts = by_class([both, judged([fault(1000, 2000, "a")], (1010, "a"))])
    assert list(parts) == ["fault gpu_slow", "fault hang"]
    assert [(part.faults, part.detected) for part in parts.values()] == [(2, 1), (1, 1)]
    # but no hour twice
    assert [part.hours for part in parts.values()] == [4.0, 0.0]


def test_healthy_hours_are_those_of_work_without_a_fault():
    """The two minutes after a fault are not healthy, faults at once count once, and rest is no work."""
    labels = [fault(3600, 5400, "a"), fault(4500, 5400, "b"), quiet("not_training", "sleep", 0, 1800)]
    result = judged(labels, (2000, "c"), (3000, "d"), (4000, "c"))
    assert result.hours == 2.0
    assert result.healthy_hours == pytest.approx((7200 - 1800 - 1920) / 3600)
    assert len(result.wrong_blames_s) == 3
    assert result.healthy_wrong_blames_s == (2000, 3000)


def test_a_wrong_blame_that_goes_on_after_the_fault_is_one_of_the_healthy_hours_too():
    result = judged([fault(1000, 3000, "a")], (2800, "b"), (3100, "b"), (3300, "b"))
    assert result.wrong_blames_s == (2800,)
    assert result.healthy_wrong_blames_s == (3300,)


@pytest.mark.parametrize(("step_s", "samples"), [(5.0, 8.0), (10.0, 4.0), (30.0, 4 / 3)])
def test_a_delay_is_told_in_samples_too(step_s, samples):
    assert judged([fault(1000, 3000, "a")], (1040, "a"), step_s=step_s).faults[0].delay_samples == pytest.approx(samples)
    assert judged([fault(1000, 3000, "a")]).faults[0].delay_samples is None


@pytest.mark.parametrize(("end_s", "watched_s"), [(7200.0, 2120.0), (2000.0, 1000.0), (900.0, 0.0)])
def test_a_fault_is_watched_until_its_grace_or_the_trace_ends(end_s, watched_s):
    assert judged([fault(1000, 3000, "a")], end_s=end_s).faults[0].watched_s == watched_s


def alarmed_after(delay_s, watched_s):
    return Found("gpu_slow", True, delay_s, delay_s is not None, watched_s, 5.0)


def test_the_curve_from_onset_to_alarm():
    """Four faults: alarms after 10 and 30 s, two without, watched for 20 and for 100 s.

    Kaplan and Meier by hand: 3 of 4 are silent after 10 s; the one that ended at 20 s leaves; of two at risk one alarms at 30 s.
    """
    found = [alarmed_after(10, 500), alarmed_after(None, 20), alarmed_after(30, 500), alarmed_after(None, 100)]
    points = onset_to_alarm(found, (5, 10, 20, 30, 200))
    assert [p.share for p in points] == [0, 0.25, 0.25, 0.5, 0.5]
    assert [p.survival_share for p in points] == pytest.approx([0, 0.25, 0.25, 0.625, 0.625])
    assert [p.censored for p in points] == [0, 0, 1, 1, 2]
    assert {p.faults for p in points} == {4}


def test_an_alarm_at_the_moment_at_which_watching_ends_was_at_risk():
    points = onset_to_alarm([alarmed_after(20, 500), alarmed_after(None, 20)], (20,))
    assert points[0].survival_share == 0.5


def test_no_faults_no_curve():
    assert onset_to_alarm([], (10,)) == []


@pytest.mark.parametrize(
    ("count", "of", "low", "high"),
    [(11, 11, 0.7412, 1.0), (5, 10, 0.2366, 0.7634), (0, 30, 0.0, 0.1), (0, 0, 0.0, 1.0), (0, 2, 0.0, 1.0)],
)
def test_intervals_of_shares(count, of, low, high):
    assert intervals.share(count, of) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("count", "days", "low", "high"), [(10, 1.0, 4.795, 18.39), (10, 2.0, 2.398, 9.195), (0, 6.0, 0.0, 0.5)])
def test_intervals_of_rates(count, days, low, high):
    """The exact Poisson interval of 10 events is [4.795, 18.39]."""
    assert intervals.rate(count, days) == pytest.approx((low, high), rel=0.005)
