"""The Server tab: the Results that another process publishes."""

from __future__ import annotations

import os
from typing import Any

from everydepth.errors import DataError
from everydepth.results import Results

EVERY = 2.0  # seconds between two looks
LARGEST = 2**23  # bytes of an answer
PATIENCE = 5.0  # seconds


def published(address: str) -> Results:
    """What `address`/v1/results says; the key is that of EVERYDEPTH_API_KEY.

    The address is given on the command line, never by a page.
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
                    raise DataError(f"{url} answers with more than {LARGEST:,} bytes")
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise DataError(
            f"{url} does not answer ({type(error).__name__}); is the server running there?"
        ) from error
    if status == 401:
        raise DataError(f"{url} asks for a key; set EVERYDEPTH_API_KEY for both")
    if status != 200:
        raise DataError(f"{url} answers {status}; give the address of `everydepth serve`")
    return Results.from_json(_parsed(bytes(body), url))


def _parsed(body: bytes, url: str) -> Any:
    import json

    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{url} does not answer with JSON; is it everydepth's?") from error
