"""`eagleeye train`: from traces to a registered candidate, or one sentence and nothing registered."""

import dataclasses

import numpy as np
import pytest

from eagleeye import models
from eagleeye.cli import main
from eagleeye.detectors import ensemble
from eagleeye.errors import ModelMismatch
from eagleeye.models import Settings
from eagleeye.offline import train


@pytest.fixture
def uri(tmp_path):
    return f"sqlite:///{tmp_path}/store/mlflow.db"


@pytest.mark.slow
@pytest.mark.jit
def test_from_traces_to_a_champion(trace, job, uri, tmp_path, capsys):
    folders = [str(trace(f"t{s}", job(seed=s), [])) for s in range(3)]
    assert main(["train", "--traces", *folders, "--tracking-uri", uri]) == 0
    told = capsys.readouterr()
    assert "version 1 is registered as candidate; make it live with: eagleeye promote 1" in told.out
    assert "measured on 1 jobs that the model never saw" in told.out
    assert "12 windows kept, 0 dropped" in told.err
    assert main(["promote", "1", "--tracking-uri", uri]) == 0
    assert "version 1 is champion now; before it was none" in capsys.readouterr().out

    fitted, name = models.load(Settings(tracking_uri=uri))
    assert name == "champion v1"
    window = job(seed=7)
    assert max(s.score_R.max() for s in fitted.score(window, fitted.job_offsets(ensemble.half(window)))) < 1.0

    import mlflow

    client = mlflow.MlflowClient()
    run = client.get_run(client.get_model_version("eagleeye", "1").run_id)
    assert run.data.metrics["windows"] == 12
    assert run.data.metrics["job_hours"] == pytest.approx(1.0)
    assert run.data.metrics["knn_dtw_share_above_1"] == 0.0
    assert 0.0 < run.data.metrics["lof_largest_score"] < 1.0
    assert run.data.metrics["kernel_difference_tslearn"] < 1e-9
    assert run.data.metrics["kernel_difference_stumpy"] < 1e-6
    assert run.data.metrics["knn_dtw_threshold.gpu_power_watts"] >= 5.0
    assert {f.path for f in client.list_artifacts(run.info.run_id)} == {"scores.png", "window.png", "corpus.txt"}


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--traces", "nowhere"], 1, "nowhere is no folder"),
        ([], 2, "[source] names nothing to read"),
        (["--history", "empty"], 1, "no job in that time"),
        (["--window", "soon"], 2, "'soon' is no duration"),
        (["--prometheus", "http://127.0.0.1:9"], 3, "127.0.0.1:9"),
    ],
)
def test_nothing_to_read(options, code, sentence, uri, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EAGLEEYE_SOURCE__QUERY_TIMEOUT_S", "1s")
    assert main(["train", "--window", "1h", "--tracking-uri", uri, *options]) == code
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("ranks", "blank", "sentence"),
    [(1, False, "fewer than 3 ranks"), (8, True, "without any value")],
    ids=["one rank", "nothing observed"],
)
def test_nothing_to_learn(trace, job, alter, ranks, blank, sentence, uri, tmp_path, capsys):
    window = job(ranks=ranks)
    if blank:
        window = alter(window, lambda values_RMT: values_RMT.fill(np.nan))
    assert main(["train", "--traces", str(trace("a", window)), "--tracking-uri", uri]) == 1
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_a_kernel_that_disagrees_is_not_registered(job, monkeypatch):
    """The library is replaced, not the check: importing the real one takes half a minute."""
    from eagleeye.detectors import knn_dtw, matrix_profile

    fitted = ensemble.fit([job()])
    monkeypatch.setattr(knn_dtw, "check_kernel", lambda values_RMT, band: 1e-3)
    monkeypatch.setattr(matrix_profile, "check_kernel", lambda values_RMT, m, k: 0.0)
    with pytest.raises(ModelMismatch, match=r"differs from tslearn by 1\.0e-03"):
        train.check_kernels(fitted, job())
    monkeypatch.setattr(knn_dtw, "check_kernel", lambda values_RMT, band: float("nan"))
    with pytest.raises(ModelMismatch, match="tslearn"):
        train.check_kernels(fitted, job())


def test_whole_jobs_are_set_aside(job):
    stretches = [job(job=f"j{i}") for i in range(8) for _ in range(2)]
    learn, unseen, what = train.set_aside(stretches, 0.25)
    assert {w.job for w in unseen} == {"j1", "j5"}
    assert {w.job for w in learn}.isdisjoint({"j1", "j5"})
    assert len(learn) + len(unseen) == 16
    assert what == "2 jobs that the model never saw"


def test_the_only_job_with_a_metric_is_learned_from(job):
    odd = dataclasses.replace(job(job="j1"), metrics=("gpu_utilization_ratio", "gpu_power_watts", "never_seen"))
    learn, unseen, _ = train.set_aside([job(job="j0"), odd, job(job="j2")], 0.25)
    assert odd in learn
    assert unseen == []


def test_the_newest_stretches_of_an_only_job_are_set_aside(job):
    stretches = [job(seed=i) for i in range(5)]
    learn, unseen, what = train.set_aside(stretches, 0.25)
    assert (learn, unseen) == (stretches[:4], stretches[4:])
    assert what == "the newest 1 stretches of the only job"
    assert train.set_aside(stretches[:1], 0.25)[1] == []
