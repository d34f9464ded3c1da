"""One command for a machine with an NVIDIA GPU: are the answers right, and how fast is it?

checks    train steps of the tiny models, losses and gradients against eager
kernels   every kernel of a GPT's train step alone: bytes a second, against a copy of the same GPU
steps     train steps of GPT, LLaMA, BERT and ViT under bf16 autocast: eager, dsc, torch's default compiler, and that
          with max-autotune, as long as time is left; at the zoo's sizes, where launches count, and at those of
          GPT-2, BERT-base, ViT-B/16 and a LLaMA of 240 M parameters, where bytes and products do

python benchmarks/gpu.py [--seconds 480] [--json FILE]
python benchmarks/gpu.py --dry      on any machine: tiny models, kernels in Triton's interpreter, times that say nothing
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from common import table, write_json
from torch import Tensor, nn

from dsc.codegen.kernel import Call, Kernel, indirect
from dsc.codegen.triton_index import bound
from dsc.debug.capture import capture
from dsc.debug.kernels import Listed, listed
from dsc.debug.source import Model
from dsc.kernels import triton_launches
from dsc.models import bert, gpt, llama, vit, zoo

DTYPES = {
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "b1": torch.bool,
}  # fmt: skip
CHECKED = ("gpt-tiny", "llama-tiny", "bert-tiny", "vit-tiny", "resnet-tiny", "moe-tiny", "mlp-tiny", "convnet-tiny")
LARGE = (
    zoo.gpt_entry("GPT-2", "12 layers of 768, 1024 tokens", gpt.Config(50304, 1024, 12, 12, 768), 16),
    zoo.llama_entry("LLaMA", "12 of 1024, 2048 tokens", llama.Config(32000, 2048, 12, 16, 4, 1024, 2816), 8),
    zoo.bert_entry("BERT-base", "12 layers of 768, 512 tokens", bert.Config(30528, 512, 12, 12, 768), 32),
    zoo.vit_entry("ViT-B/16", "12 layers of 768, 224 pixels", vit.Config(layers=12, heads=12, width=768), 128),
)
TIMED = (*map(zoo.load, ("gpt", "llama", "bert", "vit")), *LARGE)
COMPILERS: dict[str, dict[str, Any]] = {
    "dsc": {"backend": "dsc"},
    "default": {"backend": "inductor"},
    "max-autotune": {"backend": "inductor", "mode": "max-autotune"},
}


@dataclass(frozen=True)
class Setup:
    device: torch.device
    dry: bool
    deadline: float

    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Check:
    model: str
    dtype: str
    loss: float
    """Difference from eager, relative."""
    gradient: float
    """The worst gradient's, relative to its largest element, or to 1e-4 of the largest of all: those that are zero
    but for rounding, such as of the bias of keys, do not count."""
    right: bool


def case(entry: zoo.Entry, device: torch.device) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return entry.build().to(device), tuple(t.to(device) for t in entry.inputs())


def train(model: nn.Module, call: Callable[..., Tensor], inputs: Sequence[Tensor], setup: Setup, low: bool) -> Tensor:
    for p in model.parameters():
        p.grad = None
    with torch.autocast(setup.device.type, torch.bfloat16, enabled=low):
        loss = call(*inputs)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def checks(setup: Setup) -> list[Check]:
    names = ("mlp-tiny", "gpt-tiny") if setup.dry else CHECKED
    return [check(name, low, setup) for name in names for low in ((False,) if setup.dry else (False, True))]


def check(name: str, low: bool, setup: Setup) -> Check:
    model, inputs = case(zoo.load(name), setup.device)
    torch.compiler.reset()
    options = {"emit": "triton", "cache": False} if setup.dry else {}
    step = torch.compile(model, backend="dsc", options=options)
    want = train(model, model, inputs, setup, low), *(p.grad for p in model.parameters())
    got = train(model, step, inputs, setup, low), *(p.grad for p in model.parameters())
    floor = 1e-4 * max(float(b.abs().max()) for b in want[1:] if b is not None)
    errors = [difference(a, b, floor) for a, b in zip(got, want) if a is not None and b is not None]
    limit = 5e-2 if low else 1e-3
    return Check(
        name, "bf16" if low else "fp32", errors[0], max(errors[1:]), errors[0] < limit and max(errors[1:]) < limit
    )


def difference(a: Tensor, b: Tensor, floor: float) -> float:
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(floor))


@dataclass(frozen=True)
class Speed:
    kernel: str
    launches: int
    megabytes: float
    microseconds: float
    share: float
    """Of the bandwidth of a copy."""


def kernels(setup: Setup) -> tuple[float, list[Speed]]:
    """Bytes a second of a copy, and every kernel that can be run on made-up data."""
    entry = zoo.load("mlp-tiny") if setup.dry else zoo.gpt_entry("", "", gpt.Config(16384, 1024, 2, 12, 768), 4)
    model, inputs = case(entry, torch.device("cpu"))
    low = tuple(t.bfloat16() if t.is_floating_point() else t for t in inputs)
    session = capture(Model("gpt", model.to(torch.bfloat16), low), "h100")
    top = bandwidth(setup)
    return top, [speed(k, top, setup) for k in listed(session) if runs_alone(k.kernel)]


def runs_alone(kernel: Kernel) -> bool:
    """Whether no index is read from memory."""
    indices = [v.access[1] for v in kernel.lets if v.op == "load"] + [sympy.sympify(s.index) for s in kernel.stores]
    return not kernel.sizes and not any(indirect(e, kernel) for e in indices)


def speed(k: Listed, top: float, setup: Setup) -> Speed:
    call = Call(k.kernel.name, tuple(range(len(k.kernel.buffers))))
    (run,) = triton_launches([k.kernel], [[call]], on_gpu=not setup.dry)
    tensors = tuple(
        torch.ones(size(k.kernel, b.name), dtype=DTYPES[b.dtype], device=setup.device) for b in k.kernel.buffers
    )
    seconds = timed(lambda: run(tensors, ()), setup, graph=True)
    return Speed(k.title, k.launches, k.bytes / 1e6, seconds * 1e6, k.bytes / seconds / top)


def size(kernel: Kernel, buffer: str) -> int:
    """Elements that the kernel may touch, or more."""
    extents = {a.name: int(a.extent) for a in kernel.axes}
    loads = [v.access[1] for v in kernel.lets if v.op == "load" and v.access[0] == buffer]
    stores = [sympy.sympify(s.index) for s in kernel.stores if s.buffer == buffer]
    return 1 + max(bound(sympy.sympify(e), extents) or 0 for e in (*loads, *stores))


def bandwidth(setup: Setup) -> float:
    """Bytes a second, read and written, by a copy larger than any cache."""
    count = 1 << (20 if setup.dry else 28)
    a, b = (torch.empty(count, dtype=torch.float32, device=setup.device) for _ in range(2))
    return 2 * 4 * count / timed(lambda: b.copy_(a), setup)


def timed(call: Callable[[], object], setup: Setup, graph: bool = False) -> float:
    """Seconds of one call: the median of several rounds of many; of a ``graph``, without the time that launching takes."""
    if setup.device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    for _ in range(3):
        call()
    repeat = 20 if graph else 10
    if graph:
        kept = torch.cuda.CUDAGraph()
        with torch.cuda.graph(kept):
            for _ in range(repeat):
                call()
    rounds = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        if graph:
            kept.replay()
        else:
            for _ in range(repeat):
                call()
        end.record()
        torch.cuda.synchronize()
        rounds.append(begin.elapsed_time(end) / 1e3 / repeat)
    return statistics.median(rounds)


@dataclass(frozen=True)
class Steps:
    model: str
    compiler: str
    compile_seconds: float
    milliseconds: float
    loss: float


def steps(setup: Setup) -> list[Steps]:
    """Every model with every compiler, the slow ones of them last."""
    entries = (zoo.load("mlp-tiny"),) if setup.dry else TIMED
    ways = ("eager", "dsc") if setup.dry else ("eager", *COMPILERS)
    found = []
    for way in ways:
        for entry in entries:
            if setup.left() < (120 if way == "max-autotune" else 30) and not setup.dry:
                print(f"no time left for {entry.name} with {way}")
                continue
            found.append(step(entry, way, setup))
    return found


def step(entry: zoo.Entry, way: str, setup: Setup) -> Steps:
    model, inputs = case(entry, setup.device)
    torch.compiler.reset()
    call = model if way == "eager" else torch.compile(model, **COMPILERS[way])

    def once() -> Tensor:
        return train(model, call, inputs, setup, not setup.dry)

    start = time.perf_counter()
    loss = once()
    setup.wait()
    first = time.perf_counter() - start
    seconds = timed(once, setup)
    return Steps(entry.name, way, first - seconds, seconds * 1e3, float(loss))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dry", action="store_true", help="on the CPU, with tiny models, in Triton's interpreter")
    parser.add_argument("--seconds", type=float, default=480, help="begin nothing that would end later than this")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if not args.dry and not torch.cuda.is_available():
        raise SystemExit("This machine has no CUDA GPU that torch can use; try it out with --dry.")
    device = torch.device("cpu" if args.dry else "cuda")
    setup = Setup(device, args.dry, time.monotonic() + args.seconds)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device.type == 'cuda' else 'dry run'}")
    right = checks(setup)
    print(
        table(
            ["model", "dtype", "loss off by", "gradient off by", "right"],
            [(c.model, c.dtype, f"{c.loss:.1e}", f"{c.gradient:.1e}", c.right) for c in right],
        )
    )
    top, alone = kernels(setup)
    print(f"\na copy moves {top / 1e9:.0f} GB/s")
    print(table(["kernel", "launches", "MB", "us", "of a copy"], [tuple(asdict(s).values()) for s in alone]))
    done = steps(setup)
    eager = {s.model: s.milliseconds for s in done if s.compiler == "eager"}
    print()
    print(
        table(
            ["model", "compiler", "compile s", "step ms", "against eager", "loss"],
            [
                (s.model, s.compiler, s.compile_seconds, s.milliseconds, eager[s.model] / s.milliseconds, s.loss)
                for s in done
            ],
        )
    )
    results = {"checks": right, "kernels": alone, "steps": done}
    write_json(args.json, {"copy": top, **{k: [asdict(r) for r in v] for k, v in results.items()}})  # type: ignore[arg-type]
    if not all(c.right for c in right):
        raise SystemExit(f"Not as eager: {', '.join(f'{c.model} {c.dtype}' for c in right if not c.right)}")


if __name__ == "__main__":
    main()
