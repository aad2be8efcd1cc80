"""How much memory a cache may take, how much the checkpoints of its jobs will take, and what is said when that does not fit."""

import re
from dataclasses import dataclass
from pathlib import Path

from checkpoint.errors import CannotRun

_V1, _V2 = ("memory.limit_in_bytes",), ("memory.max", "memory.high")


@dataclass(frozen=True, slots=True)
class Limit:
    """So many bytes, and who says so."""

    nbytes: int
    reason: str


def allowed(root: Path = Path("/")) -> Limit:
    """Return the least of the machine's memory and the limits of all control groups that this process is in.

    Both versions of control groups are read, also side by side. What a process in a container cannot see of its groups' path is
    passed over: there its own group is mounted at the top.

    Raises
    ------
    CannotRun
        The machine does not tell its memory.
    """
    try:
        total = re.search(r"^MemTotal:\s*(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        total = None
    if total is None:
        raise CannotRun(f"{root / 'proc/meminfo'} does not tell how much memory there is; set [checkpoint] memory_bytes")
    found = [Limit(int(total[1]) << 10, "the machine's memory")]
    top = root / "sys/fs/cgroup"
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        memberships = []
    for line in memberships:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            found += _along(top, path, _V2)
        elif "memory" in controllers.split(","):
            found += _along(top / "memory", path, _V1)
    return min(found, key=lambda limit: limit.nbytes)


def cap(configured_bytes: int, most: Limit) -> Limit:
    """Return how much a cache takes at most: what is configured, else half of what is allowed.

    Raises
    ------
    CannotRun
        More is configured than is allowed: the kernel would end the cache, and with it all that it holds.
    """
    if configured_bytes > most.nbytes:
        raise CannotRun(
            f"[checkpoint] memory_bytes is {configured_bytes} and {most.reason} is {most.nbytes}; "
            "set memory_bytes to less than that, or raise the limit"
        )
    if configured_bytes:
        return Limit(configured_bytes, "memory_bytes")
    return Limit(most.nbytes // 2, f"half of {most.reason}")


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the checkpoints of a node take in memory.

    `rank_bytes` are those of one generation of each rank that saves here, `copies` how many nodes' copies are held for each of
    this node's own, `generations` how many complete ones stay. Two more are held for a while: the one that is being saved and
    the one of which it is not yet known whether all ranks have it.
    """

    rank_bytes: tuple[int, ...]
    copies: int
    generations: int
    cap_bytes: int

    @property
    def generation_bytes(self) -> int:
        """One generation of this node's own ranks."""
        return sum(self.rank_bytes)

    @property
    def most_bytes(self) -> int:
        """All that is held at once when memory is not short."""
        return self.generation_bytes * (self.generations + 2) * (1 + self.copies)

    def check(self) -> None:
        """Raise CannotRun when not even one generation fits."""
        if self.generation_bytes > self.cap_bytes:
            raise CannotRun(
                f"one generation of this node's {_ranks(len(self.rank_bytes))} takes {self.generation_bytes} bytes "
                f"and the cache may take {self.cap_bytes}; raise [checkpoint] memory_bytes to {self.most_bytes}, "
                f"or to {2 * self.generation_bytes} at least"
            )

    def __str__(self) -> str:
        held = f"{_ranks(len(self.rank_bytes))} x {self.generations + 2} generations"
        if self.copies:
            held += f", and as much for copies of {self.copies} other node{'s' * (self.copies > 1)}"
        text = f"memory forecast: {size(self.most_bytes)} of at most {size(self.cap_bytes)} ({held})"
        if self.cap_bytes < 2 * self.generation_bytes:
            return f"{text}; there is room for one generation alone, so only the first save is kept: raise memory_bytes"
        return f"{text}; older generations are let go of earlier" if self.most_bytes > self.cap_bytes else text


def size(nbytes: int) -> str:
    """Return a number of bytes as people write it."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} bytes"


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


def _along(top: Path, path: str, names: tuple[str, ...]) -> list[Limit]:
    """Return the limits of a control group and of those that it lies in."""
    here, found = top / path.strip("/"), []
    while True:
        for name in names:
            try:
                told = (here / name).read_text().strip()
            except OSError:
                continue
            if told.isdigit():  # else it is "max"
                found.append(Limit(int(told), f"the limit in {here / name}"))
        if here == top:
            return found
        here = here.parent
