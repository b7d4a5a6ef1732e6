"""One HTML page from runs: charts, a depth dial, and where it all came from.

`report(["runs/e2e", "runs/lpa"], "page.html")` writes a page that opens without a network. What it
shows is whatever `Results` the runs hold: a new measurement needs nothing here.

>>> trace = ed.trace(model, test, ["accuracy"], progress=False)
>>> ed.report({"my model": trace}, "page.html").name
'page.html'
"""

from everydepth.reports.write import report

__all__ = ["report"]
