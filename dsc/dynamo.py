"""Dynamo graphs: what their nodes call, as a user would name it, and what they hold and write to."""

from __future__ import annotations

import inspect
import operator

import torch
from torch.fx import GraphModule, Node

DRAWS = frozenset(
    """
    rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson binomial
    bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_
    dropout dropout_ dropout1d dropout2d dropout3d feature_dropout feature_dropout_ alpha_dropout alpha_dropout_
    feature_alpha_dropout feature_alpha_dropout_ rrelu rrelu_ scaled_dot_product_attention gumbel_softmax
    native_dropout rrelu_with_noise multi_head_attention_forward
    """.split()
)
"""Draw random numbers."""

LAYS_OUT = frozenset(
    """
    t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_ resize_ resize_as_ set_ detach_ rename_
    requires_grad_
    """.split()
)
"""In-place methods that change what a tensor is, rather than its elements."""


def name_of(node: Node) -> str:
    """``dropout`` of ``F.dropout``, of ``torch.dropout`` and of a method; ``add_`` of ``aten.add_.Tensor`` too."""
    name: str = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.split(".")[0]  # an overload names itself


def tensor_of(value: object) -> torch.Tensor | None:
    """The fake tensor of a node; None of anything else, and of what has no strides."""
    t = value.meta.get("example_value") if isinstance(value, Node) else None
    return t if isinstance(t, torch.Tensor) and t.layout == torch.strided else None


VIEWS = frozenset(
    """
    view view_as reshape reshape_as flatten unflatten ravel as_strided expand expand_as broadcast_to broadcast_tensors
    transpose t permute movedim moveaxis swapaxes swapdims adjoint squeeze unsqueeze
    atleast_1d atleast_2d atleast_3d select narrow diagonal unfold getitem getattr
    split split_with_sizes chunk tensor_split hsplit vsplit dsplit unbind
    real imag view_as_real view_as_complex conj resolve_conj resolve_neg detach _get_data_attr alias lift_fresh
    contiguous to type type_as float double half bfloat16 int long short char byte bool cfloat cdouble cpu cuda as_tensor
    asarray positive meshgrid
    """.split()
)
"""Calls whose result may be a view of an operand, or the operand itself, and that do nothing else: eager may make them twice."""

AUGMENTED = frozenset(
    f
    for name in "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul".split()
    if callable(f := getattr(operator, name))
)
"""``x += y`` and its kind, which write to ``x``."""

_SPELLED = {f"__{f.__name__}__": f for f in (*AUGMENTED, operator.setitem, operator.getitem)}


def spell_alike(gm: GraphModule) -> None:
    """``x.__iadd__(y)`` -> ``operator.iadd(x, y)``, in place: one spelling of what writes and of what indexes."""
    changed = False
    for n in gm.graph.nodes:
        if n.op == "call_method" and n.target in _SPELLED:
            n.op, n.target, changed = "call_function", _SPELLED[n.target], True
    if changed:
        gm.recompile()


def is_named_as_write(name: str) -> bool:
    """``add_``, and not ``__add__``."""
    return name.endswith("_") and not name.endswith("__")


def written(node: Node) -> Node | None:
    """The operand that a call writes to and gives back; None if there is none, or if it only changes what a tensor is."""
    if node.op not in ("call_method", "call_function"):
        return None
    name, out = name_of(node), node.kwargs.get("out")
    first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    target = first if isinstance(first, Node) else None
    if isinstance(out, Node):
        return out
    if getattr(node.target, "__module__", "") == "_operator" and name.endswith("_"):
        return None  # ``or_`` is ``x | y``
    if is_named_as_write(name):
        return None if name in LAYS_OUT else target
    if name == "setitem" or node.target in AUGMENTED or _says_inplace(node):
        return target
    return None


def _says_inplace(node: Node) -> bool:
    """``F.relu(x, inplace=True)``, by name or by place."""
    if node.op != "call_function" or not any(a is True for a in (*node.args, *node.kwargs.values())):
        return False
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]  # not a method
    except (TypeError, ValueError):  # a builtin, or a call that is refused when it runs
        return node.kwargs.get("inplace") is True
    return bound.arguments.get("inplace") is True
