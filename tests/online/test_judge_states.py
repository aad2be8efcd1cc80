"""What a job is told beside whom it suspects: the first minute, phases, a job that stopped, and lessons that wait."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from eagleeye.online.judge import STOPPED_S, Judge, Settings
from eagleeye.records import Category, Decision, Scope, Verdict

pytestmark = pytest.mark.jit

STEP_S, LEARN_S = 5.0, 200.0
CHANGE = 60
"""Tick at which a job changes: 300 s, learned by then."""


def judged(made: Any, ticks: int, judge: Judge | None = None) -> list[Verdict]:
    judge = judge or Judge(Settings(learn_s=LEARN_S))
    return [judge.judge(made.window(t, judge.length_s(STEP_S))) for t in range(ticks)]


def idle_from(made: Any, tick: int) -> Any:
    for name in ("gpu_utilization_ratio", "ib_transmit_bytes_per_second"):
        made.columns[name][:, tick:] *= 0.001
    made.columns["gpu_power_watts"][:, tick:] *= 0.2
    return made


def test_a_job_that_stopped_is_told_when_nothing_explains_it(stream: Callable[..., Any]) -> None:
    verdicts = judged(idle_from(stream(T=130, step_s=STEP_S), CHANGE), 130)
    first = next(t for t, v in enumerate(verdicts) if v.decision is Decision.ANOMALOUS)
    idle = next(t for t, v in enumerate(verdicts) if v.reason.startswith("the job is idle"))
    assert (first - idle) * STEP_S == STOPPED_S
    told = verdicts[first]
    assert (told.rule, told.scope, told.category, told.suspects) == ("stopped", Scope.JOB, Category.UNKNOWN, ())
    assert told.reason.startswith(
        "the job stopped working 120 s ago, longer than it ever paused, and nothing tells why: the job is"
    )
    assert {v.decision for v in verdicts[idle:first]} == {Decision.NOT_APPLICABLE}


@pytest.mark.parametrize("column", ["train_phase", "process_up"])
def test_who_tells_of_phases_or_processes_needs_no_such_guess(stream: Callable[..., Any], column: str) -> None:
    made = idle_from(stream(T=130, step_s=STEP_S), CHANGE)
    made.columns[column] = np.ones((8, 130), np.float32)
    assert Decision.ANOMALOUS not in {v.decision for v in judged(made, 130)}


def test_a_job_that_never_worked_or_was_hardly_known_has_not_stopped(stream: Callable[..., Any]) -> None:
    for tick in (0, 20):
        assert Decision.ANOMALOUS not in {v.decision for v in judged(idle_from(stream(T=130, step_s=STEP_S), tick), 130)}


def test_without_rules_nothing_is_told_of_it(stream: Callable[..., Any]) -> None:
    judge = Judge(Settings(learn_s=LEARN_S, rules=False))
    made = idle_from(stream(T=130, step_s=STEP_S), CHANGE)
    assert Decision.ANOMALOUS not in {v.decision for v in judged(made, 130, judge)}


def test_an_evaluation_is_not_applicable(stream: Callable[..., Any]) -> None:
    made = stream(T=100, step_s=STEP_S)
    made.columns["gpu_utilization_ratio"][:, CHANGE:] *= 0.8
    made.columns["ib_transmit_bytes_per_second"][:, CHANGE:] *= 0.01
    verdicts = judged(made, 100)
    assert Decision.ANOMALOUS not in {v.decision for v in verdicts}
    assert {v.decision for v in verdicts[CHANGE + 3 :]} == {Decision.NOT_APPLICABLE}
    assert verdicts[-1].reason.startswith("the job seems to evaluate: ")


def test_one_slow_tick_of_everybody_is_nothing(stream: Callable[..., Any]) -> None:
    made = stream(T=100, step_s=STEP_S)
    made.columns["ib_transmit_bytes_per_second"][:, CHANGE] *= 0.5
    assert Decision.ANOMALOUS not in {v.decision for v in judged(made, 100)}


def test_a_dead_rank_is_told_before_anything_was_learned(stream: Callable[..., Any]) -> None:
    made = stream(T=40, step_s=STEP_S)
    for name in ("gpu_utilization_ratio", "gpu_power_watts", "gpu_sm_clock_hertz"):
        made.columns[name][5, 7:] *= 0.05
    judge = Judge(Settings(learn_s=600.0))
    verdicts = judged(made, 20, judge)
    told = [v for v in verdicts if v.decision is Decision.ANOMALOUS]
    assert told
    assert told[0].to_s < made.start_s + 90.0, "within the first minute and a half"
    assert {s.rank for v in told for s in v.suspects} == {5}
    assert {v.decision for v in verdicts[:7]} == {Decision.UNSURE}
    healthy = judged(stream(T=40, step_s=STEP_S), 20, Judge(Settings(learn_s=600.0)))
    assert {v.decision for v in healthy} == {Decision.UNSURE}


def test_a_lesson_waits_while_evidence_is_held(stream: Callable[..., Any]) -> None:
    """The second lesson is due after 2 x 200 s; a rank that fell ill before must not become normal by it."""
    for sick_from, learned_s in ((120, 2 * LEARN_S), (CHANGE, LEARN_S), (77, LEARN_S)):
        made = stream(T=120, step_s=STEP_S)
        for name in ("gpu_power_watts", "gpu_sm_clock_hertz"):
            made.columns[name][5, sick_from:] *= 0.7
        judge = Judge(Settings(learn_s=LEARN_S))
        last = judged(made, 120, judge)[-1]
        assert judge._work_s == learned_s
        assert [s.rank for s in last.suspects] == ([5] if sick_from < 120 else [])
