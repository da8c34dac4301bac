"""The form of a residual sub-layer as an equation, and the names of the schemes that have it.

`keelscope.topology` reads the parts from the autograd graph; here they are written down as one of a few equations, with
a and b the weights of shortcut and branch, c a weight on what the branch reads, n a norm, d a tanh in place of one, W
the branch's last matrix. Schemes that differ only in their initialisation share a form, so one form may have many
names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keelscope.topology.coefficients import Coefficient

__all__ = ["SECOND", "Parts", "equation", "schemes_of", "schemes_of_stack"]


SECOND = "y"
"""How a second stream, which takes up the branch of the first, is written."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a form is made of; every norm and activation by the letters it is written with."""

    alpha: Coefficient
    beta: Coefficient
    entry: str = "x"
    """What the branch reads: ``x``, ``n x``, ``c n x``, ``d x``, ``x + c``; empty for another addition's branch."""
    inner: bool = False
    """Whether a norm stands before the branch's last matrix."""
    branch_norm: bool = False
    shortcut_norm: bool = False
    after: tuple[str, ...] = ()
    """What is applied to the sum, first to last: ``n``, ``relu``."""


def equation(parts: Parts) -> str:
    """Write a form down.

    Args:
        parts: what it is made of.

    Returns:
        The equation of the next stream tensor.

    Example:
        >>> equation(Parts(Coefficient("constant", 64.0), Coefficient(), entry="n x", after=("n",)))
        'n(a x + F(n x))'
        >>> equation(Parts(Coefficient(), Coefficient("learnable scalar", 0.0)))
        'x + b F(x)'
    """
    stream = "x" if parts.entry else SECOND
    branch = f"F({parts.entry})" if parts.entry else "F"
    if parts.inner:
        branch = f"W n({branch})"
    if parts.branch_norm:
        branch = f"n({branch})"
    shortcut = f"n {stream}" if parts.shortcut_norm else stream
    written = f"{'' if parts.alpha.is_one else 'a '}{shortcut} + {'' if parts.beta.is_one else 'b '}{branch}"
    for name in parts.after:
        written = f"{name}({written})"
    return written


Rule = Callable[[float, float, float], bool]
"""Whether values of a and b fit a scheme at depth L: ``(a, b, L) -> bool``."""


def _equals(left: float, right: float) -> bool:
    return math.isclose(left, right, rel_tol=1e-5)


def _is_whole(value: float) -> bool:
    return value > 0.5 and abs(value - round(value)) < 1e-4 * value


_FORMS: dict[str, dict[str, Rule | None]] = {
    "n(x + F(x))": {"post_ln": None},
    "n(a x + F(x))": {
        "deepnorm": lambda a, _b, depth: _equals(a, depth**0.25),
        "keel_ablation": lambda a, _b, depth: _equals(a, depth),
    },
    "n(a x + F(c x))": {"keel_ablation": None},
    "n(a x + F(c n x))": {"keel_ablation": None},
    "n(a x + F(n x))": {"keel": None, "keel_ablation": None},
    "n(x + F(n x))": {"keel": None, "keel_ablation": None},
    "n(a x + b F(n x))": {"keel_gate": None},
    "a x + b F(n x)": {"highway": None, "keel_gate": None},
    "x + F(n x)": {"pre_ln": None, "gpt2_scaled_init": None},
    "x + F(c n x)": {"ln_scaling": None},
    "x + F(d x)": {"dyt": None},
    "x + b F(x)": {"rezero": None, "skipinit": None},
    "x + b F(x + c)": {"fixup": None},
    "x + n(F(n x))": {"peri_ln": None, "sandwich_ln": None},
    "x + W n(F(n x))": {"sub_ln": None},
    "n(a x + b n(F(x)))": {"ngpt": None},
    "n(x + F(x)), y + F": {"residual_dual": None},
    "n(x + F(x)), y + b F": {"residual_dual": None},
    "n(x + F(n x)), y + F": {"siamese_norm": None},
    "n(x + b F(n x)), y + F": {"siamese_norm": None},
}
_GATED = {"a x + b F(n x)", "n(a x + b F(n x))", "n(a x + b n(F(x)))"}
"""Forms whose schemes learn their weights."""
_LAYERSCALE: dict[str, Rule | None] = {"layerscale": None}
_SCALED_BY_DEPTH: dict[str, Rule | None] = {
    "depth_mup": lambda _a, b, depth: _is_whole(b * b * depth),
    "completep": lambda _a, b, depth: _is_whole(b * depth),
}


def schemes_of(form: str, alpha: Coefficient, beta: Coefficient, depth: int) -> tuple[str, ...]:
    """Names of the schemes whose sub-layers have a form.

    Args:
        form: as `equation` writes it.
        alpha: weight of the shortcut.
        beta: weight of the branch.
        depth: number of sub-layers on the stream.

    Returns:
        Sorted names; where the values of a and b single some out, only those. Empty if no scheme has this form.

    Example:
        >>> schemes_of("n(a x + F(x))", Coefficient("constant", 64**0.25), Coefficient(), 64)
        ('deepnorm',)
        >>> schemes_of("x + F(n x)", Coefficient(), Coefficient(), 64)
        ('gpt2_scaled_init', 'pre_ln')
    """
    rules = _candidates(form, alpha, beta)
    if alpha.value is None or beta.value is None:
        return tuple(sorted(rules))
    a, b = alpha.value, beta.value
    exact = [name for name, rule in rules.items() if rule is not None and rule(a, b, float(depth))]
    return tuple(sorted(exact or rules))


def _candidates(form: str, alpha: Coefficient, beta: Coefficient) -> dict[str, Rule | None]:
    if form == "x + b F(n x)":
        fixed = _SCALED_BY_DEPTH if beta.value is None or beta.value > 0 else {}
        return {"learnable vector": _LAYERSCALE, "constant": fixed, "buffer": fixed}.get(beta.kind, {})
    if form == "x + b F(x)" and beta.kind != "learnable scalar":
        return {}
    if form in _GATED and {alpha.kind, beta.kind} <= {"one", "constant"}:
        return {}
    return _FORMS.get(form, {})


_LETTERS = {
    "n(x + F(x))": "p",
    "x + F(n x)": "q",
    "n(x + F(n x))": "j",
    "n(a x + F(n x))": "k",
    "x + F(x)": "r",
    "x + n(F(n x))": "s",
    "x + W n(F(n x))": "w",
    "a x + W n(F(n x))": "w",
    "x + F(c n x)": "l",
    "n(x + F(n x)), y + F": "e",
    "n(x + b F(n x)), y + F": "f",
}
_STACKS = {
    "keel": re.compile(r"qjk+|qqk+|[jk]+"),
    "mix_ln": re.compile(r"p+q+"),
    "hybrid_norm": re.compile(r"(qq)?(pr)+"),
    "normformer": re.compile(r"(sw)+s?"),
    "ln_scaling": re.compile(r"qql+"),
    "siamese_norm": re.compile(r"ef*"),
}


def schemes_of_stack(forms: Sequence[str], schemes: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Names of the schemes that a whole stream follows.

    Args:
        forms: form of each sub-layer, in execution order.
        schemes: names of each.

    Returns:
        The names that all sub-layers share, or else those of the schemes that mix forms in this order (the first block
        of Keel, Mix-LN, HybridNorm, NormFormer, LayerNorm Scaling).

    Example:
        >>> schemes_of_stack(["n(x + F(x))", "x + F(n x)"], [("post_ln",), ("gpt2_scaled_init", "pre_ln")])
        ('mix_ln',)
    """
    shared = set(schemes[0]).intersection(*schemes[1:]) if schemes else set()
    if shared:
        return tuple(sorted(shared))
    word = "".join(_LETTERS.get(form, "?") for form in forms)
    return tuple(sorted(name for name, pattern in _STACKS.items() if pattern.fullmatch(word)))
