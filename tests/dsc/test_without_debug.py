"""The compiler without its debug tools: a copy of the package from which they are deleted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

TRAIN = """
import sys, warnings
from pathlib import Path
import torch, dsc
from dsc.errors import DscWarning

folder = Path(sys.argv[1])
assert Path(dsc.__file__).is_relative_to(folder), dsc.__file__
assert not (folder / "dsc" / "debug").exists()
records = []
warnings.simplefilter("error", DscWarning)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
x = torch.randn(4, 8)
want = torch.autograd.grad(model(x).sum(), list(model.parameters()))
compiled = torch.compile(model, backend=__import__("dsc.backend").backend.dsc, options={"on_compile": records.append})
got = torch.autograd.grad(compiled(x).sum(), list(model.parameters()))
for a, b in zip(want, got):
    torch.testing.assert_close(a, b)
assert sum(r.numbers["kernels"] for r in records) >= 2

class Bad(dsc.Pass):
    name = "bad"
    def run(self, gm, target):
        raise ValueError("planted")

warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    torch.compile(lambda x: x + 1, backend="dsc", options={"passes": [Bad()]})(x)
assert "Pass 'bad' failed: ValueError: planted" in str(caught[0].message)
print("works")
"""


def test_deleting_the_debug_tools_leaves_the_compiler_working(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "dsc", tmp_path / "dsc", ignore=shutil.ignore_patterns("__pycache__", "debug"))
    for name in ("passes", "codegen", "models"):  # the links become folders
        assert (tmp_path / "dsc" / name).is_dir()
    environ = {k: v for k, v in os.environ.items() if not k.startswith("DSC_")}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, str(tmp_path)],
        env={**environ, "PYTHONPATH": str(tmp_path), "DSC_CACHE_DIR": str(tmp_path / "cache")},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "works\n"
