"""Many records of one kind, kept column by column: some 20 bytes each, where an object for each takes 100.

A layout is kept as long as its run is written. Its records are drawn when the first row closes, amid much that is let
go of at once; objects among that would hold on to the memory around them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import TypeVar, cast, overload

__all__ = ["Columns"]

R = TypeVar("R")
_MOST = 256  # texts that a byte tells apart


class Columns(Sequence[R]):
    """A sequence of records, each made anew when it is asked for.

    Args:
        kind: a dataclass with no more to it than its fields.
        records: of this kind.

    Example:
        >>> from keelscope.store.schema import CoverageEntry
        >>> kept = Columns(CoverageEntry, (CoverageEntry(path, "module", "frozen") for path in "abc"))
        >>> len(kept), kept[1].path, kept == tuple(kept)
        (3, 'b', True)
    """

    __slots__ = ("_columns", "_kind", "_size")

    def __init__(self, kind: Callable[..., R], records: Iterable[R]) -> None:
        names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
        found: list[list[object]] = [[] for _ in names]
        for record in records:
            for name, values in zip(names, found, strict=True):
                values.append(getattr(record, name))
        self._kind, self._size = kind, len(found[0])
        self._columns = tuple(map(_compact, found))

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> R: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[R, ...]: ...

    def __getitem__(self, index: int | slice) -> R | tuple[R, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        place = range(self._size)[index]
        return self._kind(*(values[place if codes is None else codes[place]] for codes, values in self._columns))

    def __iter__(self) -> Iterator[R]:
        return map(self._kind, *(_spread(codes, values) for codes, values in self._columns))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, tuple | Columns) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def _compact(values: list[object]) -> tuple[bytes | None, Sequence[object]]:
    """One field of all records: a byte for each where texts repeat, and the texts; else only what there is."""
    kinds = set(map(type, values))
    if kinds == {int}:
        with suppress(OverflowError):
            return None, array("q", cast("list[int]", values))
    texts = dict.fromkeys(values) if kinds == {str} else {}
    if not 0 < len(texts) <= _MOST:
        return None, tuple(values)
    codes = {text: code for code, text in enumerate(texts)}
    return bytes(codes[value] for value in values), tuple(texts)


def _spread(codes: bytes | None, values: Sequence[object]) -> Iterable[object]:
    return values if codes is None else map(values.__getitem__, codes)
