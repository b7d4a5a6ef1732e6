"""How long `import everydepth` takes, beside `import torch`: CPU seconds of fresh processes.

    python benchmarks/importing.py

What is subtracted is an empty process. Ways take turns; each has its best of several.
"""

from __future__ import annotations

import subprocess
import sys
from resource import RUSAGE_CHILDREN, getrusage

from record import no_options, record_times, sized
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROUNDS, LIMIT = sized(3, 1), 1.3
WAYS = {
    "nothing": "",
    "import torch": "import torch",
    "import everydepth": "import everydepth",
    "everydepth and torch": "import everydepth, torch",
    "ed.as_stream": "import everydepth as ed; ed.as_stream",
    "ed.trace": "import everydepth as ed; ed.trace",
    "ed.generate": "import everydepth as ed; ed.generate",
    "ed.EveryDepth": "import everydepth as ed; ed.EveryDepth",
    "import transformers' ViT": "from transformers import ViTForImageClassification",
}


def seconds(code: str) -> float:
    before = getrusage(RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    ways = sized(list(WAYS), ["nothing", "import torch", "import everydepth"])
    best = dict.fromkeys(ways, float("inf"))
    for _ in track(range(ROUNDS), description="importing"):
        for way in ways:
            best[way] = min(best[way], seconds(WAYS[way]))
    torch = best["import torch"] - best["nothing"]
    ratios = {way: (best[way] - best["nothing"]) / torch for way in ways if way != "nothing"}
    table = Table("", "CPU seconds", "of import torch", title=f"at most {LIMIT} wanted")
    for way, ratio in ratios.items():
        table.add_row(way, f"{best[way]:.2f}", f"{ratio:.2f}")
    Console().print(table)
    figures = {"rounds": ROUNDS, "wanted": LIMIT, "cpu_seconds": best, "of_import_torch": ratios}
    record_times("importing", figures)


if __name__ == "__main__":
    no_options()
    main()
