"""Launches and bytes of one more layer of a model on a GPU: kernels of dsc and ATen calls, products and attention included.

Nothing runs: the graphs of one and of two layers are planned for ``--target``, and the difference is counted.

    apart     no product is generated (``gemm=false``): the library multiplies
    modelled  products take what follows them, and what makes their rows, where that is modelled to be faster

    python benchmarks/launches.py [--target h100] [--models gpt,llama,bert,vit] [--batch 4] [--json FILE] [--check]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from common import table, write_json

from dsc import defaults
from dsc.debug.capture import capture
from dsc.debug.source import Model
from dsc.models import bert, gpt, llama, vit, zoo
from dsc.options import Options
from dsc.passes.fuse import Fuse
from dsc.target import find

ENTRIES: dict[str, Callable[[int, int], zoo.Entry]] = {
    "gpt": lambda n, b: zoo.gpt_entry("gpt", "", gpt.Config(layers=n), batch=b),
    "gpt-768": lambda n, b: zoo.gpt_entry("gpt-768", "", gpt.Config(layers=n, width=768, heads=12), batch=b),
    "llama": lambda n, b: zoo.llama_entry("llama", "", llama.Config(layers=n), batch=b),
    "bert": lambda n, b: zoo.bert_entry("bert", "", bert.Config(layers=n), batch=b),
    "vit": lambda n, b: zoo.vit_entry("vit", "", vit.Config(layers=n), batch=b),
}
"""Name -> its model of so many layers, at a batch."""
PLANS = {"apart": False, "modelled": True}
"""Whether products may be generated."""
LIMIT = 6
"""Launches of a GPT layer, forward, that ``--check`` allows."""


@dataclass(frozen=True)
class Row:
    model: str
    plan: str
    graph: str
    kernels: float
    aten_calls: float
    megabytes: float

    @property
    def launches(self) -> float:
        return self.kernels + self.aten_calls


def numbers(name: str, layers: int, batch: int, target: str, gemm: bool) -> dict[str, dict[str, float]]:
    """Of each graph of a train step in bf16."""
    entry = ENTRIES[name](layers, batch)
    inputs = tuple(x.bfloat16() if x.is_floating_point() else x for x in entry.inputs())
    model = Model(entry.name, entry.build().to(torch.bfloat16), inputs)
    graph = tuple(replace(p, gemm=gemm) if isinstance(p, Fuse) else p for p in defaults.GRAPH)
    options = Options(passes=(*defaults.joint(find(target), Options()), *graph))
    session = capture(model, target, options, keep_stages=False)
    return {made.kind: dict(made.program.numbers) for made in session.regions[0].programs}


def measure(name: str, batch: int, target: str) -> list[Row]:
    rows = []
    for plan, gemm in PLANS.items():
        one, two = (numbers(name, n, batch, target, gemm) for n in (1, 2))
        for graph in one:
            kernels, calls, count = (two[graph][k] - one[graph][k] for k in ("kernels", "aten_calls", "bytes"))
            rows.append(Row(name, plan, graph, kernels, calls, count / 1e6))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", default="h100")
    parser.add_argument("--models", default="gpt,llama,bert,vit", help="names, with commas")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--check", action="store_true", help=f"fail if a GPT layer takes more than {LIMIT} forward")
    args = parser.parse_args()
    rows = [row for name in args.models.split(",") for row in measure(name, args.batch, args.target)]
    head = ["a layer of", "products", "graph", "kernels", "ATen", "launches", "MB"]
    cells = [(r.model, r.plan, r.graph, int(r.kernels), int(r.aten_calls), int(r.launches), r.megabytes) for r in rows]
    print(f"{args.target}, bf16, batch {args.batch}\n{table(head, cells)}")
    write_json(args.json, [{**asdict(r), "launches": r.launches} for r in rows])
    gpt_forward = [r for r in rows if (r.model, r.plan, r.graph) == ("gpt", "modelled", "forward")]
    if args.check and any(r.launches > LIMIT for r in gpt_forward):
        raise SystemExit(f"A GPT layer takes more than {LIMIT} launches forward.")


if __name__ == "__main__":
    main()
