"""Error messages for a browser, without the paths of this machine."""

from __future__ import annotations

import re
from html import escape

# An absolute path: up to the closing quote if it is quoted, else up to white space.
_PATH = re.compile(
    r"""(?<=')(?:/|[A-Za-z]:\\)[^']*[/\\]([^'/\\]*)(?=')|"""
    r"""(?<![\w'./\\])(?:/|[A-Za-z]:\\)(?:[^\s'"()]*[/\\])?([^\s'"()/\\,;]+)"""
)


def for_browser(error: Exception) -> str:
    """The message as HTML, with paths reduced to their last part.

    >>> for_browser(ValueError("/home/me/runs/one/config.json has no <depth>"))
    'config.json has no &lt;depth&gt;'
    """
    return escape(_PATH.sub(lambda found: found[1] or found[2] or "", str(error)))
