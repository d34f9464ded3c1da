"""Formats of matrix products: what is modelled, what is measured, and what the generated code moves.

plans     GPT and LLaMA (two layers of 128, trained for 250 steps on Python's standard library), with and without outlier
          channels: predicted against measured gradient errors of random plans; plans for a budget, on the batch of the
          calibration and on others; modelled time against bf16 and against uniform fp8
control   training with many switches of formats: compilations, the loss against bf16 and against other seeds, a run
          that stops and goes on
bytes     what is saved for the backward, what rounding to 8 bits moves, what the kernels compile to
equal     the emulation against PyTorch's ``_scaled_mm``

python benchmarks/precision.py [--parts plans,control,bytes,equal] [--steps 1000] [--json FILE]
python benchmarks/precision.py --gpu        on a machine with an NVIDIA GPU: kernels against the emulation, and their speed

Times of plans are modelled: products of 32 times the width on 32 times the tokens (4096 wide, 16384 tokens), by the
roofline of ``dsc.passes.precision_time``.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import table, write_json
from torch import Tensor, nn
from torch.fx import GraphModule

import dsc
from dsc import compiler, ops
from dsc import target as targets
from dsc.compilation import Compilation
from dsc.debug.demo import batches, stdlib_text
from dsc.manager import Pass, Report
from dsc.models import gpt, llama
from dsc.passes.precision_calibrate import Calibration, calibrate
from dsc.passes.precision_measure import Measured
from dsc.passes.precision_plan import choose, plan
from dsc.passes.precision_sites import Site, extract
from dsc.passes.precision_time import BANDWIDTH_SHARE, PEAK_SHARE, SCALED_SHARE, seconds
from dsc.precision import emulate
from dsc.precision import ops as eight
from dsc.precision.formats import FORMATS
from dsc.watch import Watcher

SCALE = 32.0
"""Of every side of a product, when its time is modelled."""
LENGTH, BATCH = 64, 8
MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT": lambda: gpt.GPT(gpt.Config(128, LENGTH, 2, 4, 128)),
    "LLaMA": lambda: llama.Llama(llama.Config(128, LENGTH, 2, 4, 2, 128, 384)),
}
BUDGETS = (0.01, 0.02)
SMALL = gpt.Config(128, 32, 2, 2, 32)
"""Trained for many steps."""


@dataclass
class Ear(Watcher):
    """Keeps the joint graph, after canonicalize, and what it is called with."""

    graph: list[GraphModule] = field(default_factory=list)
    inputs: list[object] = field(default_factory=list)

    def captured(self, gm: GraphModule, inputs: Sequence[object]) -> Watcher:
        self.inputs = list(inputs)
        return self

    def after(self, stage: str, p: Pass, gm: GraphModule, report: Report, seconds: float) -> None:
        if stage == "joint" and p.name == "canonicalize":
            self.graph.append(compiler.copied(gm))


def text_batches(batch: int = BATCH, length: int = LENGTH, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    return batches(stdlib_text(2_000_000), batch, length, seed)


def trained(name: str, steps: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for inputs in itertools.islice(text_batches(seed=seed), steps):
        optimizer.zero_grad()
        model(*inputs).backward()
        optimizer.step()
    return model


def with_outliers(model: nn.Module, factor: float = 40.0, count: int = 3) -> nn.Module:
    """The same function with large channels between norms and the layers that read them, as large models have."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for block in model.blocks:  # type: ignore[union-attr]
            attention, feedforward = block.attention, block.feedforward
            readers = [getattr(attention, n) for n in ("qkv", "q", "k", "v") if hasattr(attention, n)]
            others = [getattr(feedforward, n) for n in ("gate", "up") if hasattr(feedforward, n)]
            for norm, layers in ((block.norm1, readers), (block.norm2, others)):
                channels = torch.randperm(norm.weight.numel(), generator=generator)[:count]
                norm.weight[channels] *= factor
                if getattr(norm, "bias", None) is not None:
                    norm.bias[channels] *= factor
                for layer in layers:
                    layer.weight[:, channels] /= factor
    return model


def joint(model: nn.Module, inputs: tuple[Tensor, ...]) -> Ear:
    torch._dynamo.reset()
    ear = Ear()
    torch.compile(model, backend="dsc", options={"watchers": [ear], "emit": "aten"})(*inputs)
    return ear


def measured(ear: Ear, sites: Sequence[Site], old: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> Measured:
    """The graph on another batch."""
    swap = {id(a): b for a, b in zip(old, new)}
    return Measured(ear.graph[0], sites, [swap.get(id(x), x) for x in ear.inputs])


# --- plans


def plans(settings: argparse.Namespace) -> dict[str, Any]:
    print(
        f"modelled: {PEAK_SHARE:.0%} of the peak of products, {SCALED_SHARE:.0%} of that where they scale, "
        f"{BANDWIDTH_SHARE:.0%} of the bandwidth; sides times {SCALE:.0f}\n"
    )
    out: dict[str, Any] = {}
    for outliers, name in itertools.product((False, True), MODELS):
        rows = []
        title = f"{name}{', outliers' if outliers else ''}"
        if settings.only and title not in settings.only:
            continue
        model = trained(name, settings.train)
        model = with_outliers(model) if outliers else model
        drawn = text_batches(seed=5)
        inputs = next(drawn)
        ear = joint(model, inputs)
        sites = extract(ear.graph[0])
        found = calibrate(measured(ear, sites, inputs, inputs), sites, targets.find("h100"), scale=SCALE)
        probes = found.measured.backwards - 1
        others = [measured(ear, sites, inputs, next(drawn)) for _ in range(3)]
        pearson, ratio, spread = additivity(found, settings.random)
        out[title] = {"products": len(sites), "probes": probes, "pearson": pearson, "measured / predicted": ratio}
        print(f"{title}: {len(sites)} products, {probes} probes; {settings.random} random plans: Pearson {pearson:.3f}, "
              f"measured / predicted {ratio:.3f} +- {spread:.3f}")  # fmt: skip
        for target in ("h100", "a100"):
            for budget in BUDGETS:
                rows.append(budget_row(title, found, target, budget, others))
                out[title][f"{target} {budget}"] = dict(zip(HEAD[1:], rows[-1][1:]))
        out[title]["equal time"] = equal_time(title, found)
        print(table(HEAD, rows), flush=True)
        print()
    return out


HEAD = (
    "model",
    "target",
    "budget",
    "speed-up",
    "predicted",
    "measured",
    "of budget",
    "held-out, worst",
    "probes",
    "formats",
)


def additivity(found: Calibration, count: int) -> tuple[float, float, float]:
    """Random plans, each of a palette of its own: correlation of predicted with measured errors; mean and spread of ratios.

    With one palette for all, plans of many products would err alike, and there would be nothing to correlate.
    """
    draw = random.Random(0)
    pairs = []
    for _ in range(count):
        palette = draw.sample(found.candidates, draw.randint(1, 4))
        formats = {
            s.name: draw.choice([f for f in palette if f in found.legal(s)] or found.legal(s)) for s in found.sites
        }
        pairs.append((found.predicted(formats), found.measured.error(formats)))
    predicted, seen = zip(*pairs)
    ratios = [b / a for a, b in pairs]
    return statistics.correlation(predicted, seen), statistics.mean(ratios), statistics.stdev(ratios)


def budget_row(
    title: str, found: Calibration, target: str, budget: float, others: Sequence[Measured]
) -> tuple[object, ...]:
    own = Calibration(
        found.measured, found.sites, targets.find(target), candidates(found, target), SCALE, dict(found.errors), found.growth
    )
    try:
        made = plan(own, budget)
    except dsc.DscError:
        return (title, target, budget, None, None, None, None, None, None, "none fits")
    formats = {c.site: FORMATS[c.format] for c in made.choices}
    held = max(o.error(formats) for o in others)
    counts = ", ".join(f"{n} {f}" for f, n in Counter(c.format for c in made.choices).most_common())
    error = made.measured or 0.0
    return (
        title, target, budget, f"{made.speedup:.3f}x", f"{made.predicted:.4f}", f"{error:.4f}",
        f"{error / budget:.2f}", f"{held / budget:.2f}", made.probes, counts,
    )  # fmt: skip


def candidates(found: Calibration, target: str) -> tuple[Any, ...]:
    peak = targets.find(target).peak
    return tuple(f for f in found.candidates if f.rate in peak)


def equal_time(title: str, found: Calibration) -> dict[str, float]:
    """The least error that a plan has in the time of uniform e4m3 by rows, against that one's error."""
    h100 = targets.find("h100")
    uniform = {s.name: FORMATS["bf16" if s.last else "fp8-rowwise"] for s in found.sites}
    limit, error = seconds(found.sites, uniform, h100, SCALE), found.measured.error(uniform)
    low, high = 0.0, error
    for _ in range(12):
        middle = (low + high) / 2
        try:
            fits = seconds(found.sites, choose(found, middle), h100, SCALE) <= limit
        except dsc.DscError:
            fits = False
        low, high = (low, middle) if fits else (middle, high)
    chosen = choose(found, high)
    ours, mine = found.measured.error(chosen), seconds(found.sites, chosen, h100, SCALE)
    bf16 = seconds(found.sites, {}, h100, SCALE)
    print(f"  uniform e4m3 by rows: {bf16 / limit:.3f}x, error {error:.4f}; a plan in no more time: "
          f"{bf16 / mine:.3f}x, error {ours:.4f}, {ours / error:.2f} of it")  # fmt: skip
    return {"uniform error": error, "plan error": ours, "ratio": ours / error, "uniform speed-up": bf16 / limit}


# --- control


def control(settings: argparse.Namespace) -> dict[str, Any]:
    """Train under a controller whose formats are switched all the time."""

    def run(precision: Any, seed: int, steps: int, switches: int = 0, stop: bool = False) -> tuple[Any, ...]:
        torch._dynamo.reset()
        torch.manual_seed(seed)
        model = gpt.GPT(SMALL)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        control, seen = dsc.PrecisionController(), []
        drawn, losses = text_batches(4, 32, seed), []
        for part in (steps // 2, steps - steps // 2) if stop else (steps,):
            if stop and losses:
                control, optimizer, model = resumed(control, optimizer, model)
            options = {"precision": precision, "controller": control, "on_compile": seen.append}
            call = torch.compile(model, backend="dsc", fullgraph=True, options=options)
            for _ in range(part):
                i = len(losses)
                loss = call(*next(drawn))
                optimizer.zero_grad()
                control.scale(loss).backward()
                control.step(optimizer)
                losses.append(loss.detach())
                if switches and i % (steps // switches) == steps // switches - 1:
                    switch(control, i)
        return [float(x) for x in losses], seen, control

    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        losses, seen, controller = run({"*": "int8"}, 0, settings.steps, switches=25)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    bf16 = {seed: end_of(plain_bf16(seed, settings.steps)) for seed in (0, 1, 2)}
    noise = max(bf16.values()) - min(bf16.values())
    short = min(settings.steps, 60)
    whole, parts = run({"*": "int8"}, 0, short, 6)[0], run({"*": "int8"}, 0, short, 6, stop=True)[0]
    numbers = {
        "steps": len(losses),
        "switches of a product's format": int(controller.metrics()["switches"]),
        "compiled graphs (forward, backward)": len(seen),
        "graph breaks": breaks,
        "loss at the end": end_of(losses),
        "the same in bf16": bf16[0],
        "difference": abs(end_of(losses) - bf16[0]),
        "range over seeds in bf16": noise,
        "a resumed run is identical": whole == parts,
    }
    print(table(("control", ""), [(k, v if not isinstance(v, float) else f"{v:.4f}") for k, v in numbers.items()]))
    return numbers


def plain_bf16(seed: int, steps: int) -> list[float]:
    """The same training with all products in bf16, and nobody who switches."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model = gpt.GPT(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    call = torch.compile(model, backend="dsc", options={"precision": "bf16"})
    losses = []
    for inputs in itertools.islice(text_batches(4, 32, seed), steps):
        loss = call(*inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def end_of(losses: Sequence[float]) -> float:
    return statistics.mean(losses[-max(len(losses) // 10, 1) :])


def switch(controller: dsc.PrecisionController, i: int) -> None:
    """Another set of products in another format, all roles of some layers at a time."""
    draw = random.Random(i)
    for site, product in controller.products.items():
        if draw.random() < 0.3:
            controller.switch(site, draw.choice(product.formats))


def resumed(controller: dsc.PrecisionController, optimizer: Any, model: nn.Module) -> tuple[Any, Any, nn.Module]:
    """Everything saved to a file, and made anew from it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "saved")
        torch.save([model.state_dict(), optimizer.state_dict(), controller.state_dict()], file)
        saved = torch.load(file)
    torch._dynamo.reset()
    model = gpt.GPT(SMALL)
    model.load_state_dict(saved[0])
    new = torch.optim.AdamW(model.parameters(), lr=2e-3)
    new.load_state_dict(saved[1])
    control = dsc.PrecisionController()
    control.load_state_dict(saved[2])
    return control, new, model


# --- bytes


def bytes_moved(settings: argparse.Namespace) -> dict[str, Any]:
    out: dict[str, Any] = {"saved": saved_bytes(), "traffic": {}, "kernels": {}}
    print(f"saved for the backward of 8-bit layers: {out['saved']:.3f} bytes an element\n")
    from dsc.codegen import cubin
    from dsc.codegen.templates import gemm8, quantise8
    from dsc.codegen.triton import Schedule

    rows: list[tuple[object, ...]] = []
    pointer = {"e4m3": "*fp8e4nv", "int8": "*i8"}
    for capability, dtype in ((90, "e4m3"), (90, "int8"), (80, "int8")):
        for grain in ("1x128", "128x128"):
            types = [
                "*bf16",
                "*bf16",
                pointer[dtype],
                "*fp32",
                pointer[dtype],
                *["*fp32"] * 3,
                *["i32"] * 3,
                *["constexpr"] * 8,
            ]
            constants: Any = {**quantise8.constants(grain, True, True, emulate.LIMIT[dtype], dtype == "int8"), "x1": 1}
            schedule = Schedule(num_warps=quantise8.WARPS, num_stages=1)
            facts = cubin.compile_source(
                quantise8.SOURCE, "quantise", types, constants, range(11), schedule, capability
            )
            moved = {a.buffer: a.width * a.count * quantise8.WARPS * 32 for a in facts.accesses}
            elements = quantise8.SIDE**2
            scales = 2 * 4 * emulate.scale_shape(128, 128, grain)[0]
            total = (moved["x"] + moved["q"] + moved["qt"] + scales) / elements
            out["traffic"][f"sm_{capability} {dtype} {grain}"] = total
            if grain == "1x128":
                out["traffic"][f"sm_{capability} {dtype}, in a GELU"] = fused = fused_bytes(dtype, capability)
                rows.append((f"gelu and quantise {dtype}", f"sm_{capability}", "-", None, None, f"{fused:.3f}"))
            rows.append(
                (f"quantise {dtype} {grain}", f"sm_{capability}", "-", facts.registers, facts.spilled, f"{total:.3f}")
            )
        for grains in (("1x128", "128x128"), ("1x128", "1x128"), ("row", "row"), ("tensor", "tensor")):
            types = [pointer[dtype], "*fp32", pointer[dtype], "*fp32", "*bf16", *["i32"] * 3, *["constexpr"] * 8]
            schedule = Schedule(num_warps=gemm8.WARPS, num_stages=gemm8.STAGES, fp_fusion=True)
            constants = gemm8.constants(*grains, dtype == "int8", 128)
            facts = cubin.compile_source(gemm8.SOURCE, "mm8", types, constants, range(8), schedule, capability)
            units = " ".join(f"{n} {u}" for u, n in facts.tensor.items())
            sass = facts.sass()
            fallen = "HMMA" in sass or "HGMMA" in sass
            out["kernels"][f"sm_{capability} {dtype} {' '.join(grains)}"] = {
                "units": dict(facts.tensor), "registers": facts.registers, "spilled": facts.spilled, "16-bit units": fallen,
            }  # fmt: skip
            rows.append(
                (
                    f"mm8 {dtype} {' x '.join(grains)}",
                    f"sm_{capability}",
                    units + (" and HMMA" if fallen else ""),
                    facts.registers,
                    facts.spilled,
                    None,
                )
            )
    print(table(("kernel", "for", "units", "registers", "spilled", "bytes an element"), rows))
    return out


def fused_bytes(dtype: str, capability: int) -> float:
    """What rounding adds to the kernel of a GELU: values in both directions and scales, all written, none read."""
    from dsc.codegen import cubin
    from dsc.codegen.templates import quantise8
    from dsc.codegen.triton import Schedule

    pointer = {"e4m3": "*fp8e4nv", "int8": "*i8"}[dtype]
    types = ["*bf16", "*bf16", pointer, "*fp32", pointer, *["*fp32"] * 3, *["i32"] * 3, *["constexpr"] * 8]
    limit = emulate.LIMIT[dtype]
    constants: Any = {**quantise8.constants("1x128", True, True, limit, dtype == "int8", "gelu"), "x1": 1}
    schedule = Schedule(num_warps=quantise8.WARPS, num_stages=1, fp_fusion=True)
    facts = cubin.compile_source(quantise8.SOURCE, "quantise", types, constants, range(11), schedule, capability)
    moved = {a.buffer: a.width * a.count * quantise8.WARPS * 32 for a in facts.accesses}
    return float(moved["q"] + moved["qt"] + 2 * 4 * quantise8.SIDE) / quantise8.SIDE**2


def saved_bytes() -> float:
    """Bytes that the forward saves of the inputs of layers in 8 bits, over how many elements those have."""
    torch._dynamo.reset()
    seen: list[Compilation] = []
    model = MODELS["LLaMA"]()
    options = {"precision": {"*": "int8"}, "on_compile": seen.append}
    torch.compile(model, backend="dsc", options=options)(*next(text_batches())).backward()
    backward = seen[1]
    products = {s for n in backward.gm.graph.nodes if ops.name_of(n) == "dsc.mm8.default" for s in n.all_input_nodes}
    saved = [n for n in backward.gm.graph.find_nodes(op="placeholder") if n in products]
    values = [n.meta["val"] for n in saved]
    tokens = LENGTH * BATCH
    activations = [v for v in values if v.dtype == torch.int8 and v.shape[1] == tokens]
    scales = [v for v in values if v.dtype == torch.float32 and v.shape[1] == tokens // emulate.BLOCK]
    whole = sum(v.numel() * v.element_size() for v in (*activations, *scales))
    return whole / sum(v.numel() for v in activations)


# --- equal


def equal(settings: argparse.Namespace) -> dict[str, Any]:
    """Our product against ``_scaled_mm`` on the CPU: bits, and time where the two are not one."""
    numbers: dict[str, Any] = {}
    shapes = {
        "row": ((64, 300, 96), (5, 20, 7), (33, 4096, 17), (128, 1024, 384)),
        "tensor": ((64, 300, 96), (5, 20, 7)),
    }
    for grain in shapes:
        numbers[grain] = equal_by(grain, shapes[grain])
    return numbers


def equal_by(grain: str, shapes: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    tried = same = 0
    far, ours, theirs = 0.0, 0.0, 0.0
    for (m, k, n), out in itertools.product(shapes, (torch.float32, torch.bfloat16)):
        a, sa = eight.quantise(torch.randn(m, k), "e4m3", grain)
        b, sb = eight.quantise(torch.randn(n, k), "e4m3", grain)
        start = time.process_time()
        want = torch._scaled_mm(a, b.t(), scale_a=sa, scale_b=sb.t(), out_dtype=out)
        middle = time.process_time()
        got = eight.mm8(a, sa, b, sb, out)
        theirs, ours = theirs + middle - start, ours + time.process_time() - middle
        tried += 1
        same += torch.equal(want, got)
        far = max(far, float((got.float() - want.float()).norm() / want.float().norm()))
    print(f"_scaled_mm by {grain}: {same} of {tried} equal bit for bit, largest relative difference {far:.1e}; "
          f"CPU seconds {ours:.3f}, _scaled_mm {theirs:.3f}")  # fmt: skip
    return {"tried": tried, "equal": same, "difference": far}


# --- on a GPU


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


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "equal": equal, "bytes": bytes_moved, "plans": plans, "control": control,
}  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}, with commas")
    p.add_argument(
        "--gpu", action="store_true", help="check and time the kernels on this machine's GPU, and nothing else"
    )
    p.add_argument("--steps", type=int, default=1000, help="of training under a controller")
    p.add_argument(
        "--train", type=int, default=250, help="steps before a plan is made: at the start errors are no noise"
    )
    p.add_argument("--random", type=int, default=30, help="random plans")
    p.add_argument("--only", action="append", help="of the plans: GPT, LLaMA, or 'GPT, outliers'; may be repeated")
    p.add_argument("--threads", type=int, default=None)
    p.add_argument("--json", type=Path, default=None)
    settings = p.parse_args()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if settings.gpu:
        if not torch.cuda.is_available():
            raise SystemExit("There is no GPU here; leave --gpu out.")
        write_json(settings.json, {"gpu": gpu(settings)})
        return
    out = {}
    for part in settings.parts.split(","):
        out[part] = PARTS[part](settings)
        print()
    write_json(settings.json, out)


if __name__ == "__main__":
    main()
