"""What TensorBoard gets while a model trains is what the run file holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope.export import Selection
from keelscope.integrations.mirror import Mirror, TensorBoardSink


class Sink:
    def __init__(self):
        self.sent, self.closed = [], False

    def add(self, step, seconds, values):
        self.sent.append((step, values))

    def close(self):
        self.closed = True


def train(path, sink, *, steps=5, selection=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = []
    with (
        ks.watch(model, path, optimizer=optimizer, probes=["gradients"]) as watch,
        Mirror(watch, sink, selection, seconds=0.0) as mirror,
    ):
        sizes.append(mirror.update())
        for _ in range(steps):
            loss = model(torch.randn(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.log(loss=loss)
            sizes.append(mirror.update())
        run = watch.run
        expected = {
            (step, f"{key}/{path}" if path else key): float(value)
            for key in run.keys()  # noqa: SIM118 - a run is no mapping
            if not run[key].dims and key != "scalars/wall_time"
            for path, column in (
                zip(run[key].paths, run[key].values.T, strict=True) if run[key].sites else [("", run[key].values)]
            )
            for step, value in zip(run[key].steps.tolist(), column, strict=True)
            if not np.isnan(value)  # NaN is no point of a curve
        }
    return sizes, expected


@pytest.mark.parametrize("kept", ["file", "memory"])
def test_every_row_arrives_once_while_it_is_recorded(tmp_path, kept):
    sink = Sink()
    sizes, expected = train(tmp_path / "keel.h5" if kept == "file" else None, sink)
    assert [step for step, _ in sink.sent] == [0, 1, 2, 3, 4]
    assert {(step, name): value for step, values in sink.sent for name, value in values.items()} == expected
    assert sizes[0] == 0
    assert all(size > 0 for size in sizes[2:])
    assert sink.closed


def test_only_what_was_selected(tmp_path):
    sink = Sink()
    train(tmp_path / "keel.h5", sink, selection=Selection(("scalars/loss",)))
    assert all(list(values) == ["scalars/loss"] for _, values in sink.sent)


def test_tensorboard_reads_it(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    _, expected = train(tmp_path / "keel.h5", TensorBoardSink(tmp_path / "tb"))
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    found = {(one.step, tag): one.value for tag in events.Tags()["scalars"] for one in events.Scalars(tag)}
    assert found.keys() == expected.keys()
    assert all(found[key] == pytest.approx(expected[key], rel=1e-6) for key in expected)
