"""A damaged chunk takes its own rows only: the rest is read, and one sentence says what is gone."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from keelscope.cli import main
from keelscope.store.examination import examined
from keelscope.store.reader import open_run
from keelscope.store.sealing import seal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keel.h5"


@pytest.fixture
def write(path, make_layout, make_row, write_part):
    layout = make_layout()
    return lambda steps: write_part(path, layout, [make_row(layout, step) for step in steps])


def damage(path, name, chunk):
    """Overwrite the middle of a stored chunk."""
    with h5py.File(path) as file:
        place = file[name].id.get_chunk_info(chunk)
    with path.open("r+b") as raw:
        raw.seek(place.byte_offset + place.size // 2)
        raw.write(b"damage damage damage")


@pytest.fixture
def damaged(path, write):
    """A sealed run of 300 rows in two chunks, the first of which is damaged in one statistic."""
    write(range(300))
    seal(path)
    with open_run(path) as run:
        whole = {key: (run[key].values, run.observed(key)) for key in ("gradients/rms", "gradients/quantiles")}
    with h5py.File(path) as file:
        assert 64 < file["gradients/rms"].chunks[0] <= 256
    damage(path, "gradients/rms", 0)
    return path, whole


SAID = "{} is damaged: gradients/rms on steps 0 to {} cannot be read, and is left out."


@pytest.mark.parametrize("isolated", [False, True])
def test_what_can_be_read_is_read(damaged, isolated):
    path, whole = damaged
    with open_run(path, isolated=isolated) as run:
        assert run.notes == ()
        values, (before, seen) = run["gradients/rms"].values, whole["gradients/rms"]
        lost = ~(values == before).all(axis=1)
        assert lost[:128].all()
        assert not lost[-30:].any()
        assert np.isnan(values[lost]).all()
        np.testing.assert_array_equal(run.observed("gradients/rms"), seen & ~lost[:, None])
        np.testing.assert_array_equal(run["gradients/quantiles"].values, whole["gradients/quantiles"][0])
        np.testing.assert_array_equal(run.observed("gradients/quantiles"), seen)
        assert run.notes == (SAID.format(path, np.flatnonzero(lost)[-1]),)
        assert run["gradients/rms"].values.shape == values.shape
        assert len(run.notes) == 1


def test_a_window_behind_the_damage_is_whole(damaged):
    path, whole = damaged
    with open_run(path) as run:
        np.testing.assert_array_equal(run.read("gradients/rms", -10).values, whole["gradients/rms"][0][-10:])
        assert run.notes == ()


def test_where_it_is_not_known_what_was_seen_nothing_counts_as_seen(path, write):
    write(range(300))
    seal(path)
    damage(path, "gradients/observed", 0)
    with open_run(path) as run:
        seen = run.observed("gradients/rms").any(axis=1)
        assert not seen[:128].any()
        assert seen[-30:].all() or not seen.any()  # sites may share one chunk over all rows
        assert "gradients/observed on steps 0 to " in run.notes[0]


def test_a_checksum_tells_damage_from_a_chunk_that_was_made_so(path, write):
    from keelscope.store.chunks import _is_torn

    write(range(300))
    seal(path)
    with h5py.File(path) as file:
        for name in ("gradients/rms", "gradients/observed", "gradients/quantiles"):
            dataset = file[name]
            place = dataset.id.get_chunk_info(0)
            stored = path.read_bytes()[place.byte_offset : place.byte_offset + place.size]
            assert not _is_torn(dataset, stored)
            assert _is_torn(dataset, bytes([stored[0] ^ 1]) + stored[1:])
            assert _is_torn(dataset, stored[:9] + bytes([stored[9] ^ 128]) + stored[10:])


def test_doctor_and_report_say_the_same_and_end_as_for_a_file_that_is_cut_off(damaged, capsys):
    path, _ = damaged
    (said,) = examined(path).history.damaged
    assert main(["doctor", str(path)]) == 1
    assert f"note: {said}" in capsys.readouterr().out
    assert main(["report", str(path)]) == 0  # the last rows are whole
    capsys.readouterr()
    assert main(["report", str(path), "--step", "130", "--json"]) == 2
    output = capsys.readouterr()
    assert '"headline"' in output.out
    assert "gradients/rms on steps" in output.err
    assert output.err.count("\n") == 1
    assert main(["export", str(path), "--to", "csv", "--out", "-"]) == 2
    assert "gradients/rms on steps" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:-5000])
    assert main(["report", str(path)]) == 2
    assert "Traceback" not in capsys.readouterr().err
