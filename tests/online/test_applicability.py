"""When ranks can be compared: a job that does not train is "not applicable", one that nobody sees is unknown."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from eagleeye.detectors.applicability import missing, not_applicable
from eagleeye.window import Window

Facts = Callable[..., Window]
NAN = math.nan


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"gpu_utilization_ratio": [0.95, 0.96, 0.94]}, None),
        ({"gpu_utilization_ratio": [0.0, 0.01, 0.02]}, "the job is idle (median gpu_utilization_ratio 0.01)"),
        ({"gpu_utilization_ratio": [0.95, 0.96, 0.0]}, None),  # one idle rank is a finding, not an idle job
        ({"process_cpu_ratio": [0.0, 0.01, 0.02]}, "the job is idle (median process_cpu_ratio 0.01)"),
        ({"process_cpu_ratio": [1.0, 1.1, 0.9]}, None),
        ({"gpu_utilization_ratio": [NAN] * 3, "process_cpu_ratio": [0.0] * 3}, "the job is idle (median process_cpu_ratio 0.00)"),
        ({"gpu_utilization_ratio": [0.9] * 3, "process_cpu_ratio": [0.0] * 3}, None),  # the GPU decides where there is one
        ({"gpu_utilization_ratio": [NAN] * 3}, None),
        ({"tape_speed": [0.0] * 3}, None),  # nothing tells of work, so nothing tells of idleness
        ({"train_phase": [0.0] * 3}, "a rank starts up, or did a moment ago"),
        ({"train_phase": [1.0] * 3}, None),
        ({"train_phase": [2.0] * 3}, "a rank evaluates, or did a moment ago"),
        ({"train_phase": [3.0] * 3}, "a rank writes a checkpoint, or did a moment ago"),
        ({"train_phase": [4.0] * 3}, "a rank loads a checkpoint, or did a moment ago"),
        ({"train_phase": [5.0] * 3}, "a rank has finished, or did a moment ago"),
        ({"train_phase": [9.0] * 3}, "a rank is in a phase of its own, or did a moment ago"),
        ({"train_phase": [1.0, 1.0, 3.0]}, "a rank writes a checkpoint, or did a moment ago"),
        ({"train_phase": [1.0, 2.0, 1.0]}, "a rank evaluates, or did a moment ago"),
        ({"train_phase": [NAN, NAN, 3.0]}, "a rank writes a checkpoint, or did a moment ago"),
        ({"train_phase": [NAN, 1.0, NAN]}, None),
        ({"process_up": [0.0] * 3, "log_errors": [0.0] * 3}, "the job has ended"),
    ],
)
def test_not_applicable(facts: Facts, columns: dict[str, list[float]], why: str | None) -> None:
    assert not_applicable(facts(columns)) == why


@pytest.mark.parametrize(("ago", "why"), [(15, "a rank evaluates, or did a moment ago"), (16, None)])
def test_one_rank_in_eval_counts_as_long_as_a_detector_remembers_it(facts: Facts, ago: int, why: str | None) -> None:
    phases = [[1.0] * 30 for _ in range(4)]
    phases[2][29 - ago] = 2.0
    assert not_applicable(facts({"train_phase": phases}, T=30)) == why


def test_the_newest_instants_decide(facts: Facts) -> None:
    falls_idle = [[0.9] * 14 + [0.0] * 6] * 3
    assert not_applicable(facts({"gpu_utilization_ratio": falls_idle}, T=20)) == (
        "the job is idle (median gpu_utilization_ratio 0.00)"
    )
    assert not_applicable(facts({"gpu_utilization_ratio": [[0.0] * 14 + [0.9] * 6] * 3}, T=20)) is None


def test_a_job_that_counts_its_steps_is_not_idle_for_want_of_cpu(facts: Facts) -> None:
    """It is slow or stands still, which is for the rules to say; a GPU that does nothing still tells."""
    steps = {"process_cpu_ratio": [0.0] * 3, "train_step_age_seconds": [90.0] * 3}
    assert not_applicable(facts(steps)) is None
    assert not_applicable(facts(steps | {"train_step_age_seconds": [NAN] * 3})) is not None
    assert not_applicable(facts(steps | {"gpu_utilization_ratio": [0.0] * 3})) is not None


GONE, HERE = [1.0] * 3 + [NAN] * 3, [1.0] * 6


def test_half_of_the_ranks_are_not_seen(facts: Facts) -> None:
    assert missing(facts({"gpu_power_watts": [GONE, GONE, HERE, HERE, HERE]})) is None
    assert (
        missing(facts({"gpu_power_watts": [GONE, GONE, HERE, HERE]})) == "2 of 4 ranks sent nothing, or little, in the last 15 s"
    )
    assert missing(facts({"gpu_power_watts": [GONE, GONE]})) == "2 of 2 ranks sent nothing, or little, in the last 15 s"
    assert missing(facts({"gpu_power_watts": [GONE, GONE], "gpu_utilization_ratio": [HERE, HERE]})) is None


def test_less_than_half_of_the_metrics_is_as_good_as_silent(facts: Facts) -> None:
    names = ("gpu_power_watts", "gpu_utilization_ratio", "ib_transmit_bytes_per_second", "ib_receive_bytes_per_second")

    def window(sent: int) -> Window:
        """Rank 0 sends `sent` of four metrics, the other two ranks all."""
        return facts({name: [HERE if m < sent else GONE, HERE, HERE] for m, name in enumerate(names)})

    assert missing(window(2), share=0.0) is None
    assert missing(window(1), share=0.0) == "1 of 3 ranks sent nothing, or little, in the last 15 s"
    assert missing(window(1)) is None, "one of three is less than half of the ranks"


def test_any_rank_at_all(facts: Facts) -> None:
    assert missing(facts({"gpu_power_watts": [HERE, HERE, HERE]}), share=0.0) is None
    assert missing(facts({"gpu_power_watts": [GONE, HERE, HERE]}), share=0.0) == (
        "1 of 3 ranks sent nothing, or little, in the last 15 s"
    )


def test_what_others_say_of_a_rank_is_no_sign_of_life(facts: Facts) -> None:
    columns = {"gpu_power_watts": [GONE, GONE, HERE], "log_errors": [HERE] * 3, "process_up": [HERE] * 3}
    assert missing(facts(columns)) == "2 of 3 ranks sent nothing, or little, in the last 15 s"
    assert missing(facts({"log_errors": [HERE] * 3})) is None, "where there is nothing else, it must do"


@pytest.mark.parametrize(("use", "said"), [(0.01, "the job is idle (median cpu_busy_ratio 0.01)"), (0.6, None)])
def test_a_foreign_name_tells_whether_the_job_works(facts: Facts, use: float, said: str | None) -> None:
    window = replace(facts({"cpu_busy_ratio": [use] * 4}), foreign_units={"cpu_busy_ratio": "1"})
    assert not_applicable(window) == said


def test_idle_disks_are_no_idle_job(facts: Facts) -> None:
    window = replace(facts({"disk_busy_ratio": [0.0] * 4}), foreign_units={"disk_busy_ratio": "1"})
    assert not_applicable(window) is None
