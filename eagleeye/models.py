"""Fitted models: register, promote, load. The only door to MLflow.

A version holds numbers and names alone, as JSON and .npz: nothing is pickled, so a registry that somebody else writes to can make
the scorer wrong but cannot make it run code. MLflow takes seconds to import and is imported when first needed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagleeye import __version__
from eagleeye.detectors import ensemble
from eagleeye.detectors.ensemble import DETECTORS, Ensemble
from eagleeye.errors import EnvironmentLacks, MissingExtra, ModelMismatch, SourceUnavailable, UsageError
from eagleeye.window import Window

if TYPE_CHECKING:
    import pandas as pd

NAME = "eagleeye"
"""Of the registered model, and of the experiment that its runs belong to."""

CANDIDATE, CHAMPION, PREVIOUS = "candidate", "champion", "previous"
DEFAULT_URI = "sqlite:///eagleeye-data/mlflow.db"
_FACTS, _ARRAYS = "facts.json", "arrays.npz"
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "GIT_PYTHON_REFRESH": "quiet",
    # a dead or hung server is reported within half a minute; the defaults wait for a quarter of an hour
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The section ``[offline]``: what is learned from, and where models are kept."""

    tracking_uri: str = ""
    """MLflow's store: a ``sqlite:///`` file or a server's URL. Empty: $MLFLOW_TRACKING_URI, else eagleeye-data/mlflow.db."""
    window_s: float = 30 * 86400.0
    """How far back `train` reads."""
    piece_s: float = 300.0
    """Length of the windows that are kept or dropped whole."""
    stretch_s: float = 3600.0
    """Clean pieces that follow one another are joined up to this length."""
    corpus_bytes: int = 128 << 20
    """Most memory for normal work; beyond it an even sample of stretches is kept."""
    missing_ratio: float = 0.2
    """A piece with a larger share of values that were not observed is dropped."""
    unseen_ratio: float = 0.25
    """Share of the jobs that the model never sees; they tell how it does on work that is new to it."""
    detectors: tuple[str, ...] = DETECTORS
    """Which detectors are fitted."""

    def __post_init__(self) -> None:
        for name in ("missing_ratio", "unseen_ratio"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie between 0 and 1, not {getattr(self, name)}")
        if self.stretch_s < self.piece_s:
            raise ValueError(f"stretch_s ({self.stretch_s:g}) must not be below piece_s ({self.piece_s:g})")

    @property
    def uri(self) -> str:
        """Where the models are: the setting, else $MLFLOW_TRACKING_URI, else a SQLite file below the working folder."""
        return self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "") or DEFAULT_URI


def register(
    settings: Settings, fitted: Ensemble, params: Mapping[str, object], metrics: Mapping[str, float], artifacts: Path
) -> str:
    """Log a run with its parameters, metrics and the files of a folder; return the number of the new version.

    The version gets the alias ``candidate``; what is live does not change.

    Raises
    ------
    SourceUnavailable
        The registry does not answer; no version was made.
    """
    with _connected(settings.uri, write=True) as client, tempfile.TemporaryDirectory() as folder:
        import mlflow

        _write(fitted, Path(folder))
        with mlflow.start_run(experiment_id=_experiment(client, settings.uri)) as run:
            _log(params, metrics, artifacts)
            logged = mlflow.pyfunc.log_model(
                name=NAME,
                loader_module="eagleeye.models",
                data_path=folder,
                signature=_signature(fitted),
                pip_requirements=[f"eagleeye-toolkit[detect]=={__version__}"],
            )
        with contextlib.suppress(mlflow.exceptions.MlflowException):
            client.create_registered_model(NAME)  # refused when it exists
        version = str(client.create_model_version(NAME, logged.model_uri, run.info.run_id, model_id=logged.model_id).version)
        client.set_registered_model_alias(NAME, CANDIDATE, version)
    return version


def track(settings: Settings, params: Mapping[str, object], metrics: Mapping[str, float], artifacts: Path) -> str:
    """Log a run without a model, for example an evaluation; return its id. Raises as `register` does."""
    with _connected(settings.uri, write=True) as client:
        import mlflow

        with mlflow.start_run(experiment_id=_experiment(client, settings.uri)) as run:
            _log(params, metrics, artifacts)
        return str(run.info.run_id)


def promote(settings: Settings, wanted: str) -> tuple[str, str | None]:
    """Make a version (a number or an alias) the champion; return (it, the champion before or None).

    A version that this program cannot load is refused, so that what is live always works. The champion before keeps the alias
    ``previous``, for `rollback`.

    Raises
    ------
    UsageError
        No such version; the sentence lists those that exist.
    ModelMismatch, SourceUnavailable
        As for `load`.
    """
    with _connected(settings.uri) as client:
        version = _version(client, wanted)
        return version, _make_champion(client, version)


def rollback(settings: Settings) -> tuple[str, str | None]:
    """Make the champion before, ``previous``, the champion again, and the other way round; return (it, the one that it replaced).

    Raises
    ------
    UsageError
        There is none.
    ModelMismatch, SourceUnavailable
        As for `load`; what is live does not change.
    """
    with _connected(settings.uri) as client:
        aliases = _aliases(client)
        version = str(aliases.get(PREVIOUS, ""))
        if not version or version == str(aliases.get(CHAMPION, "")):
            raise UsageError("no former champion is known to go back to; name a version: `eagleeye promote VERSION`")
        return version, _make_champion(client, version)


def candidate(settings: Settings, live: str = CHAMPION) -> tuple[Ensemble, str] | None:
    """Return the candidate as `load` does; None when there is none or it is the version `live` (an alias or number) itself.

    Raises as `load` does.
    """
    if _absent_file(settings.uri):
        return None
    with _connected(settings.uri) as client:
        aliases = _aliases(client)
        version = str(aliases.get(CANDIDATE, ""))
        if not version or version == str(aliases.get(live, live.removeprefix("v"))):
            return None
        return _read(version), f"{CANDIDATE} v{version}"


def load(settings: Settings, wanted: str = CHAMPION) -> tuple[Ensemble, str]:
    """Return a fitted ensemble and its name (``champion v3``) by alias or version number.

    Raises
    ------
    UsageError
        There is no such version or alias; the sentence lists those that exist.
    ModelMismatch
        It is damaged, or was written by another format.
    SourceUnavailable
        The registry does not answer.
    """
    with _connected(settings.uri) as client:
        version = _version(client, wanted)
        return _read(version), f"v{version}" if wanted == version else f"{wanted} v{version}"


def exists(settings: Settings, alias: str = CHAMPION) -> bool:
    """Return whether the registry has such an alias; raises SourceUnavailable when it does not answer."""
    if _absent_file(settings.uri):
        return False
    with _connected(settings.uri) as client:
        return alias in _aliases(client)


def _aliases(client: Any) -> dict[str, str]:
    import mlflow

    try:
        return dict(client.get_registered_model(NAME).aliases)
    except mlflow.exceptions.MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return {}
        raise


def _version(client: Any, wanted: str) -> str:
    """Return the version number behind a number or an alias."""
    versions = sorted(int(v.version) for v in client.search_model_versions(f"name = '{NAME}'"))
    aliases = _aliases(client)
    if wanted in aliases:
        return str(aliases[wanted])
    if wanted.removeprefix("v").isdecimal() and int(wanted.removeprefix("v")) in versions:
        return wanted.removeprefix("v")
    if not versions:
        raise UsageError("no model is registered yet: run `eagleeye train` first")
    there = ", ".join(
        f"v{v}" + "".join(f" ({a})" for a, of in sorted(aliases.items()) if str(of) == str(v)) for v in versions[-20:]
    )
    raise UsageError(f"no model version or alias is called {wanted!r}; there are {there}")


def _make_champion(client: Any, version: str) -> str | None:
    """Move the aliases and return the champion before; whatever is interrupted between the two leaves what is live as it was."""
    champion = _aliases(client).get(CHAMPION)
    before = None if champion is None else str(champion)
    _read(version)
    if before not in (None, version):
        client.set_registered_model_alias(NAME, PREVIOUS, before)
    client.set_registered_model_alias(NAME, CHAMPION, version)
    return before


def _read(version: str) -> Ensemble:
    import mlflow

    with tempfile.TemporaryDirectory() as folder:
        try:
            path = Path(mlflow.artifacts.download_artifacts(artifact_uri=f"models:/{NAME}/{version}", dst_path=folder))
            return _from_files(path / "data")
        except OSError as error:
            raise ModelMismatch(f"the files of model v{version} are not there ({error}): train it again") from None
        except ModelMismatch as error:
            raise ModelMismatch(f"model v{version}: {error}") from None


def _write(fitted: Ensemble, folder: Path) -> None:
    facts, arrays = fitted.to_parts()
    (folder / _FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    np.savez_compressed(folder / _ARRAYS, allow_pickle=False, **arrays)


def _from_files(folder: Path) -> Ensemble:
    # MLflow keeps the name of a folder that it was given
    folder = next((path.parent for path in sorted(folder.rglob(_FACTS))), folder)
    try:
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        with (folder / _ARRAYS).open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        if not isinstance(facts, dict):
            raise ValueError("the facts are no object")
    except FileNotFoundError as error:
        raise ModelMismatch(f"{Path(str(error.filename)).name} is absent: train it again") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ModelMismatch(f"the stored model is damaged ({error}): train it again") from None
    return ensemble.from_parts(facts, arrays)


def _log(params: Mapping[str, object], metrics: Mapping[str, float], artifacts: Path) -> None:
    import mlflow

    mlflow.log_params(dict(params))
    mlflow.log_metrics({name: value for name, value in metrics.items() if np.isfinite(value)})
    mlflow.log_artifacts(str(artifacts))


def _signature(fitted: Ensemble) -> Any:
    from mlflow.models import ModelSignature
    from mlflow.types.schema import ColSpec, DataType, Schema

    columns = [ColSpec(DataType.double, "time"), ColSpec(DataType.long, "rank")]
    columns += [ColSpec(DataType.string, "node", required=False), ColSpec(DataType.string, "group", required=False)]
    columns += [ColSpec(DataType.double, metric, required=False) for metric in fitted.scale.metrics]
    scores = [ColSpec(DataType.long, "rank")] + [ColSpec(DataType.double, name) for name in fitted.detectors]
    return ModelSignature(inputs=Schema(columns), outputs=Schema(scores))


def _experiment(client: Any, uri: str) -> str:
    found = client.get_experiment_by_name(NAME)
    if found is not None:
        return str(found.experiment_id)
    file = _sqlite_file(uri)
    location = (file.parent / "artifacts").as_uri() if file else None
    return str(client.create_experiment(NAME, artifact_location=location))


def _sqlite_file(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).absolute() if uri.startswith("sqlite:///") else None


def _absent_file(uri: str) -> bool:
    file = _sqlite_file(uri)
    return file is not None and not file.exists()


@contextlib.contextmanager
def _connected(uri: str, *, write: bool = False) -> Iterator[Any]:
    """Yield a client; whatever MLflow raises meanwhile leaves as one sentence."""
    if not write and _absent_file(uri):
        raise UsageError(f"no model is registered yet, {_sqlite_file(uri)} does not exist: run `eagleeye train` first")
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import mlflow
        from sqlalchemy.exc import SQLAlchemyError
    except ModuleNotFoundError as error:
        raise MissingExtra(f"models need the package {error.name!r}: pip install 'eagleeye-toolkit[detect]'") from None
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    file = _sqlite_file(uri)
    try:
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
        mlflow.set_tracking_uri(f"sqlite:///{file}" if file else uri)
        with warnings.catch_warnings(action="ignore"):  # of MLflow about itself
            yield mlflow.MlflowClient()
    except (mlflow.exceptions.MlflowException, SQLAlchemyError) as error:
        first = str(error).strip().splitlines()[0][:200]
        raise SourceUnavailable(f"the model registry {uri} does not answer as it should: {first}") from None
    except OSError as error:
        raise EnvironmentLacks(f"cannot use the model registry {uri}: {error}") from None


class _Scorer:
    """What ``mlflow.pyfunc.load_model("models:/eagleeye@champion")`` wraps."""

    def __init__(self, fitted: Ensemble) -> None:
        self._fitted = fitted

    def predict(self, frame: pd.DataFrame, params: Mapping[str, object] | None = None) -> pd.DataFrame:
        """Return one row a rank: ``rank`` and the score of each detector at the frame's newest time; above 1 = anomalous.

        Parameters
        ----------
        frame : one job in long form, one row for each rank and time: ``time`` (seconds since the epoch), ``rank``, maybe ``node``
            and ``group``, and the raw metrics in base units. The first half of the times must be normal work of this job: the
            permanent differences between its ranks are learned from it.
        params : unused
        """
        import pandas as pd

        window = _window(frame)
        scores = self._fitted.score(window, self._fitted.job_offsets(ensemble.half(window)))
        return pd.DataFrame({"rank": window.ranks} | {score.detector: score.score_R for score in scores})


def _load_pyfunc(data_path: str) -> _Scorer:
    """Called by MLflow with the folder of the stored files."""
    return _Scorer(_from_files(Path(data_path)))


def _window(frame: pd.DataFrame) -> Window:
    stamps_T, column_N = np.unique(frame["time"].to_numpy(dtype=np.float64), return_inverse=True)
    ranks, first_R, row_N = np.unique(frame["rank"].to_numpy(), return_index=True, return_inverse=True)
    if len(stamps_T) < 2:
        raise ModelMismatch("one instant is no window: give rows for at least two times")
    step_s = float(np.median(np.diff(stamps_T)))
    column_N = np.round((stamps_T[column_N] - stamps_T[0]) / step_s).astype(int)
    metrics = tuple(str(c) for c in frame.columns if c not in ("time", "rank", "node", "group"))
    values_RMT = np.full((len(ranks), len(metrics), int(column_N.max()) + 1), np.nan, dtype=np.float32)
    for m, metric in enumerate(metrics):
        values_RMT[row_N, m, column_N] = frame[metric].to_numpy(dtype=np.float32)
    nodes = tuple(str(n) for n in frame["node"].to_numpy()[first_R]) if "node" in frame else tuple(f"rank {r}" for r in ranks)
    groups = tuple(str(g) for g in frame["group"].to_numpy()[first_R]) if "group" in frame else ("",) * len(ranks)
    return Window(
        "frame",
        tuple(int(r) for r in ranks),
        nodes,
        groups,
        metrics,
        float(stamps_T[0] + step_s * column_N.max()),
        step_s,
        values_RMT,
    )
