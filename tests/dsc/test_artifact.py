"""``dsc compile`` writes a folder, and ``dsc.load`` runs it: as eager does, or not at all."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")
pytest.importorskip("typer")

from typer.testing import CliRunner

import dsc
from dsc import artifact, cli, portable
from dsc.codegen.candidates import Code, choose
from dsc.debug import kept
from dsc.debug.candidates import retuned, scheduled
from dsc.debug.capture import capture
from dsc.debug.kernels import listed
from dsc.debug.saving import save
from dsc.debug.source import Model
from dsc.errors import BadArtifact, Unsaveable
from dsc.models.zoo import load


def written(name: str, folder: Path, target: str = "cpu", training: bool = True) -> artifact.Manifest:
    entry = load(name)
    model = Model(name, entry.build(), entry.inputs())
    return save(capture(model, target, training=training), folder, parallel=1)


def gradients(model: nn.Module, call: Any, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss = call(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt")
    written("gpt-tiny", folder)
    return folder


@pytest.mark.parametrize("name", ["gpt-tiny", "resnet-tiny"])
def test_trains_as_eager_does(name: str, tmp_path: Path) -> None:
    written(name, tmp_path)
    entry = load(name)
    ours, theirs = entry.build(3), entry.build(3)
    step = dsc.load(tmp_path, ours)
    for seed in (1, 2):  # running statistics move
        inputs = entry.inputs(seed=seed)
        for a, b in zip(gradients(ours, step, inputs), gradients(theirs, theirs, inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)
    with torch.no_grad():
        for p in ours.parameters():
            p.mul_(0.5)
    assert step(*inputs).item() == pytest.approx(ours(*inputs).item(), rel=1e-5)  # the weights of now


def test_inference(tmp_path: Path) -> None:
    manifest = written("mlp-tiny", tmp_path, training=False)
    assert not manifest.training
    assert (tmp_path / "inference.py").read_text().startswith("# run_0: ")
    entry = load("mlp-tiny")
    model = entry.build(5)
    result = dsc.load(tmp_path, model)(*entry.inputs(seed=4))
    assert not result.requires_grad
    torch.testing.assert_close(result, model(*entry.inputs(seed=4)).detach())


def test_command_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    words = [
        "compile",
        "mlp-tiny",
        "--target",
        "h100",
        "--dtype",
        "bf16",
        "-o",
        str(tmp_path / "out"),
        "--parallel",
        "1",
    ]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    assert "mlp-tiny for h100:" in done.stdout
    assert "dsc.load(" in done.stdout
    out = tmp_path / "out"
    manifest = artifact.read(out)
    assert manifest.capability == (9, 0)
    cubins = sorted((out / "kernels").glob("*.sm_90.cubin"))
    assert len(cubins) == len(list((out / "kernels").glob("*.py"))) > 4
    assert all(c.read_bytes().startswith(b"\x7fELF") for c in cubins)
    kept = {p.parent.name for p in (out / "triton").rglob("*.cubin")}
    assert len(kept) == len(cubins)  # what Triton will look for there
    assert (
        "torch.bfloat16, device=device('cuda')" in (out / "backward.py").read_text()
        or "aten." in (out / "backward.py").read_text()
    )
    if not torch.cuda.is_available():
        with pytest.raises(BadArtifact, match=r"it needs the GPU that it was compiled for \(h100\), and here is none"):
            dsc.load(out, load("mlp-tiny").build())


def changed(folder: Path, **values: object) -> Path:
    """The manifest with other values."""
    file = folder / artifact.MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return folder


@pytest.fixture
def copy(gpt: Path, tmp_path: Path) -> Path:
    for name in artifact.read(gpt).files | {artifact.MANIFEST: ""}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((gpt / name).read_bytes())
    return tmp_path


def test_refusals(copy: Path) -> None:
    model = load("gpt-tiny").build()
    with pytest.raises(BadArtifact, match=r"has no manifest\.json; give a folder that dsc compile wrote"):
        dsc.load(copy / "nowhere", model)
    with pytest.raises(BadArtifact, match=r"the model has no parameter .tokens\.weight., as gpt-tiny had"):
        dsc.load(copy, load("mlp-tiny").build())
    model.tokens.weight = nn.Parameter(torch.zeros(65, 32))  # type: ignore[union-attr]
    with pytest.raises(BadArtifact, match=r"float32\[65, 32\], and was compiled as float32\[64, 32\]"):
        dsc.load(copy, model)
    versions = json.loads((copy / artifact.MANIFEST).read_text())["versions"]
    with pytest.raises(BadArtifact, match=r"with torch 1.0, and this is torch 2"):
        dsc.load(changed(copy, versions={**versions, "torch": "1.0"}), model)
    with pytest.raises(BadArtifact, match="its format is 99, not 1"):
        dsc.load(changed(copy, format=99), model)
    (copy / artifact.MANIFEST).write_text("{")
    with pytest.raises(BadArtifact, match="cannot be read"):
        dsc.load(copy, model)


def test_files_that_changed(copy: Path) -> None:
    (copy / "forward.program").write_bytes(b"rubbish")
    with pytest.raises(BadArtifact, match=r"forward\.program is missing or not what was written"):
        dsc.load(copy, load("gpt-tiny").build())


def test_other_inputs(gpt: Path) -> None:
    entry = load("gpt-tiny")
    step = dsc.load(gpt, entry.build())
    with pytest.raises(BadArtifact, match=r"input 0 is int64\[3, 16\], and was compiled as int64\[2, 16\]"):
        step(*entry.inputs(batch=3))
    with pytest.raises(BadArtifact, match="the call gives 1 tensors, too few"):
        step(entry.inputs()[0])


def test_models_that_cannot_be_saved(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            torch._dynamo.graph_break()
            return y.sum()

    with pytest.raises(Unsaveable, match="it needs 2 graphs, not one; compile it where it runs"):
        save(capture(Model("broken", Broken(), (torch.randn(2, 4),)), "cpu"), tmp_path, parallel=1)
    assert not list(tmp_path.iterdir())


def test_what_triton_asks_for_on_a_gpu_is_what_was_compiled() -> None:
    """Its key has the types and hints that it works out from the arguments of a launch."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    from dsc.codegen.cubin import SIGNATURE
    from kit_kernels import DTYPES

    for short, dtype in DTYPES.items():
        t = torch.empty(64, dtype=dtype)
        assert native_specialize_impl(BaseBackend, t, False, True, True) == (SIGNATURE[short], "D")


def test_manifests_survive(gpt: Path) -> None:
    manifest = artifact.read(gpt)
    assert artifact.read(changed(gpt, **json.loads(manifest.text()))) == manifest
    assert replace(manifest, target="x") != manifest


@pytest.mark.parametrize("name", ["mlp-tiny", "llama-tiny"])
def test_what_is_compiled_on_shapes_alone_is_the_same(name: str, tmp_path: Path) -> None:
    for folder, more in (("values", ()), ("shapes", ("--shapes",))):
        done = CliRunner().invoke(cli.app, ["compile", name, "-o", str(tmp_path / folder), "--parallel", "1", *more])
        assert done.exit_code == 0, done.output
    for file in ("forward.py", "backward.py"):
        assert (tmp_path / "shapes" / file).read_text() == (tmp_path / "values" / file).read_text()
    entry = load(name)
    model, inputs = entry.build(3), entry.inputs(seed=2)
    got, want = dsc.load(tmp_path / "shapes", model)(*inputs), model(*inputs)
    torch.testing.assert_close(got, want)


def test_an_unknown_model_is_an_error_on_shapes_too(tmp_path: Path) -> None:
    words = ["compile", "llama-3-2b", "--shapes", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code != 0
    assert not (tmp_path / "out").exists()


def test_schedules_travel_with_the_program() -> None:
    entry = load("mlp-tiny")
    session = capture(Model("mlp-tiny", entry.build(), entry.inputs()), "h100")
    kernels = listed(session)
    k = kernels[0]
    assert k.schedule is not None
    other = replace(k.schedule, num_warps=2 * k.schedule.num_warps)
    code = Code(32, 0, 0, 4, 16, 1.0, 100, {}, {})
    times = {k.schedule: 2.0, other: 1.0}
    choice = choose(k.name, "h100", k.schedule, dict.fromkeys(times, code), lambda s, _: times[s])
    new = scheduled(kernels, {k.title: choice})
    assert [a is b for a, b in zip(new, kernels)] == [False] + [True] * (len(kernels) - 1)
    [made] = [p for p in session.regions[0].programs if p.kind == k.graph]
    program = portable.loads(portable.dumps(retuned(made, new).program))
    assert program.schedules[k.name] == other
    assert made.program.schedules == {}
    assert retuned(made, kernels).program.code == made.program.code


def test_an_unchanged_model_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSC_CACHE", "1")
    monkeypatch.setenv("DSC_CACHE_DIR", str(tmp_path / "cache"))
    counted: list[int] = []

    def compiled(name: str, model: Model, target: str = "cpu", **rest: Any) -> tuple[artifact.Manifest, bool]:
        return kept.compile_into(tmp_path / name, model, target, begins=counted.append, **rest)

    def model(scale: float = 1.0) -> Model:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        return Model("m", Scaled(layer, scale), (torch.ones(2, 4),))

    first, copied = compiled("a", model())
    assert not copied
    again, copied = compiled("b", model())
    assert copied
    assert again == first
    assert counted == [0]
    files = lambda name: {p.relative_to(tmp_path / name): p.read_bytes() for p in (tmp_path / name).rglob("*.*")}  # noqa: E731
    assert files("a") == files("b")
    net = model().module
    torch.testing.assert_close(dsc.load(tmp_path / "b", net)(torch.ones(2, 4)), net(torch.ones(2, 4)))
    assert not compiled("c", model(2.0))[1], "another constant"
    assert not compiled("d", model(), training=False)[1]
    assert not compiled("e", replace(model(), args=(torch.ones(3, 4),)))[1], "another shape"
    renamed = model()
    renamed.module.other = renamed.module._modules.pop("layer")
    renamed.module.forward = lambda x: renamed.module.other(x) * 1.0  # type: ignore[method-assign]
    assert not compiled("f", renamed)[1], "other names"
    monkeypatch.setenv("DSC_CACHE", "0")
    assert not compiled("g", model())[1]


class Scaled(nn.Module):
    def __init__(self, layer: nn.Module, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale  # type: ignore[no-any-return]


def test_operators_are_found_where_nothing_is_imported_yet() -> None:
    """Each in a process that knows no other, as the first of a program that is read back."""
    told = """
from dsc import portable
for home, names in portable.HOMES.items():
    for name in names:
        found = portable.operator_named("dsc", name, "default")
        assert found.overloadpacket.__name__ == name, name
    print(home)
print(portable.operator_named("torch_attn", "_varlen_attn_backward", "default"))
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", told], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [*portable.HOMES, "torch_attn._varlen_attn_backward.default"]


def test_every_operator_of_dsc_has_a_home() -> None:
    for home in portable.HOMES:
        importlib.import_module(home)
    root = Path(dsc.__file__).parent
    defined = set()
    for path in root.rglob("*.py"):
        defined |= set(re.findall(r'"(?:dsc::)?([a-z_0-9]+)(?:\(Tensor|\(Device|", "\(Tensor)', path.read_text()))
    homes = {name for names in portable.HOMES.values() for name in names}
    assert defined and defined <= homes, defined - homes
