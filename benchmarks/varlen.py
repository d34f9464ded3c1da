"""Attention over sequences of any length on a GPU: ATen's flash kernel and Triton's, modelled, measured, compared.

python benchmarks/varlen.py [--json FILE]    on a machine with an NVIDIA GPU: forward and backward of each, and how far
                                             output, sums of rows and gradients lie apart
python benchmarks/varlen.py --target a100    on any machine: what the model of costs says, which decides

The model is right if both columns of ratios lie on the same side of 1.1, Attention's ``gain``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from common import table, write_json
from torch import Tensor

from dsc.passes.attention_cost import Packed, packed
from dsc.target import Target, find

TOKENS = 32768
FORMS = ((32, 32, 64), (32, 8, 128), (16, 16, 256))
"""Heads of queries, of keys, and their width."""
LENGTHS = (64, 128, 256, 512, 2048)


@dataclass(frozen=True)
class Row:
    heads: int
    shared: int
    width: int
    length: int
    causal: bool
    aten_us: float
    triton_us: float
    """Modelled."""
    aten_measured_us: float | None = None
    triton_measured_us: float | None = None
    apart: float | None = None
    """The largest of the differences of out, sums and gradients, each relative to its norm."""


def modelled(heads: int, kv: int, width: int, length: int, causal: bool, target: Target) -> Row:
    sizes = Packed(
        (TOKENS, heads, width), (TOKENS, kv, width), torch.bfloat16, length, length, causal, None, backward=True
    )
    aten, triton = (packed(kernel, sizes, length, target).seconds * 1e6 for kernel in ("flash", "triton"))
    return Row(heads, heads // kv, width, length, causal, aten, triton)


def measured(row: Row) -> Row:
    """The same on the GPU that is here; lengths vary by a half around that of the row."""
    from dsc.codegen.templates import varlen_ops  # registers the kernels

    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(row.length // 2, row.length * 3 // 2, (TOKENS // row.length,), generator=g)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to("cuda", torch.int32)
    total, longest, scale = int(ends[-1]), int(lengths.max()), row.width**-0.5
    heads = (row.heads, row.heads // row.shared, row.heads // row.shared, row.heads)
    q, k, v, grad = (torch.randn(total, n, row.width, device="cuda", dtype=torch.bfloat16) for n in heads)
    unused = torch.empty(0, device="cuda")

    def aten() -> list[Tensor]:
        sizes = (ends, ends, longest, longest, 0.0, row.causal)
        out, sums, state, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *sizes, False, scale=scale)
        back = torch.ops.aten._flash_attention_backward(grad, q, k, v, out, sums, *sizes, state, unused, scale=scale)
        return [out, sums, *back]

    def triton() -> list[Tensor]:
        settings = (ends, ends, -1, 0 if row.causal else -1, True, scale)
        out, sums = varlen_ops.attend(q, k, v, *settings)
        return [out, sums, *varlen_ops.attend_backward(grad, q, k, v, out, sums, *settings)]

    apart = max(float((a.float() - b.float()).norm() / a.float().norm()) for a, b in zip(aten(), triton()))
    seconds = [timed(call) * 1e6 for call in (aten, triton)]
    return Row(**{**asdict(row), "aten_measured_us": seconds[0], "triton_measured_us": seconds[1], "apart": apart})


def timed(call: Callable[[], object], rounds: int = 30) -> float:
    """Seconds of a call, the median, of what the GPU does: the host is ahead after the first."""
    for _ in range(3):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)[rounds // 2] / 1e3


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--target", default=None, help="what to model; the GPU that is here, if none is named")
    p.add_argument("--json", type=Path, default=None)
    args = p.parse_args()
    if args.target is None and not torch.cuda.is_available():
        p.error("there is no GPU here: name one to model with --target")
    here = args.target is None
    name = args.target or ("a100" if torch.cuda.get_device_capability()[0] < 9 else "h100")
    rows = [
        modelled(*form, length, causal, find(name)) for form in FORMS for length in LENGTHS for causal in (True, False)
    ]
    if here:
        rows = [measured(row) for row in rows]
    head = ("heads", "shared", "width", "length", "causal", "ATen us", "Triton us", "ratio", "ATen us, measured",
            "Triton us, measured", "ratio, measured", "apart")  # fmt: skip
    lines = []
    for r in rows:
        real = ("", "", "", "")
        if r.aten_measured_us is not None and r.triton_measured_us is not None:
            ratio = r.aten_measured_us / r.triton_measured_us
            real = (f"{r.aten_measured_us:,.0f}", f"{r.triton_measured_us:,.0f}", f"{ratio:.2f}", f"{r.apart:.1e}")
        model = (f"{r.aten_us:,.0f}", f"{r.triton_us:,.0f}", f"{r.aten_us / r.triton_us:.2f}")
        lines.append((r.heads, r.shared, r.width, r.length, r.causal, *model, *real))
    print(f"{TOKENS:,} tokens in bf16, forward and backward, modelled for {name}")
    print(table(head, lines))
    write_json(args.json, [asdict(r) for r in rows])


if __name__ == "__main__":
    main()
