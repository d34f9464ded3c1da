"""What is saved for the backward and what is computed again there: as text, against torch's partitioner, and by value."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dsc.manager import PassPipeline, Report
from dsc.models.zoo import ZOO, load
from dsc.notes import notes
from dsc.passes.recompute import Recompute, extract, read
from dsc.passes.solve.mincut import Plan, solve
from dsc.target import find
from dsc.text import show
from dsc.torch_shim import aot_autograd, default_partition, make_boxed_func


@dataclass
class Split:
    """A partitioner for AOTAutograd that runs the pass and keeps what it saw."""

    enabled: bool = True
    plan: Plan = field(default_factory=lambda: Plan((), ()))
    report: Report = field(default_factory=lambda: Report(False))
    before: str = ""
    after: str = ""
    saved: tuple[str, ...] = ()
    backward: str = ""
    seconds: float = 0

    def __call__(
        self, gm: GraphModule, inputs: Any, *, num_fwd_outputs: int, **rest: Any
    ) -> tuple[GraphModule, GraphModule]:
        if self.enabled:
            self.plan, self.before = solve(extract(gm)), show(gm.graph)
            start = time.perf_counter()
            ((_, self.report),) = PassPipeline((Recompute(),)).run(gm, find("cpu"))
            self.seconds = time.perf_counter() - start
            self.after = show(gm.graph)
        fw, bw = default_partition(gm, inputs, num_fwd_outputs=num_fwd_outputs, **rest)
        results: Any = fw.graph.output_node().args[0]
        extra = results[num_fwd_outputs:]
        self.saved = tuple(n.name for n in extra if isinstance(n.meta["val"], Tensor))
        self.backward = show(bw.graph)
        return fw, bw

    def compile(self, f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        run = lambda gm, _: make_boxed_func(gm.forward)  # noqa: E731
        backend = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=self)
        torch._dynamo.reset()
        return torch.compile(f, backend=backend, fullgraph=True, **options)

    def remarks(self) -> str:
        return "".join(f"{r.verdict} {r.node}: {r.why}\n" for r in self.report.remarks) + "".join(
            f"{name} = {value:.0f}\n" for name, value in self.report.numbers
        )


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(s, dtype=dtype).requires_grad_() for s in shapes]


def gradients(f: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """All results and all gradients of their weighted sum, with the same random numbers on every call."""
    torch.manual_seed(1)
    given = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    results = f(*given)
    results = results if isinstance(results, tuple) else (results,)
    total = sum((r.float() * torch.linspace(1, 2, r.numel()).view(r.shape)).sum() for r in results)
    assert isinstance(total, Tensor)
    return [*results, *torch.autograd.grad(total, [x for x in given if x.requires_grad])]


def check(f: Callable[..., Any], inputs: list[Tensor], **options: Any) -> Split:
    """Compile through the pass, compare with eager, and compare what torch saves with the plan."""
    split = Split()
    got, want = gradients(split.compile(f, **options), inputs), gradients(f, inputs)
    torch.testing.assert_close(got, want)
    assert sorted(split.saved) == sorted(split.plan.save)
    return split


def cross_entropy(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x @ w, target)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate) * (x @ up)) @ down


def texts(split: Split, golden: Callable[..., None]) -> None:
    golden(split.before, "before")
    golden(split.after, "after")
    golden(split.remarks(), "remarks")


# It fires.


def test_cross_entropy(golden: Callable[..., None]) -> None:
    split = check(cross_entropy, [*leaves((4, 8), (8, 32)), torch.tensor([1, 0, 31, 7])])
    assert split.plan.recompute == ("_log_softmax",)
    assert "mm" in split.plan.save
    texts(split, golden)


def test_swiglu(golden: Callable[..., None]) -> None:
    split = check(swiglu, leaves((4, 8), (8, 16), (8, 16), (16, 8)))
    assert split.plan.recompute == ("silu",)
    texts(split, golden)


def test_half_precision_input_of_a_norm_is_saved_in_half_precision() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm((x @ w).float(), (8,))

    split = check(f, leaves((4, 8), (8, 8), dtype=torch.bfloat16))
    assert split.plan.recompute == ("_to_copy",)


def test_masks_made_from_nothing_are_made_again() -> None:
    def f(x: Tensor) -> Tensor:
        return x.sin().masked_fill(torch.ones(8, 8, dtype=torch.bool).tril().logical_not(), 0.0).exp()

    split = check(f, leaves((8, 8)))
    assert split.saved == ("primals_1",)


def test_pieces_of_one_product_are_saved_as_one() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        a, b, c = (x @ w).chunk(3, -1)
        return a.sigmoid() * b.tanh() * c

    split = check(f, leaves((4, 8), (8, 24)))
    assert "mm" in split.saved
    assert not any(s.startswith("getitem") for s in split.saved)


def test_sizes_that_are_symbols() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return F.log_softmax(y.view(-1, y.shape[-1]).view(x.shape[0], -1, y.shape[-1]), -1)[:, 0].exp()

    split = check(f, leaves((6, 5, 8), (8, 16)), dynamic=True)
    assert split.report.changed


# It must not.


def test_dropout(golden: Callable[..., None]) -> None:
    split = check(lambda x, w: F.dropout(x @ w, 0.5).exp(), leaves((4, 8), (8, 8)))
    assert "native_dropout" not in split.backward.replace("native_dropout_backward", "")
    texts(split, golden)


def test_dropout_between_cheap_ops_draws_once() -> None:
    split = check(lambda x: (F.dropout(x.sin(), 0.5).exp() * x.cos()).tanh(), leaves((4, 8)))
    assert "native_dropout(" not in split.backward


def test_products_are_saved(golden: Callable[..., None]) -> None:
    split = check(lambda x, w, v: (x @ w).exp() @ v, leaves((4, 8), (8, 8), (8, 8)))
    assert split.plan.recompute == ()
    texts(split, golden)


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_a_residual_stream_is_saved(norm: Callable[..., Tensor]) -> None:
    def f(x: Tensor, *ws: Tensor) -> Tensor:
        for w in ws[:-1]:
            x = x + norm(x, (8,)) @ w
        return norm(x, (8,)) @ ws[-1]

    split = check(f, leaves((4, 8), (8, 8), (8, 8), (8, 8), (8, 8)))
    assert not any(n.startswith("add") and f"{n}: f32[4,8]" in split.before for n in split.plan.recompute)


def test_what_reads_an_input_that_is_written_is_saved() -> None:
    def f(x: Tensor, state: Tensor) -> Tensor:
        y = x * state.sin()
        state.add_(1.0)
        return y.exp()

    state = torch.ones(4, 8)
    split = check(f, [*leaves((4, 8)), state])
    assert "sin" in split.saved
    assert not any(n in split.plan.recompute for n in ("sin", "mul"))


def test_a_graph_with_checkpoint_policies_is_left_alone() -> None:
    def policy(_: object, op: object, *args: object, **kw: object) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE

    def f(x: Tensor, w: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        inner = lambda y: torch.log_softmax(y @ w, -1).exp()  # noqa: E731
        result = checkpoint(inner, x, use_reentrant=False, context_fn=contexts)
        assert isinstance(result, Tensor)
        return result

    split = Split()
    inputs = leaves((4, 8), (8, 16))
    torch.testing.assert_close(gradients(split.compile(f), inputs), gradients(f, inputs))
    assert not split.report.changed
    assert [r.why for r in split.report.remarks] == ["the graph has checkpoint policies"]


def test_writing_to_a_returned_value_that_is_saved_is_an_error() -> None:
    def f(x: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, w)
        return logits, F.cross_entropy(logits.view(-1, 16), target)

    x, w = leaves((2, 2, 8), (16, 8))
    split = check(f, [x, w, torch.tensor([1, 0, 15, 7])])
    assert "_unsafe_view" in split.saved
    logits, loss = split.compile(f)(x, w, torch.tensor([1, 0, 15, 7]))
    with torch.no_grad():
        logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Whole models.


@pytest.mark.parametrize("name", [n for n in ZOO if n.endswith("-tiny")])
def test_models_train_as_in_eager(name: str) -> None:
    entry = load(name)

    def step(split: Split | None) -> list[Tensor]:
        model = entry.build()
        for m in model.modules():
            if isinstance(m, nn.Dropout):
                m.p = 0.25
        run = split.compile(model) if split else model
        torch.manual_seed(2)
        loss = run(*entry.inputs())
        loss.backward()
        return [loss, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]

    split = Split()
    torch.testing.assert_close(step(split), step(None))
    assert sorted(split.saved) == sorted(split.plan.save)
    numbers = dict(split.report.numbers)
    assert numbers["moved bytes after"] <= numbers["moved bytes before"]


def test_notes_say_what_was_decided() -> None:
    seen: list[tuple[str, str | None]] = []

    class Look(Split):
        def __call__(self, gm: GraphModule, inputs: Any, **kw: Any) -> tuple[GraphModule, GraphModule]:
            result = super().__call__(gm, inputs, **kw)
            seen.extend((n.name, notes(n).keep) for n in gm.graph.nodes if notes(n).keep)
            return result

    gradients(Look().compile(swiglu), leaves((4, 8), (8, 16), (8, 16), (16, 8)))
    assert seen == [("mm", "save"), ("silu", "recompute"), ("mm_1", "save"), ("mul", "save")]


def test_ten_thousand_nodes_take_little_time() -> None:
    """2500 layers of a chain that has choices everywhere."""
    graph = torch.fx.Graph()
    aten = torch.ops.aten

    def call(op: Any, *args: Any, tag: str) -> torch.fx.Node:
        node = graph.call_function(op, args)
        node.meta.update(val=torch.empty(4, 4), partitioner_tag=tag)
        return node

    x, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    x.meta["val"] = tangent.meta["val"] = torch.empty(4, 4)
    y, kept = x, []
    for _ in range(1700):
        s = call(aten.sigmoid.default, call(aten.mm.default, y, x, tag="is_forward"), tag="is_forward")
        y = call(aten.mul.Tensor, s, s, tag="is_forward")
        kept.append(s)
    g = tangent
    for s in reversed(kept):
        g = call(aten.mm.default, call(aten.mul.Tensor, g, s, tag="is_backward"), x, tag="is_backward")
        g = call(aten.add.Tensor, g, s, tag="is_backward")
    graph.output((y, g))
    gm = GraphModule(nn.Module(), graph)
    assert len(gm.graph.nodes) > 10_000
    start = time.process_time()
    report = Recompute().run(gm, find("cpu"))
    assert report.changed
    assert time.process_time() - start < 10  # of this process alone, about one


def test_boundary_of_the_forward() -> None:
    """Everything up to the last node that is tagged so; backward nodes count the ops of ATen before them."""
    graph = torch.fx.Graph()
    x, t = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    y = graph.call_function(torch.ops.aten.sin.default, (x,))
    g = graph.call_function(torch.ops.aten.mm.default, (t, y))
    h = graph.call_function(torch.ops.aten.mul.Tensor, (g, y))
    c = graph.call_function(torch.ops.aten.cos.default, (x,))  # reads no tangent: runs when it is needed
    k = graph.call_function(torch.ops.aten.mul.Tensor, (h, c))
    graph.output((y, k))
    for n in (x, t, y, g, h, c, k):
        n.meta["val"] = torch.empty(4, 4)
    y.meta["partitioner_tag"] = "is_forward"
    joint = read(GraphModule(nn.Module(), graph))
    assert list(joint.forward) == ["primals_1", "sin_default"]
    assert {n.name: c for n, c in joint.backward.items()} == {
        "tangents_1": 0,
        "mm_default": 0,
        "mul_tensor": 1,
        "cos_default": 1,
        "mul_tensor_1": 1,
    }
