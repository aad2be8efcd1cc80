"""A training state as a list of tensors and plain JSON, and back. No pickle: what is neither is refused by name."""

import ctypes
import json
import operator
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from checkpoint.errors import Corrupt, UsageError

ALIGN_BYTES = 64
BY_ADDRESS_BYTES = 1 << 20
"""Smaller tensors are copied by address: from here on torch's own copy is as fast, and uses several threads."""
COPIERS = 4
"""Threads that fill tensors at a restore, when no training step needs the processors."""
SAMPLE_BYTES = 256 << 10
"""Of one tensor so much is compared at most."""
_LARGEST_ITEM_BYTES = 16
_ODD_DTYPES = re.compile(r"torch\.(u?int[1-7]|q.*)")
_DTYPES = frozenset(d for d in vars(torch).values() if isinstance(d, torch.dtype) and not _ODD_DTYPES.fullmatch(str(d)))
_PLAIN = (bool, int, float, str, type(None))
_PLAIN_TYPES = frozenset(_PLAIN)
_TOO_DEEP = "the state holds itself, or is nested hundreds deep: a list or dict in it contains one that contains it"
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


class Parts(NamedTuple):
    """A tensor that is made of others, as it comes back when there is none of its kind to put it into.

    `kind` is its class, `about` what it says of itself, of a DTensor where its local part belongs; `tensors` are its parts.
    """

    kind: str
    about: Any
    tensors: dict[str, Any]


class Source:
    """Tensors of a state as a copy reads them: those that `which` numbers, all by default.

    Small ones that lie dense in this machine's memory are copied by address: what torch adds to a copy takes as long as copying
    10 KiB. The addresses are those of now, so a source is good as long as `Walker` finds the state where it was.
    """

    def __init__(self, tensors: list[Tensor], which: Iterable[int] | None = None) -> None:
        numbers = range(len(tensors)) if which is None else list(which)
        self.tensors = tensors
        self.small = [i for i in numbers if 0 < tensors[i].nbytes < BY_ADDRESS_BYTES and _is_dense(tensors[i])]
        self.others = sorted(set(numbers) - set(self.small))
        self.addresses = [ctypes.c_void_p(tensors[i].data_ptr()) for i in self.small]
        self.lengths = [ctypes.c_size_t(tensors[i].nbytes) for i in self.small]


class Flat(NamedTuple):
    """A state taken apart.

    `skeleton` holds ``["t", i]`` for tensor i, ``["w", [i, dtype, shape, stride, offset]]`` for a view of it, ``["v", i]`` for
    the plain value i, and ``["k", [kind, about, [[name, part], ...]]]`` for a tensor of tensors. `leaves` are the state's own
    tensors, `names` say where each is, and `homes` which of `tensors` holds its bytes.
    """

    tensors: list[Tensor]
    values: list[Any]
    skeleton: Any
    leaves: list[Tensor]
    names: list[str]
    homes: list[int]
    source: Source


def flatten(state: Any) -> Flat:
    """Take a nested state of dicts, lists, tuples, tensors, plain values and `Stateful` objects apart.

    What lies in the same memory is saved once: tied weights, and views of one storage that overlap.

    Raises
    ------
    UsageError
        Something in it is none of these; the sentence names where it is.
    """
    apart = _Apart()
    try:
        skeleton = apart.take(state, "state")
    except RecursionError:
        raise UsageError(_TOO_DEEP) from None
    tensors, homes = apart.shared()
    return Flat(tensors, apart.values, skeleton, apart.leaves, apart.names, homes, Source(tensors))


class _Apart:
    """What was found so far while a state is taken apart."""

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self.names: list[str] = []
        self.values: list[Any] = []
        self._nodes: list[list[Any]] = []
        self._seen: dict[tuple[Any, ...], int] = {}

    def take(self, value: Any, where: str) -> Any:
        """Return the skeleton of a value."""
        if isinstance(value, Tensor):
            return self._parts(value, where) if hasattr(value, "__tensor_flatten__") else self._leaf(value, where)
        if isinstance(value, int) and value.bit_length() > _INT_BITS:
            raise UsageError(f"{where} is a whole number of {value.bit_length()} bits; at most {_INT_BITS} can be saved")
        if isinstance(value, _PLAIN):
            self.values.append(value)
            return ["v", len(self.values) - 1]
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str | int) or isinstance(key, bool):
                    raise UsageError(f"{where} has the key {key!r}; a state's keys are texts or whole numbers")
            return ["d", [[key, self.take(item, f"{where}.{key}")] for key, item in value.items()]]
        if isinstance(value, (list, tuple)):
            kind = "l" if isinstance(value, list) else "u"
            return [kind, [self.take(item, f"{where}[{i}]") for i, item in enumerate(value)]]
        if isinstance(value, Stateful):
            return self.take(_told(value), where)
        raise UsageError(
            f"{where} is a {_kind(value)}, which cannot be saved: a state is made of tensors, plain values, dicts, lists, "
            "and objects with state_dict and load_state_dict"
        )

    def _leaf(self, tensor: Tensor, where: str) -> Any:
        _check(tensor, where)
        # tied weights are one tensor under two names
        identity = (
            tensor.data_ptr() or id(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
        )  # fmt: skip
        at = self._seen.setdefault(identity, len(self._nodes))
        if at == len(self._nodes):
            self.leaves.append(tensor)
            self.names.append(where)
            self._nodes.append(["t", at])
        return self._nodes[at]

    def _parts(self, tensor: Any, where: str) -> Any:
        about = _about(tensor, where)
        parts = [[name, self.take(getattr(tensor, name), f"{where}.{name}")] for name in _part_names(tensor)]
        return ["k", [_kind(tensor), about, parts]]

    def shared(self) -> tuple[list[Tensor], list[int]]:
        """Return the tensors to save and which of them holds each leaf, after what overlaps became views of one."""
        by_storage: dict[int, list[int]] = {}
        for i, tensor in enumerate(self.leaves):
            if tensor.numel() and not (tensor.is_conj() or tensor.is_neg()):
                by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(i)
        bases: dict[int, tuple[Tensor, int]] = {}
        for found in by_storage.values():
            for cluster in _overlapping([(*_span(self.leaves[i]), i) for i in found] if len(found) > 1 else []):
                start = min(begin for begin, _, _ in cluster) // _LARGEST_ITEM_BYTES * _LARGEST_ITEM_BYTES
                storage = self.leaves[cluster[0][2]].untyped_storage()
                base = torch.empty(0, dtype=torch.uint8, device=storage.device)
                base.set_(storage, start, (max(end for _, end, _ in cluster) - start,), (1,))
                bases |= {i: (base, start) for _, _, i in cluster}
        tensors: list[Tensor] = []
        homes: list[int] = []
        placed: dict[int, int] = {}
        for i, tensor in enumerate(self.leaves):
            if i not in bases:
                homes.append(len(tensors))
                tensors.append(
                    tensor if type(tensor) is Tensor or type(tensor) is torch.nn.Parameter else tensor.as_subclass(Tensor)
                )
                self._nodes[i][:] = ["t", homes[i]]
                continue
            base, start = bases[i]
            homes.append(placed.setdefault(id(base), len(tensors)))
            if homes[i] == len(tensors):
                tensors.append(base)
            at = tensor.storage_offset() - start // tensor.element_size()
            self._nodes[i][:] = ["w", [homes[i], _name(tensor.dtype), list(tensor.shape), list(tensor.stride()), at]]
        return tensors, homes


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor's bytes begin in its storage, and where they end."""
    begin, size = int(tensor.storage_offset()), tensor.element_size()
    length = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * size, (begin + length) * size


def _overlapping(spans: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Return the groups of spans that overlap, of two and more."""
    groups: list[list[tuple[int, int, int]]] = []
    reach = -1
    for span in sorted(spans):
        if span[0] < reach:
            groups[-1].append(span)
        else:
            groups.append([span])
        reach = max(reach, span[1])
    return [group for group in groups if len(group) > 1]


def _about(tensor: Any, where: str) -> Any:
    """Return what a tensor of other tensors says of itself, as plain data. Raises UsageError when that is something else."""
    if hasattr(tensor, "to_local"):
        mesh = tensor.device_mesh
        return {
            "shape": list(tensor.shape), "mesh": list(mesh.mesh.shape), "coordinate": mesh.get_coordinate(),
            "placements": [str(placement) for placement in tensor.placements],
        }  # fmt: skip
    names, context = tensor.__tensor_flatten__()
    try:
        if len(names) > len(_part_names(tensor)):
            raise TypeError
        return [list(tensor.shape), json.loads(json.dumps(context, default=_dtype_name))]
    except (TypeError, ValueError):
        raise UsageError(
            f"{where} is a {_kind(tensor)}, which cannot be saved: its __tensor_flatten__ tells more than tensors and plain data"
        ) from None


def _part_names(tensor: Any) -> list[str]:
    """Return the names of the tensors that a tensor is made of; a DTensor names its mesh besides."""
    return [name for name in tensor.__tensor_flatten__()[0] if isinstance(getattr(tensor, name), Tensor)]


def _dtype_name(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value)
    raise TypeError


class Walker:
    """`flatten` for the same state again and again: what was found the last time is only looked over, not taken apart again.

    Training changes the numbers in its tensors, hardly ever the tensors. Where an object, key, shape, type or place in memory is
    another than the last time, the state is taken apart anew.
    """

    def __init__(self) -> None:
        self._known = _Looks()
        self._forms: list[list[Any]] = []
        self._odd: list[Tensor] = []
        """Tensors whose strides do not follow from their shapes, or that begin where another does."""
        self._strides: list[Any] = []
        self._flat: Flat | None = None

    def flatten(self, state: Any) -> Flat:
        """Return what `flatten` returns, and the very same skeleton and source as long as the state keeps its form."""
        looks = _Looks()
        try:
            looks.over(state)
        except RecursionError:
            raise UsageError(_TOO_DEEP) from None
        too_large = any(isinstance(value, int) and value.bit_length() > _INT_BITS for value in looks.values)
        if self._flat is not None and not too_large and self._is_known(looks):
            return self._flat._replace(values=looks.values)
        flat = flatten(state)
        if not {id(tensor) for tensor in flat.leaves} <= {id(tensor) for tensor in looks.tensors}:
            # an object makes its tensors anew each time: they are never known again, and must not be held until the next save
            self._known, self._flat, self._odd = _Looks(), None, []
            return flat
        self._known, self._flat, self._forms = looks, flat, [list(map(look, looks.tensors)) for look in _LOOKS]
        begin = Counter(self._forms[0])
        self._odd = [t for t, at in zip(looks.tensors, self._forms[0], strict=True) if begin[at] > 1 or not t.is_contiguous()]
        self._strides = [tensor.stride() for tensor in self._odd]
        return flat

    def _is_known(self, looks: "_Looks") -> bool:
        """Whether this is the state of the last time: the same tensors at their places, equal keys, values of the same types."""
        known = self._known
        return (
            looks.marks == known.marks
            and len(looks.tensors) == len(known.tensors)
            and all(map(operator.is_, looks.tensors, known.tensors))
            and all(map(operator.is_, looks.objects, known.objects))
            # in C, and without keeping what is compared: ten thousand new objects would start the garbage collector
            and all(all(map(operator.eq, map(look, known.tensors), form)) for look, form in zip(_LOOKS, self._forms, strict=True))
            and [tensor.stride() for tensor in self._odd] == self._strides
        )


_LOOKS: tuple[Callable[[Tensor], Any], ...] = (
    Tensor.data_ptr,
    Tensor.is_contiguous,
    operator.attrgetter("shape"),
    operator.attrgetter("dtype"),
)


class _Looks:
    """What one look over a state finds: its tensors, its plain values, and in `marks` the keys, lengths and types around them."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.values: list[Any] = []
        self.marks: list[Any] = []
        self.objects: list[Any] = []

    def over(self, value: Any) -> None:
        """Note a part of a state."""
        kind = type(value)
        if kind is Tensor or kind is torch.nn.Parameter:
            self.tensors.append(value)
            self.marks.append(kind)
        elif kind in _PLAIN_TYPES:
            self.values.append(value)
            self.marks.append(kind)
        elif kind is dict or isinstance(value, Mapping):
            self.marks.append((kind, *value))
            self._each(value.values())
        elif isinstance(value, (list, tuple)):
            self.marks.append((kind, len(value)))
            self._each(value)
        elif isinstance(value, Tensor):
            self.objects.append(value)
            names: list[str] = []
            if not hasattr(value, "__tensor_flatten__"):
                self.tensors.append(value)
            else:
                names = _part_names(value)
                # a DTensor's never changes, and takes long to tell
                self.marks.append(None if hasattr(value, "to_local") else repr(value.__tensor_flatten__()[1]))
            self.marks.append((kind, *names))
            for name in names:
                self.over(getattr(value, name))
        elif isinstance(value, _PLAIN):
            self.values.append(value)
            self.marks.append(kind)
        elif isinstance(value, Stateful):
            self.over(_told(value))
        else:
            self.objects.append(value)  # `flatten` refuses it

    def _each(self, values: Iterable[Any]) -> None:
        for value in values:
            # what there is most of costs no call
            if (kind := type(value)) is Tensor or kind is torch.nn.Parameter:
                self.tensors.append(value)
                self.marks.append(kind)
            else:
                self.over(value)


def _told(value: Stateful) -> Any:
    """Return the state that an object tells; of a module its own tensors, so that they are known again, not new views of them."""
    if isinstance(value, torch.nn.Module) and type(value).state_dict is torch.nn.Module.state_dict:
        return value.state_dict(keep_vars=True)
    return value.state_dict()


def unflatten(skeleton: Any, tensors: Sequence[Tensor], values: Sequence[Any]) -> Any:
    """Return the state of which `flatten` made these parts, `Stateful` objects as their state. Raises Corrupt."""
    shared: dict[str, Tensor] = {}

    def whole(node: Any) -> Any:
        kind, content = node
        if kind == "t":
            return tensors[content]
        if kind == "w":
            return shared[key] if (key := repr(content)) in shared else shared.setdefault(key, _view(tensors, *content))
        if kind == "v":
            return values[content]
        if kind == "d":
            return {key: whole(item) for key, item in content}
        if kind in ("l", "u"):
            return (list if kind == "l" else tuple)(whole(item) for item in content)
        if kind == "k":
            name, about, parts = content
            return Parts(name, about, {part: whole(item) for part, item in parts})
        raise Corrupt(f"the description of a state has a part of kind {kind!r}")

    try:
        return whole(skeleton)
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise Corrupt(f"the description of a state is broken: {error}") from None


def _view(tensors: Sequence[Tensor], at: int, dtype: str, shape: list[int], stride: list[int], offset: int) -> Tensor:
    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype) or min((*shape, *stride, offset), default=0) < 0:
        raise ValueError(f"a view of {dtype}")
    base = tensors[at]
    end = offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if end * wanted.itemsize > base.nbytes:
        raise ValueError(f"a view of {end} times {dtype} into {base.nbytes} bytes")
    begin = base.storage_offset() * base.element_size() // wanted.itemsize
    return torch.empty(0, dtype=wanted).set_(base.untyped_storage(), begin + offset, shape, stride)


def misfit(into: Any, state: Any, where: str = "state") -> str:
    """Return why `state` cannot be put into `into`, empty when it can. Changes nothing.

    Only what holds tensors or `Stateful` objects must have the form of the checkpoint; plain data is replaced.
    """
    if isinstance(into, Tensor) and hasattr(into, "__tensor_flatten__"):
        return _misfit_parts(into, state, where)
    if isinstance(into, Tensor):
        if isinstance(state, Parts):
            return f"{where} is a tensor here and part of a {state.kind} in the checkpoint"
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
        if sizes != saved:
            return f"{where} has groups of {sizes} parameters here and of {saved} in the checkpoint"
        return next(
            filter(None, (_misfit_moments(*item, f"{where}.state.{at}") for at, item in _moments(into, state).items())), ""
        )
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


def _misfit_parts(into: Any, state: Any, where: str) -> str:
    if not isinstance(state, Parts) or state.kind != _kind(into):
        return f"{where} is a {_kind(into)} here and none in the checkpoint"
    about = json.loads(json.dumps(_about(into, where)))
    if about != state.about:
        return f"{where} is {about} here and {state.about} in the checkpoint"
    return next(filter(None, (misfit(getattr(into, name), part, f"{where}.{name}") for name, part in state.tensors.items())), "")


def _moments(optimizer: torch.optim.Optimizer, state: Any) -> dict[Any, tuple[Tensor, Any]]:
    """Return of each number under which an optimizer's state has something the parameter that it belongs to, and what that is."""
    owners = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    saved = state.get("state", {})
    return {number: (owner, saved[number]) for number, owner in zip(numbers, owners, strict=True) if number in saved}


def _misfit_moments(owner: Tensor, moments: Any, where: str) -> str:
    """Return why what belongs to a parameter cannot become tensors of its kind."""
    for name, value in moments.items() if isinstance(moments, Mapping) else ():
        if isinstance(value, Parts) and not hasattr(owner, "__tensor_flatten__"):
            return f"{where}.{name} is a {value.kind} in the checkpoint and its parameter a tensor here"
        if isinstance(value, Parts) and (why := _misfit_parts(owner.detach(), value, f"{where}.{name}")):
            return why
    return ""


def put_into(into: Any, state: Any) -> None:
    """Write `state` into the tensors, dicts, lists and `Stateful` objects of `into`, which `misfit` has found to fit.

    Nothing in `into` shares memory with `state` afterwards.
    """
    with torch.no_grad():
        _fill(into, state)


def _fill(item: Any, value: Any) -> Any:
    """Do what `_filled` does, all copies included: in several threads, as one does not use up the memory's bandwidth."""
    copies: list[tuple[Tensor, Tensor]] = []
    filled = _filled(item, value, copies)
    large = [pair for pair in copies if pair[0].nbytes >= BY_ADDRESS_BYTES]
    with ThreadPoolExecutor(min(COPIERS, len(os.sched_getaffinity(0)))) as threads:
        running = threads.map(_copy, large)
        for pair in copies:
            if pair[0].nbytes < BY_ADDRESS_BYTES:
                _copy(pair)
        list(running)
    return filled


@torch.no_grad()
def _copy(pair: tuple[Tensor, Tensor]) -> None:
    pair[0].copy_(pair[1])


def _filled(item: Any, value: Any, copies: list[tuple[Tensor, Tensor]]) -> Any:
    """Return `item`, into which `value` is written once all `copies` are made, if it can hold it, else a copy of `value`."""
    if isinstance(item, Tensor) and isinstance(value, Tensor) and (item.shape, item.dtype) == (value.shape, value.dtype):
        copies.append((item, value))
        return item
    if isinstance(item, Tensor) and isinstance(value, Parts) and not _misfit_parts(item, value, ""):
        for name, part in value.tensors.items():
            _filled(getattr(item, name), part, copies)
    elif isinstance(item, torch.nn.Module) and type(item).state_dict is torch.nn.Module.state_dict:
        item.load_state_dict(_fill(item.state_dict(keep_vars=True), value))
    elif isinstance(item, torch.optim.Optimizer):
        # what it holds already is filled in place: new memory would cost more than the copy
        made = {number: _moments_like(*found) for number, found in _moments(item, value).items()}
        item.load_state_dict(_fill(item.state_dict(), {**value, "state": {**value.get("state", {}), **made}}))
    elif isinstance(item, Stateful):
        item.load_state_dict(_own(value))
    elif isinstance(item, MutableMapping) and isinstance(value, Mapping):
        if _is_plain(item):
            item.clear()
        for key in list(item):
            if key not in value:
                del item[key]
        for key in value:
            item[key] = _filled(item.get(key), value[key], copies)
    elif isinstance(item, list) and isinstance(value, list):
        here = item if len(item) == len(value) and not _is_plain(item) else [None] * len(value)
        item[:] = [_filled(old, new, copies) for old, new in zip(here, value, strict=True)]
    elif isinstance(item, tuple) and isinstance(value, tuple) and len(item) == len(value) and not _is_plain(item):
        return tuple(_filled(old, new, copies) for old, new in zip(item, value, strict=True))
    else:
        return _own(value)
    return item


def _own(value: Any) -> Any:
    """Return a copy of a value."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Parts):
        return value._replace(tensors=_own(value.tensors))
    if isinstance(value, Mapping):
        return {key: _own(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_own, value))
    return value


def _moments_like(owner: Any, moments: Any) -> Any:
    """Return what belongs to a parameter, tensors that were of the parameter's kind made of their parts again."""
    if not isinstance(moments, Mapping):
        return moments
    return {name: _whole(owner, value) if isinstance(value, Parts) else value for name, value in moments.items()}


def _whole(owner: Any, parts: Parts) -> Any:
    model = owner.detach()
    names, context = model.__tensor_flatten__()
    inner = {name: getattr(model, name) for name in names} | _own(parts.tensors)
    return type(model).__tensor_unflatten__(inner, context, owner.shape, owner.stride())


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
        found.append(Place(_name(tensor.dtype), list(tensor.shape), at, nbytes))
        at += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
    return found, at


def views(buffer: Any, where: Sequence[Place]) -> list[Tensor]:
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


class Target:
    """The same tensors in a slab, which is filled again and again."""

    def __init__(self, buffer: Any, where: Sequence[Place]) -> None:
        self.tensors = views(buffer, where)
        self._addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in self.tensors]
        self._small: tuple[list[int], list[ctypes.c_void_p]] = [], []

    def fill(self, source: Source) -> None:
        """Copy the tensors of a source to their places."""
        if self._small[0] is not source.small:
            self._small = source.small, [self._addresses[i] for i in source.small]
        for _ in map(_memmove, self._small[1], source.addresses, source.lengths):
            pass
        self.copy({i: source.tensors[i] for i in source.others})

    def copy(self, tensors: Mapping[int, Tensor]) -> None:
        """Copy tensors to their places by number. The one place where those of a device leave it."""
        with torch.no_grad():
            for i, tensor in tensors.items():
                self.tensors[i].copy_(tensor)

    def differs(self, source: Sequence[Tensor], which: Sequence[int], share: float, draw: random.Random) -> int | None:
        """Compare a share of some tensors with their source, at least one, and return the number of one that differs."""
        wanted, seen = share * sum(self.tensors[i].nbytes for i in which), 0
        while seen < wanted:
            at = draw.choice(which)
            copy, tensor = self.tensors[at], source[at]
            if _is_dense(tensor):
                length = min(copy.nbytes, SAMPLE_BYTES)
                start = draw.randrange(copy.nbytes - length + 1)
                same = _memcmp(copy.data_ptr() + start, tensor.data_ptr() + start, length) == 0
            else:
                length = copy.nbytes
                same = torch.equal(_raw(copy), _raw(torch.empty_like(copy).copy_(tensor)))
            if not same:
                return at
            seen += length
        return None


def _raw(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's bytes lie in this machine's memory as they are saved."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


# holding the interpreter through a copy of less than a tenth of a millisecond is cheaper than giving it away and asking it back
_memmove = ctypes.PyDLL(None).memmove
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(tensor: Tensor, where: str) -> None:
    # a state has thousands of tensors and a save is a stall, so this takes a microsecond
    if tensor.dtype in _DTYPES and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta):
        if tensor.data_ptr() or not tensor.numel():
            return
        kind = f"{_kind(tensor)} without memory of its own"
    elif tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type == "meta":
        kind = f"{'nested ' if tensor.is_nested else ''}{tensor.layout} tensor on {tensor.device}"
    else:
        kind = f"tensor of {tensor.dtype}"
    raise UsageError(f"{where} is a {kind}, which cannot be saved yet; save its dense part")
