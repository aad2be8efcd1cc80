"""Time as an argument: the only module that may ask the operating system what time it is."""

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since the epoch, and a way to wait."""

    def now_s(self) -> float:
        """Return the current time, seconds since the epoch (UTC)."""
        ...

    def sleep_s(self, duration_s: float) -> None:
        """Return after `duration_s` seconds; at once when it is zero or negative."""
        ...


class SystemClock:
    """The machine's clock. `stop()` from another thread or a signal handler ends every wait at once."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def now_s(self) -> float:
        """Return the current time, seconds since the epoch (UTC)."""
        return time.time()

    def sleep_s(self, duration_s: float) -> None:
        """Wait `duration_s` seconds, or until `stop()`."""
        if duration_s > 0:
            self._stopped.wait(duration_s)

    def stop(self) -> None:
        """End all present and future waits."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        """Whether `stop()` was called."""
        return self._stopped.is_set()


class ManualClock:
    """A clock that moves only when it is told to: for replay, simulation and tests."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        """Return the time set last."""
        return self._now_s

    def sleep_s(self, duration_s: float) -> None:
        """Advance by `duration_s` without waiting."""
        self.advance_to(self._now_s + max(duration_s, 0.0))

    def advance_to(self, now_s: float) -> None:
        """Move to `now_s`. Raises ValueError when that lies in the past."""
        if now_s < self._now_s:
            raise ValueError(f"a clock cannot go back from {self._now_s} to {now_s}")
        self._now_s = now_s


def monotonic_s() -> float:
    """Return seconds on a clock that never jumps: for measuring durations, not for time stamps."""
    return time.monotonic()
