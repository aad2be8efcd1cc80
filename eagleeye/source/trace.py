"""Recorded traces: a folder with `trace.json`, `metrics.parquet` and maybe `logs/NODE.log`; read, and written by `TraceWriter`.

A column t of the array built on opening holds only rows stamped at or before its own stamp, so a window cut off at `end_s` never
looks ahead. Shape suffixes: R ranks, M metrics, T columns; N rows of the file.
"""

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eagleeye.collect.logs import ErrorWindow, stamp_s
from eagleeye.errors import DataError, EnvironmentLacks, NoData, UsageError
from eagleeye.files import sync_folder
from eagleeye.metrics import BY_COLUMN, check_unit
from eagleeye.source.base import Progress
from eagleeye.source.series import SLACK_S
from eagleeye.window import Window

KINDS = ("fault", "benign", "not_training")

LOG_COLUMNS = ("log_errors", "log_hardware_errors", "log_communication_errors", "log_first_error_age_seconds")

_SPARSE = 100_000
_LINE_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Label:
    """What really happened in a stretch of a trace: for judging, never for scoring. Times are seconds since the epoch."""

    start_s: float
    end_s: float
    kind: str
    category: str
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    infrastructure: bool
    nameable: bool


class TraceSource:
    """One recorded job. `window` is a slice of an array, so thousands a second.

    Parameters
    ----------
    folder : the trace
    log_window_s : length of the sliding window in which error lines are counted

    Raises
    ------
    NoData
        There is no such folder, or no row in it.
    DataError
        The trace breaks its format; the sentence says where.
    """

    def __init__(self, folder: Path | str, log_window_s: float = 300.0) -> None:
        self.folder = Path(folder)
        about = _about(self.folder)
        self.job: str = about["job"]
        self._step_s = float(about["interval_seconds"])
        places = sorted(about["ranks"], key=lambda place: int(place["rank"]))
        self.ranks: tuple[int, ...] = tuple(int(place["rank"]) for place in places)
        self.nodes: tuple[str, ...] = tuple(str(place["node"]) for place in places)
        self.groups: tuple[str, ...] = tuple(str(place.get("group", "")) for place in places)
        measured: tuple[str, ...] = tuple(about["metrics"])
        self._units: dict[str, str] = {name: unit for name, unit in about["metrics"].items() if name not in BY_COLUMN}

        at_N, rank_N, values_NM = _rows(self.folder / "metrics.parquet", measured)
        row_N = np.searchsorted(self.ranks, rank_N)
        strange = (row_N == len(self.ranks)) | (np.array(self.ranks)[np.minimum(row_N, len(self.ranks) - 1)] != rank_N)
        path = self.folder / "metrics.parquet"
        if strange.any():
            raise DataError(f"{path}: rank {rank_N[strange][0]} is not among the ranks of trace.json")
        order = np.lexsort((at_N, row_N))
        twice = (np.diff(row_N[order]) == 0) & (np.diff(at_N[order]) == 0)
        if twice.any():
            row = order[:-1][twice][0]
            raise DataError(f"{path}: rank {rank_N[row]} has two rows for {_utc(at_N[row])}; keep one")
        self._start_s = float(at_N.min())
        # Upwards, never to the nearest: a column may hold nothing from after its stamp.
        column_N = np.ceil((at_N - self._start_s - SLACK_S) / self._step_s).astype(np.int64)
        T = int(column_N.max()) + 1
        distinct = np.unique(column_N)
        if _SPARSE + 100 * distinct.size < T:
            raise DataError(
                f"{path}: times go from {_utc(at_N.min())} to {_utc(at_N.max())}, which cannot be one job; check `time`"
            )
        values_RMT = np.full((len(self.ranks), len(measured), T), np.nan, dtype=np.float32)
        values_RMT[row_N[order], :, column_N[order]] = values_NM[order]
        self.stamps_s: NDArray[np.float64] = self._start_s + self._step_s * distinct.astype(np.float64)
        """Stamps of the columns that have rows, ascending: the ticks of a replay."""

        logged = tuple(c for c in LOG_COLUMNS if c not in measured) if (self.folder / "logs").is_dir() else ()
        self.metrics: tuple[str, ...] = measured + logged
        if logged:
            stamps_T = self._start_s + self._step_s * np.arange(T, dtype=np.float64)
            lines_RMT = np.full((len(self.ranks), len(LOG_COLUMNS), T), np.nan, dtype=np.float32)
            for node in dict.fromkeys(self.nodes):
                here = [r for r, other in enumerate(self.nodes) if other == node]
                lines_RMT[here] = _log_columns(self.folder / "logs" / f"{node}.log", stamps_T, log_window_s)
            chosen = [LOG_COLUMNS.index(c) for c in logged]
            values_RMT = np.concatenate([values_RMT, lines_RMT[:, chosen]], axis=1)
        self._values_RMT = values_RMT
        self._values_RMT.flags.writeable = False

    @property
    def step_s(self) -> float:
        """Seconds between columns."""
        return self._step_s

    def scrape(self, now_s: float) -> None:
        """Nothing to do: everything was recorded."""

    def failures(self) -> Mapping[str, str]:
        """Empty: what was not recorded shows as missing data."""
        return {}

    def close(self) -> None:
        """Nothing to do."""

    def jobs(self, now_s: float) -> tuple[str, ...]:
        """Return the job, once its first row is stamped."""
        return (self.job,) if now_s >= self._start_s - SLACK_S else ()

    def window(self, job: str, end_s: float, length_s: float) -> Window:
        """See `Source.window`. The last column is the newest stamp at or before `end_s`."""
        if job != self.job:
            raise NoData(f"{self.folder} is a trace of the job {self.job!r}, not of {job!r}")
        count = max(1, round(length_s / self._step_s))
        stop = math.floor((end_s - self._start_s + SLACK_S) / self._step_s) + 1
        R, M, T = self._values_RMT.shape
        if stop <= 0 or stop - count >= T:
            raise NoData(f"{self.folder} has no row in the {length_s:g} s before {_utc(end_s)}")
        first = stop - count
        if first >= 0 and stop <= T:
            values_RMT = self._values_RMT[:, :, first:stop]
        else:
            values_RMT = np.full((R, M, count), np.nan, dtype=np.float32)
            a, b = max(first, 0), min(stop, T)
            values_RMT[:, :, a - first : b - first] = self._values_RMT[:, :, a:b]
        last_s = self._start_s + (stop - 1) * self._step_s
        return Window(self.job, self.ranks, self.nodes, self.groups, self.metrics, last_s, self._step_s, values_RMT, self._units)

    def history(self, start_s: float, end_s: float, length_s: float, progress: Progress | None = None) -> Iterator[Window]:
        """See `Source.history`."""
        total = math.floor((end_s - start_s) / length_s + 1e-9)
        for k in range(total):
            with contextlib.suppress(NoData):
                yield self.window(self.job, start_s + (k + 1) * length_s, length_s)
            if progress:
                progress((k + 1) / total)


def labels(folder: Path | str) -> tuple[Label, ...]:
    """Return what `labels.json` says. Raises NoData when there is none, DataError when it breaks the format."""
    path = Path(folder) / "labels.json"
    try:
        data = _json(path)
    except FileNotFoundError:
        raise NoData(f"{path} is absent: this trace cannot be judged, only scored") from None
    if not isinstance(data, list) or any(not isinstance(entry, dict) for entry in data):
        raise DataError(f"{path} must be a list of labels; an empty list says that nothing happened")
    strange = [entry.get("kind") for entry in data if entry.get("kind") not in KINDS]
    if strange:
        raise DataError(f"{path}: {strange[0]!r} is no kind of label; there are {', '.join(KINDS)}")
    if any(not isinstance(entry.get(key), list) for entry in data for key in ("nodes", "ranks")):
        raise DataError(f"{path}: nodes and ranks of a label must be lists")
    try:
        return tuple(
            Label(
                _seconds(entry["start"]),
                _seconds(entry["end"]),
                str(entry["kind"]),
                str(entry["category"]),
                tuple(str(node) for node in entry["nodes"]),
                tuple(int(rank) for rank in entry["ranks"]),
                bool(entry["infrastructure"]),
                bool(entry["nameable"]),
            )
            for entry in data
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: an entry breaks the format: {type(error).__name__} {error}") from None


class TraceWriter:
    """Writes a trace from consecutive windows of one job. The folder appears whole, at `close`, or not at all.

    Windows are spooled to a hidden folder beside it, so memory stays small; metrics and ranks may differ from window to window.

    Raises
    ------
    UsageError
        `folder` exists already.
    EnvironmentLacks
        The place cannot be written, or the disk is full.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        if self.folder.exists():
            raise UsageError(f"{self.folder} exists already; name a new folder")
        self._parts: list[Path] = []
        self._job = ""
        self._step_s = 0.0
        self._next_s = -math.inf
        self._metrics: dict[str, str] = {}
        self._places: dict[int, tuple[str, str]] = {}
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self._spool = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}.", dir=self.folder.parent))
        except OSError as error:
            raise EnvironmentLacks(f"cannot write beside {self.folder}: {error.strerror or error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    @property
    def empty(self) -> bool:
        """Whether no window was added yet."""
        return not self._parts

    def add(self, window: Window) -> None:
        """Append a window that begins after the end of the one before. Raises ValueError when it does not."""
        if self._parts and (window.job != self._job or window.step_s != self._step_s or window.start_s < self._next_s):
            raise ValueError("windows of a trace are of one job, with one step, one after the other")
        self._job, self._step_s = window.job, window.step_s
        self._next_s = window.end_s + window.step_s / 2
        self._metrics.update({name: window.unit(name) or "1" for name in window.metrics})
        for rank, node, group in zip(window.ranks, window.nodes, window.groups, strict=True):
            self._places[rank] = (node, group)
        T = window.values_RMT.shape[2]
        columns: dict[str, Any] = {
            "time": pa.array(np.repeat(np.round(window.stamps_T * 1e6).astype(np.int64), len(window.ranks)), pa.int64()).cast(
                pa.timestamp("us", tz="UTC")
            ),
            "rank": np.tile(np.array(window.ranks, dtype=np.int32), T),
        }
        columns |= {name: window.values_RMT[:, m].T.ravel() for m, name in enumerate(window.metrics)}
        path = self._spool / f"{len(self._parts):06d}.part"
        with self._guarded():
            pq.write_table(pa.table(columns), path)
        self._parts.append(path)

    def close(self) -> None:
        """Make the folder appear. Raises NoData, leaving nothing, when no window was added."""
        if self.empty:
            self.abandon()
            raise NoData(f"{self.folder} is not written: nothing was recorded")
        metrics = [name for name in BY_COLUMN if name in self._metrics]
        metrics += [name for name in self._metrics if name not in BY_COLUMN]
        schema = pa.schema(
            [("time", pa.timestamp("us", tz="UTC")), ("rank", pa.int32()), *((name, pa.float32()) for name in metrics)]
        )
        about = {
            "job": self._job,
            "interval_seconds": int(self._step_s) if self._step_s.is_integer() else self._step_s,
            "ranks": [
                {"rank": rank, "node": node, "gpu": None, "group": group} for rank, (node, group) in sorted(self._places.items())
            ],
            "metrics": {name: self._metrics[name] for name in metrics},
        }
        with self._guarded():
            with (self._spool / "metrics.parquet").open("wb") as file:
                with pq.ParquetWriter(file, schema) as writer:
                    for part in self._parts:
                        table = pq.read_table(part)
                        absent = pa.nulls(table.num_rows, pa.float32())
                        writer.write_table(
                            pa.table([table[n] if n in table.column_names else absent for n in schema.names], schema=schema)
                        )
                        part.unlink()
                file.flush()
                os.fsync(file.fileno())
            with (self._spool / "trace.json").open("w", encoding="utf-8") as text:
                json.dump(about, text, indent=1)
                text.flush()
                os.fsync(text.fileno())
            self._spool.chmod(0o755)
            sync_folder(self._spool)
            self._spool.rename(self.folder)
            sync_folder(self.folder.parent)

    def abandon(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self._spool, ignore_errors=True)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.abandon()
            raise EnvironmentLacks(f"cannot write the trace {self.folder}: {error.strerror or error}") from None


def write_trace(folder: Path | str, windows: Sequence[Window]) -> None:
    """Write consecutive windows of one job as a trace. Raises as `TraceWriter` does."""
    with TraceWriter(folder) as writer:
        for window in windows:
            writer.add(window)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path} is no valid JSON: {error}") from None


def _about(folder: Path) -> Any:
    """Return `trace.json`, checked."""
    path = folder / "trace.json"
    if not folder.is_dir():
        raise NoData(f"{folder} is no folder; name one that holds a trace")
    try:
        about = _json(path)
    except FileNotFoundError:
        raise DataError(f"{path} is absent, so {folder} is no trace") from None
    kinds: dict[str, Any] = {"job": str, "interval_seconds": (int, float), "ranks": list, "metrics": dict}
    for key, kind in kinds.items():
        if not isinstance(about, dict) or not isinstance(about.get(key), kind):
            raise DataError(f"{path}: {key!r} is absent or of the wrong kind")
    if not 0 < about["interval_seconds"] < math.inf:
        raise DataError(f"{path}: interval_seconds must be above zero, not {about['interval_seconds']}")
    seen: set[int] = set()
    for place in about["ranks"]:
        if not isinstance(place, dict) or not isinstance(place.get("rank"), int) or not isinstance(place.get("node"), str):
            raise DataError(f"{path}: an entry of 'ranks' lacks its rank or node: {json.dumps(place)[:80]}")
        if place["rank"] in seen:
            raise DataError(f"{path}: rank {place['rank']} occurs twice")
        seen.add(place["rank"])
    if not seen:
        raise DataError(f"{path}: 'ranks' is empty")
    for column, unit in about["metrics"].items():
        check_unit(column, unit, str(path))
    return about


def _rows(path: Path, measured: Sequence[str]) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float32]]:
    """Return times (N,) s, ranks (N,), values (N, M); NaN for what is null, infinite, or a column that is not there."""
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise DataError(f"{path} is absent") from None
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read, it is cut off or no Parquet file: {str(error).splitlines()[0]}") from None
    for name, fits in (("time", pa.types.is_timestamp), ("rank", pa.types.is_integer)):
        if name not in table.column_names or not fits(table.schema.field(name).type):
            raise DataError(f"{path}: the column {name!r} is absent or of the wrong type")
        if table[name].null_count:
            raise DataError(f"{path}: {table[name].null_count} rows have no {name}")
    # pandas adds the number of each row by itself when rows were filtered before writing
    stored = [name for name in table.column_names if not name.startswith("__index_level_")]
    unknown = [name for name in stored if name not in ("time", "rank", *measured)]
    if unknown:
        raise DataError(f"{path}: the column {unknown[0]!r} has no unit in trace.json")
    if not table.num_rows:
        raise NoData(f"{path} holds no row")
    at_N = table["time"].cast(pa.timestamp("us"), safe=False).cast(pa.int64()).to_numpy() / 1e6
    values_NM = np.full((table.num_rows, len(measured)), np.nan, dtype=np.float32)
    for m, name in enumerate(measured):
        if name in table.column_names:
            kind = table.schema.field(name).type
            if not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind)):
                raise DataError(f"{path}: the column {name!r} holds {kind}, not numbers")
            values_NM[:, m] = table[name].cast(pa.float32(), safe=False).to_numpy()
    values_NM[~np.isfinite(values_NM)] = np.nan
    return at_N, table["rank"].cast(pa.int64()).to_numpy(), values_NM


def _log_columns(path: Path, stamps_T: NDArray[np.float64], window_s: float) -> NDArray[np.float32]:
    """Return (4, T) the `LOG_COLUMNS` of a node, whose file may be absent: it logged nothing.

    A line without a time belongs to the one above it.
    """
    lines: list[tuple[float, str]] = []
    at_s: float | None = None
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                own_s = stamp_s(line, float(stamps_T[0]))
                if own_s is not None:
                    at_s, (_, _, line) = own_s, line.partition(" ")
                if at_s is not None:
                    lines.append((at_s, line[:_LINE_CHARS].rstrip()))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    lines.sort(key=lambda line: line[0])
    columns = np.zeros((4, stamps_T.size), dtype=np.float32)
    columns[3] = np.nan
    errors, taken = ErrorWindow(window_s), 0
    for t, stamp in enumerate(stamps_T):
        while taken < len(lines) and lines[taken][0] <= stamp:
            errors.add(*lines[taken])
            taken += 1
        if taken:
            counts, first_s = errors.at(float(stamp))
            columns[:3, t] = sum(counts.values()), counts["hardware"], counts["communication"]
            if first_s is not None:
                columns[3, t] = stamp - first_s
    return columns


def _seconds(text: str) -> float:
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _utc(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f").rstrip("0").rstrip(".") + "Z"
