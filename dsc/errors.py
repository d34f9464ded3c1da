"""What can go wrong, a class per mistake.  Every message is here, and says what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, fields


class DscWarning(UserWarning):
    """Something works, but not as well as it could."""


class DscError(Exception):
    """Any mistake that dsc reports.  The fields of a subclass are its facts; ``str`` makes the sentence of them."""

    def __reduce__(self) -> tuple[type[DscError], tuple[object, ...]]:
        """Travel between processes: the exception's own ``args`` miss what was given by keyword."""
        return type(self), tuple(getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]


def nearest(name: str, known: Iterable[str]) -> str:
    """``did you mean 'fuse'?`` where some known name is near, else the list of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"use one of {', '.join(map(repr, names))}." if names else "there is none to choose."


@dataclass(eq=False, repr=False)
class UnknownOption(DscError):
    """A key that names no option of dsc, or of a pass."""

    name: str
    known: tuple[str, ...]
    owner: str = "dsc"

    def __str__(self) -> str:
        return f"{self.name!r} is not an option of {self.owner}; {nearest(self.name, self.known)}"


@dataclass(eq=False, repr=False)
class BadOption(DscError):
    """An option whose value has the wrong type or is not one of its values."""

    name: str
    value: object
    expected: str

    def __str__(self) -> str:
        return f"Option {self.name!r} cannot be {self.value!r}; give {self.expected}."


@dataclass(eq=False, repr=False)
class OptionNotYet(BadOption):
    """An option that is planned, and that this version does not act on."""

    expected: str = "nothing"

    def __str__(self) -> str:
        return f"Option {self.name!r} is not available yet in this version; leave it out."


@dataclass(eq=False, repr=False)
class UnknownTarget(DscError):
    """A machine that is not in the table of targets."""

    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name!r} is not a target that dsc knows; {nearest(self.name, self.known)}"


@dataclass(eq=False, repr=False)
class UnknownPass(DscError):
    """A pipeline string that names a pass that does not exist."""

    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name!r} is not a pass; {nearest(self.name, self.known)}"


@dataclass(eq=False, repr=False)
class BadPlugin(DscError):
    """A pass of another package that cannot be used."""

    name: str
    package: str
    problem: str

    def __str__(self) -> str:
        problem = self.problem.rstrip(".")
        return f"Pass {self.name!r} of the package {self.package!r} cannot be used: {problem}; update or remove that package."


@dataclass(eq=False, repr=False)
class BadPassOrder(DscError):
    """Two passes of a pipeline that cannot stand in this order."""

    pass_name: str
    problem: str
    move: str

    def __str__(self) -> str:
        return f"Pass {self.pass_name!r} {self.problem}; {self.move}."


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
class InfeasibleBudget(DscError):
    """A memory budget below what any plan needs."""

    budget: int
    least: int
    reason: str

    def __str__(self) -> str:
        return (
            f"A memory budget of {size(self.budget)} cannot be met: {self.reason}; "
            f"give at least {self.least} bytes ({size(self.least)}) or a smaller batch."
        )


def size(nbytes: int) -> str:
    """``1.25 GiB``, ``3.00 MiB``, ``17 B``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} B"


@dataclass(eq=False, repr=False)
class BadPlan(DscError):
    """A saved plan that cannot be read, or that is for another graph."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"The plan in {self.where} cannot be used: {self.reason}; delete it to plan anew."


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
class BadGraphFile(DscError):
    """A saved graph that cannot be read."""

    problem: str

    def __str__(self) -> str:
        return f"The saved graph cannot be read: {self.problem.rstrip('.')}; save it again with this version of dsc and torch."


@dataclass(eq=False, repr=False)
class BadArchive(DscError):
    """A file of exported kernels that cannot be read or written."""

    path: str
    problem: str

    def __str__(self) -> str:
        return (
            f"{self.path} cannot serve as an archive of kernels: {self.problem}; make one by dsc cache --export FILE."
        )


@dataclass(eq=False, repr=False)
class BadCrash(DscError):
    """A file that is not a saved crash."""

    path: str
    problem: str

    def __str__(self) -> str:
        return (
            f"{self.path} is not a crash that can be replayed: {self.problem}; give the .json file beside the .txt one."
        )


@dataclass(eq=False, repr=False)
class BadTrace(DscError):
    """A file that is not a trace, or one that this version cannot read."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path} is not a trace that can be read: {self.problem}; record one by dsc.trace(...) or DSC_TRACE=folder."


@dataclass(eq=False, repr=False)
class TraceUnwritable(DscError):
    """A trace that cannot be written where the user wants it."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"The trace {self.path} cannot be written: {self.reason}; name a file or folder that you can write."


@dataclass(eq=False, repr=False)
class UnknownModel(DscError):
    """A MODEL that is neither a name of the zoo nor one of the other forms."""

    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.name!r} is not a model: {nearest(self.name, self.known).rstrip('.')} "
            "Or give FILE.py:NAME, FILE.pt2, FILE.onnx or hf:CONFIG.json."
        )


@dataclass(eq=False, repr=False)
class BadModel(DscError):
    """A file, or something in it, that cannot serve as a model."""

    spec: str
    problem: str
    instead: str

    def __str__(self) -> str:
        return f"{self.spec} cannot be used: {self.problem.rstrip('.')}; {self.instead}."


@dataclass(eq=False, repr=False)
class BadInput(DscError):
    """An ``--input`` that cannot be read, or none where one is needed."""

    text: str
    problem: str

    def __str__(self) -> str:
        what = f"Input {self.text!r} cannot be used" if self.text else "Inputs are missing"
        return (
            f"{what}: {self.problem}; write --input f32[4,128], i64[4,16]<1000 for indices below 1000, a number, "
            "or FILE.py:FUNCTION for a function that gives them all."
        )


@dataclass(eq=False, repr=False)
class UnknownNode(DscError):
    """A node that no graph of the model has."""

    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        close = difflib.get_close_matches(self.name, self.known, n=3)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "dsc show prints them."
        return f"No graph has a node {self.name!r}; {hint}"


@dataclass(eq=False, repr=False)
class NotReduced(DscError):
    """No script can be made of a failure, or there is no failure."""

    what: str
    reason: str

    def __str__(self) -> str:
        return f"Nothing can be cut out of {self.what}: {self.reason}; dsc bisect says what is known."


@dataclass(eq=False, repr=False)
class Untraceable(DscError):
    """Something in the user's model that cannot be put into a graph."""

    what: str
    reason: str
    instead: str

    def __str__(self) -> str:
        return f"{self.what} cannot be traced: {self.reason}; {self.instead}."


@dataclass(eq=False, repr=False)
class CpuOnly(DscError):
    """An operator of a graph traced on a CPU that no other device has."""

    op: str
    node: str
    device: str

    def __str__(self) -> str:
        return (
            f"The model cannot be planned for {self.device} from here: node {self.node!r} calls {self.op}, which only "
            "CPUs have; trace it on a machine with that device, or write that part in other operators."
        )


@dataclass(eq=False, repr=False)
class BadArtifact(DscError):
    """A compiled model that cannot be run here."""

    folder: str
    reason: str
    instead: str

    def __str__(self) -> str:
        return f"{self.folder} cannot be loaded: {self.reason}; {self.instead}."


@dataclass(eq=False, repr=False)
class Unsaveable(DscError):
    """A model that compiles, but not into a folder."""

    model: str
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.model} cannot be saved: {self.reason}; compile it where it runs, by torch.compile(backend='dsc')."
        )


@dataclass(eq=False, repr=False)
class TritonMissing(DscError):
    """Kernels for a GPU are wanted, and Triton is not installed."""

    module: str

    def __str__(self) -> str:
        return f"Kernels for GPUs need {self.module}, which is not installed: pip install triton (Linux only)."
