"""Training processes that are killed and stopped at any moment, and jobs of several ranks."""

import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

SAVE_FOR_EVER = """
client = Client("job", run_dir=run_dir)
restored = client.load()
step = 0 if restored is None else restored.step
if restored is not None:
    assert (restored.state["w"] == step).all() and restored.state["step"] == step, "a torn state"
pipe.send(("restored", step))
weight = torch.empty(count)
while True:
    step += 1
    handle = client.save(step, {"w": weight.fill_(step), "step": step})
    if step % 2:
        handle.wait("cached", 10)
        pipe.send(("cached", step))
"""


@pytest.mark.parametrize("kills", [4, pytest.param(25, marks=pytest.mark.slow)])
def test_a_trainer_killed_at_any_moment(cluster: Any, trainer: Any, kills: int) -> None:
    """What was cached is never lost, and what was being copied never counts."""
    node = cluster(1, storage=None)[0]
    seen = 0
    for seed in range(kills):
        process = trainer(SAVE_FOR_EVER, run_dir=node.run_dir, count=5_000_000)
        kind, step = process.tells()
        assert kind == "restored"
        assert step >= seen
        for _ in range(2):
            seen = process.tells()[1]
        process.process.join(random.Random(seed).uniform(0.0, 0.05))
        process.kill()
        while process.pipe.poll():
            try:
                seen = process.pipe.recv()[1]
            except EOFError:
                break
    assert "Traceback" not in node.said


STOPPED = """
client = Client("job", run_dir=run_dir)
client.load()
weight = torch.empty(10_000_000)
for step in range(1, 1000):
    pipe.send(step)
    try:
        handle = client.save(step, {"w": weight.fill_(-step), "step": -step})
        gone = handle.cached.exception(10)
    except CheckpointError as error:
        gone = error
    if gone:
        pipe.send(str(gone))
        break
while "another process" not in str(gone):
    time.sleep(0.1)
    step += 1
    gone = client.save(step, {"w": weight, "step": -1}).cached.exception(10)
pipe.send((step, str(gone)))
time.sleep(600)
"""


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_stopped_trainer_that_wakes_up_harms_nothing(cluster: Any, trainer: Any, poll: Any, again: bool) -> None:
    """It wakes in the midst of a copy into memory that was its own, or waiting, while its successor is the rank."""
    node = cluster(1, storage=None)[0]
    old = trainer(STOPPED, run_dir=node.run_dir)
    while old.tells() != 4:
        pass
    old.process.join(0.02)
    old.signal(signal.SIGSTOP)
    if again:
        node.kill()
        node.start().ready()
    weight = torch.empty(10_000_000)
    with node.client() as client:
        restored = client.load()
        assert again or (restored is not None and (restored.state["w"] == -restored.step).all())
        for step in range(101, 104):
            client.save(step, {"w": weight.fill_(step), "step": step}).wait("cached", 10)
        old.signal(signal.SIGCONT)
        while not isinstance(told := old.tells(), str):
            pass
        assert "went away during the save of step" in told or "so it is not known whether step" in told
        for step in range(104, 110):
            client.save(step, {"w": weight.fill_(step), "step": step}).wait("cached", 10)
        step, told = old.tells()
        assert told == (
            f"the cache in {node.run_dir} refuses: another process has become rank 0 of job job; this one should end; "
            f"step {step} is saved nowhere"
        )
        client.save(120, {"w": weight.fill_(120), "step": 120}).wait("cached", 10)
        found = client.load()
    assert found is not None
    assert (found.step, found.state["step"]) == (120, 120)
    assert (found.state["w"] == 120).all()


RANK = """
import torch.distributed as dist
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
os.environ["EAGLEEYE_CHECKPOINT__PEERS"] = peers
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
client = Client("job", rank, world_size, run_dir=run_dir)
into = {"w": torch.zeros(1000), "step": 0}
try:
    restored = client.load(into=into)
except CheckpointError as error:
    pipe.send(f"{type(error).__name__}: {error}")
    sys.exit()
assert restored is None or (into["w"] == restored.step * 100 + rank).all()
assert restored is None or (len(restored.shards), restored.shards[rank]) == (world_size, (restored.source, restored.holder))
pipe.send(None if restored is None else (restored.step, restored.generation, restored.source, restored.notes))
for step, level in iter(pipe.recv, None):
    handle = client.save(step, {"w": torch.full((1000,), float(step * 100 + rank)), "step": step})
    handle.wait(level, 30)
    pipe.send(handle.generation)
client.close()
"""


class Job:
    """Ranks on the nodes of a cluster, one a node (or more), started as often as a test likes."""

    def __init__(self, trainer: Any, nodes: Any, folder: Path, world_size: int) -> None:
        self.trainer, self.nodes, self.folder, self.world_size = trainer, nodes, folder, world_size
        self.starts = 0
        self.ranks: list[Any] = []

    def start(self, where: list[int] | None = None) -> list[Any]:
        """Start all ranks, rank i on node ``where[i]``, and return what each restored."""
        self.starts += 1
        where = where or [rank % len(self.nodes.nodes) for rank in range(self.world_size)]
        peers = ",".join(f"node{i}=127.0.0.1:{self.nodes[i].port}" for i in sorted(set(where)))
        self.ranks = [
            self.trainer(
                RANK, rank=rank, world_size=self.world_size, run_dir=self.nodes[at].run_dir, peers=peers,
                meeting=str(self.folder / f"meeting{self.starts}"),
            )
            for rank, at in enumerate(where)
        ]  # fmt: skip
        return [rank.tells() for rank in self.ranks]

    def save(self, step: int, level: str = "persistent", ranks: list[int] | None = None) -> list[str]:
        chosen = [self.ranks[i] for i in ranks] if ranks else self.ranks
        for rank in chosen:
            rank.pipe.send((step, level))
        return [rank.tells() for rank in chosen]

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()


@pytest.fixture
def job(trainer: Any, cluster: Any, tmp_path: Path) -> Any:
    return lambda nodes, world_size, **options: Job(trainer, cluster(nodes, peers=False, **options), tmp_path, world_size)


def test_two_ranks_go_on_together(job: Any) -> None:
    it = job(2, 2)
    assert it.start() == [None, None]
    first = it.save(10)
    assert first[0] == first[1]
    newest = it.save(20)
    it.kill()
    assert it.start() == [(20, newest[0], "local", ())] * 2


def test_a_shard_that_one_rank_lacks(job: Any) -> None:
    """One rank was killed before its save: all go back to what all have, and the note says why."""
    it = job(2, 2)
    it.start()
    it.save(10)
    it.save(20, "replicated", ranks=[1])
    it.kill()
    (zero, one) = it.start()
    assert (zero[0], one[0]) == (10, 10)
    assert zero[1] == one[1]
    assert zero[3] == ("of step 20 the shard of rank 0 is nowhere",)


def test_a_first_save_that_never_completed_is_a_first_start(job: Any) -> None:
    it = job(2, 2, storage=None)
    it.start()
    it.save(10, "replicated", ranks=[1])
    it.kill()
    assert it.start() == [None, None]
    assert len(set(it.save(10, "cached"))) == 1


@pytest.mark.slow
def test_a_node_is_lost_and_its_rank_moves_to_another(job: Any) -> None:
    it = job(4, 3)
    it.start([0, 1, 2])
    it.save(10)
    it.save(20)
    it.kill()
    it.nodes[1].kill()
    told = it.start([0, 3, 2])
    assert {t[0] for t in told} == {20}
    assert [t[2] for t in told] == ["local", "neighbour", "local"]
    it.save(30)
    it.kill()
    for node in it.nodes.nodes:
        node.kill()
    it.nodes.start()
    told = it.start([2, 1, 0])
    assert [(t[0], t[2]) for t in told] == [(30, "storage")] * 3


@pytest.mark.slow
def test_two_lost_neighbours_lead_all_to_storage(job: Any) -> None:
    """The newest generation died with both of its holders; the one before lies in storage."""
    it = job(3, 3)
    it.start()
    it.save(10)
    storage = it.nodes.storage
    storage.rename(storage.with_name("away"))
    storage.touch()  # from now on nothing can be stored
    it.save(20, "replicated")
    it.kill()
    for at in (0, 1):
        it.nodes[at].kill()
    storage.unlink()
    storage.with_name("away").rename(storage)
    for at in (0, 1):
        it.nodes[at].start().ready()
    told = it.start()
    assert {t[0] for t in told} == {10}
    assert told[0][3] == ("of step 20 the shard of rank 0 is nowhere",)


@pytest.mark.slow
def test_four_ranks_on_two_nodes(job: Any) -> None:
    it = job(2, 4)
    it.start()
    for step in range(1, 6):
        newest = it.save(step, "replicated")
    it.kill()
    it.nodes[0].kill()
    it.nodes[0].start().ready()
    told = it.start()
    assert {(t[0], t[1]) for t in told} == {(5, newest[0])}
    assert [t[2] for t in told] == ["neighbour", "local", "neighbour", "local"]


@pytest.mark.slow
def test_a_job_of_another_size_is_refused_by_all_ranks(job: Any) -> None:
    it = job(2, 2)
    it.start()
    it.save(10)
    it.kill()
    it.world_size = 3
    sentence = (
        "CheckpointError: job job had a checkpoint of step 10 and nothing can be restored (step 10 was saved by 2 ranks and this "
        "job has 3); bring its holders back, or give the job another name to start anew"
    )
    assert it.start() == [sentence] * 3


@pytest.mark.slow
def test_a_rank_without_a_cache_stops_all(job: Any) -> None:
    it = job(2, 2)
    it.nodes[1].kill()
    zero, one = it.start()
    assert zero == "CacheGone: another rank has no cache on its node, and says so; nobody restores"
    assert one.startswith(f"CacheGone: no cache answers in {it.nodes[1].run_dir} (")
