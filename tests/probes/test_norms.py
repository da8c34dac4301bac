"""What the probe of norms records, against autograd on models that train."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.functional import jacobian

import keelscope as ks
from keelscope.board import Board, gather
from keelscope.models import build
from keelscope_probes import norms
from keelscope_probes.norms import NORM_SPECTRUM, NORM_TRANSPORT, NORMS

CASES = Path(__file__).parents[1] / "cases" / "handed"


def twin(module: nn.Module) -> nn.Module:
    """A copy in float64 without hooks."""
    copied = copy.deepcopy(module).double()
    copied._forward_hooks.clear()
    return copied


def keep_gradient(output: Tensor, into: dict[str, Tensor], key: str) -> None:
    def hook(gradient: Tensor) -> None:
        into[key] = gradient.detach()

    output.register_hook(hook)


class Seen:
    """Input and gradients of each norm, by torch's own means."""

    def __init__(self, model: nn.Module, paths: list[str]) -> None:
        self.modules = {path: model.get_submodule(path) for path in paths}
        self.inputs: dict[str, Tensor] = {}
        self.at_output: dict[str, Tensor] = {}
        for path, module in self.modules.items():
            module.register_forward_hook(self.keep(path), with_kwargs=True)

    def keep(self, path: str):
        def hook(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> None:
            self.inputs[path] = (*args, *kwargs.values())[0].detach()
            keep_gradient(output, self.at_output, path)

        return hook

    def truth(self, path: str) -> dict[str, float | list[float]]:
        """Every statistic of one norm from dense Jacobians, token by token."""
        module, x, g = twin(self.modules[path]), self.inputs[path].double(), self.at_output[path].double()
        d = x.shape[-1]
        tokens = x.reshape(-1, d)
        dense = torch.stack([jacobian(module, token, vectorize=True) for token in tokens])
        gains = torch.linalg.matrix_norm(dense) / d**0.5
        passed = torch.einsum("to,toi->ti", g.reshape(-1, d), dense)
        return {
            "jacobian_gain": gains.square().mean().sqrt().item(),
            "jacobian_gain_quantile": np.quantile(gains, [0.1, 0.5, 0.9], method="inverted_cdf").tolist(),
            "sigma_max_exact": torch.linalg.matrix_norm(dense, ord=2).amax().item(),
            "input_rms": x.square().mean().sqrt().item(),
            "measured_gain": (passed.norm() / g.norm()).item(),
        }


def assert_recorded(run: ks.Run, seen: Seen) -> None:
    sites = [site.path for site in run["norms/jacobian_gain"].sites]
    assert sorted(seen.modules) == sorted(sites)
    for i, path in enumerate(sites):
        truth = seen.truth(path)
        for name in ("jacobian_gain", "sigma_max_exact", "input_rms", "measured_gain"):
            value = run[f"norms/{name}"].values[0, i]
            assert value == pytest.approx(truth[name], rel=2e-4), (path, name)
        quantiles = run["norms/jacobian_gain_quantile"].values[0, i]
        np.testing.assert_allclose(quantiles, truth["jacobian_gain_quantile"], rtol=2 ** (1 / 8) - 1)
        assert run["norms/sigma_max"].values[0, i] >= truth["sigma_max_exact"] * (1 - 1e-5)


def off_ones(model: nn.Module) -> nn.Module:
    """Gains that are not all 1, as after some training."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=draw))
    return model


@pytest.mark.parametrize(("scheme", "norm"), [("post_ln", "layer"), ("keel", "rms"), ("pre_ln", "scale")])
def test_reference_models(scheme, norm, tmp_path):
    """Recorded to a file, read back, compared with autograd."""
    model = off_ones(build(scheme, depth=4, width=16, heads=2, norm=norm))
    paths = [path for path, module in model.named_modules() if type(module).__name__.lower().endswith("norm")]
    seen = Seen(model, paths)
    tokens = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    with ks.watch(model, tmp_path / "run.h5", probes=["default", "norms+sigma_max_exact"]) as watch:
        logits = model(tokens)
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        watch.step()
    with ks.open_run(tmp_path / "run.h5") as run:
        assert run["norms/jacobian_gain_quantile"].values.shape == (1, len(paths), 3)
        assert_recorded(run, seen)


@pytest.mark.usefixtures("operators")
class TestTransformers:
    def record(self, model: nn.Module, paths: list[str]) -> tuple[ks.Run, Seen]:
        model = off_ones(model).train()
        seen = Seen(model, paths)
        tokens = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))
        watch = ks.watch(model, probes=["norms+sigma_max_exact"], sites="leaves")
        model(input_ids=tokens, labels=tokens).loss.backward()
        watch.close()
        return watch.run, seen

    def test_bert(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
        )
        torch.manual_seed(0)
        model = transformers.BertForMaskedLM(config)
        paths = [path for path, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
        assert len(paths) == 6
        assert_recorded(*self.record(model, paths))

    def test_llama(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
        )
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        paths = [path for path, module in model.named_modules() if type(module).__name__ == "LlamaRMSNorm"]
        assert len(paths) == 5
        assert_recorded(*self.record(model, paths))


def convolutional(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.LazyLinear(2))


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(6), nn.BatchNorm2d(6).eval(), nn.GroupNorm(2, 6), nn.InstanceNorm2d(6, affine=True)]
)
def test_norms_of_images(norm):
    """The whole Jacobian, across samples: its Frobenius norm, its top value, and the gradient that passed."""
    torch.manual_seed(0)
    model = convolutional(norm)
    kept: dict[str, Tensor] = {}

    def keep(_: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        kept["x"] = args[0].detach().clone()
        if output.requires_grad:
            keep_gradient(output, kept, "g")

    norm.register_forward_hook(keep)
    x = torch.randn(3, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    model(x)
    kept.clear()
    watch = ks.watch(model, probes=["norms+sigma_max_exact"], sites="leaves")
    model(x).square().sum().backward()
    watch.close()
    dense = jacobian(twin(norm), kept["x"].double()).reshape(kept["x"].numel(), -1)
    g = kept["g"].double().reshape(-1)
    run = watch.run
    want = {
        "jacobian_gain": (dense.norm() / len(dense) ** 0.5).item(),
        "sigma_max_exact": torch.linalg.matrix_norm(dense, ord=2).item(),
        "input_rms": kept["x"].square().mean().sqrt().item(),
        "measured_gain": ((g @ dense).norm() / g.norm()).item(),
    }
    for name, value in want.items():
        assert run[f"norms/{name}"].values.tolist() == [[pytest.approx(value, rel=1e-4)]], name


@pytest.mark.usefixtures("vision")
def test_resnet():
    """All 20 BatchNorms of a ResNet-18; the product of gain and next gradient agrees with torch's own backward."""
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(num_classes=3)
    gradients: dict[str, Tensor] = {}
    model.conv1.register_forward_hook(lambda _module, _args, output: keep_gradient(output, gradients, "in"))
    model.bn1.register_forward_hook(lambda _module, _args, output: keep_gradient(output, gradients, "out"))
    watch = ks.watch(model, probes=["norms", "gradients"], sites="leaves")
    model(torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    watch.close()
    run = watch.run
    sites = [site.path for site in run["norms/measured_gain"].sites]
    assert len(sites) == 20
    assert np.isfinite(run["norms/jacobian_gain"].values).all()
    measured = run["norms/measured_gain"].values[0, sites.index("bn1")]
    assert measured == pytest.approx((gradients["in"].norm() / gradients["out"].norm()).item(), rel=1e-3)


def test_micro_batches_merge():
    """Two forwards of a step are one observation of all their tokens."""
    norm = nn.LayerNorm(6)
    off_ones(nn.ModuleDict({"norm": norm}))
    halves = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 30.0])[:, None, None]
    runs = []
    for batches in (halves.unbind(), [halves]):
        watch = ks.watch(nn.Sequential(norm), probes="norms+sigma_max_exact", sites="leaves")
        sum(norm(batch.clone().requires_grad_()).pow(3).sum() for batch in batches).backward()
        watch.close()
        runs.append(watch.run)
    keys = [key for key in runs[0].keys() if key.startswith("norms/")]  # noqa: SIM118 - a run is no mapping
    assert len(keys) == 8
    for key in keys:
        np.testing.assert_allclose(runs[0][key].values, runs[1][key].values, rtol=1e-5, err_msg=key)


def test_a_model_without_norms():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with ks.watch(model) as watch:
        model(torch.randn(3, 4)).sum().backward()
        watch.step()
    assert "norms/jacobian_gain" not in watch.run
    assert watch.run["gradients/norm"].values.size


def test_no_gradient_is_not_zero_gain():
    """A forward without backward: gains of the Jacobian, nothing measured."""
    model = nn.Sequential(nn.LayerNorm(4))
    with ks.watch(model, probes="norms", sites="leaves") as watch:
        model(torch.randn(3, 4, requires_grad=True))
        watch.step()
    assert np.isfinite(watch.run["norms/jacobian_gain"].values).all()
    assert np.isnan(watch.run["norms/measured_gain"].values).all()


def test_loss_scale_does_not_matter():
    model, x = (
        nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 1)),
        torch.randn(3, 8, generator=torch.Generator().manual_seed(0)),
    )
    found = []
    for scale in (1.0, 2.0**12):
        watch = ks.watch(model, probes="norms", sites="leaves")
        (scale * model(x.clone().requires_grad_()).square().sum()).backward()
        watch.close()
        found.append(watch.run["norms/measured_gain"].values.item())
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), split=st.integers(1, 6), kind=st.sampled_from(["layer", "rms", "dyt", "scale"]))
def test_merge_law(seed, split, kind):
    """of(a ++ b) == merge(of(a), of(b)) for views that depend on the module."""
    draw = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(7, 3, 8, generator=draw) * torch.rand(7, 1, 1, generator=draw).exp2() for _ in range(2))
    owner = build(
        "dyt" if kind == "dyt" else "pre_ln", depth=2, width=8, heads=2, norm=kind if kind != "dyt" else "rms"
    )
    owner = off_ones(owner).sublayers[0].norm
    for probe, tensors in ((NORMS, (x,)), (NORM_SPECTRUM, (x,)), (NORM_TRANSPORT, (x, g))):
        parts = [tuple(t[cut] for t in tensors) for cut in (slice(None), slice(split), slice(split, None))]
        for statistic in (*probe.statistics, *probe.optional):
            whole, a, b = (statistic.terms.of(*probe.view(part, owner)).numpy() for part in parts)
            merged = statistic.terms.merge(a, b)
            np.testing.assert_allclose(merged, whole, rtol=1e-12)
            np.testing.assert_allclose(statistic.of(merged), statistic.of(whole), rtol=1e-12)


def test_quantiles_inside_a_bin():
    """Gains spread evenly over one bin: the quantiles lie inside it, far closer than its width of 9 %."""
    (quantile,) = [s for s in NORMS.statistics if s.name == "jacobian_gain_quantile"]
    table = torch.zeros(1000, 6, dtype=torch.float64)
    table[:, 0] = torch.linspace(0.001, 0.124, 1000, dtype=torch.float64).mul(2).exp2()
    got = quantile.of(quantile.terms.of(table).numpy())
    np.testing.assert_allclose(got, np.quantile(table[:, 0].sqrt(), [0.1, 0.5, 0.9]), rtol=2e-3)


def test_quantiles_outside_the_range():
    """Gains of 0 and beyond 2^24 keep their side; a token that is no number counts as above."""
    (quantile,) = [s for s in NORMS.statistics if s.name == "jacobian_gain_quantile"]

    def of(*gains: float) -> list[float]:
        table = torch.zeros(len(gains), 6, dtype=torch.float64)
        table[:, 0] = torch.tensor(gains, dtype=torch.float64).square()
        return quantile.of(quantile.terms.of(table).numpy()).tolist()

    assert of(0.0, 0.0, 0.0) == [0, 0, 0]
    assert of(1e9, float("nan"), float("inf")) == [float("inf")] * 3
    assert of(0.0, 1.0, float("nan"))[1] == pytest.approx(1.0, rel=2 ** (1 / 8) - 1)
    assert np.isnan(of()).all()


def case(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, CASES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_case_affine():
    """Exact spectral and Frobenius norms per token; max|gamma| / s is only a bound."""
    from keelscope.jacobian.closed_forms import frobenius_gain, row_gains
    from keelscope.jacobian.recognition import recognise
    from keelscope.jacobian.spectrum import sigma_max

    affine = case("ln_jacobian_affine")
    model, _ = affine.build()
    form, x = recognise(model[0]), affine.data()
    want = affine.EXPECT["evidence"]
    np.testing.assert_allclose(sigma_max(form, x), want["spectral"], rtol=1e-8)
    np.testing.assert_allclose(frobenius_gain(form, x) * 6**0.5, want["frobenius"], rtol=1e-8)
    np.testing.assert_allclose(row_gains(form, x).sigma_max, want["naive_max_gain_over_std (wrong)"], rtol=1e-8)


def test_case_two_features():
    """A LayerNorm over two features lets eps / s^3 through, which the recorded gains say."""
    two = case("ln_two_features")
    model, step = two.build()
    watch = ks.watch(model, probes="norms+sigma_max_exact", sites="all")
    step(model)
    watch.close()
    run, want = watch.run, two.EXPECT["evidence"]
    spectral = want["spectral_per_row"]
    assert run["norms/sigma_max_exact"].values.item() == pytest.approx(max(spectral), rel=1e-4)
    assert run["norms/sigma_max"].values.item() == pytest.approx(max(spectral), rel=1e-4)
    rms = np.sqrt(np.mean(np.square(spectral)) / 2)
    assert run["norms/jacobian_gain"].values.item() == pytest.approx(rms, rel=1e-4)
    assert run["norms/measured_gain"].values.item() == pytest.approx(want["drop_across_norm"], rel=1e-3)


def test_quantiles_of_many_sites_are_those_of_each():
    counts = np.random.default_rng(0).poisson(0.3, (600, 386)).astype(np.float64)
    counts[5] = 0.0
    named = {str(i): counts[:, i] for i in range(386)}
    with np.errstate(all="ignore"):  # as where statistics are finished
        together = norms._quantiles(named)
        apart = [norms._quantiles({name: column[i] for name, column in named.items()}) for i in range(600)]
    assert together.shape == (600, len(norms.QUANTILES))
    assert np.array_equal(together, np.stack(apart), equal_nan=True)
    assert np.isnan(together[5]).all()


@pytest.mark.parametrize("rows", [0, 255, 256, 70_000])
def test_counts_of_few_and_of_many_rows(rows):
    """The kernel packs them in integers that are as narrow as the rows are few."""
    gains = torch.full((rows, 6), 0.25, dtype=torch.float64)
    gains[: rows // 7, 0] = 4.0
    board = Board()
    slots = [board.put(norms._HISTOGRAM, (g,)) for g in (gains, gains[:1], gains)]
    found = gather(slots, norms._HISTOGRAM, board.fetch())
    assert np.array_equal(found[0], norms._histogram_of(gains).numpy())
    assert found.sum(-1).tolist() == [rows, min(rows, 1), rows]
    assert np.array_equal(gather(slots[::2], norms._HISTOGRAM, board.fetch()), found[::2])
