"""Run the Python blocks of pages, each page from its first block to its last, in its own folder.

    python tests/docs/run_pages.py README.md docs/index.md

A program and not a test, so that pages run as they do for a reader: while tests run, the package is
changed to check the shapes of every call, and `torch.cond` does not survive that.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from types import ModuleType

import torch

from everydepth.stream import registry

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(page: Path) -> None:
    # A module of its own, found by its name, as dataclasses want it.
    sys.modules["__page__"] = ModuleType("__page__")
    names = vars(sys.modules["__page__"])
    text = page.read_text()
    for found in BLOCK.finditer(text):
        line = text[: found.start(1)].count("\n")
        # Blank lines in front give errors the line numbers of the page.
        exec(compile("\n" * line + found[1], str(page), "exec"), names)


def main(pages: list[Path]) -> int:
    warnings.simplefilter("error")
    # From calibrate, on tiny models: whether it comes depends on how busy the machine is.
    warnings.filterwarnings("ignore", "full depth is faster")
    torch.set_num_threads(1)
    failed = 0
    for page in pages:
        registry._by_class.clear()  # pages may register classes
        begin = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                run(page)
            except Exception:  # noqa: BLE001 - the other pages are run as well
                traceback.print_exc()
                failed += 1
            os.chdir(page.parent)
        print(f"{page}: {time.process_time() - begin:.1f} s")
    return failed


if __name__ == "__main__":
    sys.exit(main([Path(name).resolve() for name in sys.argv[1:]]))
