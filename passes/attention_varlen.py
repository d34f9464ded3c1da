"""Attention over sequences of any length in a graph: what ATen's calls of it mean, and ``dsc::varlen_attention`` in their place."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from dsc import cost, flash_attention, ops, varlen_attention  # noqa: F401  # the last one registers the operator
from dsc.domain import shape
from dsc.passes.attention_cost import Packed
from dsc.passes.canonicalize import Rewriter
from dsc.passes.linears import packet
from dsc.passes.sparse_attention import OUT, SUMS, replace_items
from dsc.torch_shim import optimization_hint

aten = torch.ops.aten
FORWARD, BACKWARD = torch.ops.dsc.varlen_attention.default, torch.ops.dsc.varlen_attention_backward.default
FLASH, EFFICIENT = "flash", "efficient"
CALLS: Mapping[str, tuple[str, str]] = {
    "_varlen_attn": (FLASH, "_varlen_attn_backward"),
    "_flash_attention_forward": (FLASH, "_flash_attention_backward"),
    "_efficient_attention_forward": (EFFICIENT, "_efficient_attention_backward"),
}
"""Call -> ATen's kernel, and the call of its gradient.  The first is ``torch.nn.attention.varlen.varlen_attn``; nested
tensors make the other two."""
ENDS = (("cum_seq_q", "cum_seq_k"), ("cu_seq_q", "cu_seq_k"), ("cu_seqlens_q", "cu_seqlens_k"))
LONGEST = (("max_q", "max_k"), ("max_seqlen_q", "max_seqlen_k"))
WINDOW = ("window_size_left", "window_size_right", "window_size")
"""Of the flash kernel; the memory-efficient one has the last name for something else."""
KNOWN = frozenset(
    ("query", "key", "value", "is_causal", "custom_mask_type", "scale", "dropout_p", "return_debug_mask", "enable_gqa",
     "num_splits", "compute_log_sumexp", *(name for pairs in (ENDS, LONGEST) for pair in pairs for name in pair))
)  # fmt: skip
"""Arguments that the kernel has, or that say nothing about results.  More come with every version of PyTorch."""
SAME = ("query", "key", "value", "is_causal", "custom_mask_type", "scale", "dropout_p", *WINDOW,
        *(name for pair in ENDS for name in pair))  # fmt: skip
"""Arguments that a gradient has to have of its forward."""
BATCHED = 4
"""Rank of the memory-efficient kernel's operands: a batch of one."""


@dataclass(frozen=True)
class Found:
    """One call, as ``dsc::varlen_attention`` has it."""

    node: Node
    backward: Node | None
    kernel: str
    query: Node
    key: Node
    value: Node
    ends: tuple[Node, Node]
    longest: int
    """Keys that the longest sequence has, or is likely to have."""
    left: int
    right: int
    from_end: bool
    scale: float

    @property
    def settings(self) -> tuple[object, ...]:
        return *self.ends, self.left, self.right, self.from_end, self.scale


def packs(node: Node) -> bool:
    """Whether it is such a call."""
    return packet(node) in CALLS and bool(_pair(cost.arguments(node), ENDS))


def find(node: Node) -> Found | str:
    """What a call means; or why the kernel cannot take its place, in a few words."""
    kernel, gradient = CALLS[packet(node)]
    given = cost.arguments(node)
    ends, longest = _pair(given, ENDS), _pair(given, LONGEST)
    q, k, v = (given[n] for n in ("query", "key", "value"))
    assert isinstance(q, Node) and isinstance(k, Node) and isinstance(v, Node)
    if len(ends) != 2 or (why := _of_arguments(kernel, given)) is not None:
        return "ends on one side alone" if len(ends) != 2 else str(why)
    if (why := _of_operands(kernel, *map(ops.tensor, (q, k, v, *ends)))) is not None:
        return why
    if len(longest) != 2 or _hint(longest[0]) <= 1:
        return "one query a sequence, which ATen splits by keys"
    if kernel == EFFICIENT and not _within(longest, ops.tensor(q), ops.tensor(k)):
        return "lengths that ATen compares with the rows that there are"
    band = _band(kernel, given, longest[1])
    if isinstance(band, str):
        return band
    backward = {u for i in _read(node) for u in i.users if packet(u) == gradient}
    if (why := _of_readers(node, kernel, given, backward)) is not None:
        return why
    scale = given.get("scale")
    factor = float(scale) if isinstance(scale, (int, float)) else float(ops.tensor(q).shape[-1]) ** -0.5
    return Found(node, next(iter(backward), None), kernel, q, k, v, ends, _hint(longest[1]), *band, factor)


def weigh(found: Found) -> Packed:
    """Its sizes, for the model of costs."""
    q, k = _three(found.query), _three(found.key)
    count = max(_hint(ops.tensor(found.ends[0]).shape[0]) - 1, 1)
    band = found.left + found.right + 1 if found.left >= 0 else None
    return Packed(
        q, k, ops.tensor(found.query).dtype, max(k[0] // count, 1), found.longest, found.right == 0 and band is None, band,
        found.backward is not None,
    )  # fmt: skip


def write(rw: Rewriter, found: Found) -> Node:
    """``dsc::varlen_attention`` in the place of a call and its gradient."""
    node, backward = found.node, found.backward
    flat = found.kernel == EFFICIENT
    with rw.gm.graph.inserting_before(node):
        q, k, v = (_flat(rw, node, x) if flat else x for x in (found.query, found.key, found.value))
        both = rw.call(node, FORWARD, q, k, v, *found.settings)
        out = rw.call(node, operator.getitem, both, OUT)
        sums = rw.call(node, operator.getitem, both, SUMS)
        made = {OUT: _batched(rw, node, out) if flat else out, SUMS: sums}
    if backward is not None:
        given = cost.arguments(backward)
        grad = given.get("grad_out", given.get("grad_out_"))
        assert isinstance(grad, Node)
        with rw.gm.graph.inserting_before(backward):
            grad = _flat(rw, backward, grad) if flat else grad
            three = rw.call(backward, BACKWARD, grad, q, k, v, out, sums, *found.settings)
            items = {i: rw.call(backward, operator.getitem, three, i) for i in range(3)}
            if flat:
                items = {i: _batched(rw, backward, x) for i, x in items.items()}
        replace_items(rw, backward, three, 3, items)
        _drop_unread(rw, items.values(), three)
    for reader in [r for i in node.users for r in _aliases(i)][::-1]:
        if not reader.users:
            rw.gm.graph.erase_node(reader)
    replace_items(rw, node, both, 2, made)
    return both


def _of_arguments(kernel: str, given: Mapping[str, object]) -> str | None:
    known = KNOWN | set(WINDOW) if kernel == FLASH else KNOWN
    if (other := next((n for n, x in given.items() if n not in known and x is not None), None)) is not None:
        return f"{other} is given"
    if given.get("dropout_p"):
        return "dropout has random numbers of its own"
    if given.get("return_debug_mask"):
        return "its weights are wanted"
    if isinstance(given.get("scale"), Node):
        return "its scale is a symbol"
    if kernel == FLASH and (other := _activated()) is not None:
        return f"{other} is active in its place"
    return None


def _activated() -> str | None:
    """The flash kernels of another package that PyTorch was told to call, if any."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    found = current() if current is not None else None
    return None if found is None else str(found)


def _of_operands(
    kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_ends: torch.Tensor, k_ends: torch.Tensor
) -> str | None:
    """ATen refuses most of these too, with errors that stay its own."""
    half = (torch.bfloat16, torch.float16)
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (half if kernel == FLASH else flash_attention.WIDEST):
        return f"{ops.SHORT.get(q.dtype, q.dtype)} operands"
    if not q.dim() == k.dim() == v.dim() == (3 if kernel == FLASH else BATCHED):
        return "operands of another rank"
    if kernel == EFFICIENT and not q.shape[0] == k.shape[0] == v.shape[0] == 1:
        return "a batch of more than one"
    width, heads = q.shape[-1], q.shape[-2]
    if not all(isinstance(n, int) for t in (q, k, v) for n in t.shape[-2:]):
        return "heads that are symbols"
    if not width == k.shape[-1] == v.shape[-1] or width > flash_attention.WIDEST[q.dtype] or width % 8:
        return f"heads {width} wide"
    if k.shape[-2] == 0 or heads % k.shape[-2] or (kernel == EFFICIENT and heads != k.shape[-2]):
        return "heads that do not divide"
    if any(t.device != q.device for t in (k, v, q_ends, k_ends)):
        return "operands on several devices"
    if any(t.stride(-1) != 1 for t in (q, k, v)):
        return "rows that are not whole"
    if any(e.dtype != torch.int32 or e.dim() != 1 or not e.is_contiguous() for e in (q_ends, k_ends)):
        return "ends that are no row of int32"
    if shape(q_ends) != shape(k_ends) or shape(k) != shape(v) or q_ends.shape[0] in (0, 1):
        return "operands of sizes that differ"
    return None


def _band(kernel: str, given: Mapping[str, object], longest: object) -> tuple[int, int, bool] | str:
    """``left``, ``right`` and ``from_end`` of the operator, by the rules of ATen's kernel."""
    if kernel == EFFICIENT:
        mask = given["custom_mask_type"]
        if mask not in (0, 1):  # 1 is causal from the first token on; from the last one on, rows may see nothing
            return "its mask leaves rows without a number"
        return (-1, 0 if mask else -1, mask == 0)
    pair = given.get("window_size") or (given.get("window_size_left"), given.get("window_size_right"))
    assert isinstance(pair, (list, tuple))
    left, right = (-1 if n is None else n for n in pair)
    if not isinstance(left, int) or not isinstance(right, int):
        return "its window is a symbol"
    right = 0 if given.get("is_causal") else right
    if left < 0 and right <= 0:
        return (-1, max(right, -1), True)
    if not isinstance(longest, int):
        return "a window beside lengths that are symbols"
    left, right = (-1 if n < 0 or n >= longest else n for n in (left, right))  # as wide as the longest: no window
    return (left, longest if left >= 0 and right < 0 else right, True)


def _within(longest: Sequence[object], q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether it is known that no sequence is said to be longer than all of them."""
    pairs = zip(longest, (q.shape[1], k.shape[1]))
    return all(isinstance(n, int) and isinstance(rows, int) and n <= rows for n, rows in pairs)


def _of_readers(node: Node, kernel: str, given: Mapping[str, object], backward: set[Node]) -> str | None:
    if len(backward) > 1:
        return "it has two gradients"
    own = {OUT} if kernel == EFFICIENT else {OUT, SUMS}
    for item in node.users:
        readers = {u for i in _aliases(item) for u in i.users if u not in _aliases(item)}
        if item.args[1] not in own and readers - backward:
            return "what it says beside its output is read"
    for gradient in backward:
        theirs = cost.arguments(gradient)
        if any(_plain(given[n]) != _plain(theirs[n]) for n in SAME if n in given and n in theirs):
            return "its gradient is of another call"
        if any(u.args[1] == 3 and u.users for u in gradient.users):
            return "its bias has a gradient"
        if theirs.get("shared_storage_dqdkdv"):
            return "its gradients are parts of one tensor"
    return None


def _plain(argument: object) -> object:
    """A node without aliases; a list as a tuple."""
    while isinstance(argument, Node) and packet(argument) in ("detach", "alias"):
        argument = ops.operand(argument, 0)
    return tuple(argument) if isinstance(argument, (list, tuple)) else argument


def _read(node: Node) -> list[Node]:
    """The items of a call, and their aliases."""
    return [a for item in node.users for a in _aliases(item)]


def _aliases(item: Node) -> list[Node]:
    """It, and what is another name of it, each after what it is made of."""
    found = [item]
    for n in found:
        found += [u for u in n.users if packet(u) in ("detach", "alias")]
    return found


def _drop_unread(rw: Rewriter, nodes: Iterable[Node], made: Node) -> None:
    """Those of the items of ``made`` that nobody reads."""
    for n in nodes:
        while n is not made and not n.users:
            above = ops.operand(n, 0)
            rw.gm.graph.erase_node(n)
            n = above


def _flat(rw: Rewriter, like: Node, x: Node) -> Node:
    return rw.call(like, aten.squeeze.dim, x, 0)


def _batched(rw: Rewriter, like: Node, x: Node) -> Node:
    return rw.call(like, aten.unsqueeze.default, x, 0)


def _pair(given: Mapping[str, object], names: Sequence[tuple[str, str]]) -> tuple[Any, ...]:
    """The two arguments under the names that this call has; fewer where it is given none."""
    found = next((p for p in names if p[0] in given), names[0])
    return tuple(x for n in found if (x := given.get(n)) is not None)


def _three(n: Node) -> tuple[int, int, int]:
    """Tokens, heads, and the width of a head."""
    tokens, heads, width = map(_hint, ops.tensor(n).shape[-3:])
    return tokens, heads, width


def _hint(size: object) -> int:
    """A number, a symbol, or a node that stands for one."""
    value = ops.value(size) if isinstance(size, Node) else size
    assert isinstance(value, (int, torch.SymInt))
    return int(optimization_hint(value))
