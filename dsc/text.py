"""The canonical text of a graph: what golden tests, the debug tools and errors print.  Same graph, same text.

    x: f32[8,16]                                      an input
    sum_1: f32[8] = sum.dim_IntList(x, [1])           an op, without ``aten.``, and with its overload if not ``default``
    t: f32[16,8]{1,16} = t(x)  {group=k0}             strides if not contiguous; what passes decided
    topk: (f32[8,2], i64[8,2]) = topk(x, 2)           several results
    s: sym(s0)                                        a size
    return (t, sum_1)

A device is shown if it is not the CPU, as in ``f32[8]@cuda``, and without its number, so that every rank prints the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from dsc import ops
from dsc.notes import decided
from dsc.torch_shim import Max, OpOverload, sym_expr

SHORT: dict[torch.dtype, str] = {
    **ops.SHORT,
    torch.uint16: "u16", torch.uint32: "u32", torch.uint64: "u64",
    torch.complex32: "c32", torch.complex64: "c64", torch.complex128: "c128",
    torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2",
    torch.float8_e4m3fnuz: "f8e4m3fnuz", torch.float8_e5m2fnuz: "f8e5m2fnuz",
}  # fmt: skip


def show(graph: Graph) -> str:
    """A line per node."""
    return "".join(line(node) + "\n" for node in graph.nodes)


def line(node: Node) -> str:
    """One node: name, type, what it computes, what was decided about it."""
    match node.op:
        case "output":
            text = f"return {arg(node.args[0])}"
        case "placeholder":
            text = f"{node.name}: {type_of(node)}"
        case "get_attr":
            text = f"{node.name}: {type_of(node)} = self.{node.target}"
        case _:
            given = [arg(a) for a in node.args] + [f"{k}={arg(v)}" for k, v in node.kwargs.items()]
            text = f"{node.name}: {type_of(node)} = {op_name(node)}({', '.join(given)})"
    facts = " ".join(f"{k}={v}" for k, v in decided(node).items())
    return f"{text}  {{{facts}}}" if facts else text


def op_name(node: Node) -> str:
    """``aten.add.Tensor`` -> ``add.Tensor``, ``aten.relu.default`` -> ``relu``; other namespaces stay."""
    target = node.target
    if isinstance(target, OpOverload):
        return str(target).removeprefix("aten.").removesuffix(".default")
    if node.op == "call_method":
        return f".{target}"
    return target if isinstance(target, str) else str(getattr(target, "__name__", type(target).__name__))


UNKNOWN = "?"
"""The type of what no pass knows."""


def type_of(node: Node) -> str:
    """The type of what ``node`` gives; ``?`` if no pass knows."""
    return type_text(node.meta["val"]) if "val" in node.meta else UNKNOWN


def type_text(val: object) -> str:
    """``f32[8,16]``, ``f32[4,8]{1,4}@cuda``, ``(f32[8], sym(s0), None)``."""
    match val:
        case torch.Tensor():
            return _tensor_text(val)
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return f"sym({_sym_text(val)})"
        case list() | tuple():
            return f"({', '.join(map(type_text, val))})"
        case None:
            return "None"
        case _:
            return type(val).__name__


def _tensor_text(val: torch.Tensor) -> str:
    dims = ",".join(map(_sym_text, val.shape))
    text = f"{SHORT.get(val.dtype, _plain(val.dtype))}[{dims}]"
    if val.layout is not torch.strided:
        text += f"{{{_plain(val.layout)}}}"
    elif not is_contiguous(val.shape, val.stride()):
        text += f"{{{','.join(map(_sym_text, val.stride()))}}}"
    return text if val.device.type == "cpu" else f"{text}@{val.device.type}"


def is_contiguous(shape: Sequence[int | torch.SymInt], stride: Sequence[int | torch.SymInt]) -> bool:
    """Whether the strides are exactly those of a fresh row-major tensor.  Adds no guard, unlike ``is_contiguous()``."""
    step: Any = 1
    for size, got in zip(reversed(shape), reversed(stride)):
        if got is not step and _at_least_one(sym_expr(got)) != step:
            return False
        size = sym_expr(size)
        step = step * (max(size, 1) if isinstance(size, int) else _at_least_one(size))
    return True


def _at_least_one(e: Any) -> Any:
    """``Max(1, u0)`` -> ``u0``: a stride counts an empty dimension as one."""
    if isinstance(e, int) or not e.has(Max):
        return e
    return e.replace(Max, lambda *a: sympy.Mul(*(x for x in a if x != 1)))


def arg(a: object) -> str:
    """One argument, short and the same on every run."""
    match a:
        case Node():
            return a.name
        case list():
            return f"[{', '.join(map(arg, a))}]"
        case tuple():
            return f"({', '.join(map(arg, a))}{',' if len(a) == 1 else ''})"
        case dict():
            return f"{{{', '.join(f'{k}: {arg(v)}' for k, v in a.items())}}}"
        case slice():
            return f"{arg(a.start)}:{arg(a.stop)}:{arg(a.step)}"
        case torch.dtype():
            return SHORT.get(a, _plain(a))
        case torch.device():
            return a.type
        case torch.layout() | torch.memory_format():
            return _plain(a)
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return _sym_text(a)
        case torch.Tensor():
            return type_text(a)
        case None | bool() | int() | float() | complex() | str():
            return repr(a)
        case _:
            return str(getattr(a, "__name__", type(a).__name__))  # repr would print an address


def _sym_text(s: int | torch.SymInt | torch.SymFloat | torch.SymBool) -> str:
    e = s.node.expr if isinstance(s, torch.SymFloat | torch.SymBool) else sym_expr(s)
    return str(e).replace(" ", "")


def _plain(name: object) -> str:
    return str(name).removeprefix("torch.")
