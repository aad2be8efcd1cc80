"""A shard on its way into this node's memory: which chunks are there, which are not, and who gave bad ones.

Whatever breaks costs the chunks that were under way. A chunk is checked by the thread that pulled it, while it still lies in the
processor's cache, and the socket's buffer fills meanwhile: measured, a thread of its own for that costs more.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager

from checkpoint.errors import CheckpointError, Corrupt
from checkpoint.manifest import Manifest
from checkpoint.transport import Reader

TICK_S = 1.0
"""While chunks land the other side hears from us so often."""
_BAD_TRIES = 2
"""A chunk that came damaged is asked for once more from the same holder: it may have happened on the wire."""
_TRIES = 3
"""Connections to a holder that break one after the other, with nothing landed, until it is given up."""

OpenReader = Callable[[], AbstractContextManager[Reader]]


class Landing:
    """Memory of `manifest.nbytes` that is being filled, by any number of holders at once. A chunk is pulled by one at a time."""

    def __init__(self, manifest: Manifest, data: memoryview) -> None:
        self.manifest, self.data = manifest, data
        self.given: Counter[str] = Counter()
        """How many good chunks came from whom."""
        self.notes: list[str] = []
        """What went wrong, with whom."""
        self._changed = threading.Condition()
        self._waiting = deque(range(len(manifest.digests)))
        self._missing = set(self._waiting)
        self._bad: Counter[tuple[str, int]] = Counter()
        self._stopped: set[str] = set()

    @property
    def missing(self) -> set[int]:
        """Which chunks are not there yet, or are not known to be good."""
        with self._changed:
            return set(self._missing)

    def note(self, holder: str, what: object) -> None:
        """Remember what is wrong with a holder."""
        with self._changed:
            if (said := f"{holder}: {what}") not in self.notes:
                self.notes.append(said)

    def gave_bad(self, holder: str) -> bool:
        """Whether a holder gave bytes that are not those that were saved."""
        with self._changed:
            return any(who == holder for who, _ in self._bad)

    def forgive(self) -> None:
        """Ask those once more who gave bad chunks."""
        with self._changed:
            self._bad.clear()

    def draw(self, holder: str, open_reader: OpenReader, connections: int, tick: Callable[[], None]) -> None:
        """Pull from one holder, on several connections, until all is there or it cannot give what is missing.

        A connection that breaks is made anew, unless several break one after the other with nothing landed; that is no error here
        but a note. `tick` is called all the while, and what it raises ends the drawing.
        """
        with self._changed:
            self._stopped.discard(holder)
        idle = 0
        while idle < _TRIES and self._wait_for_wanted(holder, tick):
            before = self.given[holder]
            self._draw_once(holder, open_reader, max(1, min(connections, len(self.missing))), tick)
            idle = idle + 1 if self.given[holder] == before else 0

    def _wait_for_wanted(self, holder: str, tick: Callable[[], None]) -> bool:
        """Wait until a holder can give a chunk that nobody else is pulling, and return whether that is so."""
        while True:
            with self._changed:
                possible = {number for number in self._missing if self._bad[holder, number] < _BAD_TRIES}
                if not possible:
                    return False
                if not possible.isdisjoint(self._waiting):
                    return True
                self._changed.wait(TICK_S)
            tick()

    def _draw_once(self, holder: str, open_reader: OpenReader, connections: int, tick: Callable[[], None]) -> None:
        with ThreadPoolExecutor(connections) as pool:
            pulls = [pool.submit(self._pull, holder, open_reader) for _ in range(connections)]
            try:
                while wait(pulls, TICK_S).not_done:
                    tick()
            except BaseException:
                with self._changed:
                    self._stopped.add(holder)
                raise
        for pull in pulls:
            pull.result()

    def _pull(self, holder: str, open_reader: OpenReader) -> None:
        claimed: set[int] = set()

        def claims() -> Iterator[int]:
            while (number := self._claim(holder)) is not None:
                claimed.add(number)
                yield number

        try:
            with open_reader() as reader:
                for number in reader.read(claims(), self.data):
                    claimed.discard(number)
                    self._check(holder, number)
        except (CheckpointError, OSError) as error:
            self.note(holder, error)
        finally:
            with self._changed:
                self._waiting.extend(claimed)
                self._changed.notify_all()

    def _claim(self, holder: str) -> int | None:
        with self._changed:
            for _ in range(0 if holder in self._stopped else len(self._waiting)):
                number = self._waiting.popleft()
                if self._bad[holder, number] < _BAD_TRIES:
                    return number
                self._waiting.append(number)
        return None

    def _check(self, holder: str, number: int) -> None:
        start, stop = self.manifest.bounds(number)
        good = self.manifest.fits(number, self.data[start:stop])
        with self._changed:
            if good:
                self._missing.discard(number)
                self.given[holder] += 1
            else:
                self._bad[holder, number] += 1
                self._waiting.append(number)
            self._changed.notify_all()
        if not good:
            self.note(holder, Corrupt(f"the bytes from {start} to {stop} are not those that were saved"))
