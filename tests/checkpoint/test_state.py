import json
import math
import random
import re
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from mmap import mmap
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from checkpoint.errors import Corrupt, UsageError
from checkpoint.state import ALIGN_BYTES, Parts, Place, Target, Walker, flatten, misfit, places, put_into, unflatten, views

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
W = torch.ones(2)
REFUSED = [d for d in DTYPES if re.fullmatch(r"torch\.(u?int[1-7]|qu?int.*)", str(d))]


def through_memory(state: Any) -> Any:
    """Return a state after the way that it takes in a save and a load."""
    flat = flatten(state)
    where, nbytes = places(flat.tensors)
    slab = mmap(-1, nbytes + 7)
    if flat.tensors:
        Target(slab, where).fill(flat.source)
    told = json.loads(json.dumps({"skeleton": flat.skeleton, "places": where, "values": flat.values}))
    return unflatten(told["skeleton"], views(slab, [Place(*item) for item in told["places"]]), told["values"])


def of_bytes(dtype: torch.dtype, count: int) -> Tensor:
    """Return a tensor of arbitrary bits, NaNs and all."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count * size,), dtype=torch.uint8)
    return raw.view(dtype)


def bits(tensor: Tensor) -> list[int]:
    return [] if not tensor.numel() else tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in REFUSED], ids=str)
def test_every_bit_of_every_dtype_comes_back(dtype: torch.dtype) -> None:
    for tensor in (of_bytes(dtype, 24).view(2, 3, 4), of_bytes(dtype, 1).view(()), of_bytes(dtype, 0).view(0, 5)):
        (back,) = through_memory([tensor])
        assert (back.dtype, back.shape) == (dtype, tensor.shape)
        assert bits(back) == bits(tensor)


@pytest.mark.parametrize("dtype", [d for d in REFUSED if "q" not in str(d)], ids=str)
def test_a_dtype_that_torch_cannot_copy_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match=rf"^state\.w is a tensor of {dtype}, which cannot be saved yet"):
        flatten({"w": torch.empty(3, dtype=dtype)})


@pytest.mark.filterwarnings("ignore:.*quant.*")
def test_a_quantized_tensor_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^state\.w is a tensor of torch\.quint8, which cannot be saved yet"):
        flatten({"w": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)})


def test_views_that_are_not_contiguous() -> None:
    base = torch.arange(24.0).view(4, 6)
    state = [base.t(), base[::2, 1::3], base[0].expand(3, 6), base[1:], torch.arange(6).view(2, 3).permute(1, 0)]
    flat = flatten(state)
    assert [tensor.nbytes for tensor in flat.tensors] == [base.nbytes, 6 * 8]  # `base` once, and the last
    came_back = through_memory(state)
    for back, tensor in zip(came_back, state, strict=True):
        assert torch.equal(back, tensor)
    came_back[0][0, 0] = 7  # views of one memory are so again
    assert came_back[1].shape == (2, 2)
    assert came_back[2][:, 0].tolist() == [7, 7, 7]


def test_parts_of_one_storage_that_do_not_overlap_are_saved_without_what_lies_between() -> None:
    base = torch.arange(1000.0)
    state = {"a": base[:10], "b": base[990:]}
    flat = flatten(state)
    assert [tensor.nbytes for tensor in flat.tensors] == [40, 40]
    assert through_memory(state)["b"].tolist() == list(range(990, 1000))


def test_views_of_other_dtypes_share_their_bytes() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j, 5 + 6j])
    state = {"z": z[1:], "real": z.real, "raw": z.view(torch.int32)[1:]}
    assert [tensor.nbytes for tensor in flatten(state).tensors] == [z.nbytes]
    back = through_memory(state)
    assert torch.equal(back["z"], z[1:])
    assert torch.equal(back["real"], z.real)
    assert torch.equal(back["raw"], z.view(torch.int32)[1:])


def test_a_conjugate_is_not_taken_for_what_it_is_the_conjugate_of() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    state = [z, z.conj(), z.imag, z.conj().imag]
    for back, tensor in zip(through_memory(state), state, strict=True):
        assert torch.equal(back, tensor)


def test_each_tensor_is_aligned_and_none_overlap() -> None:
    where, nbytes = places(
        [torch.empty(n, dtype=d) for n, d in ((1, torch.bool), (0, torch.int8), (5, torch.float64), (3, torch.int8))]
    )
    assert [item.offset % ALIGN_BYTES for item in where] == [0] * 4
    ends = [item.offset + item.nbytes for item in where]
    assert all(end <= item.offset for end, item in zip(ends, where[1:], strict=False))
    assert ends[-1] <= nbytes


def test_tied_weights_are_saved_once_and_stay_tied() -> None:
    tied = torch.nn.Linear(3, 3)
    state = {"a": tied.weight, "b": tied.weight, "model": tied, "part": tied.weight[:1], "turned": tied.weight.t()}
    flat = flatten(state)
    assert [tensor.nbytes for tensor in flat.tensors] == [36, 12]  # the weight and what lies in it, and its bias
    back = through_memory(state)
    assert back["a"] is back["b"] is back["model"]["weight"]
    assert torch.equal(back["turned"], tied.weight.t())
    back["a"].fill_(7)
    assert (back["turned"] == 7).all()
    assert (back["part"] == 7).all()


def test_shapes_of_states() -> None:
    state = {
        "nested": {1: [torch.ones(2), (None, True, False, "text", "")], -7: {}, "7": []},
        "tuple": (),
        "order": OrderedDict(b=1, a=2),
        "large": 2**200,
        "negative": -(10**40),
        "float": [0.1, -0.0, 1e-320, math.inf, -math.inf],
        "words": "\ud800 \x00 ünïcödé",
    }
    back = through_memory(state)
    assert torch.equal(back["nested"][1].pop(0), state["nested"][1].pop(0))  # type: ignore[index]
    assert back == {**state, "order": {"b": 1, "a": 2}}
    assert list(back["order"]) == ["b", "a"]
    assert math.copysign(1, back["float"][1]) == -1
    assert {type(back[name]) for name in ("large", "negative")} == {int}
    assert type(back["tuple"]) is tuple
    assert list(back["nested"]) == [1, -7, "7"]
    assert math.isnan(through_memory(math.nan))
    assert torch.equal(through_memory(torch.ones(2)), torch.ones(2))


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"a": {"b": [1, {2}]}}, r"^state\.a\.b\[1\] is a set, which cannot be saved"),
        ({"a": b"bytes"}, r"^state\.a is a bytes, which"),
        ({"a": (lambda: 0,)}, r"^state\.a\[0\] is a function, which"),
        ({"a": torch.Size}, r"^state\.a is a type, which"),
        ({"a": {(1, 2): 3}}, r"^state\.a has the key \(1, 2\); a state's keys are texts or whole numbers"),
        ({True: 3}, r"^state has the key True"),
        ({"a": 1j}, r"^state\.a is a complex, which"),
        ({"a": 1 << 20_000}, r"^state\.a is a whole number of 20001 bits"),
        ({"a": torch.device("cpu")}, r"^state\.a is a torch\.device, which"),
        ({"a": torch.eye(2).to_sparse()}, r"^state\.a is a torch.sparse_coo tensor on cpu, which cannot be saved yet"),
        ({"a": torch.empty(2, device="meta")}, r"^state\.a is a torch.strided tensor on meta, which"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_place(state: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        flatten(state)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^state\.n is a .*, which cannot be saved yet"):
        flatten({"n": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])})


@pytest.mark.parametrize(
    "skeleton",
    [
        None,
        7,
        [],
        ["t"],
        ["t", 9],
        ["v", 9],
        ["x", 0],
        ["d", [["a"]]],
        ["l", 3],
        ["t", "0"],
        [[], 0],
        ["k", ["a", 1]],
        ["w", [0, "float32", [2], [1], 0]],
        ["w", [0, "float32", [1], [1], 1]],
        ["w", [0, "float32", [1], [1], -1]],
        ["w", [9, "float32", [1], [1], 0]],
        ["w", [0, "none", [1], [1], 0]],
        ["w", [0, "float32", [1, 1], [1], 0]],
    ],
)
def test_a_broken_description_is_corrupt(skeleton: Any) -> None:
    with pytest.raises(Corrupt):
        unflatten(skeleton, [torch.ones(1)], [1])


@pytest.mark.parametrize(
    "place",
    [
        Place("float32", [2], 0, 9),
        Place("float32", [2], 8, 8),
        Place("float32", [3], 0, 8),
        Place("float32", [1], 2, 4),
        Place("float32", [2], -8, 8),
        Place("Tensor", [2], 0, 8),
        Place("nonsense", [2], 0, 8),
    ],
)
def test_a_place_outside_of_the_shard_is_corrupt(place: Place) -> None:
    with pytest.raises(Corrupt):
        views(mmap(-1, 8), [place])


def learner(seed: int, steps: int = 3) -> dict[str, Any]:
    """Return a small training state after some steps, different for each seed."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + seed))
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)],
        milestones=[2],
    )
    made = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0, "losses": []}
    for _ in range(steps):
        advance(made)
    return made | {"rng": torch.get_rng_state()}


def advance(state: dict[str, Any]) -> float:
    loss = state["model"](torch.randn(16, 4)).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    state["scheduler"].step()
    state["step"] += 1
    state["losses"].append(loss.item())
    return loss.item()


@pytest.mark.parametrize("steps", [0, 5])
def test_training_goes_on_bit_by_bit_where_it_was(steps: int) -> None:
    """The restored one may be fresh, as after a start, or have taken steps of its own."""
    first = learner(1)
    saved = through_memory(first)
    second = learner(2, steps)
    assert misfit(second, saved) == ""
    put_into(second, saved)
    assert (second["step"], second["losses"]) == (first["step"], first["losses"])
    after = []
    for state in (first, second):
        torch.set_rng_state(saved["rng"])
        after.append([advance(state) for _ in range(4)])
    assert after[0] == after[1]
    for a, b in zip(first["model"].state_dict().values(), second["model"].state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("into", "state", "sentence"),
    [
        ({"a": W}, {"a": torch.ones(3)}, "state.a is torch.float32 (2,) here and torch.float32 (3,) in the checkpoint"),
        ({"a": W}, {"a": W.int()}, "state.a is torch.float32 (2,) here and torch.int32 (2,) in the checkpoint"),
        ({"a": W}, {"a": 1}, "state.a is a tensor here and a int in the checkpoint"),
        ({"a": W}, {"b": W}, "state has 'a' only here or only in the checkpoint"),
        ({"a": W}, [1], "state has 'a' only here or only in the checkpoint"),
        ({"a": {"b": W}}, {"a": {}}, "state.a has 'b' only here or only in the checkpoint"),
        ([{"b": W}], [{"b": W[:1]}], "state[0].b is torch.float32 (2,) here and torch.float32 (1,) in the checkpoint"),
        ([W], [], "state has another length in the checkpoint"),
        (([W],), {"a": 1}, "state has another length in the checkpoint"),
        (torch.nn.Linear(2, 2), {"weight": torch.ones(2, 2)}, "state has 'bias' only here or only in the checkpoint"),
    ],
)
def test_what_does_not_fit_is_told_in_one_sentence(into: Any, state: Any, sentence: str) -> None:
    assert misfit(into, state) == sentence


def test_an_optimizer_of_other_groups_does_not_fit() -> None:
    one, two = torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    here, saved = torch.optim.SGD(one.parameters(), 0.1), torch.optim.SGD(two.parameters(), 0.1).state_dict()
    assert misfit({"o": here}, {"o": saved}) == "state.o has groups of [2] parameters here and of [4] in the checkpoint"
    assert misfit({"o": here}, {"o": {}}) == "state.o is an optimizer here and none in the checkpoint"


def test_plain_data_is_replaced_whatever_its_form() -> None:
    w, losses, meters = torch.zeros(2), [1.0], {"old": 1}
    into = {"w": w, "losses": losses, "meters": meters, "pair": (1, torch.zeros(1)), "later": None, "list": [torch.zeros(1), 5]}
    state = {
        "w": torch.ones(2), "losses": [1.0, 2.0, 3.0], "meters": {"new": [2]}, "pair": (7, torch.ones(1)),
        "later": {"ema": torch.ones(3)}, "list": [torch.ones(1), 6],
    }  # fmt: skip
    assert misfit(into, state) == ""
    put_into(into, state)
    assert w.tolist() == [1, 1]
    assert into["w"] is w
    assert losses == [1.0, 2.0, 3.0]
    assert meters == {"new": [2]}
    assert into["losses"] is losses
    assert into["pair"] == (7, torch.ones(1))
    assert torch.equal(into["later"]["ema"], torch.ones(3))  # type: ignore[index]
    assert into["list"][1] == 6  # type: ignore[index]


def test_a_mapping_that_cannot_be_changed_is_told() -> None:
    frozen = MappingProxyType({"w": torch.zeros(2)})
    assert misfit({"a": frozen}, {"a": {"w": torch.ones(2)}}) == "state.a is a mappingproxy here, which cannot be filled"


def test_a_restored_tensor_has_a_storage_of_its_own() -> None:
    """`torch.set_rng_state` ignores where a tensor begins in its storage, and would take other bytes, or crash."""
    back = through_memory({"w": torch.ones(100), "rng": torch.get_rng_state()})
    assert back["rng"].storage_offset() == 0
    assert back["rng"].untyped_storage().nbytes() == back["rng"].numel()
    torch.set_rng_state(back["rng"])


def trained() -> tuple[dict[str, Any], torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "epoch": 1, "seen": [1, 2.5, None, "a"]}, model, optimizer


def same_flat(walker: Walker, state: Any) -> bool:
    """Whether the walker finds what a fresh look finds; return whether it knew the form again."""
    before = walker._flat
    found, fresh = walker.flatten(state), flatten(state)
    assert (found.skeleton, found.values) == (fresh.skeleton, fresh.values)
    assert [t.data_ptr() for t in found.tensors] == [t.data_ptr() for t in fresh.tensors]
    assert [bits(t) for t in found.tensors] == [bits(t) for t in fresh.tensors]
    return before is not None and found.skeleton is before.skeleton


def test_a_walker_knows_a_state_again_and_takes_its_new_numbers() -> None:
    state, model, optimizer = trained()
    walker = Walker()
    assert not same_flat(walker, state)
    for epoch in range(2, 5):
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 1 / epoch
        state["epoch"], state["seen"] = epoch, [epoch, 0.5, None, "b"]
        assert same_flat(walker, state)
        assert epoch in walker.flatten(state).values


def replace_data(state: dict[str, Any]) -> None:
    state["model"][0].weight.data = torch.randn(4, 4)


def replace_parameter(state: dict[str, Any]) -> None:
    state["model"][0].weight = torch.nn.Parameter(torch.randn(4, 4))


def resize(state: dict[str, Any]) -> None:
    state["model"][0].weight.data = torch.randn(2, 4)


def retype(state: dict[str, Any]) -> None:
    state["model"].half()


def tie(state: dict[str, Any]) -> None:
    state["model"][0].bias = state["model"][1].bias


def new_module(state: dict[str, Any]) -> None:
    state["model"].append(torch.nn.Linear(4, 1))


def new_moment(state: dict[str, Any]) -> None:
    first = next(iter(state["optimizer"].state.values()))
    first["exp_avg"] = first["exp_avg"].clone() + 1


def rename(state: dict[str, Any]) -> None:
    state["Epoch"] = state.pop("epoch")


def other_type(state: dict[str, Any]) -> None:
    state["epoch"] = 1.0


def longer(state: dict[str, Any]) -> None:
    state["seen"] = [1, 2.5, None, "a", 3]


def tuple_for_list(state: dict[str, Any]) -> None:
    state["seen"] = tuple(state["seen"])


@pytest.mark.parametrize(
    "change",
    [replace_data, replace_parameter, resize, retype, tie, new_module, new_moment, rename, other_type, longer, tuple_for_list],
)
def test_a_walker_sees_every_change_of_form(change: Any) -> None:
    state, _, _ = trained()
    walker = Walker()
    same_flat(walker, state)
    assert same_flat(walker, state)
    change(state)
    assert not same_flat(walker, state)
    assert same_flat(walker, state)


def test_a_walker_unties_what_was_tied() -> None:
    state = {"model": torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))}
    state["model"][1].weight = state["model"][0].weight
    walker = Walker()
    same_flat(walker, state)
    assert len(walker.flatten(state).tensors) == 3
    state["model"][1].weight = torch.nn.Parameter(torch.randn(4, 4))
    same_flat(walker, state)
    assert len(walker.flatten(state).tensors) == 4


class Pair(NamedTuple):
    """A tuple of a class of its own."""

    first: Any
    second: Any


class Row(list[Any]):
    """A list of a class of its own."""


def test_a_walker_looks_into_lists_and_tuples_of_any_class() -> None:
    state: dict[str, Any] = {"pair": Pair([1], torch.ones(2)), "row": Row([1, 2]), "size": torch.Size([3, 4])}
    walker = Walker()
    same_flat(walker, state)
    assert same_flat(walker, state)
    state["pair"].first[0] = state["row"][1] = 5
    assert same_flat(walker, state)
    assert walker.flatten(state).values == [5, 1, 5, 3, 4]
    state["row"].append(6)
    assert not same_flat(walker, state)


def test_a_walker_unties_what_is_transposed_in_place() -> None:
    square = torch.arange(4.0).view(2, 2)
    state = {"a": square, "b": square.view(2, 2), "c": torch.ones(2, 2)}
    walker = Walker()
    same_flat(walker, state)
    assert same_flat(walker, state)
    state["b"].t_()
    assert not same_flat(walker, state)
    state["c"].t_()
    assert not same_flat(walker, state)


def test_a_walker_does_not_hold_what_an_object_makes_anew_each_time() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    class Average:
        def state_dict(self) -> dict[str, torch.Tensor]:
            tensor = torch.ones(10)
            made.append(weakref.ref(tensor))
            return {"average": tensor}

        def load_state_dict(self, state_dict: Any) -> None: ...

    walker = Walker()
    assert [tensor.tolist() for tensor in walker.flatten({"a": Average()}).tensors] == [[1.0] * 10]
    assert [reference() for reference in made] == [None, None]


def test_a_walker_refuses_what_becomes_unsavable() -> None:
    state, _, _ = trained()
    walker = Walker()
    walker.flatten(state)
    state["epoch"] = 1 << 20_000
    with pytest.raises(UsageError, match=r"^state\.epoch is a whole number of 20001 bits"):
        walker.flatten(state)
    state["epoch"] = {1}
    with pytest.raises(UsageError, match=r"^state\.epoch is a set"):
        walker.flatten(state)


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    """A process group of this process alone, and its mesh."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0], mesh_dim_names=("shards",))
    dist.destroy_process_group()


def sharded(mesh: DeviceMesh, seed: int) -> dict[str, Any]:
    """Return a training state whose parameters and moments are DTensors."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    model.bias = torch.nn.Parameter(distribute_tensor(model.bias.detach(), mesh, [Replicate()]))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(distribute_tensor(torch.randn(2, 4), mesh, [Replicate()])).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_a_dtensor_is_saved_by_its_local_part_and_goes_back_to_where_it_belongs(one_rank: DeviceMesh) -> None:
    first = sharded(one_rank, 1)
    saved = through_memory(first)
    weight = saved["model"]["weight"]
    assert isinstance(weight, Parts)
    assert weight.kind == "torch.distributed.tensor.DTensor"
    assert weight.about == {"shape": [3, 4], "mesh": [1], "coordinate": [0], "placements": ["S(0)"]}
    assert torch.equal(weight.tensors["_local_tensor"], first["model"].weight.to_local())
    second = sharded(one_rank, 2)
    fresh = sharded(one_rank, 3)
    fresh["optimizer"] = torch.optim.AdamW(fresh["model"].parameters(), foreach=False)
    for other in (second, fresh):
        assert misfit(other, saved) == ""
        put_into(other, saved)
        assert torch.equal(other["model"].weight.full_tensor(), first["model"].weight.full_tensor())
        mine, theirs = (next(iter(state["optimizer"].state.values()))["exp_avg"] for state in (other, first))
        assert isinstance(mine, DTensor)
        assert mine.placements == theirs.placements
        assert torch.equal(mine.to_local(), theirs.to_local())
        other["optimizer"].step()


def test_a_dtensor_that_is_placed_otherwise_does_not_fit(one_rank: DeviceMesh) -> None:
    here, there = (distribute_tensor(torch.ones(2, 2), one_rank, [Shard(dim)]) for dim in (0, 1))
    told = misfit({"w": here}, through_memory({"w": there}))
    assert told.startswith("state.w is {'shape': [2, 2], 'mesh': [1], 'coordinate': [0], 'placements': ['S(0)']} here and {")
    assert (
        misfit({"w": here}, {"w": torch.ones(2, 2)})
        == "state.w is a torch.distributed.tensor.DTensor here and none in the checkpoint"
    )
    told = misfit({"w": torch.ones(2, 2)}, through_memory({"w": there}))
    assert told == "state.w is a tensor here and part of a torch.distributed.tensor.DTensor in the checkpoint"
    model = torch.nn.Linear(2, 2)
    saved = {"state": {0: {"exp_avg": through_memory(there)}}, "param_groups": [{"params": [0, 1]}]}
    told = misfit(torch.optim.SGD(model.parameters(), 0.1), saved)
    assert told == "state.state.0.exp_avg is a torch.distributed.tensor.DTensor in the checkpoint and its parameter a tensor here"


def test_a_walker_knows_dtensors_again(one_rank: DeviceMesh) -> None:
    state, walker = sharded(one_rank, 1), Walker()
    assert not same_flat(walker, state)
    assert same_flat(walker, state)
    state["model"].weight.data.to_local().fill_(7)
    assert same_flat(walker, state)
    state["model"].weight = torch.nn.Parameter(distribute_tensor(torch.ones(3, 4), one_rank, [Replicate()]))
    assert not same_flat(walker, state)


class Scaled(Tensor):
    """Numbers in eight bits and a scale, with what the class tells of itself."""

    numbers: Tensor
    scale: Tensor
    rule: Any

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor, rule: Any) -> "Scaled":
        made = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.numbers, made.scale, made.rule = numbers, scale, rule
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scale"], self.rule

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


def test_a_tensor_of_tensors_is_saved_by_its_parts() -> None:
    def made(value: int, rule: Any = ("rows", torch.int8)) -> dict[str, Any]:
        return {"w": Scaled(torch.full((2, 3), value, dtype=torch.int8), torch.tensor(value / 2), rule)}

    saved = through_memory(made(5))
    into = made(1)
    assert misfit(into, saved) == ""
    put_into(into, saved)
    assert into["w"].numbers.tolist() == [[5] * 3] * 2
    assert into["w"].scale == 2.5
    assert "columns" in misfit(made(1, ("columns", torch.int8)), saved)
    walker = Walker()
    state = made(5)
    assert not same_flat(walker, state)
    assert same_flat(walker, state)
    state["w"].rule = ("columns", torch.int8)
    assert not same_flat(walker, state)
    with pytest.raises(UsageError, match=r"^state\.w is a .*Scaled, .*__tensor_flatten__ tells more than tensors and plain data"):
        flatten(made(5, object()))


class Hidden(Tensor):
    """A tensor that keeps its data where nobody sees it."""

    @staticmethod
    def __new__(cls) -> "Hidden":
        return Tensor._make_wrapper_subclass(cls, (2,), dtype=torch.float32)  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


def test_a_tensor_without_memory_is_refused() -> None:
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    for tensor in (freed, Hidden()):
        with pytest.raises(UsageError, match=r"^state\.w is a .* without memory of its own, which cannot be saved yet"):
            flatten({"w": tensor})


class Named(Tensor):
    """A tensor with nothing but a class of its own."""


def test_a_tensor_with_a_class_of_its_own_is_saved_as_a_tensor() -> None:
    state = {"w": torch.arange(4.0).as_subclass(Named)}
    walker = Walker()
    assert not same_flat(walker, state)
    assert same_flat(walker, state)
    assert through_memory(state)["w"].tolist() == [0, 1, 2, 3]


def test_an_optimizer_is_filled_where_it_is() -> None:
    """New memory costs more than a copy; what was there before is used again, and nothing is shared with the checkpoint."""
    first, second = learner(1), learner(2)
    saved = through_memory(first)
    moment = next(iter(second["optimizer"].state.values()))["exp_avg"]
    put_into(second, saved)
    assert next(iter(second["optimizer"].state.values()))["exp_avg"] is moment
    for tensor in saved["model"].values():
        tensor.zero_()
    assert torch.equal(second["model"][0].weight, first["model"][0].weight)


def test_a_sample_finds_a_copy_that_went_wrong() -> None:
    flat = flatten({"a": torch.ones(100_000), "b": torch.ones(3, 2).t(), "empty": torch.empty(0)})
    where, nbytes = places(flat.tensors)
    target = Target(mmap(-1, nbytes), where)
    target.fill(flat.source)
    draw = random.Random(1)
    assert all(target.differs(flat.tensors, range(3), 0.01, draw) is None for _ in range(100))
    assert target.differs(flat.tensors, [], 0.01, draw) is None
    target.tensors[1][0, 0] = 2
    assert target.differs(flat.tensors, [1], 0.01, draw) == 1
    target.tensors[0].view(torch.uint8)[:] += 1
    assert target.differs(flat.tensors, [0], 0.01, draw) == 0


def test_a_state_that_holds_itself_is_refused_in_words() -> None:
    state: dict[str, Any] = {"w": torch.ones(2)}
    state["me"] = state
    for take in (flatten, Walker().flatten):
        with pytest.raises(UsageError, match="the state holds itself, or is nested hundreds deep"):
            take(state)
