"""What a node, a fused group or a graph costs on a target: operations, bytes, and seconds by a roofline.

A launch takes as long as the slower of its arithmetic and its traffic, at the share of the target's peaks that good
kernels reach, and no less than it takes to launch: Williams, Waterman and Patterson, "Roofline", CACM 2009.
Sizes that are symbols count as their hints.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import GraphModule, Node

from dsc import keep, ops
from dsc.notes import notes
from dsc.target import Target
from dsc.torch_shim import OpOverload, optimization_hint

Unit = Literal["matmul", "attention", "convolution", "vector"]

EFFICIENCY: Mapping[Unit, float] = {"matmul": 0.65, "attention": 0.45, "convolution": 0.5, "vector": 0.5}
"""Share of the peak rate that a good kernel reaches: cuBLAS, flash attention and cuDNN on layers of common models."""
BANDWIDTH_EFFICIENCY = 0.85
"""Share of the memory bandwidth that a streaming kernel reaches."""
LAUNCH_SECONDS = {"cuda": 3e-6, "cpu": 0.0}
"""Of one kernel, when the host runs ahead of the device; a call costs a CPU nothing worth counting."""

RATES: Mapping[torch.dtype, tuple[str, ...]] = {
    torch.float64: ("fp64",),
    torch.float32: ("fp32",),
    torch.bfloat16: ("bf16", "fp32"),
    torch.float16: ("fp16", "fp32"),
    torch.int8: ("int8", "fp32"),
    torch.float8_e4m3fn: ("fp8", "bf16", "fp32"),
    torch.float8_e5m2: ("fp8", "bf16", "fp32"),
}
"""Dtype of the operands -> rows of ``Target.peak``, the first that the target has."""

_PRODUCTS = frozenset("mm addmm bmm baddbmm linear matmul _scaled_mm _grouped_mm _scaled_grouped_mm grouped_mm".split())
_COPIES = frozenset(f"dsc.{name}.default" for name in ("offload", "offloaded", "fetch", "fetched"))
ROWS_FIRST = ("_efficient_attention", "_flash_attention")
"""Attention whose operands are [B, T, H, D]; others' are [B, H, T, D]."""
_GATHERS = frozenset("embedding index_select gather index".split())


@dataclass(frozen=True, slots=True)
class Cost:
    flops: float
    bytes: int
    seconds: float


def unit(node: Node) -> Unit:
    """The hardware that does the node's arithmetic, as far as rates differ."""
    name = _packet(node)
    if name in _PRODUCTS:
        return "matmul"
    if name in ("convolution", "convolution_backward"):
        return "convolution"
    attends = "attention" in name or "varlen_attn" in name or name in ("sdpa", "sdpa_backward")
    return "attention" if attends else "vector"


def flops(node: Node) -> float:
    """Arithmetic operations, a multiplication and an addition counted as two.

    1. Products, convolutions and attention: exact; causal attention is half of a full one, its backward 2.5 forwards.
    2. Reductions and rowwise operators: one an element that they read.  All else: one an element of the result.
    3. Views, items, sizes and fills: none; masks that are drawn: what Philox takes.
    """
    info = ops.info(node)
    if _packet(node) == "keep" and node.op == "call_function":
        return keep.OPERATIONS * _numel(_results(node)[0])
    if node.op != "call_function" or info.kind in ("view", "item", "create") or not _results(node):
        return 0.0
    match unit(node):
        case "matmul":
            left = ops.tensor(ops.operand(node, 1 if _packet(node) in ("addmm", "baddbmm") else 0))
            each = 2.0 * _numel(_results(node)[0]) * _hint(left.shape[-1])
            if "grouped" in _packet(node) and left.dim() == ops.tensor(ops.operand(node, 1)).dim() == 2:
                return each / max(_hint(_results(node)[0].shape[0]), 1)  # a group has its part of the contraction
            return each
        case "convolution":
            return _convolution_flops(node)
        case "attention":
            return _attention_flops(node)
    read = max((_numel(ops.tensor(a)) for a in ops.tensor_operands(node)), default=0)
    made = max(map(_numel, _results(node)))
    return float(max(read, made) if info.kind in ("reduction", "rowwise") else made)


def bytes_moved(node: Node) -> int:
    """Bytes read and written: each operand once, of a table only the rows looked up; each result that has a reader."""
    if node.op != "call_function" or _moves_nothing(node):
        return 0
    if _packet(node) == "embedding_add":  # in place: the rest of the table is not touched
        table, rows, index = (stored_bytes(ops.tensor(a)) for a in ops.tensor_operands(node))
        return rows + index + 2 * min(table, rows)
    read = sum(touched(node, a) for a in ops.tensor_operands(node))
    written = sum(stored_bytes(ops.tensor(n)) for n in made(node))
    return read + written + sum(stored_bytes(ops.tensor(n)) for n in ops.mutated(node))


def seconds(node: Node, target: Target) -> float:
    """Of one launch that computes the node alone; views, items and sizes take none."""
    if node.op != "call_function" or _moves_nothing(node):
        return 0.0
    return roofline({node: flops(node)}, bytes_moved(node), target)


def seconds_of_group(nodes: Sequence[Node], target: Target) -> float:
    """Of one launch that computes all nodes and keeps in registers what only they read."""
    return roofline({n: flops(n) for n in nodes}, bytes_of_group(nodes), target)


def bytes_of_group(nodes: Sequence[Node]) -> int:
    """Inputs once, results that something outside reads once."""
    inside = set(nodes)
    inputs: dict[Node, int] = {}
    written = 0
    for n in nodes:
        targets = ops.mutated(n)
        written += sum(stored_bytes(ops.tensor(w)) for w in targets)
        for a in ops.tensor_operands(n):
            if a in targets:
                continue
            source = a
            while (
                source not in inside and source.op == "call_function" and (ops.is_view(source) or ops.is_split(source))
            ):
                source = ops.operand(source, 0)
            if source not in inside:
                inputs[source] = max(inputs.get(source, 0), touched(n, a))
        if isinstance(ops.value(n), torch.Tensor) and read_outside(n, inside):
            written += stored_bytes(ops.tensor(n))
    return sum(inputs.values()) + written


def graph_cost(gm: GraphModule, target: Target) -> Cost:
    """Of a whole graph, with the groups that ``fuse`` noted on its nodes as one launch each."""
    groups: dict[str, list[Node]] = {}
    total_flops, total_bytes, total = 0.0, 0, 0.0
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        total_flops += flops(node)
        group = notes(node).group
        if group is not None:
            groups.setdefault(group, []).append(node)
            continue
        total_bytes += bytes_moved(node)
        total += seconds(node, target)
    for nodes in groups.values():
        total_bytes += bytes_of_group(nodes)
        total += seconds_of_group(nodes, target)
    return Cost(total_flops, total_bytes, total)


def roofline(work: Mapping[Node, float], nbytes: float, target: Target) -> float:
    """Seconds of one launch that does ``work`` (operations by node) and moves ``nbytes``."""
    arithmetic = sum(f / rate(n, target) for n, f in work.items() if f)
    return max(arithmetic, nbytes / (target.bandwidth * BANDWIDTH_EFFICIENCY)) + LAUNCH_SECONDS[target.kind]


def rate(node: Node, target: Target) -> float:
    """Operations per second that a good kernel reaches; convolutions of fp32 use tf32 where there is any, as torch does."""
    kind = unit(node)
    dtypes = [ops.tensor(a).dtype for a in ops.tensor_operands(node)] or [t.dtype for t in _results(node)]
    names = RATES.get(dtypes[0] if dtypes else torch.float32, ("fp32",))
    if kind == "vector":
        names = ("fp64",) if names == ("fp64",) else ("fp32",)
    if kind == "convolution" and names == ("fp32",):
        names = ("tf32", "fp32")
    if _packet(node) == "keep" and target.capability is not None and target.capability >= (9, 0):
        return target.peak["fp32"] / 2 * EFFICIENCY[kind]  # integers gained no lanes there
    peak = next((target.peak[n] for n in names if n in target.peak), target.peak["fp32"])
    return peak * EFFICIENCY[kind]


def stored_bytes(t: torch.Tensor) -> int:
    """Bytes that a tensor's elements occupy: a broadcast dimension counts once."""
    sizes = [_hint(n) for n, s in zip(t.shape, t.stride()) if not (isinstance(s, int) and s == 0)]
    return math.prod(sizes) * t.element_size()


def made(node: Node) -> list[Node]:
    """The nodes that stand for the results of a call: itself, or those of its items that are used."""
    if isinstance(ops.value(node), torch.Tensor):
        return [] if ops.mutated(node) and not _is_fresh(node) else [node]
    items = [u for u in node.users if ops.info(u).kind == "item" and isinstance(ops.value(u), torch.Tensor)]
    return [u for u in items if u.users]


def read_outside(node: Node, inside: set[Node]) -> bool:
    """Whether anything else than the nodes ``inside`` reads a value, perhaps through views."""
    for user in node.users:
        if user in inside:
            continue
        if not (ops.is_view(user) or ops.is_split(user)) or read_outside(user, inside):
            return True
    return False


def _moves_nothing(node: Node) -> bool:
    if ops.name_of(node) in _COPIES:
        return True  # beside the computation: see dsc.tiers
    return ops.info(node).kind in ("view", "item") or not _results(node)


def _is_fresh(node: Node) -> bool:
    """Whether a call that writes to an operand gives back something else than that operand."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and all(r.alias_info is None for r in schema.returns)


def touched(node: Node, operand: Node) -> int:
    """Bytes that a call reads of an operand."""
    whole = stored_bytes(ops.tensor(operand))
    if _packet(node) in _GATHERS and node.args and node.args[0] is operand and _results(node):
        return min(whole, stored_bytes(_results(node)[0]))
    return whole


def _convolution_flops(node: Node) -> float:
    given = arguments(node)
    x, weight = (_tensor(given[k]) for k in ("input", "weight"))
    backward = "grad_output" in given
    out = _tensor(given["grad_output"]) if backward else _results(node)[0]
    transposed = bool(given["transposed"])
    once = 2.0 * _numel(x if transposed else out) * _numel(weight) / max(_hint(weight.shape[0]), 1)
    if not backward:
        return once
    wanted = given["output_mask"]
    assert isinstance(wanted, Sequence)
    return once * (bool(wanted[0]) + bool(wanted[1])) + (_numel(out) if wanted[2] else 0)


def _attention_flops(node: Node) -> float:
    """Two products of [queries, keys] and [queries or keys, width] a head forward, five backward.

    Of sequences that lie one after the other ([tokens, heads, width]) each query counts as many keys as they have on average.
    """
    given = arguments(node)
    if not {"query", "key", "value"} <= given.keys():
        return float(sum(map(_numel, _results(node))))
    q, k, v = (_tensor(given[n]) for n in ("query", "key", "value"))
    rows_first = _packet(node).startswith(ROWS_FIRST)
    keys = float(_hint(k.shape[1 if rows_first else -2]))
    ends = next((x for n in ("cum_seq_k", "cu_seq_k", "cu_seq_q") if isinstance(x := given.get(n), Node)), None)
    if ends is not None and k.dim() == 3:
        keys = _hint(k.shape[0]) / max(_hint(ops.tensor(ends).shape[0]) - 1, 1)
    pairs = _numel(q) / max(_hint(q.shape[-1]), 1) * keys
    widths = _hint(q.shape[-1]) + _hint(v.shape[-1])
    causal = given.get("is_causal", given.get("causal")) is True or given.get("right") == 0
    if "backward" in _packet(node):
        return pairs * (3 * 2.0 * _hint(q.shape[-1]) + 2 * 2.0 * _hint(v.shape[-1])) / (2 if causal else 1)
    return 2.0 * pairs * widths / (2 if causal else 1)


def arguments(node: Node) -> dict[str, object]:
    """Arguments by the names of the schema, defaults included."""
    if not isinstance(node.target, OpOverload):
        return dict(node.kwargs)
    parameters = node.target._schema.arguments
    given: dict[str, object] = {p.name: p.default_value for p in parameters if p.has_default_value()}
    given.update({p.name: a for p, a in zip(parameters, node.args)})
    given.update(node.kwargs)
    return given


def _packet(node: Node) -> str:
    target = node.target
    return target.overloadpacket.__name__ if isinstance(target, OpOverload) else str(getattr(target, "__name__", ""))


def _results(node: Node) -> list[torch.Tensor]:
    return list(_tensors(ops.value(node)))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _tensors(v)


def _tensor(argument: object) -> torch.Tensor:
    assert isinstance(argument, Node)
    return ops.tensor(argument)


def _numel(t: torch.Tensor) -> int:
    return math.prod(map(_hint, t.shape))


def _hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else optimization_hint(size)


def total(costs: Iterable[Cost]) -> Cost:
    """The sum, for programs that run one after the other."""
    all_costs = list(costs)
    return Cost(sum(c.flops for c in all_costs), sum(c.bytes for c in all_costs), sum(c.seconds for c in all_costs))
