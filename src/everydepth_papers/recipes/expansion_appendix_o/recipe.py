"""What the planner says at the sizes of App. O's tables, and a refit of the Chinchilla points."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, published
from everydepth_papers.evidence.rows import holds_in

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PUBLISHED = published(__file__)
WORST = 5  # points of highest loss, which the published refit leaves out


def cell(settings: Cell, seed: int, folder: Path) -> Mapping[str, Any]:
    from everydepth.growth import scaling

    if settings["what"] == "plan":
        plan = scaling.plan(parameters=settings["parameters"], multiple=1)
        spent = 6 * settings["parameters"] * settings["tokens"] if "tokens" in settings else None
        best = None if spent is None else scaling.plan(flops=spent).to_json()
        return {"plan": plan.to_json(), "same_flops": best}
    if settings["what"] == "coupling":
        return _slope(settings["alpha"], settings["beta"])
    if settings["what"] == "synthetic":
        n = [10.0 ** (7 + i / 4) for i in range(12)]
        d = [20 * m * (1 + i % 3) for i, m in enumerate(n)]
        law = scaling.fit(n, scaling.EPOCH(n, d), d, seed=seed)
        return {"fit": law.to_json()}
    n, d, loss = _points()
    law = scaling.fit(n, loss, d, bootstrap=settings["bootstrap"], seed=seed)
    share = law["beta"] / (law["alpha"] + law["beta"])
    return {"fit": law.to_json(), "exponents": [share, 1 - share]}


def _slope(alpha: float, beta: float) -> dict[str, float]:
    """Of log excess against log N: the recursion of App. M, block by block, and its formula."""
    import math

    from everydepth_papers.evidence.depth_law import Coupling, DepthFit

    law, coupling = DepthFit(0.1, beta, 0.0, None), Coupling(alpha=alpha)
    # Deep enough for the limit: 1,000 and 10,000 blocks.
    sizes = [coupling.per_layer * depth ** (2 / alpha) * depth for depth in (1e3, 1e4)]
    excess: list[float] = []
    for size in sizes:
        left = 1.0
        for _ in range(round(coupling.at(size)[0])):
            left -= law.a * left**beta
        excess.append(left)
    slope = math.log(excess[0] / excess[1]) / math.log(sizes[1] / sizes[0])
    return {"formula": law.exponent(alpha), "recursion": slope}


def _points() -> tuple[list[float], list[float], list[float]]:
    """Parameters, tokens (FLOPs / 6 N) and losses, without the worst."""
    from everydepth_papers.evidence.running import data_folder

    file = next(iter(sorted(data_folder("chinchilla").glob("*.csv"))))
    with open(file, encoding="utf-8", newline="") as text:
        rows = list(csv.DictReader(text))
    points = [(float(r["Model Size"]), float(r["Training FLOP"]), float(r["loss"])) for r in rows]
    kept = sorted(points, key=lambda p: p[2])[:-WORST]
    return [n for n, _, _ in kept], [c / (6 * n) for n, c, _ in kept], [x for _, _, x in kept]


NEAR = 0.02  # relative: of exponents
ROUGH = 0.1  # of widths: the table is rounded, and leaves embeddings out


def rows(results: Sequence[Finished]) -> Sequence[Row]:
    found = statements(results)
    for r in results:
        if r.cell["what"] == "plan":
            found += _planned(r)
        elif r.cell["what"] == "coupling":
            alpha, beta = r.cell["alpha"], r.cell["beta"]
            found.append(
                Row(
                    f"Table 2: exponent of the excess in N, depth ~ width^{alpha:g}, beta {beta:g}",
                    round(r["formula"], 4),
                    round(r["recursion"], 4),
                    note="published: the formula of Theorem 6; measured: its recursion, simulated",
                )
            )
        else:
            found += _fitted(r)
    return found


def statements(results: Sequence[Finished]) -> list[Row]:
    coupled = [r for r in results if r.cell["what"] == "coupling"]
    levine = [(r["plan"], PUBLISHED["levine"].get(r.cell["name"])) for r in _plans(results)]
    trained = [
        (name := r.cell["name"], r["same_flops"], PUBLISHED["trained"].get(name))
        for r in _plans(results)
    ]
    fits = [r for r in results if "exponents" in r.values]
    return [
        holds_in(
            "Table 2: the recursion of App. M has the formula's exponent",
            "by proof",
            coupled,
            lambda r: abs(r["recursion"] / r["formula"] - 1) < NEAR,
            f"within {NEAR:.0%}, between 1,000 and 10,000 blocks",
            unit="couplings",
        ),
        holds_in(
            "Table 3: N = 12 depth width^2 gives the printed width",
            "widths of GPT-3's sizes, projected",
            [pair for pair in levine if pair[1] is not None],
            lambda plan, printed: abs(plan["width"] / printed["width"] - 1) < ROUGH,
            f"within {ROUGH:.0%}, at the printed depth",
            unit="sizes",
        ),
        holds_in(
            "Table 4: trained on fewer tokens per parameter than is optimal for the same compute",
            "large models were undertrained, which Chinchilla was not",
            [
                (best, p)
                for name, best, p in trained
                if p is not None and best is not None and name != "Chinchilla"
            ],
            lambda best, p: p["tokens"] / p["parameters"] < best["tokens"] / best["parameters"],
            "all but Chinchilla",
            unit="models",
        ),
        holds_in(
            "Table 5: parameters and tokens grow alike with compute",
            "closer to balanced growth than to Kaplan's 0.73 and 0.27",
            fits,
            lambda r: abs(r["exponents"][0] - 0.5) < abs(r["exponents"][0] - 0.73),
            "parametric loss, refitted",
            unit="fits",
        ),
    ]


def _plans(results: Sequence[Finished]) -> list[Finished]:
    return [r for r in results if r.cell["what"] == "plan"]


def _planned(result: Finished) -> list[Row]:
    name, plan = result.cell["name"], result["plan"]
    printed = PUBLISHED["levine"].get(name)
    if printed is not None:
        notes = {"depth": "read off the table: a check of the code", "width": "N = 12 depth width²"}
        return [
            Row(f"Table 3: {name}, {what}", printed[what], plan[what], note=note)
            for what, note in notes.items()
        ]
    printed, best = PUBLISHED["trained"][name], result["same_flops"]
    ratio = printed["tokens"] / printed["parameters"]
    note = f"ours: compute-optimal at the same FLOPs, {best['parameters']:.3g} parameters"
    per = best["tokens"] / best["parameters"]
    return [
        Row(f"Table 4: {name}, tokens per parameter", round(ratio, 2), round(per, 1), note=note)
    ]


def _fitted(result: Finished) -> list[Row]:
    fit = result["fit"]
    whose = "refit" if result.cell["what"] == "fit" else "refit of the published law"
    found: list[Row] = []
    for name, value in PUBLISHED["refit"].items():
        low, high = fit["intervals"][name] if fit["intervals"] else (None, None)
        note = "" if low is None else "95 % bootstrap interval"
        measured = round(fit["values"][name], 4)
        found.append(Row(f"{whose}: {name}", value, measured, low, high, note))
    if "exponents" in result.values:
        for name, place in (("N ~ C^a", 0), ("D ~ C^b", 1)):
            found.append(
                Row(
                    f"Table 5, parametric loss: {name}",
                    PUBLISHED["exponents"]["parametric"][place],
                    round(result["exponents"][place], 3),
                    note="the published value is of the first fit of these points",
                )
            )
    return found


def figure(results: Sequence[Finished]) -> Figure:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(10, 4), layout="constrained")
    axes = drawn.subplots(1, 2)
    levine = PUBLISHED["levine"].values()
    for axis, what in zip(axes, ("depth", "width"), strict=True):
        sizes = [row["parameters"] for row in levine]
        axis.plot(sizes, [row[what] for row in levine], "o", label="Table 3, projected")
        plans = sorted(
            (r["plan"]["parameters"], r["plan"][what]) for r in results if r.cell["what"] == "plan"
        )
        axis.plot(*zip(*plans, strict=True), label="everydepth plan")
        axis.set(xscale="log", xlabel="parameters", ylabel=what)
        axis.legend()
    axes[1].set_yscale("log")
    return drawn


PLANS: list[Cell] = [
    {
        "what": "plan",
        "name": name,
        **{k: v for k, v in row.items() if k in ("parameters", "tokens")},
    }
    for table in ("levine", "trained")
    for name, row in PUBLISHED[table].items()
]

COUPLED: list[Cell] = [
    {"what": "coupling", "alpha": alpha, "beta": beta}
    for alpha in (1.0, 0.5, 0.25)
    for beta in (1.5, 2.5)
]

RECIPE = Recipe(
    name="expansion_appendix_o",
    title="The planner at the sizes of published models",
    paper="expansion",
    item="App. M and O, Tables 2 to 5",
    presets={
        "smoke": Preset(cells=[*PLANS, *COUPLED, {"what": "synthetic"}], cost="2 s, 1 core"),
        "small": Preset(
            cells=[*PLANS, *COUPLED, {"what": "fit", "bootstrap": 200}],
            cost="1 min, 1 core",
            needs=("chinchilla",),
        ),
        "paper": Preset(
            cells=[*PLANS, *COUPLED, {"what": "fit", "bootstrap": 4000}],
            cost="15 min, 1 core",
            needs=("chinchilla",),
        ),
    },
    cell=cell,
    rows=rows,
    figure=figure,
    about=(
        "Depth follows Levine et al.'s projections, so Table 3 checks the code and not the law. "
        "Tokens follow the refit of the Chinchilla points; the five points of highest loss are "
        "left out, as in that refit."
    ),
)
