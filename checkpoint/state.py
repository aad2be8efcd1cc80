"""A training state as a list of tensors and plain JSON, and back. No pickle: what is neither is refused by name."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from checkpoint.errors import Corrupt, UsageError

ALIGN_BYTES = 64


@runtime_checkable
class Stateful(Protocol):
    """A module, an optimizer, a scheduler, a data loader: anything that can tell its state and take it back."""

    def state_dict(self) -> Any:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take a state over."""
        ...


class Flat(NamedTuple):
    """A state taken apart. `skeleton` holds ``["t", i]`` for tensor i and ``["v", i]`` for the plain value i."""

    tensors: list[Tensor]
    values: list[Any]
    skeleton: Any


def flatten(state: Any) -> Flat:
    """Take a nested state of dicts, lists, tuples, tensors, plain values and `Stateful` objects apart.

    Raises
    ------
    UsageError
        Something in it is none of these; the sentence names where it is.
    """
    flat = Flat([], [], None)
    seen: dict[tuple[int, Any, Any, Any], int] = {}
    return flat._replace(skeleton=_flatten(state, flat, seen, "state"))


def _flatten(value: Any, flat: Flat, seen: dict[tuple[int, Any, Any, Any], int], where: str) -> Any:
    if isinstance(value, Tensor):
        _check(value, where)
        # tied weights are one tensor under two names
        identity = (value.data_ptr() or id(value), value.dtype, value.shape, value.stride())
        at = seen.setdefault(identity, len(flat.tensors))
        if at == len(flat.tensors):
            flat.tensors.append(value.detach())
        return ["t", at]
    if value is None or isinstance(value, bool | int | float | str):
        flat.values.append(value)
        return ["v", len(flat.values) - 1]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise UsageError(f"{where} has the key {key!r}; a state's keys are texts or whole numbers")
        return ["d", [[key, _flatten(item, flat, seen, f"{where}.{key}")] for key, item in value.items()]]
    if isinstance(value, list | tuple):
        kind = "l" if isinstance(value, list) else "u"
        return [kind, [_flatten(item, flat, seen, f"{where}[{i}]") for i, item in enumerate(value)]]
    if isinstance(value, Stateful):
        return _flatten(value.state_dict(), flat, seen, where)
    raise UsageError(
        f"{where} is a {type(value).__name__}, which cannot be saved: a state is made of tensors, plain values, dicts, lists, "
        "and objects with state_dict and load_state_dict"
    )


def unflatten(skeleton: Any, tensors: Sequence[Tensor], values: Sequence[Any]) -> Any:
    """Return the state of which `flatten` made these parts, `Stateful` objects as their state. Raises Corrupt."""
    try:
        kind, content = skeleton
        if kind == "t":
            return tensors[content]
        if kind == "v":
            return values[content]
        if kind == "d":
            return {key: unflatten(item, tensors, values) for key, item in content}
        if kind in "lu":
            return (list if kind == "l" else tuple)(unflatten(item, tensors, values) for item in content)
    except (IndexError, TypeError, ValueError) as error:
        raise Corrupt(f"the description of a state is broken: {error}") from None
    raise Corrupt(f"the description of a state has a part of kind {kind!r}")


def misfit(into: Any, state: Any, where: str = "state") -> str:
    """Return why `state` cannot be put into `into`, empty when it can. Changes nothing."""
    if isinstance(into, Tensor):
        if not isinstance(state, Tensor):
            return f"{where} is a tensor here and a {type(state).__name__} in the checkpoint"
        if into.shape != state.shape or into.dtype != state.dtype:
            here, there = f"{into.dtype} {tuple(into.shape)}", f"{state.dtype} {tuple(state.shape)}"
            return f"{where} is {here} here and {there} in the checkpoint"
        return ""
    if isinstance(into, torch.nn.Module):
        return misfit(dict(into.state_dict()), state, where)
    if isinstance(into, Mapping):
        if not isinstance(state, Mapping) or set(into) != set(state):
            keys = set(into) ^ set(state) if isinstance(state, Mapping) else set(into)
            return (
                f"{where} has {sorted(map(str, keys))[0]!r} only here or only in the checkpoint"
                if keys
                else f"{where} is no dict"
            )
        return next(filter(None, (misfit(item, state[key], f"{where}.{key}") for key, item in into.items())), "")
    if isinstance(into, list | tuple) and any(isinstance(item, Tensor | Stateful) for item in into):
        if not isinstance(state, list | tuple) or len(state) != len(into):
            return f"{where} has another length in the checkpoint"
        return next(filter(None, (misfit(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(into, state, strict=True)))), "")
    return ""


def put_into(into: Any, state: Any) -> None:
    """Write `state` into the tensors, dicts and `Stateful` objects of `into`, which `misfit` has found to fit."""
    if isinstance(into, Tensor):
        with torch.no_grad():
            into.copy_(state)
    elif isinstance(into, dict):
        for key, item in into.items():
            if isinstance(item, Tensor | dict | list | tuple | Stateful):
                put_into(item, state[key])
            else:
                into[key] = state[key]
    elif isinstance(into, Stateful):
        into.load_state_dict(state)
    elif isinstance(into, list | tuple):
        for i, item in enumerate(into):
            if isinstance(item, Tensor | dict | list | tuple | Stateful):
                put_into(item, state[i])
            elif isinstance(into, list):
                into[i] = state[i]


class Place(NamedTuple):
    """Where one tensor lies in a shard."""

    dtype: str
    shape: list[int]
    offset: int
    nbytes: int


def places(tensors: Sequence[Tensor]) -> tuple[list[Place], int]:
    """Return where each tensor goes, aligned, and how many bytes all take."""
    found, at = [], 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        found.append(Place(str(tensor.dtype).removeprefix("torch."), list(tensor.shape), at, nbytes))
        at += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
    return found, at


def views(buffer: Tensor, where: Sequence[Place]) -> list[Tensor]:
    """Return the tensors that lie in a buffer of bytes. Raises Corrupt when they do not fit into it."""
    found = []
    for place in where:
        dtype = getattr(torch, place.dtype, None)
        if not isinstance(dtype, torch.dtype) or not 0 <= place.offset <= place.offset + place.nbytes <= buffer.numel():
            raise Corrupt(f"a tensor of {place.dtype} at byte {place.offset} does not fit into {buffer.numel()} bytes")
        try:
            if place.nbytes:
                found.append(buffer[place.offset : place.offset + place.nbytes].view(dtype).view(place.shape))
            else:
                found.append(torch.empty(place.shape, dtype=dtype))
        except RuntimeError as error:
            raise Corrupt(f"a tensor of {place.dtype} and shape {place.shape} does not fit: {error}") from None
    return found


def _check(tensor: Tensor, where: str) -> None:
    if hasattr(tensor, "to_local") or tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind = type(tensor).__name__ if hasattr(tensor, "to_local") else f"{tensor.layout} tensor on {tensor.device}"
        raise UsageError(f"{where} is a {kind}, which cannot be saved yet; save its local, dense part")
