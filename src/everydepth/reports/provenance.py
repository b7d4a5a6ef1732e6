"""The provenance of a run: commands, settings, machine, and what was not measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from everydepth.reports.markup import folded, text
from everydepth.reports.reading import RunView


def made_by(view: RunView, heading: str) -> str:
    """The provenance card of one run; `heading` is HTML."""
    rows = "".join(
        f"<tr><th>{text(key)}</th><td>{text(value)}</td></tr>" for key, value in _facts(view)
    )
    more = ""
    if view.config:
        settings = json.dumps(dict(view.config), indent=1, ensure_ascii=False)
        more += folded("settings", f"<pre>{text(settings)}</pre>")
    for results in view.answers.values():
        about = dict(results.about)
        skipped = about.pop("skipped", None)
        if about:
            facts = json.dumps(about, indent=1, ensure_ascii=False)
            more += folded(f"about the {results.kind}", f"<pre>{text(facts)}</pre>")
        if isinstance(skipped, Mapping) and skipped:
            lines = (f"<li>{text(name)}: {text(why)}</li>" for name, why in skipped.items())
            more += folded("not measured", f"<ul>{''.join(lines)}</ul>")
    commands = "".join(f"<pre>{text(command)}</pre>" for command in _commands(view))
    return (
        f'<div class="card wide"><h3>{heading}</h3>{commands}'
        f'<table class="facts"><tbody>{rows}</tbody></table>{more}</div>'
    )


def _commands(view: RunView) -> list[str]:
    sources = (view.environment, view.config, *(a.about for a in view.answers.values()))
    return list(dict.fromkeys(str(s["command"]) for s in sources if s.get("command")))


def _facts(view: RunView) -> Iterator[tuple[str, Any]]:
    for results in view.answers.values():
        if results.model:
            seconds = results.about.get("seconds")
            yield results.kind, str(results) + (f", {seconds} s" if seconds else "")
    found = view.environment
    versions = found.get("versions")
    if isinstance(versions, Mapping):
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    for key in ("python", "platform", "cpus_usable"):
        if key in found:
            yield key.replace("_", " "), found[key]
    devices = found.get("devices")
    for device in devices if isinstance(devices, list) else []:
        if isinstance(device, Mapping):
            yield "device", f"{device.get('name')} {device.get('description') or ''}"
