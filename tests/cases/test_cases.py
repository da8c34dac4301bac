"""Sixty-five hard cases from public bug reports: numbers, hooks left behind, and training bit for bit as without us."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in (HERE / "handed").glob("*.py"))


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, list[str]]]:
    """Every case, run once, each in a process of its own."""
    done = subprocess.run(
        [sys.executable, HERE / "runner.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["case"]: line["found"] for line in lines}


def test_all_cases_are_here():
    assert len(NAMES) == 65


@pytest.mark.parametrize("name", NAMES)
def test_case(name, results):
    found = results[name]
    assert {"numbers", "hooks", "identity"} <= set(found)
    assert {check: wrong for check, wrong in found.items() if wrong} == {}
