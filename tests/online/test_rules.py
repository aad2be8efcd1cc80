"""The rules: each fact names whom it concerns, or that it concerns nobody in particular, or the rule is silent."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagleeye.detectors.rules import Finding, Limits, check, ended
from eagleeye.metrics import CATALOGUE
from eagleeye.records import Category, Scope
from eagleeye.window import Window

Facts = Callable[..., Window]
NAN = math.nan


def found(window: Window, limits: Limits | None = None) -> Finding:
    finding = check(window, limits or Limits())
    assert finding is not None
    return finding


def told(window: Window, limits: Limits | None = None) -> tuple[str, Category, Scope, tuple[int, ...]]:
    finding = found(window, limits)
    return finding.rule, finding.category, finding.scope, finding.ranks


def test_broken_hardware_on_one_node(facts: Facts) -> None:
    window = facts({"log_hardware_errors": [0, 0, 1, 1, 0, 0]}, nodes=["a", "a", "b", "b", "c", "c"])
    assert told(window) == ("hardware_error", Category.GPU, Scope.NODE, (2, 3))
    assert found(window).reason == "the log of b reports broken hardware (a fatal Xid or an uncorrectable error)"


def test_broken_hardware_on_most_nodes_is_nobodys(facts: Facts) -> None:
    window = facts({"log_hardware_errors": [1, 1, 0]})
    assert told(window) == ("hardware_error", Category.UNKNOWN, Scope.JOB, ())
    assert found(window).reason == "2 nodes log broken hardware at once"


def test_broken_hardware_on_half_of_the_nodes_names_them(facts: Facts) -> None:
    assert told(facts({"log_hardware_errors": [1, 0, 1, 0]}))[3] == (0, 2)


def test_an_error_that_left_the_window_is_forgotten(facts: Facts) -> None:
    assert check(facts({"log_hardware_errors": [[0] * 6, [1, 1, 1, 1, 1, 0]]}), Limits()) is None


@pytest.mark.parametrize("metric", ["network_up", "ib_port_up"])
def test_link_down(facts: Facts, metric: str) -> None:
    window = facts({metric: [1, 1, 0, 1]})
    assert told(window) == ("link_down", Category.NETWORK, Scope.NODE, (2,))
    assert found(window).reason == "n2 lost the carrier of a network link while the other nodes kept theirs"
    assert told(facts({metric: [0, 0, 0, 0]})) == ("link_down", Category.NETWORK, Scope.JOB, ())
    assert check(facts({metric: [1, 1, 1, 1]}), Limits()) is None
    assert check(facts({"gpu_power_watts": [1, 1, 0, 1]}), Limits()) is None


def test_a_link_must_be_seen_down_twice(facts: Facts) -> None:
    blink = [[1] * 6, [1, 1, 1, 1, 1, 0], [1] * 6]
    assert check(facts({"network_up": blink}), Limits()) is None
    assert check(facts({"network_up": [[1] * 6, [1, 1, 1, 1, 0, NAN], [1] * 6]}), Limits()) is None
    assert told(facts({"network_up": [[1] * 6, [1, 1, 1, 1, 0, 0], [1] * 6]}))[3] == (1,)


def test_one_of_two_kinds_of_link_is_enough(facts: Facts) -> None:
    assert told(facts({"network_up": [1, 1, 1, 1], "ib_port_up": [1, 0, NAN, NAN]}))[3] == (1,)


def test_the_node_of_every_rank_of_it_is_concerned(facts: Facts) -> None:
    assert told(facts({"network_up": [1, 1, 0, NAN]}, nodes=["a", "a", "b", "b"]))[3] == (2, 3)


def lost(
    facts: Facts,
    up: list[float],
    age: list[float],
    errors: list[float],
    communication: list[float],
    phase: float = 1,
    step_age: list[float] | None = None,
) -> Window:
    """`step_age` tells whether those that are left stand still: above 20 s they do (10 s and two intervals of 5 s)."""
    R = len(up)
    return facts(
        {
            "process_up": up,
            "process_exit_age_seconds": age,
            "log_errors": errors,
            "log_communication_errors": communication,
            "train_phase": [phase] * R,
            "train_step_age_seconds": step_age or [NAN] * R,
        }
    )


def test_killed_while_the_others_die_of_it(facts: Facts) -> None:
    window = lost(facts, [0, 0, 0, 0], [5.0, 4.9, 5.2, 4.8], [3, 3, 0, 4], [3, 3, 0, 4])
    assert told(window) == ("process_lost", Category.NODE, Scope.RANK, (2,))
    assert found(window).reason == (
        "the process of rank 2 on n2 vanished without a word; "
        "the others that vanished had logged a lost peer before, this one had not"
    )


def test_killed_while_the_others_hang_on(facts: Facts) -> None:
    window = lost(facts, [1, 0, 1, 1], [NAN, 25.0, NAN, NAN], [0] * 4, [0] * 4, step_age=[20.1, NAN, 22.0, 21.0])
    assert told(window) == ("process_lost", Category.NODE, Scope.RANK, (1,))
    assert found(window).reason == (
        "the process of rank 1 on n1 vanished without a word; all other ranks are still there, and miss it"
    )


def test_killed_while_one_of_the_others_complains(facts: Facts) -> None:
    window = lost(facts, [1, 0, 1, 1], [NAN, 5.0, NAN, NAN], [0, 0, 1, 0], [0, 0, 1, 0])
    assert told(window) == ("process_lost", Category.NODE, Scope.RANK, (1,))
    assert found(window).reason.endswith("; all other ranks are still there, and miss it")


@pytest.mark.parametrize(
    "step_age",
    [
        [0.4, NAN, 0.6, 0.5],  # the job goes on with fewer ranks
        [20.0, NAN, 20.0, 20.0],  # not longer than a pause that samples may blur
        [300.0, NAN, 0.5, 300.0],  # one that steps on is enough
        [300.0, NAN, NAN, 300.0],  # and one that is not seen might
        [NAN] * 4,  # nobody knows
    ],
)
def test_a_rank_that_nobody_misses_left_in_order(facts: Facts, step_age: list[float]) -> None:
    for errors in (0.0, 2.0, NAN):
        window = lost(facts, [1, 0, 1, 1], [NAN, 500.0, NAN, NAN], [0, errors, 0, 0], [0] * 4, step_age=step_age)
        assert check(window, Limits()) is None


@pytest.mark.parametrize("errors", [0.0, NAN])
def test_a_job_without_a_hook_that_ends_over_some_seconds(facts: Facts, errors: float) -> None:
    """The phase is not known, the ranks leave one after the other, and nobody is left that could stand still."""
    gone = {1: 3.0, 3: 9.0, 0: 12.0}
    for count in range(1, 4):
        left = dict(list(gone.items())[:count])
        up, age = [float(r not in left) for r in range(4)], [left.get(r, NAN) for r in range(4)]
        assert check(lost(facts, up, age, [errors] * 4, [errors] * 4, phase=NAN), Limits()) is None
    over = lost(facts, [0] * 4, [12.0, 3.0, 7.0, 9.0], [0] * 4, [0] * 4, phase=NAN)
    assert ended(over)
    assert check(over, Limits()) is None


def test_an_exception_of_its_own(facts: Facts) -> None:
    window = lost(facts, [1, 0, 1, 1], [NAN, 5.0, NAN, NAN], [0, 2, 0, 0], [0] * 4, step_age=[21.0, NAN, 22.0, 21.0])
    assert told(window) == ("process_lost", Category.USER_CODE, Scope.RANK, (1,))
    assert "the process of rank 1 on n1 ended with an error of its own" in found(window).reason


def test_the_first_to_vanish_while_the_rest_hangs(facts: Facts) -> None:
    window = lost(facts, [1, 0, 0, 1], [NAN, 5.2, 9.0, NAN], [0] * 4, [0] * 4, step_age=[25.0, NAN, NAN, 25.0])
    assert told(window) == ("process_lost", Category.NODE, Scope.RANK, (2,))
    assert found(window).reason == "the process of rank 2 on n2 vanished without a word; it vanished first"


@pytest.mark.parametrize(
    ("up", "phase", "blamed"),
    [
        ([[1] * 6, [1, 0, 0, 0, 0, 0], [1] * 6, [1] * 6], 1, True),
        ([[1, 0, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0], [1, 0, 0, 1, 1, 1], [1] * 6], 1, False),  # the others were started again
        ([[1] * 6, [1, 0, 0, 0, 0, 0], [1] * 6, [1] * 6], 0, False),  # faster than anybody looked, and have not begun to train
        ([[0, 0, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]], 1, True),  # it was there, too
    ],
)
def test_a_rank_that_is_slow_to_begin_again_has_not_vanished(
    facts: Facts, up: list[list[float]], phase: float, blamed: bool
) -> None:
    """What its neighbours logged before the restart still lies in the window of the logs."""
    exit_age_s = 5.0 * sum(value == 0 for value in up[1][2:]) + 1.0
    window = lost(facts, up, [NAN, exit_age_s, NAN, NAN], [0, 0, 3, 3], [0, 0, 3, 3], phase)  # type: ignore[arg-type]
    finding = check(window, Limits())
    assert (finding and finding.ranks) == ((1,) if blamed else None)


def test_where_no_log_is_watched_an_exception_looks_like_a_kill(facts: Facts) -> None:
    window = lost(facts, [1, 0, 0, 1], [NAN, 5.2, 9.0, NAN], [NAN] * 4, [NAN] * 4, step_age=[25.0, NAN, NAN, 25.0])
    assert told(window) == ("process_lost", Category.UNKNOWN, Scope.RANK, (2,))
    assert "rank 2 on n2 vanished, and no log is watched that could tell why; it vanished first" in found(window).reason


def test_a_silent_death_beside_a_silent_node_may_be_its_doing(facts: Facts) -> None:
    """n1 is down and tells nothing; n2's rank dies of that without a word, and the others complain."""
    window = lost(facts, [0, NAN, 0, 0], [5.0, NAN, 5.2, 4.8], [3, NAN, 0, 4], [3, NAN, 0, 4])
    assert told(window) == ("process_lost", Category.UNKNOWN, Scope.RANK, (2,))
    assert "rank 2 on n2 vanished while n1 sent nothing and may be the cause" in found(window).reason


def test_all_vanish_and_no_log_is_watched(facts: Facts) -> None:
    """The order of an end means nothing where nobody says that it was one of trouble."""
    window = lost(facts, [0, 0, 0, 0], [5.0, 5.2, 9.0, 5.1], [NAN] * 4, [NAN] * 4)
    assert told(window) == ("process_lost", Category.UNKNOWN, Scope.JOB, ())
    assert found(window).reason == "every rank process vanished, and no log is watched that could tell why"


def test_all_vanish_at_once(facts: Facts) -> None:
    window = lost(facts, [0, 0, 0, 0], [5.0, 5.2, 5.5, 5.1], [1, 1, 1, 1], [1, 1, 1, 1])
    assert told(window) == ("process_lost", Category.UNKNOWN, Scope.JOB, ())
    assert found(window).reason == ("4 rank processes vanished within 1 s of each other, which tells nothing about who was first")


def test_two_silent_deaths_within_a_second_blame_nobody(facts: Facts) -> None:
    window = lost(facts, [0, 0, 0, 0], [5.0, 5.2, 5.5, 5.1], [1, 0, 0, 1], [1, 0, 0, 1])
    assert told(window)[2:] == (Scope.JOB, ())


def test_victims_are_still_falling(facts: Facts) -> None:
    stand = [21.0, NAN, 21.0, 21.0]
    assert check(lost(facts, [1, 0, 1, 1], [NAN, 1.9, NAN, NAN], [0] * 4, [0] * 4, step_age=stand), Limits()) is None
    assert told(lost(facts, [1, 0, 1, 1], [NAN, 2.1, NAN, NAN], [0] * 4, [0] * 4, step_age=stand))[3] == (1,)


def test_all_finished_in_order(facts: Facts) -> None:
    window = lost(facts, [0, 0, 0], [5.0, 9.0, 7.0], [0, 0, 0], [0, 0, 0], phase=5)
    assert ended(window)
    assert check(window, Limits()) is None


def test_one_finished_rank_leaves_before_the_others(facts: Facts) -> None:
    window = facts({"process_up": [1, 0, 1], "process_exit_age_seconds": [NAN, 9.0, NAN], "train_phase": [1, 5, 1]})
    assert not ended(window)
    assert check(window, Limits()) is None


@pytest.mark.parametrize(
    ("up", "phase", "errors", "expected"),
    [
        ([0, 0], [NAN, NAN], [0, 0], True),  # nobody complains and nobody knows phases
        ([0, 0], [NAN, NAN], [0, 1], False),
        ([0, 0], [NAN, NAN], [NAN, NAN], False),  # logs that were not read tell nothing
        ([0, 0], [5, 1], [0, 0], False),  # one was cut off while the other finished
        ([0, 0], [5, 5], [3, 0], True),
        ([0, NAN], [5, 5], [0, 0], False),
        ([0, 1], [5, 5], [0, 0], False),
        ([NAN, NAN], [5, 5], [0, 0], False),
    ],
)
def test_ended(facts: Facts, up: list[float], phase: list[float], errors: list[float], expected: bool) -> None:
    assert ended(facts({"process_up": up, "train_phase": phase, "log_errors": errors})) is expected


def standing(facts: Facts, age: list[float] | None = None, phase: list[float] | None = None, **columns: list[object]) -> Window:
    return facts(
        {
            "train_step_age_seconds": age or [20.0, 21.0, 20.5, 22.0],
            "train_step_seconds": [0.5] * 4,
            "train_phase": phase or [1] * 4,
            "process_up": [1] * 4,
            **columns,
        }
    )


@pytest.mark.parametrize(
    ("columns", "after_s", "why"),
    [
        (
            {"process_stopped_ratio": [0, 0, 1, 0], "train_heartbeat_age_seconds": [0.5, 0.5, 20, 0.5]},
            20,
            "its process is stopped",
        ),
        ({"train_heartbeat_age_seconds": [0.5, 0.5, 20, 0.5]}, 20, "its process shows no sign of life"),
        ({"train_step_count": [8, 9, 6, 8]}, 300, "it is steps behind the others"),
        ({"train_collective_ratio": [1, 1, 0, 1]}, 300, "the others wait for it in a collective that it has not entered"),
    ],
)
def test_a_job_stands_still_because_of_one(facts: Facts, columns: dict[str, list[object]], after_s: float, why: str) -> None:
    window = standing(facts, age=[after_s, after_s + 1, after_s, after_s + 2], **columns)
    assert told(window) == ("stalled", Category.HANG, Scope.RANK, (2,))
    assert found(window).reason == f"no rank finished a step for {after_s} s (usually 0.5 s); rank 2 on n2: {why}"
    finding = check(standing(facts, age=[after_s - 0.1] * 4, **columns), Limits())
    assert finding is None or finding.ranks == ()


def test_a_sign_of_life_may_be_two_samples_old(facts: Facts) -> None:
    assert check(standing(facts, train_heartbeat_age_seconds=[0.5, 0.5, 15.0, 0.5]), Limits()) is None
    assert told(standing(facts, train_heartbeat_age_seconds=[0.5, 0.5, 15.1, 0.5]))[3] == (2,)


@pytest.mark.parametrize("heartbeat", [[0.5] * 4, [NAN] * 4])
@pytest.mark.parametrize("waited_s", [20, 59, 299])
def test_rank_0_waits_for_the_disk_to_which_it_writes_a_checkpoint(
    facts: Facts, waited_s: float, heartbeat: list[object]
) -> None:
    """Uninterruptible sleep looks like a process that was stopped; it is named for whoever is told, but nobody is taken out."""
    columns: dict[str, list[object]] = {"process_stopped_ratio": [1, 0, 0, 0], "train_heartbeat_age_seconds": heartbeat}
    window = standing(facts, age=[waited_s] * 4, **columns)
    assert told(window) == ("stalled", Category.UNKNOWN, Scope.RANK, (0,))
    assert found(window).reason.endswith("rank 0 on n0: its process is stopped, or waits for a disk")


@pytest.mark.parametrize("waited_s", [5, 15, 25, 45, 59, 62, 120, 299])
def test_rank_0_writes_a_checkpoint_for_all(facts: Facts, waited_s: float) -> None:
    """It says nothing of a phase, the others wait in the next collective: healthy, however much it looks like a hang."""
    columns = {"train_collective_ratio": [0, 1, 1, 1], "train_step_count": [7, 9, 9, 9], "train_heartbeat_age_seconds": [0.5] * 4}
    finding = check(standing(facts, age=[waited_s] * 4, **columns), Limits())
    assert (finding and finding.ranks) == (None if waited_s < 60 else ())
    assert check(standing(facts, age=[waited_s] * 4, phase=[3, 1, 1, 1], **columns), Limits()) is None


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"process_stopped_ratio": [1, 1, 1, 0]},  # most are stopped
        {"train_heartbeat_age_seconds": [20, 20, 20, 20]},
        {"train_step_count": [8, 8, 8, 8]},
        {"train_step_count": [8, 8, 7, 8]},  # one step apart is nothing
        {"train_collective_ratio": [0, 0, 0, 0]},  # nobody waits
        {"train_collective_ratio": [1, 1, 1, 1]},  # all wait
        {"train_collective_ratio": [[1] * 6, [1] * 6, [0, 0, 0, 0, 1, 0], [1] * 6]},  # in and out
        {"process_stopped_ratio": [[0] * 6, [0] * 6, [0, 0, 0, 0, 0, 1], [0] * 6]},  # one look
        {"train_step_count": [NAN] * 4, "train_collective_ratio": [NAN] * 4},
    ],
)
def test_a_job_stands_still_and_nothing_tells_why(facts: Facts, columns: dict[str, list[object]]) -> None:
    for age_s in (60, 300):
        window = standing(facts, age=[age_s, age_s + 1, age_s, age_s + 2], **columns)
        assert told(window) == ("stalled", Category.HANG, Scope.JOB, ())
        assert found(window).reason == (
            f"no rank finished a step for {age_s} s (usually 0.5 s), and nothing tells the ranks apart"
        )
    assert check(standing(facts, age=[59.9] * 4, **columns), Limits()) is None, "pauses are ordinary"


def test_a_slow_job_is_given_six_of_its_steps(facts: Facts) -> None:
    usual = {"train_step_seconds": [4.0] * 3, "train_phase": [1] * 3, "process_stopped_ratio": [0, 0, 1]}
    assert check(facts(usual | {"train_step_age_seconds": [33.9] * 3}), Limits()) is None
    later = facts(usual | {"train_step_age_seconds": [34.0] * 3})  # and two intervals of 5 s
    assert told(later)[::3] == ("stalled", (2,))
    assert check(later, Limits(stall_s=24.1)) is None


def test_a_job_is_given_half_more_than_its_longest_step(facts: Facts) -> None:
    """An evaluation or a checkpoint within a step was ordinary before, so it is again."""
    steps = {"train_step_seconds": [[0.5, 0.5, 40.0, 0.5, 0.5, 0.5]] + [[0.5] * 6] * 2, "process_stopped_ratio": [0, 0, 1]}
    assert check(facts(steps | {"train_step_age_seconds": [69.9] * 3}), Limits()) is None
    assert told(facts(steps | {"train_step_age_seconds": [70.0] * 3}))[::3] == ("stalled", (2,))


def test_sparse_samples_blur_when_a_job_stopped(facts: Facts) -> None:
    stopped = {"process_stopped_ratio": [0, 0, 1, 0]}
    for step_s, after_s in ((1.0, 12.0), (15.0, 40.0), (60.0, 130.0)):
        assert check(facts(stopped | {"train_step_age_seconds": [after_s - 0.1] * 4}, step_s=step_s), Limits()) is None
        assert told(facts(stopped | {"train_step_age_seconds": [after_s] * 4}, step_s=step_s))[3] == (2,)


def test_one_rank_that_steps_on_keeps_the_job_alive(facts: Facts) -> None:
    assert check(standing(facts, age=[20.0, 21.0, 3.0, 22.0]), Limits()) is None


@pytest.mark.parametrize("phase", [0, 2, 3, 4, 5])
def test_only_training_can_stand_still(facts: Facts, phase: float) -> None:
    assert check(standing(facts, phase=[1, 1, phase, 1]), Limits()) is None


def test_before_the_first_step(facts: Facts) -> None:
    assert check(standing(facts, age=[NAN] * 4), Limits()) is None
    assert check(facts({"train_step_count": [0, 0, 0], "process_stopped_ratio": [0, 1, 0]}), Limits()) is None


def test_a_vanished_process_is_another_rules_business(facts: Facts) -> None:
    columns = {"train_step_age_seconds": [20.0] * 4, "process_up": [1, 1, 0, 1], "process_exit_age_seconds": [NAN, NAN, 0.5, NAN]}
    assert check(facts(columns), Limits()) is None


def burst(facts: Facts, errors: list[float], first: list[float], communication: list[float] | None = None) -> Window:
    return facts(
        {
            "log_errors": errors,
            "log_first_error_age_seconds": first,
            "log_communication_errors": communication or [0] * len(errors),
        }
    )


def test_a_burst_of_errors_blames_who_began(facts: Facts) -> None:
    window = burst(facts, [0, 12, 0], [NAN, 30.0, NAN])
    assert told(window) == ("log_burst", Category.UNKNOWN, Scope.NODE, (1,))
    assert found(window).reason == "n1 logged at least 10 error lines in the window, and was the first to log any"
    quiet = burst(facts, [1, 12, 0], [40.0, 30.0, NAN])
    assert told(quiet)[3] == (0,)
    assert found(quiet).reason == "n0 was the first to log an error, before n1 logged at least 10 error lines in the window"
    assert told(burst(facts, [1, 12, 0], [20.0, 30.0, NAN]))[3] == (1,)


def test_several_nodes_at_once(facts: Facts) -> None:
    window = burst(facts, [12, 12, 0], [30.0, 30.6, NAN])
    assert told(window) == ("log_burst", Category.USER_CODE, Scope.JOB, ())
    assert found(window).reason == "2 nodes began to log errors within 1 s of each other"


def test_below_the_threshold(facts: Facts) -> None:
    assert check(burst(facts, [9, 0], [30.0, NAN]), Limits()) is None
    assert told(burst(facts, [9, 0], [30.0, NAN]), Limits(log_lines=9))[0] == "log_burst"


def test_complaints_about_a_peer_are_not_ones_own_errors(facts: Facts) -> None:
    assert check(burst(facts, [12, 0], [30.0, NAN], communication=[12, 0]), Limits()) is None


def test_who_began_is_unknown(facts: Facts) -> None:
    assert told(burst(facts, [12, 12], [NAN, NAN]))[2:] == (Scope.JOB, ())


def test_a_finding_about_somebody_goes_before_one_about_everybody(facts: Facts) -> None:
    window = facts({"network_up": [0, 0, 0], "log_errors": [0, 20, 0], "log_first_error_age_seconds": [NAN, 9.0, NAN]})
    assert told(window)[::3] == ("log_burst", (1,))


@pytest.mark.parametrize("metric", [m.column for m in CATALOGUE])
def test_what_was_not_observed_triggers_nothing(facts: Facts, metric: str) -> None:
    assert check(facts({metric: [NAN, NAN, NAN]}), Limits()) is None


levels = st.sampled_from([0.0, 1.0, 5.0, 100.0, NAN])
RULED = sorted(m.column for m in CATALOGUE if not m.compared)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_hiding_a_rank_never_makes_it_guilty(data: st.DataObject) -> None:
    R = 4
    chosen = data.draw(st.lists(st.sampled_from(RULED), min_size=1, unique=True))
    values_RMT = np.full((R, len(chosen), 3), NAN, dtype=np.float32)
    for r in range(R - 1):
        for m in range(len(chosen)):
            values_RMT[r, m] = data.draw(levels)
    window = Window("llm", tuple(range(R)), ("a", "b", "c", "d"), ("all",) * R, tuple(chosen), 100.0, 5.0, values_RMT)
    finding = check(window, Limits())
    assert finding is None or R - 1 not in finding.ranks
