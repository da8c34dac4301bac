"""Every key an EXPECT may have, and the check that stands for it. A key that is not here fails its case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from behaviours import behaviour
from evidences import evidence
from facts import NUMERIC
from mechanics import filed
from observation import Seen
from verdicts import diagnosis

Check = Callable[[Seen, Any], list[str]]


def covered(keys: set[str]) -> list[str]:
    """Keys without a check."""
    return [f"no check covers the key {key!r}" for key in sorted(keys - set(FACTS) - set(NUMERIC))]


def _bounds(seen: Seen, want: dict[str, tuple[float, float]]) -> list[str]:
    norms = {path: seen.norm(path) for path in want}
    return [f"{p}: {norms[p]} outside {want[p]}" for p in want if not want[p][0] <= norms[p] <= want[p][1]]


def _aliases(seen: Seen, want: dict[str, str]) -> list[str]:
    sites = seen.watch.run["parameter_gradients/norm"].sites
    got = {alias: site.path for site in sites for alias in site.aliases}
    return [] if got == want else [f"{got}"]


def _calls(seen: Seen, want: dict[str, int]) -> list[str]:
    got = {path: len(seen.calls[0].get(path, ())) for path in want}
    return [] if got == want else [f"{got}"]


def _backwards(seen: Seen, want: int) -> list[str]:
    got = max(len(record.per_backward) for record in seen.gradients[0].values())
    return [] if got == want else [f"{got}"]


def _names_raw(seen: Seen, want: list[str]) -> list[str]:
    """The names of the wrapper are in the model, and in no record."""
    there = set(dict(seen.model.named_parameters()))
    recorded = set(seen.watch.run["parameter_gradients/norm"].paths)
    return [name for name in want if name not in there or name in recorded]


def _names(seen: Seen, want: list[str]) -> list[str]:
    recorded = seen.watch.run["parameter_gradients/norm"].paths
    return [f"missing: {name}" for name in want if name not in recorded] + filed(seen.case)


def _dtypes(seen: Seen, want: dict[str, str]) -> list[str]:
    got = {path: {call.dtype for call in seen.calls[0].get(path, ())} for path in want}
    return [f"{path}: {got[path]}" for path in want if got[path] != {want[path]}]


def _scale(seen: Seen, want: float) -> list[str]:
    return evidence(seen, {"raw_over_true": want})


def _norm(seen: Seen, path: str) -> list[str]:
    return [] if path in seen.watch.run["norms/jacobian_gain"].paths else [f"{path} is not recorded as a norm"]


def _raises(seen: Seen, want: str) -> list[str]:
    return [] if type(seen.error).__name__ == want else [f"{seen.error!r}"]


FACTS: dict[str, Check] = {
    "aliases": _aliases,
    "backwards_per_step": _backwards,
    "behaviour": behaviour,
    "bounds": _bounds,
    "calls": _calls,
    "calls_per_step": _calls,
    "diagnosis": diagnosis,
    "dtypes": _dtypes,
    "evidence": evidence,
    "ln_module": _norm,
    "names": _names,
    "names_clean": _names,
    "names_raw": _names_raw,
    "scale": _scale,
    "step_raises": _raises,
}
