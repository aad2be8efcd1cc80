"""The backend seam: the hands that a plan needs. Implementations live in `remediation`, found through `eagleeye.plugins`."""

from typing import Protocol

from eagleeye.records import Action, JobView, Result


class RemediationBackend(Protocol):
    """Looks at a job and does one action at a time on a cluster, a scheduler, or on paper."""

    name: str

    def observe(self, job: str) -> JobView | None:
        """Return what is seen of `job`; None when this backend cannot see jobs at all. Changes nothing.

        Raises
        ------
        TransientError
            It could not be looked at just now; no plan is carried out without a look.
        PermanentError
            There is no such job.
        """
        ...

    def watch(self, job: str) -> None:
        """Let the job know that somebody acts on its incidents, so that it waits for a verdict before it restarts by itself.

        Raises
        ------
        BackendError
            There is no such job, or it cannot be told just now.
        """
        ...

    def perform(self, operation_id: str, action: Action, job: str, reason: str) -> tuple[Result, str]:
        """Carry out `action` on `job` because of `reason`; return DONE or OBSERVED and one sentence.

        May be repeated with the same `operation_id`, after a crash or an unclear answer, and then changes nothing twice and
        returns what the first call did. Keeps the budget by itself, too: never below the job's minimum of nodes.

        Raises
        ------
        TransientError
            Nothing changed; the same request may succeed later.
        PermanentError
            Nothing changed, and repeating cannot help.
        AmbiguousError
            It may or may not have been done; a repetition with the same `operation_id` will tell.
        """
        ...
