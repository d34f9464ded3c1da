"""Programs to bytes and back: what a cache keeps, and what travels to another machine.

Operators are kept by name.  Bytes are unpickled: read only what came from a place that nobody else can write.
"""

from __future__ import annotations

import importlib
import io
import pickle
from typing import Any

import torch
from torch.fx import GraphModule

from dsc.program import Program
from dsc.runtime.state import Entry
from dsc.torch_shim import FakeTensor, HigherOrderOperator, OpOverload, higher_order

CONSTANTS = 1 << 20
"""Bytes of constants up to which a program is worth keeping."""


HOMES = {
    "dsc.runtime.offload": ("offload", "offloaded", "fetch", "fetched"),
    "dsc.narrow": ("narrow8", "widen8"),
    "dsc.sdpa": ("sdpa", "sdpa_backward"),
    "dsc.flash_attention": ("flash_attention", "flash_attention_backward"),
    "dsc.varlen_attention": ("varlen_attention", "varlen_attention_backward"),
    "dsc.block_attention": ("block_select", "block_attention", "block_attention_backward"),
    "dsc.grouped": ("grouped_mm",),
    "dsc.keep": ("keep",),
    "dsc.given": ("given",),
    "dsc.embedding": ("embedding_add", "embedding_add_", "embedding_grad"),
    "dsc.replay": ("rng_state", "set_rng_state"),
    "dsc.nm": ("alive_rows", "mm_of_rows", "mm_over_rows", "nm_keep", "nm_mask", "nm_refresh", "nm_stats"),
    "dsc.packed": ("cslt_compress", "cslt_mm", "pack24", "sparse_mm24"),
    "dsc.precision.ops": (
        "mm8",
        "mm_tf32",
        "quantise",
        "quantise_both",
        "quantise_of",
        "quantise_by",
        "quantise_both_by",
    ),
}
"""Operators that are registered where they are first wanted, by a module of dsc."""


class NotPortable(Exception):
    """A program that mentions what cannot be kept: graphs of control flow, functions of the user, large constants."""


def dumps(program: Program) -> bytes:
    """The program as bytes.

    Raises:
        NotPortable: it holds something that only this process knows.
    """
    out = io.BytesIO()
    try:
        _Pickler(out, protocol=5).dump(program)
    except (pickle.PicklingError, TypeError, AttributeError) as why:
        raise NotPortable(str(why)) from why
    return out.getvalue()


def loads(data: bytes) -> Program:
    """The program that ``dumps`` took."""
    found: Program = pickle.loads(data)
    return found


class _Pickler(pickle.Pickler):
    def reducer_override(self, x: Any) -> Any:
        match x:
            case OpOverload():
                packet, _, overload = x.__name__.rpartition(".")
                return operator_named, (x.namespace, packet, overload)
            case HigherOrderOperator():
                if higher_order(x.__name__) is not x:
                    raise NotPortable(f"{x.__name__} is not an operator of PyTorch")
                return higher_order, (x.__name__,)
            case Entry():
                raise NotPortable("it reads or writes state, which lives in this process")
            case GraphModule() | FakeTensor():
                raise NotPortable(f"it holds a {type(x).__name__}")
            case torch.Tensor() if x.nbytes > CONSTANTS:
                raise NotPortable(f"it holds a constant of {x.nbytes} bytes")
            case _:
                return NotImplemented


def operator_named(namespace: str, packet: str, overload: str) -> OpOverload:
    """``aten``, ``add``, ``Tensor`` -> ``torch.ops.aten.add.Tensor``."""
    if namespace == "dsc" and (home := next((h for h, names in HOMES.items() if packet in names), None)) is not None:
        importlib.import_module(home)
    if namespace == "torch_attn":
        importlib.import_module("torch.nn.attention.varlen")
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return found
