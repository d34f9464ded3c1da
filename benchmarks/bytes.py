"""Bytes that compiled operators move on a GPU, against the least that they could: each input once, each result once.

Nothing runs: kernels are planned and compiled for ``--target``, and every count is exact.

    moved   by kernels (each buffer once a launch, by what it touches, partial sums of chunks included) and ATen calls
    floor   the inputs that the graph reads and the results that it gives, once each
    asked   what the instructions of the compiled kernels ask for, over what the kernels move: 1 where nothing is asked
            for twice or in vain (values that a row shares, the ends of tiles); ``-`` where a kernel loops

    python benchmarks/bytes.py [--target h100] [--dtype bf16] [--only softmax,adamw] [--rows 4096] [--json FILE] [--check]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from common import table, write_json
from torch import Tensor, nn
from torch.fx import Node

from dsc import bind, ops
from dsc.codegen.triton import grid
from dsc.compilation import Compilation
from dsc.debug.capture import capture
from dsc.debug.kernels import Listed, facts_of, listed
from dsc.debug.source import Model

WIDTH, VOCAB = 1024, 8192
LIMIT = 1.05
"""What ``--check`` allows."""


class Call(nn.Module):
    """A function of its weights and of inputs."""

    def __init__(self, fn: Callable[..., Tensor], *weights: Tensor) -> None:
        super().__init__()
        self.fn = fn
        self.weights = nn.ParameterList(nn.Parameter(w) for w in weights)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.fn(*inputs, *self.weights)


class AdamW(nn.Module):
    """One step over a list of weights, as ``torch.optim.AdamW`` computes it: weights and both moments in place."""

    def forward(self, *tensors: Tensor) -> None:
        count = len(tensors) // 4
        weights, grads, means, squares = (tensors[i * count : (i + 1) * count] for i in range(4))
        for w, g, m, s in zip(weights, grads, means, squares):
            w.mul_(1 - 1e-3 * 1e-2)
            m.lerp_(g, 1 - 0.9)
            s.mul_(0.999).addcmul_(g, g, value=1 - 0.999)
            w.addcdiv_(m, s.sqrt().div_(0.5).add_(1e-8), value=-1e-3)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


def epilogue(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return residual + F.gelu(x @ weight + bias, approximate="tanh")


def cases(count: int = 4096) -> Mapping[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...], bool]]]:
    """Name -> (module, inputs, with gradients), for so many rows."""

    def x(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def adamw() -> tuple[nn.Module, tuple[Tensor, ...], bool]:
        return AdamW(), tuple(x(WIDTH, WIDTH).detach().abs() for _ in range(8)), False

    return {
        "layer_norm": lambda: (Call(layer_norm, torch.ones(WIDTH), torch.zeros(WIDTH)), (x(count, WIDTH),), True),
        "rms_norm": lambda: (Call(rms_norm, torch.ones(WIDTH)), (x(count, WIDTH),), True),
        "softmax": lambda: (Call(lambda t: torch.softmax(t, -1)), (x(count, WIDTH),), True),
        "cross_entropy": lambda: (
            Call(F.cross_entropy),
            (x(count // 4, VOCAB), torch.arange(count // 4) % VOCAB),
            True,
        ),
        "adamw": adamw,
        "gemm+bias+gelu+residual": lambda: (
            Call(epilogue, x(WIDTH, WIDTH).detach() / 32, torch.zeros(WIDTH)),
            (x(count, WIDTH), x(count, WIDTH)),
            True,
        ),
    }


@dataclass(frozen=True)
class Row:
    name: str
    graph: str
    kernels: int
    aten_calls: int
    moved: int
    floor: int
    asked: float | None

    @property
    def ratio(self) -> float:
        return self.moved / self.floor


def measure(name: str, target: str, dtype: torch.dtype, count: int) -> list[Row]:
    module, inputs, training = cases(count)[name]()
    keep = name == "adamw"  # moments have 32 bits
    cast = tuple(
        t.detach().to(dtype).requires_grad_(t.requires_grad) if t.is_floating_point() and not keep else t
        for t in inputs
    )
    module = module if keep else module.to(dtype)
    session = capture(Model(name, module, cast), target, training=training)
    kernels = listed(session)
    (capability,) = {80 if target.startswith("a100") else 90}
    facts = facts_of(kernels, (capability,), parallel=1)
    rows = []
    for made in session.regions[0].programs:
        mine = [k for k in kernels if k.graph == made.kind]
        by_kernels = sum(k.launches * k.bytes for k in mine)
        planned = sum(count for b in made.bound.values() for _, count in bind.accessed(b))
        by_aten = int(made.program.numbers["bytes"]) - planned
        asked = [asked_by(k, facts[k.title, capability].accesses) for k in mine]
        share = None if None in asked or not mine else sum(a for a in asked if a is not None) / by_kernels
        rows.append(
            Row(
                name,
                made.kind,
                sum(k.launches for k in mine),
                int(made.program.numbers["aten_calls"]),
                by_kernels + by_aten,
                floor(made),
                share,
            )
        )
    return rows


def asked_by(k: Listed, accesses: object) -> int | None:
    """Bytes of all the loads and stores of all threads of a kernel; None if it loops."""
    assert k.schedule is not None
    if "\n    for " in k.source:
        return None
    threads = 32 * k.schedule.num_warps * grid(k.kernel, k.schedule, {})
    return k.launches * threads * sum(a.width * a.count for a in accesses if a.buffer != "fail")  # type: ignore[attr-defined]


def floor(made: Compilation) -> int:
    """Every input that something reads, and every result and every input that is written."""
    nodes = list(made.gm.graph.nodes)
    read = [n for n in nodes if n.op == "placeholder" and n.users and isinstance(ops.value(n), Tensor)]
    results = made.gm.graph.output_node().args[0]
    given = {n for n in (results if isinstance(results, (tuple, list)) else ()) if isinstance(n, Node)}
    written = [w for n in nodes if n.op == "call_function" for w in ops.mutated(n)]
    made_here = [n for n in given if n.op != "placeholder" and isinstance(ops.value(n), Tensor)]
    return sum(size_of(n) for n in (*read, *made_here, *written))


def size_of(n: Node) -> int:
    """Bytes in memory: broadcast dimensions count once."""
    t = ops.tensor(n)
    count = 1
    for length, step in zip(t.shape, t.stride()):
        count *= int(length) if step else 1
    return count * t.element_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", default="h100")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--only", default=",".join(cases()), help="names, with commas")
    parser.add_argument("--rows", type=int, default=4096, help="of the operands; a quarter for cross entropy")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--check", action="store_true", help=f"fail if something moves more than {LIMIT} of its floor")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    rows = [row for name in args.only.split(",") for row in measure(name, args.target, dtype, args.rows)]
    head = ["operator", "graph", "kernels", "ATen", "moved MB", "floor MB", "ratio", "asked"]
    cells = [(r.name, r.graph, r.kernels, r.aten_calls, r.moved / 1e6, r.floor / 1e6, r.ratio, r.asked) for r in rows]
    print(f"{args.target}, {args.dtype}, {args.rows} rows\n{table(head, cells)}")
    write_json(args.json, [{**asdict(r), "ratio": r.ratio} for r in rows])
    above = [f"{r.name} {r.graph}" for r in rows if r.ratio > LIMIT]
    if args.check and above:
        raise SystemExit(f"More than {LIMIT} of the floor: {', '.join(above)}")


if __name__ == "__main__":
    main()
