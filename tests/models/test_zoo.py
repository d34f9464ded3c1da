"""Every tiny model learns, compiles, and is the same for the same seed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from dsc.models.zoo import ZOO, UnknownModel, load

TINY = [name for name in ZOO if name.endswith("-tiny")]
SEQUENCES = ("gpt-tiny", "llama-tiny", "bert-tiny", "moe-tiny", "encdec-tiny")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def loss_and_gradients(model: nn.Module, call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    model.zero_grad()
    loss = call(*inputs)
    torch.autograd.backward(loss)
    result = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        result[name] = parameter.grad
    return result


def test_each_family_has_a_tiny_and_a_realistic_model() -> None:
    families = {"mlp", "convnet", "gpt", "llama", "bert", "vit", "resnet", "moe", "encdec", "uvit"}
    assert set(ZOO) == families | {f"{family}-tiny" for family in families} | {"gpt-bytes"}
    assert all(entry.name == name and entry.description for name, entry in ZOO.items())


@pytest.mark.parametrize("name", TINY)
def test_one_step_lowers_the_loss(name: str) -> None:
    model, inputs = ZOO[name].build(), ZOO[name].inputs()
    before = loss_and_gradients(model, model, inputs)
    assert before["loss"].shape == ()
    assert all(value.isfinite().all() for value in before.values())
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    assert model(*inputs) < before["loss"]


@pytest.mark.parametrize("name", TINY)
def test_equal_seeds_give_equal_models_and_inputs(name: str) -> None:
    entry = ZOO[name]
    state = torch.random.get_rng_state()
    first, second, other = entry.build(1), entry.build(1), entry.build(2)
    assert torch.equal(state, torch.random.get_rng_state()), "building a model moved the global random state"
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(entry.inputs(seed=1), entry.inputs(seed=1), rtol=0, atol=0)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters()))
    assert not torch.equal(entry.inputs(seed=1)[0], entry.inputs(seed=2)[0])


@pytest.mark.parametrize("name", TINY)
def test_one_graph_serves_every_batch_and_length(name: str) -> None:
    eager = ZOO[name].build()
    model = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    calls = [ZOO[name].inputs(batch) for batch in (5, 7)]
    if name in SEQUENCES:
        calls.append(tuple(tensor[:, :11].contiguous() for tensor in calls[0]))
    for tensor in calls[0]:
        torch._dynamo.mark_dynamic(tensor, [0, 1] if name in SEQUENCES else 0)
    for inputs in calls:
        expected = loss_and_gradients(eager, eager, inputs)
        torch.testing.assert_close(loss_and_gradients(model, compiled, inputs), expected)
    assert len(counter.graphs) == 1


@pytest.mark.parametrize("name", SEQUENCES)
def test_too_long_a_sequence_is_refused(name: str) -> None:
    inputs = tuple(torch.cat((tensor, tensor), dim=1) for tensor in ZOO[name].inputs())
    with pytest.raises(ValueError, match="32 tokens is longer than max_length=16"):
        ZOO[name].build()(*inputs)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "moe-tiny"])
def test_decoders_do_not_see_the_future(name: str) -> None:
    model, (idx, targets) = ZOO[name].build().eval(), ZOO[name].inputs()
    model.balance = 0.0  # type: ignore[assignment]  # the load-balancing loss looks at all tokens
    later = idx.clone()
    later[:, -1] = (later[:, -1] + 1) % 64
    targets[:, -1] = -100
    torch.testing.assert_close(model(idx, targets), model(later, targets))


def test_bert_does_not_see_padding() -> None:
    model, (idx, mask, targets) = ZOO["bert-tiny"].build().eval(), ZOO["bert-tiny"].inputs(4)
    assert not mask.all()
    torch.testing.assert_close(model(idx, mask, targets), model(idx.masked_fill(~mask, 7), mask, targets))


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownModel, match=r"no model is named 'lama'; did you mean 'llama'\?") as caught:
        load("lama")
    assert isinstance(caught.value, KeyError)
    assert load("llama") is ZOO["llama"]
