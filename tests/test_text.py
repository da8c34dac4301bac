from __future__ import annotations

import itertools
import sysconfig
from pathlib import Path

import pytest
import torch

from keelscope.errors import UsageError
from keelscope.text import Text

DATA = bytes(range(256)) * 4


def test_a_folder_is_its_files_in_the_order_of_their_paths_without_hidden_ones(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.bin").write_bytes(b"\x00first\xff")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"hidden")
    text = Text.read(tmp_path)
    assert bytes(text.tokens.tolist()) == b"\x00first\xffsecond"
    assert text.tokens.dtype == torch.uint8


def test_a_file_is_its_bytes_up_to_the_limit(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(DATA)
    assert bytes(Text.read(path).tokens.tolist()) == DATA
    assert len(Text.read(str(path), limit=100)) == 100
    (tmp_path / "b.txt").write_bytes(DATA)
    assert len(Text.read(tmp_path, limit=1500)) == 1500


def test_the_default_is_the_source_of_the_running_python():
    text = Text.read()
    first = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[0].read_bytes()
    assert bytes(text.tokens[: len(first)].tolist()) == first
    assert len(text) > 1_000_000
    assert b"def " in bytes(text.part("validation")[:100_000].tolist())


def test_parts_do_not_overlap_and_cover_everything():
    text = Text(DATA, validation=0.25)
    assert (len(text.part("train")), len(text.part("validation"))) == (768, 256)
    assert torch.equal(torch.cat([text.part("train"), text.part("validation")]), text.tokens)


def test_targets_are_the_bytes_that_follow():
    tokens, targets = Text(DATA).batch(3, 5, 16, seed=2)
    assert tokens.shape == targets.shape == (5, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal((tokens + 1) % 256, targets)  # DATA counts upwards


def test_batches_are_a_function_of_seed_and_index():
    text = Text(DATA)
    first = list(itertools.islice(text.batches(4, 8, 1), 3))
    again = [text.batch(index, 4, 8, seed=1) for index in range(3)]
    assert all(torch.equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True))
    assert not torch.equal(first[0][0], first[1][0])
    assert not torch.equal(first[0][0], text.batch(0, 4, 8, seed=2)[0])


def test_drawing_leaves_the_global_random_state_alone():
    state = torch.get_rng_state()
    Text(DATA).batch(0, 4, 8)
    assert torch.equal(torch.get_rng_state(), state)


def test_windows_reach_the_first_and_the_last_byte_of_their_part_only():
    text = Text(bytes(range(20)), validation=0.5)
    seen = torch.cat([torch.cat(text.batch(index, 8, 4)) for index in range(40)])
    assert set(seen.flatten().tolist()) == set(range(10))
    seen = torch.cat([torch.cat(text.batch(index, 8, 4, split="validation")) for index in range(40)])
    assert set(seen.flatten().tolist()) == set(range(10, 20))


def test_a_window_may_be_the_whole_part():
    tokens, targets = Text(bytes(range(9)), validation=0.0).batch(0, 2, 8)
    assert tokens.tolist() == [list(range(8))] * 2
    assert targets.tolist() == [list(range(1, 9))] * 2


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda path: Text.read(path / "none"), "there is no text at "),
        (Text.read, "is empty: give a file or folder with at least a few thousand bytes of text"),
        (lambda _: Text(b""), "text is empty: give a file or folder"),
        (lambda _: Text(b"abc", validation=1.0), "validation = 1.0 cannot be used: give a share from 0 to below 1"),
        (lambda _: Text(b"abc").part("test"), "split = 'test' is not known: choose train or validation"),
        (
            lambda _: Text(b"0123456789", title="digits").batch(0, 1, 9),
            "the train part of digits has 9 bytes, too few for windows of 9 + 1: give more text or a smaller length",
        ),
    ],
)
def test_what_cannot_be_read_is_said_in_one_sentence(tmp_path, act, message):
    with pytest.raises(UsageError) as caught:
        act(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    path = tmp_path / "locked.txt"
    path.write_bytes(b"x")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UsageError, match=r"locked\.txt cannot be read \(Permission denied\)"):
        Text.read(path)


def test_a_text_says_how_long_it_is():
    assert repr(Text(b"x" * 2000, title="letters")) == "Text(letters: 2,000 bytes, 200 of them for validation)"
