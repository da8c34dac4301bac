"""Batches: described by a specification such as ``int64[4,128]<50257``, or derived from what a model says of itself.

The specification is a short text that a user can type; `Entry` is one tensor of it. `default_spec` writes such a text
for models that carry a configuration (transformers, timm), so that the report can show exactly what was fed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keelscope.errors import InputSpecError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Entry", "default_spec", "example_spec", "make_batch", "parse"]

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool", "complex64", "complex128")
FORM = 'one input is dtype[shape], integers with an upper bound: "int64[4,128]<50257" or "float32[8,3,224,224]"'
LARGEST = 2**32


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a batch."""

    dtype: str
    shape: tuple[int, ...]
    high: int = 0
    """Integers are drawn from ``0 .. high - 1``; 0 for other dtypes."""
    name: str = ""
    """Keyword under which the model takes it; empty for a positional input."""


def parse(spec: str) -> tuple[Entry, ...]:
    """Read a batch description.

    Args:
        spec: inputs separated by ``;``, each ``[name=]dtype[shape][<high]``.

    Returns:
        The inputs in order.

    Raises:
        InputSpecError: if the text does not parse; the message says at which character and why.

    Example:
        >>> parse("input_ids=int64[2,16]<100")
        (Entry(dtype='int64', shape=(2, 16), high=100, name='input_ids'),)
    """
    entries, start = [], 0
    for part in spec.split(";"):
        entries.append(_Scanner(spec, start, start + len(part)).entry())
        start += len(part) + 1
    names = [entry.name for entry in entries]
    if any(names) and not all(names):
        raise InputSpecError(f"--input {spec!r}: name every input or none of them.")
    if any(names) and len(set(names)) < len(names):
        raise InputSpecError(f"--input {spec!r}: two inputs have the same name.")
    return tuple(entries)


def make_batch(entries: tuple[Entry, ...], seed: int = 0) -> object:
    """Draw a batch: standard normal floats, uniform integers below their bound, fair booleans.

    Args:
        entries: what `parse` returned.
        seed: seed of a generator of its own; the global one is not touched.

    Returns:
        One tensor, a tuple ending in None (no target) for several positional inputs, or a dict for named ones.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = [_draw(entry, generator) for entry in entries]
    if entries[0].name:
        return {entry.name: tensor for entry, tensor in zip(entries, tensors, strict=True)}
    return tensors[0] if len(tensors) == 1 else (*tensors, None)


def default_spec(model: nn.Module) -> str:
    """Describe a small batch for a model that says what it takes; ``""`` if it does not say.

    Args:
        model: a transformers model (``model.config``), a timm model (``model.pretrained_cfg``), or any other.

    Returns:
        A text for `parse`.
    """
    image = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if isinstance(image, dict) and "input_size" in image:
        return f"float32[4,{','.join(map(str, image['input_size']))}]"
    config = getattr(model, "config", None)
    main = getattr(model, "main_input_name", "")
    if main == "pixel_values":
        return _pixels(config)
    if main == "input_ids" or isinstance(getattr(config, "vocab_size", None), int):
        return _tokens(config)
    return ""


def example_spec(model: nn.Module) -> str:
    """A specification worth trying, read from the first layer with a known input width.

    Args:
        model: any module.

    Returns:
        For instance ``float32[8,64]`` for a model that starts with ``Linear(64, ...)``.
    """
    for module in model.modules():
        width = getattr(module, "in_features", None)
        vocabulary = getattr(module, "num_embeddings", None)
        channels = getattr(module, "in_channels", None)
        if isinstance(vocabulary, int):
            return f"int64[4,128]<{vocabulary}"
        if isinstance(channels, int):
            return f"float32[4,{channels},64,64]"
        if isinstance(width, int):
            return f"float32[8,{width}]"
    return "float32[8,64]"


def _tokens(config: object) -> str:
    vocabulary = getattr(config, "vocab_size", None)
    if not isinstance(vocabulary, int):
        return ""
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 64
    ids = f"int64[4,{min(64, longest)}]<{vocabulary}"
    decoder = f";decoder_input_ids={ids}" if getattr(config, "is_encoder_decoder", False) else ""
    return f"input_ids={ids}{decoder}"


def _pixels(config: object) -> str:
    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return f"pixel_values=float32[4,{getattr(config, 'num_channels', None) or 3},{height},{width}]"


def _draw(entry: Entry, generator: torch.Generator) -> torch.Tensor:
    import torch

    dtype = getattr(torch, entry.dtype)
    if entry.dtype in INTEGERS:
        return torch.randint(entry.high, entry.shape, generator=generator, dtype=dtype)
    if entry.dtype == "bool":
        return torch.rand(entry.shape, generator=generator) < 0.5
    wide = dtype if entry.dtype not in {"float16", "bfloat16"} else torch.float32
    return torch.randn(entry.shape, generator=generator, dtype=wide).to(dtype)


class _Scanner:
    """Reads one input from ``text[start:end]`` and says where it stopped."""

    def __init__(self, text: str, start: int, end: int) -> None:
        self.text, self.at, self.end = text, start, end

    def entry(self) -> Entry:
        name = self.take(r"[A-Za-z_]\w*(?=\s*=)")
        if name:
            self.take("=")
        dtype = self.take(r"\w+")
        if dtype not in DTYPES:
            self.at -= len(dtype)
            self.fail(f"expected a dtype ({', '.join(DTYPES)})")
        shape = self.shape()
        high = self.bound(dtype)
        if self.take(r"\S"):
            self.at -= 1
            self.fail("expected ';' or the end")
        return Entry(dtype, shape, high, name)

    def shape(self) -> tuple[int, ...]:
        self.expect(r"\[", "'['")
        sizes: list[int] = []
        while not self.take(r"\]"):
            if sizes:
                self.expect(",", "',' or ']'")
            sizes.append(int(self.expect(r"[1-9]\d{0,9}(?!\d)", "a size (1 or more)")))
        if math.prod(sizes) > LARGEST:
            self.fail(f"that is {math.prod(sizes):.1e} values, more than fit")
        return tuple(sizes)

    def bound(self, dtype: str) -> int:
        if dtype not in INTEGERS:
            return 0
        self.expect("<", f"'<' and an upper bound, since {dtype} values need one")
        high = int(self.expect(r"[1-9]\d{0,18}(?!\d)", "an upper bound (1 or more)"))
        bits = int(re.sub(r"\D", "", dtype)) - (not dtype.startswith("u"))
        if high > 2**bits:
            self.fail(f"{dtype} holds values below {2**bits}")
        return high

    def take(self, pattern: str) -> str:
        """The text that matches here, after spaces; empty if it does not."""
        spaces = re.compile(r"\s*").match(self.text, self.at, self.end)
        start = spaces.end() if spaces else self.at
        found = re.compile(pattern).match(self.text, start, self.end)
        if not found:
            return ""
        self.at = found.end()
        return found.group()

    def expect(self, pattern: str, what: str) -> str:
        return self.take(pattern) or self.fail(f"expected {what}")

    def fail(self, why: str) -> str:
        found = self.text[self.at : self.at + 8]
        seen = f"{found!r}" if found else "the end"
        raise InputSpecError(f"--input {self.text!r}, character {self.at + 1} ({seen}): {why}; {FORM}.")
