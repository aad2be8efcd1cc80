"""Why a rank was blamed and why another was not: one sentence for each reason, the same from a replay and from a live scorer."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from eagleeye.cli import main
from eagleeye.clock import ManualClock
from eagleeye.detectors.base import Score
from eagleeye.detectors.ensemble import Ensemble
from eagleeye.detectors.peers import Scale
from eagleeye.detectors.whole_job import Past
from eagleeye.errors import NoData, SourceUnavailable, UsageError
from eagleeye.online import explain as explaining
from eagleeye.online.explain import Explanation, Grounds, RankView, ask, at, explain, replayed, text
from eagleeye.online.judge import Judge, Settings
from eagleeye.online.replay import verdicts
from eagleeye.online.scorer import Scorer
from eagleeye.online.service import serve
from eagleeye.records import Decision, Scope, Suspect, Verdict, from_json, to_json
from eagleeye.source.trace import TraceSource, write_trace
from eagleeye.window import Window

NAN = float("nan")
POWER, CLOCK = "gpu_power_watts", "gpu_sm_clock_hertz"
MEMBERS = ("peer_deviation", "knn_dtw", "matrix_profile", "lof")
VOTES: dict[str, bool | None] = {**dict.fromkeys(MEMBERS, True), "silence": None, "flat_together": False, "job_change": False}
BLAMED = Verdict(
    "llm", 0.0, 1_772_440_270.0, Decision.ANOMALOUS, "rank 5 on n5 is slow", Scope.RANK, None, (Suspect(5, "n5", 4.0, ""),), VOTES
)
NORMAL = Verdict("llm", 0.0, 1_772_440_270.0, Decision.NORMAL, "no rank differs from its peers", votes=VOTES)


def window(power: Sequence[float] = (600, 601, 599, 602, 598, 450), groups: Sequence[str] = ("all",) * 6) -> Window:
    """A window of three instants in which nothing changes."""
    values_RMT = np.repeat(np.array(power, np.float32)[:, None, None], 3, axis=2)
    return Window("llm", tuple(range(6)), tuple(f"n{r}" for r in range(6)), tuple(groups), (POWER,), BLAMED.to_s, 5.0, values_RMT)


def said(now: Sequence[float], so_far: Sequence[float]) -> tuple[tuple[Score, ...], tuple[Score, ...]]:
    """Every member says the same of the six ranks."""
    both = ([Score(m, np.array(v, float), None, (POWER,) * 6) for m in MEMBERS] for v in (now, so_far))
    scores, held = (tuple(s) for s in both)
    return scores, held


QUIET = (0.1, 0.2, 0.1, 0.3, 0.1, 4.0)
HELD = (0.0, 0.0, 0.0, 0.0, 0.0, 1.1)


def grounds(verdict: Verdict = BLAMED, now: Sequence[float] = QUIET, so_far: Sequence[float] = HELD, **other: Any) -> Grounds:
    scores, evidence = said(now, so_far)
    return Grounds(verdict, **{"window": window(), "settings": Settings(), "scores": scores, "evidence": evidence, **other})


def only(found: Grounds, rank: int) -> RankView:
    (view,) = explain(found, [rank]).ranks
    return view


# ---- sentences


def test_blamed() -> None:
    view = only(grounds(), 5)
    assert (view.blamed, view.score, view.evidence, view.peers) == (True, 4.0, 1.1, 5)
    assert view.why == (
        "Blamed: peer_deviation, knn_dtw, matrix_profile and lof have enough evidence against it (6 of 6 votes), "
        "and no rank lies out further."
    )


def test_a_second_suspect() -> None:
    both = replace(BLAMED, suspects=(*BLAMED.suspects, Suspect(2, "n2", 3.0, "")))
    view = only(grounds(both, now=(0.1, 0.1, 3.0, 0.1, 0.1, 4.0), so_far=(0, 0, 1.1, 0, 0, 1.1)), 2)
    assert view.why.endswith("(6 of 6 votes), and it deviates 0.75 times as far as rank 5, too much for a mere victim.")


@pytest.mark.parametrize(
    ("now", "so_far", "why"),
    [
        (0.2, 0.0, "Not blamed: most of its judges see it at 0.20 or below, where normal work reaches 0.5 and 1 is anomalous."),
        (0.2, 1.1, "where normal work reaches 0.5 and 1 is anomalous; what it did before does not count any more."),
        (
            1.5,
            0.62,
            "Not blamed: its score is 1.50, where 1 is anomalous, but the evidence is not enough yet: 0.62 of the 1 needed for "
            "at most 1 false alarm per 1000 GPU-days.",
        ),
        (
            1.5,
            1.1,
            "Not blamed: it lies in the shadow of rank 5: it deviates 0.38 times as far, and below 0.6 it is taken for a "
            "victim of that one.",
        ),
        (NAN, NAN, "Not judged: too few members could say anything of it; rank 5 on n5 is slow."),
    ],
    ids=["below", "before", "evidence", "shadow", "unjudged"],
)
def test_not_blamed(now: float, so_far: float, why: str) -> None:
    view = only(grounds(now=(0.1, now, 0.1, 0.3, 0.1, 4.0), so_far=(0, so_far, 0, 0, 0, 1.1)), 1)
    assert not view.blamed
    assert view.why.endswith(why)


def test_the_judges_own_reason_comes_first() -> None:
    both = {"now": (0.1, 3.9, 0.1, 0.3, 0.1, 4.0), "so_far": (0, 1.1, 0, 0, 0, 1.1)}
    why = "its own gpu_power_watts changed no more than that of its peers"
    assert only(grounds(**both, spared={1: why}), 1).why == f"Not blamed: {why}."


def test_who_was_blamed_before_is_counted_as_the_judge_counts() -> None:
    fading = {"now": (0.1, 0.2, 0.1, 0.3, 0.1, 0.8), "so_far": HELD}
    assert only(grounds(**fading, held=(5,)), 5).why.endswith("(6 of 6 votes), and no rank lies out further.")
    assert explaining._count(grounds(**fading)).agreed == ()
    assert explaining._count(grounds(**fading, held=(5,))).agreed == (5,)


def test_no_majority() -> None:
    found = grounds()
    found.scores[3].score_R[1] = 2.0
    assert only(found, 1).why.endswith("0.5 and 1 is anomalous; lof alone makes no majority (1 of 6 votes).")
    for k in (2, 3):
        found.scores[k].score_R[0], found.evidence[k].score_R[0] = 2.0, 1.1
    for k in (0, 1):
        found.scores[k].score_R[0], found.evidence[k].score_R[0] = 0.7, 0.3
    assert only(found, 0).why.endswith(
        "0.30 of the 1 needed for at most 1 false alarm per 1000 GPU-days; matrix_profile and lof alone have enough, which is no "
        "majority (2 of 6 votes)."
    )


def test_the_furthest_is_not_sure_yet() -> None:
    unsure = replace(NORMAL, reason="no rank differs from its peers for sure")
    found = grounds(unsure, now=(0.1, 3.0, 0.1, 0.1, 0.1, 4.0), so_far=(0, 1.1, 0, 0, 0, 0.5))
    why = "Not blamed: the evidence against it suffices, but rank 5 lies out further, is not sure yet and may be the cause."
    assert only(found, 1).why == why


@pytest.mark.parametrize(
    ("verdict", "why"),
    [
        (
            replace(BLAMED, rule="link_down"),
            {
                5: "Blamed by the rule link_down, without a vote: rank 5 on n5 is slow.",
                1: "Not blamed: the rule link_down decided without a vote and names rank 5 on n5; most of its judges see",
            },
        ),
        (
            replace(BLAMED, rule="stalled", scope=Scope.JOB, suspects=()),
            {1: "Not blamed: the rule stalled decided without a vote and names nobody; most"},
        ),
        (
            replace(NORMAL, decision=Decision.NOT_APPLICABLE, reason="the job pauses: GPUs are used 3 % of what is usual"),
            {5: "Not blamed: the job pauses: GPUs are used 3 % of what is usual, and nobody is compared meanwhile."},
        ),
        (
            replace(BLAMED, scope=Scope.JOB, suspects=(), reason="the whole job became slower than it was"),
            {1: "Not blamed: the job as a whole changed, so nobody is named; most of its judges see it at 0.20"},
        ),
        (
            replace(BLAMED, scope=Scope.JOB, suspects=(), reason="3 of 4 nodes deviate at once"),
            {5: "Not blamed although a majority finds it anomalous: 3 of 4 nodes deviate at once."},
        ),
        (
            replace(NORMAL, decision=Decision.UNSURE, reason="learning what is normal for this job: 300 of 600 s"),
            {1: "1 is anomalous; the verdict is unsure besides (learning what is normal for this job: 300 of 600 s)."},
        ),
    ],
    ids=["rule", "rule-of-all", "pause", "whole-job", "many-nodes", "learning"],
)
def test_the_verdict_decides(verdict: Verdict, why: dict[int, str]) -> None:
    for rank, sentence in why.items():
        assert sentence in only(grounds(verdict), rank).why


def test_nothing_was_learned_yet() -> None:
    learning = replace(NORMAL, decision=Decision.UNSURE, reason="learning what is normal for this job: 5 of 600 s")
    found = explain(grounds(learning, scores=(), evidence=()), [1])
    assert found.ranks[0].why == "Not judged: learning what is normal for this job: 5 of 600 s."
    assert {m.abstained for m in found.members} == {"was not asked"}
    assert explain(grounds(learning, scores=(), evidence=())).ranks == (), "nobody lies out further than another"


def test_a_rank_that_fell_silent() -> None:
    silent = grounds(window=window((600, 601, NAN, 602, 598, 450)))
    why = "Not blamed: nothing was observed of it in the last 15 s, and what is missing is neither normal nor a fault of its own."
    assert only(silent, 2).why == why
    assert [(c.own, c.deviations) for c in only(silent, 2).metrics] == [(None, None)]


def test_too_few_peers() -> None:
    two = grounds(window=window(groups=("a", "a", "a", "b", "b", "a")))
    view = only(two, 3)
    assert view.peers == 1
    assert view.why == "Not blamed: there are 2 ranks of its role (b), and with fewer than 3 nobody can say who is right."
    assert [(c.own, c.peers, c.spread) for c in view.metrics] == [(602.0, None, None)]


def test_the_policy_of_the_paper() -> None:
    votes: dict[str, bool | None] = {"knn_dtw": True, "matrix_profile": True, "lof": False}
    three = tuple(
        Score(m, np.array(v, float), None, (POWER,) * 6)
        for m, v in (("knn_dtw", (0, 1.4, 0, 0, 0, 4)), ("matrix_profile", (0, 0, 0, 0, 0, 4)), ("lof", (0, 0, 0, 0, 0, 0.5)))
    )
    found = grounds(replace(BLAMED, votes=votes), settings=Settings(policy="transom"), scores=three, evidence=())
    assert only(found, 5).why == (
        "Blamed: knn_dtw and matrix_profile fire, more than half of the members, and no rank is stranger on average."
    )
    assert only(found, 1).why == (
        "Not blamed: knn_dtw finds it anomalous, and this policy names the strangest rank alone, which is 5."
    )
    told = text(explain(found))
    assert "Policy transom: more than half of the members must fire" in told
    assert [v.rank for v in explain(found).ranks] == [5, 1, 0]


# ---- numbers


def learned(**other: Any) -> Grounds:
    own = Ensemble(Scale((POWER,), np.array([10.0])), 5.0, {}, {}, {})
    offset_RM = np.array([[0], [0], [0], [0], [0], [-20]], np.float32)
    return grounds(own=own, offset_RM=offset_RM, **other)


def test_a_metric_beside_the_peers() -> None:
    (power,) = only(learned(), 5).metrics
    assert (power.metric, power.unit, power.own, power.peers, power.usual) == (POWER, "watts", 450.0, 600.0, -20.0)
    assert power.spread == pytest.approx(1.4826)
    assert power.deviations == pytest.approx((450 - 600 + 20) / 10)
    assert "gpu_power_watts  450 W  600 W ± 1.48 W  -20 W          -13.0" in text(explain(learned(), [5]))
    (power,) = only(grounds(), 5).metrics
    assert (power.own, power.peers, power.usual, power.deviations) == (450.0, 600.0, None, None), "nothing was learned yet"


def test_a_difference_that_may_not_hold_any_more() -> None:
    """At a level that was never seen, the smaller reading counts, as it does for the members."""
    level = {"high": {}, "flat_points": 0, "level": {}, "spread": {}, "use": NAN}
    known, strange = (
        Past(range={POWER: r}, pause_points=0, least_change=0.03, **level) for r in ((590.0, 610.0), (200.0, 300.0))
    )
    near = window((600, 601, 599, 602, 598, 595))
    assert only(learned(window=near, past=known), 5).metrics[0].deviations == pytest.approx(1.5)
    assert only(learned(window=near, past=strange), 5).metrics[0].deviations == 0.0
    far = window()
    assert only(learned(window=far, past=strange), 5).metrics[0].deviations == pytest.approx(-13.0)


def test_everybody_changes_between_two_instants() -> None:
    values_RMT = np.full((6, 1, 3), 600, np.float32)
    values_RMT[:, :, 2] = 300
    values_RMT[5] = 600
    (power,) = only(grounds(window=replace(window(), values_RMT=values_RMT)), 1).metrics
    assert (power.own, power.peers) == (450.0, 450.0), "a rank that does as the others do is not far off"


def test_the_facts_of_a_rule() -> None:
    """No member compares them, and of a vote they tell nothing."""
    stopped = np.concatenate([window().values_RMT, np.zeros((6, 2, 3), np.float32)], axis=1)
    stopped[5, 1] = 1.0
    with_facts = replace(window(), metrics=(POWER, "process_stopped_ratio", "process_up"), values_RMT=stopped)
    by_rule = grounds(replace(BLAMED, rule="stalled"), window=with_facts)
    assert [(c.metric, c.own, c.peers) for c in only(by_rule, 5).metrics] == [
        ("process_stopped_ratio", 1.0, 0.0),
        (POWER, 450.0, 600.0),
    ]
    assert [c.metric for c in only(grounds(window=with_facts), 5).metrics] == [POWER]


def test_members() -> None:
    found = {m.name: m for m in explain(grounds()).members}
    assert list(found) == list(VOTES)
    assert found["peer_deviation"] == explaining.MemberView("peer_deviation", 3.0, False, True, "", 5, 4.0, 1.1)
    assert (found["job_change"].of_job, found["job_change"].vote, found["job_change"].weight) == (True, False, 1.0)
    assert found["silence"].abstained == "was not asked"
    quiet = Score("silence", np.full(6, NAN), "nobody fell silent", ("",) * 6)
    scores, held = said(QUIET, HELD)
    (silence,) = [m for m in explain(grounds(scores=(*scores, quiet), evidence=(*held, quiet))).members if m.name == "silence"]
    assert (silence.abstained, silence.rank, silence.score) == ("nobody fell silent", None, None)


def test_who_is_told_of() -> None:
    assert [v.rank for v in explain(grounds()).ranks] == [5, 3, 1], "the suspect and two that lie out furthest after it"
    assert [v.rank for v in explain(grounds(NORMAL)).ranks] == [5, 3]
    assert [v.rank for v in explain(grounds(), [4, 0, 4]).ranks] == [4, 0]
    gaps = replace(window(), ranks=(0, 1, 2, 5, 7, 8))
    with pytest.raises(UsageError, match=r"job llm has no rank 6; there are 0 to 2, 5, 7 to 8$"):
        explain(grounds(window=gaps), [6])


def test_round_trip_through_json() -> None:
    for found in (grounds(), learned(), grounds(scores=(), evidence=()), grounds(window=window((NAN,) * 6))):
        told = explain(found, range(6))
        assert from_json(Explanation, json.loads(json.dumps(to_json(told), allow_nan=False))) == told
        assert text(told)


def test_text() -> None:
    lines = text(explain(learned())).splitlines()
    assert lines[0] == "job llm, 6 ranks, at 2026-03-02T08:31:10Z: anomalous: rank 5 on n5 is slow"
    assert "peer_deviation  3       yes   rank 5         4.00  1.10" in lines
    assert "job_change      1       no    was not asked  –     –" in lines
    assert "rank 5 on n5, 5 peers of all" in lines
    assert "  majority        4.00  1.10" in lines
    assert not any(line.endswith(" ") for line in lines)


def test_what_is_lost_is_not_told_as_known() -> None:
    gone = replace(NORMAL, decision=Decision.UNSURE, reason="the source does not answer")
    view = only(explaining.lost(learned(), gone), 5)
    assert (view.score, view.opinions, view.metrics) == (None, (), ())
    assert not view.blamed


# ---- from a replay and from a live scorer

STEP_S, LEARN_S, FAULT, T = 10.0, 600.0, 75, 90
SETTINGS = Settings(learn_s=LEARN_S, tick_s=STEP_S)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory, stream: Callable[..., Any]) -> Path:
    """Six ranks, of which rank 5 falls behind and rank 1 is not observed at the end."""
    made = stream(R=6, T=T, step_s=STEP_S, per_node=1)
    for name in (POWER, CLOCK):
        made.columns[name][5, FAULT:] *= 0.6
    for column in made.columns.values():
        column[1, 60:] = np.nan
    folder = tmp_path_factory.mktemp("trace") / "llm"
    write_trace(folder, [made.window(T - 1)])
    return folder


@pytest.mark.jit
def test_a_replay_gives_the_verdicts_of_a_replay(trace: Path) -> None:
    source = TraceSource(trace)
    assert [g.verdict for g in replayed(source, Judge(SETTINGS))] == list(verdicts(source, Judge(SETTINGS)))


@pytest.mark.jit
def test_the_first_anomalous_verdict(trace: Path) -> None:
    source = TraceSource(trace)
    found = explain(at(source, Judge(SETTINGS)))
    assert found.verdict.decision is Decision.ANOMALOUS
    assert FAULT <= round((found.verdict.to_s - source.stamps_s[0]) / STEP_S) <= FAULT + 3
    assert [s.rank for s in found.verdict.suspects] == [5]
    first, second, third = found.ranks
    assert (first.rank, first.blamed, second.blamed, third.blamed) == (5, True, False, False)
    assert {c.metric for c in first.metrics[:2]} <= {POWER, CLOCK}
    power = next(c for c in first.metrics if c.metric == POWER)
    assert power.own == pytest.approx(360, rel=0.05)
    assert power.peers == pytest.approx(600, rel=0.02)
    assert power.deviations is not None
    assert power.deviations < -10
    assert first.evidence is not None
    assert first.evidence > 1
    assert only(at(source, Judge(SETTINGS)), 1).why.startswith("Not blamed: nothing was observed of it in the last 30 s")


@pytest.mark.jit
def test_a_time(trace: Path) -> None:
    source = TraceSource(trace)
    start_s = float(source.stamps_s[0])
    assert at(source, Judge(SETTINGS), start_s + 57.0).verdict.to_s == start_s + 50
    assert at(source, Judge(SETTINGS), start_s).verdict.decision is Decision.UNSURE
    last_s = float(source.stamps_s[-1])
    for out in (start_s - 1, last_s + STEP_S):
        with pytest.raises(
            UsageError, match=r"llm goes from 2026-02-02T02:40:00Z to .*; the time to explain lies outside of that"
        ):
            at(source, Judge(SETTINGS), out)


@pytest.fixture(scope="module")
def live(trace: Path) -> Iterator[tuple[str, Scorer]]:
    """A scorer that watched the trace up to its end, and its address."""
    source = TraceSource(trace)
    scorer = Scorer(SETTINGS, source, ManualClock(float(source.stamps_s[0])))
    server = serve(scorer, "127.0.0.1", 0)
    for stamp_s in source.stamps_s:
        scorer.tick(float(stamp_s))
    yield f"http://127.0.0.1:{server.server_port}", scorer
    server.shutdown()
    server.server_close()


@pytest.mark.jit
def test_a_live_scorer_explains_the_same(trace: Path, live: tuple[str, Scorer]) -> None:
    url, _ = live
    source = TraceSource(trace)
    recorded = at(source, Judge(SETTINGS), float(source.stamps_s[-1]))
    assert recorded.verdict.decision is Decision.ANOMALOUS
    assert ask(url, source.job) == explain(recorded)
    assert ask(url + "/", source.job, [1, 3]) == explain(recorded, [1, 3])


@pytest.mark.jit
def test_the_command(trace: Path, live: tuple[str, Scorer], capsys: pytest.CaptureFixture[str]) -> None:
    replaying = ["explain", "--replay", str(trace), "--model", "none"]
    assert main(replaying) == 0
    default = capsys.readouterr().out
    assert default.startswith("job llm, 6 ranks, at 2026-02-02T02:5")
    assert "rank 5 on n5, 5 peers of all\n  Blamed: " in default
    assert main([*replaying, "--at", "first"]) == 0
    assert capsys.readouterr().out == default
    outs = []
    for when in ("14m30s", "2026-02-02T02:54:30Z", "2026-02-02T02:54:30", "2026-02-02T03:54:30+01:00"):
        assert main([*replaying, "--at", when, "--rank", "3", "--json"]) == 0
        outs.append(capsys.readouterr().out)
    assert outs == outs[:1] * 4
    found = from_json(Explanation, json.loads(outs[0]))
    assert [v.rank for v in found.ranks] == [3]
    assert main(["explain", "--scorer", live[0], "--job", "llm", "--json"]) == 0
    assert from_json(Explanation, json.loads(capsys.readouterr().out)) == ask(live[0], "llm")


@pytest.mark.jit
def test_a_source_that_went_down(trace: Path) -> None:
    source = TraceSource(trace)
    scorer = Scorer(SETTINGS, source, ManualClock(float(source.stamps_s[0])))
    scorer.tick(float(source.stamps_s[0]))
    source.jobs = lambda now_s: ()  # type: ignore[method-assign]
    scorer.tick(float(source.stamps_s[1]))
    found = explain(scorer.snapshot.jobs["llm"].grounds, [5])
    assert found.verdict.reason == "no source reports this job any more"
    assert found.ranks[0].metrics == ()


# ---- bad input


@pytest.mark.jit
def test_what_a_live_scorer_cannot_explain(live: tuple[str, Scorer], capsys: pytest.CaptureFixture[str]) -> None:
    url, _ = live
    with pytest.raises(NoData, match=r"no job 'other' is being watched; GET /api/v1/jobs lists those that are"):
        ask(url, "other")
    with pytest.raises(NoData, match=r"job llm has no rank 9; there are 0 to 5"):
        ask(url, "llm", [9])
    with pytest.raises(NoData, match=r"rank='-1' must be a number"):
        ask(url, "llm", [-1])
    assert main(["explain", "--scorer", url, "--job", "llm", "--rank", "9"]) == 1
    assert capsys.readouterr() == ("", "eagleeye explain: job llm has no rank 9; there are 0 to 5\n")


def test_no_scorer() -> None:
    with pytest.raises(
        SourceUnavailable, match=r"the scorer at http://127\.0\.0\.1:1 does not answer \(.*\); is `eagleeye score`"
    ):
        ask("http://127.0.0.1:1", "llm")


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (200, b"<html>", "gives no explanation"),
        (200, b'{"jobs": []}', "gives no explanation"),
        (404, b"not here", "answers with status 404 and no reason"),
        (500, b"[]", "answers with status 500 and no reason"),
    ],
)
def test_another_service(status: int, body: bytes, sentence: str) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(SourceUnavailable, match=sentence):
            ask(f"http://127.0.0.1:{server.server_port}", "llm")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--replay", "TRACE", "--rank", "9"], 2, "job llm has no rank 9; there are 0 to 5"),
        (
            ["--replay", "TRACE", "--at", "3d"],
            2,
            "TRACE goes from 2026-02-02T02:40:00Z to 2026-02-02T02:54:50Z; the time to explain lies",
        ),
        (["--replay", "TRACE", "--at", "9999-12-31T23:59:59-12:00"], 2, "the time to explain lies outside of that"),
        (["--replay", "TRACE", "--at", "noon"], 2, "--at 'noon' is no time; write first, 2026-03-02T08:31:10Z, or 25m"),
        (["--replay", "TRACE", "--job", "llm"], 2, "--job belongs to --scorer"),
        (["--replay", "TRACE/.."], 2, "trace.json is absent"),
        (["--replay", "TRACE/nowhere"], 1, "TRACE/nowhere is no folder"),
        (["--scorer", "http://127.0.0.1:1", "--job", "llm"], 3, "does not answer"),
        (["--scorer", "http://127.0.0.1:1"], 2, "--scorer needs --job"),
        (["--scorer", "127.0.0.1:1", "--job", "llm"], 2, "is no address of a scorer"),
        (["--scorer", "http://127.0.0.1:1", "--job", "llm", "--at", "first"], 2, "--at belongs to --replay"),
    ],
)
def test_one_sentence(trace: Path, arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *(a.replace("TRACE", str(trace)) for a in arguments)]) == code
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.startswith("eagleeye explain: ")
    assert sentence.replace("TRACE", str(trace)) in errors
    assert errors.count("\n") == 1


@pytest.mark.jit
def test_a_trace_in_which_nothing_happened(
    tmp_path: Path, stream: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path / "quiet", [stream(R=4, T=12, step_s=STEP_S).window(11)])
    arguments = ["explain", "--replay", str(tmp_path / "quiet"), "--model", "none"]
    assert main(arguments) == 0
    assert ": unsure: learning what is normal for this job" in capsys.readouterr().out
    assert main([*arguments, "--at", "first"]) == 1
    assert f"no verdict on {tmp_path / 'quiet'} is anomalous; choose another time with --at\n" in capsys.readouterr().err
