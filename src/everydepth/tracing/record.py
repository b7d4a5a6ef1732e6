"""A trace: the results of all metrics of one run over the data; saved without pickles."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from everydepth.errors import DataError, SettingError
from everydepth.results.result import Result

if TYPE_CHECKING:
    import pandas as pd

VERSION = 1
_MASK = "!mask"  # suffix of the stored mask of a masked array; cannot be part of an array's name


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Depths 0..L of one model on one data set; depth 0 is the embedding.

    `trace["cos"]` is a numpy array, `trace.results["cos"]` all of what the metric gives.

    model: the model's class name. task: what its readout predicts. depth: L.
    samples: rows of data; rows: predictions (equal to `samples`, or the number of real tokens).
    passes: how often the data was run through the model.
    partial: the run was interrupted; results cover `samples` rows only.
    skipped: metrics left out of the default set, and why.
    meta: seconds, batch size, how memory was used, versions.

    >>> trace = ed.trace(model, test, ["accuracy", "cos"], progress=False)
    >>> trace["accuracy"].shape, trace["cos"].shape  # depths 0..3; pairs of depths
    ((4,), (4, 4))
    >>> ed.Trace.load(trace.save("trace")).depth
    3
    """

    model: str
    task: str
    depth: int
    samples: int
    rows: int
    results: Mapping[str, Result]
    passes: int = 1
    partial: bool = False
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        object.__setattr__(self, "results", MappingProxyType(dict(self.results)))

    def __getitem__(self, name: str) -> np.ndarray:
        return self.result(name).value

    def __contains__(self, name: object) -> bool:
        return name in self.results

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def result(self, name: str) -> Result:
        """All of what one metric gives."""
        if name not in self.results:
            why = f" ({name} was left out: {self.skipped[name]})" if name in self.skipped else ""
            close = get_close_matches(name, self.results, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise SettingError(
                f"this trace has no {name!r}{why}; {hint}it has {', '.join(self.results) or 'none'}"
            )
        return self.results[name]

    # -- one row per depth ------------------------------------------------------------------------

    def columns(self, *, main: bool = False) -> dict[str, list[float | None]]:
        """Every curve as one value per depth 0..L; None where a metric says nothing at a depth.

        main: only the first series of every metric.
        """
        found: dict[str, list[float | None]] = {}
        for name, result in self.results.items():
            if result.kind not in ("curve", "histogram") or result.is_gap:
                continue
            depths = np.asarray(result.arrays["depth"])
            for series in result.series[:1] if main else result.series:
                title = name if series == result.series[0] else f"{name}.{series}"
                column: list[float | None] = [None] * (self.depth + 1)
                for depth, value in zip(depths, np.ma.asarray(result.arrays[series]), strict=True):
                    if value is not np.ma.masked and 0 <= depth <= self.depth:
                        column[int(depth)] = float(value)
                found[title] = column
        return found

    def table(self) -> str:
        """Plain text: one row per depth 0..L, one column per metric; gaps and notes below."""
        columns = self.columns(main=True)
        cells = [["depth", *columns]]
        for depth in range(self.depth + 1):
            values = (column[depth] for column in columns.values())
            cells.append([str(depth), *("-" if v is None else f"{v:.4g}" for v in values)])
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
        notes = [f"{name}: {r.note}" for name, r in self.results.items() if r.note]
        return "\n".join([str(self), *lines, *notes])

    def with_results(self, *results: Result) -> Trace:
        """A trace with further results, such as a token grid; a name that exists is replaced."""
        return replace(self, results={**self.results, **{r.name: r for r in results}})

    def to_pandas(self) -> pd.DataFrame:
        """One row per depth, one column per curve."""
        try:
            import pandas as pd
        except ImportError as error:
            raise SettingError(
                "to_pandas needs pandas, which is not installed; run `pip install pandas`, or use "
                "trace.columns()"
            ) from error
        frame = pd.DataFrame(self.columns(), dtype="float64")
        frame.index.name = "depth"
        return frame

    # -- shown ------------------------------------------------------------------------------------

    def __str__(self) -> str:
        tokens = f", {self.rows:,} predictions" if self.rows != self.samples else ""
        state = ", PARTIAL (interrupted)" if self.partial else ""
        return (
            f"Trace of {self.model}: {self.depth} blocks, {self.samples:,} samples{tokens}, "
            f"{len(self.results)} metrics{state}"
        )

    def _repr_html_(self) -> str:
        def row(cells: list[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        columns = self.columns(main=True)
        body = [
            row([str(d), *("" if c[d] is None else f"{c[d]:.4g}" for c in columns.values())], "td")
            for d in range(self.depth + 1)
        ]
        notes = [
            f"<li>{html.escape(name)}: {html.escape(r.note)}</li>"
            for name, r in self.results.items()
            if r.note
        ]
        return (
            f"<p>{html.escape(str(self))}</p><table>{row(['depth', *columns], 'th')}"
            f"{''.join(body)}</table><ul>{''.join(notes)}</ul>"
        )

    def plot(self, name: str, backend: str = "matplotlib") -> Any:
        """The figure of one metric: `backend` is "matplotlib" (paper) or "plotly" (page)."""
        from everydepth.results.figures import figure

        return figure(self.result(name), backend)

    # -- kept -------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write `trace.json` and `trace.npz` into the folder `path`; returns the folder."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, np.ndarray] = {}
        described: list[dict[str, Any]] = []
        for name, result in self.results.items():
            for key, array in result.arrays.items():
                arrays[f"{name}/{key}"] = np.ma.getdata(array)
                if isinstance(array, np.ma.MaskedArray):
                    arrays[f"{name}/{key}{_MASK}"] = np.ma.getmaskarray(array)
            described.append(
                {
                    "name": name,
                    "kind": result.kind,
                    "series": list(result.series),
                    "arrays": list(result.arrays),
                    "labels": dict(result.labels),
                    "meta": dict(result.meta),
                    "note": result.note,
                }
            )
        head = {key: getattr(self, key) for key in _HEAD}
        text = json.dumps(
            {
                "version": VERSION,
                **head,
                "skipped": dict(self.skipped),
                "meta": dict(self.meta),
                "results": described,
            },
            indent=1,
        )
        # The JSON names the arrays, so it is written last: a cut-off save does not look complete.
        _write(folder / "trace.npz", lambda file: np.savez_compressed(file, **arrays))  # pyright: ignore[reportArgumentType]
        _write(folder / "trace.json", lambda file: file.write(text.encode()))
        return folder

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read what `save` wrote; nothing in the files can run code."""
        folder = Path(path)
        try:
            text = json.loads((folder / "trace.json").read_text())
        except (OSError, ValueError) as error:
            raise DataError(
                f"no trace in {folder} ({error}); pass the folder given to `Trace.save`"
            ) from error
        if text.get("version") != VERSION:
            raise DataError(
                f"{folder} holds a trace of version {text.get('version')!r}, but this everydepth "
                f"reads version {VERSION}; read it with the everydepth that wrote it"
            )
        with np.load(folder / "trace.npz", allow_pickle=False) as stored:
            results = {entry["name"]: _result(entry, stored) for entry in text["results"]}
        return Trace(
            results=results,
            skipped=text["skipped"],
            meta=text["meta"],
            **{key: text[key] for key in _HEAD},
        )


_HEAD = ("model", "task", "depth", "samples", "rows", "passes", "partial")


def _write(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """The whole file or the one before: never half of one."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        write(file)
    part.replace(path)


def _result(entry: dict[str, Any], stored: Mapping[str, np.ndarray]) -> Result:
    def array(key: str) -> np.ndarray:
        name = f"{entry['name']}/{key}"
        data, mask = stored[name], f"{name}{_MASK}"
        return np.ma.masked_array(data, mask=stored[mask]) if mask in stored else data

    names: list[str] = entry["arrays"]
    return Result(
        name=entry["name"],
        kind=entry["kind"],
        series=tuple(entry["series"]),
        arrays={key: array(key) for key in names},
        labels=entry["labels"],
        meta=entry["meta"],
        note=entry["note"],
    )
