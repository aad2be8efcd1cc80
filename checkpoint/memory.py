"""Slabs: anonymous files in memory that a training process maps, fills and hands back. Made once, populated, and used again."""

import fcntl
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass, field

from checkpoint.errors import CannotRun

_PAGE = mmap.PAGESIZE
_SLACK = 2
"""A free slab is used again for anything that fills at least this part of it: one in two."""


@dataclass(eq=False)
class Slab:
    """One memory file of `size_bytes`, mapped here for good. Its size is sealed: nobody can pull pages away from a reader."""

    number: int
    file: int
    size_bytes: int
    map: mmap.mmap = field(repr=False)
    reusable: bool = True
    """False once a process that may still run keeps a mapping that it must not use any more."""
    discarded: bool = False
    """True once its memory was let go of: whoever maps it should do so, too."""

    def view(self, nbytes: int) -> memoryview:
        """Return the first `nbytes` bytes."""
        return memoryview(self.map)[:nbytes]


class Slabs:
    """Gives and takes slabs within a limit. Not thread safe: its owner locks.

    Slabs of one `owner` are used again for the same owner only: a training process keeps its mapping of those it got, and must
    never be able to write into another's, not even its successor's.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._free: list[tuple[str, Slab]] = []
        self._count = 0

    def take(self, owner: str, nbytes: int) -> Slab:
        """Return a slab with room for `nbytes`, every page of it in memory already.

        Raises
        ------
        CannotRun
            The limit or the machine's memory is reached.
        """
        needed = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        fitting = [s for o, s in self._free if o == owner and needed <= s.size_bytes <= _SLACK * needed]
        if fitting:
            slab = min(fitting, key=lambda s: s.size_bytes)
            self._free.remove((owner, slab))
            return slab
        while self.used_bytes + needed > self.limit_bytes and self._free:
            self.discard(self._free.pop(0)[1])
        if self.used_bytes + needed > self.limit_bytes:
            raise CannotRun(
                f"{needed} bytes more do not fit: {self.used_bytes} of {self.limit_bytes} bytes are in use; "
                "raise [checkpoint] memory_bytes or save less often"
            )
        self._count += 1
        file = -1
        try:
            file = os.memfd_create(f"eagleeye-slab-{self._count}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(file, needed)
            # populated here, so that this process pays for the pages and a lack of memory shows now, not in a training step
            mapped = mmap.mmap(file, needed, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError as error:
            if file >= 0:
                os.close(file)
            raise CannotRun(f"cannot get {needed} bytes of memory: {error.strerror or error}") from None
        self.used_bytes += needed
        return Slab(self._count, file, needed, mapped)

    def give(self, owner: str, slab: Slab) -> None:
        """Take a slab back, for later use by the same owner if it is reusable."""
        if slab.reusable:
            self._free.append((owner, slab))
        else:
            self.discard(slab)

    def discard(self, slab: Slab) -> None:
        """Let go of a slab's memory."""
        slab.discarded = True
        self.used_bytes -= slab.size_bytes
        os.close(slab.file)
        # somebody may still read a view of it; then the mapping goes when the last view does
        with suppress(BufferError):
            slab.map.close()

    def forget(self, owner: str) -> None:
        """Let go of every free slab of an owner."""
        for held in [item for item in self._free if item[0] == owner]:
            self._free.remove(held)
            self.discard(held[1])
