"""A run as a tree of labelled xarray datasets, from a file or from memory alike.

Used by `reader.Run.to_xarray`; gives what `xarray.open_datatree` gives on the file, minus uncommitted rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keelscope.store.layout import extra_axes
from keelscope.store.names import OBSERVED, SITE, STEP, WALL_TIME, dataset_names
from keelscope.store.optional import needed
from keelscope.store.schema import SCALARS, GroupSpec, Site
from keelscope.store.shown import ShownRun

if TYPE_CHECKING:
    import xarray


__all__ = ["to_tree", "variable_names"]


def to_tree(run: ShownRun) -> xarray.DataTree:
    """Read every series of a run into an xarray tree.

    Args:
        run: the run.

    Returns:
        One node per group, with the coordinates ``step``, ``site`` and those of each site.
    """
    needed("xarray", "xarray")
    import xarray

    info = run.info
    attributes = {"title": info.title, "run_id": info.run_id, "created_at": info.created_at}
    nodes = {"/": xarray.Dataset(attrs=attributes), SCALARS: _scalars(run)}
    nodes |= {name: _group(run, spec) for name, spec in run.groups.items()}
    return xarray.DataTree.from_dict(nodes)


def _scalars(run: ShownRun) -> xarray.Dataset:
    import xarray

    names, steps = variable_names(run), run[f"{SCALARS}/{WALL_TIME}"].steps
    variables = {}
    for label, name in names.items():
        one = run[f"{SCALARS}/{label}"]
        variables[name] = (STEP, one.values, {"units": one.unit} | ({} if name == label else {"label": label}))
    return xarray.Dataset(variables, coords={STEP: steps})


def variable_names(run: ShownRun) -> dict[str, str]:
    """The variable of each scalar.

    Args:
        run: the run.

    Returns:
        Scalar -> variable, which has the same name where a variable can have it.
    """
    return dataset_names(name for name in run.scalars if name != WALL_TIME) | {WALL_TIME: WALL_TIME}


def _group(run: ShownRun, spec: GroupSpec) -> xarray.Dataset:
    import xarray

    variables: dict[str, tuple[Sequence[str], object, dict[str, str]]] = {}
    series = [run[f"{spec.name}/{statistic.name}"] for statistic in spec.statistics]
    for one in series:
        attributes = {"units": one.unit, "long_name": one.doc}
        variables[one.name.partition("/")[2]] = ((STEP, SITE, *one.dims), one.values, attributes)
    variables[OBSERVED] = ((STEP, SITE), run.observed(spec.name), {})
    coords = {STEP: series[0].steps, SITE: _texts(site.path for site in spec.sites), **_site_coordinates(spec.sites)}
    coords |= {dim: np.array(values) for dim, values in extra_axes(spec).items()}
    provenance = {"keelscope_probe": spec.probe, "probe_version": spec.probe_version, **spec.provenance}
    return xarray.Dataset(variables, coords=coords, attrs=provenance)


def _site_coordinates(sites: Sequence[Site]) -> dict[str, tuple[str, object]]:
    texts = {name: _texts(getattr(site, name) for site in sites) for name in ("kind", "role", "stack")}
    numbers = {name: np.array([getattr(site, name) for site in sites]) for name in ("position", "numel")}
    return {name: (SITE, values) for name, values in (texts | numbers).items()}


def _texts(values: Iterable[str]) -> NDArray[np.object_]:
    return np.array(list(values), dtype=object)
