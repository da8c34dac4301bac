"""Batch descriptions parse, or say where they do not; batches are seeded and in range."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keelscope.errors import InputSpecError
from keelscope.targets.inputs import DTYPES, INTEGERS, Entry, default_spec, example_spec, make_batch, parse


def write(entry: Entry) -> str:
    name = f"{entry.name}=" if entry.name else ""
    high = f"<{entry.high}" if entry.high else ""
    return f"{name}{entry.dtype}[{','.join(map(str, entry.shape))}]{high}"


@st.composite
def entries(draw):
    named = draw(st.booleans())
    found = []
    for index in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
        high = draw(st.integers(1, 100)) if dtype in INTEGERS else 0
        found.append(Entry(dtype, shape, high, f"x{index}" if named else ""))
    return tuple(found)


@given(entries(), st.sampled_from(["", " "]))
def test_what_is_written_is_read(listed, space):
    text = ";".join(map(write, listed))
    assert parse(text.replace(",", f",{space}").replace(";", f"{space};{space}")) == listed


@given(entries(), st.integers(0, 2**31))
def test_batch_has_the_described_tensors(listed, seed):
    batch = make_batch(listed, seed)
    tensors = list(batch.values()) if isinstance(batch, dict) else batch
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else [t for t in tensors if t is not None]
    for entry, tensor in zip(listed, tensors, strict=True):
        assert str(tensor.dtype) == f"torch.{entry.dtype}"
        assert tuple(tensor.shape) == entry.shape
        if entry.dtype in INTEGERS and tensor.numel():
            assert int(tensor.min()) >= 0
            assert int(tensor.max()) < entry.high


def test_forms_of_a_batch():
    assert isinstance(make_batch(parse("float32[2,3]")), torch.Tensor)
    two = make_batch(parse("float32[2];bool[2]"))
    assert len(two) == 3
    assert two[-1] is None
    assert list(make_batch(parse("a=float32[2]; b=int64[2]<5"))) == ["a", "b"]


def test_seeded_without_touching_the_global_generator():
    state = torch.get_rng_state()
    first, again, other = (make_batch(parse("float32[64]"), seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_floats_are_standard_normal():
    values = make_batch(parse("float32[20000]"))
    assert abs(float(values.mean())) < 0.03
    assert abs(float(values.std()) - 1) < 0.03


@pytest.mark.parametrize(
    ("spec", "where", "why"),
    [
        ("", "character 1 (the end)", "expected a dtype"),
        ("int46[4]<5", "character 1 ('int46[4]')", "expected a dtype (float16, bfloat16, float32"),
        ("int64", "character 6 (the end)", "expected '['"),
        ("int64[4,128", "character 12 (the end)", "expected ',' or ']'"),
        ("int64[4;float32[2]", "character 8 (';float32')", "expected ',' or ']'"),
        ("int64[4,]<5", "character 9 (']<5')", "expected a size (1 or more)"),
        ("int64[4,x]<5", "character 9 ('x]<5')", "expected a size (1 or more)"),
        ("float32[0,3]", "character 9 ('0,3]')", "expected a size (1 or more)"),
        ("float32[-1]", "character 9 ('-1]')", "expected a size"),
        ("int64[4]", "character 9 (the end)", "expected '<' and an upper bound, since int64 values need one"),
        ("int64[4]<", "character 10 (the end)", "expected an upper bound (1 or more)"),
        ("int64[4]<0", "character 10 ('0')", "expected an upper bound (1 or more)"),
        ("int8[4]<1000", "character 13", "int8 holds values below 128"),
        ("float32[4]<5", "character 11 ('<5')", "expected ';' or the end"),
        ("float32[2] float32[2]", "character 12 ('float32[')", "expected ';' or the end"),
        ("float32[2];", "character 12 (the end)", "expected a dtype"),
        ("float32[99999,99999]", "character 21", "that is 1.0e+10 values, more than fit"),
    ],
)
def test_says_where_and_why_it_does_not_parse(spec, where, why):
    with pytest.raises(InputSpecError) as caught:
        parse(spec)
    message = str(caught.value)
    assert where in message
    assert why in message
    assert 'int64[4,128]<50257"' in message


def test_names_are_all_or_none_and_distinct():
    with pytest.raises(InputSpecError, match="name every input or none"):
        parse("a=float32[2];float32[2]")
    with pytest.raises(InputSpecError, match="two inputs have the same name"):
        parse("a=float32[2];a=float32[2]")


@given(st.text(max_size=30))
def test_any_text_parses_or_raises_its_own_error(text):
    with contextlib.suppress(InputSpecError):
        assert parse(text)


@pytest.mark.parametrize(
    ("layers", "spec"),
    [
        ([torch.nn.Embedding(11, 4)], "int64[4,128]<11"),
        ([torch.nn.ReLU(), torch.nn.Linear(5, 2)], "float32[8,5]"),
        ([torch.nn.Conv2d(3, 2, 1), torch.nn.Linear(5, 2)], "float32[4,3,64,64]"),
        ([torch.nn.ReLU()], "float32[8,64]"),
    ],
)
def test_example_for_a_model_that_says_nothing(layers, spec):
    model = torch.nn.Sequential(*layers)
    assert default_spec(model) == ""
    assert example_spec(model) == spec
    parse(spec)


def test_default_from_a_configuration():
    model = torch.nn.Linear(2, 2)
    model.config = type("Config", (), {"vocab_size": 77, "max_position_embeddings": 20})()
    assert default_spec(model) == "input_ids=int64[4,20]<77"
    model.config.is_encoder_decoder = True
    assert default_spec(model) == "input_ids=int64[4,20]<77;decoder_input_ids=int64[4,20]<77"
    model.main_input_name, model.config.image_size = "pixel_values", 32
    assert default_spec(model) == "pixel_values=float32[4,3,32,32]"
    model.pretrained_cfg = {"input_size": (1, 8, 8)}
    assert default_spec(model) == "float32[4,1,8,8]"
