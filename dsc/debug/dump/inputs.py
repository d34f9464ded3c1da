"""What the inputs and results of an ATen graph stand for, in the model's own words."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn
from torch.fx import GraphModule, Node


def names(dynamo: GraphModule, inputs: tuple[object, ...], module: nn.Module) -> dict[int, str]:
    """Place among the graph's inputs -> the name of the parameter, the buffer or the argument."""
    known = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    places = dynamo.graph.find_nodes(op="placeholder")
    found = {}
    for i, given in enumerate(inputs):
        argument = places[i].name.removeprefix("l_").strip("_") if i < len(places) else f"input {i}"
        found[i] = known.get(id(given), argument) if isinstance(given, torch.Tensor) else argument
    return found


def meaning(node: Node, names: Mapping[int, str]) -> str:
    """What a placeholder of an ATen graph stands for; empty for what the forward saved."""
    described = described_as(node.meta.get("desc"), names)
    if described:
        return described
    numbered = re.fullmatch(r"primals_(\d+)", node.name)
    return names.get(int(numbered[1]) - 1, "") if numbered else ""


def described_as(desc: object, names: Mapping[int, str]) -> str:
    """AOTAutograd's own description of an input or result, in the model's words."""
    place = getattr(desc, "idx", None)
    match type(desc).__name__:
        case "PlainAOTInput":
            return names.get(int(place or 0), "")
        case "GradAOTOutput":
            return f"gradient of {described_as(getattr(desc, 'grad_of', None), names)}"
        case "TangentAOTInput":
            return f"gradient of {described_as(getattr(desc, 'output', None), names)}"
        case "PlainAOTOutput":
            return f"result {place}"
    return ""
