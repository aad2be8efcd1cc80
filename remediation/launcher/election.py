"""Who leads: the launcher that holds a lease, which it must renew. No clock is compared with another node's.

An observer takes the lease only after its version stood still for `lease_s` on the observer's own clock. The term grows with
every holder and stands in every version of the job's document, so that a leader which slept through its lease can change nothing.
"""

import math
from dataclasses import dataclass

from eagleeye.records import from_json, to_json
from remediation.launcher.store import Store

KEY = "leader"


@dataclass(frozen=True, slots=True)
class Lease:
    """The document ``leader``. `holder` is empty when its holder gave it back."""

    holder: str = ""
    term: int = 0
    beat: int = 0
    lease_s: float = 0.0


class Changes:
    """How long ago the version of each document was seen to change, on this process's own monotonic clock."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def age_s(self, key: str, version: int, now_s: float) -> float:
        """Return the seconds since the version of `key` changed; 0 at its first sight."""
        known = self._seen.get(key)
        if known is None or known[0] != version:
            self._seen[key] = known = (version, now_s)
        return now_s - known[1]


class Election:
    """One candidate.

    Parameters
    ----------
    node : the name under which it leads
    lease_s : how long a lease holds that nobody renews
    """

    def __init__(self, store: Store, node: str, lease_s: float) -> None:
        self._store, self._node, self._lease_s = store, node, lease_s
        self._changes = Changes()
        self._version = self._term = self._beat = 0
        self._renewed_s = -math.inf

    def step(self, now_s: float) -> int:
        """Renew the lease or try to take it; return the term while this candidate leads, else 0."""
        if self._term and now_s - self._renewed_s > self._lease_s:
            self._term = 0  # it may have been taken since: from here on an observer like the others
        if self._term:
            if now_s - self._renewed_s > self._lease_s / 4:
                self._write(self._node, self._term, now_s)
        else:
            self._version, lease = look(self._store)
            age_s = self._changes.age_s(KEY, self._version, now_s)
            if not lease.holder or age_s > self._lease_s:
                self._write(self._node, lease.term + 1, now_s)
        return self._term

    def release(self) -> None:
        """Let the others lead at once."""
        if self._term:
            self._write("", self._term, -math.inf)
            self._term = 0

    def _write(self, holder: str, term: int, now_s: float) -> None:
        self._beat += 1
        lease = Lease(holder, term, self._beat, self._lease_s)
        if self._store.put(KEY, to_json(lease), self._version):
            self._version += 1
            self._term, self._renewed_s = term, now_s
        else:
            self._term = 0


def look(store: Store) -> tuple[int, Lease]:
    """Return the version of the lease (0: there is none yet) and the lease."""
    version, document = store.get(KEY) or (0, {})
    return version, from_json(Lease, document)
