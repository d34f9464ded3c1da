"""``FILE.onnx``: its graph as one of torch functions, whose weights can be trained.

Sizes, axes and whatever else follows from the shapes of the inputs is computed while the file is read: the graph that
Dynamo sees holds tensors alone.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from dsc.debug.load.onnx_ops import DTYPES, OPS, Row
from dsc.debug.load.python import from_user
from dsc.debug.source import Model
from dsc.errors import BadInput, BadModel

UNKNOWN = 2
"""The size of a dimension of an input that the file leaves open."""


def load(file: str, given: Sequence[str] = ()) -> Model:
    """The module, on inputs of the sizes that the file names.

    Raises:
        BadModel: the package onnx is missing, or the file is, or is no ONNX, or has an operator that is not in the table.
        BadInput: more or fewer inputs than the graph has.
    """
    if not Path(file).is_file():
        raise BadModel(file, "there is no such file", "check the path")
    try:
        onnx: Any = importlib.import_module("onnx")
    except ImportError as why:
        raise BadModel(file, f"the package onnx is missing ({why})", "install it: pip install onnx") from why
    try:
        proto = onnx.load(file)
    except Exception as why:
        raise BadModel(file, f"it is no ONNX file ({type(why).__name__})", "save the model again") from why
    if not proto.graph.node:
        raise BadModel(file, "it is no ONNX file, or one without operators", "save the model again")
    weights = {t.name for t in proto.graph.initializer}
    wanted = [i for i in proto.graph.input if i.name not in weights]
    args = from_user(given, nn.Identity()) if given else tuple(example(i.type.tensor_type) for i in wanted)
    if len(args) != len(wanted):
        names = ", ".join(i.name for i in wanted)
        raise BadInput(" ".join(given), f"{Path(file).name} takes {len(wanted)} inputs ({names})")
    reader = Reader(file, onnx.numpy_helper, onnx.helper)
    return Model(file, reader.read(proto.graph, [i.name for i in wanted], args), args)


def example(kind: Any) -> torch.Tensor:
    """A tensor of the type of an input: normal, or 0 and 1."""
    shape = [d.dim_value or UNKNOWN for d in kind.shape.dim]
    dtype = DTYPES.get(kind.elem_type, torch.float32)
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(2, shape, generator=generator).to(dtype)


class Reader:
    """Evaluates the graph on the inputs, and writes down what depends on them or on weights."""

    def __init__(self, file: str, numpy: Any, helper: Any) -> None:
        self.file, self.numpy, self.helper = file, numpy, helper
        self.root, self.graph = nn.Module(), Graph()
        self.values: dict[str, Any] = {"": None}
        self.nodes: dict[str, Node] = {}
        """Of values that are not known beforehand."""

    def read(self, graph: Any, inputs: Sequence[str], args: Sequence[object]) -> GraphModule:
        for name, value in zip(inputs, args):
            self.values[name] = value
            self.nodes[name] = self.graph.placeholder(plain_name(name))
        for t in graph.initializer:
            self.weight(t.name, torch.from_numpy(self.numpy.to_array(t).copy()))
        with torch.no_grad():
            for node in graph.node:
                self.take(node)
        self.graph.output(
            tuple(self.nodes[o.name] if o.name in self.nodes else self.values[o.name] for o in graph.output)
        )
        return GraphModule(self.root, self.graph)

    def weight(self, name: str, value: torch.Tensor) -> None:
        """A float with dimensions is a parameter, all else a constant."""
        self.values[name] = value
        if value.is_floating_point() and value.dim():
            self.root.register_parameter(plain_name(name), nn.Parameter(value))
            self.nodes[name] = self.graph.get_attr(plain_name(name))

    def take(self, node: Any) -> None:
        """One operator."""
        attributes = {a.name: self.attribute(a) for a in node.attribute}
        if node.op_type == "Constant":
            self.values[node.output[0]] = torch.as_tensor(next(iter(attributes.values())))
            return
        if node.op_type == "Shape":
            shape = list(self.values[node.input[0]].shape)
            self.values[node.output[0]] = torch.tensor(shape[attributes.get("start", 0) : attributes.get("end")])
            return
        row = OPS.get(node.op_type)
        if row is None or node.domain not in ("", "ai.onnx"):
            raise BadModel(self.file, f"it has the operator {node.op_type}, for which there is no rule", "leave it out")
        if "axes" in attributes and 1 in row.known:  # an input since opset 13 or 18
            attributes["axes"] = list(attributes["axes"])
        if node.op_type == "Split" and len(node.input) < 2 and "split" not in attributes:
            attributes["num_outputs"] = len(node.output)
        if "split" in attributes:
            attributes["sizes"] = attributes.pop("split")
        try:
            self.apply(node, row, attributes)
        except BadModel:
            raise
        except Exception as why:
            problem = (
                f"its operator {node.name or node.op_type} fails: {type(why).__name__}: {str(why).splitlines()[0]}"
            )
            raise BadModel(self.file, problem, "check --input") from why

    def apply(self, node: Any, row: Row, attributes: dict[str, Any]) -> None:
        known = [self.known(name) if i in row.known else self.values[name] for i, name in enumerate(node.input)]
        result = row.function(*known, **attributes)
        results = result if isinstance(result, list) else [result]
        self.values.update(zip(node.output, results))
        if not any(name in self.nodes for name in node.input):
            return
        args = tuple(
            known[i] if i in row.known else self.nodes.get(name, self.constant(name))
            for i, name in enumerate(node.input)
        )
        made = self.graph.call_function(row.function, args, attributes, name=plain_name(node.name or node.output[0]))
        if not isinstance(result, list):
            self.nodes[node.output[0]] = made
            return
        for i, name in enumerate(node.output):
            self.nodes[name] = self.graph.call_function(operator.getitem, (made, i))

    def known(self, name: str) -> Any:
        """A size or a list of them."""
        value = self.values[name]
        return value.tolist() if isinstance(value, torch.Tensor) else value

    def constant(self, name: str) -> Any:
        """A number, or a buffer."""
        value = self.values[name]
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() == 0:
            return value.item()
        if not hasattr(self.root, plain_name(name)):
            self.root.register_buffer(plain_name(name), value)
        return self.graph.get_attr(plain_name(name))

    def attribute(self, a: Any) -> Any:
        value = self.helper.get_attribute_value(a)
        if isinstance(value, bytes):
            return value.decode()
        if hasattr(value, "dims"):
            return torch.from_numpy(self.numpy.to_array(value).copy())
        return list(value) if isinstance(value, (list, tuple)) or hasattr(value, "__len__") else value


def plain_name(name: str) -> str:
    """A name that Python can spell."""
    word = "".join(c if c.isalnum() else "_" for c in name).strip("_")
    return word if word and not word[0].isdigit() else f"v_{word}"
