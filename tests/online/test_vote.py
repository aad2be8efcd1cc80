"""The vote: a truth table to read, and the same rule written the obvious way."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagleeye.detectors.base import Score
from eagleeye.online.vote import POLICIES, SHADOW_RATIO, tally

NAMES = ("knn_dtw", "matrix_profile", "lof")
EQUAL = dict.fromkeys(NAMES, 1.0)
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
    ballot = tally([score(name, row) for name, row in zip(NAMES, rows, strict=True)], EQUAL)
    assert ballot.judged == (expected != "unjudged"), why
    assert ballot.suspects == (() if expected in ("nobody", "unjudged") else tuple(int(r) for r in expected.split())), why


def test_the_table_covers_what_it_should() -> None:
    assert len(cases()) > 20
    assert all(why for _, _, why in cases())


values = st.sampled_from([math.nan, 0.0, 0.5, 0.99, 1.0, 1.01, 1.5, 2.0, 3.0, 7.0])


weights = st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=3, max_size=3)


@settings(deadline=None, max_examples=300)
@given(data=st.data(), weight=weights, count=st.integers(1, 3), R=st.integers(1, 6))
def test_against_the_obvious_majority(data: st.DataObject, weight: list[float], count: int, R: int) -> None:
    rows = [data.draw(st.lists(values, min_size=R, max_size=R)) for _ in range(count)]
    ballot = tally([score(n, row) for n, row in zip(NAMES, rows, strict=False)], dict(zip(NAMES, weight, strict=True)))
    judged, majority = set(), {}
    for rank in range(R):
        known = [(row[rank], weight[d]) for d, row in enumerate(rows) if not math.isnan(row[rank])]
        total = sum(w for _, w in known)
        if known and total >= 2.0:
            judged.add(rank)
            reached = [v for v, _ in known if sum(w for other, w in known if other >= v) > total / 2]
            if max(reached) > 1:
                majority[rank] = max(reached)
    strongest = max(majority.values(), default=0.0)
    expected = [rank for rank, strength in majority.items() if strength >= SHADOW_RATIO * strongest]
    assert ballot.suspects == tuple(sorted(expected, key=lambda rank: (-majority[rank], rank)))
    assert {rank for rank in range(R) if np.isfinite(ballot.strength_R[rank])} == judged


def test_the_heaviest_alone_is_no_majority_and_the_others_without_it_are_none_either() -> None:
    weight = POLICIES["default"].weights
    names = ("peer_deviation", "knn_dtw", "matrix_profile", "lof")
    rows = [[9.0, 0.0, 9.0], [0.0, 9.0, 9.0], [0.0, 9.0, 0.0], [0.0, 9.0, 0.0]]
    assert tally([score(n, row) for n, row in zip(names, rows, strict=True)], weight).suspects == (2,)


def test_evidence_decides_and_the_score_of_the_tick_tells_who_lies_out_now() -> None:
    now = [score("a", [5.0, 0.7, 3.0]), score("b", [5.0, 0.7, 3.0])]
    held = [score("a", [0.9, 1.2, 1.2]), score("b", [0.9, 1.2, 1.2])]
    assert tally(now, {}, held).suspects == (2,)
    assert tally(now, {}, held, held=(1,)).suspects == (2,), "in the shadow of rank 2"
    assert tally([score("a", [0.7]), score("b", [0.7])], {}, [score("a", [1.2]), score("b", [1.2])], held=(0,)).suspects == (0,)


def test_scores_of_different_windows_cannot_be_counted() -> None:
    for scores in ([], [score("a", [1.0]), score("b", [1.0, 2.0])]):
        with pytest.raises(ValueError, match="scores of one and the same window"):
            tally(scores, {})
