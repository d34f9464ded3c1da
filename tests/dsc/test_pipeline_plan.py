"""The pipeline planner on small models: what each stage runs and gets, plans as data, clusters, degrees, bad input."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsc
from dsc.distributed import degrees, forward, line, plan, stage_cost, table, topology
from dsc.distributed.cluster import Cluster, Link
from dsc.distributed.plan import Degrees, PipelinePlan
from dsc.distributed.planner import plan_pipeline
from dsc.errors import (
    BadCluster,
    BadMicrobatches,
    BadOption,
    BadPlan,
    ClusterTooSmall,
    PipelineTooLarge,
    TooManyStages,
    UnknownSchedule,
    UnknownTarget,
    Untraceable,
)
from dsc.models import encdec, gpt, llama, moe, uvit
from dsc.models.zoo import ZOO
from dsc.passes.solve import stage_cut
from dsc.passes.solve.pipeline_simulate import bound, simulate


def meta(length: int, batch: int, count: int = 2) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(batch, length, dtype=torch.long, device="meta") for _ in range(count))


def built(module: Any) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = module().to(torch.bfloat16)
    return made


def wide_gpt() -> nn.Module:
    return built(lambda: gpt.GPT(gpt.Config(vocab=32000, max_length=512, layers=8, heads=16, width=1024)))


@cache
def wide(**options: Any) -> PipelinePlan:
    """A GPT whose work outweighs its messages, on four cards of a node."""
    options = {"stages": 4, "cluster": "4xa100", "microbatches": 8, "effort": "quick", **options}
    return plan_pipeline(wide_gpt(), meta(512, 16), **options)


@cache
def tiny(name: str, **options: Any) -> tuple[forward.Forward, PipelinePlan]:
    entry = ZOO[name]
    model, inputs = entry.build(), entry.inputs(8)
    options = {"stages": 2, "cluster": "4xa100", "microbatches": 4, "effort": "quick", **options}
    return forward.trace(model, forward.microbatch(inputs, 4)), plan_pipeline(model, inputs, **options)


# --- what stages run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("gpt-tiny", "auto"), ("llama-tiny", "zbv"), ("moe-tiny", "zbv"), ("encdec-tiny", "auto"), ("encdec-tiny", "zbv"),
     ("uvit-tiny", "auto"), ("resnet-tiny", "zbv")],
)  # fmt: skip
def test_stages_run_all_calls_once_and_have_what_they_read(name: str, schedule: str) -> None:
    traced, made = tiny(name, schedule=schedule)
    nodes = {n.name: n for n in traced.gm.graph.nodes}
    run = [n for s in made.stages for n in s.nodes]
    copied = {n for s in made.stages for n in s.copied}
    assert sorted(run) == sorted({n.name for n in nodes.values() if n.op == "call_function"} - copied)
    sent: tuple[str, ...] = ()
    for s in made.stages:
        assert s.receives == sent
        have = {*s.receives, *s.inputs}
        for call in (*s.copied, *s.nodes):
            for a in nodes[call].all_input_nodes:
                known = a.name in have or traced.state.get(a.name) in s.state
                assert known, f"stage {s.index} runs {call}, and has no {a.name}"
            have.add(call)
        assert set(s.sends) <= have
        sent = s.sends
    assert made.stages[-1].sends == traced.results
    assert all(made.stage_of(n) == s.index for s in made.stages for n in s.nodes)
    assert plan.why_not(made) is None
    given = [name for s in made.stages for name in s.inputs]
    assert sorted(given) == sorted(traced.inputs)


def test_targets_go_to_the_last_stage_and_tied_weights_are_known() -> None:
    _, made = tiny("gpt-tiny")
    assert made.stages[0].inputs == ("idx",) and made.stages[-1].inputs == ("targets",)
    assert made.shared == {"tokens.weight": (0, made.stages[-1].index)}
    assert all("slice" not in n for s in made.stages for n in s.nodes if s.copied), "a view of the positions is copied"


def test_what_several_stages_need_is_passed_on() -> None:
    module = built(lambda: encdec.EncoderDecoder(encdec.Config(1024, 256, 4, 8, 512, 1024)))
    made = plan_pipeline(
        module, meta(256, 8, 3), stages=4, cluster="4xa100", microbatches=8, schedule="1f1b", effort="quick"
    )
    passed = [set(s.receives) & set(s.sends) for s in made.stages]
    assert any(passed), "the encoder's result crosses several decoder stages"
    skip = built(lambda: uvit.UViT(uvit.Config(size=64, layers=8, heads=8, width=512)))
    images = torch.zeros(8, 3, 64, 64, dtype=torch.bfloat16, device="meta")
    times = torch.zeros(8, dtype=torch.bfloat16, device="meta")
    made = plan_pipeline(
        skip, (images, times, images), stages=4, cluster="4xa100", microbatches=8, schedule="1f1b", effort="quick"
    )
    assert len(made.stages[2].receives) > len(made.stages[-1].receives)


def test_statistics_of_micro_batches_are_remarked_on() -> None:
    _, made = tiny("resnet-tiny", schedule="zbv")
    assert [r.node for r in made.remarks if "statistics" in r.why] == ["batch_norm"]


@pytest.mark.parametrize(("stages", "microbatches", "schedule"), [(1, 1, "gpipe"), (1, 2, "zbv"), (2, 1, "zbv"), (2, 4, "interleaved")])  # fmt: skip
def test_small_numbers_and_several_results(stages: int, microbatches: int, schedule: str) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
            self.unused = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.layers(x) + y, self.layers[:2](x).mean(), x

    inputs = (torch.zeros(8, 64), torch.zeros(8, 64))
    made = plan_pipeline(
        Several(),
        inputs,
        stages=stages,
        cluster="2xa100",
        microbatches=microbatches,
        schedule=schedule,
        chunks=3,
        effort="quick",
    )
    assert plan.why_not(made) is None and plan.parse(plan.dump(made)) == made
    assert made.stages[-1].sends == ("add", "mean", "x")
    assert all("x" in s.receives for s in made.stages[1:]), "a result that an early stage has is passed on to the last"


def test_a_plan_from_the_meta_device_is_for_the_real_model_too() -> None:
    entry = ZOO["gpt-tiny"]
    with torch.device("meta"):
        shapes = entry.make()
    inputs = entry.inputs(8)
    made = plan_pipeline(shapes, inputs, stages=2, cluster="2xa100", microbatches=4, effort="quick")
    assert made.graph == forward.trace(entry.build(), forward.microbatch(inputs, 4)).fingerprint
    other = forward.trace(entry.build(), forward.microbatch(inputs, 2))
    assert made.graph != other.fingerprint, "micro-batches of another size make another graph"


def test_values_are_not_cut_off_from_what_writes_into_them() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for i, layer in enumerate(self.layers):
                x = layer(x)
                if i == 2:
                    y = x.relu()
                    z = y * 2
                    y.add_(1)
                    x = y + z
            return x.sum()

    traced = forward.trace(Writes(), (torch.zeros(4, 64),))
    laid = line.on_cluster(traced, Cluster.parse("2xa100"), Degrees(pipeline=2))
    names = [n.name for n in laid.nodes]
    first, last = names.index("relu"), names.index("add_")
    assert not laid.line.allowed[first + 1 : last + 1].any()
    assert laid.line.allowed[last + 1]
    assert len(line.orders(traced)) == 1, "calls that write keep the order of the program"


# --- numbers -------------------------------------------------------------------------------------------------------------


def test_the_plan_is_what_the_simulator_says() -> None:
    made = wide()
    again = simulate(table.pipeline_of(made), made.orders)
    assert again.seconds == pytest.approx(made.seconds)
    assert made.bound <= made.seconds * (1 + 1e-9)
    assert bound(table.pipeline_of(made)) == pytest.approx(made.bound)
    assert max(made.peaks) <= made.limit
    fitting = [r.seconds for r in made.rivals if r.fits]
    assert made.seconds <= min(fitting) * 1.01, "robustness to jitter may cost a little, no more"
    assert made.bubble < 0.2


def test_costs_agree_with_the_compilers_own_of_the_joint_graph() -> None:
    from dsc import cost
    from dsc.debug import shapes
    from dsc.passes.canonicalize import Canonicalize
    from dsc.passes.fuse import Fuse

    config = llama.Config(8192, 1024, 3, 16, 4, 2048, 5632)
    cluster = Cluster.parse("2xa100")
    module = built(lambda: llama.Llama(config))
    traced = forward.trace(module, meta(1024, 2))
    laid = line.on_cluster(traced, cluster, Degrees(pipeline=2))
    accumulate = sum(3 * p.numel() * 2 for p in module.parameters()) / (cluster.target.bandwidth * 0.85)
    ours = float(laid.line.total[-1]) - accumulate
    joint = shapes.joint(
        lambda: llama.Llama(config),
        lambda: tuple(torch.zeros(2, 1024, dtype=torch.long) for _ in range(2)),
        torch.bfloat16,
    )
    for p in (Canonicalize(), Fuse()):
        p.run(joint.gm, cluster.target)
    assert ours == pytest.approx(cost.graph_cost(joint.gm, cluster.target).seconds, rel=0.12)


def test_tensor_parallelism_divides_products_and_pays_for_sums() -> None:
    traced = forward.trace(wide_gpt(), meta(512, 8))
    one = line.on_cluster(traced, Cluster.parse("8xa100"), Degrees())
    four = line.on_cluster(traced, Cluster.parse("8xa100"), Degrees(tensor=4, sequence=4))
    ratio = float(one.line.total[-1] / four.line.total[-1])
    assert 2.0 < ratio < 4.0
    assert float(one.line.made[-1] / four.line.made[-1]) == pytest.approx(4, rel=0.1)
    slow = line.on_cluster(traced, Cluster.parse("8x1xa100"), Degrees(tensor=4, sequence=4))
    assert slow.line.total[-1] > four.line.total[-1], "between machines the sums take longer"
    linears = [n for n in four.nodes if stage_cost.packet(n) == "linear"]
    layout = stage_cost.Layout(Cluster.parse("8xa100"), Degrees(tensor=4))
    pricing = stage_cost._Pricing(traced, layout)
    pricing.run()
    assert [n in pricing.divided for n in linears[:4]] == [True, False, True, False], "column, row, column, row"


def test_memory_moves_cuts_then_recomputes_then_says_what_to_change() -> None:
    free = wide(schedule="1f1b")
    most = max(free.peaks)
    less = wide(schedule="1f1b", memory=int(most * 0.9))
    assert max(less.peaks) <= most * 0.9
    all_at_once = wide(schedule="gpipe")
    static = max(sum(s.static_bytes for s in all_at_once.stages_of(r)) for r in range(4))
    tight = wide(schedule="gpipe", memory=static + (max(all_at_once.peaks) - static) // 4)
    assert any(s.recompute for s in tight.stages) and max(tight.peaks) <= tight.limit
    assert all(s.dgrad > s.forward for s in tight.stages if s.recompute)
    with pytest.raises(PipelineTooLarge, match=r"No pipeline fits into .* a rank: rank \d needs at least .*; give "):
        wide(schedule="1f1b", memory=most // 20)


def test_micro_batches_are_chosen_and_explained() -> None:
    made = wide(microbatches="auto", schedule="1f1b")
    assert 16 % made.microbatches == 0 and made.microbatches * made.microbatch_size == 16
    assert any("micro-batches" in r.node for r in made.remarks)


def test_a_head_heavier_than_a_rank_is_named() -> None:
    module = built(lambda: gpt.GPT(gpt.Config(vocab=256000, max_length=256, layers=2, heads=8, width=512)))
    made = plan_pipeline(module, meta(256, 8), stages=4, cluster="4xa100", microbatches=8, effort="quick")
    assert any("no cut can balance it" in r.why for r in made.remarks)


def test_nodes_of_a_cluster_decide_what_crosses_the_network() -> None:
    made = wide(cluster="2x2xa100", schedule="1f1b")
    sends = [s.send for s in made.stages[:-1]]
    assert sends[1] > 3 * max(sends[0], sends[2])
    assert made.devices == (0, 1, 2, 3)


# --- plans as data -----------------------------------------------------------------------------------------------------


def test_plans_are_saved_read_and_compared(tmp_path: Path) -> None:
    made = wide()
    file = tmp_path / "plans" / "p.json"
    made.save(file)
    again = PipelinePlan.load(file)
    assert again == made and again.key == made.key and again.diff(made) == []
    other = replace(made, schedule="mine", limit=5)
    assert made.diff(other) == [f"schedule: {made.schedule} -> mine", f"limit: {made.limit} -> 5"]
    assert made.key != other.key


def test_planning_twice_gives_the_same_plan() -> None:
    entry = ZOO["llama-tiny"]
    options: dict[str, Any] = {"stages": 2, "cluster": "2xa100", "microbatches": 4, "effort": "quick"}
    first, second = (plan_pipeline(entry.build(), entry.inputs(8), **options) for _ in range(2))
    assert plan.dump(first) == plan.dump(second)


def test_broken_plans_are_refused(tmp_path: Path) -> None:
    _, made = tiny("gpt-tiny")
    data = json.loads(plan.dump(made))
    with pytest.raises(BadPlan, match="No such file"):
        PipelinePlan.load(tmp_path / "none.json")
    for change, message in (
        ({"version": 99}, "of version 99"),
        ({"pipeline": {**data["pipeline"], "orders": data["pipeline"]["orders"][::-1]}}, "whose stage is not its own"),
        ({"pipeline": {k: v for k, v in data["pipeline"].items() if k != "split"}}, "'split'"),
        ({"pipeline": {**data["pipeline"], "microbatches": 5}}, "of 5 micro-batches"),
        ({"pipeline": {**data["pipeline"], "orders": ["0X0", ""]}}, "no action"),
    ):
        with pytest.raises(BadPlan, match=message):
            plan.parse(json.dumps({**data, **change}))
    with pytest.raises(BadPlan, match="before its forward"):
        plan.parse(plan.dump(made).replace("0F0 ", "", 1).replace('"0F1', '"0I0 0F0 0F1', 1))


def test_the_table(golden: Any) -> None:
    made = wide(schedule="zbv")
    golden(table.text(made))


# --- clusters and degrees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nodes", "cards", "between"),
    [("8xa100", 1, 8, 25e9), ("2x8xh100", 2, 8, 50e9), ("16xa100", 2, 8, 25e9), ("4x4xA100-40@ib100", 4, 4, 12.5e9), ("3xcpu", 1, 3, 1.25e9)],
)  # fmt: skip
def test_clusters(text: str, nodes: int, cards: int, between: float) -> None:
    found = Cluster.parse(text)
    assert (found.nodes, found.per_node, found.between.bandwidth) == (nodes, cards, between)
    assert Cluster.from_data(found.to_data()) == found
    assert Cluster.parse(str(found)).size == found.size
    assert found.link(0, 0) is None and (found.size == 1 or found.link(0, 1) == found.inside)
    assert nodes == 1 or found.link(0, cards) == found.between


@pytest.mark.parametrize("text", ["", "a100", "0xa100", "12xa100", "8xa100@wifi10", "8*a100"])
def test_bad_clusters(text: str) -> None:
    with pytest.raises(BadCluster):
        Cluster.parse(text)


def test_an_unknown_card_is_named() -> None:
    with pytest.raises(UnknownTarget, match="a1000"):
        Cluster.parse("8xa1000")


def test_a_cluster_is_divided_with_the_heaviest_traffic_inside() -> None:
    cluster = Cluster.parse("2x4xa100")
    found = degrees.propose(wide_gpt(), meta(512, 32), cluster)
    assert all(p.degrees.devices == 8 for p in found)
    assert all(p.degrees.tensor <= 4 for p in found), "tensor parallelism stays in a node"
    assert [p.fits for p in found] == sorted((p.fits for p in found), reverse=True)
    assert found[0].seconds == min(p.seconds for p in found)
    assert topology.devices(Degrees(pipeline=4, tensor=2)) == (0, 2, 4, 6)
    near = Degrees(data=4, pipeline=2, near="replicas")
    assert topology.devices(near) == (0, 4) and topology.peers(near) == (0, 1, 2, 3)
    inside = topology.reduce_seconds(1e9, near, cluster)
    assert inside < topology.reduce_seconds(1e9, replace(near, near="stages"), cluster) / 5
    assert {p.degrees.near for p in found} == {"stages", "replicas"}
    tight = degrees.propose(wide_gpt(), meta(512, 32), cluster, memory=int(found[0].peak * 0.7))
    assert tight[0].degrees != found[0].degrees or not tight[0].fits or tight[0].recompute
    with pytest.raises(ClusterTooSmall):
        plan_pipeline(wide_gpt(), meta(512, 32), stages=16, cluster=cluster, microbatches=8)


def test_experts_are_spread_over_replicas_where_memory_asks() -> None:
    module = built(lambda: moe.MoE(moe.Config(4096, 256, 4, 8, 8, 512, 1024, experts=8)))
    found = degrees.propose(module, meta(256, 8), Cluster.parse("4xa100"))
    spread = [p for p in found if p.degrees.expert > 1]
    assert spread and all(p.degrees.data % p.degrees.expert == 0 for p in spread)
    for p in spread:
        (same,) = [q for q in found if q.degrees == replace(p.degrees, expert=1)]
        assert p.peak < same.peak, "fewer experts a card"
    convolved = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Conv1d(8, 8, 3))
    assert all(
        p.degrees.expert == 1 for p in degrees.propose(convolved, (torch.zeros(4, 4, 16),), Cluster.parse("2xa100"))
    )


def test_auto_stages_take_the_whole_cluster() -> None:
    made = plan_pipeline(wide_gpt(), meta(512, 16), cluster="4xa100", memory="3GiB", effort="quick")
    assert made.degrees.devices == 4
    assert any("replicas" in r.node or "stages" in r.node for r in made.remarks)


# --- bad input ---------------------------------------------------------------------------------------------------------


def test_a_cluster_that_no_division_suits_is_refused() -> None:
    with pytest.raises(BadOption, match="'cluster' cannot be '64x1xa100'; give a smaller one: no division of it suits"):
        plan_pipeline(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.zeros(3, 4),), cluster="64x1xa100")


def test_each_mistake_is_one_sentence() -> None:
    entry = ZOO["mlp-tiny"]
    model, inputs = entry.build(), entry.inputs(8)

    def go(**options: Any) -> None:
        dsc.plan_pipeline(
            model, inputs, **{"stages": 2, "cluster": "8xa100", "microbatches": 4, "effort": "quick", **options}
        )

    with pytest.raises(
        TooManyStages, match=r"cannot be cut into 9 stages \(its graph has \d+ calls\); give at most \d"
    ):
        go(stages=9, cluster="16xa100")
    with pytest.raises(UnknownSchedule, match="'zvb' is not a schedule; did you mean 'zbv'"):
        go(schedule="zvb")
    with pytest.raises(
        BadMicrobatches,
        match="3 micro-batches cannot be: they would be unequal on a batch of 8; give one of 1, 2, 4, 8",
    ):
        go(microbatches=3)
    with pytest.raises(BadMicrobatches, match="no positive whole number"):
        go(microbatches=0)
    with pytest.raises(BadMicrobatches, match="no whole number"):
        go(microbatches="many")
    with pytest.raises(BadMicrobatches, match="'dualpipev' cannot run them on 4 ranks"):
        plan_pipeline(wide_gpt(), meta(512, 16), stages=4, cluster="4xa100", microbatches=4, schedule="dualpipev")
    with pytest.raises(BadOption, match="'stages'"):
        go(stages=0)
    with pytest.raises(BadOption, match="'memory'"):
        go(memory="much")
    with pytest.raises(BadOption, match="'optimizer'"):
        go(optimizer="adamx")
    with pytest.raises(BadOption, match="'effort'"):
        go(effort="none")
    with pytest.raises(BadOption, match="'slow'"):
        go(slow=(1.0,))
    with pytest.raises(BadOption, match="'example_inputs' cannot be 3; give tensors"):
        plan_pipeline(model, (3, 4), stages=2, microbatches=2)  # type: ignore[arg-type]
    with pytest.raises(BadMicrobatches, match="no one batch size"):
        plan_pipeline(model, (inputs[0], inputs[1][:4]), stages=2, microbatches=2)


def test_control_flow_on_values_is_refused_with_its_line_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.a(x) if x.sum() > 0 else self.b(x)
            return y.sum()

    with pytest.raises(Untraceable, match=r"if x.sum\(\) > 0 .*test_pipeline_plan.py:\d+\); make its control flow"):
        plan_pipeline(Branches(), (torch.zeros(4, 4),), stages=2, microbatches=2)
    assert capfd.readouterr().err == ""


def test_what_a_model_says_while_it_is_traced_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    class Says(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            print("hello", file=sys.stderr)
            return super().forward(x)

    forward.trace(Says(4, 4), (torch.zeros(4, 4),))
    assert capsys.readouterr().err == "hello\n"


# --- costs that are measured ----------------------------------------------------------------------------------------------


class Lopsided(nn.Module):
    """Layers alike but for the first, which takes far longer than a roofline knows; with much that runs only once."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 48)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(12))
        self.norm = nn.BatchNorm1d(48)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.linalg.matrix_exp(self.table(tokens).unflatten(0, (-1, 48)) / 50).flatten(0, 1)
        for layer in self.layers:
            x = torch.dropout(layer(x).relu(), 0.1, True)
        return self.norm(x).sum()


def test_costs_are_measured_where_the_model_lies() -> None:
    model, tokens = Lopsided(), torch.arange(96 * 4) % 16
    kept = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    options: dict[str, Any] = {
        "stages": 3,
        "cluster": "4xcpu",
        "microbatches": 4,
        "schedule": "1f1b",
        "effort": "quick",
    }
    modelled, timed = (plan_pipeline(model, tokens, costs=c, **options) for c in ("modelled", "measured"))
    assert torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(t, kept[name]) for name, t in model.state_dict().items()), "the statistics stay"
    first, before = timed.stages[0], modelled.stages[0]
    assert first.forward + first.backward > before.forward + before.backward
    assert len(timed.stages[0].nodes) < len(modelled.stages[0].nodes), "the slow call leaves no room for others"
    assert timed.graph == modelled.graph and plan.why_not(timed) is None
    assert any(r.node == "costs" and "measured" in r.why for r in timed.remarks)


def test_measured_costs_have_parts_where_the_modelled_ones_have() -> None:
    from dsc.distributed import measure

    entry = ZOO["gpt-tiny"]
    model, inputs = entry.build(), entry.inputs(2)
    traced = forward.trace(model, inputs)
    priced = stage_cost.costs(traced, stage_cost.Layout(Cluster.parse("2xcpu"), Degrees(pipeline=2)))
    timed = measure.measured(traced, priced, model, inputs)
    assert timed.keys() == priced.keys()
    for n, c in priced.items():
        t = timed[n]
        assert (t.saved, t.late) == (c.saved, c.late)
        if stage_cost.packet(n) == "linear":
            assert t.forward > 0 and t.dgrad > 0 and t.wgrad > 0 and t.forward != c.forward
        if not (c.forward or c.dgrad or c.wgrad):
            assert (t.forward, t.dgrad, t.wgrad) == (0, 0, 0), f"{n} is free"


def test_costs_cannot_be_measured_without_values() -> None:
    options: dict[str, Any] = {"stages": 2, "microbatches": 4, "costs": "measured"}
    with pytest.raises(
        BadOption, match="'costs' cannot be 'measured'; give 'modelled' for a model or a batch on the meta"
    ):
        plan_pipeline(wide_gpt(), meta(512, 16), cluster="4xa100", **options)
    entry = ZOO["mlp-tiny"]
    with pytest.raises(BadOption, match="where cards share a layer"):
        plan_pipeline(entry.build(), entry.inputs(8), cluster="4xa100", degrees=Degrees(tensor=2), **options)
    with pytest.raises(BadOption, match="'costs' cannot be 'guessed'; give one of modelled, measured"):
        plan_pipeline(entry.build(), entry.inputs(8), **{**options, "costs": "guessed"})


def test_wide_places_are_tried_where_links_are_fast() -> None:
    traced = forward.trace(built(lambda: moe.MoE(moe.Config())), meta(256, 1))
    found = []
    for speed in (1e9, 1e15):
        wire = Link("wire", speed, 0.0)
        laid = line.on_cluster(traced, Cluster("cpu", 1, 4, wire, wire), Degrees(pipeline=4))
        at = stage_cut.places(laid.line, 4)
        cuts = stage_cut.straight(laid.line, 4, at, talk=0.0)
        assert cuts is not None
        widest = max(laid.line.crossing[at])
        found.append((widest, max(laid.line.total[b] - laid.line.total[a] for a, b in pairwise(cuts))))
    assert found[1][0] > found[0][0] and found[1][1] < found[0][1]
