"""For mkdocstrings: lines such as `depth: how many blocks` in a docstring become a list.

Docstrings here are plain sentences. A paragraph that begins with `name: ` or `name, other: `, where
the names are parameters or attributes of what is documented, is a list of them; one item reaches to
the line that begins the next. Examples (`>>>`) become blocks of code.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Docstring, Extension, Function, Module

ITEM = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*):(?: |$)")
EXAMPLE = re.compile(r"(?:^ *>>> .*\n?)(?:^.*\S.*\n?)*", re.MULTILINE)


def listed(text: str, names: set[str]) -> str:
    lines: list[str] = []
    inside = False
    either = "|".join(sorted(names)) or "$"
    # "depth: of the cut. share: ..." is two items, too.
    text = re.sub(rf"(?<=[.;]) (?=(?:{either})(?:, (?:{either}))*:\s)", "\n", text)
    for line in text.split("\n"):
        found = ITEM.match(line)
        if found and set(found[1].split(", ")) <= names:
            if not inside:
                lines.append("")
            heads = ", ".join(f"`{name}`" for name in found[1].split(", "))
            lines.append(f"- {heads}: {line[found.end() :]}")
            inside = True
            continue
        if inside and not line.strip():
            inside = False
        lines.append(f"  {line.strip()}" if inside else line)
    return "\n".join(lines)


def fenced(text: str) -> str:
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)


class Parameters(Extension):
    """Called by griffe for whatever it documents."""

    def _rewrite(self, shown: Function | Class | Module, names: set[str]) -> None:
        if shown.docstring is not None:
            text = fenced(listed(shown.docstring.value, names))
            shown.docstring = Docstring(text, parent=shown)

    def on_function(self, *, func: Function, **_: Any) -> None:
        self._rewrite(func, {parameter.name for parameter in func.parameters})

    def on_class(self, *, cls: Class, **_: Any) -> None:
        names = set(cls.members)
        if "__init__" in cls.members:
            names |= {parameter.name for parameter in cls.members["__init__"].parameters}
        self._rewrite(cls, names)

    def on_module(self, *, mod: Module, **_: Any) -> None:
        self._rewrite(mod, set(mod.members))
