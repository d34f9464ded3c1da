"""Kernels of 8-bit products on a GPU: against the emulation, and their speed."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from common import table
from precision_models import MODELS, text_batches

from dsc.precision import emulate
from dsc.precision import ops as eight


def gpu(settings: argparse.Namespace) -> dict[str, Any]:
    """Kernels against the emulation, and against bf16 products of the same shapes.  Under a minute."""
    import dsc.codegen.templates.precision_ops  # noqa: F401  # registers them

    device = torch.device("cuda")
    fp8 = torch.cuda.get_device_capability() >= (9, 0)
    kinds = (("e4m3", True), ("int8", False)) if fp8 else (("int8", False),)
    out: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "checks": {}, "times": {}}
    rows: list[tuple[object, ...]] = []
    for (dtype, _), grain, shape in itertools.product(
        kinds, ("1x128", "row", "tensor"), ((256, 512, 384), (272, 496, 400))
    ):
        m, k, n = shape
        x, w = torch.randn(m, k), torch.randn(n, k)
        other = "128x128" if grain == "1x128" else grain
        exact = [emulate.quantise_both(t, dtype, g) for t, g in ((x, grain), (w, other))]
        got = [eight.quantise_both(t.to(device), dtype, g) for t, g in ((x, grain), (w, other))]
        same = all(torch.equal(a.float(), b.cpu().float()) for g, e in zip(got, exact) for a, b in zip(e, g))
        (a, sa, *_), (b, sb, *_) = exact
        want = emulate.mm8(a, sa, b, sb, torch.bfloat16).float()
        product = eight.mm8(*(t.to(device) for t in (a, sa, b, sb)), torch.bfloat16).cpu().float()
        error = float((product - want).norm() / want.norm())
        out["checks"][f"{dtype} {grain} {shape}"] = {"rounding equal": same, "product": error}
        rows.append((f"{dtype} {grain}", "x".join(map(str, shape)), same, f"{error:.1e}"))
    print(table(("kernel", "M x K x N", "rounding equal", "product, relative error"), rows))
    print(
        f"tf32: {float((eight.tf32(x.to(device), w.t().to(device)).cpu() - x @ w.t()).norm() / (x @ w.t()).norm()):.1e}\n"
    )
    times: list[tuple[object, ...]] = []
    for m, k, n in ((8192, 4096, 4096), (8192, 4096, 14336), (4096, 8192, 4096)):
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        w = torch.randn(n, k, device=device, dtype=torch.bfloat16)
        base = timed(lambda x=x, w=w: x @ w.t())
        flops = 2 * m * n * k
        shape = f"{m}x{k}x{n}"
        times.append((shape, "bf16", f"{base * 1e6:.0f}", f"{flops / base / 1e12:.0f}", 1.0, None))
        for (dtype, _), (ga, gb) in itertools.product(
            kinds, (("1x128", "128x128"), ("1x128", "1x128"), ("row", "row"), ("tensor", "tensor"))
        ):
            qa, qb = eight.quantise(x, dtype, ga), eight.quantise(w, dtype, gb)
            t = timed(lambda qa=qa, qb=qb: eight.mm8(*qa, *qb, torch.bfloat16))
            r = timed(lambda x=x, dtype=dtype, ga=ga: eight.quantise_both(x, dtype, ga))
            moved = m * k * 4.06 / r / 1e9
            out["times"][f"{shape} {dtype} {ga} {gb}"] = {"seconds": t, "bf16": base, "rounding": r}
            times.append(
                (
                    shape,
                    f"{dtype} {ga} x {gb}",
                    f"{t * 1e6:.0f}",
                    f"{flops / t / 1e12:.0f}",
                    base / t,
                    f"{r * 1e6:.0f} us, {moved:.0f} GB/s",
                )
            )
    print(table(("M x K x N", "format", "us", "TFLOP/s", "over bf16", "rounding x both ways"), times))
    out["step"] = gpu_step(device)
    return out


def gpu_step(device: torch.device) -> dict[str, float]:
    """One train step of the GPT on the GPU against the CPU's emulation: relative difference of the gradients."""
    found: dict[str, float] = {}
    inputs = next(text_batches())
    for precision in ("int8", *(("fp8",) if torch.cuda.get_device_capability() >= (9, 0) else ()), "bf16", "tf32"):
        results = []
        for place in ("cpu", device):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = MODELS["GPT"]().to(place)
            options = {"precision": {"blocks.*": precision}}
            torch.compile(model, backend="dsc", options=options)(*(t.to(place) for t in inputs)).backward()
            results.append(torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None]))
        found[precision] = float((results[0] - results[1]).norm() / results[0].norm())
    print(
        "\ngradients of a step on the GPU against the CPU's emulation: "
        + ", ".join(f"{k} {v:.1e}" for k, v in found.items())
    )
    return found


def timed(call: Callable[[], object]) -> float:
    """Median seconds of a call, of twenty."""
    for _ in range(3):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
    events[0].record()
    for e in events[1:]:
        call()
        e.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / 1e3
