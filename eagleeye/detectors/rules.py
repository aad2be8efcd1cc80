"""Facts that need no vote: broken hardware in a log, a link without carrier, a vanished process, a job that stands still.

A rule reads the newest instants of a raw window and names whom the fact concerns, or says that it concerns nobody in particular.
It is the only way past the vote, and the verdict says so. Missing columns make a rule silent, never sure.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagleeye.records import Category, Scope
from eagleeye.window import Window

CLOCK_TOLERANCE_S = 1.0
"""Nodes agree on the time within this; an order of events closer than that proves nothing."""

SETTLE_S = 2.0
"""A process that vanished is judged after this long: until then its victims are still falling."""

STARTING, TRAINING, FINISHED = 0.0, 1.0, 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found. `ranks` are indices into the window; empty means the whole job.

    Of category UNKNOWN it names where, but not whether the node is to blame: such a finding takes nobody out.
    """

    rule: str
    category: Category
    scope: Scope
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Limits:
    """When the rules speak.

    `stall_s`: a job stands still when no rank finished a step for this long and for `stall_steps` times its usual step.
    `hang_s`: signs that a rank which writes a checkpoint shows, too, count after this long.
    `nameless_s`: a job that stands still is told without a name only after this long, since pauses are ordinary.
    `log_lines`: error lines of one node in the sliding window of its log.
    """

    stall_s: float = 10.0
    stall_steps: float = 6.0
    hang_s: float = 300.0
    nameless_s: float = 60.0
    log_lines: int = 10


def check(window: Window, limits: Limits) -> Finding | None:
    """Return the first finding that names somebody, else one about the whole job, else None."""
    found = [finding for rule in _RULES if (finding := rule(window, limits))]
    return next((f for f in found if f.ranks), found[0] if found else None)


def ended(window: Window) -> bool:
    """Whether every rank's process is gone and left in order: it said so, or nobody's log complains."""
    up_R = _newest_R(window, "process_up")
    if np.isnan(up_R).all() or (up_R != 0).any():
        return False
    finished_R = _newest_R(window, "train_phase") == FINISHED
    return bool(finished_R.all() or not (finished_R.any() or (np.nan_to_num(_newest_R(window, "log_errors"), nan=1.0) > 0).any()))


def _newest_R(window: Window, metric: str) -> NDArray[np.float64]:
    """(R,) newest value; NaN where the window lacks the metric or the newest instant was not observed."""
    if not window.has(metric):
        return np.full(len(window.ranks), np.nan)
    return window.column_RT(metric)[:, -1].astype(np.float64)


def _all_of_last_R(
    window: Window, metric: str, count: int, test: Callable[[NDArray[np.float32]], NDArray[np.bool_]]
) -> NDArray[np.bool_]:
    """(R,) whether the newest `count` instants all pass `test`; False while fewer are there. NaN passes no comparison."""
    if not window.has(metric) or window.values_RMT.shape[2] < count:
        return np.zeros(len(window.ranks), dtype=bool)
    return np.asarray(test(window.column_RT(metric)[:, -count:]).all(axis=1))


def _ranks_of(window: Window, nodes: set[str]) -> tuple[int, ...]:
    return tuple(i for i, node in enumerate(window.nodes) if node in nodes)


def _nodes_where(window: Window, mask_R: NDArray[np.bool_]) -> list[str]:
    return sorted({window.nodes[i] for i in np.flatnonzero(mask_R)})


def _minority(window: Window, nodes: list[str]) -> bool:
    return 0 < len(nodes) <= len(set(window.nodes)) / 2


def _hardware_error(window: Window, limits: Limits) -> Finding | None:
    nodes = _nodes_where(window, _newest_R(window, "log_hardware_errors") > 0)
    if not nodes:
        return None
    if not _minority(window, nodes):
        return Finding("hardware_error", Category.UNKNOWN, Scope.JOB, (), f"{len(nodes)} nodes log broken hardware at once")
    reason = f"the log of {', '.join(nodes)} reports broken hardware (a fatal Xid or an uncorrectable error)"
    return Finding("hardware_error", Category.GPU, Scope.NODE, _ranks_of(window, set(nodes)), reason)


def _link_down(window: Window, limits: Limits) -> Finding | None:
    down_R = np.zeros(len(window.ranks), dtype=bool)
    for metric in ("network_up", "ib_port_up"):
        down_R |= _all_of_last_R(window, metric, 2, lambda v: v == 0)
    nodes = _nodes_where(window, down_R)
    if not nodes:
        return None
    if not _minority(window, nodes):
        return Finding("link_down", Category.NETWORK, Scope.JOB, (), f"{len(nodes)} nodes lost a network link at once")
    reason = f"{', '.join(nodes)} lost the carrier of a network link while the other nodes kept theirs"
    return Finding("link_down", Category.NETWORK, Scope.NODE, _ranks_of(window, set(nodes)), reason)


def _process_lost(window: Window, limits: Limits) -> Finding | None:
    gone_R = (_newest_R(window, "process_up") == 0) & ~(_newest_R(window, "train_phase") == FINISHED)
    age_R = _newest_R(window, "process_exit_age_seconds")
    gone_R &= np.isfinite(age_R)
    if not gone_R.any() or age_R[gone_R].max() < SETTLE_S or ended(window):
        return None
    lost = np.flatnonzero(gone_R)
    communication_R = _newest_R(window, "log_communication_errors")
    own_R = _newest_R(window, "log_errors")
    stuck_R = _newest_R(window, "train_step_age_seconds")[~gone_R] > limits.stall_s + 2 * window.step_s
    if not (communication_R > 0).any() and not (len(stuck_R) and stuck_R.all()):
        # nobody misses them: ranks also leave when a job ends, is cancelled, or goes on with fewer
        if gone_R.all() and np.isnan(own_R).all():
            reason = "every rank process vanished, and no log is watched that could tell why"
            return Finding("process_lost", Category.UNKNOWN, Scope.JOB, (), reason)
        return None
    # whoever complains of a lost peer is a victim; the culprit died without such a line
    silent = [i for i in lost if communication_R[i] == 0]
    victims = [i for i in lost if communication_R[i] > 0]
    order = sorted(lost, key=lambda i: -age_R[i])
    lead_s = age_R[order[0]] - age_R[order[1]] if len(order) > 1 else np.inf
    if victims and len(silent) == 1:
        culprit, why = silent[0], "the others that vanished had logged a lost peer before, this one had not"
    elif lead_s > CLOCK_TOLERANCE_S and (len(order) > 1 or not gone_R.all()):
        culprit, why = order[0], "it vanished first" if len(order) > 1 else "all other ranks are still there, and miss it"
    else:
        at_once = f"{len(lost)} rank processes vanished within {CLOCK_TOLERANCE_S:.0f} s of each other"
        reason = f"{at_once}, which tells nothing about who was first"
        return Finding("process_lost", Category.UNKNOWN, Scope.JOB, (), reason)
    if _begun_since(window, float(age_R[culprit]), ~gone_R):
        return None  # the job started anew since then: whoever is not there yet has not vanished, but is slow to begin
    category, how = Category.NODE, "vanished without a word"
    if own_R[culprit] > 0:
        category, how = Category.USER_CODE, "ended with an error of its own"
    elif np.isnan(own_R[culprit]):
        category, how = Category.UNKNOWN, "vanished, and no log is watched that could tell why"
    elif unseen := _nodes_where(window, np.isnan(_newest_R(window, "process_up"))):
        category, how = Category.UNKNOWN, f"vanished while {', '.join(unseen)} sent nothing and may be the cause"
    rank, node = window.ranks[culprit], window.nodes[culprit]
    reason = f"the process of rank {rank} on {node} {how}; {why}"
    return Finding("process_lost", category, Scope.RANK, (int(culprit),), reason)


def _begun_since(window: Window, ago_s: float, here_R: NDArray[np.bool_]) -> bool:
    """Whether one of the ranks that are here began in the last `ago_s` seconds, or all that tell their phase still start up."""
    up_RT = window.column_RT("process_up")[:, -max(int(ago_s / window.step_s), 1) :]
    phase_R = _newest_R(window, "train_phase")[here_R]
    phase_R = phase_R[np.isfinite(phase_R)]
    return bool((up_RT[here_R] == 0).any() or (phase_R.size and (phase_R == STARTING).all()))


def _stalled(window: Window, limits: Limits) -> Finding | None:
    if not window.has("train_step_age_seconds"):
        return None
    age_R = _newest_R(window, "train_step_age_seconds")
    seen_R = np.isfinite(age_R)
    phase_R = _newest_R(window, "train_phase")
    if not seen_R.any() or ((phase_R != TRAINING) & np.isfinite(phase_R)).any() or (_newest_R(window, "process_up") == 0).any():
        return None
    usual_s = longest_s = 0.0
    if window.has("train_step_seconds"):
        steps = window.column_RT("train_step_seconds")
        steps = steps[np.isfinite(steps)]
        usual_s, longest_s = (float(np.median(steps)), float(np.max(steps))) if len(steps) else (0.0, 0.0)
    stood_s = float(age_R[seen_R].min())
    # a value may be as old as one interval between samples; after two, all samples were taken while the job stood
    blur_s = 2 * window.step_s
    if stood_s < max(limits.stall_s, limits.stall_steps * usual_s, 1.5 * longest_s) + blur_s:
        return None
    stands = f"no rank finished a step for {stood_s:.0f} s (usually {usual_s:.2g} s)"
    count_R = _newest_R(window, "train_step_count")
    in_collective_R = _all_of_last_R(window, "train_collective_ratio", 3, lambda v: v > 0)
    outside_R = _all_of_last_R(window, "train_collective_ratio", 3, lambda v: v == 0)
    stopped_R = _all_of_last_R(window, "process_stopped_ratio", 2, lambda v: v > 0.9)
    lifeless_R = _newest_R(window, "train_heartbeat_age_seconds") > limits.stall_s / 2 + blur_s
    signs = [
        (stopped_R & lifeless_R, Category.HANG, "its process is stopped"),
        (lifeless_R, Category.HANG, "its process shows no sign of life"),
        # the kernel shows who waits for a disk, to write the checkpoint for all, as stopped, too; only his heart goes on
        (stopped_R, Category.UNKNOWN, "its process is stopped, or waits for a disk"),
    ]
    if stood_s >= limits.hang_s:
        # a rank that writes a checkpoint for all looks the same, so these two signs need time
        signs += [
            (count_R < _newest_count(count_R) - 1, Category.HANG, "it is steps behind the others"),
            (
                outside_R & in_collective_R.any(),
                Category.HANG,
                "the others wait for it in a collective that it has not entered",
            ),
        ]
    for mask_R, category, why in signs:
        nodes = _nodes_where(window, mask_R)
        if _minority(window, nodes):
            ranks = tuple(int(i) for i in np.flatnonzero(mask_R))
            named = ", ".join(f"rank {window.ranks[i]} on {window.nodes[i]}" for i in ranks)
            return Finding("stalled", category, Scope.RANK, ranks, f"{stands}; {named}: {why}")
    if stood_s < limits.nameless_s:
        return None
    return Finding("stalled", Category.HANG, Scope.JOB, (), f"{stands}, and nothing tells the ranks apart")


def _newest_count(count_R: NDArray[np.float64]) -> float:
    """Steps of the rank that is furthest; one step between ranks is nothing, they do not finish it in one instant."""
    return float(np.nanmax(count_R)) if np.isfinite(count_R).any() else np.nan


def _log_burst(window: Window, limits: Limits) -> Finding | None:
    own_R = _newest_R(window, "log_errors") - np.nan_to_num(_newest_R(window, "log_communication_errors"))
    first_R = _newest_R(window, "log_first_error_age_seconds")
    nodes = _nodes_where(window, own_R >= limits.log_lines)
    if not nodes:
        return None
    # the first to complain among all that complain, not only among the loudest
    complaining_R = own_R > 0
    oldest = {node: max(first_R[i] for i in _ranks_of(window, {node})) for node in _nodes_where(window, complaining_R)}
    order = sorted(oldest, key=lambda node: -np.nan_to_num(oldest[node]))
    if len(order) > 1 and not oldest[order[0]] - oldest[order[1]] > CLOCK_TOLERANCE_S:
        reason = f"{len(order)} nodes began to log errors within {CLOCK_TOLERANCE_S:.0f} s of each other"
        return Finding("log_burst", Category.USER_CODE, Scope.JOB, (), reason)
    many = f"logged at least {limits.log_lines} error lines in the window"
    if order[0] in nodes:
        reason = f"{order[0]} {many}, and was the first to log any"
    else:
        reason = f"{order[0]} was the first to log an error, before {', '.join(nodes)} {many}"
    return Finding("log_burst", Category.UNKNOWN, Scope.NODE, _ranks_of(window, {order[0]}), reason)


_RULES = (_hardware_error, _link_down, _process_lost, _stalled, _log_burst)
