"""Recorded traces: read, written, cut off, broken."""

import json
import math
import resource
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from eagleeye.errors import DataError, EagleEyeError, EnvironmentLacks, NoData, UsageError
from eagleeye.source.trace import LOG_COLUMNS, TraceSource, TraceWriter, labels, write_trace
from eagleeye.window import Window

T0 = datetime(2026, 3, 2, 8, 0, 10, tzinfo=UTC).timestamp()
STEP_S = 10.0
SHARED = Path(__file__).parents[3] / "shared" / "traces"
RECORDED = sorted(p.parent for p in SHARED.glob("*/trace.json"))


def about(**changes):
    data = {
        "job": "j",
        "interval_seconds": 10,
        "ranks": [{"rank": r, "node": f"n{r // 2}", "gpu": r % 2, "group": f"pp{r // 2}"} for r in range(4)],
        "metrics": {"gpu_power_watts": "watts", "strange_thing": "1/s"},
    }
    return data | changes


def rows(count=6, ranks=range(4)):
    return pd.DataFrame(
        [
            {
                "time": pd.Timestamp(T0 + STEP_S * t, unit="s", tz="UTC"),
                "rank": np.int32(r),
                "gpu_power_watts": np.float32(100 * r + t),
                "strange_thing": np.float32(t),
            }
            for t in range(count)
            for r in ranks
        ]
    ).astype({"rank": "int32", "gpu_power_watts": "float32", "strange_thing": "float32"})


def write(folder, frame=None, data=None, logs=None):
    folder.mkdir()
    (folder / "trace.json").write_text(json.dumps(data or about()))
    (rows() if frame is None else frame).to_parquet(folder / "metrics.parquet")
    if logs is not None:
        (folder / "logs").mkdir()
        for node, text in logs.items():
            (folder / "logs" / f"{node}.log").write_text(text)
    return folder


def test_a_trace_is_a_stream_of_windows(tmp_path):
    source = TraceSource(write(tmp_path / "t"))
    assert (source.job, source.step_s) == ("j", 10.0)
    np.testing.assert_array_equal(source.stamps_s, T0 + STEP_S * np.arange(6))
    window = source.window("j", T0 + 30, 20)
    assert (window.ranks, window.nodes, window.groups) == ((0, 1, 2, 3), ("n0", "n0", "n1", "n1"), ("pp0", "pp0", "pp1", "pp1"))
    assert window.metrics == ("gpu_power_watts", "strange_thing")
    np.testing.assert_array_equal(window.column_RT("gpu_power_watts"), [[2, 3], [102, 103], [202, 203], [302, 303]])
    assert (window.end_s, window.step_s) == (T0 + 30, 10.0)
    assert not window.values_RMT.flags.writeable
    assert source.window("j", T0 + 39.9, 20).end_s == T0 + 30, "nothing from after the asked end"


def test_before_the_start_and_after_the_end_is_nan_and_beyond_is_an_error(tmp_path):
    source = TraceSource(write(tmp_path / "t"))
    early = source.window("j", T0 + 10, 40).column_RT("gpu_power_watts")[1]
    np.testing.assert_array_equal(early, [np.nan, np.nan, 100, 101])
    late = source.window("j", T0 + 60, 20).column_RT("gpu_power_watts")[1]
    np.testing.assert_array_equal(late, [105, np.nan])
    for end_s in (T0 - 1, T0 + 100):
        with pytest.raises(NoData, match="has no row in the 20 s before 2026-03-02T08:0"):
            source.window("j", end_s, 20)
    with pytest.raises(NoData, match="not of 'other'"):
        source.window("other", T0, 20)
    assert source.jobs(T0 - 1) == ()
    assert source.jobs(T0) == ("j",)


def test_missing_rows_nulls_and_infinities_are_nan_and_order_does_not_matter(tmp_path):
    frame = rows()
    frame.loc[frame.index[5], "gpu_power_watts"] = np.inf
    frame.loc[frame.index[6], "gpu_power_watts"] = None
    frame = frame.drop(index=frame.index[7])
    frame = frame.sample(frac=1, random_state=1)
    window = TraceSource(write(tmp_path / "t", frame)).window("j", T0 + 20, 30)
    np.testing.assert_array_equal(
        window.column_RT("gpu_power_watts"), [[0, 1, 2], [100, np.nan, 102], [200, np.nan, 202], [300, np.nan, 302]]
    )


def test_a_row_between_two_stamps_is_seen_only_from_the_later_one(tmp_path):
    frame = rows()
    late = frame["time"] == frame["time"].unique()[2]
    frame.loc[late, "time"] += pd.Timedelta(seconds=1)
    source = TraceSource(write(tmp_path / "t", frame))
    np.testing.assert_array_equal(source.window("j", T0 + 20, 20).column_RT("strange_thing")[0], [1, np.nan])
    assert source.window("j", T0 + 29, 10).column_RT("strange_thing")[0, 0] != 2


LOGS = {
    "n0": "2026-03-02T08:00:25.000Z kernel: NVRM: Xid (PCI:0000:17:00): 79, pid=1, GPU has fallen off the bus.\n"
    "  a continuation without a time\n"
    "2026-03-02T08:00:31.500Z RuntimeError: CUDA error: an illegal memory access was encountered\n",
    "elsewhere": "2026-03-02T08:00:25.000Z RuntimeError: not ours\n",
}


def test_error_lines_become_columns_of_all_ranks_of_their_node(tmp_path):
    source = TraceSource(write(tmp_path / "t", logs=LOGS), log_window_s=20.0)
    window = source.window("j", T0 + 50, 60)
    assert window.metrics[-4:] == LOG_COLUMNS
    for rank in (0, 1):
        np.testing.assert_array_equal(window.column_RT("log_errors")[rank], [0, 0, 1, 2, 1, 0])
        np.testing.assert_array_equal(window.column_RT("log_hardware_errors")[rank], [0, 0, 1, 1, 0, 0])
        np.testing.assert_array_equal(
            window.column_RT("log_first_error_age_seconds")[rank], [np.nan, np.nan, 5, 15, 18.5, np.nan]
        )
    np.testing.assert_array_equal(window.column_RT("log_errors")[2:], 0)
    assert np.isnan(window.column_RT("log_first_error_age_seconds")[2:]).all()


def test_without_logs_there_are_no_log_columns(tmp_path):
    assert TraceSource(write(tmp_path / "t")).metrics == ("gpu_power_watts", "strange_thing")


def test_a_metric_that_was_announced_but_never_recorded_is_nan(tmp_path):
    source = TraceSource(write(tmp_path / "t", rows().drop(columns="strange_thing")))
    assert np.isnan(source.window("j", T0, 10).column_RT("strange_thing")).all()


def break_json(folder):
    (folder / "trace.json").write_text('{"job": ')


def break_parquet(folder):
    path = folder / "metrics.parquet"
    path.write_bytes(path.read_bytes()[:-50])


def change(**changes):
    return lambda folder: (folder / "trace.json").write_text(json.dumps(about(**changes)))


def frame(make):
    return lambda folder: make(rows()).to_parquet(folder / "metrics.parquet")


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (shutil.rmtree, NoData, "is no folder"),
        (lambda f: (f / "trace.json").unlink(), DataError, r"trace\.json is absent"),
        (lambda f: (f / "metrics.parquet").unlink(), DataError, r"metrics\.parquet is absent"),
        (break_json, DataError, "no valid JSON"),
        (change(interval_seconds=0), DataError, "must be above zero"),
        (change(ranks=[]), DataError, "'ranks' is empty"),
        (change(ranks=[{"rank": 1}]), DataError, "lacks its rank or node"),
        (change(ranks=[{"rank": 1, "node": "a"}] * 2), DataError, "rank 1 occurs twice"),
        (change(ranks=about()["ranks"][:3]), DataError, "rank 3 is not among the ranks"),
        (change(metrics={"gpu_power_watts": "kilowatts"}), DataError, "unit 'kilowatts'; use one of"),
        (change(metrics={"gpu_power_watts": "bytes"}), DataError, "must be in 'watts'"),
        (change(metrics={"gpu_power_watts": "watts"}), DataError, "'strange_thing' has no unit"),
        (change(job=7), DataError, "'job' is absent or of the wrong kind"),
        (lambda f: (f / "metrics.parquet").write_bytes(b""), DataError, "cut off or no Parquet"),
        (break_parquet, DataError, "cut off or no Parquet"),
        (frame(lambda d: d.iloc[:0]), NoData, "holds no row"),
        (frame(lambda d: d.drop(columns="rank")), DataError, "'rank' is absent"),
        (frame(lambda d: d.assign(time=1.0)), DataError, "'time' is absent or of the wrong type"),
        (frame(lambda d: d.assign(strange_thing="x")), DataError, "holds .*string, not numbers"),
        (frame(lambda d: pd.concat([d, d.iloc[3:4]])), DataError, "rank 3 has two rows for 2026-03-02T08:00:10Z"),
        (frame(lambda d: d.assign(rank=d["rank"].astype("Int32").where(d.index != 1))), DataError, "1 rows have no rank"),
        (
            frame(lambda d: pd.concat([d, d.iloc[:1].assign(time=pd.Timestamp("1970-01-01", tz="UTC"))])),
            DataError,
            "cannot be one job",
        ),
    ],
)
def test_each_kind_of_damage_is_one_sentence(tmp_path, damage, kind, words):
    folder = write(tmp_path / "t")
    damage(folder)
    with pytest.raises(EagleEyeError, match=words) as caught:
        TraceSource(folder)
    assert type(caught.value) is kind
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_labels_are_parsed_and_their_absence_is_said(tmp_path):
    folder = write(tmp_path / "t")
    with pytest.raises(NoData, match="cannot be judged"):
        labels(folder)
    entry = {
        "start": "2026-03-02T08:00:10.500Z",
        "end": "2026-03-02T08:01:00Z",
        "kind": "fault",
        "category": "gpu_ecc",
        "nodes": ["n0"],
        "ranks": [1],
        "infrastructure": True,
        "nameable": False,
    }
    (folder / "labels.json").write_text(json.dumps([entry]))
    (label,) = labels(folder)
    assert (label.start_s, label.end_s, label.nodes, label.ranks) == (T0 + 0.5, T0 + 50, ("n0",), (1,))
    assert (label.infrastructure, label.nameable) == (True, False)
    del entry["nodes"]
    (folder / "labels.json").write_text(json.dumps([entry]))
    with pytest.raises(DataError, match="nodes"):
        labels(folder)


def made(end_s=T0 + 50, ranks=(0, 3), metrics=("gpu_power_watts", "train_step_age_seconds"), seed=0, T=6, step_s=STEP_S):
    values = np.random.default_rng(seed).normal(size=(len(ranks), len(metrics), T)).astype(np.float32)
    values[0, 0, 2] = np.nan
    return Window("j", ranks, tuple(f"n{r}" for r in ranks), ("pp0",) * len(ranks), metrics, end_s, step_s, values)


@pytest.mark.parametrize("step_s", [10.0, 0.5])
def test_what_is_written_is_read_back(tmp_path, step_s):
    one = made(step_s=step_s, end_s=T0 + 0.123456)
    two = made(
        step_s=step_s, end_s=T0 + 0.123456 + 6 * step_s, ranks=(0, 2, 3), metrics=("log_errors", "gpu_power_watts"), seed=1
    )
    write_trace(tmp_path / "new" / "t", [one, two])
    source = TraceSource(tmp_path / "new" / "t")
    assert source.step_s == step_s
    assert source.metrics == ("gpu_power_watts", "train_step_age_seconds", "log_errors")
    for window in (one, two):
        again = source.window("j", window.end_s, 6 * step_s)
        assert again.end_s == pytest.approx(window.end_s, abs=1e-5)
        for r, rank in enumerate(window.ranks):
            for m, name in enumerate(window.metrics):
                np.testing.assert_array_equal(again.column_RT(name)[again.ranks.index(rank)], window.values_RMT[r, m])
    assert np.isnan(source.window("j", one.end_s, 10).values_RMT[1]).all(), "rank 2 was not there yet"
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["t"]


def test_an_existing_folder_an_empty_trace_and_a_crash_leave_nothing(tmp_path):
    (tmp_path / "t").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        TraceWriter(tmp_path / "t")
    with pytest.raises(NoData, match="nothing was recorded"):
        write_trace(tmp_path / "u", [])
    with pytest.raises(ValueError, match="one after the other"):
        write_trace(tmp_path / "u", [made(), made()])
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as a full disk: no file grows beyond 1000 bytes
    try:
        with pytest.raises(EnvironmentLacks, match="cannot write the trace"):
            write_trace(tmp_path / "t", [made()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", RECORDED or [pytest.param(None, marks=pytest.mark.skip("no ../shared/traces here"))])
def test_recorded_traces_load_and_a_cut_off_copy_is_the_same_as_far_as_it_goes(folder, tmp_path):
    whole = TraceSource(folder)
    assert all(label.start_s < label.end_s for label in labels(folder))
    assert len(whole.ranks) in (32, 64)
    table = pd.read_parquet(folder / "metrics.parquet")
    cut_s = float(whole.stamps_s[len(whole.stamps_s) * 6 // 10])
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(folder / "trace.json", copy)
    table[table["time"] <= pd.Timestamp(cut_s, unit="s", tz="UTC")].to_parquet(copy / "metrics.parquet")
    if (folder / "logs").is_dir():
        (copy / "logs").mkdir()
        moment = datetime.fromtimestamp(cut_s, UTC).isoformat()[:23]
        for log in (folder / "logs").iterdir():
            kept = [line for line in log.read_text().splitlines(keepends=True) if line[:23] <= moment]
            (copy / "logs" / log.name).write_text("".join(kept))
    cut = TraceSource(copy)
    assert cut.metrics == whole.metrics
    for end_s in [*cut.stamps_s[::37], cut.stamps_s[-1]]:
        one, other = whole.window(whole.job, end_s, 300), cut.window(whole.job, end_s, 300)
        assert one.end_s == other.end_s
        np.testing.assert_array_equal(one.values_RMT, other.values_RMT)


def test_windows_of_64_ranks_come_by_the_thousand_a_second(tmp_path):
    ranks = tuple(range(64))
    write_trace(tmp_path / "t", [made(ranks=ranks, T=720, metrics=tuple(f"m{m}" for m in range(10)))])
    source = TraceSource(tmp_path / "t")
    began = time.perf_counter()
    for end_s in source.stamps_s:
        source.window("j", float(end_s), 600)
    assert len(source.stamps_s) / (time.perf_counter() - began) > 2000
    assert math.isclose(source.stamps_s[-1], T0 + 50)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "must be a list of labels"),
        ("[1]", "must be a list of labels"),
        ('[{"kind": "fualt", "nodes": [], "ranks": []}]', "'fualt' is no kind of label"),
        ('[{"kind": "fault", "nodes": "n1", "ranks": []}]', "must be lists"),
    ],
)
def test_labels_that_say_nothing_clear_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "labels.json").write_text(text)
    with pytest.raises(DataError, match=said):
        labels(tmp_path)
