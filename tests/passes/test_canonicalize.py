"""Compound operators to single-purpose ones: golden graphs, and the same answers."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from dsc import target
from dsc.debug.capture import capture
from dsc.debug.source import Model
from dsc.errors import PassFailed
from dsc.manager import PassPipeline
from dsc.passes.canonicalize import Canonicalize
from kit_graphs import story, trace

Golden = Callable[..., None]


def test_dropout_is_a_mask_and_a_product(golden: Golden) -> None:
    golden(story(trace(lambda x: torch.native_dropout(x, 0.25, True), torch.ones(4, 8)), Canonicalize()))


def test_dropout_out_of_training_stays(golden: Golden) -> None:
    golden(story(trace(lambda x: torch.native_dropout(x, 0.25, False), torch.ones(4, 8)), Canonicalize()))


def test_mean_loss_is_rows_and_their_sum(golden: Golden) -> None:
    f = lambda x, t: F.nll_loss(x, t)  # noqa: E731
    golden(story(trace(f, torch.ones(4, 8), torch.zeros(4, dtype=torch.int64)), Canonicalize()))


def test_weighted_loss_stays(golden: Golden) -> None:
    f = lambda x, t, w: F.nll_loss(x, t, w)  # noqa: E731
    golden(story(trace(f, torch.ones(4, 8), torch.zeros(4, dtype=torch.int64), torch.ones(8)), Canonicalize()))


def norm_backward(mask: list[bool]) -> Callable[..., object]:
    def f(g: torch.Tensor, x: torch.Tensor, m: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> object:
        return [y for y in torch.ops.aten.native_layer_norm_backward(g, x, [8], m, r, w, w, mask) if y is not None]

    return f


INPUTS = (torch.ones(4, 8), torch.ones(4, 8), torch.ones(4, 1), torch.ones(4, 1), torch.ones(8))


def test_norm_gradients_part(golden: Golden) -> None:
    golden(story(trace(norm_backward([True, True, True]), *INPUTS), Canonicalize()))


def test_norm_gradient_of_the_input_alone_stays(golden: Golden) -> None:
    golden(story(trace(norm_backward([True, False, False]), *INPUTS), Canonicalize()))


def test_equal_views_are_shared(golden: Golden) -> None:
    golden(story(trace(lambda x, w: (x @ w.t(), w.t() @ x), torch.ones(8, 8), torch.ones(8, 8)), Canonicalize()))


@pytest.mark.parametrize("p", [0.1, 0.9])
def test_same_answer_and_same_random_stream(p: float) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, mask = torch.native_dropout(x, p, True)
        return y, mask, torch.rand(3)

    gm = trace(f, torch.randn(64, 8))
    PassPipeline((Canonicalize(),)).run(gm, target.find("cpu"))
    x = torch.randn(64, 8)
    torch.manual_seed(3)
    want = f(x)
    torch.manual_seed(3)
    got = gm(x)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


def test_a_broken_graph_names_the_pass() -> None:
    gm = trace(lambda x: torch.native_dropout(x, 0.5, True)[0], torch.ones(4))
    del next(n for n in gm.graph.nodes if n.op == "placeholder").meta["val"]
    with pytest.raises(PassFailed, match="canonicalize"):
        PassPipeline((Canonicalize(),)).run(gm, target.find("cpu"))


def test_a_low_precision_loss_on_a_gpu_sums_in_fp32() -> None:
    """CUDA's kernel does; a CPU's rounds every partial sum, and stays with ATen."""
    x, target = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True), torch.arange(64)
    for machine, calls in (("h100", 0), ("cpu", 1)):
        session = capture(Model("loss", Loss(), (x, target)), machine)
        forward = session.regions[0].programs[0]
        assert forward.program.numbers["aten_calls"] == calls
        sums = [
            n for n in forward.gm.graph.nodes if "sum.default" in str(n.target) and n.meta["val"].is_floating_point()
        ]
        assert [n.meta["val"].dtype for n in sums] == [torch.float32] * (machine == "h100")


class Loss(torch.nn.Module):
    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, target)
