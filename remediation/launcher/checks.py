"""Is this node fit to hold ranks? Asked before the first round, and again after a failed rank.

A check says ok, bad, or could not run, and one sentence. Only `bad` keeps a node out: what cannot be measured is nobody's fault.
"""

import enum
import functools
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from eagleeye.clock import SystemClock, monotonic_s
from eagleeye.errors import EagleEyeError, NoData
from remediation.launcher.worker import Background

_DISK_BYTES = 4 << 20
_FREE_BYTES = 64 << 20
_MEMORY_BYTES = 16 << 20
_AVAILABLE_BYTES = 256 << 20
_CLOCK_S = 60.0
_CACHE_S = 5.0


class Result(enum.StrEnum):
    """How a check ended."""

    OK = "ok"
    BAD = "bad"
    COULD_NOT_RUN = "not checked"


class Finding(NamedTuple):
    """What one check found."""

    check: str
    result: Result
    sentence: str


Check = Callable[[], tuple[Result, str]]


def disk(folder: Path) -> tuple[Result, str]:
    """Write a few MB to `folder`, force them to the disk, read them back and compare; look at the free space."""
    pattern = os.urandom(4096) * (_DISK_BYTES // 4096)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(pattern)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read from the disk, not from memory
            file.seek(0)
            same = file.read() == pattern
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        return Result.BAD, f"{folder} cannot be written and read: {error.strerror}"
    if not same:
        return Result.BAD, f"{folder} gave back other bytes than were written"
    if free_bytes < _FREE_BYTES:
        return Result.BAD, f"{folder} has only {free_bytes >> 20} MiB left"
    return Result.OK, f"{folder} holds what is written, {free_bytes >> 30} GiB free"


def memory() -> tuple[Result, str]:
    """Fill a few MB with two opposite patterns and read them back; look at what is available."""
    for byte in (0x55, 0xAA):
        block = bytearray([byte]) * _MEMORY_BYTES
        if block.count(byte) != _MEMORY_BYTES:
            return Result.BAD, "memory gave back other bytes than were written"
    try:
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
        available_bytes = int(line.split()[1]) << 10
    except (OSError, StopIteration):
        return Result.COULD_NOT_RUN, "the kernel does not tell how much memory is available"
    if available_bytes < _AVAILABLE_BYTES:
        return Result.BAD, f"only {available_bytes >> 20} MiB of memory are available"
    return Result.OK, f"{available_bytes >> 30} GiB of memory are available"


def clock(folder: Path) -> tuple[Result, str]:
    """Compare this node's clock with the newest file that any node wrote into the shared `folder`."""
    try:
        newest_s = max((entry.stat().st_mtime for entry in os.scandir(folder)), default=0.0)
    except OSError as error:
        return Result.COULD_NOT_RUN, f"{folder} cannot be listed: {error.strerror}"
    behind_s = newest_s - SystemClock().now_s()
    if behind_s > _CLOCK_S:
        return Result.BAD, f"the clock is {behind_s:.0f} s behind the newest file in {folder}; set it (chrony, ntpd)"
    return Result.OK, "the clock is not behind the other nodes'"


def network(address: str) -> tuple[Result, str]:
    """Take a port on the address at which the other nodes expect this one."""
    try:
        with bound(address) as taken:
            taken.listen()
    except OSError as error:
        return Result.BAD, f"this node cannot serve on {address}: {error.strerror or error}; give its own --address"
    return Result.OK, f"{address} can be served on"


def bound(address: str) -> socket.socket:
    """Return a socket that holds a free port of `address`. Raises OSError when that is no address of this node."""
    held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        held.bind((address, 0))
    except OSError:
        held.close()
        raise
    return held


def gpu() -> tuple[Result, str]:
    """Ask the driver for the readings of every GPU."""
    from eagleeye.collect.base import Settings, Site
    from eagleeye.collect.nvml import NvmlCollector

    try:
        samples = list(NvmlCollector(Site(Settings())).collect(0.0))
    except NoData as error:
        return Result.COULD_NOT_RUN, str(error)
    except OSError as error:
        return Result.BAD, str(error)
    return Result.OK, f"{len({sample.labels['gpu'] for sample in samples})} GPUs answer"


def cache(address: str) -> tuple[Result, str]:
    """Reach the checkpoint cache that this node had; one that is just being started again has a few seconds."""
    host, _, port = address.rpartition(":")
    end_s = monotonic_s() + _CACHE_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError as error:
            if monotonic_s() > end_s:
                return Result.BAD, f"the checkpoint cache at {address} is gone ({error}); start `eagleeye cache` again"
            SystemClock().sleep_s(0.2)
        else:
            return Result.OK, f"the checkpoint cache at {address} answers"


def all_checks(folder: Path, address: str, cache_address: str = "") -> dict[str, Check]:
    """Return the checks by name. `folder` is shared with the other nodes, the addresses are those of this node and its cache."""
    return {
        **({"cache": functools.partial(cache, cache_address)} if cache_address else {}),
        "shared folder": functools.partial(disk, folder),
        "disk": functools.partial(disk, Path(tempfile.gettempdir())),
        "memory": memory,
        "clock": functools.partial(clock, folder),
        "network": functools.partial(network, address),
        "gpu": gpu,
    }


def run(checks: dict[str, Check], timeout_s: float) -> list[Finding]:
    """Run all checks at once; one that takes longer than `timeout_s` could not run."""
    work = {name: Background(check) for name, check in checks.items()}
    end_s = monotonic_s() + timeout_s
    findings = []
    for name, background in work.items():
        if not background.wait(end_s - monotonic_s()):
            findings.append(Finding(name, Result.COULD_NOT_RUN, f"no result after {timeout_s:g} s"))
            continue
        try:
            findings.append(Finding(name, *background.result()))
        except EagleEyeError as error:
            findings.append(Finding(name, Result.COULD_NOT_RUN, str(error)))
    return findings
