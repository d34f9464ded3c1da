"""How compile time and memory grow with the model: ``python benchmarks/scale.py``.

Layers: the train step of a narrow GPT; what dsc does beyond tracing (passes, split, code, the C++ compiler) by itself, and
the whole first step.  Nodes: an inference graph made of copies of one block, given to dsc's passes and emitters directly,
so that even 50,000 nodes need no tracing.  Each row is a process of its own with an empty cache; times are CPU seconds.
"""

from __future__ import annotations

import contextlib
import json
import resource
import tempfile
from collections.abc import Callable
from typing import Any

import common
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

LENGTH, VOCAB, WIDTH = 32, 256, 64


def layers(count: int) -> dict[str, float]:
    """One train step of a GPT with so many layers."""
    from dsc import compiler
    from dsc.models import gpt

    model = gpt.GPT(gpt.Config(vocab=VOCAB, max_length=LENGTH, layers=count, heads=4, width=WIDTH))
    tokens = torch.randint(VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    step = torch.compile(model, backend="dsc", options={"cache": False})
    spent = dict.fromkeys(("run_joint", "split", "compile_aten"), 0.0)
    programs: list[Any] = []

    def timed(name: str) -> Callable[..., Any]:
        inner = getattr(compiler, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            start = common.cpu_seconds()
            out = inner(*args, **kwargs)
            spent[name] += common.cpu_seconds() - start
            if name == "compile_aten":
                programs.append(out[1])
            return out

        return call

    start = common.cpu_seconds()
    with contextlib.ExitStack() as stack:
        for name in spent:
            stack.enter_context(common.replaced(compiler, name, timed(name)))
        torch.autograd.backward(step(tokens[:, :-1], tokens[:, 1:]))
    whole = common.cpu_seconds() - start
    return {"beyond": sum(spent.values()), "whole": whole, **spent, **counted(programs)}


def nodes(count: int) -> dict[str, float]:
    """An inference graph of about so many nodes."""
    from dsc import compiler
    from dsc.options import Options
    from dsc.target import find

    gm = repeated(count)
    size = len(gm.graph.nodes)
    make = compiler.make(Options(), find("cpu"))
    start = common.cpu_seconds()
    _, program = compiler.compile_aten(gm, "inference", make)
    return {"nodes": size, "beyond": common.cpu_seconds() - start, **counted([program])}


def counted(programs: list[Any]) -> dict[str, float]:
    return {
        "kernels": sum(p.numbers["kernels"] for p in programs),
        "distinct": sum(p.numbers["distinct_kernels"] for p in programs),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def block(x: Tensor, scale: Tensor, shift: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
    """[N, width] -> [N, width]: norm, two products, a gelu between, a residual sum."""
    y = F.layer_norm(x, (WIDTH,), scale, shift)
    return x + F.gelu(y @ inner) @ outer


def repeated(count: int) -> GraphModule:
    """Copies of ``block``, one after the other, until there are ``count`` nodes."""
    shapes = ((128, WIDTH), (WIDTH,), (WIDTH,), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
    one = make_fx(block, tracing_mode="fake")(*(torch.ones(s) for s in shapes))
    inputs = [n for n in one.graph.nodes if n.op == "placeholder"]
    body = [n for n in one.graph.nodes if n.op == "call_function"]
    (result,) = (n for n in one.graph.nodes if n.op == "output")
    graph = Graph()
    known: dict[Node, Node] = {n: graph.node_copy(n) for n in inputs}
    while len(graph.nodes) < count:
        for n in body:
            known[n] = graph.node_copy(n, known.__getitem__)
        known[inputs[0]] = known[result.args[0]]
    graph.output((known[inputs[0]],))
    return GraphModule(nn.Module(), graph)


def fresh(part: str, count: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = ["-W", "ignore", __file__, "--once", f"{part},{count}"]
        return common.apart(command, {"DSC_CACHE_DIR": folder}, f"{part} {count}")


def main() -> None:
    p = common.parser(__doc__, "gpt")
    p.add_argument("--layers", default="6,24,96")
    p.add_argument("--nodes", default="1000,10000,50000")
    p.add_argument("--once", metavar="PART,COUNT", help="measure in this process, print JSON")
    args = p.parse_args()
    if args.once:
        part, count = args.once.split(",")
        print(json.dumps({"layers": layers, "nodes": nodes}[part](int(count))))
        return
    results: dict[str, dict[str, dict[str, float]]] = {}
    for part in ("layers", "nodes"):
        results[part], rows = {}, []
        for count in filter(None, getattr(args, part).split(",")):
            r = results[part][count] = fresh(part, int(count))
            last = rows[-1] if rows else None
            growth = r["beyond"] / results[part][str(last[0])]["beyond"] if last else None
            kernels = f"{r['kernels']:.0f} ({r['distinct']:.0f})"
            rows.append((count, r["beyond"], growth, r.get("whole"), kernels, f"{r['peak_mb']:.0f}"))
        print(common.table((part, *HEAD), rows), flush=True)
    common.write_json(args.json, results)


HEAD = ("beyond tracing CPU s", "x row above", "first step CPU s", "kernels (distinct)", "peak MB")


if __name__ == "__main__":
    main()
