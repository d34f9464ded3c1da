"""What works here: versions, compilers, targets, the cache.  Every check tries what it speaks of.

The main path is what ``torch.compile(model, backend="dsc")`` needs on this machine.  Where it is broken the model still
runs, on PyTorch's own kernels.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import sympy
import torch

from dsc import __version__, options
from dsc.codegen import build, cache, cpp
from dsc.codegen.kernel import Axis, Buffer, Call, Kernel, Let, Store
from dsc.compilation import Compilation
from dsc.debug.units import nbytes
from dsc.errors import DscWarning
from dsc.options import Options

State = Literal["ok", "missing", "broken"]
"""Works; is not here and need not be; does not work and should."""

PYTHON, TORCH = (3, 11), ((2, 11), (2, 15))
"""The oldest Python; the oldest and newest torch that dsc knows."""

EXTRAS = {
    "plotly": "to draw the curves of dsc demo",
    "onnx": "to read and write .onnx files",
    "onnxruntime": "to run what was written",
    "transformers": "for MODEL hf:CONFIG.json",
}


@dataclass(frozen=True)
class Check:
    name: str
    state: State
    found: str
    todo: str = ""
    """What helps, where something does not work."""
    main: bool = False
    """Whether the main path needs it."""


def checks(given: Options) -> Iterator[Check]:
    """All checks, one after the other: some take seconds.  A check that raises is broken."""
    known = Path(given.cache_dir) if given.cache_dir else options.default_cache_dir()
    for name, main, check in (
        ("dsc", True, backend),
        ("Python", True, python),
        ("torch", True, pytorch),
        ("C++ compiler", True, lambda: compiler(given)),
        ("C++ kernel", True, lambda: cpp_kernel(given)),
        ("train step", True, lambda: train_step(given)),
        ("cache", True, lambda: cache_folder(known)),
        ("GPU", False, gpu),
        ("Triton", False, triton),
        ("a100 (sm_80)", False, lambda: triton_kernel(80)),
        ("h100, h200 (sm_90)", False, lambda: triton_kernel(90)),
        ("ptxas", False, lambda: tool("ptxas")),
        ("cuobjdump", False, lambda: tool("cuobjdump")),
    ):
        yield replace(tried(name, check), main=main or (torch.cuda.is_available() and "sm_" in name))
    for package, use in EXTRAS.items():
        yield installed(package, use)


def healthy(found: list[Check]) -> bool:
    """Whether the main path works."""
    return not any(c.main and c.state != "ok" for c in found)


def tried(name: str, check: Callable[[], Check]) -> Check:
    try:
        return replace(check(), name=name)
    except Exception as raised:  # whatever is wrong with this machine
        why = getattr(raised, "inner_exception", raised)  # what Dynamo wrapped
        words = str(why).strip().split("\n")[0]
        return Check(name, "broken", f"{type(why).__name__}: {words}", "please report it if the rest is sound")


# --- the checks; each leaves its name to the table


def backend() -> Check:
    """Whether torch finds dsc by itself."""
    points = metadata.entry_points(group="torch_dynamo_backends")
    if "dsc" not in points.names:
        return Check("", "broken", f"{__version__}, not registered with torch", "pip install dsc-compiler")
    return Check("", "ok", f"{__version__}, registered as a backend of torch.compile")


def python() -> Check:
    here = sys.version_info[:2]
    if here < PYTHON:
        return Check("", "broken", platform.python_version(), f"use Python {PYTHON[0]}.{PYTHON[1]} or newer")
    return Check("", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def pytorch() -> Check:
    here = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if here < TORCH[0]:
        return Check("", "broken", torch.__version__, f"pip install 'torch>={TORCH[0][0]}.{TORCH[0][1]}'")
    newer = "" if here <= TORCH[1] else ", newer than what dsc was tested with"
    return Check("", "ok", f"{torch.__version__}{newer}, {torch.get_num_threads()} threads")


def compiler(given: Options) -> Check:
    path = found_compiler(given)
    if path is None:
        wanted = given.cxx or "g++, clang++, c++"
        return Check("", "broken", f"none of {wanted}", "install g++ or clang++, or name one by DSC_CXX")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=60)
    return Check("", "ok", f"{path}: {done.stdout.splitlines()[0]}")


def found_compiler(given: Options) -> str | None:
    return shutil.which(given.cxx) if given.cxx else build.find_compiler()


def sample(n: int = 1024) -> Kernel:
    """``out[i] = a[i] + b[i]``, f32[n]."""
    at = sympy.Symbol("p0", integer=True, nonnegative=True)
    axes = frozenset({"p0"})
    loads = tuple(Let(f"{b}0", "load", (), (b, at), "f32", axes) for b in ("a", "b"))
    total = Let("total", "add", ("a0", "b0"), None, "f32", axes)
    buffers = (Buffer("a", "f32"), Buffer("b", "f32"), Buffer("out", "f32", "out"))
    return Kernel("sample", (Axis("p0", sympy.Integer(n)),), buffers, (*loads, total), (Store("out", at, "total"),))


def cpp_kernel(given: Options) -> Check:
    """Emit, build and run a kernel, in a folder of its own, so that nothing comes from the cache."""
    path = found_compiler(given)
    if path is None:
        return Check("", "broken", "not tried: no C++ compiler")
    source = cpp.emit_unit([sample()], [(Call("sample", (0, 1, 2)),)])
    a, b, out = torch.rand(1024), torch.rand(1024), torch.zeros(1024)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dsc-") as folder:
        library = build.build(source, Path(folder), path)
    seconds = time.perf_counter() - start
    pointers = (ctypes.c_void_p * 3)(*(t.data_ptr() for t in (a, b, out)))
    if library.function("run_0")(pointers, (ctypes.c_long * 1)()) != 0 or not torch.equal(out, a + b):
        return Check("", "broken", "it gives wrong numbers", "try another compiler by DSC_CXX, and please report it")
    return Check("", "ok", f"built in {seconds:.1f} s, right to the bit")


def train_step(given: Options) -> Check:
    """A small model, forward and backward, through torch.compile, beside eager."""
    torch.manual_seed(0)
    x, w = torch.rand(8, 16), torch.rand(16, 4, requires_grad=True)

    def loss(w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ w).square().sum()

    (want,) = torch.autograd.grad(loss(w), w)
    records: list[Compilation] = []
    given_on: dict[str, Any] = {"cache_dir": given.cache_dir, "cxx": given.cxx, "on_compile": records.append}
    with warnings.catch_warnings():
        warnings.simplefilter("error", DscWarning)
        (got,) = torch.autograd.grad(torch.compile(loss, backend="dsc", options=given_on)(w), w)
    if not torch.allclose(got, want, rtol=1e-4, atol=1e-5):
        return Check("", "broken", f"the gradient is off by {(got - want).abs().max():.1e}", "please report it")
    kernels = sum(int(r.numbers["kernels"]) for r in records)
    return Check("", "ok", f"{kernels} kernels, the gradient is eager's")


def cache_folder(folder: Path) -> Check:
    try:
        build.guard(folder)
    except build.CacheUnusable as why:
        return Check("", "broken", str(why), "name another folder by DSC_CACHE_DIR")
    found = cache.entries(folder)
    return Check("", "ok", f"{folder}: {len(found)} libraries, {nbytes(sum(e.bytes for e in found))}")


def gpu() -> Check:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch is built for CUDA {built}" if built else "torch is built without CUDA"
        return Check("", "missing", f"none; {why}", "kernels for GPUs can be made and read, not run")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Check("", "ok", ", ".join(names))


def triton() -> Check:
    try:
        import triton as package
    except ModuleNotFoundError:
        return Check("", "missing", "not installed", "pip install triton, to make kernels for GPUs")
    return Check("", "ok", str(package.__version__))


def triton_kernel(capability: int) -> Check:
    """Compile a kernel down to machine code; no GPU is needed."""
    try:
        from dsc.codegen.cubin import inspect
    except ModuleNotFoundError:
        return Check("", "missing", "not tried: no Triton")
    start = time.perf_counter()
    facts = inspect(sample(), capability=capability)
    seconds = time.perf_counter() - start
    return Check(
        "", "ok", f"compiled in {seconds:.1f} s: {facts.registers} registers, {len(facts.cubin)} bytes of machine code"
    )


def tool(name: str) -> Check:
    """A program of NVIDIA's that comes with Triton."""
    try:
        import triton as package
    except ModuleNotFoundError:
        return Check("", "missing", "not tried: no Triton")
    found = getattr(package.knobs.nvidia, name)
    done = subprocess.run([found.path, "--version"], capture_output=True, text=True, check=True, timeout=60)
    release = next((line for line in done.stdout.splitlines() if "release" in line), "").strip()
    return Check("", "ok", f"{found.path}: {release}")


def installed(package: str, use: str) -> Check:
    try:
        return Check(package, "ok", metadata.version(package))
    except metadata.PackageNotFoundError:
        return Check(package, "missing", "not installed", f"pip install {package}, {use}")
