"""Every kernel that the models' train steps need, held to what a GPU wants: compiled here, for A100 and H100.

The models have the widths of the real ones and two layers, which use the same kernels as twelve.
"""

from __future__ import annotations

import pytest
import sympy
import torch

pytest.importorskip("triton")

from dsc.codegen.cubin import LIMITS, KernelFacts
from dsc.codegen.kernel import NBYTES, Index, Kernel, indirect
from dsc.codegen.triton_nest import Nest, nest
from dsc.codegen.triton_plan import launched
from dsc.debug.capture import capture
from dsc.debug.kernels import Listed, facts_of, listed
from dsc.debug.source import Model
from dsc.models import bert, convnet, gpt, llama, moe, resnet, vit, zoo

MODELS = {
    "gpt": zoo.gpt_entry("gpt", "", gpt.Config(layers=2), batch=2),
    "llama": zoo.llama_entry("llama", "", llama.Config(layers=2), batch=2),
    "bert": zoo.bert_entry("bert", "", bert.Config(layers=2), batch=2),
    "vit": zoo.vit_entry("vit", "", vit.Config(layers=2), batch=2),
    "resnet": zoo.resnet_entry("resnet", "", resnet.Config(blocks=(1, 1, 1, 1)), size=96, batch=4),
    "moe": zoo.moe_entry("moe", "", moe.Config(layers=1), batch=2),
    "convnet": zoo.convnet_entry("convnet", "", convnet.Config(), size=64, batch=8),
}
SHARE = 0.06
"""Of a kernel's traffic, from which on the width of an access matters."""


@pytest.fixture(scope="module", params=MODELS)
def kernels(request: pytest.FixtureRequest) -> list[Listed]:
    entry = MODELS[request.param]
    inputs = tuple(x.bfloat16() if x.is_floating_point() else x for x in entry.inputs())
    return listed(capture(Model(entry.name, entry.build().to(torch.bfloat16), inputs), "h100"))


@pytest.mark.parametrize("capability", [80, 90])
def test_no_spills_and_whole_accesses(kernels: list[Listed], capability: int) -> None:
    facts = facts_of(kernels, (capability,), parallel=1)
    assert len(facts) == len(kernels) >= 4
    for k in kernels:
        found = facts[k.title, capability]
        assert found.spilled == 0, k.title
        assert found.shared <= LIMITS[capability].shared_block, k.title
        assert found.occupancy >= 1 / 8, (k.title, found.registers)
        assert narrow(k, found) == [], k.source


def narrow(k: Listed, facts: KernelFacts) -> list[tuple[str, int]]:
    """Buffers that matter and that threads walk in less than 16 bytes though their layout would allow it."""
    out = []
    assert k.schedule is not None
    kernel = launched(k.kernel, k.schedule).kernel
    n = nest(kernel)
    for a in facts.accesses:
        share = k.traffic.get(a.buffer, 0) / k.bytes
        if a.width < 16 and share > SHARE and k.bytes > 1e5 and layout_allows(kernel, n, a.buffer, a.store):
            out.append((a.buffer, a.width))
    return out


def layout_allows(kernel: Kernel, n: Nest, buffer: str, store: bool) -> bool:
    """Whether every such access walks runs of 16 bytes along one side of the tile."""
    itemsize = NBYTES[kernel.buffer(buffer).dtype]
    loads = [v.access[1] for v in n.kernel.lets if v.op == "load" and v.access[0] == buffer]
    indices = [s.index for s in n.kernel.stores if s.buffer == buffer] if store else loads
    return all(run_of(n, sympy.sympify(e)) * itemsize % 16 == 0 for e in indices)


def run_of(n: Nest, index: Index) -> int:
    """Points of one side that lie next to each other in memory."""
    best = 1
    for side in (n.parallel, n.reduced):
        run = 1
        names = {s.name: s for s in index.free_symbols}
        for a in reversed(side):
            s = names.get(a.name)
            if s is None or index.coeff(s) != run or indirect(index, n.kernel) & {a.name}:
                break
            run *= int(a.extent)
        best = max(best, run)
    return best


def test_the_rule_itself() -> None:
    """A kernel made to walk the wrong way is found."""
    from kit_kernels import Build

    b = Build("strided", i=64, j=2048)
    b.store("out", b["i"] * 2048 + b["j"], b.load("x", b["i"] * 2048 + b["j"]))
    n = nest(b.kernel())
    assert layout_allows(b.kernel(), n, "x", store=False)
    b = Build("odd", i=64, j=9)
    b.store("out", b["i"] * 9 + b["j"], b.let("mul", b.load("x", b["i"] * 11 + b["j"]), b.load("y", b["i"])))
    n = nest(b.kernel())
    assert not layout_allows(b.kernel(), n, "x", store=False)
    assert layout_allows(b.kernel(), n, "out", store=True)
