"""Launchers and ranks as real processes: from the first round to the last, with everything that can end in between."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from eagleeye.errors import UsageError
from eagleeye.records import to_json
from remediation.launcher.agent import Settings, _Launcher, launch
from remediation.launcher.rounds import Agent, Phase, Request, State
from remediation.launcher.store import FolderStore

UNTIL_TOLD = """
import socket
if os.environ["RANK"] == "0":
    served = socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), reuse_port=False)
while not (folder / 'finish').exists(): time.sleep(0.02)
"""
FAILS_AT_5 = """
from eagleeye.collect import progress
progress.step(5)
(folder / f"at-5-{me}").touch()
while os.environ["RANK"] != "1" or len(list(folder.glob(f"at-5-round{round_}-*"))) < 3: time.sleep(0.01)
sys.exit(17)
"""
WITH_CHILD = """
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"child-of-{me}").write_text(f"{os.getpid()} ")
time.sleep(600)
"""


def child(fleet: Any, rank: int) -> int:
    """Return the process number of the child of a rank of the first round."""
    path = fleet.folder / f"child-of-round1-rank{rank}"
    fleet.wait_for(lambda: path.exists() and path.read_text().endswith(" "))
    return int(path.read_text())


def test_from_the_first_round_to_the_end(fleet: Any) -> None:
    fleet.start_all(UNTIL_TOLD, cache="10.0.0.1:9480")
    environs = [fleet.environ(1, rank) for rank in range(3)]
    assert [(e["EAGLEEYE_NODE"], e["RANK"], e["WORLD_SIZE"]) for e in environs] == [(f"node{r}", str(r), "3") for r in range(3)]
    assert len({(e["MASTER_ADDR"], e["MASTER_PORT"]) for e in environs}) == 1
    assert {len(e["EAGLEEYE_CHECKPOINT__PEERS"].split(",")) for e in environs} <= {3, 4}
    (fleet.folder / "finish").touch()
    assert fleet.codes("node0", "node1", "node2", "node3") == [0, 0, 0, 0]
    job = fleet.job()
    assert (job.phase, job.round, job.restarts) == (Phase.DONE, 1, ())
    assert fleet.log("node3").count("job j is done") == 1
    late = fleet.start("node1")
    assert late.wait(10) == 0
    assert "to run it again from its checkpoints, remove the folder" in fleet.log("node1")


def test_a_killed_rank_restarts_all_in_place_when_nobody_watches(fleet: Any) -> None:
    fleet.start_all()
    began_s = time.monotonic()
    os.kill(fleet.pid(1, 2), signal.SIGKILL)
    job = fleet.wait_for_round(2)
    assert time.monotonic() - began_s < 5
    assert (job.members, job.reason) == ({"node0": 0, "node1": 1, "node2": 2}, "rank 2 on node2 was killed by SIGKILL")
    assert not any(fleet.alive(fleet.pid(1, rank)) for rank in range(3))
    assert [fleet.environ(2, rank)["TORCHELASTIC_RESTART_COUNT"] for rank in range(3)] == ["1"] * 3


@pytest.mark.slow
def test_other_ranks_are_left_alone_while_a_verdict_is_waited_for(fleet: Any) -> None:
    fleet.start_all(verdict_wait_s=1.5)
    fleet.store.put("watcher", {"beat": 1}, 0)
    began_s = time.monotonic()
    os.kill(fleet.pid(1, 2), signal.SIGKILL)
    fleet.wait_for(lambda: fleet.agent("node2").state is State.FAILED)
    assert fleet.job().round == 1
    while time.monotonic() - began_s < 1.0:
        assert fleet.alive(fleet.pid(1, 0))
        time.sleep(0.05)
    fleet.wait_for_round(2)
    assert time.monotonic() - began_s > 1.5


def test_a_job_that_fails_at_the_same_step_again_and_again(fleet: Any) -> None:
    for n in range(3):
        fleet.start(f"node{n}", FAILS_AT_5, max_restarts=2)
    assert fleet.codes("node0", "node1", "node2", seconds=30.0) == [93, 93, 93]
    sentence = "job j is not started again: 2 restarts in a row got no further than step 5; last: rank 1 on node1 "
    sentence += "ended with exit code 17"
    assert [fleet.log(f"node{n}").count(sentence) for n in range(3)] == [1, 1, 1]
    assert [(r.round, r.step) for r in fleet.job().restarts] == [(1, 5), (2, 5), (3, 5)]
    assert "Traceback" not in fleet.log("node1")


@pytest.mark.slow
def test_a_killed_launcher_takes_its_ranks_along_and_the_spare_takes_over(fleet: Any) -> None:
    """The killed one is the leader: another one leads, and the book of the job goes on."""
    fleet.start_all(WITH_CHILD)
    fleet.wait_for(lambda: fleet.leader() != "" and fleet.job().term > 0)
    victim, term = fleet.leader(), fleet.job().term
    if victim == "node3":  # a spare may lead; then make another one lead
        fleet.launchers["node3"].kill()
        fleet.wait_for(lambda: fleet.job().term > term and fleet.leader() != "node3")
        victim, term = fleet.leader(), fleet.job().term
        fleet.start("node4", WITH_CHILD, spare=True)
        fleet.wait_for(lambda: "node4" in fleet.job().spares)
    rank = fleet.job().members[victim]
    pids = [fleet.pid(1, rank), child(fleet, rank)]
    fleet.launchers[victim].kill()
    fleet.wait_for(lambda: not any(fleet.alive(pid) for pid in pids), seconds=1.0)
    job = fleet.wait_for_round(2)
    assert job.term > term
    assert {r for n, r in job.members.items() if n in ("node3", "node4")} == {rank}
    assert victim not in job.excluded
    assert job.reason == f"the launcher of {victim} is silent"
    fleet.start(victim, WITH_CHILD)
    fleet.wait_for(lambda: victim in fleet.job().spares)
    assert fleet.job().round == 2, "it comes back as a spare, and nobody is disturbed"


@pytest.mark.slow
def test_a_leader_that_was_stopped_and_goes_on_changes_nothing(fleet: Any) -> None:
    fleet.start_all()
    fleet.wait_for(lambda: fleet.leader() != "" and fleet.job().term > 0)
    old, term = fleet.leader(), fleet.job().term
    os.kill(fleet.launchers[old].pid, signal.SIGSTOP)
    fleet.wait_for(lambda: fleet.job().term > term)
    if old != "node3":
        job = fleet.wait_for_round(2)
        assert old not in job.members
    before = fleet.job()
    os.kill(fleet.launchers[old].pid, signal.SIGCONT)
    fleet.wait_for(lambda: old in fleet.job().spares and old not in fleet.job().lost)
    after = fleet.job()
    assert (after.term, after.round, after.members) == (before.term, before.round, before.members)
    if old != "node3":
        rank = {"node0": 0, "node1": 1, "node2": 2}[old]
        fleet.wait_for(lambda: not fleet.alive(fleet.pid(1, rank)))


def leads_alone(folder: Path, **more: Any) -> tuple[_Launcher, FolderStore]:
    """A launcher that holds the lease and takes no turns by itself."""
    store = FolderStore(folder / "j")
    settings = Settings(job="j", rendezvous=str(folder), node="n1", nodes=2, address="127.0.0.1", **more)
    made = _Launcher(settings, ["true"], [], store, None)
    made._register()
    made._lead()
    assert made._term == 1
    return made, store


def test_a_leader_that_slept_after_it_made_sure_of_its_lease_changes_nothing(tmp_path: Path) -> None:
    leader, store = leads_alone(tmp_path)
    version, job = store.get("job") or (0, {})
    assert (version, job["term"]) == (1, 1)
    store.put("job", {**job, "term": 2}, version)
    store.put("requests/op", to_json(Request("cordon", "n1", "", 0)), 0)
    leader._lead()
    assert leader._term == 1, "its lease holds, as far as it knows"
    assert (store.get("job") or (0, {}))[0] == 2
    assert store.find("answers") == {}
    leader._port.close()


def test_what_a_leader_saw_before_a_pause_makes_nobody_lost(tmp_path: Path) -> None:
    leader, store = leads_alone(tmp_path, lease_s=0.2, agent_lost_s=0.4, period_s=0.05)
    store.put("agents/n2", to_json(Agent("id", 1, "127.0.0.1", state=State.READY)), 0)
    leader._lead()
    time.sleep(0.5)
    while (store.get("job") or (0, {}))[1]["term"] == 1:
        leader._lead()
    assert (store.get("job") or (0, {}))[1]["lost"] == []
    leader._port.close()


def test_a_folder_that_all_nodes_share_speaks_against_none_of_them(tmp_path: Path) -> None:
    leader, _ = leads_alone(tmp_path)
    names = []
    for again in (False, True):
        leader._check(again)
        assert leader._checking.wait(30.0)
        names.append([finding.check for finding in leader._checking.result()])
    assert names[0] == ["shared folder", *names[1]]
    leader._port.close()


def test_a_leader_that_leaves_lets_another_one_lead_at_once(fleet: Any) -> None:
    fleet.start_all(lease_s=60.0, agent_lost_s=90.0)
    fleet.wait_for(lambda: fleet.leader() and fleet.job().term)
    leader, term = fleet.leader(), fleet.job().term
    fleet.launchers[leader].terminate()
    fleet.wait_for(lambda: fleet.job().term > term, seconds=5.0)


def test_sigterm_stops_the_ranks_in_order_and_says_good_bye(fleet: Any) -> None:
    fleet.start_all(WITH_CHILD)
    pids = [fleet.pid(1, 1), child(fleet, 1)]
    fleet.launchers["node1"].terminate()
    assert fleet.codes("node1") == [143]
    assert not any(fleet.alive(pid) for pid in pids)
    assert fleet.agent("node1").state is State.LEFT
    job = fleet.wait_for_round(2)
    assert (job.members, job.reason) == ({"node0": 0, "node3": 1, "node2": 2}, "node1 left the job: stopped by SIGTERM")
    fleet.launchers["node0"].send_signal(signal.SIGINT)
    assert fleet.codes("node0") == [130]
    fleet.wait_for(lambda: fleet.job().phase is Phase.FORMING)
    fleet.wait_for(lambda: not any(fleet.alive(fleet.pid(2, rank)) for rank in range(3)))


@pytest.mark.slow
def test_too_few_nodes_are_waited_for_and_not_for_ever(fleet: Any) -> None:
    fleet.start_all(spares=0, join_timeout_s=3.0)
    fleet.launchers["node2"].kill()
    assert fleet.codes("node0", "node1") == [1, 1]
    leads = next(n for n in ("node0", "node1") if "waits for nodes" in fleet.log(n))
    assert fleet.log(leads).count("job j waits for nodes: 2 of 3 are ready (the launcher of node2 is silent)") == 1
    assert "waited 3 s in vain for enough nodes: the launcher of node2 is silent" in fleet.log("node0")


@pytest.mark.slow
def test_a_node_that_comes_back_fills_its_place(fleet: Any) -> None:
    fleet.start_all(spares=0)
    fleet.launchers["node2"].kill()
    fleet.wait_for(lambda: fleet.job().phase is Phase.FORMING)
    fleet.start("node2")
    assert fleet.wait_for_round(2).members == {"node0": 0, "node1": 1, "node2": 2}


def test_a_second_launcher_of_a_node_is_refused(fleet: Any) -> None:
    fleet.start_all(spares=0)
    first = fleet.launchers["node1"]
    assert fleet.start("node1").wait(10) == 2
    assert f"job j has a launcher on node1 already, process {first.pid}; end that first" in fleet.log("node1")
    assert first.poll() is None
    assert fleet.alive(fleet.pid(1, 1))


@pytest.mark.slow
def test_a_launcher_that_slept_and_was_replaced_on_its_own_node_ends(fleet: Any) -> None:
    fleet.start_all(spares=0)
    first, rank = fleet.launchers["node1"], fleet.pid(1, 1)
    os.kill(first.pid, signal.SIGSTOP)
    second = fleet.start("node1")
    fleet.wait_for_round(2)
    assert fleet.alive(rank), "nobody but its own launcher may touch it"
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait(10) == 2
    assert f"process {second.pid} has taken this node over" in fleet.log("node1")
    assert not fleet.alive(rank)
    assert second.poll() is None
    assert fleet.job().round == 2


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"nodes": 4}, "has 3 nodes, at least 3, and 1 ranks per node; say the same"),
        ({"ranks_per_node": 2}, "has 3 nodes, at least 3, and 1 ranks per node; say the same"),
        ({"address": "203.0.113.7"}, "this node is not fit: this node cannot serve on 203.0.113.7"),
    ],
)
def test_a_launcher_that_does_not_fit(fleet: Any, more: dict[str, Any], sentence: str) -> None:
    fleet.start("node0")
    fleet.wait_for(lambda: fleet.store.get("job"))
    assert fleet.start("node1", **more).wait(10) == (3 if "address" in more else 2)
    assert sentence in fleet.log("node1")
    assert "Traceback" not in fleet.log("node1")


@pytest.mark.slow
def test_a_store_that_breaks_stops_no_rank(fleet: Any) -> None:
    fleet.start_all(UNTIL_TOLD, spares=0)
    moved = fleet.rendezvous.with_name("unmounted")
    fleet.rendezvous.rename(moved)
    fleet.wait_for(lambda: all("ranks that run go on" in fleet.log(f"node{n}") for n in range(3)))
    time.sleep(2.0)  # longer than any lease
    assert all(fleet.alive(fleet.pid(1, rank)) for rank in range(3))
    moved.rename(fleet.rendezvous)
    (fleet.folder / "finish").touch()
    assert fleet.codes("node0", "node1", "node2") == [0, 0, 0]
    assert fleet.job().round == 1
    assert len(re.findall("ranks that run go on", fleet.log("node0"))) <= 3


@pytest.mark.slow
def test_hooks_run_before_the_ranks_and_may_take_long(fleet: Any) -> None:
    program = f"""
import sys, time
from pathlib import Path
from eagleeye.errors import DataError
from remediation.launcher.agent import Settings, launch
def slow(round_, members):
    time.sleep(2.0)
    Path({str(fleet.folder)!r}, f"hook{{round_}}").write_text(repr(dict(members)))
    if round_ == 1:
        raise DataError("the restore failed")
settings = Settings(job="j", rendezvous={str(fleet.rendezvous)!r}, node="n1", lease_s=0.4, agent_lost_s=0.8, period_s=0.05)
sys.exit(launch(settings, ["test", "-e", {str(fleet.folder / "hook2")!r}], [slow]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
    assert (fleet.folder / "hook2").read_text() == "{'n1': 0}"
    assert "the ranks cannot be started: the restore failed" in done.stderr
    assert fleet.job().restarts[0].reason == "n1 could not start its ranks: the restore failed"


@pytest.mark.parametrize(
    ("settings", "command", "sentence"),
    [
        ({}, ["true"], "a job needs a name and a folder"),
        ({"job": "j", "rendezvous": "/nowhere"}, ["true"], "there is no folder /nowhere"),
        ({"job": "j", "rendezvous": "/tmp"}, [], "give the command of a rank after --"),
        ({"job": "j", "rendezvous": "/tmp"}, ["no-such-command"], "there is no command 'no-such-command' on this node"),
    ],
)
def test_what_cannot_be_meant(settings: dict[str, Any], command: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        launch(Settings(**settings), command)


@pytest.mark.parametrize(
    "settings",
    [{"nodes": 0}, {"min_nodes": 2}, {"node": "a,b"}, {"node": ""}, {"lease_s": 5.0}, {"period_s": 1.0}, {"max_restarts": -1}],
)
def test_settings_that_contradict_themselves(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|is no name"):
        Settings(**settings)


@pytest.mark.slow
def test_an_idle_launcher_takes_less_than_a_hundredth_of_a_core(fleet: Any) -> None:
    fleet.start_all(lease_s=3.0, agent_lost_s=5.0, period_s=0.25)

    def used_s(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    time.sleep(1.0)
    before = {node: used_s(process.pid) for node, process in fleet.launchers.items()}
    time.sleep(10.0)
    shares = {node: (used_s(process.pid) - before[node]) / 10 for node, process in fleet.launchers.items()}
    assert max(shares.values()) < 0.01, shares
