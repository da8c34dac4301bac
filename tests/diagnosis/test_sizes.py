"""The size of a recorded model, from its structure, its configuration and its norms."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

import keelscope as ks
from keelscope.diagnosis.sizes import ModelSizes, sizes_of_run
from keelscope.errors import UsageError
from keelscope.models import build
from keelscope.oneshot import record_once
from keelscope.targets import resolve


def recorded(target):
    case = resolve(target)
    return record_once(case.model, case.batch, case.loss, config=case.sizes)


def test_a_scheme_tells_its_own_sizes():
    run = recorded("scheme:keel?depth=8&width=24&heads=3&vocabulary=50")
    assert sizes_of_run(run) == ModelSizes(8, 24, 3, 50)
    assert sizes_of_run(run).options == {"depth": 8, "width": 24, "heads": 3, "vocabulary": 50}


def test_width_from_norms_where_no_config_tells_it(tmp_path):
    import torch

    model = build("pre_ln", depth=6, width=20, heads=2)
    with ks.watch(model, tmp_path / "r.h5") as watch:
        model(torch.randint(256, (2, 8))).square().mean().backward()
        watch.step()
    sizes = sizes_of_run(ks.open_run(tmp_path / "r.h5"))
    assert (sizes.depth, sizes.width, sizes.vocabulary) == (6, 20, None)
    assert sizes.notes == ("Its attention heads are not known, or do not fit its width: 5 is assumed.",)


def test_blocks_that_do_not_tell_their_sublayers_count_twice(make_run):
    run = make_run(np.ones(7), sublayers=0)
    with pytest.raises(UsageError, match="does not tell its width"):
        sizes_of_run(run)


def test_no_stack_no_depth():
    import torch

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    run = record_once(model, torch.ones(2, 4), lambda output, _: output.sum())
    with pytest.raises(UsageError, match="has no residual stack"):
        sizes_of_run(run)


def test_what_cannot_be_known_is_said(stack):
    run = stack.recorded(stack.measure(9), per_block=1)
    run.info.config.update({"width": 30})
    sizes = sizes_of_run(run)
    assert (sizes.depth, sizes.width, sizes.heads) == (10, 30, 15)
    assert "Its depth of 9 is odd, and a reference block holds two: 10 is taken." in sizes.notes
