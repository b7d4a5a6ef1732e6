"""What a preset of a recipe measured, beside what the paper prints: the Results of `reproduce`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from everydepth.results import Results, named, rows
from everydepth_papers.evidence.recipe import Finished, Row


class Reproduction(Results, kind="reproduction"):
    """`found.table("comparison")` is the comparison; all else is in `about`: recipe, preset, title,
    source, about, command, seeds, seconds, machine, rows and cells.

    >>> from everydepth_papers.evidence import find_recipe, reproduce
    >>> found = reproduce(find_recipe("residual_table2")[0], progress=False)
    >>> found.about["source"], len(found["comparison"]) == len(found.rows)
    ('Residual Relay, Table 2', True)
    """

    @classmethod
    def of(
        cls, compared: Sequence[Row], finished: Sequence[Finished], **facts: Any
    ) -> Reproduction:
        """facts: other entries of `about`."""
        lines = [row.to_json() for row in compared]
        return cls.of_json({**facts, "rows": lines, "cells": [one.to_json() for one in finished]})

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Reproduction:
        """From the content of `about`."""
        lines = [Row(**row).cells for row in content["rows"]]
        heads = ("quantity", "published", "measured", "spread", "note")
        comparison = rows(
            "comparison",
            {head: [line[place] for line in lines] for place, head in enumerate(heads)},
            title=f"{content['title']} ({content['source']}), preset {content['preset']}",
            about="What the paper prints and what was measured here; the spread is over seeds "
            "unless the note says otherwise.",
            note=f"{content['seeds']} seed(s), {content['seconds']:.0f} s: {content['command']}. "
            f"{content['about']}",
        )
        return cls(results=named(comparison), about=content)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The comparison."""
        return tuple(Row(**row) for row in self.about["rows"])

    @property
    def finished(self) -> tuple[Finished, ...]:
        """The cells, in the order in which they were planned."""
        return tuple(Finished(**cell) for cell in self.about["cells"])
