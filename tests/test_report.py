"""The page about one incident: what it says, that it says it safely, and that a browser draws it."""

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagleeye import charts
from eagleeye.actions import policy
from eagleeye.actions.journal import Journal
from eagleeye.actions.runner import Runner
from eagleeye.cli import main
from eagleeye.clock import ManualClock
from eagleeye.errors import AmbiguousError, BackendError, DataError, NoData, PermanentError, TransientError
from eagleeye.quantities import quantity
from eagleeye.records import (
    Action,
    ActionKind,
    Category,
    Decision,
    Incident,
    IncidentState,
    JobView,
    Outcome,
    Plan,
    Result,
    Scope,
    Suspect,
    Verdict,
)  # fmt: skip
from eagleeye.report import MOST_ROWS, Recovery, Report, Restore, Truth, judge, read_verdicts, render
from eagleeye.window import Window
from remediation.dryrun import DryRun

START_S = 1_772_438_400.0
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Collects elements, text outside scripts and styles, and complains of tags that do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def classes(self, tag: str) -> set[str]:
        return {name for t, a in self.elements if t == tag for name in (a.get("class") or "").split()}


def recorded(ranks: int = 4, columns: int = 150, bad: int | None = 2, since: int = 100, job: str = "demo") -> Window:
    """One rank per node up to 16 ranks, then eight; one rank computes slowly from column `since` on."""
    rng = np.random.default_rng(7)
    metrics = (
        "train_compute_seconds",
        "process_cpu_ratio",
        "network_transmit_bytes_per_second",
        "train_collective_ratio",
        "process_up",
    )
    level_M = np.array([0.2, 0.4, 1.5e7, 0.15, 1.0], dtype=np.float32)
    values = level_M[None, :, None] * (1 + 0.02 * rng.standard_normal((ranks, 5, columns)))
    values[:, 4] = 1.0
    if bad is not None:
        values[:, 3, since:] = 0.8
        values[bad, 0, since:] *= 4
        values[bad, 3, since:] = 0.1
    each = 1 if ranks <= 16 else 8
    nodes = tuple(f"node{r // each}" for r in range(ranks))
    return Window(
        job, tuple(range(ranks)), nodes, ("all",) * ranks, metrics, START_S + 2 * (columns - 1), 2.0, values.astype(np.float32)
    )


def said(window: Window, suspect: tuple[int, str] | None, since: int = 104, rule: str | None = None) -> list[Verdict]:
    """Unsure while it learns, normal, then anomalous about `suspect`; with None it stays normal."""
    verdicts = []
    for t, stamp_s in enumerate(window.stamps_T):
        common = {"job": window.job, "from_s": window.start_s, "to_s": float(stamp_s), "model": "own past"}
        if t < 30:
            verdicts.append(Verdict(decision=Decision.UNSURE, reason="learning", votes={"knn_dtw": None, "lof": None}, **common))
        elif suspect is None or t < since:
            verdicts.append(
                Verdict(decision=Decision.NORMAL, reason="all alike", votes={"knn_dtw": False, "lof": False}, **common)
            )
        else:
            blamed = (Suspect(*suspect, 3.2, "slow"),) if suspect[1] else ()
            verdicts.append(
                Verdict(
                    decision=Decision.ANOMALOUS, reason=f"rank {suspect[0]} computes slowly", category=Category.NODE,
                    scope=Scope.RANK if blamed else Scope.JOB, suspects=blamed,
                    votes={"knn_dtw": True, "matrix_profile": None, "lof": True}, rule=rule, **common,
                )
            )  # fmt: skip
    return verdicts


def page_of(suspect: tuple[int, str] | None = (2, "node2"), truth: Truth | None = None, window: Window | None = None) -> Page:
    window = window or recorded()
    return Page(render(Report("Demo: slow", "Four nodes on one machine.", window, said(window, suspect), truth=truth)))


SLOW = Truth("slow", "node2", 2, "A CPU quota held node2 back.", START_S + 200)
"""Column 100 ends at this instant; the first anomalous verdict comes 8 s later."""


def test_the_headline_names_suspect_time_reason_and_delay() -> None:
    page = page_of(truth=SLOW)
    assert "Rank 2 on node2 is the suspect since 08:03:28 UTC." in page.text
    assert "Rank 2 computes slowly" in page.text
    assert "✓ Right, 8.0 s after the fault: rank 2 on node2 was broken (slow)." in page.text
    assert "vote, 2 of 3 1 abstained" in page.text
    assert "Decided to do nothing no plan was made" in page.text


@pytest.mark.parametrize(
    ("suspect", "truth", "kind", "sentence"),
    [
        ((2, "node2"), SLOW, "right", "Right, 8.0 s after the fault"),
        ((1, "node1"), SLOW, "wrong", "Wrong blame, 8.0 s after the fault: rank 2 on node2 was broken (slow), not node1."),
        ((0, ""), SLOW, "wrong", "nobody was named: rank 2 on node2 was broken"),
        ((0, ""), Truth("storage", at_s=START_S + 200), "right", "no single node was broken (storage), and nobody was blamed."),
        (None, SLOW, "missed", "Missed: rank 2 on node2 was broken (slow), and no alarm was raised."),
        (None, Truth("none"), "quiet", "Right: nothing was broken."),
        (None, None, "quiet", "is not known here"),
        ((2, "node2"), None, "alarm", "is not known here"),
        ((2, "node2"), Truth("none"), "false", "False alarm: nothing was broken."),
        ((2, "node2"), Truth("hang", "node9", 9), "wrong", "Wrong blame: rank 9 on node9 was broken (hang), not node2."),
    ],
)
def test_verdicts_are_compared_with_the_truth(
    suspect: tuple[int, str] | None, truth: Truth | None, kind: str, sentence: str
) -> None:
    window = recorded()
    report = Report("t", "", window, said(window, suspect), truth=truth)
    assert judge(report).kind == kind
    page = Page(render(report))
    assert sentence in page.text
    assert kind in page.classes("section")


def test_an_alarm_before_the_fault_is_false_and_does_not_count_as_found() -> None:
    window = recorded()
    early = said(window, (1, "node1"), since=60)
    assert judge(Report("t", "", window, early[:90], truth=SLOW)).check.startswith("False alarm: it came 80 s before the fault")
    both = early[:61] + said(window, (2, "node2"))[61:]
    found = judge(Report("t", "", window, both, truth=SLOW))
    assert (found.kind, found.suspect and found.suspect.rank) == ("right", 2)
    assert found.check.endswith("Before the fault there were 1 false alarms.")


def test_the_right_node_with_another_rank_is_told() -> None:
    window = recorded(ranks=24, bad=9)
    report = Report("t", "", window, said(window, (10, "node1")), truth=Truth("slow", "node1", 9, "", START_S + 200))
    assert judge(report).kind == "right"
    assert "Right node, but rank 9 was the broken one there." in judge(report).check


def test_nothing_judged_is_not_called_normal() -> None:
    window = recorded(bad=None)
    none = Page(render(Report("t", "", window, [])))
    assert "No verdict was recorded, so nothing can be said." in none.text
    assert "missing" in none.classes("rect")
    learning = Page(render(Report("t", "", window, said(window, None)[:20])))
    assert "Nothing could be judged." in learning.text
    idle = [Verdict("demo", v.from_s, v.to_s, Decision.NOT_APPLICABLE, "the job is idle") for v in said(window, None)]
    assert "This is no busy training job" in Page(render(Report("t", "", window, idle))).text


def test_abstention_a_rule_and_missing_data_have_their_own_signs() -> None:
    window = recorded()
    values = window.values_RMT.copy()
    values[2, :, 110:] = np.nan
    gone = Window(window.job, window.ranks, window.nodes, window.groups, window.metrics, window.end_s, window.step_s, values)
    page = Page(render(Report("t", "", gone, said(gone, (2, "node2"), rule="exit"))))
    assert "The rule “exit” decided without a vote at 08:03:28 UTC" in page.text
    assert "matrix_profile – abstained" in page.text
    assert "knn_dtw ● fired" in page.text
    assert "6.67 % of the data are missing" in page.text
    assert ("path", "no data") in {(t, a.get("data-told")) for t, a in page.elements}
    assert "no data" not in {a.get("data-told") for _, a in page_of().elements}


def test_levels_tell_missing_from_normal_and_from_incomparable() -> None:
    deviation = np.array([[0.1, 0.2, 4.0, -30.0], [np.nan] * 4], dtype=np.float32)
    observed = np.array([[True, False, False, True], [True, True, False, True]])
    assert charts.levels_RT(deviation, observed).tolist() == [
        [0, charts.MISSING, 1, 4],
        [charts.UNCOMPARED, charts.UNCOMPARED, charts.MISSING, charts.UNCOMPARED],
    ]
    wide = np.zeros((1, 720), dtype=np.float32)
    seen = np.ones((1, 720), dtype=bool)
    seen[0, 11] = False
    wide[0, 101] = 7.0
    levels = charts.levels_RT(wide, seen)
    assert levels.shape == (1, 360)
    assert (levels[0, 5], levels[0, 50], int((levels == 0).sum())) == (charts.MISSING, 2, 358)


def test_the_suspect_stands_out_in_the_heat_map_and_leads_the_curves() -> None:
    page = page_of(truth=SLOW)
    names = [a["aria-label"] or "" for t, a in page.elements if t == "svg" and a.get("role") == "img"]
    heat = next(n for n in names if n.startswith("Deviation"))
    own, other = re.search(r"suspect rank 2 on node2 reaches ([\d.]+); the highest other rank reaches ([\d.]+)", heat).groups()
    assert float(own) > 25
    assert float(other) < 6
    assert [n.split(".")[0] for n in names[2:4]] == ["train_collective_ratio", "train_compute_seconds"]
    assert "the suspect ends at 1" in names[2]
    assert {"suspect"} <= page.classes("rect")


def test_the_really_broken_rank_is_marked_beside_the_blamed_one() -> None:
    page = page_of(suspect=(1, "node1"), truth=SLOW)
    assert "◀ suspect" in page.text
    assert "◀ broken" in page.text
    assert {"suspect", "broken"} <= page.classes("path")


def test_two_ranks_cannot_be_compared_and_the_page_says_so() -> None:
    window = recorded(ranks=2, bad=None)
    page = Page(render(Report("t", "", window, said(window, None))))
    assert "Fewer than 3 ranks do the same work, so nobody can be compared." in page.text
    assert "uncompared" in page.classes("path")
    assert "heat0" not in page.classes("path")


def test_a_job_without_any_value_has_a_page() -> None:
    window = recorded(bad=None)
    empty = Window(
        window.job,
        window.ranks,
        window.nodes,
        window.groups,
        window.metrics,
        window.end_s,
        2.0,
        np.full((4, 5, 3), np.nan, np.float32),
    )
    assert "100 % of the data are missing" in Page(render(Report("t", "", empty, []))).text


def test_every_text_is_escaped() -> None:
    evil = '<script>alert("1")</script>&\'$title'
    base = recorded(job=evil)
    window = Window(
        evil,
        base.ranks,
        tuple(f"{evil}{r}" for r in range(4)),
        (evil,) * 4,
        (evil, *base.metrics[1:]),
        base.end_s,
        2.0,
        base.values_RMT,
    )
    verdicts = [
        Verdict(evil, v.from_s, v.to_s, v.decision, evil, v.scope, v.category, v.suspects, {evil: True}, evil, evil)
        for v in said(window, (2, f"{evil}2"))
    ]
    incident = Incident(evil, evil, (evil,), (2,), START_S + 208, START_S + 298, IncidentState.OPEN, Category.NODE, evil)
    plan = Plan(evil, evil, (Action(ActionKind.CORDON, evil),), evil)
    outcome = Outcome(evil, Result.OBSERVED, evil, START_S + 210, START_S + 211)
    text = render(
        Report(
            evil, evil, window, verdicts, [incident], [plan], [outcome, replace(outcome, operation_id=f"{evil}-evict-{evil}",
            result=Result.DONE)], Truth(evil, f"{evil}2", 2, evil, START_S), [evil],
            healed(evicted=evil, spare=evil, phases=[(evil, 1.0)], saves=[(275, evil, evil)],
                   restores=[Restore(0, evil, "neighbour", evil, 250, 0.1), Restore(1, evil, evil, evil, 250, 0.1)]),
        )
    )  # fmt: skip
    page = Page(text)
    assert text.count("<script") == 1
    assert "alert(" not in "".join(re.findall(r"<script>.*?</script>", text, re.S))
    assert page.text.count(evil) > 30
    assert f"evicted {evil}" in page.text
    assert f"{evil} was taken out and {evil} took its place" in page.text
    assert f"memory of {evil}" in page.text
    assert not {"img", "a", "link", "iframe", "object", "foreignobject", "image", "use"} & {t for t, _ in page.elements}
    assert not [name for _, a in page.elements for name in a if name.startswith("on") or name in ("style", "href")]
    rows = next(a["data-rows"] for _, a in page.elements if a.get("data-rows"))
    assert json.loads(rows or "")[2][2] == f"{evil}2"


def test_nothing_is_fetched_from_anywhere() -> None:
    window = recorded()
    text = render(Report("t", "", window, said(window, (2, "node2")), truth=SLOW))
    text = text.replace("http://www.w3.org/2000/svg", "")
    for forbidden in ("http:", "https:", "src=", "@import", "//cdn", "href=", "@font-face"):
        assert forbidden not in text
    assert re.findall(r"url\((.)", text).count("#") == len(re.findall(r"url\(", text))
    assert "default-src 'none'" in text


def test_every_picture_has_a_text_alternative() -> None:
    page = page_of(truth=SLOW)
    pictures = [a for t, a in page.elements if t == "svg"]
    assert all(
        a.get("aria-hidden") == "true" or (a.get("role") == "img" and len(a.get("aria-label") or "") > 30) for a in pictures
    )
    assert all(a.get("scope") in ("row", "col") for t, a in page.elements if t == "th")


def test_incidents_plans_and_outcomes_are_listed() -> None:
    window = recorded()
    incident = Incident(
        "abc123", "demo", ("node2",), (2,), START_S + 208, START_S + 298, IncidentState.OPEN, Category.NODE, "slow"
    )
    plan = Plan("abc123", "demo", (Action(ActionKind.NOTIFY, "demo"), Action(ActionKind.CORDON, "node2")), "slow")
    outcome = Outcome("abc123-0", Result.OBSERVED, "would tell", START_S + 210, START_S + 210.5)
    page = Page(render(Report("t", "", window, said(window, (2, "node2")), [incident], [plan], [outcome])))
    assert "notify demo, cordon node2 observed only; nothing was touched" in page.text
    assert "notify demo, then cordon node2" in page.text
    assert "still open" in page.text
    assert "would tell 08:03:30 UTC 0.5 s" in page.text
    assert {"incident", "action"} <= page.classes("rect")


def loss_of(steps: int, first: int = 1) -> dict[int, float]:
    """A loss that falls and swings, as a run of the same seed always gives it."""
    return {step: 2.2 + 3.3 * math.exp(-step / 60) + 0.05 * math.sin(7.3 * step) for step in range(first, first + steps)}


def healed(**changed: object) -> Recovery:
    """Node 1 is replaced by node 4; the job goes on from step 250, 14 steps back, and equals the unbroken run."""
    told = Recovery(
        evicted="node1", spare="node4", restored_step=250, lost_steps=14,
        phases=[("detect", 8.4), ("plan", 2.1), ("stop", 3.3), ("start", 14.2), ("restore", 0.12), ("first step", 3.08)],
        restores=[
            Restore(1, "node4", "neighbour", "node2", 250, 0.118), Restore(0, "node0", "local", "node0", 250, 0.021),
            Restore(2, "node2", "storage", "storage", 250, 0.4),
        ],
        loss=loss_of(330), steady_loss=loss_of(500), saves=[(step, f"a{step}", f"a{step}") for step in (275, 300, 325)],
        identical=True,
    )  # fmt: skip
    return replace(told, **changed)  # type: ignore[arg-type]


def section_of(recovery: Recovery) -> str:
    """Return the markup of the section."""
    window = recorded()
    text = render(Report("t", "", window, said(window, (1, "node1")), recovery=recovery))
    return re.findall(r"<section[^>]*><h2>Recovery</h2>.*?</section>", text, re.S)[0]


def pictures_of(section: str, name: str) -> list[str]:
    return [svg for svg in re.findall(r"<svg .*?</svg>", section, re.S) if f"<title>{name}" in svg]


def test_a_recovery_has_a_section_between_the_timeline_and_the_heat_map_and_only_then() -> None:
    window = recorded()
    report = Report("t", "", window, said(window, (1, "node1")), recovery=healed())
    headings = re.findall(r"<h2>(.*?)</h2>", render(report))
    assert headings[:3] == ["What was decided, and when", "Recovery", "Who deviates from the ranks that do the same work"]
    assert "Recovery" not in render(replace(report, recovery=None))


BASE = "node1 was taken out and node4 took its place; the job went on from step 250, 14 steps back, 31.2 s after the fault"
WRONG_FROM_301 = loss_of(300) | {step: loss + 1e-7 for step, loss in loss_of(30, 301).items()}


@pytest.mark.parametrize(
    ("changed", "kind", "sentence"),
    [
        ({}, "right", f"✓ {BASE}; every loss and every parameter equals the unbroken run"),
        ({"loss": WRONG_FROM_301}, "wrong", f"✗ {BASE}, and differs from the unbroken run from step 301 on"),
        ({"saves": [(275, "a", "a"), (300, "a", "b")]}, "wrong", "differs from the unbroken run from step 300 on"),
        ({"loss": loss_of(330) | {9: 1.0}}, "wrong", "from step 9 on, which is before the restored step"),
        ({"loss": loss_of(330) | {290: math.nan}}, "wrong", "differs from the unbroken run from step 290 on"),
        ({"steady_loss": {}, "saves": []}, "unknown", f"? {BASE}, and was not compared with an unbroken run"),
        ({"steady_loss": loss_of(250), "saves": []}, "unknown", "was not compared with the unbroken run after that step"),
        ({"identical": False}, "wrong", f"✗ {BASE}, and was not shown to equal the unbroken run"),
        ({"saves": [(275, "a", "")]}, "right", "; every loss equals the unbroken run; parameters were not compared"),
        ({"steady_loss": loss_of(9)}, "right", "; every parameter equals the unbroken run; the loss was not compared"),
        ({"lost_steps": 0}, "right", "went on from step 250, without losing a step, 31.2 s after"),
        ({"lost_steps": 1}, "right", "went on from step 250, 1 step back, 31.2 s after"),
        ({"spare": ""}, "right", "node1 was taken out and nobody took its place; the job"),
        ({"phases": []}, "right", "from step 250, 14 steps back; every loss and"),
    ],
)  # fmt: skip
def test_one_sentence_tells_how_the_job_went_on(changed: dict[str, object], kind: str, sentence: str) -> None:
    section = section_of(healed(**changed))
    assert sentence in Page(section).text
    assert kind in Page(section).classes("section")


def test_no_number_in_both_runs_is_the_same_and_in_one_is_not() -> None:
    both = loss_of(330) | {290: math.nan, 291: math.inf}
    same = Page(section_of(healed(loss=both, steady_loss=both)))
    assert "every loss and every parameter equals" in same.text
    assert "over the 330 steps that both runs told of: exactly 0." in same.text
    assert "infinite or no number" in same.text
    assert "missing" in same.classes("path")
    one = Page(section_of(healed(loss=both)))
    assert "told of: infinite, for at step 290 only one of them is a number; 2 steps differ, the first is 290." in one.text
    assert "infinite or no number" not in Page(section_of(healed())).text


def test_the_largest_difference_is_told_with_its_step() -> None:
    assert "over the 330 steps that both runs told of: exactly 0." in Page(section_of(healed())).text
    apart = loss_of(330) | {300: loss_of(330)[300] + 0.001, 310: loss_of(330)[310] - 0.025}
    assert "told of: 0.025, at step 310; 2 steps differ, the first is 300." in Page(section_of(healed(loss=apart))).text
    assert "No loss of an unbroken run is known." in Page(section_of(healed(steady_loss={}))).text
    assert "No step was told of by both runs." in Page(section_of(healed(steady_loss=loss_of(9, 900)))).text


def test_phases_are_as_wide_as_they_were_long_and_all_have_a_number() -> None:
    section = section_of(healed())
    (bar,) = pictures_of(section, "Phases")
    widths = [float(w) for w in re.findall(r'<rect class="phase\d"[^>]* width="([\d.]+)"', bar)]
    assert len(widths) == 6
    assert widths[3] / widths[0] == pytest.approx(14.2 / 8.4, rel=0.01)
    assert sum(widths) + 6 * 1.5 == pytest.approx(charts.WIDTH - 48, abs=1)
    drawn = re.findall(r"<text[^>]*>(.*?)</text>", bar)
    assert {"1 detect, 8.4 s", "4 start, 14.2 s", "2 plan", "5"} <= set(drawn)
    assert bar.count('class="lead"') == 1
    text = Page(section).text
    assert "1 detect, 8.4 s 2 plan, 2.1 s 3 stop, 3.3 s 4 start, 14.2 s 5 restore, 120 ms 6 first step, 3.08 s" in text
    assert "31.2 s from the fault to the first new step. In order: detect, 8.4 s; plan, 2.1 s;" in bar


@pytest.mark.parametrize(
    "lengths_s", [[31.2], [0.0], [0.0] * 12, [1e-9, 1e9], [5, -1, 3], [math.nan, 2.0], [0.01] * 11 + [60.0], [0.4] * 40]
)
def test_any_phases_fit_the_bar(lengths_s: list[float]) -> None:
    bar = charts.phases("Phases", "of some length", [(f"phase {k}", length) for k, length in enumerate(lengths_s)])
    edges = [(float(x), float(w)) for x, w in re.findall(r'<rect class="phase\d" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', bar)]
    assert len(edges) == len(lengths_s)
    assert all(x >= 24 and w >= 1 and x + w <= charts.WIDTH - 20 for x, w in edges)
    below = [float(x) for x in re.findall(r'<text x="([\d.]+)"[^>]*class="lane"', bar)]
    assert below == sorted(below)
    assert all(b - a > 15.5 for a, b in pairwise(below))
    assert all(24 <= x <= charts.WIDTH - 24 for x in below)
    assert "nan" not in bar


def marks_of(picture: str) -> dict[str, float]:
    return {kind: float(x) for kind, x in re.findall(r'<path class="mark (\w+)" d="M([\d.]+) ', picture)}


def test_the_loss_shows_what_was_before_the_fault_what_was_lost_and_where_it_was_restored() -> None:
    section = section_of(healed())
    whole, close = pictures_of(section, "Loss")
    for picture, first, last in ((whole, 1, 330), (close, 222, 292)):
        axis = charts.Axis(first, last, *charts.CURVE_BOX)
        assert marks_of(picture) == {
            "restored": pytest.approx(axis.x(250), abs=0.1),
            "fault": pytest.approx(axis.x(264), abs=0.1),
        }
        x, width = map(float, re.findall(r'<rect class="lost" x="([\d.]+)"[^>]* width="([\d.]+)"', picture)[0])
        assert (x, x + width) == (pytest.approx(axis.x(250), abs=0.2), pytest.approx(axis.x(264), abs=0.2))
        assert ">restored, step 250<" in picture
        assert ">fault after step 264<" in picture
        # the wide line lies below the others, each of which begins where the one before ends
        starts = dict(re.findall(r'<path class="line (\w+)" d="M(\d+) ', picture))
        assert list(starts) == ["steady", "before", "again", "after"]
        assert [int(x) / 2 for x in starts.values()] == [
            pytest.approx(axis.x(step), abs=0.5) for step in (first, first, 250, 264)
        ]
    assert "14 steps lost the same, computed again new steps restored fault" in Page(section).text
    assert "Steps 251 to 264 were computed before the fault, lost, and computed again." in Page(section).text


def test_without_a_lost_step_there_is_no_band() -> None:
    section = section_of(healed(lost_steps=0))
    assert 'class="lost"' not in section
    assert 'class="line again"' not in section
    assert marks_of(pictures_of(section, "Loss")[0]).keys() == {"restored", "fault"}


def test_absent_steps_break_the_line_and_a_lone_one_is_seen() -> None:
    told = {step: loss for step, loss in loss_of(330).items() if not 100 < step < 150}
    whole = pictures_of(section_of(healed(loss=told)), "Loss")[0]
    line = re.findall(r'class="line before" d="(.*?)"', whole)[0]
    assert line.count("M") == 2
    lone = section_of(healed(loss={270: 2.0}, steady_loss={}))
    assert re.search(r'class="line after" d="M\d+ \d+h0"', lone)
    assert "the unbroken run" not in lone.split("No loss of")[0].split("Loss by step")[1]
    assert "No loss was told." in section_of(healed(loss={}, steady_loss={}))


def test_a_very_long_run_is_thinned_out_and_hides_neither_its_start_nor_a_leap() -> None:
    long = loss_of(100_000)
    leaped = long | dict.fromkeys(range(90_000, 91_000), 4.0) | dict.fromkeys(range(70_000, 80_000), math.nan)
    section = section_of(healed(loss=leaped, steady_loss=long, restored_step=50_000, lost_steps=120, saves=[], identical=False))
    assert len(section.encode()) < 90_000
    whole = pictures_of(section, "Loss")[0]
    assert [tick for tick in re.findall(r'text-anchor="end">([\d.]+)</text>', whole) if float(tick) >= 3.5]
    assert whole.count('class="line extent') == 3
    assert 'class="missing"' in whole
    assert "differs from the unbroken run from step 70000 on" in section


@pytest.mark.parametrize("value", [1e300, -1e300, math.inf, math.nan])
def test_impossible_losses_do_not_break_the_picture(value: float) -> None:
    for loss in (dict.fromkeys(range(1, 300), value), loss_of(330) | {260: value}, {251: value}):
        section = section_of(healed(loss=loss))
        assert len(pictures_of(section, "Loss")) == 2
        assert not re.search(r' (d|x|y|width)="[^"]*(nan|inf)', section)
    (whole, _) = pictures_of(section_of(healed(loss=loss_of(330) | {260: value})), "Loss")
    assert re.findall(r'text-anchor="end">([^<]+)</text>', whole)[:3] == ["0", "2", "4"]
    assert 'class="missing"' in whole


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        ([0.0, 2.0, 4.0], ["0", "2", "4"]), ([2.3015, 2.302, 2.3025], ["2.3015", "2.302", "2.3025"]), ([0.0], ["0"]), ([], []),
        ([1_000_002.0, 1_000_004.0], ["1000002", "1000004"]), ([-5e-9, 0.0, 5e-9], ["-5e-09", "0", "5e-09"]),
    ],
)  # fmt: skip
def test_labels_of_a_scale_differ(ticks: list[float], labels: list[str]) -> None:
    assert charts._labels(ticks) == labels


def cells(section: str, heading: str) -> list[list[str]]:
    """Return the rows of the table below a heading."""
    table = re.findall(rf"<h3>{heading}</h3><div class=\"scroll\"><table>.*?<tbody>(.*?)</tbody>", section, re.S)[0]
    return [
        [Page(cell).text for cell in re.findall(r"<t[hd][^>]*>.*?</t[hd]>", row)] for row in re.findall(r"<tr>(.*?)</tr>", table)
    ]


def test_restores_tell_rank_node_source_step_and_time() -> None:
    section = section_of(healed())
    assert cells(section, "What was restored") == [
        ["0", "node0", "this node's memory", "250", "21 ms"],
        ["1", "node4", "memory of node2", "250", "118 ms"],
        ["2", "node2", "storage", "250", "400 ms"],
    ]
    told = (
        "1 rank from their own node's memory, 1 rank from memory of another node, 1 rank from storage; the slowest took 400 ms."
    )
    assert told in Page(section).text
    odd = section_of(healed(restores=[Restore(0, "node0", "local", "node0", 225, 0.021)]))
    assert cells(odd, "What was restored") == [["0", "node0", "this node's memory", "225, not 250", "21 ms"]]
    many = section_of(healed(restores=[Restore(r, "n", "local", "n", 250, 0.1) for r in range(1000)]))
    assert len(cells(many, "What was restored")) == 64
    assert "1000 ranks from their own node's memory; the slowest took 100 ms. 936 more ranks were left out." in Page(many).text
    assert "No rank told what it restored." in Page(section_of(healed(restores=[]))).text


def test_saves_are_compared_and_at_most_the_last_twelve_listed() -> None:
    saves = [(25 * k, f"a{k}", f"a{k}") for k in range(1, 13)]
    section = section_of(healed(saves=[*saves[:-2], (275, "a11", "b11"), (300, "a12", "")]))
    rows = cells(section, "Saves compared")
    assert (len(rows), rows[0]) == (12, ["25", "a1", "a1", "same"])
    assert rows[-2:] == [["275", "a11", "b11", "DIFFERENT"], ["300", "a12", "–", "not compared"]]
    assert "earlier save" not in section
    more = section_of(healed(saves=[(5, "x", "y"), (10, "x", "x"), (15, "x", ""), *saves]))
    assert cells(more, "Saves compared") == cells(section_of(healed(saves=saves)), "Saves compared")
    assert "3 earlier saves left out, 1 of them different." in Page(more).text
    assert "No save was told." in section_of(healed(saves=[]))


def test_a_rank_that_moved_is_shown_with_the_node_it_was_on_when_it_was_blamed() -> None:
    base = recorded(bad=1)
    moved = replace(base, nodes=("node0", "node4", "node2", "node3"))
    verdicts = said(base, (1, "node1"))
    truth = Truth("slow", "node1", 1, "", START_S + 200)
    for recovery in (None, healed()):
        text = render(Report("t", "", moved, verdicts, truth=truth, recovery=recovery))
        page = Page(text)
        assert "Rank 1 on node1 is the suspect since" in page.text
        assert "✓ Right, 8.0 s after the fault: rank 1 on node1 was broken (slow)." in page.text
        assert "suspect rank 1 on node1, then node4 reaches" in page.text
        assert "Suspect: rank 1 on node1, then node4." in page.text
        assert "1 node1, then node4 all 100 % suspect" in page.text
        assert "on node4" not in page.text.replace("from memory", "")
        rows = json.loads(next(a["data-rows"] for _, a in page.elements if a.get("data-rows")) or "")
        assert [row[2] for row in rows] == ["node0", "node1, then node4", "node2", "node3"]
    # where nobody was blamed the recovery tells it; where another was blamed the really broken rank is still marked
    assert "1 node1, then node4 all 100 %" in Page(render(Report("t", "", moved, [], recovery=healed()))).text
    wrong = Page(render(Report("t", "", moved, said(base, (2, "node2")), truth=truth)))
    assert "suspect rank 2 on node2 reaches" in wrong.text
    assert "broken rank 1 on node1, then node4 reaches" in wrong.text


class Hands:
    """A backend whose actions end as told: what it raises is raised by every attempt, an action that it lacks is done."""

    name = "hands"

    def __init__(self, fails: dict[ActionKind, BackendError]) -> None:
        self.fails = fails

    def observe(self, job: str) -> JobView | None:
        return None

    def perform(self, operation_id: str, action: Action, job: str, reason: str) -> tuple[Result, str]:
        if action.kind in self.fails:
            raise self.fails[action.kind]
        return Result.DONE, f"{action.kind.value} was carried out"


INCIDENT = Incident(
    "abc123", "demo", ("node2",), (2,), START_S + 208, START_S + 298, IncidentState.OPEN, Category.NODE, "slow", 90
)  # fmt: skip


def carried_out(path: Path, hands: Hands | DryRun) -> tuple[list[Plan], list[Outcome]]:
    """Return what a real runner planned and did."""
    acting = isinstance(hands, Hands)
    journal = Journal(path, acting=acting)
    clock = ManualClock(START_S + 300)
    runner = Runner(policy.Settings(), hands, hands, journal, clock, lambda line: None)
    runner.respond([INCIDENT])
    plans, outcomes = journal.plans(acted=acting), journal.outcomes()
    journal.close()
    return plans, outcomes


@pytest.mark.parametrize(
    ("hands", "card", "rows"),
    [
        (DryRun(), "Decided to do notify demo, cordon node2, evict node2, restart demo observed only; nothing was touched",
         ["would notify demo observed", "would cordon node2 observed", "would restart demo observed"]),
        (Hands({}), "What was done notified demo, cordoned node2, evicted node2, restarted demo all that was planned",
         ["notified demo done", "cordoned node2 done", "evicted node2 done", "restarted demo done"]),
        (Hands({ActionKind.EVICT: PermanentError("no spare is left")}),
         "What was done notified demo, cordoned node2, did not evict node2 no spare is left; not tried: restart demo",
         ["notified demo done", "cordoned node2 done", "did not evict node2 permanent"]),
        (Hands({ActionKind.CORDON: TransientError("the folder is away")}),
         "What was done notified demo, failed to cordon node2 the folder is away; attempt 1 of 5, the next in 1 s; "
         "not tried: evict node2, restart demo",
         ["notified demo done", "failed to cordon node2 transient"]),
        (Hands({ActionKind.RESTART: AmbiguousError("no answer came")}),
         "What was done notified demo, cordoned node2, evicted node2, perhaps restarted demo no answer came",
         ["evicted node2 done", "perhaps restarted demo ambiguous"]),
    ],
    ids=["observed", "done", "permanent", "transient", "ambiguous"],
)  # fmt: skip
def test_what_was_done_is_told_in_the_words_of_how_it_ended(
    tmp_path: Path, hands: Hands | DryRun, card: str, rows: list[str]
) -> None:
    window = recorded()
    plans, outcomes = carried_out(tmp_path / "journal.db", hands)
    page = Page(render(Report("t", "", window, said(window, (2, "node2")), [INCIDENT], plans, outcomes)))
    assert card in page.text
    assert all(row in page.text for row in rows)
    assert ("would" in page.text) == isinstance(hands, DryRun)
    failed = any(outcome.result not in (Result.DONE, Result.OBSERVED) for outcome in outcomes)
    assert ("bad" in page.classes("td")) == failed


def test_a_deed_counts_for_more_than_the_same_observed(tmp_path: Path) -> None:
    carried_out(tmp_path / "journal.db", DryRun())
    plans, outcomes = carried_out(tmp_path / "journal.db", Hands({}))
    assert len(outcomes) == 8
    window = recorded()
    for told in (outcomes, [*outcomes[4:], *outcomes[:4]]):
        page = Page(render(Report("t", "", window, said(window, (2, "node2")), [INCIDENT], plans, told, recovery=healed())))
        hero = page.text.split("What was decided")[0]
        assert "What was done notified demo, cordoned node2, evicted node2, restarted demo" in hero
        assert "node1 was taken out and node4 took its place; the job went on 31.2 s after the fault" in hero


@pytest.mark.parametrize(("ranks", "columns", "most_bytes"), [(4, 150, 150_000), (64, 720, 1_500_000), (1500, 60, 1_500_000)])
def test_pages_stay_small(ranks: int, columns: int, most_bytes: int) -> None:
    window = recorded(ranks, columns, since=columns - 40)
    verdicts = said(window, (2, window.nodes[2]), since=columns - 35)
    text = render(Report("t", "", window, verdicts))
    assert len(text.encode()) < most_bytes
    rows = next(a["data-rows"] for _, a in Page(text).elements if a.get("data-rows"))
    assert len(json.loads(rows or "")) == min(ranks, MOST_ROWS)
    assert ("1244 rows were left out" in text) == (ranks == 1500)
    assert ("476 more ranks were left out" in text) == (ranks == 1500)


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (12_500_000, "bytes/s", "12.5 MB/s"), (0.384, "1", "38.4 %"), (0.12, "seconds", "120 ms"), (2.5, "seconds", "2.5 s"),
        (1.41e9, "hertz", "1.41 GHz"), (300, "watts", "300 W"), (61, "celsius", "61 °C"), (3, "1/s", "3/s"), (0, "bytes", "0 B"),
        (-2000, "bytes", "-2 kB"), (float("nan"), "bytes", "–"), (1234, "", "1.23 k"),
    ],
)  # fmt: skip
def test_quantities_are_written_for_people(value: float, unit: str, written: str) -> None:
    assert quantity(value, unit) == written


def test_the_clock_counts_minutes_and_then_hours() -> None:
    assert [charts.clock(s) for s in (0, 65, 3661, 5400, 36_000)] == ["0:00", "1:05", "61:01", "1:30:00", "10:00:00"]


def write_trace(folder: Path, window: Window, labels: object = None) -> None:
    folder.mkdir()
    units = {"train_compute_seconds": "seconds", "network_transmit_bytes_per_second": "bytes/s"}
    about = {
        "job": window.job,
        "interval_seconds": window.step_s,
        "ranks": [{"rank": r, "node": n, "group": g} for r, n, g in zip(window.ranks, window.nodes, window.groups, strict=True)],
        "metrics": {m: units.get(m, "1") for m in window.metrics},
    }
    (folder / "trace.json").write_text(json.dumps(about))
    R, _, T = window.values_RMT.shape
    columns = {m: window.values_RMT[:, k].T.ravel() for k, m in enumerate(window.metrics)}
    stamps = pa.array((np.repeat(window.stamps_T, R) * 1e6).astype(np.int64)).cast(pa.timestamp("us", tz="UTC"))
    ranks = np.tile(np.array(window.ranks, dtype=np.int32), T)
    pq.write_table(pa.table({"time": stamps, "rank": ranks, **columns}), folder / "metrics.parquet")
    if labels is not None:
        (folder / "labels.json").write_text(json.dumps(labels))


def write_lines(path: Path, verdicts: list[Verdict]) -> None:
    lines = [
        {
            "time": f"2026-03-02T{8 + int(v.to_s - START_S) // 3600:02d}:{int(v.to_s - START_S) // 60 % 60:02d}:"
            f"{int(v.to_s - START_S) % 60:02d}.000Z",
            "decision": v.decision.value,
            "scope": v.scope.value if v.scope else None,
            "suspects": [{"rank": s.rank, "node": s.node, "score": s.score} for s in v.suspects],
            "category": v.category.value if v.category else None,
            "votes": dict(v.votes),
            "reason": v.reason,
        }
        for v in verdicts
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


FAULT = {
    "start": "2026-03-02T08:03:20Z", "end": "2026-03-02T08:10:00Z", "kind": "fault", "category": "slow", "nodes": ["node2"],
    "ranks": [2], "infrastructure": True, "nameable": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ([FAULT], "Right, 8.0 s after the fault: rank 2 on node2 was broken (slow)."),
        ([], "False alarm: nothing was broken."),
        ([{**FAULT, "kind": "benign", "category": "checkpoint"}], "The labels tell of checkpoint (benign), which is no fault."),
        ([{**FAULT, "nameable": False}], "Wrong blame, 8.0 s after the fault: no single node was broken (slow), not node2."),
        (None, "The trace has no labels"),
    ],
)
def test_the_verb_makes_a_page_of_a_trace(tmp_path: Path, labels: object, sentence: str) -> None:
    window = recorded()
    write_trace(tmp_path / "trace", window, labels)
    write_lines(tmp_path / "v.jsonl", said(window, (2, "node2")))
    out = tmp_path / "sub" / "report.html"
    assert main(["report", str(tmp_path / "trace"), "--verdicts", str(tmp_path / "v.jsonl"), "--out", str(out)]) == 0
    page = Page(out.read_text())
    assert sentence in page.text
    assert "Rank 2 on node2 is the suspect since 08:03:28 UTC." in page.text
    assert "notify demo, cordon node2, evict node2, restart demo planned only; nothing was carried out" in page.text
    assert [p.name for p in out.parent.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "line 1 is no verdict"),
        ('{"decision": "normal"}', "line 1 is no verdict (KeyError: 'time')"),
        ('{"time": "2026-03-02T08:00:00Z", "decision": "fine"}', "'fine' is not a valid Decision"),
        ('{"time": "2026-03-02T08:00:00Z", "decision": "normal", "votes": {"a": 3}}', "a vote is true, false or null"),
        (
            '{"time": "2026-03-02T08:00:00Z", "decision": "normal", "suspects": [{"rank": 1, "node": "a"}]}',
            "cannot blame anybody",
        ),
        ("[]", "line 1 is no verdict"),
        ('{"time": "2026-03-05T08:00:00Z", "decision": "normal"}', "of another time"),
    ],
)
def test_bad_verdicts_give_one_sentence_and_no_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, sentence: str
) -> None:
    write_trace(tmp_path / "trace", recorded())
    (tmp_path / "v.jsonl").write_text(content + "\n")
    arguments = ["report", str(tmp_path / "trace"), "--verdicts", str(tmp_path / "v.jsonl"), "--out", str(tmp_path / "r.html")]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert not (tmp_path / "r.html").exists()


def test_absent_and_binary_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="cannot read"):
        read_verdicts(tmp_path / "none.jsonl", "demo")
    (tmp_path / "v.jsonl").write_bytes(b"\xff\xfe\x00PAR1")
    with pytest.raises(DataError, match="is no text"):
        read_verdicts(tmp_path / "v.jsonl", "demo")


BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


def browse(page: Path, profile: Path) -> tuple[str, str]:
    done = subprocess.run(
        [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
            f"--user-data-dir={profile}", "--window-size=1200,2400", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
def test_a_browser_draws_the_page_without_complaint(tmp_path: Path) -> None:
    window = recorded()
    text = render(Report("t", "", window, said(window, (2, "node2")), truth=SLOW, recovery=healed()))
    (tmp_path / "page.html").write_text(text)
    _, complaints = browse(tmp_path / "page.html", tmp_path / "a")
    assert "CONSOLE" not in complaints

    # The page forbids foreign scripts, so the copy that is measured goes without that rule.
    measure = (
        "<script>document.body.dataset.boxes = JSON.stringify([...document.querySelectorAll('svg[role=img]')]"
        ".map(s => { const b = s.getBoundingClientRect(); return [b.width, b.height]; }));"
        "const map = [...document.querySelectorAll('svg[data-rows]')][0], box = map.getBoundingClientRect();"
        "map.dispatchEvent(new MouseEvent('mousemove', {clientX: box.left + box.width / 2, clientY: box.top + box.height / 2}));"
        "document.body.dataset.tip = document.getElementById('tip').textContent;</script>"
    )
    bare = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    (tmp_path / "measured.html").write_text(bare.replace("</body>", measure + "</body>"))
    dom, complaints = browse(tmp_path / "measured.html", tmp_path / "b")
    assert "CONSOLE" not in complaints
    body = next(a for t, a in Page(dom).elements if t == "body")
    boxes = json.loads(body["data-boxes"] or "")
    assert len(boxes) == 9
    assert all(width > 200 and height > 40 for width, height in boxes)
    assert re.match(r"rank [12] on node[12]\n2:\d\d  \(08:02:\d\d UTC\)", body["data-tip"] or "")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
def test_the_page_runs_only_its_own_script(tmp_path: Path) -> None:
    window = recorded()
    text = render(Report("t", "", window, said(window, (2, "node2"))))
    (tmp_path / "page.html").write_text(text.replace("</body>", "<script>document.title = 'foreign'</script></body>"))
    dom, complaints = browse(tmp_path / "page.html", tmp_path / "a")
    assert "<title>t</title>" in dom
    assert "Content Security Policy" in complaints
