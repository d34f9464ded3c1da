"""Loss curves of one model trained twice, in eager and through dsc, from the same weights on the same batches.

    python benchmarks/loss_curve.py --model gpt-bytes --steps 300 [--dtype bf16] [--dropout 0.1]

Prints the largest difference between the two curves; JSON with --json.  Dropout draws from the same seeds: dsc makes
the same calls to torch's generator as eager does.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
from pathlib import Path

import torch

from dsc.debug.demo import batches, stdlib_text
from dsc.models import zoo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-bytes")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--noise", action="store_true", help="eager against eager, its weights off by one last bit")
    parser.add_argument("--rate", type=float, default=5e-4, help="after 20 steps of warm-up")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    eager = zoo.load(args.model).build(0)
    for m in eager.modules():
        if hasattr(m, "dropout"):
            m.dropout = args.dropout
    ours = copy.deepcopy(eager)
    compiled = ours if args.noise else torch.compile(ours, backend="dsc", dynamic=False)
    if args.noise:
        with torch.no_grad():
            for p in ours.parameters():
                p.mul_(1 + 1e-7)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=args.rate) for m in (eager, ours)]
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 1 / 20, total_iters=19) for o in optimizers]
    curves: list[list[float]] = [[], []]
    data = batches(stdlib_text(1_000_000), args.batch, 128, seed=0)
    for step, inputs in zip(range(args.steps), data):
        for which, call in enumerate((eager, compiled)):
            torch.manual_seed(step)
            with autocast(args.dtype):
                loss = call(*inputs)
            loss.backward()
            optimizers[which].step()
            schedules[which].step()
            optimizers[which].zero_grad(set_to_none=True)
            curves[which].append(loss.item())
    worst = max(abs(a - b) for a, b in zip(*curves))
    print(
        f"{args.model} {args.dtype} dropout {args.dropout}: {len(curves[0])} steps, loss {curves[0][0]:.4f} -> "
        f"{curves[0][-1]:.4f} in eager, {curves[1][-1]:.4f} in {'eager off by a bit' if args.noise else 'dsc'}; largest difference {worst:.2e}"
    )
    if args.json:
        args.json.write_text(json.dumps({"eager": curves[0], "dsc": curves[1], "worst": worst}))


def autocast(dtype: str) -> contextlib.AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if dtype == "bf16" else contextlib.nullcontext()


if __name__ == "__main__":
    main()
