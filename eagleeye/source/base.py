"""The source seam: where windows come from. Recorded traces, exporters scraped directly, a Prometheus server."""

import abc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from eagleeye.clock import Clock
from eagleeye.errors import ConfigError, NoData
from eagleeye.source.series import MARGIN_STEPS, Block, assemble, jobs_in
from eagleeye.window import Window

Progress = Callable[[float], None]
"""Called with the share done, 0 to 1."""

_CHUNK_S = 3600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """The section ``[source]``."""

    targets: tuple[str, ...] = ()
    """Exporters to scrape directly: ``HOST:PORT`` or a URL. Excludes `prometheus`."""
    prometheus: str = ""
    """URL of a Prometheus server that scrapes the exporters."""
    interval_s: float = 5.0
    """Seconds between scrapes, and between columns of a window. With a Prometheus: its scrape interval."""
    timeout_s: float = 2.0
    """How long one exporter may take, never longer than `interval_s`; a hung one costs only itself."""
    query_timeout_s: float = 15.0
    """How long one query to Prometheus may take, of which a few are tried."""
    ring_s: float = 3600.0
    """How much is kept in memory of exporters scraped directly."""
    forget_s: float = 300.0
    """How long a rank stays in the windows after its exporter fell silent."""
    history_dir: str = ""
    """Folder for what was scraped directly, as Parquet, for `train`; nothing is kept when empty."""
    history_file_s: float = 300.0
    """How much goes into one file of `history_dir`, and at most is lost by a crash."""
    history_keep_s: float = 35 * 86400.0
    """Older files of `history_dir` are deleted."""

    def __post_init__(self) -> None:
        if self.targets and self.prometheus:
            raise ValueError("set either targets or prometheus, not both")
        if self.history_file_s > self.ring_s:
            raise ValueError(f"history_file_s ({self.history_file_s:g}) must not be above ring_s ({self.ring_s:g})")


class Source(Protocol):
    """Where the windows of jobs come from.

    `scrape` is called once a tick by the scorer, before it asks for windows that end at the same `now_s`. Every call may be
    repeated; arrays are read-only.
    """

    @property
    def step_s(self) -> float:
        """Seconds between columns of a window."""
        ...

    def scrape(self, now_s: float) -> None:
        """Read what must be read now; returns at once where somebody else stores the data. Never raises for one bad target."""
        ...

    def failures(self) -> Mapping[str, str]:
        """Return target -> one sentence, for those that the newest `scrape` could not read."""
        ...

    def jobs(self, now_s: float) -> tuple[str, ...]:
        """Return the sorted names of the jobs that are known at `now_s`. Raises SourceUnavailable."""
        ...

    def window(self, job: str, end_s: float, length_s: float) -> Window:
        """Return what the job's ranks did in the `length_s` seconds before `end_s`.

        T = length_s / step_s columns always; NaN where nothing was observed. All ranks known in that time are there, also one
        that fell silent. Nothing stamped later than `end_s` is used.

        Raises
        ------
        NoData
            Nothing is known of the job in that time.
        SourceUnavailable
            The server does not answer.
        """
        ...

    def history(self, start_s: float, end_s: float, length_s: float, progress: Progress | None = None) -> Iterator[Window]:
        """Yield consecutive windows of `length_s`, none overlapping, of every job known between start and end.

        Memory is bounded by about an hour of samples, however long the time. Raises as `window` does, but for NoData.
        """
        ...

    def close(self) -> None:
        """Write and release what is held; the source is not used any more."""
        ...


class SampleSource(abc.ABC):
    """Windows out of raw samples: all that scraping directly and Prometheus have in common."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @property
    def step_s(self) -> float:
        """Seconds between columns of a window."""
        return self._settings.interval_s

    @abc.abstractmethod
    def _recent(self, start_s: float, end_s: float, job: str) -> Sequence[Block]:
        """Return the samples that concern a job in [start_s, end_s]."""

    @abc.abstractmethod
    def _stored(self, start_s: float, end_s: float) -> Sequence[Block]:
        """Return all samples in [start_s, end_s], an hour or so."""

    def window(self, job: str, end_s: float, length_s: float) -> Window:
        """See `Source.window`."""
        start_s = end_s - max(length_s, self._settings.forget_s) - MARGIN_STEPS * self.step_s
        return assemble(job, self._recent(start_s, end_s, job), end_s, length_s, self.step_s, self._settings.forget_s)

    def history(self, start_s: float, end_s: float, length_s: float, progress: Progress | None = None) -> Iterator[Window]:
        """See `Source.history`."""
        total = math.floor((end_s - start_s) / length_s + 1e-9)
        per_chunk = max(1, int(_CHUNK_S // length_s))
        for first in range(0, total, per_chunk):
            ends = [start_s + (k + 1) * length_s for k in range(first, min(first + per_chunk, total))]
            blocks = self._stored(ends[0] - length_s - MARGIN_STEPS * self.step_s, ends[-1])
            for window_end_s in ends:
                for job in jobs_in(blocks, window_end_s - length_s, window_end_s):
                    yield assemble(job, blocks, window_end_s, length_s, self.step_s)
            if progress:
                progress(min(first + per_chunk, total) / total)


def open_source(settings: Settings, clock: Clock) -> Source:
    """Return the live source that the settings name.

    Raises
    ------
    ConfigError
        They name none.
    NoData
        They name a history alone, and it is not there.
    """
    if settings.prometheus:
        from eagleeye.source.prometheus import PrometheusSource

        return PrometheusSource(settings, clock)
    if settings.history_dir and not settings.targets and not Path(settings.history_dir).is_dir():
        raise NoData(f"there is no folder {settings.history_dir}; a scorer with [source] history_dir fills it")
    if settings.targets or settings.history_dir:
        from eagleeye.source.exporters import ExporterSource

        return ExporterSource(settings)
    raise ConfigError("[source] names nothing to read: set targets (exporters) or prometheus (a server's URL)")
