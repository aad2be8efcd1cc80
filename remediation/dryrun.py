"""The backend without hands: says what would be done, does nothing."""

from eagleeye.records import Action, ActionKind, JobView, Result

_SENTENCES = {
    ActionKind.NOTIFY: "would tell the owner of job {}",
    ActionKind.CORDON: "would keep new work away from node {}",
    ActionKind.EVICT: "would take node {} out of the job",
    ActionKind.RESTART: "would restart job {} on the remaining nodes",
}


class DryRun:
    """Observes: every action ends as OBSERVED, and nothing changes anywhere."""

    name = "dryrun"

    def observe(self, job: str) -> JobView | None:
        """Return None: it sees no jobs."""
        return None

    def watch(self, job: str) -> None:
        """Nobody acts, so nobody needs to know."""

    def perform(self, operation_id: str, action: Action, job: str, reason: str) -> tuple[Result, str]:
        """Return OBSERVED and what the action would have done."""
        return Result.OBSERVED, _SENTENCES[action.kind].format(action.target)
