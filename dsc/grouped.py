"""Products of groups of rows with a matrix each (mixtures of experts), as one operator that asks the host nothing.

``aten._grouped_mm`` on GPUs before sm_90 copies the offsets to the host and multiplies group by group.  On CUDA this one
is Triton's (``dsc.codegen.templates.grouped_mm``); on a CPU it is ATen's.  Importing this module registers it.

Shapes, of bf16, with offs [E] int32, the ends of the groups, ascending:

    a [S, K], b [E, K, N] -> [S, N]       rows of a, in groups; rows after the last group are not defined, as ATen's
    a [E, M, K], b [K, S] -> [M, S]       columns of b, in groups; likewise
    a [M, S], b [S, N] -> [E, M, N]       the contraction, in groups; zero where a group is empty
"""

from __future__ import annotations

import torch
from torch import Tensor

LIBRARY = torch.library.Library("dsc", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("grouped_mm(Tensor a, Tensor b, Tensor offs) -> Tensor")  # type: ignore[no-untyped-call]


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    out: Tensor = torch.ops.aten._grouped_mm(a, b, offs)
    return out


LIBRARY.impl("grouped_mm", grouped_mm, "CPU")  # type: ignore[no-untyped-call]


@torch.library.register_fake("dsc::grouped_mm", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    if a.dim() == b.dim() == 2:
        return a.new_empty(offs.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(a.shape[-2], b.shape[-1])
