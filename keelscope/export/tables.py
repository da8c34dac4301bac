"""Runs as tables: CSV and Parquet, long or wide, and JSON.

The long form has a row per number and is written block by block. The wide form has a row per step and a column per
series, site and part; groups that were not recorded on a step leave their cells empty.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keelscope.export.selection import Selection
from keelscope.store.longform import COLUMNS, LongBlock
from keelscope.store.optional import needed
from keelscope.store.reader import Run

__all__ = ["write_csv", "write_json", "write_parquet"]


def write_csv(run: Run, selection: Selection, path: Path, *, wide: bool = False) -> int:
    """Write a table as text; infinities are ``inf``, NaN is ``nan``, what was not recorded is empty.

    Args:
        run: the run.
        selection: what of it.
        path: the file.
        wide: a column per series and site.

    Returns:
        How many numbers it holds.
    """
    count = 0
    blocks = selection.blocks(run)
    table = _wide(list(blocks)) if wide else None
    with path.open("x", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if table is not None:
            steps, columns, count = table
            writer.writerow(["step", *map(_as_text, columns)])
            writer.writerows([step, *_cells(columns, row)] for row, step in enumerate(steps.tolist()))
            return count
        writer.writerow(COLUMNS)
        for block in blocks:
            writer.writerows(_rows(block))
            count += len(block.values)
    return count


def write_parquet(run: Run, selection: Selection, path: Path, *, wide: bool = False) -> int:
    """Write a table as a column store (needs pyarrow).

    Args:
        run: the run.
        selection: what of it.
        path: the file.
        wide: a column per series and site.

    Returns:
        How many numbers it holds.

    Raises:
        UsageError: if pyarrow is not installed.
    """
    arrow, parquet = needed("pyarrow", "parquet"), needed("pyarrow.parquet", "parquet")
    blocks = selection.blocks(run)
    if wide:
        steps, columns, count = _wide(list(blocks))
        arrays = {name: arrow.array(values, mask=~known) for name, (values, known) in columns.items()}
        parquet.write_table(arrow.table({"step": steps, **arrays}), path)
        return count
    text = arrow.dictionary(arrow.int32(), arrow.string())
    schema = arrow.schema(
        [("step", arrow.int64()), *((name, text) for name in COLUMNS[1:-1]), ("value", arrow.float64())]
    )
    count = 0
    with parquet.ParquetWriter(path, schema) as writer:
        for block in blocks:
            writer.write_table(arrow.table(_arrow_columns(arrow, block), schema=schema))
            count += len(block.values)
    return count


def write_json(run: Run, selection: Selection, path: Path) -> int:
    """Write standard JSON: what the run is, and its series one after the other.

    NaN and values that were not recorded are null, infinities are the texts ``"inf"`` and ``"-inf"``.

    Args:
        run: the run.
        selection: what of it.
        path: the file.

    Returns:
        How many numbers it holds.
    """
    sites, count = selection.sites_of(run), 0
    keys = selection.keys(run)
    info = {name: getattr(run.info, name) for name in ("title", "run_id", "created_at", "model_class", "n_parameters")}
    with path.open("x", encoding="utf-8") as file:
        file.write(f'{{"run": {json.dumps(_finite(info), ensure_ascii=False)},\n "series": [')
        for number, key in enumerate(keys):
            entry, size = _json_entry(run, key, sites, selection.steps)
            file.write(("," if number else "") + "\n  " + json.dumps(entry, ensure_ascii=False, allow_nan=False))
            count += size
        file.write("\n ]}\n")
    return count


def _json_entry(run: Run, key: str, sites: dict[str, NDArray[np.intp]], steps: slice) -> tuple[dict[str, Any], int]:
    series, group = run[key], key.partition("/")[0]
    inside = np.ones(len(series.steps), np.bool_)
    if steps.start is not None:
        inside &= series.steps >= steps.start
    if steps.stop is not None:
        inside &= series.steps < steps.stop
    rows = np.flatnonzero(inside)[:: steps.step or 1]
    values, paths = series.values[rows], [""]
    if group in sites:
        values, paths = values[:, sites[group]], [series.sites[index].path for index in sites[group]]
    dims = {dim: list(_coordinates(run, group, key, dim)) for dim in series.dims}
    entry = {
        "name": key,
        "unit": series.unit,
        "doc": series.doc,
        "steps": series.steps[rows].tolist(),
        "sites": paths if group in sites else None,
        "axes": _finite(dims),
        "values": _finite(values.tolist()),
    }
    return entry, int(values.size)


def _coordinates(run: Run, group: str, key: str, dim: str) -> tuple[float, ...]:
    name = key.partition("/")[2]
    return next(spec.coords[dim] for spec in run.groups[group].statistics if spec.name == name)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _rows(block: LongBlock) -> Iterator[tuple[Any, ...]]:
    sites = [_as_text(path) for path in block.sites]
    names = ([sites[index] for index in block.site], [block.parts[index] for index in block.part])
    for step, site, part, value in zip(block.steps.tolist(), *names, block.values.tolist(), strict=True):
        yield step, block.group, block.statistic, site, part, repr(value)


def _as_text(label: str) -> str:
    """A label that no spreadsheet takes for a formula."""
    return f"'{label}" if label[:1] in {"=", "+", "-", "@"} else label


def _arrow_columns(arrow: Any, block: LongBlock) -> list[Any]:
    def texts(codes: NDArray[np.intp], names: tuple[str, ...]) -> Any:
        return arrow.DictionaryArray.from_arrays(codes.astype(np.int32), arrow.array(names, arrow.string()))

    zeros = np.zeros(len(block.steps), np.intp)
    named = (texts(zeros, (block.group,)), texts(zeros, (block.statistic,)))
    return [
        arrow.array(block.steps),
        *named,
        texts(block.site, block.sites),
        texts(block.part, block.parts),
        arrow.array(block.values),
    ]


def _wide(
    blocks: list[LongBlock],
) -> tuple[NDArray[np.int64], dict[str, tuple[NDArray[np.float64], NDArray[np.bool_]]], int]:
    """Steps, and by column name the values and which of them are known."""
    steps = np.unique(np.concatenate([np.zeros(0, np.int64), *(block.steps for block in blocks)]))
    columns: dict[str, tuple[NDArray[np.float64], NDArray[np.bool_]]] = {}
    for block in blocks:
        rows, column = np.searchsorted(steps, block.steps), block.site * len(block.parts) + block.part
        table = np.full((len(steps), len(block.sites) * len(block.parts)), np.nan)
        known = np.zeros(table.shape, np.bool_)
        table[rows, column], known[rows, column] = block.values, True
        for index, (path, label) in enumerate(itertools.product(block.sites, block.parts)):
            name = "/".join(word for word in (block.group, block.statistic, path, label) if word)
            old, there = columns.get(name, (table[:, index], known[:, index]))
            columns[name] = np.where(known[:, index], table[:, index], old), there | known[:, index]
    return steps, columns, sum(len(block.values) for block in blocks)


def _cells(columns: dict[str, tuple[NDArray[np.float64], NDArray[np.bool_]]], row: int) -> list[str]:
    return [repr(float(values[row])) if known[row] else "" for values, known in columns.values()]
