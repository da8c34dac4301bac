"""Which modules are norms: torch's own by their forward, every other class by its behaviour.

A class that is not torch's is tried out once on a stand-in (`standin`): `fitting` reads gain, shift
and epsilon off its outputs, and the result is checked against the closed form. The module, its buffers, its hooks and
the random state are not touched. What is remembered is a `keelscope.jacobian.readers.Reader`, not values.
"""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakKeyDictionary

from torch import Tensor, distributed, jit, nn
from torch.nn.parameter import is_lazy

from keelscope.jacobian.fitting import fit
from keelscope.jacobian.norms import NormForm
from keelscope.jacobian.readers import TORCH_READERS, Reader, agrees, frozen
from keelscope.jacobian.standin import is_simple, settings_for

__all__ = ["Recogniser", "recognise"]


def recognise(module: nn.Module) -> NormForm | None:
    """The form of a module, without a memory of earlier answers.

    Args:
        module: any module; it is not called.

    Returns:
        Its form now, or None if it is no norm of a known form.

    Example:
        >>> recognise(nn.LayerNorm(8)).kind, recognise(nn.Linear(8, 8))
        ('layer', None)
    """
    return Recogniser().form(module)


class Recogniser:
    """`recognise` with a memory, for callers that ask at every step. Keeps no module alive."""

    def __init__(self) -> None:
        self._readers: WeakKeyDictionary[nn.Module, tuple[type, Reader | None]] = WeakKeyDictionary()
        self._of_likes: dict[Hashable, Reader | None] = {}

    def knows(self, module: nn.Module) -> bool:
        """Whether the module is a norm.

        Args:
            module: any module.

        Returns:
            Whether `form` has an answer for it.
        """
        return self._reader(module) is not None

    def form(self, module: nn.Module) -> NormForm | None:
        """The form of a norm as it is now.

        Args:
            module: any module.

        Returns:
            The form, or None: no norm, or one whose tensors lie on other ranks.
        """
        reader = self._reader(module)
        if reader is None:
            return None
        form = reader(module)
        whole = all(not isinstance(t, Tensor) or t.numel() in {1, form.width} for t in (form.gamma, form.beta))
        return form if whole else None

    def _reader(self, module: nn.Module) -> Reader | None:
        if isinstance(module, jit.ScriptModule):  # has no forward of its own to look at
            return None
        known = self._readers.get(module)
        if known is not None and known[0] is type(module):
            return known[1]
        if any(is_lazy(t) for t in (*module._parameters.values(), *module._buffers.values()) if t is not None):
            return _torch_reader(module)  # what it will be shows after its first call
        own = _runs_forward_of_torch(module)
        reader = _torch_reader(module) if own else self._tried(module)
        if reader is not None or not own:  # that a layer of torch is no norm is told at once, and most are none
            self._readers[module] = (type(module), reader)
        return reader

    def _tried(self, module: nn.Module) -> Reader | None:
        """The reader of a class that is not torch's, tried out for the first module of its kind."""
        if not is_simple(module) or _spans_ranks(module):
            return None
        key = _likeness(module)
        if key not in self._of_likes:
            self._of_likes[key] = _find_reader(module)
        return self._of_likes[key]


def _likeness(module: nn.Module) -> Hashable:
    """Equal for modules that behave alike: class, settings, and the shapes of their tensors."""
    settings = tuple(sorted((name, repr(v)) for name, v in vars(module).items() if name != "training" and _is_plain(v)))
    tensors = tuple(
        (name, None if tensor is None else tuple(tensor.shape))
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    )
    return type(module), settings, tensors, tuple(module._modules.keys())


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(entry) for entry in value)
    return value is None or isinstance(value, int | float | str)


def _find_reader(module: nn.Module) -> Reader | None:
    for setting in settings_for(module):
        fitted = fit(module, setting)
        candidates: list[Reader] = [*_likely(module), *([] if fitted is None else [fitted])]
        found = next((reader for reader in candidates if agrees(module, reader, setting)), None)
        if found is not None:
            return found
    return None


def _likely(module: nn.Module) -> list[Reader]:
    """Readers of the classes a module descends from, and of frozen BatchNorm by the names of its buffers."""
    inherited = [reader for parent, reader in TORCH_READERS if isinstance(module, parent)]
    names = {"weight", "bias", "running_mean", "running_var"}
    return [*inherited, *([frozen] if names <= set(module._buffers) else [])]


def _torch_reader(module: nn.Module) -> Reader | None:
    """The reader of a class that runs torch's own forward, parametrised and sharded classes included."""
    forward = getattr(type(module), "forward", None)
    return next((reader for parent, reader in TORCH_READERS if forward is parent.forward), None)


def _runs_forward_of_torch(module: nn.Module) -> bool:
    """Whether the forward is torch's own, also in a class that sharding or parametrisation made."""
    owner = next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), nn.Module)
    return owner.__module__.startswith("torch.") and owner is not nn.SyncBatchNorm


def _spans_ranks(module: nn.Module) -> bool:
    """Whether a row lies on several ranks, of which this one sees its part only."""
    return isinstance(module, nn.SyncBatchNorm) and distributed.is_available() and distributed.is_initialized()
