"""The second waist: what a verb gives, and all that can be done with it.

A `Result` is one named measurement: arrays, axis, unit, which way is better, and one sentence. A
`Results` is a collection of them with where they came from. `table()`, `plot()`, `figure()`,
`save()`, `load()` and `to_json()` mean the same on every one; report, command line and app show any
`Results` and know no verb.

How a verb gives Results:

1. Subclass with a kind, the word by which a saved one is known again:

       class Profile(Results, kind="profile"):
           \"\"\"Depths 1..L of one model: quality and cost.\"\"\"

           def choose(self, *, latency_ms): ...        # a few words of its own

2. Build measurements. A `kind` says how the arrays are laid out, and so how they are drawn and
   tabulated (`Kind` lists them: lines over any axis, one line per scale, bars, points with the
   unbeaten joined, matrices, single numbers, rows to read). The words that a reader needs (`title`,
   `about`, `unit`, `better`, `section`) stand with the code that measures.

       latency = curve("latency", depths, median, low=first_quartile, high=third_quartile,
                       unit="ms", better="lower", section="cost", title="Time",
                       about="Median of warm calls, with quartiles.")

   `curve`, `scalars` and `rows` are short for the most usual; `Result` itself says it all.

3. Return them with their provenance; the first that can be better is the main one.

       return Profile(results=named(accuracy, latency),
                      about=provenance(model=stream.name, task=stream.task, depth=stream.depth,
                                       samples=n, seconds=s, settings=config))

Own words read `self["latency"]` and `self.about[...]`, so that they work on a loaded one too. All
that is saved is in `results` and `about`. What cannot be saved (modules, tensors) may be a further
dataclass field with a default; it is missing after loading. Files that were written before all
results were saved alike are read by the verb's own `convert`, named in `results.earlier`.
"""

from everydepth.results.build import curve, rows, scalars
from everydepth.results.result import Better, Kind, Result, defined, gap
from everydepth.results.results import Number, OptionalNumber, Results, named, provenance
from everydepth.results.table import Table

__all__ = [
    "Better",
    "Kind",
    "Number",
    "OptionalNumber",
    "Result",
    "Results",
    "Table",
    "curve",
    "defined",
    "gap",
    "named",
    "provenance",
    "rows",
    "scalars",
]
