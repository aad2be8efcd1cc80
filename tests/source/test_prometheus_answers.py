"""Servers that misbehave where a Prometheus should be, and the decoding of what it sends."""

import struct
import time

import cramjam
import numpy as np
import pytest

from eagleeye.clock import ManualClock
from eagleeye.errors import SourceUnavailable
from eagleeye.source import prometheus as module
from eagleeye.source.base import Settings, open_source


def source_at(address: str, **more: float):
    return open_source(Settings(prometheus=f"http://{address}", **more), ManualClock())


@pytest.mark.parametrize(
    ("status", "body", "length", "words", "attempts"),
    [
        ("503 Service Unavailable", b"Service Unavailable", None, "answered 503: Service Unavailable", 3),
        ("502 Bad Gateway", b"<html><h1>Bad\n Gateway</h1></html>", None, "answered 502: Bad Gateway", 3),
        ("200 OK", b'{"status":"success","data":{"resu', 400, "IncompleteRead|more expected|half", 3),
        ("200 OK", b'{"status":"success","data":{"resu', None, "something else than JSON, or half of it", 3),
        ("200 OK", b"<html>a router's log-in page</html>", None, "something else than JSON", 3),
        ("200 OK", b'{"hello": 1}', None, "nonsense", 3),
        ("200 OK", b'{"status":"success","data":{"result":[1, 2]}}', None, "nonsense", 3),
        (
            "400 Bad Request",
            b'{"status":"error","errorType":"bad_data","error":"exceeded maximum resolution of 11,000 points per timeseries."}',
            None,
            "answered 400: exceeded maximum resolution of 11,000 points per timeseries.",
            1,
        ),
    ],
)
def test_bad_answers_are_one_sentence_after_bounded_attempts(raw_server, http_answer, status, body, length, words, attempts):
    server = raw_server(http_answer(status, body, length))
    with pytest.raises(SourceUnavailable, match=words) as caught:
        source_at(server.address).jobs(1e9)
    assert "\n" not in str(caught.value)
    assert server.address in str(caught.value)
    assert server.requests == attempts


def test_a_server_that_hangs_and_one_that_recovers(raw_server, http_answer):
    hung = raw_server(None)
    began = time.monotonic()
    with pytest.raises(SourceUnavailable, match=r"did not answer within 0\.2 s"):
        source_at(hung.address, query_timeout_s=0.2).jobs(1e9)
    assert time.monotonic() - began < 2
    fine = b'{"status":"success","data":{"resultType":"vector","result":[{"metric":{"training_job":"llm"},"value":[1,"1"]}]}}'
    server = raw_server(http_answer("503 Busy", b""), http_answer("200 OK", fine))
    assert source_at(server.address).jobs(1e9) == ("llm",)
    assert server.requests == 2


def test_a_broken_answer_to_a_remote_read(raw_server, http_answer):
    names = http_answer("200 OK", b'{"status":"success","data":["eagleeye_rank_info"]}')
    for body in (
        b"no snappy",
        bytes(cramjam.snappy.compress_raw(b"\x0a\x7f\x0a\x02")),
        bytes(cramjam.snappy.compress_raw(b"\x0f")),
    ):
        server = raw_server(names, *[http_answer("200 OK", body)] * 3)
        with pytest.raises(SourceUnavailable, match=r"remote read|nonsense"):
            list(source_at(server.address).history(1e9, 1e9 + 60, 60))


@pytest.mark.parametrize("values", [[1.5, 2.5, -3.0], [0.0, 0.0], [0.0, 1.0, 0.0, 2.0], [float("nan"), 1e300], []])
def test_samples_of_remote_read_are_decoded(values):
    at_ms = [1_750_000_000_000 + 5000 * n for n in range(len(values))]
    data = b""
    for at, value in zip(at_ms, values, strict=True):
        sample = (b"\x09" + struct.pack("<d", value) if value else b"") + b"\x10" + module._varint(at)
        data += module._field(2, sample)
    at_N, values_N = module._decoded(data)
    np.testing.assert_array_equal(at_N, np.array(at_ms) / 1000)
    np.testing.assert_array_equal(values_N, values)
