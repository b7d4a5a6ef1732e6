"""One HTML page from runs: charts, a depth dial, and where it all came from.

`report(["runs/e2e", "runs/lpa"], "page.html")` writes a page that opens without a network. What it
shows is whatever `Results` the runs hold: a new measurement needs nothing here.

>>> trace = ed.trace(model, test, ["accuracy"], progress=False)
>>> ed.report({"my model": trace}, "page.html").name
'page.html'
"""

import sys
from types import ModuleType
from typing import Any

from everydepth.report.write import report

__all__ = ["report"]


class _CallablePackage(ModuleType):
    """`everydepth.report` names a function and this package, and Python binds the package to the
    name as soon as it is imported from anywhere: so the package can be called like the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return report(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
