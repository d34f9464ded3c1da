"""Attention of no device: an operator that traces on a CPU with the shapes and strides of CUDA's attention kernels.

``dsc::sdpa`` and ``dsc::sdpa_backward`` stand for one of ATen's fused CUDA kernels (flash or memory-efficient) while a
graph is traced on a machine that has neither.  On a CPU they compute with ATen's CPU attention, so that the graph runs.
``dsc.retarget`` puts the CUDA operators in their place.  Importing this module registers the two operators.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
FLASH_WIDTH = 256
"""The widest head of the flash kernel."""

LIBRARY = torch.library.Library("dsc", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(  # type: ignore[no-untyped-call]
    "sdpa(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout, bool causal, float? scale, str kernel)"
    " -> (Tensor out, Tensor logsumexp, Tensor seed, Tensor offset)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
LIBRARY.define(  # type: ignore[no-untyped-call]
    "sdpa_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor out, Tensor logsumexp,"
    " Tensor seed, Tensor offset, float dropout, bool causal, float? scale, str kernel) -> (Tensor, Tensor, Tensor)"
)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` as it chooses its kernel on CUDA; [B, H, T, D] x [B, H', S, D] -> [B, H, T, D].

    1. Under autocast, operands are cast first.
    2. 16-bit operands without a mask, square if causal, D <= 256: flash, with H' heads of keys if ``enable_gqa``.
    3. Other floats of up to 32 bits: memory-efficient; a mask becomes an additive one, keys are repeated to H heads.
    4. Anything else (float64, a mask that needs a gradient, other ranks, widths that differ): products and a softmax.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (_lowered(x, dtype) for x in (query, key, value))
        attn_mask = _lowered(attn_mask, dtype) if attn_mask is not None else None
    with torch.autocast(kind, enabled=False):
        if not _fits(query, key, value, attn_mask, is_causal, enable_gqa):
            math = aten._scaled_dot_product_attention_math
            out: Tensor = math(
                query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]
            return out
        width = query.shape[-1]
        scale = width**-0.5 if scale is None else scale
        if padding := -width % 8:  # the kernels read 16 bytes at a time
            query, key, value = (F.pad(x, (0, padding)) for x in (query, key, value))
        kernel = "flash" if _flash(query, key, attn_mask, is_causal) else "efficient"
        if kernel == "efficient":
            times = query.shape[1] // key.shape[1]
            key, value = (x if times == 1 else x.repeat_interleave(times, 1) for x in (key, value))
            attn_mask = _additive(attn_mask, query, key) if attn_mask is not None else None
        out = torch.ops.dsc.sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, kernel)[0]
        return out[..., :width] if padding else out


def _lowered(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast casts: floats, unless they have 64 bits."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def _fits(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, gqa: bool) -> bool:
    if not q.dim() == k.dim() == v.dim() == 4 or not q.dtype == k.dtype == v.dtype:
        return False
    if q.dtype not in (*HALF, torch.float32) or not isinstance(q.shape[-1], int):
        return False
    if mask is not None and (causal or mask.requires_grad or mask.dim() > 4):
        return False
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        return False
    return bool(q.shape[1] == k.shape[1] or (gqa and q.shape[1] % k.shape[1] == 0))


def _flash(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> bool:
    square = not causal or q.shape[-2] == k.shape[-2]
    return q.dtype in HALF and mask is None and q.shape[-1] <= FLASH_WIDTH and bool(square)


def _additive(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """[B, H, T, S] of the operands' dtype: -inf where a bool mask is false; rows start at multiples of 16 elements."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
    length = k.shape[-2]
    if mask.shape[-1] == length and length % 16:
        mask = F.pad(mask, (0, -length % 16))[..., :length]
    return mask.to(q.dtype).expand(q.shape[0], q.shape[1], q.shape[2], length)


# What the CUDA kernels return, as their fake kernels tell.


def _fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None, kernel: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if kernel == "flash":
        r = aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)
        return r[0], r[1], r[6], r[7]
    out: tuple[Tensor, Tensor, Tensor, Tensor] = aten._scaled_dot_product_efficient_attention(
        q, k, v, mask, True, dropout, causal, scale=scale
    )
    return out


def _fake_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, seed: Tensor,
    offset: Tensor, dropout: float, causal: bool, scale: float | None, kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if kernel == "flash":
        return tuple(torch.empty_like(x) for x in (q, k, v))  # type: ignore[return-value]
    return tuple(torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype, device=x.device) for x in (q, k, v))  # type: ignore[return-value]


# The gradient.


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, mask, *settings = inputs
    out, lse, seed, offset = output
    ctx.save_for_backward(q, k, v, mask, out, lse, seed, offset)  # type: ignore[arg-type]
    ctx.set_materialize_grads(False)
    ctx.settings = settings  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, g: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 8
    q, k, v, mask, out, lse, seed, offset = ctx.saved_tensors  # type: ignore[attr-defined]
    grads = torch.ops.dsc.sdpa_backward(g, q, k, v, mask, out, lse, seed, offset, *ctx.settings)  # type: ignore[attr-defined]
    return (*grads, None, None, None, None, None)


# On a CPU.


def _on_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None, kernel: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ATen's CPU attention; with dropout, plain products under a mask that ``seed`` repeats (not eager's numbers)."""
    rows = q.shape[2]
    k_all, v_all = _all_heads(k, q), _all_heads(v, q)
    seed = torch.zeros(2 if kernel == "flash" else (), dtype=torch.int64)
    if dropout > 0:
        seed.copy_(torch.randint(2**62, (), dtype=torch.int64))
        p, kept = _weights(q, k_all, mask, dropout, causal, scale, seed)
        out = ((p * kept) @ v_all.float()).to(q.dtype)
        lse = q.new_zeros(q.shape[:3], dtype=torch.float32)
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k_all, v_all, 0.0, causal, attn_mask=mask, scale=scale
        )
    lse = lse.contiguous() if kernel == "flash" else F.pad(lse, (0, -rows % 32))
    word = torch.uint64 if kernel == "flash" else torch.int64
    return _laid(out, q, kernel), lse, seed.to(word), torch.zeros((), dtype=word)


def _backward_on_cpu(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, seed: Tensor,
    offset: Tensor, dropout: float, causal: bool, scale: float | None, kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    k_all, v_all = _all_heads(k, q), _all_heads(v, q)
    if dropout > 0:
        p, kept = _weights(q, k_all, mask, dropout, causal, scale, seed)
        wide = g.float()
        gv = (p * kept).mT @ wide
        gp = (wide @ v_all.float().mT) * kept
        gs = p * (gp - (gp * p).sum(-1, keepdim=True)) * (q.shape[-1] ** -0.5 if scale is None else scale)
        gq, gk = gs @ k_all.float(), gs.mT @ q.float()
    else:
        gq, gk, gv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k_all, v_all, out, lse[..., : q.shape[2]], 0.0, causal, attn_mask=mask, scale=scale
        )
    return _laid(gq, q, kernel), _laid(_own_heads(gk, k), k, kernel), _laid(_own_heads(gv, v), v, kernel)


def _weights(
    q: Tensor, k: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None, seed: Tensor
) -> tuple[Tensor, Tensor]:
    """Softmax of the scores [B, H, T, S], and what dropout multiplies it by; both float32."""
    scores = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    if mask is not None:
        scores = scores + mask
    source = torch.Generator().manual_seed(int(seed.flatten()[0]))
    return torch.softmax(scores, -1), (torch.rand(scores.shape, generator=source) >= dropout) / (1 - dropout)


def _all_heads(x: Tensor, q: Tensor) -> Tensor:
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _own_heads(g: Tensor, x: Tensor) -> Tensor:
    """The sum over the query heads that share a head of ``x``."""
    return g if g.shape[1] == x.shape[1] else g.reshape(g.shape[0], x.shape[1], -1, *g.shape[2:]).sum(2)


def _laid(x: Tensor, like: Tensor, kernel: str) -> Tensor:
    """In the strides that the CUDA kernel gives a result for an operand ``like``."""
    if kernel == "flash":
        return torch.empty_like(like).copy_(x)
    return torch.empty_permuted(like.shape, (0, 2, 1, 3), dtype=like.dtype).copy_(x)


torch.library.register_fake("dsc::sdpa", _fake, lib=LIBRARY)
torch.library.register_fake("dsc::sdpa_backward", _fake_backward, lib=LIBRARY)
torch.library.register_autograd("dsc::sdpa", _backward, setup_context=_save, lib=LIBRARY)
LIBRARY.impl("sdpa", _on_cpu, "CPU")  # type: ignore[no-untyped-call]
LIBRARY.impl("sdpa_backward", _backward_on_cpu, "CPU")  # type: ignore[no-untyped-call]
