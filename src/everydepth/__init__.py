"""everydepth: a residual network you can use, understand, shrink and grow at every depth.

`__init__.pyi` lists the public names. Nothing is imported before it is used: `everydepth --help`
and `import everydepth` need neither torch nor transformers.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]  # pyright: ignore[reportUnsupportedDunderAll]
