"""The registry, on a real SQLite store and against servers that do not answer."""

import json
import shutil
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from eagleeye import models
from eagleeye.cli import main
from eagleeye.clock import monotonic_s
from eagleeye.detectors import ensemble
from eagleeye.errors import ModelMismatch, SourceUnavailable, UsageError
from eagleeye.models import Settings
from eagleeye.window import Window

pytestmark = pytest.mark.slow  # MLflow takes seconds to import, and more to make a database


def make_job(seed: int = 0) -> Window:
    rng = np.random.default_rng(seed)
    values_RMT = np.array([400.0, 1.4e9])[None, :, None] * (1 + 0.01 * rng.standard_normal((6, 2, 120)))
    nodes = tuple(f"n{r // 2}" for r in range(6))
    metrics = ("gpu_power_watts", "gpu_sm_clock_hertz")
    return Window("j", tuple(range(6)), nodes, ("",) * 6, metrics, 1.7e9, 5.0, values_RMT.astype(np.float32))


@pytest.fixture(scope="module")
def fitted():
    return ensemble.fit([make_job()])


@pytest.fixture
def report(tmp_path):
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "note.txt").write_text("what was left out")
    return folder


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """An empty store: making its tables takes five seconds, copying it none."""
    folder = tmp_path_factory.mktemp("template")
    (folder / "files").mkdir()
    models.track(Settings(tracking_uri=f"sqlite:///{folder}/mlflow.db"), {}, {}, folder / "files")
    # without the experiment, whose artifacts lie where it was made
    import sqlite3

    with sqlite3.connect(folder / "mlflow.db") as database:
        database.execute("delete from runs")
        database.execute("delete from experiments where name = 'eagleeye'")
    database.close()
    return folder / "mlflow.db"


@pytest.fixture
def settings(template, tmp_path):
    (tmp_path / "store").mkdir()
    shutil.copy(template, tmp_path / "store" / "mlflow.db")
    return Settings(tracking_uri=f"sqlite:///{tmp_path}/store/mlflow.db")


def stored_files(tmp_path: Path, name: str) -> Path:
    return next((tmp_path / "store" / "artifacts").rglob(name))


def scores(fitted, window):
    return np.stack([score.score_R for score in fitted.score(window, fitted.job_offsets(window))])


def test_a_candidate_becomes_champion_only_by_promotion(settings, fitted, report):
    assert models.register(settings, fitted, {"jobs": 1}, {"hours": 0.1, "unknown": float("nan")}, report) == "1"
    assert models.exists(settings, "candidate")
    assert not models.exists(settings)
    assert models.promote(settings, "candidate") == ("1", None)
    assert models.register(settings, fitted, {}, {}, report) == "2"
    assert models.load(settings)[1] == "champion v1"
    assert models.promote(settings, "v2") == ("2", "1")
    assert models.load(settings)[1] == "champion v2"
    assert models.load(settings, "1")[1] == "v1"
    assert models.load(settings, "candidate")[1] == "candidate v2"


def test_the_champion_before_comes_back(settings, fitted, report, capsys):
    for _ in range(3):
        models.register(settings, fitted, {}, {}, report)
    with pytest.raises(UsageError, match="no former champion is known to go back to"):
        models.rollback(settings)
    models.promote(settings, "1")
    models.promote(settings, "1")
    with pytest.raises(UsageError, match="no former champion"):
        models.rollback(settings)
    models.promote(settings, "3")
    assert models.load(settings, "previous")[1] == "previous v1"
    assert models.rollback(settings) == ("1", "3")
    assert (models.load(settings)[1], models.load(settings, "previous")[1]) == ("champion v1", "previous v3")
    command = ["promote", "--rollback", "--tracking-uri", settings.uri]
    assert main(command) == 0
    assert capsys.readouterr().out == "version 3 is champion now; before it was version 1\n"
    assert models.load(settings)[1] == "champion v3"


def test_a_champion_before_that_cannot_be_loaded_does_not_come_back(settings, fitted, report, tmp_path, capsys):
    models.register(settings, fitted, {}, {}, report)
    models.promote(settings, "1")
    path = stored_files(tmp_path, "facts.json")
    models.register(settings, fitted, {}, {}, report)
    models.promote(settings, "2")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    assert main(["promote", "--rollback", "--tracking-uri", settings.uri]) == ModelMismatch.exit_code
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == (
        "eagleeye promote: model v1: the model has format 1, this program reads format 2: train it again with this version\n"
    )
    assert (models.load(settings)[1], models.exists(settings, "previous")) == ("champion v2", True)


@pytest.mark.parametrize("given", [[], ["1", "--rollback"]])
def test_promote_wants_one_thing(given, tmp_path, capsys):
    assert main(["promote", *given, "--tracking-uri", f"sqlite:///{tmp_path}/mlflow.db"]) == UsageError.exit_code
    assert capsys.readouterr().err == "eagleeye promote: name either a VERSION, for example candidate, or --rollback\n"
    assert list(tmp_path.iterdir()) == []


def test_a_candidate_beside_the_champion(settings, fitted, report):
    assert models.candidate(settings) is None
    models.register(settings, fitted, {}, {}, report)
    assert models.candidate(settings)[1] == "candidate v1"
    models.promote(settings, "1")
    assert models.candidate(settings) is None
    models.register(settings, fitted, {}, {}, report)
    assert models.candidate(settings)[1] == "candidate v2"
    assert models.candidate(settings, "2") is None


def test_what_is_loaded_scores_bit_for_bit_the_same(settings, fitted, report):
    models.register(settings, fitted, {}, {}, report)
    window = make_job(seed=1)
    np.testing.assert_array_equal(scores(models.load(settings, "candidate")[0], window), scores(fitted, window))


def test_run_parameters_metrics_and_files_are_logged(settings, fitted, report):
    import mlflow

    models.register(settings, fitted, {"jobs": 3}, {"hours": 0.5}, report)
    client = mlflow.MlflowClient()
    run = client.get_run(client.get_model_version("eagleeye", "1").run_id)
    assert run.data.params == {"jobs": "3"}
    assert run.data.metrics == {"hours": 0.5}
    assert run.info.status == "FINISHED"
    assert [f.path for f in client.list_artifacts(run.info.run_id)] == ["note.txt"]


def test_nothing_is_pickled(settings, fitted, report, tmp_path):
    models.register(settings, fitted, {}, {}, report)
    kinds = {path.suffix for path in (tmp_path / "store" / "artifacts").rglob("*") if path.is_file()}
    assert kinds <= {".json", ".npz", ".txt", ".yaml", ""}
    with np.load(stored_files(tmp_path, "arrays.npz"), allow_pickle=False) as stored:
        assert all(stored[name].dtype.kind == "f" for name in stored.files)


def test_the_model_serves_frames_through_pyfunc(settings, fitted, report):
    import mlflow
    import pandas as pd

    models.register(settings, fitted, {}, {}, report)
    models.promote(settings, "1")
    window = make_job(seed=2)
    R, _, T = window.values_RMT.shape
    frame = pd.DataFrame(
        {"time": np.repeat(window.stamps_T, R), "rank": np.tile(window.ranks, T), "node": np.tile(window.nodes, T)}
        | {metric: window.column_RT(metric).T.ravel().astype(float) for metric in window.metrics}
    )
    served = mlflow.pyfunc.load_model("models:/eagleeye@champion")
    found = served.predict(frame.sample(frac=1.0, random_state=0))
    assert list(found.columns) == ["rank", "knn_dtw", "matrix_profile", "lof", "peer_deviation"]
    expected = fitted.score(window, fitted.job_offsets(ensemble.half(window)))
    for score in expected:
        np.testing.assert_allclose(found[score.detector], score.score_R, rtol=1e-6)
    assert {c.name for c in served.metadata.signature.inputs if c.required} == {"time", "rank"}
    with pytest.raises(mlflow.exceptions.MlflowException, match="rank"):
        served.predict(frame.drop(columns="rank"))


def test_an_unknown_version_is_refused_with_those_that_exist(settings, fitted, report):
    models.register(settings, fitted, {}, {}, report)
    for wanted in ("7", "best"):
        with pytest.raises(UsageError, match=rf"called '{wanted}'; there are v1 \(candidate\)"):
            models.promote(settings, wanted)
    assert not models.exists(settings)


def test_an_empty_registry_says_what_to_do(settings):
    with pytest.raises(UsageError, match="run `eagleeye train` first"):
        models.load(settings)
    assert not models.exists(settings)


def test_asking_creates_no_store(tmp_path):
    settings = Settings(tracking_uri=f"sqlite:///{tmp_path}/none/mlflow.db")
    assert not models.exists(settings)
    with pytest.raises(UsageError, match="does not exist: run `eagleeye train` first"):
        models.load(settings)
    assert list(tmp_path.iterdir()) == []


def test_damaged_arrays_are_refused_and_not_promoted(settings, fitted, report, tmp_path):
    models.register(settings, fitted, {}, {}, report)
    path = stored_files(tmp_path, "arrays.npz")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ModelMismatch, match="model v1: the stored model is damaged"):
        models.load(settings, "1")
    with pytest.raises(ModelMismatch, match="damaged"):
        models.promote(settings, "1")
    assert not models.exists(settings)
    path.unlink()
    with pytest.raises(ModelMismatch, match=r"model v1: arrays\.npz is absent"):
        models.load(settings, "1")


def test_another_format_is_refused(settings, fitted, report, tmp_path):
    models.register(settings, fitted, {}, {}, report)
    path = stored_files(tmp_path, "facts.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    sentence = "model v1: the model has format 1, this program reads format 2: train it again with this version"
    for call in (lambda: models.load(settings, "1"), lambda: models.promote(settings, "1"), lambda: models.candidate(settings)):
        with pytest.raises(ModelMismatch, match=sentence):
            call()
    path.write_text("[]")
    with pytest.raises(ModelMismatch, match="no object"):
        models.load(settings, "1")


def test_pickled_arrays_are_not_run(settings, fitted, report, tmp_path):
    models.register(settings, fitted, {}, {}, report)
    np.savez(stored_files(tmp_path, "arrays.npz"), scale_M=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ModelMismatch, match="damaged"):
        models.load(settings, "1")


def test_a_dead_server_is_reported_soon(fitted, report):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{free.getsockname()[1]}"
    for call in (
        lambda: models.load(Settings(tracking_uri=uri)),
        lambda: models.exists(Settings(tracking_uri=uri)),
        lambda: models.register(Settings(tracking_uri=uri), fitted, {}, {}, report),
    ):
        began_s = monotonic_s()
        with pytest.raises(SourceUnavailable, match="does not answer as it should"):
            call()
        assert monotonic_s() - began_s < 15


def test_a_server_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []
        threading.Thread(target=lambda: [held.append(server.accept()) for _ in range(2)], daemon=True).start()
        began_s = monotonic_s()
        with pytest.raises(SourceUnavailable):
            models.load(Settings(tracking_uri=f"http://127.0.0.1:{server.getsockname()[1]}"))
        assert monotonic_s() - began_s < 20
        for connection, _ in held:
            connection.close()


def test_a_store_that_is_no_database(tmp_path):
    (tmp_path / "mlflow.db").write_text("this is a letter, not a database\n" * 100)
    with pytest.raises(SourceUnavailable, match="does not answer as it should"):
        models.load(Settings(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db"))


def test_where_models_are_kept(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert Settings().uri == "sqlite:///eagleeye-data/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert Settings().uri == "http://tracking:5000"
    assert Settings(tracking_uri="sqlite:///x.db").uri == "sqlite:///x.db"
