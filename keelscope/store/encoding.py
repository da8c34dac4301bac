"""Lays out an empty run file: every group, dataset, attribute and dimension scale, before the first row.

The inverse is `decoding`; `commit` fills the datasets made here. All objects must exist before SWMR starts, so nothing
is added to a file later. Names and attributes are listed in `docs/file-format.md`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass

import h5py
import numpy as np

from keelscope.store.layout import extra_axes, row_shape
from keelscope.store.names import (
    COVERAGE,
    OBSERVED,
    SEEN_LATER,
    SITE,
    STATUS,
    STEP,
    WALL_TIME,
    as_json_text,
    clean,
    clean_text,
    dataset_names,
)
from keelscope.store.privacy import redacted
from keelscope.store.schema import (
    SCALARS,
    SCHEMA_VERSION,
    CoverageEntry,
    GroupSpec,
    PartInfo,
    RunLayout,
    Site,
    StatisticSpec,
)

__all__ = ["LIVE", "PACKED", "STATUS_FIELDS", "Storage", "attach", "chunk_rows", "create_objects", "write_labels"]

STATUS_FIELDS = ("state", "heartbeat", "rows_committed", "rows_dropped")
_SCALAR_CHUNK = 1024
_TEXT = h5py.string_dtype()


PACKED: Mapping[str, object] = {"compression": "gzip", "compression_opts": 1, "shuffle": True, "fletcher32": True}
"""Filters of a sealed file; every HDF5 reader knows them."""
_PACKED_CHUNK, _PACKED_SITES = 2**17, 128


@dataclass(frozen=True, slots=True)
class Storage:
    """How the datasets over steps are stored: growing and plain, or of known length and packed."""

    rows: Mapping[str, int] | None = None
    """Length by group, None while rows still come."""
    narrow: Set[tuple[str, str]] = frozenset()
    """(group, statistic) whose values float32 holds exactly."""

    def options(self, group: str, name: str, row: tuple[int, ...], itemsize: int) -> dict[str, object]:
        """Shape, chunks and filters of one dataset.

        Args:
            group: name of its group.
            name: its name.
            row: shape of a row.
            itemsize: bytes of an entry.

        Returns:
            Keywords of ``create_dataset``.
        """
        sites = 256 if self.rows is None else _PACKED_SITES
        tile = tuple(min(size, sites if axis == 0 else 64) for axis, size in enumerate(row))
        bytes_of_row = itemsize * math.prod(tile)
        if self.rows is None:
            return {"shape": (0, *row), "maxshape": (None, *row), "chunks": (chunk_rows(bytes_of_row), *tile)}
        rows = self.rows[group]
        fitting = min(1 << (max(1, _PACKED_CHUNK // bytes_of_row).bit_length() - 1), 256 if row else 4096)
        chunks = (max(1, min(fitting, rows)), *tile)
        grows = {} if rows else {"maxshape": (None, *row)}
        narrow = {"dtype": np.float32} if (group, name) in self.narrow else {}
        return {"shape": (rows, *row), "chunks": chunks, **grows, **PACKED, **narrow}


LIVE = Storage()


def create_objects(file: h5py.File, layout: RunLayout, storage: Storage = LIVE) -> None:
    """Create everything a run file holds.

    Args:
        file: an empty file, open for writing.
        layout: what will be recorded, as `layout.checked` returned it.
        storage: how the datasets over steps are stored.
    """
    _write_root(file, layout)
    fields = write_labels(file, f"{STATUS}_field", STATUS_FIELDS, "name of each entry of status")
    status = file.create_dataset(STATUS, data=np.zeros(len(STATUS_FIELDS)))
    _describe(status, "state (0 live, 2 done, 3 stopped), heartbeat (s since 1970), rows", "")
    attach(status, fields)
    _write_scalars(file, layout.scalars, storage)
    for group in layout.groups:
        _write_group(file, group, storage)
    if layout.coverage:
        _write_coverage(file, layout.coverage)


def chunk_rows(row_bytes: int) -> int:
    """Rows per chunk: the power of two that keeps a chunk within 64 KiB, between 64 and 1024.

    Args:
        row_bytes: bytes of one row of the chunk.

    Returns:
        Number of rows.

    Example:
        >>> chunk_rows(256 * 8), chunk_rows(24 * 8), chunk_rows(8)
        (64, 256, 1024)
    """
    fitting = max(1, 65536 // row_bytes)
    return min(max(1 << (fitting.bit_length() - 1), 64), _SCALAR_CHUNK)


def _write_root(file: h5py.File, layout: RunLayout) -> None:
    info = layout.info
    library, _, library_version = info.training_library.partition(" ")
    file.attrs.update(
        {
            "Conventions": "CF-1.11",
            "keelscope_schema": SCHEMA_VERSION,
            "keelscope_kind": "part" if (layout.part.rank, layout.part.part) > (0, 0) else "run",
            "title": clean_text(info.title),
            "run_id": clean(info.run_id),
            "created_at": clean(info.created_at),
            "creation_library": "keelscope",
            "creation_library_version": _own_version(),
            "creation_library_language": "Python",
            "h5py_version": h5py.version.version,
            "HDF5_Version": h5py.version.hdf5_version,
            "training_library": clean(library),
            "training_library_version": clean(library_version),
            "model_class": clean(info.model_class),
            "device": clean(info.device),
            "n_parameters": np.int64(info.n_parameters),
            "seed": np.int64(info.seed),
            "stacks": _json([asdict(stack) for stack in info.stacks]),
            "sublayers": _json([asdict(sublayer) for sublayer in info.sublayers]),
            "run_config": _json(redacted(info.config)),
            "groups": " ".join(group.name for group in layout.groups),
            "default": SCALARS,
            **_part_attributes(layout.part),
        }
    )


def _part_attributes(part: PartInfo) -> dict[str, object]:
    counts = {name: np.int32(getattr(part, name)) for name in ("rank", "world_size", "part")}
    steps = {name: np.int64(getattr(part, name)) for name in ("first_step", "resumed_at_step")}
    return {**counts, **steps, "session_id": clean(part.session_id)}


def _write_scalars(file: h5py.File, labels: Sequence[str], storage: Storage) -> None:
    group = file.create_group(SCALARS, track_order=True)
    names = dataset_names(labels)
    group.attrs.update({"statistics": " ".join(names.values()), "signal": next(iter(names.values()), WALL_TIME)})
    group.attrs["axes"] = [STEP]
    steps = _steps(group, SCALARS, storage)
    wall_time = _growing(group, WALL_TIME, "s", "seconds since created_at", storage.options(SCALARS, WALL_TIME, (), 8))
    attach(wall_time, steps)
    for label, name in names.items():
        dataset = _growing(group, name, "", clean(label), storage.options(SCALARS, label, (), 8))
        dataset.attrs["label"] = clean(label)
        attach(dataset, steps)


def _write_group(file: h5py.File, spec: GroupSpec, storage: Storage) -> None:
    group = file.create_group(spec.name, track_order=True)
    group.attrs.update(
        {
            "statistics": " ".join(statistic.name for statistic in spec.statistics),
            "keelscope_probe": clean(spec.probe),
            "probe_version": np.int32(spec.probe_version),
            "provenance": _json(dict(spec.provenance)),
            "signal": spec.statistics[0].name,
        }
    )
    group.attrs["axes"] = [STEP, SITE]
    steps = _steps(group, spec.name, storage)
    sites = _write_sites(group, spec.sites)
    axes = {dim: _axis(group, dim, values) for dim, values in extra_axes(spec).items()}
    for statistic in spec.statistics:
        options = storage.options(spec.name, statistic.name, row_shape(spec, statistic), 8)
        dataset = _growing(group, statistic.name, statistic.unit, statistic.doc, options)
        dataset.attrs.update(_statistic_attributes(statistic))
        attach(dataset, steps, sites, *(axes[dim] for dim in statistic.dims))
    attach(_observed(group, storage.options(spec.name, OBSERVED, (len(spec.sites),), 1)), steps, sites)


def _statistic_attributes(statistic: StatisticSpec) -> dict[str, str]:
    return {
        "coordinates": "kind role stack position numel aliases",
        "ancillary_variables": OBSERVED,
        "extra_axes": " ".join(statistic.dims),
        "across_ranks": statistic.across_ranks,
    }


def _write_sites(group: h5py.Group, sites: Sequence[Site]) -> h5py.Dataset:
    scale = write_labels(group, SITE, [site.path for site in sites], "dotted path of the module or parameter")
    columns: dict[str, tuple[object, str]] = {
        "kind": ([clean(site.kind) for site in sites], "class name"),
        "role": ([clean(site.role) for site in sites], "layer, branch, norm, parameter, sublayer, gate or other"),
        "stack": ([clean(site.stack) for site in sites], "path of the stack it belongs to, empty outside"),
        "position": (np.array([site.position for site in sites], dtype=np.int32), "index in the stack, -1 outside"),
        "numel": (np.array([site.numel for site in sites], dtype=np.int64), "parameter entries it owns"),
        "aliases": ([_aliases(site.aliases) for site in sites], "other paths of the same object, as a JSON list"),
    }
    for name, (data, doc) in columns.items():
        dtype = _TEXT if isinstance(data, list) else None
        dataset = group.create_dataset(name, data=data, dtype=dtype)
        dataset.attrs["long_name"] = doc
        attach(dataset, scale)
    return scale


def _write_coverage(file: h5py.File, entries: Sequence[CoverageEntry]) -> None:
    group = file.create_group(COVERAGE, track_order=True)
    scale = write_labels(group, "path", [entry.path for entry in entries], "dotted path of the module or parameter")
    columns = {
        "what": ([entry.what for entry in entries], "module or parameter"),
        "status": ([entry.first or entry.status for entry in entries], "observed, or why not, in one word"),
        "reason": ([entry.first_reason or entry.reason for entry in entries], "why it was not observed"),
    }
    for name, (texts, doc) in columns.items():
        dataset = group.create_dataset(name, data=[clean_text(text) for text in texts], dtype=_TEXT)
        dataset.attrs["long_name"] = doc
        attach(dataset, scale)
    later = group.create_dataset(SEEN_LATER, data=np.array([bool(entry.first) for entry in entries], np.uint8))
    later.attrs["long_name"] = "whether a row after the first one observed it; written when the file is closed"
    attach(later, scale)


def _steps(group: h5py.Group, name: str, storage: Storage) -> h5py.Dataset:
    steps = group.create_dataset(STEP, dtype=np.int64, fillvalue=-1, **storage.options(name, STEP, (), 8))
    steps.make_scale(STEP)
    steps.attrs.update({"long_name": "optimizer step", "units": "1"})
    return steps


def _growing(group: h5py.Group, name: str, unit: str, doc: str, options: Mapping[str, object]) -> h5py.Dataset:
    dataset = group.create_dataset(name, fillvalue=np.nan, **{"dtype": np.float64, **options})
    _describe(dataset, doc, unit)
    dataset.attrs["_FillValue"] = np.array([np.nan], dataset.dtype)
    return dataset


def _observed(group: h5py.Group, options: Mapping[str, object]) -> h5py.Dataset:
    dataset = group.create_dataset(OBSERVED, dtype=np.uint8, **options)
    _describe(dataset, "whether the site was seen on this step", "1")
    dataset.attrs.update({"flag_values": np.array([0, 1], dtype=np.uint8), "flag_meanings": "not_observed observed"})
    return dataset


def write_labels(group: h5py.Group, name: str, labels: Sequence[str], doc: str) -> h5py.Dataset:
    """Write texts as a dimension scale.

    Args:
        group: where.
        name: name of the scale.
        labels: the texts.
        doc: its ``long_name``.

    Returns:
        The scale.
    """
    scale = group.create_dataset(name, data=[clean(label) for label in labels], dtype=_TEXT)
    scale.make_scale(name)
    scale.attrs["long_name"] = doc
    return scale


def _axis(group: h5py.Group, name: str, values: Sequence[float]) -> h5py.Dataset:
    scale = group.create_dataset(name, data=np.asarray(values, dtype=np.float64))
    scale.make_scale(name)
    _describe(scale, name.replace("_", " "), "1")
    return scale


def attach(dataset: h5py.Dataset, *scales: h5py.Dataset) -> None:
    """Name the leading axes of a dataset.

    Args:
        dataset: the dataset.
        *scales: one dimension scale per axis.
    """
    for axis, scale in enumerate(scales):
        dataset.dims[axis].attach_scale(scale)


def _describe(dataset: h5py.Dataset, doc: str, unit: str) -> None:
    dataset.attrs.update({"units": clean_text(unit), "long_name": clean_text(doc)})


def _aliases(aliases: Sequence[str]) -> str:
    return _json([clean(alias) for alias in aliases]) if aliases else ""


def _json(value: Mapping[str, object] | Sequence[object]) -> str:
    return as_json_text(json.dumps(value, ensure_ascii=False, default=str))


def _own_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("keelscope")
    except PackageNotFoundError:
        return "unknown"
