"""Hard cases from public bug reports: numbers, hooks, training bit for bit as without us, and every other fact."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1800)  # the first test of all waits for every case

HERE = Path(__file__).parent
HANDED = sorted((HERE / "handed").glob("*.py"))
OWN = sorted((HERE / "own").glob("*.py"))
EXPECTED = runpy.run_path(str(HERE / "facts.py"))["expected"]
NUMERIC = runpy.run_path(str(HERE / "facts.py"))["NUMERIC"]
ALWAYS = ("numbers", "hooks", "identity", "keys")
KINDS = [
    "amp",
    "checkpointing",
    "compile",
    "diagnosis",
    "distributed",
    "dtype",
    "false-alarm",
    "files",
    "frozen",
    "inplace",
    "io-structure",
    "lifecycle",
    "ln-jacobian",
    "nan",
    "no-side-effects",
    "repeated-calls",
    "special-modules",
    "training-loop",
    "transformer-fastpath",
    "uncalled-or-unregistered",
    "zero-init",
]

MISSING: dict[tuple[str, str], str] = {}
"""Facts that wait for a rule."""


def checks_of(path):
    facts = [key for key in EXPECTED(path) if key not in NUMERIC]
    return [*ALWAYS, *(["oracle"] if path.parent.name == "own" else []), *facts]


def constant(path, name):
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    return None


def every_check():
    for path in [*HANDED, *OWN]:
        for check in checks_of(path):
            reason = MISSING.get((path.stem, check))
            marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
            yield pytest.param(path.stem, check, marks=marks, id=f"{path.stem}-{check}")


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, list[str]]]:
    """Every case, run once, each in a process of its own."""
    done = subprocess.run(
        [sys.executable, HERE / "runner.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["case"]: line["found"] for line in lines}


def test_all_cases_are_here(results):
    assert len(HANDED) == 65
    assert set(results) == {path.stem for path in [*HANDED, *OWN]}


@pytest.mark.parametrize(("name", "check"), list(every_check()))
def test_case(name, check, results):
    assert results[name][check] == []


@pytest.mark.parametrize("path", [*HANDED, *OWN], ids=lambda path: path.stem)
def test_nothing_else_was_found(path, results):
    assert set(results[path.stem]) == set(checks_of(path))


def test_every_kind_has_two_cases_of_our_own():
    kinds = Counter(constant(path, "KIND") for path in OWN)
    assert set(kinds) == set(KINDS) == {constant(path, "KIND") for path in HANDED}
    assert min(kinds.values()) >= 2


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_a_case_of_our_own_cites_its_report_and_computes_its_numbers(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    source = constant(path, "SOURCE")
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", source)
    assert f"Source: {source}" in ast.get_docstring(tree)
    assert {"build", "oracle"} <= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert path.stem not in {handed.stem for handed in HANDED}


def test_each_report_is_used_once():
    sources = [constant(path, "SOURCE") for path in OWN]
    assert len(set(sources)) == len(sources)
    assert set(sources).isdisjoint({constant(path, "SOURCE") for path in HANDED})
