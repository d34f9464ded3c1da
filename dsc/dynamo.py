"""Dynamo graphs: what their nodes call, as a user would name it."""

from __future__ import annotations

from torch.fx import Node

DRAWS = frozenset(
    """
    rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson binomial
    bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_
    dropout dropout_ dropout1d dropout2d dropout3d feature_dropout feature_dropout_ alpha_dropout alpha_dropout_
    feature_alpha_dropout feature_alpha_dropout_ rrelu rrelu_ scaled_dot_product_attention gumbel_softmax
    """.split()
)
"""Draw random numbers."""

LAYS_OUT = frozenset(
    """
    t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_ resize_ resize_as_ set_ detach_ rename_
    """.split()
)
"""In-place methods that change what a tensor is, rather than its elements."""


def name_of(node: Node) -> str:
    """``dropout`` of ``F.dropout``, of ``torch.dropout`` and of a method."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
