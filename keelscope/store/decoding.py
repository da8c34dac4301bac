"""Reads the layout of a run back from the objects that `encoding` made, through the allow-list.

Gives the same `RunLayout` that the writer was given, except that control characters in labels are replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from keelscope.errors import UnsupportedSchemaError
from keelscope.store.allowlist import (
    RefusedError,
    check_link,
    child_dataset,
    child_group,
    int_attribute,
    read_labels,
    text_attribute,
)
from keelscope.store.chunks import Peek, read_block
from keelscope.store.covered import observed_later
from keelscope.store.names import COVERAGE, SEEN_LATER, SITE, clean, clean_text
from keelscope.store.schema import (
    SCALARS,
    SCHEMA_VERSION,
    CoverageEntry,
    GroupSpec,
    PartInfo,
    RunInfo,
    RunLayout,
    Site,
    Stack,
    StatisticSpec,
    SublayerInfo,
)

__all__ = ["check_schema", "read_layout", "scalar_names"]

_MAX_NAMES = 10_000
_MAX_LENGTH = 2**22
_AXES = 8  # that are kept, so that the parts of a run share theirs
_VERSION = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4})*")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def check_schema(file: h5py.File, path: Path) -> None:
    """Refuse files that are not run files or that this version cannot read.

    Args:
        file: an open HDF5 file.
        path: its name, for the message.

    Raises:
        RefusedError: if it is not a run file.
        UnsupportedSchemaError: if its format has a newer major version.
    """
    found = text_attribute(file, "keelscope_schema", "")
    if not _VERSION.fullmatch(found):
        raise RefusedError("it is HDF5, but keelscope did not write it")
    if int(found.partition(".")[0]) > int(SCHEMA_VERSION.partition(".")[0]):
        writer = clean(text_attribute(file, "creation_library_version", "unknown"))
        says = f"{path} has format {clean(found)}, this keelscope reads up to {SCHEMA_VERSION}"
        if writer in (_own_version(), "unknown"):
            raise UnsupportedSchemaError(
                f"{says}, and keelscope {writer}, which it names as its writer, makes no such files: its header was "
                "changed, so copy it again from where it came."
            )
        raise UnsupportedSchemaError(
            f"{says}; install keelscope {writer} or newer (pip install 'keelscope>={writer}')."
        )


def _own_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("keelscope")
    except PackageNotFoundError:
        return "unknown"


def read_layout(file: h5py.File, peek: Peek) -> RunLayout:
    """Everything about a run except its numbers.

    Args:
        file: an open run file.
        peek: reads bytes of the same file.

    Returns:
        The layout.

    Raises:
        RefusedError: if an object is missing or not what a run file holds there.
    """
    names = _names(text_attribute(file, "groups"))
    return RunLayout(
        info=_read_info(file),
        groups=tuple(_read_group(child_group(file, name), name, peek) for name in names),
        scalars=tuple(scalar_names(child_group(file, SCALARS))),
        coverage=_read_coverage(child_group(file, COVERAGE), peek) if COVERAGE in file else (),
        part=_read_part(file),
    )


def scalar_names(group: h5py.Group) -> dict[str, str]:
    """Which dataset holds which scalar.

    Args:
        group: the group of scalars.

    Returns:
        Label to name of the dataset.
    """
    names = _names(text_attribute(group, "statistics"))
    return {clean(text_attribute(child_dataset(group, name, "f", 1), "label")): name for name in names}


def _read_info(file: h5py.File) -> RunInfo:
    library = f"{text_attribute(file, 'training_library', '')} {text_attribute(file, 'training_library_version', '')}"
    config = _json(file, "run_config", "{}")
    return RunInfo(
        title=clean_text(text_attribute(file, "title", "")),
        run_id=clean(text_attribute(file, "run_id", "")),
        created_at=clean(text_attribute(file, "created_at", "")),
        model_class=clean(text_attribute(file, "model_class", "")),
        n_parameters=int_attribute(file, "n_parameters", 0),
        device=clean(text_attribute(file, "device", "")),
        training_library=clean(library.strip()),
        seed=int_attribute(file, "seed", -1),
        stacks=_read_stacks(file),
        sublayers=_read_sublayers(file),
        config=config if isinstance(config, dict) else {},
    )


def _read_part(file: h5py.File) -> PartInfo:
    return PartInfo(
        rank=int_attribute(file, "rank", 0),
        world_size=int_attribute(file, "world_size", 1),
        part=int_attribute(file, "part", 0),
        session_id=clean(text_attribute(file, "session_id", "")),
        first_step=int_attribute(file, "first_step", 0),
        resumed_at_step=int_attribute(file, "resumed_at_step", -1),
    )


def _read_stacks(file: h5py.File) -> tuple[Stack, ...]:
    stacks = _json(file, "stacks", "[]")
    if not isinstance(stacks, list):
        raise RefusedError("attribute stacks of / is not a list")
    try:
        return tuple(
            Stack(
                path=clean(s["path"]),
                kind=clean(s["kind"]),
                length=int(s["length"]),
                sublayers=int(s["sublayers"]),
                main=bool(s["main"]),
                chained=bool(s.get("chained", False)),  # the first files of format 1.2 lack it
            )
            for s in stacks
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise RefusedError("attribute stacks of / does not describe stacks") from error


def _read_sublayers(file: h5py.File) -> tuple[SublayerInfo, ...]:
    sublayers = _json(file, "sublayers", "[]")
    if not isinstance(sublayers, list):
        raise RefusedError("attribute sublayers of / is not a list")
    try:
        return tuple(_read_sublayer(entry) for entry in sublayers)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise RefusedError("attribute sublayers of / does not describe sub-layers") from error


def _read_sublayer(entry: dict[str, Any]) -> SublayerInfo:
    labels = {name: clean(entry[name]) for name in ("form", "site", "branch", "norm_before", "norm_after")}
    return SublayerInfo(
        **labels,
        schemes=_cleaned(entry["schemes"]),
        alpha=_weight(entry["alpha"]),
        beta=_weight(entry.get("beta")),  # files of format 1.0 lack this and what follows
        gates=_cleaned(entry.get("gates", ())),
        stream=int(entry.get("stream", 0)),
    )


def _weight(value: float | None) -> float | None:
    return None if value is None else float(value)


def _cleaned(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(clean(name) for name in names)


def _read_group(group: h5py.Group, name: str, peek: Peek) -> GroupSpec:
    sites = _read_sites(group, peek)
    provenance = _json(group, "provenance", "{}")
    if not isinstance(provenance, dict):
        raise RefusedError(f"attribute provenance of /{name} is not a mapping")
    return GroupSpec(
        name=name,
        statistics=tuple(
            _read_statistic(group, key, len(sites), peek) for key in _names(text_attribute(group, "statistics"))
        ),
        sites=sites,
        probe=clean(text_attribute(group, "keelscope_probe", "")),
        probe_version=int_attribute(group, "probe_version", 1),
        provenance={clean(str(key)): clean_text(str(value)) for key, value in provenance.items()},
    )


def _read_statistic(group: h5py.Group, name: str, n_sites: int, peek: Peek) -> StatisticSpec:
    check_link(group, name, h5py.Dataset)
    dims = tuple(_names(text_attribute(group[name], "extra_axes", "")))
    dataset = child_dataset(group, name, "f", 2 + len(dims))
    coords = {dim: tuple(map(float, _whole(child_dataset(group, dim, "f", 1), peek))) for dim in dims}
    if dataset.shape[1:] != (n_sites, *map(len, coords.values())):
        raise RefusedError(f"{dataset.name} has shape {dataset.shape}, which does not fit its {n_sites} sites")
    return StatisticSpec(
        name=name,
        unit=clean_text(text_attribute(dataset, "units", "")),
        doc=clean_text(text_attribute(dataset, "long_name", "")),
        dims=dims,
        coords=coords,
        across_ranks=clean_text(text_attribute(dataset, "across_ranks", "")),
    )


def _read_sites(group: h5py.Group, peek: Peek) -> tuple[Site, ...]:
    paths = read_labels(group, SITE, peek)
    kinds, roles, stacks, aliases = (read_labels(group, name, peek) for name in ("kind", "role", "stack", "aliases"))
    positions, sizes = (_whole(child_dataset(group, name, "iu", 1), peek).tolist() for name in ("position", "numel"))
    if min(positions, default=0) < -1 or max(positions, default=0) > _MAX_LENGTH or min(sizes, default=0) < 0:
        raise RefusedError(f"the sites of {group.name} have positions or sizes that no module has")
    try:
        return _axis(*map(tuple, (paths, kinds, roles, stacks, positions, sizes, aliases)))
    except ValueError as error:
        raise RefusedError(f"the site coordinates of {group.name} do not fit each other") from error


@lru_cache(maxsize=_AXES)
def _axis(*columns: tuple[Any, ...]) -> tuple[Site, ...]:
    """The sites that columns describe; one object for all parts of a run, so that they are known to be the same."""
    return tuple(
        Site(clean(path), clean(kind), clean(role), clean(stack), position, size, _aliases(others))
        for path, kind, role, stack, position, size, others in zip(*columns, strict=True)
    )


def _read_coverage(group: h5py.Group, peek: Peek) -> tuple[CoverageEntry, ...]:
    columns = [read_labels(group, name, peek) for name in ("path", "what", "status", "reason")]
    if len(set(map(len, columns))) > 1:
        raise RefusedError(f"the columns of {group.name} do not fit each other")
    later = np.zeros(len(columns[0]))
    if SEEN_LATER in group:  # the first files of format 1.2 lack it
        later = _whole(child_dataset(group, SEEN_LATER, "u", 1), peek).astype(np.float64)
    if len(later) != len(columns[0]):
        raise RefusedError(f"the columns of {group.name} do not fit each other")
    entries = (
        CoverageEntry(clean(path), clean(what), clean(status), clean_text(reason))
        for path, what, status, reason in zip(*columns, strict=True)
    )
    return tuple(observed_later(entry) if seen else entry for entry, seen in zip(entries, later.tolist(), strict=True))


def _whole(dataset: h5py.Dataset, peek: Peek) -> NDArray[np.generic]:
    if len(dataset) > _MAX_LENGTH:
        raise RefusedError(f"{dataset.name} has {len(dataset)} entries, more than a run file holds")
    return read_block(dataset, (slice(None),), peek)


def _aliases(text: str) -> tuple[str, ...]:
    names = json.loads(text) if text else []
    return tuple(clean(str(name)) for name in names) if isinstance(names, list) else ()


def _json(owner: h5py.Group, name: str, default: str) -> object:
    try:
        value: object = json.loads(text_attribute(owner, name, default))
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"attribute {name} of {owner.name} is not JSON") from error
    return value


def _names(text: str) -> list[str]:
    names = text.split()
    if len(names) > _MAX_NAMES or not all(map(_NAME.fullmatch, names)):
        raise RefusedError("a list of names holds something that is not a name")
    if len(set(names)) < len(names):
        raise RefusedError("a list of names names something twice")
    return names
