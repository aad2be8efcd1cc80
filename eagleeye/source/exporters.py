"""Exporters scraped directly into a ring in memory: the embedded default, no server needed. History is kept as Parquet.

Shape suffixes: S series of a target, N scrapes.
"""

import contextlib
import http.client
import logging
import math
import socket
import ssl
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import numpy as np

from eagleeye.clock import monotonic_s
from eagleeye.errors import ConfigError, EagleEyeError, EnvironmentLacks, SourceUnavailable
from eagleeye.source.base import Progress, SampleSource, Settings
from eagleeye.source.exposition import identified, parsed
from eagleeye.source.history import History
from eagleeye.source.series import SLACK_S, Block, Floats, jobs_in
from eagleeye.window import Window

_LOG = logging.getLogger(__name__)
_PAGE_LIMIT_BYTES = 64 << 20
_THREADS_LIMIT = 1024
_CHURN = 64


class ExporterSource(SampleSource):
    """Scrapes `settings.targets` at every tick, all at once, each with a deadline of its own."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._targets = [_Target(target) for target in dict.fromkeys(settings.targets)]
        self._failures: dict[str, str] = {}
        self._history = History(Path(settings.history_dir), settings.history_keep_s) if settings.history_dir else None
        self._written_s = -math.inf
        self._newest_s = -math.inf
        threads = min(max(len(self._targets), 1), _THREADS_LIMIT)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="scrape")

    def scrape(self, now_s: float) -> None:
        """Scrape every target once and stamp what they say with `now_s`; takes `timeout_s` at most."""
        timeout_s = min(self._settings.timeout_s, self.step_s)
        asked: dict[Future[str], _Target] = {self._pool.submit(t.fetch, timeout_s): t for t in self._targets}
        wait(asked, timeout=timeout_s)
        failures: dict[str, str] = {}
        for future, target in asked.items():
            try:
                if not future.done():
                    future.cancel()
                    target.abandon()
                    raise SourceUnavailable(f"{target.name} did not answer within {timeout_s:g} s")
                target.add(now_s, future.result())
            except EagleEyeError as error:
                failures[target.name] = str(error)
                target.miss(now_s)
            target.forget(now_s - self._settings.ring_s)
        if self._written_s == -math.inf:
            self._written_s = now_s - self.step_s
        self._newest_s = now_s
        if self._history and now_s - self._written_s >= self._settings.history_file_s:
            try:
                self._write()
            except EnvironmentLacks as error:
                failures[self._settings.history_dir] = str(error)
        for name in sorted(failures.keys() - self._failures.keys()):
            _LOG.warning("%s", failures[name])
        for name in sorted(self._failures.keys() - failures.keys()):
            _LOG.warning("%s is well again", name)
        self._failures = failures

    def failures(self) -> Mapping[str, str]:
        """See `Source.failures`."""
        return dict(self._failures)

    def jobs(self, now_s: float) -> tuple[str, ...]:
        """See `Source.jobs`."""
        after_s = now_s - self._settings.forget_s
        return jobs_in(self._blocks(after_s, now_s), after_s, now_s)

    def history(self, start_s: float, end_s: float, length_s: float, progress: Progress | None = None) -> Iterator[Window]:
        """See `Source.history`. Raises ConfigError when no `history_dir` is set."""
        if not self._history:
            raise ConfigError("[source] history_dir is not set, so nothing was kept of what the exporters said")
        return super().history(start_s, end_s, length_s, progress)

    def close(self) -> None:
        """Write the rest of the history. Raises EnvironmentLacks."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._history:
            self._write()

    def _blocks(self, start_s: float, end_s: float) -> list[Block]:
        blocks = (target.block(start_s, end_s) for target in self._targets)
        return [block for block in blocks if block is not None]

    def _recent(self, start_s: float, end_s: float, job: str) -> Sequence[Block]:
        return self._blocks(start_s, end_s)

    def _stored(self, start_s: float, end_s: float) -> Sequence[Block]:
        assert self._history is not None
        return self._history.read(start_s, end_s)

    def _write(self) -> None:
        assert self._history is not None
        self._history.write(self._blocks(np.nextafter(self._written_s, math.inf), self._newest_s))
        self._written_s = self._newest_s


class _Target:
    """One exporter: how to reach it, and what it said lately, as rows over an index of series."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._url = _url(name)
        self._socket: socket.socket | None = None
        self._index: dict[str, int] = {}
        self._series: list[tuple[str, Mapping[str, str]]] = []
        self._rows: deque[tuple[float, Floats]] = deque()
        self._live = 0

    def fetch(self, timeout_s: float) -> str:
        """Return the page. Runs in a thread of its own.

        Raises
        ------
        SourceUnavailable
            No connection, no answer, a status other than 200, or half a body.
        """
        late = f"{self.name} did not answer within {timeout_s:g} s"
        deadline_s = monotonic_s() + timeout_s
        host, port = self._url.hostname or "", self._url.port
        if self._url.scheme == "https":
            context = ssl.create_default_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        try:
            connection.connect()
            self._socket = connection.sock
            path = (self._url.path or "/metrics") + (f"?{self._url.query}" if self._url.query else "")
            connection.request("GET", path, headers={"Accept": "text/plain;version=0.0.4"})
            with connection.getresponse() as response:
                if response.status != 200:
                    raise SourceUnavailable(f"{self.name} answered {response.status} {response.reason}")
                body = bytearray()
                while chunk := response.read1(1 << 16):
                    body += chunk
                    if len(body) > _PAGE_LIMIT_BYTES:
                        raise SourceUnavailable(f"{self.name} sent more than {_PAGE_LIMIT_BYTES >> 20} MiB; is it an exporter?")
                    if monotonic_s() > deadline_s:
                        raise SourceUnavailable(late)
                if response.length:
                    raise SourceUnavailable(f"{self.name} sent half a page: {response.length} bytes are missing")
            return body.decode("utf-8")
        except TimeoutError:
            raise SourceUnavailable(late) from None
        except UnicodeDecodeError:
            raise SourceUnavailable(f"{self.name} sent a page that is no UTF-8 text") from None
        except (OSError, http.client.HTTPException) as error:
            raise SourceUnavailable(f"{self.name} cannot be scraped: {str(error) or type(error).__name__}") from None
        finally:
            self._socket = None
            connection.close()

    def abandon(self) -> None:
        """End a `fetch` that still waits in its thread, so that a hung exporter holds no thread until the next tick."""
        hung = self._socket
        if hung is not None:
            with contextlib.suppress(OSError):  # it ended by itself, just now
                hung.shutdown(socket.SHUT_RDWR)

    def add(self, at_s: float, page: str) -> None:
        """Keep what a page says. Raises DataError, keeping nothing, when it is no page of an exporter of ours."""
        if self._rows and at_s <= self._rows[-1][0]:
            return
        values = dict(parsed(page, self.name))
        fresh = {key: identified(key, self.name) for key in values if key not in self._index}
        for key, series in fresh.items():
            self._index[key] = len(self._series)
            self._series.append(series)
        row = np.full(len(self._series), np.nan)
        row[[self._index[key] for key in values]] = list(values.values())
        self._rows.append((at_s, row))
        self._live = len(values)

    def miss(self, at_s: float) -> None:
        """Keep that nothing was seen at that time."""
        if not self._rows or at_s > self._rows[-1][0]:
            self._rows.append((at_s, np.empty(0)))

    def forget(self, before_s: float) -> None:
        """Drop scrapes from before that time, and series that occur in none any more once they are many."""
        while self._rows and self._rows[0][0] < before_s:
            self._rows.popleft()
        width = len(self._series)
        if width <= _CHURN + 2 * self._live:
            return
        used = np.zeros(width, dtype=bool)
        for _, row in self._rows:
            used[: row.size] |= np.isfinite(row)
        keep = np.flatnonzero(used)
        place = {int(old): new for new, old in enumerate(keep)}
        self._series = [self._series[old] for old in place]
        self._index = {key: place[old] for key, old in self._index.items() if old in place}
        self._rows = deque((at_s, _widened(row, width)[keep]) for at_s, row in self._rows)

    def block(self, start_s: float, end_s: float) -> Block | None:
        """Return the scrapes in [start_s, end_s], or None when there are none."""
        rows = [(at_s, row) for at_s, row in self._rows if start_s <= at_s <= end_s + SLACK_S]
        if not rows:
            return None
        names, labels = tuple(s[0] for s in self._series), tuple(s[1] for s in self._series)
        values_NS = np.stack([_widened(row, len(names)) for _, row in rows])
        return Block(names, labels, np.array([at_s for at_s, _ in rows]), np.ascontiguousarray(values_NS.T))


def _widened(row: Floats, width: int) -> Floats:
    return row if row.size == width else np.concatenate([row, np.full(width - row.size, np.nan)])


def _url(target: str) -> SplitResult:
    url = urlsplit(target if "://" in target else f"http://{target}")
    try:
        if url.scheme in ("http", "https") and url.hostname and url.port != 0:
            return url
    except ValueError:
        pass
    raise ConfigError(f"[source] targets: {target!r} is no exporter; write HOST:PORT or http://HOST:PORT/metrics")
