"""A training state as a list of tensors and plain JSON, and back. No pickle: what is neither is refused by name."""

import re
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from mmap import mmap
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from checkpoint.errors import Corrupt, UsageError

ALIGN_BYTES = 64
_ODD_DTYPES = re.compile(r"torch\.(u?int[1-7]|q.*)")
_DTYPES = frozenset(d for d in vars(torch).values() if isinstance(d, torch.dtype) and not _ODD_DTYPES.fullmatch(str(d)))
_PLAIN = (bool, int, float, str, type(None))
_PLAIN_TYPES = frozenset(_PLAIN)
_INT_BITS = 10_000  # Python reads and writes whole numbers of up to 4300 digits


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
    seen: dict[tuple[Any, ...], int] = {}
    return flat._replace(skeleton=_flatten(state, flat, seen, "state"))


def _flatten(value: Any, flat: Flat, seen: dict[tuple[Any, ...], int], where: str) -> Any:
    if isinstance(value, Tensor):
        _check(value, where)
        # tied weights are one tensor under two names
        identity = (
            value.data_ptr() or id(value), value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg()
        )  # fmt: skip
        at = seen.setdefault(identity, len(flat.tensors))
        if at == len(flat.tensors):
            flat.tensors.append(value)
        return ["t", at]
    if isinstance(value, int) and value.bit_length() > _INT_BITS:
        raise UsageError(f"{where} is a whole number of {value.bit_length()} bits; at most {_INT_BITS} can be saved")
    if isinstance(value, _PLAIN):
        flat.values.append(value)
        return ["v", len(flat.values) - 1]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise UsageError(f"{where} has the key {key!r}; a state's keys are texts or whole numbers")
        return ["d", [[key, _flatten(item, flat, seen, f"{where}.{key}")] for key, item in value.items()]]
    if isinstance(value, (list, tuple)):
        kind = "l" if isinstance(value, list) else "u"
        return [kind, [_flatten(item, flat, seen, f"{where}[{i}]") for i, item in enumerate(value)]]
    if isinstance(value, Stateful):
        return _flatten(_told(value), flat, seen, where)
    raise UsageError(
        f"{where} is a {_kind(value)}, which cannot be saved: a state is made of tensors, plain values, dicts, lists, "
        "and objects with state_dict and load_state_dict"
    )


class Walker:
    """`flatten` for the same state again and again: what was found the last time is only looked over, not taken apart again.

    Training changes the numbers in its tensors, hardly ever the tensors. Where an object, key, shape, type or place in memory is
    another than the last time, the state is taken apart anew.
    """

    def __init__(self) -> None:
        self._parts: list[Any] = []
        self._forms: list[tuple[Any, ...]] = []
        self._tensors: list[Tensor] = []
        self._tied: list[Tensor] = []
        """Tensors that begin where another does, and their strides: one that is transposed in place is tied no longer."""
        self._strides: list[Any] = []
        self._plain_at: list[int] = []
        self._flat: Flat | None = None

    def flatten(self, state: Any) -> Flat:
        """Return what `flatten` returns, and the very same skeleton as long as the state keeps its form."""
        parts: list[Any] = []
        _collect(state, parts)
        if self._flat is not None and self._known(parts):
            values = [parts[i] for i in self._plain_at]
            if not any(isinstance(v, int) and v.bit_length() > _INT_BITS for v in values):
                return self._flat._replace(values=values)
        flat = flatten(state)
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if not {id(tensor) for tensor in flat.tensors} <= {id(tensor) for tensor in tensors}:
            # an object makes its tensors anew each time: they are never known again, and must not be held until the next save
            self._parts, self._flat, self._tensors, self._tied = [], None, [], []
            return flat
        self._parts, self._flat, self._tensors = parts, flat, tensors
        self._forms = [_form(tensor) for tensor in tensors]
        begin = Counter(form[0] for form in self._forms)
        self._tied = [tensor for tensor, form in zip(tensors, self._forms, strict=True) if begin[form[0]] > 1]
        self._strides = [tensor.stride() for tensor in self._tied]
        self._plain_at = [i for i, part in enumerate(parts) if isinstance(part, _PLAIN)]
        return flat

    def _known(self, parts: list[Any]) -> bool:
        """Whether the parts are those of the last time: the same tensors, equal keys, plain values of the same types."""
        if len(parts) != len(self._parts):
            return False
        for new, old in zip(parts, self._parts, strict=True):
            kind = type(new)
            if new is not old and (kind is not type(old) or (kind is tuple and new != old) or kind not in _COMPARED):
                return False
        same = self._forms == [_form(tensor) for tensor in self._tensors]
        return same and self._strides == [tensor.stride() for tensor in self._tied]


_COMPARED = frozenset({tuple, *_PLAIN})


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


def _collect(value: Any, parts: list[Any]) -> None:
    """Append the tensors and plain values of a state to `parts`, and the keys, lengths and kinds between them as tuples."""
    kind = type(value)
    if kind is Tensor or kind is torch.nn.Parameter or kind in _PLAIN_TYPES:
        parts.append(value)
    elif isinstance(value, Mapping):
        parts.append((kind, *value))
        for item in value.values():
            _collect(item, parts)
    elif isinstance(value, list | tuple):
        parts.append((kind, len(value)))
        for item in value:
            _collect(item, parts)
    elif not isinstance(value, Tensor) and isinstance(value, Stateful):
        _collect(_told(value), parts)
    else:
        # a tensor or number of a class of its own; whatever else it is, `flatten` refuses it
        parts.append(value)


def _told(value: Stateful) -> Any:
    """Return the state that an object tells; of a module its own tensors, so that they are known again, not new views of them."""
    if isinstance(value, torch.nn.Module) and type(value).state_dict is torch.nn.Module.state_dict:
        return value.state_dict(keep_vars=True)
    return value.state_dict()


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
    """Return why `state` cannot be put into `into`, empty when it can. Changes nothing.

    Only what holds tensors or `Stateful` objects must have the form of the checkpoint; plain data is replaced.
    """
    if isinstance(into, Tensor):
        if not isinstance(state, Tensor):
            return f"{where} is a tensor here and a {_kind(state)} in the checkpoint"
        if into.shape != state.shape or into.dtype != state.dtype:
            here, there = f"{into.dtype} {tuple(into.shape)}", f"{state.dtype} {tuple(state.shape)}"
            return f"{where} is {here} here and {there} in the checkpoint"
        return ""
    if isinstance(into, torch.nn.Module):
        return misfit(dict(into.state_dict()), state, where)
    if isinstance(into, torch.optim.Optimizer):
        if not isinstance(state, Mapping) or "param_groups" not in state:
            return f"{where} is an optimizer here and none in the checkpoint"
        sizes, saved = ([len(group["params"]) for group in groups] for groups in (into.param_groups, state["param_groups"]))
        return "" if sizes == saved else f"{where} has groups of {sizes} parameters here and of {saved} in the checkpoint"
    if _is_plain(into):
        return ""
    if isinstance(into, Mapping):
        if not isinstance(into, MutableMapping):
            return f"{where} is a {_kind(into)} here, which cannot be filled"
        if not isinstance(state, Mapping) or set(into) != set(state):
            keys = set(into) ^ set(state) if isinstance(state, Mapping) else set(into)
            return (
                f"{where} has {sorted(map(str, keys))[0]!r} only here or only in the checkpoint"
                if keys
                else f"{where} is no dict"
            )
        return next(filter(None, (misfit(item, state[key], f"{where}.{key}") for key, item in into.items())), "")
    if isinstance(into, list | tuple):
        if not isinstance(state, list | tuple) or len(state) != len(into):
            return f"{where} has another length in the checkpoint"
        return next(filter(None, (misfit(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(into, state, strict=True)))), "")
    return ""


def put_into(into: Any, state: Any) -> None:
    """Write `state` into the tensors, dicts, lists and `Stateful` objects of `into`, which `misfit` has found to fit."""
    _filled(into, state)


def _filled(item: Any, value: Any) -> Any:
    """Return `item` with `value` written into it if it can hold it, else `value`."""
    if isinstance(item, Tensor):
        with torch.no_grad():
            item.copy_(value)
    elif isinstance(item, Stateful):
        item.load_state_dict(value)
    elif isinstance(item, MutableMapping) and isinstance(value, Mapping):
        if _is_plain(item):
            item.clear()
        for key in value:
            item[key] = _filled(item.get(key), value[key])
    elif isinstance(item, list) and isinstance(value, list):
        here = [None] * len(value) if _is_plain(item) else item
        item[:] = [_filled(old, new) for old, new in zip(here, value, strict=True)]
    elif isinstance(item, tuple) and not _is_plain(item):
        return tuple(_filled(old, new) for old, new in zip(item, value, strict=True))
    else:
        return value
    return item


def _is_plain(value: Any) -> bool:
    """Whether there is neither a tensor nor a `Stateful` object in a value."""
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return not isinstance(value, Tensor | Stateful)


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


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


def views(buffer: mmap, where: Sequence[Place]) -> list[Tensor]:
    """Return the tensors that lie in a buffer of bytes. Raises Corrupt when they do not fit into it.

    Each has a storage of its own: `torch.set_rng_state` and others read from where a storage begins, and `torch.save` writes all
    of it.
    """
    found = []
    for place in where:
        dtype = getattr(torch, place.dtype, None)
        if (
            not isinstance(dtype, torch.dtype)
            or place.offset % ALIGN_BYTES
            or not 0 <= place.offset <= place.offset + place.nbytes <= len(buffer)
        ):
            raise Corrupt(f"a tensor of {place.dtype} at byte {place.offset} does not fit into {len(buffer)} bytes")
        try:
            if place.nbytes:
                raw = torch.frombuffer(buffer, dtype=torch.uint8, count=place.nbytes, offset=place.offset)
                found.append(raw.view(dtype).view(place.shape))
            else:
                found.append(torch.empty(place.shape, dtype=dtype))
        except RuntimeError as error:
            raise Corrupt(f"a tensor of {place.dtype} and shape {place.shape} does not fit: {error}") from None
    return found


def _check(tensor: Tensor, where: str) -> None:
    # a state has thousands of tensors and a save is a stall, so this line takes half a microsecond
    if (
        tensor.dtype in _DTYPES
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_meta or hasattr(tensor, "to_local"))
    ):
        return
    if hasattr(tensor, "to_local"):
        kind = f"{_kind(tensor)}"
    elif tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type == "meta":
        kind = f"{'nested ' if tensor.is_nested else ''}{tensor.layout} tensor on {tensor.device}"
    else:
        kind = f"tensor of {tensor.dtype}"
    raise UsageError(f"{where} is a {kind}, which cannot be saved yet; save its local, dense part")
