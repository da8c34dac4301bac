"""A folder with a model file and a recorded run, and a way to run the command line in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from pathlib import Path

NET = """
import torch
from torch import nn

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return x + self.linear(x)

def healthy():
    return nn.Sequential(*[Residual() for _ in range(12)])
def shrinking():
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(24)])
def ready():
    return healthy(), torch.ones(4, 8)
def boom():
    raise RuntimeError("no weights today")
def nothing():
    pass
def text():
    return "a model"
def frozen():
    return nn.Linear(8, 8).requires_grad_(False)
def dropping():
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
def per_entry(output, batch):
    return output
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def keelscope(capsys):
    """Run the command line in this process."""
    from keelscope.cli import main

    def run(*words: str) -> Result:
        capsys.readouterr()
        code = main(words)
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


@pytest.fixture(scope="session")
def recorded(tmp_path_factory) -> Path:
    """A folder with runs keel.h5 and post_ln.h5: 16 sub-layers, 3 steps."""
    from keelscope.cli.recording import Plan, record_all
    from keelscope.text import Text
    from keelscope.training import TrainingConfig

    folder = tmp_path_factory.mktemp("runs")
    sizes = {"depth": 16, "width": 16, "heads": 2}
    training = TrainingConfig(steps=3, batch_size=2, length=16)
    record_all(Plan(("keel", "post_ln"), sizes, Text(b"to be or not to be " * 500), training, folder))
    return folder
