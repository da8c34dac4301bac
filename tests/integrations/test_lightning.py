"""A real Lightning Trainer, watched: the numbers of the loop written by hand, and the training it would have been."""

from __future__ import annotations

import importlib
import logging
import warnings
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import keelscope as ks
from keelscope.errors import UsageError
from keelscope.integrations.lightning import KeelscopeCallback

PACKAGES = [name for name in ("lightning", "pytorch_lightning") if find_spec(name) is not None]
pytestmark = [
    pytest.mark.skipif(not PACKAGES, reason="not installed: lightning (make test installs it)"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),  # few workers, small logging intervals
    pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # theirs, with this torch
]


@pytest.fixture(params=PACKAGES)
def package(request):
    """`lightning.pytorch` and `pytorch_lightning` are two packages with two Callback classes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("lightning.pytorch" if request.param == "lightning" else request.param)
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return module


@pytest.fixture
def pl():
    return importlib.import_module("lightning.pytorch" if "lightning" in PACKAGES else "pytorch_lightning")


def net(dropout: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 1))


def automatic(pl, dropout: float = 0.0):
    class Automatic(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(dropout)

        def training_step(self, batch, _index):
            loss = loss_of(self, batch)
            self.log("train", loss)
            return {"loss": loss, "more": 1}

        def validation_step(self, batch, _index):
            self.log("val", loss_of(self, 100 * batch))

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    torch.manual_seed(0)
    return Automatic()


def loss_of(module, batch):
    return module.net(batch).float().square().mean()


def batches(number: int = 8) -> list[torch.Tensor]:
    return list(torch.randn(number, 4, 6, generator=torch.Generator().manual_seed(1)))


def trainer(pl, folder, *callbacks, **options):
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    } | options
    return pl.Trainer(callbacks=list(callbacks), **settings)


def loader(rows) -> DataLoader:
    return DataLoader(rows, batch_size=None)


def in_precision(loops, package, precision: str) -> dict[str, object]:
    """Options of the Trainer: it has no fp16 on the CPU of its own accord."""
    if precision != "16-mixed":
        return {"precision": precision}
    name = package.__name__ + ".plugins.precision"
    return {"plugins": [importlib.import_module(name).MixedPrecision(precision, "cpu", loops.scaler())]}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # Lightning, where the first step is skipped
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_numbers_are_those_of_the_loop_by_hand(package, tmp_path, loops, precision):
    """Accumulation, clipping, a schedule, a sanity check and validation in the middle of the epoch."""
    callback = KeelscopeCallback(tmp_path / "net.h5", config={"note": "mine"})
    learner = trainer(
        package,
        tmp_path,
        callback,
        accumulate_grad_batches=2,
        gradient_clip_val=0.05,
        **in_precision(loops, package, precision),
        num_sanity_val_steps=2,
        val_check_interval=2,
    )
    learner.fit(automatic(package), loader(batches()), loader(batches(3)))
    module = automatic(package)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    hand = loops.by_hand(
        module,
        optimizer,
        batches(),
        loss_of,
        accumulate=2,
        clip=0.05,
        precision={"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(precision, ""),
        always_schedule=True,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    assert min(np.linalg.norm(hand.truth.gradients, axis=1)) > 0.05, "clipping must have something to clip"
    with ks.open_run(tmp_path / "net.h5") as run:
        hand.truth.check(run)
        loops.same_run(run, hand.run)
        assert run.info.config == {
            "precision": precision,
            "gradient_clip_val": 0.05,
            "accumulate_grad_batches": 2,
            "note": "mine",
        }
        assert not run.live


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_training_is_what_it_would_have_been(package, tmp_path, loops, precision):
    def train(*callbacks):
        options = in_precision(loops, package, precision)
        learner = trainer(package, tmp_path, *callbacks, **options, accumulate_grad_batches=3)
        module = automatic(package, dropout=0.3)
        learner.fit(module, loader(batches()), loader(batches(2)))
        return module, {name: float(value) for name, value in learner.callback_metrics.items()}, torch.get_rng_state()

    plain = train()
    watched = train(KeelscopeCallback(tmp_path / "run.h5", every=2, probes=["default", "updates"]))
    loops.same_weights(watched[0], plain[0])
    assert watched[1] == plain[1]
    assert torch.equal(watched[2], plain[2])


def test_last_step_of_an_epoch_has_fewer_batches(pl, tmp_path):
    """Five batches, two at a time: three steps, and the loss of the last as Lightning weighs it."""
    callback = KeelscopeCallback()
    module = automatic(pl)
    learner = trainer(pl, tmp_path, callback, accumulate_grad_batches=2, max_epochs=2, limit_val_batches=0)
    learner.fit(module, loader(batches(5)))
    loss = callback.watch.run["scalars/loss"]
    assert loss.steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert learner.global_step == 6
    torch.manual_seed(0)
    first = automatic(pl)
    wanted = (loss_of(first, batches()[0]) + loss_of(first, batches()[1])).item() / 2
    assert loss.values[0] == pytest.approx(wanted, rel=1e-6)


def adversarial(pl, ratio: int = 1):
    """Manual optimization with two optimizers, the second stepping each `ratio`-th batch, clipped by hand."""

    class Adversarial(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.maker, self.judge = nn.Linear(6, 6), nn.Linear(6, 1)
            self.wanted: list[list[float]] = []

        def training_step(self, batch, index):
            of_judge, of_maker = self.optimizers()
            self.manual_backward((self.judge(self.maker(batch).detach()) - self.judge(batch)).square().mean())
            judge = self.judge.weight.grad.double().norm().item()
            self.clip_gradients(of_judge, gradient_clip_val=1e-2)
            of_judge.step()
            of_judge.zero_grad()
            if index % ratio == ratio - 1:
                loss = self.judge(self.maker(batch)).square().mean()
                self.manual_backward(loss)
                self.wanted.append([self.maker.weight.grad.double().norm().item(), judge])
                self.clip_gradients(of_maker, gradient_clip_val=1e-2)
                of_maker.step()
                of_maker.zero_grad()
                of_judge.zero_grad()
                return {"loss": loss}
            return None

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.judge, self.maker)]

    torch.manual_seed(0)
    return Adversarial()


def test_manual_optimization_with_two_optimizers(package, tmp_path):
    callback, module = KeelscopeCallback(tmp_path / "gan.h5"), adversarial(package)
    trainer(package, tmp_path, callback).fit(module, loader(batches(5)))
    with ks.open_run(tmp_path / "gan.h5") as run:
        norms = run["parameter_gradients/norm"]
        got = np.hstack([norms.of("maker.weight").values, norms.of("judge.weight").values])
        np.testing.assert_allclose(got, module.wanted, rtol=1e-5)
        assert norms.steps.tolist() == [0, 1, 2, 3, 4]
        assert np.isfinite(run["scalars/loss"].values).all()


def test_a_row_ends_when_every_optimizer_has_stepped(pl, tmp_path):
    callback, module = KeelscopeCallback(), adversarial(pl, ratio=2)
    trainer(pl, tmp_path, callback).fit(module, loader(batches(6)))
    norms = callback.watch.run["parameter_gradients/norm"].of("maker.weight")
    assert norms.steps.tolist() == [0, 1, 2]
    np.testing.assert_allclose(norms.values[:, 0], np.array(module.wanted)[:, 0], rtol=1e-5)


def test_resumed_training_goes_on_with_its_step(pl, tmp_path):
    saver = pl.callbacks.ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=3)
    options = {"limit_train_batches": 3, "limit_val_batches": 0}
    first = trainer(pl, tmp_path, KeelscopeCallback(), saver, enable_checkpointing=True, **options)
    first.fit(automatic(pl), loader(batches()))
    callback, whole = KeelscopeCallback(), KeelscopeCallback()
    options |= {"max_epochs": 2}
    trainer(pl, tmp_path, callback, **options).fit(automatic(pl), loader(batches()), ckpt_path=tmp_path / "last.ckpt")
    trainer(pl, tmp_path, whole, **options).fit(automatic(pl), loader(batches()))
    for key in ("gradients/rms", "parameter_gradients/norm", "scalars/loss", "scalars/lr"):
        resumed, unbroken = callback.watch.run[key], whole.watch.run[key]
        assert resumed.steps.tolist() == [3, 4, 5]
        np.testing.assert_allclose(resumed.values, unbroken.values[3:], rtol=1e-5, err_msg=key)


def test_an_exception_closes_the_file(package, tmp_path):
    module = automatic(package)

    def fail(_module, _inputs):
        if module.global_step == 3:
            raise RuntimeError("in the middle of a step")

    module.net[4].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="middle of a step"):
        trainer(package, tmp_path, KeelscopeCallback(tmp_path / "run.h5")).fit(module, loader(batches()))
    with ks.open_run(tmp_path / "run.h5") as run:
        assert not run.live
        assert run["gradients/norm"].steps.tolist() == [0, 1, 2]
    assert [len(part._forward_hooks) for part in module.modules() if part._forward_hooks] == []


def test_optimizers_that_lightning_wraps(pl, tmp_path):
    """`self.optimizers()` gives wrappers; `watch` sees the steps of what is inside."""
    runs = []

    class Own(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            self.watch = ks.watch(pl_module, optimizer=pl_module.optimizers(use_pl_optimizer=True))

        def on_train_end(self, trainer, pl_module):
            self.watch.close()
            runs.append(self.watch.run)

    trainer(pl, tmp_path, Own(), limit_val_batches=0).fit(automatic(pl), loader(batches(4)))
    assert runs[0]["parameter_gradients/norm"].steps.tolist() == [0, 1, 2, 3]


def test_only_the_main_process_records(pl, tmp_path, monkeypatch):
    callback = KeelscopeCallback(tmp_path / "run.h5")
    monkeypatch.setattr(pl.Trainer, "is_global_zero", property(lambda _: False))
    trainer(pl, tmp_path, callback).fit(automatic(pl), loader(batches(2)))
    assert callback.watch is None
    assert not (tmp_path / "run.h5").exists()


def test_it_is_one_of_theirs(package):
    assert isinstance(KeelscopeCallback(), (KeelscopeCallback, package.Callback))


def test_without_lightning(monkeypatch):
    import sys

    for name in [name for name in sys.modules if name.partition(".")[0] in {"lightning", "pytorch_lightning"}]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"^lightning is not installed; pip install 'keelscope\[lightning\]'"):
        KeelscopeCallback()
