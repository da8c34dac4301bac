from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from keelscope import models
from keelscope.errors import UsageError
from keelscope.models.epsilon import EpsilonSchedule
from keelscope.text import Text
from keelscope.training import Trainer, TrainingConfig, learning_rate, train

SMALL = {"depth": 4, "width": 16, "heads": 2}
QUICK = TrainingConfig(steps=6, batch_size=4, length=16, warmup=2, learning_rate=3e-3)


@pytest.fixture(scope="module")
def text():
    return Text.read()


class Log:
    def __init__(self):
        self.rows = []

    def log(self, **scalars):
        self.rows.append(scalars)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_steps_are_plain_adamw_on_clipped_gradients(text):
    model, twin = models.build("keel", **SMALL), models.build("keel", **SMALL)
    result = train(model, text, QUICK)
    decayed = [p for p in twin.parameters() if p.ndim > 1]
    others = [p for p in twin.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    losses = []
    for step, rate in enumerate([1.5e-3, 3e-3] + [1.5e-3 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]):
        tokens, targets = text.batch(step, 4, 16, seed=0)
        loss = F.cross_entropy(twin(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.square().sum() for p in twin.parameters()]).sum().sqrt()
        for p in twin.parameters():
            p.grad.mul_((1 / (norm + 1e-6)).clamp(max=1))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        losses.append(loss.item())
        assert result.gradient_norms[step] == pytest.approx(norm.item(), rel=1e-5)
    assert result.losses == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scheme", models.SCHEMES)
def test_training_is_reproducible_to_the_bit(text, scheme):
    runs = []
    for _ in range(2):
        torch.rand(7)
        model = models.build(scheme, **SMALL, dropout=0.1)
        runs.append((train(model, text, QUICK).losses, weights(model)))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])


def test_another_seed_draws_other_batches_and_the_global_random_state_stays(text):
    state = torch.get_rng_state()
    first = train(models.build("keel", **SMALL, dropout=0.1), text, QUICK)
    second = train(models.build("keel", **SMALL, dropout=0.1), text, TrainingConfig(**{**config(), "seed": 1}))
    assert first.losses != second.losses
    assert torch.equal(torch.get_rng_state(), state)


def config():
    return {name: getattr(QUICK, name) for name in QUICK.__dataclass_fields__}


@pytest.mark.parametrize("scheme", ["keel", "post_ln", "pre_ln"])
def test_a_model_learns_real_text(text, scheme):
    model = models.build(scheme, depth=4, width=32, heads=2)
    result = train(model, text, TrainingConfig(steps=60, batch_size=8, length=32, learning_rate=1e-2))
    assert (result.status, result.steps) == ("completed", 60)
    assert sum(result.losses[-5:]) / 5 < 3.2 < math.log(256) < result.losses[0]
    assert result.message == f"60 steps, last loss {result.losses[-1]:.3f}"
    assert result.tokens_per_second > 0


def test_watch_and_callback_get_every_step_after_the_optimizer(text):
    log, order = Log(), []
    trainer = Trainer(models.build("keel", **SMALL), text, QUICK)
    trainer.optimizer.register_step_post_hook(lambda *_: order.append(("optimizer", len(log.rows))))
    result = trainer.run(watch=log, on_step=lambda step, loss: order.append((step, loss, len(log.rows))))
    expected = []
    for step in range(6):
        expected += [("optimizer", step), (step, result.losses[step], step + 1)]
    assert order == expected
    assert [row["loss"] for row in log.rows] == list(result.losses)
    assert [row["grad_norm_total"] for row in log.rows] == list(result.gradient_norms)
    assert [row["lr"] for row in log.rows] == [learning_rate(QUICK, step) for step in range(6)]
    assert [row["tokens"] for row in log.rows] == [64 * (step + 1) for step in range(6)]


def test_divergence_ends_training_with_a_sentence(text):
    log = Log()
    wild = TrainingConfig(steps=50, batch_size=4, length=16, warmup=0, learning_rate=1e30)
    result = train(models.build("pre_ln", **SMALL), text, wild, watch=log)
    assert result.status == "diverged"
    assert 1 < result.steps < 50
    assert not math.isfinite(result.losses[-1])
    assert all(map(math.isfinite, result.losses[:-1]))
    assert len(log.rows) == result.steps
    assert result.message.startswith(f"the loss is {result.losses[-1]} at step {result.steps - 1}: training stopped")


def test_without_clipping_gradients_pass_as_they_are(text):
    largest = []
    trainer = Trainer(models.build("post_ln", **SMALL), text, TrainingConfig(**{**config(), "clip": None}))
    trainer.optimizer.register_step_pre_hook(
        lambda *_: largest.append(torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm().item())
    )
    result = trainer.run()
    assert largest == pytest.approx(result.gradient_norms, rel=1e-5)
    assert max(largest) > 1


def test_bfloat16_runs_under_autocast_and_keeps_float32_weights(text):
    model = models.build("keel", **SMALL)
    seen = set()
    model.sublayers[1].branch.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    result = train(model, text, TrainingConfig(**{**config(), "precision": "bfloat16"}))
    full = train(models.build("keel", **SMALL), text, QUICK)
    assert seen == {torch.bfloat16}
    assert weights(model).dtype == torch.float32
    assert result.losses == pytest.approx(full.losses, rel=0.02)
    assert result.losses != full.losses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps = 0 cannot be used: give a whole number, 1 or more"),
        ({"batch_size": 2.5}, "batch_size = 2.5 cannot be used: give a whole number, 1 or more"),
        ({"warmup": -1}, "warmup = -1 cannot be used: give a whole number, 0 or more"),
        ({"learning_rate": -1e-3}, "learning_rate = -0.001 cannot be used: give a number, 0 or more"),
        ({"learning_rate": math.nan}, "learning_rate = nan cannot be used: give a number, 0 or more"),
        ({"clip": 0.0}, "clip = 0.0 cannot be used: give a number above 0, or None for no clipping"),
        ({"precision": "fp8"}, "precision = 'fp8' is not known: choose float32 or bfloat16"),
    ],
)
def test_what_cannot_be_trained_with_is_said_in_one_sentence(options, message):
    with pytest.raises(UsageError) as caught:
        TrainingConfig(**options)
    assert str(caught.value) == message


def test_a_vocabulary_smaller_than_the_text_is_said(text):
    with pytest.raises(
        UsageError, match=r"the model knows 40 tokens, text has 256 \(bytes\): build it with vocabulary"
    ):
        Trainer(models.build("keel", **SMALL, vocabulary=40), text, QUICK)


def test_epsilon_follows_its_schedule_step_by_step(text):
    schedule = EpsilonSchedule(start=1e-2, end=1e-6, steps=4)
    trainer = Trainer(models.build("keel", **SMALL), text, TrainingConfig(**{**config(), "epsilon": schedule}))
    seen = []
    trainer.optimizer.register_step_pre_hook(lambda *_: seen.append(trainer.model.sublayers[2].outer_norm.eps))
    result = trainer.run()
    assert seen == pytest.approx([1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-6])
    assert result.losses[0] != train(models.build("keel", **SMALL), text, QUICK).losses[0]


def test_schemes_scale_the_learning_rate_of_their_branches(text):
    rates = []
    trainer = Trainer(models.build("depth_mup", **{**SMALL, "depth": 8}), text, QUICK)
    trainer.optimizer.register_step_pre_hook(
        lambda *_: rates.append([group["lr"] for group in trainer.optimizer.param_groups])
    )
    trainer.run()
    assert rates[2] == pytest.approx([3e-3 / 2, 3e-3, 3e-3])


def test_ngpt_stays_on_the_sphere_while_training(text):
    model = models.build("ngpt", **SMALL)
    train(model, text, QUICK)
    length = model.sublayers[1].branch.hidden.weight.norm(dim=-1)
    torch.testing.assert_close(length, torch.ones_like(length))


def test_any_language_model_trains_with_decay_on_its_matrices_only(text):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 256))
    model[1].bias.requires_grad_(requires_grad=False)
    trainer = Trainer(model, text, QUICK)
    matrices, others = trainer.optimizer.param_groups
    assert [id(p) for p in matrices["params"]] == [id(model[0].weight), id(model[2].weight)]
    assert [id(p) for p in others["params"]] == [id(model[1].weight), id(model[2].bias)]
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.01, 0.0)
    assert trainer.run().losses[-1] < math.log(256) + 1
