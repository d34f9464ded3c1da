"""Sparse training from the outside: against dense references that multiply by the same masks, and what never happens."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsc
from dsc import errors, sparsity
from dsc.block_attention import block_mask, block_select
from dsc.models import zoo
from dsc.nm import nm_mask


class MLP(nn.Module):
    """up -> gelu -> down, and a head that is no part of it."""

    def __init__(self, width: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.Linear(width, 8)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.down(F.gelu(self.up(x))))).square().mean()


def model(make: Callable[[], nn.Module] = MLP) -> nn.Module:
    torch.manual_seed(0)
    return make()


def compiled(
    net: nn.Module, given: Any, seen: list[Any] | None = None, **options: Any
) -> tuple[Callable[..., Tensor], dsc.State]:
    torch.compiler.reset()
    state = options.pop("state", dsc.State())
    options.setdefault("emit", "aten")  # passes are the same for every emitter, and nothing has to be built
    heard = {} if seen is None else {"on_compile": seen.append}
    return torch.compile(net, backend="dsc", options={"sparsity": given, "state": state, **heard, **options}), state


def masks(state: dsc.State) -> dict[str, Tensor]:
    return {n: state[f"sparsity.{n}.mask"].clone() for n in (x.name for x in sparsity.read(state).layers)}


def reference(net: nn.Module, kept: dict[str, Tensor], inputs: tuple[Tensor, ...], decay: float) -> list[Tensor]:
    """Loss and gradients of the dense model with its weights times the masks, and the decay of what they hide."""
    other = copy.deepcopy(net)
    for name, mask in kept.items():
        with torch.no_grad():
            other.get_submodule(name).weight.mul_(mask)
    loss = other(*inputs)
    loss.backward()
    found = [loss.detach()]
    for (name, p), q in zip(other.named_parameters(), net.parameters()):
        mask = kept.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        assert p.grad is not None
        found.append(p.grad if mask is None else p.grad + decay * q.detach() * ~mask)
    return found


def step(call: Callable[..., Tensor], net: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    net.zero_grad()
    loss = call(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


def worst(got: list[Tensor], want: list[Tensor]) -> float:
    assert len(got) == len(want)
    return max(float((a - b).abs().max()) for a, b in zip(got, want))


GIVEN: dict[str, Any] = {
    "plain": "2:4",
    "all": {"layers": "all", "decay": 0.1},
    "transposable": {"transposable": True, "decay": 0.0},
    "named": {"layers": ["down"], "pattern": "1:4"},
    "4:8": {"pattern": "4:8"},
    "wanda": {"importance": "wanda"},
    "fisher": {"importance": "fisher"},
    "taylor": {"importance": "taylor"},
    "hessian": {"importance": "hessian"},
    "gated": {"gate_threshold": 0.5, "decay": 0.0},
}


@pytest.mark.parametrize("name", GIVEN)
def test_as_dense_times_the_same_masks_over_steps_that_move_the_weights(name: str) -> None:
    net, given = model(), GIVEN[name]
    call, state = compiled(net, given, emit="auto" if name in ("plain", "wanda") else "aten")
    sgd = torch.optim.SGD(net.parameters(), 0.5)
    decay = given.get("decay", 2e-4) if isinstance(given, dict) else 2e-4
    for seed in range(4):
        x = torch.randn(24, 16, generator=torch.Generator().manual_seed(seed))
        got = step(call, net, (x,))
        if name != "gated":
            assert worst(got, reference(net, masks(state), (x,), decay)) <= 1e-5
        sgd.step()
    report = sparsity.read(state)
    assert report.layers[0].steps == 4
    assert {x.name for x in report.layers} == {"named": {"down"}, "all": {"up", "down", "head"}}.get(
        name, {"up", "down"}
    )
    n, m = (report.layers[0].form[k] for k in "nm")
    assert all(x.density == n / m for x in report.layers)
    assert 0 < report.coverage <= 1 and 0 < report.retained <= 1 and report.entropy <= 1 + 1e-9
    if name in ("wanda", "fisher", "taylor"):
        assert not torch.equal(state["sparsity.up.scale"], torch.ones_like(state["sparsity.up.scale"]))
    with torch.no_grad():  # an evaluation uses the masks of the weights as they are now
        left = copy.deepcopy(net)
        sparsity.finalize(left, state)
        assert torch.allclose(call(x), left(x), atol=1e-6)


@pytest.mark.parametrize("emit", ["cpp", "aten"])
def test_low_precision_and_autocast(emit: str) -> None:
    net = model()
    call, state = compiled(net, {"decay": 0.0}, emit=emit)
    x = torch.randn(24, 16)
    with torch.autocast("cpu", torch.bfloat16):
        got = step(call, net, (x,))
        want = reference(net, masks(state), (x,), 0.0)
    assert worst(got, want) <= 2e-2
    half = model().bfloat16()
    call, state = compiled(half, {"decay": 0.0}, emit=emit)
    got = step(call, half, (x.bfloat16(),))
    assert worst(got, reference(half, masks(state), (x.bfloat16(),), 0.0)) <= 2e-2


def test_one_compilation_and_nothing_stale_over_many_masks_decays_and_densities() -> None:
    net, seen = model(), []
    call, state = compiled(net, {"decay": 0.1, "density": 0.5}, seen)
    x = torch.randn(24, 16)
    sgd = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(120):
            decay = 0.1
            if i % 5 == 1:
                decay = 0.5
                sparsity.set_decay(state, decay)
            elif i:
                sparsity.set_decay(state, 0.1)
            if i == 50:
                state["sparsity.up.keep"].fill_(3)
            if i == 60:
                state["sparsity.up.keep"].fill_(2)
            if i == 80:
                sparsity.densify(state)
            if i == 100:
                state["sparsity.dense_from"].fill_(-1)
            if i % 10 == 5:
                with torch.no_grad():
                    for p in net.parameters():
                        p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)), alpha=0.1)
            got = step(call, net, (x,))
            kept = masks(state)
            assert worst(got, reference(net, kept, (x,), decay)) <= 1e-5 * max(1, decay)
            want = 1.0 if 80 <= i < 100 else 0.75 if 50 <= i < 60 else 0.5
            assert float(kept["up"].float().mean()) == want
            sgd.step()
    assert [r.kind for r in seen] == ["forward", "backward"]
    assert float(state["sparsity.up.stats"][1]) > 0


def test_the_backward_of_a_step_keeps_its_own_mask() -> None:
    """Density changes, and another forward runs, between a forward and its backward."""
    net = model()
    call, state = compiled(net, {"decay": 0.0})
    x = torch.randn(24, 16)
    step(call, net, (x,))
    kept = masks(state)
    net.zero_grad()
    loss = call(x)
    sparsity.densify(state)
    other = call(x)
    assert float(state["sparsity.up.mask"].float().mean()) == 1
    loss.backward()
    got = [loss.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]
    assert worst(got, reference(net, kept, (x,), 0.0)) <= 1e-5
    assert not torch.equal(loss, other)


def test_masks_are_kept_between_refreshes_after_a_warning() -> None:
    net = model()
    call, state = compiled(net, {"refresh": 3, "decay": 0.0})
    seen = []
    with pytest.warns(dsc.DscWarning, match=r"every 3 steps: .* nats"):  # noqa: PT031
        for i in range(6):
            step(call, net, (torch.randn(24, 16, generator=torch.Generator().manual_seed(i)),))
            seen.append(masks(state)["up"])
            with torch.no_grad():
                net.up.weight.add_(torch.randn(net.up.weight.shape), alpha=0.3)  # type: ignore[operator]
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[1], seen[2])
    assert not torch.equal(seen[2], seen[3]) and torch.equal(seen[3], seen[5])


def test_state_saves_loads_and_goes_on(tmp_path: Any) -> None:
    def run(net: nn.Module, call: Callable[..., Tensor], start: int, stop: int) -> list[Tensor]:
        out = []
        for i in range(start, stop):
            out.append(step(call, net, (torch.randn(24, 16, generator=torch.Generator().manual_seed(i)),))[0])
            with torch.no_grad():
                for p in net.parameters():
                    p.sub_(p.grad, alpha=0.5)  # type: ignore[arg-type]
        return out

    net = model()
    call, state = compiled(net, {"importance": "fisher"})
    whole = run(net, call, 0, 6)
    net = model()
    call, state = compiled(net, {"importance": "fisher"})
    run(net, call, 0, 3)
    torch.save((net.state_dict(), state.state_dict()), tmp_path / "checkpoint.pt")
    weights, kept = torch.load(tmp_path / "checkpoint.pt")
    fresh, other = model(), dsc.State()
    fresh.load_state_dict(weights)
    other.load_state_dict(kept)
    call, _ = compiled(fresh, {"importance": "fisher"}, state=other)
    assert torch.equal(torch.stack(run(fresh, call, 3, 6)), torch.stack(whole[3:]))


def test_finalize_leaves_exact_zeros_that_torch_can_pack() -> None:
    from torch.sparse._semi_structured_conversions import (
        sparse_semi_structured_from_dense_cutlass,
        sparse_semi_structured_to_dense_cutlass,
    )

    net = model(lambda: MLP(64, 128))
    call, state = compiled(net, {"layers": "all", "transposable": True})
    step(call, net, (torch.randn(8, 64),))
    sparsity.finalize(net, state)
    for name in ("up.weight", "down.weight", "head.weight"):
        weight = net.state_dict()[name]
        assert bool(((weight.view(-1, 4) != 0).sum(1) == 2).all())
        assert bool(((weight.T.reshape(-1, 4) != 0).sum(1) == 2).all())
    low = net.state_dict()["up.weight"].half()
    assert torch.equal(sparse_semi_structured_to_dense_cutlass(*sparse_semi_structured_from_dense_cutlass(low)), low)
    with pytest.raises(errors.StrangeMask, match="no such layer"):
        sparsity.finalize(nn.Linear(4, 4), state)
    with pytest.raises(errors.NoSparsity, match="has no masks"):
        sparsity.finalize(net, dsc.State())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.up.weight = self.embed.weight

    def forward(self, i: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.embed(i)))).square().mean()


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(F.relu(self.one(x))).square().mean()


def frozen() -> nn.Module:
    net = MLP()
    net.up.weight.requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("make", "inputs", "layer", "why"),
    [
        (Tied, (torch.arange(8),), "up", "tied: embedding.default reads it too"),
        (Shared, (torch.randn(4, 16),), "one", "shared by 2 products"),
        (frozen, (torch.randn(4, 16),), "up", "frozen"),
        (lambda: MLP(18, 30), (torch.randn(4, 18),), "up", "18 inputs are no multiple of 4"),
        (lambda: MLP().double(), (torch.randn(4, 16).double(),), "up", "float64"),
    ],
)
def test_layers_that_cannot_be_sparse_are_left_alone_and_named(
    make: Callable[[], nn.Module], inputs: tuple[Tensor, ...], layer: str, why: str
) -> None:
    remarks: list[Any] = []

    class Hear(dsc.Watcher):
        def after(self, stage: str, p: Any, gm: Any, report: Any, seconds: float) -> None:
            remarks.extend(report.remarks if p.name == "sparsify" else ())

    net = model(make)
    want = step(copy.deepcopy(net), net, inputs)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dsc.DscWarning)
        call, state = compiled(net, {"layers": layer}, watchers=[Hear()])
        got = step(call, net, inputs)[0]
    assert torch.allclose(got, want, atol=1e-6)
    assert [r.why for r in remarks if r.node == layer and why in r.why], remarks
    with pytest.raises(errors.NoSparsity):
        sparsity.read(state)


def test_named_as_a_pass() -> None:
    """The state of the compilation is its own."""
    net, state = model(), dsc.State()
    torch.compiler.reset()
    passes = 'canonicalize,sparsify{pattern="1:4",decay=0.0},recompute,fuse'
    call = torch.compile(net, backend="dsc", options={"passes": passes, "state": state})
    got = step(call, net, (x := torch.randn(24, 16),))
    assert sparsity.read(state).density == 0.25
    assert worst(got, reference(net, masks(state), (x,), 0.0)) <= 1e-5


def test_nothing_eligible_is_a_warning() -> None:
    net = model()
    call, _ = compiled(net, {"layers": "nothing.*"})
    with pytest.warns(dsc.DscWarning, match=r"No layer of this graph is sparse \(up: it is not chosen by"):
        step(call, net, (torch.randn(4, 16),))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("4:2", "'sparsity.pattern' cannot be '4:2'"),
        ({"pattern": "1:4", "transposable": True}, "only 2:4 is searched both ways"),
        ({"layer": "up"}, "'layer' is not an option of sparsity; did you mean 'layers'"),
        ({"decay": -1}, "'sparsity.decay' cannot be -1"),
        ({"refresh": 0}, "'sparsity.refresh' cannot be 0"),
        ({"importance": "random"}, "'sparsity.importance' cannot be 'random'"),
        ({"density": 2.0}, "'sparsity.density' cannot be 2.0"),
        ({"layers": 3}, "'sparsity.layers' cannot be"),
        (24, "'sparsity' cannot be 24"),
    ],
)
def test_bad_options(given: object, match: str) -> None:
    call, _ = compiled(model(), given)
    with pytest.raises(Exception, match=match) as raised:
        call(torch.randn(4, 16))
    assert isinstance(raised.value.__cause__ or raised.value.inner_exception, errors.DscError)  # type: ignore[attr-defined]


def test_gates_skip_rows_of_zeros_and_change_nothing() -> None:
    """Padding: most rows have no gradient at all."""

    class Picked(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.down(F.gelu(self.up(x)))))[:6].square().mean()

    net = model(Picked)
    call, state = compiled(net, {"decay": 0.0})
    x = torch.randn(64, 16)
    got = step(call, net, (x,))
    assert worst(got, reference(net, masks(state), (x,), 0.0)) <= 1e-6


# What happens around the graphs.


def test_balance_gives_more_to_layers_that_are_worth_more() -> None:
    net = model()
    with torch.no_grad():
        net.down.weight.mul_(4)  # type: ignore[operator]
    call, state = compiled(net, {"pattern": "4:8", "density": 0.5})
    step(call, net, (torch.randn(24, 16),))
    densities = sparsity.balance(state, 0.5, entropy=0.8)
    step(call, net, (torch.randn(24, 16),))
    report = sparsity.read(state)
    assert tuple(x.density for x in report.layers) == densities
    assert len(set(densities)) == 2 and report.density <= 0.5 + 1e-6
    call, state = compiled(net, "2:4")
    step(call, net, (torch.randn(24, 16),))
    with pytest.raises(errors.BadOption, match="measured"):
        sparsity.balance(state, 0.5)


def test_the_probe_leaves_all_but_the_decay_as_it_was() -> None:
    net = model()
    call, state = compiled(net, "2:4")
    adam = torch.optim.AdamW(net.parameters(), 1e-2)

    def once() -> None:
        step(call, net, (torch.randn(24, 16, generator=torch.Generator().manual_seed(0)),))
        adam.step()

    once()
    before = copy.deepcopy((net.state_dict(), state.state_dict()))
    once()
    after = copy.deepcopy(net.state_dict())
    net.load_state_dict(before[0])
    state.load_state_dict(before[1])
    chosen = sparsity.probe_decay(state, net, adam, once, steps=4)
    assert chosen in (0.0, 6e-5, 2e-4, 6e-4) and float(state["sparsity.decay"]) == pytest.approx(chosen)
    assert all(torch.allclose(a, b, atol=2e-2) for a, b in zip(net.state_dict().values(), after.values()))
    assert int(state["sparsity.step"]) == int(before[1]["sparsity.step"]) + 1


def test_the_diagonal_of_a_hessian_that_is_known() -> None:
    """Squares of the outputs of one layer: its Hessian's diagonal is 2 x^2, the same in each row."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x).square().sum()

    net, x = model(One), torch.diag(torch.arange(1.0, 9.0))
    call, state = compiled(net, {"importance": "hessian", "layers": "all", "decay": 0.0})
    step(call, net, (x,))
    sparsity.estimate_hessian(state, net, lambda: net(x), samples=2)
    assert torch.allclose(state["sparsity.up.scale"], 2 * torch.arange(1.0, 9.0).square().expand(4, 8))
    got = step(call, net, (x,))
    score = net.up.weight.square() * state["sparsity.up.scale"]  # type: ignore[operator]
    assert torch.equal(masks(state)["up"], nm_mask(score.detach(), torch.tensor(2), 4, False))
    assert worst(got, reference(net, masks(state), (x,), 0.0)) <= 1e-3


def test_channels_and_heads_are_gated_and_cut_out() -> None:
    entry = zoo.load("gpt-tiny")
    net, inputs = entry.build(), entry.inputs()
    channels = sparsity.gate(net)
    assert {s.kind for s in channels.sites} == {"mlp", "heads"} and len(channels.sites) == 4
    torch.compiler.reset()
    call = torch.compile(net, backend="dsc")
    plain = entry.build()
    assert torch.allclose(call(*inputs), plain(*inputs), atol=1e-5)
    for i in range(1, 5):
        step(call, net, inputs)
        channels.observe()
        channels.progress(i, 4, 0.5)
    assert all(1 <= int(s.gate.sum()) < s.count for s in channels.sites if s.kind == "mlp")
    want, count = net(*inputs).detach(), sum(p.numel() for p in net.parameters())
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.allclose(call(*inputs), want, atol=1e-5)
    gone = sparsity.compact(channels)
    assert gone == count - sum(p.numel() for p in net.parameters()) > 0
    assert torch.allclose(net(*inputs), want, atol=1e-5)
    assert torch.allclose(call(*inputs), want, atol=1e-5)
    assert not any("gate" in n for n, _ in net.named_buffers())
    with pytest.raises(errors.CannotPrune, match="no MLP and no attention"):
        sparsity.gate(nn.ReLU())


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(32, 96), nn.Linear(32, 32), causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
        causal = self.causal
        if mask is None and getattr(self, "sparse", False):
            index = block_select(q.detach(), k.detach(), causal, 16, 2, 1, 2)
            mask, causal = block_mask(index, length, causal, 16), False
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


ATTENTION = {"pattern": "block_sparse", "window": 32, "top_k": 2, "sink": 16, "block": 16}


@pytest.mark.parametrize("causal", [True, False])
def test_attention_over_blocks_in_a_model(causal: bool) -> None:
    net = model(lambda: Attention(causal))
    torch.compiler.reset()
    call = torch.compile(net, backend="dsc", options={"attention": ATTENTION})
    x = torch.randn(2, 200, 32)
    got = step(lambda x: call(x).square().mean(), net, (x,))
    with torch.no_grad():
        evaluated = call(x)
    net.sparse = True  # type: ignore[assignment]
    want = step(lambda x: net(x).square().mean(), net, (x,))
    assert worst(got, want) <= 1e-5
    assert float((evaluated - net(x).detach()).abs().max()) <= 1e-5


@pytest.mark.parametrize(
    ("attention", "match"),
    [
        ({"pattern": "strided"}, "'attention.pattern' cannot be 'strided'"),
        ({"window": 0}, "'attention.window' cannot be 0"),
        ({"block": 48}, "'attention.block' cannot be 48"),
        ({"topk": 3}, "'topk' is not an option of attention; did you mean 'top_k'"),
        ("block_sparse", "'attention' cannot be 'block_sparse'"),
    ],
)
def test_bad_attention(attention: object, match: str) -> None:
    torch.compiler.reset()
    call = torch.compile(model(), backend="dsc", options={"attention": attention})
    with pytest.raises(Exception, match=match) as raised:
        call(torch.randn(4, 16))
    assert isinstance(raised.value.__cause__ or raised.value.inner_exception, errors.DscError)  # type: ignore[attr-defined]


def test_attention_with_a_mask_or_few_tokens_stays() -> None:
    remarks: list[str] = []

    class Hear(dsc.Watcher):
        def after(self, stage: str, p: Any, gm: Any, report: Any, seconds: float) -> None:
            remarks.extend(r.why for r in report.remarks if p.name == "sparse-attention")

    net = model(lambda: Attention(False))
    for inputs in ((torch.randn(1, 40, 32),), (torch.randn(1, 200, 32), torch.ones(200, 200).bool())):
        torch.compiler.reset()
        call = torch.compile(net, backend="dsc", options={"attention": ATTENTION, "watchers": [Hear()]}, dynamic=False)
        assert torch.allclose(call(*inputs), net(*inputs), atol=1e-5)
    assert remarks[0] == "6 blocks of 16 cover all 40 tokens" and remarks[-1] == "it has a mask"
