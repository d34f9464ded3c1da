"""Formats of products: which product gets which, what the graph then holds, what it computes, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from dsc import ops
from dsc.compilation import Compilation
from dsc.manager import Pass, Report
from dsc.models import zoo
from dsc.passes.precision_produce import fuse_producers
from dsc.precision import plan as plans
from dsc.precision.plan import Choice, PrecisionPlan
from dsc.target import Target


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Mlp(nn.Module):
    def __init__(self, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return torch.nn.functional.cross_entropy(self.head(x), labels)


INPUTS = (torch.randn(48, 32, generator=torch.Generator().manual_seed(1)), torch.arange(48) % 8)


def step(model: nn.Module, call: Any, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    loss = call(*inputs)
    return [loss.detach(), *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])]


def error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    a, b = (torch.cat([t.flatten() for t in ts[1:]]) for ts in (got, want))
    return float((a - b).norm() / b.norm())


def compiled(model: nn.Module, inputs: tuple[torch.Tensor, ...], **options: Any) -> tuple[float, list[Compilation]]:
    """Relative gradient error against eager, and the records of the two graphs."""
    seen: list[Any] = []
    call = torch.compile(model, backend="dsc", options={"on_compile": seen.append, **options})
    return error(step(model, call, inputs), step(model, model, inputs)), seen


def joint_remarks(model: nn.Module, inputs: tuple[torch.Tensor, ...], **options: Any) -> dict[str, str]:
    """Site -> what the pass says of it."""
    from dsc.watch import Watcher

    class Ear(Watcher):
        def after(self, stage: str, p: Any, gm: Any, report: Any, seconds: float) -> None:
            if p.name == "precision":
                found.update({r.node: f"{r.verdict} {r.why}" for r in report.remarks})

    found: dict[str, str] = {}
    call = torch.compile(model, backend="dsc", options={"watchers": [Ear()], **options})
    step(model, call, inputs)
    return found


@pytest.mark.parametrize(
    ("precision", "least", "most"),
    [("tf32", 1e-5, 1e-3), ("bf16", 5e-4, 1e-2), ("fp16", 1e-5, 2e-3), ("fp8", 5e-3, 0.06), ("int8", 1e-3, 0.02)],
)
def test_one_format_for_all(precision: str, least: float, most: float) -> None:
    found, seen = compiled(Mlp(), INPUTS, precision=precision)
    assert least < found < most
    assert len(seen) == 2


@pytest.mark.parametrize(("precision", "recipe"), [("fp8", "tensorwise"), ("fp8", "rowwise"), ("int8", "rowwise")])
def test_every_recipe(precision: str, recipe: str) -> None:
    found, seen = compiled(Mlp(), INPUTS, precision=precision, recipe=recipe)
    assert 1e-3 < found < 0.08
    assert f"precision={precision}-{recipe}" in seen[0].text + seen[1].text


def test_none_changes_nothing() -> None:
    plain, seen = compiled(Mlp(), INPUTS)
    torch._dynamo.reset()
    again, other = compiled(Mlp(), INPUTS, precision=None)
    assert plain == again
    assert [r.text for r in seen] == [r.text for r in other]


def test_the_forward_saves_8_bits_in_place_of_what_they_round() -> None:
    _, (forward, backward) = compiled(Mlp(128, 256), (torch.randn(256, 128), torch.arange(256) % 8), precision="int8")
    quantised = [n for n in forward.gm.graph.nodes if ops.name_of(n).startswith("dsc.quantise")]
    assert len(quantised) == 4  # x and gelu(up), and both weights; x is an input
    hidden = [n for n in backward.gm.graph.find_nodes(op="placeholder") if n.meta["val"].dtype == torch.int8]
    assert {tuple(n.meta["val"].shape) for n in hidden} >= {(256, 256), (128, 256)}
    elements = 256 * 256
    saved = {n: n.meta["val"] for n in backward.gm.graph.find_nodes(op="placeholder") if "getitem" in n.name}
    mine = [t for t in saved.values() if t.dtype == torch.int8 and tuple(t.shape) == (256, 256)][:1]
    scales = [t for t in saved.values() if t.dtype == torch.float32 and tuple(t.shape) == (256, 2)]
    assert mine and scales
    assert sum(t.numel() * t.element_size() for t in (*mine, scales[0])) <= 1.05 * elements


def test_roles_apart() -> None:
    asked = {"up": {"forward": "bf16", "backward": "fp32"}, "d*": {"wgrad": "int8"}, "head": {"dgrad": "fp8-rowwise"}}
    found = joint_remarks(Mlp(), INPUTS, precision=asked)
    assert found == {
        "up.forward": "did bf16, 48 x 64 x 32",
        "up.wgrad": "skipped not in fp32: it is in fp32 already",
        "down.wgrad": "did int8-blockwise, 32 x 64 x 48",
        "head.dgrad": "did fp8-rowwise, 48 x 32 x 8",
    }


def test_the_layer_before_the_loss_is_left_out_unless_it_is_named() -> None:
    found = joint_remarks(Mlp(), INPUTS, precision="fp8")
    assert (
        found["head.forward"] == "skipped not in fp8-blockwise: it feeds the loss: name the layer to have it in 8 bits"
    )
    torch._dynamo.reset()
    assert joint_remarks(Mlp(), INPUTS, precision={"*": "fp8"})["head.forward"].startswith("did fp8-blockwise")


def test_shapes_that_8_bits_do_not_suit_on_a_gpu() -> None:
    model = Mlp(104, 4096)
    inputs = (torch.randn(4096, 104), torch.arange(4096) % 8)
    found = joint_remarks(model, inputs, precision={"*": "fp8"}, target="h100", emit="aten")
    assert "shape 8 not a multiple of 16: rows of 8 bits would not be aligned" in found["head.forward"]
    assert "shape 104 not a multiple of 16" in found["up.forward"]
    torch._dynamo.reset()
    inputs = (torch.randn(4096, 112), inputs[1])
    found = joint_remarks(Mlp(112, 4096), inputs, precision={"up": "fp8"}, target="h100", emit="aten")
    assert "shape 112 not a multiple of 128: padding costs more than it gains" in found["up.forward"]


def test_a_format_that_the_target_has_not_got() -> None:
    with pytest.raises(BackendCompilerFailed, match="a100 cannot compute in fp8-blockwise; use int8 or bf16"):
        compiled(Mlp(), INPUTS, precision="fp8", target="a100", emit="aten")


def test_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(BackendCompilerFailed, match=r"'\*.attn.\*' matches no layer .* there are 'up', 'down', 'head'"):
        compiled(Mlp(), INPUTS, precision={"*.attn.*": "bf16"})


@pytest.mark.parametrize("name", ["bert-tiny", "moe-tiny"])
def test_models(name: str) -> None:
    entry = zoo.load(name)
    found, _ = compiled(entry.build(), entry.inputs(), precision={"*": "int8"})
    assert found < 0.1


def test_autocast_goes_on_in_its_own_dtype() -> None:
    model = Mlp()

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out: torch.Tensor = fast(*inputs)
        return out

    fast = torch.compile(model, backend="dsc", options={"precision": "int8"})
    assert error(step(model, call, INPUTS), step(model, model, INPUTS)) < 0.03


def test_sizes_that_vary_compile_once() -> None:
    model = Mlp()
    call = torch.compile(model, backend="dsc", options={"precision": "int8"}, dynamic=True)
    for rows in (48, 200):
        inputs = (torch.randn(rows, 32), torch.arange(rows) % 8)
        assert error(step(model, call, inputs), step(model, model, inputs)) < 0.03


def test_inference_has_the_forward_formats(tmp_path: Path) -> None:
    model = Mlp()
    asked = {"up": "int8", "down": {"forward": "bf16", "backward": "fp32"}, "head": {"backward": "int8"}}
    seen: list[Compilation] = []
    call = torch.compile(model, backend="dsc", options={"precision": asked, "on_compile": seen.append})
    trained = call(*INPUTS).detach()
    with torch.no_grad():
        assert torch.equal(call(*INPUTS), trained)
        assert not torch.equal(model(*INPUTS), trained)
    (inference,) = (r for r in seen if r.kind == "inference")
    assert "precision=int8-blockwise" in inference.text and "precision=bf16" in inference.text
    assert inference.text.count("precision=") == 2
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match=r"'\*.attn.\*' matches no layer"):
        torch.compile(model, backend="dsc", options={"precision": {"*.attn.*": "bf16"}})(*INPUTS)


def test_auto_leaves_inference_alone_unless_there_is_a_plan(tmp_path: Path) -> None:
    model, file = Mlp(), tmp_path / "plan.json"
    options = {"precision": "auto", "precision_plan": str(file)}
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="dsc", options=options)(*INPUTS), model(*INPUTS))
    PrecisionPlan((Choice("up.forward", "int8-blockwise"), Choice("up.wgrad", "int8-blockwise"))).save(file)
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(model, backend="dsc", options=options)(*INPUTS)
    torch._dynamo.reset()
    assert torch.equal(found, torch.compile(model, backend="dsc", options=options)(*INPUTS))
    assert not torch.equal(found, model(*INPUTS))


def test_a_model_in_16_bits_may_stay_as_it_is(tmp_path: Path) -> None:
    model, file = Mlp().bfloat16(), tmp_path / "plan.json"
    x, labels = INPUTS
    loss = torch.compile(model, backend="dsc", options={"precision": "auto", "precision_plan": str(file)})(
        x.bfloat16(), labels
    )
    loss.backward()
    made = plans.load(file)
    assert made.measured is not None and made.measured <= 0.02
    assert {c.format for c in made.choices if c.site.startswith("head")} == {"bf16"}  # it feeds the loss


def test_no_product_no_change() -> None:
    model = nn.LayerNorm(8)
    call = torch.compile(model, backend="dsc", options={"precision": "fp8"})
    torch.testing.assert_close(call(torch.ones(2, 8)), model(torch.ones(2, 8)))


def test_auto_keeps_the_budget_and_its_plan_is_replayed(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    entry = zoo.load("gpt-tiny")
    model, inputs = entry.build(), entry.inputs()
    options = {"precision": "auto", "error_budget": 0.02, "precision_plan": str(file), "target": "h100", "emit": "aten"}
    assert compiled(model, inputs, **options)[0] <= 0.005  # so small a model gains nothing on an H100
    made = plans.load(file)
    assert made.measured is not None and made.measured <= 0.021
    edited = made.changed({c.site: "int8-blockwise" for c in made.choices})
    edited.save(file)
    torch._dynamo.reset()
    again = compiled(model, inputs, precision="auto", precision_plan=str(file))[0]
    torch._dynamo.reset()
    assert 0.005 < again == compiled(model, inputs, precision=edited)[0]
    assert plans.load(file) == edited


def test_auto_on_a_batch_that_says_nothing() -> None:
    x, labels = INPUTS
    with pytest.raises(BackendCompilerFailed, match="Precision cannot be calibrated: the gradient is not finite"):
        compiled(Mlp(), (x * float("nan"), labels), precision="auto")
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="An error budget of 1e-09 cannot be met"):
        compiled(Mlp(), INPUTS, precision="auto", error_budget=1e-9)


def test_a_plan_of_another_model() -> None:
    plan = PrecisionPlan((Choice("encoder.forward", "bf16"),))
    with pytest.raises(
        BackendCompilerFailed, match=r"it has none of the products of this graph, such as 'up\.forward'"
    ):
        compiled(Mlp(), INPUTS, precision=plan)


@dataclass(frozen=True)
class Producers(Pass):
    """What the pass does on a GPU's graph."""

    name: ClassVar[str] = "producers"
    runs_on: ClassVar[Literal["joint", "graph", "both"]] = "joint"

    def run(self, gm: Any, target: Target) -> Report:
        return Report(bool(fuse_producers(gm)))


@pytest.mark.parametrize(("name", "producer"), [("gpt-tiny", "gelu_tanh"), ("llama-tiny", "silu_mul")])
def test_activations_are_rounded_where_they_are_computed(name: str, producer: str) -> None:
    entry = zoo.load(name)
    model, inputs = entry.build(), entry.inputs()
    passes: list[Any] = ["canonicalize", "precision{format=int8}", "default"]
    plain, _ = compiled(model, inputs, passes=passes)
    torch._dynamo.reset()
    fused, seen = compiled(model, inputs, passes=[*passes[:2], Producers(), "default"])
    made = [n for n in seen[0].gm.graph.nodes if ops.name_of(n) == "dsc.quantise_of.default"]
    assert [n.args[1] for n in made] == [producer] * 2  # of two blocks; sums are read by norms too
    assert fused == pytest.approx(plain, rel=1e-4)
    assert not [n for n in seen[0].gm.graph.nodes if ops.name_of(n) in ("gelu.default", "silu.default") and not n.users]
