"""What flows along the line, as frozen records that survive a trip through JSON.

Sample (exporter) -> Verdict (vote) -> Incident -> Plan (policy) -> Outcome (backend, journal). `Window` and
`Score` carry arrays and live in `eagleeye.window` and `eagleeye.detectors.base`.
"""

import dataclasses
import enum
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from eagleeye.errors import DataError


class Decision(enum.StrEnum):
    """What one tick says of one job. Missing data is UNSURE, never NORMAL."""

    NORMAL = "normal"
    ANOMALOUS = "anomalous"
    UNSURE = "unsure"
    NOT_APPLICABLE = "not_applicable"


class Scope(enum.StrEnum):
    """Whom an anomaly concerns. JOB means: everybody, so nobody is to be taken out."""

    RANK = "rank"
    NODE = "node"
    JOB = "job"


class Category(enum.StrEnum):
    """The kind of cause, as far as the data tell it."""

    GPU = "gpu"
    NETWORK = "network"
    STORAGE = "storage"
    NODE = "node"
    USER_CODE = "user_code"
    HANG = "hang"
    UNKNOWN = "unknown"


class ActionKind(enum.StrEnum):
    """What a plan may ask of a backend."""

    NOTIFY = "notify"
    CORDON = "cordon"
    EVICT = "evict"
    RESTART = "restart"


class Result(enum.StrEnum):
    """How an action ended. OBSERVED: written down, deliberately not done."""

    OBSERVED = "observed"
    DONE = "done"
    TRANSIENT = "transient"
    PERMANENT = "permanent"
    AMBIGUOUS = "ambiguous"


class IncidentState(enum.StrEnum):
    """Life of an incident; transitions only by `eagleeye.online.incidents.advance`."""

    OPEN = "open"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one series, in the base unit of its catalogue row, as a collector reads it."""

    series: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that should be taken out, its score (above 1 = anomalous) and what it did, in words."""

    rank: int
    node: str
    score: float
    evidence: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of a job for the window that ends at `to_s` (seconds since the epoch).

    `votes` maps each detector to True (fired), False, or None (abstained). `rule` names the deterministic rule that decided
    without a vote, if one did. `model` names the fitted model, for example ``champion v3`` or ``own past``.
    """

    job: str
    from_s: float
    to_s: float
    decision: Decision
    reason: str
    scope: Scope | None = None
    category: Category | None = None
    suspects: tuple[Suspect, ...] = ()
    votes: Mapping[str, bool | None] = field(default_factory=dict)
    rule: str | None = None
    model: str = ""

    def __post_init__(self) -> None:
        if self.decision is not Decision.ANOMALOUS and (self.suspects or self.scope):
            raise ValueError(f"a {self.decision} verdict cannot blame anybody")
        if self.scope is Scope.JOB and self.suspects:
            raise ValueError("a verdict about the whole job cannot name suspects")


@dataclass(frozen=True, slots=True)
class Incident:
    """Anomalous verdicts of one job about the same nodes, from the first to the last.

    `nodes` is empty when the whole job is concerned. `rule` names the rule that decided without a vote, if one did. `id` is a
    function of job, nodes and `opened_s`.
    """

    id: str
    job: str
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    opened_s: float
    last_anomalous_s: float
    state: IncidentState
    category: Category
    reason: str
    verdict_count: int = 1
    closed_s: float | None = None
    rule: str | None = None


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a plan. `target` is a node for CORDON and EVICT, a job for RESTART and NOTIFY."""

    kind: ActionKind
    target: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What should be done about one incident, in order, and why (also when nothing should be done)."""

    incident_id: str
    job: str
    actions: tuple[Action, ...]
    reason: str

    def __post_init__(self) -> None:
        if not self.reason:
            raise ValueError("a plan must say why")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one action ended. `operation_id` is a function of incident and step, so that a repetition is recognised."""

    operation_id: str
    result: Result
    detail: str
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class JobView:
    """What a backend sees of a job at this moment, so that a plan can keep within its budget.

    `nodes` hold ranks now, `spares` are ready to take over, `excluded` were taken out. The job needs `min_nodes`.
    `running_since_s` is when the ranks of the present round were started, None while the job forms, stops or restarts.
    """

    job: str
    nodes: tuple[str, ...]
    spares: tuple[str, ...]
    excluded: tuple[str, ...]
    min_nodes: int
    running_since_s: float | None


def operation_id(incident_id: str, action: Action) -> str:
    """Return the name of what is done for one action of a plan: the same for every repetition, so that one is recognised."""
    return f"{incident_id}-{action.kind.value}-{action.target}"


def operation_of(name: str) -> tuple[str, Action] | None:
    """Return the incident and the action that `operation_id` made `name` of, None for a name of another make."""
    match = _OPERATION.fullmatch(name)
    return (match["incident"], Action(ActionKind(match["kind"]), match["target"])) if match else None


_OPERATION = re.compile(rf"(?P<incident>.+?)-(?P<kind>{'|'.join(ActionKind)})-(?P<target>.+)", re.DOTALL)

R = TypeVar("R")


def to_json(record: Any) -> dict[str, Any]:
    """Return a record as a dict of JSON types; enums become their values, tuples become lists."""
    return typing.cast(dict[str, Any], _plain(record))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def from_json(kind: type[R], data: Any) -> R:
    """Return the record of class `kind` that `to_json` wrote.

    Raises
    ------
    DataError
        A field is missing, unknown, of the wrong type, or breaks an invariant; the sentence names where.
    """
    return typing.cast(R, _typed(kind, data, kind.__name__))


def _typed(kind: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(data, Mapping):
            raise DataError(f"{where}: an object was expected, got {type(data).__name__}")
        hints = typing.get_type_hints(kind)
        unknown = set(data) - set(hints)
        if unknown:
            raise DataError(f"{where}: unknown field {sorted(unknown)[0]!r}; was it written by a newer version?")
        required = {
            f.name
            for f in dataclasses.fields(kind)
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        }
        missing = required - set(data)
        if missing:
            raise DataError(f"{where}: field {sorted(missing)[0]!r} is missing")
        fields = {name: _typed(hints[name], value, f"{where}.{name}") for name, value in data.items()}
        try:
            return kind(**fields)
        except ValueError as error:
            raise DataError(f"{where}: {error}") from None
    if origin is typing.Union or origin is types.UnionType:
        if data is None and type(None) in arguments:
            return None
        for option in arguments:
            if option is type(None):
                continue
            try:
                return _typed(option, data, where)
            except DataError:
                continue
        raise DataError(f"{where}: {data!r} is not one of {kind}")
    if origin is tuple:
        if not isinstance(data, list | tuple):
            raise DataError(f"{where}: a list was expected, got {data!r}")
        return tuple(_typed(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(data, Mapping):
            raise DataError(f"{where}: an object was expected, got {data!r}")
        return {str(k): _typed(arguments[1], v, f"{where}.{k}") for k, v in data.items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(data)
        except ValueError:
            raise DataError(f"{where}: {data!r} is not one of {[str(m.value) for m in kind]}") from None
    if kind is float and isinstance(data, int | float) and not isinstance(data, bool):
        return float(data)
    if isinstance(kind, type) and isinstance(data, kind) and not (kind is int and isinstance(data, bool)):
        return data
    raise DataError(f"{where}: {data!r} is not a {getattr(kind, '__name__', kind)}")
