"""Ablations: scaled skips, memorized labels, their gradients, and labels that are likely wrong."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
