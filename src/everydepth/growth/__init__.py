"""Grow: would more depth help, where, and was it worth it?

>>> found = ed.growth.score(model, valid, progress=False)
>>> len(found.sites)  # before the first block, and behind each
4
>>> print(found.verdict)
deep...
"""

from everydepth.growth import scaling
from everydepth.growth.arms import CompareConfig
from everydepth.growth.comparing import Comparison, compare
from everydepth.growth.config import GrowConfig
from everydepth.growth.guarantees import Guarantee, guarantee
from everydepth.growth.held_out import Paired, paired
from everydepth.growth.jump import Jumpboard, jumpboard
from everydepth.growth.loop import grow
from everydepth.growth.optimizers import carried
from everydepth.growth.rounds import Grown, Round
from everydepth.growth.scoring import Score, SiteScore, score

__all__ = [
    "CompareConfig",
    "Comparison",
    "GrowConfig",
    "Grown",
    "Guarantee",
    "Jumpboard",
    "Paired",
    "Round",
    "Score",
    "SiteScore",
    "carried",
    "compare",
    "grow",
    "guarantee",
    "jumpboard",
    "paired",
    "scaling",
    "score",
]
