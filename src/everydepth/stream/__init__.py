"""The waist: a network is `h_0 -> h_1 -> ... -> h_L` with one shared readout."""

from everydepth.stream.balcony import Balcony
from everydepth.stream.block import Block, Branch
from everydepth.stream.checks import Check, StreamReport, check_stream
from everydepth.stream.contract import (
    BESIDE_INPUTS,
    IGNORE_INDEX,
    Batch,
    ResidualStream,
    StreamFactory,
    Task,
    sample_task,
)
from everydepth.stream.cursor import Call, Cursor
from everydepth.stream.depth import Depths, at_depth, chosen_depths
from everydepth.stream.edit import (
    block_copy,
    copy_without,
    edited,
    lengthened,
    name_stages,
    shortened,
)
from everydepth.stream.feed import Feed, Source
from everydepth.stream.generic import GenericStream
from everydepth.stream.gradients import TapGradients, observe_gradients
from everydepth.stream.insert import insert, sites
from everydepth.stream.modes import evaluating
from everydepth.stream.registry import Family, as_stream, families, model_class, register
from everydepth.stream.states import States
from everydepth.stream.taps import BranchRecord, first_tensor, record_branches, with_first_tensor
from everydepth.stream.targets import (
    Criterion,
    Targets,
    at_least_float32,
    has_labels,
    labeled_samples,
    no_labels,
    real_tokens,
    with_labels,
)
from everydepth.stream.wrapping import (
    adapter,
    check_plain,
    check_resident,
    merged,
    plain_value,
    plain_values,
    rewrapped,
    shareable,
    stored,
    unwrapped,
    without_gradients,
)

__all__ = [
    "BESIDE_INPUTS",
    "IGNORE_INDEX",
    "Balcony",
    "Batch",
    "Block",
    "Branch",
    "BranchRecord",
    "Call",
    "Check",
    "Criterion",
    "Cursor",
    "Depths",
    "Family",
    "Feed",
    "GenericStream",
    "ResidualStream",
    "Source",
    "States",
    "StreamFactory",
    "StreamReport",
    "TapGradients",
    "Targets",
    "Task",
    "adapter",
    "as_stream",
    "at_depth",
    "at_least_float32",
    "block_copy",
    "check_plain",
    "check_resident",
    "check_stream",
    "chosen_depths",
    "copy_without",
    "edited",
    "evaluating",
    "families",
    "first_tensor",
    "has_labels",
    "insert",
    "labeled_samples",
    "lengthened",
    "merged",
    "model_class",
    "name_stages",
    "no_labels",
    "observe_gradients",
    "plain_value",
    "plain_values",
    "real_tokens",
    "record_branches",
    "register",
    "rewrapped",
    "sample_task",
    "shareable",
    "shortened",
    "sites",
    "stored",
    "unwrapped",
    "with_first_tensor",
    "with_labels",
    "without_gradients",
]
