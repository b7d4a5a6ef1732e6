"""`check_claims`: measure the claims, on the standard networks or on your own model."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress
from rich.table import Table
from torch import nn

from everydepth.data.feeding import Feed
from everydepth.errors import DataError, SettingError
from everydepth.runs import Run
from everydepth.runs.cells import Cell, cell_key, run_cells
from everydepth.runs.engine import Engine, check_engine
from everydepth.stream import ResidualStream, as_stream, unwrapped
from everydepth_papers.claims.catalog import CLAIMS
from everydepth_papers.claims.claim import Claim, Entry, Measured, ask, entry, measured
from everydepth_papers.claims.facts import GROUPS, Batches, Facts, Missing, gather
from everydepth_papers.claims.standard import SCALES, cell
from everydepth_papers.paper import PAPERS, papers_table
from everydepth_papers.paper import paper as paper_of
from everydepth_papers.verdict import VERDICTS, Verdict

PARTS = 8
"""Disjoint parts of somebody's data; each gives one value of every claim."""
FEWEST_BLOCKS = 3


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What was measured. `subject`: the model that was asked, or the preset of standard networks.

    seeds: of the standard networks; 0 for somebody's model, whose values come from parts of data.

    >>> from everydepth_papers.claims import check_claims
    >>> ledger = check_claims(model, test, only="cos-agrees-with-cka", progress=False)
    >>> sum(ledger.counts().values())
    1
    """

    subject: str
    seeds: int
    entries: tuple[Entry, ...]
    seconds: float

    def __getitem__(self, name: str) -> Entry:
        return next(e for e in self.entries if e.claim.name == checked_names([name])[0])

    def counts(self) -> dict[Verdict, int]:
        found = Counter(e.verdict for e in self.entries)
        return {verdict: found[verdict] for verdict in VERDICTS}

    def to_json(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "seeds": self.seeds,
            "seconds": round(self.seconds, 1),
            "date": datetime.now(UTC).date().isoformat(),
            "counts": self.counts(),
            "claims": [e.to_json() for e in self.entries],
        }

    def table(self) -> Table:
        return table_of(self.to_json())


def check_claims(
    model: nn.Module | ResidualStream | None = None,
    data: Any = None,
    *,
    only: str | Iterable[str] | None = None,
    paper: str | None = None,
    seeds: int = 3,
    preset: str = "standard",
    run: str | Path | None = None,
    engine: Engine = "local",
    batch_size: int = 32,
    max_samples: int = 1024,
    progress: bool = True,
    about: Mapping[str, Any] | None = None,
) -> Ledger:
    """The ledger: which claims of the papers hold, measured.

    Without a model: on small standard networks, each trained once a seed and shared by all claims
    (about ten minutes of one core; `preset="smoke"` takes seconds and says nothing). One value a
    seed, and Student's 95 % interval of their mean decides. With a model and data: those claims
    that can be asked of one model, one value for each of 8 disjoint parts of the data.

    only: names of claims. paper: a key of `PAPERS`.
    run: a directory; trained networks are not trained again when it is given a second time, so an
        interrupted ledger goes on where it was, and one with more seeds or claims adds to it.
    engine: where the standard networks are trained: "local", "processes" or "ray" (see `sweep`).
    data: labeled batches, rows, or a data set, as for `trace`.

    >>> from everydepth_papers.claims import check_claims
    >>> ledger = check_claims(model, test, only=["lpa-monotone", "bound-ordered"], progress=False)
    >>> len(ledger["bound-ordered"].measured[0].values)  # one for each part of the data
    8
    """
    wanted = _chosen(only, paper)
    if preset not in SCALES:
        raise SettingError(f"preset {preset!r}; use {' or '.join(SCALES)}")
    if seeds < 1:
        raise SettingError(f"seeds={seeds}; use 1 or more, 2 for an interval")
    if (model is None) != (data is None):
        given, absent = ("data", "model") if model is None else ("model", "data")
        raise SettingError(
            f"{given} without {absent}; give both to ask a model of your own, or neither for the "
            "standard networks"
        )
    check_engine(engine)
    if model is not None and engine != "local":
        raise SettingError(f"engine={engine!r} with a model, which is not trained; leave it out")
    config = {"preset": preset if model is None else None, **(about or {})}
    opened = None if run is None else Run.resumed(run, config, kind="claims")
    started = _now()
    if model is None:
        subject, count = f"standard networks ({preset})", seeds
        entries = _standard(wanted, seeds, preset, opened, engine, progress)
    else:
        stream = as_stream(model)
        subject, count = stream.name, 0
        entries = _own(wanted, stream, data, batch_size, max_samples, progress)
    found = Ledger(subject=subject, seeds=count, entries=entries, seconds=_now() - started)
    if opened is not None:
        opened.write_results({"claims": found.to_json()})
    return found


def checked_names(names: Iterable[str]) -> list[str]:
    """The names, if all are claims."""
    found = list(names)
    for name in found:
        if name not in CLAIMS:
            close = get_close_matches(name, CLAIMS, 1, cutoff=0.3)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise SettingError(
                f"claim {name!r} is not in the ledger; {hint}`everydepth claims --list` shows all "
                f"{len(CLAIMS)}"
            )
    return found


def _now() -> float:
    import time

    return time.perf_counter()


def _chosen(only: str | Iterable[str] | None, paper: str | None) -> list[Claim]:
    if paper is not None:
        paper_of(paper)  # an unknown one is refused here
    names = CLAIMS if only is None else checked_names([only] if isinstance(only, str) else only)
    found = [CLAIMS[n] for n in names if paper in (None, CLAIMS[n].paper)]
    if not found:
        raise SettingError(
            f"none of these claims is of {paper_of(paper or '')}; leave out `only` or `paper`"
        )
    return found


# -- the standard networks -------------------------------------------------------------------------


def groups_of(name: str) -> tuple[str, ...]:
    """What any claim reads of a cell, whichever claims are asked now: a cell is made once."""
    wanted = {
        g for c in CLAIMS.values() for cells in c.cells.values() if name in cells for g in c.needs
    }
    return tuple(group for group in GROUPS if group in wanted)


def _standard(
    wanted: Sequence[Claim],
    seeds: int,
    preset: str,
    run: Run | None,
    engine: Engine,
    progress: bool,
) -> tuple[Entry, ...]:
    names = list(dict.fromkeys(n for c in wanted for cells in c.cells.values() for n in cells))
    # Seed by seed: what is interrupted is then a ledger of fewer seeds. A cell of which other
    # groups were read is another cell.
    cells: list[Cell] = [
        {"network": name, "seed": seed, "groups": list(groups_of(name))}
        for seed in range(seeds)
        for name in names
    ]
    found = run_cells(
        cells,
        partial(_measured, preset),
        run=run,
        engine=engine,
        skips=DataError,  # not kept: the data may be there next time
        title="standard networks",
        progress=progress,
    )
    facts: dict[tuple[str, int], Facts] = {}
    for one in cells:
        key = cell_key(one)
        absent = {"values": {}, "missing": {"*": found.skipped.get(key)}}
        facts[one["network"], one["seed"]] = Facts(found.results.get(key, absent))
    return tuple(_asked(claim, facts, seeds) for claim in wanted)


def _measured(preset: str, *, network: str, seed: int, groups: list[str]) -> Mapping[str, Any]:
    return cell(network, seed, SCALES[preset], tuple(groups))


def _asked(claim: Claim, facts: Mapping[tuple[str, int], Facts], seeds: int) -> Entry:
    found: list[Measured] = []
    gaps: list[str] = []
    for kind, cells in claim.cells.items():
        try:
            values = [ask(claim, *(facts[name, seed] for name in cells)) for seed in range(seeds)]
        except Missing as reason:
            gaps.append(f"{kind}: {reason}")
            continue
        found.append(measured(claim, kind, values))
    return entry(claim, found, "; ".join(gaps))


# -- somebody's model ------------------------------------------------------------------------------


def _own(
    wanted: Sequence[Claim],
    stream: ResidualStream,
    data: Any,
    batch_size: int,
    max_samples: int,
    progress: bool,
) -> tuple[Entry, ...]:
    batches = list(Feed(data, stream, batch_size=batch_size, max_samples=max_samples))
    parts = _parts(batches)
    possible = [c for c in wanted if not c.own]
    groups = [g for g in GROUPS if any(g in c.needs for c in possible)]
    model = unwrapped(stream.model)
    facts: list[Facts] = []
    with Progress(transient=True, disable=not progress) as bar:
        for part in bar.track(parts, description=stream.name):
            facts.append(Facts(gather(model, part, groups)))
    return tuple(_asked_of(claim, stream, facts) for claim in wanted)


def _parts(batches: Batches) -> list[Batches]:
    """Up to 8, dealt out in turn so that sorted data does not make them differ."""
    if len(batches) < 2:
        raise DataError(
            f"{len(batches)} batch of data; an interval needs 2 parts or more, so pass more rows "
            "or a smaller batch_size"
        )
    count = min(PARTS, len(batches))
    return [batches[place::count] for place in range(count)]


def _asked_of(claim: Claim, stream: ResidualStream, facts: Sequence[Facts]) -> Entry:
    if claim.own:
        return entry(claim, (), claim.own)
    if stream.depth < FEWEST_BLOCKS:
        why = f"{stream.name} has {stream.depth} blocks; a trajectory needs {FEWEST_BLOCKS}"
        return entry(claim, (), why)
    try:
        values = [ask(claim, one) for one in facts]
    except Missing as reason:
        return entry(claim, (), str(reason))
    return entry(claim, [measured(claim, stream.name, values)])


# -- shown -----------------------------------------------------------------------------------------


def table_of(content: Mapping[str, Any]) -> Table:
    """A ledger's JSON, for a terminal."""
    counts = ", ".join(f"{n} {verdict}" for verdict, n in content["counts"].items() if n)
    table = Table(title=f"{content['subject']}: {counts}", box=None, title_justify="left")
    for name in ("paper", "claim", "verdict", "measured (95 % interval)"):
        table.add_column(name)
    colors = {"holds": "green", "does not hold": "red", "inconclusive": "yellow"}
    for row in content["claims"]:
        color = colors.get(row["verdict"], "dim")
        lines = [cell_text(row, one) for one in row["measured"]] or [row["note"]]
        table.add_row(
            str(paper_of(row["paper"])),
            row["name"],
            f"[{color}]{row['verdict']}[/]",
            "\n".join(lines),
        )
    return table


def cell_text(row: Mapping[str, Any], one: Mapping[str, Any]) -> str:
    """`ViT 0.97 (0.95 to 0.99), wanted >= 0.9`."""
    if one["mean"] is None:
        return f"{one['on']}: {one['note'] or 'undefined'}"
    spread = "no interval"
    if one["low"] is not None:
        spread = f"{number(one['low'])} to {number(one['high'])}"
    return (
        f"{one['on']} {number(one['mean'])} ({spread}), wanted {row['relation']} "
        f"{row['threshold']:g}"
    )


def number(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.3g}"


def listing() -> dict[str, Any]:
    """The claims as the JSON of a ledger in which nothing was measured."""
    blank = [entry(claim, ()).to_json() for claim in CLAIMS.values()]
    rows = [{**row, "verdict": "not measured"} for row in blank]
    subject = "standard networks"
    return {"subject": subject, "seeds": 0, "counts": {"not measured": len(rows)}, "claims": rows}


def markdown(content: Mapping[str, Any]) -> str:
    """A ledger's JSON as a page of the documentation."""
    machine = content.get("machine", {})
    counts = ", ".join(f"**{n}** {verdict}" for verdict, n in content["counts"].items() if n)
    lines = [
        "# Claims of the papers, measured",
        "",
        "<!-- Written by `everydepth claims --record`; not edited by hand. -->",
        "",
        f"On the {content['subject']}, {content['seeds']} seeds: {counts}.",
        "",
        "A claim *holds* where the whole 95 % interval (Student's, over seeds) lies on the claimed "
        "side of the threshold, *does not hold* where none of it does, and is *inconclusive* in "
        "between; a claim on several kinds of networks holds if it holds on each. The networks are "
        "small and the data too: a claim that does not hold here may hold at scale, and the other "
        "way round. Thresholds were fixed before anything was measured. What each network is: "
        "`everydepth_papers.claims.standard`.",
        "",
        "Ask the same of your own model: `everydepth claims MODEL --data DATA`.",
        "",
    ]
    if machine:
        versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
        lines += [
            f"Measured {content['date']} on {machine['cpus']} CPUs ({machine['platform']}), Python "
            f"{machine['python']}, {versions}.",
            "",
        ]
    lines += [*papers_table(), ""]
    for paper in dict.fromkeys(row["paper"] for row in content["claims"]):
        lines += [
            f"## {PAPERS[paper].name}",
            "",
            f"*{PAPERS[paper].title}*",
            "",
            "| claim | test | verdict | measured |",
            "|---|---|---|---|",
        ]
        for row in content["claims"]:
            if row["paper"] != paper:
                continue
            values = "<br>".join(cell_text(row, one) for one in row["measured"])
            note = f"<br>{row['note']}" if row["note"] else ""
            test = f"{row['test']} {row['relation']} {row['threshold']:g}"
            cells = (
                f"`{row['name']}`: {row['statement']} ({row['source']})",
                test,
                f"**{row['verdict']}**",
                values + note,
            )
            lines.append("| " + " | ".join(c.replace("|", "&#124;") for c in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def save(content: Mapping[str, Any], file: Path) -> None:
    """A ledger's JSON in a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
