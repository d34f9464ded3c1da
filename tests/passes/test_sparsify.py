"""``sparsify`` and ``sparse-attention`` as text: where they fire, where they do not, and what a GPU target gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsc.debug.capture import capture
from dsc.debug.source import Model
from dsc.models import zoo
from dsc.options import Options
from dsc.passes import linears
from dsc.runtime.state import State
from dsc.text import show

Golden = Callable[..., None]


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.relu(self.up(x)))
        return out.sum()


def told(net: nn.Module, inputs: tuple[Tensor, ...], name: str, target: str = "cpu", **options: Any) -> str:
    """The graph after the pass, and its remarks and numbers."""
    training = options.pop("training", True)
    session = capture(Model("m", net, inputs), target, Options(state=State(), **options), training=training)
    (stage,) = [s for s in session.regions[0].stages if s.name == name]
    assert stage.report is not None
    remarks = [f"{r.node}: {r.verdict}: {r.why}" for r in stage.report.remarks]
    numbers = [f"{n}: {v:g}" for n, v in stage.report.numbers]
    return "\n".join([show(stage.gm.graph), *remarks, *numbers, ""])


def test_masked_on_a_cpu(golden: Golden) -> None:
    golden(told(MLP(8, 16), (torch.randn(4, 8),), "sparsify", sparsity={}))


def test_mma_sp_on_a100(golden: Golden) -> None:
    net = MLP(1024, 4096).bfloat16()
    given = {"transposable": True}
    golden(told(net, (torch.randn(8192, 1024).bfloat16(),), "sparsify", "a100", sparsity=given))


def test_cusparselt_on_h100(golden: Golden) -> None:
    net = MLP(1024, 4096).bfloat16()
    golden(told(net, (torch.randn(8192, 1024).bfloat16(),), "sparsify", "h100", sparsity={}))


@pytest.mark.filterwarnings("ignore:No layer of this graph is sparse")
def test_dense_where_sparse_would_not_win(golden: Golden) -> None:
    golden(told(MLP(128, 256).bfloat16(), (torch.randn(64, 128).bfloat16(),), "sparsify", "h100", sparsity={}))


def test_an_inference_graph_has_masks_and_no_updates(golden: Golden) -> None:
    golden(told(MLP(8, 16), (torch.randn(4, 8),), "sparsify", sparsity={}, training=False))


def test_attention_over_blocks(golden: Golden) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).view(1, 128, 1, 8).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q, is_causal=True).sum()

    given = {"window": 16, "sink": 0, "top_k": 2, "block": 16}
    golden(told(Attention(), (torch.randn(1, 128, 8),), "sparse-attention", attention=given))


HIDDEN = {
    "gpt-tiny": {
        "blocks.0.feedforward.up",
        "blocks.0.feedforward.out",
        "blocks.1.feedforward.up",
        "blocks.1.feedforward.out",
    },
    "bert-tiny": {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"},
    "vit-tiny": {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"},
}


@pytest.mark.parametrize("name", HIDDEN)
def test_which_layers_are_an_mlp(name: str) -> None:
    """By the graph alone: no name of a layer is looked at."""
    entry = zoo.load(name)
    session = capture(Model(name, entry.build(), entry.inputs()), "cpu", Options())
    (stage,) = [s for s in session.regions[0].stages if s.graph == "joint" and s.name == "canonicalize"]
    found, _ = linears.find(stage.gm)
    assert {x.layer for x in found if x.hidden} == HIDDEN[name]
    assert all(x.wgrad is not None for x in found)
