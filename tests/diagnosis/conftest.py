"""Runs made by hand."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def make_run():
    return runpy.run_path(str(Path(__file__).parents[1] / "runs.py"))["make_run"]
