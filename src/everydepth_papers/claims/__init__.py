"""A ledger of the papers' claims: each with a test, a threshold, and a verdict that was measured.

`everydepth claims` prints it; `docs/claims.md` shows the last one that was recorded.

>>> from everydepth_papers.claims import check_claims
>>> ledger = check_claims(model, test, only="lpa-monotone", progress=False)
>>> ledger.entry("lpa-monotone").verdict in ("holds", "does not hold", "inconclusive")
True

| file | noun |
|---|---|
| `claim` | a claim, and when it holds |
| `catalog` | all of them |
| `facts` | numbers about one network, measured with the verbs |
| `standard` | the small networks that are trained once per seed and shared by all claims |
| `ledger` | what was measured of each claim |
| `checking` | `check_claims`: who is asked |
"""

from everydepth_papers.claims.catalog import CLAIMS
from everydepth_papers.claims.checking import check_claims
from everydepth_papers.claims.claim import Claim, Entry, Measured
from everydepth_papers.claims.ledger import Ledger

__all__ = ["CLAIMS", "Claim", "Entry", "Ledger", "Measured", "check_claims"]
