"""An installation from the source distribution, with and without a C compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = """
import json, sys, torch
from keelscope import kernel
from keelscope.board import Board, gather
from keelscope.statistics import MEAN, MOMENTS, NORM, RMS, VARIANCE
assert kernel.__file__.startswith(sys.argv[1]), kernel.__file__
torch.manual_seed(0)
x = 100 + torch.randn(3, 5000)
board = Board()
slot = board.put(MOMENTS, (x,))
print(json.dumps([kernel.is_compiled(), isinstance(slot, bytes)]))
(terms,) = gather([slot], MOMENTS, board.fetch())
print(json.dumps([float(s.of(terms)) for s in (MEAN, NORM, RMS, VARIANCE)]))
"""


def run(*command, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "CC", "CFLAGS"}}
    arguments = [sys.executable, *map(str, command)]
    return subprocess.run(arguments, cwd="/", env=kept | environment, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    code = "import os, sys; os.chdir(sys.argv[1]); from hatchling.build import build_sdist as b; print(b(sys.argv[2]))"
    return folder / run("-c", code, ROOT, folder).split()[-1]


def installed(sdist, target, **environment):
    options = ("--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--no-cache-dir", "--no-compile")
    run("-m", "pip", "install", *options, "--target", target, sdist, **environment)
    return [json.loads(line) for line in run("-c", SCRIPT, target, PYTHONPATH=str(target)).splitlines()]


def test_installs_with_and_without_a_compiler(sdist, tmp_path):
    without, expected = installed(sdist, tmp_path / "pure", CC="false")
    assert without == [False, False]
    assert not list((tmp_path / "pure").rglob("*.so"))
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    with_compiler, got = installed(sdist, tmp_path / "compiled")
    assert with_compiler == [True, True]
    assert got == pytest.approx(expected, rel=1e-6)
