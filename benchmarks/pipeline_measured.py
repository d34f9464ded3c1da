"""Pipelines as they run here, over gloo without a GPU: every figure that is measured, a part each.

    python benchmarks/pipeline_measured.py --parts sleep,even,zero-bubble,grid,powersgd,recover --json out.json

``sleep``: bubbles of known, searched and re-cut pipelines, and the simulator's error.  ``even``: stage times of four models.
``zero-bubble``: what splitting a compiled backward costs.  ``grid``: loss and gradients against one process.
``powersgd``: compressed replicas.  ``recover``: a killed rank, another split in mid-run, a slow rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pipeline_grid
import pipeline_powersgd
import pipeline_recover
import pipeline_sleep
import pipeline_stages
import torch
from common import write_json


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--parts", default="sleep,even,zero-bubble,grid,powersgd,recover")
    p.add_argument("--models", default=",".join(pipeline_grid.MODELS), help="of the grid")
    p.add_argument("--ranks", default="2,4", help="of the grid")
    p.add_argument(
        "--searched", type=int, default=pipeline_grid.SEARCHED, help="searched orders of a model in the grid"
    )
    p.add_argument("--json", type=Path, default=None)
    a = p.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], object]] = {
        "sleep": pipeline_sleep.main,
        "even": pipeline_stages.even,
        "zero-bubble": pipeline_stages.zero_bubble,
        "grid": lambda: pipeline_grid.main(a.models.split(","), [int(r) for r in a.ranks.split(",")], a.searched),
        "powersgd": pipeline_powersgd.main,
        "recover": pipeline_recover.main,
    }
    found = {}
    for name in a.parts.split(","):
        if name not in parts:
            p.error(f"{name!r} is no part: {', '.join(parts)}")
        print(f"== {name}\n", flush=True)
        found[name] = parts[name]()
    write_json(a.json, found)


if __name__ == "__main__":
    main()
