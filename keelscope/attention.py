"""Attention scores, taken where attention happens: inside the forwards of watched modules, at the level of operators.

Fused attention never forms its weights, so no module hands them out. While a watched module runs, `AttentionMode` sees
every operator that PyTorch executes (a dispatch mode: below autograd and autocast, so the model takes the same path and
computes the same bits) and works the scores of a few queries out of the arguments of fused attention and of softmax.
`keelscope.hooks` opens and closes the modules. Compiled regions and whole-layer kernels (`nn.MultiheadAttention` on its
inference path, the `flash_attn` package) run unseen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from keelscope.board import Board
from keelscope.calls import TermSlots
from keelscope.containment import NO_OP, Unscriptable, warn_once
from keelscope.entries import is_measurable

__all__ = ["AttentionMode", "CloseHook", "OpenModule", "attention_scores", "scores_seen"]

MOST_QUERIES = 64
_MOST_SCORES = 1 << 25
"""Entries of the largest score tensor made here; long sequences are looked at through fewer queries."""
_FUSED = ("scaled_dot_product_attention", "_scaled_dot_product_")
_SOFTMAX = ("_softmax", "_safe_softmax")

Arguments = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class OpenModule:
    """A watched module whose forward is running."""

    site: int
    module: nn.Module
    board: Board = field(default_factory=Board)
    seen: list[TermSlots] = field(default_factory=list)
    """What was kept of each attention inside it."""


class AttentionMode(TorchDispatchMode):
    """Shows the attention scores of a forward to the innermost open module.

    Each thread has its own open modules; the mode is in force while there are any.

    Args:
        show: called with the innermost open module and ``[batch, head, query, key]`` scores.
    """

    supports_higher_order_operators = True  # flex_attention is one; without this it would raise

    def __init__(self, show: Callable[[OpenModule, Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._show = show
        self._of_thread, self._is_used = _OfThread(), False
        self.found: dict[int, list[TermSlots]] = {}
        """Site -> what was kept of each attention inside its last forward."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Part of the machinery: `torch.compile` goes on compiling and takes its regions as they are."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what asks for this imports torch._dynamo at the first operator

    def open(self, module: OpenModule) -> None:
        """A forward begins."""
        self._is_used = True
        self._of_thread.modules.append(module)
        if not self._of_thread.active:
            self.__enter__()  # type: ignore[no-untyped-call]
            self._of_thread.active = True

    def close(self, site: int) -> None:
        """The forward of a site has ended, or was broken off; it may not have been open."""
        modules = self._of_thread.modules
        place = next((i for i in reversed(range(len(modules))) if modules[i].site == site), None)
        if place is not None:
            self.found[site] = modules[place].seen
            del modules[place:]
            self._withdraw()

    def reset(self) -> None:
        """Forget modules whose end was never seen (a forward broken off by the keyboard)."""
        if self._is_used:
            self.found.clear()
            self._of_thread.modules.clear()
            self._withdraw()

    def _withdraw(self) -> None:
        """Leave the stack of modes once nothing is open; a mode that someone left on top of this one is not touched."""
        here = self._of_thread
        if here.active and not here.modules and _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            here.active = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator as it is, after a look at its arguments."""
        if self._of_thread.modules:
            self._look(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _look(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = operator.__name__.partition(".")[0]
        attends = name in _SOFTMAX or (name.startswith(_FUSED) and not name.endswith("_backward"))
        if not attends or not is_measurable(args[0]):
            return
        inside = self._of_thread.modules[-1]
        try:
            names = [argument.name for argument in operator._schema.arguments]
            with _measuring(args[0]):
                scores = attention_scores(dict(zip(names, args, strict=False)) | kwargs, inside.module)
                if scores is not None:
                    self._show(inside, scores)
        except Exception as error:  # a forward goes on whatever happens here
            warn_once(self, error)


@dataclass(frozen=True, slots=True, eq=False)
class CloseHook(Unscriptable):
    """The forward hook that closes a module, also if its forward raised."""

    mode: AttentionMode
    site: int

    def __call__(self, *_: object) -> None:
        """Look no longer; returning None leaves the output as it is."""
        if not torch.compiler.is_compiling():
            self.mode.close(self.site)

    def __reduce__(self) -> tuple[object, ...]:
        return NO_OP


class _OfThread(threading.local):
    """The open modules of one thread, the innermost last."""

    def __init__(self) -> None:
        self.modules: list[OpenModule] = []
        self.active = False


@contextmanager
def _measuring(like: Tensor) -> Iterator[None]:
    """No gradients, no other modes (selective checkpointing counts operators), no rounding by autocast."""
    with torch.no_grad(), _disable_current_modes(), torch.autocast(like.device.type, enabled=False):
        yield


def attention_scores(arguments: Arguments, module: nn.Module) -> Tensor | None:
    """Scores of at most 64 evenly spaced queries, from the arguments of a fused attention or a softmax.

    Args:
        arguments: by the names in the operator's schema.
        module: the innermost watched module, which says how many heads a three-dimensional softmax has.

    Returns:
        ``[batch, head, query, key]`` in float32 (float64 stays), masked keys at -inf or wherever the mask put them;
        None if this is no attention of that shape.

    Example:
        >>> q = torch.eye(2).reshape(1, 1, 2, 2)
        >>> attention_scores({"query": q, "key": q, "is_causal": True, "scale": 3.0}, nn.Identity()).tolist()
        [[[[3.0, -inf], [0.0, 3.0]]]]
    """
    if "query" in arguments:
        query, key = arguments["query"], arguments["key"]
        scaled = arguments.get("q_descale") is not None  # eight-bit operands
        return _scores_of(query, key, arguments) if _plain(query) and _plain(key) and not scaled else None
    scores = arguments["self"]
    if scores.dim() == 3 and isinstance(module, nn.MultiheadAttention) and len(scores) % module.num_heads == 0:
        scores = scores.unflatten(0, (-1, module.num_heads))  # [batch, head, query, key]
    if not _plain(scores) or arguments["dim"] not in {-1, scores.dim() - 1, arguments["self"].dim() - 1}:
        return None
    return _wide(scores[..., _queries(scores.shape), :])


def _scores_of(query: Tensor, key: Tensor, arguments: Arguments) -> Tensor:
    """``scale * q k' + mask`` for a few queries."""
    batch, heads, length, width = query.shape
    rows = _queries((batch, heads, length, key.shape[2]))
    if key.shape[1] != heads:  # grouped queries
        key = key.repeat_interleave(heads // key.shape[1], dim=1)
    scale = arguments.get("scale")
    scores = _wide(query[:, :, rows]) @ _wide(key).mT  # [batch, head, query, key]
    scores *= width**-0.5 if scale is None else scale
    if arguments.get("is_causal"):
        places = torch.arange(max(scores.shape[3], length), device=scores.device)
        scores.masked_fill_(places[: scores.shape[3]] > places[:length][rows, None], -torch.inf)
    mask = arguments.get("attn_mask", arguments.get("attn_bias"))
    if mask is None:
        return scores
    mask = mask[..., rows, :] if mask.shape[-2] == length else mask
    return scores.masked_fill_(~mask, -torch.inf) if mask.dtype is torch.bool else scores.add_(mask)


def _queries(shape: Sequence[int]) -> slice:
    """Every n-th query, from the middle of the first stretch: all of them up to 64."""
    batch, heads, length, keys = shape
    most = min(MOST_QUERIES, max(_MOST_SCORES // max(batch * heads * keys, 1), 1))
    step = max(-(-length // most), 1)
    return slice(step // 2, None, step)


def _plain(tensor: object) -> bool:
    """Whether this is an ordinary ``[batch, head, position, feature]`` with something in it."""
    return (
        type(tensor) in {Tensor, nn.Parameter}
        and isinstance(tensor, Tensor)
        and tensor.dim() == 4
        and not tensor.is_nested
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and is_measurable(tensor)
    )


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def scores_seen(module: nn.Module, inputs: Sequence[object]) -> list[Tensor]:
    """Every score tensor of one call of a module, for the checks of a probe.

    Args:
        module: the module; it is run once.
        inputs: its positional arguments.

    Returns:
        ``[batch, head, query, key]`` each.
    """
    found: list[Tensor] = []
    mode = AttentionMode(lambda _, scores: found.append(scores))
    mode.open(OpenModule(0, module))
    try:
        module(*inputs)
    finally:
        mode.close(0)
    return found
