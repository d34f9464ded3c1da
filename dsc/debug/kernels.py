"""The kernels of a captured model as data: emitted source, where they came from, what the machine code says of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from torch.fx import Node

from dsc import bind, blame, errors, text
from dsc.codegen import cpp, triton_plan
from dsc.codegen.kernel import NBYTES, Kernel
from dsc.codegen.triton import Schedule
from dsc.compilation import Compilation
from dsc.debug.capture import Session
from dsc.notes import notes
from dsc.torch_shim import optimization_hint

if TYPE_CHECKING:
    from dsc.codegen.cubin import KernelFacts

CAPABILITIES = (80, 90)
FEW = 4
"""So many compilations are not worth starting processes for."""


@dataclass(frozen=True)
class Listed:
    """One distinct kernel of one graph; of a kernel in chunks, one of its launches.

    A product whose contraction is cut is followed by the launch that adds up its pieces.
    """

    region: int
    graph: str
    """forward, backward or inference."""
    kernel: Kernel
    launches: int
    traffic: Mapping[str, int]
    """Bytes that one launch reads or writes, by buffer."""
    nodes: tuple[tuple[str, str], ...]
    """Canonical text and line of the user's program, of each node of its first launch."""
    source: str
    """Triton or C++."""
    schedule: Schedule | None
    """None for C++."""
    divisible: tuple[str, ...] = ()
    """Sizes that are multiples of 16 in the captured run."""

    @property
    def bytes(self) -> int:
        """Moved by one launch."""
        return sum(self.traffic.values())

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def title(self) -> str:
        return f"{self.graph}.{self.name}" if self.region == 0 else f"{self.region}.{self.graph}.{self.name}"


def listed(session: Session) -> list[Listed]:
    """All kernels of a session, by region and graph, in the order of their first launch."""
    on_gpu = session.target.kind == "cuda"
    return [
        k for i, region in enumerate(session.regions) for made in region.programs for k in _of_program(i, made, on_gpu)
    ]


def _of_program(region: int, made: Compilation, on_gpu: bool) -> Iterator[Listed]:
    groups: dict[str, list[Node]] = {}
    for n in made.gm.graph.nodes:
        if (group := notes(n).group) is not None:
            groups.setdefault(group, []).append(n)
    launches: dict[str, list[str]] = {}
    for group, bound in made.bound.items():
        launches.setdefault(bound.kernel.name, []).append(group)
    for mine in launches.values():
        bound = made.bound[mine[0]]
        kernel = bound.kernel
        nodes = tuple((text.line(n), blame.line_of(n)) for n in groups.get(mine[0], ()))
        traffic = {b.name: count for b, (_, count) in zip(kernel.buffers, bind.accessed(bound))}
        if not on_gpu:
            yield Listed(region, made.kind, kernel, len(mine), traffic, nodes, cpp.emit_unit([kernel], []), None)
            continue
        yield from launches_of(
            Listed(region, made.kind, kernel, len(mine), traffic, nodes, "", None), triton_plan.plan(kernel)
        )


def launches_of(k: Listed, plan: triton_plan.Plan) -> Iterator[Listed]:
    """The launches of a Triton kernel; a product stands for the pieces of its contraction.

    ``k``: the kernel, with the traffic of its own buffers.
    """
    traffic = {**k.traffic, **{t.buffer: int(optimization_hint(t.size)) * NBYTES[t.dtype] for t in plan.temporaries}}
    for p in plan.choices:
        names = {b.name for x in (p.kernel, triton_plan.launched(p.kernel, p.schedule).kernel) for b in x.buffers}
        moved = {name: count for name, count in traffic.items() if name in names}
        source = triton_plan.source(p.kernel, p.schedule)
        yield replace(k, kernel=p.kernel, traffic=moved, source=source, schedule=p.schedule)


def facts_of(
    kernels: Sequence[Listed],
    capabilities: Sequence[int] = CAPABILITIES,
    parallel: int = 2,
    done: Callable[[], None] = lambda: None,
    cache: str | None = None,
) -> Mapping[tuple[str, int], KernelFacts]:
    """(title, capability) -> what was read off the compiled kernel; ``done`` is called after each.

    ``parallel`` processes compile, where there is much to do; what Triton's cache holds already costs little.
    ``cache`` is a folder to use as that cache; None is Triton's own.

    Raises:
        CodegenFailed: a kernel that Triton refuses.
        TritonMissing: it is not installed.
    """
    if find_spec("triton") is None:
        raise errors.TritonMissing("triton")
    jobs = [(k, k.schedule, c) for k in kernels if k.schedule is not None for c in capabilities]
    out: dict[tuple[str, int], KernelFacts] = {}
    for (k, _, c), facts in zip(jobs, compiled(jobs, parallel, done, cache)):
        if isinstance(facts, errors.CodegenFailed):
            raise facts
        out[k.title, c] = facts
    return out


Job = tuple[Listed, Schedule, int]
"""A kernel, a schedule, a compute capability."""


def compiled(
    jobs: Sequence[Job], parallel: int = 2, done: Callable[[], None] = lambda: None, cache: str | None = None
) -> list[KernelFacts | errors.CodegenFailed]:
    """The facts of each job, or the error of the kernel that Triton refuses; see ``facts_of``."""
    if len(jobs) <= FEW or parallel < 2:
        found = []
        for job in jobs:
            found.append(_inspect(*job, cache))
            done()
        return found
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(min(parallel, len(jobs)), context) as pool:
        futures = [pool.submit(_inspect, *job, cache) for job in jobs]
        try:
            for _ in as_completed(futures):
                done()
            return [f.result() for f in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _inspect(k: Listed, schedule: Schedule, capability: int, cache: str | None) -> KernelFacts | errors.CodegenFailed:
    from dsc.codegen.cubin import inspect, triton_cache

    with triton_cache(cache):
        try:
            return inspect(k.kernel, schedule, capability, divisible=k.divisible)
        except errors.CodegenFailed as why:
            return why
