"""``hf:CONFIG.json``: a model of transformers with random weights, from its configuration alone."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsc.debug.load.python import from_user
from dsc.debug.source import Keyworded, Model
from dsc.errors import BadModel

BATCH, LENGTH = 2, 16
"""Of the inputs that are made here."""
CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForImageClassification",
    "AutoModelForSequenceClassification",
)
"""Tried in this order where the configuration names no architecture: models with a loss."""
SHARE_OF_MEMORY = 0.25
"""Of this machine's, that weights in fp32 may take: gradients and activations come on top."""


def load(spec: str, given: Sequence[str] = ()) -> Model:
    """The architecture that the configuration names, else the first of ``CLASSES`` that it fits, else the bare model.

    Texts and images are made up to the configuration's sizes, and labels where the model takes them.

    Raises:
        BadModel: transformers is missing, or the file is missing, no JSON, no configuration, or of too large a model.
    """
    path = Path(spec.removeprefix("hf:"))
    raw = read(path, spec)
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as why:
        raise BadModel(spec, f"transformers is missing ({why})", "install it: pip install transformers") from why
    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.for_model(**raw)
    except Exception as why:
        raise BadModel(spec, first_line(why), "correct the configuration") from why
    make = chooser(transformers, config)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            fits(spec, make, config)
            module: nn.Module = make(config)
        except BadModel:
            raise
        except Exception as why:
            raise BadModel(spec, f"making it raises {first_line(why)}", "correct the configuration") from why
    module.train()
    if given:
        return Model(spec, module, from_user(given, module))
    named = inputs(module, config)
    if not named:
        raise BadModel(spec, "it takes neither texts nor images", "give its inputs by --input")
    return Model(spec, Keyworded(module, tuple(named)), tuple(named.values()))


def read(path: Path, spec: str) -> dict[str, Any]:
    """The JSON of the file, or of ``config.json`` in a folder."""
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text())
    except OSError as why:
        raise BadModel(spec, f"{file} cannot be read: {why.strerror}", "check the path") from why
    except ValueError as why:
        raise BadModel(spec, f"{file} is no JSON ({why})", "correct the file") from why
    if not isinstance(raw, dict) or "model_type" not in raw:
        raise BadModel(spec, f"{file} has no 'model_type'", "give the config.json of a model of transformers")
    return raw


def chooser(transformers: Any, config: Any) -> Any:
    """A function from the configuration to the model."""
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for name in CLASSES:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return auto.from_config
    return transformers.AutoModel.from_config


def fits(spec: str, make: Any, config: Any) -> None:
    """Refuse a model whose weights would fill this machine."""
    with torch.device("meta"):
        count = sum(p.numel() for p in make(config).parameters())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if count * 4 > SHARE_OF_MEMORY * memory:
        raise BadModel(
            spec,
            f"its {count / 1e9:.1f} billion parameters are too many for {memory / 2**30:.0f} GiB of memory",
            "give it fewer or narrower layers in the configuration",
        )


def inputs(module: nn.Module, config: Any) -> dict[str, Tensor]:
    """Texts or images, and labels, by the names of ``forward``."""
    names = inspect.signature(module.forward).parameters
    generator = torch.Generator().manual_seed(0)
    text = getattr(config, "get_text_config", lambda: config)()
    made: dict[str, Tensor] = {}
    if "pixel_values" in names and (size := getattr(config, "image_size", None) or 64):
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        made["pixel_values"] = torch.randn(
            BATCH, getattr(config, "num_channels", 3), height, width, generator=generator
        )
    elif "input_ids" in names:
        length = min(LENGTH, getattr(text, "max_position_embeddings", None) or LENGTH)
        made["input_ids"] = torch.randint(text.vocab_size, (BATCH, length), generator=generator)
    if made and "labels" in names:
        if "ForImageClassification" in type(module).__name__ or "SequenceClassification" in type(module).__name__:
            made["labels"] = torch.randint(config.num_labels, (BATCH,), generator=generator)
        elif "input_ids" in made:
            made["labels"] = made["input_ids"].clone()
    return made


def first_line(why: Exception) -> str:
    words = str(why).strip().splitlines()
    return f"{type(why).__name__}: {words[0][:160] if words else ''}"
