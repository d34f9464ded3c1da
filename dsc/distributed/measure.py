"""What each call of a forward takes on this machine: forward, gradients of its values, gradients of its weights.

A roofline knows a card's peaks, not how far a library is from them for one shape.  Where the model and a micro-batch are
at hand, the calls are run one by one, as eager runs them, and cuts are made by what they took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node
from torch.utils import _pytree as pytree

from dsc import ops
from dsc.distributed import assemble, line
from dsc.distributed.forward import Forward
from dsc.distributed.stage_cost import NodeCost

ROUNDS = 6
"""Runs of the whole forward; of each call the fastest counts."""


def measured(
    forward: Forward, priced: Mapping[Node, NodeCost], model: nn.Module, microbatch: Sequence[Tensor]
) -> dict[Node, NodeCost]:
    """``priced`` with seconds of the device that ``model`` lies on, for every call that costs anything.

    1. A call runs alone, on the values of ``microbatch``; its gradients are those of ones.
    2. A weight gradient is added to another one, as for every micro-batch but the first.
    3. Calls that cost nothing in ``priced``, views and what fuses with a neighbour, stay free; bytes stay as they are.
    4. The model's buffers, gradients and the state of random numbers are left as they were.
    """
    tensors = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    given = dict(zip(forward.inputs, microbatch))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def value(name: str) -> Tensor:
        if name in forward.state:
            owner = tensors[forward.state[name]]
            return owner.detach() if name in forward.parameters else owner.detach().clone()
        return given[name] if name in given else forward.constants[name]

    names = [n.name for n in forward.gm.graph.nodes if n.op == "placeholder"]
    timed = {n for n, c in priced.items() if (c.forward or c.dgrad or c.wgrad) and not ops.mutated(n)}
    carry = assemble.differentiable(forward)
    late = line.copies(forward) | {n for n in forward.gm.graph.nodes if n.name in forward.parameters}
    took: dict[Node, list[tuple[float, float, float]]] = {n: [] for n in timed}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else [], device_type="cuda"):
        for _ in range(ROUNDS):
            _Timer(forward, took, carry, late, device).run(*map(value, names))
    best = {n: [min(t[k] for t in each) for k in range(3)] for n, each in took.items()}
    return {
        n: replace(c, forward=best[n][0], dgrad=best[n][1], wgrad=best[n][2]) if n in timed else c
        for n, c in priced.items()
    }


class _Timer(Interpreter):
    """Runs every call on leaves of its own, and those of ``took`` backward too."""

    def __init__(
        self,
        forward: Forward,
        took: Mapping[Node, list[tuple[float, float, float]]],
        carry: frozenset[str],
        late: frozenset[Node] | set[Node],
        device: torch.device,
    ) -> None:
        super().__init__(forward.gm)
        self.took, self.carry, self.late, self.device = took, carry, late, device

    def run_node(self, n: Node) -> Any:
        if n not in self.took:
            with torch.no_grad():
                return super().run_node(n)
        leaves: dict[Node, Tensor] = {}

        def leaf(a: Node) -> Any:
            held = self.env[a]
            if isinstance(held, Tensor) and a.name in self.carry and a not in leaves:
                leaves[a] = held.detach().requires_grad_()
            return leaves.get(a, held)

        args, kwargs = torch.fx.node.map_arg((n.args, n.kwargs), leaf)
        target: Any = n.target
        with torch.enable_grad():
            ahead, out = self.clock(lambda: target(*args, **kwargs))
        results = [r for r in pytree.tree_leaves(out) if isinstance(r, Tensor) and r.requires_grad]
        soon = [x for a, x in leaves.items() if a not in self.late]
        weights = [x for a, x in leaves.items() if a in self.late]
        ones = [torch.ones_like(r) for r in results]
        sums = [torch.zeros_like(w) for w in weights]

        def back(to: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
            if not to or not results:
                return ()
            return torch.autograd.grad(results, to, ones, retain_graph=True, allow_unused=True)

        def add() -> None:
            for total, grad in zip(sums, back(weights)):
                if grad is not None:
                    total.add_(grad)

        dgrad, wgrad = self.clock(lambda: back(soon))[0], self.clock(add)[0]
        self.took[n].append((ahead, dgrad if soon else 0.0, wgrad if weights else 0.0))
        return pytree.tree_map(lambda r: r.detach() if isinstance(r, Tensor) else r, out)

    def clock(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds of a call: of this thread on a CPU, so that other processes do not count."""
        if self.device.type != "cuda":
            start = time.thread_time()
            out = call()
            return time.thread_time() - start, out
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        out = call()
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - start, out
