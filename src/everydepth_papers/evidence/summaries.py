"""docs/results.md: one screen per paper: what it says, what was found, where it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everydepth_papers.number import NOTHING, number
from everydepth_papers.paper import PAPERS
from everydepth_papers.premise import Checked, failing
from everydepth_papers.verdict import VERDICTS, Verdict, few_seeds

INTRODUCTION = """\
# Results

Written by `everydepth reproduce --docs docs/results.md`; do not edit. Five papers, each on one
screen: what it claims, a figure of what was measured here, and where its claims hold on small
networks of our own ([all claims](claims.md), {seeds} seeds). Behind it: [every table](tables.md),
published against measured, and an [index](paper-index.md) of all numbered tables and figures.

A verdict needs a premise. Where a network did not learn more than a linear classifier, where labels
were not memorized, or where no sample left early, a claim about learning, memorization or exits is
not decided.

In the figures of claims each bar is a claim on one kind of network: how far the measured value is
from the threshold, in half widths of its 95 % interval. Green holds, red does not, gray is
undecided. Where a claim is about every case, the bar is the range of the seeds, and one seed beyond
the line refutes it. Values far from the line are drawn at the edge. What each claim says, and the
values, are folded below its figure.
"""
COUNTED: Mapping[Verdict, str] = {
    "holds": "held",
    "does not hold": "failed on some network",
    "inconclusive": "undecided",
    "not applicable": "not applicable",
}
SHORT: Mapping[Verdict, str] = {
    "holds": "yes",
    "does not hold": "no",
    "inconclusive": "undecided",
    "not applicable": "does not apply",
}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a paper says in a sentence or two, and the recipe whose figure shows it best."""

    says: str
    recipe: str
    shown: str


SUMMARIES: Mapping[str, Summary] = {
    "progressive": Summary(
        says="A residual network approximates its target block by block. Trained with a loss at "
        "every depth (LPA), its error falls with every block, early depths become usable, and the "
        "last depth loses nothing, or gains.",
        recipe="progressive_tables2_3",
        shown="Accuracy at every depth of image classifiers, end to end and with LPA; bands are "
        "the smallest and largest seed.",
    ),
    "expansion": Summary(
        says="A block inserted without effect offers a first step that lowers the loss, on test "
        "data too if gradients of training and test data agree, which width favors. The signal "
        "for further depth fades as networks get deeper.",
        recipe="expansion_figures1_3",
        shown="Covariance of activation gradients, signal and test loss against depth and width.",
    ),
    "tracing": Summary(
        says="Features of a transformer grow alike as layers get closer, and accuracy follows. A "
        "loss at every depth through one shared head aligns them: decisions are final earlier and "
        "samples may leave early.",
        recipe="tracing_vision",
        shown="Similarity, accuracy and exits of vision transformers by training objective.",
    ),
    "one_layer": Summary(
        says="One attention layer and one ReLU layer approximate any continuous map of sequences "
        "on a compact domain. The construction here is our own.",
        recipe="one_layer",
        shown="Largest error against the number of parameters, constructed and trained.",
    ),
    "residual": Summary(
        says="Residual connections carry what generalizes, not what is memorized: without the "
        "skips of a layer wrong labels are still fitted, test accuracy falls, most for early "
        "layers, and gradients of memorized samples are the smaller ones.",
        recipe="residual_removal_vision",
        shown="Memorization, accuracy, gradients and margins of a ViT without a layer's skips.",
    ),
}


def summary_page(ledger: Mapping[str, Any] | None, pictures: Mapping[str, str]) -> str:
    """The page. ledger: the recorded claims, as JSON. pictures: recipe -> file of its figure."""
    seeds = 0 if ledger is None else ledger["seeds"]
    lines = [INTRODUCTION.format(seeds=seeds)]
    if warning := few_seeds(seeds):
        lines += [warning, ""]
    for key, summary in SUMMARIES.items():
        name = PAPERS[key].name
        lines += [f"## {name}", "", f"*{PAPERS[key].title}*", "", summary.says, ""]
        if summary.recipe in pictures:
            lines += [f"![{summary.shown}](assets/results/{pictures[summary.recipe]})", ""]
            lines += [f"{summary.shown} `everydepth reproduce {summary.recipe}`", ""]
        if claims := claims_of(ledger, key):
            lines += [_counted(claims), ""]
            lines += [f"![Claims of {name}](assets/results/{claims_picture(key)})", ""]
            lines += folded(f"The {len(claims)} claims in words", [*_table(claims), ""])
    return "\n".join(lines)


def folded(summary: str, lines: Sequence[str]) -> list[str]:
    """Markdown in a collapsed section; works on the site and on GitHub."""
    return ['<details markdown="1">', f"<summary>{summary}</summary>", "", *lines, "</details>", ""]


COLORS: Mapping[Verdict, str] = {
    "holds": "tab:green",
    "does not hold": "tab:red",
    "inconclusive": "tab:gray",
    "not applicable": "lightgray",
}
EDGE = 6.0  # half widths


def claims_of(ledger: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """The recorded claims of a paper."""
    return [] if ledger is None else [c for c in ledger["claims"] if c["paper"] == key]


def claims_picture(key: str) -> str:
    """The file name of the figure of a paper's claims."""
    return f"claims-{key}.png"


def claims_figure(claims: Sequence[Mapping[str, Any]]) -> Any:
    """One bar for each claim and kind of network, as `INTRODUCTION` says; those that hold first."""
    from matplotlib.figure import Figure

    rows = [(claim, one) for claim in claims for one in claim["measured"]]
    rows.sort(key=lambda row: VERDICTS.index(row[1]["verdict"]))
    page = Figure(figsize=(8, 0.8 + 0.2 * len(rows)), layout="constrained")
    axis = page.subplots()
    for place, (claim, one) in enumerate(rows):
        color = COLORS[one["verdict"]]
        spot = distance(claim, one)
        if spot is None:
            how: dict[str, Any] = {"fontsize": 7, "color": "gray", "ha": "center", "va": "center"}
            axis.text(0, place, "premise not met", **how)
            continue
        middle, half = spot
        axis.plot([middle - half, middle + half], [place, place], color=color, linewidth=2)
        axis.plot([middle], [place], "o", color=color, markersize=4)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set(xlim=(-EDGE - 1, EDGE + 1), ylim=(len(rows) - 0.5, -0.5), xticks=[-EDGE, 0, EDGE])
    axis.set_xticklabels(["does not hold", "threshold", "holds"])
    axis.set_yticks(range(len(rows)), [f"{c['name']}, {one['on']}" for c, one in rows], fontsize=7)
    return page


def distance(claim: Mapping[str, Any], one: Mapping[str, Any]) -> tuple[float, float] | None:
    """Of a figure from its threshold, toward what is claimed, and half its interval: both in half
    widths, the first no farther than `EDGE`. None without a figure.

    >>> from everydepth_papers.evidence.summaries import distance
    >>> distance(
    ...     {"relation": "<=", "threshold": 0.5}, {"mean": 0.2, "low": 0.1, "high": 0.3}
    ... )
    (3.0, 1.0)
    """
    if one["mean"] is None:
        return None
    sign = 1 if claim["relation"] == ">=" else -1
    low, high = (one["mean"] if one[end] is None else one[end] for end in ("low", "high"))
    half = (high - low) / 2
    gap = sign * ((low + high) / 2 - claim["threshold"])
    if half < NOTHING * max(1.0, abs(gap)):  # all seeds agree
        return (0.0 if abs(gap) < NOTHING else EDGE if gap > 0 else -EDGE), 0.0
    return round(max(-EDGE, min(EDGE, gap / half)), 6), 1.0


def _counted(claims: Sequence[Mapping[str, Any]]) -> str:
    """`Of 12 claims: held 5, undecided 7.`"""
    seen = Counter(claim["verdict"] for claim in claims)
    words = ", ".join(
        f"{COUNTED[verdict]} {seen[verdict]}" for verdict in VERDICTS if seen[verdict]
    )
    return f"**Of {len(claims)} claims**: {words}."


def _table(claims: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per claim, those that hold first."""
    lines = ["| claim | here | measured |", "|---|---|---|"]
    for verdict in VERDICTS:
        lines += [
            f"| {claim['statement']} `{claim['name']}` | {_places(claim)} | {_values(claim)} |"
            for claim in claims
            if claim["verdict"] == verdict
        ]
    return lines


def _places(claim: Mapping[str, Any]) -> str:
    """`yes: ResNet, LM; no: ViT`."""
    found: dict[Verdict, list[str]] = {}
    for one in claim["measured"]:
        found.setdefault(one["verdict"], []).append(one["on"])
    said = [f"**{SHORT[v]}**: {', '.join(found[v])}" for v in VERDICTS if v in found]
    return "; ".join(said) or f"**{SHORT[claim['verdict']]}**"


def _values(claim: Mapping[str, Any]) -> str:
    """What decided, or the premise that fails: `largest rise: ViT 0.02, LM 0.01; wanted <= 0`."""
    known = [f"{one['on']} {number(one['mean'])}" for one in claim["measured"] if one["values"]]
    gaps = [f"{one['on']}: {gap}" for one in claim["measured"] if (gap := _gap(one))]
    test = claim["test"].replace("|", "&#124;")
    wanted = f"wanted {claim['relation']} {claim['threshold']:g}"
    measured = [f"{test}: {', '.join(known)}; {wanted}"] if known else []
    return ". ".join([*measured, *gaps]) or claim["note"]


def _gap(one: Mapping[str, Any]) -> str:
    """The premise that decided the verdict because too few seeds meet it; else empty."""
    checked = [Checked.of_json(premise) for premise in one["premises"]]
    if failing(checked, len(checked[0].figures) if checked else 0) is None:
        return ""
    return str(min(checked, key=lambda premise: sum(premise.met)))
