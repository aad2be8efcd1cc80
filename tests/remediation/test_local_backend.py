"""The local backend asks the leader of a job: nothing is done twice, one node at a time, and never below the job's minimum."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from eagleeye.errors import AmbiguousError, ConfigError, PermanentError, TransientError
from eagleeye.records import Action, ActionKind, Result, to_json
from remediation.launcher.rounds import Job, Phase, Request
from remediation.launcher.store import FolderStore
from remediation.local import Local, Settings

CORDON, EVICT, RESTART = ActionKind.CORDON, ActionKind.EVICT, ActionKind.RESTART


def hands(fleet: Any, timeout_s: float = 10.0) -> Local:
    return Local(Settings(str(fleet.rendezvous), timeout_s))


def evict(fleet: Any, node: str, operation: str = "") -> tuple[Result, str]:
    return hands(fleet).perform(operation or f"i1-evict-{node}", Action(EVICT, node), "j", "its GPU is slow")


def test_the_whole_plan_for_a_bad_node(fleet: Any) -> None:
    fleet.start_all(spares=2)
    backend = hands(fleet)
    view = backend.observe("j")
    assert view is not None
    assert (view.nodes, view.spares, view.excluded, view.min_nodes) == (("node0", "node1", "node2"), ("node3", "node4"), (), 3)
    fleet.wait_for(lambda: (backend.observe("j") or view).running_since_s is not None)
    since_s = (backend.observe("j") or view).running_since_s
    assert since_s is not None
    assert abs(time.time() - since_s) < 30
    plan = [(CORDON, "node1"), (EVICT, "node1"), (RESTART, "j")]
    outcomes = [
        backend.perform(f"i1-{kind.value}-{target}", Action(kind, target), "j", "its GPU is slow") for kind, target in plan
    ]
    assert outcomes == [
        (Result.DONE, "node1 gets no new ranks of job j"),
        (Result.DONE, "node1 was taken out of job j; node3 takes its place in round 2"),
        (Result.DONE, "job j runs again, in round 2"),
    ]
    assert fleet.codes("node1") == [94]
    assert fleet.log("node1").count("this node was taken out of job j: its GPU is slow") == 1
    job = fleet.wait_for_round(2)
    assert job.members == {"node0": 0, "node3": 1, "node2": 2}
    view = backend.observe("j")
    assert view is not None
    assert (view.nodes, view.spares, view.excluded) == (("node0", "node3", "node2"), ("node4",), ("node1",))
    assert view.running_since_s is not None
    assert view.running_since_s > since_s
    # a repetition, also by another process, tells the same and does nothing
    again = [hands(fleet).perform(f"i1-{k.value}-{t}", Action(k, t), "j", "its GPU is slow") for k, t in plan]
    assert again == outcomes
    assert evict(fleet, "node1", "i2-evict-node1") == (Result.DONE, "node1 is already out of job j")
    assert fleet.job().round == 2
    assert fleet.start("node1").wait(10) == 94, "its launcher cannot come back"


def test_a_restart_alone(fleet: Any) -> None:
    fleet.start_all(spares=0)
    outcome = hands(fleet).perform("i1-restart-j", Action(RESTART, "j"), "j", "it hangs")
    assert outcome == (Result.DONE, "job j runs again, in round 2")
    assert fleet.job().restarts[0].reason == "it hangs"
    assert hands(fleet).perform("i2-restart-j", Action(RESTART, "j"), "j", "it hangs")[1] == "job j runs again, in round 3"


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        ("node1", "no spare left: without node1 job j has 2 of the 3 nodes that it needs"),
        ("node77", "node77 is no node of job j"),
    ],
)
def test_what_the_leader_refuses(fleet: Any, node: str, sentence: str) -> None:
    fleet.start_all(spares=0)
    pids = [fleet.pid(1, rank) for rank in range(3)]
    for _ in range(2):
        with pytest.raises(PermanentError) as refusal:
            evict(fleet, node)
        assert str(refusal.value) == sentence
    assert (fleet.job().round, fleet.job().excluded) == (1, {})
    assert all(fleet.alive(pid) for pid in pids)


def test_a_failed_rank_whose_node_is_evicted_in_time(fleet: Any) -> None:
    fleet.start_all(verdict_wait_s=30.0)
    hands(fleet).watch("j")
    os.kill(fleet.pid(1, 2), signal.SIGKILL)
    fleet.wait_for(lambda: fleet.agent("node2").state.value == "failed")
    evict(fleet, "node2")
    assert fleet.wait_for_round(2).members == {"node0": 0, "node1": 1, "node3": 2}


def test_looking_changes_nothing_and_watching_is_told_to_the_leader(fleet: Any) -> None:
    fleet.start_all()
    hands(fleet).observe("j")
    assert fleet.store.get("watcher") is None
    hands(fleet).watch("j")
    hands(fleet).watch("j")
    assert fleet.store.get("watcher") == (2, {"beat": 2})
    with pytest.raises(PermanentError, match="there is no job k"):
        hands(fleet).watch("k")


def test_a_job_whose_rank_just_failed_still_counts_as_running(fleet: Any) -> None:
    fleet.start_all(verdict_wait_s=30.0)
    backend = hands(fleet)
    backend.watch("j")
    fleet.wait_for(lambda: backend.observe("j").running_since_s is not None)
    before = backend.observe("j")
    os.kill(fleet.pid(1, 2), signal.SIGKILL)
    fleet.wait_for(lambda: fleet.agent("node2").state.value == "failed")
    assert backend.observe("j").running_since_s == before.running_since_s


FAILS_SILENTLY_AT_5 = """
from eagleeye.collect import progress
progress.step(5)
(folder / f"at-5-{me}").touch()
while os.environ["RANK"] != "1" or len(list(folder.glob(f"at-5-round{round_}-*"))) < 3: time.sleep(0.01)
os._exit(17)
"""


@pytest.mark.slow
def test_a_program_that_fails_wherever_it_runs_costs_one_node_at_most(fleet: Any) -> None:
    """It says nothing when it ends, and whoever judges takes that for a broken node, round after round."""
    fleet.start_all(FAILS_SILENTLY_AT_5, spares=2, verdict_wait_s=2.0, max_restarts=2)
    refused = []
    for number in range(1, 5):
        hands(fleet).watch("j")
        fleet.wait_for(lambda number=number: fleet.job().round >= number or fleet.job().phase is Phase.FAILED)
        if fleet.job().phase is Phase.FAILED:
            break
        (node,) = [name for name, rank in fleet.job().members.items() if rank == 1]
        fleet.wait_for(
            lambda node=node, number=number: (fleet.agent(node).state.value, fleet.agent(node).round) == ("failed", number)
        )
        try:
            evict(fleet, node, f"i{number}-evict-{node}")
        except PermanentError as error:
            refused.append(str(error))
        fleet.wait_for(lambda number=number: fleet.job().round > number or fleet.job().phase is Phase.FAILED)
    assert list(fleet.job().excluded) == ["node1"]
    assert set(refused) == {"node3 got no further than the node in whose place it is, so another one would not help"}
    assert fleet.codes("node0", "node1", "node2", "node3", "node4") == [93, 94, 93, 93, 93]


@pytest.mark.slow
def test_a_node_whose_launcher_sleeps_saves_the_others(fleet: Any) -> None:
    """Whoever is blamed while another node is silent stays; and the sleeper is no loss when it wakes in time."""
    fleet.start_all(spares=2, verdict_wait_s=60.0)
    hands(fleet).watch("j")
    os.kill(fleet.launchers["node0"].pid, signal.SIGSTOP)
    fleet.wait_for(lambda: fleet.job().lost == ("node0",))
    with pytest.raises(PermanentError, match="node0 is gone, too, and what node1 is blamed for may come from that"):
        evict(fleet, "node1")
    os.kill(fleet.launchers["node0"].pid, signal.SIGCONT)
    fleet.wait_for(lambda: fleet.job().lost == ())
    assert (fleet.job().round, fleet.job().excluded, fleet.job().cordoned) == (1, {}, ())
    assert all(fleet.alive(fleet.pid(1, rank)) for rank in range(3))


@pytest.mark.slow
def test_the_leader_itself_is_taken_out(fleet: Any) -> None:
    fleet.start_all(spares=2)
    fleet.wait_for(lambda: fleet.leader() and fleet.job().term)
    leader, term = fleet.leader(), fleet.job().term
    assert evict(fleet, leader)[0] is Result.DONE
    assert fleet.codes(leader) == [94]
    fleet.wait_for(lambda: fleet.job().phase is Phase.RUNNING and fleet.job().term > term)
    assert leader in fleet.job().excluded
    assert leader not in fleet.job().members


@pytest.mark.slow
def test_two_evictions_at_once_never_cost_more_than_one_node_at_a_time(fleet: Any) -> None:
    fleet.start_all(spares=2)
    versions: list[tuple[int, str, int]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            job = fleet.job()
            if not versions or versions[-1] != (job.round, job.phase.value, len(job.excluded)):
                versions.append((job.round, job.phase.value, len(job.excluded)))

    outcomes: dict[str, tuple[Result, str]] = {}
    refused: list[str] = []

    def ask(node: str) -> None:
        request = Request("evict", node, "its GPU is slow", 1)  # both were blamed in the first round
        fleet.store.put(f"requests/i{node}-evict-{node}", to_json(request), 0)
        try:
            outcomes[node] = evict(fleet, node, f"i{node}-evict-{node}")
        except PermanentError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=ask, args=(node,)) for node in ("node0", "node2")]
    watcher = threading.Thread(target=watch)
    for thread in (watcher, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    (out,) = outcomes
    fleet.wait_for_round(2)
    (stays,) = {"node0", "node2"} - {out}
    outcomes[stays] = evict(fleet, stays, f"i3-evict-{stays}")  # what is found in the new round is another matter
    fleet.wait_for_round(3)
    fleet.wait_for(lambda: fleet.job().phase is Phase.RUNNING)
    over.set()
    watcher.join()
    assert [sentence.endswith("blamed, and what was found before counts no more") for sentence in refused] == [True]
    assert {result for result, _ in outcomes.values()} == {Result.DONE}
    assert {excluded - number for number, _, excluded in versions} == {-1}, "each round takes out one more node"
    assert (fleet.job().round, len(fleet.job().excluded)) == (3, 2)
    assert set(fleet.job().members) == {"node1", "node3", "node4"}
    assert fleet.job().members["node1"] == 1
    with pytest.raises(PermanentError, match="no spare left"):
        evict(fleet, "node1")


@pytest.mark.slow
def test_nobody_leads(fleet: Any) -> None:
    fleet.start_all(spares=1)
    for process in fleet.launchers.values():
        process.kill()
    with pytest.raises(TransientError, match="no launcher of job j is alive to lead it"):
        evict(fleet, "node1")
    for n in range(4):
        fleet.start(f"node{n}", spare=n > 2)
    fleet.wait_for_round(2)
    assert fleet.job().excluded == {}, "what was withdrawn is not done later"
    fleet.wait_for(lambda: "node3" in fleet.job().spares)
    assert evict(fleet, "node1")[1].startswith("node1 was taken out of job j")


def test_a_request_that_a_leader_took_and_never_answered(fleet: Any) -> None:
    fleet.start_all(spares=1)
    for process in fleet.launchers.values():
        process.kill()
        process.wait()
    request = {"kind": "evict", "target": "node1", "reason": "why", "round": 1, "taken": 1, "withdrawn": False}
    fleet.store.put("requests/i1-evict-node1", request, 0)
    with pytest.raises(AmbiguousError, match="the launchers of job j have the request i1-evict-node1, and nobody leads it"):
        evict(fleet, "node1")
    with pytest.raises(AmbiguousError, match=r"and no answer came within 0\.2 s"):
        hands(fleet, 0.2).perform("i1-evict-node1", Action(EVICT, "node1"), "j", "why")


def test_what_is_not_there(tmp_path: Path) -> None:
    backend = Local(Settings(str(tmp_path)))
    with pytest.raises(PermanentError, match="there is no job j in"):
        backend.observe("j")
    with pytest.raises(PermanentError, match="there is no job j in"):
        backend.perform("i1-evict-n", Action(EVICT, "n"), "j", "why")
    with pytest.raises(ConfigError, match="needs the folder in which the launchers meet: --rendezvous DIR"):
        Local(Settings())
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere; give the one that"):
        Local(Settings(str(tmp_path / "nowhere")))
    (tmp_path / "j").mkdir()
    (tmp_path / "j" / "job@1").write_text("{")
    with pytest.raises(TransientError, match="job@1 is broken"):
        backend.observe("j")
    with pytest.raises(ValueError, match="answer_timeout_s"):
        Settings(answer_timeout_s=0.0)


def test_a_notification_is_only_said(tmp_path: Path) -> None:
    told = Local(Settings(str(tmp_path))).perform("i1-notify-j", Action(ActionKind.NOTIFY, "j"), "j", "everybody is slow")
    assert told == (Result.DONE, "for the owner of job j: everybody is slow")
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_has_ended(tmp_path: Path) -> None:
    ended = Job("j", 2, 2, 1, round=1, phase=Phase.DONE, members={"a": 0, "b": 1})
    FolderStore(tmp_path / "j").put("job", to_json(ended), 0)
    backend = Local(Settings(str(tmp_path)))
    view = backend.observe("j")
    assert view is not None
    assert (view.nodes, view.running_since_s) == ((), None)
    with pytest.raises(PermanentError, match="job j has ended: done"):
        backend.perform("i1-evict-a", Action(EVICT, "a"), "j", "why")


def test_the_base_install_is_enough() -> None:
    heavy = ["numpy", "torch", "requests", "pandas", "yaml", "prometheus_client"]
    code = f"import remediation.local, remediation.launcher.agent, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
