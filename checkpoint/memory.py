"""Slabs: anonymous files in memory that a training process maps, fills and hands back. Made once, populated, and used again.

With pages of 4 KiB a fresh mapping of a slab costs more than the copy of what is in it; with pages of 2 MiB it does not. They are
taken from the machine's reserve where it has one (``MFD_HUGETLB``), else what was populated is collapsed into them while nobody
fills it (``MADV_COLLAPSE``), else pages stay small.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from checkpoint.errors import CannotRun

_PAGE = mmap.PAGESIZE
LARGE_PAGE = 2 << 20
_SLACK = 2
"""A free slab is used again for anything that fills at least this part of it: one in two."""
_COLLAPSE_BYTES = 8 * LARGE_PAGE
"""So much is collapsed at once; whoever wants to fill the slab waits no longer than for that."""
_POPULATE_WRITE, _COLLAPSE = 23, 25  # of madvise(2), since Linux 5.14 and 6.1; not in the module mmap of Python 3.11
_RESERVE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")

# ctypes lets other threads run during these calls, the module mmap does not, and it cannot choose an address
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


@dataclass(eq=False)
class Slab:
    """One memory file of `size_bytes`, mapped here for good. Its size is sealed: nobody can pull pages away from a reader."""

    number: int
    owner: str
    file: int
    size_bytes: int
    map: mmap.mmap = field(repr=False)
    large_bytes: int = 0
    """How much of it lies in pages of 2 MiB."""
    settled: bool = False
    """True once its pages are as large as they will get."""
    filling: bool = True
    """True while somebody writes into it, or is about to."""
    reusable: bool = True
    """False once a process that may still run keeps a mapping that it must not use any more."""
    discarded: bool = False
    """True once its memory was let go of: whoever maps it should do so, too."""

    def view(self, nbytes: int) -> memoryview:
        """Return the first `nbytes` bytes."""
        return memoryview(self.map)[:nbytes]


class Slabs:
    """Gives and takes slabs within a limit; for any thread, none of which waits for the pages that another one is given.

    Slabs of one `owner` are used again for the same owner only: a training process keeps its mapping of those it got, and must
    never be able to write into another's, not even its successor's.
    """

    def __init__(self, limit_bytes: int, reserve: Path = _RESERVE) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._reserve = reserve
        self._lock = threading.Condition()
        self._ahead: list[tuple[str, int]] = []
        """Owner and size of what is being made ahead."""
        self._all: list[Slab] = []
        self._free: list[Slab] = []
        self._count = 0

    def take(self, owner: str, nbytes: int) -> Slab:
        """Return a slab with room for `nbytes`, every page of it in memory already.

        Raises
        ------
        CannotRun
            The limit or the machine's memory is reached.
        """
        needed = _whole_pages(nbytes)
        with self._lock:
            while not (fitting := [s for s in self._free if s.owner == owner and _fits(s.size_bytes, needed)]):
                if not any(who == owner and _fits(size, needed) for who, size in self._ahead):
                    break
                self._lock.wait()  # it is there sooner than another one
            if fitting:
                slab = min(fitting, key=lambda s: s.size_bytes)
                self._free.remove(slab)
                slab.filling = True
                return slab
            while self.used_bytes + needed > self.limit_bytes and self._free:
                self._discard(self._free.pop(0))
            if self.used_bytes + needed > self.limit_bytes:
                raise CannotRun(
                    f"{needed} bytes more do not fit: {self.used_bytes} of {self.limit_bytes} bytes are in use; "
                    "raise [checkpoint] memory_bytes or save less often"
                )
            self.used_bytes += needed
        return self._make(owner, needed)

    def prepare(self, owner: str, nbytes: int, count: int, wanted: Callable[[], bool]) -> None:
        """Make what an owner lacks of `count` slabs for `nbytes`, while they are wanted and nothing need be let go of for them.

        Raises
        ------
        CannotRun
            The machine's memory is reached.
        """
        needed = _whole_pages(nbytes)
        while True:
            with self._lock:
                owned = sum(s.owner == owner and _fits(s.size_bytes, needed) for s in self._all)
                if owned >= count or self.used_bytes + needed > self.limit_bytes or not wanted():
                    return
                self.used_bytes += needed
                self._ahead.append((owner, needed))
            slab = None
            try:
                slab = self._make(owner, needed)
            finally:
                with self._lock:
                    self._ahead.remove((owner, needed))
                    if slab is not None and wanted():
                        slab.filling = False
                        self._free.append(slab)
                    elif slab is not None:
                        self._discard(slab)
                    self._lock.notify_all()

    def adopt(self, file: int, size_bytes: int) -> Slab:
        """Hold the memory file of another cache, of which nobody knows who else maps it: it is never filled again."""
        mapped = mmap.mmap(file, size_bytes, flags=mmap.MAP_SHARED)
        with self._lock:
            self._count += 1
            self.used_bytes += size_bytes
            slab = Slab(self._count, "", file, size_bytes, mapped, filling=False, reusable=False)
            self._all.append(slab)
        return slab

    def give(self, owner: str, slab: Slab) -> None:
        """Take a slab back, for later use by the same owner if it is reusable."""
        with self._lock:
            slab.owner, slab.filling = owner, False
            if slab.reusable:
                self._free.append(slab)
            else:
                self._discard(slab)

    def forget(self, owner: str) -> None:
        """Let go of every free slab of an owner."""
        with self._lock:
            for slab in [slab for slab in self._free if slab.owner == owner]:
                self._free.remove(slab)
                self._discard(slab)

    def settle(self) -> bool:
        """Give one slab that nobody fills larger pages if that is possible; return whether there was one.

        This takes seconds for a large slab, and ends early when somebody wants to fill it.
        """
        with self._lock:
            slab = next((s for s in self._all if not s.settled and not s.filling), None)
            if slab is None:
                return False
            file = os.dup(slab.file)
        try:
            slab.large_bytes, slab.settled = _collapse(
                file, slab.size_bytes, lambda: slab.filling or slab.discarded or bool(self._ahead)
            )
        finally:
            os.close(file)
        return True

    @property
    def unsettled(self) -> bool:
        """Whether `settle` would find something to do, and nobody may be waiting for a slab that is made ahead."""
        with self._lock:
            return not self._ahead and any(not s.settled and not s.filling for s in self._all)

    @property
    def pages(self) -> str:
        """Say in what pages the slabs lie."""
        with self._lock:
            total, large = sum(s.size_bytes for s in self._all), sum(s.large_bytes for s in self._all)
        return f"{large >> 20} of {total >> 20} MiB in pages of 2 MiB"

    def _make(self, owner: str, needed: int) -> Slab:
        """Return a new slab, whose bytes are counted as used already."""
        with self._lock:
            self._count += 1
            number = self._count
        try:
            slab = self._large(number, owner, needed) or _small(number, owner, needed)
        except OSError as error:
            with self._lock:
                self.used_bytes -= needed
            raise CannotRun(f"cannot get {needed} bytes of memory: {error.strerror or error}") from None
        with self._lock:
            self.used_bytes += slab.size_bytes - needed
            self._all.append(slab)
        return slab

    def _large(self, number: int, owner: str, needed: int) -> Slab | None:
        """Return a slab in pages of the machine's reserve, None when that has not so many, or somebody is faster."""
        size = -(-needed // LARGE_PAGE) * LARGE_PAGE
        if size > _SLACK * needed or free_large_pages(self._reserve) * LARGE_PAGE < size:
            return None
        try:
            return _slab(number, owner, size, os.MFD_HUGETLB | os.MFD_HUGE_2MB)
        except OSError:
            return None

    def _discard(self, slab: Slab) -> None:
        slab.discarded = True
        self._all.remove(slab)
        self.used_bytes -= slab.size_bytes
        os.close(slab.file)
        # somebody may still read a view of it; then the mapping goes when the last view does
        with suppress(BufferError):
            slab.map.close()


def free_large_pages(reserve: Path = _RESERVE) -> int:
    """Return how many pages of 2 MiB the machine holds in reserve for nobody."""
    try:
        return int((reserve / "free_hugepages").read_text()) - int((reserve / "resv_hugepages").read_text())
    except (OSError, ValueError):
        return 0


def can_collapse() -> bool:
    """Whether this kernel makes pages of 2 MiB out of small ones."""
    slab = _small(0, "", LARGE_PAGE)
    try:
        return _collapse(slab.file, slab.size_bytes, lambda: False)[0] == LARGE_PAGE
    finally:
        slab.map.close()
        os.close(slab.file)


def _fits(size_bytes: int, needed: int) -> bool:
    return needed <= size_bytes <= _SLACK * needed


def _whole_pages(nbytes: int) -> int:
    return max(_PAGE, -(-nbytes // _PAGE) * _PAGE)


def _small(number: int, owner: str, size_bytes: int) -> Slab:
    slab = _slab(number, owner, size_bytes, 0)
    slab.settled = size_bytes < LARGE_PAGE
    return slab


def _slab(number: int, owner: str, size_bytes: int, flags: int) -> Slab:
    file = os.memfd_create(f"eagleeye-slab-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(file, size_bytes)
        # populated here, so that this process pays for the pages and a lack of memory shows now, not in a training step
        with _mapped(file, size_bytes) as address:
            if (error := _advise(address, size_bytes, _POPULATE_WRITE)) == errno.EINVAL:
                os.posix_fallocate(file, 0, size_bytes)
                _libc.memset(address, 0, size_bytes)
            elif error:
                raise OSError(error, os.strerror(error))
        mapped = mmap.mmap(file, size_bytes, flags=mmap.MAP_SHARED)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(file)
        raise
    return Slab(number, owner, file, size_bytes, mapped, large_bytes=size_bytes if flags else 0, settled=bool(flags))


def _collapse(file: int, size_bytes: int, unwanted: Callable[[], bool]) -> tuple[int, bool]:
    """Return how many bytes lie in large pages now, and whether all was tried."""
    large, whole = 0, size_bytes // LARGE_PAGE * LARGE_PAGE
    with _mapped(file, size_bytes) as address:
        for start in range(0, whole, _COLLAPSE_BYTES):
            if unwanted():
                return large, False
            length = min(_COLLAPSE_BYTES, whole - start)
            error = _advise(address + start, length, _COLLAPSE)
            if error == errno.EINVAL:
                return large, True  # this kernel cannot
            # others say that there is no large page free; a later piece may find one
            large += 0 if error else length
    return large, True


@contextmanager
def _mapped(file: int, size_bytes: int) -> Iterator[int]:
    """Yield an address that is a multiple of 2 MiB, at which a file is mapped."""
    length = size_bytes + LARGE_PAGE
    reserved = _libc.mmap(None, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        address = -(-reserved // LARGE_PAGE) * LARGE_PAGE
        fixed = 0x10
        if _libc.mmap(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | fixed, file, 0) != address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        yield address
    finally:
        _libc.munmap(reserved, length)


def _advise(address: int, size_bytes: int, advice: int) -> int:
    """Return 0 or the number of the error."""
    return 0 if _libc.madvise(address, size_bytes, advice) == 0 else ctypes.get_errno()
