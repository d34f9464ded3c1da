"""Live bytes as planned are the bytes that the allocator holds."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kit_memory
from dsc import kernels, link, liveness
from dsc.manager import PassPipeline
from dsc.models.zoo import ZOO, load
from dsc.options import Options
from dsc.passes.canonicalize import Canonicalize
from dsc.passes.fuse import Fuse
from dsc.passes.recompute import Recompute
from dsc.runtime import run
from dsc.runtime.pool import Pool
from dsc.torch_shim import default_partition
from kit_graphs import CPU, trace

TINY = [n for n in ZOO if n.endswith("-tiny")]


class Dropped(nn.Module):
    """Dropout, several results of one call, a saved view, and an output that is saved too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, -1)
        values, _ = torch.topk(F.dropout(torch.cat([a * b, a], -1), 0.25), 64)
        return self.down(values.transpose(0, 1)).square().mean()


MODELS = [*TINY, "dropped"]


def make(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if name == "dropped":
        torch.manual_seed(0)
        return Dropped(), (torch.randn(64, 16),)
    entry = load(name)
    return entry.build(), entry.inputs()


@pytest.mark.parametrize("name", MODELS)
def test_unfused_peak_is_measured_to_the_byte(name: str) -> None:
    step = kit_memory.train_step(*make(name))
    planned = liveness.profile_step(step.forward, step.backward, step.saved)
    measured, _, _ = kit_memory.measured_peak(
        step, kit_memory.interpreter(step.forward), kit_memory.interpreter(step.backward)
    )
    assert abs(planned.peak - measured) <= 16


@pytest.mark.parametrize("name", ["resnet-tiny", "moe-tiny", "dropped"])
def test_program_peak_is_measured_within_a_hundredth(name: str) -> None:
    def partition(joint, inputs, **rest):  # type: ignore[no-untyped-def]
        PassPipeline((Canonicalize(), Recompute())).run(joint, CPU)
        return default_partition(joint, inputs, **rest)

    step = kit_memory.train_step(*make(name), partition)
    arenas, calls, refused = Pool(), [], []
    for gm, kind in ((step.forward, "forward"), (step.backward, "backward")):
        PassPipeline((Canonicalize(), Fuse())).run(gm, CPU)
        program, _, remarks = link.link(gm, Options(), kind)
        refused.append(frozenset(r.node for r in remarks))
        calls.append(run.load(program, kernels.launches(program, Options()), arenas, kind))
    planned = liveness.profile_step(
        step.forward, step.backward, step.saved, pooled=True, refused=(refused[0], refused[1])
    )
    measured, _, _ = kit_memory.measured_peak(step, *calls, warm=True)  # type: ignore[arg-type]
    assert planned.peak == pytest.approx(measured, rel=0.01)


def test_fused_temporaries_are_absent() -> None:
    gm = trace(lambda x: (x.exp() + 1).sin() * 2, torch.randn(1024))
    unfused = liveness.profile(gm).peak
    Fuse().run(gm, CPU)
    assert liveness.profile(gm).peak == 2 * 4096
    assert unfused == 3 * 4096


def test_views_share_their_storage() -> None:
    gm = trace(lambda x: (x * 2).view(4, 8).t().contiguous(), torch.randn(32))
    assert liveness.profile(gm).peak == 3 * 128


def test_largest_are_of_the_peak() -> None:
    gm = trace(lambda x: ((x.expand(64, 64) + 1).sum(0) * 2).sum(), torch.randn(64))
    found = liveness.profile(gm)
    assert [v.nbytes for v in found.largest(2)] == [64 * 64 * 4, 64 * 4]
    assert found.timeline[found.at][1] == found.peak
    assert sum(found.by_kind(found.at).values()) == found.peak
