"""The exceptions. Every message says what happened, where, and what to do.

Whatever reaches a user is an `EagleEyeError`: the command line prints its one sentence and exits with
`exit_code`. Anything else is a bug and keeps its traceback.
"""


class EagleEyeError(Exception):
    """Base of all errors that a user can cause or cure.

    Exit codes: 1 a problem was found, 2 wrong usage, 3 the environment lacks something.
    """

    exit_code = 1


class UsageError(EagleEyeError):
    """The command cannot mean what was typed."""

    exit_code = 2


class ConfigError(EagleEyeError):
    """A configuration file, environment variable or flag holds an unknown key or an impossible value."""

    exit_code = 2


class DataError(EagleEyeError):
    """Data that was read breaks its format: wrong unit, unknown metric, truncated file."""

    exit_code = 2


class NoData(EagleEyeError):
    """There is nothing to read here. For a collector: this machine has none of it, which is no failure."""

    exit_code = 1


class MissingExtra(EagleEyeError):
    """An optional dependency is not installed."""

    exit_code = 3


class SourceUnavailable(EagleEyeError):
    """A server that should hold the data does not answer, or answers nonsense."""

    exit_code = 3


class EnvironmentLacks(EagleEyeError):
    """A port in use, missing rights, a full disk: the machine, not the command, is at fault."""

    exit_code = 3


class ModelMismatch(EagleEyeError):
    """A stored model does not fit this version of the program or these data."""

    exit_code = 3


class BackendError(EagleEyeError):
    """A remediation backend could not do what the plan says."""


class TransientError(BackendError):
    """Nothing changed; the same request may succeed later."""


class PermanentError(BackendError):
    """Nothing changed, and repeating the request cannot help."""


class AmbiguousError(BackendError):
    """The request may or may not have been accepted: observe before any repetition."""
