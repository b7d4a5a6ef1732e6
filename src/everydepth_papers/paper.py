"""The five papers, by key: `progressive`, `expansion`, `tracing`, `one_layer`, `residual`.

Names of recipes begin with a key, `everydepth claims --paper` takes one, and whatever is shown to
a reader says the short name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from everydepth.config import checked
from everydepth.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class Paper:
    """name: short, as it is called here. authors: "anonymous" for a paper under review, empty if
    the text that was used does not say.

    >>> from everydepth_papers.paper import PAPERS
    >>> [str(paper) for paper in PAPERS.values()][:2]
    ['Progressive Approximation', 'Depth Expansion']
    """

    key: str
    name: str
    title: str
    authors: str = ""

    def __str__(self) -> str:
        return self.name


PAPERS: Mapping[str, Paper] = MappingProxyType(
    {
        paper.key: paper
        for paper in (
            Paper(
                key="progressive",
                name="Progressive Approximation",
                title="Progressive Approximation in Deep Residual Networks: Theory and Validation",
            ),
            Paper(
                key="expansion",
                name="Depth Expansion",
                title="A Qualitative Test-Risk Mechanism for Scaling Behavior in Normalized "
                "Residual Networks",
            ),
            Paper(
                key="tracing",
                name="Tracing Representations",
                title="Tracing Representation Progression: Analyzing and Enhancing Layer-Wise "
                "Similarity",
                authors="anonymous",
            ),
            Paper(
                key="one_layer",
                name="One-Layer Transformer",
                title="Universal Approximation Theorem for a Single-Layer Transformer",
                authors="Esmail Gumaan",
            ),
            Paper(
                key="residual",
                name="Residual Relay",
                title="Residual Connections Relay Generalization but Not Memorization in "
                "Transformers",
                authors="anonymous",
            ),
        )
    }
)


@checked
def paper(key: str) -> Paper:
    """The paper of a key.

    >>> from everydepth_papers.paper import paper
    >>> paper("one_layer").authors
    'Esmail Gumaan'
    """
    if key not in PAPERS:
        raise SettingError(f"paper {key!r}; use one of {', '.join(PAPERS)}")
    return PAPERS[key]


def papers_table() -> list[str]:
    """All five as lines of a Markdown table."""
    rows = [f"| {p.name} | `{p.key}` | {p.title} | {p.authors or '-'} |" for p in PAPERS.values()]
    return ["| paper | key | title | authors |", "|---|---|---|---|", *rows]
