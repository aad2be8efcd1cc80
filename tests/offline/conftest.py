"""Small recorded jobs on disk, written by the product's own writer."""

import dataclasses
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from eagleeye.source.trace import write_trace
from eagleeye.window import Window

START_S = 1_700_000_000.0


def make_job(ranks: int = 8, points: int = 240, seed: int = 0, job: str = "j", step_s: float = 5.0) -> Window:
    """A busy job: utilisation near 0.9, power and clock with noise of half a percent and permanent differences."""
    rng = np.random.default_rng(seed)
    levels_M = np.array([0.9, 400.0, 1.4e9])
    own, noise = 0.02 * rng.standard_normal((ranks, 3, 1)), 0.005 * rng.standard_normal((ranks, 3, points))
    return Window(
        job,
        tuple(range(ranks)),
        tuple(f"n{r // 2}" for r in range(ranks)),
        ("",) * ranks,
        ("gpu_utilization_ratio", "gpu_power_watts", "gpu_sm_clock_hertz"),
        START_S + step_s * points,
        step_s,
        (levels_M[None, :, None] * (1 + own + noise)).astype(np.float32),
    )


def altered(window: Window, change: Callable[[np.ndarray], None]) -> Window:
    values_RMT = window.values_RMT.copy()
    change(values_RMT)
    return dataclasses.replace(window, values_RMT=values_RMT)


def utc(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat().replace("+00:00", "Z")


@pytest.fixture(scope="session")
def job() -> Callable[..., Window]:
    return make_job


@pytest.fixture(scope="session")
def alter() -> Callable[[Window, Callable[[np.ndarray], None]], Window]:
    return altered


@pytest.fixture
def trace(tmp_path: Path) -> Callable[..., Path]:
    """Write a window as a trace; `labels` are (start, end, kind, category, nodes), in seconds after the start."""

    def write(name: str, window: Window, labels: list[tuple[float, float, str, str, list[str]]] | None = None) -> Path:
        folder = tmp_path / "traces" / name
        write_trace(folder, [window])
        if labels is not None:
            entries = [
                {
                    "start": utc(START_S + start), "end": utc(START_S + end), "kind": kind, "category": category,
                    "nodes": nodes, "ranks": [], "infrastructure": True, "nameable": bool(nodes),
                }
                for start, end, kind, category, nodes in labels
            ]  # fmt: skip
            (folder / "labels.json").write_text(json.dumps(entries))
        return folder

    return write


@pytest.fixture
def verdicts(tmp_path: Path) -> Callable[..., Path]:
    """Write verdicts (seconds after the start, decision, nodes) as OUT/NAME.jsonl; return OUT."""

    def write(name: str, *ticks: tuple[float, str, list[str]]) -> Path:
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        lines = [
            json.dumps(
                {
                    "time": utc(START_S + at),
                    "decision": decision,
                    "suspects": [{"rank": 0, "node": n, "score": 2.0} for n in nodes],
                }
            )
            for at, decision, nodes in ticks
        ]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        return out

    return write
