"""`eagleeye.toml` -> checked settings. Knows no component: each owner hands in its own frozen dataclass.

Precedence: file < environment (``EAGLEEYE_ONLINE__LEARN_S=90``) < command line. Durations are text ("30d", "90s") for fields
that end in ``_s``, sizes are text ("64MiB") for fields that end in ``_bytes``.
"""

import dataclasses
import difflib
import os
import re
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from eagleeye.errors import ConfigError

S = TypeVar("S")

DEFAULT_FILE = Path("eagleeye.toml")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SECTIONS = ("collect", "source", "offline", "online", "actions", "remediation", "checkpoint")


def duration_s(text: str | float) -> float:
    """Return a duration in seconds. ``30d``, ``1h30m``, ``90s``, ``250ms``, or a bare number of seconds.

    Raises
    ------
    ConfigError
        The text is no positive duration.
    """
    if (isinstance(text, int | float) and not isinstance(text, bool)) or re.fullmatch(r"\s*\d+(\.\d+)?\s*", str(text)):
        seconds = float(text)
    elif re.fullmatch(r"\s*(\d+(\.\d+)?(ms|s|m|h|d|w))+\s*", str(text)):
        seconds = sum(float(n) * _SECONDS[u] for n, _, u in re.findall(r"(\d+(\.\d+)?)(ms|s|m|h|d|w)", str(text)))
    else:
        raise ConfigError(f"{text!r} is no duration; write for example 90s, 15m, 1h30m or 30d")
    if not 0 < seconds < 1e10:
        raise ConfigError(f"{text!r} is no duration above zero")
    return seconds


def size_bytes(text: str | int) -> int:
    """Return a size in bytes: ``64MiB``, ``2GiB``, or a bare number of bytes.

    Raises
    ------
    ConfigError
        The text is no size.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)?\s*", str(text))
    if not match:
        raise ConfigError(f"{text!r} is no size; write for example 64MiB or 2GiB")
    return int(float(match.group(1)) * _BYTES[match.group(2) or "B"])


def read(path: Path | None = None) -> dict[str, Any]:
    """Return the parsed file: `path`, else ``$EAGLEEYE_CONFIG``, else ``./eagleeye.toml`` if it exists, else nothing.

    Raises
    ------
    ConfigError
        The file cannot be read, is no TOML, or has an unknown section.
    """
    explicit = path or (Path(os.environ["EAGLEEYE_CONFIG"]) if os.environ.get("EAGLEEYE_CONFIG") else None)
    chosen = explicit or DEFAULT_FILE
    if explicit is None and not chosen.exists():
        return {}
    try:
        data = tomllib.loads(chosen.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {chosen}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{chosen} is no valid TOML: {error}") from None
    for section in data:
        if section not in SECTIONS:
            raise ConfigError(f"{chosen}: unknown section [{section}]{_nearest(section, SECTIONS)}")
    return data


def settings(kind: type[S], section: str, data: Mapping[str, Any], flags: Mapping[str, Any] | None = None) -> S:
    """Return `kind` filled from a section of `data`, then the environment, then `flags` that are not None.

    Parameters
    ----------
    kind : a frozen dataclass whose fields all have defaults
    section : dotted name, for example ``online`` or ``remediation.kubernetes``
    data : what `read` returned
    flags : command line values by field name

    Raises
    ------
    ConfigError
        Unknown key (with the nearest valid one), or a value of the wrong kind.
    """
    fields = {f.name for f in dataclasses.fields(typing.cast(Any, kind))}
    hints = typing.get_type_hints(kind)
    table: Any = data
    for part in section.split("."):
        table = table.get(part, {}) if isinstance(table, Mapping) else {}
    if not isinstance(table, Mapping):
        raise ConfigError(f"[{section}] must be a table of settings")
    values: dict[str, tuple[Any, str]] = {key: (value, f"[{section}] {key}") for key, value in table.items()}
    prefix = f"EAGLEEYE_{section.upper().replace('.', '__')}__"
    for name, text in os.environ.items():
        if name.startswith(prefix):
            values[name.removeprefix(prefix).lower()] = (text, name)
    for key, value in (flags or {}).items():
        if value is not None:
            values[key] = (value, f"--{key.replace('_', '-')}")
    for key, (_, where) in values.items():
        if key not in fields:
            raise ConfigError(f"{where}: unknown setting {key!r}{_nearest(key, fields)}")
    made = {key: _coerce(hints[key], key, value, where) for key, (value, where) in values.items()}
    try:
        return kind(**made)
    except ValueError as error:
        raise ConfigError(f"[{section}] {error}") from None


def _coerce(kind: Any, key: str, value: Any, where: str) -> Any:
    try:
        if key.endswith("_s"):
            return duration_s(value)
        if key.endswith("_bytes"):
            return size_bytes(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if kind is bool and isinstance(value, str):
        if value.lower() in ("true", "1", "yes", "on"):
            return True
        if value.lower() in ("false", "0", "no", "off"):
            return False
    if kind in (int, float) and isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            pass
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if typing.get_origin(kind) is tuple:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise ConfigError(f"{where}: {value!r} is not a list of texts")
    plain = kind if isinstance(kind, type) else next((a for a in typing.get_args(kind) if isinstance(value, a)), None)
    if plain is not None and isinstance(value, plain) and not (plain is not bool and isinstance(value, bool)):
        return value
    raise ConfigError(f"{where}: {value!r} is not a {getattr(kind, '__name__', kind)}")


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return f"; did you mean {close[0]!r}?" if close else ""
