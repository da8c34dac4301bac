"""Runs every hard case in a process of its own and prints one line of JSON for each: what is wrong, by kind of check.

Run as a script, so that each process is forked from one that has imported torch and done nothing yet. Names of cases
as arguments run those only.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch._dynamo  # noqa: F401 - what cases import is imported once, before any process is forked
import torch.utils.checkpoint  # noqa: F401
from facts import load
from mechanics import hooks, identity, numbers, oracle
from observation import look
from table import FACTS, covered

from keelscope.diagnosis.rules import all_rules
from keelscope.probe import resolve_probes
from keelscope.session import watch  # noqa: F401

HERE = Path(__file__).parent
EVERY = {"numbers": numbers, "hooks": hooks, "identity": identity}


def examine(path: Path, results: multiprocessing.SimpleQueue) -> None:
    signal.alarm(60)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, list[str]] = {}
    for name, check in EVERY.items():
        found[name] = tried(lambda check=check: check(load(path)))
    if path.parent.name == "own":
        found["oracle"] = tried(lambda: oracle(load(path)))
    found |= facts(path, found)
    results.put(json.dumps(found))


def facts(path: Path, found: dict[str, list[str]]) -> dict[str, list[str]]:
    """One watched run, and every fact that EXPECT states beside its numbers."""
    case: ModuleType = load(path)
    asked = {key: value for key, value in case.EXPECT.items() if key in FACTS}
    results = {"keys": covered(set(case.EXPECT))}
    try:
        seen = look(case)
    except BaseException as error:  # a crash is a finding, whatever it is
        return results | {key: [f"{type(error).__name__}: {error}", traceback.format_exc(limit=-3)] for key in asked}
    seen.found |= found
    if "step_raises" not in asked and seen.error is not None:
        results["keys"].append(f"the step raised {seen.error!r}")
    return results | {key: tried(lambda key=key: FACTS[key](seen, asked[key])) for key in asked}


def tried(check: Callable[[], list[str]]) -> list[str]:
    """What a check finds; that it crashed is a finding, too."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return check()
    except BaseException as error:
        return [f"{type(error).__name__}: {error}", traceback.format_exc(limit=-3)]


def main(names: list[str]) -> None:
    resolve_probes("default")
    all_rules()
    context = multiprocessing.get_context("fork")
    paths = sorted(path for folder in ("handed", "own") for path in (HERE / folder).glob("*.py"))
    for path in paths:
        if names and path.stem not in names:
            continue
        results = context.SimpleQueue()
        process = context.Process(target=examine, args=(path, results))
        process.start()
        process.join(90)
        if process.is_alive():
            process.kill()
        found = json.loads(results.get()) if not results.empty() else {"process": [f"exit code {process.exitcode}"]}
        sys.stdout.write(json.dumps({"case": path.stem, "found": found}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
