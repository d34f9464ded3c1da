"""Peak memory and time of ``cross_entropy(linear(x), target)`` with its gradients, at a large vocabulary, on this machine.

Each way runs in a process of its own.  ``peak`` is the most memory that it had beyond parameters and inputs, as the
system counts it; ``share`` is that of dsc with the logits whole; ``differs`` is the largest difference of a gradient
from eager's, over the largest of that gradient.

    python benchmarks/linear_loss.py [--rows 1024] [--width 64] [--vocab 131072] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from common import table, write_json
from torch import Tensor

WAYS = {"eager": None, "dsc, logits whole": "canonicalize,recompute,canonicalize,fuse", "dsc": "default"}


@dataclass(frozen=True)
class Row:
    way: str
    peak: int
    """Bytes."""
    seconds: float
    loss: float
    differs: float = 0.0


def resident(key: str) -> int:
    """Bytes, as Linux counts them: VmRSS now, VmHWM at most."""
    return next(
        int(x.split()[1]) << 10 for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key)
    )


def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), target)


def measure(way: str, rows: int, width: int, vocab: int, gradients: Path) -> Row:
    torch.manual_seed(0)
    x, w = torch.randn(rows, width).requires_grad_(), (torch.randn(vocab, width) / width**0.5).requires_grad_()
    target = torch.randint(0, vocab, (rows,))
    options = {"passes": WAYS[way], "cache": False}
    call = loss if WAYS[way] is None else torch.compile(loss, backend="dsc", options=options)
    small = torch.compile(loss, backend="dsc", options={"cache": False}) if call is not loss else loss
    small(x[:8], w[:16].detach().requires_grad_(), target[:8] % 16).backward()  # imports, threads
    x.grad = None
    if call is not loss:
        torch.compiler.reset()
    before = resident("VmRSS")
    value = call(x, w, target)
    value.backward()
    peak = resident("VmHWM") - before
    assert x.grad is not None and w.grad is not None
    torch.save([x.grad, w.grad], gradients)
    seconds = []
    for _ in range(3):
        w.grad = x.grad = None
        start = time.perf_counter()
        call(x, w, target).backward()
        seconds.append(time.perf_counter() - start)
    return Row(way, peak, min(seconds), float(value))


def difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(a, b, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--child", nargs=2, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(asdict(measure(args.child[0], args.rows, args.width, args.vocab, Path(args.child[1])))))
        return
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for i, way in enumerate(WAYS):
            file = Path(folder) / str(i)
            sizes = [f"--{k}={getattr(args, k)}" for k in ("rows", "width", "vocab")]
            done = subprocess.run(
                [sys.executable, __file__, *sizes, "--child", way, file], capture_output=True, text=True
            )
            if done.returncode:
                raise SystemExit(done.stderr)
            found = Row(**json.loads(done.stdout.splitlines()[-1]))
            apart = difference(torch.load(file), torch.load(Path(folder) / "0"))
            rows.append(Row(found.way, found.peak, found.seconds, found.loss, apart))
    whole = rows[1].peak
    head = ["way", "peak MB", "share", "seconds", "loss", "differs"]
    cells = [(r.way, r.peak / 1e6, r.peak / whole, r.seconds, r.loss, f"{r.differs:.1e}") for r in rows]
    print(f"{args.rows} rows of {args.width}, vocabulary {args.vocab}, fp32\n{table(head, cells)}")
    write_json(args.json, [asdict(r) for r in rows])


if __name__ == "__main__":
    main()
