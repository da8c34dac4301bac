"""The numbers behind the labels of the unseen half, in plain torch: ``python tests/diagnosis/unseen/evidence.py``.

Builders run with a stand-in for the watch that only hangs tensor hooks on outputs: no number comes from the tool.
Of the longest chain of modules: RMS of the output gradient and norm of the parameter gradient at both ends, summed in
float64; parameters without a gradient, with one of exactly 0, with NaN or Inf; the first output with NaN or Inf; the
loss, and the loss after 30 steps of Adam on the same batch. The docstrings of the builders hold these sentences.
"""

from __future__ import annotations

import copy
import math
import runpy
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

import keelscope as ks
import keelscope.oneshot

HERE = Path(__file__).parent


class Plain:
    """Stands where a watch would: keeps gradients of outputs by module, and numbers of the last step."""

    def __init__(self, model, path=None, *, optimizer=None, **options):
        self.model, self.optimizer = model, optimizer
        self.losses, self.levels, self.parameters, self.broken, self.trained = [], {}, {}, [], ""
        self.run = self

    def __enter__(self):
        self.handles = [
            module.register_forward_hook(lambda _, __, output, name=name: self.look(name, output))
            for name, module in self.model.named_modules()
        ]
        optimizers = self.optimizer if isinstance(self.optimizer, (list, tuple)) else [self.optimizer]
        self.handles += [o.register_step_pre_hook(lambda *_: self.keep()) for o in optimizers if o is not None]
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()

    def look(self, name, output):
        tensor = next(tensors_in(output), None)
        if tensor is None or not tensor.is_floating_point():
            return
        if not tensor.detach().isfinite().all():
            self.broken.append(name)
        if tensor.requires_grad:
            tensor.register_hook(lambda g: self.levels.__setitem__(name, float(g.double().square().mean().sqrt())))

    def keep(self):
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                self.parameters[name] = "frozen"
            else:
                self.parameters[name] = None if parameter.grad is None else float(parameter.grad.double().norm())

    def log(self, **values):
        self.losses.append(float(next(iter(values.values()))))
        self.keep()

    def step(self):
        if not self.parameters:
            self.keep()


def tensors_in(output):
    """Tensors of an output, in order."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors_in(value)


def plain_once(model, batch, loss, **_):
    """One forward and backward, and 30 steps of Adam on a copy."""
    saved = copy.deepcopy(model)
    with Plain(model) as watch:
        value = value_of(model, batch, loss)
        value.backward()
        watch.log(loss=value)
    watch.trained = trained(saved, batch, loss)
    return watch


def value_of(model, batch, loss):
    """The loss of a model on a batch."""
    if isinstance(batch, dict):
        output = model(**batch)
    else:
        output = model(*batch[:-1]) if isinstance(batch, tuple) else model(batch)
    return output.loss if loss is None else loss(output, batch)


def trained(model, batch, loss, steps=30):
    """Loss before and after some steps of Adam at 1e-3."""
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer, values = torch.optim.Adam(learned, lr=1e-3), []
    for _ in range(steps):
        optimizer.zero_grad()
        value = value_of(model, batch, loss)
        value.backward()
        optimizer.step()
        values.append(float(value))
    return f"{values[0]:.3g} -> {values[-1]:.3g}"


def chains(model):
    """Paths in each chain of three or more modules, longest first; of two that lie in each other the longer one."""
    found = []
    kinds = (nn.ModuleList, nn.Sequential)
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, kinds) and len(m) >= 3]
    for name, module in sorted(lists, key=lambda pair: -len(pair[1])):
        if not any(inside(name, other) or inside(other, name) for other in found):
            found.append(name)
            yield [f"{name}.{child}".lstrip(".") for child, _ in module.named_children()]


def inside(path, other):
    """Whether a module lies in another."""
    return not other or path.startswith(f"{other}.")


def sentence(watch):
    """What was measured, in the words of a docstring."""
    parts = [*on_the_longest_chain(watch), *on_parameters(watch), *on_outputs(watch), on_the_loss(watch)]
    return "; ".join(parts) + "."


def on_the_longest_chain(watch):
    """RMS of output gradients and norms of parameter gradients at both ends of the longest chain that has any."""
    for children in chains(watch.model):
        levels = {child: watch.levels.get(child) for child in children}
        known = [child for child, level in levels.items() if level is not None and 0 < level < math.inf]
        if len(known) < 3:
            continue
        norms = [norm for child in children if (norm := norm_of(watch, child)) is not None and 0 < norm < math.inf]
        yield (
            f"output gradients {levels[known[0]]:.2g} at {known[0]} and {levels[known[-1]]:.2g} at {known[-1]}"
            f" (of {len(children)})" + (f", parameters' {norms[0]:.2g} and {norms[-1]:.2g}" if len(norms) > 1 else "")
        )
        return


def on_parameters(watch):
    """How many parameters have no gradient, one of exactly 0, or one with NaN or Inf; frozen ones."""
    for words, holds in (
        ("get no gradient", lambda v: v is None),
        ("get exactly 0", lambda v: v == 0),
        ("get NaN or Inf", lambda v: isinstance(v, float) and not math.isfinite(v)),
        ("are frozen", lambda v: v == "frozen"),
    ):
        count = sum(holds(value) for value in watch.parameters.values())
        if count:
            yield f"{count} of {len(watch.parameters)} parameters {words}"


def on_outputs(watch):
    """The first module with a NaN or Inf in its output."""
    if watch.broken:
        yield f"NaN or Inf first comes out of {watch.broken[0] or 'the model'}"
    elif any(isinstance(v, float) and not math.isfinite(v) for v in watch.parameters.values()):
        yield "every module's output is finite"


def on_the_loss(watch):
    """Loss on the batch, and what training makes of it."""
    if watch.trained:
        return f"loss {watch.trained} in 30 steps of Adam"
    return "loss " + " -> ".join(f"{value:.3g}" for value in dict.fromkeys((watch.losses[0], watch.losses[-1])))


def norm_of(watch, path):
    """Norm of all parameter gradients inside a module."""
    values = [v for n, v in watch.parameters.items() if n.startswith(f"{path}.") and isinstance(v, float)]
    return math.sqrt(sum(v * v for v in values)) if values else None


def measured(file):
    """Each labelled model of a file with its sentence."""
    scope = runpy.run_path(str(HERE / f"{file}.py"))
    for model in [model for value in scope.values() for model in getattr(value, "labelled", ())]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield model, sentence(model.record())


def stand_in():
    """Put the plain stand-in where builders look for a watch."""
    ks.watch, keelscope.oneshot.record_once = Plain, plain_once
    torch.set_num_threads(1)
    runpy.run_path(str(HERE.parents[1] / "conftest.py"))["declare_operators"]()


if __name__ == "__main__":
    stand_in()
    for name in sys.argv[1:] or sorted(path.stem for path in HERE.glob("*.py")):
        for model, words in measured(name):
            sys.stdout.write(f"{name}: {model.name}, {model.headline}{'' if model.healthy else ', sick'}: {words}\n")
