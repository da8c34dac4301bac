from __future__ import annotations

import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope.diagnosis import Severity, diagnose


def trained(loss_of, *, steps=8, log=lambda step: True, name="loss"):
    """A small regression, with a loss that may go wrong on some step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with ks.watch(model, optimizer=optimizer) as watch:
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(step, model(torch.ones(2, 4)))
            loss.backward()
            optimizer.step()
            if log(step):
                watch.log(**{name: loss})
            watch.step()
        return diagnose(watch.run)


def negative(at, root=torch.sqrt):
    """A root has a NaN gradient there, too; a logarithm has not."""
    return lambda step, y: y.square().mean() + (root(-y.square().sum()) if step == at else 0.0)


def nonfinite(report):
    return [finding for finding in report.findings if finding.rule.startswith("nonfinite")]


@pytest.mark.parametrize("name", ["loss", "train_loss", "lm_loss"])
def test_the_loss_is_the_first_cause(name):
    report = trained(negative(5), name=name)
    loss, module = nonfinite(report)
    assert (loss.severity, loss.steps, loss.sites) == (Severity.ERROR, (5, 5), ())
    assert loss.statement == (
        f"The loss function itself produced NaN: scalars/{name} is NaN at step 5, while every watched output is finite "
        "on that step."
    )
    assert "log, sqrt or division" in loss.remedy
    assert "65504" in loss.remedy
    assert (module.rule, module.steps) == ("nonfinite_forward", (6, 7))
    assert report.sentence.endswith(f"first at step 5; the loss function produced it ({name}).")


def test_a_nan_without_a_nan_gradient():
    (finding,) = nonfinite(trained(negative(12, torch.log), steps=24))
    assert finding.statement.startswith("The loss function itself produced NaN: scalars/loss is NaN at step 12")


def test_an_infinite_loss_is_never_a_missing_one():
    report = trained(lambda step, y: y.square().mean() / (0.0 if step == 7 else 1.0), log=lambda step: step in (0, 7))
    assert nonfinite(report)[0].statement.startswith("The loss function itself produced Inf")


def test_what_is_not_logged_is_not_nan():
    assert nonfinite(trained(negative(99), log=lambda step: step % 4 == 0)) == []
    report = trained(lambda step, y: y.square().mean(), log=lambda step: step < 4)
    assert nonfinite(report) == []


def test_a_finite_loss_is_not_blamed_for_its_backward():
    def rooted(step, y):
        return (y.square().mean() + ((y - y.detach()).square().sum().sqrt() if step == 5 else 0.0)).float()

    first = nonfinite(trained(rooted))[0]
    assert (first.rule, first.steps) == ("nonfinite_backward", (5, 7))
    assert "these" not in first.remedy  # one module is named
    assert "between the output of this module and the loss" in first.remedy
    unlogged = nonfinite(trained(rooted, log=lambda step: step % 4 == 0))
    assert not any("loss function" in finding.statement for finding in unlogged)


def test_a_held_out_loss_is_not_the_one_trained_on():
    assert "loss function" not in " ".join(f.statement for f in nonfinite(trained(negative(5), name="val_loss")))


def test_an_output_that_is_bad_explains_the_loss():
    report = trained(lambda step, y: (y * (float("nan") if step == 5 else 1.0)).square().mean())
    assert nonfinite(report)[0].statement.startswith("The loss function")  # what follows the model belongs to the loss

    class Broken(nn.Linear):
        def forward(self, x):
            return super().forward(x) * float("nan")

    model = nn.Sequential(nn.Linear(4, 4), Broken(4, 4))
    with ks.watch(model) as watch:
        loss = model(torch.ones(2, 4)).mean()
        loss.backward()
        watch.log(loss=loss)
        watch.step()
        (finding,) = nonfinite(diagnose(watch.run))
    assert finding.sites == ("1",)


def test_a_loss_that_nobody_logs_is_not_blamed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    with ks.watch(model) as watch:
        hidden = model[0](torch.ones(2, 3))
        model[1]((hidden - hidden.detach()).square().sum().sqrt() * hidden).square().mean().backward()
        watch.step()
        (finding,) = nonfinite(diagnose(watch.run))
    assert (finding.rule, finding.sites) == ("nonfinite_backward", ("0", "1"))


def ignored(step, y):
    """Cross entropy where every label is ignored: 0/0, and gradients of exactly 0."""
    del step
    return nn.functional.cross_entropy(y, torch.full((2,), -100))


def test_a_loss_that_is_nan_from_the_first_row_on_is_not_finite_and_not_dead():
    report = trained(ignored)
    assert report.headline == "non-finite"
    assert report.sentence == (
        "NaN or Inf was recorded on 8 of the last 8 recorded steps, first at step 0; the loss function produced it "
        "(loss), and every gradient is exactly 0: a mean over nothing, as where all labels are ignored."
    )
    (finding,) = nonfinite(report)
    assert "all labels of the batch are ignored" in finding.remedy
    assert "zero_gradient" not in {found.rule for found in report.findings}


def test_a_loss_that_is_nan_from_the_first_row_on_with_a_nan_gradient():
    report = trained(lambda step, y: y.square().mean() * float("nan"))
    assert report.headline == "non-finite"
    assert "labels" not in report.sentence


def test_a_gradient_of_zero_under_a_finite_loss_is_still_dead():
    assert trained(lambda step, y: 0.0 * y.sum()).headline == "dead"


def test_a_nan_before_the_first_number_may_be_a_filler():
    report = trained(lambda step, y: y.square().mean(), log=lambda step: step > 2)
    assert nonfinite(report) == []
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    with ks.watch(model) as watch:
        for mean in (float("nan"), 1.0, 0.9):
            model(torch.ones(2, 4)).square().mean().backward()
            watch.step()
            watch.log(loss=mean)
    assert watch.run.scalars.count("logged_nan/loss") == 1
    assert nonfinite(diagnose(watch.run)) == []
