"""A run goes on from one part to the next, and no row is lost, doubled or changed on the way."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from itertools import chain

import h5py
import numpy as np
import pytest

from keelscope.errors import RecordingWarning, UsageError
from keelscope.store import rotation
from keelscope.store.commit import State
from keelscope.store.filesource import FileSource
from keelscope.store.livepart import LivePart
from keelscope.store.memory import MemoryWriter
from keelscope.store.opening import FileState, file_state
from keelscope.store.pace import Pace
from keelscope.store.parts import find_parts, part_path
from keelscope.store.schema import GroupSpec, PartInfo, Row, Site, StatisticSpec
from keelscope.store.writer import RunWriter


def files_of(path):
    return [path, *find_parts(path).values()]


def steps_of(path):
    return [FileSource(file).steps("scalars").tolist() for file in files_of(path)]


def append_steps(writer, layout, make_row, steps):
    for step in steps:
        writer.append(make_row(layout, step))


@pytest.mark.parametrize("live", ["swmr", "parts"])
def test_a_part_holds_so_many_rows(tmp_path, layout, make_row, live):
    writer = RunWriter(tmp_path / "keel.h5", layout, pace=Pace(part_rows=10, live=live))
    append_steps(writer, layout, make_row, range(34))
    writer.close()
    assert steps_of(writer.path) == [[*range(n, min(n + 10, 34))] for n in range(0, 34, 10)]
    for number, file in enumerate(files_of(writer.path)):
        assert file_state(file) is FileState.CLOSED
        with h5py.File(file) as part:
            assert part["status"][0] == (State.DONE if number == 3 else State.CLOSING)
            assert (part.attrs["part"], part.attrs["first_step"]) == (number, 10 * number)
            rows = [make_row(layout, int(step)) for step in part["scalars/step"]]
            assert part["gradients/norm"][:].tolist() == [row.values["gradients"]["norm"].tolist() for row in rows]


def test_a_new_part_begins_at_a_certain_age(tmp_path, layout, make_row):
    writer = RunWriter(tmp_path / "keel.h5", layout, pace=Pace(part_time=0.0, delay=0.0, batch=1))
    for step in range(4):
        writer.append(make_row(layout, step))
        writer.flush()
    writer.close()
    assert steps_of(writer.path) == [[0], [1], [2], [3]]


def test_an_idle_run_begins_no_parts(tmp_path, layout, make_row):
    writer = RunWriter(tmp_path / "keel.h5", layout, pace=Pace(part_time=0.0, heartbeat=0.01))
    writer.flush()
    writer.append(make_row(layout, 0))
    writer.flush()
    writer.close()
    assert steps_of(writer.path) == [[0]]


def test_what_is_new_begins_a_part_and_leaves_the_rows_before_it_alone(tmp_path, layout, make_row):
    """A scalar, a site, a statistic and a group, each after rows that still wait to be committed."""
    first, second = layout.groups
    more = replace(first, sites=(*first.sites, Site("blocks.6", "Block")))
    wider = replace(first, statistics=(*first.statistics, StatisticSpec("max", "1", "Largest.")))
    late = GroupSpec("late", (StatisticSpec("norm", "1", "Euclidean norm."),), (Site("a", "Linear"),))
    layouts = [
        layout,
        replace(layout, scalars=(*layout.scalars, "accuracy")),
        replace(layout, groups=(more, second)),
        replace(layout, groups=(wider, second)),
        replace(layout, groups=(first, second, late)),
    ]
    for number, new in enumerate(layouts[1:]):
        writer = RunWriter(tmp_path / f"{number}.h5", layout)
        memory = MemoryWriter(layout)
        for one in (writer, memory):
            append_steps(one, layout, make_row, range(5))
            assert one.change(new)
            append_steps(one, new, make_row, range(5, 9))
            one.close()
        assert steps_of(writer.path) == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
        check_part(FileSource(part_path(writer.path, 0, 1)), new, make_row)
        check_memory(memory.run(), layout, new, make_row)


def check_part(source, layout, make_row):
    assert source.layout.groups == layout.groups
    for group in layout.groups:
        steps = source.steps(group.name)
        for spec in group.statistics:
            values = source.read(group.name, spec.name, 0, len(steps))
            expected = [make_row(layout, int(step)).values[group.name][spec.name] for step in steps]
            assert values.tolist() == np.array(expected).tolist()


def check_memory(run, before, after, make_row):
    """Rows of both layouts; NaN and not observed where there was nothing yet."""
    for group in after.groups:
        for spec in group.statistics:
            series = run[f"{group.name}/{spec.name}"]
            assert series.values.shape[1] == len(group.sites)
            for step, values, seen in zip(series.steps, series.values, run.observed(group.name), strict=True):
                known = make_row(before if step < 5 else after, int(step)).values.get(group.name, {})
                expected = known.get(spec.name, np.full((0, *values.shape[1:]), np.nan))
                assert values[: len(expected)].tolist() == expected.tolist()
                assert np.isnan(values[len(expected) :]).all()
                assert not seen[max(map(len, known.values()), default=0) :].any()


def test_a_layout_only_grows(tmp_path, layout):
    writer = RunWriter(tmp_path / "keel.h5", layout)
    for smaller, what in [
        (replace(layout, scalars=("loss",)), "scalar 'lr'"),
        (replace(layout, groups=layout.groups[:1]), "group 'parameters'"),
        (replace(layout, groups=(replace(layout.groups[0], sites=layout.groups[0].sites[1:]),)), "site 'blocks.0'"),
    ]:
        with pytest.raises(UsageError, match=f"The new layout lacks {what}"):
            writer.change(smaller)
    writer.close()


def test_layouts_change_so_often_and_no_more(tmp_path, layout, make_row):
    writer = RunWriter(tmp_path / "keel.h5", layout, pace=Pace(changes=2))
    names, taken = list(layout.scalars), []
    for step in range(5):
        wider = replace(layout, scalars=(*names, f"s{step}"))
        taken.append(writer.change(wider))
        if taken[-1]:
            names.append(f"s{step}")
        writer.append(Row(step, 0.0, {}, dict.fromkeys(names, 1.0)))
    writer.close()
    assert taken == [True, True, False, False, False]
    assert steps_of(writer.path) == [[], [0], [1, 2, 3, 4]]


def test_where_no_part_can_be_begun_the_open_one_does_as_well(tmp_path, layout, make_row, monkeypatch):
    writer = RunWriter(tmp_path / "keel.h5", layout, pace=Pace(part_rows=10))
    monkeypatch.setattr(rotation, "LivePart", refuse)
    append_steps(writer, layout, make_row, range(25))
    writer.flush()
    monkeypatch.undo()
    writer.close()
    assert steps_of(writer.path) == [[*range(25)]]


def refuse(*_, **__):
    raise OSError(24, "Too many open files")


def test_a_part_that_cannot_be_closed_costs_a_warning_and_no_row(tmp_path, layout, make_row, monkeypatch):
    real, closed = LivePart.close, []

    def close(part, state, dropped):
        real(part, state, dropped)
        closed.append(part.path.name)
        if len(closed) == 1:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(LivePart, "close", close)
    writer = RunWriter(tmp_path / "keel.h5", layout, pace=Pace(part_rows=10))
    append_steps(writer, layout, make_row, range(25))
    with pytest.warns(RecordingWarning, match=r"a part of .*keel\.h5 could not be completed: Input/output error"):
        writer.close()
    assert closed == ["keel.h5", "r00000.p0001.h5", "r00000.p0002.h5"]
    assert [*chain(*steps_of(writer.path))] == [*range(25)]


class TestResume:
    def test_a_session_goes_on_in_the_next_part(self, tmp_path, layout, make_row):
        sessions = set()
        for first in (0, 8, 20):
            part = PartInfo(first_step=first)
            writer = RunWriter(tmp_path / "keel.h5", layout, exists="resume", part=part, pace=Pace(part_rows=8))
            append_steps(writer, layout, make_row, range(first, first + 12))
            writer.close()
        assert writer.path == tmp_path / "keel.h5"
        assert [steps[0] for steps in steps_of(writer.path)] == [0, 8, 8, 16, 20, 28]
        resumed = []
        for file in files_of(writer.path):
            with h5py.File(file) as found:
                resumed.append(int(found.attrs["resumed_at_step"]))
                sessions.add(found.attrs["session_id"])
        assert resumed == [-1, -1, 8, 8, 20, 20]
        assert len(sessions) == 3

    def test_a_killed_part_is_left_as_it_is(self, tmp_path, layout, make_row, python):
        script = """
import os, signal, sys
from conftest import make_layout, make_row
from keelscope.store.pace import Pace
from keelscope.store.writer import RunWriter
layout = make_layout()
writer = RunWriter(sys.argv[1], layout, pace=Pace(part_rows=8))
for step in range(12):
    writer.append(make_row(layout, step))
writer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
        path = tmp_path / "keel.h5"
        python(script, path, check=False)
        before = {file: file.read_bytes() for file in files_of(path)}
        assert [file_state(file) for file in before] == [FileState.CLOSED, FileState.DEAD]
        writer = RunWriter(path, layout, exists="resume", part=PartInfo(first_step=10))
        append_steps(writer, layout, make_row, range(10, 15))
        writer.flush()
        assert [file_state(file) for file in before] == [FileState.CLOSED, FileState.DEAD]
        assert {file: file.read_bytes() for file in before} == before
        writer.close()
        assert steps_of(path) == [[*range(8)], [8, 9, 10, 11], [10, 11, 12, 13, 14]]

    def test_two_writers_do_not_resume_one_run_at_once(self, tmp_path, layout):
        first = RunWriter(tmp_path / "keel.h5", layout)
        with pytest.raises(FileExistsError, match="still being written"):
            RunWriter(tmp_path / "keel.h5", layout, exists="resume")
        first.close()


class TestScratch:
    """Where SWMR cannot be trusted, parts are written elsewhere and appear when they are closed."""

    pace = Pace(live="parts", part_rows=10)

    def test_files_appear_whole_and_nothing_is_left_in_scratch(self, tmp_path, layout, make_row, scratch):
        writer = RunWriter(tmp_path / "keel.h5", layout, pace=self.pace)
        append_steps(writer, layout, make_row, range(10))
        writer.flush()
        assert not writer.path.exists()
        append_steps(writer, layout, make_row, range(10, 15))
        writer.flush()
        assert [file_state(file) for file in files_of(writer.path)] == [FileState.CLOSED]
        writer.close()
        assert steps_of(writer.path) == [[*range(10)], [*range(10, 15)]]
        assert not list(scratch.iterdir())
        assert not list(tmp_path.glob(".keelscope*"))

    def test_the_name_is_taken_before_the_file_is_there(self, tmp_path, layout):
        writers = [RunWriter(tmp_path / "keel.h5", layout, pace=self.pace) for _ in range(2)]
        assert [writer.path.name for writer in writers] == ["keel.h5", "keel-2.h5"]
        for writer in writers:
            writer.close()

    def test_rows_that_cannot_be_published_are_kept_and_said(self, tmp_path, layout, make_row, scratch):
        folder = tmp_path / "share"
        writer = RunWriter(folder / "keel.h5", layout, pace=self.pace)
        append_steps(writer, layout, make_row, range(10))
        writer.flush()
        folder.rename(tmp_path / "unreachable")
        with pytest.warns(RecordingWarning, match=r"its rows are kept in .*keel\.h5"):
            writer.close()
        (kept,) = scratch.glob("*/keel.h5")
        assert FileSource(kept).steps("scalars").tolist() == [*range(10)]

    def test_parts_wait_for_a_place_that_comes_back(self, tmp_path, layout, make_row):
        folder = tmp_path / "share"
        writer = RunWriter(folder / "keel.h5", layout, pace=self.pace)
        append_steps(writer, layout, make_row, range(10))
        writer.flush()
        folder.rename(tmp_path / "unreachable")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecordingWarning)
            append_steps(writer, layout, make_row, range(10, 15))
            writer.flush()
        (tmp_path / "unreachable").rename(folder)
        writer.close()
        assert [*chain(*steps_of(folder / "keel.h5"))] == [*range(15)]

    @pytest.fixture
    def scratch(self, tmp_path, monkeypatch):
        folder = tmp_path / "scratch"
        folder.mkdir()
        monkeypatch.setattr(rotation.LivePart.__init__.__globals__["tempfile"], "tempdir", str(folder))
        return folder


@pytest.mark.parametrize(("fsync", "times"), [("close", 0), ("commit", 3)])
def test_the_disk_is_waited_for_when_asked(tmp_path, layout, make_row, monkeypatch, fsync, times):
    waited = []
    writer = RunWriter(tmp_path / "keel.h5", layout, pace=Pace(fsync=fsync))
    monkeypatch.setattr(os, "fdatasync", waited.append)
    for step in range(3):
        writer.append(make_row(layout, step))
        writer.flush()
    assert len(waited) == times
    writer.close()


@pytest.mark.parametrize("wrong", [{"fsync": "always"}, {"live": "no"}, {"batch": 0}, {"part_rows": 0}])
def test_a_pace_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Pace(**wrong)
