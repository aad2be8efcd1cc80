"""How the ranks of a job agree on what to restore, so that all of them go on from the same generation or none does."""

import json
from typing import Any, Protocol

import torch
import torch.distributed as dist

from checkpoint.errors import UsageError


class Agreement(Protocol):
    """Three questions that all ranks ask together, in the same order."""

    def largest(self, number: int) -> int:
        """Return the largest number that any rank gives."""
        ...

    def tell(self, words: Any) -> Any:
        """Return what rank 0 says (JSON); the others' words do not count."""
        ...

    def gather(self, words: Any) -> list[Any]:
        """Return what each rank says (JSON), in their order."""
        ...


class Alone:
    """A job of one rank."""

    def largest(self, number: int) -> int:
        """Return the number."""
        return number

    def tell(self, words: Any) -> Any:
        """Return the words."""
        return words

    def gather(self, words: Any) -> list[Any]:
        """Return the words."""
        return [words]


class Collective:
    """Agreement by torch.distributed, over gloo whatever the job itself uses, so that no GPU is needed for it."""

    def __init__(self) -> None:
        self._group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def largest(self, number: int) -> int:
        """Return the largest number that any rank gives."""
        shared = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group)
        return int(shared.item())

    def tell(self, words: Any) -> Any:
        """Return what rank 0 says."""
        text = json.dumps(words).encode() if dist.get_rank() == 0 else b""
        room = torch.zeros(self.largest(len(text)), dtype=torch.uint8)
        if text:
            room = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.broadcast(room, 0, group=self._group)
        return json.loads(bytes(room.tolist()))

    def gather(self, words: Any) -> list[Any]:
        """Return what each rank says."""
        text = json.dumps(words).encode()
        room = torch.full((self.largest(len(text)),), ord(" "), dtype=torch.uint8)
        room[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rooms = [torch.empty_like(room) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(rooms, room, group=self._group)
        return [json.loads(bytes(each.tolist())) for each in rooms]


def agreement(world_size: int) -> Agreement:
    """Return the way in which this process's job agrees.

    Raises
    ------
    UsageError
        There are several ranks and no process group by which they could.
    """
    if world_size == 1:
        return Alone()
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(f"{world_size} ranks must agree on what to restore: call torch.distributed.init_process_group before")
    if dist.get_world_size() != world_size:
        raise UsageError(f"the process group has {dist.get_world_size()} ranks and WORLD_SIZE says {world_size}")
    return Collective()
