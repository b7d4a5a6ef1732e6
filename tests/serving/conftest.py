"""A small language model that talks, for every test of serving."""

from __future__ import annotations

from tests.helpers.talking import talker as talker
