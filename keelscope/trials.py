"""What a probe does with real tensors: the checks behind `keelscope.testing.check_probe`.

A `Trial` is a probe on a module it fits. Each ``check_*`` raises `ProbeError` with what is wrong; the last one trains a
small model through `keelscope.session`, with the probe and without.
"""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from keelscope.attention import scores_seen
from keelscope.errors import ProbeError, RecordingWarning
from keelscope.jacobian.linearised import Entry
from keelscope.jacobian.passage import Memory, Span
from keelscope.leaves import floating_leaves
from keelscope.probe import Axis, JacobianProbe, Probe, Tap, TensorProbe, group_of
from keelscope.session import watch
from keelscope.statistics import Statistic, Terms
from keelscope.store.reader import Run

__all__ = ["Trial", "attempt", "check_device", "check_recording", "check_values", "check_view", "fail"]

Tensors = tuple[Tensor, ...]
Array = NDArray[np.float64]

_T = TypeVar("_T")
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_SCALE = 1024.0
_GATE = 6
"""Number of weights that a gate gives."""
_WAITS = ("item() cannot be called", "copy out of meta", "can't convert meta", "data-independent", "aten::equal")


def fail(probe: Probe, what: str) -> None:
    """Raise what is wrong with a probe."""
    raise ProbeError(f"probe {probe.name!r}: {what}.")


def attempt(probe: Probe, what: str, run: Callable[[], _T]) -> _T:
    """Run code of a probe; what it raises is said to be its fault."""
    try:
        return run()
    except ProbeError:
        raise
    except Exception as error:
        raise ProbeError(f"probe {probe.name!r}: {what} {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Trial:
    """A probe on a module it fits, and what the module is called with."""

    probe: Probe
    owner: nn.Module
    inputs: tuple[object, ...]

    @property
    def place(self) -> str:
        """Where the trial is made, for messages."""
        return f"at {type(self.owner).__name__}"

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """All that the probe offers."""
        return (*self.probe.statistics, *self.probe.optional)

    def tensors(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensors:
        """Random tensors of the shapes that the tap has here."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in self._shapes())

    def view(self, tensors: Tensors) -> Tensors | None:
        """What the probe picks of them."""
        view = attempt(self.probe, f"view() raises {self.place}:", lambda: self._shown(tensors))
        if view is not None and not (isinstance(view, tuple) and all(isinstance(entry, Tensor) for entry in view)):
            fail(self.probe, f"view() gives {type(view).__name__} {self.place}, expected a tuple of tensors or None")
        return view

    def _shown(self, tensors: Tensors) -> Tensors | None:
        if not isinstance(self.probe, JacobianProbe):
            return self.probe.view(tensors, self.owner)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            x = tensors[0].float().requires_grad_()
            entry = Entry.of(x)
            output = floating_leaves(copy.deepcopy(self.owner).eval()(x))[0][1]
        assert output.grad_fn is not None
        passage = Span(entry, output.output_nr, (0, 0)).passage(Memory(), output.grad_fn)
        with torch.no_grad():
            return self.probe.measures(passage, self.owner)

    def terms(self, terms: Terms, view: Tensors) -> Array:
        """The terms of one observation, ``[column]``."""
        shapes = " and ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in view)
        with torch.no_grad():
            values: object = attempt(
                self.probe, f"the terms {terms.name!r} raise on {shapes}:", lambda: terms.of(*view)
            )
        wanted = f"torch.float64 [{len(terms.columns)}]"
        got = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        if got != wanted:
            fail(self.probe, f"the terms {terms.name!r} give {got}, expected {wanted}: one number per column")
        assert isinstance(values, Tensor)
        return values.numpy()

    def attention(self) -> list[tuple[int, ...]]:
        """Shapes of the attention scores inside the module."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return [tuple(scores.shape) for scores in scores_seen(copy.deepcopy(self.owner), self.inputs)]

    def _shapes(self) -> list[tuple[int, ...]]:
        tap = self.probe.tap
        if tap.axis is Axis.SUBLAYER:
            shape = next(tuple(leaf.shape) for _, leaf in floating_leaves(self.inputs))
            return [shape] * (3 if tap is Tap.RESIDUAL_SUM else 6)
        if tap.axis is Axis.GATE:
            return [(_GATE, 2) if tap is Tap.GATE else (_GATE,)]
        if not tap.of_module:
            first = tuple(next(self.owner.parameters()).shape)
            return [first, first] if tap is Tap.UPDATE else [first]
        given = [tuple(leaf.shape) for _, leaf in floating_leaves(self.inputs)]
        if tap is Tap.ATTENTION:
            return [self.attention()[0]]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            made = [tuple(leaf.shape) for _, leaf in floating_leaves(copy.deepcopy(self.owner)(*self.inputs))]
        if tap is Tap.INPUT_AND_GRADIENT:
            return [(given or made)[0], made[0]]
        return [(given or made)[0] if tap in {Tap.INPUT, Tap.JACOBIAN} else made[0]]


def check_view(trial: Trial) -> None:
    """The view and its terms leave tensors and random states alone and let go of them, whatever the dtype."""
    for dtype in _DTYPES:
        tensors = trial.tensors(dtype)
        copies = [tensor.clone() for tensor in tensors]
        before = _random_states()
        view = trial.view(tensors)
        for terms in {statistic.terms for statistic in trial.statistics} if view is not None else ():
            trial.terms(terms, view or ())
        if not all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True)):
            fail(trial.probe, f"view() or its terms change the tensors they are shown {trial.place}")
        if _random_states() != before:
            fail(trial.probe, f"view() or its terms draw random numbers {trial.place}: the model would draw others")
    shown = _storages_shown(trial)
    gc.collect()
    if not all(reference.expired() for reference in shown):  # type: ignore[no-untyped-call]
        fail(trial.probe, f"view() or its terms keep a tensor they were shown {trial.place}: memory would grow")


def _storages_shown(trial: Trial) -> list[StorageWeakRef]:
    tensors = trial.tensors()
    view = trial.view(tensors)
    for terms in {statistic.terms for statistic in trial.statistics} if view is not None else ():
        trial.terms(terms, view or ())
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]  # type: ignore[no-untyped-call]


def _random_states() -> tuple[bytes, object, bytes]:
    of_numpy = np.random.get_state(legacy=False)["state"]["key"]  # noqa: NPY002 - users draw from it
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), of_numpy.tobytes()


def check_device(trial: Trial) -> None:
    """Hooks never wait for the device: tensors without data raise where a value would be read."""
    try:
        owner = copy.deepcopy(trial.owner).to("meta")
        view = trial.probe.view(tuple(tensor.to("meta") for tensor in trial.tensors()), owner)
        for statistic in trial.statistics if view is not None else ():
            statistic.terms.of(*(view or ()))
    except Exception as error:  # anything else that such tensors cannot do says nothing about the probe
        if any(mark in str(error) for mark in _WAITS):
            fail(
                trial.probe,
                f"view() or its terms read a value {trial.place} (item(), float(), tolist(), nonzero(), a mask as "
                "index, an if on a tensor): every hook would wait for the device",
            )


def check_values(trial: Trial) -> None:
    """Every statistic finishes to its shape, merges, and is free of the loss scale."""
    for statistic in trial.statistics:
        for seed in range(2):
            tensors = trial.tensors(torch.float64, seed)
            view = trial.view(tensors)
            if view is not None:
                value = _finished(trial, statistic, trial.terms(statistic.terms, view))
                _check_merge(trial, statistic, view, value)
                _check_loss_scale(trial, statistic, tensors, value)


def _finished(trial: Trial, statistic: Statistic, terms: Array) -> Array:
    """The value of one observation, and of three at once."""
    extra = tuple(len(statistic.coords[dim]) for dim in statistic.dims)
    three = np.stack([terms, terms, terms])
    for given, shape in ((terms, extra), (three, (3, *extra))):
        values = attempt(trial.probe, f"finish of {statistic.name!r} raises", partial(statistic.of, given))
        if values.shape != shape:
            got, wanted = list(values.shape), list(shape)
            fail(trial.probe, f"{statistic.name!r} gives {got} for terms {list(given.shape)}, expected {wanted}")
    return statistic.of(terms)


def _check_merge(trial: Trial, statistic: Statistic, view: Tensors, value: Array) -> None:
    """Split at every place along the first axis of what is seen."""
    rows = {tensor.shape[0] for tensor in view if tensor.dim()}
    splits = range(rows.pop() + 1) if statistic.mergeable and len(rows) == 1 else range(0)
    for split in splits:
        parts = [tuple(t[part] for t in view) for part in (slice(None, split), slice(split, None))]
        terms = [trial.terms(statistic.terms, part) for part in parts]
        for merged in _merged(trial, statistic.terms, *terms):
            got = statistic.of(merged)
            if not np.allclose(got, value, rtol=1e-6, atol=1e-9, equal_nan=True):
                fail(
                    trial.probe,
                    f"{statistic.name!r} breaks of(a ++ b) == merge(of(a), of(b)) {trial.place}: two parts give {got}, "
                    f"the whole {value}; a statistic that cannot merge says mergeable=False",
                )


def _merged(trial: Trial, terms: Terms, a: Array, b: Array) -> list[Array]:
    """Two parts merged: alone, and side by side with the swapped pair."""

    def merge() -> list[Array]:
        return [terms.merge(a, b), *terms.merge(np.stack([a, b]), np.stack([b, a]))]

    return attempt(trial.probe, f"merge of the terms {terms.name!r} raises", merge)


def _check_loss_scale(trial: Trial, statistic: Statistic, tensors: Tensors, value: Array) -> None:
    """What mixed precision multiplies is taken out again."""
    terms = statistic.terms
    if not trial.probe.tap.of_gradient:
        return
    first = 1.0 if trial.probe.tap is Tap.INPUT_AND_GRADIENT else _SCALE
    scaled = trial.view((first * tensors[0], *(_SCALE * tensor for tensor in tensors[1:])))
    if scaled is not None:
        got = statistic.of(terms.rescaled(trial.terms(terms, scaled), 1 / _SCALE))
        if not np.allclose(got, value, rtol=1e-6, atol=1e-12, equal_nan=True):
            fail(
                trial.probe,
                f"{statistic.name!r} keeps the loss scale of mixed precision {trial.place} ({got} instead of {value}); "
                f"give the terms {terms.name!r} their degrees, or a rescale",
            )


class _Host(nn.Module):
    """A model around one module, with a gradient for everything in it.

    Args:
        inner: the module.
        width: of a branch around which the module is the norm of a gated residual sub-layer; 0 for none.
    """

    def __init__(self, inner: nn.Module, width: int = 0) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(()))
        self.stem = nn.Linear(width, width) if width else None
        self.branch = nn.Linear(width, width) if width else None
        self.gate = nn.Parameter(torch.full((width,), 0.5)) if width else None

    def forward(self, *inputs: object) -> Tensor:
        scaled = [self.scale * x if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
        if self.stem is not None and self.branch is not None:
            streams = [self.stem(x) for x in scaled]
            scaled = [x + self.gate * self.branch(x) for x in streams]
        leaves = [leaf for _, leaf in floating_leaves(self.inner(*scaled))]
        return torch.stack([leaf.double().square().mean() for leaf in leaves]).sum()


def check_recording(trial: Trial) -> None:
    """Two steps of training: recorded, without a warning, and bit for bit as without the probe."""
    with torch.random.fork_rng(devices=[]):
        alone, _ = _trained(trial, watched=False)
        watched, run = _trained(trial, watched=True)
    if watched != alone:
        fail(trial.probe, f"changes training {trial.place}: losses or weights differ from those without it")
    assert run is not None
    found = [run.get(f"{group_of(trial.probe)}/{statistic.name}") for statistic in trial.statistics]
    view = trial.view(trial.tensors())
    seen = any(series is not None and np.isfinite(series.values).any() for series in found)
    choosy = trial.probe.tap is Tap.JACOBIAN or getattr(trial.probe, "worth", None) is not None
    if view is not None and not seen and not choosy:  # the model here has no stack
        fail(trial.probe, f"records nothing {trial.place}, although it fits and its view gives tensors")


def _in_full(probe: Probe) -> Probe:
    """The probe with what is optional, where that can be asked for."""
    if isinstance(probe, TensorProbe | JacobianProbe):
        return replace(probe, statistics=(*probe.statistics, *probe.optional))
    return probe


def _trained(trial: Trial, *, watched: bool) -> tuple[list[object], Run | None]:
    torch.manual_seed(0)
    is_residual = trial.probe.tap.axis in {Axis.SUBLAYER, Axis.GATE}
    width = next(leaf.shape[-1] for _, leaf in floating_leaves(trial.inputs)) if is_residual else 0
    model = _Host(copy.deepcopy(trial.owner), width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = watch(model, optimizer=optimizer, probes=[_in_full(trial.probe)], sites="all") if watched else None
    losses: list[object] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecordingWarning)
        for _ in range(2):
            optimizer.zero_grad()
            attempt(
                trial.probe, f"recording raises {trial.place}:", lambda: losses.append(_step(model, optimizer, trial))
            )
        if session is not None:
            attempt(trial.probe, f"recording raises {trial.place}:", session.close)
    weights = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return [*losses, *weights], session.run if session is not None else None


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, trial: Trial) -> float:
    loss: Tensor = model(*trial.inputs)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()
