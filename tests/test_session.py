"""Rows, steps and lifecycles of a watch: which step a number belongs to, and that nothing stays behind."""

from __future__ import annotations

import gc
import math
import random
import subprocess
import sys
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope import kernel
from keelscope.errors import (
    CoverageWarning,
    NothingToObserveError,
    ProbeError,
    RecordingWarning,
    RunExistsError,
    UnknownNameError,
    UsageError,
)
from keelscope.models import build
from keelscope.probe import Tap, TensorProbe
from keelscope.statistics import NORM, RMS


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def batch(step: int = 0) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1000 + step))


def norm(tensor: torch.Tensor) -> float:
    return tensor.double().norm().item()


def hooks_on(model: nn.Module) -> int:
    modules = sum(
        len(getattr(module, name))
        for module in model.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    )
    parameters = sum(
        len(getattr(p, name) or ())
        for p in model.parameters()
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    )
    return modules + parameters


def hooks_of(optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def sgd(model: nn.Module, lr: float = 0.1, **options) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


class Reference:
    """A loop without hooks that keeps what the watch should have recorded."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.gradients: list[list[float]] = []
        self.weights: list[list[float]] = []
        self.losses: list[float] = []

    def note(self, loss: torch.Tensor) -> None:
        self.losses.append(float(loss.detach()))
        self.gradients.append([math.nan if p.grad is None else norm(p.grad) for p in self.model.parameters()])
        self.weights.append([norm(p) for p in self.model.parameters()])

    def check(self, run: ks.Run, steps: list[int]) -> None:
        series = run["parameter_gradients/norm"]
        assert series.steps.tolist() == steps
        np.testing.assert_allclose(series.values, np.array(self.gradients)[steps], rtol=1e-6)


@pytest.mark.parametrize("every", [1, 2, 3, 7, ks.Schedule(every=4, dense=3)])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mode", ["optimizer", "step"])
def test_rows_and_scalars_belong_to_their_step(every, when, mode):
    model = mlp()
    optimizer, reference = sgd(model), Reference(model)
    with ks.watch(model, optimizer=optimizer if mode == "optimizer" else None, every=every, sites="all") as watch:
        for step in range(10):
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            loss.backward()
            reference.note(loss)
            if when == "before":
                watch.log(loss=loss)
            optimizer.step()
            watch.step()
            if when == "after":
                watch.log(loss=loss, extra=step)
    recorded = (
        [step for step in range(10) if ks.Schedule(every).records(step)] if isinstance(every, int) else [0, 1, 2, 4, 8]
    )
    reference.check(watch.run, recorded)
    assert watch.run["scalars/loss"].steps.tolist() == list(range(10))
    np.testing.assert_allclose(watch.run["scalars/loss"].values, reference.losses, rtol=1e-6)
    if when == "after":
        assert watch.run["scalars/extra"].values.tolist() == list(range(10))


def test_numbers_of_both_habits_in_one_loop():
    """`loss` is logged before the optimizer steps, `score` after it, and both only now and then."""
    model = mlp()
    optimizer = sgd(model)
    with ks.watch(model, optimizer=optimizer, every=4) as watch:
        watch.log(seed=7)
        for step in range(9):
            model(batch(step)).sum().backward()
            if step % 2 == 0:
                watch.log(loss=step)
            optimizer.step()
            if step % 3 == 0:
                watch.log(score=10 * step)
    loss, score = (watch.run[f"scalars/{name}"] for name in ("loss", "score"))
    at = dict(zip(loss.steps.tolist(), loss.values.tolist(), strict=True))
    assert {step: value for step, value in at.items() if not math.isnan(value)} == {0: 0, 2: 2, 4: 4, 6: 6, 8: 8}
    at = dict(zip(score.steps.tolist(), score.values.tolist(), strict=True))
    assert {step: value for step, value in at.items() if not math.isnan(value)} == {0: 0, 3: 30, 6: 60}
    assert watch.run["scalars/seed"].values[0] == 7


def test_a_score_logged_after_each_validation_is_at_the_step_before():
    """Also where one validation ran before training began, which has no step of its own."""
    model = mlp()
    optimizer = sgd(model)

    def validate(watch: ks.Watch, score: int) -> None:
        with torch.no_grad():
            model(batch())
        watch.log(score=score)

    with ks.watch(model, optimizer=optimizer, every=4) as watch:
        validate(watch, -1)
        for step in range(7):
            model(batch(step)).sum().backward()
            optimizer.step()
            if step % 2:
                validate(watch, step)
    score = watch.run["scalars/score"]
    at = dict(zip(score.steps.tolist(), score.values.tolist(), strict=True))
    assert {step: value for step, value in at.items() if not math.isnan(value)} == {0: -1, 1: 1, 3: 3, 5: 5}


@pytest.mark.parametrize("mode", ["optimizer", "step", "backward"])
def test_steps_go_on_where_training_was_resumed(mode, recwarn):
    model = mlp()
    optimizer, reference = sgd(model), Reference(model)
    with ks.watch(model, optimizer=optimizer if mode == "optimizer" else None, every=2, first_step=7) as watch:
        watch.log(loss=0.5)
        for step in range(5):
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            loss.backward()
            reference.note(loss)
            optimizer.step()
            if mode == "step":
                watch.step()
            watch.log(loss=step)
    reference.gradients = [[]] * 7 + reference.gradients
    assert watch.run["scalars/loss"].steps.tolist() == [7, 8, 9, 10, 11]
    assert watch.run["scalars/loss"].values.tolist() == [0, 1, 2, 3, 4]
    series = watch.run["parameter_gradients/norm"]
    assert series.steps.tolist() == [8, 10]
    np.testing.assert_allclose(series.values, [reference.gradients[step] for step in (8, 10)], rtol=1e-6)


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "7"])
def test_unusable_first_step(wrong):
    with pytest.raises(UsageError, match=r"first_step= takes the number of completed steps"):
        ks.watch(mlp(), first_step=wrong)


def test_without_optimizer_and_step_a_backward_is_a_row():
    model = mlp()
    optimizer, reference = sgd(model), Reference(model)

    def loop() -> ks.Watch:
        with ks.watch(model) as watch:
            for step in range(4):
                optimizer.zero_grad()
                loss = model(batch(step)).square().mean()
                loss.backward()
                reference.note(loss)
                optimizer.step()
                watch.log(loss=loss)
        return watch

    with pytest.warns(CoverageWarning, match="one row is recorded per backward pass") as caught:
        watch = loop()
    assert len(caught) == 1
    reference.check(watch.run, [0, 1, 2, 3])
    np.testing.assert_allclose(watch.run["scalars/loss"].values, reference.losses, rtol=1e-6)


def test_accumulation_is_one_row():
    model = mlp()
    optimizer, reference = sgd(model), Reference(model)
    levels = []
    with ks.watch(model, optimizer=optimizer, sites="all") as watch:
        for step in range(3):
            optimizer.zero_grad()
            squares = 0.0
            for micro in range(4):
                output = model(batch(10 * step + micro))
                output.retain_grad()
                loss = output.square().mean() / 4
                loss.backward()
                squares += norm(output.grad) ** 2
            levels.append(math.sqrt(squares))
            reference.note(loss)
            optimizer.step()
            watch.log(loss=loss)
    reference.check(watch.run, [0, 1, 2])
    np.testing.assert_allclose(watch.run["gradients/norm"].of("2").values[:, 0], levels, rtol=1e-6)


def clipped(model):
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def replaced(model):
    for parameter in model.parameters():
        parameter.grad = 0.5 * parameter.grad


def cleared(model):
    model.zero_grad()


def zeroed(model):
    model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("edit", "counted"), [(clipped, 3), (replaced, 3), (cleared, 1), (zeroed, 1)])
def test_micro_batches_whose_gradients_are_edited_are_one_row_and_cleared_ones_are_left_out(
    edit, counted, native, monkeypatch
):
    if not native:
        monkeypatch.setattr(kernel, "_native", None)
    model = mlp()
    optimizer, expected = sgd(model), []
    with ks.watch(model, optimizer=optimizer, sites="all") as watch:
        for step in range(4):
            outputs = []
            for micro in range(3):
                output = model((1 + micro) * batch(10 * step + micro))
                output.square().mean().backward()
                outputs.append(output.detach())
                if micro < 2:
                    edit(model)
            expected.append(float(torch.stack(outputs[-counted:]).square().mean().sqrt()))
            optimizer.step()
            optimizer.zero_grad()
    np.testing.assert_allclose(watch.run["outputs/rms"].of("2").values[:, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("every", [1, 2])
def test_validation_stays_out(every):
    """Forwards without gradient before, inside, after and long after a step leave the numbers alone."""
    model = mlp()
    optimizer = sgd(model)
    means = []

    def validate(scale: float) -> None:
        with torch.no_grad():
            model(scale * batch())
        with torch.inference_mode():
            model(scale * batch())

    with ks.watch(model, optimizer=optimizer, every=every, sites="all", probes=["default", "inputs"]) as watch:
        validate(1e3)
        for step in range(4):
            output = model(batch(step))
            means.append(output.double().mean().item())
            validate(1e4)
            output.sum().backward()
            validate(1e5)
            optimizer.step()
            validate(1e6)
            watch.log(loss=step)
        validate(1e7)
    series = watch.run["outputs/mean"]
    assert series.steps.tolist() == list(range(0, 4, every))
    np.testing.assert_allclose(series.of("2").values[:, 0], means[::every], rtol=1e-6)
    assert np.nanmax(watch.run["inputs/max_abs"].of("0").values) < 10
    assert watch.run["scalars/loss"].values.tolist() == [0, 1, 2, 3]


def test_what_is_done_at_a_module_does_not_grow_with_depth():
    """Deciding where a forward belongs looks at no other call of the step."""

    class Calls(list):
        walked = 0

        def __iter__(self):
            Calls.walked += 1
            return super().__iter__()

    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(30)])
    optimizer = sgd(model)
    with ks.watch(model, optimizer=optimizer, sites="all") as watch:
        watch._recorder.current.calls = Calls()
        model(batch()).sum().backward()
        optimizer.step()
        assert Calls.walked < 10


def test_validation_is_not_measured():
    """Once a step has shown how the model trains, forwards without gradient cost nothing and hold no memory."""
    seen = []
    probe = TensorProbe("p", Tap.OUTPUT, (RMS,), views=lambda tensors, _: (seen.append(1), tensors)[1])
    model = mlp()
    optimizer = sgd(model)
    with ks.watch(model, optimizer=optimizer, sites="all", probes=[probe]) as watch:
        for step in range(3):
            model(batch(step)).sum().backward()
            optimizer.step()
            before = len(seen)
            with torch.no_grad():
                for _ in range(5):
                    model(batch())
            assert len(seen) - before == (20 if step == 0 else 0)
    assert watch.run["p/rms"].steps.tolist() == [0, 1, 2]


def test_a_model_that_only_runs_forward_has_a_row():
    model = mlp()
    with ks.watch(model, sites="all") as watch, torch.no_grad():
        output = model(batch())
    assert watch.run["outputs/mean"].of("2").values[0, 0] == pytest.approx(output.mean().item(), rel=1e-6)
    assert {entry.status for entry in watch.coverage if entry.what == "parameter"} == {"no_backward"}


def test_gan_with_two_optimizers():
    """A row closes when both have stepped; what the generator's loss does to the discriminator is not its gradient."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"G": nn.Linear(2, 2), "D": nn.Linear(2, 1)})
    generator, discriminator = sgd(model["G"]), sgd(model["D"])
    wanted, updates = [], []
    with ks.watch(model, optimizer=[discriminator, generator], probes=["default", "updates"]) as watch:
        for step in range(4):
            noise = torch.randn(3, 2, generator=torch.Generator().manual_seed(step))
            before = [p.detach().clone() for p in (model["G"].weight, model["D"].weight)]
            discriminator.zero_grad()
            (model["D"](noise).mean() - model["D"](model["G"](noise).detach()).square().mean()).backward()
            of_d = norm(model["D"].weight.grad)
            discriminator.step()
            generator.zero_grad()
            model["D"](model["G"](noise)).mean().backward()
            wanted.append([norm(model["G"].weight.grad), of_d])
            generator.step()
            after = (model["G"].weight, model["D"].weight)
            updates.append([norm(a.detach() - b) for a, b in zip(after, before, strict=True)])
            watch.log(loss=step)
    for key, values in (("parameter_gradients/norm", wanted), ("updates/norm", updates)):
        series = watch.run[key]
        assert series.steps.tolist() == [0, 1, 2, 3]
        got = np.hstack([series.of("G.weight").values, series.of("D.weight").values])
        np.testing.assert_allclose(got, values, rtol=1e-5)
    assert watch.run["scalars/loss"].values.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", ["in step", "before clipping"])
def test_mixed_precision_is_unscaled(unscale, fused):
    model = mlp()
    optimizer = sgd(model, lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    wanted, used, levels = [], [], []
    probes = ["default", "parameter_gradients+clipped_norm"]
    with ks.watch(model, optimizer=optimizer, sites="all", probes=probes) as watch:
        for step in range(5):
            optimizer.zero_grad()
            scale = scaler.get_scale()
            output = model(batch(step).expand(2, 5, 4))
            output.retain_grad()
            loss = output.square().mean()
            scaler.scale(loss).backward()
            wanted.append([norm(p.grad) / scale for p in model.parameters()])
            levels.append((output.grad / scale)[:, 2:].double().norm(dim=-1).log10().mean().item())
            if unscale == "before clipping":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
            used.append([norm(p.grad) for p in model.parameters()] if unscale == "before clipping" else wanted[-1])
            scaler.step(optimizer)
            scaler.update()
            watch.log(loss=loss)
    assert scaler.get_scale() > 1024, "the scale must change during the test"
    np.testing.assert_allclose(watch.run["parameter_gradients/norm"].values, wanted, rtol=1e-5)
    np.testing.assert_allclose(watch.run["parameter_gradients/clipped_norm"].values, used, rtol=1e-5)
    totals = np.linalg.norm(wanted, axis=1)
    np.testing.assert_allclose(watch.run["scalars/grad_norm_total"].values, totals, rtol=1e-5)
    np.testing.assert_allclose(watch.run["gradients/late_token_level"].of("2").values[:, 0], levels, rtol=1e-5)


def test_step_skipped_by_the_scaler_does_not_shift_the_others():
    model = mlp()
    optimizer = sgd(model, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    wanted, levels, losses = [], [], []
    with ks.watch(model, optimizer=optimizer, sites="all") as watch:
        for step in range(5):
            optimizer.zero_grad()
            output = model(batch(step))
            output.retain_grad()
            loss = output.square().mean()
            scaler.scale(loss).backward()
            if step == 2:
                model[0].weight.grad[0, 0] = math.inf
            else:
                wanted.append([norm(p.grad) / scaler.get_scale() for p in model.parameters()])
                levels.append(norm(output.grad) / scaler.get_scale())
                losses.append(loss.item())
            scaler.step(optimizer)
            scaler.update()
            watch.log(loss=loss)
    assert watch.run["parameter_gradients/norm"].steps.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(watch.run["parameter_gradients/norm"].values, wanted, rtol=1e-5)
    np.testing.assert_allclose(watch.run["gradients/norm"].of("2").values[:, 0], levels, rtol=1e-5)
    np.testing.assert_allclose(watch.run["scalars/loss"].values, losses, rtol=1e-6)


@pytest.mark.parametrize("unscale", [False, True])
def test_a_step_that_a_fused_optimizer_skips_is_marked(unscale):
    """The scaler calls it for an overflow as well: the step is counted, and nothing is learned."""
    model = mlp()
    optimizer = sgd(model, lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with ks.watch(model, optimizer=optimizer) as watch:
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(model(batch(step)).square().mean()).backward()
            if step == 2:
                model[0].weight.grad[0, 0] = math.inf
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert watch.run["scalars/skipped"].values.tolist() == [0, 0, 1, 0]
    assert watch.run["parameter_gradients/norm"].steps.tolist() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("error")
def test_a_scaler_that_is_turned_off():
    model = mlp()
    optimizer = sgd(model, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    wanted = []
    with ks.watch(model, optimizer=optimizer) as watch:
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(batch(step)).square().mean()).backward()
            wanted.append([norm(p.grad) for p in model.parameters()])
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
    np.testing.assert_allclose(watch.run["parameter_gradients/norm"].values, wanted, rtol=1e-5)
    assert watch.run["scalars/lr"].values.tolist() == [1e-2] * 3


@pytest.mark.parametrize("skipped", [(0,), (1,), (0, 1, 2), (10,)])
@pytest.mark.parametrize(("scheme", "options"), [("keel", {"alpha_learnable": True}), ("keel_gate", {"gate": "token"})])
def test_attempts_that_the_scaler_skips_leave_no_trace_in_any_group(scheme, options, skipped):
    """Nothing is learned and the batch is always the same, so every row is that of the first step without a skip."""

    def trained(skipped):
        model = build(scheme, depth=4, width=8, heads=2, **options)
        optimizer = sgd(model, lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with ks.watch(model, optimizer=optimizer, probes=["default", "sublayers"]) as watch:
            for attempt in range(12):
                optimizer.zero_grad()
                scaler.scale(model(torch.arange(8).view(1, 8)).logsumexp(-1).mean()).backward()
                if attempt in skipped:
                    model.sublayers[0].branch.output.weight.grad[0, 0] = math.inf
                scaler.step(optimizer)
                scaler.update()
        return watch.run

    whole, run = trained(()), trained(skipped)
    assert run.steps.tolist() == list(range(12 - len(skipped)))
    for key in (key for key in whole.keys() if not key.startswith("scalars/")):  # noqa: SIM118 - a run has no iterator
        values = run[key].values
        wanted = np.broadcast_to(whole[key].values[0], values.shape)
        np.testing.assert_allclose(values, wanted, rtol=1e-4, atol=1e-9, err_msg=key)


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_optimizer_that_runs_the_loop_itself(how):
    model = mlp()
    optimizer, reference = sgd(model), Reference(model)
    with ks.watch(model, optimizer=optimizer, probes=["default", "updates"]) as watch:
        for step in range(5):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(batch(step)).square().mean()
                loss.backward()
                reference.note(loss)
                return loss

            loss = optimizer.step(closure) if how == "positional" else optimizer.step(closure=closure)
            watch.log(loss=loss)
    reference.check(watch.run, [0, 1, 2, 3, 4])
    np.testing.assert_allclose(watch.run["scalars/loss"].values, reference.losses, rtol=1e-6)
    np.testing.assert_allclose(watch.run["updates/norm"].values, 0.1 * np.array(reference.gradients), rtol=1e-4)


def test_lbfgs_has_the_gradient_of_its_last_evaluation():
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    reference, ends = Reference(model), []
    with ks.watch(model, optimizer=optimizer) as watch:
        for _ in range(4):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(batch()).square().mean()
                loss.backward()
                reference.note(loss)
                return loss

            optimizer.step(closure)
            ends.append(reference.gradients[-1])
    np.testing.assert_allclose(watch.run["parameter_gradients/norm"].values, ends, rtol=1e-6)
    assert watch.run["parameter_gradients/norm"].steps.tolist() == [0, 1, 2, 3]


def test_gradients_set_by_hand():
    model = mlp()
    optimizer, reference = sgd(model), Reference(model)
    with ks.watch(model, optimizer=optimizer) as watch:
        for step in range(3):
            loss = model(batch(step)).square().mean()
            for parameter, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                parameter.grad = 2 * gradient
            reference.note(loss)
            optimizer.step()
    reference.check(watch.run, [0, 1, 2])


@pytest.mark.parametrize("mode", ["optimizer", "step"])
def test_steps_without_a_forward_are_rows(mode):
    """A model that is called through its functional form still steps."""
    model = mlp()
    optimizer = sgd(model)
    with ks.watch(model, optimizer=optimizer if mode == "optimizer" else None) as watch:
        for step in range(3):
            optimizer.zero_grad()
            (step * model[0].weight).sum().backward()
            optimizer.step()
            watch.step()
    series = watch.run["parameter_gradients/norm"].of("0.weight")
    assert series.steps.tolist() == [0, 1, 2]
    np.testing.assert_allclose(series.values[:, 0], [step * math.sqrt(24) for step in range(3)], rtol=1e-6)


def test_weights_are_those_before_the_step_and_updates_what_it_added():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights, updates = [], []
    probes = [*(TensorProbe("w", Tap.PARAMETER, (RMS,)),), "updates", "parameters", "gradients"]
    with ks.watch(model, optimizer=optimizer, probes=probes) as watch:
        for step in range(4):
            before = [p.detach().clone() for p in model.parameters()]
            weights.append([p.double().square().mean().sqrt().item() for p in before])
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
            updates.append([norm(p.detach() - b) for p, b in zip(model.parameters(), before, strict=True)])
    np.testing.assert_allclose(watch.run["w/rms"].values, weights, rtol=1e-6)
    np.testing.assert_allclose(watch.run["updates/norm"].values, updates, rtol=1e-4)
    ratio = np.array(updates) / (np.array(weights) * np.sqrt([24, 6, 6, 1]))
    np.testing.assert_allclose(watch.run["updates/ratio"].values, ratio, rtol=1e-4)
    np.testing.assert_allclose(watch.run["parameters/rms"].values[0], weights[0], rtol=1e-6)


def test_own_scalars():
    model = mlp()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    totals = []
    with ks.watch(model, optimizer=optimizer) as watch:
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            totals.append(nn.utils.clip_grad_norm_(model.parameters(), 1e-3).item())
            optimizer.step()
            schedule.step()
    np.testing.assert_allclose(watch.run["scalars/grad_norm_total"].values, totals, rtol=1e-5)
    np.testing.assert_allclose(watch.run["scalars/lr"].values, [0.1, 0.05, 0.025])
    assert (watch.run["scalars/watch_ms"].values > 0).all()
    assert np.isnan(watch.run["scalars/loss"].values).all()


@pytest.mark.parametrize("arm", [None, ks.Arm()])
def test_a_total_that_the_user_logs_is_not_replaced(arm):
    model, found = mlp(), [1.0, math.nan, None, None, 2.0]
    optimizer = sgd(model)
    expected = []
    with ks.watch(model, optimizer=optimizer, arm=arm) as watch:
        for step, mine in enumerate(found):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            whole = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            expected.append(norm(whole) if mine is None else mine)
            optimizer.step()
            if mine is not None:
                watch.log(grad_norm_total=mine)
    np.testing.assert_allclose(watch.run["scalars/grad_norm_total"].values, expected, rtol=1e-6)


def test_the_total_is_that_of_the_first_probe_on_every_row():
    model = mlp()
    optimizer = sgd(model)
    mine = TensorProbe("firsts", Tap.PARAMETER_GRADIENT, (NORM,), views=lambda tensors, _: (tensors[0].flatten()[:1],))
    expected = []
    with ks.watch(model, optimizer=optimizer, probes=(mine, "parameter_gradients")) as watch:
        for step in range(4):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            expected.append(norm(torch.stack([parameter.grad.flatten()[0] for parameter in model.parameters()])))
            optimizer.step()
    np.testing.assert_allclose(watch.run["scalars/grad_norm_total"].values, expected, rtol=1e-6)


def test_unfrozen_later():
    model = mlp()
    model[0].requires_grad_(requires_grad=False)
    optimizer, reference = sgd(model), Reference(model)
    with ks.watch(model, optimizer=optimizer, sites="all") as watch:
        for step in range(4):
            if step == 2:
                assert {e.path: e.status for e in watch.coverage}["0.weight"] == "frozen"
                model[0].requires_grad_(requires_grad=True)
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            loss.backward()
            reference.note(loss)
            optimizer.step()
    assert np.isnan(reference.gradients).any()
    reference.check(watch.run, [0, 1, 2, 3])
    assert {entry.path: entry.status for entry in watch.coverage}["0.weight"] == "observed"


def test_tied_weights_count_once():
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    optimizer = sgd(model)
    with ks.watch(model, optimizer=optimizer) as watch:
        model(torch.tensor([1, 2])).square().sum().backward()
        total = norm(embedding.weight.grad)
        optimizer.step()
    series = watch.run["parameter_gradients/norm"]
    assert [(site.path, site.aliases) for site in series.sites] == [("0.weight", ("1.weight",))]
    assert series.values[0, 0] == pytest.approx(total, rel=1e-6)
    assert watch.run["scalars/grad_norm_total"].values[0] == pytest.approx(total, rel=1e-6)


def test_watching_draws_no_random_numbers():
    """Also not those of Python and numpy, and not to find out what a class of the user's does."""

    class NoisyNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x):
            noise = 1e-9 * (random.random() + np.random.rand() + torch.rand(()))  # noqa: NPY002 - a user's global state
            return self.weight * x / (x.square().mean(-1, keepdim=True) + noise).sqrt()

    def states() -> list[object]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002

    model = nn.Sequential(nn.Linear(4, 6), NoisyNorm(), nn.Linear(6, 1))
    before = states()
    watch = ks.watch(model, sites="all")
    assert states() == before
    watch.close()


class TestLifecycle:
    """Nothing stays on the model, whatever ends the watch."""

    def test_close_gives_every_hook_back(self):
        model = mlp()
        optimizer = sgd(model)
        watch = ks.watch(model, optimizer=optimizer, sites="all", probes=["default", "inputs", "updates"])
        assert hooks_on(model) > 0
        loss = model(batch()).sum()
        watch.close()
        assert hooks_on(model) == hooks_of(optimizer) == 0
        loss.backward()
        optimizer.step()
        watch.close()

    def test_hooks_are_off_between_recorded_steps(self):
        model = mlp()
        optimizer = sgd(model)
        with ks.watch(model, optimizer=optimizer, every=3, sites="all"):
            found = []
            for step in range(7):
                found.append(hooks_on(model) > 0)
                model(batch(step)).sum().backward()
                optimizer.step()
        assert found == [True, False, False, True, False, False, True]

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
    @pytest.mark.parametrize("place", ["forward", "backward", "loop"])
    def test_errors_pass_and_leave_nothing(self, error, place):
        class Failing(nn.Module):
            def forward(self, x):
                if place == "forward" and self.fail:
                    raise error("stop")
                if place == "backward" and self.fail:
                    x.register_hook(lambda _: (_ for _ in ()).throw(error("stop")))
                return x

        model = nn.Sequential(nn.Linear(4, 4), Failing(), nn.Linear(4, 1))
        model[1].fail = False
        optimizer = sgd(model)

        def loop() -> None:
            for step in range(3):
                model[1].fail = step == 2
                model(batch(step)).square().sum().backward()
                optimizer.step()
                watch.log(loss=step)
            raise error("stop")

        with pytest.raises(error, match="stop"), ks.watch(model, optimizer=optimizer, sites="all") as watch:
            loop()
        assert hooks_on(model) == hooks_of(optimizer) == 0
        complete = [0, 1, 2] if place == "loop" else [0, 1]
        assert watch.run["gradients/norm"].steps.tolist() == complete
        assert watch.run["scalars/loss"].values.tolist() == complete
        model[1].fail = False
        with ks.watch(model, sites="all") as again:
            model(batch()).sum().backward()
            again.step()
        assert np.isfinite(again.run["gradients/norm"].values).all()

    def test_user_hooks_stay_and_see_the_same(self):
        seen = []

        def train(watched: bool) -> list[float]:
            model = mlp()
            optimizer = sgd(model)
            model[0].register_forward_hook(lambda _module, _args, output: output * 2)
            model[2].register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
            model[2].register_full_backward_hook(lambda *_: seen.append(watched))
            model[0].weight.register_hook(lambda gradient: gradient * 3)
            before = hooks_on(model)
            watch = ks.watch(model, optimizer=optimizer, sites="all", probes=["default", "inputs"]) if watched else None
            for step in range(3):
                optimizer.zero_grad()
                model(batch(step)).square().sum().backward()
                optimizer.step()
            if watch is not None:
                watch.close()
            assert hooks_on(model) == before
            return [p.double().sum().item() for p in model.parameters()]

        assert train(watched=True) == train(watched=False)
        assert seen == [True] * 3 + [False] * 3

    def test_watching_twice_counts_once(self):
        model = mlp()
        optimizer = sgd(model)
        first = ks.watch(model, optimizer=optimizer, sites="all")
        model(batch()).sum().backward()
        optimizer.step()
        with pytest.warns(RecordingWarning, match="already watched; the earlier watch is closed"):
            second = ks.watch(model, optimizer=optimizer, sites="all", calls=True)
        assert first.run["gradients/norm"].steps.tolist() == [0]
        model(batch()).sum().backward()
        optimizer.step()
        assert {path: len(calls) for path, calls in second.calls.items()} == {"": 1, "0": 1, "1": 1, "2": 1}
        second.close()
        assert hooks_on(model) == hooks_of(optimizer) == 0

    def test_watching_again_after_close_is_quiet(self):
        model = mlp()
        for _ in range(2):
            with ks.watch(model):
                model(batch()).sum().backward()

    def test_two_models_at_once(self):
        models = [mlp(0), mlp(1)]
        optimizers = [sgd(model) for model in models]
        watches = [ks.watch(m, optimizer=o, sites="all") for m, o in zip(models, optimizers, strict=True)]
        norms = []
        for model, optimizer in zip(models, optimizers, strict=True):
            model(batch()).square().sum().backward()
            norms.append(norm(model[0].weight.grad))
            optimizer.step()
        for watch, wanted in zip(watches, norms, strict=True):
            watch.close()
            assert watch.run["parameter_gradients/norm"].of("0.weight").values[0, 0] == pytest.approx(wanted, rel=1e-6)

    def test_a_closed_watch_keeps_nothing_alive(self):
        model = mlp()
        optimizer = sgd(model)
        watch = ks.watch(model, optimizer=optimizer)
        model(batch()).sum().backward()
        optimizer.step()
        watch.close()
        reference = weakref.ref(model)
        del model, optimizer
        gc.collect()
        assert reference() is None
        assert watch.run["gradients/norm"].steps.tolist() == [0]
        assert watch.coverage

    def test_long_runs_hold_no_tensors(self):
        model = mlp()
        optimizer = sgd(model)
        with ks.watch(
            model, optimizer=optimizer, sites="all", probes=["default", "inputs", "updates"], calls=True
        ) as watch:

            def train(steps: int) -> int:
                for step in range(steps):
                    model(batch(step)).sum().backward()
                    optimizer.step()
                    watch.log(loss=step)
                gc.collect()
                return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

            train(3)
            assert train(2) == train(20)

    @pytest.mark.filterwarnings("ignore:watch\\(\\) was given no optimizer")
    def test_a_watch_that_nobody_holds_records(self, tmp_path):
        """It lives as long as the model, and the next one closes it."""
        model = mlp()
        ks.watch(model, tmp_path / "run.h5")
        gc.collect()
        for step in range(3):
            model.zero_grad()
            model(batch(step)).sum().backward()
        with pytest.warns(RecordingWarning, match="already watched"):
            ks.watch(model).close()
        with ks.open_run(tmp_path / "run.h5") as run:
            assert run["gradients/norm"].steps.tolist() == [0, 1, 2]

    def test_a_model_that_is_dropped_takes_its_watch_along(self):
        model = mlp()
        watch = weakref.ref(ks.watch(model, sites="all"))
        model(batch()).sum().backward()
        reference = weakref.ref(model)
        del model
        gc.collect()
        assert reference() is None
        assert watch() is None

    def test_unclosed_file_is_complete_after_exit(self, tmp_path):
        code = f"""
import torch, keelscope as ks
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watch = ks.watch(model, {str(tmp_path / "run.h5")!r}, optimizer=optimizer)
for step in range(3):
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    watch.log(loss=step)
"""
        subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
        with ks.open_run(tmp_path / "run.h5") as run:
            assert run["scalars/loss"].values.tolist() == [0, 1, 2]
            assert not run.live


class TestThreads:
    def test_models_trained_in_threads_do_not_mix(self):
        wanted, got = {}, {}

        def train(seed: int) -> None:
            model = mlp(seed)
            optimizer, reference = sgd(model), Reference(model)
            with ks.watch(model, optimizer=optimizer, sites="all") as watch:
                for step in range(8):
                    optimizer.zero_grad()
                    loss = model(batch(step)).square().mean()
                    loss.backward()
                    reference.note(loss)
                    optimizer.step()
            wanted[seed], got[seed] = reference.gradients, watch.run["parameter_gradients/norm"].values

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            threads = [threading.Thread(target=train, args=(seed,)) for seed in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert sorted(got) == [0, 1, 2]
        for seed in range(3):
            np.testing.assert_allclose(got[seed], wanted[seed], rtol=1e-6)

    def test_backward_in_another_thread(self):
        model = mlp()
        optimizer, reference = sgd(model), Reference(model)
        with ks.watch(model, optimizer=optimizer, sites="all") as watch:
            for step in range(3):
                optimizer.zero_grad()
                loss = model(batch(step)).square().mean()
                thread = threading.Thread(target=loss.backward)
                thread.start()
                thread.join()
                reference.note(loss)
                optimizer.step()
        reference.check(watch.run, [0, 1, 2])
        assert np.isfinite(watch.run["gradients/norm"].values).all()


class TestFiles:
    def test_file_and_memory_agree(self, tmp_path):
        def record(path) -> ks.Watch:
            model = mlp()
            optimizer = sgd(model)
            with ks.watch(model, path, optimizer=optimizer, every=2, sites="all", config={"lr": 0.1}) as watch:
                for step in range(5):
                    optimizer.zero_grad()
                    loss = model(batch(step)).square().mean()
                    loss.backward()
                    optimizer.step()
                    watch.log(loss=loss)
            return watch

        memory, file = record(None), record(tmp_path / "run.h5")
        assert memory.path is None
        assert file.path == tmp_path / "run.h5"
        with ks.open_run(file.path) as run:
            assert run.keys() == memory.run.keys()
            keys = set(run.keys()) - {"scalars/watch_ms", "scalars/wall_time"}
            for key in keys:
                np.testing.assert_array_equal(run[key].values, memory.run[key].values, err_msg=key)
                assert run[key].sites == memory.run[key].sites
            assert run.coverage == memory.run.coverage
            assert run.info.config == {"lr": 0.1}

    def test_existing_file_is_never_overwritten(self, tmp_path):
        def record(**options) -> ks.Watch:
            model = mlp()
            with ks.watch(model, tmp_path / "run.h5", **options) as watch:
                model(batch()).sum().backward()
                watch.step()
            return watch

        record()
        first = (tmp_path / "run.h5").read_bytes()
        assert record().path == tmp_path / "run-2.h5"
        with pytest.raises(RunExistsError):
            record(exists="error")
        assert (tmp_path / "run.h5").read_bytes() == first

    def test_run_can_be_read_while_it_is_recorded(self, tmp_path):
        for path in (None, tmp_path / "run.h5"):
            model = mlp()
            optimizer = sgd(model)
            with ks.watch(model, path, optimizer=optimizer) as watch:
                for step in range(3):
                    model(batch(step)).sum().backward()
                    optimizer.step()
                    watch.log(loss=step)
                    assert watch.run["scalars/loss"].values.tolist() == list(range(step + 1))
                    assert watch.run["gradients/norm"].steps.tolist() == list(range(step + 1))

    def test_logging_after_looking_warns(self):
        model = mlp()
        optimizer = sgd(model)
        with ks.watch(model, optimizer=optimizer) as watch:
            for step in range(3):
                model(batch(step)).sum().backward()
                optimizer.step()
                if step == 1:
                    assert watch.run
                    with pytest.warns(RecordingWarning, match=r"\['loss'\] came after the row of step 1 was closed"):
                        watch.log(loss=step)
                else:
                    watch.log(loss=step)
        np.testing.assert_array_equal(watch.run["scalars/loss"].values, [0, math.nan, 2])

    def test_a_name_that_comes_late_is_stored_from_there_on(self):
        model = mlp()
        optimizer = sgd(model)
        with ks.watch(model, optimizer=optimizer) as watch:
            for step in range(4):
                model(batch(step)).sum().backward()
                optimizer.step()
                watch.log(loss=step, **({"late": 1} if step >= 2 else {}))
        assert watch.run["scalars/loss"].values.tolist() == [0, 1, 2, 3]
        np.testing.assert_array_equal(watch.run["scalars/late"].values, [math.nan, math.nan, 1, 1])

    @pytest.mark.parametrize("kept", ["file", "memory"])
    def test_names_of_any_kind(self, tmp_path, kept):
        names = ["val/loss", "val_loss", "loss/val", "acc@1", "perte de validation", "step", "wall_time", "a.b", "%2F"]
        model = mlp()
        optimizer = sgd(model)
        with ks.watch(model, tmp_path / "run.h5" if kept == "file" else None, optimizer=optimizer) as watch:
            for step in range(3):
                model(batch(step)).sum().backward()
                optimizer.step()
                watch.log(**{name: 10 * step + i for i, name in enumerate(names)})
        run = ks.open_run(tmp_path / "run.h5") if kept == "file" else watch.run
        for i, name in enumerate(names):
            assert run[f"scalars/{name}"].values.tolist() == [i, 10 + i, 20 + i]
        assert list(run["scalars/val/loss"].to_frame().columns) == ["val/loss"]
        pytest.importorskip("h5netcdf")
        written = tmp_path / "run.nc"
        tree = run.to_xarray()
        tree.to_netcdf(written, engine="h5netcdf")
        labels = {variable.attrs.get("label", name): name for name, variable in tree["scalars"].data_vars.items()}
        assert tree["scalars"][labels["step"]].values.tolist() == [5, 15, 25]

    def test_too_many_late_names_are_said_once(self):
        model = mlp()
        optimizer = sgd(model)

        def train() -> ks.Watch:
            with ks.watch(model, optimizer=optimizer) as watch:
                for step in range(30):
                    model(batch(step)).sum().backward()
                    optimizer.step()
                    watch.log(loss=step, **{f"late{step}": step})
            return watch

        with pytest.warns(RecordingWarning) as said:
            watch = train()
        assert [str(w.message).partition(": ")[2] for w in said] == [
            "too many names came late, and those that come from now on are left out without a word."
        ]
        assert watch.run["scalars/loss"].values.tolist() == list(range(30))
        assert watch.run["scalars/late16"].values[16] == 16

    def test_the_path_is_known_before_the_first_row(self, tmp_path):
        for name in ("run.h5", "run-2.h5", "run-3.h5"):
            model = mlp()
            with ks.watch(model, tmp_path / "run.h5") as watch:
                assert watch.path == tmp_path / name
                model(batch()).sum().backward()
            assert watch.path == tmp_path / name
        assert ks.watch(mlp()).path is None
        assert ks.watch(mlp(), tmp_path / "run.h5", exists="resume").path == tmp_path / "run.h5"


class TestMessages:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"probes": "gradient"}, UnknownNameError, r"no probe is called 'gradient'; did you mean gradients"),
            (
                {"probes": "outputs+skew"},
                UnknownNameError,
                r"'outputs' has no optional statistic 'skew'; it has kurtosis",
            ),
            ({"probes": [3]}, ProbeError, r"3 is not a probe: expected name, .*check_probe says what is missing"),
            (
                {"sites": "blocks.*"},
                UnknownNameError,
                r"sites='blocks\.\*' matches no module; module paths look like '0'",
            ),
            ({"every": 0}, UsageError, r"every >= 1 and dense >= 0; got every=0"),
            ({"every": 1.5}, UsageError, r"every must be a positive int or a keelscope.Schedule; got 1.5"),
            ({"optimizer": "adam"}, UsageError, r"optimizer= takes torch optimizers; got str"),
            ({"exists": "replace"}, UsageError, r"exists='replace' is not known; use 'new'"),
        ],
    )
    def test_unusable_options(self, options, error, message):
        model = mlp()
        with pytest.raises(error, match=message):
            ks.watch(model, **options)
        assert hooks_on(model) == 0

    def test_not_a_model(self):
        with pytest.raises(UsageError, match=r"takes a torch.nn.Module; got function"):
            ks.watch(lambda x: x)
        with pytest.raises(NothingToObserveError, match=r"has no module and no parameter to observe"):
            ks.watch(nn.ModuleList())

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("loss", "low", r"log\(loss=\.\.\.\) takes one real number; got str"),
            ("loss", 10**400, r"takes one real number; got int"),
            ("loss", torch.ones(2), r"log\(loss=\.\.\.\) takes one real number; got Tensor of shape \[2\]"),
            ("loss", 1j, r"takes one real number; got complex"),
            ("loss", None, r"takes one real number; got NoneType"),
            ("", 1.0, r"a name has 1 to 128 characters"),
            ("a\nb", 1.0, r"'a\\nb'.*no control characters"),
            ("n" * 129, 1.0, r"a name has 1 to 128 characters"),
        ],
    )
    def test_unusable_scalars(self, name, value, message):
        """A wrong number ends no training: it is left out, with one warning."""
        with ks.watch(mlp()) as watch:
            with pytest.warns(RecordingWarning, match=message):
                watch.log(**{name: value})
            watch.log(**{name: value})

    def test_optimizer_of_another_model(self):
        model, other = mlp(), sgd(mlp())

        def loop() -> None:
            with ks.watch(model, optimizer=other):
                for step in range(6):
                    model(batch(step)).sum().backward()
                    model.zero_grad()

        with pytest.warns(RecordingWarning, match=r"is it the one that trains this model") as said:
            loop()
        assert len(said) == 1
        assert said[0].filename == __file__

    def test_optimizer_that_does_not_step(self, monkeypatch):
        monkeypatch.setattr("keelscope.steps.any_scaler", lambda: False)  # that of another test may still be alive
        model = mlp()

        def loop() -> None:
            with ks.watch(model, optimizer=sgd(model)):
                for step in range(6):
                    model(batch(step)).sum().backward()
                    model.zero_grad()

        with pytest.warns(RecordingWarning, match=r"cleared several times without a step"):
            loop()

    def test_an_optimizer_of_part_of_the_model_and_one_beside_it(self):
        model, beside = mlp(), mlp()
        with ks.watch(model, optimizer=[torch.optim.SGD(model[0].parameters(), lr=0.1), sgd(beside)]):
            pass
        beside.requires_grad_(requires_grad=False)
        with ks.watch(beside, optimizer=sgd(model)):
            pass

    def test_optimizer_class(self):
        with pytest.raises(UsageError, match=r"got the class SGD"):
            ks.watch(mlp(), optimizer=torch.optim.SGD)

    def test_usable_scalars(self):
        model = mlp()
        with ks.watch(model) as watch:
            loss = model(batch()).sum()
            loss.backward()
            watch.log(a=loss, b=np.float32(2), c=math.nan, d=math.inf, e=True, f=torch.tensor([[3.0]]))
            watch.step()
        got = [watch.run[f"scalars/{name}"].values[0] for name in "abcdef"]
        np.testing.assert_array_equal(got, [loss.item(), 2, math.nan, math.inf, 1, 3])

    def test_nothing_recorded_yet(self):
        with ks.watch(mlp()) as watch, pytest.raises(UsageError, match=r"nothing is recorded yet: the first row"):
            watch.run  # noqa: B018


def test_calls_know_in_which_dtype_outputs_came():
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2))
    with ks.watch(model, sites="all", calls=True) as watch:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(torch.tensor([0, 1])).sum().backward()
        watch.step()
        assert {path: [call.dtype for call in calls] for path, calls in watch.calls.items()} == {
            "0": ["float32"],
            "1": ["bfloat16"],
            "": ["bfloat16"],
        }


def test_a_forward_after_the_last_step_is_no_row_of_training():
    model = mlp()
    optimizer = sgd(model)
    watch = ks.watch(model, optimizer=optimizer)
    for step in range(3):
        model(batch(step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(batch(3))
    watch.close()
    assert watch.run.steps.tolist() == [0, 1, 2]
