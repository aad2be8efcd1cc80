"""Replay: one line a tick in the judged format, never looking ahead, whole files or none."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagleeye.errors import DataError, EnvironmentLacks, NoData, UsageError
from eagleeye.online.judge import Judge, Settings
from eagleeye.online.replay import line, replay, verdicts
from eagleeye.records import Category, Decision, Scope, Suspect, Verdict
from eagleeye.source.trace import TraceSource, write_trace

pytestmark = pytest.mark.jit

STEP_S = 10.0
SETTINGS = Settings(learn_s=600.0)
SHARED = Path(__file__).parents[2].parent / "shared" / "traces"
FAULT, CUT, T = 75, 90, 110


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory, stream: Callable[..., Any]) -> Path:
    """A folder of two traces: `whole`, whose rank 5 falls behind, and `cut`, its first ticks."""
    folder = tmp_path_factory.mktemp("traces")
    made = stream(R=6, T=T, step_s=STEP_S, per_node=1)
    made.columns["gpu_power_watts"][5, FAULT:] *= 0.6
    made.columns["gpu_sm_clock_hertz"][5, FAULT:] *= 0.6
    write_trace(folder / "whole", [made.window(T - 1)])
    write_trace(folder / "cut", [made.window(CUT - 1)])
    return folder


@pytest.fixture(scope="module")
def lines(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The lines of both, from one run."""
    told: list[str] = []
    out = tmp_path_factory.mktemp("out") / "new"
    written = replay([traces / "whole", traces / "cut"], out, SETTINGS, progress=told.append)
    assert written == [out / "whole.jsonl", out / "cut.jsonl"]
    assert sorted(out.iterdir()) == sorted(written), "nothing else lies there"
    assert re.fullmatch(r"1/2 whole: 110 ticks, \d+ anomalous", told[0])
    assert len(told) == 2
    return {path.stem: path.read_text().splitlines() for path in written}


def test_a_lesson_longer_than_the_usual_window_is_learned(tmp_path: Path, stream: Callable[..., Any]) -> None:
    """Lessons need more past than ticks do; a replay that always brings the same would never learn at fine sampling."""
    write_trace(tmp_path / "fine", [stream(R=4, T=340, step_s=1.0).window(339)])
    source, judge = TraceSource(tmp_path / "fine"), Judge(Settings(learn_s=150.0))
    told = list(verdicts(source, judge))
    assert [v.decision for v in told[-20:]] == [Decision.NORMAL] * 20
    assert len(told) == 340


def test_format_of_a_line() -> None:
    votes = {"knn_dtw": True, "matrix_profile": True, "lof": None}
    verdict = Verdict(
        "llm",
        0.0,
        1_772_440_270.25,
        Decision.ANOMALOUS,
        "why",
        Scope.RANK,
        Category.NETWORK,
        (Suspect(17, "gpu-0002", 3.1, "traffic"),),
        votes,
        None,
        "champion v3",
    )
    assert line(verdict) == {
        "time": "2026-03-02T08:31:10.250Z",
        "decision": "anomalous",
        "scope": "rank",
        "suspects": [{"rank": 17, "node": "gpu-0002", "score": 3.1}],
        "category": "network",
        "votes": votes,
        "rule": None,
        "model": "champion v3",
        "reason": "why",
    }
    quiet = line(replace(verdict, decision=Decision.UNSURE, scope=None, category=None, suspects=()))
    assert (quiet["decision"], quiet["scope"], quiet["category"], quiet["suspects"]) == ("unsure", None, None, [])


def test_a_line_a_tick(lines: dict[str, list[str]]) -> None:
    ticks = [json.loads(text) for text in lines["whole"]]
    assert len(ticks) == T
    assert ticks[0]["time"] == "2026-02-02T02:40:00.000Z"
    assert ticks[-1]["time"] == "2026-02-02T02:58:10.000Z"
    assert [t["decision"] for t in ticks[:59]] == ["unsure"] * 59
    assert {t["decision"] for t in ticks[60:FAULT]} == {"normal"}
    blamed = [i for i, t in enumerate(ticks) if t["decision"] == "anomalous"]
    assert FAULT <= blamed[0] <= FAULT + 3
    assert all([s["node"] for s in ticks[i]["suspects"]] == ["n5"] for i in blamed)
    assert set(ticks[-1]) == {"time", "decision", "scope", "suspects", "category", "votes", "rule", "model", "reason"}


def test_it_never_looks_ahead(lines: dict[str, list[str]]) -> None:
    assert lines["cut"] == lines["whole"][:CUT]
    assert any('"anomalous"' in text for text in lines["cut"])


def test_labels_are_never_an_input(traces: Path, tmp_path: Path, lines: dict[str, list[str]]) -> None:
    shutil.copytree(traces / "cut", tmp_path / "cut")
    (tmp_path / "cut" / "labels.json").write_text("no labels at all")
    (path,) = replay([tmp_path / "cut"], tmp_path / "out", SETTINGS)
    assert path.read_text().splitlines() == lines["cut"]


def test_two_traces_of_one_name(traces: Path, tmp_path: Path) -> None:
    shutil.copytree(traces / "cut", tmp_path / "cut")
    with pytest.raises(UsageError, match="two of the traces are called 'cut' and would overwrite each other"):
        replay([traces / "cut", tmp_path / "cut"], tmp_path / "out", SETTINGS)
    assert not (tmp_path / "out").exists()


def test_a_broken_trace_is_known_before_anything_is_written(traces: Path, tmp_path: Path) -> None:
    shutil.copytree(traces / "cut", tmp_path / "broken")
    data = (tmp_path / "broken" / "metrics.parquet").read_bytes()
    (tmp_path / "broken" / "metrics.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=re.escape(str(tmp_path / "broken" / "metrics.parquet"))):
        replay([traces / "cut", tmp_path / "broken"], tmp_path / "out", SETTINGS)
    with pytest.raises(NoData, match="is no folder"):
        replay([traces / "cut", tmp_path / "nowhere"], tmp_path / "out", SETTINGS)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written(traces: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EnvironmentLacks, match=r"cannot write .*cut\.jsonl: .*; free some space or choose another place"):
        replay([traces / "cut"], tmp_path / "file" / "out", SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain-0", "sleep-0", "ecc-0"])
def test_shared_traces(name: str, tmp_path: Path) -> None:
    if not (SHARED / name).is_dir():
        pytest.skip("the shared traces are not beside this checkout")
    (path,) = replay([SHARED / name], tmp_path, Settings())
    ticks = [json.loads(text) for text in path.read_text().splitlines()]
    decisions = {t["decision"] for t in ticks}
    labels = json.loads((SHARED / name / "labels.json").read_text())
    faulty = {node for label in labels if label["kind"] == "fault" for node in label["nodes"]}
    blamed = {s["node"] for t in ticks for s in t["suspects"]}
    assert [t["time"] for t in ticks] == sorted({t["time"] for t in ticks})
    if name == "sleep-0":
        assert decisions <= {"not_applicable", "unsure"}
    elif name == "plain-0":
        assert decisions <= {"normal", "unsure"}
    else:
        assert faulty
        assert blamed == faulty
