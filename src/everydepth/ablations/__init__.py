"""Ablations: scaled skips, memorized labels, their gradients, and labels that are likely wrong.

`__init__.pyi` lists what is public; a name is imported when it is first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
