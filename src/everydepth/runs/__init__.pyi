from .checkpoint import FORMAT as FORMAT
from .checkpoint import Checkpoint as Checkpoint
from .holding import held as held
from .run import Run as Run
