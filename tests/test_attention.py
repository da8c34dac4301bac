"""Looking at attention changes nothing and leaves nothing behind, whatever happens in the forward."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import keelscope as ks
from keelscope.attention import AttentionMode, OpenModule, attention_scores, scores_seen
from keelscope.errors import RecordingWarning
from keelscope.models import build


class Block(nn.Module):
    """A residual attention block with dropout in and after attention."""

    def __init__(self, width: int = 16, heads: int = 4, run=None) -> None:
        super().__init__()
        self.norm, self.joint, self.output = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.run = heads, run or (lambda attend, x: attend(x))
        self.fused = True

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.joint(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2 * self.training)
        else:
            mixed = F.dropout((q @ k.mT / 2).softmax(-1), 0.2, self.training) @ v
        return self.output(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.run(self.attend, x), 0.1, self.training)


def blocks(depth: int = 3, run=None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(run=run) for _ in range(depth)])


def batch(step: int = 0) -> Tensor:
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, *, watched: bool = True, steps: int = 4, **options) -> tuple[list[object], ks.Watch | None]:
    """Losses, weights and random state at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watch = ks.watch(model, optimizer=optimizer, **options) if watched else None
    torch.manual_seed(1)
    losses: list[object] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecordingWarning)
        warnings.filterwarnings("ignore", message=".*non-leaf Tensor.*")  # torch.compile's own doing
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(batch(step).requires_grad_()).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if watch is not None:
            watch.close()
    weights = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return [*losses, *weights, torch.get_rng_state().numpy().tobytes()], watch


def entropies(watch: ks.Watch) -> np.ndarray:
    return watch.run["attention/entropy"].values


def probes() -> list[object]:
    """The probe on every recorded step."""
    from dataclasses import replace

    from keelscope_probes.attention import ATTENTION

    return ["default", "tokens", replace(ATTENTION, every=1)]


def wrapped(kind: str):
    """Ways to run a part of the forward that is repeated in backward."""
    if kind == "plain":
        return None
    if kind == "selective":
        policy = {torch.ops.aten.bmm.default, torch.ops.aten.mm.default, torch.ops.aten._softmax.default}
        contexts = partial(
            create_selective_checkpoint_contexts,
            lambda _ctx, op, *_a, **_k: (
                CheckpointPolicy.MUST_SAVE if op in policy else CheckpointPolicy.PREFER_RECOMPUTE
            ),
        )
        return lambda attend, x: checkpoint(attend, x, use_reentrant=False, context_fn=contexts)
    return lambda attend, x: checkpoint(attend, x, use_reentrant=kind == "reentrant")


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "eager"])
@pytest.mark.parametrize("kind", ["plain", "reentrant", "non-reentrant", "selective"])
def test_training_is_bit_identical(kind, fused):
    results = []
    for watched in (False, True):
        model = blocks(run=wrapped(kind))
        for block in model:
            block.fused = fused
        results.append(train(model, watched=watched, probes=probes()))
    (alone, _), (watched, watch) = results
    assert watched == alone
    assert np.isfinite(entropies(watch)).all()
    assert entropies(watch).shape == (4, 3, 4)


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", "selective"])
def test_recomputation_is_not_counted_twice(kind):
    rows = [train(blocks(run=wrapped(run)), steps=1, probes=probes()[2:])[1] for run in ("plain", kind)]
    np.testing.assert_array_equal(entropies(rows[0]), entropies(rows[1]))
    model = blocks(run=wrapped(kind))
    counted: list[int] = []
    probe = copy.copy(probes()[2])
    object.__setattr__(probe, "views", lambda tensors, _: (counted.append(1), tensors)[1])
    train(model, steps=1, probes=[probe])
    assert len(counted) == 3


def test_a_forward_that_raises():
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ks.watch(model, optimizer=optimizer, probes=probes()) as watch:
        with pytest.raises(RuntimeError, match=r"shape|size"):
            model[1](torch.ones(2, 6, 15))
        assert _get_current_dispatch_mode() is None
        model(batch()).sum().backward()
        optimizer.step()
    wanted = train(blocks(), steps=1, probes=probes())[1]
    assert entropies(watch).shape == entropies(wanted).shape
    assert np.isfinite(entropies(watch)).all()


def test_a_forward_broken_off_by_the_keyboard():
    def interrupted(attend, x):
        attend(x)
        raise KeyboardInterrupt

    model = blocks()
    model[1].run = interrupted
    with ks.watch(model, probes=probes()) as watch:
        with pytest.raises(KeyboardInterrupt):
            model(batch())
        model[1].run = lambda attend, x: attend(x)
        model(batch()).sum().backward()
    assert _get_current_dispatch_mode() is None
    assert np.isfinite(entropies(watch)).all()


def test_a_mode_left_behind_by_the_model_is_not_taken_off():
    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    other = Other()
    model = blocks(1)
    model[0].run = lambda attend, x: (other.__enter__(), attend(x))[1]
    watch = ks.watch(model, probes=probes(), sites="all")
    model(batch()).sum().backward()
    assert _get_current_dispatch_mode() is other
    other.__exit__(None, None, None)
    watch.close()
    assert _get_current_dispatch_mode() is None
    assert np.isfinite(entropies(watch)).all()


def test_the_innermost_watched_module_has_it():
    model = build("pre_ln", depth=2, width=16, heads=2, vocabulary=9)
    ids = torch.randint(0, 9, (2, 5), generator=torch.Generator().manual_seed(0))
    for sites, path in (
        ("all", "sublayers.0.branch"),
        ("sublayers.*", "sublayers.0.branch"),
        ("sublayers.0", "sublayers.0"),
    ):
        with ks.watch(model, probes="attention", sites=sites) as watch:
            model(ids).sum().backward()
        assert [site.path for site in watch.run["attention/entropy"].sites] == [path]
    with ks.watch(model, probes=["attention", "outputs"], sites="leaves") as watch:
        model(ids).sum().backward()
    assert watch.run.get("attention/entropy") is None


def test_validation_between_steps_stays_out():
    model = blocks()
    alone = train(copy.deepcopy(model), steps=1, probes=probes())[1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ks.watch(model, optimizer=optimizer, probes=probes()) as watch:
        torch.manual_seed(1)
        model(batch(0)).square().mean().backward()
        with torch.no_grad():
            model(100 * batch(7))
        optimizer.step()
    np.testing.assert_array_equal(entropies(watch)[0], entropies(alone)[0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    model = blocks().eval()
    with mode():
        alone = model(batch())
        with ks.watch(model, probes=probes()) as watch:
            assert torch.equal(model(batch()), alone)
            watch.step()
    with ks.watch(model, probes=probes()) as other:
        model(batch()).sum().backward()
    np.testing.assert_allclose(entropies(watch), entropies(other), rtol=1e-6)


def test_copies_and_pickles_of_a_watched_model():
    model = build("pre_ln", depth=2, width=16, heads=2, vocabulary=9)
    with ks.watch(model, probes="attention"):
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        for other in (twin, again):
            other(torch.zeros(1, 4, dtype=torch.int64))
            assert _get_current_dispatch_mode() is None


def test_a_compiled_model_runs_eager_and_is_seen():
    alone, _ = train(blocks(), probes=probes())
    model = torch.compile(blocks(), backend="eager")
    watched, watch = train(model, probes=probes())
    assert watched == alone
    assert np.isfinite(entropies(watch)).all()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_inside_the_forward(backend):
    """It is compiled as often as without the watch, and gives the same bits."""
    counted: list[list[int]] = []
    results = []
    for watched in (False, True):
        torch._dynamo.reset()
        graphs: list[int] = []

        def compiler(graph, inputs, graphs=graphs):
            graphs.append(len(graph.graph.nodes))
            return torch._dynamo.lookup_backend(backend)(graph, inputs)

        @torch.compile(backend=compiler)
        def attend(scores: Tensor) -> Tensor:
            scaled = scores * 2
            torch._dynamo.graph_break()
            return scaled.softmax(-1)

        model = nn.Sequential(Compiled(attend))
        results.append(train(model, watched=watched, probes=["default", *probes()[2:]])[0])
        counted.append(graphs)
    assert results[0] == results[1]
    assert counted[0] == counted[1]


class Compiled(nn.Module):
    def __init__(self, softmax) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.softmax = nn.Linear(16, 16), [softmax]  # in a list it is not seen, and stays compiled

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (4, 4)).transpose(1, 2)
        return (self.softmax[0](q @ q.mT) @ q).transpose(1, 2).flatten(2)


def test_flex_attention_runs_as_before():
    """A higher-order operator, which not every mode lets pass."""
    from torch.nn.attention.flex_attention import flex_attention

    class Flexible(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return flex_attention(q, q, q)

    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", category=UserWarning)
        torch._dynamo.reset()
        model, q = nn.Sequential(Flexible()), torch.randn(1, 2, 8, 16)
        with ks.watch(model, probes=probes(), sites="all") as watch:
            seen = model(q)
            watch.step()
        assert torch.equal(seen, model(q))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_function_transforms_run_as_before():
    """Their values are not concrete: nothing is recorded, nothing fails."""
    model = blocks().eval()
    for block in model:
        block.fused = False
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    def results() -> list[Tensor]:
        gradients = torch.func.grad(loss)(parameters, batch())
        each = torch.func.vmap(loss, in_dims=(None, 0))(parameters, batch()[:, None])
        return [*gradients.values(), each, *torch.func.jvp(partial(loss, x=batch()), (parameters,), (parameters,))]

    alone = results()
    with ks.watch(model, probes=probes()[2:]) as watch:
        seen = results()
        watch.step()
    assert all(torch.equal(a, b) for a, b in zip(alone, seen, strict=True))
    assert watch.run.get("attention/entropy") is None


def test_the_structure_found_is_the_same():
    model = build("keel", depth=4, width=16, heads=2, vocabulary=9)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    found = []
    for names in (["default"], ["default", "attention"]):
        with ks.watch(model, probes=names) as watch:
            model(ids).sum().backward()
        found.append(watch.run.info.sublayers)
    assert found[0] == found[1]
    assert len(found[0]) == 4


def test_threads_have_open_modules_of_their_own():
    shown: list[int] = []
    mode = AttentionMode(lambda inside, _: shown.append(inside.site))
    q = torch.randn(1, 2, 4, 8)
    barrier = threading.Barrier(2)

    def work(site: int) -> None:
        mode.open(OpenModule(site, nn.Identity()))
        barrier.wait()
        F.scaled_dot_product_attention(q, q, q)
        barrier.wait()
        mode.close(site)

    threads = [threading.Thread(target=work, args=(site,)) for site in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(shown) == [1, 2]
    F.scaled_dot_product_attention(q, q, q)
    assert sorted(shown) == [1, 2]


def test_a_fault_while_looking_is_one_warning():
    def broken(_inside: OpenModule, _scores: Tensor) -> None:
        raise ValueError("broken")

    mode = AttentionMode(broken)
    q = torch.randn(1, 2, 4, 8)
    mode.open(OpenModule(0, nn.Identity()))
    with pytest.warns(RecordingWarning, match="broken") as caught:
        first, second = (F.scaled_dot_product_attention(q, q, q) for _ in range(2))
    mode.close(0)
    assert len(caught) == 1
    assert torch.equal(first, second)


def test_no_gradient_is_kept():
    scores = scores_seen(blocks(1), (batch().requires_grad_(),))
    assert [tuple(one.shape) for one in scores] == [(2, 4, 6, 6)]
    assert not scores[0].requires_grad


def test_dynamo_is_not_imported():
    code = (
        "import sys, torch, keelscope as ks\nfrom keelscope.models import build\n"
        "model = build('pre_ln', depth=2, width=16, heads=2, vocabulary=9)\n"
        "with ks.watch(model, probes='attention') as watch:\n"
        "    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()\n"
        "assert watch.run['attention/entropy'].values.size\nassert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_fused_operator_names_its_arguments_as_expected():
    """Those of devices that no test has, too: a renamed argument would silently lose the mask."""
    schemas = [
        schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::_scaled_dot_product")
    ]
    forward = [schema for schema in schemas if "backward" not in schema.name]
    assert len(forward) >= 5
    for schema in forward:
        arguments = {argument.name for argument in schema.arguments}
        assert {"query", "key", "is_causal", "scale"} <= arguments, schema
        assert arguments & {"attn_mask", "attn_bias"} or schema.name.endswith("flash_attention"), schema


def test_eight_bit_operands_are_left_alone():
    q = torch.ones(1, 1, 2, 8)
    arguments = {"query": q, "key": q, "scale": 1.0}
    assert attention_scores(arguments, nn.Identity()) is not None
    assert attention_scores(arguments | {"q_descale": torch.ones(1)}, nn.Identity()) is None
