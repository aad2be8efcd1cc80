"""Samples of series -> the columns of a Window. Pure: no clock, no I/O.

In come `Block`s of raw samples, as a scrape or Prometheus gives them; out goes one `Window` of a job. Every live source passes
through here, so that the same exporters give the same window whichever way they were read.

Shape suffixes: S series of a block, N instants of a block, R ranks, M metrics, T columns of the window.

A column holds what was known at its stamp: the newest sample at or before it, never a later one; NaN when that one is a miss or
more than `HOLD_STEPS` steps old.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from eagleeye.errors import NoData
from eagleeye.metrics import BY_COLUMN, BY_SERIES, CATALOGUE, RANK_INFO, Kind, Metric
from eagleeye.window import Window

Floats = NDArray[np.float64]
V = TypeVar("V", bound=np.generic)

HOLD_STEPS = 1.5
"""How many steps a sample is held: above 1, for scrape and stamp are never in phase; below 2, so that a missed scrape shows."""

MARGIN_STEPS = 4
"""How many steps before a window its samples are needed: for the rate of the first column."""

SLACK_S = 1e-5
"""Two times closer than this are the same: stamps are sums of floats, and traces store microseconds."""

_FLICKER_STEPS = 6.0
"""A rank that is not told of for longer than this and then again counts as placed anew."""

_PROCESS_UP = BY_COLUMN["process_up"].series
_LOG_CLASSES = {"hardware": "log_hardware_errors", "communication": "log_communication_errors"}


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Series that were read at the same instants, as the series of one exporter are.

    Attributes
    ----------
    names : (S,) series names of the catalogue
    labels : (S,) their labels
    at_N : (N,) seconds since the epoch, strictly increasing
    values_SN : (S, N) raw values; NaN = the series was not there at that instant, or the scrape failed
    """

    names: tuple[str, ...]
    labels: tuple[Mapping[str, str], ...]
    at_N: Floats
    values_SN: Floats


def block_up(series: Iterable[tuple[str, Mapping[str, str], Floats, Floats]]) -> list[Block]:
    """Put (name, labels, at_N, values_N) with equal instants together, since a block is converted at once."""
    alike: dict[bytes, list[tuple[str, Mapping[str, str], Floats, Floats]]] = defaultdict(list)
    for one in series:
        if one[2].size:
            alike[one[2].tobytes()].append(one)
    return [
        Block(tuple(s[0] for s in group), tuple(s[1] for s in group), group[0][2], np.stack([s[3] for s in group]))
        for group in alike.values()
    ]


def at_stamps(values_SN: Floats, at_N: Floats, stamps_T: Floats, kind: Kind, step_s: float) -> Floats:
    """Return (S, T) what raw samples say at the stamps.

    A gauge: its newest value. A timestamp: its age, stamp minus newest value, NaN for a time that never was (zero). A counter:
    its mean rate per second from the newest sample before the column to the newest in it; after a reset it counts from zero,
    and no rate spans a gap of more than `HOLD_STEPS` steps.
    """
    S, N = values_SN.shape
    hold_s = HOLD_STEPS * step_s + SLACK_S
    valid_SN = np.isfinite(values_SN)
    values_SN = np.where(valid_SN, values_SN, np.nan)
    newest_SN = np.maximum.accumulate(np.where(valid_SN, np.arange(N), -1), axis=1)
    newest_SP = np.concatenate([np.full((S, 1), -1), newest_SN], axis=1)  # before instant n; -1 = none yet

    def newest_ST(times_T: Floats) -> NDArray[np.intp]:
        return newest_SP[:, np.searchsorted(at_N, times_T + SLACK_S, side="right")]

    def pick(array_SN: NDArray[V], index_ST: NDArray[np.intp]) -> NDArray[V]:
        return np.take_along_axis(array_SN, np.maximum(index_ST, 0), axis=1)

    # The newest instant decides, also when the series was missing then: only where nobody knows of a miss is a sample held.
    now_ST = np.broadcast_to(np.searchsorted(at_N, stamps_T + SLACK_S, side="right") - 1, (S, stamps_T.size))
    known_ST = (now_ST >= 0) & pick(valid_SN, now_ST) & (stamps_T - at_N[np.maximum(now_ST, 0)] <= hold_s)
    if kind != "counter":
        value_ST = pick(values_SN, now_ST)
        if kind == "timestamp":
            known_ST &= value_ST > 0
            value_ST = np.maximum(stamps_T - value_ST, 0.0)  # another machine's clock may run ahead a little
        return np.where(known_ST, value_ST, np.nan)

    before_SN = newest_SP[:, :-1]
    pair_SN = valid_SN & (before_SN >= 0)
    gap_SN = pair_SN & (at_N - at_N[np.maximum(before_SN, 0)] > hold_s)
    rise_SN = np.where(pair_SN & ~gap_SN, values_SN - pick(values_SN, before_SN), 0.0)
    rise_SN = np.where(rise_SN < 0, values_SN, rise_SN)
    total_SN, gaps_SN = np.cumsum(rise_SN, axis=1), np.cumsum(gap_SN, axis=1)
    then_ST = newest_ST(stamps_T - step_s)
    then_ST = np.where((then_ST == now_ST) | (then_ST < 0), pick(before_SN, now_ST), then_ST)
    known_ST &= (then_ST >= 0) & (pick(gaps_SN, now_ST) == pick(gaps_SN, then_ST))
    span_ST = at_N[np.maximum(now_ST, 0)] - at_N[np.maximum(then_ST, 0)]
    rise_ST = pick(total_SN, now_ST) - pick(total_SN, then_ST)
    return np.where(known_ST & (span_ST > 0), rise_ST / np.where(span_ST > 0, span_ST, 1.0), np.nan)


@dataclass(frozen=True, slots=True)
class _Stay:
    """A rank on a GPU of a node, told of from `first_s` to `last_s` without a break; its process was last there at `alive_s`."""

    node: str
    gpu: str
    group: str
    first_s: float
    last_s: float
    alive_s: float


def _stays(blocks: Sequence[Block], job: str, step_s: float) -> dict[int, list[_Stay]]:
    told: list[tuple[int, Mapping[str, str], Floats]] = []
    dead: dict[tuple[str, int], list[Floats]] = defaultdict(list)
    for block in blocks:
        for s, name in enumerate(block.names):
            labels = block.labels[s]
            if labels.get("training_job") != job or not labels.get("rank", "").isdecimal():
                continue
            rank = int(labels["rank"])
            if name == RANK_INFO.series:
                told.append((rank, labels, block.at_N[np.isfinite(block.values_SN[s])]))
            elif name == _PROCESS_UP:
                dead[labels.get("node", ""), rank].append(block.at_N[block.values_SN[s] == 0])
    found: dict[int, list[_Stay]] = defaultdict(list)
    for rank, labels, at_N in told:
        place = (labels.get("node", ""), labels.get("gpu", ""), labels.get("group", ""))
        dead_N = np.isin(at_N, np.concatenate(dead.get((place[0], rank), [at_N[:0]])))
        breaks = np.flatnonzero(np.diff(at_N) > _FLICKER_STEPS * step_s) + 1
        for run, gone in zip(np.split(at_N, breaks), np.split(dead_N, breaks), strict=True):
            if run.size:
                alive_s = float(run[~gone][-1]) if not gone.all() else -np.inf
                found[rank].append(_Stay(*place, float(run[0]), float(run[-1]), alive_s))
    return found


def _whereabouts(stays: Sequence[_Stay], stamps_T: Floats, hold_s: float) -> NDArray[np.intp]:
    """Return (T,) the index of the stay that holds at each stamp, -1 before the first.

    Of two that are alive at once the one that began later holds. Exporters go on telling of a dead process for long, so one that
    is not alive holds only until another begins; it does so also when its exporter fell silent, so that the rank keeps its place.
    """
    stay_T = np.full(stamps_T.size, -1)
    for index in sorted(range(len(stays)), key=lambda i: (stays[i].alive_s, stays[i].last_s)):
        stay_T[stamps_T + SLACK_S >= stays[index].first_s] = index
    for index in sorted(range(len(stays)), key=lambda i: (stays[i].first_s, stays[i].alive_s)):
        stay = stays[index]
        stay_T[(stamps_T + SLACK_S >= stay.first_s) & (stamps_T <= stay.alive_s + hold_s)] = index
    return stay_T


def _columns(name: str, labels: Mapping[str, str]) -> list[Metric]:
    """Return the catalogue rows that a series feeds; an error count feeds the total and its class."""
    row = BY_SERIES.get(name)
    if row is None:
        return []
    by_class = _LOG_CLASSES.get(labels.get("class", "")) if row.column == "log_errors" else None
    return [row, BY_COLUMN[by_class]] if by_class else [row]


def _owners(row: Metric, labels: Mapping[str, str], job: str) -> list[tuple[str, ...]]:
    """Return the keys under which ranks find a series: their node, their GPU (by index or UUID), or themselves."""
    node = labels.get("node", "")
    if row.scope == "rank":
        return [(node, "rank", labels.get("rank", ""))] if labels.get("training_job") == job else []
    if row.scope == "gpu":
        return [(node, "gpu", labels[key]) for key in ("gpu", "uuid") if labels.get(key)]
    return [(node,)]


def _join(rows: list[Floats], how: str) -> Floats:
    """Return (T,) one value of several series; what is absent from a page that was read is not there, and makes no NaN."""
    if len(rows) == 1:
        return rows[0]
    stacked = np.stack(rows)
    if how == "max":
        return np.asarray(np.fmax.reduce(stacked, axis=0))
    if how == "min":
        return np.asarray(np.fmin.reduce(stacked, axis=0))
    return np.where(np.isfinite(stacked).any(axis=0), np.nansum(stacked, axis=0), np.nan)


def assemble(job: str, blocks: Sequence[Block], end_s: float, length_s: float, step_s: float, forget_s: float = 0.0) -> Window:
    """Return the window of a job from raw samples.

    Parameters
    ----------
    blocks : samples from before the window (a few steps, for rates) to its end; later ones are not looked at
    length_s : T = length_s / step_s columns, at least one
    forget_s : a rank last told of longer ago than this and than the window is left out

    Raises
    ------
    NoData
        No rank of the job was told of.
    """
    T = max(1, round(length_s / step_s))
    stamps_T = end_s - step_s * np.arange(T - 1, -1, -1, dtype=np.float64)
    hold_s = HOLD_STEPS * step_s
    since_s = end_s - max(T * step_s, forget_s)
    blocks = [b for b in (_between(block, since_s - MARGIN_STEPS * step_s, end_s) for block in blocks) if b is not None]
    stays = {
        rank: all_ for rank, all_ in sorted(_stays(blocks, job, step_s).items()) if max(stay.last_s for stay in all_) > since_s
    }
    if not stays:
        others = jobs_in(blocks)
        told = f"; there are {', '.join(others)}" if others else "; is an exporter running beside it?"
        raise NoData(f"job {job!r}: no exporter told of a rank in the last {end_s - since_s:.0f} s{told}")
    nodes = {stay.node for all_ in stays.values() for stay in all_}

    found: dict[tuple[str, tuple[str, ...]], list[Floats]] = defaultdict(list)
    for block in blocks:
        wanted: dict[Kind, list[tuple[int, list[Metric]]]] = defaultdict(list)
        for s, (name, labels) in enumerate(zip(block.names, block.labels, strict=True)):
            rows = _columns(name, labels)
            if rows and labels.get("node", "") in nodes:
                wanted[rows[0].kind].append((s, rows))
        for kind, chosen in wanted.items():
            values_ST = at_stamps(block.values_SN[[s for s, _ in chosen]], block.at_N, stamps_T, kind, step_s)
            for values_T, (s, rows) in zip(values_ST, chosen, strict=True):
                for row in rows:
                    for owner in _owners(row, block.labels[s], job):
                        found[row.column, owner].append(values_T)
    joined = {key: _join(rows, BY_COLUMN[key[0]].join) for key, rows in found.items()}

    ranks = tuple(stays)
    last: list[_Stay] = []
    cube: dict[str, Floats] = {}
    for r, (rank, all_) in enumerate(stays.items()):
        stay_T = _whereabouts(all_, stamps_T, hold_s)
        last.append(all_[int(stay_T[-1])])
        for index in np.unique(stay_T[stay_T >= 0]):
            stay, here_T = all_[int(index)], stay_T == index
            owners: dict[str, tuple[str, ...]] = {
                "rank": (stay.node, "rank", str(rank)),
                "gpu": (stay.node, "gpu", stay.gpu),
            }
            for row in CATALOGUE:
                values = joined.get((row.column, owners.get(row.scope, (stay.node,))))
                if values is not None:
                    values_RT = cube.setdefault(row.column, np.full((len(ranks), T), np.nan))
                    values_RT[r, here_T] = values[here_T]
    metrics = tuple(row.column for row in CATALOGUE if row.column in cube)
    values_RMT = np.full((len(ranks), len(metrics), T), np.nan, dtype=np.float32)
    for m, column in enumerate(metrics):
        values_RMT[:, m] = cube[column]
    return Window(job, ranks, tuple(s.node for s in last), tuple(s.group for s in last), metrics, end_s, step_s, values_RMT)


def _between(block: Block, start_s: float, end_s: float) -> Block | None:
    first, stop = np.searchsorted(block.at_N, [start_s - SLACK_S, end_s + SLACK_S], side="right")
    if first == 0 and stop == block.at_N.size:
        return block
    return Block(block.names, block.labels, block.at_N[first:stop], block.values_SN[:, first:stop]) if stop > first else None


def jobs_in(blocks: Iterable[Block], after_s: float = -np.inf, until_s: float = np.inf) -> tuple[str, ...]:
    """Return the sorted names of the jobs of which a rank was told in (after_s, until_s]."""
    found = set()
    for block in blocks:
        inside_N = (block.at_N > after_s) & (block.at_N <= until_s + SLACK_S)
        for s, name in enumerate(block.names):
            job = block.labels[s].get("training_job")
            if name == RANK_INFO.series and job and job not in found and np.isfinite(block.values_SN[s, inside_N]).any():
                found.add(job)
    return tuple(sorted(found))
