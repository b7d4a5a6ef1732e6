"""What a verb gives: named measurements, and how each is drawn."""

from everydepth.results.result import Kind, Result, gap

__all__ = ["Kind", "Result", "gap"]
