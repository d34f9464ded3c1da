"""Where Triton is not installed: ATen and a remark, or one sentence; never an operator that nothing can run."""

from __future__ import annotations

import subprocess
import sys

HIDDEN = """
import sys, warnings

sys.modules["triton"] = None  # as if it were not installed
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.mix = nn.Embedding(3000, 32), nn.Linear(32, 32)

    def forward(self, ids):
        x = self.table(ids)
        y = torch.nn.functional.gelu(self.mix(x))
        s = (y @ x.mT) * 0.1
        return torch.nn.functional.linear(s.softmax(-1) @ x, self.table.weight).square().mean()

torch.manual_seed(0)
model, ids = Net(), torch.randint(0, 3000, (2, 64))
"""


def run(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", HIDDEN + script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_graph_for_a_gpu_is_planned_without_its_operators() -> None:
    """Products, attention and tables; each pass says why it put nothing in."""
    found = run("""
from dsc.debug.capture import capture
from dsc.debug.source import Model
(region,) = capture(Model("net", model, (ids,)), "a100").regions
print(sorted({str(n.target) for p in region.programs for n in p.gm.graph.nodes if str(n.target).startswith("dsc.")}))
for s in region.stages:
    for r in s.report.remarks if s.report is not None else ():
        if "Triton is not installed" in r.why:
            print(s.name, r.verdict)
""")
    assert found == ["[]", "embedding skipped", "attention skipped", "grouped skipped"]


def test_generated_kernels_fall_back_to_aten() -> None:
    """Products with what follows them, and all else that was emitted: the same numbers, a warning and a remark."""
    found = run("""
made = []
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    call = torch.compile(model, backend="dsc", options={"emit": "triton", "cache": False, "on_compile": made.append})
    loss = call(ids)
    loss.backward()
mine = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
want = model(ids)
want.backward()
torch.testing.assert_close(loss, want)
torch.testing.assert_close(mine, [p.grad for p in model.parameters()])
sentences = {str(w.message).split(":")[0] for w in told if "need triton" in str(w.message)}
print(sorted(sentences))
for m in made:
    print(m.kind, m.program.emitter, [r.why for name, report in m.reports if name == "link" for r in report.remarks][0])
""")
    graphs = [
        f"The {kind} graph runs on ATen, with the same results and no kernels of dsc"
        for kind in ("backward", "forward")
    ]
    assert found[0] == str(graphs)
    for kind, line in zip(("forward", "backward"), found[1:], strict=True):
        assert line.startswith(f"{kind} aten the whole graph stays with ATen: Kernels for GPUs need triton")


def test_what_aten_has_not_is_one_sentence() -> None:
    """A program for a GPU with an operator that only Triton computes is not run at all."""
    found = run("""
import dsc.grouped
from dsc import kernels
from dsc.debug.capture import capture
from dsc.debug.source import Model
from dsc.errors import TritonMissing

class Asked(nn.Module):
    def forward(self, a, b, ends):
        return torch.ops.dsc.grouped_mm(a, b, ends).float().relu()

inputs = torch.randn(64, 32).bfloat16(), torch.randn(2, 32, 48).bfloat16(), torch.tensor([10, 64], dtype=torch.int32)
for target in ("a100", "cpu"):
    (made,) = capture(Model("net", Asked(), inputs), target).regions[0].programs
    print(kernels.needs_triton(made.gm), any(map(kernels.by_triton, made.program.externals.values())))
(made,) = capture(Model("net", model.mix, (torch.randn(4, 32),)), "a100").regions[0].programs[:1]
print(kernels.needs_triton(made.gm), any(map(kernels.by_triton, made.program.externals.values())))
try:
    kernels.register()
except TritonMissing as sentence:
    print(sentence)
""")
    sentence = "Kernels for GPUs need triton, which is not installed: pip install triton (Linux only)."
    assert found == ["True True", "False True", "False False", sentence]
