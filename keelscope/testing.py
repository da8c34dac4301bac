"""`check_probe`: does a probe keep its contract? For the tests of packages that bring probes.

Everything `keelscope.probe.Probe` and `keelscope.statistics.Terms` ask for is tried on real modules and on tensors of
every dtype (by `keelscope.trials`); the first thing that is wrong is raised as one `ProbeError`. Recording needs
nothing of this.
"""

from __future__ import annotations

import torch
from torch import nn

from keelscope import trials
from keelscope.errors import ProbeError, UsageError
from keelscope.probe import Axis, Probe, Tap, group_of
from keelscope.statistics import Statistic, Terms
from keelscope.store.layout import checked
from keelscope.store.schema import GroupSpec, RunInfo, RunLayout, Site

__all__ = ["check_probe"]

_FIELDS = {"name": str, "group": str, "version": int, "tap": Tap, "statistics": tuple, "optional": tuple, "every": int}
_ENOUGH = 4

Example = tuple[nn.Module, tuple[object, ...]]


def check_probe(probe: object, *, module: nn.Module | None = None, inputs: tuple[object, ...] = ()) -> None:
    """Check that a probe keeps its contract.

    Args:
        probe: the probe.
        module: a module it fits; by default it is tried on common layers of torch.
        inputs: what `module` is called with.

    Raises:
        ProbeError: saying what is wrong and what was expected: an attribute that is missing or of the wrong type, a
            name that cannot be stored, a view that changes or keeps its tensors, draws random numbers or waits for
            the device, terms of the wrong shape or dtype, a merge that breaks ``of(a ++ b) == merge(of(a), of(b))``,
            values of the wrong shape, gradients that keep the loss scale, or training that is not bit for bit as
            without the probe.

    Example:
        >>> from keelscope.probe import Axis, Tap, TensorProbe
        >>> from keelscope.statistics import RMS
        >>> check_probe(TensorProbe("sizes", Tap.OUTPUT, (RMS,)))
        >>> check_probe(TensorProbe("sizes", Tap.OUTPUT, ()))
        Traceback (most recent call last):
            ...
        keelscope.errors.ProbeError: probe 'sizes': statistics is empty, so nothing would be recorded.
    """
    sound = _with_attributes(probe)
    for statistic in (*sound.statistics, *sound.optional):
        _check_declaration(sound, statistic)
    _check_layout(sound)
    examples = [(module, inputs)] if module is not None else _examples()
    fitting = [trials.Trial(sound, owner, args) for owner, args in examples if _fits(sound, owner)]
    fitting = [trial for trial in fitting if sound.tap is not Tap.ATTENTION or trial.attention()]
    if not fitting:
        tried = ", ".join(type(owner).__name__ for owner, _ in examples)
        missing = "sees no attention in any of" if sound.tap is Tap.ATTENTION else "fits none of"
        trials.fail(sound, f"{missing} {tried}; give a module that it fits, with module= and inputs=")
    for trial in fitting[:_ENOUGH]:
        trials.check_view(trial)
        trials.check_device(trial)
        trials.check_values(trial)
    trials.check_recording(fitting[0])


def _with_attributes(probe: object) -> Probe:
    names = [*_FIELDS, "fits", "view"]
    missing = [name for name in names if not hasattr(probe, name)]
    if missing or isinstance(probe, type):
        wrong = f"lacks {', '.join(missing)}" if missing else "is a class: give an instance"
        raise ProbeError(
            f"{probe!r} {wrong}; a probe has {', '.join(_FIELDS)}, fits(module) and view(tensors, module)."
        )
    assert isinstance(probe, Probe)
    for name, kind in _FIELDS.items():
        value = getattr(probe, name)
        if not isinstance(value, kind) or isinstance(value, bool):
            trials.fail(probe, f"{name} is {value!r}, expected {kind.__name__}")
        if kind is int and value < 1:
            trials.fail(probe, f"{name} is {value}, expected at least 1")
    if not probe.statistics and not probe.optional:
        trials.fail(probe, "statistics is empty, so nothing would be recorded")
    return probe


def _check_declaration(probe: Probe, statistic: object) -> None:
    if not isinstance(statistic, Statistic):
        trials.fail(probe, f"{statistic!r} is no keelscope.Statistic")
    assert isinstance(statistic, Statistic)
    terms = statistic.terms
    if not isinstance(terms, Terms):
        trials.fail(probe, f"the terms of statistic {statistic.name!r} are {terms!r}, expected keelscope.Terms")
    if not terms.columns or len(set(terms.columns)) < len(terms.columns):
        trials.fail(probe, f"the terms {terms.name!r} have columns {terms.columns}, expected distinct names")
    if terms.degrees and len(terms.degrees) != len(terms.columns):
        trials.fail(
            probe, f"the terms {terms.name!r} have {len(terms.degrees)} degrees for {len(terms.columns)} columns"
        )
    if statistic.extent is not None and len(statistic.dims) != 1:
        trials.fail(probe, f"statistic {statistic.name!r} has an extent, so it needs one axis, not {statistic.dims}")
    if not statistic.unit or not statistic.doc:
        trials.fail(
            probe, f'statistic {statistic.name!r} needs a unit ("1" for a pure number) and a doc of one sentence'
        )


def _check_layout(probe: Probe) -> None:
    """Names and axes, as a run file will judge them."""
    specs = tuple(statistic.spec() for statistic in (*probe.statistics, *probe.optional))
    try:
        checked(RunLayout(RunInfo("", "", ""), (GroupSpec(group_of(probe), specs, (Site("", "Module"),)),)))
    except UsageError as error:
        trials.fail(probe, str(error).rstrip("."))


def _fits(probe: Probe, owner: nn.Module) -> bool:
    where = f"fits({type(owner).__name__})"
    answer = trials.attempt(probe, f"{where} raises", lambda: probe.fits(owner))
    if not isinstance(answer, bool):
        trials.fail(probe, f"{where} gives {answer!r}, expected True or False")
    suits = {
        Axis.MODULE: True,
        Axis.PARAMETER: any(True for _ in owner.parameters(recurse=False)),
        Axis.SUBLAYER: isinstance(owner, nn.LayerNorm | nn.RMSNorm),
        Axis.GATE: isinstance(owner, nn.LayerNorm | nn.RMSNorm),
    }
    return bool(answer) and suits[probe.tap.axis]


def _examples() -> list[Example]:
    """Common layers, each with something to be called with."""
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))  # [batch, position, feature]
    pictures = x[..., None].expand(-1, -1, -1, 8)  # [batch, channel, row, column]
    with torch.random.fork_rng(devices=[]):
        plain = [nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Sigmoid(), nn.Tanh(), nn.GELU(), nn.Softmax(-1)]
        plain += [nn.RMSNorm(8), nn.GroupNorm(2, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Conv1d(6, 6, 3)]
        plain += [nn.GRU(8, 8, batch_first=True), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)]
        found: list[Example] = [(module, (x,)) for module in plain]
        found += [(nn.MultiheadAttention(8, 2, batch_first=True), (x, x, x)), (nn.Conv2d(6, 4, 3), (pictures,))]
        found += [(nn.BatchNorm2d(6), (pictures,)), (nn.Embedding(24, 8), (torch.arange(24).reshape(4, 6),))]
    return found
