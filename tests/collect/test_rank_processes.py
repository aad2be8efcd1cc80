"""Which process is a rank, and what real processes look like when they are killed, stopped or starved."""

import os
import signal
import time
from pathlib import Path

import pytest

from eagleeye.collect.base import Site
from eagleeye.collect.environment import identify
from eagleeye.collect.identity import IdentityCollector
from eagleeye.collect.process import ProcessCollector
from eagleeye.collect.ranks import Candidate, Process, RankTable, choose, parse_stat
from eagleeye.errors import NoData

SLEEP = "import time; time.sleep(60)"


def candidate(pid: int, parent: int, command: str = "python", file: bool = False, **environ: str) -> Candidate:
    identity = identify(environ)
    assert identity is not None
    return Candidate(Process(pid, parent, command, "S", 100 + pid), identity, "0", Path("f") if file else None)


def chosen(*candidates: Candidate, plain: dict[int, int] | None = None) -> dict[int, int]:
    parents = {c.process.pid: c.process.parent for c in candidates} | (plain or {})
    return {rank: c.process.pid for (_, rank), c in choose(candidates, parents).items()}


T0 = {"RANK": "0", "WORLD_SIZE": "2"}
T1 = {"RANK": "1", "WORLD_SIZE": "2"}
S0 = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}


def test_workers_of_the_data_loader_are_no_ranks() -> None:
    assert chosen(candidate(10, 5, **T0), candidate(11, 10, **T0), candidate(12, 11, **T0), candidate(20, 5, **T1)) == {
        0: 10,
        1: 20,
    }


def test_shell_and_profiler_around_a_rank_are_not_the_rank() -> None:
    assert chosen(candidate(10, 5, "bash", **T0), candidate(11, 10, "nsys", **T0), candidate(12, 11, **T0)) == {0: 12}


def test_workers_below_a_rank_below_a_shell() -> None:
    assert chosen(candidate(10, 5, "bash", **T0), candidate(12, 10, **T0), candidate(13, 12, **T0)) == {0: 12}


def test_a_shell_alone_is_no_rank() -> None:
    assert chosen(candidate(10, 5, "bash", **T0)) == {}


def test_an_agent_under_slurm_launches_ranks_and_is_none() -> None:
    ranks = [candidate(11, 10, **S0, **T0), candidate(12, 10, **S0, **T1)]
    assert chosen(candidate(10, 5, **S0), *ranks) == {0: 11, 1: 12}


def test_ancestors_without_variables_are_passed() -> None:
    assert chosen(candidate(10, 5, **T0), candidate(12, 11, **T0), plain={11: 10}) == {0: 10}


def test_who_writes_progress_is_the_rank() -> None:
    assert chosen(candidate(10, 5, **T0), candidate(11, 10, file=True, **T0), candidate(12, 11, **T0)) == {0: 11}


def test_stat_line_with_a_hostile_command() -> None:
    line = b"42 (a) R 1 (b) S 7 " + b"0 " * 17 + b"12345 0 0"
    assert parse_stat(42, line) == Process(42, 7, "a) R 1 (b", "S", 12345)
    with pytest.raises(ValueError, match="truncated"):
        parse_stat(42, b"42 (a) S 7 0")


def test_fixture_node(bench) -> None:
    site = bench.site(proc_root=str(bench.files / "proc"))
    found = bench.values(IdentityCollector(site))["rank_info"]
    # in the order gpu, group, local_rank, pid, rank, world_size
    assert set(found) == {("0", "stage1", "0", "4001", "4", "8"), ("1", "stage1", "1", "4002", "5", "8")}
    process = bench.values(ProcessCollector(site))
    assert process["process_up"] == {("4",): 1.0, ("5",): 1.0}
    assert process["process_cpu_seconds_total"][("4",)] == 1300.0
    assert process["process_run_wait_seconds_total"][("4",)] == 5.25
    assert process["process_resident_memory_bytes"][("4",)] == 2500000 * os.sysconf("SC_PAGE_SIZE")
    assert process["process_stopped_ratio"] == {("4",): 0.0, ("5",): 1.0}


def test_no_procfs_at_all(bench, tmp_path: Path) -> None:
    site = bench.site(proc_root=str(tmp_path / "nothing"))
    with pytest.raises(NoData):
        list(ProcessCollector(site).collect(0.0))
    with pytest.raises(NoData):
        list(IdentityCollector(site).collect(0.0))


def table_with(bench, rank: int, **settings: object) -> tuple[Site, RankTable]:
    site = bench.site(**settings)
    table = site.shared(RankTable)
    bench.wait_for(lambda: (table.scan(), any(r.identity.rank == rank for r in table.ranks()))[1])
    return site, table


def test_killed_rank_stays_with_the_time_of_its_end(bench) -> None:
    process = bench.spawn(SLEEP, bench.rank(3))
    site, _ = table_with(bench, 3)
    collector = ProcessCollector(site)
    assert bench.values(collector)["process_up"] == {("3",): 1.0}
    killed_s = time.time()
    process.kill()
    process.wait()
    bench.wait_for(lambda: bench.values(collector)["process_up"] == {("3",): 0.0}, 1.0)
    after = bench.values(collector)
    assert abs(after["process_exit_timestamp_seconds"][("3",)] - killed_s) < 0.1
    assert set(after) == {"process_up", "process_exit_timestamp_seconds"}
    assert ("3",) in {key[-2:-1] for key in bench.values(IdentityCollector(site))["rank_info"]}


def test_end_is_noticed_without_pidfd(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Site, "same_pids", property(lambda _: False))
    process = bench.spawn(SLEEP, bench.rank(3))
    site, _ = table_with(bench, 3)
    killed_s = time.time()
    process.kill()
    collector = ProcessCollector(site)
    bench.wait_for(lambda: bench.values(collector)["process_up"] == {("3",): 0.0}, 1.0)
    assert abs(bench.values(collector)["process_exit_timestamp_seconds"][("3",)] - killed_s) < 0.5


def test_a_new_process_takes_the_rank(bench) -> None:
    first = bench.spawn(SLEEP, bench.rank(3))
    site, table = table_with(bench, 3)
    first.kill()
    first.wait()
    bench.wait_for(lambda: table.ranks()[0].exited_s)
    time.sleep(0.3)
    second = bench.spawn(SLEEP, bench.rank(3))
    bench.wait_for(lambda: (table.scan(), table.ranks()[0].process.pid == second.pid)[1])
    assert bench.values(ProcessCollector(site))["process_up"] == {("3",): 1.0}


def test_orphans_do_not_take_the_rank(bench) -> None:
    program = "import os, time\nif os.fork() == 0: time.sleep(60)\nprint('forked', flush=True); time.sleep(60)"
    process = bench.spawn(program, bench.rank(3))
    assert process.stdout is not None
    assert process.stdout.readline() == "forked\n"
    _, table = table_with(bench, 3)
    time.sleep(0.3)
    process.kill()
    process.wait()
    bench.wait_for(lambda: table.ranks()[0].exited_s)
    for _ in range(3):
        table.scan()
    assert [(r.process.pid, r.exited_s is None) for r in table.ranks()] == [(process.pid, False)]


def test_a_vanished_rank_is_forgotten_in_the_end(bench) -> None:
    process = bench.spawn(SLEEP, bench.rank(3))
    _, table = table_with(bench, 3, remember_s=0.2)
    process.kill()
    process.wait()
    bench.wait_for(lambda: (table.scan(), not table.ranks())[1])


def test_ranks_of_other_nodes_are_theirs(bench) -> None:
    bench.spawn(SLEEP, bench.rank(3))
    bench.spawn(SLEEP, bench.rank(2, EAGLEEYE_NODE="n2"))
    _, table = table_with(bench, 3)
    table.scan()
    assert [r.identity.rank for r in table.ranks()] == [3]


def test_stopped_share_of_a_stopped_process(bench) -> None:
    process = bench.spawn(SLEEP, bench.rank(3))
    site, _ = table_with(bench, 3)
    collector = ProcessCollector(site)
    bench.values(collector)
    time.sleep(0.5)
    assert bench.values(collector)["process_stopped_ratio"] == {("3",): 0.0}
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    bench.values(collector)
    time.sleep(0.5)
    assert bench.values(collector)["process_stopped_ratio"] == {("3",): 1.0}


def test_duty_cycle_of_a_slowed_process(bench) -> None:
    process = bench.spawn(SLEEP, bench.rank(3))
    site, _ = table_with(bench, 3)
    collector = ProcessCollector(site)
    bench.values(collector)
    # 100 ms stopped, 100 ms running: looks at a fixed 10 Hz would see one half only
    for _ in range(15):
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.1)
    assert 0.2 < bench.values(collector)["process_stopped_ratio"][("3",)] < 0.8


def test_cpu_and_wait_of_a_starved_process(bench) -> None:
    # two threads of one process on one CPU, each in the kernel and without the interpreter's lock
    program = (
        "import hashlib, os, threading\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "def work():\n    while True: hashlib.pbkdf2_hmac('sha256', b'a', b'b', 200_000)\n"
        "for _ in range(2): threading.Thread(target=work).start()"
    )
    bench.spawn(program, bench.rank(3))
    site, _ = table_with(bench, 3)
    collector = ProcessCollector(site)
    time.sleep(0.2)
    before, begin = bench.values(collector), time.monotonic()
    time.sleep(1.0)
    after, took = bench.values(collector), time.monotonic() - begin
    cpu = after["process_cpu_seconds_total"][("3",)] - before["process_cpu_seconds_total"][("3",)]
    wait = after["process_run_wait_seconds_total"][("3",)] - before["process_run_wait_seconds_total"][("3",)]
    assert 0.1 * took < cpu < 1.1 * took
    assert 0.5 * took < wait < 2.1 * took


def test_wait_counter_does_not_fall_when_a_thread_ends(bench, tmp_path: Path) -> None:
    from eagleeye.collect.process import _WaitCounter

    def thread(name: str, wait_ns: int) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "schedstat").write_text(f"1 {wait_ns} 1\n")

    counter = _WaitCounter()
    thread("1", 1_000_000_000)
    thread("2", 500_000_000)
    assert counter.read_s(tmp_path) == 1.5
    (tmp_path / "2" / "schedstat").unlink()
    (tmp_path / "2").rmdir()
    thread("1", 1_250_000_000)
    assert counter.read_s(tmp_path) == 1.75
    thread("2", 100_000_000)
    assert counter.read_s(tmp_path) == 1.85
