"""Incidents from the scorer's service: all that `eagleeye remediate` knows of detection is this JSON."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar

from eagleeye.errors import DataError, SourceUnavailable, UsageError
from eagleeye.records import Incident, from_json

TIMEOUT_S = 5.0

T = TypeVar("T")


def check_address(scorer_url: str) -> None:
    """Raise UsageError when this cannot be the address of a scorer."""
    if not scorer_url.startswith(("http://", "https://")):
        raise UsageError(f"{scorer_url!r} is no address of a scorer; write for example http://127.0.0.1:9471")


def incidents(scorer_url: str) -> list[Incident]:
    """Return the incidents that the scorer at `scorer_url` knows.

    Raises
    ------
    SourceUnavailable
        It does not answer, or what it says is no list of incidents.
    """
    return _listed(scorer_url, "incidents", lambda item: from_json(Incident, item))


def jobs(scorer_url: str) -> list[str]:
    """Return the names of the jobs that the scorer at `scorer_url` judges.

    Raises
    ------
    SourceUnavailable
        It does not answer, or what it says is no list of jobs.
    """
    return _listed(scorer_url, "jobs", lambda item: str(item["job"]))


def _listed(scorer_url: str, what: str, read: Callable[[Any], T]) -> list[T]:
    url = f"{scorer_url.rstrip('/')}/api/v1/{what}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            told = json.load(answer)
            if not isinstance(told, dict):
                raise DataError("a list")
            return [read(item) for item in told[what]]
    except (OSError, urllib.error.URLError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise SourceUnavailable(f"the scorer at {url} does not answer ({reason}); is `eagleeye score` running there?") from None
    except (KeyError, TypeError, DataError) as error:
        raise SourceUnavailable(f"{url} answers, but not with {what} ({error}); is it the service of `eagleeye score`?") from None
