"""Joint graphs of models that are too large for this machine: traced on shapes alone, no tensor is ever allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from dsc import retarget, sdpa
from dsc.errors import Untraceable
from dsc.torch_shim import FakeTensorMode, aot_function, default_partition


@contextmanager
def only() -> Iterator[None]:
    """Tensors made inside have shapes and no values; the state of random numbers stays as it is."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]):
        yield


@dataclass(frozen=True)
class Joint:
    """The joint graph of one train step."""

    gm: GraphModule
    results: int
    """Of the forward, before anything is saved."""
    parameters: int
    """The first inputs are so many parameters and buffers; the rest are the model's arguments."""


class CudaAttention(TorchFunctionMode):
    """Attention chooses its kernel as on CUDA, whatever the device of the trace."""

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if f is F.scaled_dot_product_attention:
            return sdpa.attention(*args, **(kwargs or {}))
        return f(*args, **(kwargs or {}))


def joint(
    build: Callable[[], nn.Module],
    draw: Callable[[], tuple[Tensor, ...]],
    dtype: torch.dtype | None = None,
    cuda: bool = True,
) -> Joint:
    """Trace forward and backward of ``build()(*draw())``, a scalar loss, with parameters and buffers in ``dtype``.

    ``cuda``: as it would be traced on a GPU, with the attention kernels that torch chooses there.

    Raises:
        Untraceable: the model asks for values, or draws tensors in a way that shapes alone cannot follow.
    """
    found: dict[str, Any] = {}

    def keep(gm: GraphModule, inputs: Any, *, num_fwd_outputs: int, **rest: Any) -> Any:
        found["gm"], found["results"] = _copied(gm), num_fwd_outputs
        return default_partition(gm, inputs, num_fwd_outputs=num_fwd_outputs, **rest)

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode, torch.random.fork_rng(devices=[]):
            model, inputs = build(), draw()
            cast(model, dtype)
            inputs = tuple(x.to(dtype) if dtype and x.is_floating_point() else x for x in inputs)
            state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            names = list(state)

            def run(*flat: Tensor) -> Any:
                with CudaAttention() if cuda else torch.enable_grad():
                    return torch.func.functional_call(model, dict(zip(names, flat)), flat[len(names) :])

            same: Callable[..., Any] = lambda gm, _: gm  # noqa: E731
            aot_function(run, fw_compiler=same, bw_compiler=same, partition_fn=keep, num_params_buffers=len(names))(
                *state.values(), *inputs
            )
    except Exception as why:
        reason = f"{type(why).__name__}: {str(why).splitlines()[0] if str(why) else ''}"
        raise Untraceable("The model", reason, "trace it on real tensors of a smaller size instead") from why
    if cuda:
        retarget.to_device(found["gm"], torch.device("cuda"))
    return Joint(found["gm"], found["results"], len(names))


def cast(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Floating-point parameters and buffers to ``dtype``, fake ones too, which ``Module.to`` refuses."""
    if dtype is None:
        return
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if p.is_floating_point():
                p.data = p.data.to(dtype)
        for name, b in module.named_buffers(recurse=False):
            if b.is_floating_point():
                setattr(module, name, b.to(dtype))


def _copied(gm: GraphModule) -> GraphModule:
    graph = torch.fx.Graph()
    known: dict[Any, Any] = {}
    for node in gm.graph.nodes:
        known[node] = graph.node_copy(node, known.__getitem__)
    return GraphModule(gm, graph)
