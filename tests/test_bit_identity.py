"""A watched run is the unwatched run, bit for bit: losses, weights, optimizer, buffers and random state.

Twenty steps of each; what trains how is in the name of the test. Ranks are in ``tests/distributed``, trainers in
``tests/integrations``.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import keelscope as ks
from keelscope.probe import available_probes

pytestmark = pytest.mark.filterwarnings("ignore:A Jacobian is not recorded:keelscope.errors.CoverageWarning")
STEPS = 20
Loss = Callable[[nn.Module, int], Tensor]


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + step)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout = nn.Linear(8, 16), nn.Dropout(0.3)
        self.norm, self.last = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.dropout(nn.functional.gelu(self.first(x)))))


def perceptron() -> tuple[nn.Module, Loss]:
    return Perceptron(), lambda model, step: model(torch.randn(6, 8, generator=generator(step))).square().mean()


def convolution() -> tuple[nn.Module, Loss]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(288, 4)
    )
    return model, lambda model, step: model(torch.randn(4, 3, 8, 8, generator=generator(step))).square().mean()


def tokens(step: int) -> Tensor:
    return torch.randint(1, 99, (2, 10), generator=generator(step))


def bert() -> tuple[nn.Module, Loss]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16,
    )  # fmt: skip
    return BertForMaskedLM(config), lambda model, step: model(input_ids=tokens(step), labels=tokens(step)).loss


def gpt2_checkpointed(reentrant: bool = False) -> tuple[nn.Module, Loss]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    model = GPT2LMHeadModel(config)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    return model, lambda model, step: model(input_ids=tokens(step), labels=tokens(step)).loss


def gpt2(layers: int = 2, dropout: float = 0.1) -> tuple[nn.Module, Loss]:
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0, use_cache=False))
    return model, lambda model, step: model(input_ids=tokens(step), labels=tokens(step)).loss


def everything() -> list[str]:
    """Every installed probe, with all that is optional."""
    return ["+".join([name, *(s.name for s in probe.optional)]) for name, probe in available_probes().items()]


def all_but_jacobians() -> list[str]:
    return ["default", "inputs", "updates", "sublayers", "tokens", "attention"]


def train(
    build: Callable[[], tuple[nn.Module, Loss]], half: torch.dtype | None = None, **options
) -> tuple[list[object], ks.Watch | None]:
    """Everything that must not differ."""
    torch.manual_seed(0)
    model, loss_of = build()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # a scale that grows every other step overflows, so that some steps are skipped
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2, enabled=half is torch.float16)
    losses, scales = [], [scaler.get_scale()]
    with ks.watch(model, optimizer=optimizer, **options) if options else nullcontext() as watch:
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", half, enabled=half is not None):
                loss = loss_of(model, step)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
            scales.append(scaler.get_scale())
            if watch is not None:
                watch.log(loss=loss)
    state = [*losses, *model.state_dict().values(), *(p.grad for p in model.parameters()), torch.get_rng_state()]
    state += [value for of_one in optimizer.state_dict()["state"].values() for value in of_one.values()]
    return copy.deepcopy([*state, *scales]), watch


def assert_identical(a: list[object], b: list[object]) -> None:
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}  # gradients of a skipped step are NaN
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(torch.as_tensor(x), torch.as_tensor(y), **exactly)


def graphs() -> int:
    """How many graphs torch.compile has made."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def plain():
    """The training that nobody watches, once for each kind; the same twice."""
    known: dict[object, list[object]] = {}

    def of(build, half=None):
        if (build, half) not in known:
            known[build, half] = train(build, half)[0]
            assert_identical(known[build, half], train(build, half)[0])
        return known[build, half]

    return of


def assert_recorded(watch: ks.Watch, every: int) -> None:
    assert watch.run["gradients/norm"].steps.tolist() == list(range(0, STEPS, every))
    assert torch.tensor(watch.run["parameter_gradients/norm"].values).isfinite().any(1).all()


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("build", [perceptron, convolution, bert, gpt2_checkpointed])
def test_bit_identical(build, every, plain, operators):
    options = {"probes": everything(), "sites": "all", "every": every, "calls": True}
    watched, watch = train(build, **options)
    assert_identical(plain(build), watched)
    assert_recorded(watch, every)
    assert graphs() == 0


@pytest.mark.parametrize("build", [perceptron, convolution, bert, gpt2_checkpointed])
def test_bit_identical_with_default_probes(build, plain, operators):
    watched, watch = train(build, every=1)
    assert_identical(plain(build), watched)
    assert_recorded(watch, 1)
    assert graphs() == 0


@pytest.mark.parametrize("build", [perceptron, gpt2])
def test_bit_identical_with_all_probes_but_jacobians(build, plain, operators):
    watched, watch = train(build, probes=all_but_jacobians())
    assert_identical(plain(build), watched)
    assert_recorded(watch, 1)
    groups = {"norms", "updates"} | ({"attention", "sublayers", "tokens"} if build is gpt2 else set())
    assert groups <= set(watch.run.groups)


@pytest.mark.parametrize("probes", ["default", "all but jacobians"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bf16", "fp16 with a scaler"])
@pytest.mark.parametrize("build", [perceptron, gpt2])
def test_bit_identical_in_mixed_precision(build, half, probes, plain, operators):
    watched, watch = train(build, half, probes=probes if probes == "default" else all_but_jacobians())
    assert_identical(plain(build, half), watched)
    skips = [after < before for before, after in itertools.pairwise(watched[-STEPS - 1 :])]
    assert any(skips) is (half is torch.float16)
    rows = STEPS - sum(skips) + skips[-1]  # a step that was begun when the watch is closed is a row
    assert watch.run["gradients/norm"].steps.tolist() == list(range(rows))
    assert graphs() == 0


def gpt2_reentrant() -> tuple[nn.Module, Loss]:
    return gpt2_checkpointed(reentrant=True)


def test_bit_identical_with_reentrant_checkpointing(plain, operators):
    watched, watch = train(gpt2_reentrant, probes=everything(), sites="all")
    assert_identical(plain(gpt2_reentrant), watched)
    assert torch.tensor(watch.run["gradients/norm"].of("transformer.h.0").values).isfinite().all()


class TestCompiled:
    """Recorded steps run eager, the others stay compiled, and nothing is compiled again."""

    def compiled(self) -> tuple[nn.Module, Loss]:
        model, loss = perceptron()
        return torch.compile(model, backend="aot_eager"), loss

    def in_place(self) -> tuple[nn.Module, Loss]:
        model, loss = perceptron()
        model.compile(backend="aot_eager")
        return model, loss

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
    @pytest.mark.parametrize("how", ["compiled", "in_place"])
    @pytest.mark.parametrize("every", [1, 3])
    def test_bit_identical_and_never_recompiled(self, how, every):
        plain, _ = train(getattr(self, how))
        once = graphs()
        assert once > 0
        torch._dynamo.reset()
        counts = []

        def build():
            model, loss = getattr(self, how)()
            return model, lambda model, step: (counts.append(graphs()), loss(model, step))[1]

        watched, watch = train(build, probes=everything(), sites="all", every=every)
        assert_identical(plain, watched)
        assert counts[-1] - counts[2] == 0, "compiled again after the warm-up"
        assert graphs() - once == (once if every > 1 else 0)
        series = watch.run["gradients/norm"]
        assert series.steps.tolist() == list(range(0, STEPS, every))
        assert {site.path for site in series.sites} == {"", "first", "dropout", "norm", "last"}
        assert torch.tensor(series.values).isfinite().all()

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
    @pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at every tensor
    @pytest.mark.parametrize("probes", ["default", "all but jacobians"])
    def test_gpt2_is_bit_identical_and_never_recompiled(self, probes, operators):
        def build():
            model, loss = gpt2(layers=1)
            return torch.compile(model, backend="aot_eager"), loss

        unwatched, _ = train(build)
        once = graphs()
        assert once > 0
        torch._dynamo.reset()
        probes = probes if probes == "default" else all_but_jacobians()
        watched, watch = train(build, probes=probes, every=4)
        assert graphs() - once == once, "the steps between are compiled once, as they are without a watch"
        assert_identical(unwatched, watched)
        assert_recorded(watch, 4)

    @pytest.mark.slow  # a C++ compiler runs
    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
    def test_inductor_without_dropout_agrees_and_is_never_recompiled(self):
        def build():
            model, loss = perceptron()
            model.dropout.p = 0.0
            return torch.compile(model), loss

        unwatched, _ = train(build)
        once = graphs()
        assert once > 0
        torch._dynamo.reset()
        watched, watch = train(build, every=4)
        assert graphs() - once == once
        assert len(unwatched) == len(watched)
        for ours, theirs in zip(watched, unwatched, strict=True):
            torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), rtol=1e-5, atol=1e-5)
        assert_recorded(watch, 4)

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
    def test_watching_a_model_that_already_ran_compiled(self):
        torch.manual_seed(0)
        model, loss = self.compiled()
        loss(model, 0).backward()
        wanted = [p.grad.norm().item() for p in model.parameters()]
        model.zero_grad()
        before = graphs()
        torch.manual_seed(0)
        with ks.watch(model, sites="all") as watch:
            torch.manual_seed(5)
            eager = loss(model, 0)
            eager.backward()
            watch.step()
        assert graphs() == before
        assert len(wanted) == watch.run["parameter_gradients/norm"].values.shape[1]
        assert torch.tensor(watch.run["gradients/norm"].values).isfinite().all()
        assert torch.compiler.is_compiling() is False
