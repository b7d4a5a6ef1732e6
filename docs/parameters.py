"""For mkdocstrings: lines such as `depth: how many blocks` in a docstring become a list.

Docstrings here are plain sentences. A paragraph that begins with `name: ` or `name, other: `, where
the names are parameters or attributes of what is documented, is a list of them; one item reaches to
the line that begins the next. Examples (`>>>`) become blocks of code. Fields of a config bring
their own help.
"""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import import_module
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


def helped(cls: Class) -> str:
    """The fields of a config that say what they are: `lr: float = setting(.., help="..")`."""
    if not any("setting(" in str(getattr(m, "value", "")) for m in cls.members.values()):
        return ""
    config = getattr(import_module(cls.module.path), cls.name)
    found = {f.name: f.metadata.get("setting") for f in fields(config)}
    return "\n".join(f"{name}: {a.help}" for name, a in found.items() if a is not None and a.help)


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
        fields = helped(cls)
        if fields and cls.docstring is not None:
            cls.docstring.value = f"{cls.docstring.value.rstrip()}\n\n{fields}\n"
        self._rewrite(cls, names)

    def on_module(self, *, mod: Module, **_: Any) -> None:
        self._rewrite(mod, set(mod.members))
