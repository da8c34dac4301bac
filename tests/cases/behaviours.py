"""What ``behaviour`` in an EXPECT asks for: one check per name; a name without one is a finding itself."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import mechanics
from mechanics import hook_counts
from observation import Seen

Check = Callable[[Seen, Any], list[str]]


def behaviour(seen: Seen, want: dict[str, Any]) -> list[str]:
    """Every name of a ``behaviour``."""
    wrong = [f"no check covers {name!r}" for name in want if name not in BEHAVIOURS]
    return wrong + [f"{n}: {line}" for n, value in want.items() for line in BEHAVIOURS.get(n, _known)(seen, value)]


def _known(*_: object) -> list[str]:
    return []


def _again(check: Callable[[ModuleType], list[str]], seen: Seen, want: object) -> list[str]:
    """A check of its own on the case, made once however many names ask for it."""
    assert want is not False, "facts are stated as what is true"
    if check.__name__ not in seen.found:
        seen.found[check.__name__] = check(seen.case)
    return seen.found[check.__name__]


def _no_error(seen: Seen, _: bool) -> list[str]:
    return [] if seen.error is None else [f"{type(seen.error).__name__}: {seen.error}"]


def _user_hooks(seen: Seen, number: int) -> list[str]:
    """They are as many as the case installs, and none of them is ours."""
    found = _again(mechanics.hooks, seen, number)
    left = sum(hook_counts(seen.model))
    return found if left == number else [*found, f"{left} hooks instead of {number}"]


def _our_hooks(seen: Seen, number: int) -> list[str]:
    assert number == 0
    return _again(mechanics.hooks, seen, number)


def _growth(seen: Seen, number: int) -> list[str]:
    assert number == 0
    return _again(mechanics.memory, seen, number)


def _module_data(seen: Seen, _: str) -> list[str]:
    """Each module that holds parameters was observed, or the coverage says why not; a 0 stands for neither."""
    said = {e.path: e.status for e in seen.watch.coverage if e.what == "module"}
    called = seen.calls[0]
    owners = {path.rpartition(".")[0] for path, _ in seen.parameters()}
    return [
        f"{path}: {said.get(path)}"
        for path in owners
        if not (called.get(path) or said.get(path) in {"not_observed", "coverage_gap", "never_called"})
    ]


def _every_gradient(seen: Seen, _: str) -> list[str]:
    return [path for path, _ in seen.parameters() if not seen.norm(path) > 0]


def _real_norms(seen: Seen, _: bool) -> list[str]:
    numbers = [n for records in seen.gradients for record in records.values() for n in record.per_backward]
    return [f"{n!r}" for n in numbers if type(n) is not float] + ([] if numbers else ["no gradient"])


def _plain_floats(seen: Seen, _: bool) -> list[str]:
    calls = [call for step in seen.calls for found in step.values() for call in found]
    numbers = [n for c in calls for n in (*c.outputs.values(), *(m for leaf in c.leaves.values() for m in leaf))]
    numbers += [n for records in seen.gradients for record in records.values() for n in record.per_backward]
    return [f"{n!r}" for n in numbers if type(n) is not float] + ([] if numbers else ["no number"])


def _class_of(seen: Seen, kind: str) -> list[str]:
    kinds = {site.kind for site in seen.watch.run["outputs/mean"].sites if site.path in {"0", "2"}}
    return [] if kinds == {kind} else [f"{kinds}"]


def _no_grad_left(seen: Seen, _: bool) -> list[str]:
    return [path for path, parameter in seen.parameters() if parameter.grad is not None]


def _json(seen: Seen, _: str) -> list[str]:
    found: list[str] = []
    for report in seen.reports:
        json.loads(report.to_json(), parse_constant=found.append)
    return found


def _nan_said(seen: Seen, _: bool) -> list[str]:
    text = str(seen.report)
    return [] if "NaN" in text and "non-finite" in text else [text]


def _once(seen: Seen, _: bool) -> list[str]:
    paths = seen.watch.run["parameter_gradients/norm"].paths
    known = len(list(seen.model.parameters()))
    return [] if len(paths) == len(set(paths)) == known else [f"{paths} for {known} parameters"]


def _clear_refusal(seen: Seen, _: object) -> list[str]:
    """The command line on a file that is no run: one sentence and a status, no traceback."""
    with tempfile.TemporaryDirectory() as folder:
        files = seen.case.make_files(folder)
        commands = [[sys.executable, "-m", "keelscope", "report", str(Path(file))] for file in files.values()]
        done = [subprocess.run(command, capture_output=True, text=True, check=False) for command in commands]
    return [
        f"status {run.returncode}: {run.stdout}{run.stderr}"
        for run in done
        if run.returncode != 2 or "Traceback" in run.stderr or len(run.stderr.split()) < 5
    ]


IDENTITY = partial(_again, mechanics.identity)

BEHAVIOURS: dict[str, Check] = {
    "must_not_raise": _no_error,
    "attach_must_not_raise": _no_error,
    "bit_identical_training": IDENTITY,
    "gradients_unchanged": IDENTITY,
    "model_output_unchanged": IDENTITY,
    "loss_atol": IDENTITY,
    "hooks_left_behind": _our_hooks,
    "tool_hooks_left_behind": _our_hooks,
    "training_flag_unchanged": partial(_again, mechanics.hooks),
    "user_hooks_left_intact": _user_hooks,
    "attach_n_times": partial(_again, mechanics.twice),
    "calls_not_doubled": partial(_again, mechanics.twice),
    "user_hook_calls_per_step": partial(_again, mechanics.twice),
    "deepcopy_works": partial(_again, mechanics.copied),
    "copy_does_not_record": partial(_again, mechanics.copied),
    "exception_passes_through": partial(_again, mechanics.raising),
    "next_attach_clean": partial(_again, mechanics.raising),
    "attach_separately": partial(_again, mechanics.apart),
    "no_name_collision": partial(_again, mechanics.apart),
    "roundtrip_exact": partial(_again, mechanics.filed),
    "live_tensor_growth_after_warmup": _growth,
    "module_data": _module_data,
    "children": _module_data,
    "param_gradients": _every_gradient,
    "norm_is_real": _real_norms,
    "values_are_python_floats": _plain_floats,
    "class_after_first_step": _class_of,
    "grad_is_none_after_step": _no_grad_left,
    "json_valid": _json,
    "nan_visible_in_report": _nan_said,
    "params_reported_once": _once,
    "exit_status": _clear_refusal,
    "traceback": _clear_refusal,
}
