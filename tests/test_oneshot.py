"""One forward and backward as a run: the right numbers, the model as it was, errors of one sentence."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope.errors import BatchError, LossError, NothingToObserveError, UsageError
from keelscope.oneshot import record_once


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def squares(output, _):
    return output.square().mean()


class Restless(nn.Module):
    """Changes everything a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("level", torch.zeros(4))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("later", None)
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)

    def forward(self, x):
        x = self.drop(self.norm(self.layer(x)))
        self.level = 0.9 * self.level + x.mean(0).detach()  # a new tensor in its place
        self.hidden += 1
        self.later = x.detach().sum()
        x = x * (random.random() + np.random.rand())  # noqa: NPY002 - the global states are the point
        self.drop.eval()
        return self.frozen(x)


def state(model: nn.Module) -> dict[str, object]:
    return {
        **{name: p.detach().clone() for name, p in model.named_parameters()},
        **{name + ".grad": None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        **{name: None if b is None else b.clone() for m in [model] for name, b in m._buffers.items()},
        "bn": [b.clone() for b in model.norm.buffers()],
        "modes": [m.training for m in model.modules()],
        "flags": [p.requires_grad for p in model.parameters()],
        "rng": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1],  # noqa: NPY002
    }


def assert_same(before: object, after: object) -> None:
    if isinstance(before, dict):
        assert before.keys() == after.keys()
        for key, value in before.items():
            assert_same(value, after[key])
    elif isinstance(before, list | tuple):
        assert len(before) == len(after)
        for a, b in zip(before, after, strict=True):
            assert_same(a, b)
    elif isinstance(before, torch.Tensor | np.ndarray):
        np.testing.assert_array_equal(np.asarray(before), np.asarray(after))
    else:
        assert before == after


@pytest.mark.parametrize("fails", ["", "forward", "loss", "backward"])
def test_the_model_is_as_it_was(fails):
    model = Restless()
    model(batch(6, 4)).sum().backward()
    model.frozen.eval()
    identities = [(id(p), id(p.grad)) for p in model.parameters()], {n: id(b) for n, b in model.named_buffers()}
    before = state(model)

    def loss(output, _):
        if fails == "loss":
            raise RuntimeError("no labels")
        if fails == "backward":
            output.register_hook(lambda _: (_ for _ in ()).throw(RuntimeError("lost")))
        return output.square().mean()

    try:
        record_once(model, batch(6, 5 if fails == "forward" else 4), loss)
        assert not fails
    except (BatchError, LossError):
        assert fails
    assert_same(before, state(model))
    assert identities == (
        [(id(p), id(p.grad)) for p in model.parameters()],
        {n: id(b) for n, b in model.named_buffers()},
    )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())


def test_an_optimizer_inside_backward_does_not_step():
    model = nn.Linear(3, 1)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: (optimizers[p].step(), optimizers[p].zero_grad())[0])
    before = [p.detach().clone() for p in model.parameters()]
    run = record_once(model, batch(5, 3), squares)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert [len(p._post_accumulate_grad_hooks) for p in model.parameters()] == [1, 1]
    model(batch(5, 3)).sum().backward()
    assert not torch.equal(before[0], model.weight), "the hook must be back"
    assert np.isfinite(run["parameter_gradients/norm"].values).all()


def test_numbers():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    x = batch(5, 4)
    run = record_once(model, x, squares, sites="all")
    loss = model(x).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert run["scalars/loss"].values.tolist() == [loss.item()]
    assert run["parameter_gradients/norm"].steps.tolist() == [0]
    np.testing.assert_allclose(
        run["parameter_gradients/norm"].values[0], [g.norm().item() for g in gradients], rtol=1e-6
    )
    total = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
    assert run["scalars/grad_norm_total"].values[0] == pytest.approx(total, rel=1e-6)


def test_works_under_no_grad_and_with_existing_gradients():
    model = nn.Linear(4, 1)
    model(batch(5, 4)).sum().backward()
    with torch.no_grad():
        run = record_once(model, batch(5, 4), squares)
    again = record_once(model, batch(5, 4), squares)
    np.testing.assert_array_equal(run["parameter_gradients/norm"].values, again["parameter_gradients/norm"].values)


class Keyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, scale=1.0):
        self.given = scale
        output = self.layer(x) * scale
        return type("Output", (), {"loss": output.mean(), "logits": output})()


class TestBatches:
    def test_a_mapping_gives_keywords_and_none_takes_the_loss_of_the_output(self):
        model = Keyed()
        run = record_once(model, {"x": batch(5, 4), "scale": 3.0})
        assert model.given == 3.0
        assert run["scalars/loss"].values[0] == pytest.approx(3 * model.layer(batch(5, 4)).mean().item(), rel=1e-6)

    def test_a_tuple_gives_all_but_its_last_entry(self):
        seen = []
        x, y = batch(5, 4), batch(5, 1)
        record_once(nn.Linear(4, 1), (x, y), lambda output, b: (seen.append(b), (output - b[1]).square().mean())[1])
        assert seen[0][1] is y

    def test_a_tuple_of_one_is_the_input(self):
        record_once(nn.Linear(4, 1), (batch(5, 4),), squares)

    def test_anything_else_is_the_input(self):
        model = nn.EmbeddingBag(5, 3)
        record_once(model, torch.tensor([[0, 1], [2, 3]]), squares)


class TestMessages:
    @pytest.mark.parametrize(
        ("x", "loss", "error", "message"),
        [
            (
                batch(5, 3),
                squares,
                BatchError,
                r"^Linear rejects the batch \(RuntimeError: mat1 and mat2 .*\); check its shape",
            ),
            ("text", squares, BatchError, r"^Linear rejects the batch \(TypeError: "),
            (batch(5, 4), None, LossError, r"output has no \.loss; give loss_fn="),
            (batch(5, 4), lambda *_: 3.0, LossError, r"the loss must be a tensor; got float"),
            (batch(5, 4), lambda o, _: o, LossError, r"one real number; got shape \[5, 2\], dtype torch.float32"),
            (
                batch(5, 4),
                lambda o, _: o.sum().to(torch.complex64),
                LossError,
                r"got shape \[\], dtype torch.complex64",
            ),
            (batch(5, 4), lambda o, _: o.argmax(), LossError, r"got shape \[\], dtype torch.int64"),
            (batch(5, 4), lambda o, _: o.detach().sum(), LossError, r"does not depend on any parameter"),
            (
                batch(5, 4),
                lambda o, _: o.missing,
                LossError,
                r"the loss function raised AttributeError: 'Tensor' object",
            ),
            (batch(5, 4), lambda o: o.sum(), LossError, r"the loss function raised TypeError: .*positional argument"),
        ],
    )
    def test_what_does_not_work(self, x, loss, error, message):
        with pytest.raises(error, match=message) as caught:
            record_once(nn.Linear(4, 2), x, loss)
        assert "\n" not in str(caught.value)

    def test_nothing_to_observe(self):
        with pytest.raises(
            NothingToObserveError, match=r"no parameter of Linear requires a gradient; set requires_grad_"
        ):
            record_once(nn.Linear(4, 1).requires_grad_(requires_grad=False), batch(5, 4), squares)
        with pytest.raises(NothingToObserveError, match=r"no parameter of ReLU"):
            record_once(nn.ReLU(), batch(5, 4), squares)

    def test_what_is_no_model(self):
        with pytest.raises(UsageError, match=r"takes a torch.nn.Module, a run or a run file; got function"):
            ks.report(lambda x: x, batch(5, 4), squares)

    def test_a_run_takes_no_batch(self, tmp_path):
        run = record_once(nn.Linear(4, 1), batch(5, 4), squares)
        with pytest.raises(UsageError, match=r"a recorded run takes neither batch nor loss_fn"):
            ks.report(run, batch(5, 4))
        with pytest.raises(UsageError, match=r"a recorded run takes neither batch nor loss_fn"):
            ks.report(tmp_path / "run.h5", loss_fn=squares)


def test_report_of_model_run_and_file_agree(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)])
    x = batch(4, 8)
    live = ks.report(model, x, squares)
    assert ks.report(live.run).headline == live.headline == "vanishing"
    with ks.watch(model, tmp_path / "run.h5") as watch:
        model(x).square().mean().backward()
        watch.step()
    assert ks.report(tmp_path / "run.h5").headline == "vanishing"
