"""Launches of compiled kernels: what is looked at, what is compiled once, and how Triton's kernels are called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from triton.compiler.compiler import make_backend

from dsc.codegen import cubin, triton_launch
from dsc.codegen.cubin import inspect
from dsc.codegen.kernel import Call
from dsc.codegen.kernel import Kernel as KernelIR
from dsc.codegen.triton_launch import Kernel
from dsc.codegen.triton_nest import default_schedule, tiles
from dsc.codegen.triton_plan import Part, plan
from dsc.codegen.triton_run import CheckFailed
from kit_kernels import Build, sym


class Compiled:
    """Stands in for a kernel that Triton compiled: writes down how it is called."""

    function, packed_metadata = 77, (4, 1, 0)

    def __init__(self, log: list[tuple[Any, ...]], strict: bool) -> None:
        self.log, self.strict = log, strict

    def run(self, *arguments: object) -> None:
        if self.strict:
            raise TypeError("function takes other arguments")
        self.log.append(("again", *arguments))


class Jit:
    """Stands in for a JITFunction."""

    def __init__(self, strict: bool = False) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.strict = strict

    def __getitem__(self, programs: tuple[int, ...]) -> Any:
        def call(*arguments: object, **constants: object) -> Compiled:
            self.log.append(("compile", programs, arguments, constants))
            return Compiled(self.log, self.strict)

        return call


def double(*sizes: int | str) -> KernelIR:
    b = Build("double", i=sizes[0])
    b.store("out", b["i"], b.let("add", b.load("x", b["i"]), b.load("x", b["i"])))
    return b.kernel()


def prepared(kernel: KernelIR, jit: Jit) -> Kernel:
    schedule = default_schedule(kernel)
    return Kernel(Part(kernel, schedule), jit, tiles(kernel, schedule))


@pytest.fixture(autouse=True)
def _stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "raw_stream", lambda device: 5 + device)


def test_second_launch_calls_the_compiled_kernel() -> None:
    jit, x, out = Jit(), torch.ones(4096), torch.empty(4096)
    k = prepared(double(4096), jit)
    order = [{"x": x, "out": out}[b.name] for b in k.part.kernel.buffers]
    for _ in range(2):
        k.launch(order, [16, 32], (), 0)
    compiled, again = jit.log
    assert compiled[:2] == ("compile", (4,))
    assert compiled[3] == {"XB": 1024, **triton_launch.options(k.part.schedule)}
    assert again == ("again", 4, 1, 1, 5, 77, (4, 1, 0), None, None, None, 16, 32, 1024)


def test_compiled_anew_for_other_alignments_sizes_and_devices() -> None:
    jit = Jit()
    k = prepared(double("n"), jit)
    x = [torch.ones(8)] * 2
    for pointers, sizes, device in (([16, 32], (8,), 0), ([16, 36], (8,), 0), ([16, 32], (7,), 0), ([16, 32], (8,), 1)):
        for _ in range(2):
            k.launch(x, pointers, sizes, device)
    assert [entry[0] for entry in jit.log] == ["compile", "again"] * 4
    assert jit.log[-1][4] == 6  # the stream of device 1
    assert jit.log[-1][-4:] == (16, 32, 8, 1024)  # pointers, n, the tile
    k.launch(x, [0, 0], (0,), 0)
    assert len(jit.log) == 8  # nothing to compute


def test_a_triton_that_is_called_otherwise() -> None:
    jit = Jit(strict=True)
    k = prepared(double(4096), jit)
    for _ in range(3):
        k.launch([torch.ones(4096)] * 2, [16, 32], (), 0)
    assert [entry[0] for entry in jit.log] == ["compile"] * 3


def embedding(rows: int) -> KernelIR:
    b = Build("embedding", i=4096)
    row = b.let("check", b.load("index", b["i"], "i64"), attr=sympy.Integer(rows))
    b.store("out", b["i"], b.load("table", sym(row)))
    return b.kernel()


def test_checks_stop_the_gpu() -> None:
    kernel = embedding(10)
    (part,) = plan(kernel).parts
    assert part.schedule.asserts
    ptx = inspect(kernel, part.schedule, 90).ptx
    assert ptx.count("call.uni __assertfail") == 1
    assert not plan(kernel, interpreter=True).parts[0].schedule.asserts


def test_lookup_in_nothing_is_known_before_the_launch() -> None:
    jit = Jit()
    with pytest.raises(CheckFailed):
        prepared(embedding(0), jit).launch([torch.ones(8)] * 3, [0, 0, 0], (), 0)
    assert not jit.log


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    kernel = double("n")
    run = triton_launch.sequence({"double": plan(kernel)}, [Call("double", (0, 1), (0,))])
    for n, start in ((1000, 0), (1000, 0), (1000, 1), (1000, 1), (5, 0), (0, 0)):
        x = torch.randn(n + start, device="cuda")[start:]
        out = torch.empty_like(x)
        order = {"x": x, "out": out}
        assert run(tuple(order[b.name] for b in kernel.buffers), (n,)) == 0
        assert torch.equal(out, 2 * x)


def test_precompiled_kernels_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What threads compile is what one compilation of the same kernel looks for; what fails is left for later."""
    caplog.set_level("DEBUG", "dsc")
    kernels = [double(4096), embedding(10), double("n"), replace(double(2048), name="tl.bad name")]
    plans = [plan(k) for k in kernels]
    with cubin.triton_cache(str(tmp_path)):
        triton_launch.precompile(plans, 90, 2)
        found = {p.name for p in tmp_path.rglob("*.cubin")}
        assert found == {"double.cubin", "embedding.cubin"}, caplog.text
        assert "tl.bad name is not compiled ahead: SyntaxError" in caplog.text
        monkeypatch.setattr("triton.compiler.compiler.make_backend", refuse_stages)
        for k, p in zip(kernels[:2], plans):
            inspect(k, p.parts[0].schedule, 90)


def refuse_stages(target: Any) -> Any:
    """A backend that can only read what was compiled."""
    backend = make_backend(target)
    monkey = type("Reader", (type(backend),), {"add_stages": lambda *_: pytest.fail("compiled again")})
    return monkey(target)
