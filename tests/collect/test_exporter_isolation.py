"""The page goes out whatever a collector does, and the process behaves at its start and its end."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from eagleeye.collect.base import Settings
from eagleeye.collect.exporter import Exporter
from eagleeye.errors import EnvironmentLacks, NoData
from eagleeye.records import Sample


class Fake:
    """A collector that does what its function says."""

    def __init__(self, name: str, work) -> None:
        self.name = name
        self.work = work
        self.calls = 0

    def supported(self) -> bool:
        return True

    def collect(self, now_s: float) -> Iterable[Sample]:
        self.calls += 1
        return self.work()


def good() -> list[Sample]:
    return [Sample("eagleeye_network_tcp_retransmits_total", {}, 7.0)]


def raises(error: Exception):
    def work() -> list[Sample]:
        raise error

    return work


@contextlib.contextmanager
def serving(bench, *collectors: Fake, **settings: object) -> Iterator[Exporter]:
    site = bench.site(address="127.0.0.1", port=0, **settings)
    exporter = Exporter(site.settings, collectors, site)
    try:
        yield exporter
    finally:
        exporter.close()


def page(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def health(found: dict[str, float], collector: str) -> dict[str, float]:
    pattern = re.compile(rf'eagleeye_exporter_collector_(\w+)\{{collector="{collector}"\}}')
    return {m.group(1): value for name, value in found.items() if (m := pattern.fullmatch(name))}


GOOD = 'eagleeye_network_tcp_retransmits_total{node="n1"}'


def test_health_of_a_good_collector(bench) -> None:
    with serving(bench, Fake("fine", good)) as exporter:
        found = page(exporter.port)
    said = health(found, "fine")
    assert (said["present"], said["success"]) == (1.0, 1.0)
    assert 0 < said["duration_seconds"] < 1
    assert abs(said["last_success_timestamp_seconds"] - time.time()) < 5
    assert found['eagleeye_exporter_info{node="n1",version="0.1.0"}'] == 1.0
    assert found[GOOD] == 7.0


@pytest.mark.parametrize(
    "work",
    [
        raises(RuntimeError("bug")),
        raises(OSError("gone")),
        lambda: [Sample("eagleeye_no_such_series", {}, 1.0)],
        lambda: [Sample("eagleeye_network_up", {}, 1.0)],
        lambda: [Sample("eagleeye_network_up", {"device": "a", "more": "b"}, 1.0)],
        lambda: [Sample("eagleeye_network_up", {"device": "a"}, 1.0)] * 2,
        lambda: (1 / 0 for _ in range(3)),
        lambda: None,
    ],
)
def test_a_broken_collector_loses_only_itself(bench, work, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(bench, Fake("broken", work), Fake("fine", good)) as exporter:
        for _ in range(2):
            found = page(exporter.port)
            assert found[GOOD] == 7.0
            assert health(found, "fine")["success"] == 1.0
            assert health(found, "broken")["success"] == 0.0
            assert "last_success_timestamp_seconds" not in health(found, "broken")
    assert capfd.readouterr().err.count("collector broken: ") == 1


def test_no_data_is_no_failure(bench) -> None:
    with serving(bench, Fake("absent", raises(NoData("nothing here")))) as exporter:
        said = health(page(exporter.port), "absent")
    assert said["present"] == 0.0
    assert "success" not in said


def test_values_that_are_not_finite_are_left_out(bench) -> None:
    work = lambda: [Sample("eagleeye_network_up", {"device": d}, v) for d, v in (("a", 1.0), ("b", float("nan")))]  # noqa: E731
    with serving(bench, Fake("some", work)) as exporter:
        found = page(exporter.port)
    assert found['eagleeye_network_up{device="a",node="n1"}'] == 1.0
    assert 'eagleeye_network_up{device="b",node="n1"}' not in found


def test_a_hanging_collector_delays_one_page_and_recovers(bench, capfd: pytest.CaptureFixture[str]) -> None:
    release = threading.Event()
    hanging = Fake("hanging", lambda: release.wait(20) and good()[:0])
    with serving(bench, hanging, Fake("fine", good), deadline_s=0.3) as exporter:
        for longest_s in (0.8, 0.25, 0.25):
            began = time.monotonic()
            found = page(exporter.port)
            assert time.monotonic() - began < longest_s
            assert found[GOOD] == 7.0
            assert health(found, "hanging")["success"] == 0.0
        assert hanging.calls == 1
        assert health(found, "hanging")["duration_seconds"] >= 0.3
        release.set()
        time.sleep(0.1)
        assert health(page(exporter.port), "hanging")["success"] == 1.0
        assert hanging.calls == 2
    errors = capfd.readouterr().err.splitlines()
    assert [line.split(" since")[0] for line in errors] == ["collector hanging: it hangs", "collector hanging: works again"]


def test_absent_everything(bench, tmp_path: Path) -> None:
    site = bench.site(
        address="127.0.0.1", port=0, proc_root=str(tmp_path / "no"), sys_root=str(tmp_path / "no"), run_dir="/no/run"
    )
    exporter = Exporter(site.settings, site=site)
    try:
        found = page(exporter.port)
    finally:
        exporter.close()
    assert {name.partition("{")[0] for name in found} == {
        "eagleeye_exporter_info",
        "eagleeye_exporter_collector_present",
        "eagleeye_exporter_collector_duration_seconds",
    }
    assert {v for name, v in found.items() if "present" in name} == {0.0}


def test_pages_asked_for_at_once_are_whole(bench) -> None:
    found: list[dict[str, float]] = []
    with serving(bench, Fake("fine", good)) as exporter:
        threads = [threading.Thread(target=lambda: found.append(page(exporter.port))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [f[GOOD] for f in found] == [7.0] * 8


def test_port_in_use(bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        site = bench.site(address="127.0.0.1", port=taken.getsockname()[1])
        with pytest.raises(EnvironmentLacks, match=r"cannot serve on 127.0.0.1:\d+: .*in use.*--port"):
            Exporter(site.settings, [], site)


def test_address_of_somebody_else(bench) -> None:
    site = bench.site(address="192.0.2.7", port=0)
    with pytest.raises(EnvironmentLacks, match=r"cannot serve on 192.0.2.7"):
        Exporter(site.settings, [], site)


@pytest.mark.parametrize(
    "settings", [{"port": 70000}, {"port": -1}, {"step_pattern": "step ("}, {"step_pattern": "step"}, {"step_pattern": "(a)(b)"}]
)
def test_impossible_settings(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"does not exist|no regular expression|exactly one group"):
        Settings(**settings)  # type: ignore[arg-type]


def export(*flags: str, **environ: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [str(Path(sys.executable).with_name("eagleeye")), "export", "--address", "127.0.0.1", *flags],
        env={"PATH": os.environ["PATH"], **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_program_cleanly(number: signal.Signals, tmp_path: Path) -> None:
    process = export("--port", "0", "--run-dir", str(tmp_path), EAGLEEYE_NODE="n7")
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.fullmatch(r"node n7: http://127.0.0.1:(\d+)/metrics\n", line)
    assert match, line
    assert 'eagleeye_exporter_info{node="n7",version="0.1.0"}' in page(int(match.group(1)))
    process.send_signal(number)
    output, errors = process.communicate(timeout=10)
    assert (process.returncode, output, errors) == (0, "", "")


@pytest.mark.parametrize(
    ("flags", "code", "sentence"),
    [
        (["--port", "70000"], 2, "port 70000 does not exist"),
        (["--collectors", "nvml,nonsense"], 2, "no collector is called 'nonsense'"),
        (["--address", "192.0.2.7", "--port", "0"], 3, "cannot serve on 192.0.2.7:0"),
    ],
)
def test_a_mistake_is_one_sentence(flags: list[str], code: int, sentence: str) -> None:
    process = export(*flags)
    output, errors = process.communicate(timeout=10)
    assert process.returncode == code
    assert output == ""
    assert sentence in errors
    assert len(errors.splitlines()) == 1
