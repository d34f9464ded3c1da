"""What a user gives to ``dsc.distributed.run``: trains six steps with checkpoints; the first attempt loses rank 1 in step 3."""

from __future__ import annotations

import copy
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import dsc
import kit_pipeline as hand
from dsc.distributed import forward
from dsc.models import zoo

FOLDER, STEPS = Path(sys.argv[1]), 6


def main() -> None:
    torch.set_num_threads(1)
    entry = zoo.load("gpt-tiny")
    model, inputs = entry.build(), entry.inputs(8)
    fresh = copy.deepcopy(model)
    plan = hand.plan(forward.trace(model, entry.inputs(2)), dist.get_world_size(), "1F1B", 4, 2)
    pipe = dsc.pipeline(model, inputs, plan=plan, compiled=False)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    start = pipe.resume(FOLDER, optimizer)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for step in range(start, STEPS):
        if first and step == 3 and dist.get_rank() == 1:
            (stage,) = pipe.stages.values()
            stage.functions.forward = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        pipe.step(*(x.roll(step, 0) for x in inputs))
        optimizer.step()
        pipe.save(FOLDER, optimizer)
    whole = dsc.pipeline(fresh, inputs, plan=plan, compiled=False)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        whole.step(*(x.roll(step, 0) for x in inputs))
        optimizer.step()
    got, want = pipe.full_state_dict(), whole.full_state_dict()
    equal = all(torch.equal(got[n], want[n]) for n in want)
    if dist.get_rank() == 0:
        (FOLDER / "result").write_text(f"started from {start}, equal {equal}")


if __name__ == "__main__":
    main()
