"""Sums over sub-layers, graph walks and call notes of the compiled kernel, against torch and Python."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope import kernel, kernel_calls, kernel_residuals
from keelscope.ears import Ears
from keelscope.errors import RecordingWarning
from keelscope.models import build
from keelscope.paths import PathFlow
from keelscope.probe import resolve_probes
from keelscope.topology.graph import Graph
from keelscope.topology.imprint import Imprint
from keelscope.topology.listener import Listener
from keelscope.topology.reader import GraphReader
from keelscope.topology.recipes import Kept, Order, Recipe
from keelscope_probes.sublayers import RESIDUAL_GAINS, RESIDUAL_GRADIENTS, RESIDUAL_SUMS

pytestmark = pytest.mark.skipif(not kernel.is_compiled(), reason="the kernel is not built")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", [nn.Identity(), nn.LayerNorm(33)])
@pytest.mark.parametrize("weight", [1.0, 1000.0])
def test_sums_and_gains(dtype, norm, weight):
    x, f = drawn(5, 7, 33, dtype=dtype), drawn(5, 7, 33, seed=1, dtype=dtype) * 1e-3
    f[0, 0, :5], x[0, 1, 3] = 0, torch.inf
    for tensors in ((x, x, f), (x, weight * x, f), (x[1:], weight * x[1:], f[1:])):
        for probe in (RESIDUAL_SUMS, RESIDUAL_GAINS):
            view, terms = probe.view(tensors, norm.to(dtype)), probe.statistics[0].terms
            packed = np.frombuffer(terms.packs(*view))
            assert packed.tolist() == pytest.approx(terms.of(*view).tolist(), rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("odd", ["bfloat16", "not contiguous", "of two sizes"])
def test_other_operands_are_left_to_torch(odd):
    x, f = drawn(4, 6), drawn(4, 6, seed=1)
    x, f = {
        "bfloat16": (x.bfloat16(), f.bfloat16()),
        "not contiguous": (x.T, f.T),
        "of two sizes": (x, f[:2]),
    }[odd]
    assert kernel_residuals.residual_sums(x, x, f, torch.ones(4, dtype=torch.float64)) is None


def test_gradients():
    terms = RESIDUAL_GRADIENTS.statistics[0].terms
    g = [drawn(3, 50, seed=seed) for seed in range(6)]
    for six in (g, [g[0], g[0], *g[2:]], [torch.empty(0), torch.empty(0), *g[2:5], torch.empty(0)]):
        packed = np.frombuffer(terms.packs(*six))
        assert packed.tolist() == pytest.approx(terms.of(*six).tolist(), rel=1e-12)
    assert terms.packs(*g[:3], torch.zeros(()).expand(3, 50), *g[4:]) is None


def noted(model: nn.Module, x: torch.Tensor) -> Listener:
    listener = Listener(keep=True)
    listener.limit(9, frozenset())

    def after(path: str):
        def ended(module: nn.Module, args: object, output: object) -> None:
            if not listener.hear(path, module, args, ({}, output)):
                listener.after(path, module, (args, {}), output)

        return ended

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            before = module.register_forward_pre_hook(lambda _module, _args, path=path: listener.before(path))
            hooks.callback(before.remove)
            hooks.callback(module.register_forward_hook(after(path)).remove)
        model(x)
    return listener


def test_a_walk_beside_a_known_graph(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    first, again, other = (
        noted(model, torch.ones(2, 4)),
        noted(model, torch.zeros(3, 4)),
        noted(model[:2], torch.ones(2, 4)),
    )
    graph, _ = first.graph()
    imprint = Imprint(graph, first)
    nodes = imprint.nodes_of(again)
    assert nodes == Graph([again.nodes[-1], *again.nodes]).nodes
    assert imprint.nodes_of(other) is None
    monkeypatch.setattr(kernel, "_native", None)
    assert imprint.nodes_of(again) == nodes
    assert imprint.nodes_of(other) is None


def test_what_meets_in_plain_sums():
    keys = [(place, 0) for place in range(5)]
    tensors = [drawn(2, 3), drawn(2, 3, seed=1), drawn(3, 2), drawn(2, 3).double(), drawn(2, 3, seed=2)]
    kept = Kept(Order(keys), tensors)
    assert dict(kept) == dict(zip(keys, tensors, strict=True))
    recipes = [
        Recipe(keys[0], dtype, ((),), tuple((key, ()) for key in branch), (9, 0))
        for dtype, *branch in (
            (torch.float32, keys[1]),
            (torch.float32, keys[2]),
            (torch.float32, keys[3]),
            (torch.float64, keys[1]),
            (torch.float32, keys[1], keys[4]),
            (torch.float32, (7, 0)),
        )
    ]
    found = kept.plain([*recipes, None])
    assert [x is not None for x in found] == [True] + [False] * 6
    assert all(one is other for one, other in zip(found[0], recipes[0].operands(kept, lambda _: 1.0), strict=True))
    assert found[0].branch is tensors[1]


@pytest.mark.parametrize("native", [True, False])
def test_kept_tensors_are_those_that_nobody_has_written_into(native, monkeypatch):
    if not native:
        monkeypatch.setattr(kernel, "_native", None)
    tensors = [drawn(2), drawn(3), None, drawn(4)]
    versions = [0 if tensor is None else tensor._version for tensor in tensors]

    def taken(*positions: int) -> list[torch.Tensor] | None:
        return kernel_calls.kept_tensors(tensors, versions, np.array(positions, np.int32).tobytes())

    first, last = taken(0, 3)
    assert first is tensors[0]
    assert last is tensors[3]
    assert taken(0, 2) is None
    tensors[3].add_(1)
    assert taken(0, 3) is None
    assert taken(1)[0] is tensors[1]


def test_shapes_are_told_from_what_was_heard_while_nobody_has_written_into_it():
    x = torch.ones(2, 3, requires_grad=True) * 2
    nodes, heard = [x.grad_fn], ([x], [x._version])
    wanted = [
        (0, 0, shape, dtype) for shape in ((2, 3), (3, 2), None) for dtype in (torch.float32, torch.float64, None)
    ]
    others = [1, 3, 4, 5, 7]
    for at in (0, -1):
        assert kernel_calls.other_tensors(nodes, wanted, heard, np.full(9, at, np.int32).tobytes()) == others
    x.t_()
    assert kernel_calls.other_tensors(nodes, wanted, heard, np.zeros(9, np.int32).tobytes()) == others
    with pytest.raises(ValueError, match="as many positions"):
        kernel_calls.other_tensors(nodes, wanted, heard, b"")


@pytest.mark.parametrize("native", [True, False])
def test_calls_are_noted_alike(native, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Identity()))
    expected = noted(model, torch.ones(2, 4))
    if not native:
        monkeypatch.setattr(kernel, "_native", None)
    found = noted(model, torch.ones(2, 4))
    start = found.rows[0][2][1] - expected.rows[0][2][1]
    assert [row[:2] + row[3:] for row in found.rows] == [row[:2] + row[3:] for row in expected.rows]
    assert [(a - start, b - start) for _, _, (a, b), *_ in found.rows] == [row[2] for row in expected.rows]
    assert [node.name() for node in found.nodes] == [node.name() for node in expected.nodes]
    assert found.slots == expected.slots


@pytest.mark.parametrize("native", [True, False])
def test_hooks_are_put_on_and_taken_off(native, monkeypatch):
    if not native:
        monkeypatch.setattr(kernel, "_native", None)
    module = nn.Linear(2, 2)
    ears = Ears([("a", module)], lambda: None)
    for on in (False, False, True, True, False):
        ears.hang(on=on)
        kept = module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_with_kwargs
        assert [len(hooks) for hooks in kept] == [int(on)] * 3
    assert not ears.refused()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_module_without_hooks_is_left_alone():
    scripted, bare = torch.jit.script(nn.Linear(2, 2)), object.__new__(nn.Linear)
    ears = Ears([("a", scripted), ("b", bare)], lambda: None)
    ears.hang(on=True)
    ears.take_off()
    assert ears.refused() == {id(scripted), id(bare)}


def stepped(scheme: str) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    model = build(scheme, depth=4, width=8, heads=2, vocabulary=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probes = [replace(probe, every=1) for probe in resolve_probes("sublayers")]
    with ks.watch(model, optimizer=optimizer, probes=probes) as watch:
        for _ in range(3):
            model(torch.arange(12).reshape(2, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {key: watch.run.read(key).values for key in list(watch.run.keys()) if key.startswith("sublayers/")}


@pytest.mark.parametrize("scheme", ["pre_ln", "post_ln", "keel"])
def test_gradients_added_up_here_and_in_python(scheme, monkeypatch):
    """Also where a hop is left to Python, as every norm on a sum is."""
    found = stepped(scheme)
    monkeypatch.setattr(kernel, "_native", None)
    expected = stepped(scheme)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert np.isfinite(found[key]).any(), key
        assert found[key] == pytest.approx(values, rel=1e-6, abs=1e-12, nan_ok=True), key


def watched_graph(depth: int) -> tuple[PathFlow, torch.Tensor, list[int]]:
    model, reported = build("pre_ln", depth=depth, width=8, heads=2, vocabulary=20), []
    reader = GraphReader(model, keep=True)
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            call = module.register_forward_hook(
                lambda module, args, output, path=path: reader.on_module(path, module, args, output)
            )
            hooks.callback(call.remove)
        loss = model(torch.arange(12).reshape(2, 6)).square().mean()
    reader.read(loss)
    flow = PathFlow(reader.live, lambda index, _: reported.append(index), sums=True)
    flow.attach()
    return flow, loss, reported


def test_sums_are_taken_once_and_no_hook_is_left():
    flow, loss, reported = watched_graph(6)
    loss.backward(retain_graph=True)
    seen, rows = flow.taken()
    assert len(seen) == 6
    assert sorted([*np.flatnonzero(seen), *reported]) == list(range(6))
    assert seen[1:].all()
    assert (rows[1:, :6] > 0).all()
    flow.detach()
    before, reported[:] = flow.taken()[1].copy(), []
    loss.backward()
    assert np.array_equal(flow.taken()[1], before)
    assert reported == []


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_an_error_inside_a_hook_is_said_and_training_goes_on(monkeypatch):
    flow, loss, _ = watched_graph(4)

    def fail(*_: object) -> None:
        raise ValueError("spoiled")

    monkeypatch.setattr(flow, "_report", fail)
    monkeypatch.setattr(torch.Tensor, "detach", fail)
    with pytest.warns(RecordingWarning, match="spoiled"):  # gradients in a graph are detached
        loss.backward(create_graph=True)
    monkeypatch.undo()
    flow.detach()
