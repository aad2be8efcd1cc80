"""The window: shape and order are checked once, cuts keep their stamps, and what was not observed stays NaN."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagleeye.errors import DataError
from eagleeye.window import Window


def window(R: int = 3, T: int = 5, step_s: float = 2.0, end_s: float = 1_000_000.0, **changes: Any) -> Window:
    values_RMT = np.arange(R * 2 * T, dtype=np.float32).reshape(R, 2, T)
    given: dict[str, Any] = {
        "job": "llm",
        "ranks": tuple(range(R)),
        "nodes": tuple(f"n{r}" for r in range(R)),
        "groups": ("all",) * R,
        "metrics": ("gpu_power_watts", "tape_speed"),
        "end_s": end_s,
        "step_s": step_s,
        "values_RMT": values_RMT,
    }
    return Window(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"values_RMT": np.zeros((3, 2), np.float32)}, r"values of shape \(3, 2\) do not fit 3 ranks x 2 metrics"),
        ({"values_RMT": np.zeros((2, 2, 5), np.float32)}, r"values of shape \(2, 2, 5\) do not fit"),
        ({"values_RMT": np.zeros((3, 1, 5), np.float32)}, r"values of shape \(3, 1, 5\) do not fit"),
        ({"nodes": ("n0",)}, "every rank needs a node and a group"),
        ({"groups": ("a", "b")}, "every rank needs a node and a group"),
        ({"ranks": (0, 2, 1)}, "ranks must strictly increase"),
        ({"ranks": (0, 1, 1)}, "ranks must strictly increase"),
        ({"metrics": ("x", "x")}, "a metric occurs twice"),
        ({"end_s": float("nan")}, "end_s must be finite and step_s positive"),
        ({"end_s": float("inf")}, "end_s must be finite and step_s positive"),
        ({"step_s": 0.0}, "end_s must be finite and step_s positive"),
        ({"step_s": float("nan")}, "end_s must be finite and step_s positive"),
    ],
)
def test_what_is_no_window(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        window(**changes)


def test_values_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        window().values_RMT[0, 0, 0] = 1.0


def test_stamps() -> None:
    assert window().stamps_T.tolist() == [999_992.0, 999_994.0, 999_996.0, 999_998.0, 1_000_000.0]
    assert window().start_s == 999_992.0


def test_columns() -> None:
    assert window().column_RT("tape_speed")[1].tolist() == [15.0, 16.0, 17.0, 18.0, 19.0]
    assert window().has("tape_speed")
    assert not window().has("gpu_sm_clock_hertz")
    with pytest.raises(DataError, match=r"^job llm: no metric 'clock' here; there are gpu_power_watts, tape_speed$"):
        window().column_RT("clock")


def test_select_reorders_and_leaves_absent_ones_unobserved() -> None:
    picked = window().select(["tape_speed", "clock", "gpu_power_watts"])
    assert picked.metrics == ("tape_speed", "clock", "gpu_power_watts")
    assert picked.values_RMT.dtype == np.float32
    assert np.isnan(picked.column_RT("clock")).all()
    assert np.array_equal(picked.column_RT("gpu_power_watts"), window().column_RT("gpu_power_watts"))
    assert window().select([]).values_RMT.shape == (3, 0, 5)


def test_last_and_before() -> None:
    assert window().last(4.0).stamps_T.tolist() == [999_998.0, 1_000_000.0]
    assert window().last(0.0).stamps_T.tolist() == [1_000_000.0]
    assert window().last(1e6).values_RMT.shape[2] == 5
    cut = window().before(999_997.9)
    assert (cut.end_s, cut.values_RMT.shape[2], cut.start_s) == (999_996.0, 3, 999_992.0)
    assert window().before(1e9).end_s == 1_000_000.0
    assert window(end_s=1.77e9).before(1.77e9 - 5e-7).end_s == 1.77e9, "stamps round"
    with pytest.raises(ValueError, match="nothing lies before that time"):
        window().before(999_991.9)


@settings(deadline=None)
@given(T=st.integers(1, 40), step_s=st.sampled_from([0.1, 1.0, 7.5, 60.0]), keep=st.integers(1, 40))
def test_a_cut_shows_the_same_values_at_the_same_stamps(T: int, step_s: float, keep: int) -> None:
    whole = window(T=T, step_s=step_s, end_s=1.77e9)
    keep = min(keep, T)
    counted_from_the_start_s = whole.start_s + (keep - 1) * step_s  # the same instant, but for rounding
    for cut in (whole.last(keep * step_s), whole.before(float(whole.stamps_T[keep - 1])), whole.before(counted_from_the_start_s)):
        assert cut.values_RMT.shape[2] == keep
        places = [int(np.argmin(np.abs(whole.stamps_T - stamp_s))) for stamp_s in cut.stamps_T]
        assert places == list(range(places[0], places[0] + keep))
        assert np.array_equal(cut.values_RMT, whole.values_RMT[:, :, places])


def test_no_rank_at_all() -> None:
    empty = window(R=0)
    assert empty.values_RMT.shape == (0, 2, 5)
    assert empty.last(4.0).select(["x"]).values_RMT.shape == (0, 1, 2)
