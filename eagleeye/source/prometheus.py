"""A Prometheus server that scrapes the exporters. The only door to prometheus-api-client.

Raw samples are asked for, not `query_range`, which would move them onto a grid of its own and fill missed scrapes for five
minutes: missing data must stay missing. Short windows come as JSON by an instant query of a range (``{...}[5m]``); long
history by remote read, which costs the server a fifth of that. Of its two answers the plain SAMPLES are used: the chunked one is
twice as fast to receive, but needs a compiled decoder of Gorilla chunks.
"""

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import cramjam
import numpy as np
import requests
from prometheus_api_client import PrometheusConnect
from prometheus_api_client.exceptions import PrometheusApiClientException
from urllib3.util.retry import Retry

from eagleeye.clock import Clock
from eagleeye.errors import ConfigError, SourceUnavailable
from eagleeye.metrics import BY_SERIES, RANK_INFO
from eagleeye.source.base import SampleSource, Settings
from eagleeye.source.series import Block, Floats, block_up

A = TypeVar("A")
Series = tuple[str, Mapping[str, str], Floats, Floats]

_ATTEMPTS = 3
_BACK_OFF_S = 0.25
_RETRY_STATUS = (408, 429, 500, 502, 503, 504)
_STALE = np.uint64(0x7FF0000000000002)
"""The NaN by which Prometheus writes down that a series ended."""
_NAMES = tuple(name for name in (RANK_INFO.series, *BY_SERIES) if name)


class PrometheusSource(SampleSource):
    """Windows from a Prometheus server; `settings.interval_s` is its scrape interval."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        super().__init__(settings)
        if not re.match(r"https?://[^/]", settings.prometheus):
            raise ConfigError(f"[source] prometheus: {settings.prometheus!r} is no URL; write for example http://HOST:9090")
        self._clock = clock
        self._url = settings.prometheus.rstrip("/")
        self._timeout_s = settings.query_timeout_s
        self._session = requests.Session()
        self._client = PrometheusConnect(self._url, session=self._session, timeout=self._timeout_s, retry=Retry(0), method="POST")

    def scrape(self, now_s: float) -> None:
        """Nothing to do: the server scrapes."""

    def failures(self) -> Mapping[str, str]:
        """Empty: what the server could not scrape shows as missing data."""
        return {}

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def jobs(self, now_s: float) -> tuple[str, ...]:
        """See `Source.jobs`."""
        query = f"group by (training_job) (last_over_time({RANK_INFO.series}[{_range(self._settings.forget_s)}]))"
        return tuple(sorted({job for s in self._ask(query, now_s) if (job := s["metric"].get("training_job"))}))

    def _recent(self, start_s: float, end_s: float, job: str) -> Sequence[Block]:
        span = _range(end_s - start_s)
        ranks = self._samples(f"{RANK_INFO.series}{{training_job={json.dumps(job, ensure_ascii=False)}}}[{span}]", end_s)
        nodes = sorted({re.escape(node) for s in ranks if (node := s[1].get("node"))})
        if not nodes:  # the other jobs, so that the error can name them
            return block_up(self._samples(f"{RANK_INFO.series}[{span}]", end_s))
        where = json.dumps("|".join(nodes), ensure_ascii=False)
        names = "|".join(BY_SERIES)
        return block_up(ranks + self._samples(f'{{__name__=~"{names}",node=~{where}}}[{span}]', end_s))

    def _stored(self, start_s: float, end_s: float) -> Sequence[Block]:
        present = self._try(lambda: self._client.get_label_values("__name__"))
        found: list[Series] = []
        for name in _NAMES:
            if name in present:
                found += self._try(lambda name=name: self._remote_read(name, start_s, end_s))  # type: ignore[misc]
        return block_up(found)

    def _samples(self, query: str, at_s: float) -> list[Series]:
        found: list[Series] = []
        for series in self._ask(query, at_s):
            labels = dict(series["metric"])
            pairs_N2 = np.array([(at, float(value)) for at, value in series["values"]], dtype=np.float64)
            found.append((labels.pop("__name__", ""), labels, pairs_N2[:, 0].copy(), pairs_N2[:, 1].copy()))
        return found

    def _ask(self, query: str, at_s: float) -> list[dict[str, Any]]:
        def once() -> list[dict[str, Any]]:
            answer = self._client.custom_query(query, params={"time": f"{at_s:.3f}"})
            if not isinstance(answer, list) or not all(isinstance(s, dict) and "metric" in s for s in answer):
                raise ValueError("its answer is no list of series")
            return answer

        return self._try(once)

    def _try(self, once: Callable[[], A]) -> A:
        """Return what `once` returns; repeat it a few times while repetition may help."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return once()
            except PrometheusApiClientException as error:
                status, said = _refusal(str(error))
                problem = f"answered {status}: {said}"
                lasting = status not in _RETRY_STATUS
            except requests.Timeout:
                problem, lasting = f"did not answer within {self._timeout_s:g} s", False
            except requests.exceptions.JSONDecodeError:
                problem, lasting = "answered something else than JSON, or half of it; is this the address of a Prometheus?", False
            except requests.RequestException as error:
                problem, lasting = f"cannot be read: {_root(error)}", False
            except (ValueError, KeyError, TypeError, IndexError, struct.error) as error:
                problem, lasting = f"answered nonsense ({str(error) or type(error).__name__})", False
            if lasting or attempt == _ATTEMPTS:
                break
            self._clock.sleep_s(_BACK_OFF_S * 2 ** (attempt - 1))
        raise SourceUnavailable(f"Prometheus at {self._url} {problem}")

    def _remote_read(self, name: str, start_s: float, end_s: float) -> list[Series]:
        response = self._session.post(
            f"{self._url}/api/v1/read",
            data=bytes(cramjam.snappy.compress_raw(_read_request(name, start_s, end_s))),
            headers={
                "Content-Encoding": "snappy",
                "Content-Type": "application/x-protobuf",
                "X-Prometheus-Remote-Read-Version": "0.1.0",
            },
            timeout=self._timeout_s,
        )
        if response.status_code != 200:
            raise PrometheusApiClientException(f"HTTP Status Code {response.status_code} ({response.content!r})")
        try:
            body = bytes(cramjam.snappy.decompress_raw(response.content))
        except cramjam.DecompressionError:
            raise ValueError("its answer to a remote read is not compressed by snappy, or cut off") from None
        return list(_read_response(body))


def _range(span_s: float) -> str:
    return f"{max(1, round(span_s * 1000))}ms"


def _refusal(text: str) -> tuple[int, str]:
    """Return the status and, in one line, what the server gave as its reason."""
    match = re.match(r"HTTP Status Code (\d+) \(b?['\"](.*)['\"]\)$", text, re.DOTALL)
    if not match:
        return 0, text.splitlines()[0][:200] if text else "nothing"
    body = match.group(2)
    reason = re.search(r'"error":\s*"((?:[^"\\]|\\.)*)"', body)
    said = reason.group(1) if reason else " ".join(re.sub(r"<[^>]*>|\\[nrt]", " ", body).split())
    return int(match.group(1)), said[:200] or "no reason given"


def _root(error: BaseException) -> str:
    """Return the innermost cause, which is what a person can act on."""
    reason = getattr(error.args[0], "reason", None) if error.args else None
    text = str(reason or error)
    return text.rpartition("> ")[2].rpartition("): ")[2] or text


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _field(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _read_request(name: str, start_s: float, end_s: float) -> bytes:
    """Return a prompb.ReadRequest of one query: all series of one name."""
    matcher = _field(2, b"__name__") + _field(3, name.encode())
    times = b"\x08" + _varint(round(start_s * 1000)) + b"\x10" + _varint(round(end_s * 1000))
    return _field(1, times + _field(3, matcher))


def _fields(data: bytes, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (field number, start, stop) of the length-delimited fields of a message, and skip others."""
    while start < stop:
        tag, start = _read_varint(data, start)
        if tag & 7 == 2:
            length, start = _read_varint(data, start)
            if start + length > stop:
                raise ValueError("its answer to a remote read is cut off")
            yield tag >> 3, start, start + length
            start += length
        elif tag & 7 == 0:
            _, start = _read_varint(data, start)
        elif tag & 7 == 1:
            start += 8
        else:
            raise ValueError("its answer to a remote read is no protobuf")


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return number, at
        shift += 7


def _read_response(data: bytes) -> Iterator[Series]:
    """Yield the series of a prompb.ReadResponse."""
    for number, start, stop in _fields(data, 0, len(data)):
        if number == 1:
            for inner, a, b in _fields(data, start, stop):
                if inner == 1:
                    yield _time_series(data, a, b)


def _time_series(data: bytes, start: int, stop: int) -> Series:
    labels: dict[str, str] = {}
    first = stop
    for number, a, b in _fields(data, start, stop):
        if number == 2:
            first = a - 2  # tag and length, one byte each; all that follows are samples
            break
        if number == 1:
            parts = {inner: data[x:y].decode() for inner, x, y in _fields(data, a, b)}
            labels[parts[1]] = parts.get(2, "")
    at_N, values_N = _decoded(data[first:stop])
    real_N = values_N.view(np.uint64) != _STALE  # queries leave these markers out, too
    return labels.pop("__name__"), labels, at_N[real_N], values_N[real_N]


def _decoded(data: bytes) -> tuple[Floats, Floats]:
    """Return times (s) and values of prompb.Sample fields: tag, length, then 0x09 + double, unless zero, and 0x10 + varint (ms).

    The varint of a time takes six bytes from 1971 to 2109, so a field takes 18 bytes, or 9 where the value is zero. Only where
    both occur must the fields be walked through one by one.
    """
    octets = np.frombuffer(data, dtype=np.uint8)
    starts = np.empty(0, dtype=np.intp)
    for size in (18, 9):
        if data and len(data) % size == 0:
            cells = octets.reshape(-1, size)
            if ((cells[:, 0] == 0x12) & (cells[:, 1] == size - 2) & (cells[:, size - 7] == 0x10)).all():
                starts = np.arange(0, len(data), size)
                break
    else:
        walked, at = [], 0
        while at < len(data) - 1:
            walked.append(at)
            at += 2 + data[at + 1]
        if at != len(data):
            raise ValueError("its answer to a remote read is cut off")
        starts = np.array(walked, dtype=np.intp)
    sizes, ends = octets[starts + 1], starts + 2 + octets[starts + 1]
    if not ((octets[starts] == 0x12) & ((sizes == 16) | (sizes == 7)) & (octets[ends - 7] == 0x10)).all():
        raise ValueError("its answer to a remote read holds something else than samples")
    digits = (octets[ends[:, None] + np.arange(-6, 0)] & 0x7F).astype(np.int64)
    at_ms = (digits << np.arange(0, 42, 7)).sum(axis=1)
    values = np.zeros(starts.size)
    full = sizes == 16
    values[full] = octets[starts[full, None] + np.arange(3, 11)].view("<f8")[:, 0]
    return at_ms / 1000.0, values
