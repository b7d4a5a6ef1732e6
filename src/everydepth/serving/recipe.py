"""A description of a server from which another process can build it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from everydepth.config import checked
from everydepth.environment import usable_device
from everydepth.errors import SettingError
from everydepth.serving.config import ServeConfig

if TYPE_CHECKING:
    from fastapi import FastAPI
    from torch import nn

    from everydepth.exits.policies import Policy
    from everydepth.exits.profile import Profile
    from everydepth.serving.serve import Served


@checked
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The files, names and settings of a server.

    model: a folder or name for `everydepth.load`. policies: like risk-0.01=policy.json.

    >>> from everydepth.serving import Recipe
    >>> Recipe(model="runs/tiny").called
    'tiny'
    """

    model: str
    name: str | None = None
    profile: Path | None = None
    policies: tuple[str, ...] = ()
    certificate: Path | None = None
    device: str | None = None
    key: str | None = field(default=None, repr=False)
    config: ServeConfig = field(default_factory=ServeConfig)

    @property
    def called(self) -> str:
        """The model's name for clients; by default its folder's."""
        return self.name or Path(self.model).resolve().name

    def network(self) -> nn.Module:
        from everydepth.exits.load import load

        return load(self.model).to(usable_device(self.device or "cpu"))

    def known(self) -> Profile | None:
        from everydepth.exits.profile import Profile

        return None if self.profile is None else Profile.load(self.profile)

    def promised(self) -> Policy | None:
        from everydepth.exits.policies import Policy

        return None if self.certificate is None else Policy.load(self.certificate)

    def served(self) -> Served:
        """Load the model and everything that belongs to it."""
        from everydepth.exits.load import load_tokenizer, model_folder
        from everydepth.serving.serve import Served
        from everydepth.stream import as_stream

        network = self.network()
        reads = "input_ids" in as_stream(network).inputs
        return Served(
            name=self.called,
            model=network,
            tokenizer=load_tokenizer(self.model) if reads else None,
            folder=Path(model_folder(self.model)),
            policies=dict(_named(text) for text in self.policies),
            profile=self.known(),
            certificate=self.promised(),
        )

    def app(self) -> FastAPI:
        """The ASGI application."""
        from everydepth.serving.serve import application

        return application(self.served(), self.config, key=self.key)


def _named(text: str) -> tuple[str, Policy]:
    """The name and the policy of a text like risk-0.01=policy.json."""
    from everydepth.exits.policies import Policy

    name, _, file = text.partition("=")
    if not name or not file:
        raise SettingError(f"--policy {text}; write NAME=FILE, like risk-0.01=policy.json")
    return name, Policy.load(Path(file))
