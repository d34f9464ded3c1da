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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import write_json
from precision_bytes import bytes_moved
from precision_control import control
from precision_equal import equal
from precision_gpu import gpu
from precision_plans import plans

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
