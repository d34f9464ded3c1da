"""What joins, and what does not: golden graphs before and after fuse."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from dsc import manager, target
from dsc.errors import BadOption, UnknownOption
from dsc.notes import notes
from dsc.passes.canonicalize import Canonicalize
from dsc.passes.fuse import Fuse
from kit_graphs import story, trace

Golden = Callable[..., None]


def groups(gm: torch.fx.GraphModule) -> dict[str, str | None]:
    return {n.name: notes(n).group for n in gm.graph.nodes if n.op == "call_function"}


def test_pointwise_chain_is_one_kernel(golden: Golden) -> None:
    golden(story(trace(lambda x, y: ((x * 2).exp() + y).relu(), torch.ones(8, 16), torch.ones(16)), Fuse()))


def test_softmax_and_norm_share_rows(golden: Golden) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.softmax(-1) + x, (16,), w)

    golden(story(trace(f, torch.ones(8, 16), torch.ones(16)), Fuse()))


def test_several_reductions_of_one_input(golden: Golden) -> None:
    golden(story(trace(lambda x: (x.sum(1), x.amax(1), (x * x).mean(1)), torch.ones(64, 32)), Fuse()))


def test_views_cost_nothing(golden: Golden) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.exp().view(2, 4, 16) + 1).view(8, 16).sum(-1)

    golden(story(trace(f, torch.ones(8, 16)), Fuse()))


def test_matmul_cuts(golden: Golden) -> None:
    golden(story(trace(lambda x, w: (x.relu() @ w).relu(), torch.ones(8, 16), torch.ones(16, 4)), Fuse()))


def test_reductions_over_other_axes_stay_apart(golden: Golden) -> None:
    golden(story(trace(lambda x: (x.sum(0), x.sum(1)), torch.ones(64, 32)), Fuse()))


def test_path_through_a_third_would_be_a_cycle(golden: Golden) -> None:
    """exp feeds mm and the add, and the add needs mm: exp and add cannot be one kernel."""

    def f(x: torch.Tensor) -> torch.Tensor:
        e = x.exp()
        return e @ e + e

    gm = trace(f, torch.ones(16, 16))
    golden(story(gm, Fuse()))
    named = groups(gm)
    assert named["exp"] != named["add"]


def test_cheap_producer_is_copied_into_its_readers(golden: Golden) -> None:
    """A mask made from nothing costs less to make again than to read."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(16) < 8
        return (torch.where(mask, x, 0.0) @ w).where(mask, 1.0)

    golden(story(trace(f, torch.ones(8, 16), torch.ones(16, 16)), Fuse()))


def test_whole_reduction_does_not_drag_what_follows(golden: Golden) -> None:
    """Case 6: after a full sum nothing parallel is left."""
    golden(story(trace(lambda x: x / x.sum(), torch.ones(512, 512)), Fuse()))


def test_launches_are_saved_where_they_cost(golden: Golden) -> None:
    f = lambda x, y: (x.exp(), y.neg())  # noqa: E731
    golden(story(trace(f, torch.ones(8), torch.ones(8)), Fuse()), "cpu")
    golden(story(trace(f, torch.ones(8), torch.ones(8)), Fuse(), where=target.find("h100")), "h100")


def test_lone_copies_stay_with_aten(golden: Golden) -> None:
    golden(story(trace(lambda x: x.t().contiguous() @ x, torch.ones(8, 8)), Fuse()))


def test_symbolic_sizes(golden: Golden) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.view(-1, 16) * 2, (16,)).view(x.shape)

    golden(story(trace(f, torch.ones(5, 7, 16), dynamic=True), Fuse()))


def test_cross_entropy_rows(golden: Golden) -> None:
    def f(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, t)

    golden(story(trace(f, torch.ones(8, 32), torch.zeros(8, dtype=torch.int64)), Canonicalize(), Fuse()))


def test_max_nodes_cuts_long_groups() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = x + 1
        return x

    gm = trace(f, torch.ones(8))
    manager.PassPipeline((Fuse(max_nodes=4),)).run(gm, target.find("cpu"))
    sizes: dict[str | None, int] = {}
    for name in groups(gm).values():
        sizes[name] = sizes.get(name, 0) + 1
    assert None not in sizes
    assert max(sizes.values()) <= 4


def test_fusion_is_deterministic() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        a, b = x.exp(), x.sin()
        return (a.sum(-1, keepdim=True) + b.softmax(-1)) * a + b.mean(-1, keepdim=True)

    texts = {story(trace(f, torch.ones(32, 16)), Fuse()) for _ in range(3)}
    assert len(texts) == 1


def test_unknown_option_suggests() -> None:
    with pytest.raises(UnknownOption, match="max_nodes"):
        manager.parse("fuse{max_node=3}", {"fuse": Fuse})
    with pytest.raises(BadOption, match="whole number"):
        manager.parse("fuse{max_nodes=many}", {"fuse": Fuse})


def test_an_input_read_in_two_orders_is_no_reason_to_join() -> None:
    """Two results of the same inputs, one of which reads them transposed: two kernels, each with one loop order."""

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * y.t().sigmoid(), (x.t() * y).contiguous()

    def g(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * y.t().sigmoid(), (x.t() * y).t().exp()  # transposed twice: one order

    for made, count in ((f, 2), (g, 1)):
        gm = trace(made, torch.ones(64, 96), torch.ones(96, 64))
        manager.PassPipeline((Fuse(),)).run(gm, target.find("cpu"))
        assert len(set(groups(gm).values()) - {None}) == count
