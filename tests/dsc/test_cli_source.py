"""Every form of MODEL: what it loads, and one sentence for what it cannot use."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dsc.cli.source import find
from dsc.debug.load import inputs
from dsc.errors import BadInput, BadModel, DscError, ModelFailed, UnknownModel
from kit_cli import captured, dsc

USER = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 4)

    def forward(self, x, scale=None):
        y = self.second(torch.tanh(self.first(x)))
        return y if scale is None else y * scale

class Sized(nn.Module):
    def __init__(self, n):
        super().__init__()

ready = Net(12)
number = 3

def build():
    return Net(32)

def product(x, w):
    return torch.tanh(x @ w)

def inputs():
    return {"scale": torch.full((4,), 2.0), "x": torch.randn(3, 8)}

def other():
    return torch.randn(5, 8)

def raises(x, scale):
    raise ValueError("no such thing")
"""


@pytest.fixture
def user(tmp_path: Path) -> str:
    file = tmp_path / "user.py"
    file.write_text(USER)
    return str(file)


def run(spec: str, *given: str) -> torch.Tensor:
    model = find(spec, given)
    result = model.module(*model.args)
    assert isinstance(result, torch.Tensor)
    return result


def test_zoo_in_any_case() -> None:
    assert find("MLP-Tiny").name == "mlp-tiny"
    assert len(find("mlp-tiny", ["f32[3,20]", "i64[3]<5"]).args) == 2


def test_objects_of_a_file(user: str) -> None:
    assert run(f"{user}:Net").shape == (3, 4)
    assert find(f"{user}:ready").module.first.out_features == 12  # type: ignore[union-attr]
    assert find(f"{user}:build").module.first.out_features == 32  # type: ignore[union-attr]
    assert run(f"{user}:Net", "f32[7,8]").shape == (7, 4)
    assert run(f"{user}:Net", f"{user}:other").shape == (5, 4)


def test_weights_are_the_same_every_time(user: str) -> None:
    assert torch.equal(run(f"{user}:Net"), run(f"{user}:Net"))


def test_inputs_of_a_function_take_part_in_the_backward(user: str) -> None:
    session = captured(f"{user}:product", ["f32[4,8]", "f32[8,3]"], "a100")
    assert [s.graph for s in session.regions[0].stages if s.name == "trace"] == ["joint", "forward", "backward"]
    assert not any(t.requires_grad for t in find(f"{user}:Net", ["f32[2,8]"]).args)  # type: ignore[attr-defined]


def test_inputs_as_text() -> None:
    values = inputs.parse(["f32[2,3]", "i64[50]<7", "bf16[4]", "b1[9]", "3", "0.5", "true", "None", "i32[2]", "f64[]"])
    kinds = [(t.dtype, tuple(t.shape)) if isinstance(t, torch.Tensor) else t for t in values]
    assert kinds == [
        (torch.float32, (2, 3)), (torch.int64, (50,)), (torch.bfloat16, (4,)), (torch.bool, (9,)), 3, 0.5, True, None,
        (torch.int32, (2,)), (torch.float64, ()),
    ]  # fmt: skip
    assert values[1].unique().tolist() == list(range(7))  # type: ignore[attr-defined]
    again = inputs.parse(["f32[2,3]"])[0]
    assert torch.equal(again, values[0])  # type: ignore[arg-type]


def test_exported_program(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 4), nn.GELU())
    x = torch.randn(3, 8)
    torch.export.save(torch.export.export(module, (x,)), tmp_path / "m.pt2")
    found = find(str(tmp_path / "m.pt2"))
    assert torch.allclose(found.module(*found.args), module(x))
    assert "gelu_backward" in dsc("show", str(tmp_path / "m.pt2"), "-t", "h100", "-g", "backward")


def test_exported_program_with_keywords(tmp_path: Path, user: str) -> None:
    module = find(f"{user}:ready").module
    given = torch.randn(3, 8), {"scale": torch.tensor(3.0)}
    torch.export.save(torch.export.export(module, given[:1], given[1]), tmp_path / "k.pt2")
    assert torch.allclose(run(str(tmp_path / "k.pt2")), module(given[0], scale=3.0))


CONFIGURATIONS = [
    ({"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 8}, "GPT2LMHeadModel", (2, 8)),
    ({"model_type": "vit", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32,
      "image_size": 16, "patch_size": 8}, "ViTForImageClassification", (2, 3, 16, 16)),
    ({"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32,
      "vocab_size": 50, "architectures": ["BertModel"]}, "BertModel", (2, 16)),
]  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize(("raw", "name", "shape"), CONFIGURATIONS, ids=lambda c: c if isinstance(c, str) else "")
def test_configuration(raw: dict[str, Any], name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = find(f"hf:{tmp_path / 'config.json'}")
    assert type(model.module.dsc_inner).__name__ == name
    assert model.args[0].shape == shape  # type: ignore[attr-defined]
    result = model.module(*model.args)
    assert ("loss" in result) == (name != "BertModel")
    assert find(f"hf:{tmp_path}").args[0].shape == shape  # type: ignore[attr-defined]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_too_large_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 65536}))
    with pytest.raises(BadModel, match=r"its [\d.]+ billion parameters are too many for \d+ GiB of memory"):
        find(f"hf:{tmp_path}")


BAD = [
    ("mpl-tiny", [], UnknownModel, "'mpl-tiny' is not a model: did you mean 'mlp-tiny'?"),
    ("{user}", [], BadModel, "it does not say which model of the file; give {user}:Net."),
    ("{user}:Nett", [], BadModel, "the file defines no 'Nett'; did you mean 'Net'."),
    ("{user}:number", [], BadModel, "it has type int; name a module or a function."),
    (
        "{user}:Sized",
        [],
        BadModel,
        "making it raises TypeError: Sized.__init__() missing 1 required positional argument",
    ),
    ("{user}:Net", ["f3[2,8]"], BadInput, "'f3' is no dtype, did you mean 'f32'?"),
    ("{user}:Net", ["f32[2,8"], BadInput, "it is neither a tensor nor a number"),
    ("{user}:Net", ["i64[2]<0"], BadInput, "the range is empty"),
    ("{user}:Net", ["f32[2]<3"], BadInput, "a range is for whole numbers only"),
    ("{user}:Net", ["f32[2,9]"], ModelFailed, "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x9 and 8x16)"),
    ("{user}:raises", [], ModelFailed, "ValueError: no such thing; check the model and --input."),
    ("{folder}/none.py:f", [], BadModel, "there is no file {folder}/none.py; check the path."),
    ("{folder}/syntax.py:f", [], BadModel, "the file raises SyntaxError"),
    ("{folder}/raises.py:f", [], BadModel, "NameError: name 'undefined' is not defined, at line 2; correct the file."),
    ("{folder}/plain.py:f", [], BadInput, "Inputs are missing: plain.py has no function inputs() that gives them"),
    ("{folder}/none.pt2", [], BadModel, "there is no such file"),
    ("{folder}/text.pt2", [], BadModel, "it is no exported program, or the end of it is missing"),
    ("{folder}/none.onnx", [], BadModel, "there is no such file"),
    ("hf:{folder}/none.json", [], BadModel, "none.json cannot be read: No such file or directory; check the path."),
    ("hf:{folder}/cut.json", [], BadModel, "cut.json is no JSON"),
    ("hf:{folder}/plain.json", [], BadModel, "plain.json has no 'model_type'"),
]


@pytest.mark.parametrize(("spec", "given", "kind", "words"), BAD, ids=lambda c: c if isinstance(c, str) else "")
def test_what_cannot_be_used(
    spec: str, given: list[str], kind: type[DscError], words: str, tmp_path: Path, user: str
) -> None:
    for name, content in {
        "syntax.py": "def f(:\n",
        "raises.py": "import torch\nx = undefined\n",
        "plain.py": "def f(x):\n    return x\n",
        "text.pt2": "text",
        "cut.json": '{"model_type": ',
        "plain.json": "{}",
    }.items():
        (tmp_path / name).write_text(content)
    spec, words = (t.replace("{user}", user).replace("{folder}", str(tmp_path)) for t in (spec, words))
    with pytest.raises(kind) as raised:
        captured(spec, given)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_exit_code_of_bad_input(user: str) -> None:
    assert dsc("passes", f"{user}:Nett", code=2).startswith(f"{user}:Nett cannot be used: ")
