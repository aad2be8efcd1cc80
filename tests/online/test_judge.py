"""One job tick by tick: it learns, blames the rank that was bent within three ticks, and otherwise blames nobody."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from eagleeye.online.judge import Judge, Settings
from eagleeye.records import Category, Decision, Scope, Verdict

LEARN_S = 100.0
FAULT = 200

pytestmark = pytest.mark.jit


def judged(made: Any, ticks: Iterable[int], judge: Judge | None = None) -> list[Verdict]:
    judge = judge or Judge(Settings(learn_s=LEARN_S))
    return [judge.judge(made.window(t, judge.length_s(made.step_s))) for t in ticks]


def said(verdicts: list[Verdict]) -> set[Decision]:
    return {v.decision for v in verdicts}


def test_learns_then_finds_nothing(stream: Callable[..., Any]) -> None:
    verdicts = judged(stream(), [*range(0, 90, 10), *range(90, 105)])
    learning, compared = verdicts[:18], verdicts[18:]
    assert said(learning) == {Decision.UNSURE}
    assert [v.reason for v in learning[4:6]] == [f"learning what is normal for this job: {s} of 100 s" for s in (41, 51)]
    assert {v.model for v in learning} == {""}
    assert said(compared) == {Decision.NORMAL}
    last = verdicts[-1]
    assert (last.votes, last.model) == ({"knn_dtw": False, "matrix_profile": False, "lof": False}, "own past")
    assert (last.job, last.to_s, last.scope, last.category, last.rule) == ("llm", 1_770_000_104.0, None, None, None)


def test_a_bent_rank_is_blamed_within_three_ticks_and_nobody_else(stream: Callable[..., Any]) -> None:
    made = stream()
    made.columns["gpu_sm_clock_hertz"][5, FAULT:] *= 0.6
    made.columns["gpu_power_watts"][5, FAULT:] *= 0.6
    verdicts = judged(made, range(0, 260, 5))
    before = [v for v in verdicts if v.to_s < made.start_s + FAULT]
    assert Decision.ANOMALOUS not in said(before)
    during = [v for v in verdicts if v.to_s >= made.start_s + FAULT]
    first = next(i for i, v in enumerate(during) if v.decision is Decision.ANOMALOUS)
    assert first < 3
    assert said(during[first:]) == {Decision.ANOMALOUS}
    for verdict in during[first:]:
        assert [(s.rank, s.node) for s in verdict.suspects] == [(5, "n2")]
        assert (verdict.scope, verdict.category, verdict.rule) == (Scope.RANK, Category.GPU, None)
        assert verdict.suspects[0].score > 1
        assert verdict.reason.startswith("rank 5 on n2 differs from its peers: gpu_")
        assert sum(v is True for v in verdict.votes.values()) >= 2


def test_both_ranks_of_a_node_make_it_the_nodes_fault(stream: Callable[..., Any]) -> None:
    made = stream(R=12)
    made.columns["ib_transmit_bytes_per_second"][4:6, FAULT:] *= 0.4
    last = judged(made, range(0, 260, 5))[-1]
    assert (last.scope, last.category, {s.rank for s in last.suspects}) == (Scope.NODE, Category.NETWORK, {4, 5})


def test_one_odd_tick_convicts_nobody(stream: Callable[..., Any]) -> None:
    made = stream()
    for column in made.columns.values():
        column[5, FAULT : FAULT + 1] *= 0.5
    assert Decision.ANOMALOUS not in said(judged(made, [*range(0, FAULT - 2, 6), *range(FAULT - 2, FAULT + 20)]))


def test_a_node_must_be_suspected_for_a_while(stream: Callable[..., Any]) -> None:
    made = stream()
    made.columns["gpu_power_watts"][5, FAULT:] *= 0.6
    made.columns["gpu_sm_clock_hertz"][5, FAULT:] *= 0.6
    patient = Judge(Settings(learn_s=LEARN_S, confirm_s=30.0))
    verdicts = judged(made, range(0, 260, 5), patient)
    suspected = next(v.to_s for v in verdicts if sum(vote is True for vote in v.votes.values()) >= 2)
    blamed = next(v.to_s for v in verdicts if v.decision is Decision.ANOMALOUS)
    assert blamed - suspected == 30.0


def test_a_change_of_the_whole_job_blames_nobody(stream: Callable[..., Any]) -> None:
    made = stream()
    made.columns["gpu_power_watts"][:, FAULT:] *= 0.5
    made.columns["ib_transmit_bytes_per_second"][:, FAULT:] *= 0.3
    assert said(judged(made, range(0, 260, 5))[30:]) == {Decision.NORMAL}


def test_most_nodes_at_once_are_not_one_nodes_fault(stream: Callable[..., Any]) -> None:
    made = stream(R=8, per_node=1)
    factors = [1, 1, 1, 0.4, 1.6, 0.4, 1.6, 0.4]
    for r, factor in enumerate(factors):
        made.columns["gpu_power_watts"][r, FAULT:] *= factor
        made.columns["gpu_sm_clock_hertz"][r, FAULT:] *= factor
    last = judged(made, range(0, 260, 5))[-1]
    assert (last.decision, last.scope, last.suspects) == (Decision.ANOMALOUS, Scope.JOB, ())
    assert last.reason == "5 of 8 nodes deviate at once, so the cause is not one of them"


@pytest.mark.parametrize("R", [1, 2])
def test_too_few_ranks_are_never_normal(stream: Callable[..., Any], R: int) -> None:
    verdicts = judged(stream(R=R), range(0, 250, 5))
    assert said(verdicts) == {Decision.UNSURE}
    assert "job llm: no group of 3 ranks that do the same work, so nobody can be compared" in {v.reason for v in verdicts}


def test_a_rank_that_is_never_seen_is_not_blamed_and_hides_nobody(stream: Callable[..., Any]) -> None:
    made = stream()
    for column in made.columns.values():
        column[2] = math.nan
    made.columns["gpu_power_watts"][6, FAULT:] *= 0.5
    made.columns["gpu_sm_clock_hertz"][6, FAULT:] *= 0.5
    verdicts = judged(made, range(0, 260, 5))
    assert {(v.decision, v.reason) for v in verdicts[25:40]} == {
        (Decision.UNSURE, "1 of 8 ranks sent nothing in the last 3 s")
    }, "what is not known is not normal"
    assert [s.rank for s in verdicts[-1].suspects] == [6]


def test_nothing_observed_is_unsure(stream: Callable[..., Any]) -> None:
    made = stream()
    for column in made.columns.values():
        column[:, FAULT:] = math.nan
    verdicts = judged(made, [*range(0, FAULT, 5), FAULT + 10, FAULT + 50])
    assert verdicts[-1].decision is Decision.UNSURE
    assert verdicts[-1].reason == "8 of 8 ranks sent nothing in the last 3 s"


def test_nothing_ever_observed_is_unsure(stream: Callable[..., Any]) -> None:
    made = stream()
    for column in made.columns.values():
        column[:] = math.nan
    assert said(judged(made, range(0, 200, 10))) == {Decision.UNSURE}


def test_another_set_of_ranks_learns_anew(stream: Callable[..., Any]) -> None:
    made = stream()
    judge = Judge(Settings(learn_s=LEARN_S))
    assert judged(made, range(0, 150, 5), judge)[-1].decision is Decision.NORMAL
    made.nodes = (*made.nodes[:-2], "n9", "n9")
    moved = judged(made, range(150, 300, 5), judge)
    assert moved[0].reason.startswith("learning what is normal for this job: ")
    assert said(moved[:19]) == {Decision.UNSURE}
    assert said(moved[20:]) == {Decision.NORMAL}


def test_an_idle_job_is_not_applicable_for_ever(stream: Callable[..., Any]) -> None:
    made = stream()
    made.columns["gpu_utilization_ratio"][:] *= 0.01
    made.columns["gpu_power_watts"][3, FAULT:] *= 3
    verdicts = judged(made, range(0, 300, 5))
    assert said(verdicts) == {Decision.NOT_APPLICABLE}
    assert verdicts[0].reason == "the job is idle (median gpu_utilization_ratio 0.01)"


def test_a_busy_job_that_goes_idle_is_not_applicable(stream: Callable[..., Any]) -> None:
    made = stream()
    made.columns["gpu_utilization_ratio"][:, FAULT:] *= 0.01
    verdicts = judged(made, range(0, 260, 5))
    assert Decision.ANOMALOUS not in said(verdicts)
    assert said(verdicts[42:]) == {Decision.NOT_APPLICABLE}


def test_time_spent_idle_is_not_learned_from(stream: Callable[..., Any]) -> None:
    made = stream()
    made.columns["gpu_utilization_ratio"][:, :100] *= 0.01
    verdicts = judged(made, range(0, 250, 5))
    assert said(verdicts[:20]) == {Decision.NOT_APPLICABLE}
    assert said(verdicts[21:39]) == {Decision.UNSURE}
    assert said(verdicts[42:]) == {Decision.NORMAL}


def test_metrics_that_the_catalogue_does_not_know(stream: Callable[..., Any]) -> None:
    made = stream()
    names = ("tape_speed", "tape_tension", "queue_depth", "cpu_busy_ratio")
    made.columns = dict(zip(names, made.columns.values(), strict=True))
    made.columns["tape_speed"][1, FAULT:] *= 0.5
    made.columns["tape_tension"][1, FAULT:] *= 0.5
    verdicts = judged(made, range(0, 260, 5))
    assert said(verdicts[20:40]) == {Decision.NORMAL}
    assert [(s.rank, s.node) for s in verdicts[-1].suspects] == [(1, "n0")]
    assert "tape_" in verdicts[-1].reason


def test_a_rule_speaks_before_anything_was_learned(stream: Callable[..., Any]) -> None:
    made = stream(R=6, per_node=1)
    made.columns["log_hardware_errors"] = np.zeros((6, 400), np.float32)
    made.columns["log_hardware_errors"][4, 20:] = 1
    before, during = judged(made, [19, 20])
    assert before.decision is Decision.UNSURE
    assert (during.decision, during.rule, during.scope, during.category) == (
        Decision.ANOMALOUS,
        "hardware_error",
        Scope.NODE,
        Category.GPU,
    )
    assert [(s.rank, s.node, s.score, s.evidence) for s in during.suspects] == [(4, "n4", 1.01, "hardware_error")]
    assert during.votes == {"knn_dtw": None, "matrix_profile": None, "lof": None}


def test_a_rule_names_a_node_once(stream: Callable[..., Any]) -> None:
    made = stream()
    made.columns["log_hardware_errors"] = np.zeros((8, 400), np.float32)
    made.columns["log_hardware_errors"][2:4, 20:] = 1
    assert [s.node for s in judged(made, [20])[0].suspects] == ["n1"]


def test_the_past_that_a_tick_needs(stream: Callable[..., Any]) -> None:
    assert Judge(Settings(learn_s=600)).length_s(5.0) == 605.0
    assert Judge(Settings(learn_s=60)).length_s(60.0) == 121 * 60.0
    with pytest.raises(ValueError, match="quorum must lie between 1 and 3, not 4"):
        Settings(quorum=4)


def test_the_same_windows_give_the_same_verdicts(stream: Callable[..., Any]) -> None:
    made = stream()
    made.columns["gpu_power_watts"][5, 150:] *= 0.6
    made.columns["gpu_sm_clock_hertz"][5, 150:] *= 0.6
    assert judged(made, range(0, 200, 5)) == judged(made, range(0, 200, 5))
