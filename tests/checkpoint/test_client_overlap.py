"""Saves that are copied while training goes on, copies that are wrong, and memory that is full."""

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.client import LATE_BYTES, LEVELS, Client
from checkpoint.errors import CannotRun, Corrupt, UsageError
from checkpoint.manifest import Generation, Key
from checkpoint.server import Cache, Settings
from checkpoint.state import Target

LARGE = LATE_BYTES // 4 + 1
"""Numbers of float32 that an overlapped save copies late."""


def large(value: float) -> torch.Tensor:
    return torch.full((LARGE,), value)


def restored(client: Client) -> Any:
    found = client.load()
    assert found is not None
    return found.state


def test_an_overlapped_save_is_handed_over_at_the_fence(three: Any) -> None:
    with three[0].client("overlap") as client:
        handle = client.save(1, {"w": large(3), "small": torch.ones(2), "step": 1}, overlap=True)
        assert not any(getattr(handle, level).done() for level in LEVELS)
        client.fence()
        handle.wait("persistent", 20)
        state = restored(client)
    assert state["step"] == 1
    assert torch.equal(state["w"], large(3))
    assert state["small"].tolist() == [1, 1]


def test_waiting_for_a_level_passes_the_fence(three: Any) -> None:
    with three[0].client("overlap-wait") as client:
        client.save(1, {"w": large(3)}, overlap=True).wait("cached", 20)
        assert torch.equal(restored(client)["w"], large(3))


def test_what_changes_before_the_fence_is_not_saved_and_named(three: Any, capfd: pytest.CaptureFixture[str]) -> None:
    state = {"model": {"w": large(1)}, "v": large(1)}
    with three[0].client("overlap-torn") as client:
        client.save(1, state).wait("cached", 20)
        handle = client.save(2, state, overlap=True)
        state["model"]["w"].add_(1)
        client.fence()
        sentence = r"^step 2 is saved nowhere: state\.model\.w changed before the fence; call client\.fence\(\) before"
        for level in LEVELS:
            with pytest.raises(Corrupt, match=sentence):
                handle.wait(level, 5)
        assert "step 2 is saved nowhere" in capfd.readouterr().err
        assert torch.equal(restored(client)["model"]["w"], large(1))
        # from now on it is copied at once, and may change when it likes
        handle = client.save(3, state, overlap=True)
        state["model"]["w"].add_(1)
        handle.wait("cached", 20)
        assert torch.equal(restored(client)["model"]["w"], large(2))
        # the other may not
        handle = client.save(4, state, overlap=True)
        state["v"].zero_()
        with pytest.raises(Corrupt, match=r"state\.v changed before the fence"):
            handle.wait("cached", 5)


def test_a_step_that_was_withdrawn_can_be_saved_again(three: Any) -> None:
    state = {"w": large(1)}
    with three[0].client("overlap-again") as client:
        withdrawn = client.save(1, state, overlap=True)
        state["w"].add_(1)
        client.fence()
        again = client.save(1, state)
        assert again is not withdrawn
        again.wait("cached", 20)
        assert torch.equal(restored(client)["w"], large(2))


def test_the_next_save_and_the_end_of_the_client_pass_the_fence(three: Any) -> None:
    with three[0].client("overlap-next") as client:
        first = client.save(1, {"w": large(1)}, overlap=True)
        second = client.save(2, {"w": large(2)}, overlap=True)
        first.cached.result(20)
        assert not second.cached.done()
    with three[0].client("overlap-next") as client:
        assert torch.equal(restored(client)["w"], large(2))


def test_views_that_change_before_the_fence_are_seen_in_what_holds_them(three: Any) -> None:
    base = large(1)
    state = {"whole": base, "part": base[: LARGE // 2]}
    with three[0].client("overlap-views") as client:
        handle = client.save(1, state, overlap=True)
        state["part"].add_(1)
        client.fence()
        with pytest.raises(Corrupt, match=r"state\.(whole|part) and 1 more changed before the fence"):
            handle.wait("cached", 5)


def test_a_guarded_optimizer_waits_for_the_copy(three: Any) -> None:
    """What is saved is the state of before the step, also though nothing but the step's hook passes the fence."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.BatchNorm1d(256))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(8, 256)

    def train() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    train()
    with three[0].client("overlap-guard") as client:
        hook = client.guard(optimizer)
        for step in range(1, 4):
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            handle = client.save(step, {"model": model, "optimizer": optimizer}, overlap=True)
            train()  # the forward pass changes the running mean, and the step all else
            assert handle.cached.exception(20) is None
            saved = restored(client)["model"]
            assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())
        hook.remove()
        handle = client.save(4, {"model": model, "optimizer": optimizer}, overlap=True)
        train()
        with pytest.raises(Corrupt, match="changed before the fence"):
            handle.wait("cached", 5)


def test_tensors_of_inference_mode_are_copied_at_once(three: Any) -> None:
    with torch.inference_mode():
        frozen = large(1)
    with three[0].client("overlap-inference") as client:
        handle = client.save(1, {"w": frozen}, overlap=True)
        with torch.inference_mode():
            frozen.add_(1)
        handle.wait("cached", 20)
        assert torch.equal(restored(client)["w"], large(1))


def test_a_cache_that_dies_before_the_fence_ends_no_training(cluster: Any) -> None:
    node = cluster(1)[0]
    with node.client() as client:
        handle = client.save(1, {"w": large(1)}, overlap=True)
        node.kill()
        client.fence()
        for level in LEVELS:
            assert getattr(handle, level).exception(10) is not None


@pytest.mark.parametrize("overlap", [False, True])
def test_a_copy_that_is_not_what_it_was_made_of_is_not_saved(
    three: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    copy, fill = Target.copy, Target.fill

    def badly(target: Target, *given: Any) -> None:
        (copy if overlap else fill)(target, *given)
        for tensor in target.tensors:
            tensor.view(torch.uint8)[::100] ^= 1

    state = {"w": large(1), "v": large(2)}
    with three[0].client(f"bad-copy-{overlap}") as client:
        client.save(1, state).wait("cached", 20)
        monkeypatch.setattr(Target, "copy" if overlap else "fill", badly)
        handle = client.save(2, state, overlap=overlap)
        client.fence()
        with pytest.raises(Corrupt, match=r"^step 2 is saved nowhere: the copy of state\.[wv] is not what it was made of"):
            handle.wait("cached", 5)
        assert capfd.readouterr().err.count("training goes on") == 1
        monkeypatch.undo()
        found = client.load()
        assert found is not None
        assert found.step == 1
        client.save(3, state).wait("cached", 20)
        assert torch.equal(restored(client)["v"], large(2))


def test_an_unknown_way_to_do_when_memory_is_full() -> None:
    with pytest.raises(UsageError, match="there is no way 'skip' to do when memory is full; there are wait, raise, drop_oldest"):
        Client("job", when_full="skip")


@pytest.mark.parametrize("when_full", ["wait", "raise"])
def test_full_memory_raises_if_that_is_wanted_and_is_never_silent(
    cluster: Any, when_full: str, capfd: pytest.CaptureFixture[str]
) -> None:
    node = cluster(1, "--memory-bytes", str(32 << 20), storage=None)[0]
    with node.client(when_full=when_full, timeout_s=0.2) as client:
        client.save(1, {"w": torch.zeros(1 << 18)}).wait("cached", 20)
        grown = {"w": torch.zeros(10 << 20)}
        if when_full == "raise":
            with pytest.raises(CannotRun):
                client.save(2, grown)
        else:
            with pytest.raises(CannotRun, match="step 2 is saved nowhere"):
                client.save(2, grown).wait("cached", 5)
            assert "step 2 is saved nowhere" in capfd.readouterr().err
        client.save(3, {"w": torch.zeros(1 << 18)}).wait("cached", 20)


def test_what_storage_waits_for_is_let_go_of_only_if_that_is_wanted(tmp_path: Path) -> None:
    folders = {"run_dir": str(tmp_path / "run"), "storage": str(tmp_path / "storage")}
    cache = Cache(Settings(node="n0", address="127.0.0.1", port=0, memory_bytes=2 * mmap.PAGESIZE, **folders))
    try:
        older, newer = (Key("j", Generation(5, step, "abcdef00"), 0) for step in (1, 2))
        for key in (older, newer):
            cache.seal(key, 1, 100, cache.take("rank", 100, "j"), "rank", {})
        # storage has begun to write the older one and is not through; all know that both are complete
        cache._storing["j"] = older.generation
        cache._complete["j"], cache._asked["j"] = {older.generation, newer.generation}, {older, newer}
        with pytest.raises(CannotRun, match="do not fit"):
            cache.take("rank", 100, "j")
        assert older in cache._shards
        cache.take("rank", 100, "j", drop=True)
        assert older not in cache._shards
        assert newer in cache._shards
        with pytest.raises(CannotRun, match="do not fit"):
            cache.take("rank", 100, "j", drop=True)
        assert newer in cache._shards
    finally:
        cache.index.close()
        cache.doors.close()
