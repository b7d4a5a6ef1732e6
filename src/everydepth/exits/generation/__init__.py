"""Generate text at any depth, faster with drafts from a shallow depth or with early exits."""

from everydepth.exits.generation.generate import generate
from everydepth.exits.generation.result import Generation, GenerationStats
from everydepth.exits.generation.text import stream_text

__all__ = ["Generation", "GenerationStats", "generate", "stream_text"]
