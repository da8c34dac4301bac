"""Text to train on: the bytes of a file or a folder, by default the source files of the running Python.

`training` draws batches from a `Text`; the command line makes one from ``--text``. A token is a byte, so the vocabulary
is 256 and nothing has to be downloaded.
"""

from __future__ import annotations

import itertools
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import torch

from keelscope.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

__all__ = ["Text"]

LIMIT: Final = 1 << 28
"""Bytes read at most: 256 MiB."""


class Text:
    r"""Bytes as tokens, with the end kept for validation.

    Args:
        data: The bytes.
        validation: Share of the bytes, at the end, that is kept for validation.
        title: What the text is, for messages and plots.

    Raises:
        UsageError: If there are no bytes, or the share is not between 0 and 1.

    Example:
        >>> text = Text(b"to be or not to be", validation=0.0)
        >>> tokens, targets = next(text.batches(1, 4, seed=0))
        >>> bool((tokens[:, 1:] == targets[:, :-1]).all())
        True
    """

    def __init__(self, data: bytes, *, validation: float = 0.1, title: str = "text") -> None:
        if not data:
            raise UsageError(f"{title} is empty: give a file or folder with at least a few thousand bytes of text")
        if not 0 <= validation < 1:
            raise UsageError(f"validation = {validation!r} cannot be used: give a share from 0 to below 1")
        self.title = title
        self.tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        """All bytes, uint8 ``[byte]``."""
        self.split = len(data) - int(validation * len(data))
        """Index of the first byte of the validation part."""

    @classmethod
    def read(cls, path: str | Path | None = None, *, validation: float = 0.1, limit: int = LIMIT) -> Text:
        """Read a file, or all files of a folder in the order of their paths.

        Args:
            path: File or folder; None is the source files of the running Python's standard library.
            validation: Share of the bytes, at the end, that is kept for validation.
            limit: Bytes read at most; the rest is left out.

        Returns:
            The text.

        Raises:
            UsageError: If there is no such file, it cannot be read, or there is nothing in it.
        """
        if path is None:
            return cls(_join(_library(), limit), validation=validation, title="the Python standard library")
        path = Path(path)
        if not path.exists():
            raise UsageError(
                f"there is no text at {path}: give a file or a folder, or leave it out for Python's own source"
            )
        files = _files(path) if path.is_dir() else [path]
        return cls(_join(files, limit), validation=validation, title=path.resolve().name)

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Text({self.title}: {len(self):,} bytes, {len(self) - self.split:,} of them for validation)"

    def part(self, split: Literal["train", "validation"]) -> Tensor:
        """The bytes of one part.

        Args:
            split: ``"train"`` or ``"validation"``.

        Returns:
            uint8 ``[byte]``.

        Raises:
            UsageError: For another name.
        """
        if split not in {"train", "validation"}:
            raise UsageError(f"split = {split!r} is not known: choose train or validation")
        return self.tokens[: self.split] if split == "train" else self.tokens[self.split :]

    def batch(
        self,
        index: int,
        batch_size: int,
        length: int,
        *,
        seed: int = 0,
        split: Literal["train", "validation"] = "train",
    ) -> tuple[Tensor, Tensor]:
        """One batch of windows at random places, a function of its arguments alone.

        Args:
            index: Number of the batch, from 0.
            batch_size: Number of windows.
            length: Number of tokens of a window.
            seed: Which sequence of batches.
            split: Which part of the text.

        Returns:
            Tokens and the tokens that follow them, int64 ``[batch, position]`` each.

        Raises:
            UsageError: If the part is too short for one window.
        """
        part = self.part(split)
        room = len(part) - length
        if room < 1:
            raise UsageError(
                f"the {split} part of {self.title} has {len(part)} bytes, too few for windows of {length} + 1: "
                "give more text or a smaller length"
            )
        starts = torch.from_numpy(np.random.default_rng((seed, index)).integers(room, size=(batch_size, 1)))
        windows = part[starts + torch.arange(length + 1)].long()  # [batch, position + 1]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def batches(
        self, batch_size: int, length: int, seed: int = 0, *, split: Literal["train", "validation"] = "train"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches without end, the same ones for the same arguments.

        Args:
            batch_size: Number of windows.
            length: Number of tokens of a window.
            seed: Which sequence of batches.
            split: Which part of the text.

        Yields:
            Tokens and the tokens that follow them, int64 ``[batch, position]`` each.

        Raises:
            UsageError: If the part is too short for one window.
        """
        for index in itertools.count():
            yield self.batch(index, batch_size, length, seed=seed, split=split)


def _library() -> list[Path]:
    """Return the modules at the top of the standard library, by name (subfolders differ between distributions)."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def _files(folder: Path) -> list[Path]:
    """Return the files below a folder in the order of their paths, without hidden ones."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    visible = [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    return sorted(visible, key=lambda path: path.relative_to(folder).as_posix())


def _join(files: Iterable[Path], limit: int) -> bytes:
    data = bytearray()
    for path in files:
        try:
            with path.open("rb") as file:
                data += file.read(limit - len(data))
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({error.strerror}): give a readable file or folder") from error
        if len(data) >= limit:
            break
    return bytes(data)
