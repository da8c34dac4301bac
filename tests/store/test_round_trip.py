"""Whatever is recorded comes back bit for bit, from a file as from memory."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from keelscope.store.memory import MemoryWriter
from keelscope.store.names import clean, clean_text
from keelscope.store.reader import open_run
from keelscope.store.schema import (
    CoverageEntry,
    GroupSpec,
    PartInfo,
    Row,
    RunInfo,
    RunLayout,
    Site,
    Stack,
    StatisticSpec,
    SublayerInfo,
)
from keelscope.store.writer import RunWriter

LABEL = st.text(max_size=20)
NAME = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,8}", fullmatch=True).map(lambda name: f"x_{name}")
COUNT = st.integers(-(2**31), 2**31 - 1)
POSITION = st.integers(-1, 10**6)
ALIASES = st.lists(LABEL, max_size=2).map(tuple)
SITE = st.builds(Site, LABEL, LABEL, LABEL, LABEL, POSITION, st.integers(0, 2**62), ALIASES)
SUBLAYER = st.builds(
    SublayerInfo,
    form=LABEL,
    schemes=st.lists(LABEL, max_size=2).map(tuple),
    site=LABEL,
    branch=LABEL,
    norm_before=LABEL,
    norm_after=LABEL,
    alpha=st.none() | st.floats(allow_nan=False),
    beta=st.none() | st.floats(allow_nan=False),
    gates=st.lists(LABEL, max_size=2).map(tuple),
    stream=st.integers(0, 9),
)
INFO = st.builds(
    RunInfo,
    title=LABEL,
    run_id=LABEL,
    created_at=LABEL,
    model_class=LABEL,
    n_parameters=st.integers(0, 2**62),
    device=LABEL,
    training_library=st.sampled_from(["", "torch 2.13.0", "jax"]),
    seed=st.integers(-1, 2**62),
    stacks=st.lists(st.builds(Stack, LABEL, LABEL, COUNT, COUNT, st.booleans()), max_size=2).map(tuple),
    sublayers=st.lists(SUBLAYER, max_size=2).map(tuple),
    config=st.dictionaries(st.text("abc", min_size=1), st.integers() | LABEL | st.lists(st.booleans()), max_size=3),
)


@st.composite
def statistics(draw: st.DrawFn, name: str, axes: dict[str, tuple[float, ...]]) -> StatisticSpec:
    dims = tuple(draw(st.lists(st.sampled_from(sorted(axes)), unique=True, max_size=2))) if axes else ()
    return StatisticSpec(name, draw(LABEL), draw(LABEL), dims, {dim: axes[dim] for dim in dims})


@st.composite
def groups(draw: st.DrawFn, name: str) -> GroupSpec:
    names = draw(st.lists(NAME, unique=True, min_size=1, max_size=5))
    cut = draw(st.integers(1, len(names)))
    values = st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=3).map(tuple)
    axes = {axis: draw(values) for axis in names[cut:]}
    specs = tuple(draw(statistics(statistic, axes)) for statistic in names[:cut])
    sites = tuple(draw(st.lists(SITE, min_size=1, max_size=4)))
    notes = draw(st.dictionaries(LABEL, LABEL, max_size=2))
    return GroupSpec(name, specs, sites, draw(LABEL), draw(st.integers(0, 2**31 - 1)), notes)


@st.composite
def layouts(draw: st.DrawFn) -> RunLayout:
    names = draw(st.lists(NAME, unique=True, max_size=2))
    coverage = st.lists(st.builds(CoverageEntry, LABEL, LABEL, LABEL, LABEL), max_size=3).map(tuple)
    scalars = st.lists(LABEL, unique_by=clean, max_size=3).map(tuple)
    return RunLayout(draw(INFO), tuple(draw(groups(name)) for name in names), draw(scalars), draw(coverage))


@st.composite
def rows(draw: st.DrawFn, layout: RunLayout) -> list[Row]:
    made = []
    for step in sorted(draw(st.sets(st.integers(0, 2**60), max_size=4))):
        values = {}
        for group in layout.groups:
            if draw(st.booleans()):
                values[group.name] = {s.name: draw(blocks(group, s)) for s in group.statistics if draw(st.booleans())}
        scalars = {name: draw(st.floats()) for name in layout.scalars if draw(st.booleans())}
        seen = {
            n: draw(arrays(bool, len(g.sites))) for n, g in named(layout).items() if n in values and draw(st.booleans())
        }
        made.append(Row(step, draw(st.floats(0, 1e9)), values, scalars, seen))
    return made


def blocks(group: GroupSpec, spec: StatisticSpec) -> st.SearchStrategy[np.ndarray]:
    shape = (len(group.sites), *(len(spec.coords[dim]) for dim in spec.dims))
    return arrays(np.float64, shape, elements=st.floats())


def named(layout: RunLayout) -> dict[str, GroupSpec]:
    return {group.name: group for group in layout.groups}


def cleaned(layout: RunLayout) -> RunLayout:
    """The layout as a file keeps it: without control characters."""
    info = layout.info
    return RunLayout(
        info=replace(
            info,
            title=clean_text(info.title),
            run_id=clean(info.run_id),
            created_at=clean(info.created_at),
            model_class=clean(info.model_class),
            device=clean(info.device),
            sublayers=tuple(map(cleaned_sublayer, info.sublayers)),
            stacks=tuple(replace(stack, path=clean(stack.path), kind=clean(stack.kind)) for stack in info.stacks),
        ),
        groups=tuple(cleaned_group(group) for group in layout.groups),
        scalars=tuple(map(clean, layout.scalars)),
        coverage=tuple(
            CoverageEntry(clean(e.path), clean(e.what), clean(e.status), clean_text(e.reason)) for e in layout.coverage
        ),
    )


def cleaned_sublayer(sublayer: SublayerInfo) -> SublayerInfo:
    fields = {name: clean(getattr(sublayer, name)) for name in ("form", "site", "branch", "norm_before", "norm_after")}
    lists = {name: tuple(map(clean, getattr(sublayer, name))) for name in ("schemes", "gates")}
    return replace(sublayer, **fields, **lists)


def cleaned_group(group: GroupSpec) -> GroupSpec:
    return replace(
        group,
        probe=clean(group.probe),
        provenance={clean(key): clean_text(value) for key, value in group.provenance.items()},
        statistics=tuple(replace(s, unit=clean_text(s.unit), doc=clean_text(s.doc)) for s in group.statistics),
        sites=tuple(
            Site(
                clean(s.path),
                clean(s.kind),
                clean(s.role),
                clean(s.stack),
                s.position,
                s.numel,
                tuple(map(clean, s.aliases)),
            )
            for s in group.sites
        ),
    )


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_layout_and_rows_come_back_exactly(data):
    layout = data.draw(layouts())
    recorded = data.draw(rows(layout))
    memory = MemoryWriter(layout)
    with tempfile.TemporaryDirectory() as folder:
        writer = RunWriter(Path(folder) / "keel.h5", layout)
        for row in recorded:
            writer.append(row)
            memory.append(row)
        writer.close()
        with open_run(writer.path) as run:
            session = run._source.layout.part.session_id
            assert run._source.layout == replace(cleaned(layout), part=PartInfo(session_id=session))
            kept = memory.run()
            assert list(map(clean, kept.keys())) == run.keys()
            for key, same in zip(kept.keys(), run.keys(), strict=True):
                assert run[same].steps.tolist() == kept[key].steps.tolist()
                assert run[same].values.tobytes() == kept[key].values.tobytes()
            for group in run.groups:
                assert np.array_equal(run.observed(group), kept.observed(group))
                assert run[f"{group}/{run.groups[group].statistics[0].name}"].steps.tolist() == [
                    row.step for row in recorded if group in row.values
                ]
            assert run.steps.tolist() == [row.step for row in recorded if row.values or not run.groups]
            assert run["scalars/wall_time"].values.tolist() == [row.wall_time for row in recorded]


PATHS = [
    "a/b",
    "a.b",
    "a",
    "conv 1",
    "Conv 1",
    "층",
    "%2F",
    "attrs",
    "/lead",
    "..",
    ".",
    "",
    "block_" + "x" * 1000,
    "e\u0301",
    "é",
    "🙂",
    "\u202eabc",
    "<script>alert(1)</script>",
    '"quoted\\"',
    " leading and trailing ",
]


def test_names_of_modules_come_back_exactly_and_apart(tmp_path, make_layout):
    layout = make_layout(PATHS, scalars=("train/loss", "loss", "Loss", "step", "wall_time", "损失"))
    aliased = replace(
        layout.groups[0], sites=tuple(replace(site, aliases=tuple(PATHS)) for site in layout.groups[0].sites)
    )
    layout = replace(layout, groups=(aliased, *layout.groups[1:]))
    writer = RunWriter(tmp_path / "keel.h5", layout)
    values = np.arange(len(PATHS), dtype=float)
    writer.append(Row(0, 0.0, {"gradients": {"norm": values}}, {name: i for i, name in enumerate(layout.scalars)}))
    writer.close()
    run = open_run(writer.path)
    assert run["gradients/norm"].paths == tuple(PATHS)
    assert run.groups["gradients"].sites[0].aliases == tuple(PATHS)
    assert run["gradients/norm"].at(0).tolist() == values.tolist()
    assert {name: run[f"scalars/{name}"].at(0) for name in layout.scalars} == {
        n: i for i, n in enumerate(layout.scalars)
    }


def test_the_whole_range_of_float64_is_kept(tmp_path, layout):
    values = np.array([5e-324, 1e-45, 1e40, 1.7976931348623157e308, -0.0, 0.1])
    writer = RunWriter(tmp_path / "keel.h5", layout)
    writer.append(Row(0, 0.0, {"gradients": {"norm": values}}))
    writer.close()
    assert open_run(writer.path)["gradients/norm"].at(0).tobytes() == values.tobytes()


def test_zero_infinity_computed_nan_and_not_observed_are_four_things(tmp_path, layout):
    values = np.array([0.0, np.inf, -np.inf, np.nan, np.nan, 1.0])
    seen = np.array([True, True, True, True, False, True])
    writer = RunWriter(tmp_path / "keel.h5", layout)
    writer.append(Row(0, 0.0, {"gradients": {"norm": values}}, {}, {"gradients": seen}))
    writer.close()
    with h5py.File(writer.path) as file:
        norm, observed = file["gradients/norm"][0], file["gradients/observed"][0]
        assert file["gradients/observed"].attrs["flag_meanings"] == "not_observed observed"
    assert (norm == 0).tolist() == [True] + 5 * [False]
    assert np.isinf(norm).tolist() == [False, True, True, False, False, False]
    assert (np.isnan(norm) & (observed == 1)).tolist() == [False, False, False, True, False, False]
    assert (np.isnan(norm) & (observed == 0)).tolist() == [False, False, False, False, True, False]
    assert open_run(writer.path).observed("gradients").tolist() == [seen.tolist()]


@pytest.mark.parametrize("sites", [1, 255, 256, 257, 600])
def test_rows_and_sites_over_several_chunks(tmp_path, make_layout, make_row, sites):
    layout = make_layout(sites)
    writer = RunWriter(tmp_path / "keel.h5", layout)
    made = [make_row(layout, step) for step in range(150)]
    for row in made:
        writer.append(row)
    writer.close()
    run = open_run(writer.path)
    for name in ("norm", "quantiles"):
        expected = np.stack([row.values["gradients"][name] for row in made])
        assert np.array_equal(run[f"gradients/{name}"].values, expected)
