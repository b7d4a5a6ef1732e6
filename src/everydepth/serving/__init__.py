"""A server in which depth is a service level: one checkpoint, many depths.

`SharedBatch` and `Scheduler` do the work, without threads or sockets; `http` and `classify` put
them behind an address. `__init__.pyi` lists what is public; a name is imported when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
