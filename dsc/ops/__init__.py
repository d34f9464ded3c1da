"""What dsc knows of each ATen operator: ``kinds`` classifies them, ``refusals`` says which calls no kernel may compute."""

from __future__ import annotations

from dsc.ops.kinds import (
    SHORT,
    Kind,
    OpInfo,
    axes,
    info,
    is_alias,
    is_ordered,
    is_split,
    is_tangent,
    is_view,
    may_fail,
    mutated,
    name_of,
    nbytes,
    operand,
    reduced_dims,
    split_of,
    table,
    tensor,
    tensor_operands,
    value,
    written_places,
)
from dsc.ops.layout import foretold, foretold_first
from dsc.ops.refusals import is_plain, why_not_fused

__all__ = [
    "SHORT",
    "Kind",
    "OpInfo",
    "axes",
    "foretold",
    "foretold_first",
    "info",
    "is_alias",
    "is_ordered",
    "is_plain",
    "is_split",
    "is_tangent",
    "is_view",
    "may_fail",
    "mutated",
    "name_of",
    "nbytes",
    "operand",
    "reduced_dims",
    "split_of",
    "table",
    "tensor",
    "tensor_operands",
    "value",
    "why_not_fused",
    "written_places",
]
