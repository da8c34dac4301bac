"""A training that goes on from a checkpoint goes on in the same run."""

from __future__ import annotations

import copy

import h5py
import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope.errors import RunExistsError
from keelscope.resume import completed_steps, last_step, starting_step
from keelscope.store.filesource import FileSource
from keelscope.store.lock import WriterLock
from keelscope.store.parts import find_parts


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def train(path, model, optimizer, steps, seal="never", **options):
    pace = ks.Pace(seal=seal)
    with ks.watch(model, path, optimizer=optimizer, exists="resume", pace=pace, **options) as watch:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            watch.log(loss=loss)
    return watch


def steps_of(path):
    return [FileSource(file).steps("parameter_gradients").tolist() for file in (path, *find_parts(path).values())]


def resumed_at(path):
    found = []
    for file in (path, *find_parts(path).values()):
        with h5py.File(file) as part:
            found.append(int(part.attrs["resumed_at_step"]))
    return found


def test_the_optimizer_knows_where_a_checkpoint_stands(tmp_path):
    """Four steps, a checkpoint, and two sessions from it."""
    path, model = tmp_path / "net.h5", net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(path, model, optimizer, 4)
    checkpoint = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    for _ in range(2):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))
        watch = train(path, model, optimizer, 3)
    assert watch.path == path
    assert steps_of(path) == [[0, 1, 2, 3], [4, 5, 6], [4, 5, 6]]
    assert resumed_at(path) == [-1, 4, 4]


def test_a_run_is_one_file_again_after_each_session(tmp_path):
    path, model = tmp_path / "net.h5", net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first in (None, None, 3):
        train(path, model, optimizer, 2, seal="exact", first_step=first)
        assert [file.name for file in tmp_path.iterdir()] == ["net.h5"]
    with ks.open_run(path) as run:
        assert run.steps.tolist() == [0, 1, 2, 3, 4]


def test_without_a_count_in_the_optimizer_the_run_tells(tmp_path):
    path, model = tmp_path / "net.h5", net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train(path, model, optimizer, 2)
    assert steps_of(path) == [[0, 1], [2, 3], [4, 5]]
    assert last_step(path) == 5


def test_what_the_caller_says_counts(tmp_path):
    path, model = tmp_path / "net.h5", net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(path, model, optimizer, 6)
    train(path, model, optimizer, 2, first_step=2, every=2)
    assert steps_of(path) == [[0, 1, 2, 3, 4, 5], [2]]
    assert resumed_at(path) == [-1, 2]


def test_only_a_resumed_run_asks_anybody(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(tmp_path / "net.h5", model, optimizer, 3)
    assert completed_steps([optimizer]) == 3
    assert starting_step(None, tmp_path / "net.h5", "new", [optimizer]) == 0
    assert starting_step(None, None, "resume", [optimizer]) == 0
    assert starting_step(None, tmp_path / "other.h5", "resume", []) == 0
    assert starting_step(7, tmp_path / "net.h5", "resume", [optimizer]) == 7


def test_a_damaged_part_does_not_hide_the_others(tmp_path):
    path, model = tmp_path / "net.h5", net()
    train(path, model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    (tmp_path / "net.h5.parts").mkdir()
    (tmp_path / "net.h5.parts" / "r00000.p0001.h5").write_bytes(path.read_bytes()[:1000])
    assert last_step(path) == 2


def test_a_run_that_is_still_recorded_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("keelscope.store.destination._PATIENCE", 0.05)
    lock = WriterLock(tmp_path / "net.h5")
    with pytest.raises(RunExistsError, match=r"net\.h5 is still being written; end that process"):
        ks.watch(net(), tmp_path / "net.h5", exists="resume")
    lock.release()


def test_one_that_is_taken_meanwhile_is_recorded_beside(tmp_path, monkeypatch):
    """Whoever comes second keeps its rows, under the next free name."""
    monkeypatch.setattr("keelscope.store.destination._PATIENCE", 0.05)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = ks.watch(model, tmp_path / "net.h5", optimizer=optimizer, exists="resume")
    lock = WriterLock(tmp_path / "net.h5")
    for _ in range(2):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    watch.close()
    lock.release()
    assert watch.path == tmp_path / "net-2.h5"
    assert steps_of(watch.path) == [[0, 1]]
