"""The table of docs/models.md: every class that could be built small, and what was found of it.

`python -m tests.zoo.table docs/models.md --rows rows.jsonl` measures what the page lacks, one model
after the other, and writes the page anew. Each row also goes to the file as soon as it is known, so
that a run can be interrupted. `--again NAME` measures a row that the page has.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tests.zoo.stock import Stock, stock, time_limit
from tests.zoo.verbs import VERBS, applies, labeled
from tests.zoo.vision import Vision, libraries, timm_models, torchvision_classifiers
from torch import Tensor, nn

import everydepth as ed
from everydepth.stream import ResidualStream
from everydepth.stream.discovery import DiscoveredStream

CLAUSES = {
    "last depth is the model": "last depth",
    "observe equals drive": "drive",
    "branches add up": "sums",
    "a zero projection is silent": "silence",
    "gradient reaches every block": "gradient",
    "rows can be selected": "rows",
    "truncation gives the same": "cut",
    "cache equals full forward": "cache",
    "the loss is the model's own": "loss",
}
MEASURED = "measured"
_MARKS = {True: "yes", False: "**no**", None: "-"}


def measured(entry: Stock | Vision, *, verbs: bool = True) -> dict[str, Any]:
    """One row: what was found, each clause, each verb; or why it could not be built or followed."""
    row: dict[str, Any] = {"name": entry.name, MEASURED: date.today().isoformat()}
    try:
        with time_limit():
            model, batch = entry.make()
    except Exception as error:  # noqa: BLE001 - whatever keeps a class from being built small
        return {**row, "unbuilt": _said(error)}
    try:
        with time_limit(300):
            stream = _followed(entry, model, batch)
            row["depth"] = stream.depth
            row["branches"] = [[b.kind for b in block.branches] for block in stream.blocks]
            row["readout"] = stream.structure.readout.how
            given = labeled(stream, batch)
            report = ed.check_stream(stream, given)
        row["checks"] = {check.name: check.passed for check in report.checks}
        row["broken"] = {c.name: c.detail[:200] for c in report.checks if c.passed is False}
    except Exception as error:  # noqa: BLE001 - a class that is not followed is a row, too
        return {**row, "error": _said(error)}
    return {**row, **(_used(stream, given) if verbs else {})}


def _followed(entry: Stock | Vision, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    """A stream found without a word; of pictures on a small one, as large ones take long."""
    options = {"example": batch} if isinstance(entry, Vision) else {}
    stream = DiscoveredStream(model, **options)
    stream.options = options
    return stream


def _used(stream: ResidualStream, given: Mapping[str, Tensor]) -> dict[str, Any]:
    """Each verb: True, None where it does not apply, or what it said instead."""
    found: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        for name, verb in VERBS.items():
            try:
                with time_limit(300):
                    verb(stream, given, Path(folder))
            except Exception as error:  # noqa: BLE001 - what a verb cannot do is in the table
                found[name] = _said(error) if applies(name, error) else None
            else:
                found[name] = True
    return found


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@dataclass(frozen=True)
class Verdicts:
    """How many of some rows were followed, and how far.

    ran: classes with residual connections that build and run; `whole` keep every clause that
        applies, `branched` with every residual connection known, `used` go through every verb
        that applies (of `tried`, and those that are not `followed` go through none); `bare` have
        no residual connection, and are refused for it.
    """

    ran: int
    followed: int
    whole: int
    branched: int
    bare: int
    tried: int
    used: int
    unbuilt: int

    @classmethod
    def of(cls, rows: Iterable[dict[str, Any]]) -> Verdicts:
        rows = list(rows)
        built = [row for row in rows if "unbuilt" not in row]
        bare = [row for row in built if _bare(row)]
        whole = [r for r in built if "checks" in r and False not in r["checks"].values()]
        tried = [row for row in built if any(verb in row for verb in VERBS)]
        used = [r for r in tried if all(r.get(v) in (True, None) for v in VERBS)]
        return cls(
            ran=len(built) - len(bare),
            followed=sum("checks" in row for row in built),
            whole=len(whole),
            branched=sum(all(row["branches"]) for row in whole),
            bare=len(bare),
            tried=len(tried),
            used=len(used),
            unbuilt=len(rows) - len(built),
        )

    def __str__(self) -> str:
        part = "" if self.tried == self.followed else f" of {self.tried} tried"
        share = self.used / max(self.tried, 1) * self.followed / max(self.ran, 1)
        verbs = f" {self.used}{part} ({share:.1%}) go through every verb that applies."
        return (
            f"{self.ran} with residual connections build and run. {self.whole} of them "
            f"({self.whole / max(self.ran, 1):.1%}) keep every clause of `check_stream` that "
            f"applies, {self.branched} ({self.branched / max(self.ran, 1):.1%}) with every "
            f"residual connection known.{verbs if self.tried else ''} {self.bare} have no "
            f"residual connection and are told so. {self.unbuilt} do not build or run."
        )


_BARE = "has no residual connection"


def _bare(row: Mapping[str, Any]) -> bool:
    return _BARE in row.get("error", "")


LIBRARIES = {
    "transformers": "Every class of the auto mappings for causal, sequence, masked, token, image, "
    "audio and sequence-to-sequence models",
    "torchvision": "The residual classifiers",
    "timm": "One small model of each module",
}


def rendered(rows: Iterable[dict[str, Any]], known: Mapping[str, int] | None = None) -> str:
    """The page; known: library -> how many models there are to measure."""
    known = {"transformers": len(stock()), **(known or {})}
    lines = [
        "# Models",
        "",
        "Generated by `python -m tests.zoo.table docs/models.md`: small models with random "
        "weights, built from their own configs, followed without a word about their class.",
        "",
        "Readout: *modules* is pick, norms and head; *head* the model's own forward up to its "
        "head; *tail* the model's own forward to the end. A dash: the clause or verb does not "
        "apply. An empty cell: not tried. The share of those that go through every verb counts "
        "classes that are not followed as failing. timm's models keep at most two of the equal "
        "blocks that follow one another, where they still run: a longer one may fail where these "
        "do not.",
    ]
    by_library: dict[str, list[dict[str, Any]]] = {name: [] for name in LIBRARIES}
    for row in sorted(rows, key=lambda row: row["name"]):
        mapping = row["name"].partition(":")[0]
        by_library[mapping if mapping in LIBRARIES else "transformers"].append(row)
    for library, held in by_library.items():
        lines += _section(library, held, known.get(library, 0)) if held else []
    return "\n".join(lines) + "\n"


def _section(library: str, rows: list[dict[str, Any]], known: int) -> list[str]:
    verbs = [name for name in VERBS if any(name in row for row in rows)]
    head = ["class", "depth", "branches of a block", "readout", *CLAUSES.values(), *verbs, MEASURED]
    built = [row for row in rows if "unbuilt" not in row]
    unbuilt = [row for row in rows if "unbuilt" in row]
    left = known - len(rows)
    more = f" {left} more have not been measured." if left > 0 else ""
    days = Counter(f"on {row[MEASURED]}" if row.get(MEASURED) else "earlier" for row in built)
    more += f" Measured: {', '.join(f'{n} {day}' for day, n in sorted(days.items()))}."
    return [
        *("", f"## {library}", "", f"{LIBRARIES[library]}. {Verdicts.of(rows)}{more}", ""),
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *(_line(row, verbs) for row in built),
        *(("", "Not built small:", "") if unbuilt else ()),
        *(f"- `{row['name']}`: {_plain(row['unbuilt'])}" for row in unbuilt),
    ]


def read(page: str) -> dict[str, dict[str, Any]]:
    """The rows of a page by name: all that `rendered` needs to write it again."""
    rows: dict[str, dict[str, Any]] = {}
    columns: list[str] = []
    for line in page.splitlines():
        if line.startswith("| class |"):
            columns = _cells(line)
        elif line.startswith("- `"):
            name, _, said = line.removeprefix("- `").partition("`: ")
            rows[name] = {"name": name, "unbuilt": said}
        elif line.startswith("| "):
            row = _row(dict(zip(columns, _cells(line), strict=True)))
            rows[row["name"]] = row
    return rows


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def _row(cells: Mapping[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": cells["class"], MEASURED: cells.get(MEASURED, "")}
    kinds = cells["branches of a block"]
    if cells["depth"] == "-":
        bare = kinds == "no residual connection"
        return {**row, "error": _BARE if bare else kinds.removeprefix("not followed: ")}
    meant = {mark: value for value, mark in _MARKS.items()}
    checks = {name: meant[mark] for name, short in CLAUSES.items() if (mark := cells.get(short))}
    verbs = {name: meant[mark] for name in VERBS if (mark := cells.get(name))}
    return {
        **row,
        "depth": int(cells["depth"]),
        "branches": [[] if k == "not known" else k.split(", ") for k in kinds.split("; ")],
        "readout": cells["readout"],
        "checks": checks,
        **verbs,
    }


def _plain(text: str) -> str:
    """An error as words of a table."""
    return re.sub(r"[|<>*_`\[\]]", " ", text)[:140].rstrip()


def _line(row: dict[str, Any], verbs: list[str]) -> str:
    if "checks" not in row:
        said = re.sub(r"^\w+Error: ", "", row.get("error", "").partition(";")[0])
        reason = f"not followed: {_plain(said)}"
        reason = "no residual connection" if _bare(row) else reason
        cells = [row["name"], "-", reason, *[""] * (1 + len(CLAUSES))]
        return "| " + " | ".join([*cells, *[""] * len(verbs), row.get(MEASURED, "")]) + " |"
    kinds = list(dict.fromkeys(", ".join(kinds) or "not known" for kinds in row["branches"]))
    marks = [_MARKS[row["checks"][name]] if name in row["checks"] else "" for name in CLAUSES]
    done = [_verb_mark(row, verb) for verb in verbs]
    cells = [row["name"], str(row["depth"]), "; ".join(kinds), row["readout"], *marks, *done]
    return "| " + " | ".join([*cells, row.get(MEASURED, "")]) + " |"


def _verb_mark(row: dict[str, Any], verb: str) -> str:
    return {True: "yes", None: "-"}.get(row[verb], "**no**") if verb in row else ""


def entries(library: str) -> list[Stock] | list[Vision]:
    if library == "transformers":
        return stock()
    libraries()
    return torchvision_classifiers() if library == "torchvision" else timm_models()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--rows", type=Path, required=True, help="results, one JSON a line")
    parser.add_argument("--library", choices=list(LIBRARIES), default="transformers")
    parser.add_argument("--verbs", action="store_true", help="run every verb, too")
    parser.add_argument("--again", nargs="*", default=[], help="rows to measure although known")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after them")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = read(given.page.read_text() if given.page.exists() else "")
    text = given.rows.read_text() if given.rows.exists() else ""
    # A row measured later, with verbs, takes the place of the one before.
    new = {row["name"]: row for row in map(json.loads, text.splitlines())}
    rows |= new
    known = {n for n, r in rows.items() if not given.verbs or "checks" not in r or "train" in r}
    known -= set(given.again) - set(new)
    everything = entries(given.library)
    end = time.monotonic() + 60 * given.minutes
    for entry in everything:
        if entry.name in known:
            continue
        if time.monotonic() > end:
            break
        with given.rows.open("a") as file:
            # Said first, and held against it only if the process does not live to say more.
            file.write(json.dumps({"name": entry.name, "error": "the process crashed"}) + "\n")
            file.flush()
            begun = time.process_time()
            row = rows[entry.name] = measured(entry, verbs=given.verbs)
            row["seconds"] = round(time.process_time() - begun, 1)
            file.write(json.dumps(row) + "\n")
    given.page.write_text(rendered(rows.values(), {given.library: len(everything)}))


if __name__ == "__main__":
    main()
