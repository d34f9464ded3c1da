"""ONNX files as torch modules, beside onnxruntime."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dsc.cli.source import find
from dsc.debug.capture import capture
from dsc.errors import BadInput, BadModel

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True),
            nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.layers(x), -1)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(50, 16), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.embed(tokens), is_causal=False)
        return F.gelu(x[:, 1:] - x[:, :-1]).mean(1) @ self.embed.weight.t()


def mixed(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b = torch.cat([x, y], 1).chunk(2, 1)
    c = torch.where(a > 0, a.clamp(max=1.5), b.exp()) / (y.abs() + 1)
    return c.sum(0), c.amax(1, keepdim=True), F.pad(c, (1, 2)).tril(), (x.long() // 2).float(), c.var(1).sqrt().flip(0)


def saved(module: nn.Module, args: tuple[torch.Tensor, ...], file: Path) -> None:
    torch.onnx.export(module.eval(), args, str(file), dynamo=True, verbose=False)


class Function(nn.Module):
    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> object:
        return self.function(*args)


CASES = [
    (Convolutions(), (torch.randn(2, 3, 17, 17),)),
    (Words(), (torch.randint(2, (2, 7)),)),
    (Function(mixed), (torch.randn(4, 6), torch.randn(4, 6))),
]


@pytest.mark.parametrize(("module", "args"), CASES, ids=["convolutions", "words", "mixed"])
def test_same_as_onnxruntime(module: nn.Module, args: tuple[torch.Tensor, ...], tmp_path: Path) -> None:
    file = tmp_path / "m.onnx"
    saved(module, args, file)
    model = find(str(file))
    assert [a.shape for a in model.args] == [a.shape for a in args]  # type: ignore[attr-defined]
    runtime = onnxruntime.InferenceSession(str(file))
    names = [i.name for i in runtime.get_inputs()]
    want = runtime.run(None, dict(zip(names, [a.numpy() for a in model.args])))  # type: ignore[attr-defined]
    got = model.module(*model.args)
    assert len(got) == len(want)
    for g, w in zip(got, want):
        torch.testing.assert_close(g.detach(), torch.from_numpy(w), rtol=1e-4, atol=1e-5)


def test_it_is_one_graph_that_can_be_trained(tmp_path: Path) -> None:
    saved(Words(), (torch.randint(2, (2, 7)),), tmp_path / "m.onnx")
    session = capture(find(str(tmp_path / "m.onnx")), "h100")
    (region,) = session.regions
    assert {s.graph for s in region.stages} == {"joint", "forward", "backward"}
    assert sum(g is not None for g in session.outcome.gradients) == len(session.outcome.gradients) > 10


def test_what_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("text")
    with pytest.raises(BadModel, match="it is no ONNX file"):
        find(str(tmp_path / "text.onnx"))
    saved(Words(), (torch.randint(2, (2, 7)),), tmp_path / "m.onnx")
    with pytest.raises(BadInput, match=r"m.onnx takes 1 inputs \(tokens\)"):
        find(str(tmp_path / "m.onnx"), ["i64[2,7]", "i64[2,7]"])
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    values = [helper.make_tensor_value_info(n, kind, [2]) for n in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Det", ["x"], ["y"])], "g", values[:1], values[1:])
    onnx.save(helper.make_model(graph), tmp_path / "det.onnx")
    with pytest.raises(BadModel, match="it has the operator Det, for which there is no rule"):
        find(str(tmp_path / "det.onnx"))
