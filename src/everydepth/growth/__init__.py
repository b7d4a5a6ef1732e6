"""Grow: would more depth help, where, and was it worth it?

>>> found = ed.growth.score(model, valid, progress=False)
>>> len(found.sites)  # before the first block, and after each
4
>>> print(found.verdict)
deep...
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
