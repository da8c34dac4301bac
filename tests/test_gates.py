"""How gates are found in hand-written modules, by graph, name and declaration, and what accumulates on one step."""

from __future__ import annotations

import copy
import importlib.util
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import keelscope
from keelscope.models import build
from keelscope.sites import plan_sites
from keelscope.topology.gates import find_gates
from keelscope.topology.squashing import Step, reachable_slopes, squashed

X = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
"""``[batch, position, feature]``; without a gradient the first block would show no residual sum."""


class Block(nn.Module):
    """A residual block whose weights a subclass computes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(8), nn.Linear(8, 8)
        self.p = nn.Parameter(torch.tensor(0.25))

    def weigh(self, x: Tensor) -> tuple[Tensor | float, Tensor | float]:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.weigh(x)
        return a * x + b * self.branch(self.norm(x))


def block(weigh, **attributes) -> type[Block]:
    def prepare(self) -> None:
        Block.__init__(self)
        for name, make in attributes.items():
            setattr(self, name, make())

    return type("Mine", (Block,), {"__init__": prepare, "weigh": weigh})


def stack(kind, n: int = 2, **tensors) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(kind() for _ in range(n))).double()
    with torch.no_grad():
        for name, value in tensors.items():
            for part in model:
                getattr(part, name).fill_(value)
    return model


def recorded(model: nn.Module, x: Tensor = X, *, steps: int = 1, **options):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with keelscope.watch(model, optimizer=optimizer, probes=["gates"], **options) as watch:
            for _ in range(steps):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            return watch.run


def table(run) -> dict[str, str]:
    return {site.path: site.kind for site in run.groups["gates"].sites} if "gates" in run.groups else {}


def gate(run, path: str, statistic: str = "value", step: int = 0) -> float:
    return float(run[f"gates/{statistic}"].of(path).values[step, 0])


FUNCTIONS = {
    "raw": lambda p: p,
    "sigmoid": torch.sigmoid,
    "shifted": lambda p: 1 - p,
    "scaled": lambda p: 3 * p / 7,
    "negative": lambda p: -p.tanh(),
    "clamp": lambda p: p.clamp(0, 1),
    "above": lambda p: p.clamp(min=0.1),
    "below": lambda p: torch.clamp_max(p, 1),
    "softplus": lambda p: functional.softplus(p, beta=2),
    "exp": torch.exp,
    "relu": torch.relu,
    "abs": torch.abs,
    "hardsigmoid": functional.hardsigmoid,
    "hardtanh": lambda p: functional.hardtanh(p, -0.5, 0.5),
    "chain": lambda p: 1 - 0.5 * torch.sigmoid(4 * p),
    "view": lambda p: p.sigmoid().reshape(1, 1, 1).expand(1, 3, 1),
}
FLAT = {("clamp", 40.0), ("clamp", -3.0), ("above", -3.0), ("below", 40.0), ("relu", -3.0), ("hardsigmoid", 40.0)} | {
    ("hardsigmoid", -3.0),
    ("hardtanh", 40.0),
    ("hardtanh", -3.0),
    ("sigmoid", 40.0),
    ("chain", 40.0),
    ("chain", -3.0),
    ("negative", 40.0),
    ("view", 40.0),
}


@pytest.mark.parametrize("start", [0.25, 40.0, -3.0])
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_weights_made_in_the_open(name, start):
    """The weight, its slope and its gradient follow the function, on later steps as well."""
    function = FUNCTIONS[name]
    model = stack(block(lambda self, _x: (1.0, function(self.p))), p=start)
    values = []
    for _ in range(2):
        values.append(float(function(model[0].p.detach()).mean()))
        alone = copy.deepcopy(model)
        wanted = torch.autograd.grad(alone(X).square().mean(), alone[0].p)[0].abs().item()
        run = recorded(model)
        assert gate(run, "0.p") == pytest.approx(values[-1], rel=1e-9)
        assert gate(run, "0.p", "gradient") == pytest.approx(wanted, rel=1e-9, abs=1e-300)
    assert table(run) == {"0.p": "learnable scalar", "1.p": "learnable scalar"}
    model = stack(block(lambda self, _x: (1.0, function(self.p))), p=start)
    run = recorded(model, steps=2)
    np.testing.assert_allclose(run["gates/value"].of("0.p").values[:, 0], values, rtol=1e-9)
    assert gate(run, "0.p", "saturated_fraction") == ((name, start) in FLAT)


def test_slopes_are_those_of_autograd():
    raw = torch.linspace(-4, 4, 33, dtype=torch.float64).requires_grad_()
    for steps, function in [
        ((Step("sigmoid"),), torch.sigmoid),
        ((Step("tanh"),), torch.tanh),
        ((Step("exp"),), torch.exp),
        ((Step("softplus", 2.0, 20.0),), lambda x: functional.softplus(x, 2.0)),
        ((Step("clamp", 0.0, 1.0),), lambda x: x.clamp(0, 1)),
        ((Step("relu"),), torch.relu),
        ((Step("abs"),), torch.abs),
        ((Step("hardsigmoid"),), functional.hardsigmoid),
        ((Step("scale", 2.0), Step("sigmoid")), lambda x: (2 * x).sigmoid()),
    ]:
        weights = function(raw)
        (wanted,) = torch.autograd.grad(weights.sum(), raw)
        found, slopes = squashed(steps, raw.detach())
        torch.testing.assert_close(found, weights.detach())
        factor = 2.0 if steps[0].name == "scale" else 1.0
        torch.testing.assert_close(slopes * factor, wanted.abs())
        back = reachable_slopes(steps, weights.detach())
        known = ~back.isnan()
        torch.testing.assert_close(back[known] * factor, wanted[known].abs())
    assert reachable_slopes(None, torch.ones(2)).isnan().all()


def test_one_gate_on_both_sides_is_one_entry():
    model = stack(block(lambda self, _x: ((t := torch.sigmoid(self.p)), 1 - t)))
    run = recorded(model)
    assert table(run) == {"0.p": "learnable scalar", "1.p": "learnable scalar"}
    assert gate(run, "0.p") == pytest.approx(1 / (1 + math.exp(-0.25)))
    assert [info.gates for info in run.info.sublayers] == [("0.p",), ("1.p",)]
    assert run.info.sublayers[0].beta == pytest.approx(1 - gate(run, "0.p"))


class Twice(Block):
    """Two weights on the branch, one after the other, and one on the shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.r = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.q * x + torch.sigmoid(self.r) * (self.p * self.branch(self.norm(x)))


def test_several_gates_of_one_sublayer():
    run = recorded(stack(Twice, p=0.3))
    assert {path for path in table(run) if path.startswith("0.")} == {"0.q", "0.p", "0.r"}
    assert [gate(run, path) for path in ("0.q", "0.p")] == pytest.approx([0.5, 0.3], rel=1e-6)
    assert gate(run, "0.r") == pytest.approx(1 / (1 + math.exp(-0.5)), rel=1e-6)
    assert set(run.info.sublayers[0].gates) == {"0.q", "0.p", "0.r"}


def test_a_weight_of_two_parameters_is_not_guessed():
    run = recorded(stack(block(lambda self, _x: (1.0, self.p * self.q), q=lambda: nn.Parameter(torch.tensor(2.0)))))
    (path,) = (path for path in table(run) if path.startswith("0."))
    assert math.isnan(gate(run, path, "saturated_fraction"))
    assert path in run.groups["gates"].provenance["as_stored"]


def test_a_gate_that_blocks_share_is_one_entry():
    model = stack(block(lambda self, _x: (1.0, self.p)))
    model[1].p = model[0].p
    run = recorded(model)
    assert table(run) == {"0.p": "learnable scalar"}
    assert [info.gates for info in run.info.sublayers] == [("0.p",), ("0.p",)]


def test_buffers_frozen_parameters_and_numbers():
    kind = block(lambda self, _x: (2.0, self.q))
    model = nn.Sequential(kind(), kind()).double()
    model[0].register_buffer("q", torch.tensor(0.5, dtype=torch.float64))
    model[1].q = nn.Parameter(torch.tensor(0.25, dtype=torch.float64), requires_grad=False)
    run = recorded(model, steps=2)
    kinds = {"0.q": "buffer", "0.branch:alpha": "constant", "1.q": "buffer", "1.branch:alpha": "constant"}
    assert table(run) == kinds
    assert [gate(run, path) for path in kinds] == [0.5, 2.0, 0.25, 2.0]
    assert np.isnan(run["gates/gradient"].values).all()


def test_a_token_gate_without_a_module_of_its_own():
    """The sigmoid of a layer's output: seen at the layer, valued after the sigmoid."""
    kind = block(lambda self, x: ((t := torch.sigmoid(self.t(x))), 1 - t), t=lambda: nn.Linear(8, 1))
    model = stack(kind)
    alone, made = copy.deepcopy(model), []
    alone[1].t.register_forward_hook(lambda _m, _i, output: made.append(output))
    gradient = torch.autograd.grad(alone(X).square().mean(), made)[0]
    run = recorded(model, steps=2)
    assert table(run) == {"0.t": "gate (token)", "1.t": "gate (token)"}
    assert gate(run, "1.t") == pytest.approx(made[0].sigmoid().mean().item(), rel=1e-12)
    assert gate(run, "1.t", "gradient") == pytest.approx(gradient.norm().item(), rel=1e-9)
    assert 0 < gate(run, "1.t", step=1) < 1
    assert gate(run, "1.t", "gradient", step=1) > 0
    assert gate(run, "1.t", "saturated_fraction", step=1) == 0


def test_a_token_gate_of_bare_matrices_is_seen_once():
    kind = block(lambda self, x: (1.0, torch.sigmoid(x @ self.w)), w=lambda: nn.Parameter(torch.ones(8, 1)))
    run = recorded(stack(kind), steps=2)
    assert table(run) == {"0.w": "gate (token)", "1.w": "gate (token)"}
    assert gate(run, "0.w") == pytest.approx(torch.sigmoid(X.sum(-1)).mean().item(), rel=1e-12)
    assert gate(run, "0.w", "gradient") > 0
    assert math.isnan(gate(run, "0.w", step=1))
    assert run.groups["gates"].provenance["first_step_only"] == "0.w, 1.w"


def test_a_function_that_cannot_be_read_leaves_the_slope_open():
    kind = block(lambda self, _x: (1.0, torch.sin(self.p)))
    run = recorded(stack(kind))
    assert gate(run, "0.p") == 0.25
    assert math.isnan(gate(run, "0.p", "saturated_fraction"))
    assert run.groups["gates"].provenance["as_stored"] == "0.p, 1.p"


class Strange(nn.Module):
    """A gate in a module, by a function that the graph does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.tensor(0.5))

    def forward(self) -> Tensor:
        return torch.sin(self.b)


def test_a_function_inside_a_module_is_seen_at_the_module():
    run = recorded(stack(block(lambda self, _x: (1.0, self.g()), g=Strange)), steps=2)
    assert table(run) == {"0.g.b": "learnable scalar", "1.g.b": "learnable scalar"}
    assert gate(run, "0.g.b") == pytest.approx(math.sin(0.5), rel=1e-9)
    assert gate(run, "0.g.b", "gradient") > 0
    assert gate(run, "0.g.b", step=1) != gate(run, "0.g.b")


class Declared(nn.Module):
    """A weight that meets no residual sum."""

    residual_gates = ("w", "t", "missing")

    def __init__(self) -> None:
        super().__init__()
        self.w, self.t, self.inner = nn.Parameter(torch.full((8,), 0.5)), nn.Linear(8, 1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.t(x)) * self.w * self.inner(x)


def test_declared_gates_need_no_residual_sum():
    model = nn.Sequential(Declared(), nn.Tanh(), Declared()).double()
    alone, made = copy.deepcopy(model), []
    alone[2].t.register_forward_hook(lambda _m, _i, output: made.append(output))
    loss = alone(X).square().mean()
    at_module, at_weight = torch.autograd.grad(loss, [made[0], alone[2].w])
    run = recorded(model, steps=2)
    wanted = {"0.w": "learnable vector", "0.t": "gate (token)", "2.w": "learnable vector", "2.t": "gate (token)"}
    assert table(run) == wanted
    assert gate(run, "2.t") == pytest.approx(made[0].mean().item(), rel=1e-12)
    assert gate(run, "2.t", "gradient") == pytest.approx(at_module.norm().item(), rel=1e-9)
    assert gate(run, "2.w", "gradient") == pytest.approx(at_weight.norm().item(), rel=1e-9)
    assert math.isnan(gate(run, "2.w", "saturated_fraction"))


class Named(nn.Module):
    """A residual weight that only its name gives away: the sum is hidden from the graph."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_parameter(name, nn.Parameter(torch.full(shape, 0.1)))
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * getattr(self, self.name).sum()


@pytest.mark.parametrize(
    ("name", "shape", "found"),
    [
        ("resweight", (), True),
        ("skipinit_gain", (1,), True),
        ("layer_scale", (8, 1, 1), True),
        ("layer_scale_parameter", (8,), True),
        ("gamma_1", (8,), True),
        ("lambda1", (8,), True),
        ("alpha", (), True),
        ("resweight", (8, 8), False),
        ("gate_proj", (8,), False),
        ("temperature", (), False),
    ],
)
def test_names(name, shape, found):
    run = recorded(nn.Sequential(Named(name, shape), Named(name, shape)).double())
    assert (f"0.{name}" in table(run)) is found


def test_norms_activations_routers_and_swiglu_are_no_gates():
    class LayerScaleNorm(nn.LayerNorm):
        def __init__(self) -> None:
            super().__init__(8)
            self.gamma_1 = nn.Parameter(torch.ones(8))

    class Snake(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alpha = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.sin(self.alpha * x) ** 2

    model = nn.Sequential(nn.Linear(8, 8), LayerScaleNorm(), Snake(), nn.PReLU(), nn.Linear(8, 8), Snake()).double()
    assert table(recorded(model)) == {}
    for options in ({"feed_forward": "swiglu"}, {"experts": 4}):
        moe = build("pre_ln", depth=4, width=8, heads=2, vocabulary=7, **options)
        tokens = torch.arange(12).reshape(2, 6) % 7
        assert find_gates(None, plan_sites(moe)) == ()
        assert table(recorded(moe, tokens)) == {}


def test_micro_batches_make_one_row():
    kind = block(lambda self, x: (self.p, torch.sigmoid(self.t(x))), t=lambda: nn.Linear(8, 1))
    model = stack(kind)
    whole, parts = copy.deepcopy(model), X.split([2, 1, 2])
    made: list[Tensor] = []
    whole[0].t.register_forward_hook(lambda _m, _i, output: made.append(output))
    losses = [whole(part).square().sum() for part in parts]
    gradients = torch.autograd.grad(sum(losses), [*made, whole[0].p])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with keelscope.watch(model, optimizer=optimizer, probes=["gates"]) as watch:
        for _ in range(2):
            optimizer.zero_grad()
            for part in parts:
                model(part).square().sum().backward()
            optimizer.step()
        run = watch.run
    assert gate(run, "0.p", "gradient") == pytest.approx(gradients[-1].abs().item(), rel=1e-9)
    together = torch.cat([part.flatten() for part in gradients[:-1]])
    assert gate(run, "0.t", "gradient") == pytest.approx(together.norm().item(), rel=1e-9)
    weights = torch.cat([one.detach().sigmoid().flatten() for one in made])
    assert gate(run, "0.t") == pytest.approx(weights.mean().item(), rel=1e-9)
    assert gate(run, "0.t", "minimum") == pytest.approx(weights.min().item(), rel=1e-9)
    assert gate(run, "0.t", "maximum") == pytest.approx(weights.max().item(), rel=1e-9)


def test_a_loss_scale_is_taken_out():
    kind = block(lambda self, x: (self.p, torch.sigmoid(self.t(x))), t=lambda: nn.Linear(8, 1))
    plain, model = stack(kind).float(), stack(kind).float()
    expected = recorded(plain, X.float())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with keelscope.watch(model, optimizer=optimizer, probes=["gates"]) as watch:
        scaler.scale(model(X.float()).square().mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        run = watch.run
    for path in ("0.p", "0.t"):
        assert gate(run, path, "gradient") == pytest.approx(gate(expected, path, "gradient"), rel=1e-5)


def test_without_an_optimizer_values_are_those_the_step_used():
    model = stack(block(lambda self, _x: (1.0, self.p)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with keelscope.watch(model, probes=["gates", "parameter_gradients"]) as watch:
        for _ in range(2):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
            watch.step()
        run = watch.run
    assert gate(run, "0.p") == 0.25
    moved = abs(gate(run, "0.p", step=1) - 0.25)
    assert moved == pytest.approx(0.5 * gate(run, "0.p", "gradient"), rel=1e-9)


CASES = Path(__file__).parent / "cases" / "handed"


def test_a_first_block_on_plain_data_has_the_gates_of_the_others():
    """A highway network with closed gates; the means are those of the case, computed by hand."""
    spec = importlib.util.spec_from_file_location("case", CASES / "gates_closed.py")
    case = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(case)
    model, step = case.build()
    with keelscope.watch(model, probes=["gates"]) as watch:
        for _ in range(2):
            step(model)
            watch.step()
        run = watch.run
    assert table(run) == {"1.gate": "gate (token)", "2.gate": "gate (token)", "0.gate": "gate (token)"}
    wanted, modules = case.EXPECT["evidence"]["mean_gate"], case.EXPECT["modules"]
    for row in range(2):
        for i in range(3):
            path = f"{i}.gate"
            assert gate(run, path, step=row) == pytest.approx(wanted[i], rel=1e-6)
            norm = modules[path]["out_grad_norms"][0]
            assert gate(run, path, "gradient", step=row) == pytest.approx(norm, rel=1e-5)


def test_the_case_of_rezero():
    spec = importlib.util.spec_from_file_location("case", CASES / "rezero_alpha.py")
    case = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(case)
    model, step = case.build()
    with keelscope.watch(model, probes=["gates"]) as watch:
        for _ in range(2):
            step(model)
            watch.step()
        run = watch.run
    for row in range(2):
        for path in ("0.alpha", "1.alpha"):
            norm = case.EXPECT["steps"][row]["params"][path]["grad_norm"]
            assert gate(run, path, "gradient", step=row) == pytest.approx(norm, rel=1e-6)
            assert gate(run, path, "saturated_fraction", step=row) == 0


@pytest.mark.parametrize("name", ["rezero", "highway", "keel_gate"])
@pytest.mark.parametrize("kind", ["scalar", "token"])
def test_training_is_bit_for_bit_the_same(name, kind):
    options = {} if name == "rezero" else {"gate": kind}
    results = []
    for watched in (False, True):
        model = build(name, depth=4, width=8, heads=2, vocabulary=7, dropout=0.1, **options)
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        watch = keelscope.watch(model, optimizer=optimizer, probes=["gates"], every=2) if watched else None
        for _ in range(5):
            tokens = torch.randint(0, 7, (2, 6))
            optimizer.zero_grad()
            functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
        if watch is not None:
            watch.close()
        results.append(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert results[0] == results[1]


def test_layer_scale_of_timm():
    try:
        import timm
    except Exception:  # an installed timm may not fit the installed torch
        pytest.skip("timm cannot be imported")
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=2, init_values=1e-3, num_classes=3, weight_init="skip"
    ).double()
    run = recorded(model, torch.randn(2, 3, 32, 32, dtype=torch.float64))
    assert table(run) == {f"blocks.{i}.ls{k}.gamma": "learnable vector" for i in range(2) for k in (1, 2)}
    assert gate(run, "blocks.1.ls2.gamma") == pytest.approx(1e-3, rel=1e-6)
    assert gate(run, "blocks.1.ls2.gamma", "saturated_fraction") == 0
    assert [info.gates for info in run.info.sublayers] == [(path,) for path in table(run)]


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("name", "options", "path"),
    [
        ("rezero", {}, "sublayers.2.alpha"),
        ("highway", {}, "sublayers.2.gate.bias"),
        ("keel_gate", {"gate": "token"}, "sublayers.2.gate"),
    ],
)
@pytest.mark.usefixtures("process_group")
def test_wrapped_models_give_the_same_numbers(how, name, options, path):
    from torch.distributed.fsdp import fully_shard

    tokens = torch.arange(12).reshape(2, 6) % 7
    runs = []
    for is_wrapped in (False, True):
        model = build(name, depth=4, width=8, heads=2, vocabulary=7, **options)
        if how == "fsdp":
            for parameter in model.parameters():  # FSDP2 shards no parameter without dimensions
                if not parameter.dim():
                    parameter.data = parameter.data.reshape(1)
        if is_wrapped and how == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        elif is_wrapped:
            for part in (*model.sublayers, model):
                fully_shard(part)
        runs.append(recorded(model, tokens, steps=2))
    assert set(table(runs[1])) == set(table(runs[0]))
    for statistic in ("value", "minimum", "maximum", "saturated_fraction", "gradient"):
        wanted, found = (run[f"gates/{statistic}"].of(path).values[:, 0] for run in runs)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=statistic)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(reentrant):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind = block(lambda self, x: (self.p, torch.sigmoid(self.t(x))), t=lambda: nn.Linear(8, 1))
            self.stem, self.blocks = nn.Linear(8, 8), nn.ModuleList([kind(), kind(), kind()])

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for part in self.blocks:
                x = checkpoint(part, x, use_reentrant=reentrant) if self.on else part(x)
            return x

    torch.manual_seed(0)
    model = Checkpointed().double()
    runs = []
    for model.on in (False, True):
        runs.append(recorded(copy.deepcopy(model), steps=2))
    assert {**table(runs[1])} == {**table(runs[0])}
    for statistic in ("value", "gradient"):
        for path in ("blocks.1.p", "blocks.1.t"):
            wanted, found = (run[f"gates/{statistic}"].of(path).values[:, 0] for run in runs)
            late = path.endswith("t")  # what a region hides is known after the first step
            np.testing.assert_allclose(found[late:], wanted[late:], rtol=1e-9, err_msg=f"{statistic} {path}")


def test_when_all_gates_are_known_no_other_parameter_is_shown_to_their_probes():
    model = build("rezero", depth=4, width=8, heads=2, bias=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with keelscope.watch(model, optimizer=optimizer) as session:
        gates = session._recorder.gates
        before = len(gates.parameters)
        model(torch.arange(12).view(2, 6)).square().mean().backward()
        assert len(gates.parameters) == 4 < before
        optimizer.step()
        optimizer.zero_grad()
    found = session.run["gates/gradient"].values
    assert found.shape == (1, 4)
    assert np.isfinite(found).all()
