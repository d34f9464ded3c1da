"""What can go wrong while a graph is compiled, or its kernels are built."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.errors.base import DscError


@dataclass(eq=False, repr=False)
class PassFailed(DscError):
    """A pass raised, or left an illegal graph.  ``cause`` is what happened, chained as ``__cause__`` too."""

    pass_name: str
    cause: BaseException
    earlier: tuple[str, ...] = ()
    node: str = ""
    """The node that it was looking at, where that is known."""
    line: str = ""
    """The line of the user's program that the node comes from."""
    saved: str = ""
    """Where the graph before the pass was written."""

    def __str__(self) -> str:
        after = f" after {', '.join(self.earlier)}" if self.earlier else ""
        what, todo = str(self.cause), ""
        if not isinstance(self.cause, DscError):
            named = f" at node {self.node!r}" if self.node else ""
            what = f"{type(self.cause).__name__}: {what.rstrip('.')}{named}"
            todo = "; leave it out by options={'passes': ...}, and please report it."
        origin = f", from {self.line}" if self.line else ""
        saved = f"; the graph before it is in {self.saved}" if self.saved else ""
        if not origin + saved + todo:
            return f"Pass {self.pass_name!r} failed{after}: {what}"
        return f"Pass {self.pass_name!r} failed{after}: {what.rstrip('.')}{origin}{saved}{todo or '.'}"


@dataclass(eq=False, repr=False)
class InvalidGraph(DscError):
    """A graph that breaks an invariant.  ``node`` is empty where the problem is in no one node."""

    where: str
    node: str
    problem: str

    def __str__(self) -> str:
        at = f" at node {self.node!r}" if self.node else ""
        return f"The graph is not legal {self.where}{at}: {self.problem}."


@dataclass(eq=False, repr=False)
class CacheUnusable(DscError):
    """A cache folder that cannot be written, or that others could write to."""

    path: str
    reason: str

    def __str__(self) -> str:
        return (
            f"The cache folder {self.path!r} cannot be used: {self.reason}; "
            "name another by options={'cache_dir': ...} or DSC_CACHE_DIR."
        )


@dataclass(eq=False, repr=False)
class CompilerMissing(DscError):
    """No C++ compiler among those tried."""

    tried: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"No C++ compiler was found (tried {', '.join(self.tried)}); install g++ or clang++, "
            "name one by options={'cxx': ...} or DSC_CXX, or do without by options={'emit': 'aten'}."
        )


@dataclass(eq=False, repr=False)
class CodegenFailed(DscError):
    """A kernel that could not be emitted, compiled or loaded."""

    kernel: str
    reason: str

    def __str__(self) -> str:
        return (
            f"No code could be made for kernel {self.kernel!r}: {self.reason}; "
            "run without generated kernels by options={'emit': 'aten'}, and please report it."
        )


@dataclass(eq=False, repr=False)
class LeftToATen(DscError):
    """A graph for which no kernels can be had: a failure of ours, which costs speed and nothing else."""

    graph: str
    reason: str

    def __str__(self) -> str:
        return (
            f"The {self.graph} graph runs on ATen, with the same results and no kernels of dsc: "
            f"{self.reason.removesuffix(', and please report it')}; "
            "please report it, and silence this by options={'emit': 'aten'}."
        )


@dataclass(eq=False, repr=False)
class LeftToEager(DscError):
    """A graph that AOTAutograd cannot trace, or would trace wrongly."""

    reason: str

    def __str__(self) -> str:
        return (
            f"One graph runs in eager, with the same results and no kernels of dsc: {self.reason}; "
            "put what causes it into a function under torch.compiler.disable to compile the rest."
        )


@dataclass(eq=False, repr=False)
class ModelFailed(DscError):
    """A model that raises on the inputs that it was given."""

    model: str
    reason: str

    def __str__(self) -> str:
        return f"{self.model} does not run on these inputs: {self.reason}; check the model and --input."


@dataclass(eq=False, repr=False)
class TritonMissing(DscError):
    """Kernels for a GPU are wanted, and Triton is not installed."""

    module: str

    def __str__(self) -> str:
        return f"Kernels for GPUs need {self.module}, which is not installed: pip install triton (Linux only)."
