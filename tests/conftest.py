"""What every test may need: operators that torchvision and timm look for when they are imported."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from importlib.util import find_spec

import pytest
from hypothesis import settings

settings.register_profile("keelscope", max_examples=50, deadline=None)  # time on a busy machine says nothing
settings.load_profile("keelscope")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported; tests share few cores


def pytest_collection_finish() -> None:
    """Take modules and thousands of collected tests out of every later collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def operators() -> None:
    """Make torchvision importable."""
    declare_operators()


def declare_operators() -> None:
    """Make torchvision importable on a torch that it was not built for, by declaring the operators it looks up."""
    if find_spec("torchvision") is None:
        return
    import torch

    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor a) -> Tensor")


@pytest.fixture
def vision(operators: None) -> None:
    """Skip where torchvision or timm is missing."""
    for package in ("torchvision", "timm"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed (make test installs it)")
