"""Real exporters and a real Prometheus, on free ports of the loopback device."""

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagleeye.metrics import PREFIX

Value = float | Callable[[], float]


class Exporter(Collector):
    """An HTTP exporter whose series a test sets; a callable value is evaluated at each scrape."""

    def __init__(self, node: str) -> None:
        self.node = node
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], Value] = {}
        self._lock = threading.Lock()
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(0, addr="127.0.0.1", registry=registry)
        self.address = f"127.0.0.1:{self._server.server_port}"

    def set(self, name: str, value: Value | None, **labels: str) -> None:
        """Set a series of this node; None removes it."""
        key = (PREFIX + name, tuple(sorted({"node": self.node, **labels}.items())))
        with self._lock:
            if value is None:
                self._values.pop(key, None)
            else:
                self._values[key] = value

    def rank(self, rank: int, job: str = "llm", gpu: str = "0", group: str = "pp0", value: Value | None = 1.0) -> None:
        """Tell of a rank; None makes it unknown again."""
        self.set(
            "rank_info",
            value,
            training_job=job,
            rank=str(rank),
            local_rank=gpu,
            world_size="4",
            gpu=gpu,
            group=group,
            pid="100",
        )

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            items = list(self._values.items())
        for (name, labels), value in items:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name, "Set by a test.", labels=[k for k, _ in labels])
            family.add_metric([v for _, v in labels], value() if callable(value) else value)
            yield family

    def close(self) -> None:
        """Stop answering: connections are refused from now on."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


@pytest.fixture(scope="module")
def exporters() -> Iterator[Callable[[str], Exporter]]:
    """Return a function that starts an exporter for a node."""
    started: list[Exporter] = []

    def start(node: str) -> Exporter:
        started.append(Exporter(node))
        return started[-1]

    yield start
    with ThreadPoolExecutor(16) as pool:  # each shutdown takes half a second
        list(pool.map(Exporter.close, started))


class RawServer:
    """A TCP server that answers every request with fixed bytes, or hangs; counts what it was asked."""

    def __init__(self, answer: bytes | None, then: Sequence[bytes] = ()) -> None:
        self._answers = [answer, *then]
        self.requests = 0
        self._held: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            received = b""
            while b"\r\n\r\n" not in received:
                chunk = connection.recv(65536)
                if not chunk:
                    break
                received += chunk
            head, _, body = received.partition(b"\r\n\r\n")
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    while len(body) < int(line.split(b":")[1]):
                        body += connection.recv(65536)
            answer = self._answers[min(self.requests, len(self._answers) - 1)]
            self.requests += 1
            if answer is None:
                self._held.append(connection)
            else:
                connection.sendall(answer)
                connection.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._held:
            connection.close()
        self._thread.join(5)


@pytest.fixture
def raw_server() -> Iterator[Callable[..., RawServer]]:
    """Return a function that starts a server of fixed answers; None as answer hangs."""
    started: list[RawServer] = []

    def start(answer: bytes | None, *then: bytes) -> RawServer:
        started.append(RawServer(answer, then))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def http_answer() -> Callable[..., bytes]:
    """Return a function that makes an HTTP answer; `length` may promise more bytes than there are."""
    return _http_answer


def _http_answer(status: str, body: bytes, length: int | None = None, kind: str = "text/plain") -> bytes:
    length = len(body) if length is None else length
    head = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
    return head.encode() + body


@dataclass
class PrometheusServer:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def prometheus_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., PrometheusServer]]:
    """Return a function that starts a real Prometheus, and returns once it has scraped all `targets` (about 6 s)."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no `prometheus` on PATH")
    started: list[PrometheusServer] = []

    def start(targets: Sequence[str], interval_s: float = 0.5, flags: Sequence[str] = ()) -> PrometheusServer:
        folder: Path = tmp_path_factory.mktemp("prometheus")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        interval = f"{round(interval_s * 1000)}ms"
        listed = ", ".join(f"'{target}'" for target in targets)
        (folder / "prometheus.yml").write_text(
            f"global: {{scrape_interval: {interval}, scrape_timeout: {interval}}}\n"
            f"scrape_configs:\n- job_name: eagleeye\n  static_configs:\n  - targets: [{listed}]\n"
        )
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    program,
                    f"--config.file={folder}/prometheus.yml",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address=127.0.0.1:{port}",
                    *flags,
                ],
                stdout=log,
                stderr=log,
            )
        server = PrometheusServer(f"http://127.0.0.1:{port}", process)
        started.append(server)
        deadline = time.monotonic() + 30
        while True:
            try:
                answer = requests.get(f"{server.url}/api/v1/query", params={"query": "up"}, timeout=1)
                if answer.status_code == 200 and len(answer.json()["data"]["result"]) == len(targets):
                    return server
            except requests.RequestException:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"prometheus did not start: {(folder / 'log').read_text()[-1000:]}")
            time.sleep(0.05)

    yield start
    for server in started:
        server.process.terminate()
        server.process.wait(20)
