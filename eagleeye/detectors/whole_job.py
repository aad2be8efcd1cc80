"""The whole job against its own past: does it still make progress, and as fast as before? Blames nobody by itself.

In synchronous training one sick rank, a congested network or a slow storage slow everybody alike, which no comparison between
peers sees. Three members of the vote look at the job instead, each by its own past and by ratios alone, so that no model of other
jobs is needed:

* `flat_together`: GPUs are fully in use, yet there is neither power, tensor activity nor traffic. Ranks spin in a collective that
  never ends.
* `job_change`: all rates of work fell together by one ratio. A batch change or an evaluation changes some of them and not others.
* `silence`: a rank fell silent when the job came to stand still. It alone speaks of single ranks.

Source: hangs show full utilization (TRANSOM, section II); self-history change points for whole-job slow-downs (Greyhound,
ATC'25; BOCD). *Differs*: means over several horizons against robust limits of the job's own past instead of a Bayesian run
length.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagleeye.detectors.base import Score, abstain
from eagleeye.detectors.peers import job_medians_MT
from eagleeye.window import Window

Floats = NDArray[np.float64]

FLAT_TOGETHER, JOB_CHANGE, SILENCE = MEMBERS = ("flat_together", "job_change", "silence")

MEMORY_POINTS = {JOB_CHANGE: 4}
"""How many instants a score depends on, at the horizons that matter soon after a change; the others look at the newest alone."""

USE = "gpu_utilization_ratio"
RATES = (
    "gpu_tensor_active_ratio",
    "ib_transmit_bytes_per_second",
    "ib_receive_bytes_per_second",
    "network_transmit_bytes_per_second",
    "network_receive_bytes_per_second",
)
"""Proportional to the work done: a job at half its pace shows half of each."""

STEP = "train_step_seconds"
"""Steps per second is a rate of work, too."""

CPU = "process_cpu_ratio"
"""Where no GPU tells, processors do: a larger batch costs more of them a step, waiting costs less."""

POWER = "gpu_power_watts"

SPINNING_RATIO = 0.9
"""Utilization of ranks that wait in a collective: the kernel that waits counts as use."""

FLAT_RATIO = 0.03
"""Below this share of its usual high a rate counts as none."""

POWER_RATIO = 0.75
"""Power of GPUs that wait lies well below their usual mean; it alone proves nothing."""

LEAST_FLAT_POINTS = 2

PAUSE_RATIO = 0.3
"""GPUs used less than this share of the usual do not work at all."""

NOW_POINTS = 3
HORIZONS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
LEAST_CHANGE, LEAST_CHANGE_POINTS, LEAST_SOON = 0.03, 8, 0.08
"""Jobs drift by one or two percent a day (Llama 3, section 3.3.4); a slow-down below this is left to people. Soon after it
began, below the second."""

UNFAMILIAR_RATIO = 0.25
"""A job median this share of the learned range beyond it was never seen before."""

YOUNG_S = 120.0
"""Of a job watched for no longer than this only a loss of 0.3 of its pace tells anything; less with a longer past."""

DEVIATIONS = 6.0
WORST_RATIO = 1.5
"""A slow-down must go this much beyond the slowest moments of the past."""

CPU_AGREE_RATIO = 0.7
AGREE_RATIO = 1.6
"""Rates that fall because the job became slower fall by the same factor, up to this."""


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """What normal work of this job looked like, job medians.

    Attributes
    ----------
    high : rate -> its usual high (90 % quantile)
    flat_points : longest run of instants in which all rates were flat
    level : (metric, horizon) -> mean of means over that many instants
    spread : (metric, horizon) -> robust standard deviation of these
    use : usual utilization, NaN where it is not measured
    range : metric -> least and largest of the job's medians
    pause_points : longest run of instants in which the GPUs were hardly used
    least_change : a slow-down that a past of this length cannot tell from ordinary ups and downs
    """

    high: Mapping[str, float]
    flat_points: int
    level: Mapping[tuple[str, int], float]
    spread: Mapping[tuple[str, int], float]
    use: float
    range: Mapping[str, tuple[float, float]]
    pause_points: int
    least_change: float


def learn(window: Window) -> Past:
    """Return what `window`, normal work of one job, teaches about the job as a whole."""
    series, rates = _job_series(window), _rates(window)
    high = {m: float(np.nanquantile(v, 0.9)) for m, v in series.items() if m in rates and np.isfinite(v).any()}
    high = {m: v for m, v in high.items() if v > 0}
    use_T = series.get(USE, np.full(1, np.nan))
    use = float(np.nanmedian(use_T)) if np.isfinite(use_T).any() else np.nan
    working_T = _working_T(series, use)
    level: dict[tuple[str, int], float] = {}
    spread: dict[tuple[str, int], float] = {}
    for m, value_T in series.items():
        for h in HORIZONS:
            means_N = _means_N(np.where(working_T, value_T, np.nan), h)
            if len(means_N) >= max(h // 2, 12):
                middle = float(np.median(means_N))
                level[m, h] = middle
                low, high_ = np.quantile(means_N, (0.1, 0.9))
                seen = max(1.4826 * float(np.median(np.abs(means_N - middle))), float(high_ - low) / 2.56)
                # a job that stalls for some seconds now and then is slower now and then
                seen = max(seen, WORST_RATIO * (middle - float(np.quantile(means_N, 0.02))) / DEVIATIONS)
                spread[m, h] = seen * (1 + 2 * h / len(value_T))  # few independent windows of that length were seen
    least = 0.3 * min(1.0, YOUNG_S / (len(working_T) * window.step_s))
    return Past(high, _longest_run(_flat_T(series, high)), level, spread, use, _ranges(window), _longest_run(~working_T), least)


def unfamiliar(past: Past, window: Window) -> dict[str, float]:
    """Return metric -> how many times its learned high the job's median is now, for metrics outside of what was learned.

    Permanent differences between boards need not hold there, and what is proportional to the level grew with it.
    """
    out = {}
    for m, (low, high) in past.range.items():
        if window.has(m):
            newest = window.column_RT(m)[:, -3:]
            newest = newest[np.isfinite(newest)]
            margin = UNFAMILIAR_RATIO * max(high - low, 0.02 * abs(high))
            middle = float(np.median(newest)) if len(newest) else low
            if not low - margin <= middle <= high + margin:
                out[m] = max(1.0, abs(middle) / max(abs(high), abs(low), 1e-30))
    return out


def _ranges(window: Window) -> dict[str, tuple[float, float]]:
    medians = zip(window.metrics, job_medians_MT(window), strict=True)
    return {m: (float(np.nanmin(v)), float(np.nanmax(v))) for m, v in medians if np.isfinite(v).any()}


def scores(past: Past, window: Window) -> list[Score]:
    """Return what the members say of the end of `window`; the first two say the same of every rank."""
    window = window.last((2 * HORIZONS[-1] + 2 * past.flat_points) * window.step_s)
    series = _job_series(window)
    run = _newest_run(_flat_T(series, past.high))
    return [_flat_together(past, window, series, run), _job_change(past, window, series), _silence(past, window, run)]


def _flat_together(past: Past, window: Window, series: Mapping[str, Floats], run: int) -> Score:
    use_T = series.get(USE)
    if not past.high or use_T is None:
        return abstain(FLAT_TOGETHER, window, "needs utilization and a rate of work")
    newest = use_T[-max(run, 1) :]
    spins = bool(np.isfinite(newest).any()) and float(np.nanmedian(newest)) >= min(SPINNING_RATIO, past.use)
    power_T = series.get(POWER)
    if power_T is not None and (POWER, 2) in past.level and spins and np.isfinite(power_T[-max(run, 1) :]).any():
        spins = bool(np.nanmedian(power_T[-max(run, 1) :]) < POWER_RATIO * past.level[POWER, 2])
    if not run:
        return abstain(FLAT_TOGETHER, window, "the job computes or sends")
    if not spins:
        # idle together: a checkpoint, a restart or the end; that is for others to say
        return abstain(FLAT_TOGETHER, window, "the job does not spin")
    needed = max(LEAST_FLAT_POINTS, 2 * past.flat_points)
    return _of_everybody(FLAT_TOGETHER, window, run / needed, "gpu_tensor_active_ratio")


def _job_change(past: Past, window: Window, series: Mapping[str, Floats]) -> Score:
    rates = [m for m in past.high if (m, HORIZONS[0]) in past.level and m in series and m != CPU]
    if not rates:
        return abstain(JOB_CHANGE, window, "no rate of work was measured for long enough")
    working_T = _working_T(series, past.use)
    series = {m: np.where(working_T, value_T, np.nan) for m, value_T in series.items()}
    if not working_T[-NOW_POINTS:].all():
        return abstain(JOB_CHANGE, window, "the job pauses, or did a moment ago")
    best, judged = 0.0, False
    for h in HORIZONS:
        ratios: list[float] = []
        strengths: list[float] = []
        for m in rates:
            if past.level.get((m, h), 0.0) <= 0 or not np.isfinite(series[m][-h:]).mean() > 0.5:
                continue
            level, spread = past.level[m, h], past.spread[m, h]
            now = max(_newest_mean(series[m], h), _lasting_ratio(past, series[m], m, h) * level)
            least = max(LEAST_CHANGE if h >= LEAST_CHANGE_POINTS else LEAST_SOON, past.least_change)
            ratios.append(max(now / level, 1e-3))
            strengths.append((level - now) / max(DEVIATIONS * spread, least * level))
        judged |= bool(ratios)
        if ratios and _fell_together(ratios) and _still_used(past, series, h, min(ratios)):
            best = max(best, *strengths)
    if not judged:
        return abstain(JOB_CHANGE, window, "no rate of work was heard lately")
    return _of_everybody(JOB_CHANGE, window, best, rates[0])


def _lasting_ratio(past: Past, value_T: Floats, m: str, h: int) -> float:
    """Pace in the faster half of a horizon, half way to the usual: no burst, and nothing that is over, passes for lasting."""
    half = h // 2
    halves = value_T[-h:-half], value_T[-half:]
    if past.level.get((m, half), 0.0) <= 0 or half not in HORIZONS or not all(np.isfinite(v).any() for v in halves):
        return 0.0
    return max(2 * (_newest_mean(v, half) / past.level[m, half]) - 1 for v in halves)


def _fell_together(ratios: Sequence[float]) -> bool:
    least, most = min(ratios), max(ratios)
    return most / least <= AGREE_RATIO and 1 - most >= 0.5 * (1 - least)


def _still_used(past: Past, series: Mapping[str, Floats], h: int, ratio: float) -> bool:
    """Whether use of the GPUs goes with a slower pace: kept up by waiting, or fallen as the work did.

    An evaluation uses GPUs less without falling to the pace of its traffic; a pause does not use them at all.
    """
    use_T = series.get(USE)
    if use_T is None and CPU in series and past.level.get((CPU, h), 0.0) > 0:
        # a larger batch costs as much of the processors as before, waiting does not
        return bool(_newest_mean(series[CPU], h) / past.level[CPU, h] < 1 - CPU_AGREE_RATIO * (1 - ratio))
    if use_T is None or not np.isfinite(past.use) or not np.isfinite(use_T[-h:]).any():
        return True
    use = _newest_mean(use_T, h) / past.use
    if np.isfinite(use_T[-NOW_POINTS:]).any():
        # the mean over a phase that just began or ended says nothing of either
        now = float(np.nanmean(use_T[-NOW_POINTS:])) / past.use
        if abs(now - use) > max(0.1, 3 * past.spread.get((USE, NOW_POINTS), 0.0) / past.use):
            return False
    return use > 0.93 or (use > PAUSE_RATIO and 0.75 * ratio < use < 1.33 * ratio)


def phase(past: Past, window: Window) -> str | None:
    """Return in words what else than usual the job does without being in trouble; None if it does as usual or nobody can tell."""
    series = _job_series(window.last(NOW_POINTS * window.step_s))
    use_T = series.get(USE)
    ratios = {
        m: float(np.nanmean(series[m])) / past.level[m, NOW_POINTS]
        for m in past.high
        if past.level.get((m, NOW_POINTS), 0.0) > 0 and m in series
    }
    if use_T is None or not ratios or not np.isfinite(past.use):
        return None
    use = float(np.nanmean(use_T)) / past.use
    if use < PAUSE_RATIO:
        return f"the job pauses: GPUs are used {use:.0%} of what is usual"
    if use < 0.9 and min(ratios.values()) < 0.5 * use:
        least = min(ratios, key=lambda m: ratios[m])
        return f"the job seems to evaluate: GPUs are used {use:.0%} of what is usual, {least} is at {ratios[least]:.0%}"
    return None


def _silence(past: Past, window: Window, run: int) -> Score:
    """A rank that others outlive: heard before, silent since the job stands still."""
    heard_RT: NDArray[np.bool_] = np.asarray(np.isfinite(window.values_RMT).any(axis=1))
    T = heard_RT.shape[1]
    points = min(max(LEAST_FLAT_POINTS, run), T - 1)
    silent_R = ~heard_RT[:, T - points :].any(axis=1) & (heard_RT[:, : T - points].mean(axis=1) > 0.5)
    if not 0 < int(silent_R.sum()) <= len(silent_R) / 2:
        return abstain(SILENCE, window, "nobody fell silent, or too many did")
    needed = max(LEAST_FLAT_POINTS, 2 * past.flat_points)
    return Score(SILENCE, np.where(silent_R, run / needed, np.nan), None, tuple("silent" if s else "" for s in silent_R))


def _of_everybody(name: str, window: Window, value: float, evidence: str) -> Score:
    R = len(window.ranks)
    return Score(name, np.full(R, value), None, (evidence,) * R)


def _job_series(window: Window) -> dict[str, Floats]:
    """Median over ranks of each metric that tells of work -> (T,); metrics that nobody sent are left out."""
    metrics = [m for m in (USE, *_rates(window), POWER) if window.has(m)]
    found = dict(zip(metrics, job_medians_MT(window.select(metrics)).astype(np.float64), strict=True))
    if STEP in found:
        found[STEP] = 1.0 / np.where(found[STEP] > 0, found[STEP], np.nan)
    return {m: median_T for m, median_T in found.items() if np.isfinite(median_T).any()}


def _rates(window: Window) -> tuple[str, ...]:
    """Rates of the catalogue, and what other exporters tell in bytes per second."""
    use = () if window.has(USE) else (CPU,)
    return (*RATES, STEP, *use, *(m for m in window.metrics if window.foreign_units.get(m) == "bytes/s"))


def _flat_T(series: Mapping[str, Floats], high: Mapping[str, float]) -> NDArray[np.bool_]:
    # the time of a step is told until the next one has ended, however long that takes
    moving = [m for m in high if m in series and m != STEP] or [m for m in high if m in series]
    rates = [np.where(np.isfinite(series[m]), series[m] / high[m], np.nan) for m in moving]
    if not rates:
        return np.zeros(len(next(iter(series.values()), np.zeros(1))), dtype=bool)
    return np.asarray(np.fmax.reduce(np.stack(rates)) < FLAT_RATIO)


def _working_T(series: Mapping[str, Floats], use: float) -> NDArray[np.bool_]:
    """Instants in which the GPUs did not plainly pause; how long pauses last is not the pace of the work."""
    if USE not in series:
        return np.ones(len(next(iter(series.values()), np.zeros(1))), dtype=bool)
    return np.asarray(~(series[USE] <= PAUSE_RATIO * use))


@functools.lru_cache
def _weights(h: int) -> Floats:
    """(h,) weights of a mean over `h` instants.

    Hann's window: an iteration longer than the sampling interval beats with it, and its ripple in a plain mean is larger than
    most slow-downs. Under these weights it falls with the third power of the horizon.
    """
    bell = np.hanning(h + 2)[1:-1]
    return np.asarray(bell / bell.sum())


def _means_N(value_T: Floats, h: int) -> Floats:
    if len(value_T) < h:
        return np.empty(0)
    means = np.lib.stride_tricks.sliding_window_view(value_T, h) @ _weights(h)
    return np.asarray(means[np.isfinite(means)])


def _newest_mean(value_T: Floats, h: int) -> float:
    newest = value_T[-h:]
    weights = _weights(h)[-len(newest) :] * np.isfinite(newest)
    return float(np.nansum(newest * weights) / weights.sum()) if weights.any() else np.nan


def _longest_run(flags_T: NDArray[np.bool_]) -> int:
    longest = run = 0
    for flag in flags_T:
        run = run + 1 if flag else 0
        longest = max(longest, run)
    return longest


def _newest_run(flags_T: NDArray[np.bool_]) -> int:
    off = np.flatnonzero(~flags_T[::-1])
    return int(off[0]) if len(off) else len(flags_T)
