"""Log files -> error lines in a sliding window, by class, and when the first of them was written.

`classify` and `ErrorWindow` know nothing of files. `LogTail` follows files through rotation, truncation and floods in bounded
memory. `LogCollector` joins them.
"""

import glob
import os
import re
import stat
import threading
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from eagleeye.clock import monotonic_s
from eagleeye.collect.base import Site
from eagleeye.errors import NoData
from eagleeye.metrics import PREFIX
from eagleeye.records import Sample

CLASSES = ("hardware", "communication", "error")

FATAL_XIDS = frozenset({46, 48, 54, 62, 63, 64, 74, 79, 92, 94, 95, 110, 119, 120, 121, 136, 140, 143, 149, 154, 155, 156, 158})
"""Xid codes that mean: reset or replace the board. Codes that applications cause by themselves (13, 31, 43, 45) are plain errors.

Source: NVIDIA, "XID Errors", catalogue of codes and their resolution.
"""

_OURS = ("eagleeye ", "checkpoint: ")
_XID = re.compile(r"\bXid\b\s*(?:\([^)]*\))?\s*:\s*(\d+)")
_QUIET = re.compile(r"(?:^|[\s\[|:<])(?:INFO|DEBUG|TRACE|NOTICE|VERBOSE)(?:[\s\]|:>,]|$)|^I\d{4}\s")
_HARMLESS = re.compile(
    r"""(?ix)
    \b(?:no|zero|0|without)\s+(?:[\w-]+\s+){0,3}(?:errors?|failures?|exceptions?)\b
    | (?:\buncorrect\w+\s+(?:\w+\s+){0,2})?
      \b(?:errors?|failures?|exceptions?)(?:[\s_-]*(?:count|total|num(?:ber)?))?\s*[:=]\s*(?:0\b(?!\.)|none\b)
    | \berrors?[\s_-]?(?:rate|ratio|bars?|margin|bound|budget|feedback|correction|handl\w+|prone|free|threshold)\b
    | \b(?:error|fatal)\s*[:=]\s*[+-]?\d[\d.e+-]*(?=\s*(?:$|[,;|)\]]|\w+\s*[:=]))
    | \bcorrect(?:ed|able)\s+(?:\w+\s+){0,2}errors?\b
    | \bseverity=corrected\b
    """
)
_HARDWARE = re.compile(
    r"""(?ix)
    \buncorrect(?:able|ed)\b (?!(?:\s+\w+){0,3}\s*[:=]\s*(?:0|none)\b | (?:\s+\w+){0,2}\s+none\b | (?:\s+errors?)?\s+(?:0)\b)
    | \bdouble[ -]bit\ (?:ecc\ )?errors?\b
    | \bfallen\ off\ the\ bus\b
    | \bgpu\ (?:is\ )?lost\b
    | \bhardware\ error\b
    | \bthermal\ shutdown\b
    """
)
_CORRECTED = re.compile(r"(?i)(?<!un)\bcorrect(?:ed|able)\b")
"""What the hardware mended itself is no fault, whatever the line is called."""

_COMMUNICATION = re.compile(
    r"""(?ix)
    \bwatchdog\ caught\ collective\b
    | \bremote\ process\ (?:has\ )?exited\b
    | \bconnection\ (?:was\ |has\ been\ )?(?:reset|closed\ by|refused|timed\ out|aborted|lost)\b
    | \bbroken\ pipe\b
    | \bnetwork\ is\ (?:down|unreachable)\b
    | \bno\ route\ to\ host\b
    | \b(?:NCCL|RCCL|HCCL)\ (?:error|communicator\ was\ aborted)\b
    | \bnccl(?:Remote|System|Unhandled\w*)Error\b
    | \bDist(?:Backend|Network|Store)Error\b
    | \bgloo\b.*(?:timed\ out|timeout\ caused|(?:read|write|connect)\ error|closed|abort)
    | \b(?:socket|tcpstore)\b.*\b(?:timed\ out|closed|reset|failed\ to\ (?:recv|send))
    | \b(?:collective|all_?reduce|broadcast|all_?gather|reduce_?scatter|barrier)\b.*\btimed\ out\b
    | \bIBV_WC_\w*ERR\b | \bgot\ completion\b.*\berror\b
    """
)
_LEVEL = re.compile(r"(?:^|[\s\[|(<:-])(?:ERROR|FATAL|CRITICAL|EMERG|ALERT|PANIC)(?=[\]:)>,]|\s+\S)|\[[EF]\s")
_ERROR = re.compile(
    r"""(?x)
    \bTraceback\ \(most\ recent\ call\ last\)
    | \b[A-Z]\w*(?:Error|Exception)\b(?=\s*:|\s*$|\()
    | ^\W*(?:[\w./-]+:\s+)?(?i:fatal|error):?\s+(?i:[a-z])
    | (?i:\bsegmentation\ fault\b | \bcore\ dumped\b | \bkernel\ panic\b | \bout\ of\ memory\b | \bnot\ responding\b)
    | \bSIG(?:SEGV|ABRT|BUS|ILL|FPE|KILL)\b
    | \bterminate\ called\ after\b
    """
)
_HINTS = (
    *("xid", "error", "fatal", "exception", "traceback", "critical", "emerg", "alert", "panic", "sig", "terminate"),
    *("uncorrect", "bus", "lost", "link", "i/o", "thermal", "memory", "segmentation", "dumped", "responding", "[e ", "[f "),
    *("watchdog", "exited", "connection", "pipe", "network", "no route", "nccl", "gloo", "timed out", "closed", "reset"),
    *("failed to", "aborted", "ibv_wc", "completion"),
)
"""Every line that one of the patterns matches holds one of these; looking for them first makes a plain line ten times cheaper."""
_GLOG = re.compile(r"[EF]\d{4}\s")
_STAMP = re.compile(r"\W{0,2}(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?\d*\s?(Z|[+-]\d\d:?\d\d)?")


def classify(text: str) -> str | None:
    """Return the class of a log line: ``hardware``, ``communication``, ``error``, or None for a line that reports no error.

    A line of level INFO or below is none, whatever it mentions; so are counts of zero, error rates and losses, and what our own
    launcher and cache say about others. Only the first 1,000 characters are read.
    """
    text = text[:1000]
    if text.startswith(_OURS):
        return None
    lower = text.lower()
    if not any(hint in lower for hint in _HINTS) and not _GLOG.match(text):
        return None
    xid = _XID.search(text)
    if xid:
        return "hardware" if int(xid.group(1)) in FATAL_XIDS else "error"
    if _QUIET.search(text[:160]):
        return None
    mended = _CORRECTED.search(text)
    text = _HARMLESS.sub(" ", text)
    if _HARDWARE.search(text) and not mended:
        return "hardware"
    if _COMMUNICATION.search(text):
        return "communication"
    if _LEVEL.search(text[:160]) or _GLOG.match(text) or _ERROR.search(text):
        return "error"
    return None


def stamp_s(text: str, read_s: float) -> float | None:
    """Return the ISO time that a line begins with, seconds since the epoch, or None.

    A time without zone is read as UTC or as local time, whichever lies nearer to `read_s`.
    """
    match = _STAMP.match(text)
    if not match:
        return None
    day, clock, fraction, zone = match.groups()
    try:
        bare = datetime.fromisoformat(f"{day}T{clock}")
        exact = datetime.fromisoformat(f"{day}T{clock}{zone.replace('Z', '+00:00')}") if zone else None
    except ValueError:
        return None
    part_s = float(f"0.{fraction}") if fraction else 0.0
    if exact is not None:
        return exact.timestamp() + part_s
    return min((bare.replace(tzinfo=UTC).timestamp(), bare.timestamp()), key=lambda t: abs(t - read_s)) + part_s


class ErrorCounts(NamedTuple):
    """Error lines of one window: how many of each class, and when the first was written (None when there is none)."""

    by_class: dict[str, int]
    first_s: float | None


class ErrorWindow:
    """Error lines of the last `window_s` seconds. At most `limit` lines of each class are kept: a flood counts as `limit`.

    Add lines roughly in the order of time; a line forgets what lies more than a window before it.
    """

    def __init__(self, window_s: float = 300.0, limit: int = 50_000) -> None:
        self.window_s = window_s
        self._limit = limit
        self._times: dict[str, array[float]] = {name: array("d") for name in CLASSES}

    def add(self, at_s: float, text: str) -> str | None:
        """Take in one line written at `at_s`; return its class."""
        kind = classify(text)
        if kind is not None:
            times = self._times[kind]
            del times[: bisect_right(times, at_s - self.window_s)]
            if len(times) < self._limit:
                times.insert(bisect_right(times, at_s), at_s)
        return kind

    def at(self, now_s: float) -> ErrorCounts:
        """Return what the window (now_s - window_s, now_s] holds; lines later than `now_s` do not count."""
        counts: dict[str, int] = {}
        firsts: list[float] = []
        for name, times in self._times.items():
            begin, end = bisect_right(times, now_s - self.window_s), bisect_right(times, now_s)
            counts[name] = end - begin
            firsts.extend(times[begin : min(end, begin + 1)])
        return ErrorCounts(counts, min(firsts, default=None))


Listener = Callable[[str, float, str], None]
"""Called with path, time (seconds since the epoch) and text of each new line."""


class _Followed:
    """One open log file and the unfinished line at its end."""

    def __init__(self, path: str, descriptor: int, offset_bytes: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.offset_bytes = offset_bytes
        self.rest = b""


class LogTail:
    """Follows the files of ``settings.logs`` and hands every new line to its listeners.

    Files that exist at the start begin at their end; of their last part only lines count that carry a time inside the window.
    A file is known by its inode, so a rotated file is read to its end and its successor from its beginning.
    """

    POLL_S = 0.25
    LOOK_S = 2.0
    CHUNK_BYTES = 1 << 20
    BEHIND_BYTES = 8 << 20
    LINE_BYTES = 4096
    FILES = 256

    def __init__(self, site: Site) -> None:
        self._globs = site.settings.logs
        self._window_s = site.settings.log_window_s
        self._clock = site.clock
        self._started_s = site.clock.now_s()
        self._listeners: list[Listener] = []
        self._files: dict[tuple[int, int], _Followed] = {}
        self._history: deque[tuple[str, float, str]] = deque(maxlen=10_000)
        self._looked_s = float("-inf")
        self._lock = threading.Lock()
        self._look(first=True)
        if self._globs:
            site.background(self._work)

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that are followed now."""
        return tuple(f.path for f in list(self._files.values()))

    def listen(self, listener: Listener) -> None:
        """Hand every line from now on to `listener`, and first those of the window's past."""
        with self._lock:
            for line in self._history:
                listener(*line)
            self._listeners.append(listener)

    def poll(self) -> None:
        """Read what the files got since the last call."""
        with self._lock:
            now_s = self._clock.now_s()
            for key, followed in list(self._files.items()):
                self._read(key, followed, now_s)
            if monotonic_s() - self._looked_s > self.LOOK_S:
                self._look(first=False)

    def _work(self) -> float:
        began_s = monotonic_s()
        self.poll()
        # A flood of lines may cost this thread at most a fifth of one CPU.
        return max(self.POLL_S, 4 * (monotonic_s() - began_s))

    def _look(self, first: bool) -> None:
        """Open files that are new and forget those that are gone."""
        self._looked_s = monotonic_s()
        found: dict[tuple[int, int], tuple[str, os.stat_result]] = {}
        for pattern in self._globs:
            for path in sorted(glob.iglob(pattern, recursive=True)):
                try:
                    status = os.stat(path)
                except OSError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    found.setdefault((status.st_dev, status.st_ino), (path, status))
        newest = sorted(found.items(), key=lambda item: -item[1][1].st_mtime)[: self.FILES]
        for key, (path, status) in newest:
            if key in self._files:
                self._files[key].path = path
                continue
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            except OSError:
                continue
            old = first or status.st_mtime < self._started_s
            self._files[key] = _Followed(path, descriptor, status.st_size if old else 0)
            for line in self._recent(path, descriptor, status.st_size) if old else ():
                if first:
                    self._history.append(line)
                else:
                    self._tell(*line)
        for key in self._files.keys() - {key for key, _ in newest}:
            os.close(self._files.pop(key).descriptor)

    def _recent(self, path: str, descriptor: int, size_bytes: int) -> Iterator[tuple[str, float, str]]:
        """Yield the lines at the end of an old file that carry a time inside the window."""
        begin = max(0, size_bytes - self.CHUNK_BYTES)
        now_s = self._clock.now_s()
        for raw in os.pread(descriptor, size_bytes - begin, begin).split(b"\n")[1 if begin else 0 :]:
            text = raw[: self.LINE_BYTES].decode("utf-8", "replace")
            at_s = stamp_s(text, now_s)
            if at_s is not None and now_s - self._window_s < at_s <= now_s:
                yield path, at_s, text

    def _read(self, key: tuple[int, int], followed: _Followed, now_s: float) -> None:
        try:
            size_bytes = os.fstat(followed.descriptor).st_size
            if size_bytes < followed.offset_bytes:
                followed.offset_bytes, followed.rest = 0, b""
            if size_bytes - followed.offset_bytes > self.BEHIND_BYTES:
                followed.offset_bytes, followed.rest = size_bytes - self.CHUNK_BYTES, b""
            data = os.pread(followed.descriptor, self.CHUNK_BYTES, followed.offset_bytes)
        except OSError:
            os.close(self._files.pop(key).descriptor)
            return
        followed.offset_bytes += len(data)
        *lines, rest = (followed.rest + data).split(b"\n") if data else (followed.rest,)
        followed.rest = rest[: self.LINE_BYTES]
        for raw in lines:
            text = raw[: self.LINE_BYTES].decode("utf-8", "replace").rstrip("\r")
            own_s = stamp_s(text, now_s)
            self._tell(followed.path, now_s if own_s is None else min(own_s, now_s), text)

    def _tell(self, path: str, at_s: float, text: str) -> None:
        for listener in self._listeners:
            listener(path, at_s, text)


class LogCollector:
    """Error lines of this node's logs in the sliding window."""

    name = "logs"

    def __init__(self, site: Site) -> None:
        self._window = ErrorWindow(site.settings.log_window_s)
        self._lock = threading.Lock()
        self._globs = site.settings.logs
        self._tail = site.shared(LogTail)
        self._tail.listen(self._take)

    def _take(self, path: str, at_s: float, text: str) -> None:
        with self._lock:
            self._window.add(at_s, text)

    def supported(self) -> bool:
        """Whether any log is to be watched."""
        return bool(self._globs)

    def collect(self, now_s: float) -> Iterable[Sample]:
        """Return the counts by class, and the time of the first error line if there is one."""
        self._tail.poll()
        if not self._tail.paths:
            raise NoData(f"no file matches {', '.join(self._globs) or 'the setting logs, which is empty'}")
        with self._lock:
            counts, first_s = self._window.at(now_s)
        for kind, count in counts.items():
            yield Sample(PREFIX + "log_window_errors", {"class": kind}, float(count))
        if first_s is not None:
            yield Sample(PREFIX + "log_first_error_timestamp_seconds", {}, first_s)
