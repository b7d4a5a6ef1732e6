"""`everydepth app`, noting packages that its threads import: watched_app.py NOTES WORDS...

The main thread may import what it likes: it does so before the others have something to do.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from everydepth.cli.main import main


class Watch:
    """Is asked before all other finders, leaves the finding to them, and writes down the name."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def find_spec(self, name: str, path: Sequence[str] | None, _: Any = None) -> ModuleSpec | None:
        # Modules of a package that is there come one by one (plotly's hundreds), and need no other.
        known = name.partition(".")[0] in sys.modules
        other = threading.current_thread() is not threading.main_thread()
        if other and not known and PathFinder.find_spec(name, path) is not None:
            with self.notes.open("a") as notes:
                notes.write(f"{name}\n")
        return None


if __name__ == "__main__":
    notes = Path(sys.argv.pop(1))
    notes.touch()
    sys.meta_path.insert(0, Watch(notes))
    main()
