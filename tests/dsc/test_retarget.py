"""Models traced on a CPU, and what they become for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dsc import compiler, retarget, verify
from dsc import options as opt
from dsc.errors import CpuOnly
from dsc.models.zoo import load
from dsc.target import find
from dsc.torch_shim import aot_autograd, make_boxed_func

CUDA = torch.device("cuda")
ZOO = [
    *((name, "bf16") for name in ("gpt-tiny", "llama-tiny", "vit-tiny", "resnet-tiny", "bert-tiny", "moe-tiny")),
    *((name, "fp32") for name in ("gpt-tiny", "resnet-tiny")),
    *((name, "autocast") for name in ("gpt-tiny", "bert-tiny")),
]


def joint_graphs(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[list[tuple[Any, ...]], list[Tensor]]:
    """(joint graph for CUDA, what a partitioner is given), and results with gradients of the prepared graph on the CPU."""
    found: list[tuple[Any, ...]] = []

    def partition(joint: GraphModule, example: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, ...]:
        copy = compiler.copied(joint)
        retarget.to_device(copy, CUDA)
        found.append((copy, example, kwargs))
        return compiler.split(joint, example, **kwargs)

    def backend(gm: GraphModule, example: Sequence[Any]) -> Any:
        retarget.prepare(gm)
        run = lambda g, _: make_boxed_func(g.forward)  # noqa: E731
        return aot_autograd(fw_compiler=run, bw_compiler=run, inference_compiler=run, partition_fn=partition)(
            gm, example
        )

    torch._dynamo.reset()
    return found, results(torch.compile(fn, backend=backend), fn, inputs)


def results(fn: Callable[..., Any], owner: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [*inputs, *(owner.parameters() if isinstance(owner, nn.Module) else ())]
    leaves = [t for t in leaves if t.requires_grad]
    out = fn(*inputs)
    grads = torch.autograd.grad(out.float().square().sum(), leaves, allow_unused=True)
    return [out.detach(), *(g for g in grads if g is not None)]


def attention_ops(gm: GraphModule) -> set[str]:
    return {n.target.overloadpacket.__name__ for n in gm.graph.nodes if "attention" in str(n.target)}


def check(gm: GraphModule) -> None:
    """Legal, and nothing left on the CPU."""
    verify.verify(gm, "for cuda")
    for n in gm.graph.nodes:
        values = n.meta.get("val")
        for v in values if isinstance(values, (tuple, list)) else [values]:
            assert not isinstance(v, Tensor) or v.device.type == "cuda", n.format_node()
        devices = [a for a in (*n.args, *n.kwargs.values()) if isinstance(a, torch.device)]
        assert all(d.type == "cuda" for d in devices), n.format_node()


def planned(joint: tuple[Any, ...], target: str) -> list[Any]:
    make = compiler.make(opt.parse({"target": target}, None, {}), find(target))
    gm, example, kwargs = joint
    graphs = compiler.split(compiler.plan_joint(compiler.copied(gm), make), example, **kwargs)
    return [compiler.plan(g, kind, make, build=False) for g, kind in zip(graphs, ("forward", "backward"))]


@pytest.mark.parametrize(("name", "mode"), ZOO)
def test_zoo_becomes_a_cuda_program(name: str, mode: str) -> None:
    entry = load(name)
    model, inputs = entry.build(), list(entry.inputs())
    if mode == "bf16":
        model.to(torch.bfloat16)
        inputs = [x.bfloat16() if x.is_floating_point() else x for x in inputs]
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        joints, got = joint_graphs(model, inputs)
        want = results(model, model, inputs)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)  # the prepared graph still runs on the CPU, as eager does
    [joint] = joints
    check(joint[0])
    if name == "resnet-tiny":
        assert not attention_ops(joint[0])
    else:
        kernel = "efficient" if mode == "fp32" or name == "bert-tiny" else "flash"
        wanted = f"_scaled_dot_product_{kernel}_attention"
        assert attention_ops(joint[0]) == {wanted, f"{wanted}_backward"}
    for record in planned(joint, "h100"):
        assert record.numbers["kernels"] > 0
        assert "@triton.jit" in record.program.code
        check(record.gm)


def qkv(*shape: int, dtype: torch.dtype = torch.float32, kv_heads: int | None = None) -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    batch, heads, length, width = shape
    shapes = [(batch, h, length, width) for h in (heads, kv_heads or heads, kv_heads or heads)]
    return [torch.randn(s, generator=make).to(dtype).requires_grad_() for s in shapes]


FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
CASES: dict[str, tuple[Callable[..., Tensor], list[Tensor], str | None]] = {
    "scale": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.5), qkv(2, 3, 9, 16), EFFICIENT),
    "causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), qkv(2, 3, 9, 8), EFFICIENT),
    "odd width": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        qkv(2, 3, 9, 10, dtype=torch.bfloat16),
        FLASH,
    ),
    "gqa": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        qkv(2, 4, 9, 16, dtype=torch.bfloat16, kv_heads=2),
        FLASH,
    ),
    "gqa in 32 bits": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        qkv(2, 4, 9, 16, kv_heads=2),
        EFFICIENT,
    ),
    "not square": (
        lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :5], k, v, is_causal=True),
        qkv(2, 2, 9, 16, dtype=torch.bfloat16),
        EFFICIENT,
    ),
    "mask": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(9, 9, dtype=torch.bool).tril()),
        qkv(2, 2, 9, 16),
        EFFICIENT,
    ),
    "additive mask": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, q.detach().new_ones(2, 1, 1, 16)),
        qkv(2, 2, 16, 16, dtype=torch.bfloat16),
        EFFICIENT,
    ),
    "no batch": (lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]), qkv(2, 2, 9, 16), None),
    "float64": (F.scaled_dot_product_attention, qkv(2, 2, 9, 16, dtype=torch.float64), None),
}


@pytest.mark.parametrize("case", CASES)
def test_attention_chooses_as_on_cuda_and_computes_as_eager(case: str) -> None:
    fn, inputs, kernel = CASES[case]
    joints, got = joint_graphs(fn, inputs)
    want = results(fn, fn, inputs)
    low = inputs[0].dtype == torch.bfloat16
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2 if low else 1e-5, atol=2e-2 if low else 1e-5)
    [(gm, _, _)] = joints
    check(gm)
    assert attention_ops(gm) == ({kernel, f"{kernel}_backward"} if kernel else set())


def test_a_wrong_call_raises_what_eager_raises() -> None:
    q, k, v = qkv(1, 1, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="attn_mask"):
        joint_graphs(lambda *x: F.scaled_dot_product_attention(*x, attn_mask=mask, is_causal=True), [q, k, v])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_on_the_cpu_drops_the_same_forward_and_backward(dtype: torch.dtype) -> None:
    """The output is linear in the values: its derivative along them is the output itself."""
    q, k, v = (t.detach() for t in qkv(2, 2, 32, 16, dtype=dtype))
    v.requires_grad_()
    torch.manual_seed(0)
    kernel = "flash" if dtype == torch.bfloat16 else "efficient"
    out, *_ = torch.ops.dsc.sdpa(q, k, v, None, 0.5, False, None, kernel)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    (gv,) = torch.autograd.grad(out, v, weight)
    left, right = (gv.float() * v.float()).sum(), (out.float() * weight.float()).sum()
    torch.testing.assert_close(left, right, rtol=2e-2, atol=1e-1 if dtype == torch.bfloat16 else 1e-3)
    again = torch.ops.dsc.sdpa(q, k, v, None, 0.5, False, None, kernel)[0]
    assert not torch.equal(out, again)
    plain = F.scaled_dot_product_attention(q, k, v)
    assert (out - plain).abs().max() > 0.01


def test_dropout_gradients_are_those_of_its_formula() -> None:
    inputs = qkv(1, 2, 6, 8)

    def ours(*xs: Tensor) -> Tensor:
        torch.manual_seed(3)
        return torch.ops.dsc.sdpa(*xs, None, 0.4, True, None, "efficient")[0]

    out = ours(*inputs)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, inputs, weight)
    for i, g in enumerate(grads):
        step = torch.randn(g.shape, generator=torch.Generator().manual_seed(2))
        ends = [
            (ours(*(t.detach() + s * 1e-2 * step if i == j else t for j, t in enumerate(inputs))) * weight).sum()
            for s in (1, -1)
        ]
        torch.testing.assert_close((g * step).sum(), (ends[0] - ends[1]).detach() / 2e-2, rtol=2e-2, atol=2e-2)


def test_symbolic_lengths_and_constants() -> None:
    table = torch.tensor([1.0, 2.0, 3.0])

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y * torch.arange(y.shape[2], device=y.device)[:, None] * torch.tensor([2.0, 3.0, 1.0])[1] + table.sum()

    inputs = qkv(2, 2, 9, 16, dtype=torch.bfloat16)
    for t in inputs:
        torch._dynamo.mark_dynamic(t, 2)
    joints, _ = joint_graphs(f, inputs)
    [joint] = joints
    check_devices = [n for n in joint[0].graph.nodes if n.op == "call_function" and n.kwargs.get("device")]
    assert check_devices
    assert all(n.kwargs["device"].type == "cuda" for n in check_devices)
    names = {str(n.target) for n in joint[0].graph.nodes}
    assert "aten.sym_size.int" in names
    verify.verify(joint[0], "for cuda")
    for record in planned(joint, "a100"):
        assert record.program.source


def test_layer_norm_statistics_have_32_bits_on_cuda() -> None:
    norm = nn.LayerNorm(32, dtype=torch.bfloat16)
    joints, _ = joint_graphs(norm, [torch.randn(4, 32).bfloat16().requires_grad_()])
    [(gm, _, _)] = joints
    [node] = [n for n in gm.graph.nodes if n.target is torch.ops.aten.native_layer_norm.default]
    assert [t.dtype for t in node.meta["val"]] == [torch.bfloat16, torch.float32, torch.float32]


def test_a_graph_already_split_moves_too() -> None:
    entry = load("gpt-tiny")
    graphs: list[GraphModule] = []

    def keep(g: GraphModule, _: Any) -> Any:
        copy = compiler.copied(g)
        retarget.to_device(copy, CUDA)
        graphs.append(copy)
        return make_boxed_func(g.forward)

    def backend(gm: GraphModule, example: Sequence[Any]) -> Any:
        retarget.prepare(gm)
        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(gm, example)

    torch._dynamo.reset()
    torch.compile(entry.build().bfloat16(), backend=backend)(*entry.inputs()).backward()
    forward, backward = graphs
    check(forward)
    check(backward)
    saved = {n.name: n.meta["val"] for n in forward.graph.output_node().all_input_nodes}
    for n in backward.graph.nodes:
        if n.op == "placeholder" and n.name in saved:
            assert n.meta["val"].dtype == saved[n.name].dtype
            assert n.meta["val"].shape == saved[n.name].shape


def test_operators_of_the_cpu_alone() -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    gm = make_fx(lambda q, k, v: op(q, k, v)[0], tracing_mode="fake")(*(t.detach() for t in qkv(1, 2, 4, 8)))
    with pytest.raises(CpuOnly, match=r"cannot be planned for cuda .* which only CPUs have"):
        retarget.to_device(gm, CUDA)
