"""Measures the gradient flow of reference models at random init, once per model for the whole folder.

Setup of every measurement: width 64, 4 heads, windows of 32 characters, batch 8, GELU, RMSNorm, next-character loss on
the text of the licence (the default text differs between Python versions), with a token for each of its characters.
Slopes are fits over sub-layers 10 to 90 %, in decades per sub-layer, positive when the gradient shrinks towards the
input.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from keelscope import models
from keelscope.text import Text


@dataclass(frozen=True)
class Flow:
    loss: float
    whole: np.ndarray  # [entry], norm of the gradient with respect to the stream before sub-layer 0, 1, ..., L
    late: np.ndarray  # [entry], median over the later half of positions of the per-token norm
    first: np.ndarray  # [entry], norm at position 0
    power: np.ndarray  # [entry], mean square of the stream
    branch_gain: np.ndarray  # [sub-layer], mean square of F over mean square of the stream it is added to
    parameters: np.ndarray  # [sub-layer], norm of the gradient of the branch's parameters

    @property
    def top(self) -> float:
        """Parameter gradient of the last attention branch."""
        return self.parameters[-2]

    def slope(self, name: str = "whole", skip: int = 0) -> float:
        return fit(np.log10(getattr(self, name)), skip)


def fit(values: np.ndarray, skip: int = 0) -> float:
    count = len(values)
    low, high = max(skip, round(0.1 * count)), round(0.9 * count)
    return float(np.polyfit(np.arange(low, high), values[low:high], 1)[0])


@functools.cache
def characters() -> tuple[Text, torch.Tensor]:
    """The text, and byte -> number among the bytes that occur in it."""
    text = Text.read(Path(__file__).parents[2] / "LICENSE")
    occurs = torch.bincount(text.tokens.long(), minlength=256) > 0
    return text, occurs.cumsum(0) - 1


@functools.cache
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    text, number = characters()
    tokens, targets = text.batch(0, 8, 32, seed=0)
    return number[tokens], number[targets]


def stream_of(output):
    return output if isinstance(output, torch.Tensor) else output[0]


def watch(model):
    """Keep the stream before and after every sub-layer, and each branch's output."""
    streams, gains, handles = [], [], []

    def keep(tensor):
        tensor.retain_grad()
        streams.append(tensor)

    def before(_, inputs):
        if not streams:
            keep(stream_of(inputs[0]))

    def branch(_, __, output):
        gains.append((output.detach().square().mean() / streams[-1].detach().square().mean()).item())

    for sublayer in model.sublayers:
        handles += [
            sublayer.register_forward_pre_hook(before),
            sublayer.register_forward_hook(lambda _, __, output: keep(stream_of(output))),
            sublayer.branch.register_forward_hook(branch),
        ]
    return streams, gains, handles


def loss_of(model):
    tokens, targets = batch()
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def build(scheme: str, *, linear: bool = False, **options):
    """The model, with every branch replaced by one random matrix if asked for: no attention, v = 1."""
    model = models.build(scheme, **{"vocabulary": int(characters()[1][-1]) + 1, **options})
    if linear:
        generator = torch.Generator().manual_seed(options.get("seed", 0))
        for sublayer in model.sublayers:
            width = model.config.width
            sublayer.branch = torch.nn.Linear(width, width, bias=False)
            sublayer.branch.weight.data.normal_(0, width**-0.5, generator=generator)
    return model


def measure(scheme: str, **options) -> Flow:
    model = build(scheme, **options)
    streams, gains, _ = watch(model)
    loss = loss_of(model)
    loss.backward()
    tokens = [tensor.grad.flatten(2).norm(dim=-1).double() for tensor in streams]  # [batch, position]
    norms = [
        sum(p.grad.double().square().sum().item() for p in sublayer.branch.parameters() if p.grad is not None) ** 0.5
        for sublayer in model.sublayers
    ]
    return Flow(
        loss=loss.item(),
        whole=np.array([t.norm().item() for t in tokens]),
        late=np.array([t[:, 16:].median().item() for t in tokens]),
        first=np.array([t[:, 0].norm().item() for t in tokens]),
        power=np.array([tensor.detach().square().mean().item() for tensor in streams]),
        branch_gain=np.array(gains),
        parameters=np.array(norms),
    )


def measure_shortcut(scheme: str, **options) -> np.ndarray:
    """Norms of the stream's gradient when no gradient enters a branch, ``[entry]``."""
    model = build(scheme, **options)
    for sublayer in model.sublayers:
        sublayer.branch.register_forward_hook(lambda _, __, output: output.detach())
    streams, _, _ = watch(model)
    loss_of(model).backward()
    return np.array([tensor.grad.double().norm().item() for tensor in streams])


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def rms():
    """RMSNorm without gains, epsilon 1e-5, written out."""
    return lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@pytest.fixture(scope="session")
def run():
    """``run(scheme, formula, **options) -> (model, logits, state)``.

    The state is that of ``formula(index, state, branch)`` applied to the model's own branches one after the other, from
    ``start(embedding)``, all in float64 on 6 sub-layers.
    """

    def apply(scheme, formula, *, start=lambda x: x, prepare=lambda model: None, **options):
        model = models.build(scheme, **{"depth": 6, "width": 16, "heads": 2, **options}).double()
        prepare(model)
        tokens = batch()[0][:2, :8]
        state = start(model.embedding.weight[tokens])
        for index, sublayer in enumerate(model.sublayers):
            state = formula(index, state, sublayer.branch)
        return model, model(tokens), state

    return apply


@pytest.fixture(scope="session")
def flow():
    """``flow(scheme, **options) -> Flow``, measured once."""
    return functools.cache(measure)


@pytest.fixture(scope="session")
def fall_per_four(flow):
    """``fall_per_four(scheme, **options)``: factor by which the top parameter gradient falls per fourfold depth.

    The geometric mean over 16 -> 64 -> 256 sub-layers.
    """
    return lambda scheme, **options: (
        (flow(scheme, depth=16, **options).top / flow(scheme, depth=256, **options).top) ** 0.5
    )


@pytest.fixture(scope="session")
def shortcut_profile():
    """``shortcut_profile(scheme, **options)``, gradient norms without branches, measured once."""
    return functools.cache(measure_shortcut)


@pytest.fixture(scope="session")
def shortcut_slope(shortcut_profile):
    """``shortcut_slope(scheme, **options)``, the slope of that."""
    return lambda scheme, *, skip=0, **options: fit(np.log10(shortcut_profile(scheme, **options)), skip)
