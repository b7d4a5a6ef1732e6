"""`report`: one self-contained HTML page with charts, a depth dial and provenance.

`report(["runs/e2e", "runs/lpa"], "page.html")` compares two runs and needs no network to view. It
shows any `Results`: a new measurement needs no code here.

>>> trace = ed.trace(model, test, ["accuracy"], progress=False)
>>> ed.report({"my model": trace}, "page.html").name
'page.html'
"""

from everydepth.reports.write import report

__all__ = ["report"]
