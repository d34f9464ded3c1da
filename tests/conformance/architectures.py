"""Train steps of Hugging Face architectures: tiny, with random weights, without a network.

The loss and the gradient of every parameter are compared; with dropout also where the generator stands, twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsc.debug.fuzz.observe import random_state

SMALL: dict[str, object] = {
    **dict.fromkeys("hidden_size d_model n_embd dim embedding_size emb_dim embed_dim d_embed".split(), 64),
    **dict.fromkeys("num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers".split(), 2),
    **dict.fromkeys("num_decoder_layers num_encoder_layers num_experts_per_tok num_key_value_heads".split(), 2),
    **dict.fromkeys("num_attention_heads n_head n_heads num_heads encoder_attention_heads".split(), 4),
    **dict.fromkeys("decoder_attention_heads num_labels num_experts num_local_experts n_routed_experts".split(), 4),
    **dict.fromkeys("intermediate_size d_ff n_inner ffn_dim encoder_ffn_dim decoder_ffn_dim hidden_dim".split(), 128),
    **dict.fromkeys("max_position_embeddings n_positions".split(), 128),
    "moe_intermediate_size": 64,
    "vocab_size": 256,
    "head_dim": 16,
    "d_kv": 16,
    "image_size": 64,
    "patch_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 3,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
"""Values of configurations, where they have the name and a value that is no container."""

ALWAYS = ("pad_token_id", "num_labels")
LARGEST = 20_000_000
HEADS = (
    ("causal", "AutoModelForCausalLM"),
    ("seq2seq", "AutoModelForSeq2SeqLM"),
    ("masked", "AutoModelForMaskedLM"),
    ("image", "AutoModelForImageClassification"),
    ("sequence", "AutoModelForSequenceClassification"),
)

FAMILIES: dict[str, tuple[str, ...]] = {
    "GPT-2": ("gpt2", "gpt_bigcode", "opt"),
    "BERT": ("bert", "roberta", "distilbert", "electra"),
    "LLaMA": ("llama", "mistral", "qwen2", "gemma"),
    "T5": ("t5", "mt5", "bart"),
    "ViT": ("vit", "vit_msn", "dinov2", "beit"),
}
"""Architectures that train with dropout; what they call its probabilities differs."""

DROPOUT = 0.2
DROPOUTS = """
    dropout attention_dropout activation_dropout resid_pdrop embd_pdrop attn_pdrop hidden_dropout_prob resid_dropout
    attention_probs_dropout_prob dropout_rate embed_dropout classifier_dropout hidden_dropout drop_path_rate
""".split()


def names() -> list[str]:
    """The architectures of the sweep."""
    return (Path(__file__).parent / "architectures.txt").read_text().split()


@dataclass(frozen=True)
class Subject:
    kind: str
    model: nn.Module
    inputs: dict[str, Tensor]


def build(name: str, dropout: float | None = None) -> Subject:
    """The architecture with its first fitting head, weights drawn from seed 0, and a batch of two.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        KeyError: there is no such architecture, or it has none of the heads.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    kind_of = transformers.CONFIG_MAPPING[name]
    config = kind_of(**smaller(kind_of()))
    config.use_cache = False
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    if dropout is not None:
        for key in DROPOUTS:
            if isinstance(getattr(config, key, None), (int, float)):
                setattr(config, key, dropout)
    for kind, head in HEADS:
        auto = getattr(transformers, head)
        if kind_of not in auto._model_mapping:
            continue
        with torch.device("meta"):
            size = sum(p.numel() for p in auto.from_config(config).parameters())
        if size > LARGEST:
            raise ValueError(f"{name} has {size / 1e6:.0f} M parameters")
        torch.manual_seed(0)
        inputs = {k: t.to(torch.get_default_device()) for k, t in batch(kind, config).items()}
        return Subject(kind, auto.from_config(config).to(torch.get_default_device()), inputs)
    raise KeyError(f"{name} has no head")


def smaller(base: object) -> dict[str, object]:
    def fits(key: str) -> bool:
        old = getattr(base, key, None)
        return key in ALWAYS or (old is not None and not isinstance(old, (list, tuple, dict)))

    return {key: value for key, value in SMALL.items() if fits(key)}


def batch(kind: str, config: Any) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    if kind == "image":
        size = getattr(config, "image_size", 64)
        size = size if isinstance(size, int) else size[0]
        images = torch.randn(2, getattr(config, "num_channels", 3), size, size, generator=g, device="cpu")
        return {"pixel_values": images, "labels": torch.randint(0, 4, (2,), generator=g, device="cpu")}
    ids = torch.randint(4, min(256, getattr(config, "vocab_size", 256)), (2, 32), generator=g, device="cpu")
    labels = torch.randint(0, 2, (2,), generator=g, device="cpu") if kind == "sequence" else ids.clone()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@dataclass(frozen=True)
class Step:
    loss: Tensor
    gradients: dict[str, Tensor]
    generator: Tensor


def step(subject: Subject, forward: Callable[..., Any], seed: int = 1) -> Step:
    subject.model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    out = forward(**subject.inputs)
    loss = out.loss if out.loss is not None else out[0].float().square().mean()
    loss.backward()
    named = {n: p.grad.detach().clone() for n, p in subject.model.named_parameters() if p.grad is not None}
    return Step(loss.detach().clone(), named, random_state())


def compare(name: str, backend: str, dynamic: bool | None = None, dropout: float | None = None) -> None:
    """One train step in eager and compiled; two with dropout, each from a seed of its own.

    Raises:
        AssertionError: loss, gradients or the generator's state differ.
    """
    subject = build(name, dropout)
    subject.model.train(dropout is not None)
    seeds = (1,) if dropout is None else (1, 2)
    expected = [step(subject, subject.model, s) for s in seeds]
    torch._dynamo.reset()
    compiled = torch.compile(subject.model, backend=backend, dynamic=dynamic)
    got = [step(subject, compiled, s) for s in seeds]
    for want, have in zip(expected, got):
        same(want, have)
    if dropout is not None:
        assert not torch.equal(expected[0].loss, expected[1].loss), "the model drops nothing"


def same(want: Step, got: Step) -> None:
    assert torch.isfinite(got.loss), "the loss is not finite"
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-4, atol=1e-5, msg=lambda m: f"loss: {m}")
    missing = sorted(want.gradients.keys() ^ got.gradients.keys())
    assert not missing, f"gradients of one run alone: {missing[:5]}"
    for name, g in want.gradients.items():
        largest = float(g.abs().max()) if g.numel() else 0.0
        tolerance = max(1e-5, 1e-4 * largest)
        torch.testing.assert_close(
            got.gradients[name], g, rtol=1e-3, atol=tolerance, msg=lambda m, n=name: f"gradient of {n}: {m}"
        )
    assert torch.equal(want.generator, got.generator), "the generator is in another state than eager's"
