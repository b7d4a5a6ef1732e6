"""A ledger: what was measured of each claim, as Results and as a page of the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from everydepth.config import checked
from everydepth.errors import SettingError
from everydepth.results import Results, named, rows
from everydepth_papers.claims.catalog import CLAIMS, checked_names
from everydepth_papers.claims.claim import Entry, Measured
from everydepth_papers.number import number
from everydepth_papers.paper import PAPERS, papers_table
from everydepth_papers.premise import Checked
from everydepth_papers.verdict import VERDICTS, Verdict, few_seeds


class Ledger(Results, kind="claims"):
    """One line per claim, and one for every kind of network it was measured on.

    `about["subject"]`: the model that was asked, or the preset of standard networks.
    `about["seeds"]`: of the standard networks; 0 for your own model, whose values come from parts
    of the data.

    >>> from everydepth_papers.claims import check_claims
    >>> ledger = check_claims(model, test, only="cos-agrees-with-cka", progress=False)
    >>> ledger["claim"].tolist(), sum(ledger.counts().values())
    (['cos-agrees-with-cka'], 1)
    """

    @classmethod
    def of(cls, subject: str, entries: Sequence[Entry], **facts: Any) -> Ledger:
        """facts: other entries of `about`, as JSON values."""
        found = Counter(one.verdict for one in entries)
        counts = {verdict: found[verdict] for verdict in VERDICTS}
        claims = [one.to_json() for one in entries]
        return cls.of_json({"subject": subject, "counts": counts, **facts, "claims": claims})

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Ledger:
        """From the content of `about`."""
        claims = content["claims"]
        counts = ", ".join(f"{n} {verdict}" for verdict, n in content["counts"].items() if n)
        every = [(row, one) for row in claims for one in row["measured"]]
        return cls(
            about=content,
            results=named(
                rows(
                    "claim",
                    {
                        "claim": [row["name"] for row in claims],
                        "verdict": [row["verdict"] for row in claims],
                        "says": [row["statement"] for row in claims],
                        "paper": [PAPERS[row["paper"]].name for row in claims],
                        "note": [row["note"] for row in claims],
                    },
                    title="Claims of the papers",
                    about="A claim holds where the whole interval lies on the wanted side, on "
                    f"every kind of network it is made of. {content['subject']}: {counts}.",
                ),
                rows(
                    "measured",
                    {
                        "claim": [row["name"] for row, _ in every],
                        "on": [one["on"] for _, one in every],
                        "mean": [one["mean"] for _, one in every],
                        "low": [one["low"] for _, one in every],
                        "high": [one["high"] for _, one in every],
                        "wanted": [_wanted(row) for row, _ in every],
                        "verdict": [one["verdict"] for _, one in every],
                        "premises": [_premises(one) for _, one in every],
                        "test": [row["test"] for row, _ in every],
                    },
                    title="What was measured of each claim",
                    about="The mean over seeds, or over parts of the data, with its 95 % interval.",
                ),
            ),
        )

    def within(self, whole: Mapping[str, Any]) -> Ledger:
        """A recorded ledger, as JSON, with these claims in place of its own of the same names.

        Both must be of the same networks and seeds, or a reader would be told the wrong ones.
        """
        for name in ("subject", "seeds"):
            if whole[name] != self.about[name]:
                raise SettingError(
                    f"a ledger of {name} {self.about[name]} cannot become part of one of "
                    f"{whole[name]}; record all claims, or to another file"
                )
        new = {row["name"]: row for row in self.about["claims"]}
        claims = [new.pop(row["name"], row) for row in whole["claims"]] + list(new.values())
        found = Counter(row["verdict"] for row in claims)
        counts = {verdict: found[verdict] for verdict in VERDICTS}
        return Ledger.of_json({**whole, "counts": counts, "claims": claims})

    @checked
    def entry(self, name: str) -> Entry:
        """The recorded entry of one claim."""
        (known,) = checked_names([name])
        for row in self.about["claims"]:
            if row["name"] == known:
                return _entry(row)
        raise SettingError(
            f"claim {name!r} was not asked for; measured are {', '.join(self['claim'])}"
        )

    def counts(self) -> dict[Verdict, int]:
        """How many claims have each verdict."""
        return dict(self.about["counts"])

    def markdown(self) -> str:
        """A page of the documentation."""
        content = self.about
        machine, counts = content.get("machine"), self.counts()
        shown = ", ".join(f"**{n}** {verdict}" for verdict, n in counts.items() if n)
        lines = [
            INTRODUCTION.format(subject=content["subject"], seeds=content["seeds"], counts=shown)
        ]
        if warning := few_seeds(content["seeds"]):
            lines += [warning, ""]
        if machine:
            versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
            spent = content.get("cpu_seconds")  # older ledgers have none
            after = "" if spent is None else f", in {spent:,.0f} CPU seconds"
            lines += [
                f"Measured {machine['date']} on {machine['cpus']} CPUs ({machine['platform']}), "
                f"Python {machine['python']}, {versions}{after}.",
                "",
            ]
        lines += [*papers_table(), ""]
        for key in dict.fromkeys(row["paper"] for row in content["claims"]):
            lines += [f"## {PAPERS[key].name}", "", f"*{PAPERS[key].title}*", "", *HEAD]
            lines += [_line(row) for row in content["claims"] if row["paper"] == key]
            lines.append("")
        return "\n".join(lines)


HEAD = ("| claim | test | verdict | measured |", "|---|---|---|---|")
INTRODUCTION = """\
# Claims of the papers, measured

<!-- Written by `everydepth claims --record`; not edited by hand. -->

On the {subject}, {seeds} seeds: {counts}.

A claim *holds* where the whole 95 % interval (Student's, over seeds, which are paired where
networks are compared) lies on the claimed side of the threshold, *does not hold* where none of it
does, and is *inconclusive* in between. Where a claim is about every case, such as a theorem, the
worst seed decides instead (*each ... to ...*). A claim on several kinds of networks holds if it
holds on each to which it applies.

No verdict without its premise: behind *given* stands what must be true of the networks for the
claim to be about them, with its mean, its range over seeds and the seeds that met it. Seeds that do
not are left out; where fewer than half, or fewer than three, remain, the row is *not applicable*,
or *inconclusive* where networks did not learn. *Skill* is accuracy minus that of logistic
regression on the same rows (language models: of a table of pairs of bytes; surfaces: 1 minus the
error over that of a plane).

The networks are small and the data too: a claim that does not hold here may hold at scale, and the
other way round. Thresholds were fixed before anything was measured. What each network is:
`everydepth_papers.claims.standard`.

Ask the same of your own model: `everydepth claims MODEL --data DATA`.
"""


def _entry(row: Mapping[str, Any]) -> Entry:
    found: list[Measured] = []
    for one in row["measured"]:
        kept: dict[str, Any] = {k: v for k, v in one.items() if k not in ("mean", "values")}
        kept["premises"] = tuple(map(Checked.of_json, one.get("premises", ())))
        found.append(Measured(**kept, values=tuple(one["values"])))
    return Entry(
        claim=CLAIMS[row["name"]],
        measured=tuple(found),
        verdict=row["verdict"],
        note=row["note"],
    )


def _wanted(row: Mapping[str, Any]) -> str:
    return f"{row['relation']} {row['threshold']:g}"


def _line(row: Mapping[str, Any]) -> str:
    values = [_in_words(row, one) for one in row["measured"]] + [row["note"]]
    cells = (
        f"`{row['name']}`: {row['statement']} ({row['source']})",
        f"{row['test']} {_wanted(row)}",
        f"**{row['verdict']}**",
        "<br>".join(filter(None, values)),
    )
    return "| " + " | ".join(cell.replace("|", "&#124;") for cell in cells) + " |"


def _premises(one: Mapping[str, Any]) -> str:
    """Every premise with its figure and the number of cases that meet it."""
    return "; ".join(str(Checked.of_json(content)) for content in one.get("premises", ()))


def _in_words(row: Mapping[str, Any], one: Mapping[str, Any]) -> str:
    """`ViT 0.97 (0.95 to 0.99): holds; given ...`."""
    given = _premises(one)
    words = f"{one['on']}: {one['note'] or 'no case counts'}"
    if one["mean"] is not None:
        spread = "no interval"
        if one["low"] is not None:
            spread = f"{number(one['low'])} to {number(one['high'])}"
            spread = f"each {spread}" if row.get("worst") else spread
        words = f"{one['on']} {number(one['mean'])} ({spread})"
    return f"{words}: {one['verdict']}" + (f" *given {given}*" if given else "")
