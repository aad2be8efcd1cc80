"""Is this a moment in which ranks can be compared at all? Pure.

TRANSOM section IV says itself that its detectors only suit busy jobs, and flags a sleeping one; we say "not applicable" instead.
"""

from dataclasses import replace

import numpy as np

from eagleeye.detectors.peers import MIN_PEERS, compared
from eagleeye.detectors.rules import TRAINING, ended
from eagleeye.window import Window

BUSY_RATIO = 0.05
"""Below this share of use of its GPU (or of a CPU) in the median rank, a job does not work."""

RECENT_POINTS, RECENT_S = 6, 60.0
"""What counts as now: so many instants, and no longer than this where they are rare."""

MEMORY_POINTS = 16
"""No detector's newest stretch reaches further back, the median of five included."""

REPEATS, LIVELY_RATIO = 2, 0.6
"""See `without_repeats`."""

WORK = ("gpu_tensor_active_ratio", "gpu_power_watts", "ib_transmit_bytes_per_second", "network_transmit_bytes_per_second")
IN_STEP_RATIO = 0.25

PHASES = {0: "starts up", 2: "evaluates", 3: "writes a checkpoint", 4: "loads a checkpoint", 5: "has finished"}


def not_applicable(window: Window) -> str | None:
    """Return why the job cannot be judged now, in words, or None when it can."""
    if ended(window):
        return "the job has ended"
    if window.has("train_phase"):
        # what the detectors still remember counts, and one rank in another phase makes the comparison meaningless
        phases = window.column_RT("train_phase")[:, -MEMORY_POINTS:]
        others = phases.T[np.isfinite(phases.T) & (phases.T != TRAINING)]
        if len(others):
            return f"a rank {PHASES.get(int(others[-1]), 'is in a phase of its own')}, or did a moment ago"
    # a job that counts its steps and waits is slow or stands still, which the rules see; it is not idle
    steps = window.has("train_step_age_seconds") and np.isfinite(window.column_RT("train_step_age_seconds")[:, -1]).any()
    points = max(2, min(RECENT_POINTS, round(RECENT_S / window.step_s)))
    for metric in _use_metrics(window, steps=bool(steps)):
        recent = window.column_RT(metric)[:, -points:]
        seen = np.asarray(np.isfinite(recent).any(axis=1))
        if seen.any():
            use = float(np.median(np.nanmean(recent[seen], axis=1)))
            return f"the job is idle (median {metric} {use:.2f})" if use < BUSY_RATIO else None
    return None


def _use_metrics(window: Window, *, steps: bool) -> list[str]:
    """Names of the metrics that tell whether the job works, the surest first; other exporters' names count by their words.

    A job whose disks are idle computes.
    """
    used = [m for m in window.foreign_units if window.unit(m) == "1" and ("utilization" in m or "busy" in m)]
    foreign = sorted(m for m in used if not m.startswith(("disk", "storage", "filesystem", "memory", "network")))
    names = ["gpu_utilization_ratio", *foreign, *([] if steps else ["process_cpu_ratio"])]
    return [name for name in names if window.has(name)]


def out_of_step(window: Window) -> str | None:
    """Return why the ranks do not work in step, in words, or None: inference and notebooks keep each rank busy on its own.

    `window` is what would be learned from. In synchronous training ranks of one group rise and fall together, so that their
    spread at an instant is small beside the level in at least one metric of use or work; where it is in none, peers are no
    measure.
    """
    ratios = {}
    groups = np.array(window.groups)
    for metric in (*_use_metrics(window, steps=False), *(m for m in WORK if window.has(m))):
        worst = 0.0
        for group in set(window.groups):
            values_RT = window.column_RT(metric)[groups == group].astype(np.float64)
            values_RT = values_RT[np.isfinite(values_RT).mean(axis=1) > 0.5]
            if len(values_RT) < MIN_PEERS:
                continue
            values_RT = np.where(np.isfinite(values_RT), values_RT, np.nanmedian(values_RT, axis=1)[:, None])
            middle_T = np.median(values_RT, axis=0)
            level = float(np.quantile(np.abs(middle_T), 0.9))
            away_RT = values_RT - middle_T
            away_RT -= np.median(away_RT, axis=1)[:, None]
            spread = 1.4826 * float(np.median(np.median(np.abs(away_RT), axis=0)))
            # where most ranks do nothing at an instant, the median rank shows neither level nor spread
            spread = max(spread, float(np.median(away_RT.std(axis=0))) / 2)
            worst = max(worst, spread / level if level > 0 else np.inf)
        if worst:
            ratios[metric] = worst
    if not ratios or min(ratios.values()) < IN_STEP_RATIO:
        return None
    metric = min(ratios, key=lambda m: ratios[m])
    apart = f"{metric} spreads by {min(ratios[metric], 9.99):.0%} between them"
    return f"the ranks do not work in step ({apart}), so this is no synchronous training"


def without_repeats(window: Window) -> Window:
    """Return the window without what an exporter told again and again: a rank whose every value stays the same to the last bit
    while those of nearly all others change was not measured.

    Zero and one are no values of a measurement that hangs, but of a rank that does: they repeat in earnest.
    """
    values_RMT = window.values_RMT
    known_RMT = np.isfinite(values_RMT)
    before_RMT, now_RMT = values_RMT[:, :, :-1], values_RMT[:, :, 1:]
    same_RMT = before_RMT == now_RMT
    both_MT = (known_RMT[:, :, :-1] & known_RMT[:, :, 1:]).sum(axis=0)
    lively_MT = np.pad(both_MT - same_RMT.sum(axis=0) >= LIVELY_RATIO * np.maximum(both_MT, 1), ((0, 0), (1, 0)))
    telling_RMT = same_RMT & lively_MT[:, 1:] & (now_RMT != 0) & (now_RMT != 1)
    again_RT = telling_RMT.any(axis=1) & (same_RMT | ~known_RMT[:, :, 1:] | ~known_RMT[:, :, :-1]).all(axis=1)
    stale_RT = np.zeros((len(window.ranks), values_RMT.shape[2]), dtype=bool)
    for r in np.flatnonzero(again_RT.any(axis=1)):
        run: list[int] = []
        last_M = np.full(len(window.metrics), np.nan, dtype=np.float32)
        for t in np.flatnonzero(known_RMT[r].any(axis=0)):
            value_M, known_M = values_RMT[r, :, t], known_RMT[r, :, t] & np.isfinite(last_M)
            same_M = value_M == last_M
            again = bool((same_M | ~known_M).all() and (same_M & lively_MT[:, t] & (value_M != 0) & (value_M != 1)).any())
            run = [*run, int(t)] if again else []
            # once may be chance
            if len(run) >= REPEATS:
                stale_RT[r, run] = True
            last_M = np.where(known_RMT[r, :, t], value_M, last_M)
    if not stale_RT.any():
        return window
    return replace(window, values_RMT=np.where(stale_RT[:, None, :], np.float32(np.nan), values_RMT))


def missing(window: Window, share: float = 0.5) -> str | None:
    """Return a sentence when at least `share` of the ranks sent less than half of what others send, else None.

    What is not known is not normal. Facts that others report about a rank (the log of its node, say) are no sign of life.
    """
    signals = [window.metrics.index(m) for m in compared(window)] or list(range(len(window.metrics)))
    seen_R = np.isfinite(window.values_RMT[:, signals, -3:]).any(axis=2).sum(axis=1)
    silent_R = (seen_R == 0) | (seen_R < seen_R.max() / 2)
    if not silent_R.any() or silent_R.mean() < share:
        return None
    return f"{int(silent_R.sum())} of {len(silent_R)} ranks sent nothing, or little, in the last {3 * window.step_s:.0f} s"
