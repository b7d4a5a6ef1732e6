"""The second waist: what every verb returns, and everything you can do with it.

A `Result` is one named measurement: arrays, axis, unit, which direction is better, and one
sentence. A `Results` is a collection of them with their provenance. `table()`, `plot()`,
`figure()`, `save()`, `load()` and `to_json()` work the same for all; report, command line and app
display any `Results` and know no verb.

To return Results from a verb:

1. Subclass with a kind, which identifies a saved one:

       class Profile(Results, kind="profile"):
           \"\"\"Depths 1..L of one model: quality and cost.\"\"\"

           def choose(self, *, latency_ms): ...        # methods of its own

2. Build measurements. A `kind` says how the arrays are laid out, and so how they are drawn and
   tabulated (see `Kind`: lines over any axis, one line per scale, bars, points with the Pareto
   front joined, matrices, single numbers, rows of text). What a reader needs to know (`title`,
   `about`, `unit`, `better`, `section`) belongs to the code that measures.

       latency = curve("latency", depths, median, low=first_quartile, high=third_quartile,
                       unit="ms", better="lower", section="cost", title="Time",
                       about="Median of warm calls, with quartiles.")

   `curve`, `lines`, `scalars` and `rows` cover the common cases; `Result` covers all.

3. Return them with their provenance; the first one with `better` set is the main one.

       return Profile(results=named(accuracy, latency),
                      about=provenance(model=stream.name, task=stream.task, depth=stream.depth,
                                       samples=n, seconds=s, settings=config))

Methods of your own read `self["latency"]` and `self.about[...]`, attributes are a `Number` or a
`Fact`, so that all work after loading: only `results` and `about` are saved. What cannot be saved
(modules, tensors) may be an additional dataclass field with a default; it is missing after loading.
"""

from everydepth.results.build import curve as curve
from everydepth.results.build import lines as lines
from everydepth.results.build import rows as rows
from everydepth.results.build import scalars as scalars
from everydepth.results.result import Better as Better
from everydepth.results.result import Kind as Kind
from everydepth.results.result import Result as Result
from everydepth.results.result import defined as defined
from everydepth.results.result import gap as gap
from everydepth.results.results import Fact as Fact
from everydepth.results.results import Number as Number
from everydepth.results.results import OptionalNumber as OptionalNumber
from everydepth.results.results import Results as Results
from everydepth.results.results import named as named
from everydepth.results.results import provenance as provenance
from everydepth.results.table import Table as Table
