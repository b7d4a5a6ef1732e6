"""Transformers without its progress bars and reports, for the time of a context."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Generator[None, None, None]:
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
