"""A stage as an ONNX model: every value has its type and shape, and what ONNX has operators for runs in onnxruntime.

A node becomes the ONNX operators that compute the same, named after it; where there is no rule for it, those of its
decomposition in PyTorch; where there is none either, one node of the domain ``dsc.aten``, which viewers show and nothing
runs.  Writes in place give the value that they write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from dsc import __version__, ops, text
from dsc.debug.capture import Region, Session, Stage
from dsc.debug.dump import inputs as meanings
from dsc.torch_shim import FakeTensor, OpOverload, decomposition_table, detect_fake_mode, sym_expr

OPSET, IR_VERSION = 20, 10
DOMAIN = "dsc.aten"
"""Of nodes that stand for a call of ATen with no like in ONNX."""
DEEPEST = 6
"""Decompositions inside decompositions."""
TYPES: Mapping[torch.dtype, int] = {
    torch.float32: TensorProto.FLOAT, torch.float64: TensorProto.DOUBLE, torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16, torch.int64: TensorProto.INT64, torch.int32: TensorProto.INT32,
    torch.int16: TensorProto.INT16, torch.int8: TensorProto.INT8, torch.uint8: TensorProto.UINT8,
    torch.bool: TensorProto.BOOL, torch.complex64: TensorProto.COMPLEX64, torch.complex128: TensorProto.COMPLEX128,
}  # fmt: skip

Value = str | None
"""The name of a value; None where PyTorch gives None."""
Values = Value | list[Value]


class NoRule(Exception):
    """A call that ONNX has no operators for, in these arguments."""


@dataclass
class Writer:
    """Collects the nodes of one ONNX graph."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    infos: list[onnx.ValueInfoProto] = field(default_factory=list)
    values: dict[Node, Values] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    scope: str = ""
    """The node that is being written: what its operators are named after."""

    def fresh(self, name: str) -> str:
        count = self.names[name] = self.names.get(name, -1) + 1
        return f"{name}/{count}" if count else name

    def op(self, kind: str, *args: Value, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """One node: the name of its result, or a list of names."""
        made = [self.fresh(f"{self.scope}/{kind}") for _ in range(outputs)]
        name = self.fresh(f"{self.scope}:{kind}")
        given = [a or "" for a in args]
        self.nodes.append(helper.make_node(kind, given, made, name=name, domain=domain, **attributes))
        return made[0] if outputs == 1 else made

    def constant(self, value: object, dtype: torch.dtype) -> str:
        """A scalar or a list as an initializer."""
        tensor = torch.tensor(value, dtype=dtype)
        name = self.fresh(f"{self.scope}/constant")
        if dtype is torch.bfloat16:
            raw = tensor.view(torch.int16).numpy().tobytes()
            proto = onnx.TensorProto(name=name, data_type=TYPES[dtype], dims=tensor.shape, raw_data=raw)
        else:
            proto = numpy_helper.from_array(tensor.numpy(), name)
        self.initializers.append(proto)
        return name

    def ints(self, *values: int) -> str:
        return self.constant(list(values), torch.int64)

    def value(self, a: object) -> str:
        """The name of an argument that is a tensor."""
        found = self.values.get(a) if isinstance(a, Node) else None
        if not isinstance(found, str):
            raise NoRule(f"{a} is no tensor")
        return found

    def cast(self, name: str, to: torch.dtype, of: torch.dtype | None = None) -> str:
        return name if of is to else str(self.op("Cast", name, to=TYPES[to]))

    def like(self, a: object, dtype: torch.dtype) -> str:
        """An operand, a tensor or a number, in that dtype."""
        if isinstance(a, Node) and isinstance(ops.value(a), torch.Tensor):
            return self.cast(self.value(a), dtype, ops.tensor(a).dtype)
        if isinstance(a, bool | int | float):
            return self.constant(a, dtype)
        raise NoRule(f"{a} is no number")


def model_bytes(session: Session, region: Region, stage: Stage) -> bytes:
    """The model file of one stage."""
    return bytes(model(session, region, stage).SerializeToString())


def model(session: Session, region: Region, stage: Stage) -> onnx.ModelProto:
    """One stage.  Its inputs and outputs are those of the graph, under the names of the nodes."""
    w = Writer()
    gm = stage.gm
    meaning = meanings.names(region.dynamo, region.inputs, session.model.module)
    given = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for n in given:
        w.values[n] = w.fresh(n.name)
    write(w, gm, DEEPEST)
    results = gm.graph.output_node().args[0]
    outputs = []
    for i, r in enumerate(results if isinstance(results, (list, tuple)) else [results]):
        if isinstance(r, Node) and isinstance(w.values.get(r), str) and isinstance(ops.value(r), torch.Tensor):
            w.scope = f"result_{i}"
            name = f"result_{i}"
            w.nodes.append(helper.make_node("Identity", [w.value(r)], [name], name=f"{name}:Identity"))
            outputs.append(info(name, ops.value(r)))
    starts = [info(str(w.values[n]), ops.value(n), meanings.meaning(n, meaning)) for n in given]
    title = f"{session.model.name} {stage.graph} after {stage.name}"
    graph = helper.make_graph(w.nodes, title, starts, outputs, w.initializers, value_info=w.infos)
    made = helper.make_model(
        graph,
        producer_name="dsc",
        producer_version=__version__,
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)],
    )
    helper.set_model_props(made, {"target": session.target.name, "graph": stage.graph, "after": stage.name})
    return made


def opaque(made: onnx.ModelProto) -> list[str]:
    """Calls in the model that nothing can run, by the name of their operator."""
    return sorted({n.op_type for n in made.graph.node if n.domain == DOMAIN})


def write(w: Writer, gm: GraphModule, depth: int) -> None:
    """All nodes of a graph whose inputs have values; each then has its own."""
    outer = w.scope
    for n in gm.graph.nodes:
        if n.op in ("placeholder", "output"):
            continue
        w.scope = f"{outer}/{n.name}" if outer else n.name
        made = write_node(w, gm, n, depth)
        w.values[n] = made if outer else named(w, n, made)
    w.scope = outer


def named(w: Writer, n: Node, made: Values) -> Values:
    """A node's results under the node's own name, with their types."""
    if isinstance(made, list):
        return made
    if made is None or not isinstance(ops.value(n), torch.Tensor):
        return made
    name = w.fresh(n.name)
    last = w.nodes[-1] if w.nodes else None
    if last is not None and list(last.output) == [made] and ops.info(n).kind != "item":
        last.output[0] = name
    else:
        w.nodes.append(helper.make_node("Identity", [made], [name], name=f"{name}:Identity"))
    w.infos.append(info(name, ops.value(n)))
    return name


def write_node(w: Writer, gm: GraphModule, n: Node, depth: int) -> Values:
    """By rule, by decomposition, or as an opaque node."""
    from dsc.debug.dump.onnx_table import RULES

    if n.op == "get_attr":
        return attribute(w, gm, n)
    if ops.name_of(n) == "getitem":
        source, place = n.args
        found = w.values.get(source) if isinstance(source, Node) else None
        return found[place] if isinstance(found, list) and isinstance(place, int) else None
    if ops.name_of(n) in RULES:
        mark = len(w.nodes), len(w.initializers)
        try:
            return RULES[ops.name_of(n)](w, n)
        except NoRule:
            del w.nodes[mark[0] :], w.initializers[mark[1] :]
    inner = decomposed(n) if depth else None
    return through(w, n, inner, depth - 1) if inner is not None else left_opaque(w, n)


def attribute(w: Writer, gm: GraphModule, n: Node) -> Value:
    found: Any = gm
    for part in str(n.target).split("."):
        found = getattr(found, part)
    if not isinstance(found, torch.Tensor) or isinstance(found, FakeTensor):
        return None
    name = w.fresh(f"{n.name}/data")
    data = found.detach().cpu().contiguous()
    w.initializers.append(numpy_helper.from_array(data.numpy(), name))
    return name


def decomposed(n: Node) -> GraphModule | None:
    """The call as a graph of simpler ones, by PyTorch's own table; its inputs are the tensor operands in order."""
    if not isinstance(n.target, OpOverload) or n.target.namespace != "aten":
        return None
    rule = decomposition_table.get(n.target)
    operands = n.all_input_nodes
    values = [ops.value(a) for a in operands]
    if rule is None or not all(isinstance(v, torch.Tensor) for v in values):
        return None
    mode = detect_fake_mode(values)
    if mode is None:
        return None

    def call(*given: Any) -> Any:
        at = dict(zip(operands, given))
        args, kwargs = torch.fx.node.map_arg((n.args, n.kwargs), at.__getitem__)
        out = rule(*args, **kwargs)
        return [out] if isinstance(out, torch.Tensor) else list(out)

    try:
        with mode, torch.no_grad():
            return make_fx(call)(*values)
    except Exception:  # PyTorch's own decompositions fail in many ways; the node then stays opaque
        return None


def through(w: Writer, n: Node, inner: GraphModule, depth: int) -> Values:
    """The decomposition in place of the call."""
    places = inner.graph.find_nodes(op="placeholder")
    for place, operand in zip(places, n.all_input_nodes):
        w.values[place] = w.values[operand]
    write(w, inner, depth)
    results = inner.graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    made = [w.values.get(r) if isinstance(r, Node) else None for r in results]
    flat = [m for m in made if not isinstance(m, list)]
    return flat[0] if isinstance(ops.value(n), torch.Tensor) else flat


def left_opaque(w: Writer, n: Node) -> Values:
    """One node of our own domain, with its text as an attribute."""
    value = ops.value(n)
    several = list(value) if isinstance(value, (list, tuple)) else [value]
    given = [v for a in n.all_input_nodes for v in _flat(w.values.get(a)) if v]
    kind = ops.name_of(n).replace("::", ".")
    made = w.op(kind, *given, outputs=len(several), domain=DOMAIN, text=text.line(n))
    results: list[Value] = made if isinstance(made, list) else [made]
    for name, v in zip(results, several):
        if isinstance(v, torch.Tensor) and len(several) > 1:
            w.infos.append(info(str(name), v))
    return results if isinstance(value, (list, tuple)) else results[0]


def _flat(value: Values) -> Iterator[Value]:
    yield from value if isinstance(value, list) else [value]


def info(name: str, value: object, doc: str = "") -> onnx.ValueInfoProto:
    """Type and shape; sizes that are symbols by their names.  A number is a scalar of 64 bits."""
    if isinstance(value, torch.Tensor):
        made = helper.make_tensor_value_info(name, TYPES.get(value.dtype, TensorProto.UNDEFINED), dims(value.shape))
    else:
        kind = TensorProto.DOUBLE if isinstance(value, float | torch.SymFloat) else TensorProto.INT64
        made = helper.make_tensor_value_info(name, kind, [])
    made.doc_string = doc
    return made


def dims(shape: Sequence[int | torch.SymInt]) -> list[int | str]:
    found = [sym_expr(s) for s in shape]
    return [s if isinstance(s, int) else str(s) for s in found]


def feeds(made: onnx.ModelProto, values: Sequence[torch.Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs for onnxruntime, in the order of the graph's."""
    return {i.name: v.detach().cpu().numpy() for i, v in zip(made.graph.input, values)}
