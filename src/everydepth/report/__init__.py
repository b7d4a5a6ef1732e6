"""One HTML page from runs: charts, a depth dial, and where it all came from.

`report(["runs/e2e", "runs/lpa"], "page.html")` writes a page that opens without a network. What it
shows are panels, one function a result: `everydepth.report.panels` says how to add one.
"""

from everydepth.report.panels import Panel, panel
from everydepth.report.write import report

__all__ = ["Panel", "panel", "report"]
