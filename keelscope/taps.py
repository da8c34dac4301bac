"""What can be observed: which tensors of a model (`Tap`), and what stands along the site axis then (`Axis`).

`keelscope.probe` builds on it; `keelscope.hooks`, `keelscope.parameters`, `keelscope.residuals` and `keelscope.gates`
deliver the tensors.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["Axis", "Tap"]


class Axis(Enum):
    """What the entries of a site axis are."""

    MODULE = "module"
    PARAMETER = "parameter"
    SUBLAYER = "sublayer"
    """Residual sub-layers in execution order, found in the first recorded step."""
    GATE = "gate"
    """Gates and residual weights, found in the first recorded step, by name, or declared by the model."""

    __hash__ = object.__hash__  # an enumeration's own is written in Python, and asked dozens of times a row


class Tap(Enum):
    """Which tensors a probe is shown, and who owns them."""

    INPUT = "input"
    """The first floating tensor among a module's arguments, before the module runs."""
    OUTPUT = "output"
    """The first floating tensor of a module's output."""
    OUTPUT_GRADIENT = "output_gradient"
    """The gradient with respect to each floating tensor of a module's output."""
    INPUT_AND_GRADIENT = "input_and_gradient"
    """A module's first floating input and the gradient of its first floating output, when the gradient arrives: two
    tensors. Left out if the input was changed in place since the forward."""
    JACOBIAN = "jacobian"
    """The Jacobian of a stack's entry on the live graph, from its first input that requires a gradient to its first
    output that does, when the gradient arrives: shown to a `JacobianProbe`."""
    ATTENTION = "attention"
    """The scores of each attention inside a module, before the softmax, taken where they are computed: float32
    ``[batch, head, query, key]`` of up to 64 evenly spaced queries, masked keys at -inf or far below the others. The
    module is the innermost watched one around the attention."""
    PARAMETER = "parameter"
    """A parameter, before the optimizer changes it."""
    PARAMETER_GRADIENT = "parameter_gradient"
    """A parameter's gradient of the whole step."""
    STEP_GRADIENT = "step_gradient"
    """A parameter's gradient as its optimizer got it: clipped, unscaled. Needs ``optimizer=``."""
    UPDATE = "update"
    """What the optimizer added to a parameter, and the parameter before: two tensors."""

    RESIDUAL_SUM = "residual_sum"
    """What meets in a residual addition ``a x + b F``: the stream x, the shortcut a x, the branch b F. The owner is the
    norm on the sum, or an identity."""
    RESIDUAL_GRADIENTS = "residual_gradients"
    """The gradients around a residual sub-layer, see `keelscope.paths.PathGradients`: six tensors, empty where one is
    not known. The owner is the norm on the sum, or an identity."""

    GATE = "gate"
    """The weights that a gate gives and their slopes, |d weight / d parameter| (NaN where it is not known), side by
    side: one tensor ``[entry, 2]``. The owner is the module that holds the gate."""
    GATE_GRADIENT = "gate_gradient"
    """The gradient of the whole step at a gate's parameter; for gates that depend on data, the gradient at the output
    of the gate's module."""

    __hash__ = object.__hash__

    @property
    def axis(self) -> Axis:
        """What the site axis holds."""
        return _AXES[self]

    @property
    def of_module(self) -> bool:
        """Whether the site axis holds modules."""
        return self.axis is Axis.MODULE

    @property
    def of_gradient(self) -> bool:
        """Whether what it shows grows with the loss, so that a loss scale is taken out."""
        return self in _OF_GRADIENT

    @property
    def in_backward(self) -> bool:
        """Whether it waits for the backward pass of a module."""
        return self is Tap.OUTPUT_GRADIENT or self is Tap.INPUT_AND_GRADIENT or self is Tap.JACOBIAN


_AXES = {
    Tap.INPUT: Axis.MODULE,
    Tap.OUTPUT: Axis.MODULE,
    Tap.OUTPUT_GRADIENT: Axis.MODULE,
    Tap.INPUT_AND_GRADIENT: Axis.MODULE,
    Tap.JACOBIAN: Axis.MODULE,
    Tap.ATTENTION: Axis.MODULE,
    Tap.PARAMETER: Axis.PARAMETER,
    Tap.PARAMETER_GRADIENT: Axis.PARAMETER,
    Tap.STEP_GRADIENT: Axis.PARAMETER,
    Tap.UPDATE: Axis.PARAMETER,
    Tap.RESIDUAL_SUM: Axis.SUBLAYER,
    Tap.RESIDUAL_GRADIENTS: Axis.SUBLAYER,
    Tap.GATE: Axis.GATE,
    Tap.GATE_GRADIENT: Axis.GATE,
}
_OF_GRADIENT = frozenset(tap for tap in Tap if "gradient" in tap.value)
