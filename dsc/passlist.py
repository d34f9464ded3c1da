"""The passes, in the order in which they run, and why each stands where it does."""

from __future__ import annotations

from collections.abc import Mapping

from dsc.manager import Pass
from dsc.passes.canonicalize import Canonicalize
from dsc.passes.fuse import Fuse
from dsc.passes.recompute import Recompute

JOINT: tuple[Pass, ...] = (
    Canonicalize(),  # first: the others read single-purpose operators
    Recompute(),  # before the split: it decides what the split saves
)
"""On the joint graph of forward and backward, before it is split."""

GRAPH: tuple[Pass, ...] = (
    Canonicalize(),  # again: inference graphs saw no joint pass, and splitting repeats views
    Fuse(),  # last: it decides over the nodes that will really run
)
"""On the forward, backward or inference graph."""

KNOWN: Mapping[str, type[Pass]] = {p.name: p for p in (Canonicalize, Recompute, Fuse)}
