"""Every baseline keeps the protocol and finds what it is made for, on real small traces."""

import math

import numpy as np
import pytest

from eagleeye.offline import baselines
from eagleeye.offline.baselines import BASELINES, Baseline, Minder, Pca, RobustZ, learn_points
from eagleeye.records import Decision, Scope
from eagleeye.source.trace import TraceSource, write_trace

SICK, FROM = 5, 80
"""Rank on node n2, and the instant from which it is sick."""


def slow_clock(values_RMT):
    values_RMT[SICK, 1:, FROM:] *= 0.6


@pytest.fixture(scope="module")
def replay(tmp_path_factory):
    """Verdicts of a method on a window, through a trace on disk."""

    def run(window, method):
        folder = tmp_path_factory.mktemp("trace") / "t"
        write_trace(folder, [window])
        source = TraceSource(folder)
        return source, list(method(source))

    return run


def alarms(found):
    return [v for v in found if v.decision is Decision.ANOMALOUS]


@pytest.mark.parametrize("name", BASELINES)
def test_a_sick_rank_is_named_and_nobody_before(name, job, alter, replay):
    source, found = replay(alter(job(ranks=16, points=150), slow_clock), BASELINES[name])
    assert [v.to_s for v in found] == list(source.stamps_s)
    onset_s = source.stamps_s[FROM]
    told = alarms(found)
    assert told, "the fault was missed"
    assert {s.node for v in told for s in v.suspects} == {"n2"}
    assert told[0].suspects[0].rank == SICK
    patience_s = {"minder": 240.0, "minder_hasty": 80.0, "rough_page": 20.0}.get(name, 75.0)
    assert onset_s <= told[0].to_s <= onset_s + patience_s


@pytest.mark.parametrize("name", [n for n in BASELINES if n != "minder_hasty"])
def test_a_healthy_job_is_left_alone(name, job, replay):
    """Minder without its four minutes is there to show what they are good for."""
    _, found = replay(job(ranks=16, points=150, seed=3), BASELINES[name])
    assert alarms(found) == []


@pytest.mark.parametrize("name", BASELINES)
def test_nothing_later_than_a_tick_is_used(name, job, alter, replay):
    """A truncated copy gives the same verdicts for the part that is there."""
    whole = alter(job(ranks=16, points=150), slow_clock)
    _, found = replay(whole, BASELINES[name])
    _, of_part = replay(whole.before(whole.stamps_T[FROM + 20]), BASELINES[name])
    assert len(of_part) == FROM + 21
    assert of_part == found[: FROM + 21]


@pytest.mark.parametrize("name", BASELINES)
def test_an_idle_job_is_not_applicable_whatever_its_ranks_do(name, job, alter, replay):
    def asleep(values_RMT):
        values_RMT[:, 0] = 0.01
        slow_clock(values_RMT)

    _, found = replay(alter(job(ranks=16, points=150), asleep), BASELINES[name])
    assert {v.decision for v in found} == {Decision.NOT_APPLICABLE}


@pytest.mark.parametrize("name", ["robust_z", "minder", "minder_hasty", "rough_page"])
def test_a_slow_down_of_everybody_blames_nobody(name, job, alter, replay):
    def together(values_RMT):
        values_RMT[:, :, FROM:] *= 0.6

    _, found = replay(alter(job(ranks=16, points=150), together), BASELINES[name])
    assert [v.suspects for v in alarms(found)] == [()] * len(alarms(found))
    assert {v.scope for v in alarms(found)} <= {Scope.JOB}


@pytest.mark.parametrize("name", BASELINES)
def test_ruined_data_are_survived(name, job, alter, replay):
    """A constant metric, one that is missing for all, one rank that sends nothing, 40 % missing, two lone ranks."""

    def ruin(values_RMT):
        values_RMT[:, 1] = 400.0
        values_RMT[:, 2] = np.nan
        values_RMT[3] = np.nan
        values_RMT[np.random.default_rng(0).random(values_RMT.shape) < 0.4] = np.nan

    _, found = replay(alter(job(ranks=16, points=150), ruin), BASELINES[name])
    assert {s.rank for v in alarms(found) for s in v.suspects} <= {3}, "only the silent rank may be called odd"
    _, found = replay(alter(job(ranks=2, points=150), slow_clock_of_one), BASELINES[name])
    assert not any(len(v.suspects) > 1 for v in alarms(found))


def slow_clock_of_one(values_RMT):
    values_RMT[1, 1:, FROM:] *= 0.6


@pytest.mark.parametrize("name", BASELINES)
def test_nothing_observed_is_never_normal(name, job, alter, replay):
    def blind(values_RMT):
        values_RMT[:, 1:] = np.nan
        values_RMT[:, 0, 1:] = np.nan

    _, found = replay(alter(job(ranks=16, points=100), blind), BASELINES[name])
    assert Decision.ANOMALOUS not in {v.decision for v in found}
    assert found[-1].decision is Decision.UNSURE


@pytest.mark.parametrize(("step_s", "points"), [(1.0, 60), (5.0, 60), (10.0, 60), (30.0, 20), (60.0, 20)])
def test_what_is_learned_from_is_less_than_the_first_two_fifths_of_an_hour(step_s, points):
    assert learn_points(step_s) == points
    assert points * step_s <= 0.4 * 3600


def test_robust_z_is_median_and_five_median_absolute_deviations(job, alter):
    """Power of five ranks 1, 2, 3, 4, 100: median 3, deviations 2, 1, 0, 1, 97, their median 1."""
    window = alter(job(ranks=5, points=1), lambda v: v.__setitem__((slice(None), 1, 0), [1, 2, 3, 4, 100]))
    score_R = RobustZ().score_R(window.select(["gpu_power_watts"]))
    assert score_R == pytest.approx([2 / 1.4826 / 5, 1 / 1.4826 / 5, 0, 1 / 1.4826 / 5, 97 / 1.4826 / 5])


def test_the_forest_scores_as_scikit_learn_does():
    rng = np.random.default_rng(0)
    scorer = baselines.Forest()
    scorer.fit(rng.standard_normal((1000, 4)))
    vectors_NM = 3 * rng.standard_normal((50, 4))
    assert scorer.score(vectors_NM) * 0.6 == pytest.approx(-scorer.forest.score_samples(vectors_NM), rel=1e-6)


def test_the_limit_of_pca_is_exceeded_by_one_in_a_thousand():
    """Jackson and Mudholkar's limit is for normal vectors: there the share of larger distances is what it says."""
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((6, 6)) * np.array([5, 4, 1, 0.5, 0.5, 0.4])
    scorer = Pca()
    scorer.fit(rng.standard_normal((4000, 6)) @ mixing.T)
    above = (scorer.score(rng.standard_normal((200_000, 6)) @ mixing.T) > 1).mean()
    assert 0.0005 < above < 0.0025


def test_minder_scores_distances_in_standard_deviations(job, alter):
    """Of n members that agree but for one, that one lies (n - 1) / sqrt(n) standard deviations out; the others do not."""
    window = alter(job(ranks=16, points=40), lambda v: v.__setitem__(slice(None), np.ones(v.shape)))
    scorer = Minder()
    scorer.learn(window)
    odd = alter(window, lambda v: v.__setitem__((SICK, 1), 2.0))
    score_R = scorer.score_R(odd)
    # the distances of the others to it make their sums differ from nobody else's
    assert score_R[SICK] == pytest.approx((16 - 1) / math.sqrt(16 - 1) / 3, rel=1e-6)
    assert (np.delete(score_R, SICK) <= 1).all()


def test_a_run_begins_anew_after_a_tick_below(job, alter, replay):
    """Robust z that must last a minute: half a minute twice, with a pause, is no minute."""

    def twice(values_RMT):
        values_RMT[SICK, 1:, 100:106] *= 0.5
        values_RMT[SICK, 1:, 110:116] *= 0.5

    _, found = replay(alter(job(ranks=16, points=150), twice), BASELINES["robust_z"])
    assert alarms(found) == []
    _, found = replay(alter(job(ranks=16, points=150), twice), Baseline("hasty", RobustZ, lasting_s=20.0, learns=False))
    assert [v.suspects[0].rank for v in alarms(found)] == [SICK] * len(alarms(found)) != []


def test_rough_page_names_the_silent_and_tells_of_a_hang(job, alter, replay):
    def gone(values_RMT):
        values_RMT[SICK, :, FROM:] = np.nan

    source, found = replay(alter(job(ranks=16, points=150), gone), BASELINES["rough_page"])
    assert alarms(found)[0].suspects[0].rank == SICK
    assert alarms(found)[0].to_s <= source.stamps_s[FROM] + 25

    def hang(values_RMT):
        values_RMT[:, 0, FROM:] *= 1.06
        values_RMT[:, 1, FROM:] *= 0.2

    _, found = replay(alter(job(ranks=16, points=150), hang), BASELINES["rough_page"])
    assert any(v.votes["hang"] and v.scope is Scope.JOB for v in alarms(found))


def test_published_constants():
    """What the papers print, so that nobody tunes a baseline by accident."""
    assert (RobustZ.K, baselines.Forest.THRESHOLD, baselines.PlainLof.THRESHOLD) == (5.0, 0.6, 1.5)
    assert (Pca.CONFIDENCE, Minder.WINDOW_POINTS, Minder.CONTINUITY_S) == (0.999, 8, 240.0)
