"""The backend seam: the hands that a plan needs. Implementations live in `remediation`, found through `eagleeye.plugins`."""

from typing import Protocol

from eagleeye.records import Action, Result


class RemediationBackend(Protocol):
    """Does one action at a time on a cluster, a scheduler, or on paper.

    `perform` may be repeated with the same `operation_id` after a crash or an unclear answer and must then change nothing
    twice. It returns DONE or OBSERVED with a sentence, or raises TransientError, PermanentError or AmbiguousError.
    """

    name: str

    def perform(self, operation_id: str, action: Action) -> tuple[Result, str]:
        """Carry out `action`; return how it ended and one sentence."""
        ...
