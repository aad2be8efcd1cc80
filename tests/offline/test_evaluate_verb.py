"""`eagleeye evaluate` on real files: recorded verdicts and methods, tables, JSON, plots, bars, and bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagleeye.cli import main
from eagleeye.errors import EnvironmentLacks
from eagleeye.offline import evaluate
from eagleeye.offline.baselines import BASELINES

FAULT = (600.0, 1100.0, "fault", "gpu_slow", ["n1"])


@pytest.fixture
def two(trace, verdicts, job):
    """A trace with a fault that is found after 30 s, and one without anything but a wrong blame."""
    folders = [trace("sick", job(), [FAULT]), trace("well", job(seed=1), [])]
    verdicts("sick", (0, "normal", []), (630, "anomalous", ["n1"]), (1200, "normal", []))
    out = verdicts("well", (0, "unsure", []), (300, "anomalous", ["n2"]), (1200, "normal", []))
    return [str(f) for f in folders], out


def test_table_json_and_plots(two, tmp_path, capsys):
    folders, out = two
    where = tmp_path / "judged.json"
    assert main(["evaluate", *folders, "--verdicts", str(out), "--json", str(where), "--plots", str(tmp_path / "plots")]) == 0
    said = capsys.readouterr().out
    assert "fault gpu_slow" in said
    assert "recall                    1 of 1 = 1.000 [0.207, 1.000]" in said
    assert "blame precision           1 of 2 = 0.500" in said
    assert "alarmed within            10 s 0.00, 20 s 0.00, 30 s 1.00, 60 s 1.00" in said
    assert "  per 1000 healthy hours  2e+03 [26.1, 1.11e+04]: 1 in 0.5 healthy hours" in said
    found = json.loads(where.read_text())
    assert found["total"]["recall"]["count"] == 1
    assert found["total"]["wrong_blames_per_job_day"]["count"] == 1
    assert found["total"]["job_hours"] == pytest.approx(2 / 3)
    assert found["total"]["gpu_days"] == pytest.approx(8 * 2 / 3 / 24)
    assert found["total"]["delay_s"]["median"] == 30.0
    assert found["traces"][0]["faults"][0]["delay_samples"] == 6.0
    assert found["total"]["delay_fine_s"]["count"] == 1
    assert found["total"]["delay_coarse_samples"] is None
    assert found["total"]["healthy_job_hours"] == pytest.approx((600 + 1200) / 3600)
    assert found["total"]["wrong_blames_per_1000_healthy_job_hours"]["rate"] == pytest.approx(2000)
    shares = {point["after_s"]: point["share"] for point in found["total"]["onset_to_alarm"]}
    assert (shares[20], shares[30]) == (0.0, 1.0)
    assert found["classes"]["nothing"]["wrong_blames_per_job_day"]["count"] == 1
    assert [t["name"] for t in found["traces"]] == ["sick", "well"]
    for name in ("delays.png", "classes.png"):
        assert (tmp_path / "plots" / name).read_bytes()[:4] == b"\x89PNG"


def test_bars_decide_the_exit_code(two, capsys):
    folders, out = two
    bars = ["--at-least", "recall=1", "--at-least", "culprit=0.9"]
    assert main(["evaluate", *folders, "--verdicts", str(out), *bars]) == 0
    assert main(["evaluate", *folders, "--verdicts", str(out), "--at-least", "blame_precision=0.6"]) == 1
    assert "blame_precision is 1 of 2, below the bar of 0.6" in capsys.readouterr().err


def test_a_bar_is_checked_before_anything_is_replayed(two, capsys):
    folders, _ = two
    assert main(["evaluate", *folders, "--methods", "robust_z", "--at-least", "recall=2"]) == 2
    assert "replayed" not in capsys.readouterr().err


@pytest.mark.parametrize("bar", ["recall", "recall=2", "recall=x", "accuracy=0.9"])
def test_a_bar_that_is_none(two, bar, capsys):
    folders, out = two
    assert main(["evaluate", *folders, "--verdicts", str(out), "--at-least", bar]) == 2
    assert "is no bar; write NAME=SHARE" in capsys.readouterr().err


def test_no_labels(trace, verdicts, job, capsys):
    folder = trace("bare", job())
    out = verdicts("bare", (0, "normal", []))
    assert main(["evaluate", str(folder), "--verdicts", str(out)]) == 1
    assert "labels.json is absent: this trace cannot be judged" in capsys.readouterr().err


def test_no_verdicts(trace, tmp_path, job, capsys):
    folder = trace("sick", job(), [FAULT])
    assert main(["evaluate", str(folder), "--verdicts", str(tmp_path)]) == 1
    assert "sick.jsonl is absent: replay the trace first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"time": "2026-03-02T08:00:00Z", "decision": "maybe", "suspects": []}', "'maybe' is not a valid Decision"),
        ('{"time": "soon", "decision": "normal", "suspects": []}', "soon"),
        ('{"time": "2026-03-02T08:00:00", "decision": "normal", "suspects": []}', "no zone"),
        ('{"time": "2026-03-02T08:00:00Z", "decision": "normal"}', "suspects"),
        ('{"time": "2026-03-02T08:00:00Z", "decision": "anomalous", "suspects": [{"rank": 3}]}', "node"),
    ],
)
def test_a_bad_line_is_named(trace, verdicts, job, bad, why, capsys):
    folder = trace("sick", job(), [FAULT])
    out = verdicts("sick", (0, "normal", []))
    with (out / "sick.jsonl").open("a") as file:
        file.write("\n" + bad + "\n")
    assert main(["evaluate", str(folder), "--verdicts", str(out)]) == 2
    said = capsys.readouterr().err
    assert "sick.jsonl, line 3 is no verdict" in said
    assert why in said


def test_an_empty_file_of_verdicts(trace, verdicts, job, capsys):
    folder = trace("sick", job(), [FAULT])
    out = verdicts("sick")
    assert main(["evaluate", str(folder), "--verdicts", str(out)]) == 1
    assert "holds no verdict" in capsys.readouterr().err


def test_two_traces_of_one_name(trace, verdicts, job, capsys):
    folder = trace("sick", job(), [FAULT])
    out = verdicts("sick", (0, "normal", []))
    assert main(["evaluate", str(folder), f"{folder}/.", "--verdicts", str(out)]) == 2
    assert "two traces are called sick" in capsys.readouterr().err


def slow_clock(values_RMT):
    """Rank 2, on node n1, from 600 s on."""
    values_RMT[2, 1:, 120:] *= 0.6


@pytest.fixture
def jobs(trace, job, alter):
    """A trace in which n1 is slow from the 600th second on, and a healthy one."""
    sick = trace("sick", alter(job(points=216), slow_clock), [FAULT])
    return [str(sick), str(trace("well", job(points=216, seed=1), []))]


def test_methods_are_rows_of_one_table(jobs, tmp_path, capsys):
    where, plots = tmp_path / "judged.json", tmp_path / "plots"
    options = ["--methods", "rough_page,robust_z", "--json", str(where), "--plots", str(plots)]
    assert main(["evaluate", *jobs, *options, "--at-least", "culprit=1"]) == 0
    said = capsys.readouterr()
    compared, by_class, first = ([line.split("  ") for line in part.splitlines()] for part in said.out.split("\n\n")[:3])
    assert [line[0] for line in compared[2:4]] == [line[0] for line in by_class[2:4]] == ["rough_page", "robust_z"]
    assert compared[2].count("1.000 [0.21, 1.00]") == 3
    assert [line[-1].strip() for line in by_class[2:4]] == ["1, 1", "1, 1"]
    assert first[0] == ["rough_page"]
    assert "replayed 4 of 4: robust_z on well" in said.err
    found = json.loads(where.read_text())
    assert list(found["methods"]) == ["rough_page", "robust_z"]
    assert found["method"] == "rough_page"
    assert found["total"] == found["methods"]["rough_page"]["total"]
    delays = {name: part["traces"][0]["faults"][0]["delay_s"] for name, part in found["methods"].items()}
    assert delays["rough_page"] <= 20 < 60 <= delays["robust_z"] <= 75
    for name in ("methods.png", "delays.png", "robust_z/delays.png", "robust_z/classes.png", "rough_page/classes.png"):
        assert (plots / name).read_bytes()[:4] == b"\x89PNG"
    assert sorted(p.name for p in plots.iterdir()) == ["delays.png", "methods.png", "robust_z", "rough_page"]


def test_nothing_to_draw_is_no_error(jobs, tmp_path):
    """No fault at all, and no alarm."""
    assert main(["evaluate", jobs[1], "--methods", "robust_z,minder", "--plots", str(tmp_path / "plots")]) == 0
    assert (tmp_path / "plots" / "methods.png").exists()


def test_a_method_nobody_knows(two, capsys):
    folders, _ = two
    assert main(["evaluate", *folders, "--methods", "robust_z,isolation_forrest"]) == 2
    assert "no method 'isolation_forrest', the nearest is isolation_forest; there are all, ablation" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", " , "])
def test_no_method_at_all(text):
    with pytest.raises(evaluate.UsageError, match="no method is named"):
        evaluate.chosen(text, ["a"], {})


def test_groups_and_names_mix_and_each_method_runs_once():
    groups = {"all": ["a", "b", "c"], "few": ["c", "b"]}
    assert evaluate.chosen("b, few,a", ["a", "b", "c"], groups) == ["b", "c", "a"]


def test_verdicts_or_methods_but_not_both(two, capsys):
    folders, out = two
    assert main(["evaluate", *folders, "--verdicts", str(out), "--methods", "robust_z"]) == 2
    assert "give one of the two" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "-1"])
def test_no_processes(two, count, capsys):
    folders, _ = two
    assert main(["evaluate", *folders, "--methods", "robust_z", "--jobs", count]) == 2
    assert "jobs must be at least 1" in capsys.readouterr().err


def test_a_broken_trace_is_known_before_the_first_replay(jobs, tmp_path, capsys):
    (Path(jobs[1]) / "metrics.parquet").write_bytes(b"PAR1")
    assert main(["evaluate", *jobs, "--methods", "robust_z", "--json", str(tmp_path / "x.json")]) == 2
    said = capsys.readouterr().err
    assert "metrics.parquet" in said
    assert "replayed" not in said
    assert not (tmp_path / "x.json").exists()


def test_plots_that_cannot_be_written(two, tmp_path, capsys):
    folders, out = two
    (tmp_path / "file").write_text("")
    assert main(["evaluate", *folders, "--verdicts", str(out), "--plots", str(tmp_path / "file")]) == 3
    assert "cannot write" in capsys.readouterr().err


def test_a_method_without_verdicts(jobs):
    with pytest.raises(evaluate.NoData, match="no verdict was given"):
        evaluate.compare([Path(jobs[0])], {"silent": lambda source: []})


@pytest.mark.slow
def test_two_processes_find_what_one_does(jobs):
    chosen = {name: BASELINES[name] for name in ("isolation_forest", "robust_z")}
    before = dict(os.environ)
    several = evaluate.compare([Path(j) for j in jobs], chosen, jobs=2)
    assert dict(os.environ) == before
    assert several == evaluate.compare([Path(j) for j in jobs], chosen)


@pytest.mark.slow
def test_a_process_that_dies_is_one_sentence(jobs, tmp_path, monkeypatch):
    (tmp_path / "dying.py").write_text("import os\ndef die(source):\n    os._exit(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import dying

    with pytest.raises(EnvironmentLacks, match="use fewer --jobs"):
        evaluate.compare([Path(jobs[0])], {"die": dying.die}, jobs=2)


@pytest.mark.slow
def test_an_interrupt_leaves_nothing(jobs, tmp_path):
    """Neither a file nor a process, nor a traceback; the workers learn of it from the first process alone."""
    command = [sys.executable, "-c", "from eagleeye.cli import main; raise SystemExit(main())", "evaluate", *(jobs * 40)]
    options = ["--methods", "baselines", "--jobs", "2", "--json", str(tmp_path / "x.json"), "--plots", str(tmp_path / "plots")]
    running = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, process_group=0)
    assert "replayed" in running.stderr.readline()
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in said
    assert not (tmp_path / "x.json").exists()
    assert not (tmp_path / "plots").exists()
    for _ in range(100):
        try:
            os.killpg(running.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("a worker lives on")


@pytest.mark.slow
@pytest.mark.jit
def test_the_default_method_is_what_score_replays(jobs, tmp_path):
    direct, recorded = tmp_path / "direct.json", tmp_path / "recorded.json"
    assert main(["evaluate", *jobs, "--json", str(direct)]) == 0
    assert main(["score", "--model", "none", "--replay", *jobs, "--out-dir", str(tmp_path / "out")]) == 0
    assert main(["evaluate", *jobs, "--verdicts", str(tmp_path / "out"), "--json", str(recorded)]) == 0
    left, right = (json.loads(path.read_text()) for path in (direct, recorded))
    assert (left.pop("method"), right.pop("method")) == ("default", "recorded")
    assert left == right


@pytest.mark.slow
def test_an_evaluation_is_a_run_of_mlflow(jobs, tmp_path):
    uri = f"sqlite:///{tmp_path}/store/mlflow.db"
    assert main(["evaluate", *jobs, "--methods", "rough_page,robust_z", "--track", "--tracking-uri", uri]) == 0
    import mlflow

    (run,) = mlflow.MlflowClient(uri).search_runs(["1"])
    assert run.data.metrics["rough_page/recall"] == 1.0
    assert run.data.metrics["robust_z/wrong_blames_per_job_day"] == 0.0
    assert run.data.params["methods"] == "rough_page, robust_z"
    files = {file.path for file in mlflow.MlflowClient(uri).list_artifacts(run.info.run_id)}
    assert {"table.txt", "judged.json", "methods.png", "delays.png", "robust_z"} <= files
