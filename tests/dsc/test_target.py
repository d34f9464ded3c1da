from types import SimpleNamespace

import pytest
import torch

from dsc import target
from dsc.errors import BadOption, UnknownTarget


@pytest.mark.parametrize("name", list(target.TABLE))
def test_rows_make_sense(name: str) -> None:
    t = target.find(name.upper())
    assert t.name == name
    assert (t.kind == "cuda") == (t.capability is not None)
    assert t.memory > t.l2 > t.smem_per_sm > 0
    assert t.bandwidth >= t.link > 0
    assert t.peak["fp64"] <= t.peak["fp32"] <= t.peak["tf32"] <= t.peak["bf16"] == t.peak["fp16"]
    assert ("fp8" in t.peak) == ("fp8" in t.features)
    assert isinstance(hash(t), int)


def test_rates_are_dense() -> None:
    assert target.find("h100").peak["bf16"] == 989e12
    assert target.find("h100").peak["fp8"] == 1979e12
    assert target.find("a100").peak["bf16"] == 312e12


def test_unknown_name_suggests() -> None:
    with pytest.raises(UnknownTarget, match="'A1000' is not a target that dsc knows; did you mean 'a100'"):
        target.find("A1000")


def test_cpu_device() -> None:
    assert target.for_device(torch.device("cpu")) is target.find("cpu")


def test_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadOption, match="'target' cannot be None; give a name, since cuda:0 is not on this machine"):
        target.for_device(torch.device("cuda:0"))


def card(monkeypatch: pytest.MonkeyPatch, name: str, memory: float, major: int, sms: int) -> target.Target:
    props = SimpleNamespace(
        name=name, total_memory=int(memory), major=major, minor=0, multi_processor_count=sms, L2_cache_size=2**20
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: props)
    return target.for_device(torch.device("cuda:0"))


@pytest.mark.parametrize(
    ("name", "memory", "row"),
    [
        ("NVIDIA A100-SXM4-40GB", 42.3e9, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 85.1e9, "a100"),
        ("NVIDIA H100 80GB HBM3", 85.0e9, "h100"),
        ("NVIDIA H100 PCIe", 85.0e9, "h100-pcie"),
        ("NVIDIA H200", 150e9, "h200"),
    ],
)
def test_known_cards(monkeypatch: pytest.MonkeyPatch, name: str, memory: float, row: str) -> None:
    t = card(monkeypatch, name, memory, 9, 132)
    assert (t.name, t.memory) == (row, int(memory))


def test_other_cards_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    t = card(monkeypatch, "NVIDIA A10", 24e9, 8, 54)
    assert (t.name, t.capability, t.peak["bf16"]) == ("NVIDIA A10", (8, 0), 156e12)
    assert card(monkeypatch, "Tesla V100", 16e9, 7, 80).features == frozenset()
