"""Runs made by hand."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def make_run():
    return runpy.run_path(str(Path(__file__).parents[1] / "runs.py"))["make_run"]


@pytest.fixture(scope="session")
def stack():
    """A residual stack whose every number is known."""
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "residual_stack.py")))
