"""The examples of docs/trainers.md run as they stand, and record what the page says."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import keelscope as ks

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
EXAMPLES = dict(re.findall(r"^```python title=\"(\w+)_example.py\"\n(.*?)^```$", PAGE.read_text(), re.M | re.S))
NEEDS = {"huggingface": ("transformers", "accelerate"), "lightning": ("lightning",), "accelerate": ("accelerate",)}


def test_every_library_has_an_example():
    assert set(EXAMPLES) == set(NEEDS)


@pytest.mark.parametrize("library", sorted(NEEDS))
@pytest.mark.filterwarnings("ignore:::lightning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_example(library, tmp_path, monkeypatch):
    missing = [name for name in NEEDS[library] if find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (make test installs them)")
    monkeypatch.chdir(tmp_path)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    script = tmp_path / f"{library}_example.py"
    script.write_text(EXAMPLES[library])
    printed = io.StringIO()
    with torch.random.fork_rng(), contextlib.redirect_stdout(printed):
        runpy.run_path(str(script))
    (path,) = (tmp_path / "runs").glob("*.h5")
    with ks.open_run(path) as run:
        steps = run["scalars/loss"].steps.tolist()
        assert run["gradients/rms"].steps.tolist() == [step for step in steps if step % 5 == 0]
        assert len(steps) == {"huggingface": 20, "lightning": 16, "accelerate": 20}[library]
        assert str(ks.report(path).headline) in printed.getvalue()
        assert not run.live
