"""The examples of docs/exporting.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

PAGE = Path(__file__).parents[2] / "docs" / "exporting.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


def test_examples(tmp_path, monkeypatch):
    for library in ("pandas", "xarray", "tensorboard"):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    names = {"model": model, "batches": [torch.randn(8, 4) for _ in range(3)]}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    assert len(EXAMPLES) == 2
    for example in reversed(EXAMPLES):  # the second records the run that the first exports
        exec(compile(example, str(PAGE), "exec"), names)
    assert list(Path("tb").iterdir())
    late = Path("late.csv").read_text().splitlines()
    assert {line.partition(",")[0] for line in late[1:]} == {"1", "2"}
    assert set(names["frame"]["statistic"]) == {"rms", "loss"}
