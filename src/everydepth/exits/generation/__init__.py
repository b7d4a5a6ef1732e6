"""Text from any depth, faster with drafts of a shallow depth, or with early exits."""

from everydepth.exits.generation.generate import generate
from everydepth.exits.generation.result import Generation, GenerationStats

__all__ = ["Generation", "GenerationStats", "generate"]
