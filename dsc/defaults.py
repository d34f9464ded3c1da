"""The passes of a compilation that asks for nothing special, in the order in which they run, and why each stands there.

They have a file of their own so that nothing else is imported for them: every process waits for its imports.
"""

from __future__ import annotations

from dsc.manager import Pass
from dsc.options import Options
from dsc.passes.canonicalize import Canonicalize
from dsc.passes.chunk_loss import ChunkLoss
from dsc.passes.embedding import Embedding
from dsc.passes.fuse import Fuse
from dsc.passes.recompute import Recompute
from dsc.target import Target

JOINT: tuple[Pass, ...] = (
    ChunkLoss(),  # before losses are taken apart
    Canonicalize(),  # first: the others read single-purpose operators
    Embedding(),  # before anything weighs what the gradients of tables take
    Recompute(),  # before the split: it decides what the split saves
)
"""On the joint graph of forward and backward, before it is split."""

GRAPH: tuple[Pass, ...] = (
    Canonicalize(),  # again: inference graphs saw no joint pass, and splitting repeats views
    Fuse(),  # last: it decides over the nodes that will really run
)
"""On the forward, backward or inference graph."""

ASKING = ("passes", "memory_budget", "sparsity", "attention", "precision", "dropout")
"""Options that change the pipeline."""


def joint(target: Target, options: Options) -> tuple[Pass, ...]:
    """``JOINT`` for a target: on GPUs the form of attention and of products of groups is chosen before it is weighed what to save of it."""
    if target.kind != "cuda":
        return JOINT
    from dsc.passes.attention import Attention  # nothing else needs them
    from dsc.passes.grouped import Grouped

    *before, recompute = JOINT
    return (*before, Attention(fast=options.numerics == "fast"), Grouped(), recompute)


def suffice(options: Options) -> bool:
    """Whether the options leave the pipeline as it is here."""
    return all(getattr(options, name, None) is None for name in ASKING)
