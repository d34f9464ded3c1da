"""Kernels compiled for a GPU that need not be here, and what the machine code says of them.

Triton compiles to a cubin without a GPU, and ships NVIDIA's tools to read one.  Counts of instructions are static: an
access inside a loop counts once.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dsc.codegen.candidates import Code
from dsc.codegen.kernel import Kernel
from dsc.codegen.triton import Schedule, default_schedule, emit, tiles
from dsc.codegen.triton_plan import launched
from dsc.codegen.triton_run import LANGUAGE, load_source, options
from dsc.errors import CodegenFailed

SIGNATURE = {
    "f32": "*fp32", "bf16": "*bf16", "f16": "*fp16", "f64": "*fp64", "i64": "*i64",
    "i32": "*i32", "i16": "*i16", "i8": "*i8", "u8": "*u8", "b1": "*u1",
}  # fmt: skip
"""Storage dtype -> Triton's name of a pointer to it, as a launch with a tensor spells it: it is part of the cache key."""

WIDEST = 16
"""Most bytes that a thread loads or stores at once."""


@dataclass(frozen=True, slots=True)
class Access:
    """Loads or stores of global memory that one line of the source became."""

    line: int
    """Of the emitted source, from 1."""
    buffer: str
    store: bool
    width: int
    """Bytes that a thread moves at once."""
    count: int
    """Instructions."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a multiprocessor has, by compute capability (CUDA C++ Programming Guide, technical specifications)."""

    registers: int = 65536
    warps: int = 64
    blocks: int = 32
    shared: int = 164 * 1024
    """Bytes a multiprocessor."""
    shared_block: int = 163 * 1024
    """Bytes a block may have."""


LIMITS: Mapping[int, Limits] = {80: Limits(), 90: Limits(shared=228 * 1024, shared_block=227 * 1024)}
RESERVED = 1024
"""Bytes of shared memory that the system takes for each block."""


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """One kernel as compiled for one compute capability."""

    name: str
    capability: int
    registers: int
    """A thread."""
    spilled: int
    """Bytes of registers kept in memory, a thread."""
    shared: int
    """Bytes a block."""
    warps: int
    """A block."""
    occupancy: float
    """Share of the multiprocessor's warps that can be resident at once: 0 (the kernel cannot start) to 1."""
    accesses: tuple[Access, ...]
    tensor: Mapping[str, int]
    """Tensor-core instructions by name: HMMA, HGMMA, QGMMA, IMMA, IGMMA, DMMA."""
    async_copies: int
    """Copies from global to shared memory that bypass registers (cp.async, TMA)."""
    source: str
    ptx: str
    cubin: bytes

    @property
    def loads(self) -> int:
        return sum(a.count for a in self.accesses if not a.store)

    @property
    def stores(self) -> int:
        return sum(a.count for a in self.accesses if a.store)

    def wide(self, store: bool) -> int:
        """Loads or stores of 16 bytes."""
        return sum(a.count for a in self.accesses if a.store == store and a.width == WIDEST)

    @property
    def code(self) -> Code:
        """In numbers, as schedules are compared by them."""
        lines = {(a.buffer, a.line) for a in self.accesses if not a.store and a.buffer}
        loaded = sorted({buffer for buffer, _ in lines})
        touched = sorted({a.buffer for a in self.accesses if a.buffer})
        return Code(
            registers=self.registers,
            spilled=self.spilled,
            shared=self.shared,
            warps=self.warps,
            blocks=blocks(self.registers, self.shared, self.warps, self.capability),
            occupancy=self.occupancy,
            instructions=instructions(self.cubin),
            widths={name: max(a.width for a in self.accesses if a.buffer == name) for name in touched},
            passes={name: sum(buffer == name for buffer, _ in lines) for name in loaded},
            tensor=sum(self.tensor.values()),
        )

    def sass(self) -> str:
        """The machine code as text, without its encoding.  Takes half a second."""
        text = _tool("cuobjdump", self.cubin, "-sass")
        return "\n".join(
            re.sub(r"\s*/\* 0x[0-9a-f]{16} \*/", "", x) for x in text.splitlines() if not _ENCODED.match(x)
        )


_ENCODED = re.compile(r"^\s*/\* 0x[0-9a-f]{16} \*/\s*$")


def inspect(
    kernel: Kernel,
    schedule: Schedule | None = None,
    capability: int = 90,
    *,
    aligned: bool = True,
    divisible: Collection[str] = (),
) -> KernelFacts:
    """Compile ``kernel`` for compute capability ``capability`` (80, 90) and read what came out.

    Of a product whose contraction is cut, its pieces.

    ``aligned`` promises pointers that are multiples of 16 bytes, ``divisible`` names the sizes that are multiples of
    16: what Triton finds out by itself when it launches.  Without, it loads one element at a time.

    Raises:
        CodegenFailed: Triton or ptxas refuse the kernel.
    """
    part = launched(kernel, schedule or default_schedule(kernel))
    kernel, schedule = part.kernel, part.schedule
    types, constants = signature(kernel, schedule)
    known = [i for i, t in enumerate(types) if aligned and t.startswith("*")]
    known += [len(kernel.buffers) + i for i, s in enumerate(kernel.sizes) if s in divisible]
    return compile_source(emit(kernel, schedule), kernel.name, types, constants, known, schedule, capability)


def signature(kernel: Kernel, schedule: Schedule) -> tuple[list[str], dict[str, int]]:
    """The types of all arguments, and the values of those that are constants."""
    constants = tiles(kernel, schedule)
    types = [SIGNATURE[b.dtype] for b in kernel.buffers] + ["i32"] * len(kernel.sizes)
    types += ["*i32"] * (kernel.checks and not schedule.asserts) + ["constexpr"] * len(constants)
    return types, constants


def compile_source(
    source: str,
    name: str,
    types: Collection[str],
    constants: Mapping[str, int],
    divisible: Collection[int],
    schedule: Schedule,
    capability: int,
) -> KernelFacts:
    """As ``inspect``, from source: ``types`` of all arguments, places of those that are multiples of 16."""
    fn = load_source(source)[name]
    try:
        with LANGUAGE:
            out = compile_function(fn, types, constants, divisible, schedule, capability)
    except Exception as why:
        raise CodegenFailed(
            name, f"Triton refuses it for sm_{capability} ({str(why).strip().splitlines()[0]})"
        ) from why
    ptx, cubin, shared = str(out.asm["ptx"]), bytes(out.asm["cubin"]), int(out.metadata.shared)
    registers, spills = resources(cubin, ptx, schedule)
    return KernelFacts(
        name=name,
        capability=capability,
        registers=registers,
        spilled=spills,
        shared=shared,
        warps=schedule.num_warps,
        occupancy=occupancy(registers, shared, schedule.num_warps, capability),
        accesses=accesses(ptx, source),
        tensor=tensor_instructions(ptx),
        async_copies=len(re.findall(r"^\s*(?:@!?%p\d+ )?cp\.async\.(?:c[ag]\.shared|bulk\.tensor)", ptx, re.MULTILINE)),
        source=source,
        ptx=ptx,
        cubin=cubin,
    )


def compile_function(
    fn: Any,
    types: Collection[str],
    constants: Mapping[str, int],
    divisible: Collection[int],
    schedule: Schedule,
    capability: int,
) -> Any:
    """What Triton makes of a JITFunction, taken from its cache where it has it.  ``LANGUAGE`` is to be held."""
    hints = {(i,): [["tt.divisibility", 16]] for i in divisible}
    return triton.compile(
        ASTSource(fn, dict(zip(fn.arg_names, types)), dict(constants), hints),
        target=GPUTarget("cuda", capability, 32),
        options=options(schedule),
    )


@contextmanager
def triton_cache(folder: str | None) -> Iterator[None]:
    """Compilations inside are kept in ``folder``, if one is given."""
    with triton.knobs.cache.scope():
        if folder is not None:
            triton.knobs.cache.dir = folder
        yield


def resources(cubin: bytes, ptx: str, schedule: Schedule) -> tuple[int, int]:
    """Registers of a thread, and bytes of them kept in memory."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", _tool("cuobjdump", cubin, "-res-usage"))
    assert found is not None
    return int(found[1]), spilled(ptx, schedule) if int(found[2]) else 0


def spilled(ptx: str, schedule: Schedule) -> int:
    """Bytes of spill stores: a stack may also hold the tables of ``sin``, which only the assembler tells apart."""
    found = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert found is not None
    fused = [] if schedule.fp_fusion else ["--fmad=false"]
    log = _tool("ptxas", ptx.encode(), "-v", f"--gpu-name={found[1]}", *fused, "-o", "/dev/null")
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", log)))


def occupancy(registers: int, shared: int, warps: int, capability: int) -> float:
    """Resident warps over the most that there can be."""
    return blocks(registers, shared, warps, capability) * warps / LIMITS[capability].warps


def blocks(registers: int, shared: int, warps: int, capability: int) -> int:
    """That a multiprocessor holds at once: registers are given by 256 a warp, shared memory by block."""
    limit = LIMITS[capability]
    if shared > limit.shared_block:
        return 0
    by_warp = -(-registers * 32 // 256) * 256
    return min(
        limit.blocks,
        limit.warps // warps,
        limit.registers // max(by_warp, 1) // warps,
        limit.shared // (shared + RESERVED),
    )


INSTRUCTION = 16
"""Bytes of a machine instruction, since Volta."""
EXECUTABLE = 4
"""The flag of a section of an ELF file that holds code."""


def instructions(cubin: bytes) -> int:
    """Machine instructions of a cubin (an ELF file of 64 bits): the size of its code, padding included."""
    (table,), (size, count) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HH", cubin, 0x3A)
    total = 0
    for i in range(count):
        flags, _, _, nbytes = struct.unpack_from("<QQQQ", cubin, table + i * size + 8)
        total += nbytes if flags & EXECUTABLE else 0
    return total // INSTRUCTION


_LOC = re.compile(r"^\s*\.loc\s+\d+ (\d+)")
_ACCESS = re.compile(r"^\s*(?:@!?%p\d+ )?(ld|st|atom|red)\.(?:\w+\.)*?global\.(.*?) ")
_COPY = re.compile(r"^\s*(?:@!?%p\d+ )?cp\.async\.c[ag]\.shared\.global.*?, (0x[0-9a-f]+|\d+)")
_NAMED = re.compile(r"tl\.(?:load|store|atomic_\w+)\((\w+)")


def accesses(ptx: str, source: str) -> tuple[Access, ...]:
    """Global memory accesses, by the line of the source that asks for them."""
    lines = source.splitlines()
    counts: dict[tuple[int, str, bool, int], int] = {}
    for line, store, width in _instructions(ptx):
        text = lines[line - 1] if 0 < line <= len(lines) else ""
        named = _NAMED.search(text)
        key = (line, named[1] if named else "", store, width)
        counts[key] = counts.get(key, 0) + 1
    return tuple(Access(*key, count) for key, count in sorted(counts.items()))


def _instructions(ptx: str) -> Iterator[tuple[int, bool, int]]:
    """(line, store?, bytes) of every access, in order; the assembler joins loads of one address."""
    line, seen = 0, set[str]()
    for text in ptx.splitlines():
        if (loc := _LOC.match(text)) is not None:
            line = int(loc[1])
        elif (copy := _COPY.match(text)) is not None:
            yield line, False, int(copy[1], 0)
        elif (found := _ACCESS.match(text)) is not None:
            address = f"{found[2]}{text[text.index('[') :]}{text[: text.index(found[1])]}"
            if found[1] == "ld" and address in seen:
                continue
            seen.add(address)
            bits = re.search(r"(?:\.|^)(?:v(\d)\.)?[bsuf](\d+)$", found[2])
            if bits is not None:
                yield line, found[1] != "ld", int(bits[1] or 1) * int(bits[2]) // 8


_MMA = re.compile(r"^\s*(?:@!?%p\d+ )?(mma|wgmma)\.(?:sync|mma_async)\S*", re.MULTILINE)


def tensor_instructions(ptx: str) -> Mapping[str, int]:
    """Matrix instructions by the name that the machine has for them, from their operand types."""
    counts: dict[str, int] = {}
    for found in _MMA.finditer(ptx):
        parts = found[0].strip().split(".")
        group = "GMMA" if found[1] == "wgmma" else "MMA"
        kinds = set(parts)
        letter = "Q" if kinds & {"e4m3", "e5m2"} else "I" if kinds & {"s8", "u8"} else "D" if "f64" in kinds else "H"
        counts[letter + group] = counts.get(letter + group, 0) + 1
    return counts


def _tool(name: str, content: bytes, *arguments: str) -> str:
    """What one of NVIDIA's tools prints of a file with that content."""
    with tempfile.TemporaryDirectory(prefix="dsc-") as folder:
        file = Path(folder, "kernel")
        file.write_bytes(content)
        command = [getattr(triton.knobs.nvidia, name).path, *arguments, str(file)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout or done.stderr  # ptxas writes there
