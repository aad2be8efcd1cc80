"""Who is in a job, and what happens next: every decision, without a process."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagleeye.records import from_json, to_json
from remediation.launcher import rounds
from remediation.launcher.rounds import Agent, Answer, Duty, Job, Limits, Phase, Request, Seen, State

LIMITS = Limits(verdict_wait_s=20.0, max_restarts=3)
JOB = Job("j", nodes=3, min_nodes=3, ranks_per_node=2)


def agent(node: str, state: State = State.READY, round_: int = 0, **more: object) -> Agent:
    return Agent(f"id-{node}", 1, f"addr-{node}", 1000, state=state, round=round_, **more)  # type: ignore[arg-type]


def fleet(names: Iterable[str], spares: Iterable[str] = (), **more: object) -> dict[str, Agent]:
    return {n: agent(n, **more) for n in names} | {n: agent(n, spare=True, **more) for n in spares}  # type: ignore[arg-type]


def step(job: Job, agents: dict[str, Agent], **more: object) -> Job:
    requests = more.pop("requests", {})
    return rounds.advance(job, Seen(agents, **more), requests, LIMITS)[0]  # type: ignore[arg-type]


def running(
    names: Iterable[str] = ("n1", "n2", "n3"), spares: Iterable[str] = ("n4",), **more: object
) -> tuple[Job, dict[str, Agent]]:
    """A job whose first round runs."""
    agents = fleet(names, spares)
    job = replace(JOB, **more)  # type: ignore[arg-type]
    job = step(job, agents)
    assert (job.phase, job.round) == (Phase.RESTARTING, 1)
    agents = {n: replace(a, round=1) for n, a in agents.items()}
    job = step(job, agents, now_s=76.0)
    assert (job.phase, job.started_s) == (Phase.RUNNING, None)
    agents = {n: replace(a, state=State.RUNNING if n in job.members else State.READY) for n, a in agents.items()}
    return step(job, agents, now_s=77.0), agents


def acted(job: Job, agents: dict[str, Agent]) -> dict[str, Agent]:
    """The launchers after they did what the job says: stopped, or started, their ranks."""
    state = {Phase.RESTARTING: State.READY, Phase.RUNNING: State.RUNNING}[job.phase]
    return {
        n: replace(
            a,
            state=State.EXCLUDED if n in job.excluded else state if n in job.members else State.READY,
            round=job.round,
            exit_codes={},
        )
        for n, a in agents.items()
    }


def evict(node: str, round_: int = 1) -> Request:
    return Request("evict", node, "its GPU is slow", round_, taken=1)


# --- order and ranks ---


@given(
    kept=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 7), max_size=8).filter(
        lambda k: len(set(k.values())) == len(k)
    ),
    fresh=st.lists(st.sampled_from("stuvwxyz"), unique=True, max_size=8),
    wanted=st.integers(1, 8),
)
def test_ranks_are_dense_and_members_keep_theirs(kept: dict[str, int], fresh: list[str], wanted: int) -> None:
    size = min(wanted, len(kept) + len(fresh))
    ranks = rounds.assign(kept, fresh, size)
    assert sorted(ranks.values()) == list(range(size))
    assert all(ranks[node] == rank for node, rank in kept.items() if rank < size)
    assert [n for n in fresh if n in ranks] == fresh[: len([n for n in fresh if n in ranks])], "spares are taken in order"


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], 0), ([None], 0), ([None, None], 1), ([None] * 4, 3), ([5], 0), ([5, 5], 1), ([5, 4, 5, None], 3), ([5, 6, 7, 8], 0),
        ([5, 5, 5, 6], 0), ([None, None, 1, 1], 1), ([0], 0), ([0, 0], 1), ([9, 8, 9, 10, 10], 1),
    ],
)  # fmt: skip
def test_restarts_that_got_no_further(steps: list[int | None], expected: int) -> None:
    assert rounds.fruitless(steps) == expected


# --- forming ---


@pytest.mark.parametrize(
    ("agents", "members"),
    [
        (fleet(["n1", "n2"], ["n4", "n5"]), None),
        (fleet(["n10", "n2", "n1"], ["n4"]), {"n1": 0, "n2": 1, "n10": 2}),
        (fleet(["n1", "n2", "n3", "n4"]), {"n1": 0, "n2": 1, "n3": 2}),
        (fleet(["n1", "n2"], ["n4"]) | {"n3": agent("n3", State.WARMING)}, None),
        (fleet(["n1", "n2"], ["n4"]) | {"n3": agent("n3", State.BROKEN)}, {"n1": 0, "n2": 1, "n4": 2}),
        (fleet(["n1"], ["n4", "n5"]) | {"n3": agent("n3", State.BROKEN)}, None),
    ],
)
def test_the_first_round(agents: dict[str, Agent], members: dict[str, int] | None) -> None:
    job = step(JOB, agents)
    assert (job.phase, job.members) == ((Phase.RESTARTING, members) if members else (Phase.FORMING, {}))
    assert job.round == (1 if members else 0)


def test_a_spare_stands_in_for_a_node_that_fell_silent_before_the_first_round() -> None:
    agents = fleet(["n1", "n2", "n3"], ["n4"])
    assert step(JOB, agents, lost=frozenset({"n3"})).members == {"n1": 0, "n2": 1, "n4": 2}


def test_a_round_starts_when_nobody_can_hold_an_earlier_rank_any_more() -> None:
    job, agents = running()
    job = step(job, agents, requests={"op": evict("n2")})
    assert (job.phase, job.round, job.started_s) == (Phase.RESTARTING, 2, None)
    late = acted(job, agents)
    for name in ("n1", "n2", "n4"):
        assert step(job, late | {name: agents[name]}).phase is Phase.RESTARTING, name
    assert step(job, late | {"n2": agents["n2"]}, lost=frozenset({"n2"})).phase is Phase.RUNNING
    job = step(job, late | {"n1": replace(late["n1"], free_port=4711, cache="h:1"), "n4": replace(late["n4"], cache="h:4")})
    assert (job.phase, job.master_address, job.master_port) == (Phase.RUNNING, "addr-n1", 4711)
    assert job.peers == {"n1": "h:1", "n4": "h:4"}


def test_caches_of_spares_are_peers_and_those_of_nodes_taken_out_are_not() -> None:
    job, agents = running(spares=("n4", "n5"))
    job = step(job, agents, requests={"op": evict("n2")})
    agents = {n: replace(a, cache=f"{n}:1") for n, a in acted(job, agents).items()}
    assert set(step(job, agents).peers) == {"n1", "n3", "n4", "n5"}


# --- failures ---


def failed(agents: dict[str, Agent], node: str, step_: int | None = None, code: int = 7) -> dict[str, Agent]:
    return agents | {node: replace(agents[node], state=State.FAILED, exit_codes={"0": 0, "1": code}, step=step_)}


def test_a_failed_rank_restarts_everybody_in_place() -> None:
    job, agents = running()
    after = step(job, failed(agents, "n2", 12))
    assert (after.phase, after.round, after.members) == (Phase.RESTARTING, 2, job.members)
    assert [(r.round, r.reason, r.step) for r in after.restarts] == [(1, "rank 3 on n2 ended with exit code 7", 12)]
    assert "was killed by SIGKILL" in step(job, failed(agents, "n2", code=-9)).reason


def test_the_reason_names_who_was_first_as_far_as_that_can_be_told() -> None:
    job, agents = running()
    all_failed = failed(failed(failed(agents, "n1", code=1), "n2", code=-6), "n3", code=-9)
    assert step(job, all_failed).reason == "rank 5 on n3 was killed by SIGKILL, and 2 more"
    assert (
        step(job, failed(failed(agents, "n1"), "n2"), lost=frozenset({"n3"})).reason == "the launcher of n3 is silent, and 2 more"
    )
    assert (
        step(job, failed(failed(agents, "n2", code=-6), "n1", code=1)).reason == "rank 1 on n1 ended with exit code 1, and 1 more"
    )


def test_a_verdict_is_waited_for_only_where_somebody_watches_and_not_for_ever() -> None:
    job, agents = running()
    for bad, lost in ((failed(agents, "n2"), frozenset[str]()), (agents, frozenset({"n2"}))):
        assert step(job, bad, lost=lost, watched=True, broken_for_s=19.0) == replace(job, lost=tuple(lost), spares=("n4",))
        assert step(job, bad, lost=lost, watched=True, broken_for_s=20.0).round == 2
        assert step(job, bad, lost=lost, watched=False).round == 2


@pytest.mark.parametrize("state", [State.LEFT, State.BROKEN])
def test_a_node_that_said_good_bye_needs_no_verdict(state: State) -> None:
    job, agents = running()
    after = step(job, agents | {"n2": replace(agents["n2"], state=state, why="SIGTERM")}, watched=True)
    assert after.members == {"n1": 0, "n4": 1, "n3": 2}
    assert after.reason == "n2 left the job: SIGTERM"


def test_a_lost_node_is_replaced_and_may_come_back_as_a_spare() -> None:
    job, agents = running()
    job = step(job, agents, lost=frozenset({"n2"}))
    assert (job.members, job.excluded, job.lost) == ({"n1": 0, "n4": 1, "n3": 2}, {}, ("n2",))
    assert step(job, acted(job, agents)).spares == ("n2",)


def test_spares_go_before_nodes_that_came_back() -> None:
    job, agents = running()
    assert step(job, agents | fleet(["n0"])).spares == ("n4", "n0")
    assert step(job, agents | fleet(["n0"]), lost=frozenset({"n2"})).members == {"n1": 0, "n4": 1, "n3": 2}


def test_a_launcher_started_anew_does_not_join_a_round_that_runs_but_keeps_its_rank() -> None:
    job, agents = running(spares=())
    agents["n2"] = replace(agent("n2"), id="new")
    assert rounds.duty(job, "n2", "new", 0, False) is Duty.WAIT
    job = step(job, agents)
    assert (job.phase, job.round, job.members, job.ids["n2"]) == (Phase.RESTARTING, 2, {"n1": 0, "n2": 1, "n3": 2}, "new")


def test_too_few_nodes_wait_and_go_on_when_one_comes() -> None:
    job, agents = running(spares=())
    job = step(job, agents, lost=frozenset({"n2"}))
    assert (job.phase, job.round) == (Phase.FORMING, 1)
    assert rounds.duty(job, "n1", "id-n1", 1, True) is Duty.STOP
    assert rounds.forming(job, Seen(agents, frozenset({"n2"}))) == (
        "job j waits for nodes: 2 of 3 are ready (the launcher of n2 is silent)"
    )
    job = step(job, agents | fleet(["n9"]), lost=frozenset({"n2"}))
    assert (job.round, job.members) == (2, {"n1": 0, "n9": 1, "n3": 2})


def test_a_job_that_may_shrink_does() -> None:
    job, agents = running(spares=(), min_nodes=2)
    job = step(job, agents, lost=frozenset({"n1"}))
    assert (job.round, job.members) == (2, {"n3": 0, "n2": 1})


def test_a_member_lost_while_the_next_round_is_prepared() -> None:
    job, agents = running(spares=("n4", "n5"))
    job = step(job, agents, requests={"op": evict("n2")})
    job = step(job, acted(job, agents), lost=frozenset({"n4"}))
    assert (job.phase, job.round, job.members) == (Phase.RESTARTING, 3, {"n1": 0, "n5": 1, "n3": 2})
    assert len(job.restarts) == 1


def test_done_when_all_are_done_even_if_their_launchers_have_gone() -> None:
    job, agents = running()
    done = {n: replace(a, state=State.DONE) if n in job.members else a for n, a in agents.items()}
    assert step(job, done | {"n1": agents["n1"]}).phase is Phase.RUNNING
    assert step(job, done, lost=frozenset({"n1"})).phase is Phase.DONE
    assert step(job, failed(done, "n2")).round == 2, "those that are done begin again, too"


def repeat(steps: list[int | None]) -> Job:
    job, agents = running()
    for at in steps:
        job = step(job, failed(agents, "n2", at))
        if job.phase is Phase.FAILED:
            break
        job = step(job, acted(job, agents))
        assert job.phase is Phase.RUNNING
        agents = acted(job, agents)
    return job


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([5, 5, 5], None),
        ([5, 5, 5, 5], "3 restarts in a row got no further than step 5"),
        ([None] * 4, "3 restarts in a row got no further than the start (no rank told of a step)"),
        ([5, 5, 5, 6, 6, 6], None),
        ([5, 6, 6, 5, 3], "3 restarts in a row got no further than step 6"),
    ],
)  # fmt: skip
def test_the_budget_of_restarts(steps: list[int | None], sentence: str | None) -> None:
    job = repeat(steps)
    if sentence is None:
        assert (job.phase, len(job.restarts)) == (Phase.RUNNING, len(steps))
    else:
        assert (job.phase, job.reason) == (Phase.FAILED, f"{sentence}; last: rank 3 on n2 ended with exit code 7")
        assert rounds.duty(job, "n1", "id-n1", 4, True) is Duty.LEAVE


# --- requests ---


def ask(job: Job, agents: dict[str, Agent], request: Request, **more: object) -> tuple[Job, Answer | None]:
    job, answers = rounds.advance(job, Seen(agents, **more), {"op": request}, LIMITS)  # type: ignore[arg-type]
    return job, answers.get("op")


def test_an_eviction_puts_the_spare_in_its_place_and_leaves_the_others() -> None:
    job, agents = running()
    job, answer = ask(job, agents, evict("n2"))
    assert answer == Answer("done", "n2 was taken out of job j; n4 takes its place in round 2")
    assert (job.members, job.excluded) == ({"n1": 0, "n4": 1, "n3": 2}, {"n2": "its GPU is slow"})
    assert rounds.duty(job, "n2", "id-n2", 1, True) is Duty.LEAVE
    again = ask(job, agents, evict("n2"))
    assert again == (job, Answer("done", "n2 is already out of job j"))


@pytest.mark.parametrize(
    ("spares", "lost", "node", "sentence"),
    [
        ((), (), "n2", "no spare left: without n2 job j has 2 of the 3 nodes that it needs"),
        (("n4",), ("n4",), "n2", "no spare left: without n2 job j has 2 of the 3 nodes that it needs"),
        (("n4", "n5"), ("n1",), "n2", "n1 is gone, too, and what n2 is blamed for may come from that"),
        (("n4",), (), "n77", "n77 is no node of job j"),
    ],
)
def test_an_eviction_is_refused(spares: tuple[str, ...], lost: tuple[str, ...], node: str, sentence: str) -> None:
    job, agents = running(spares=spares)
    after, answer = ask(job, agents, evict(node), lost=frozenset(lost), watched=True)
    assert answer == Answer("permanent", sentence)
    assert (after.excluded, after.round) == ({}, 1)


def test_of_two_evictions_at_once_one_is_done() -> None:
    """The other one rests on what was found before the restart, which may have been the doing of the first."""
    job, agents = running(spares=("n4", "n5", "n6"))
    job, answers = rounds.advance(job, Seen(agents), {"op1": evict("n2"), "op2": evict("n3")}, LIMITS)
    void = Answer("permanent", "job j was restarted since n3 was blamed, and what was found before counts no more")
    assert (answers["op2"], list(job.excluded)) == (void, ["n2"])
    assert ask(job, agents, evict("n3"))[1] == void


def test_two_evictions_are_done_one_after_the_other() -> None:
    job, agents = running(spares=("n4", "n5", "n6"))
    job, _ = ask(job, agents, evict("n2"))
    rest = {"op2": evict("n3", 2)}
    while job.phase is Phase.RESTARTING:
        job, answers = rounds.advance(job, Seen(agents), rest, LIMITS)
        assert answers == {}, "the first replacement is still under way"
        agents = acted(job, agents) if job.phase is Phase.RESTARTING else agents
    job, answers = rounds.advance(job, Seen(agents), rest, LIMITS)
    assert answers == {}, "the ranks of the new round are not started yet"
    job, answers = rounds.advance(job, Seen(acted(job, agents)), rest, LIMITS)
    assert (set(answers), list(job.excluded), job.round) == ({"op2"}, ["n2", "n3"], 3)


@pytest.mark.parametrize(
    "changed",
    [{"state": State.LEFT}, {"state": State.BROKEN}, {"id": "new", "state": State.WARMING}],
)
def test_nobody_is_taken_out_beside_a_node_that_left(changed: dict[str, Any]) -> None:
    """What n2 is blamed for may be n1's end; and two would be out at once."""
    job, agents = running(spares=("n4", "n5"))
    job, answer = ask(job, agents | {"n1": replace(agents["n1"], **changed)}, evict("n2"), watched=True)
    assert answer == Answer("permanent", "n1 is gone, too, and what n2 is blamed for may come from that")
    assert (job.excluded, job.members["n2"]) == ({}, 1)


def test_an_eviction_that_is_refused_leaves_no_trace() -> None:
    """A node that stays must be able to hold ranks again when its launcher begins anew."""
    job, agents = running(spares=())
    job, _ = ask(job, agents, Request("cordon", "n2", "", 1))
    job, answer = ask(job, agents, evict("n2"))
    assert (answer is not None and answer.result, job.cordoned, job.excluded) == ("permanent", (), {})
    agents["n2"] = replace(agent("n2"), id="new")
    assert step(job, agents).members == {"n1": 0, "n2": 1, "n3": 2}


def test_a_node_whose_ranks_have_finished_stays() -> None:
    """The others may still write the last checkpoint, and a vanished process looks bad from outside."""
    job, agents = running()
    done = agents | {"n2": replace(agents["n2"], state=State.DONE, exit_codes={"0": 0, "1": 0})}
    after, answer = ask(job, done, evict("n2"))
    assert answer == Answer("permanent", "the ranks of n2 have finished in order")
    assert (after.round, after.excluded) == (1, {})


@pytest.mark.parametrize(
    ("first", "second", "stays"),
    [(5, 5, True), (5, 4, True), (None, None, True), (5, None, True), (5, 6, False), (None, 1, False)],
)
@pytest.mark.parametrize("between", [False, True])
def test_a_rank_that_fails_on_two_nodes_alike_costs_no_second_node(
    first: int | None, second: int | None, stays: bool, between: bool
) -> None:
    job, agents = running(spares=("n4", "n5"))
    job, _ = ask(job, failed(agents, "n2", first), evict("n2"))
    for _ in range(2):
        job = step(job, acted(job, agents))
        agents = acted(job, agents)
    if between:  # a restart in place does not make it another trouble
        job = step(job, failed(agents, "n4", second))
        for _ in range(2):
            job = step(job, acted(job, agents))
            agents = acted(job, agents)
    after, answer = ask(job, failed(agents, "n4", second), evict("n4", job.round), watched=True)
    assert answer is not None
    assert ("n4" not in after.excluded, answer.result == "permanent") == (stays, stays)
    assert not stays or answer.detail == "n4 got no further than the node in whose place it is, so another one would not help"
    assert "n3" in ask(job, agents, evict("n3", job.round))[0].excluded, "another rank is another matter"


def test_a_round_counts_as_started_when_the_last_member_has_begun() -> None:
    """Hooks and slow disks make nodes begin minutes apart; a process that is not there yet looks like one that vanished."""
    job, agents = running()
    job = step(job, failed(agents, "n2"))
    ready = acted(job, agents)
    job = step(job, ready, now_s=100.0)
    begun = acted(job, ready)
    assert (job.phase, job.started_s) == (Phase.RUNNING, None)
    job = step(job, begun | {"n3": ready["n3"]}, now_s=150.0)
    assert job.started_s is None
    job = step(job, begun, now_s=200.0)
    assert job.started_s == 200.0
    assert step(job, begun, now_s=300.0).started_s == 200.0


def test_an_eviction_comes_before_a_restart_in_place() -> None:
    job, agents = running()
    job, _ = ask(job, failed(agents, "n1"), evict("n2"), watched=True)
    assert (job.round, job.members) == (2, {"n1": 0, "n4": 1, "n3": 2})


def test_a_spare_can_be_evicted_without_a_restart() -> None:
    job, agents = running()
    after, answer = ask(job, agents, evict("n4"))
    assert answer == Answer("done", "n4 was taken out of job j")
    assert (after.phase, after.round, after.spares) == (Phase.RUNNING, 1, ())


def test_a_cordoned_node_is_never_chosen_and_a_cordoned_member_goes_on() -> None:
    job, agents = running(spares=("n4", "n5"))
    for node in ("n4", "n2"):
        job, answer = ask(job, agents, Request("cordon", node, "", 1))
        assert answer == Answer("done", f"{node} gets no new ranks of job j")
    assert (job.round, job.spares) == (1, ("n5",))
    job = step(job, agents, lost=frozenset({"n1"}))
    assert job.members == {"n5": 0, "n2": 1, "n3": 2}
    assert ask(job, agents, Request("cordon", "n77", "", 1))[1] == Answer("permanent", "n77 is no node of job j")


def test_a_restart_is_done_when_everybody_runs_a_newer_round() -> None:
    job, agents = running()
    request = Request("restart", "j", "it hangs", 1)
    job, answer = ask(job, agents, request)
    assert (job.round, answer) == (2, None)
    agents = acted(job, agents)
    job, answer = ask(job, agents, request)
    assert (job.phase, answer) == (Phase.RUNNING, None)
    after, answer = ask(job, acted(job, agents), request)
    assert answer == Answer("done", "job j runs again, in round 2")
    assert after.round == 2


def test_an_eviction_counts_as_the_restart_of_its_incident() -> None:
    job, agents = running()
    job, _ = ask(job, agents, evict("n2"))
    agents = acted(job, agents)
    job = step(job, agents)
    after, answer = ask(job, acted(job, agents), Request("restart", "j", "", 1))
    assert (after.round, answer) == (2, Answer("done", "job j runs again, in round 2"))


@pytest.mark.parametrize("kind", ["evict", "restart"])
def test_a_job_that_has_ended_is_not_touched(kind: str) -> None:
    job, agents = running()
    job = replace(job, phase=Phase.FAILED, reason="why")
    target = "n2" if kind == "evict" else "j"
    assert ask(job, agents, Request(kind, target, "", 1))[1] == Answer("permanent", "job j has ended: why")


def test_requests_for_restarts_are_within_the_budget() -> None:
    job, agents = running()
    for _ in range(4):
        job, _ = ask(job, agents, Request("restart", "j", "it hangs", job.round))
        if job.phase is Phase.FAILED:
            break
        agents = acted(job, agents)
        job = step(job, agents)
        agents = acted(job, agents)
    assert job.phase is Phase.FAILED
    assert job.reason.endswith("last: it hangs")


# --- whatever happens ---


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, str]]:
    node = st.sampled_from(["n1", "n2", "n3", "n4", "n5"])
    event = st.sampled_from(["act", "act", "act", "fail", "lose", "back", "evict", "cordon", "restart", "done", "leave"])
    return draw(st.lists(st.tuples(event, node), max_size=40))


@given(histories())
@settings(max_examples=300, deadline=None)
def test_whatever_happens_the_job_stays_whole(history: list[tuple[str, str]]) -> None:
    agents, lost, open_ = fleet(["n1", "n2", "n3"], ["n4", "n5"]), set[str](), dict[str, Request]()
    job = JOB
    for number, (event, node) in enumerate(history):
        if event == "act" and job.phase in (Phase.RESTARTING, Phase.RUNNING):
            agents = {n: a if n in lost or a.state is State.LEFT else acted(job, {n: a})[n] for n, a in agents.items()}
        elif event == "fail" and agents[node].state is State.RUNNING:
            agents = failed(agents, node)
        elif event == "lose":
            lost.add(node)
        elif event == "back":
            lost.discard(node)
            agents[node] = replace(agent(node), id=f"id-{node}-{number}")
        elif event == "done" and agents[node].state is State.RUNNING:
            agents[node] = replace(agents[node], state=State.DONE)
        elif event == "leave":
            agents[node] = replace(agents[node], state=State.LEFT)
        elif event in ("evict", "cordon", "restart"):
            open_[f"op{number}"] = Request(event, "j" if event == "restart" else node, "why", job.round, taken=1)
        before = job
        job, answers = rounds.advance(job, Seen(agents, frozenset(lost)), open_, LIMITS)
        open_ = {operation: request for operation, request in open_.items() if operation not in answers}
        assert from_json(Job, to_json(job)) == job
        assert job.round in (before.round, before.round + 1)
        if before.phase is Phase.RUNNING:
            assert len(set(job.excluded) & set(before.members)) <= 1, "one node at a time"
        if before.phase is Phase.RESTARTING:
            assert not set(job.excluded) - set(before.excluded), "not before the last replacement is over"
        assert before.excluded.items() <= job.excluded.items()
        assert not set(job.excluded) & set(job.members)
        if job.round > before.round:
            assert sorted(job.members.values()) == list(range(3))
            assert not lost & set(job.members)
            kept = {n: r for n, r in job.members.items() if before.ids.get(n) == job.ids[n] and n in before.members}
            assert all(before.members[n] == rank for n, rank in kept.items())
        assert set(job.spares).isdisjoint(job.excluded)
        again, answers = rounds.advance(job, Seen(agents, frozenset(lost)), open_, LIMITS)
        assert again.excluded == job.excluded or answers, "a second look at the same thing does nothing more"
