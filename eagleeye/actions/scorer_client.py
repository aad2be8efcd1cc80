"""Incidents from the scorer's service: all that `eagleeye remediate` knows of detection is this JSON."""

import http.client
import json
import urllib.error
import urllib.request

from eagleeye.errors import DataError, SourceUnavailable
from eagleeye.records import Incident, from_json

TIMEOUT_S = 5.0


def incidents(scorer_url: str) -> list[Incident]:
    """Return the incidents that the scorer at `scorer_url` knows.

    Raises
    ------
    SourceUnavailable
        It does not answer, or what it says is no list of incidents.
    """
    url = f"{scorer_url.rstrip('/')}/api/v1/incidents"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return [from_json(Incident, item) for item in json.load(answer)["incidents"]]
    except (OSError, urllib.error.URLError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise SourceUnavailable(f"the scorer at {url} does not answer ({reason}); is `eagleeye score` running there?") from None
    except (KeyError, TypeError, DataError) as error:
        raise SourceUnavailable(
            f"{url} answers, but not with incidents ({error}); is it the service of `eagleeye score`?"
        ) from None
