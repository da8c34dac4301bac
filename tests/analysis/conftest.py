"""A residual stack whose every number is known."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def stack():
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "residual_stack.py")))
