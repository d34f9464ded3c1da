"""ATen graphs as JSON and back: nodes, fake values with their symbolic sizes, notes, lines of the user's program.

Reading runs nothing that the file says: operators are looked up by name, size expressions are parsed, not evaluated.
What JSON has no way to say (an object of a custom class among the arguments) comes back as its printed name.

    {"nodes": [{"name", "op", "target", "args", "kwargs", "val", "notes", "stack", ...}, ...],
     "symbols": {"s0": 8},                the sizes that are symbols, with what they were while tracing, or null
     "attributes": {"mask": VALUE},       tensors of the graph, with their data where they are small
     "graphs": {"body": GRAPH}}           graphs that higher-order calls take

An argument is itself if JSON has it, else ``{"kind": ...}``: see ``encode_arg``.
"""

from __future__ import annotations

import ast
import base64
import json
import math
import operator
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from dsc import text
from dsc.errors import BadGraphFile
from dsc.notes import KEY, Notes, decided
from dsc.torch_shim import FakeTensor, FakeTensorMode, OpOverload, known_size, make_shape_env, sym_expr, sympy_class

SMALL = 4096
"""Elements of a tensor attribute above which only its type is kept."""

MODULE_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
"""Under which the modules that a node lies in stand in its meta: of itself, and of the forward of a gradient."""

MODULES: Mapping[str, Any] = {"operator": operator, "math": math, "torch": torch}


@dataclass(frozen=True)
class Opaque:
    """What could not be written, by the name under which ``dsc.text`` prints it."""

    __name__: str

    def __call__(self, *_: object, **__: object) -> object:
        raise TypeError(f"{self.__name__} was not saved and cannot be called")


def pack(gm: GraphModule) -> str:
    """The graph as one short string: base64 of zlib of its JSON."""
    return base64.b64encode(zlib.compress(json.dumps(encode(gm)).encode())).decode()


def unpack(packed: str) -> GraphModule:
    """What ``pack`` packed.

    Raises:
        BadGraphFile: the string is something else.
    """
    try:
        data = json.loads(zlib.decompress(base64.b64decode(packed)))
    except (ValueError, zlib.error) as why:
        raise BadGraphFile(f"{type(why).__name__}: {why}") from why
    return decode(data)


# --- graph to JSON


def encode(gm: GraphModule) -> dict[str, Any]:
    symbols: dict[str, int | None] = {}
    nodes = [encode_node(n, symbols) for n in gm.graph.nodes]
    attributes: dict[str, Any] = {}
    graphs: dict[str, Any] = {}
    for n in gm.graph.nodes:
        if n.op != "get_attr":
            continue
        value = operator.attrgetter(n.target)(gm)
        if isinstance(value, GraphModule):
            graphs[n.target] = encode(value)
        elif isinstance(value, torch.Tensor):
            attributes[n.target] = encode_tensor(value, symbols) | data_of(value)
    return {"nodes": nodes, "symbols": symbols, "attributes": attributes, "graphs": graphs}


def encode_node(node: Node, symbols: dict[str, int | None]) -> dict[str, Any]:
    given: dict[str, Any] = {"name": node.name, "op": node.op, "target": encode_target(node)}
    if node.args:
        given["args"] = [encode_arg(a, symbols) for a in node.args]
    if node.kwargs:
        given["kwargs"] = {k: encode_arg(v, symbols) for k, v in node.kwargs.items()}
    if "val" in node.meta:
        given["val"] = encode_value(node.meta["val"], symbols)
    if facts := decided(node):
        given["notes"] = {k: encode_note(v) for k, v in facts.items()}
    if stack := node.meta.get("stack_trace"):
        given["stack"] = stack
    for key in MODULE_STACKS:
        if modules := node.meta.get(key):
            given[key] = [[k, path, getattr(kind, "__name__", str(kind))] for k, (path, kind) in modules.items()]
    return given


def encode_note(value: object) -> object:
    if is_dataclass(value) or not isinstance(value, (str, int, float, bool)):
        return {"opaque": str(value)}
    return value


def encode_target(node: Node) -> str:
    """``aten.add.Tensor``, ``operator:getitem``, ``higher_order:cond``; ``?:name`` for what cannot be looked up."""
    target = node.target
    if isinstance(target, (str, OpOverload)):
        return str(target)
    name = str(getattr(target, "__name__", type(target).__name__))
    if getattr(torch.ops.higher_order, name, None) is target:
        return f"higher_order:{name}"
    home = next((m for m, module in MODULES.items() if getattr(module, name, None) is target), "?")
    return f"{home}:{name}"


def encode_arg(a: Any, symbols: dict[str, int | None]) -> Any:
    """One argument; ``symbols`` learns of the sizes in it."""
    match a:
        case None | bool() | int() | str():
            return a
        case float():
            return a if math.isfinite(a) else {"float": repr(a)}
        case complex():
            return {"complex": [a.real, a.imag]}
        case Node():
            return {"node": a.name}
        case list():
            return [encode_arg(x, symbols) for x in a]
        case tuple():
            return {"tuple": [encode_arg(x, symbols) for x in a]}
        case dict():
            return {"dict": [[str(k), encode_arg(v, symbols)] for k, v in a.items()]}
        case slice():
            return {"slice": [encode_arg(x, symbols) for x in (a.start, a.stop, a.step)]}
        case torch.dtype():
            return {"dtype": str(a).removeprefix("torch.")}
        case torch.layout():
            return {"layout": str(a).removeprefix("torch.")}
        case torch.memory_format():
            return {"memory_format": str(a).removeprefix("torch.")}
        case torch.device():
            return {"device": str(a)}
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return encode_sym(a, symbols)
        case _:
            return {"opaque": text.arg(a)}


def encode_value(val: Any, symbols: dict[str, int | None]) -> Any:
    """``meta["val"]``: tensors by type, the rest as arguments."""
    match val:
        case torch.Tensor():
            return {"tensor": encode_tensor(val, symbols)}
        case list():
            return [encode_value(v, symbols) for v in val]
        case tuple():
            return {"tuple": [encode_value(v, symbols) for v in val]}
        case _:
            return encode_arg(val, symbols)


def encode_tensor(val: torch.Tensor, symbols: dict[str, int | None]) -> dict[str, Any]:
    strided = val.layout is torch.strided
    return {
        "dtype": str(val.dtype).removeprefix("torch."),
        "device": str(val.device),
        "shape": [encode_arg(s, symbols) for s in val.shape],
        "stride": [encode_arg(s, symbols) for s in val.stride()] if strided else None,
    }


def data_of(value: torch.Tensor) -> dict[str, Any]:
    """The numbers of a small constant, which JSON keeps exactly; ``nan`` and ``inf`` are written as JSON's readers do."""
    plain = value.layout is torch.strided and value.device.type == "cpu" and not value.is_complex()
    if not plain or type(value) not in (torch.Tensor, torch.nn.Parameter) or value.numel() > SMALL:
        return {}
    wide = value.detach().double() if value.is_floating_point() else value
    return {"data": wide.tolist()}


def encode_sym(a: torch.SymInt | torch.SymFloat | torch.SymBool, symbols: dict[str, int | None]) -> Any:
    expr = sym_expr(a) if isinstance(a, torch.SymInt) else a.node.expr
    if isinstance(expr, int):
        return expr
    for s in expr.free_symbols:
        symbols.setdefault(str(s), known_size(a.node.shape_env, s))
    kind = {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool"}[type(a)]
    return {"sym": sympy.srepr(expr), "type": kind}


# --- JSON to graph


def decode(data: Mapping[str, Any]) -> GraphModule:
    """A graph with fake values of its own.

    Raises:
        BadGraphFile: the data is no graph, or one of operators that this torch does not have.
    """
    try:
        return Reader(data).read()
    except BadGraphFile:
        raise
    except Exception as why:  # data from outside may be wrong in any way
        raise BadGraphFile(f"{type(why).__name__}: {why}") from why


class Reader:
    """Builds one graph."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.symbols: Mapping[str, int | None] = data.get("symbols", {})
        self.shape_env = make_shape_env(known_symbols(data, self.symbols))
        self.mode = FakeTensorMode(shape_env=self.shape_env, allow_non_fake_inputs=True)
        self.nodes: dict[str, Node] = {}

    def read(self) -> GraphModule:
        root = torch.nn.Module()
        for name, value in self.data.get("attributes", {}).items():
            place(root, name, self.attribute(value))
        for name, graph in self.data.get("graphs", {}).items():
            place(root, name, decode(graph))
        graph = Graph()
        for given in self.data["nodes"]:
            self.nodes[given["name"]] = self.node(graph, given)
        return GraphModule(root, graph)

    def node(self, graph: Graph, given: Mapping[str, Any]) -> Node:
        target = decode_target(given["target"]) if given["op"] == "call_function" else given["target"]
        args = tuple(self.arg(a) for a in given.get("args", ()))
        kwargs = {k: self.arg(v) for k, v in given.get("kwargs", {}).items()}
        node = graph.create_node(given["op"], target, args, kwargs, given["name"])
        node.name = given["name"]
        if "val" in given and (val := self.value(given["val"])) is not Opaque:
            node.meta["val"] = val
        if facts := given.get("notes"):
            known = {f.name for f in fields(Notes)}
            node.meta[KEY] = Notes(**{k: v for k, v in facts.items() if k in known and not isinstance(v, dict)})
        if stack := given.get("stack"):
            node.meta["stack_trace"] = stack
        for key in MODULE_STACKS:
            if key in given:
                node.meta[key] = {k: (path, kind) for k, path, kind in given[key]}
        return node

    def arg(self, a: Any) -> Any:
        if isinstance(a, list):
            return [self.arg(x) for x in a]
        if not isinstance(a, dict):
            return a
        if "sym" in a:
            return self.sym(a["sym"], a["type"])
        kind, value = next(iter(a.items()))
        match kind:
            case "node":
                return self.nodes[value]
            case "tuple":
                return tuple(self.arg(x) for x in value)
            case "dict":
                return {k: self.arg(v) for k, v in value}
            case "slice":
                return slice(*(self.arg(x) for x in value))
            case "float":
                return float(value)
            case "complex":
                return complex(*value)
            case "device":
                return torch.device(value)
            case "dtype" | "layout" | "memory_format":
                return constant(value, getattr(torch, kind))
            case "opaque":
                return Opaque(value)
        raise BadGraphFile(f"no argument is of the kind {kind!r}")

    def value(self, given: Any) -> Any:
        match given:
            case {"tensor": t}:
                return self.tensor(t)
            case {"tuple": values}:
                return tuple(self.value(v) for v in values)
            case list():
                return [self.value(v) for v in given]
            case {"opaque": _}:
                return Opaque
        return self.arg(given)

    def tensor(self, t: Mapping[str, Any]) -> Any:
        shape = [self.arg(s) for s in t["shape"]]
        dtype = constant(t["dtype"], torch.dtype)
        if t["stride"] is None:
            meta = torch.empty(shape, dtype=dtype, device="meta")
        else:
            meta = torch.empty_strided(shape, [self.arg(s) for s in t["stride"]], dtype=dtype, device="meta")
        return FakeTensor(self.mode, meta, torch.device(t["device"]))  # ten times faster than to call in the mode

    def attribute(self, t: Mapping[str, Any]) -> torch.Tensor:
        if "data" not in t:
            return self.tensor(t)  # type: ignore[no-any-return]
        dtype = constant(t["dtype"], torch.dtype)
        out = torch.empty_strided(t["shape"], t["stride"], dtype=dtype)
        wide = torch.float64 if dtype.is_floating_point else dtype
        return out.copy_(torch.tensor(t["data"], dtype=wide).reshape(t["shape"]))

    def sym(self, expr: str, kind: str) -> Any:
        parsed = parse_expr(expr)
        env = self.shape_env
        if kind == "int":
            return env.create_symintnode(parsed, hint=self.hint(parsed))
        if kind == "float":
            return env.create_symfloatnode(parsed, hint=None)
        return env.create_symboolnode(parsed)

    def hint(self, expr: sympy.Expr) -> int | None:
        known = {s: self.symbols.get(str(s)) for s in expr.free_symbols}
        return None if None in known.values() else int(expr.subs(known))


def known_symbols(data: Mapping[str, Any], values: Mapping[str, int | None]) -> dict[sympy.Symbol, int | None]:
    """The symbols of all expressions in the data, with their values."""
    found: dict[sympy.Symbol, int | None] = {}
    for expr in expressions(data.get("nodes", ())):
        found |= {s: values.get(str(s)) for s in parse_expr(expr).free_symbols}
    return found


def expressions(data: Any) -> set[str]:
    if isinstance(data, dict):
        here = {data["sym"]} if "sym" in data else set()
        return here.union(*map(expressions, data.values()))
    return set().union(*map(expressions, data)) if isinstance(data, (list, tuple)) else set()


def place(root: torch.nn.Module, path: str, value: torch.Tensor | GraphModule) -> None:
    *folders, name = path.split(".")
    for folder in folders:
        if not hasattr(root, folder):
            root.add_module(folder, torch.nn.Module())
        root = getattr(root, folder)
    setattr(root, name, value)


def constant(name: str, kind: type) -> Any:
    """``float32`` -> ``torch.float32``."""
    found = getattr(torch, name, None)
    if not isinstance(found, kind):
        raise BadGraphFile(f"torch has no {kind.__name__} {name!r}")
    return found


def decode_target(name: str) -> Callable[..., Any]:
    """The function that ``encode_target`` named."""
    home, colon, function = name.partition(":")
    if not colon:
        namespace, _, rest = name.partition(".")
        packet, _, overload = rest.partition(".")
        found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
        if not isinstance(found, OpOverload):
            raise BadGraphFile(f"this torch has no operator {name!r}; import the library that defines it first")
        return found
    if home == "higher_order":
        return getattr(torch.ops.higher_order, function)  # type: ignore[no-any-return]
    if home in ("operator", "math") or (home == "torch" and function.startswith("sym_")):
        return getattr(MODULES[home], function)  # type: ignore[no-any-return]
    return Opaque(function)


def parse_expr(source: str) -> sympy.Expr:
    """``Add(Symbol('s0', integer=True), Integer(1))``, as ``sympy.srepr`` writes it.  Nothing is evaluated."""
    return built(ast.parse(source, mode="eval").body)


def built(tree: ast.expr) -> Any:
    match tree:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if (cls := sympy_class(name)) is not None:
            return cls(*map(built, args), **{k.arg: built(k.value) for k in keywords if k.arg})
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)):
            return -value  # type: ignore[operator]  # a number, or this raises
        case ast.Name(id=name) if name in ("true", "false"):
            return getattr(sympy, name)
    raise BadGraphFile(f"{ast.unparse(tree)!r} is no size")
