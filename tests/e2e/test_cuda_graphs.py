"""Train steps whose programs are recorded and replayed, by a recorder for CPU tensors, against eager; and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from dsc import compiler, recordable
from dsc.compilation import Compilation
from dsc.debug.capture import capture
from dsc.debug.source import Model
from dsc.options import Options
from dsc.target import find
from dsc.torch_shim import joint_compiler
from kit_recorder import Recorder


def recorded(f: Callable[..., Any], made: list[Compilation]) -> Any:
    """``torch.compile`` with programs of ATen calls alone, recorded on the CPU."""
    options = Options(cuda_graphs=True, emit="aten", cache=False, on_compile=made.append)  # type: ignore[arg-type]

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        make = replace(compiler.make(options, find("cpu"), sample=inputs), recorder=lambda _: Recorder())

        def as_kind(kind: str) -> Callable[[GraphModule, Sequence[Any]], compiler.Compiled]:
            return lambda g, _: compiler.compile_aten(g, kind, make)[0]

        aot: Callable[..., Any] = joint_compiler(
            fw_compiler=as_kind("forward"),
            bw_compiler=as_kind("backward"),
            inference_compiler=as_kind("inference"),
            partition_fn=lambda joint, inputs, **rest: compiler.split(compiler.run_joint(joint, make), inputs, **rest),
            keep_inference_input_mutations=True,
        )
        made_here: Callable[..., Any] = aot(gm, inputs)
        return made_here

    return torch.compile(f, backend=backend)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.dropout(F.gelu(self.norm(self.a(x))), 0.2, self.training)
        return F.cross_entropy(self.b(h), y)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 6, generator=g), torch.randint(0, 3, (5,), generator=g)) for _ in range(count)]


def train(net: nn.Module, call: Callable[..., Tensor], accumulate: int, set_to_none: bool) -> list[Tensor]:
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for i, (x, y) in enumerate(batches(15)):
        loss = call(x, y)
        loss.backward()
        losses.append(loss.detach())
        if i % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    return [*losses, *(p.detach() for p in net.parameters()), *(b.float() for b in net.buffers())]


@pytest.mark.parametrize(("accumulate", "set_to_none"), [(1, True), (3, True), (3, False)])
def test_training_is_eager_s(accumulate: int, set_to_none: bool) -> None:
    torch.compiler.reset()
    theirs, ours, made = Net(), Net(), list[Compilation]()
    expected = train(theirs, theirs, accumulate, set_to_none)
    for a, b in zip(train(ours, recorded(ours, made), accumulate, set_to_none), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for m in made:
        assert m.program.unrecordable == (), m.program.unrecordable
        assert m.replayer is not None
        assert m.replayer.counts["replayed"] >= 8, (m.kind, m.replayer.counts, m.replayer.remarks)
    assert dict(made[0].reports)["cuda_graphs"].remarks[0].verdict == "did"


def test_a_graph_kept_for_a_second_backward_is_not_overwritten() -> None:
    torch.compiler.reset()
    net, made = Net().eval(), list[Compilation]()
    call = recorded(net, made)
    x, y = batches(1)[0]
    for _ in range(4):
        call(x, y).backward()
    net.zero_grad()
    first = call(x, y)
    first.backward(retain_graph=True)
    once = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    call(x + 1, y).backward()
    net.zero_grad()
    first.backward()
    for p, g in zip(net.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, g)


def test_inference_and_batches_of_other_sizes() -> None:
    torch.compiler.reset()
    net, made = Net().eval(), list[Compilation]()
    call = recorded(net.a, made)
    with torch.no_grad():
        for i in range(16):
            x = torch.full((2 + i % 2, 6), float(i))
            torch.testing.assert_close(call(x), net.a(x))
    assert sum(m.replayer.counts["replayed"] for m in made if m.replayer) >= 6


def graph(f: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    found: list[GraphModule] = []

    class Wrapped(nn.Module):
        def forward(self, *args: Tensor) -> Any:
            return f(*args)

    session = capture(Model("f", Wrapped(), inputs), "cpu", Options(emit="aten"), training=False)
    found += [p.gm for r in session.regions for p in r.programs]
    return found[0]


@torch.library.custom_op("dsc_test_recordable::host", mutates_args=())
def on_host(x: Tensor) -> Tensor:
    return x + 1


@on_host.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


X, ROWS = torch.randn(4, 4), torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("f", "inputs", "why"),
    [
        (lambda x: (x @ x).relu() + torch.rand_like(x), (X,), None),
        (lambda x, i: x[i] + x.index_select(0, i).sum(), (X, ROWS), None),
        (lambda x: torch.nonzero(x), (X,), "nonzero waits for the device"),
        (lambda x: x[x > 0], (X,), "index waits for the device"),
        (lambda x: torch.linalg.cholesky(x @ x.t() + 4 * torch.eye(4)), (X,), "with_effects runs a graph of its own"),
        (on_host, (X,), "dsc_test_recordable.host is not PyTorch's"),
    ],
)
def test_what_is_refused(f: Any, inputs: tuple[Tensor, ...], why: str | None) -> None:
    torch.compiler.reset()
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    try:
        gm = graph(f, *inputs)
    finally:
        torch._dynamo.config.capture_dynamic_output_shape_ops = False
    found = recordable.refusals(gm, "cpu")
    assert (found == ()) if why is None else any(why in r for r in found), found
    assert any("is on cpu, not on cuda" in r for r in recordable.refusals(gm, "cuda"))


def test_written_inputs_are_known() -> None:
    def f(x: Tensor, total: Tensor) -> Tensor:
        total.add_(x)
        return total * 2

    assert recordable.written(graph(f, X, torch.zeros(4, 4))) != ()
    assert recordable.written(graph(lambda x: x * 2, X)) == ()


def test_on_a_cpu_the_option_changes_nothing() -> None:
    torch.compiler.reset()
    made = list[Compilation]()
    options = {"cuda_graphs": True, "on_compile": made.append, "emit": "aten"}
    net = Net().eval()
    with torch.no_grad():
        call = torch.compile(net.a, backend="dsc", options=options)
        for _ in range(4):
            torch.testing.assert_close(call(X.new_ones(2, 6)), net.a(X.new_ones(2, 6)))
    assert [m.replayer for m in made] == [None]
    assert "only launches on a GPU" in dict(made[0].reports)["cuda_graphs"].remarks[0].why
