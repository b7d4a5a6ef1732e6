"""Streams discovered from a running model: its chain of blocks, its tail and its branches."""

from everydepth.stream.discovery.stream import DiscoveredStream

__all__ = ["DiscoveredStream"]
