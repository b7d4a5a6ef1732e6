"""`check_claims`: measure the claims, on the standard networks or on your own model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from everydepth.config import checked
from everydepth.environment import machine
from everydepth.errors import DataError, SettingError
from everydepth.progress import shown
from everydepth.runs import Run
from everydepth.runs.cells import Cell, cell_key, finished_cells, run_cells
from everydepth.runs.engine import EngineConfig
from everydepth.stream import ResidualStream, as_stream, unwrapped
from everydepth.stream.feed import Feed, size_for
from everydepth.training.snapshot import kept_random_state
from everydepth_papers.claims.catalog import CLAIMS, checked_names
from everydepth_papers.claims.claim import Claim, Entry, Measured, ask, entry
from everydepth_papers.claims.facts import GROUPS, Batches, Facts, Missing, gather
from everydepth_papers.claims.ledger import Ledger
from everydepth_papers.claims.standard import SCALES, cell
from everydepth_papers.paper import paper as paper_of
from everydepth_papers.verdict import check_seeds

PARTS = 8
"""Disjoint parts of your own data; each gives one value of every claim."""
FEWEST_BLOCKS = 3


@checked
@kept_random_state()
def check_claims(
    model: nn.Module | ResidualStream | None = None,
    data: Any = None,
    *,
    only: str | Iterable[str] | None = None,
    paper: str | None = None,
    seeds: int = 3,
    preset: str = "standard",
    run: str | Path | None = None,
    finished: bool = False,
    where: EngineConfig | None = None,
    batch_size: int = 32,
    max_samples: int = 1024,
    progress: bool = True,
    about: Mapping[str, Any] | None = None,
) -> Ledger:
    """The ledger: which claims of the papers hold, measured.

    Without a model: on small standard networks, each trained once per seed and shared by all claims
    (minutes of one core per seed; `preset="smoke"` takes seconds and says nothing). One value per
    seed, paired where a claim compares networks; Student's 95 % interval of their mean decides, or
    the worst value where a claim is about every case. A seed in which a claim's premise fails does
    not count. With a model and data: those claims
    that can be asked of one model, one value for each of 8 disjoint parts of the data.

    only: names of claims. paper: a key of `PAPERS`.
    run: a directory; trained networks are not trained again when it is given a second time, so an
        interrupted ledger goes on where it was, and one with more seeds or claims adds to it.
    finished: train nothing, and judge every claim by those seeds that the run directory has.
    where: the engine that trains the standard networks, as in `sweep`.
    data: labeled batches, rows, or a data set, as for `trace`.

    >>> from everydepth_papers.claims import check_claims
    >>> ledger = check_claims(model, test, only=["lpa-monotone", "bound-ordered"], progress=False)
    >>> len(ledger.entry("bound-ordered").measured[0].values)  # one for each part of the data
    8
    """
    wanted = _chosen(only, paper)
    if preset not in SCALES:
        raise SettingError(f"preset {preset!r}; use {' or '.join(SCALES)}")
    check_seeds(seeds)
    if (model is None) != (data is None):
        given, absent = ("data", "model") if model is None else ("model", "data")
        raise SettingError(
            f"{given} without {absent}; give both to ask a model of your own, or neither for the "
            "standard networks"
        )
    if finished and (run is None or model is not None):
        raise SettingError("finished=True without run=, or with a model; give a run to read")
    place = where or EngineConfig()
    if model is not None and place != EngineConfig():
        raise SettingError(
            f"engine={place.engine!r} with a model, which is not trained; leave it out"
        )
    config = {"preset": preset if model is None else None, **(about or {})}
    opened = None if run is None else Run.resumed(run, config, kind="claims")
    started = time.process_time()
    if model is None:
        subject = f"standard networks ({preset})"
        entries, count, spent = _standard(wanted, seeds, preset, opened, place, progress, finished)
    else:
        stream = as_stream(model)
        subject, count = stream.name, 0
        entries = _own(wanted, stream, data, batch_size, max_samples, progress)
        spent = time.process_time() - started
    found = Ledger.of(
        subject,
        entries,
        seeds=count,
        cpu_seconds=round(spent, 1),
        machine=machine(),
    )
    if opened is not None:
        found.save(opened.path / "claims")
        opened.write_results({"verdicts": found.counts()})
    return found


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
    """The groups of facts that any claim reads from a cell, so that each cell runs only once."""
    wanted = {
        g for c in CLAIMS.values() for cells in c.cells.values() if name in cells for g in c.needs
    }
    return tuple(group for group in GROUPS if group in wanted)


def _standard(
    wanted: Sequence[Claim],
    seeds: int,
    preset: str,
    run: Run | None,
    where: EngineConfig,
    progress: bool,
    finished: bool,
) -> tuple[tuple[Entry, ...], int, float]:
    """The entries, how many seeds there are of at least one network, and their CPU seconds."""
    names = list(dict.fromkeys(n for c in wanted for cells in c.cells.values() for n in cells))
    # Seed by seed: what is interrupted is then a ledger of fewer seeds. A cell of which other
    # groups were read is another cell.
    cells: list[Cell] = [
        {"network": name, "seed": seed, "groups": list(groups_of(name))}
        for seed in range(seeds)
        for name in names
    ]
    if finished and run is not None:
        found = finished_cells(cells, run.path)
    else:
        found = run_cells(
            cells,
            partial(_measured, preset),
            run=run,
            where=where,
            skips=DataError,  # not kept: the data may be there next time
            title="standard networks",
            progress=progress,
        )
    facts: dict[tuple[str, int], Facts] = {}
    for one in cells:
        key = cell_key(one)
        if finished and key not in found.results:
            continue
        absent = {"values": {}, "missing": {"*": found.skipped.get(key)}}
        facts[one["network"], one["seed"]] = Facts(found.results.get(key, absent))
    there = {seed for _, seed in facts}
    spent = sum((one["cpu_seconds"] for one in facts.values() if "cpu_seconds" in one), 0.0)
    return tuple(_asked(claim, facts, seeds) for claim in wanted), len(there), spent


def _measured(preset: str, *, network: str, seed: int, groups: list[str]) -> Mapping[str, Any]:
    return cell(network, seed, SCALES[preset], tuple(groups))


def _asked(claim: Claim, facts: Mapping[tuple[str, int], Facts], seeds: int) -> Entry:
    found: list[Measured] = []
    gaps: list[str] = []
    for kind, cells in claim.cells.items():
        try:
            there = [s for s in range(seeds) if all((name, s) in facts for name in cells)]
            cases = [tuple(facts[name, seed] for name in cells) for seed in there]
            found.append(ask(claim, kind, cases))
        except Missing as reason:
            gaps.append(f"{kind}: {reason}")
    return entry(claim, found, "; ".join(gaps))


# -- your own model --------------------------------------------------------------------------------


def _own(
    wanted: Sequence[Claim],
    stream: ResidualStream,
    data: Any,
    batch_size: int,
    max_samples: int,
    progress: bool,
) -> tuple[Entry, ...]:
    batches = list(
        Feed(data, stream, batch_size=size_for(data, batch_size), max_samples=max_samples)
    )
    parts = _parts(batches)
    possible = [c for c in wanted if not c.own]
    groups = [g for g in GROUPS if any(g in c.needs for c in possible)]
    model = unwrapped(stream.model)
    facts: list[Facts] = []
    for part in shown(parts, stream.name, total=len(parts), enabled=progress):
        facts.append(Facts(gather(model, part, groups)))
    _learned_as_a_whole(facts)
    return tuple(_asked_of(claim, stream, facts) for claim in wanted)


def _learned_as_a_whole(facts: Sequence[Facts]) -> None:
    """One network learned or did not, whichever part of the data is examined."""
    values = [one.content["values"] for one in facts if "skill" in one]
    mean = sum(one["skill"] for one in values) / max(len(values), 1)
    for one in values:
        one["skill"] = mean


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
        found = ask(claim, stream.name, [(one,) for one in facts])
    except Missing as reason:
        return entry(claim, (), str(reason))
    return entry(claim, [found])
