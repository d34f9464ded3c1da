"""Sparse training held to its figures: losses, masks, gradients, kernels, and attention over blocks.

toy        a small language model, two seeds: validation loss of 2:4 against dense, each model judged with its masks
masks      every weight 2:4 after finalize; transposable masks against brute force
steps      1,000 training steps, a new mask at each: compilations, and gradients against a dense masked reference
pack       bytes of the kernel that masks and packs, by its accesses, for sm_80 and sm_90
product    instructions and registers of the sparse product's loop, for sm_80 and sm_90
attention  time and modelled operations against dense attention, 4k to 32k tokens, forward and backward

python benchmarks/sparsity.py [--only toy,masks,...] [--json FILE]
python benchmarks/sparsity.py --gpu      on a machine with an NVIDIA GPU: the kernels against references, and their times
"""

from __future__ import annotations

import argparse
import collections
import copy
import itertools
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import table, write_json
from torch import Tensor, nn

import dsc
from dsc import block_attention, nm, packed, sparsity
from dsc.debug.demo import stdlib_text
from dsc.models import gpt

BLOCKS = "blocks.*"
TOY: Mapping[str, tuple[dict[str, Any] | None, float]] = {
    "dense": (None, math.inf),
    "all linears": ({"layers": BLOCKS}, 0.03),
    "transposable": ({"layers": BLOCKS, "transposable": True}, 0.045),
    "MLP only": ({}, 0.01),
}
"""Option, and the largest gap of validation loss to dense, in nats."""
BATCH, LENGTH = 16, 64


def compiled(net: nn.Module, given: Any, seen: list[Any] | None = None) -> tuple[Callable[..., Tensor], dsc.State]:
    torch.compiler.reset()
    state = dsc.State()
    options = {"sparsity": given, "state": state, **({} if seen is None else {"on_compile": seen.append})}
    return torch.compile(net, backend="dsc", options=options, dynamic=False), state


def toy_model() -> nn.Module:
    return gpt.GPT(gpt.Config(vocab=128, max_length=LENGTH, layers=2, heads=4, width=128, tied=False))


def draw(text: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    places = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=g)
    rows = torch.stack([text[p : p + LENGTH + 1] for p in places.tolist()]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def train(given: dict[str, Any] | None, seed: int, steps: int) -> float:
    """Validation loss after AdamW, with a warm-up and a cosine, of a model that is compiled with the option."""
    text = stdlib_text(4_000_000)
    text = text[text < 128]
    learn, judge = text[: int(len(text) * 0.95)], text[int(len(text) * 0.95) :]
    torch.manual_seed(seed)
    net = toy_model()
    call, _ = compiled(net, given)
    decayed = [p for p in net.parameters() if p.dim() > 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": [p for p in net.parameters() if p.dim() < 2]}]
    adam = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)
    g = torch.Generator().manual_seed(1000 + seed)
    for i in range(steps):
        for group in adam.param_groups:
            group["lr"] = 2e-3 * min(1, (i + 1) / 50) * (0.1 + 0.45 * (1 + math.cos(math.pi * i / steps)))
        loss = call(*draw(learn, g))
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        adam.step()
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        return statistics.fmean(float(call(*draw(judge, g))) for _ in range(24))


def toy(args: argparse.Namespace) -> dict[str, Any]:
    losses = {n: [train(given, s, args.steps) for s in (0, 1)] for n, (given, _) in TOY.items()}
    rows, good = [], True
    for name, (_, limit) in TOY.items():
        gap = statistics.fmean(losses[name]) - statistics.fmean(losses["dense"])
        good &= gap <= limit
        shown = "" if limit == math.inf else f"<= {limit}"
        rows.append((name, f"{losses[name][0]:.4f}", f"{losses[name][1]:.4f}", f"{gap:+.4f}", shown))
    print(table(["2:4", "seed 0", "seed 1", "gap, nats", "wanted"], rows))
    return {"losses": losses, "good": good}


def masks(_: argparse.Namespace) -> dict[str, Any]:
    net = toy_model()
    call, state = compiled(net, {"layers": BLOCKS, "transposable": True})
    g = torch.Generator().manual_seed(0)
    call(*draw(stdlib_text(100_000).clamp_max(127), g)).backward()  # type: ignore[no-untyped-call]
    sparsity.finalize(net, state)
    found = [net.get_parameter(f"{x.name}.weight") for x in sparsity.read(state).layers]
    exact = all(
        bool(((w.view(-1, 4) != 0).sum(1) == 2).all() and ((w.T.reshape(-1, 4) != 0).sum(1) == 2).all()) for w in found
    )
    w = torch.randn(256, 512, generator=g).abs().double()
    mask = nm.nm_mask(w, torch.tensor(2), 4, True)
    kept = float((w * mask).sum() / w.sum())
    tiles = w.view(64, 4, 128, 4).transpose(1, 2).reshape(-1, 16)[:200]
    best = torch.full((200,), -1.0, dtype=torch.float64)
    for chosen in itertools.combinations(range(16), 8):  # all 12,870 ways to keep 8, those of them that fit
        tile = torch.zeros(16, dtype=torch.bool)
        tile[list(chosen)] = True
        if bool((tile.view(4, 4).sum(0) == 2).all() and (tile.view(4, 4).sum(1) == 2).all()):
            best = torch.maximum(best, tiles[:, tile].sum(1))
    own = mask.view(64, 4, 128, 4).transpose(1, 2).reshape(-1, 16)[:200]
    off = float(((tiles * own).sum(1) - best).abs().max())
    rows = [
        (
            "weights 2:4 along rows and columns after finalize",
            f"{len(found)} of {len(found)}" if exact else "no",
            "all",
        ),
        ("kept in 4 x 4", f"{float(mask.float().mean()) * 16:.0f} of 16", "8 of 16"),
        ("retained L1 of random weights", f"{kept:.4f}", ">= 0.70"),
        ("off from brute force, 200 tiles", f"{off:.1e}", "<= 1e-6"),
    ]
    print(table(["masks", "", "wanted"], rows))
    return {"exact": exact, "retained": kept, "brute force": off, "good": exact and kept >= 0.7 and off <= 1e-6}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out.square().mean()


def steps(args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    net, seen, count = MLP(), list[Any](), args.masks
    call, state = compiled(net, {"decay": 0.01}, seen)
    sgd = torch.optim.SGD(net.parameters(), 0.05)
    worst, flips = 0.0, 0
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(count):
            g = torch.Generator().manual_seed(i)
            x = torch.randn(64, 32, generator=g)
            with torch.no_grad():
                for p in net.parameters():
                    p.add_(torch.randn(p.shape, generator=g), alpha=0.01)
            sgd.zero_grad()
            call(x).backward()  # type: ignore[no-untyped-call]
            flips += sum(x.flip_rate > 0 for x in sparsity.read(state).layers)
            worst = max(worst, off_reference(net, state, x, 0.01))
            sgd.step()
            if i == count // 2:
                sparsity.densify(state)
            if i == count // 2 + 10:
                state["sparsity.dense_from"].fill_(-1)
    compilations = sum(r.kind == "forward" for r in seen)
    rows = [
        ("steps, masks that changed", f"{count}, {flips} of {2 * count}", ""),
        ("compilations", compilations, "1"),
        ("worst gradient, off the dense reference", f"{worst:.1e}", "<= 1e-5"),
    ]
    print(table(["masks at every step", "", "wanted"], rows))
    return {"worst": worst, "compilations": compilations, "good": worst <= 1e-5 and compilations == 1}


def off_reference(net: nn.Module, state: dsc.State, x: Tensor, decay: float) -> float:
    """The largest difference of a gradient from that of the dense model times the masks."""
    other = copy.deepcopy(net)
    for name in ("up", "down"):
        with torch.no_grad():
            other.get_parameter(f"{name}.weight").mul_(state[f"sparsity.{name}.mask"])
    other.zero_grad()
    other(x).backward()
    worst = 0.0
    for name, p in other.named_parameters():
        want, own = p.grad, net.get_parameter(name)
        assert want is not None and own.grad is not None
        if name.endswith("weight"):
            want = want + decay * own.detach() * ~state[f"sparsity.{name[:-7]}.mask"]
        worst = max(worst, float((own.grad - want).abs().max()))
    return worst


def pack(_: argparse.Namespace) -> dict[str, Any]:
    import triton.language as tl

    from dsc.codegen.cubin import compile_source
    from dsc.codegen.templates import pack24
    from dsc.codegen.triton import Schedule

    rows, good, out = [], True, {}
    for both, capability in itertools.product((False, True), (80, 90)):
        types = ["*fp32", *["*i32"] * (4 if both else 2), "i32", "i32", *["constexpr"] * 3]
        fixed: Any = {"dtype": tl.bfloat16, "R": pack24.ROWS, "C": pack24.COLUMNS}
        schedule = Schedule(num_warps=pack24.WARPS)
        facts = compile_source(
            pack24.source(both), "pack24", types, fixed, list(range(len(types) - 3)), schedule, capability
        )
        weights, threads = pack24.ROWS * pack24.COLUMNS, 32 * pack24.WARPS
        read = sum(a.width * a.count for a in facts.accesses if not a.store) * threads / weights
        values = sum(a.width * a.count for a in facts.accesses if a.store and "values" in a.buffer) * threads / weights
        moved = read + values + 0.125 * (1 + both)  # meta: two words for 32 weights, whatever threads write them
        limit = 4 + 1.125 * (1 + both)
        good &= moved <= limit and facts.spilled == 0
        name = "W and its transpose" if both else "W"
        rows.append((name, f"sm_{capability}", f"{moved:.3f}", f"<= {limit}", facts.registers, facts.spilled))
        out[f"{name} {capability}"] = moved
    print(table(["pack24, one launch", "", "bytes a weight", "wanted", "registers", "spilled"], rows))
    w = torch.randn(64, 128)
    values, meta, turned, turned_meta = packed.pack24(w, True, torch.bfloat16)
    mask = nm.nm_mask(w.abs(), torch.tensor(2), 4, True)
    same = torch.equal(packed.unpack(values, meta), (w * mask).bfloat16())
    same &= torch.equal(packed.unpack(turned, turned_meta), (w * mask).bfloat16().T)
    print(f"both orientations unpack to the masked weight: {same}; the kernel equals that reference in the interpreter")
    return {**out, "good": good and same}


def product(_: argparse.Namespace) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from dsc.codegen import cubin
    from dsc.codegen.templates import sparse_mm
    from dsc.codegen.triton import Schedule

    rows, good = [], True
    tile = sparse_mm.LARGE
    fixed = dict(sparse_mm.constants(tile, "bf16"))
    names = ("values", "meta", "x", "y", "K", "x_stride", "y_stride")
    types = dict(zip(names, ("*i32", "*i32", "*i32", "*bf16", "i32", "i32", "i32"))) | dict.fromkeys(fixed, "constexpr")
    hints = {(i,): [["tt.divisibility", 16]] for i in range(len(names))}
    for capability in (80, 90):
        target = GPUTarget("cuda", capability, 32)
        source = GluonASTSource(sparse_mm.sparse_mm, types, fixed, hints)
        made = triton.compile(source, target=target, options={"num_warps": tile.warps})
        sass = cubin._tool("cuobjdump", made.asm["cubin"], "-sass")
        count = collections.Counter(re.findall(r"\*/\s+(?:@!?U?P\d+ +)?([A-Z]\w*(?:\.\w+)?)", sass))
        registers, spilled = cubin.resources(made.asm["cubin"], made.asm["ptx"], Schedule(num_warps=tile.warps))
        macs = tile.rows * tile.columns * tile.deep
        wanted = 2 * macs // 2 // 4096 // tile.warps
        shuffles = sum(v for k, v in count.items() if k.startswith("SHFL"))
        good &= count["HMMA.SP"] == wanted and not shuffles and registers <= 128 and not spilled
        rows.append((f"sm_{capability}", count["HMMA.SP"], wanted, count["LDSM.16"], shuffles, registers, spilled))
    head = [
        "mma.sp, a turn of the loop",
        "HMMA.SP a warp",
        "FLOP/2/4096/warps",
        "LDSM",
        "shuffles",
        "registers",
        "spilled",
    ]
    print(table(head, rows))
    return {"rows": rows, "good": good}


WINDOW, SINK, BLOCK, WIDTH = 4, 1, 64, 64
"""Blocks, blocks, tokens, and elements of a head."""


def attention(args: argparse.Namespace) -> dict[str, Any]:
    """CPU seconds of dense and sparse attention on one thread, forward and backward, in turns in the same run."""
    torch.set_num_threads(1)
    off = agreement()
    rows, out, ratio = [], {}, 0.0
    for top_k, length in itertools.product((4, 8), (4096, 8192, 16384, 32768)):
        g = torch.Generator().manual_seed(0)
        q, k, v, grad = (torch.randn(1, length, 1, WIDTH, generator=g).transpose(1, 2) for _ in range(4))
        runs = {"sparse": lambda: sparse_step(q, k, v, grad, top_k), "dense": lambda: dense_step(q, k, v, grad)}  # noqa: B023
        seconds = {n: min(cpu_seconds(run) for _ in range(args.rounds)) for n, run in runs.items()}
        listed = block_attention.listed(True, WINDOW, SINK, top_k)
        blocks = length // BLOCK
        work = 14.0 * WIDTH * length * listed * BLOCK + 2.0 * WIDTH * blocks * blocks
        dense = 14.0 * WIDTH * length * length / 2
        rows.append(
            (f"{length} tokens, top {top_k}", seconds["dense"], seconds["sparse"], seconds["dense"] / seconds["sparse"],
             dense / 1e9, work / 1e9, f"{seconds['sparse'] / length * 1e6:.2f}")
        )  # fmt: skip
        out[f"{length} {top_k}"] = seconds
        if length == 16384 and top_k == 4:
            ratio = seconds["dense"] / seconds["sparse"]
    head = ["causal attention", "dense s", "blocks s", "faster", "dense GFLOP", "blocks GFLOP", "us a token"]
    print(table(head, rows))
    print(f"window {WINDOW * BLOCK}, sink {SINK * BLOCK}, blocks of {BLOCK}; off masked attention {off:.1e} (<= 1e-5)")
    print(f"at 16384 tokens and top 4, {ratio:.2f} times as fast as dense (>= 3)")
    return {"seconds": out, "off": off, "ratio": ratio, "good": off <= 1e-5 and ratio >= 3}


def cpu_seconds(call: Callable[[], object]) -> float:
    """Of this process: what else the machine does counts little."""
    start = time.process_time()
    call()
    return time.process_time() - start


def sparse_step(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, top_k: int) -> None:
    ops, scale = torch.ops.dsc, WIDTH**-0.5
    index = ops.block_select(q, k, True, BLOCK, WINDOW, SINK, top_k)
    out, sums = ops.block_attention(q, k, v, index, True, BLOCK, scale)
    ops.block_attention_backward(grad, q, k, v, out, sums, index, True, BLOCK, scale)


def dense_step(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> None:
    aten = torch.ops.aten
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, sums, 0.0, True)


def agreement(device: str = "cpu") -> float:
    """The worst difference from masked attention, of results and gradients."""
    g = torch.Generator().manual_seed(0)
    worst = 0.0
    for causal, length in ((True, 500), (False, 450)):
        q, k, v, grad = (torch.randn(2, 4, length, WIDTH, generator=g).to(device) for _ in range(4))
        raw = [x.requires_grad_() for x in (q, k, v)]
        index = torch.ops.dsc.block_select(q.detach(), k.detach(), causal, BLOCK, 2, 1, 2)
        mask = block_attention.block_mask(index, length, causal, BLOCK)
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        wanted = torch.autograd.grad(want, raw, grad)
        plain = [x.detach() for x in raw]
        out, sums = torch.ops.dsc.block_attention(*plain, index, causal, BLOCK, WIDTH**-0.5)
        args = (grad, *plain, out, sums, index, causal, BLOCK, WIDTH**-0.5)
        found = torch.ops.dsc.block_attention_backward(*args)
        worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in zip((out, *found), (want, *wanted))))
    return worst


# On a GPU.


def timed(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 50.0


def tried(name: str, check: Callable[[], Iterator[tuple[str, object, object]]]) -> list[tuple[str, object, object]]:
    """The rows of a check, or the row that says how it failed: one broken kernel must not hide the others."""
    try:
        return list(check())
    except Exception as why:
        return [(name, f"FAILED: {type(why).__name__}: {str(why).strip().splitlines()[0] if str(why) else ''}", "")]


def gpu_pack() -> Iterator[tuple[str, object, object]]:
    for both in (False, True):
        w = torch.randn(1024, 2048, device="cuda")
        found = torch.ops.dsc.pack24(w, both, torch.bfloat16)
        dense = packed.unpack(found[0], found[1])
        mask = nm.nm_mask(w.abs(), torch.tensor(2), 4, both)
        retained = float((dense.abs().sum() - (w * mask).bfloat16().abs().sum()).abs() / w.abs().sum())
        same = float((dense == (w * mask).bfloat16()).float().mean())
        exact = bool(((dense.view(-1, 4) != 0).sum(1) == 2).all())
        turned = bool(torch.equal(packed.unpack(found[2], found[3]), dense.T)) if both else "-"
        yield (
            f"pack24 transposable={both}",
            f"2:4 {exact}, as ATen {same:.6f}, sum off {retained:.1e}, turned {turned}",
            "",
        )
        big = torch.randn(8192, 8192, device="cuda")
        us = timed(lambda: torch.ops.dsc.pack24(big, both, torch.bfloat16))  # noqa: B023
        copy_us = timed(lambda: big.clone())  # noqa: B023
        share = (4 + 1.125 * (1 + both)) / us / (8 / copy_us)
        yield f"pack24 transposable={both} [8192, 8192]", f"{us:.1f} us", f"{share:.2f} of a copy's bandwidth"


def gpu_product() -> Iterator[tuple[str, object, object]]:
    keep = torch.tensor(2)
    for dtype, (m, n, k) in itertools.product(
        (torch.bfloat16, torch.float16), ((8, 1024, 1024), (100, 256, 512), (4096, 4096, 4096), (8192, 4096, 4096))
    ):
        w, x = torch.randn(n, k, device="cuda"), torch.randn(m, k, device="cuda").to(dtype)
        values, meta, *_ = torch.ops.dsc.pack24(w, False, dtype)
        low = packed.unpack(values, meta)
        want = (x.float() @ low.float().T).to(dtype)
        name = f"{str(dtype)[6:]} [{m}, {k}] x [{n}, {k}]"
        mm = torch.ops.dsc.sparse_mm24
        got = mm(x, values, meta, w, keep, False)
        off = float((got.float() - want.float()).abs().max() / want.float().abs().max())
        dense_us, own_us = timed(lambda: x @ low.T), timed(lambda: mm(x, values, meta, w, keep, False))  # noqa: B023
        yield f"mma.sp {name}", f"off {off:.1e}", f"{own_us:.1f} us, dense {dense_us:.1f} us, {dense_us / own_us:.2f}x"
        yield from tried(f"cuSPARSELt {name}", lambda: gpu_cslt(name, x, w, low, want, dense_us))  # noqa: B023


def gpu_cslt(
    name: str, x: Tensor, w: Tensor, low: Tensor, want: Tensor, dense_us: float
) -> Iterator[tuple[str, object, object]]:
    keep = torch.tensor(2)
    small = torch.ops.dsc.cslt_compress(low)
    got = torch.ops.dsc.cslt_mm(x, small, w, keep, False)
    off = float((got.float() - want.float()).abs().max() / want.float().abs().max())
    us = timed(lambda: torch.ops.dsc.cslt_mm(x, small, w, keep, False))
    made = timed(lambda: torch.ops.dsc.cslt_compress(low))
    foreseen = packed.bytes_of_compressed(low) // low.element_size()
    words = f"off {off:.1e}, strides {got.stride()}, compressed {small.numel()} (foreseen {foreseen})"
    yield f"cuSPARSELt {name}", words, f"{us:.1f} us, {dense_us / us:.2f}x; compress {made:.1f} us"


def gpu_attention() -> Iterator[tuple[str, object, object]]:
    torch.backends.cuda.matmul.allow_tf32 = False
    yield "block attention fp32", f"off masked attention {agreement('cuda'):.1e}", "<= 1e-5"
    for length in (4096, 16384, 32768):
        q, k, v, grad = (torch.randn(1, length, 8, WIDTH, device="cuda").bfloat16().transpose(1, 2) for _ in range(4))
        own = timed(lambda: sparse_step(q, k, v, grad, 8))  # noqa: B023
        raw = [x.detach().requires_grad_() for x in (q, k, v)]

        def dense() -> None:
            out = F.scaled_dot_product_attention(*raw, is_causal=True)  # noqa: B023
            torch.autograd.grad(out, raw, grad)  # noqa: B023

        us = timed(dense)
        yield f"block attention bf16 {length} tokens, 8 heads", f"{own:.0f} us", f"dense {us:.0f} us, {us / own:.2f}x"


def gpu_train() -> Iterator[tuple[str, object, object]]:
    """A train step through the compiler: masked, on sparse tensor cores, and with attention over blocks."""
    for given in (
        {"layers": "all", "never_slower": False},
        {"layers": "all", "never_slower": False, "transposable": True},
        {"layers": "all"},
    ):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
        call, state = compiled(net, given)
        x = torch.randn(4096, 1024, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = call(x).float().square().mean()
        loss.backward()
        names = [n for n in ("0", "2") if f"sparsity.{n}.mask" in state]
        other = copy.deepcopy(net)
        with torch.no_grad():
            for n in names:
                other.get_parameter(f"{n}.weight").mul_(state[f"sparsity.{n}.mask"])
        other.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            want = other(x).float().square().mean()
        want.backward()
        off = max(
            float((p.grad - q.grad).abs().max() / q.grad.abs().max().clamp_min(1e-20))
            for p, q in zip(net.parameters(), other.parameters())
            if p.grad is not None and q.grad is not None
        )
        yield (
            f"train step {given}",
            f"loss {float(loss):.6f} / {float(want):.6f}, gradient off {off:.1e}",
            f"layers {names}",
        )


def gpu() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("This machine has no CUDA GPU that torch can use.")
    from dsc.codegen.templates import sparse_ops  # noqa: F401  # registers the kernels

    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    start = time.perf_counter()
    checks = {"pack24": gpu_pack, "mma.sp": gpu_product, "attention": gpu_attention, "train step": gpu_train}
    for name, check in checks.items():
        print(table([name, "", ""], tried(name, check)))
        print(f"({time.perf_counter() - start:.0f} s)\n", flush=True)


PARTS: Mapping[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    f.__name__: f for f in (masks, pack, product, steps, attention, toy)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, with commas: {', '.join(PARTS)}")
    parser.add_argument("--gpu", action="store_true", help="check and time the kernels on an NVIDIA GPU")
    parser.add_argument("--steps", type=int, default=300, help="of the toy language model")
    parser.add_argument("--masks", type=int, default=1000, help="steps of the part 'steps'")
    parser.add_argument("--rounds", type=int, default=3, help="of timing; the fastest counts")
    parser.add_argument("--threads", type=int, default=None, help="torch.set_num_threads")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.gpu:
        gpu()
        return
    results = {}
    for name in args.only.split(","):
        results[name] = PARTS[name](args)
        print(flush=True)
    write_json(args.json, results)
    if bad := [n for n, r in results.items() if not r["good"]]:
        raise SystemExit(f"Not as wanted: {', '.join(bad)}")


if __name__ == "__main__":
    main()
