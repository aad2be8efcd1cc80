"""Input as bad as it comes: Judge abstains or says so. It never falls over, and blames nobody for it."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from eagleeye.errors import DataError
from eagleeye.metrics import PREFIX
from eagleeye.online.judge import Judge, Settings
from eagleeye.records import Decision, Verdict
from eagleeye.source.series import assemble, block_up
from eagleeye.source.trace import TraceSource, write_trace
from eagleeye.window import Window

pytestmark = pytest.mark.jit

LEARN_S, STEP_S, TICKS = 200.0, 5.0, 150
CHANGE = 90
"""Tick at which what comes later in a stream changes; learned by then."""

Bad = Callable[[Callable[..., Any], Path], Callable[[int, float], Window]]


def _plain(change: Callable[[Any], None], **shape: Any) -> Bad:
    def make(stream: Callable[..., Any], folder: Path) -> Callable[[int, float], Window]:
        made = stream(T=TICKS, step_s=STEP_S, **shape)
        change(made)
        return lambda t, length_s: made.window(t, length_s)  # type: ignore[no-any-return]

    return make


def _all_missing(made: Any) -> None:
    for column in made.columns.values():
        column[:] = math.nan


def _constant(made: Any) -> None:
    for name, value in (("gpu_temperature_celsius", 60.0), ("ib_port_errors_per_second", 0.0), ("gpu_power_watts", 600.0)):
        made.columns[name] = np.full((8, TICKS), value, np.float32)


def _all_constant(made: Any) -> None:
    for column in made.columns.values():
        column[:] = column[0, 0]


def _holes(made: Any) -> None:
    noise = np.random.default_rng(5)
    for column in made.columns.values():
        column[noise.random(column.shape) < 0.4] = math.nan


def _whole_scrapes_missing(made: Any) -> None:
    lost = np.random.default_rng(6).random((8, TICKS)) < 0.4
    for column in made.columns.values():
        column[lost] = math.nan


def _boards_shared(made: Any) -> None:
    """Two ranks on parts of one board: each pair sees the very same power and clock, and half of the use."""
    for name in ("gpu_power_watts", "gpu_sm_clock_hertz"):
        made.columns[name][1::2] = made.columns[name][::2]
    made.columns["gpu_utilization_ratio"][:] *= 0.5


def _come_and_go(stream: Callable[..., Any], folder: Path) -> Callable[[int, float], Window]:
    made = stream(T=TICKS, step_s=STEP_S)

    def window(t: int, length_s: float) -> Window:
        whole = made.window(t, length_s)
        kept = [r for r in range(8) if t < CHANGE or r < 6 or t >= CHANGE + 10]
        return replace(
            whole,
            ranks=tuple(whole.ranks[r] for r in kept),
            nodes=tuple(whole.nodes[r] for r in kept),
            groups=tuple(whole.groups[r] for r in kept),
            values_RMT=whole.values_RMT[kept],
        )

    return window


def _flicker(made: Any) -> None:
    """Ranks that keep their place and are heard every other minute only."""
    for column in made.columns.values():
        for r in (1, 6):
            column[r, (np.arange(TICKS) // 12) % 2 == r % 2] = math.nan


def _scraped(at: Callable[[int, NDArray[np.float64]], NDArray[np.float64]], reset: bool = False) -> Bad:
    """A job as exporters of four nodes tell it; `at` says when node n was scraped by the clock that stamps the samples."""

    def make(stream: Callable[..., Any], folder: Path) -> Callable[[int, float], Window]:
        made = stream(T=TICKS + 1, step_s=STEP_S)
        clock_N = made.start_s + STEP_S * np.arange(TICKS + 1)
        series = []
        for r, node in zip(made.ranks, made.nodes, strict=True):
            at_N = at(int(node[1:]), clock_N)
            labels = {"node": node, "training_job": "llm", "rank": str(r), "gpu": str(r % 2), "group": "", "pid": "1"}
            board = {"node": node, "gpu": str(r % 2)}
            series.append((PREFIX + "rank_info", labels, at_N, np.ones(at_N.size)))
            for name in ("gpu_utilization_ratio", "gpu_power_watts", "gpu_sm_clock_hertz"):
                series.append((PREFIX + name, board, at_N, made.columns[name][r].astype(float)))
            if r % 2 == 0:
                sent_N = np.cumsum(made.columns["ib_transmit_bytes_per_second"][r].astype(float) * STEP_S)
                if reset and r == 4:
                    sent_N[CHANGE:] -= sent_N[CHANGE] - 1e9
                port = {"node": node, "device": "mlx5_0", "port": "1"}
                series.append((PREFIX + "infiniband_port_data_transmitted_bytes_total", port, at_N, sent_N))

        def window(t: int, length_s: float) -> Window:
            come = [(name, labels, at_N[: t + 2], values_N[: t + 2]) for name, labels, at_N, values_N in series]
            return assemble("llm", block_up(come), float(clock_N[t + 1]), length_s, STEP_S, forget_s=600.0)

        return window

    return make


def _recorded(change: Callable[[pd.DataFrame], pd.DataFrame]) -> Bad:
    """A trace whose rows were changed after it was written."""

    def make(stream: Callable[..., Any], folder: Path) -> Callable[[int, float], Window]:
        made = stream(T=TICKS, step_s=STEP_S)
        write_trace(folder / "t", [made.window(TICKS - 1)])
        path = folder / "t" / "metrics.parquet"
        change(pd.read_parquet(path)).to_parquet(path)
        source = TraceSource(folder / "t")
        return lambda t, length_s: source.window("llm", float(source.stamps_s[t]), length_s)

    return make


def _skewed(node: int, clock_N: NDArray[np.float64]) -> NDArray[np.float64]:
    return clock_N - (30.0 if node == 2 else 0.0)


def _ahead(node: int, clock_N: NDArray[np.float64]) -> NDArray[np.float64]:
    return clock_N + (30.0 if node == 2 else 0.0)


LEARNS, UNSURE = {Decision.UNSURE, Decision.NORMAL}, {Decision.UNSURE}

CASES: dict[str, tuple[Bad, set[Decision], set[Decision]]] = {
    "one rank": (_plain(lambda made: None, R=1), UNSURE, UNSURE),
    "two ranks": (_plain(lambda made: None, R=2), UNSURE, UNSURE),
    "boards that are shared": (_plain(_boards_shared), LEARNS, {Decision.NORMAL}),
    "ranks that come and go": (_come_and_go, LEARNS, UNSURE),
    "ranks that flicker": (_plain(_flicker), LEARNS, LEARNS),
    "all metrics missing": (_plain(_all_missing), UNSURE, UNSURE),
    "constant metrics": (_plain(_constant), LEARNS, {Decision.NORMAL}),
    "all metrics constant": (_plain(_all_constant), LEARNS, {Decision.NORMAL}),
    "a counter that is reset": (_scraped(lambda node, clock_N: clock_N, reset=True), LEARNS, {Decision.NORMAL}),
    "a clock 30 s behind": (_scraped(_skewed), LEARNS, UNSURE),
    "a clock 30 s ahead": (_scraped(_ahead), LEARNS, LEARNS),
    "rows out of order": (_recorded(lambda rows: rows.sample(frac=1.0, random_state=1)), LEARNS, {Decision.NORMAL}),
    "40 % of the values missing": (_plain(_holes), LEARNS, LEARNS),
    "40 % of the scrapes missing": (_plain(_whole_scrapes_missing), LEARNS, LEARNS),
    "40 % of the rows missing": (_recorded(lambda rows: rows.sample(frac=0.6, random_state=2)), LEARNS, LEARNS),
}


def judged(window: Callable[[int, float], Window]) -> list[Verdict]:
    judge = Judge(Settings(learn_s=LEARN_S))
    return [judge.judge(window(t, judge.length_s(STEP_S))) for t in range(TICKS)]


@pytest.mark.parametrize("name", list(CASES))
def test_bad_input_blames_nobody(name: str, stream: Callable[..., Any], tmp_path: Path) -> None:
    bad, allowed, after = CASES[name]
    verdicts = judged(bad(stream, tmp_path))
    told = [(t, v.reason) for t, v in enumerate(verdicts) if v.decision is Decision.ANOMALOUS or v.suspects]
    assert told == []
    assert {v.decision for v in verdicts} <= allowed
    assert {v.decision for v in verdicts[CHANGE + 12 : CHANGE + 20]} <= after
    assert all(v.reason for v in verdicts)


def test_two_rows_for_one_instant_are_refused_in_one_sentence(stream: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.parquet: rank 0 has two rows for 2026-02-02T02:40:00Z; keep one$"):
        _recorded(lambda rows: pd.concat([rows, rows]))(stream, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "boards that are shared",
        "constant metrics",
        pytest.param("40 % of the values missing"),
        "40 % of the scrapes missing",
    ],
)
def test_a_sick_rank_is_found_in_bad_input_too(name: str, stream: Callable[..., Any], tmp_path: Path) -> None:
    """So that the silence of the test above is no deafness."""
    changes = {
        "boards that are shared": _boards_shared,
        "constant metrics": _constant,
        "40 % of the values missing": _holes,
        "40 % of the scrapes missing": _whole_scrapes_missing,
    }

    def sick(made: Any) -> None:
        changes[name](made)
        for column in ("gpu_sm_clock_hertz", "gpu_power_watts"):
            made.columns[column][5, CHANGE:] *= 0.5

    verdicts = judged(_plain(sick)(stream, tmp_path))
    blamed = {s.rank for v in verdicts for s in v.suspects}
    assert blamed == {5}
    assert all(not v.suspects for v in verdicts[:CHANGE])
