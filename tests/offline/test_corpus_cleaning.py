"""What may be learned from, and what is dropped and why."""

import dataclasses

import numpy as np
import pytest

from eagleeye.errors import DataError, NoData
from eagleeye.models import Settings
from eagleeye.offline import corpus
from eagleeye.source.trace import TraceSource

SETTINGS = Settings(piece_s=300.0)


def collected(*folders, settings=SETTINGS):
    return corpus.collect(corpus.from_traces(folders, settings.piece_s), settings)


def test_clean_pieces_become_one_stretch(trace, job):
    window = job()
    found = collected(trace("a", window))
    assert found.kept == 4
    assert not found.dropped
    assert found.jobs == ("j@a",)
    assert found.hours == pytest.approx(1 / 3)
    (stretch,) = found.stretches
    np.testing.assert_array_equal(stretch.values_RMT, window.select(stretch.metrics).values_RMT)
    assert stretch.end_s == window.end_s


def test_jobs_do_not_mix_even_if_they_share_a_name(trace, job):
    found = collected(trace("a", job()), trace("b", job(seed=1)))
    assert found.jobs == ("j@a", "j@b")
    assert [s.values_RMT.shape[2] for s in found.stretches] == [240, 240]


def test_a_stretch_has_a_longest_length(trace, job):
    settings = Settings(piece_s=300.0, stretch_s=600.0)
    assert [s.values_RMT.shape[2] for s in collected(trace("a", job()), settings=settings).stretches] == [120, 120]


def test_labelled_faults_and_ten_minutes_after_are_left_out(trace, job):
    folder = trace("a", job(points=480), [(700.0, 800.0, "fault", "gpu_slow", ["n1"])])
    found = collected(folder)
    assert found.dropped == {"labelled fault": 3}  # 600-900, and until 1400
    assert [s.values_RMT.shape[2] for s in found.stretches] == [120, 180]


def test_a_job_that_does_not_train_teaches_nothing(trace, job):
    folder = trace("a", job(), [(0.0, 1200.0, "not_training", "sleep", [])])
    with pytest.raises(NoData, match="4 labelled not_training"):
        collected(folder)


def test_idle_pieces_are_dropped_and_short_pauses_are_not(trace, job, alter):
    def rest(values_RMT):
        values_RMT[:, 0, 60:120] = 0.0
        values_RMT[:, 0, 200:212] = 0.0

    found = collected(trace("a", alter(job(points=480), rest)))
    assert found.dropped == {"in which the job did not work": 1}


def test_gaps_are_dropped(trace, job, alter):
    def lose(values_RMT):
        values_RMT[:, :, 60:90] = np.nan
        values_RMT[:2, :, 130:140] = np.nan

    found = collected(trace("a", alter(job(points=480), lose)))
    assert found.dropped == {"with too much missing": 1}


def test_pieces_with_a_finding_of_a_rule_are_dropped(trace, job):
    window = job(points=480)
    logged = np.zeros((8, 1, 480), dtype=np.float32)
    logged[2, 0, 100:110] = 1.0
    window = dataclasses.replace(
        window, metrics=(*window.metrics, "log_hardware_errors"), values_RMT=np.concatenate([window.values_RMT, logged], axis=1)
    )
    found = collected(trace("a", window))
    assert found.dropped == {"with a finding of the rule hardware_error": 1}
    assert "log_hardware_errors" not in found.stretches[0].metrics


def test_an_unlabelled_fault_is_noticed(trace, job, alter):
    sick = alter(job(), lambda values_RMT: values_RMT[3, 1:, 170:].__imul__(0.7))
    found = collected(trace("well", job(seed=1)), trace("sick", sick))
    assert found.dropped == {"in stretches in which one rank leaves the others": 1}
    assert found.jobs == ("j@well",)


def test_memory_is_bounded_and_every_job_keeps_a_share(job):
    settings = Settings(piece_s=300.0, stretch_s=300.0, corpus_bytes=6 * 8 * 3 * 60 * 4)
    pieces = []
    for name, points in (("long", 1200), ("short", 120)):
        window = job(points=points, job=name)
        pieces += [(window.before(float(window.stamps_T[end - 1])).last(300.0), None) for end in range(60, points + 1, 60)]
    found = corpus.collect(pieces, settings)
    assert sum(s.values_RMT.nbytes for s in found.stretches) <= settings.corpus_bytes
    assert {name: sum(s.job == name for s in found.stretches) for name in found.jobs} == {"long": 4, "short": 2}
    assert found.sampled_out == 16
    again = corpus.collect(pieces, settings)
    assert [s.end_s for s in again.stretches] == [s.end_s for s in found.stretches]


@pytest.mark.parametrize(
    ("ranks", "why"), [(1, "fewer than 3 ranks that do the same work"), (2, "fewer than 3 ranks that do the same work")]
)
def test_jobs_of_too_few_ranks(trace, job, ranks, why):
    with pytest.raises(NoData, match=why):
        collected(trace("a", job(ranks=ranks)))


def test_nothing_observed(trace, job, alter):
    with pytest.raises(NoData, match="4 without any value"):
        collected(trace("a", alter(job(), lambda values_RMT: values_RMT.fill(np.nan))))


def test_a_rank_that_was_never_observed_is_told(trace, job, alter):
    folder = trace("a", alter(job(ranks=4), lambda values_RMT: values_RMT[1].fill(np.nan)))
    with pytest.raises(NoData, match="4 in which a rank was never observed"):
        collected(folder)


def test_no_pieces_at_all():
    with pytest.raises(NoData, match="no job in that time"):
        corpus.collect([], SETTINGS)


def test_too_short(trace, job):
    with pytest.raises(NoData, match="too short to learn from"):
        collected(trace("a", job(points=30)))


def test_a_broken_trace_is_named(trace, job):
    folder = trace("a", job())
    data = (folder / "metrics.parquet").read_bytes()
    (folder / "metrics.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"metrics\.parquet cannot be read"):
        collected(folder)


def test_pieces_of_a_source(trace, job):
    source = TraceSource(trace("a", job()))
    shares = []
    window = job()
    pieces = list(corpus.from_source(source, window.start_s - 5.0, window.end_s, 300.0, shares.append))
    assert [(p.values_RMT.shape[2], why) for p, why in pieces] == [(60, None)] * 4
    assert shares[-1] == 1.0
