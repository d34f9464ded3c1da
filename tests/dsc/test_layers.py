"""Imports point down, siblings never meet: the table of layers, held by the sources."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = [  # lowest first; a name stands for what is below it, unless that is named itself
    "dsc.errors dsc.collector dsc.precision dsc.codegen.writer dsc.torch_shim dsc.dynamo",
    "dsc.runtime.state dsc.precision.formats",
    "dsc.precision.plan dsc.precision.emulate",
    "dsc.precision.request dsc.precision.ops dsc.precision.rules",
    "dsc.precision.switch",
    "dsc.precision.controller dsc.precision.writers",
    "dsc.ops dsc.notes dsc.target dsc.options dsc.blame dsc.sdpa dsc.fingerprint dsc.nm dsc.block_attention dsc.flash_attention dsc.varlen_attention dsc.embedding dsc.grouped dsc.replay dsc.keep dsc.given",
    "dsc.layouts",
    "dsc.aliases",
    "dsc.packed dsc.tiers dsc.narrow dsc.foretell dsc.absent dsc.traps dsc.repair dsc.python_numbers",
    "dsc.live dsc.snapshot dsc.extract dsc.text dsc.cost dsc.packing dsc.domain dsc.gemm_tiles dsc.codegen.kernel dsc.codegen.schedule",
    "dsc.program dsc.steps dsc.products dsc.retarget",
    "dsc.recordable",
    "dsc.verify dsc.liveness dsc.partition dsc.plan dsc.budget",
    "dsc.fragments",
    "dsc.manager",
    "dsc.passes dsc.codegen dsc.runtime",
    "dsc.bind dsc.kernels dsc.compilation",
    "dsc.residence dsc.words",
    "dsc.emit",
    "dsc.defaults",
    "dsc.passlist dsc.link dsc.watch dsc.sparsity",
    "dsc.compiler dsc.portable",
    "dsc.warm dsc.artifact",
    "dsc.debug dsc.distributed",
    "dsc.cli dsc.backend dsc.__main__ dsc",
]
LAYER = {name: i for i, names in enumerate(LAYERS) for name in names.split()}
FOLDERS = {"dsc.passes": "passes", "dsc.codegen": "codegen", "dsc.models": "models", "dsc": "dsc"}
TOP = len(LAYERS) - 1


def sources() -> Iterator[tuple[str, Path]]:
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if package == "dsc" and parts[0] in ("passes", "codegen", "models"):
                continue  # the links
            yield ".".join([package, *(p for p in parts if p != "__init__")]), path


MODULES = dict(sources())


def home(module: str) -> str:
    """The entry of the table that ``module`` belongs to: the longest prefix."""
    while module not in LAYER and "." in module:
        module = module.rpartition(".")[0]
    return module


def imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((a.name, node.lineno) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            for a in node.names:
                full = f"{node.module}.{a.name}"
                yield (full if full in MODULES else str(node.module)), node.lineno


def allowed(user: str, used: str) -> bool:
    if user.startswith("dsc.models"):
        return used.startswith("dsc.models")
    if used.startswith("dsc.models"):
        return LAYER[home(user)] == TOP
    a, b = home(user), home(used)
    return a == b or LAYER[b] < LAYER[a] or LAYER[a] == TOP or used == "dsc"


@pytest.mark.parametrize("module", list(MODULES))
def test_imports_point_down(module: str) -> None:
    bad = [
        f"line {n}: {used}"
        for used, n in imports(MODULES[module])
        if used.split(".")[0] == "dsc" and not allowed(module, used)
    ]
    assert not bad, f"{module} may not import {'; '.join(bad)}"


@pytest.mark.parametrize("module", list(MODULES))
def test_private_torch_stays_in_the_shim(module: str) -> None:
    if module == "dsc.torch_shim":
        return
    bad = [
        f"line {n}: {used}"
        for used, n in imports(MODULES[module])
        if used.startswith(("torch._", "functorch", "torch.utils._"))
    ]
    assert not bad, f"{module} must take these from dsc.torch_shim: {'; '.join(bad)}"


def test_every_module_has_a_layer() -> None:
    missing = [m for m in MODULES if home(m) == "dsc" and m != "dsc"]
    assert [m for m in missing if not m.startswith("dsc.models")] == []


def test_the_rule_itself() -> None:
    assert allowed("dsc.verify", "dsc.text")
    assert allowed("dsc.passes.fuse", "dsc.codegen.kernel")
    assert allowed("dsc.passes.fuse", "dsc.passes.solve.cut")
    assert not allowed("dsc.passes.fuse", "dsc.codegen.lower")
    assert not allowed("dsc.runtime.pool", "dsc.passes.fuse")
    assert not allowed("dsc.text", "dsc.manager")
    assert not allowed("dsc.ops", "dsc.notes")
    assert not allowed("dsc.models.mlp", "dsc.ops")
