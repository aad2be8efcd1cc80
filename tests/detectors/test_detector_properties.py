"""What every detector must hold, built-in or plugged in: copy this file and put the name of yours into DETECTORS."""

import dataclasses

import numpy as np
import pytest

from eagleeye.detectors import ensemble
from eagleeye.errors import ModelMismatch, NoData
from eagleeye.window import Window

DETECTORS = ensemble.DETECTORS


@pytest.fixture(scope="module")
def fitted(job):
    return ensemble.fit([job()])


@pytest.fixture(scope="module")
def later(job):
    """More work of the same job than it was learned from, and the offsets of its ranks."""
    return job(points=300)


def scores(fitted, window: Window, name: str, learned: int = 160):
    offset_RM = fitted.job_offsets(window.before(float(window.stamps_T[learned - 1])))
    return next(s for s in fitted.score(window, offset_RM) if s.detector == name)


def slow_from(rank: int, start: int):
    """Power and clock of one rank fall by a fifth."""

    def change(values_RMT):
        values_RMT[rank, :2, start:] *= 0.8

    return change


@pytest.mark.parametrize("name", DETECTORS)
def test_healthy_ranks_stay_below_one(fitted, later, name):
    score = scores(fitted, later, name)
    assert score.abstained is None
    assert np.isfinite(score.score_R).all()
    assert score.score_R.max() < 1.0
    assert score.fired is False


@pytest.mark.parametrize("name", DETECTORS)
def test_the_sick_rank_outranks_the_rest(fitted, later, alter, name):
    score = scores(fitted, alter(later, slow_from(5, 292)), name)
    assert np.argmax(score.score_R) == 5
    assert score.score_R[5] > 1.0
    assert np.delete(score.score_R, 5).max() < 1.0
    assert score.evidence[5] in ("gpu_power_watts", "gpu_sm_clock_hertz")
    assert score.fired is True


@pytest.mark.parametrize("name", DETECTORS)
def test_order_of_ranks_and_metrics_is_irrelevant(fitted, later, alter, name):
    window = alter(later, slow_from(5, 292))
    order_R, order_M = np.random.default_rng(1).permutation(8), [2, 0, 1]
    shuffled = dataclasses.replace(
        window,
        nodes=tuple(window.nodes[i] for i in order_R),
        metrics=tuple(window.metrics[m] for m in order_M),
        values_RMT=window.values_RMT[order_R][:, order_M],
    )
    plain, other = scores(fitted, window, name), scores(fitted, shuffled, name)
    np.testing.assert_allclose(other.score_R, plain.score_R[order_R], rtol=1e-6)
    assert other.evidence == tuple(plain.evidence[i] for i in order_R)


@pytest.mark.parametrize("name", DETECTORS)
def test_an_unobserved_rank_is_unknown_not_normal(fitted, later, alter, name):
    def silence(values_RMT):
        values_RMT[3] = np.nan

    score = scores(fitted, alter(later, silence), name)
    assert np.isnan(score.score_R[3])
    assert score.evidence[3] == ""
    assert np.isfinite(np.delete(score.score_R, 3)).all()


@pytest.mark.parametrize("name", DETECTORS)
def test_a_rank_that_fell_silent_is_unknown(fitted, later, alter, name):
    def silence(values_RMT):
        values_RMT[3, :, -3:] = np.nan

    assert np.isnan(scores(fitted, alter(later, silence), name).score_R[3])


@pytest.mark.parametrize("name", DETECTORS)
def test_nobody_observed_means_abstention(fitted, later, alter, name):
    score = scores(fitted, alter(later, lambda values_RMT: values_RMT.fill(np.nan)), name)
    assert score.abstained
    assert np.isnan(score.score_R).all()
    assert score.fired is None


@pytest.mark.parametrize("name", DETECTORS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_too_few_peers_means_abstention(fitted, job, name, ranks):
    score = scores(fitted, job(ranks=ranks), name, learned=80)
    assert score.abstained
    assert np.isnan(score.score_R).all()


@pytest.mark.parametrize("name", DETECTORS)
def test_groups_are_not_compared_with_each_other(fitted, later, name):
    """The second pipeline stage draws half the power: by nature, not for a fault."""
    values_RMT = later.values_RMT.copy()
    values_RMT[4:, 0] *= 0.5
    staged = dataclasses.replace(later, groups=("a",) * 4 + ("b",) * 4, values_RMT=values_RMT)
    assert scores(fitted, staged, name).score_R.max() < 1.0


@pytest.mark.parametrize("name", DETECTORS)
def test_nothing_is_modified(fitted, later, name):
    before = later.values_RMT.copy()
    model_before = {k: np.copy(v) for k, v in fitted.models[name].items()}
    first, second = scores(fitted, later, name), scores(fitted, later, name)
    np.testing.assert_array_equal(later.values_RMT, before)
    np.testing.assert_array_equal(first.score_R, second.score_R)
    for key, value in model_before.items():
        np.testing.assert_array_equal(fitted.models[name][key], value)


@pytest.mark.parametrize("name", DETECTORS)
def test_a_sick_node_among_too_many_to_compare_each_with_each(fitted, job, alter, name):
    """600 ranks of one group, of which only some are references: whoever is sick is found, and nobody else."""
    many = job(ranks=600, points=140, per_node=8)
    window = alter(many, lambda values_RMT: values_RMT[400:408, :2, 130:].__imul__(0.8))
    score = scores(fitted, window, name, learned=80)
    assert set(np.flatnonzero(score.score_R > 1.0)) == set(range(400, 408))


def test_the_same_input_gives_the_same_model(job):
    one, two = (ensemble.fit([job(points=60), job(seed=1, job="k", points=60)]) for _ in range(2))
    assert one.to_parts()[0] == two.to_parts()[0]
    for name, array in one.to_parts()[1].items():
        np.testing.assert_array_equal(two.to_parts()[1][name], array)


def test_a_model_survives_being_taken_apart(fitted, later, alter):
    again = ensemble.from_parts(*fitted.to_parts())
    window = alter(later, slow_from(5, 292))
    assert list(again.detectors) == list(fitted.detectors)
    for name in DETECTORS:
        np.testing.assert_array_equal(scores(again, window, name).score_R, scores(fitted, window, name).score_R)


def test_another_format_is_refused(fitted):
    facts, arrays = fitted.to_parts()
    with pytest.raises(ModelMismatch, match=f"format 99, this program reads format {ensemble.FORMAT}"):
        ensemble.from_parts({**facts, "format": 99}, arrays)


@pytest.mark.parametrize("lost", ["metrics", "step_s", "models", "detectors"])
def test_a_damaged_model_is_refused(fitted, lost):
    facts, arrays = fitted.to_parts()
    with pytest.raises(ModelMismatch, match="damaged"):
        ensemble.from_parts({k: v for k, v in facts.items() if k != lost}, arrays)


def test_a_model_without_its_scales_is_refused(fitted):
    facts, arrays = fitted.to_parts()
    with pytest.raises(ModelMismatch, match="differ in number"):
        ensemble.from_parts(facts, {**arrays, "scale_M": arrays["scale_M"][:-1]})


def test_a_job_without_the_models_metrics_is_refused(fitted, later):
    strange = dataclasses.replace(later, metrics=("a", "b", "c"))
    with pytest.raises(ModelMismatch, match="none of the model's metrics"):
        fitted.score(strange, fitted.job_offsets(later))


def test_a_job_sampled_at_another_pace_is_refused(fitted, later):
    """Detectors count instants; half or twice the pace is the most that a model bears."""
    offset_RM = fitted.job_offsets(later)
    for step_s in (2.5, 5.0, 10.0):
        assert len(fitted.score(dataclasses.replace(later, step_s=step_s), offset_RM)) == len(DETECTORS)
    for step_s, said in ((2.4, "every 2.4 s"), (10.1, "every 10.1 s"), (60.0, "every 60 s")):
        with pytest.raises(ModelMismatch, match=f"job j is sampled {said} and the model was fitted at 5 s; train on such jobs"):
            fitted.score(dataclasses.replace(later, step_s=step_s), offset_RM)


@pytest.mark.parametrize("name", DETECTORS)
def test_a_rank_of_which_nothing_was_learned_stays_unjudged(fitted, later, alter, name):
    """It was silent while the job was learned; its permanent difference from the others is unknown, not zero."""
    window = alter(later, lambda values_RMT: values_RMT[3, :, :160].fill(np.nan))
    window = alter(window, lambda values_RMT: values_RMT[3].__imul__(1.5))
    score = scores(fitted, window, name)
    assert np.isnan(score.score_R[3])
    assert np.isfinite(np.delete(score.score_R, 3)).all()
    assert np.nanmax(score.score_R) < 1.0


def test_metrics_that_the_job_lacks_do_not_matter(fitted, later, alter):
    window = alter(later, slow_from(5, 292)).select(["gpu_sm_clock_hertz"])
    for name in DETECTORS:
        assert np.argmax(scores(fitted, window, name).score_R) == 5


def test_too_short_to_learn_from(job):
    with pytest.raises(NoData, match="40 samples in a row"):
        ensemble.fit([job(points=39)])


def test_jobs_may_carry_different_metrics(job):
    one = job(points=60).select(["gpu_power_watts", "gpu_sm_clock_hertz"])
    two = job(seed=1, job="k", points=60).select(["gpu_power_watts", "ib_transmit_bytes_per_second"])
    fitted = ensemble.fit([one, two])
    assert fitted.scale.metrics == ("gpu_power_watts", "gpu_sm_clock_hertz", "ib_transmit_bytes_per_second")
    assert np.isfinite(fitted.scale.scale_M).all()


def test_ranks_that_never_differ_leave_lof_without_a_voice(job, alter):
    """Constant data hold no mix of values to learn; that must not end in a crash, nor in a verdict."""
    flat = alter(job(points=100), lambda values_RMT: values_RMT.__setitem__(slice(None), 7.0))
    fitted = ensemble.fit([flat])
    lof = scores(fitted, flat, "lof", learned=80)
    assert lof.abstained == "too few normal instants were learned"


def test_lof_is_calibrated_on_jobs_that_it_does_not_know(job):
    """A job whose ranks are ten times as restless raises the threshold, although it is among the jobs learned from."""
    calm = [job(seed=s, job=f"calm-{s}", points=60) for s in range(2)]
    wild = job(seed=9, job="wild", points=60)
    values_RMT = wild.values_RMT * (1 + 0.05 * np.random.default_rng(5).standard_normal(wild.values_RMT.shape))
    wild = dataclasses.replace(wild, values_RMT=values_RMT.astype(np.float32))
    unknown = ensemble.fit([*calm, wild], ["lof"]).models["lof"]["threshold"]
    known = ensemble.fit([dataclasses.replace(w, job="one") for w in [*calm, wild]], ["lof"]).models["lof"]["threshold"]
    assert unknown > 2 * known


def test_instants_of_rest_calibrate_nothing(job, alter):
    window = job()
    metrics = ("gpu_utilization_ratio", *window.metrics)
    busy_RT = np.full((8, 1, 160), 0.9, dtype=np.float32)
    busy_RT[:, :, 130:] = 0.0
    window = dataclasses.replace(window, metrics=metrics, values_RMT=np.concatenate([busy_RT, window.values_RMT], axis=1))
    ends = ensemble.held_out_ends(window)
    assert ends
    assert min(ends) > 80
    assert max(ends) <= 136
    rested = alter(window, lambda values_RMT: values_RMT[:, 0].fill(0.0))
    with pytest.raises(NoData, match="did not work"):
        ensemble.fit([rested])


def test_lof_keeps_an_even_sample_of_what_it_saw(job):
    """Also of a little less than twice as many instants as it keeps: neither end of the first metric may be cut off."""
    window = job(points=470)
    fitted = ensemble.fit([window], ["lof"])
    vectors_NF = fitted.models["lof"]["vectors_NF"]
    assert len(vectors_NF) == 1000
    assert abs(np.median(vectors_NF[:, 0])) < 0.1
    assert -vectors_NF[:, 0].min() == pytest.approx(vectors_NF[:, 0].max(), rel=0.3)
