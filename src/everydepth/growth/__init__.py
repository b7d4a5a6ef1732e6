"""Grow: would more depth help, where, and was it worth it?"""

from everydepth.growth.held_out import Paired, paired
from everydepth.growth.jump import Jumpboard, jumpboard
from everydepth.growth.loop import Grown, Round, grow
from everydepth.growth.optimizers import carried
from everydepth.growth.scoring import Score, SiteScore, score

__all__ = [
    "Grown",
    "Jumpboard",
    "Paired",
    "Round",
    "Score",
    "SiteScore",
    "carried",
    "grow",
    "jumpboard",
    "paired",
    "score",
]
