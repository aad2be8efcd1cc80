"""The exceptions. Every message says what happened, where, and what to do; `exit_code` is what a command ends with."""


class CheckpointError(Exception):
    """Base of all errors that a user can cause or cure."""

    exit_code = 1


class UsageError(CheckpointError):
    """The call, the state or the configuration cannot mean what it says."""

    exit_code = 2


class CannotRun(CheckpointError):
    """The machine lacks something: a port in use, no memory, a full disk, a second server."""

    exit_code = 3


class CacheGone(CheckpointError):
    """The cache of this node does not answer; what it held in memory is lost here and may be held by its neighbour."""

    exit_code = 3


class Corrupt(CheckpointError):
    """Bytes are not those that were saved."""


class Superseded(CheckpointError):
    """A generation was not written to storage because a newer one went first."""


class PeerError(CheckpointError):
    """Another node's cache does not answer, or answers nonsense."""
