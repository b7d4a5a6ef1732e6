"""What is in a folder, to see that it is as it was."""

from __future__ import annotations

import hashlib
from pathlib import Path


def tree(folder: Path) -> dict[str, str]:
    """The files of a folder by what they hold; locks are of this process."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name not in (".lock", ".holder.json")
    }
