"""What goes wrong with a hook is said in one clear sentence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import keelscope as ks


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_scripting_a_watched_module_says_what_to_do():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with ks.watch(model, sites="all") as watch:
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(AttributeError, match=r"close\(\) on the watch first, or use torch.jit.trace"):
            torch.jit.script(model)
        watch.step()
    assert torch.jit.script(model)(torch.zeros(1, 2)).shape == (1, 2)
