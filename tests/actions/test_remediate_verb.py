"""`eagleeye remediate` as a process of its own against a real service: what it prints and writes down."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagleeye import plugins
from eagleeye.actions.journal import Journal
from eagleeye.actions.scorer_client import incidents
from eagleeye.clock import ManualClock
from eagleeye.errors import SourceUnavailable
from eagleeye.online.judge import Settings
from eagleeye.online.scorer import Scorer
from eagleeye.online.service import serve
from eagleeye.records import IncidentState, Result
from eagleeye.window import Window

NOW_S = 1_770_000_000.0
OBSERVES = "observe only: nothing is touched\n"


class BrokenNode:
    """A source of one job whose node n2 logs broken hardware: a fact that needs no learning."""

    step_s = 5.0

    def scrape(self, now_s: float) -> None:
        """Nothing to do."""

    def failures(self) -> Mapping[str, str]:
        return {}

    def jobs(self, now_s: float) -> tuple[str, ...]:
        return ("llm",)

    def window(self, job: str, end_s: float, length_s: float) -> Window:
        nodes = tuple(f"n{r}" for r in range(4))
        values_RMT = np.zeros((4, 2, 4), np.float32)
        values_RMT[:, 0] = 0.9
        values_RMT[2, 1] = 1
        metrics = ("gpu_utilization_ratio", "log_hardware_errors")
        return Window(job, (0, 1, 2, 3), nodes, ("all",) * 4, metrics, end_s, self.step_s, values_RMT)

    def history(self, start_s: float, end_s: float, length_s: float, progress: object = None) -> Iterator[Window]:
        yield from ()

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture(scope="module")
def scorer() -> Iterator[tuple[Scorer, str]]:
    """A scorer with one open incident, after two ticks, and its address."""
    made = Scorer(Settings(), BrokenNode(), ManualClock(NOW_S))
    server = serve(made, "127.0.0.1", 0)
    made.tick(NOW_S)
    made.tick(NOW_S + 5)
    yield made, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def command(folder: Path, *options: str) -> tuple[list[str], dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EAGLEEYE_")}
    code = "import sys; from eagleeye.cli import main; sys.exit(main())"
    return [sys.executable, "-c", code, "remediate", *options], {
        "cwd": folder,
        "env": environment,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the verb in an empty folder: (exit code, stdout, stderr)."""

    def call(*options: str) -> tuple[int, str, str]:
        arguments, rest = command(tmp_path, *options)
        done = subprocess.run(arguments, timeout=60, check=False, **rest)
        return done.returncode, done.stdout, done.stderr

    return call


def test_once(run: Callable[..., tuple[int, str, str]], scorer: tuple[Scorer, str], tmp_path: Path) -> None:
    made, url = scorer
    (incident,) = made.snapshot.incidents
    status, out, errors = run("--once", "--scorer", url)
    assert (status, errors) == (0, f"{OBSERVES}open incidents: 1\n")
    reason = "the log of n2 reports broken hardware (a fatal Xid or an uncorrectable error)"
    assert out.splitlines() == [
        f"incident {incident.id} of job llm: {reason}",
        "  observed: would tell the owner of job llm",
        "  observed: would keep new work away from node n2",
        "  observed: would take node n2 out of the job",
        "  observed: would restart job llm on the remaining nodes",
    ]
    journal = Journal(tmp_path / "eagleeye-data" / "journal.db")
    (plan,) = journal.plans(acted=False)
    assert journal.plans(acted=True) == []
    assert (plan.incident_id, plan.job, plan.reason) == (incident.id, "llm", reason)
    assert [(a.kind.value, a.target) for a in plan.actions] == [
        ("notify", "llm"), ("cordon", "n2"), ("evict", "n2"), ("restart", "llm"),
    ]  # fmt: skip
    assert [o.operation_id for o in journal.outcomes()] == [
        f"{incident.id}-{step}" for step in ("notify-llm", "cordon-n2", "evict-n2", "restart-llm")
    ]
    assert {o.result for o in journal.outcomes()} == {Result.OBSERVED}
    journal.close()
    assert run("--once", "--scorer", url) == (0, "", f"{OBSERVES}open incidents: 1\n")


def test_a_journal_elsewhere(run: Callable[..., tuple[int, str, str]], scorer: tuple[Scorer, str], tmp_path: Path) -> None:
    assert run("--once", "--scorer", scorer[1], "--journal", "j.db")[0] == 0
    assert (tmp_path / "j.db").exists()
    assert not (tmp_path / "eagleeye-data").exists()
    (tmp_path / "notes").write_text("Dear diary, " * 100)
    status, out, errors = run("--once", "--scorer", scorer[1], "--journal", "notes")
    assert (status, out) == (3, "")
    assert errors.startswith("eagleeye remediate: cannot use the journal notes: file is not a database; ")


def test_the_policy_can_be_set(run: Callable[..., tuple[int, str, str]], scorer: tuple[Scorer, str], tmp_path: Path) -> None:
    (tmp_path / "eagleeye.toml").write_text("[actions]\nmin_verdicts = 3\n")
    assert run("--once", "--scorer", scorer[1]) == (0, "", f"{OBSERVES}open incidents: 1\n")
    (tmp_path / "eagleeye.toml").write_text("[actions]\nbackend = 'ouija'\n")
    status, _, errors = run("--once", "--scorer", scorer[1])
    assert (status, errors) == (
        2,
        f"eagleeye remediate: no backend is called 'ouija'; there are {', '.join(plugins.names('backend'))}\n",
    )


PLUG_IN = """
import signal
from dataclasses import dataclass
from pathlib import Path
from eagleeye.errors import PermanentError
from eagleeye.records import JobView, Result

@dataclass(frozen=True)
class Settings:
    rendezvous: str = "meeting"

class East:
    name = "east"

    def __init__(self, settings):
        self._effects = Path(settings.rendezvous) / "effects"

    def observe(self, job):
        if not self._effects.parent.is_dir():
            raise PermanentError(f"there is no job {job} in {self._effects.parent}")
        out = "evict n2" in self._known()
        nodes = ("n0", "n1", "n3", "n4") if out else ("n0", "n1", "n2", "n3")
        return JobView(job, nodes, () if out else ("n4",), ("n2",) if out else (), 4, 1.0)

    def watch(self, job):
        pass

    def _known(self):
        return self._effects.read_text().splitlines() if self._effects.exists() else []

    def perform(self, operation_id, action, job, reason):
        line = f"{action.kind.value} {action.target}"
        if line not in self._known():
            with self._effects.open("a") as file:
                file.write(line + "\\n")
            if action.kind.value == "evict" and (self._effects.parent / "hang").exists():
                signal.pause()
        return Result.DONE, f"{line}, because {reason.partition(' of ')[0]}"
"""
ACTS = "ACTING through backend east: at most 1 node at a time, never below the job's minimum\n"
EFFECTS = ["notify llm", "cordon n2", "evict n2", "restart llm"]


@pytest.fixture
def east(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the backend `east` for the verb's processes; return the folder that it needs to see the job."""
    site = tmp_path / "site"
    info = site / "east_wing-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: east-wing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[eagleeye.backend]\neast = east_wing:East\n")
    (site / "east_wing.py").write_text(PLUG_IN)
    monkeypatch.setenv("PYTHONPATH", str(site))
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    return meeting


def test_acting(run: Callable[..., tuple[int, str, str]], scorer: tuple[Scorer, str], east: Path) -> None:
    """Observed first, then acted on; the folder comes from the backend's own section or the flag."""
    made, url = scorer
    (incident,) = made.snapshot.incidents
    status, out, errors = run("--once", "--scorer", url, "--backend", "east")
    assert (status, errors) == (0, f"{OBSERVES}open incidents: 1\n")
    assert [line.partition(":")[0] for line in out.splitlines()[1:]] == ["  observed"] * 4
    assert list(east.iterdir()) == []
    status, out, errors = run("--once", "--scorer", url, "--backend", "east", "--act")
    assert (status, errors) == (0, f"{ACTS}open incidents: 1\n")
    assert out.splitlines() == [
        f"incident {incident.id} of job llm: {incident.reason}",
        *(f"  done: {effect}, because the log" for effect in EFFECTS),
    ]
    assert (east / "effects").read_text().splitlines() == EFFECTS
    assert run("--once", "--scorer", url, "--backend", "east", "--act") == (0, "", f"{ACTS}open incidents: 1\n")
    assert run("--once", "--scorer", url, "--backend", "east") == (0, "", f"{OBSERVES}open incidents: 1\n")


def test_a_backend_has_settings_of_its_own(
    run: Callable[..., tuple[int, str, str]], scorer: tuple[Scorer, str], east: Path, tmp_path: Path
) -> None:
    (tmp_path / "eagleeye.toml").write_text("[actions]\nbackend = 'east'\n[remediation.east]\nrendezvous = 'nowhere'\n")
    status, out, _ = run("--once", "--scorer", scorer[1], "--act")
    assert status == 0
    assert out.endswith("nothing is planned, for the job cannot be looked at: there is no job llm in nowhere\n")
    status, out, _ = run("--once", "--scorer", scorer[1], "--act", "--rendezvous", "meeting")
    assert (status, len(out.splitlines())) == (0, 5)
    (tmp_path / "eagleeye.toml").write_text("[remediation.east]\nrendez = 'nowhere'\n")
    status, _, errors = run("--once", "--scorer", scorer[1], "--backend", "east")
    assert status == 2
    assert errors.startswith("eagleeye remediate: [remediation.east] rendez: unknown setting 'rendez'; did you mean 'rendezvous'")


@pytest.mark.parametrize("options", [(), ("--backend", "dryrun")])
def test_paper_cannot_act(run: Callable[..., tuple[int, str, str]], tmp_path: Path, options: tuple[str, ...]) -> None:
    sentence = "--act needs a backend that can act, and dryrun only writes down; choose one with --backend"
    assert run("--once", "--act", *options) == (2, "", f"eagleeye remediate: {sentence}\n")
    assert list(tmp_path.iterdir()) == []


def test_paper_has_no_rendezvous(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    assert run("--once", "--rendezvous", "x") == (2, "", "eagleeye remediate: backend dryrun knows no --rendezvous\n")
    assert list(tmp_path.iterdir()) == []


def test_a_remediator_that_is_killed_at_work_and_its_scorer_with_it(
    run: Callable[..., tuple[int, str, str]], scorer: tuple[Scorer, str], east: Path, tmp_path: Path
) -> None:
    """A second one is refused while it hangs; after SIGKILL the next finishes the plan though no scorer answers, once."""
    (east / "hang").write_text("")
    acting = ("--backend", "east", "--act")
    arguments, rest = command(tmp_path, "--scorer", scorer[1], *acting)
    process = subprocess.Popen(arguments, **rest)
    assert process.stdout is not None
    told = [process.stdout.readline() for _ in range(3)]
    assert told[-1].startswith("  done: cordon n2")
    deadline_s = time.monotonic() + 30
    while (east / "effects").read_text().splitlines() != EFFECTS[:3]:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    status, out, errors = run("--once", "--scorer", scorer[1], *acting)
    assert (status, out) == (3, "")
    assert errors == (
        f"eagleeye remediate: another `eagleeye remediate --act` (pid {process.pid}) already uses the journal "
        "eagleeye-data/journal.db; one is enough\n"
    )
    assert run("--once", "--scorer", scorer[1])[0] == 0, "but one may watch"
    process.kill()
    process.communicate()
    (east / "hang").unlink()
    status, out, errors = run("--once", "--scorer", f"http://127.0.0.1:{free_port()}", *acting)
    assert status == 3
    assert "does not answer" in errors
    assert out.splitlines() == [
        told[0].rstrip("\n"),
        "  again: evict n2 was begun before and its end is not known",
        "  done: evict n2, because the log (repeated after an interruption)",
        "  done: restart llm, because the log",
    ]
    assert (east / "effects").read_text().splitlines() == EFFECTS


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_a_dead_scorer(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    status, out, errors = run("--once", "--scorer", url)
    assert (status, out) == (3, "")
    assert errors == (
        f"{OBSERVES}eagleeye remediate: the scorer at {url}/api/v1/incidents does not answer ([Errno 111] Connection refused); "
        "is `eagleeye score` running there?\n"
    )


def test_it_waits_for_a_scorer_and_ends_when_told(scorer: tuple[Scorer, str], tmp_path: Path) -> None:
    """A scorer that is away is mentioned once; SIGTERM ends the wait at once."""
    arguments, rest = command(tmp_path, "--scorer", f"http://127.0.0.1:{free_port()}", "--interval", "100ms")
    process = subprocess.Popen(arguments, **rest)
    assert process.stderr is not None
    assert process.stderr.readline() == OBSERVES
    assert "does not answer" in process.stderr.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=10)
    assert (process.returncode, out, errors) == (0, "", "")


def fixed(port: int, body: bytes) -> HTTPServer:
    """Start a server that gives one answer to everything; `answered` is set after the first."""

    class Fixed(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)
            server.answered.set()  # type: ignore[attr-defined]

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", port), Fixed)
    server.answered = threading.Event()  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


def test_each_silence_of_the_scorer_is_mentioned(tmp_path: Path) -> None:
    port = free_port()
    arguments, rest = command(tmp_path, "--scorer", f"http://127.0.0.1:{port}", "--interval", "50ms")
    process = subprocess.Popen(arguments, **rest)
    assert process.stderr is not None
    assert process.stderr.readline() == OBSERVES
    assert "does not answer" in process.stderr.readline()
    server = fixed(port, b'{"incidents": []}')
    assert server.answered.wait(10)  # type: ignore[attr-defined]
    time.sleep(0.2)
    server.shutdown()
    server.server_close()
    assert "does not answer" in process.stderr.readline()
    process.terminate()
    assert process.communicate(timeout=10) == ("", "")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"<html>hello</html>", "does not answer"),
        (b"{}", "answers, but not with incidents ('incidents'); is it the service of `eagleeye score`"),
        (b"[]", "answers, but not with incidents"),
        (b'{"incidents": 5}', "answers, but not with incidents"),
        (b'{"incidents": [{"id": "a1"}]}', "answers, but not with incidents (Incident: field "),
        (b'{"incidents": null}', "answers, but not with incidents"),
        (b"\xff\xfe\xfd", "does not answer"),
        (b"", "does not answer"),
        (b"null", "answers, but not with incidents"),
    ],
)
def test_answers_that_are_no_incidents(body: bytes, sentence: str) -> None:
    server = fixed(0, body)
    try:
        with pytest.raises(SourceUnavailable) as raised:
            incidents(f"http://127.0.0.1:{server.server_port}/")
        assert sentence in str(raised.value)
        assert f"http://127.0.0.1:{server.server_port}/api/v1/incidents" in str(raised.value)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("url", ["nonsense", "127.0.0.1:9471", "ftp://127.0.0.1", "http://", "http://[::1"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(SourceUnavailable):
        incidents(url)


def test_incidents_arrive_as_they_are(scorer: tuple[Scorer, str]) -> None:
    made, url = scorer
    assert tuple(incidents(url)) == made.snapshot.incidents
    assert made.snapshot.incidents[0].state is IncidentState.OPEN


def test_what_is_no_address_of_a_scorer(run: Callable[..., tuple[int, str, str]]) -> None:
    status, _, errors = run("--once", "--scorer", "nonsense")
    sentence = "'nonsense' is no address of a scorer; write for example http://127.0.0.1:9471"
    assert (status, errors) == (2, f"eagleeye remediate: {sentence}\n")
