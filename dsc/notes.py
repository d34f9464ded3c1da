"""The typed facts that passes leave on nodes, under ``node.meta["dsc"]``.

To write one field and keep the others: ``set_notes(node, replace(notes(node), group="k0"))``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from torch.fx import Node

KEY = "dsc"

Keep = Literal["save", "recompute", "offload", "compress"]


@dataclass(frozen=True, slots=True)
class Notes:
    """What has been decided about one node.  Each field is written by one pass; None is undecided."""

    precision: str | None = None
    sparsity: str | None = None
    keep: Keep | None = None
    stage: int | None = None
    group: str | None = None


UNDECIDED = Notes()


def notes(node: Node) -> Notes:
    """The notes of ``node``; all undecided if none were left."""
    found: Notes = node.meta.get(KEY, UNDECIDED)
    return found


def set_notes(node: Node, notes: Notes) -> None:
    """Leave ``notes`` on ``node``, in place of those before."""
    node.meta[KEY] = notes


def set_keep(node: Node, keep: Keep | None) -> None:
    """Say what becomes of a value; other notes stay."""
    if notes(node).keep != keep:
        set_notes(node, replace(notes(node), keep=keep))


def decided(node: Node) -> dict[str, object]:
    """Field to value, for what has been decided, in the order of the fields."""
    found = notes(node)
    return {f.name: v for f in fields(Notes) if (v := getattr(found, f.name)) is not None}
