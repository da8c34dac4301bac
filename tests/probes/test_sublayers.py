"""What the probe of sub-layers records, against the same numbers computed in plain sight."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import keelscope as ks
from keelscope.models import build
from keelscope.text import Text
from keelscope_probes.sublayers import RESIDUAL_GAINS, RESIDUAL_SUMS

TOKENS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))


def loss_of(model):
    return F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten().roll(-1))


def recorded(model, *, steps=1, every=1, micro=1, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ks.watch(model, optimizer=optimizer, probes=["sublayers"], every=every, **options) as watch:
        for _ in range(steps):
            for _ in range(micro):
                loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    return watch.run


def plain(model):
    """Streams, branch outputs and gradients of a reference model by torch's own means."""
    seen = {"x": [], "f": []}

    def before(_, args):
        args[0].retain_grad()
        seen["x"].append(args[0])

    hooks = [sub.register_forward_pre_hook(before) for sub in model.sublayers]
    hooks += [sub.branch.register_forward_hook(lambda _, __, out: seen["f"].append(out)) for sub in model.sublayers]
    loss_of(model).backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    return seen


def reference(scheme, **options):
    return build(scheme, **{"depth": 6, "width": 16, "heads": 2, "vocabulary": 64, **options})


@pytest.mark.parametrize("scheme", ["keel", "post_ln", "pre_ln", "deepnorm", "layerscale", "rezero", "dyt"])
def test_sums(scheme):
    model = reference(scheme)
    run, seen = recorded(model), plain(reference(scheme))
    factor = {"layerscale": 0.1, "rezero": 0.0}.get(scheme, 1.0)
    alphas = {"keel": [1, 1, 6, 6, 6, 6], "deepnorm": [6**0.25] * 6}.get(scheme, [1] * 6)
    value = {name: run[f"sublayers/{name}"].values[0] for name in ("alpha", "branch_gain", "cosine", "predicted_slope")}
    for index, (stream, output) in enumerate(zip(seen["x"], seen["f"], strict=True)):
        x, f = stream.detach().double(), factor * output.detach().double()
        v = float(f.square().mean() / x.square().mean())
        assert value["alpha"][index] == pytest.approx(alphas[index], rel=1e-6)
        assert value["branch_gain"][index] == pytest.approx(v, rel=1e-5)
        if factor:
            assert value["cosine"][index] == pytest.approx(
                float((x * f).sum() / x.norm() / f.norm()), rel=1e-4, abs=1e-7
            )
        normed = scheme in {"keel", "post_ln", "deepnorm"} and not (scheme == "keel" and index == 0)
        predicted = math.log10(1 + v / alphas[index] ** 2) / 2 if normed else 0.0
        assert value["predicted_slope"][index] == pytest.approx(predicted, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("scheme", ["keel", "post_ln", "pre_ln"])
def test_gradients(scheme):
    run, seen = recorded(reference(scheme)), plain(reference(scheme))
    entering = run["sublayers/input_gradient"].values[0]
    assert entering == pytest.approx([x.grad.norm().item() for x in seen["x"]], rel=1e-5)
    assert run["sublayers/output_gradient"].values[0, :-1] == pytest.approx(entering[1:], rel=1e-12)
    s, b = (run[f"sublayers/{name}_part"].values[0] for name in ("shortcut", "branch"))
    cosine = run["sublayers/path_cosine"].values[0]
    assert np.sqrt(s**2 + b**2 + 2 * s * b * cosine) == pytest.approx(entering, rel=1e-5)
    alpha, total = (run[f"sublayers/{name}"].values[0] for name in ("alpha", "sum_gradient"))
    assert s == pytest.approx(alpha * total, rel=1e-5)


def test_shortcut_gain_is_that_of_the_jacobian():
    model = reference("keel", norm="layer")
    gains = recorded(model)["sublayers/shortcut_gain"].values[0]
    seen = plain(reference("keel", norm="layer"))
    for index in (0, 1, 4):
        sub, x, f = model.sublayers[index], seen["x"][index].detach(), seen["f"][index].detach()
        alpha = 1.0 if index < 2 else 6.0
        z = (alpha * x + f).reshape(-1, 16).double()
        norm = nn.Identity() if index == 0 else nn.LayerNorm(16, eps=1e-5).double()
        squares = [torch.autograd.functional.jacobian(norm, row).square().sum() / 16 for row in z]
        assert gains[index] == pytest.approx(alpha * math.sqrt(float(torch.stack(squares).mean())), rel=1e-5)
        assert sub.branch is not None


@pytest.mark.parametrize(("alpha", "share"), [(1024, 0.85), (512, 0.72), (256, 0.53), (64, 0.17)])
def test_low_precision_absorbs_what_the_branch_adds(alpha, share):
    """Shares of entries that bf16 leaves unchanged, measured for |F| of about .65."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 64, generator=generator).to(torch.bfloat16)
    f = (0.65 * torch.randn(256, 64, generator=generator)).to(torch.bfloat16)
    view = RESIDUAL_SUMS.view((x, alpha * x, f), nn.Identity())
    absorbed = next(s for s in RESIDUAL_SUMS.statistics if s.name == "absorbed_fraction")
    assert absorbed.value(*view) == pytest.approx(share, abs=0.05)
    single = RESIDUAL_SUMS.view((x.float(), alpha * x.float(), f.float()), nn.Identity())
    assert absorbed.value(*single) < 1e-3


def test_a_norm_that_is_not_recognised_has_no_gain():
    x = torch.ones(2, 3)
    assert RESIDUAL_GAINS.view((x, x, x), nn.Module()) is None


class TestSchedule:
    def test_every_tenth_recorded_step_and_the_first(self):
        run = recorded(reference("pre_ln"), steps=21)
        assert run["sublayers/alpha"].steps.tolist() == [0, 10, 20]

    def test_accumulation_shows_the_first_micro_batch(self):
        once, twice = (recorded(reference("pre_ln"), micro=micro) for micro in (1, 2))
        for name in ("branch_gain", "input_gradient", "shortcut_only_gradient"):
            assert np.array_equal(once[f"sublayers/{name}"].values[0], twice[f"sublayers/{name}"].values[0])

    def test_the_loss_scale_is_taken_out(self):
        model = reference("post_ln")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with ks.watch(model, optimizer=optimizer, probes=["sublayers"]) as watch:
            scaler.scale(loss_of(model)).backward()
            scaler.step(optimizer)
            scaler.update()
        plainly = recorded(reference("post_ln"))
        for name in ("input_gradient", "shortcut_only_gradient", "path_cosine"):
            scaled = watch.run[f"sublayers/{name}"].values[0]
            assert scaled == pytest.approx(plainly[f"sublayers/{name}"].values[0], rel=1e-4)


class TestAxis:
    def test_named_after_branches_in_execution_order(self):
        run = recorded(reference("keel"))
        sites = run["sublayers/alpha"].sites
        assert [site.path for site in sites] == [f"sublayers.{i}.branch" for i in range(6)]
        assert [site.kind for site in sites] == [sublayer.form for sublayer in run.info.sublayers]
        assert {site.role for site in sites} == {"sublayer"}
        assert [site.position for site in sites] == list(range(6))

    def test_a_model_without_sublayers_has_no_group(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        report = ks.report(model, torch.ones(2, 4), lambda output, _: output.sum())
        assert report.run.get("sublayers/alpha") is None

    def test_a_report_of_a_model_has_them(self):
        report = ks.report(reference("keel"), TOKENS, lambda output, _: output.square().mean())
        assert report.run["sublayers/shortcut_only_gradient"].values.shape == (1, 6)


@pytest.mark.parametrize(
    "scheme", ["keel", *(pytest.param(name, marks=pytest.mark.slow) for name in ("post_ln", "pre_ln", "deepnorm"))]
)
def test_behaviour_at_1024_sublayers(scheme):
    """residual-schemes 2.2: shortcut products .74, 1, the float32 floor, .988."""
    model = build(scheme, depth=1024, width=32, heads=4, vocabulary=64)
    report = ks.report(
        model, TOKENS, lambda output, _: F.cross_entropy(output.flatten(0, 1), TOKENS.flatten().roll(-1))
    )
    alone = report.run["sublayers/shortcut_only_gradient"].values[0]
    product = alone[0] / alone[-1]
    if scheme == "post_ln":
        assert alone[0] < 1e-37  # below what float32 holds: not a number to fit a line through
    else:
        assert product == pytest.approx({"keel": 0.74, "pre_ln": 1.0, "deepnorm": 0.988}[scheme], abs=0.05)


@pytest.fixture(scope="module")
def measured():
    """``measured(scheme, seed, **options)``: slope of the shortcut-only gradient, and the mean of the predicted one."""

    text = Text.read(Path(__file__).parents[2] / "LICENSE")
    number = (torch.bincount(text.tokens.long(), minlength=256) > 0).cumsum(0) - 1  # byte -> character
    tokens, targets = (number[bytes_] for bytes_ in text.batch(0, 8, 32, seed=0))
    vocabulary = int(number[-1]) + 1

    def measure(scheme, seed, depth=64, **options):
        model = build(scheme, depth=depth, width=64, heads=4, seed=seed, vocabulary=vocabulary, **options)
        report = ks.report(model, tokens, lambda output, _: F.cross_entropy(output.flatten(0, 1), targets.flatten()))
        middle = slice(depth // 10, depth - depth // 10)
        alone = np.log10(report.run["sublayers/shortcut_only_gradient"].values[0])
        slope = np.polyfit(np.arange(depth)[middle], alone[middle], 1)[0]
        return slope, report.run["sublayers/predicted_slope"].values[0, middle].mean()

    return measure


@pytest.mark.parametrize("seed", [0, 1])
class TestAcceptance:
    """residual-schemes 4, measured by the tool itself on real text."""

    def test_post_ln_loses_what_its_branches_say(self, measured, seed):
        slope, predicted = measured("post_ln", seed)
        assert 0.09 < slope < 0.13
        assert slope == pytest.approx(predicted, rel=0.05)

    def test_post_ln_with_small_weights_loses_nothing(self, measured, seed):
        slope, predicted = measured("post_ln", seed, init="normal")
        assert abs(slope) < 1e-3
        assert predicted < 1e-3

    @pytest.mark.parametrize("scheme", ["pre_ln", "rezero"])
    def test_plain_shortcuts_lose_nothing(self, measured, seed, scheme):
        slope, predicted = measured(scheme, seed)
        assert abs(slope) < 1e-9
        assert abs(predicted) < 1e-9

    @pytest.mark.parametrize("scheme", ["keel", "deepnorm"])
    def test_scaled_shortcuts_lose_almost_nothing(self, measured, seed, scheme):
        slope, predicted = measured(scheme, seed)
        assert abs(slope) < 1e-3
        assert slope == pytest.approx(predicted, abs=1e-3)

    def test_highway(self, measured, seed):
        slope, predicted = measured("highway", seed)
        assert slope == pytest.approx(0.0551, rel=0.01)
        assert predicted == pytest.approx(slope, rel=1e-3)

    def test_ngpt(self, measured, seed):
        slope, predicted = measured("ngpt", seed)
        assert 4e-4 < slope < 8e-4
        assert 4e-4 < predicted < 8e-4
