"""What a rank does beyond what its peers do: the common ground that every detector stands on.

In synchronous training one slow rank slows everybody, so values themselves accuse all ranks alike. What separates them is the
difference to the median of the ranks that do the same work (EROICA and Greyhound compare the same way; TRANSOM section IV
compares raw values, which is where we differ). Permanent differences between boards are a job's own and are learned in its first
minutes. Units vanish: 1.0 is one robust standard deviation of healthy ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from eagleeye.errors import NoData
from eagleeye.metrics import BY_COLUMN
from eagleeye.window import Window

MIN_PEERS = 3
"""Fewer ranks than this can disagree, but nobody can say who is right."""

MAGNITUDE_FLOOR_RATIO = 0.01
"""A difference far below one percent of the metric's usual peak is never a fault, however steady the metric is."""

ABSOLUTE_FLOOR = {"1": 0.005, "1/s": 0.2, "bytes/s": 1000.0, "bytes": 65536.0, "seconds": 0.01, "celsius": 3.0, "watts": 2.0}
"""The same for metrics that are usually zero, by base unit."""

SHIFT_RATIO = 0.25
"""Of what everybody's value usually changes from one instant to the next: a clock that is off by a quarter explains as much."""

PASSAGE_POINTS, PASSAGE_JUMPS = 12, 4
"""A passage of the whole job from one state to another shows in no more than this many of so many instants."""

FINE_S, COARSE_S = 2.5, 15.0
"""Sampling finer than the first sees bursts of a second or two as several values; from the second on none as more than one."""

ROLE_RANKS = 4
"""Fewer ranks than this, or ranks of one node alone, are odd ranks and no role of their own."""

ROLE_POINTS = 24
"""Fewest instants that roles are told from."""

_NEAR_RATIO = 1.5
_KNOWN_RATIO = 0.75
_STABLE_RATIO = 0.95
_SAMPLED = 512

_LANES = 16
"""Instants that are sorted at once: their float32 values fill one cache line."""

_MUCH = 1_000_000
"""Values that a kernel goes through in a few milliseconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """Spread of healthy ranks around their peers: (M,) robust standard deviations of `metrics`, in their units."""

    metrics: tuple[str, ...]
    scale_M: NDArray[np.float64]


def compared(window: Window) -> tuple[str, ...]:
    """Return the metrics of a window that detectors compare: unknown names too, facts for rules not; sorted."""
    return tuple(sorted(m for m in window.metrics if m not in BY_COLUMN or BY_COLUMN[m].compared))


def differences_RMT(window: Window) -> NDArray[np.float32]:
    """Return (R, M, T) values minus the median of the rank's peers at the same instant; NaN for groups under `MIN_PEERS`."""
    group_R, median_GMT = _group_medians(window)
    return np.asarray(window.values_RMT - median_GMT[group_R], dtype=np.float32)


def offsets_RM(window: Window) -> NDArray[np.float32]:
    """Return (R, M) how far each rank permanently lies from its peers; NaN where nothing was observed, so nothing is known."""
    difference_TMR = plain(differences_RMT(window).transpose(2, 1, 0))
    T = len(difference_TMR)
    return np.ascontiguousarray(_medians(difference_TMR, np.arange(T), np.array([0, T]), 1)[0].T)


def _group_medians(window: Window) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return (R,) the index of each rank's group, and (G, M, T) the medians over the ranks of each group."""
    group_R = numbered(window.groups)
    first_G = np.concatenate([[0], np.cumsum(np.bincount(group_R))])
    use_threads(window.values_RMT.size)
    return group_R, _medians(plain(window.values_RMT), np.argsort(group_R, kind="stable"), first_G, MIN_PEERS)


def job_medians_MT(window: Window) -> NDArray[np.float32]:
    """Return (M, T) the medians over all ranks that were heard, however few; NaN where none was."""
    R = len(window.ranks)
    use_threads(window.values_RMT.size)
    return np.asarray(_medians(plain(window.values_RMT), np.arange(R), np.array([0, R]), 1)[0])


def use_threads(values: int) -> None:
    """Let kernels run on every processor when there is much to do, and else in the calling thread alone.

    On a busy machine waiting for the second thread takes longer than a small job's whole tick, and replays run side by side.
    """
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS if values > _MUCH else 1)


def plain(values: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """Return a contiguous, read-only float32 view, or a copy where needed: kernels are compiled for every kind of array anew."""
    view = np.ascontiguousarray(values, dtype=np.float32).view()
    view.flags.writeable = False
    return view


@numba.njit(cache=True)
def _exchange(low, high):  # type: ignore[no-untyped-def]
    """Put the smaller of each pair into `low`. A function of its own, since only so does the compiler know two arrays."""
    for i in range(len(low)):
        a, b = low[i], high[i]
        low[i] = b if b < a else a
        high[i] = a if b < a else b


@numba.njit(cache=True)
def _sort_columns(values_NL):  # type: ignore[no-untyped-def]
    """Sort each column by Batcher's merge exchange (Knuth, The Art of Computer Programming, algorithm 5.2.2 M).

    What it compares does not depend on the values, so that one instruction compares many columns.
    """
    N, L = values_NL.shape
    flat = values_NL.reshape(-1)
    p = 1
    while 2 * p < N:
        p *= 2
    while p > 0 and N > 1:
        q, low, apart = p, 0, p
        while 2 * q < N:
            q *= 2
        while True:
            for i in range(low, N - apart, 2 * p):
                stop = min(i + p, N - apart)
                _exchange(flat[i * L : stop * L], flat[(i + apart) * L : (stop + apart) * L])
            if q == p:
                break
            apart, q, low = q - p, q // 2, p
        p //= 2


@numba.njit(cache=True, parallel=True)
def _medians(values_RMT, order_R, first_G, least):  # type: ignore[no-untyped-def]
    """(G, M, T) medians, without NaN, over the ranks `order_R[first_G[g]:first_G[g + 1]]`; NaN for groups under `least` ranks."""
    G, M, T = len(first_G) - 1, values_RMT.shape[1], values_RMT.shape[2]
    blocks = (T + _LANES - 1) // _LANES
    out_GMT = np.full((G, M, T), np.nan, dtype=np.float32)
    for task in numba.prange(M * blocks):
        m, start = task // blocks, task % blocks * _LANES
        width = min(_LANES, T - start)
        sorted_RL = np.empty((len(order_R), _LANES), dtype=np.float32)
        seen_L = np.empty(_LANES, dtype=np.int64)
        for g in range(G):
            n = first_G[g + 1] - first_G[g]
            if n < least:
                continue
            seen_L[:] = 0
            for i in range(n):
                row_T = values_RMT[order_R[first_G[g] + i], m]
                for lane in range(width):
                    value = row_T[start + lane]
                    missing = np.isnan(value)
                    sorted_RL[i, lane] = np.inf if missing else value
                    seen_L[lane] += not missing
            _sort_columns(sorted_RL[:n])
            for lane in range(width):
                if seen_L[lane] > 0:
                    middle = sorted_RL[(seen_L[lane] - 1) // 2, lane] + sorted_RL[seen_L[lane] // 2, lane]
                    out_GMT[g, m, start + lane] = middle / np.float32(2)
    return out_GMT


def spread_over_nodes(ranks: Sequence[int], node_R: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the indices of `count` ranks in order, one of each node before a second one of any.

    Which ones follows from a hash of the rank alone, so it is the same in every tick and whatever the order of ranks.
    """
    hash_R = np.array(ranks, dtype=np.uint64) * np.uint64(2654435761) % np.uint64(2**32)
    by_node = np.lexsort((hash_R, node_R))
    _, first, many = np.unique(node_R[by_node], return_index=True, return_counts=True)
    turn = np.arange(len(by_node)) - np.repeat(first, many)
    return np.sort(by_node[np.lexsort((hash_R[by_node], turn))[:count]])


def numbered(names: Sequence[str]) -> NDArray[np.int64]:
    """Return for each name the number of its first occurrence among different names."""
    index = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return np.fromiter((index[name] for name in names), np.int64, len(names))


def roles(window: Window) -> tuple[str, ...]:
    """Return groups of ranks that do the same work, for a job that does not tell its own; one group when in doubt.

    Pipeline stages send and compute at different moments. Their levels differ, too, but so do those of boards, and permanent
    differences are removed anyway; what remains, and would look like a fault, is a shape of their own. For each metric, ranks are
    joined while they differ little more from each other than from their nearest neighbour on another node (single linkage of
    squared distances). A partition counts if both halves of the stretch show it and each of its parts has `ROLE_RANKS` ranks on
    two nodes; metrics refine each other, the clearest first.

    Parameters
    ----------
    window : normal work; where it has several groups already, these are returned
    """
    T = window.values_RMT.shape[2]
    if len(set(window.groups)) > 1 or T < ROLE_POINTS or len(window.ranks) < 2 * ROLE_RANKS:
        return window.groups
    node_R = numbered(window.nodes)
    sampled = spread_over_nodes(window.ranks, node_R, _SAMPLED)
    found = []
    for metric in compared(window):
        difference_RT = differences_RMT(window.select([metric]))[:, 0]
        first, second = (_split(half, node_R, sampled) for half in (difference_RT[:, : T // 2], difference_RT[:, T // 2 :]))
        if first and second:
            overlap = np.zeros((first[1].max() + 1, second[1].max() + 1))
            np.add.at(overlap, (first[1], second[1]), 1 / len(node_R))
            if len(overlap) == overlap.shape[1] and overlap.max(axis=0).sum() >= _STABLE_RATIO:
                found.append((min(first[0], second[0]), second[1]))
    role_R = np.zeros(len(node_R), dtype=np.int64)
    for _, part_R in sorted(found, key=lambda partition: -partition[0]):
        finer_R = np.unique(role_R * len(node_R) + part_R, return_inverse=True)[1]
        if all(_is_role(np.flatnonzero(finer_R == role), node_R) for role in range(finer_R.max() + 1)):
            role_R = finer_R
    if not role_R.any():
        return window.groups
    return tuple(f"role {role + 1}" for role in numbered([str(role) for role in role_R]))


def _is_role(ranks: NDArray[np.int64], node_R: NDArray[np.int64]) -> bool:
    return len(ranks) >= ROLE_RANKS and len(np.unique(node_R[ranks])) > 1


def _split(
    difference_RT: NDArray[np.float32], node_R: NDArray[np.int64], sampled: NDArray[np.int64]
) -> tuple[float, NDArray[np.int64]] | None:
    """Return how clearly ranks fall apart in one metric (1 = as much as neighbours do) and (R,) parts, or None if they do not."""
    known = np.isfinite(difference_RT)
    core = sampled[known[sampled].mean(axis=1) > 0.5]
    if len(core) < 2 * ROLE_RANKS:
        return None
    T = known.shape[1]
    shape_RT = difference_RT - _medians(plain(difference_RT.T[:, None]), np.arange(T), np.array([0, T]), 1)[0].T
    noise = 1.4826 * float(np.median(np.abs(shape_RT[known])))
    if noise <= 0:
        return None
    # one wild value is no shape
    shape_RT = np.clip(np.where(known, shape_RT / noise, 0.0), -6.0, 6.0).astype(np.float64)
    squares_R = (shape_RT[core] ** 2).sum(axis=1)
    squared_RR = squares_R[:, None] + squares_R - 2 * shape_RT[core] @ shape_RT[core].T
    usual = float(np.median(np.where(node_R[core][:, None] == node_R[core], np.inf, squared_RR).min(axis=1)))
    if not 0 < usual < np.inf:
        return None
    parts = [core[part] for part in _components(squared_RR < _NEAR_RATIO * usual)]
    parts = [part for part in parts if _is_role(part, node_R)]
    if len(parts) < 2 or sum(len(part) for part in parts) < _KNOWN_RATIO * len(core):
        return None
    middle_PT = np.stack([np.median(shape_RT[part], axis=0) for part in parts])
    part_R = np.stack([((shape_RT - middle_T) ** 2).sum(axis=1) for middle_T in middle_PT]).argmin(axis=0)
    apart = min(float(((a - b) ** 2).sum()) for i, a in enumerate(middle_PT) for b in middle_PT[:i])
    return apart / usual, part_R


def _components(near_RR: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """Return the connected components of a graph as indices."""
    left_R = np.ones(len(near_RR), dtype=bool)
    found = []
    while left_R.any():
        part_R = np.zeros_like(left_R)
        part_R[np.argmax(left_R)] = True
        front_R = part_R
        while front_R.any():
            front_R = near_RR[front_R].any(axis=0) & ~part_R
            part_R = part_R | front_R
        left_R &= ~part_R
        found.append(np.flatnonzero(part_R))
    return found


def fit_scale(windows: Sequence[Window]) -> Scale:
    """Learn the spread of healthy ranks around their peers.

    Parameters
    ----------
    windows : normal windows; a metric that only some of them carry is learned from those

    Raises
    ------
    NoData
        No group has `MIN_PEERS` ranks, or nothing was observed.
    """
    metrics = tuple(sorted({metric for window in windows for metric in compared(window)}))
    scale_M = np.zeros(len(metrics))
    for m, metric in enumerate(metrics):
        parts = []
        sizes = []
        swing = 0.0
        for window in windows:
            one = window.select([metric])
            change_GT = np.abs(np.diff(_group_medians(one)[1][:, 0], axis=1))
            swing = max(swing, float(np.median(change_GT[np.isfinite(change_GT)]) if np.isfinite(change_GT).any() else 0.0))
            difference = differences_RMT(one) - offsets_RM(one)[:, :, None]
            parts.append(difference[np.isfinite(difference)])
            sizes.append(np.abs(one.values_RMT[np.isfinite(one.values_RMT)]))
        deviations, size = np.concatenate(parts), np.concatenate(sizes)
        if not len(deviations):
            scale_M[m] = np.nan
            continue
        spread = 1.4826 * float(np.median(np.abs(deviations)))
        scale_M[m] = max(
            spread,
            MAGNITUDE_FLOOR_RATIO * float(np.quantile(size, 0.9)),
            SHIFT_RATIO * swing,
            max(_noise(metric, w.unit(metric)) for w in windows),
        )
    if not np.isfinite(scale_M).any():
        raise NoData(f"job {windows[0].job}: no group of {MIN_PEERS} ranks that do the same work, so nobody can be compared")
    kept = np.isfinite(scale_M)
    return Scale(tuple(m for m, k in zip(metrics, kept, strict=True) if k), scale_M[kept])


def _noise(metric: str, unit: str) -> float:
    known = BY_COLUMN.get(metric)
    return known.noise if known and known.noise is not None else ABSOLUTE_FLOOR.get(unit, 1e-9)


def jumps_GM(window: Window) -> NDArray[np.float32]:
    """Return (G, M) the largest change of a group's median from one instant to the next; 0 where nothing was observed."""
    jump_GMT = np.abs(np.diff(_group_medians(window)[1], axis=2))
    return np.asarray(np.max(np.nan_to_num(jump_GMT), axis=2, initial=0.0))


def prepare(window: Window, scale: Scale, offset_RM: NDArray[np.float32], jump_GM: NDArray[np.float32] | None = None) -> Window:
    """Return a window of the scale's metrics in robust standard deviations from the peers.

    Where a group's median changes by more than `jump_GM` within one instant (a job that stalls, or goes on), the excess explains
    as much of a deviation: scrapes of nodes are not simultaneous, and who is scraped a moment later shows what the others showed
    before.

    Every instant becomes the median of the newest three observed values, of five where sampling is finer than `FINE_S`: this
    removes what a single scrape did, and bridges gaps. From `COARSE_S` on it stays as it is: it is a mean over long enough, and
    three of them reach too far back. A rank that was observed in less than half of the instants, or in none of the last three,
    stays NaN.
    """
    picked = window.select(scale.metrics)
    group_R, median_GMT = _group_medians(picked)
    excess_GMT = np.zeros_like(median_GMT)
    if jump_GM is not None and median_GMT.shape[2] > 1:
        change_GMT = np.nan_to_num(np.abs(np.diff(median_GMT, axis=2))) - jump_GM[:, :, None]
        excess_GMT[:, :, 1:] = np.maximum(change_GMT, 0.0)
        # what goes on jumping is no passage from one state to another, but the new state
        often_GMT = np.cumsum(excess_GMT > 0, axis=2, dtype=np.int64)
        often_GMT[:, :, PASSAGE_POINTS:] -= often_GMT[:, :, :-PASSAGE_POINTS].copy()
        excess_GMT[often_GMT > PASSAGE_JUMPS] = 0.0
        excess_GMT[:, :, :-1] = np.maximum(excess_GMT[:, :, :-1], excess_GMT[:, :, 1:])
    count = 5 if window.step_s < FINE_S else 3 if window.step_s < COARSE_S else 1
    values_RMT = _prepared(picked.values_RMT, median_GMT, excess_GMT, group_R, plain(offset_RM), plain(scale.scale_M), count)
    return replace(picked, values_RMT=values_RMT)


@numba.njit(cache=True, parallel=True)
def _prepared(values_RMT, median_GMT, excess_GMT, group_R, offset_RM, scale_M, count):  # type: ignore[no-untyped-def]
    """(R, M, T): every instant the median of the newest `count` observed deviations; see `prepare`."""
    R, M, T = values_RMT.shape
    out_RMT = np.empty((R, M, T), dtype=np.float32)
    for r in numba.prange(R):
        newest_KT = np.empty((count, T), dtype=np.float32)
        for m in range(M):
            row_T, median_T, out_T = values_RMT[r, m], median_GMT[group_R[r], m], out_RMT[r, m]
            excess_T = excess_GMT[group_R[r], m]
            for t in range(T):
                away = (row_T[t] - median_T[t]) - offset_RM[r, m]
                if excess_T[t] > 0:
                    away = max(away - excess_T[t], 0.0) if away > 0 else min(away + excess_T[t], 0.0) if away < 0 else away
                out_T[t] = away / scale_M[m]
            observed, first, last = 0, T, -1
            for t in range(T):
                if np.isfinite(out_T[t]):
                    observed, first, last = observed + 1, min(first, t), t
            # a rank whose newest instants are missing is unknown now, whatever it did before
            if 2 * observed < T or last < T - 3:
                out_T[:] = np.nan
                continue
            newest_KT[:, 0] = out_T[first]
            for t in range(1, T):
                seen = np.isfinite(out_T[t])
                newest_KT[0, t] = out_T[t] if seen else newest_KT[0, t - 1]
                for k in range(1, count):
                    newest_KT[k, t] = newest_KT[k - seen, t - 1]
            _sort_columns(newest_KT)
            out_T[:] = newest_KT[count // 2]
            # the first instants have too few values before them, and no single one of them may stand for them
            out_T[: count - 1] = out_T[min(count, T) - 1]
    return out_RMT
