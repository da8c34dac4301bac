"""Runs as netCDF: the tree of `Run.to_xarray`, with the selected series, sites and steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from keelscope.export.selection import Selection
from keelscope.store.labelled import variable_names
from keelscope.store.names import OBSERVED
from keelscope.store.optional import needed
from keelscope.store.reader import Run
from keelscope.store.schema import SCALARS

__all__ = ["write_netcdf"]


def write_netcdf(run: Run, selection: Selection, path: Path) -> int:
    """Write netCDF-4 (needs xarray and h5netcdf).

    Args:
        run: the run.
        selection: what of it.
        path: the file.

    Returns:
        How many numbers it holds.

    Raises:
        UsageError: if a library is not installed.
    """
    xarray = needed("xarray", "xarray")
    needed("h5netcdf", "xarray")
    keys, sites = selection.keys(run), selection.sites_of(run)
    names: dict[str, list[str]] = {}
    for key in keys:
        names.setdefault(key.partition("/")[0], []).append(key.partition("/")[2])
    if SCALARS in names:
        known = variable_names(run)
        names[SCALARS] = [known[name] for name in names[SCALARS]]
    whole, nodes, count = run.to_xarray(), {}, 0
    for group, variables in names.items():
        data = whole[group].to_dataset()
        kept = [*variables, OBSERVED] if group in sites else variables
        part = data[kept].isel({"step": _rows(data["step"].values, selection.steps)})
        nodes[group] = part.isel({"site": sites[group]}) if group in sites else part
        count += sum(int(nodes[group][name].size) for name in variables)
    tree = xarray.DataTree.from_dict({"/": whole.to_dataset(), **nodes})
    tree.to_netcdf(path, engine="h5netcdf")
    return count


def _rows(steps: Any, wanted: slice) -> Any:
    first = 0 if wanted.start is None else int(np.searchsorted(steps, wanted.start))
    last = len(steps) if wanted.stop is None else int(np.searchsorted(steps, wanted.stop))
    return np.arange(first, last, wanted.step or 1)
