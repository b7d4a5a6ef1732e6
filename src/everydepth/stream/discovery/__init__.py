"""Streams of models that no file knows: chain, tail and branches are read off a running model."""

from everydepth.stream.discovery.stream import DiscoveredStream

__all__ = ["DiscoveredStream"]
