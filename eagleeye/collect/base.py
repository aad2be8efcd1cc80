"""The collector seam: what a collector is, where it may look, and what the collectors of one exporter share.

A collector reads local counters and returns samples of the catalogue. It may fail, hang or find nothing: the exporter bears all
three. It starts no process and needs no rights beyond reading.
"""

import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from eagleeye.clock import Clock, SystemClock, monotonic_s
from eagleeye.records import Sample

T = TypeVar("T")

BUILT_IN = ("nvml", "infiniband", "network", "process", "progress", "identity", "logs")
STEP_PATTERN = r"(?i)\b(?:global[_ -]?step|iteration|iter|step)\s*[:=#]?\s*\[?\s*(\d+)(?![\d.]*\d)"


def this_node() -> str:
    """Return the node's name: ``$EAGLEEYE_NODE``, else ``$NODE_NAME`` (Kubernetes downward API), else the host name."""
    return os.environ.get("EAGLEEYE_NODE") or os.environ.get("NODE_NAME") or socket.gethostname()


@dataclass(frozen=True, slots=True)
class Settings:
    """Section ``[collect]``: what `eagleeye export` watches and where it serves."""

    node: str = field(default_factory=this_node)
    """Name of this node in every series. Several exporters on one machine need different names."""
    address: str = "0.0.0.0"
    """Address to serve on. All of them by default, as the server that scrapes runs elsewhere; 127.0.0.1 keeps it private."""
    port: int = 9470
    """Port to serve on; 0 takes a free one and prints it."""
    proc_root: str = "/proc"
    """Where procfs is mounted."""
    sys_root: str = "/sys"
    """Where sysfs is mounted."""
    run_dir: str = ""
    """Folder of the progress files. Empty: `eagleeye.collect.environment.run_dirs` says where the hook writes by itself."""
    job: str = ""
    """Name of the job of processes that carry no EAGLEEYE_JOB. Empty: the launcher's run id."""
    logs: tuple[str, ...] = ()
    """Log files to watch, as globs."""
    log_window_s: float = 300.0
    """Length of the sliding window in which error lines count."""
    step_pattern: str = STEP_PATTERN
    """Regular expression with one group, the step, for jobs without the progress hook."""
    deadline_s: float = 2.0
    """Time that one collector may take before the page goes out without it."""
    remember_s: float = 3600.0
    """How long a vanished rank stays on the page."""
    collectors: tuple[str, ...] = BUILT_IN
    """Names of the collectors to run."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port {self.port} does not exist; use 0 to 65535")
        try:
            groups = re.compile(self.step_pattern).groups
        except re.error as error:
            raise ValueError(f"step_pattern {self.step_pattern!r} is no regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"step_pattern {self.step_pattern!r} needs exactly one group, the step number")


class Site:
    """One node as its collectors see it: settings, roots, clock, and whatever they share.

    `close()` ends the background threads; they are daemons, so a process may also just exit.
    """

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self.settings = settings
        self.node = settings.node
        self.proc = Path(settings.proc_root)
        self.sys = Path(settings.sys_root)
        self.clock: Clock = clock or SystemClock()
        self._shared: dict[type[Any], Any] = {}
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def same_pids(self) -> bool:
        """Whether numbers in `proc` are process ids of this process's own namespace, so that they can be opened as such."""
        try:
            return os.readlink(self.proc / "self") == str(os.getpid())
        except OSError:
            return False

    def shared(self, kind: Callable[["Site"], T]) -> T:
        """Return the one `kind(self)` of this site, made at the first call."""
        key = cast(type[Any], kind)
        with self._lock:
            if key not in self._shared:
                self._shared[key] = kind(self)
            return cast(T, self._shared[key])

    def background(self, work: Callable[[], float]) -> None:
        """Call `work` in a thread until `close()`; it returns how many seconds to wait before the next call."""

        def loop() -> None:
            wait_s = 0.0
            while not self._closed.wait(wait_s):
                try:
                    wait_s = work()
                except Exception as error:  # the edge of this loop: a thread that died would leave old values that look new
                    print(f"{threading.current_thread().name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                    wait_s = 5.0

        thread = threading.Thread(target=loop, daemon=True, name=f"eagleeye-{getattr(work, '__qualname__', 'work')}")
        thread.start()
        self._threads.append(thread)

    def close(self) -> None:
        """End the background threads."""
        self._closed.set()
        for thread in self._threads:
            thread.join(timeout=2.0)


class MeanSinceTaken:
    """Mean of what was looked at since somebody last asked, for values that change faster than the page is read."""

    REPEAT_S = 2.0
    """How long the last mean serves whoever asks before there is a new look: two servers may scrape at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = 0.0
        self._count = 0
        self._last: float | None = None
        self._last_s = float("-inf")

    def look(self, value: float) -> None:
        """Take in one look."""
        with self._lock:
            self._sum += value
            self._count += 1

    def take(self) -> float | None:
        """Return the mean of the looks since the last call, or None when there were none for a while."""
        with self._lock:
            if self._count:
                self._last, self._last_s = self._sum / self._count, monotonic_s()
                self._sum, self._count = 0.0, 0
            return self._last if monotonic_s() - self._last_s <= self.REPEAT_S else None


class Collector(Protocol):
    """One kind of local counter. The exporter makes it once, as ``kind(site)``, and calls it at every scrape."""

    name: str

    def supported(self) -> bool:
        """Whether this machine has what the collector reads. Cheap; asked before every `collect`."""
        ...

    def collect(self, now_s: float) -> Iterable[Sample]:
        """Return the samples of now, without the label `node`, which the exporter adds.

        Called from changing threads, never from two at once. One unreadable part loses only its own samples.

        Raises
        ------
        NoData
            There is nothing here, which is no failure.
        """
        ...
