"""Numbers with units, as a person reads them."""

import math

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SUFFIX = {"bytes": "B", "bytes/s": "B/s", "hertz": "Hz", "watts": "W", "seconds": "s", "1/s": "/s", "celsius": "°C"}


def number(value: float) -> str:
    """Return three significant digits, never with an exponent for large values."""
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def quantity(value: float, unit: str) -> str:
    """Return a value of a base unit as a person reads it: ``12.5 MB/s``, ``38 %``, ``120 ms``; a dash for NaN."""
    if not math.isfinite(value):
        return "–"
    if unit == "1":
        return f"{number(value * 100)} %"
    if unit == "seconds" and 0 < abs(value) < 1:
        return f"{number(value * 1000)} ms"
    size, prefix = 1.0, ""
    if unit in ("bytes", "bytes/s", "hertz", "1/s", "", "steps"):
        size, prefix = next(((s, p) for s, p in _PREFIXES if abs(value) >= s * 0.9995), (1.0, ""))
    ending = prefix + _SUFFIX.get(unit, "")
    return f"{number(value / size)}{'' if unit == '1/s' and not prefix else ' '}{ending}".strip()
