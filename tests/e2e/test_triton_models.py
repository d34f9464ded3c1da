"""Train steps of the tiny models on the kernels that a GPU would run, in Triton's interpreter, against eager."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from dsc.compilation import Compilation
from dsc.models.zoo import load


def trained(model: nn.Module, call: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss = call(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "vit-tiny", "resnet-tiny", "bert-tiny"])
def test_trains_as_eager_does(name: str) -> None:
    entry = load(name)
    ours, theirs, records = entry.build(), entry.build(), list[Compilation]()
    torch._dynamo.reset()
    options = {"emit": "triton", "on_compile": records.append, "target": "h100"}
    compiled = torch.compile(ours, backend="dsc", options=options)
    for a, b in zip(trained(ours, compiled, entry.inputs()), trained(theirs, theirs, entry.inputs()), strict=True):
        scale = float(b.abs().max()) if b.is_floating_point() else 0.0
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * scale + 1e-9)
    assert [r.kind for r in records] == ["forward", "backward"]
    assert all(r.program.emitter == "triton" and r.program.kernels for r in records)
