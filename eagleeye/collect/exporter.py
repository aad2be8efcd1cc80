"""Serves /metrics: runs every collector at each scrape, apart from the others and against a deadline.

Samples come in from the collectors, the page goes out; nothing is stored. A collector that fails, hangs or tells nonsense loses
its own series and nothing else, and says so in `eagleeye_exporter_collector_success`.
"""

import math
import signal
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector as RegistryCollector

from eagleeye import __version__, plugins
from eagleeye.clock import monotonic_s
from eagleeye.collect.base import Collector, Settings, Site
from eagleeye.errors import DataError, EnvironmentLacks, NoData
from eagleeye.metrics import BY_SERIES, PREFIX, RANK_INFO
from eagleeye.records import Sample

CLIENT_TIMEOUT_S = 10.0

ROWS = {**BY_SERIES, RANK_INFO.series or "": RANK_INFO}


@dataclass(slots=True)
class Result:
    """How one call of a collector ended. `present` is False when the machine has nothing to collect."""

    samples: Sequence[Sample] = ()
    present: bool = True
    failure: str | None = None
    duration_s: float = math.nan


class Guard:
    """One collector, called in a thread of its own. While an old call hangs no new one is begun."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.last_success_s = math.nan
        self.failure: str | None = None
        self._running: threading.Thread | None = None
        self._began_s = 0.0
        self._result = Result()

    def begin(self, now_s: float) -> None:
        """Start a call, unless the last one still runs."""
        if self._running is None or not self._running.is_alive():
            self._began_s = monotonic_s()
            self._result = Result()
            self._running = threading.Thread(target=self._call, args=(now_s, self._result), daemon=True)
            self._running.start()

    def end(self, deadline_s: float, now_s: float) -> Result:
        """Wait until the call ends, at most until it is `deadline_s` old; return how it went."""
        assert self._running is not None
        self._running.join(max(0.0, self._began_s + deadline_s - monotonic_s()))
        result = self._result
        if self._running.is_alive():
            took_s = monotonic_s() - self._began_s
            result = Result(failure=f"it hangs since {took_s:.1f} s", duration_s=took_s)
        if result.present and result.failure is None:
            self.last_success_s = now_s
        self._tell(result.failure)
        return result

    def _call(self, now_s: float, result: Result) -> None:
        began_s = monotonic_s()
        try:
            result.present = self.collector.supported()
            if result.present:
                result.samples = _checked(self.collector.collect(now_s))
            result.failure = None
        except NoData:
            result.present, result.failure = False, None
        except Exception as error:  # the edge of the scrape: whatever a collector does, the page goes out
            result.failure = f"{type(error).__name__}: {error}"
        result.duration_s = monotonic_s() - began_s

    def _tell(self, failure: str | None) -> None:
        if (failure is None) != (self.failure is None):
            print(f"collector {self.collector.name}: {failure or 'works again'}", file=sys.stderr, flush=True)
        self.failure = failure


def _checked(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples, or raise DataError when one of them is not in the catalogue or comes twice."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
    for sample in samples:
        row = ROWS.get(sample.series)
        if row is None:
            raise DataError(f"{sample.series} is not in the catalogue")
        if {"node", *sample.labels} != set(row.labels):
            raise DataError(f"{sample.series} needs the labels {row.labels[1:]}, not {tuple(sample.labels)}")
        key = (sample.series, tuple(sorted(sample.labels.items())))
        if key in found:
            raise DataError(f"{sample.series} comes twice with the labels {dict(sample.labels)}")
        if math.isfinite(sample.value):
            found[key] = sample
    return list(found.values())


class Page(RegistryCollector):
    """The page of one node, made anew at every scrape."""

    def __init__(self, site: Site, collectors: Iterable[Collector]) -> None:
        self._site = site
        self._guards = [Guard(collector) for collector in collectors]
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        """Yield the catalogue's families in its order, then the exporter's own health."""
        with self._lock:
            now_s = self._site.clock.now_s()
            for guard in self._guards:
                guard.begin(now_s)
            results = [(guard, guard.end(self._site.settings.deadline_s, now_s)) for guard in self._guards]
        yield from _families(self._site.node, (sample for _, result in results for sample in result.samples))
        yield from self._health(results)

    def _health(self, results: Sequence[tuple[Guard, Result]]) -> Iterable[Metric]:
        name = PREFIX + "exporter_collector_"
        present = GaugeMetricFamily(
            name + "present", "0 when this machine has nothing for the collector, else 1.", labels=["collector"]
        )
        success = GaugeMetricFamily(name + "success", "Whether the collector's last call did its work.", labels=["collector"])
        took = GaugeMetricFamily(name + "duration_seconds", "How long the last call took, or runs already.", labels=["collector"])
        last = GaugeMetricFamily(name + "last_success_timestamp_seconds", "When a call last did its work.", labels=["collector"])
        info = GaugeMetricFamily(
            PREFIX + "exporter_info", "Version and node of this exporter; always 1.", labels=["version", "node"]
        )
        info.add_metric([__version__, self._site.node], 1)
        for guard, result in results:
            label = [guard.collector.name]
            present.add_metric(label, float(result.present))
            if result.present:
                success.add_metric(label, float(result.failure is None))
            if math.isfinite(result.duration_s):
                took.add_metric(label, result.duration_s)
            if math.isfinite(guard.last_success_s):
                last.add_metric(label, guard.last_success_s)
        return present, success, took, last, info


def _families(node: str, samples: Iterable[Sample]) -> Iterable[Metric]:
    by_series: dict[str, list[Sample]] = {}
    for sample in samples:
        by_series.setdefault(sample.series, []).append(sample)
    for series, row in ROWS.items():
        found = by_series.get(series)
        if not found:
            continue
        kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
        family = kind(series, row.help, labels=list(row.labels))
        rows: list[tuple[list[str], float]] = []
        for sample in found:
            labels: Mapping[str, str] = {"node": node, **sample.labels}
            rows.append(([labels[name] for name in row.labels], sample.value))
        for values, value in sorted(rows):
            family.add_metric(values, value)
        yield family


class Exporter:
    """A running exporter. `port` is the one it got; `close()` ends it."""

    def __init__(self, settings: Settings, collectors: Iterable[Collector] | None = None, site: Site | None = None) -> None:
        """Start to serve.

        Parameters
        ----------
        collectors : in place of those that ``settings.collectors`` names

        Raises
        ------
        ConfigError
            An unknown collector.
        EnvironmentLacks
            The port is in use, or the address is not this machine's.
        """
        self._site = site or Site(settings)
        made = [plugins.load("collector", name)(self._site) for name in settings.collectors] if collectors is None else collectors
        registry = CollectorRegistry()
        registry.register(Page(self._site, made))
        try:
            self._server: WSGIServer
            self._server, self._thread = start_http_server(settings.port, settings.address, registry)
            # a client that connects and says nothing would hold a thread and a descriptor for ever
            handler = cast(type, self._server.RequestHandlerClass)
            self._server.RequestHandlerClass = type("Handler", (handler,), {"timeout": CLIENT_TIMEOUT_S})
        except (OSError, OverflowError) as error:
            self._site.close()
            raise EnvironmentLacks(
                f"cannot serve on {settings.address}:{settings.port}: {error}; choose a free one with --port and --address"
            ) from None
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving and watching."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._site.close()


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; return exit code 0. Must run in the main thread. Raises what `Exporter` raises."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    exporter = Exporter(settings)
    print(f"node {settings.node}: http://{settings.address}:{exporter.port}/metrics", flush=True)
    ended.wait()
    exporter.close()
    return 0
