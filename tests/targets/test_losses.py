"""The loss is chosen from output and batch, and is one differentiable number or a sentence."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from keelscope.errors import LossError, TargetError
from keelscope.targets.losses import NOISE_SEED, choose

TOKENS = torch.tensor([[1, 2, 3, 0], [3, 2, 1, 0]])


def scores(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


@dataclass
class Output:
    last_hidden_state: torch.Tensor
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


def test_auto_takes_the_models_own_loss():
    loss = choose("auto")
    own = scores(3).sum()
    assert loss(Output(scores(2, 3), loss=own), None) is own
    assert loss.used == "output.loss"
    assert loss({"loss": own}, None) is own
    assert loss(own, None) is own


def test_auto_lm_by_hand():
    loss, logits = choose("auto"), scores(2, 4, 5)
    logp = logits.detach().log_softmax(-1)
    by_hand = -sum(logp[b, t, TOKENS[b, t + 1]] for b in range(2) for t in range(3)) / 6
    assert loss(logits, TOKENS).item() == pytest.approx(by_hand.item(), rel=1e-6)
    assert loss.used == "lm"
    assert loss.describe() == "lm (next-token cross entropy; chosen from the output, --loss overrides)"
    assert loss(Output(scores(2, 4, 8), logits=logits), {"input_ids": TOKENS}).item() == pytest.approx(by_hand.item())


def test_auto_uses_targets_of_the_batch():
    loss, logits = choose("auto"), scores(6, 5)
    targets = torch.tensor([0, 1, 2, 3, 4, 0])
    assert loss(logits, (torch.zeros(6, 2), targets)).item() == pytest.approx(F.cross_entropy(logits, targets).item())
    assert loss.used == "cross_entropy"
    sequence = scores(2, 4, 5)
    shifted = loss(sequence, (TOKENS, TOKENS.flip(0)))
    assert shifted.item() == pytest.approx(F.cross_entropy(sequence.flatten(0, 1), TOKENS.flip(0).flatten()).item())


@pytest.mark.parametrize(
    ("output", "batch"),
    [
        (scores(2, 4, 3), TOKENS),  # token 3 is no class of 3: hidden states, not logits
        (scores(2, 3, 5), TOKENS),  # another length
        (Output(scores(2, 4, 5)), {"input_ids": TOKENS}),  # named, and not called logits
        (scores(2, 4), torch.zeros(2, 4)),
        ([scores(2, 3, 4, 4)], None),
    ],
)
def test_auto_falls_back_to_regression(output, batch):
    loss = choose("auto")
    value = loss(output, batch)
    assert loss.used == "regression"
    assert value.requires_grad


def test_regression_reaches_through_a_final_layernorm():
    """The plain mean square of a LayerNorm's output is constant, so its gradient is zero; this one's is not."""
    x = scores(8, 16)
    y = F.layer_norm(x, (16,))
    plain = torch.autograd.grad(y.square().mean(), x, retain_graph=True)[0].norm()
    ours = torch.autograd.grad(choose("auto")(y, None), x)[0].norm()
    assert plain < 1e-4 * ours


def test_regression_by_hand_and_repeatable():
    x = scores(4, 5)
    noise = torch.randn((4, 5), generator=torch.Generator().manual_seed(NOISE_SEED))
    state = torch.get_rng_state()
    assert choose("auto")(x, None).item() == pytest.approx(((x - noise) ** 2).mean().item())
    assert torch.equal(torch.get_rng_state(), state)


def test_half_precision_output():
    logits = scores(2, 4, 5).detach().to(torch.bfloat16).requires_grad_()
    assert choose("lm")(logits, TOKENS).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "output", "batch", "sentence"),
    [
        ("lm", scores(2, 4, 5), None, "needs int64 tokens [batch, position] and logits"),
        ("lm", scores(2, 4, 3), TOKENS, "found int64[2, 4] and float32[2, 4, 3]; use another --loss"),
        (
            "cross_entropy",
            scores(2, 5),
            (None, torch.zeros(2, 5)),
            "needs integer targets as the last entry of a tuple",
        ),
        ("cross_entropy", scores(2, 5), (None, torch.tensor([9, 1])), "cannot match scores float32[2, 5]"),
        ("sum", torch.zeros(3), None, "no floating tensor that requires a gradient"),
        ("auto", {"ids": TOKENS}, None, "no floating tensor that requires a gradient"),
        ("auto", {"loss": scores(3)}, None, "loss output.loss returned float32[3], not one real number"),
        ("auto", {"loss": torch.zeros(())}, None, "does not depend on any parameter"),
    ],
)
def test_sentences(name, output, batch, sentence):
    with pytest.raises(LossError) as caught:
        choose(name)(output, batch)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("return output", r"loss mine.py:f returned float32\[3\], not one real number; reduce it"),
        ("return 3.0", "loss mine.py:f returned a float; it must return a tensor"),
        ("return output.sum().detach()", "loss mine.py:f does not depend on any parameter"),
        ("return output.sum() * 1j", "not one real number"),
        ("return output.nothing()", "loss mine.py:f raised AttributeError: .*--debug"),
    ],
)
def test_own_loss_that_is_wrong(tmp_path, monkeypatch, body, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(f"def f(output, batch):\n    {body}\n")
    with pytest.raises(LossError, match=sentence):
        choose("mine.py:f")(scores(3), None)


def test_own_loss(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(output, batch):\n    return (output * batch).sum()\nx = 3\n")
    loss = choose("mine.py:f")
    assert loss(scores(3), torch.zeros(3)).item() == 0
    assert loss.describe() == "mine.py:f"
    with pytest.raises(LossError, match=r"mine.py:x is a int, not a function of \(output, batch\)"):
        choose("mine.py:x")


def test_unknown_names():
    with pytest.raises(LossError, match=r"there is no loss 'mse'; use auto, sum, lm, cross_entropy or pkg"):
        choose("mse")
    with pytest.raises(TargetError, match="no module nowhere_at_all"):
        choose("nowhere_at_all:f")


def test_cross_entropy_draws_targets_where_the_input_has_none():
    output = scores(4, 10)
    loss = choose("cross_entropy")
    value = loss(output, torch.zeros(4, 3))
    assert value.item() == choose("cross_entropy")(output, torch.zeros(4, 3)).item()
    (gradient,) = torch.autograd.grad(value, output)
    assert (gradient.abs().sum(-1) > 0).all()
