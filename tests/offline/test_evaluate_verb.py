"""`eagleeye evaluate` on real files: the table, JSON, plots, bars, and bad input."""

import json

import pytest

from eagleeye.cli import main

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
    found = json.loads(where.read_text())
    assert found["total"]["recall"]["count"] == 1
    assert found["total"]["wrong_blames_per_job_day"]["count"] == 1
    assert found["total"]["job_hours"] == pytest.approx(2 / 3)
    assert found["total"]["gpu_days"] == pytest.approx(8 * 2 / 3 / 24)
    assert found["total"]["delay_s"]["median"] == 30.0
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
