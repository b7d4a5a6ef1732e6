"""The Server tab: Results published by a running server."""

from __future__ import annotations

import os
from typing import Any

from everydepth.errors import DataError
from everydepth.results import Results

EVERY = 2.0  # seconds between updates
LARGEST = 2**23  # most bytes of an answer
PATIENCE = 5.0  # seconds


def published(address: str) -> Results:
    """The Results at `address`/v1/results, with the key in EVERYDEPTH_API_KEY.

    The address comes from the command line, never from a page.
    """
    import httpx

    key = os.environ.get("EVERYDEPTH_API_KEY")
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    url = f"{address.rstrip('/').removesuffix('/v1')}/v1/results"
    body = bytearray()
    try:
        with httpx.stream("GET", url, headers=headers, timeout=PATIENCE) as answer:
            status = answer.status_code
            for part in answer.iter_bytes():
                body += part
                if len(body) > LARGEST:
                    raise DataError(f"the answer of {url} has more than {LARGEST:,} bytes")
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise DataError(
            f"{url} does not answer ({type(error).__name__}); is the server running there?"
        ) from error
    if status == 401:
        raise DataError(f"{url} needs a key; set EVERYDEPTH_API_KEY as for the server")
    if status != 200:
        raise DataError(f"{url} answers {status}; give the address of `everydepth serve`")
    return Results.from_json(_parsed(bytes(body), url))


def _parsed(body: bytes, url: str) -> Any:
    import json

    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the answer of {url} is not JSON; is it everydepth?") from error
