"""Bytes of 8-bit products: what is saved for the backward, what rounding moves, what the kernels compile to."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from common import table
from precision_models import BATCH, LENGTH, MODELS, text_batches

from dsc import ops
from dsc.compilation import Compilation
from dsc.precision import emulate


def bytes_moved(settings: argparse.Namespace) -> dict[str, Any]:
    out: dict[str, Any] = {"saved": saved_bytes(), "traffic": {}, "kernels": {}}
    print(f"saved for the backward of 8-bit layers: {out['saved']:.3f} bytes an element\n")
    from dsc.codegen import cubin
    from dsc.codegen.templates import gemm8, quantise8
    from dsc.codegen.triton import Schedule

    rows: list[tuple[object, ...]] = []
    pointer = {"e4m3": "*fp8e4nv", "int8": "*i8"}
    for capability, dtype in ((90, "e4m3"), (90, "int8"), (80, "int8")):
        for grain in ("1x128", "128x128"):
            types = [
                "*bf16",
                "*bf16",
                pointer[dtype],
                "*fp32",
                pointer[dtype],
                *["*fp32"] * 3,
                *["i32"] * 3,
                *["constexpr"] * 8,
            ]
            constants: Any = {**quantise8.constants(grain, True, True, emulate.LIMIT[dtype], dtype == "int8"), "x1": 1}
            schedule = Schedule(num_warps=quantise8.WARPS, num_stages=1)
            facts = cubin.compile_source(
                quantise8.SOURCE, "quantise", types, constants, range(11), schedule, capability
            )
            moved = {a.buffer: a.width * a.count * quantise8.WARPS * 32 for a in facts.accesses}
            elements = quantise8.SIDE**2
            scales = 2 * 4 * emulate.scale_shape(128, 128, grain)[0]
            total = (moved["x"] + moved["q"] + moved["qt"] + scales) / elements
            out["traffic"][f"sm_{capability} {dtype} {grain}"] = total
            if grain == "1x128":
                out["traffic"][f"sm_{capability} {dtype}, in a GELU"] = fused = fused_bytes(dtype, capability)
                rows.append((f"gelu and quantise {dtype}", f"sm_{capability}", "-", None, None, f"{fused:.3f}"))
            rows.append(
                (f"quantise {dtype} {grain}", f"sm_{capability}", "-", facts.registers, facts.spilled, f"{total:.3f}")
            )
        for grains in (("1x128", "128x128"), ("1x128", "1x128"), ("row", "row"), ("tensor", "tensor")):
            types = [pointer[dtype], "*fp32", pointer[dtype], "*fp32", "*bf16", *["i32"] * 3, *["constexpr"] * 8]
            schedule = Schedule(num_warps=gemm8.WARPS, num_stages=gemm8.STAGES, fp_fusion=True)
            constants = gemm8.constants(*grains, dtype == "int8", 128)
            facts = cubin.compile_source(gemm8.SOURCE, "mm8", types, constants, range(8), schedule, capability)
            units = " ".join(f"{n} {u}" for u, n in facts.tensor.items())
            sass = facts.sass()
            fallen = "HMMA" in sass or "HGMMA" in sass
            out["kernels"][f"sm_{capability} {dtype} {' '.join(grains)}"] = {
                "units": dict(facts.tensor), "registers": facts.registers, "spilled": facts.spilled, "16-bit units": fallen,
            }  # fmt: skip
            rows.append(
                (
                    f"mm8 {dtype} {' x '.join(grains)}",
                    f"sm_{capability}",
                    units + (" and HMMA" if fallen else ""),
                    facts.registers,
                    facts.spilled,
                    None,
                )
            )
    print(table(("kernel", "for", "units", "registers", "spilled", "bytes an element"), rows))
    return out


def fused_bytes(dtype: str, capability: int) -> float:
    """What rounding adds to the kernel of a GELU: values in both directions and scales, all written, none read."""
    from dsc.codegen import cubin
    from dsc.codegen.templates import quantise8
    from dsc.codegen.triton import Schedule

    pointer = {"e4m3": "*fp8e4nv", "int8": "*i8"}[dtype]
    types = ["*bf16", "*bf16", pointer, "*fp32", pointer, *["*fp32"] * 3, *["i32"] * 3, *["constexpr"] * 8]
    limit = emulate.LIMIT[dtype]
    constants: Any = {**quantise8.constants("1x128", True, True, limit, dtype == "int8", "gelu"), "x1": 1}
    schedule = Schedule(num_warps=quantise8.WARPS, num_stages=1, fp_fusion=True)
    facts = cubin.compile_source(quantise8.SOURCE, "quantise", types, constants, range(11), schedule, capability)
    moved = {a.buffer: a.width * a.count * quantise8.WARPS * 32 for a in facts.accesses}
    return float(moved["q"] + moved["qt"] + 2 * 4 * quantise8.SIDE) / quantise8.SIDE**2


def saved_bytes() -> float:
    """Bytes that the forward saves of the inputs of layers in 8 bits, over how many elements those have."""
    torch._dynamo.reset()
    seen: list[Compilation] = []
    model = MODELS["LLaMA"]()
    options = {"precision": {"*": "int8"}, "on_compile": seen.append}
    torch.compile(model, backend="dsc", options=options)(*next(text_batches())).backward()
    backward = seen[1]
    products = {s for n in backward.gm.graph.nodes if ops.name_of(n) == "dsc.mm8.default" for s in n.all_input_nodes}
    saved = [n for n in backward.gm.graph.find_nodes(op="placeholder") if n in products]
    values = [n.meta["val"] for n in saved]
    tokens = LENGTH * BATCH
    activations = [v for v in values if v.dtype == torch.int8 and v.shape[1] == tokens]
    scales = [v for v in values if v.dtype == torch.float32 and v.shape[1] == tokens // emulate.BLOCK]
    whole = sum(v.numel() * v.element_size() for v in (*activations, *scales))
    return whole / sum(v.numel() for v in activations)
