"""Loaders of public sets: on small files in the formats of the sources, and on the sets themselves where these are at hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import public
import pytest

from eagleeye.errors import DataError, EnvironmentLacks, NoData, UsageError
from eagleeye.metrics import check_unit
from eagleeye.source.trace import TraceSource, labels

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
needs_sets = pytest.mark.skipif(not SHARED.is_dir(), reason="the public sets are not at ../shared/data")


def _csv(path: Path, table: pd.DataFrame) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(path, index=False)
    return path


def make_st(folder: Path) -> None:
    """Two steps of four ranks in two stages, the last one heavier; 41 bins of 0.05 s."""
    rows = [
        {
            "step": step, "rank": rank, "dp_rank": rank % 2, "stage": rank // 2, "collective_s": 0.1, "p2p_s": 0.5,
            "compute_s": 1.0 + rank // 2, "fwd_mean_s": 0.06, "bwd_mean_s": 0.14, "step_len_s": 2.0 if step == 7 else 3.0,
        }
        for step in (7, 90)
        for rank in range(4)
    ]  # fmt: skip
    _csv(folder / "dev" / "ST_per_step.csv.gz", pd.DataFrame(rows))
    bins = pd.DataFrame({"t_s": np.round(np.arange(41) * 0.05, 2)})
    for rank in range(4):
        bins[f"r{rank}_compute"] = np.where(np.arange(41) < 10 * (1 + rank // 2), 1.0, 0.0)
        bins[f"r{rank}_comm"] = 0.25
    _csv(folder / "dev" / "ST_rank_time.csv.gz", bins)


def make_minibatch(folder: Path) -> None:
    """Ten workers; number 6 is slow at the samples 20 and 22 of job_1; job_2 ends with worker 0 alone."""
    for number, samples in ((1, 40), (2, 30)):
        rows = [
            {"worker": worker, "gpu": 25, "time": 1 + 10 * k, "batch_time_norm": 400 + 10 * worker}
            for k in range(samples)
            for worker in range(10)
            if not (number == 2 and worker and k == samples - 1)
        ]
        for row in rows:
            if number == 1 and row["worker"] == 6 and row["time"] in (201, 221):
                row["batch_time_norm"] = 900
            if number == 2 and row["worker"] == 0 and row["time"] == 291:
                row["time"] = 286  # the last sample comes early
        _csv(folder / "dev" / f"job_{number}_norm.csv", pd.DataFrame(rows).reset_index(names="Unnamed: 0"))


def make_gentd(folder: Path) -> None:
    """Two pods with a GPU, one of them late, and one without."""
    t = {"t": [0, 57, 114]}
    _csv(
        folder / "pod_gpu_duty_cycle_anon_wide.csv.gz",
        pd.DataFrame(t | {"00800b": [0.0, 50.0, 100.0], "123456": [None, 0.0, 1.0]}),
    )
    memory = t | {"00800b": [2e10, 2e10, 3e10], "123456": [None, 1e10, 1e10], "ad921d": [1e9, 1e9, 1e9]}
    _csv(folder / "pod_gpu_memory_used_bytes_anon_wide.csv.gz", pd.DataFrame(memory))
    share = t | {"Unnamed: 1": [None, None, 0.5], "00800b": [0.5, 0.5, 0.5], "999999": [0.9, 0.9, 0.9]}
    _csv(folder / "pod_memory_util_anon_wide.csv.gz", pd.DataFrame(share))


NMON = (
    *("cpu_user", "cpu_sys", "cpu_wait", "net_read", "net_write", "mem_free"),
    *("mem_active", "disk_read", "disk_write", "disk_busy", "runq", "ctxsw"),
)


def make_exathlon(folder: Path) -> None:
    """Two nodes for four seconds: nobody wrote second 2, and node6 missed second 3."""
    rows = [
        {"t": t, "node": node} | dict.fromkeys(NMON, 10.0) | ({} if (t, node) != (3, "node6") else dict.fromkeys(NMON, -1.0))
        for node in ("node5", "node6")
        for t in (0, 1, 3)
    ]
    _csv(folder / "dev" / "5_0_1_nodes.csv.gz", pd.DataFrame(rows))


def _machine(path: Path, train: int, label: str, metrics: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    label_T = np.array([int(c) for c in label], dtype=np.uint8)
    rows = np.linspace(0, 1, train + len(label_T), dtype=np.float32)
    values = np.stack([rows] * metrics, axis=1)
    np.savez_compressed(path, train=values[:train], test=values[train:], label=label_T)


def make_asd(folder: Path) -> None:
    """Servers 2 and 10, the latter with two points less to learn from."""
    _machine(folder / "dev" / "omi-10.npz", 4, "0110")
    _machine(folder / "dev" / "omi-2.npz", 6, "1001")


def make_smd(folder: Path) -> None:
    """One machine."""
    _machine(folder / "dev" / "machine-1-6.npz", 5, "00110")


def make_nab(folder: Path) -> None:
    """A series with one window, and one without any; points 20 to 22 are labelled, both ends included."""
    for name in ("real/busy", "calm/flat"):
        stamps = pd.date_range("2014-02-14 14:30:00", periods=40, freq="5min").strftime("%Y-%m-%d %H:%M:%S")
        _csv(folder / "dev" / f"{name}.csv.gz", pd.DataFrame({"timestamp": stamps, "value": np.arange(40.0)}))
    windows = {"real/busy.csv": [["2014-02-14 16:10:00.000000", "2014-02-14 16:20:00.000000"]], "calm/flat.csv": []}
    (folder / "dev" / "combined_windows.json").write_text(json.dumps(windows), encoding="utf-8")


MAKE: dict[str, Callable[[Path], None]] = {
    "bytedance_straggler": make_st,
    "alibaba_minibatch_2020": make_minibatch,
    "alibaba_gentd26": make_gentd,
    "exathlon_normal": make_exathlon,
    "asd": make_asd,
    "smd": make_smd,
    "nab": make_nab,
}


def made(name: str, tmp_path: Path) -> Path:
    """The folder of a small set."""
    MAKE[name](tmp_path / name)
    return tmp_path / name


def load(name: str, tmp_path: Path) -> list[Any]:
    """Traces of a small set."""
    return list(public.TRACES[name](made(name, tmp_path)))


def seconds(trace: Any) -> list[tuple[float, float]]:
    """Labels from the beginning of the first column."""
    origin_s = trace.window.start_s - trace.window.step_s
    return [(label.start_s - origin_s, label.end_s - origin_s) for label in trace.labels]


def test_st_ranks_of_a_stage_are_one_group(tmp_path: Path) -> None:
    for trace in load("bytedance_straggler", tmp_path):
        assert trace.window.groups == ("stage-0", "stage-0", "stage-1", "stage-1")
        assert [(label.kind, label.ranks, label.infrastructure) for label in trace.labels] == [("benign", (2, 3), False)]


def test_st_bins_are_joined_to_seconds(tmp_path: Path) -> None:
    window = load("bytedance_straggler", tmp_path)[0].window
    assert window.step_s == 1.0
    # 41 bins are two seconds and a rest that is no second
    assert window.column_RT("compute_ratio").tolist() == [[0.5, 0.0]] * 2 + [[1.0, 0.0]] * 2
    assert (window.column_RT("communication_ratio") == 0.25).all()


def test_st_steps_take_the_mean_step(tmp_path: Path) -> None:
    window = load("bytedance_straggler", tmp_path)[1].window
    assert window.step_s == 2.5
    assert window.column_RT("train_step_seconds").tolist() == [[2.0, 3.0]] * 4
    assert window.column_RT("train_compute_seconds").tolist() == [[1.0, 1.0]] * 2 + [[2.0, 2.0]] * 2


def test_job_1_is_labelled_from_the_first_to_the_last_slow_sample(tmp_path: Path) -> None:
    trace, healthy = load("alibaba_minibatch_2020", tmp_path)
    assert trace.window.column_RT("minibatch_time_ratio")[:, 0] == pytest.approx(0.4 + 0.01 * np.arange(10))
    (label,) = trace.labels
    assert (label.kind, label.nodes, label.ranks, label.nameable) == ("fault", ("worker-6",), (6,), True)
    # columns 20 to 22, each covering the ten seconds before its stamp
    assert seconds(trace) == [(200.0, 230.0)]
    assert healthy.labels == ()


def test_job_2_keeps_its_unequal_end(tmp_path: Path) -> None:
    values_RT = load("alibaba_minibatch_2020", tmp_path)[1].window.column_RT("minibatch_time_ratio")
    assert np.isfinite(values_RT).sum(axis=1).tolist() == [30] + [29] * 9
    assert np.isfinite(values_RT[0, -1])


def test_a_job_1_without_its_straggler_is_refused(tmp_path: Path) -> None:
    path = made("alibaba_minibatch_2020", tmp_path) / "dev" / "job_1_norm.csv"
    table = pd.read_csv(path)
    table["batch_time_norm"] = 400
    _csv(path, table)
    with pytest.raises(DataError, match="never falls behind"):
        public.alibaba_minibatch_2020(path.parents[1])


def test_gentd_duty_is_a_ratio_and_absent_pods_are_not_idle(tmp_path: Path) -> None:
    (trace,) = load("alibaba_gentd26", tmp_path)
    window = trace.window
    assert window.nodes == ("pod-00800b", "pod-123456")
    assert window.step_s == 57.0
    use_RT = window.column_RT("gpu_utilization_ratio")
    assert use_RT[0].tolist() == [0.0, 0.5, 1.0]
    assert np.isnan(use_RT[1, 0])
    assert use_RT[1, 1:] == pytest.approx([0.0, 0.01])
    assert window.column_RT("gpu_memory_used_bytes")[0, 2] == pytest.approx(3e10)
    assert np.isnan(window.column_RT("host_memory_used_ratio")[1]).all()
    assert [label.kind for label in trace.labels] == ["not_training"]
    assert seconds(trace) == [(0.0, 171.0)]


def test_gentd_with_another_unit_is_refused(tmp_path: Path) -> None:
    path = made("alibaba_gentd26", tmp_path) / "pod_gpu_duty_cycle_anon_wide.csv.gz"
    _csv(path, pd.read_csv(path).assign(**{"00800b": [0.0, 5000.0, 0.0]}))
    with pytest.raises(DataError, match="above 100 percent"):
        public.alibaba_gentd26(path.parent)


def test_exathlon_units_gaps_and_missed_seconds(tmp_path: Path) -> None:
    (trace,) = load("exathlon_normal", tmp_path)
    window = trace.window
    assert (trace.name, window.nodes, trace.labels) == ("exathlon_5_0_1", ("node5", "node6"), ())
    assert window.column_RT("cpu_user_ratio")[0] == pytest.approx([0.1, 0.1, np.nan, 0.1], nan_ok=True)
    assert window.column_RT("network_receive_bytes_per_second")[0, 0] == 10 * 1024
    assert window.column_RT("memory_free_bytes")[0, 0] == 10 * 2**20
    assert np.isnan(window.values_RMT[1, :, 2:]).all()


def test_asd_is_aligned_at_its_end_and_labelled_by_server(tmp_path: Path) -> None:
    (trace,) = load("asd", tmp_path)
    window = trace.window
    assert window.nodes == ("omi-2", "omi-10")
    assert window.step_s == 300.0
    assert np.isnan(window.values_RMT[1, :, :2]).all()
    assert np.isfinite(window.values_RMT[1, :, 2:]).all()
    found = [(label.nodes, *span) for label, span in zip(trace.labels, seconds(trace), strict=True)]
    assert found == [(("omi-2",), 1800.0, 2100.0), (("omi-10",), 2100.0, 2700.0), (("omi-2",), 2700.0, 3000.0)]
    assert all(label.kind == "fault" and label.nameable for label in trace.labels)


def test_a_machine_is_one_series_that_learns_from_its_first_part(tmp_path: Path) -> None:
    (series,) = public.smd_series(made("smd", tmp_path))
    assert (series.name, series.learn, series.values_MT.shape) == ("smd_machine-1-6", 5, (2, 10))
    assert series.label_T.tolist() == [False] * 7 + [True] * 2 + [False]
    (label,) = public.alone(series).labels
    assert (label.nodes, label.nameable) == (("machine-1-6",), False)


def test_nab_windows_include_both_ends(tmp_path: Path) -> None:
    flat, busy = sorted(public.nab_series(made("nab", tmp_path)), key=lambda series: bool(series.label_T.any()))
    assert not flat.label_T.any()
    assert np.flatnonzero(busy.label_T).tolist() == [20, 21, 22]
    assert busy.learn == 6
    assert busy.window.start_s == pd.Timestamp("2014-02-14 14:30:00", tz="UTC").timestamp()
    assert busy.values_MT[0, 39] == 39.0


@pytest.mark.parametrize("name", MAKE)
def test_what_was_written_is_read_as_a_trace(name: str, tmp_path: Path) -> None:
    for trace in load(name, tmp_path):
        folder = public.write(trace, tmp_path / "out")
        source = TraceSource(folder)
        length_s = trace.window.step_s * trace.window.values_RMT.shape[2]
        again = source.window(trace.window.job, trace.window.end_s, length_s).select(trace.window.metrics)
        np.testing.assert_array_equal(again.values_RMT, trace.window.values_RMT)
        assert (source.nodes, source.groups) == (trace.window.nodes, trace.window.groups)
        for label, told in zip(labels(folder), trace.labels, strict=True):
            assert (label.start_s, label.end_s) == pytest.approx((told.start_s, told.end_s), abs=2e-3)
            assert (label.kind, label.nodes, label.ranks) == (told.kind, told.nodes, told.ranks)
        for metric in trace.window.metrics:
            check_unit(metric, trace.window.unit(metric), name)


@pytest.mark.parametrize("name", MAKE)
def test_an_absent_set_is_one_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(NoData, match="is absent; --data must name"):
        public.TRACES[name](tmp_path / name)


@pytest.mark.parametrize("name", MAKE)
def test_a_cut_file_is_one_sentence(name: str, tmp_path: Path) -> None:
    folder = made(name, tmp_path)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    for path in paths:
        whole = path.read_bytes()
        for cut in (b"", whole[: len(whole) // 2]):
            # a plain text file may be cut between two rows, which nobody can see
            if path.suffix == ".csv" and cut:
                cut = cut[: cut.rindex(b"\n") + 3]
            path.write_bytes(cut)
            with pytest.raises(DataError, match="fetch it again") as caught:
                public.TRACES[name](folder)
            assert path.name in str(caught.value)
            assert "\n" not in str(caught.value)
        path.write_bytes(whole)
    public.TRACES[name](folder)


def test_a_file_of_other_columns_is_one_sentence(tmp_path: Path) -> None:
    path = made("exathlon_normal", tmp_path) / "dev" / "5_0_1_nodes.csv.gz"
    _csv(path, pd.read_csv(path).drop(columns="runq"))
    with pytest.raises(DataError, match="lacks the column 'runq'"):
        public.exathlon_normal(path.parents[1])


def test_words_among_numbers_are_refused(tmp_path: Path) -> None:
    path = made("alibaba_minibatch_2020", tmp_path) / "dev" / "job_2_norm.csv"
    _csv(path, pd.read_csv(path).astype({"batch_time_norm": object}).replace({"batch_time_norm": {410: "fast"}}))
    with pytest.raises(DataError, match="'batch_time_norm' holds something that is no number"):
        public.alibaba_minibatch_2020(path.parents[1])


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    path = made("smd", tmp_path) / "dev" / "machine-1-6.npz"
    np.savez(path, train=np.array([{"a": 1}], dtype=object), test=np.zeros((1, 1)), label=np.zeros(1))
    with pytest.raises(DataError, match="allow_pickle=False"):
        public.smd_series(path.parents[1])


def test_labels_of_another_length_are_refused(tmp_path: Path) -> None:
    path = made("smd", tmp_path) / "dev" / "machine-1-6.npz"
    np.savez(path, train=np.zeros((4, 2)), test=np.zeros((4, 2)), label=np.zeros(3))
    with pytest.raises(DataError, match=r"label \(3,\) do not fit"):
        public.smd_series(path.parents[1])


def test_a_trace_is_never_overwritten(tmp_path: Path) -> None:
    (trace,) = load("smd", tmp_path)
    public.write(trace, tmp_path / "out")
    with pytest.raises(UsageError, match="exists already"):
        public.write(trace, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["smd_machine-1-6"]


def test_the_command_line_writes_all_or_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    for name, make in MAKE.items():
        make(data / name)
    path = data / "asd" / "dev" / "omi-2.npz"
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    assert public.main(["--data", str(data), "--out", str(out)]) == 2
    assert "omi-2.npz" in capsys.readouterr().err
    assert not out.exists()
    path.write_bytes(whole)
    assert public.main(["--data", str(data), "--out", str(out)]) == 0
    alibaba, bytedance = ["alibaba_gentd26", "alibaba_job_1", "alibaba_job_2"], ["bytedance_st", "bytedance_st_steps"]
    written = [*alibaba, "asd", *bytedance, "exathlon_5_0_1"]
    assert sorted(path.name for path in out.iterdir()) == written
    assert public.main(["--data", str(data), "--out", str(out), "--sets", "smd", "nab"]) == 0
    assert len(list(out.iterdir())) == len(written) + 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "either --out DIR"),
        (["--points", "--out", "x"], "either --out DIR"),
        (["--out", "x", "--sets", "kdd"], "there is no set 'kdd'"),
        (["--points", "--sets", "alibaba_gentd26"], "there are asd, smd, nab"),
    ],
)
def test_usage(arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert public.main(["--data", str(tmp_path), *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert public.main(["--data", str(tmp_path / "no"), "--points"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"public: {tmp_path / 'no'} is no folder")
    assert said.count("\n") == 1


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (trace,) = load("smd", tmp_path)
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(EnvironmentLacks, match="name another --out"):
        public.write(trace, tmp_path / "file" / "out")


def _spiky(metrics: int = 3, T: int = 600, learn: int = 400) -> Any:
    """Noise around a wave; points 500 to 509 lie far out."""
    rng = np.random.default_rng(0)
    values = np.sin(np.arange(T) / 5) * np.ones((metrics, 1)) + rng.normal(0, 0.05, (metrics, T))
    label_T = np.zeros(T, dtype=bool)
    label_T[500:510] = True
    values[0, label_T] += 5
    units = {f"m{m}_ratio": "1" for m in range(metrics)}
    window = public._window("spiky", ["n"], None, units, 60.0, values[None])
    return public.PointSeries("spiky", window, label_T, learn)


@pytest.mark.parametrize("name", ["robust_z", "pca", "lof", pytest.param("left_profile", marks=pytest.mark.jit)])
@pytest.mark.parametrize("metrics", [1, 3])
def test_point_scorers_rank_what_is_obvious(name: str, metrics: int) -> None:
    series = _spiky(metrics)
    scores = public.point_scores(series, {name: public.SCORERS[name]})
    # PCA's windows mark the points after an anomaly, too
    assert scores[name] > (0.5 if name == "pca" else 0.7)


@pytest.mark.parametrize("name", ["robust_z", "pca", "lof", pytest.param("left_profile", marks=pytest.mark.jit)])
def test_point_scorers_know_nothing_of_later_points(name: str) -> None:
    series = _spiky()
    whole = public.SCORERS[name](series.values_MT, series.learn)
    cut = public.SCORERS[name](series.values_MT[:, :520], series.learn)
    assert whole.shape == (200,)
    np.testing.assert_allclose(cut, whole[:120], rtol=1e-5)


def test_a_score_at_random_reaches_the_share_of_labels() -> None:
    series = _spiky()
    rng = np.random.default_rng(1)
    random: dict[str, Any] = {str(k): lambda values_MT, learn: rng.random(values_MT.shape[1] - learn) for k in range(40)}
    share = series.label_T[series.learn :].mean()
    assert np.mean(list(public.point_scores(series, random).values())) == pytest.approx(share, abs=0.05)


def test_nothing_labelled_is_not_scored(tmp_path: Path) -> None:
    flat = next(series for series in public.nab_series(made("nab", tmp_path)) if not series.label_T.any())
    with pytest.raises(NoData, match="nothing is labelled"):
        public.point_scores(flat)


@needs_sets
def test_the_real_job_1() -> None:
    trace, healthy = public.alibaba_minibatch_2020(SHARED / "alibaba_minibatch_2020")
    assert trace.window.values_RMT.shape == (10, 1, 300)
    # the beginning of the sample at 1811 to the sample at 1941
    assert seconds(trace) == [(1810.0, 1950.0)]
    for window, straggler in ((trace.window, 6), (healthy.window, None)):
        values_RT = window.column_RT("minibatch_time_ratio")
        above = {r for r in range(10) if (public.times_others_T(values_RT, r) > public.STRAGGLER_RATIO).any()}
        assert above == ({straggler} if straggler else set())


@needs_sets
def test_the_real_st() -> None:
    by_time, by_step = public.bytedance_straggler(SHARED / "bytedance_straggler")
    assert by_time.window.values_RMT.shape == (8, 2, 70)
    assert by_step.window.values_RMT.shape == (8, 6, 32)
    compute_R = by_step.window.column_RT("train_compute_seconds").mean(axis=1)
    assert compute_R[6:].min() > 1.15 * compute_R[:6].max()
    assert {label.ranks for trace in (by_time, by_step) for label in trace.labels} == {(6, 7)}


@needs_sets
def test_the_real_gentd() -> None:
    (trace,) = public.alibaba_gentd26(SHARED / "alibaba_gentd26")
    assert trace.window.values_RMT.shape == (143, 3, 1441)
    use_RT = trace.window.column_RT("gpu_utilization_ratio")
    assert (use_RT == 0).mean() == pytest.approx(0.51, abs=0.005)
    assert 0.9 < np.nanmax(use_RT) <= 1


@needs_sets
def test_the_real_exathlon() -> None:
    traces = public.exathlon_normal(SHARED / "exathlon_normal")
    assert {trace.window.values_RMT.shape[:2] for trace in traces} == {(4, 12)}
    for trace in traces:
        assert (trace.window.values_RMT[np.isfinite(trace.window.values_RMT)] >= 0).all()
        assert 0.97 < np.isfinite(trace.window.values_RMT).mean() < 1


@needs_sets
def test_the_real_asd() -> None:
    (trace,) = public.asd(SHARED / "asd")
    window = trace.window
    assert window.values_RMT.shape == (12, 19, 10800)
    assert window.nodes[11] == "omi-12"
    start_s = window.start_s + 8640 * window.step_s
    assert all(label.start_s >= start_s - window.step_s for label in trace.labels)
    assert sum(round((label.end_s - label.start_s) / window.step_s) for label in trace.labels) == 1060
    # the README's claim, and ours that a shorter part for training lacks its beginning
    load_RT = window.column_RT("asd_metric_09_ratio")[:, 1349:]
    assert np.corrcoef(load_RT)[11, :11].min() > 0.7


@needs_sets
@pytest.mark.parametrize(("name", "series", "judged"), [("smd", 3, 3), ("nab", 22, 16), ("asd", 12, 12)])
def test_the_real_series(name: str, series: int, judged: int) -> None:
    found = public.SERIES[name](SHARED / name)
    assert len(found) == series
    assert sum(one.label_T[one.learn :].any() for one in found) == judged
    assert not any(one.label_T[: one.learn].any() for one in found)
