"""The forward of a model as one graph, on shapes alone: what the planner cuts, and what every rank cuts again.

The graph is torch.export's, before autograd: one node a call of the model, differentiable, with parameters, buffers and
inputs as placeholders.  The same model on micro-batches of the same shape gives the same names everywhere, on the meta
device too.
"""

from __future__ import annotations

import hashlib
import io
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from dsc.errors import BadMicrobatches, Untraceable

CALL = re.compile(r'^  File "(.+)", line (\d+), in \w+\n\s+(.+)$', re.MULTILINE)
"""The line of the model that torch.export names behind its message."""


@dataclass(frozen=True)
class Forward:
    """A traced forward: placeholders in the order parameters, buffers, constants, inputs; then calls; then results."""

    gm: GraphModule
    state: Mapping[str, str]
    """Placeholder -> the model's first name of that parameter or buffer: tied ones share a name."""
    parameters: frozenset[str]
    """Those placeholders that are parameters with gradients."""
    constants: Mapping[str, Tensor]
    """Placeholder -> a tensor that the model made while it was traced."""
    inputs: tuple[str, ...]
    """Placeholders of the model's arguments, flattened in order."""
    results: tuple[str, ...]
    """Nodes of the model's results."""

    @property
    def fingerprint(self) -> str:
        """Equal for graphs with the same calls on the same shapes under the same names, wherever the model lies."""
        return hashlib.sha256("\n".join(map(_line, self.gm.graph.nodes)).encode()).hexdigest()[:16]


def trace(model: nn.Module, microbatch: Sequence[Tensor]) -> Forward:
    """The forward of ``model(*microbatch)``.

    Nothing is computed.  Where the model lies on the meta device, so may the micro-batch.

    Raises:
        Untraceable: the model branches on values, or does what torch.export cannot follow.
    """
    first: dict[int, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, t in tensors:
        first.setdefault(id(t), name)
    known = dict(tensors)
    meta = any(p.is_meta for p in model.parameters())
    given = tuple(t.to("meta") if meta and isinstance(t, Tensor) else t for t in microbatch)
    try:
        with _quiet():
            program = torch.export.export(model, given, strict=False)
    except Exception as why:
        reason = f"{type(why).__name__}: {str(why).splitlines()[0] if str(why) else ''}".rstrip(". ")
        if found := CALL.findall(str(why)):
            file, number, code = found[-1]
            reason += f", in {code!r} ({file}:{number})"
        raise Untraceable("The model", reason, "make its control flow depend on shapes alone") from why
    signature = program.graph_signature
    lifted = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    owners = {place: first[id(known[name])] for place, name in lifted.items()}
    trained = {p for p, name in signature.inputs_to_parameters.items() if known[name].requires_grad}
    gm = program.graph_module
    for node in list(gm.graph.nodes):
        if str(node.target) == "aten._assert_tensor_metadata.default":
            gm.graph.erase_node(node)
    return Forward(
        gm,
        owners,
        frozenset(trained),
        {p: program.constants[name] for p, name in signature.inputs_to_lifted_tensor_constants.items()},
        tuple(str(n) for n in signature.user_inputs),
        tuple(str(n) for n in signature.user_outputs),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """torch.export prints all of the graph so far before it raises, where the error names the line that matters."""
    log, quiet = logging.getLogger("torch.fx.experimental.symbolic_shapes"), logging.Filter("nobody")
    log.addFilter(quiet)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            yield
        sys.stderr.write(said.getvalue())
    finally:
        log.removeFilter(quiet)


def _line(node: Node) -> str:
    value = node.meta.get("val")
    shape = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"{node.name} {shape} {node.target} {node.args} {sorted(node.kwargs.items(), key=str)}"


def microbatch(inputs: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
    """The first of ``count`` equal slices of a batch; dimension 0 of every tensor is the batch.

    Raises:
        BadMicrobatches: ``count`` does not divide the batch, or inputs disagree on it.
    """
    samples = batch_of(inputs)
    if not isinstance(count, int) or count < 1:
        raise BadMicrobatches(count, "it is no positive whole number", f"give a divisor of the batch of {samples}")
    if samples % count:
        near = [d for d in range(1, samples + 1) if samples % d == 0]
        raise BadMicrobatches(
            count, f"they would be unequal on a batch of {samples}", f"give one of {', '.join(map(str, near))}"
        )
    return tuple(t[: samples // count] if t.dim() else t for t in inputs)


def batch_of(inputs: Sequence[Tensor]) -> int:
    """Samples in a batch: dimension 0, on which all inputs that have one agree.

    Raises:
        BadMicrobatches: they do not.
    """
    sizes = {int(t.shape[0]) for t in inputs if t.dim()}
    if len(sizes) != 1:
        raise BadMicrobatches(
            1,
            f"the inputs have no one batch size in dimension 0, but {sorted(sizes) or 'no dimension'}",
            "give example inputs of the same batch",
        )
    return sizes.pop()
