"""Write a network as a web page that answers while it downloads, block by block."""

from everydepth.exits.web.pages import write

__all__ = ["write"]
