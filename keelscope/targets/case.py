"""`resolve`: a model target, an input and a loss, put together as one `Case`.

The command line hands it the words the user typed; `keelscope.report(case.model, case.batch, case.loss)` does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from keelscope.errors import BatchError, FactoryError, NothingToObserveError, TargetError, UsageError
from keelscope.targets import families
from keelscope.targets.inputs import default_spec, example_spec, make_batch, parse
from keelscope.targets.locate import call, import_object
from keelscope.targets.losses import Loss, choose
from keelscope.targets.sizes import sizes_of

__all__ = ["Case", "is_model_target", "resolve"]

FORMS = "pkg.module:factory, path/file.py:factory, hf:NAME, timm:NAME, torchvision:NAME or scheme:NAME"


@dataclass(frozen=True, slots=True)
class Case:
    """A model with everything a report of it needs."""

    model: nn.Module
    batch: object
    """What the model takes: a tensor, a tuple whose last entry is the target, or a mapping of keywords."""
    loss: Loss
    input: str
    """Where the batch comes from, in words."""

    @property
    def sizes(self) -> dict[str, int]:
        """What the model's own configuration says of its width, heads and vocabulary."""
        return sizes_of(self.model)


@dataclass(frozen=True, slots=True)
class _Built:
    model: nn.Module
    batch: object = None
    loss: object = None
    spec: str = ""


def is_model_target(target: str) -> bool:
    """Whether a target has the form of a model rather than of a run file.

    Args:
        target: what the user typed.

    Returns:
        True for ``family:name``, ``module:name`` and ``file.py:name`` unless a file of that very name exists.

    Example:
        >>> is_model_target("scheme:keel"), is_model_target("runs/keel.h5")
        (True, False)
    """
    return (":" in target or target.endswith(".py")) and not (Path(target).is_file() and not target.endswith(".py"))


def resolve(target: str, *, input: str = "", batch: str = "", loss: str = "", seed: int = 0) -> Case:  # noqa: A002 - the option's name
    """Build the model that a target names, its batch and its loss.

    The input is, in this order: ``batch``, ``input``, what the factory returned, what the model says it takes.

    Args:
        target: ``pkg.module:factory``, ``path/file.py:factory`` (returning a module, ``(module, batch)`` or
            ``(module, batch, loss)``), ``hf:NAME_OR_DIR``, ``hf:config:NAME``, ``timm:NAME``, ``torchvision:NAME`` or
            ``scheme:NAME``.
        input: specification such as ``int64[4,128]<50257``.
        batch: ``pkg.mod:fn`` returning a batch.
        loss: one of `losses.NAMES` or ``pkg.mod:fn``; empty for the factory's own loss, else ``auto``.
        seed: seed under which the model is built and the input drawn; the global generator is left as it was.

    Returns:
        The model, its batch and its loss.

    Raises:
        TargetError: if the target leads nowhere.
        FactoryError: if the factory raises or returns no module.
        UsageError: if no input is known, or two are given.
        NothingToObserveError: if no parameter requires a gradient.
    """
    if input and batch:
        raise UsageError("give --input or --batch, not both.")
    entries = parse(input) if input else ()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        built = _build(target)
        _observable(built.model, target)
        made = _call_batch(batch) if batch else None
    chosen = _own_loss(built.loss, target) if not loss and built.loss is not None else choose(loss or "auto")
    if batch:
        return Case(built.model, made, chosen, f"--batch {batch}")
    if entries:
        return Case(built.model, make_batch(entries, seed), chosen, f"{input}, random, seed {seed}")
    if built.batch is not None:
        return Case(built.model, built.batch, chosen, f"returned by {target}")
    spec = built.spec or default_spec(built.model)
    if not spec:
        raise UsageError(
            f'{target} comes without an input; add --input "{example_spec(built.model)}" (or the shape it takes), '
            "or --batch pkg.mod:fn, or let the factory return (module, batch)."
        )
    return Case(built.model, make_batch(parse(spec), seed), chosen, f"{spec}, random, seed {seed}")


def _build(target: str) -> _Built:
    if families.is_family(target):
        model, spec = families.build(target)
        return _Built(model, spec=spec)
    if ":" not in target and not target.endswith(".py"):
        raise TargetError(f"{target!r} is no model target; write {FORMS}.")
    factory = import_object(target, "factory")
    if isinstance(factory, nn.Module):
        return _Built(factory)
    if not callable(factory):
        raise FactoryError(f"{target} is a {type(factory).__name__}, not a function that returns a torch.nn.Module.")
    return _unpacked(call(factory, target), target)


def _unpacked(made: object, target: str) -> _Built:
    parts = made if isinstance(made, tuple) else (made,)
    if not parts or len(parts) > 3 or not isinstance(parts[0], nn.Module):
        raise FactoryError(
            f"{target} returned {_kind(made)}; expected a torch.nn.Module, (module, batch) or (module, batch, loss)."
        )
    return _Built(*parts)


def _kind(made: object) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return "None (is a return missing?)" if made is None else f"a {type(made).__name__}"


def _own_loss(function: object, target: str) -> Loss:
    if not callable(function):
        raise FactoryError(f"{target} returned a {type(function).__name__} as loss, not a function of (output, batch).")
    return Loss(f"the factory's {getattr(function, '__name__', type(function).__name__)}", function)


def _call_batch(target: str) -> object:
    found = import_object(target, "batch")
    made = call(found, target) if callable(found) and not isinstance(found, Tensor) else found
    if made is None:
        raise BatchError(f"--batch {target} returned None (is a return missing?).")
    return made


def _observable(model: nn.Module, target: str) -> None:
    parameters = list(model.parameters())
    if any(parameter.requires_grad for parameter in parameters):
        return
    found = f"all {len(parameters)} parameters are frozen" if parameters else "it has no parameters"
    raise NothingToObserveError(
        f"{target} ({type(model).__name__}) has no parameter that requires a gradient ({found}); "
        "call .requires_grad_(True) on the part you want to see."
    )
