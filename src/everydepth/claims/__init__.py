"""A ledger of the papers' claims: each with a test, a threshold, and a verdict that was measured.

`everydepth claims` prints it; `docs/claims.md` shows the last one that was recorded.

>>> ledger = ed.claims(model, test, only="lpa-monotone", progress=False)
>>> ledger["lpa-monotone"].verdict in ("holds", "does not hold", "inconclusive")
True

| file | noun |
|---|---|
| `claim` | a claim, and when it holds |
| `catalogue` | all of them |
| `facts` | numbers about one network, measured with the verbs |
| `standard` | the small networks that are trained once a seed and shared by all claims |
| `ledger` | `claims`: who is asked, what is kept, how it is shown |
"""

import sys
from types import ModuleType
from typing import Any

from everydepth.claims.catalogue import CLAIMS, PAPERS
from everydepth.claims.claim import Claim, Entry, Measured
from everydepth.claims.ledger import Ledger, claims

__all__ = ["CLAIMS", "PAPERS", "Claim", "Entry", "Ledger", "Measured", "claims"]


class _CallablePackage(ModuleType):
    """`everydepth.claims` names a function and this package, and Python binds the package to the
    name as soon as it is imported from anywhere: so the package can be called like the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return claims(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
