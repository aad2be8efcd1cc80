"""One leader at a time, another one soon after it dies, and none that writes after it slept."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from remediation.launcher.election import Changes, Election, look
from remediation.launcher.store import FolderStore


def test_how_long_a_version_stands_still() -> None:
    changes = Changes()
    assert changes.age_s("a", 7, 100.0) == 0
    assert changes.age_s("a", 7, 103.0) == 3
    assert changes.age_s("a", 6, 104.0) == 0
    assert changes.age_s("b", 6, 104.0) == 0


def test_the_first_leads_and_the_others_wait_for_it_to_fall_silent(tmp_path: Path) -> None:
    a, b, c = (Election(FolderStore(tmp_path), name, 3.0) for name in "abc")
    assert (a.step(10.0), b.step(1000.0), c.step(5.0)) == (1, 0, 0)  # nobody's clock is like another's
    for elapsed_s in (1.0, 2.0, 3.0, 4.0, 5.0):
        assert (a.step(10 + elapsed_s), b.step(1000 + elapsed_s), c.step(5 + elapsed_s)) == (1, 0, 0)
    assert b.step(1008.0) == 0  # three seconds of silence are not more than three
    assert c.step(12.9) == 0
    assert b.step(1008.1) == 2
    assert c.step(13.1) == 0
    assert a.step(18.2) == 0, "its lease is over by its own clock, whatever the others did"
    assert look(FolderStore(tmp_path))[1].holder == "b"


def test_a_leader_does_not_trust_a_lease_that_it_did_not_renew_in_time(tmp_path: Path) -> None:
    a = Election(FolderStore(tmp_path), "a", 3.0)
    assert [a.step(at_s) for at_s in (0.0, 2.9, 6.0, 9.0, 9.1)] == [1, 1, 0, 0, 2]


def test_a_lease_given_back_is_free_at_once(tmp_path: Path) -> None:
    a, b = (Election(FolderStore(tmp_path), name, 3.0) for name in "ab")
    assert (a.step(0.0), b.step(0.0)) == (1, 0)
    b.release()
    assert b.step(0.1) == 0, "only the holder can give it back"
    a.release()
    assert (b.step(0.2), a.step(0.2)) == (2, 0)


LEADER = """
import sys, time
from pathlib import Path
from remediation.launcher.election import Election
from remediation.launcher.store import FolderStore
store = FolderStore(Path(sys.argv[1]))
election, term, said = Election(store, sys.argv[2], 0.5), 0, 0
while True:
    version, job = store.get("job") or (0, {"term": 0, "n": 0})
    before, term = term, election.step(time.monotonic())
    if term and job["term"] <= term and not store.put("job", {"term": term, "n": job["n"] + 1}, version):
        print("refused", flush=True)
    if term != before:
        print(f"term {term}", flush=True)
    time.sleep(0.002)
"""


def test_a_leader_that_was_stopped_cannot_write(tmp_path: Path) -> None:
    """The same order as in the launcher: it looks, makes sure that it leads, writes; and is stopped anywhere in between."""
    store = FolderStore(tmp_path / "j")
    processes = {
        name: subprocess.Popen([sys.executable, "-c", LEADER, str(tmp_path / "j"), name], stdout=subprocess.PIPE, text=True)
        for name in "ab"
    }
    terms = []
    try:
        for _ in range(4):
            end_s = time.monotonic() + 10
            while (leader := look(store)[1].holder) == "" or (store.get("job") or (0, {"term": 0}))[1]["term"] in (0, *terms):
                assert time.monotonic() < end_s, "nobody leads"
                time.sleep(0.01)
            terms.append(look(store)[1].term)
            os.kill(processes[leader].pid, signal.SIGSTOP)
            while look(store)[1].holder == leader or (store.get("job") or (0, {}))[1]["term"] == terms[-1]:
                assert time.monotonic() < end_s, "nobody took over"
                time.sleep(0.01)
            os.kill(processes[leader].pid, signal.SIGCONT)
            seen = [(store.get("job") or (0, {}))[1]["term"] for _ in range(200) if not time.sleep(0.001)]
            assert terms[-1] not in seen, "the old leader wrote"
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    assert terms == sorted(set(terms))
