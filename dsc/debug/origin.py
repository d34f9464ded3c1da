"""Where a node comes from in the user's program: the line, and the module."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch.fx import Node

from dsc.blame import Frame, stack_frames

ROOT = re.compile(r"^L\[.(?P<name>\w+).\]\.?(_modules\[.dsc_inner.\]\.?|dsc_inner\.?)?")


@dataclass(frozen=True, slots=True)
class Origin:
    """Both may be missing: inputs have none, nor has what a pass made from nothing of the user's."""

    frames: tuple[Frame, ...] = ()
    """The outermost call first."""
    module: str = ""
    """``blocks.0.attention.out``, the innermost; of a gradient, that of the forward."""

    @property
    def frame(self) -> Frame | None:
        """The innermost."""
        return self.frames[-1] if self.frames else None

    @property
    def place(self) -> str:
        """``blocks.0.attention  models/gpt.py:43``; empty if nothing is known."""
        return "  ".join(filter(None, (self.module, self.frame.place if self.frame else "")))

    @property
    def text(self) -> str:
        """``blocks.0.attention  models/gpt.py:43  y = self.out(y)``."""
        return "  ".join(filter(None, (self.place, self.frame.code if self.frame else "")))


def of(node: Node) -> Origin:
    """What the node's meta says."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return Origin(stack_frames(str(node.meta.get("stack_trace") or "")), module_name(path))


def module_name(path: str) -> str:
    """``L['self'].blocks.0`` -> ``blocks.0``; what comes from ``torch.export`` is plain already."""
    return ROOT.sub("", path).replace("._modules", "").replace("['", ".").replace("']", "").strip(".")
