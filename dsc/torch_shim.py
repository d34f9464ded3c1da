"""Every private import of torch, with what differs by version (2.11 to 2.15).  No other file may import ``torch._*``.

Names of the compiler stack are imported when first used, since they cost seconds and a printer of graphs needs none.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._sympy import functions
from torch.utils._sympy.printers import PythonPrinter

FloorDiv = functions.FloorDiv
ModularIndexing = functions.ModularIndexing  # (x // divisor) % modulus
Mod = functions.Mod
PythonMod = functions.PythonMod
CleanDiv = functions.CleanDiv  # a FloorDiv known to leave no rest
CeilDiv = functions.CeilDiv
Where = functions.Where
Max = functions.Max  # what sizes are made of: not sympy.Max
Min = functions.Min

# Taken from torch when first used: see _HOMES.
aot_autograd: Callable[..., Any]
aot_function: Callable[..., Any]
make_boxed_func: Callable[[Callable[..., Any]], Callable[..., Any]]
default_partition: Callable[..., tuple[GraphModule, GraphModule]]
min_cut_rematerialization_partition: Callable[..., tuple[GraphModule, GraphModule]]
has_recomputable_ops: Callable[[GraphModule], bool]
detect_fake_mode: Callable[[Any], FakeTensorMode | None]
TorchDynamoException: type[Exception]
OutputCode: type[Any]
BypassAOTAutogradCache: type[Exception]
decomposition_table: dict[OpOverload, Callable[..., Any]]

RNG_CALLS = {"run_and_save_rng_state": "saves", "run_with_rng_state": "restores"}
"""Higher-order calls by which the partitioner repeats random numbers, and what they do with the generator's state."""

_HOMES: dict[str, tuple[str, ...]] = {
    "aot_autograd": ("torch._dynamo.backends.common",),
    "aot_function": ("torch._functorch.aot_autograd", "functorch.compile"),
    "make_boxed_func": ("torch._functorch.aot_autograd", "functorch.compile"),
    "default_partition": ("torch._functorch.partitioners", "functorch.compile"),
    "min_cut_rematerialization_partition": ("torch._functorch.partitioners", "functorch.compile"),
    "has_recomputable_ops": ("torch._functorch.partitioners",),
    "detect_fake_mode": ("torch._guards", "torch._dynamo.utils"),
    "TorchDynamoException": ("torch._dynamo.exc",),
    "OutputCode": ("torch._inductor.output_code",),
    "decomposition_table": ("torch._decomp",),
    "BypassAOTAutogradCache": ("torch._functorch._aot_autograd.autograd_cache",),
}
"""Name -> modules that may hold it, the one of torch 2.13 first."""

if not TYPE_CHECKING:  # or a checker would accept any name

    def __getattr__(name: str) -> Any:
        """Import one name of the compiler stack, from wherever this version of torch keeps it."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        for home in _HOMES[name]:
            try:
                return getattr(importlib.import_module(home), name)
            except (ImportError, AttributeError):
                continue
        raise ImportError(f"torch {torch.__version__} has no {name!r}; install a torch from 2.11 to 2.15.")


def raw_stream(device: int) -> int:
    """The address of the current stream of a CUDA device."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def storage_uses(storage: int) -> int:
    """How many tensors, and handles of Python, use the storage at that address (``UntypedStorage._cdata``)."""
    return int(torch._C._storage_Use_Count(storage))


def lazy_graph_module(root: torch.nn.Module, graph: torch.fx.Graph) -> GraphModule:
    """A module of the graph whose code is generated only if it is called."""
    try:
        from torch.fx._lazy_graph_module import _LazyGraphModule
    except ImportError:
        return GraphModule(root, graph)
    return _LazyGraphModule(root, graph)


def sym_expr(x: int | torch.SymInt) -> int | sympy.Expr:
    """A size as a number or a sympy expression of size symbols.  Adds no guard."""
    if isinstance(x, int):
        return x
    known = x.node.maybe_as_int()
    if known is not None:
        return int(known)
    expr = x.node.expr
    return int(expr) if expr.is_Integer else expr


def python_expr(e: int | sympy.Expr) -> str:
    """A size expression as Python source over integers named as its symbols (mentions ``math`` at most)."""
    if isinstance(e, int):
        return str(e)
    return str(PythonPrinter().doprint(e))


def optimization_hint(x: int | torch.SymInt | sympy.Expr, shape_env: Any = None, fallback: int = 8192) -> int:
    """A likely value of a size, to weigh costs by.  Adds no guard.

    1. A number is itself.
    2. A SymInt, or an expression with its ``shape_env``, is what it was while tracing.
    3. A symbol that had no value then, or an expression with no ``shape_env``, counts as ``fallback``.
    """
    if isinstance(x, torch.SymInt):
        shape_env = x.node.shape_env
        x = sym_expr(x)
    if isinstance(x, int):
        return x
    if x.is_number:
        return int(x)
    if hasattr(shape_env, "optimization_hint"):  # from 2.12 on
        return int(shape_env.optimization_hint(x, fallback=fallback))
    known = shape_env.size_hint(x, allow_none=True) if shape_env is not None else None
    return int(x.subs(dict.fromkeys(x.free_symbols, fallback)) if known is None else known)


def is_one(size: int | torch.SymInt) -> bool:
    """Whether a size is 1 by what guards say, such as ``Min(1, s - 1)`` of a diagonal that was broadcast.  Adds no guard."""
    expr = sym_expr(size)
    if isinstance(size, int) or isinstance(expr, int) or expr.is_number:
        return int(expr) == 1
    if expr.is_Symbol or optimization_hint(size) != 1:  # symbols are not 1, or they would be numbers
        return False
    return bool(size.node.shape_env._maybe_evaluate_static(sympy.Eq(expr, 1)) == sympy.true)


def is_decided_by_data(t: torch.Tensor) -> bool:
    """Whether a size or stride has a symbol without a value, as behind ``nonzero``: to compare it is an error."""
    if all(isinstance(n, int) for n in (*t.shape, *t.stride())):
        return False
    symbolic = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return bool(symbolic.free_unbacked_symbols((*t.shape, *t.stride())))


def known_size(shape_env: Any, symbol: sympy.Symbol) -> int | None:
    """What a size was while tracing; None if it had no value then.  Adds no guard."""
    values = shape_env.backed_var_to_val if hasattr(shape_env, "backed_var_to_val") else shape_env.var_to_val
    found = values.get(symbol)
    return int(found) if found is not None and found.is_Integer else None


def make_shape_env(known: Mapping[sympy.Symbol, int | None]) -> Any:
    """A ShapeEnv that has these symbols, each with its value if it has one."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    env = ShapeEnv()
    add = getattr(env, "add_backed_var_to_val", None) or env.add_var_to_val
    for symbol, value in known.items():
        env.var_to_range[symbol] = ValueRanges(0 if value is None else min(value, 2), int_oo)
        if value is not None:
            add(symbol, value)
    return env


def plain_partition() -> bool:
    """Whether torch's settings ask its partitioner for nothing but the two graphs."""
    config = importlib.import_module("torch._functorch.config")
    asked = ("enable_activation_offloading", "_sync_decision_cross_ranks")
    inductor = sys.modules.get("torch._inductor.config")  # if nobody has imported it, nobody has set it
    quantized = getattr(inductor, "post_grad_fusion_options", {}).get("activation_quantization_aten_pass")
    return quantized is None and not any(getattr(config, name, False) for name in asked)


def saved_descriptions(count: int) -> list[Any] | None:
    """What AOTAutograd calls saved values among the results of a forward; None if this version calls them otherwise."""
    home = importlib.import_module("torch._functorch._aot_autograd.descriptors")
    made = getattr(home, "SavedForBackwardsAOTOutput", None)
    return None if made is None else [made(i) for i in range(count)]


@contextmanager
def activation_budget(share: float) -> Iterator[None]:
    """Torch's partitioner inside saves at most this share of what it would save by default."""
    config = importlib.import_module("torch._functorch.config")
    with config.patch(activation_memory_budget=share):
        yield


def sympy_class(name: str) -> type[sympy.Basic] | None:
    """The class of expressions that torch, or else sympy, knows by this name."""
    found = getattr(functions, name, None) or getattr(sympy, name, None)
    return found if isinstance(found, type) and issubclass(found, sympy.Basic) else None


def recompile_reason() -> str | None:
    """While Dynamo compiles: the guard that failed if it compiled this function before, on one line."""
    from torch._dynamo.utils import get_metrics_context

    metrics = getattr(get_metrics_context(), "_metrics", {})
    reason = metrics.get("recompile_reason")
    return " ".join(str(reason).split()) if reason else None


def compile_id() -> str:
    """While Dynamo compiles: ``1/0``, the number of the function and of its compilation; else empty."""
    from torch._guards import CompileContext

    found = CompileContext.current_compile_id()
    return "" if found is None else str(found)


def structured_logging() -> bool:
    """Whether somebody reads torch's structured logs: ``TORCH_TRACE=folder``, to be shown by ``tlparse``."""
    from torch._logging._internal import LazyTraceHandler, trace_log

    return any(isinstance(h, LazyTraceHandler) for h in trace_log.handlers)  # not those that only capture logs


def write_artifact(name: str, payload: Callable[[], str]) -> None:
    """One text in torch's structured logs, under the compilation that is running."""
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload, expect_trace_id=False
    )


def aten_overloads() -> list[OpOverload]:
    """ATen's operators that a traced graph can hold: they write to nothing and are not made of others, by name."""
    found = []
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if not name.startswith("aten::"):
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if not isinstance(op, OpOverload) or op._schema.is_mutable or op.has_kernel_for_dispatch_key(composite):
            continue
        if "out" not in overload.split("_"):
            found.append(op)
    return found


def higher_order(name: str) -> Any:
    """The higher-order operator of PyTorch that has this name."""
    importlib.import_module("torch._prims.rng_prims")  # registers those of random numbers
    return getattr(torch.ops.higher_order, name, None)


def joint_compiler(**given: Any) -> Callable[..., Any]:
    """``aot_autograd`` without what it imports to write logs of Inductor: a tenth of a second in every process."""
    home = importlib.import_module("torch._functorch.aot_autograd")
    disable: Callable[..., Any] = importlib.import_module("torch._dynamo").disable

    def compile_graph(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if any(isinstance(x, (list, tuple, dict)) for x in inputs):
            nested: Callable[..., Any] = importlib.import_module("torch._dynamo.backends.common").aot_autograd
            return nested(**given)(gm, inputs)  # type: ignore[no-any-return]
        backward = given["bw_compiler"]

        def hidden(*args: Any) -> Any:
            """Dynamo must see neither the compiler of backward graphs nor what it makes."""
            return disable(disable(inner, reason="a compiler")(*args), reason="compiled by dsc")

        if isinstance(backward, home.SerializableAOTDispatchCompiler):
            inner, backward.compiler_fn = backward.compiler_fn, hidden
        else:
            inner, backward = backward, hidden
        made = home.aot_module_simplified(gm, inputs, **{**given, "bw_compiler": backward})
        return disable(made, reason="compiled by dsc")  # type: ignore[no-any-return]

    return compile_graph


@dataclass(frozen=True)
class Tangents:
    """Gradients that a compiled graph's backward takes, and where they come from."""

    places: tuple[int, ...]
    """Of each tangent of the joint graph: which result of the autograd node it belongs to."""

    results: tuple[int, ...]
    """Results of the graph that hang on that node, or are views of what it gave."""


def tangents_noted() -> Tangents | None:
    """What AOTAutograd noted of the graph that it has just compiled; None of graphs with subclasses of tensors.

    The node gives written inputs first, then results, then what results are views of.
    """
    context = importlib.import_module("torch._guards").TracingContext.try_get()
    noted = getattr(context, "fw_metadata", None)
    if noted is None or any(type(m).__name__ != "PlainTensorMeta" for m in noted.subclass_inp_meta):
        return None
    kinds = importlib.import_module("torch._functorch._aot_autograd.schemas").OutputType
    own = (kinds.non_alias, kinds.unsafe_view_alias, kinds.custom_function_view)
    written = [noted.input_info[i] for i in noted.mutated_inp_runtime_indices]
    differ = [issubclass(o.raw_type, torch.Tensor) and o.requires_grad_for_backward for o in noted.output_info]
    places = [i for i, x in enumerate(written) if x.mutates_data and x.requires_grad]
    places += [len(written) + i for i, o in enumerate(noted.output_info) if differ[i] and o.output_type in own]
    bases = len(written) + len(noted.output_info)
    places += range(bases, bases + noted.num_intermediate_bases)
    of_inputs = (kinds.is_input, kinds.alias_of_input)
    results = [i for i, o in enumerate(noted.output_info) if differ[i] and o.output_type not in of_inputs]
    return Tangents(tuple(places), tuple(results))


def donate_nothing() -> None:
    """Called while AOTAutograd compiles a forward graph: the backward leaves the values that the forward saved alone.

    Otherwise ``backward(retain_graph=True)`` would be refused, which eager allows.
    """
    context = importlib.import_module("torch._guards").TracingContext.try_get()
    donated = getattr(getattr(context, "fw_metadata", None), "bw_donated_idxs", None)
    if donated:
        donated.clear()  # AOTAutograd holds the same list


def is_drawn_by_python(placeholder: Node) -> bool:
    """Whether an input of a Dynamo graph is a number that Python's ``random`` draws at each call."""
    return type(getattr(placeholder.meta.get("grapharg"), "source", None)).__name__ == "RandomValueSource"


def is_compiled_node(node: object) -> bool:
    """Whether a node of autograd is the backward of a graph that AOTAutograd compiled."""
    return type(node).__name__ == "CompiledFunctionBackward"


def serializable_compiler(compile_graph: Callable[..., Any]) -> Any:
    """A compiler whose results, of type OutputCode, AOTAutograd may keep in its cache."""
    home = importlib.import_module("torch._functorch.aot_autograd")
    output = importlib.import_module("torch._inductor.output_code").OutputCode
    return home.SerializableAOTDispatchCompiler(output, compile_graph)


@contextmanager
def keepable_aot() -> Iterator[None]:
    """AOTAutograd inside makes results that can be taken out by ``keepable``, and looks into no cache of its own.

    Its own key would cost a second: it imports all of Inductor and hashes Triton's libraries.  With the cache of FX
    graphs off it refuses to make one, and a random one stands in.  A backward graph is compiled with its forward.
    """
    config = importlib.import_module("torch._functorch.config")
    inductor = importlib.import_module("torch._inductor.config")
    keep = {"bundled_autograd_cache": True, "force_non_lazy_backward_lowering": True, "bypass_autograd_cache_key": True}
    with config.patch(**keep), inductor.patch(fx_graph_cache=False):
        yield


def memory(t: torch.Tensor) -> int | None:
    """What storage a tensor lies in; None of those that ``torch.func`` wraps."""
    try:
        return int(t.untyped_storage()._cdata)
    except NotImplementedError:
        return None


def strides_tell_views(gm: GraphModule) -> bool:
    """Whether every view in a Dynamo graph is known by its shape and strides.

    Not of another dtype than what it views, of a conjugate or negative, nor of what is written: made functional, a write
    has strides of its own.
    """
    dtypes: dict[int, torch.dtype] = {}
    for n in gm.graph.nodes:
        v = n.meta.get("example_value")
        for t in v if isinstance(v, (tuple, list)) else (v,):
            if not isinstance(t, torch.Tensor) or t.layout != torch.strided:
                continue
            if (
                (place := memory(t)) is None
                or t._version > 0
                or t.is_conj()
                or t.is_neg()
                or dtypes.setdefault(place, t.dtype) != t.dtype
            ):
                return False
    return True


def keepable(compiled: Callable[..., Any], gm: GraphModule, inputs: Sequence[Any]) -> Any:
    """The result behind a function that AOTAutograd made inside of ``keepable_aot``, to be pickled; None if there is none.

    There is none of a Dynamo graph with effects: what hands it its tokens is not part of the result.  How results are made
    that are views does not survive pickling (shapes come back as what else lay in that memory): they are made by their
    strides instead, and there is none where that is not enough.
    """
    serialize = getattr(compiled, "serialize", None)
    found = serialize() if serialize is not None else None
    if found is None or found.runtime_metadata.tokens:
        return None
    infos = found.runtime_metadata.output_info
    if any(o.view_meta_sequence is not None for o in infos):
        if not strides_tell_views(gm):
            return None
        found.runtime_metadata = copy.copy(found.runtime_metadata)
        found.runtime_metadata.output_info = [replace(o, view_meta_sequence=None) for o in infos]
        found.aot_joint_graph_str = found.aot_forward_graph_str = found.aot_backward_graph_str = None
        found.min_cut_info_str = None
    if found.guards_expr:
        found.guards_expr = guards_of(inputs)
    return found


def guards_of(inputs: Sequence[Any]) -> str | None:
    """What the sizes among the inputs must be for a compiled graph to serve them; None if they may be anything.

    PyTorch joins guards by ``and`` without brackets, so that one with an ``or`` in it lets all others fail.
    """
    sizes = [s for s in inputs if isinstance(s, torch.SymInt)]
    env = sizes[0].node.shape_env
    local = importlib.import_module("torch._dynamo.source").LocalSource
    sources = [local(f"t{i}") for i in range(len(sizes))]
    found = env.produce_guards(sizes, sources, guards=env.get_pruned_guards(sizes), ignore_static=True)
    return " and ".join(f"({g})" for g in found) or None


def depends_on_a_number(gm: GraphModule) -> bool:
    """Whether the compilation of a Dynamo graph has fixed the value of a Python float that may change.

    Such guards stand in the environment of symbols, and not among those that a kept result brings.
    """
    symbolic = importlib.import_module("torch.utils._sympy.symbol")
    values = (n.meta.get("example_value") for n in gm.graph.nodes)
    env = next((v.node.shape_env for v in values if isinstance(v, torch.SymFloat)), None)
    fixed = {s for g in env.guards for s in g.expr.free_symbols} if env is not None else set()
    return any(symbolic.symbol_is_type(s, symbolic.SymT.FLOAT) for s in fixed)


def guards_hold(kept: Any, inputs: Sequence[Any]) -> bool:
    """Whether a kept result serves the sizes of these inputs.  Adds no guard."""
    if not kept.guards_expr:
        return True
    cache = importlib.import_module("torch._functorch._aot_autograd.autograd_cache").AOTAutogradCache
    hints = [optimization_hint(s) for s in inputs if isinstance(s, torch.SymInt)]
    return bool(cache.evaluate_guards(kept.guards_expr, hints))


def function_of(kept: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A kept result as the function that AOTAutograd would have made of the graph; adds the guards that it was kept with."""
    boxed = importlib.import_module("torch._inductor.utils").BoxedBool
    settings = {"cudagraphs": boxed(False), "boxed_forward_device_index": None}
    sizes = [s for s in inputs if isinstance(s, torch.SymInt)]
    run = kept.wrap_post_compile(sizes, kept.sanitized_aot_config, settings)
    counted = importlib.import_module("torch._dynamo.utils").counters["aot_autograd"]
    counted["autograd_cache_hit"] += 1

    def call(*args: Any) -> Any:
        return run(list(args))

    wrapped: Callable[..., Any] = importlib.import_module("torch._dynamo").disable(call, reason="compiled by dsc")
    return wrapped


def tracing_state() -> Iterator[str]:
    """What tracing reads besides its graph: versions, modes, and flags by which composite operators choose."""
    backends = torch.backends
    flags = [
        getattr(backends.cuda, f"{name}_sdp_enabled", bool)() for name in ("flash", "mem_efficient", "math", "cudnn")
    ]
    flags += [backends.mkldnn.enabled, backends.cudnn.enabled, backends.cudnn.deterministic, backends.cudnn.benchmark]
    casts = []
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            casts.append(f"{device} {torch.get_autocast_dtype(device)}")
    exact = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled())
    yield f"torch {torch.__version__} {torch.version.git_version} python {sys.version}"
    yield f"{flags} {casts} {exact} {modes} {torch.get_default_dtype()} {torch.get_default_device()}"
    config = importlib.import_module("torch._functorch.config")
    yield hashlib.sha256(config.save_config()).hexdigest()


def pipeline_runtime(
    stages: Sequence[Any],
    orders: Mapping[int, Sequence[str]],
    microbatches: int,
    loss: Callable[..., Any],
    **kwargs: Any,
) -> Any:
    """The pipeline runtime of torch for these lists of actions, such as ``0F3``, by rank of the group.

    It adds sends and receives, and after the last backward of a stage the reduction of its gradients.
    """
    schedules = importlib.import_module("torch.distributed.pipelining.schedules")
    made = schedules._PipelineScheduleRuntime(list(stages), microbatches, loss_fn=loss, scale_grads=False, **kwargs)
    actions = {rank: [schedules._Action.from_str(a) for a in order] for rank, order in orders.items()}
    made.pipeline_order = actions
    made._prepare_schedule_with_comms(actions)
    return made


def on_reduced(runtime: Any, reduce: Callable[[int], None]) -> None:
    """Call ``reduce(stage)`` where the runtime would reduce the gradients of that stage over replicas."""
    schedules = importlib.import_module("torch.distributed.pipelining.schedules")
    runtime.register_custom_function(schedules.REDUCE_GRAD, lambda action, _: reduce(action.stage_index))


def lowered_at_once() -> AbstractContextManager[object]:
    """AOTAutograd inside compiles a backward graph with its forward, not at its first call."""
    config = importlib.import_module("torch._functorch.config")
    patch: AbstractContextManager[object] = config.patch(force_non_lazy_backward_lowering=True)
    return patch


@contextmanager
def forwards_alone(runtime: Any) -> Iterator[None]:
    """Inside, the runtime runs forwards and what they need: its own ``eval`` cannot, where stages of a rank are neighbours."""
    whole = runtime.pipeline_order_with_comms
    kinds = ("F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
    runtime.pipeline_order_with_comms = {
        rank: [a for a in order if a.computation_type.value in kinds] for rank, order in whole.items()
    }
    try:
        yield
    finally:
        runtime.pipeline_order_with_comms = whole
