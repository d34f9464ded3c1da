"""Numbers that Python's ``random`` draws: what Dynamo traces them as, and what it passes.

Dynamo makes ``random.uniform(0, 1)`` an input of the graph.  It traces it as a tensor of the default dtype without
dimensions, draws a number at each call, and passes that in float64: a kernel made for the trace would read 4 of 8 bytes.

In eager it is a Python number, which takes on the dtype of the tensor beside it and is exact beside float64.  So such an
input is float64 in the graph too, and what reads it gets the dtype of the trace, unless it reads or gives float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dsc.dynamo import tensor_of
from dsc.torch_shim import is_drawn_by_python

DOUBLE = (torch.float64, torch.complex128)


def in_full(gm: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Change the graph in place.  What comes back are the example inputs it is to be traced with."""
    out = list(inputs)
    changed = False
    for i, n in enumerate(gm.graph.find_nodes(op="placeholder")):
        traced = tensor_of(n)
        if not is_drawn_by_python(n) or traced is None or not _narrow(traced):
            continue
        changed = True
        n.meta["example_value"] = out[i] = traced.double()
        for reader in list(n.users):
            if reader.op != "output" and not any(t.dtype in DOUBLE for t in _beside(reader, n)):
                _narrowed(gm, reader, n, traced)
    if changed:
        gm.recompile()
    return out


def _narrow(t: torch.Tensor) -> bool:
    return t.is_floating_point() and t.dtype != torch.float64


def _beside(reader: Node, number: Node) -> list[torch.Tensor]:
    """What a call reads beside the number, and what it gives."""
    return [t for n in (reader, *reader.all_input_nodes) if n is not number and (t := tensor_of(n)) is not None]


def _narrowed(gm: GraphModule, reader: Node, number: Node, traced: torch.Tensor) -> None:
    with gm.graph.inserting_before(reader):
        short = gm.graph.call_method("to", (number, traced.dtype))
    short.meta["example_value"] = traced
    reader.replace_input_with(number, short)
