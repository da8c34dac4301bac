"""The pytest plugin in a pytest of its own: light until used, readable when it fails."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

HEALTH = """
import sys

def test_loading_imports_no_torch():
    assert "torch" not in sys.modules

def make(depth, residual):
    import torch
    torch.manual_seed(0)
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)
        def forward(self, x):
            return residual * x + self.linear(x)
    return torch.nn.Sequential(*[Block() for _ in range(depth)]), torch.ones(4, 8)

def loss(output, batch):
    return output.square().mean()

def test_healthy(keelscope_report):
    report = keelscope_report(*make(12, 1), loss).check()
    assert report.headline == "flat"

def test_vanishing(keelscope_report):
    keelscope_report(*make(24, 0), loss).check()

def test_vanishing_is_not_asked_for(keelscope_report):
    keelscope_report(*make(24, 0), loss).check(fail_on=["exploding", "non-finite"])

def test_by_hand(keelscope_report):
    assert keelscope_report(*make(24, 0), loss).headline == "flat"
"""


@pytest.fixture(scope="module")
def project() -> dict[str, object]:
    return tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def test_pytest_finds_it(project):
    (target,) = project["entry-points"]["pytest11"].values()
    assert target == "keelscope.pytest_plugin"


def test_fixture(pytester):
    pytester.makepyfile(HEALTH)
    result = pytester.runpytest_subprocess("-p", "keelscope.pytest_plugin", "-p", "no:dash")
    result.assert_outcomes(passed=3, failed=2)
    text = result.stdout.str()
    (failed,) = re.findall(r"^E +\S*HealthError: (.*)$", text, re.MULTILINE)
    assert failed == "Sequential is vanishing: the check fails on error."
    assert re.search(r"^E +error vanishing: The .+ shrinks", text, re.MULTILINE)
    assert "<Report Sequential: vanishing; " in text
    assert (
        text.count(" Captured keelscope report of Sequential call ") == 2
    )  # the whole report, for each test that failed


def test_it_is_listed(pytester):
    result = pytester.runpytest_subprocess("-p", "keelscope.pytest_plugin", "-p", "no:dash", "--fixtures")
    result.stdout.fnmatch_lines(["keelscope_report*", "*whose reports are shown with the test if it fails*"])
