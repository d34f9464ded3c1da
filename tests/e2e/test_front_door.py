"""What a user does with torch.compile(model, backend="dsc"): every way in, beside eager."""

from __future__ import annotations

import copy
import gc
import os
import stat
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dsc import kernels
from dsc.codegen import build
from dsc.codegen.builder import Unlowerable
from dsc.errors import BadOption, DscWarning, UnknownFormat, UnknownOption, UnknownPass, UnknownTarget

compile = partial(torch.compile, backend="dsc")


@pytest.fixture(autouse=True)
def _own_graphs() -> Iterator[None]:
    """A fall back to eager or to ATen is a failure, except where a test asks for it."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", DscWarning)
        yield


class Net(nn.Module):
    """One of each: a product, a norm, an activation, dropout, a loss."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.gelu(self.norm(self.first(x))), self.p, self.training)
        return F.log_softmax(self.last(h), -1).square().sum()


def net(p: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(p)


def data(rows: int = 6, columns: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def gradients(m: nn.Module) -> dict[str, Tensor | None]:
    return {n.replace("_orig_mod.", ""): p.grad for n, p in m.named_parameters()}


def train(m: nn.Module, call: Callable[..., Tensor], *inputs: Tensor, seed: int = 3) -> tuple[Any, ...]:
    """One step: loss, gradients, state of the generator."""
    m.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = call(*inputs)
    loss.backward()
    return loss.detach(), {n: g.clone() for n, g in gradients(m).items() if g is not None}, torch.get_rng_state()


def same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def warned(f: Callable[[], Any]) -> tuple[Any, list[str]]:
    """The result, and what DscWarnings said, as a user sees them: each text once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", DscWarning)
        out = f()
    return out, [str(w.message) for w in caught if issubclass(w.category, DscWarning)]


def root(e: BaseException, kind: type[BaseException]) -> BaseException | None:
    """The error of that kind in the chain that Dynamo puts around what a backend raises."""
    found: BaseException | None = e
    while found is not None and not isinstance(found, kind):
        found = getattr(found, "inner_exception", None) or found.__cause__
    return found


# Options and modes.


def test_by_name_without_import() -> None:
    code = (
        "import torch, sys; assert not any(m.split('.')[0] == 'dsc' for m in sys.modules);"
        "f = torch.compile(lambda x: torch.relu(x) * 2 + 1, backend='dsc');"
        "assert torch.equal(f(torch.arange(-3., 4.)), torch.relu(torch.arange(-3., 4.)) * 2 + 1);"
        "assert 'dsc.backend' in sys.modules; assert 'dsc' in torch._dynamo.list_backends()"
    )
    subprocess.run([sys.executable, "-W", "error::UserWarning:dsc", "-c", code], check=True, timeout=100)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"numeric": "fast"}, UnknownOption, "did you mean 'numerics'"),
        ({"emit": "rust"}, BadOption, "Option 'emit' cannot be 'rust'"),
        ({"verify": "yes"}, BadOption, "True or False"),
        ({"precision": "bf17"}, UnknownFormat, "did you mean .bf16"),
        ({"sparsity": "4:2"}, BadOption, "N:M with N < M"),
        ({"target": "h10"}, UnknownTarget, "did you mean 'h10"),
        ({"passes": "canonicalise"}, UnknownPass, "did you mean 'canonicalize'"),
    ],
)
def test_wrong_options_raise(options: dict[str, object], kind: type[Exception], words: str) -> None:
    with pytest.raises(Exception, match=words) as raised:
        compile(lambda x: x + 1, options=options)(data())
    assert root(raised.value, kind) is not None


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_modes(mode: str) -> None:
    m = net()
    same(compile(m, mode=mode)(data()), m(data()))


def test_reports_reach_the_caller() -> None:
    seen: list[Any] = []
    m = net()
    train(m, compile(m, options={"on_compile": seen.append}), data())
    assert [c.kind for c in seen] == ["forward", "backward"]
    assert all(c.numbers["kernels"] > 0 for c in seen)


# Sizes and graphs.


@pytest.mark.parametrize("dynamic", [True, None])
def test_sizes_change(dynamic: bool | None) -> None:
    m = net()
    f = compile(m, dynamic=dynamic, fullgraph=True)
    for rows in (2, 1, 13, 700, 2):
        same(train(m, f, data(rows)), train(m, m, data(rows)))


def test_sizes_that_data_decides() -> None:
    def f(x: Tensor, m: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        rows = m.nonzero().squeeze(1)
        y = F.gelu(x[rows] @ w) @ w
        return torch.zeros_like(x).index_add(0, rows, y.exp()).sum(), y * 2

    w = (data(8) * 0.3).requires_grad_()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        g = compile(f, fullgraph=True)
        for chosen in (5, 12, 0, 1):
            x, m = data(12).requires_grad_(), (torch.arange(12) < chosen).float()
            a, b = f(x, m, w), g(x, m, w)
            same(b, a)
            same(*(torch.autograd.grad(o[0] + o[1].sum(), [x, w]) for o in (b, a)))


def test_graph_breaks() -> None:
    def f(x: Tensor) -> Tensor:
        y = torch.sigmoid(x) * 2
        torch._dynamo.graph_break()
        return (y.tanh() + x).sum()

    x = data().requires_grad_()
    (a,), (b,) = torch.autograd.grad(f(x), x), torch.autograd.grad(compile(f)(x), x)
    same(b, a)


# Modes of autograd.


def test_no_grad_and_inference_in_turn() -> None:
    """Memory that a program keeps must serve inside and outside of inference mode."""
    m = net()
    f = compile(m)
    with torch.inference_mode():
        same(f(data()), m(data()))
    same(train(m, f, data()), train(m, m, data()))
    with torch.no_grad():
        assert not f(data()).requires_grad
    with torch.inference_mode():
        out = f(data())
        assert out.is_inference()
        same(out, m(data()))
    same(train(m, f, data()), train(m, m, data()))


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside: bool) -> None:
    m = net()

    def f(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return m(x)

    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        loss, expected, _ = train(m, f, data())
        other, got, _ = train(m, compile(f), data())
    torch.testing.assert_close(other, loss, rtol=2e-2, atol=2e-2)
    for name, g in expected.items():
        assert got[name].dtype == g.dtype
        torch.testing.assert_close(got[name], g, rtol=5e-2, atol=2e-2 * float(g.abs().max()))


def save_products(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_checkpoint(p: float, selective: bool) -> None:
    m = net(p)
    extra = {"context_fn": partial(create_selective_checkpoint_contexts, save_products)} if selective else {}

    def f(x: Tensor) -> Tensor:
        y = checkpoint(m.first, x, use_reentrant=False, **extra)
        z = checkpoint(lambda v: F.dropout(m.norm(v).sigmoid(), m.p), y, use_reentrant=False, **extra)
        again = checkpoint(lambda v: F.dropout(v * 2, m.p), z, use_reentrant=False, **extra)
        return (m.last(again).square() + F.dropout(x, m.p).sum()).sum()

    same(train(m, compile(f), data()), train(m, f, data()))


def test_distributed_data_parallel(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        m = net()
        expected = train(m, m, data())
        wrapped = nn.parallel.DistributedDataParallel(m)
        same(train(m, compile(wrapped), data()), expected)
    finally:
        torch.distributed.destroy_process_group()


# Training.

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@pytest.mark.parametrize("tensor_rate", [False, True])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_optimizer_step(name: str, tensor_rate: bool) -> None:
    """The learning rate changes between steps, as under a schedule: no step may use an old one."""

    def run(wrap: Callable[..., Any]) -> list[Tensor]:
        m = net()
        o = OPTIMIZERS[name](m.parameters(), lr=torch.tensor(1e-2) if tensor_rate else 1e-2)
        step = wrap(o.step)
        for i in range(4):
            train(m, m, data(seed=i))
            for group in o.param_groups:
                rate = 1e-2 / (i + 1)
                group["lr"] = group["lr"].fill_(rate) if tensor_rate else rate
            step()
        return [p.detach() for p in m.parameters()]

    same(run(compile), run(lambda f: f))


def test_accumulated_gradients() -> None:
    def run(wrap: Callable[..., Any]) -> dict[str, Tensor | None]:
        m = net()
        f = wrap(m)
        for i in range(3):
            (f(data(seed=i)) / 3).backward()
        return gradients(m)

    same(run(compile), run(lambda m: m))


@pytest.mark.parametrize("kept", [False, True], ids=["lazy backward", "kept on disk"])
@pytest.mark.parametrize("first", [False, True], ids=["at once", "after a step"])
def test_backward_twice(kept: bool, first: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Graphs that are kept on disk have their backward compiled with the forward, before anyone asks to retain it."""
    monkeypatch.setenv("DSC_CACHE", str(int(kept)))
    monkeypatch.setenv("DSC_CACHE_DIR", str(tmp_path))
    m = net(0.3)

    def run(f: Any) -> dict[str, Tensor | None]:
        if first:
            f(data()).backward()
        m.zero_grad()
        torch.manual_seed(0)
        loss = f(data())
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return {n: g.clone() for n, g in gradients(m).items() if g is not None}

    same(run(compile(m)), run(m))


def test_double_backward_says_so() -> None:
    x = data().requires_grad_()
    (g,) = torch.autograd.grad(compile(lambda v: v.sin().sum())(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        g.sum().backward()


def test_eval_and_train_again() -> None:
    m = net(0.5)
    f = compile(m)
    for mode in (True, False, True):
        m.train(mode)
        same(train(m, f, data()), train(m, m, data()))


def test_hooks() -> None:
    m = net()
    seen: list[float] = []
    m.norm.register_forward_hook(lambda mod, args, out: out * 2)
    m.first.weight.register_hook(lambda g: g * 3)
    m.register_full_backward_hook(lambda mod, gi, go: seen.append(float(go[0])))
    same(train(m, compile(m), data()), train(m, m, data()))
    assert seen == [1.0, 1.0]


def test_unused_parameter_and_input() -> None:
    m = net()
    m.extra = nn.Parameter(torch.ones(3))
    x, unused = data().requires_grad_(), data().requires_grad_()
    compile(lambda a, b: m(a))(x, unused).backward()
    assert m.extra.grad is None
    assert unused.grad is None
    assert x.grad is not None


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids: Tensor) -> Tensor:
            return F.cross_entropy(self.head(torch.tanh(self.words(ids))), ids)

    torch.manual_seed(0)
    m = Tied()
    ids = torch.randint(11, (9,))
    same(train(m, compile(m), ids), train(m, m, ids))


def test_random_numbers_go_on_as_in_eager() -> None:
    def f(x: Tensor) -> Tensor:
        y = F.dropout(x, 0.3) + torch.rand_like(x)
        return F.dropout(y * torch.randn(8), 0.7).sin() + torch.bernoulli(torch.full_like(x, 0.5))

    outs = []
    for g in (f, compile(f)):
        torch.manual_seed(5)
        outs.append((g(data()), g(data()), torch.rand(3), torch.get_rng_state()))
    same(outs[1], outs[0])


def test_deterministic_mode() -> None:
    m = net()
    torch.use_deterministic_algorithms(True)
    try:
        f = compile(m)
        first = train(m, f, data())
        same(first, train(m, m, data()))
        again = train(m, f, data())
        assert torch.equal(first[0], again[0])
        assert all(torch.equal(first[1][n], again[1][n]) for n in first[1])
    finally:
        torch.use_deterministic_algorithms(False)


# Mutation and aliasing.


def test_writes_to_inputs() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2).add_(y)
        y[1:3] = x[0]
        return x.sin() + y

    pairs = [(data(), data(seed=1)) for _ in range(2)]
    outs = [g(*p) for g, p in zip((f, compile(f)), pairs)]
    same((outs[1], *pairs[1]), (outs[0], *pairs[0]))


def test_running_statistics() -> None:
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 1))
    twin = copy.deepcopy(m)
    f = compile(twin)
    for i in range(3):
        x = torch.randn(5, 3, 6, 6, generator=torch.Generator().manual_seed(i))
        same(train(twin, lambda v: f(v).sum(), x), train(m, lambda v: m(v).sum(), x))
        same(dict(twin.named_buffers()), dict(m.named_buffers()))
    same(f.eval()(x), m.eval()(x))


def test_outputs_that_are_inputs_or_views() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x.exp()
        return x, x.view(-1), x.t(), y, y[1:], y.t(), x.detach()

    x = data()
    got, expected = compile(f)(x), f(x)
    assert got[0] is x
    for a, b in zip(got, expected):
        same(a, b)
        assert a.stride() == b.stride()
        assert a.storage_offset() == b.storage_offset()
    kept = [
        [a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a in o for b in o]
        for o in (got, expected)
    ]
    assert kept[0] == kept[1]
    got[3].zero_()
    assert not got[4].any()


def test_results_are_not_reused_memory() -> None:
    m = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())
    f = compile(m)
    first = f(data(seed=1))
    kept = first.detach().clone()
    for i in range(4):
        f(data(seed=i)).sum().backward()
    assert torch.equal(first, kept)


# Threads, re-entrancy, lifetimes.


def test_two_threads_call_at_once() -> None:
    m = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Softmax(-1)).requires_grad_(
        False
    )
    f = compile(m)
    inputs = [data(300, 64, seed=i) for i in range(2)]
    expected = [m(x) for x in inputs]
    f(inputs[0])
    wrong: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(30):
                same(f(inputs[i]), expected[i])
        except BaseException as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_called_in_its_own_backward() -> None:
    m = net()
    f = compile(m)
    expected = train(m, m, data())
    inner: list[Tensor] = []

    def call_again(g: Tensor) -> None:
        with torch.enable_grad():
            x = data(seed=9).requires_grad_()
            inner.extend(torch.autograd.grad(f(x), x))

    handle = m.last.weight.register_hook(call_again)
    got = train(m, f, data())
    handle.remove()
    same(got, expected)
    x = data(seed=9).requires_grad_()
    same(inner, list(torch.autograd.grad(m(x), x)))


def test_saved_values_die_in_the_backward() -> None:
    """What only the first half of the backward reads is gone before the second half's hook runs."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 4096), nn.Linear(4096, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x))).square().sum()

    m = Block()
    f = compile(m)
    for _ in range(2):
        loss = f(data())
        saved = [weakref.ref(t) for t in loss.grad_fn.saved_tensors if t.shape == (6, 4096)]  # type: ignore[union-attr]
        assert saved
        loss.backward()
        del loss
        gc.collect()
        assert not any(r() is not None for r in saved)


def test_inputs_of_a_program_are_taken_from_its_list() -> None:
    lists: list[Any] = []

    def spy(load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(*args: Any) -> Any:
            call = load(*args)

            def boxed(inputs: list[Any]) -> Any:
                lists.append(inputs)
                return call(inputs)

            boxed._boxed_call = True  # type: ignore[attr-defined]
            return boxed

        return loaded

    from dsc.runtime import run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "load", spy(run.load))
        m = net()
        train(m, compile(m), data())
    assert len(lists) == 2
    assert all(x == [] for x in lists)


# What goes wrong around it.


@pytest.mark.parametrize("how", ["option", "path"])
def test_no_compiler(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "path":
        monkeypatch.setenv("PATH", "")
    m = net()
    expected = train(m, m, data())
    options = {"cxx": "/nonexistent/g++"} if how == "option" else {}
    got, said = warned(lambda: train(m, compile(m, options=options), data()))
    same(got, expected)
    assert len(said) == 1
    assert "install g++ or clang++" in said[0]
    assert how == "path" or "tried /nonexistent/g++" in said[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    check_refused(tmp_path / "cache", "cannot be used")


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    check_refused(tmp_path / "cache", "cannot be used")


def test_folder_that_others_can_write(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO)
    check_refused(folder, "others can write")
    assert not list(folder.iterdir())


def check_refused(folder: Path, words: str) -> None:
    m = net()
    expected = train(m, m, data())
    got, said = warned(lambda: train(m, compile(m, options={"cache_dir": str(folder)}), data()))
    same(got, expected)
    assert len(said) == 1
    assert words in said[0]
    assert "options={'cache_dir': ...}" in said[0]


def test_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise build.CompileFailed("kernels.cpp:3: error: expected ';'")

    monkeypatch.setattr(build, "build", refuse)
    m = net(0.3)
    expected = train(m, m, data())
    got, said = warned(lambda: train(m, compile(m), data()))
    same(got, expected)
    assert [s.split()[1] for s in said] == ["forward", "backward"]
    assert all("expected ';'" in s and "runs on ATen" in s for s in said)


def test_every_kernel_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsc import bind

    def refuse(*args: object) -> None:
        raise Unlowerable("no")

    monkeypatch.setattr(bind, "lower", refuse)
    seen: list[Any] = []
    m = net(0.3)
    same(train(m, compile(m, options={"on_compile": seen.append}), data()), train(m, m, data()))
    for c in seen:
        assert c.numbers["kernels"] == 0
        assert any(
            "stay with ATen: no" in r.why for name, report in c.reports if name == "link" for r in report.remarks
        )


@pytest.mark.parametrize("stage", ["joint", "graph"])
def test_pass_that_fails(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has broken the graph by then: the graph from before must run."""
    from dsc import passlist

    victim = passlist.JOINT[0] if stage == "joint" else passlist.GRAPH[-1]

    def fail(self: object, gm: Any, target: object) -> None:
        output = gm.graph.output_node()
        output.args = (tuple(None for _ in output.args[0]),)
        raise ValueError("boom")

    monkeypatch.setattr(type(victim), "run", fail)
    m = net()
    expected = train(m, m, data())
    got, said = warned(lambda: train(m, compile(m), data()))
    same(got, expected)
    assert said
    assert all("boom" in s and "please report it" in s for s in said)


# What AOTAutograd cannot do, or does wrongly.


def untraceable(x: Tensor, w: Tensor) -> Tensor:
    with torch.inference_mode():
        return (x.detach() @ w.detach()).view(-1).clone()


def margin(x: Tensor) -> Tensor:
    targets = torch.tensor([[0, 3, -1, -1, -1, -1, -1, -1], [-1, 0, 0, 0, 0, 0, 0, 0]])
    return F.multilabel_margin_loss(x[:2], targets)


def shrink(x: Tensor) -> Tensor:
    return F.softshrink(torch.where(x > 1, torch.nan, x)).nansum()


@pytest.mark.parametrize("f", [margin, shrink, lambda x: F.dropout(x, 1.0).sum() + torch.rand(())])
def test_traps_run_in_eager(f: Callable[[Tensor], Tensor]) -> None:
    def run(g: Callable[[Tensor], Tensor]) -> Any:
        torch.manual_seed(0)
        x = data().requires_grad_()
        y = g(x)
        return y, torch.autograd.grad(y, x), torch.get_rng_state()

    got, said = warned(lambda: run(compile(f)))
    torch.testing.assert_close(got, run(f), equal_nan=True)
    assert len(said) == 1
    assert "One graph runs in eager" in said[0]


def test_untraceable_runs_in_eager() -> None:
    got, said = warned(lambda: compile(untraceable)(data(), data(8)))
    assert torch.equal(got, untraceable(data(), data(8)))
    assert len(said) == 1
    assert "AOTAutograd raised" in said[0]


def test_symbolic_dropout_rates_stay_compiled() -> None:
    f = compile(lambda x, p: F.dropout(x, p, True).sum(), dynamic=True)
    for p in (0.2, 0.7):
        torch.manual_seed(0)
        got = f(data(), p)
        torch.manual_seed(0)
        same(got, F.dropout(data(), p, True).sum())


def test_errors_of_the_model_are_those_of_eager() -> None:
    def shapes(x: Tensor) -> Tensor:
        return x @ x

    def late(x: Tensor, ids: Tensor) -> Tensor:
        return F.embedding(ids, x).sum()

    for f, inputs in ((shapes, (data(),)), (late, (data(), torch.tensor([99])))):
        with pytest.raises(Exception) as expected:  # noqa: PT011
            f(*inputs)  # type: ignore[operator]
        with pytest.raises(type(expected.value)):
            compile(f)(*inputs)


def test_emitter_says_what_kernels_need() -> None:
    from dsc.options import Options

    assert kernels.emitter(Options(), torch.device("cpu")) == "cpp"
    assert kernels.emitter(Options(emit="aten"), torch.device("cpu")) == "aten"
