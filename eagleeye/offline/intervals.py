"""95 % intervals for counts. Pure."""

import math

_Z = 1.959963984540054


def share(count: int, total: int) -> tuple[float, float]:
    """Return the interval of a share of `total` trials; (0, 1) when there was none.

    Source: Wilson score interval (10.1080/01621459.1927.10502953); for a count of zero the rule of three
    (10.1001/jama.1983.03330370053031).
    """
    if total == 0:
        return 0.0, 1.0
    if count == 0:
        return 0.0, min(1.0, 3.0 / total)
    ratio, z2 = count / total, _Z**2
    centre = ratio + z2 / (2 * total)
    half = _Z * math.sqrt(ratio * (1 - ratio) / total + z2 / (4 * total**2))
    return max(0.0, (centre - half) / (1 + z2 / total)), min(1.0, (centre + half) / (1 + z2 / total))


def rate(count: int, exposure: float) -> tuple[float, float]:
    """Return the interval of a rate, for `count` events in `exposure` (days, say); (0, inf) without any.

    Source: Byar's approximation to the exact Poisson interval (Breslow and Day, Statistical Methods in Cancer Research, volume
    II, 1987); for a count of zero the rule of three.
    """
    if exposure <= 0:
        return 0.0, math.inf
    if count == 0:
        return 0.0, 3.0 / exposure
    low = count * (1 - 1 / (9 * count) - _Z / (3 * math.sqrt(count))) ** 3
    more = count + 1
    high = more * (1 - 1 / (9 * more) + _Z / (3 * math.sqrt(more))) ** 3
    return max(0.0, low) / exposure, high / exposure
