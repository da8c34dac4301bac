"""From words to a model with a batch and a loss."""

from __future__ import annotations

import pytest
import torch

from keelscope.errors import BatchError, FactoryError, NothingToObserveError, TargetError, UsageError
from keelscope.targets import is_model_target, resolve

CODE = """
import torch
from torch import nn

def bare(): return nn.Linear(3, 2)
def pair(): return nn.Linear(3, 2), torch.ones(4, 3)
def triple(): return nn.Linear(3, 2), torch.ones(4, 3), lambda output, batch: output.mean()
instance = nn.Linear(3, 2)
class Net(nn.Linear):
    def __init__(self): super().__init__(3, 2)
def frozen(): return nn.Linear(3, 2).requires_grad_(False)
def empty(): return nn.ReLU()
def nothing(): pass
def text(): return "model"
def swapped(): return torch.ones(4, 3), nn.Linear(3, 2)
def bad_loss(): return nn.Linear(3, 2), torch.ones(4, 3), "mse"
def needs(width): return nn.Linear(width, 2)
number = 3
def batch(): return torch.full((2, 3), 5.0), torch.tensor([0, 1])
tensor = torch.zeros(2, 3)
def no_batch(): pass
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(CODE)


@pytest.mark.parametrize("name", ["bare", "instance", "Net"])
def test_what_a_factory_may_be(name):
    case = resolve(f"net.py:{name}", input="float32[5,3]")
    assert isinstance(case.model, torch.nn.Linear)
    assert case.batch.shape == (5, 3)
    assert case.input == "float32[5,3], random, seed 0"


def test_batch_and_loss_of_the_factory():
    case = resolve("net.py:pair")
    assert torch.equal(case.batch, torch.ones(4, 3))
    assert case.input == "returned by net.py:pair"
    case = resolve("net.py:triple")
    value = case.loss(case.model(case.batch), case.batch)
    assert value.item() == pytest.approx(case.model(case.batch).mean().item())
    assert case.loss.describe() == "the factory's <lambda>"


def test_what_the_user_says_comes_first():
    assert resolve("net.py:triple", loss="sum").loss.name == "sum"
    assert resolve("net.py:pair", input="float32[9,3]").batch.shape == (9, 3)
    case = resolve("net.py:pair", batch="net.py:batch")
    assert case.batch[0][0, 0] == 5
    assert case.input == "--batch net.py:batch"
    assert resolve("net.py:pair", batch="net.py:tensor").batch.shape == (2, 3)


def test_seed_decides_weights_and_input_and_leaves_the_generator():
    state = torch.get_rng_state()
    first, again, other = (resolve("net.py:bare", input="float32[5,3]", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.model.weight, again.model.weight)
    assert torch.equal(first.batch, again.batch)
    assert not torch.equal(first.model.weight, other.model.weight)
    assert not torch.equal(first.batch, other.batch)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "error", "sentence"),
    [
        ("nothing", FactoryError, "net.py:nothing returned None (is a return missing?); expected a torch.nn.Module"),
        ("text", FactoryError, "net.py:text returned a str; expected a torch.nn.Module"),
        ("swapped", FactoryError, "net.py:swapped returned (Tensor, Linear); expected"),
        ("bad_loss", FactoryError, "net.py:bad_loss returned a str as loss, not a function of (output, batch)."),
        ("needs", FactoryError, "net.py:needs raised TypeError: needs() missing 1 required positional argument"),
        ("number", FactoryError, "net.py:number is a int, not a function that returns a torch.nn.Module."),
        ("frozen", NothingToObserveError, "net.py:frozen (Linear) has no parameter that requires a gradient (all 2"),
        ("empty", NothingToObserveError, "net.py:empty (ReLU) has no parameter that requires a gradient (it has no"),
        ("bare", UsageError, 'net.py:bare comes without an input; add --input "float32[8,3]"'),
    ],
)
def test_sentences(name, error, sentence):
    with pytest.raises(error) as caught:
        resolve(f"net.py:{name}")
    assert sentence in str(caught.value)


def test_more_sentences():
    with pytest.raises(UsageError, match="give --input or --batch, not both"):
        resolve("net.py:bare", input="float32[2]", batch="net.py:batch")
    with pytest.raises(TargetError, match=r"'keel' is no model target; write pkg.module:factory, path/file.py:factory"):
        resolve("keel")
    with pytest.raises(BatchError, match=r"--batch net.py:no_batch returned None"):
        resolve("net.py:bare", batch="net.py:no_batch")
    with pytest.raises(TargetError, match=r"net.py:btach: no batch 'btach' there; did you mean batch"):
        resolve("net.py:bare", batch="net.py:btach")


@pytest.mark.parametrize(
    ("target", "model"),
    [
        ("runs/keel.h5", False),
        ("keel", False),
        ("a.b:c", True),
        ("file.py:f", True),
        ("net.py", True),
        ("hf:gpt2", True),
        ("12:30.h5", False),
    ],
)
def test_run_file_or_model(tmp_path, target, model):
    (tmp_path / "12:30.h5").write_bytes(b"")
    assert is_model_target(target) is model
