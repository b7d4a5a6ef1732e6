"""Start or continue a run as its only writer."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from everydepth.runs.holding import held
from everydepth.runs.run import Run
from everydepth.runs.together import on_main


@contextmanager
def opened(
    path: str | Path, config: Mapping[str, Any], *, kind: str = "train", resume: bool = True
) -> Generator[tuple[Run, bool], None, None]:
    """Start a run, or with `resume` continue it if it exists, and hold its lock inside the context.

    Yields the run, and whether it continues. Of several processes, the main one writes; all of them
    must see the directory.
    """
    with ExitStack() as stack:

        def begin() -> bool:
            continues = resume and Run.exists(path)
            if not continues:
                Run.check_free(path)
            stack.enter_context(held(path))
            Run.resumed(path, config, kind=kind)
            return continues

        continued = on_main(begin)
        yield Run.open(path), continued
