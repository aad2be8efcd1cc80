"""The Prometheus text format, as far as exporters of ours use it: a page -> values by series."""

from collections.abc import Iterator, Mapping

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from eagleeye.errors import DataError
from eagleeye.metrics import BY_SERIES, PREFIX, RANK_INFO


def parsed(page: str, where: str) -> Iterator[tuple[str, float]]:
    """Yield (name and labels as they stand there, value) of the series that the catalogue knows; NaN for an infinite value.

    A page repeats the same names and labels at every scrape, so only the numbers are read here; `identified` reads the rest
    once, by the library, which takes far longer.

    Raises
    ------
    DataError
        The page is cut off, is no such text, or comes from somebody else's exporter.
    """
    if not page.endswith("\n"):
        raise DataError(f"{where} sent a page that is cut off or no Prometheus text")
    ours = False
    for number, line in enumerate(page.splitlines(), 1):
        if not line.startswith(PREFIX):
            continue
        ours = True
        key, _, text = line.rstrip().rpartition(" ")
        name = key.partition("{")[0]
        if name not in BY_SERIES and name != RANK_INFO.series:
            continue
        try:
            value = float(text)
        except ValueError:
            raise DataError(f"{where}: line {number} of its page is no sample: {line[:80]!r}") from None
        yield key, value if np.isfinite(value) else np.nan
    if not ours:
        raise DataError(f"{where} serves no series of ours; is it the address of an `eagleeye export`?")


def identified(key: str, where: str) -> tuple[str, Mapping[str, str]]:
    """Return name and labels of a series. Raises DataError when the text is none."""
    try:
        (family,) = text_string_to_metric_families(f"{key} 1\n")
        (sample,) = family.samples
        if sample.timestamp is not None:
            raise ValueError("our exporters leave the time to whoever scrapes")
    except ValueError:
        raise DataError(f"{where}: {key[:80]!r} on its page is no series") from None
    return key.partition("{")[0], dict(sample.labels)
