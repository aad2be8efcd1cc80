"""Saves and restores through real caches, by the ways that a real fault leaves."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.client import LEVELS, Client
from checkpoint.errors import CacheGone, CheckpointError, Superseded, UsageError


def learner(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": seed, "rng": torch.get_rng_state()}


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal bit by bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a state looks like when it was restored without `into`, in memory of its own."""
    return {key: dict(item.state_dict().items()) if hasattr(item, "state_dict") else item for key, item in state.items()}


def saved(client: Client, step: int, state: Any, *levels: str) -> None:
    handle = client.save(step, state)
    for level in levels or LEVELS:
        handle.wait(level, 20)


def test_the_first_start_has_nothing_to_restore(three: Any) -> None:
    with three[0].client("first") as client:
        assert client.load() is None


def test_a_restart_goes_on_from_this_nodes_memory(three: Any) -> None:
    state = learner(1)
    with three[0].client("local") as client:
        saved(client, 7, state)
    with three[0].client("local") as client:
        fresh = learner(2)
        restored = client.load(into=fresh)
    assert restored is not None
    assert (restored.step, restored.source, restored.holder, restored.notes) == (7, "local", "node0", ())
    assert same(plain(fresh), plain(state))
    assert restored.state is fresh
    assert 0 < restored.seconds < 20


def test_what_was_restored_shares_no_memory_with_the_cache(three: Any) -> None:
    with three[0].client("own") as client:
        state = learner(1)
        saved(client, 1, state, "cached")
        kept = client.load()
        assert kept is not None
        for fresh in (learner(2), {**learner(2), "optimizer": torch.optim.AdamW(learner(2)["model"].parameters())}):
            client.load(into=fresh)
            assert same(plain(fresh), plain(state))
            for restored in (plain(fresh), client.load().state):  # type: ignore[union-attr]
                for tensor in torch.utils._pytree.tree_leaves(restored):
                    if isinstance(tensor, torch.Tensor):
                        tensor.fill_(7)
        again = client.load()
    assert again is not None
    assert same(again.state, kept.state)
    assert same(again.state, plain(state))


def test_an_optimizer_goes_on_without_touching_the_saved_state(three: Any) -> None:
    with three[0].client("optimizer") as client:
        state = learner(1)
        before = {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}
        saved(client, 1, state, "cached")
        client.load(into=state)
        state["optimizer"].step()
        assert not same(before, dict(state["model"].state_dict()))
        again = client.load()
    assert again is not None
    assert same(again.state["model"], before)


def test_a_save_is_a_copy_and_later_steps_do_not_change_it(three: Any) -> None:
    weight = torch.zeros(1 << 20)
    with three[0].client("copy") as client:
        for step in range(1, 6):
            weight.fill_(step)
            client.save(step, {"w": weight, "step": step})
            weight.fill_(-1)
        saved(client, 6, {"w": weight, "step": 6})
        restored = client.load()
    assert restored is not None
    assert restored.state["step"] == 6
    assert (restored.state["w"] == -1).all()


def test_a_state_without_tensors_and_one_of_empty_ones(three: Any) -> None:
    for step, state in enumerate([{"step": 3}, {"e": torch.empty(0, 3)}, [], torch.tensor(5.0), 17]):
        with three[0].client("small") as client:
            saved(client, step, state)
            restored = client.load()
        assert restored is not None
        assert same(restored.state, state)


def test_the_same_step_is_saved_once(three: Any) -> None:
    with three[0].client("twice") as client:
        one = client.save(5, {"a": torch.ones(3)})
        two = client.save(5, {"a": torch.zeros(3)})
        assert one is two
        one.wait("cached", 10)
        restored = client.load()
        assert restored is not None
        assert restored.state["a"].tolist() == [1, 1, 1]
        # after going back, the step is another one
        saved(client, 5, {"a": torch.zeros(3)})
        again = client.load()
    assert again is not None
    assert again.state["a"].tolist() == [0, 0, 0]
    assert again.generation > one.generation


def test_time_does_not_run_backwards(three: Any) -> None:
    with three[0].client("backwards") as client:
        client.save(5, {"a": 1})
        with pytest.raises(UsageError, match="step 4 cannot be saved after step 5; load an older state before"):
            client.save(4, {"a": 1})
        assert client.load() is not None
        saved(client, 4, {"a": 2}, "cached")
        restored = client.load()
    assert restored is not None
    assert restored.step == 4


@pytest.mark.parametrize("step", [-1, 10**12, 1.0, True, "7", None])
def test_no_step(three: Any, step: Any) -> None:
    with three[0].client("steps") as client, pytest.raises(UsageError, match=r"is no step to save"):
        client.save(step, {})


def test_a_state_may_change_its_form(three: Any) -> None:
    states: list[Any] = [
        {"w": torch.ones(10)},
        {"w": torch.ones(10), "ema": torch.zeros(500_000)},
        {"w": torch.ones(10).double()},
        {"w": torch.ones(10), "list": list(range(1000))},
        {"w": torch.ones(3_000_000)},
        {"w": torch.ones(10)},
        {"w": torch.ones(2, 5)},
    ]
    with three[0].client("forms") as client:
        for step, state in enumerate(states * 2):
            saved(client, step, state, "cached")
            restored = client.load()
            assert restored is not None
            assert restored.step == step
            assert same(restored.state, state)


def test_memory_of_outgrown_forms_is_let_go(cluster: Any) -> None:
    """A training process must not keep mapping what the cache has let go of: its pages would stay in use, uncounted."""
    limit_bytes = 24 << 20
    with cluster(1, "--memory-bytes", str(limit_bytes), storage=None)[0].client() as client:
        for step in range(24):
            saved(client, step, {"w": torch.zeros(60_000 * 3 ** (step % 4))}, "cached")
        maps = re.findall(r"^(\w+)-(\w+) .*eagleeye-slab", Path("/proc/self/maps").read_text(), re.MULTILINE)
        assert 0 < sum(int(end, 16) - int(start, 16) for start, end in maps) <= limit_bytes


def test_jobs_and_ranks_do_not_see_each_other(three: Any, unheard: Any) -> None:
    for rank in (0, 1):
        with three[0].client("two-ranks", rank, 2) as client:
            client._agreement = unheard
            saved(client, 3, {"rank": rank}, "cached")
    with three[0].client("two") as client:
        assert client.load() is None


def test_what_does_not_fit_changes_nothing(three: Any) -> None:
    with three[0].client("misfit") as client:
        saved(client, 1, {"a": torch.ones(2), "b": torch.ones(3)}, "cached")
        into = {"a": torch.zeros(2), "b": torch.zeros(4)}
        with pytest.raises(UsageError, match=r"the checkpoint of step 1 does not fit: state\.b is torch\.float32 \(4,\) here"):
            client.load(into=into)
        assert into["a"].tolist() == [0, 0]


def test_a_job_of_another_size_is_told(three: Any, unheard: Any) -> None:
    with three[0].client("resized") as client:
        saved(client, 4, {"a": 1}, "cached")
    with three[0].client("resized", 0, 2) as client:
        client._agreement = unheard
        with pytest.raises(CheckpointError) as told:
            client.load()
    assert str(told.value) == (
        "job resized had a checkpoint of step 4 and nothing can be restored (step 4 was saved by 1 ranks and this job has 2); "
        "bring its holders back, or give the job another name to start anew"
    )


def test_a_refused_state_leaves_the_client_well(three: Any) -> None:
    with three[0].client("refused") as client:
        with pytest.raises(UsageError, match=r"^state\.f is a function"):
            client.save(1, {"f": saved})
        with pytest.raises(
            UsageError, match=r"the seal of a state takes \d+ bytes and may take \d+; put long lists into tensors"
        ):
            client.save(1, {"text": "x" * (40 << 20)})
        with pytest.raises(UsageError, match=r"the layout of a state takes \d+ bytes and may take \d+; put long lists into"):
            client.save(1, {"k" * (40 << 20): 1})
        saved(client, 1, {"a": 1}, "cached")
        restored = client.load()
    assert restored is not None
    assert restored.state == {"a": 1}


@pytest.mark.parametrize("job", ["a/b", " "])
def test_a_job_without_a_proper_name(job: str) -> None:
    with pytest.raises(UsageError, match="is no name for a job"):
        Client(job)


@pytest.mark.parametrize("run_id", [None, "", "none"])
def test_a_job_without_any_name_could_restore_anothers(monkeypatch: pytest.MonkeyPatch, run_id: str | None) -> None:
    monkeypatch.delenv("EAGLEEYE_JOB", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if run_id is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    with pytest.raises(UsageError, match=r"the job has no name .*: say Client\('llama'\) or set EAGLEEYE_JOB"):
        Client()


def test_the_launcher_tells_who_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"EAGLEEYE_JOB": "llama", "TORCHELASTIC_RUN_ID": "run", "RANK": "3", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    client = Client()
    assert (client.job, client.rank, client.world_size) == ("llama", 3, 8)
    monkeypatch.delenv("EAGLEEYE_JOB")
    assert Client().job == "run"
    monkeypatch.setenv("RANK", "8")
    with pytest.raises(UsageError, match="there is no rank 8 among 8; check RANK and WORLD_SIZE"):
        Client()
    monkeypatch.setenv("RANK", "eight")
    with pytest.raises(UsageError, match="RANK='eight' is no number"):
        Client()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("EAGLEEYE_CHECKPOINT__PEERS", "node0")
    with pytest.raises(UsageError, match="EAGLEEYE_CHECKPOINT__PEERS: 'node0' is no peer"):
        Client()


def test_several_ranks_need_a_process_group() -> None:
    with pytest.raises(UsageError, match=r"2 ranks must agree on what to restore: call torch.distributed.init_process_group"):
        Client("job", 0, 2).load()


def test_no_cache_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoint.client.CONNECT_S", 0.1)
    for folder in (tmp_path, tmp_path / "nowhere"):
        with (
            Client("job", run_dir=str(folder)) as client,
            pytest.raises(CacheGone, match=rf"no cache answers in {folder} \(.*\); start `eagleeye cache` on this node"),
        ):
            client.load()


def test_a_level_that_does_not_exist(three: Any) -> None:
    with three[0].client("levels") as client:
        handle = client.save(1, {})
        with pytest.raises(UsageError, match="there is no level 'stored'; there are cached, replicated, persistent"):
            handle.wait("stored")


def test_one_node_without_storage_says_what_it_cannot_do(cluster: Any) -> None:
    node = cluster(1, storage=None)[0]
    with node.client() as client:
        handle = client.save(1, {"a": 1})
        handle.wait("cached", 10)
        with pytest.raises(Superseded, match="no other node's cache is known, so there is no second copy"):
            handle.wait("replicated", 10)
        with pytest.raises(Superseded, match="the cache has no storage folder: start it with --storage DIR"):
            handle.wait("persistent", 10)


def test_levels_in_a_node_that_stands_still_are_not_reached(cluster: Any) -> None:
    nodes = cluster(1)
    with nodes[0].client() as client:
        saved(client, 1, {"a": 1}, "cached", "persistent")
        os.kill(nodes[0].pid, signal.SIGSTOP)
        handle = client.save(2, {"a": 2})
        with pytest.raises(CheckpointError, match=r"step 2 is not persistent after 0\.2 s"):
            handle.wait("persistent", 0.2)
        os.kill(nodes[0].pid, signal.SIGCONT)
        handle.wait("persistent", 10)


@pytest.mark.parametrize("way", ["neighbour", "storage"])
def test_a_lost_node_is_restored(cluster: Any, way: str) -> None:
    nodes = cluster(3)
    state = learner(3)
    with nodes[0].client() as client:
        saved(client, 9, state)
    nodes[0].kill()
    if way == "storage":
        for node in nodes.nodes[1:]:
            node.kill()
    for node in nodes.nodes[1:]:
        if way == "storage":
            node.start().ready()
    with nodes[2].client() as client:
        fresh = learner(4)
        restored = client.load(into=fresh)
    assert restored is not None
    assert (restored.step, restored.source) == (9, way)
    assert restored.holder == ("node1" if way == "neighbour" else "storage")
    assert same(plain(fresh), plain(state))
    assert len(restored.notes) == 1
    assert restored.notes[0].startswith("not reached: node0: the cache at 127.0.0.1:")


def test_a_killed_cache_ends_no_training(cluster: Any, poll: Any, capfd: pytest.CaptureFixture[str]) -> None:
    nodes = cluster(2)
    with nodes[0].client() as client:
        saved(client, 1, {"a": torch.ones(5)})
        nodes[0].kill()
        lost = [client.save(step, {"a": torch.ones(5)}) for step in (2, 3, 4)]
        for handle in lost:
            for level in LEVELS:
                with pytest.raises(CacheGone, match=rf"step {handle.step}"):
                    handle.wait(level, 5)
        nodes[0].start().ready()
        poll(lambda: client.save(5, {"a": torch.full((5,), 5.0)}).cached.exception(10) is None)
        saved(client, 6, {"a": torch.full((5,), 6.0)})
        said = capfd.readouterr().err
        assert said.count("ended; it is looked for") <= 1
        assert said.count("the cache is back; checkpoints go on") == 1
        assert len(said.splitlines()) <= 3
        restored = client.load()
    assert restored is not None
    assert restored.step == 6


def test_what_was_under_way_in_a_killed_cache_is_told(cluster: Any) -> None:
    node = cluster(1, write_s=(60.0,))[0]
    with node.client() as client:
        handle = client.save(1, {"a": 1})
        handle.wait("cached", 10)
        node.kill()
        with pytest.raises(CacheGone, match=r"so it is not known whether step 1 went further"):
            handle.wait("persistent", 10)
        handle.wait("cached")  # what was reached stays reached


def test_a_cache_killed_during_saves_never_gives_back_a_half(cluster: Any, poll: Any) -> None:
    """The saves go on while the cache dies at any moment; what is restored afterwards is one of the saved states, whole."""
    nodes = cluster(2)
    weight = torch.zeros(1 << 20)
    with nodes[0].client() as client:
        step = 0
        for _ in range(4):
            until = step + 15
            while step < until:
                step += 1
                client.save(step, {"w": weight.fill_(step), "step": step})
            client.save(step + 1, {"w": weight.fill_(step + 1), "step": step + 1}).cached.exception(10)
            nodes[0].kill()
            step += 1
            nodes[0].start().ready()
            client._connected(10.0)
        restored = client.load()
    assert restored is not None
    assert (restored.state["w"] == restored.state["step"]).all()
    assert restored.state["step"] == restored.step > 0
