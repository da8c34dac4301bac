"""A watched run is the unwatched run, bit for bit: losses, weights, optimizer, buffers and random state."""

from __future__ import annotations

import copy
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


def everything() -> list[str]:
    """Every installed probe, with all that is optional."""
    return ["+".join([name, *(s.name for s in probe.optional)]) for name, probe in available_probes().items()]


def train(build: Callable[[], tuple[nn.Module, Loss]], **options) -> tuple[list[object], ks.Watch | None]:
    """Everything that must not differ."""
    torch.manual_seed(0)
    model, loss_of = build()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with ks.watch(model, optimizer=optimizer, **options) if options else nullcontext() as watch:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
            if watch is not None:
                watch.log(loss=loss)
    state = [*losses, *model.state_dict().values(), *(p.grad for p in model.parameters()), torch.get_rng_state()]
    state += [value for of_one in optimizer.state_dict()["state"].values() for value in of_one.values()]
    return copy.deepcopy(state), watch


def assert_identical(a: list[object], b: list[object]) -> None:
    assert len(a) == len(b)
    assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("build", [perceptron, convolution, bert, gpt2_checkpointed])
def test_bit_identical(build, every, operators):
    plain, _ = train(build)
    again, _ = train(build)
    assert_identical(plain, again)
    options = {"probes": everything(), "sites": "all", "every": every, "calls": True}
    watched, watch = train(build, **options)
    assert_identical(plain, watched)
    assert watch.run["gradients/norm"].steps.tolist() == list(range(0, STEPS, every))
    assert torch.tensor(watch.run["parameter_gradients/norm"].values).isfinite().any(1).all()


def test_bit_identical_with_reentrant_checkpointing(operators):
    plain, _ = train(lambda: gpt2_checkpointed(reentrant=True))
    watched, watch = train(lambda: gpt2_checkpointed(reentrant=True), probes=everything(), sites="all")
    assert_identical(plain, watched)
    assert torch.tensor(watch.run["gradients/norm"].of("transformer.h.0").values).isfinite().all()


class TestCompiled:
    """Recorded steps run eager, the others stay compiled, and nothing is compiled again."""

    @pytest.fixture(autouse=True)
    def fresh(self):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        yield
        torch._dynamo.reset()

    def compiled(self) -> tuple[nn.Module, Loss]:
        model, loss = perceptron()
        return torch.compile(model, backend="aot_eager"), loss

    def in_place(self) -> tuple[nn.Module, Loss]:
        model, loss = perceptron()
        model.compile(backend="aot_eager")
        return model, loss

    def graphs(self) -> int:
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
    @pytest.mark.parametrize("how", ["compiled", "in_place"])
    @pytest.mark.parametrize("every", [1, 3])
    def test_bit_identical_and_never_recompiled(self, how, every):
        plain, _ = train(getattr(self, how))
        once = self.graphs()
        assert once > 0
        torch._dynamo.reset()
        counts = []

        def build():
            model, loss = getattr(self, how)()
            return model, lambda model, step: (counts.append(self.graphs()), loss(model, step))[1]

        watched, watch = train(build, probes=everything(), sites="all", every=every)
        assert_identical(plain, watched)
        assert counts[-1] - counts[2] == 0, "compiled again after the warm-up"
        assert self.graphs() - once == (once if every > 1 else 0)
        series = watch.run["gradients/norm"]
        assert series.steps.tolist() == list(range(0, STEPS, every))
        assert {site.path for site in series.sites} == {"", "first", "dropout", "norm", "last"}
        assert torch.tensor(series.values).isfinite().all()

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
    def test_watching_a_model_that_already_ran_compiled(self):
        torch.manual_seed(0)
        model, loss = self.compiled()
        loss(model, 0).backward()
        wanted = [p.grad.norm().item() for p in model.parameters()]
        model.zero_grad()
        before = self.graphs()
        torch.manual_seed(0)
        with ks.watch(model, sites="all") as watch:
            torch.manual_seed(5)
            eager = loss(model, 0)
            eager.backward()
            watch.step()
        assert self.graphs() == before
        assert len(wanted) == watch.run["parameter_gradients/norm"].values.shape[1]
        assert torch.tensor(watch.run["gradients/norm"].values).isfinite().all()
        assert torch.compiler.is_compiling() is False
