"""The vote: a truth table to read, and the same rule written the obvious way."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagleeye.detectors.base import Score
from eagleeye.online.vote import SHADOW_RATIO, Ballot, suspected_since_s, tally
from eagleeye.window import Window

NAMES = ("knn_dtw", "matrix_profile", "lof")
TABLE = Path(__file__).with_name("majority_vote.txt")


def score(name: str, values: list[float]) -> Score:
    score_R = np.array(values, dtype=np.float64)
    return Score(name, score_R, None if np.isfinite(score_R).any() else "saw nothing", ("",) * len(values))


def cases() -> list[tuple[str, str, str]]:
    lines = [line.partition("#") for line in TABLE.read_text().splitlines()]
    return [(*(part.strip() for part in text.split("->")), why.strip()) for text, _, why in lines if text.strip()]  # type: ignore[misc]


@pytest.mark.parametrize(("given_scores", "expected", "why"), cases(), ids=lambda text: "")
def test_truth_table(given_scores: str, expected: str, why: str) -> None:
    rows = [[math.nan if v == "-" else float(v) for v in part.split()] for part in given_scores.split("|")]
    ballot = tally([score(name, row) for name, row in zip(NAMES, rows, strict=True)])
    assert ballot.judged == (expected != "unjudged"), why
    assert ballot.suspects == (() if expected in ("nobody", "unjudged") else tuple(int(r) for r in expected.split())), why


def test_the_table_covers_what_it_should() -> None:
    assert len(cases()) > 20
    assert all(why for _, _, why in cases())


values = st.sampled_from([math.nan, 0.0, 0.5, 0.99, 1.0, 1.01, 1.5, 2.0, 3.0, 7.0])


@settings(deadline=None, max_examples=300)
@given(data=st.data(), quorum=st.integers(1, 3), count=st.integers(1, 3), R=st.integers(1, 6))
def test_against_the_obvious_majority(data: st.DataObject, quorum: int, count: int, R: int) -> None:
    rows = [data.draw(st.lists(values, min_size=R, max_size=R)) for _ in range(count)]
    ballot = tally([score(name, row) for name, row in zip(NAMES, rows, strict=False)], quorum)
    judged, majority = set(), {}
    for rank in range(R):
        known = [row[rank] for row in rows if not math.isnan(row[rank])]
        if len(known) >= quorum:
            judged.add(rank)
        if sum(value > 1 for value in known) >= quorum:
            majority[rank] = sorted(known, reverse=True)[quorum - 1]
    strongest = max(majority.values(), default=0.0)
    expected = [rank for rank, strength in majority.items() if strength >= SHADOW_RATIO * strongest]
    assert ballot.suspects == tuple(sorted(expected, key=lambda rank: (-majority[rank], rank)))
    assert ballot.judged == bool(judged)
    assert {rank for rank in range(R) if np.isfinite(ballot.strength_R[rank])} == judged
    for name, row in zip(NAMES, rows, strict=False):
        known = [value for value in row if not math.isnan(value)]
        assert ballot.votes[name] == (any(value > 1 for value in known) if known else None)


@pytest.mark.parametrize(("quorum", "suspects"), [(1, (0, 1, 2)), (2, (1, 2)), (3, (2,))])
def test_quorum(quorum: int, suspects: tuple[int, ...]) -> None:
    scores = [score("a", [2.0, 2.0, 2.0]), score("b", [0.0, 2.0, 2.0]), score("c", [0.0, 0.0, 2.0])]
    assert tally(scores, quorum).suspects == suspects


def test_a_quorum_of_more_detectors_than_there_are_judges_nobody() -> None:
    ballot = tally([score("a", [2.0, 0.0]), score("b", [2.0, 0.0])], quorum=3)
    assert (ballot.judged, ballot.suspects) == (False, ())


def test_scores_of_different_windows_cannot_be_counted() -> None:
    for scores in ([], [score("a", [1.0]), score("b", [1.0, 2.0])]):
        with pytest.raises(ValueError, match="scores of one and the same window"):
            tally(scores)


def window(nodes: tuple[str, ...], end_s: float) -> Window:
    R = len(nodes)
    return Window("llm", tuple(range(R)), nodes, ("all",) * R, (), end_s, 1.0, np.zeros((R, 0, 1), np.float32))


def since(before: dict[str, float], suspects: tuple[int, ...], nodes: str = "abcd", end_s: float = 100.0) -> dict[str, float]:
    return suspected_since_s(before, Ballot({}, np.zeros(len(nodes)), suspects), window(tuple(nodes), end_s))


def test_since_when_a_node_is_suspected() -> None:
    assert since({}, ()) == {}
    assert since({}, (2, 0)) == {"a": 100.0, "c": 100.0}
    assert since({"c": 90.0}, (2, 0)) == {"a": 100.0, "c": 90.0}
    assert since({"c": 90.0}, (1,)) == {"b": 100.0}, "a tick without suspicion ends it"
    assert since({"c": 90.0}, ()) == {}


def test_another_rank_of_the_same_node_carries_the_suspicion_on() -> None:
    assert since({"a": 90.0}, (1,), "aabb") == {"a": 90.0}
    assert since({"a": 90.0}, (2, 3), "aabb") == {"b": 100.0}


def test_the_last_tick_is_not_changed() -> None:
    before = {"c": 90.0}
    since(before, (0,))
    assert before == {"c": 90.0}
