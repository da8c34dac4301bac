"""Files that are not runs, are damaged, or are made to do harm: each is one clear error, at once, and nothing leaks."""

from __future__ import annotations

import os
import pickle
import socket
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keelscope.errors import NotARunFileError, RunFileError, RunNotFoundError, UnsupportedSchemaError
from keelscope.store.reader import open_run
from keelscope.store.schema import Row
from keelscope.store.superblock import SIZE, repaired
from keelscope.store.writer import RunWriter

SECRET = b"0123456789abcdef" * 100


@pytest.fixture
def path(tmp_path, layout, make_row):
    """A good run file of twenty rows."""
    writer = RunWriter(tmp_path / "keel.h5", layout)
    for step in range(20):
        writer.append(make_row(layout, step))
    writer.close()
    return writer.path


@contextmanager
def changed(path):
    with h5py.File(path, "r+", libver=("v110", "v110"), locking=False) as file:
        yield file


def refused(path, message):
    with pytest.raises(NotARunFileError, match=message) as caught:
        open_run(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count(". ") == 0
    return str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(RunNotFoundError, match=r"There is no run file: '.*gone\.h5'"):
        open_run(tmp_path / "gone.h5")


def test_a_name_that_is_nearly_right(tmp_path):
    (tmp_path / "keel-2.h5").touch()
    with pytest.raises(RunNotFoundError, match=r"There is no run file \(did you mean keel-2\.h5\?\): '.*keel2\.h5'"):
        open_run(tmp_path / "keel2.h5")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"step,loss\n0,1.0\n", "is not an HDF5 file"),
        (b"\x89HDF\r\n\x1a\n", "is HDF5, but not a run file"),
        (pickle.dumps({"a": 1}), "is not an HDF5 file"),
        (os.urandom(10_000), "is not an HDF5 file"),
    ],
)
def test_other_files(tmp_path, content, message):
    (tmp_path / "x.h5").write_bytes(content)
    refused(tmp_path / "x.h5", message)


def test_a_folder(tmp_path):
    refused(tmp_path, "is a folder")


def test_things_that_are_not_files_do_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe.h5")
    refused(tmp_path / "pipe.h5", "is not a regular file")
    refused("/dev/zero", "is not a regular file")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket.h5"))
        with pytest.raises(RunFileError, match="cannot be read"):
            open_run(tmp_path / "socket.h5")


def test_a_symbolic_link_is_named_with_its_target(tmp_path, path):
    (tmp_path / "latest.h5").symlink_to(path)
    assert str(path) in refused(tmp_path / "latest.h5", "is a symbolic link")


@pytest.mark.parametrize("libver", [None, ("v110", "v110")])
def test_hdf5_of_somebody_else(tmp_path, libver):
    with h5py.File(tmp_path / "x.h5", "w", libver=libver) as file:
        file["weights"] = np.ones(5)
    refused(tmp_path / "x.h5", r"is HDF5, but not a run file|keelscope did not write it")


def test_a_file_that_another_program_has_left_open(tmp_path):
    file = h5py.File(tmp_path / "x.h5", "w", libver=("v110", "v110"), locking=False)
    file["x"] = 1
    file.flush()
    refused(tmp_path / "x.h5", "was left open by another program.*h5clear -s --increment=0")
    file.close()


@pytest.mark.parametrize("keep", [47, 100, 3000, 0.5, 0.9])
def test_a_run_file_that_is_cut_off(path, keep):
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    refused(path, "is cut off|is damaged|not a run file")


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_is_an_error_of_ours_or_a_wrong_number(path, data):
    content = bytearray(path.read_bytes())
    place, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    content[place] ^= 1 << bit
    flipped = path.with_name("flipped.h5")
    flipped.write_bytes(content)
    assert read_everything(flipped) in {"read", "refused"}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_zeroed_page_is_an_error_of_ours_or_a_wrong_number(path, data):
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[max(SIZE, place) : place + 512] = bytes(len(content[max(SIZE, place) : place + 512]))
    torn = path.with_name("torn.h5")
    torn.write_bytes(content)
    assert read_everything(torn) in {"read", "refused"}


def read_everything(path):
    """Any error but ours fails the test, and so does a read that does not end."""
    try:
        with open_run(path) as run:
            for key in list(run.keys()):
                run[key]
            return "read" if repr(run) else ""
    except RunFileError as error:
        return "refused" if str(path) in str(error) else str(error)


def test_a_newer_major_version_says_what_to_install(path):
    with changed(path) as file:
        file.attrs.modify("keelscope_schema", "2.3")
        file.attrs.modify("creation_library_version", "4.1.0")
    with pytest.raises(UnsupportedSchemaError, match=r"keel\.h5 has format 2\.3.*pip install 'keelscope>=4\.1\.0'"):
        open_run(path)


def test_a_newer_minor_version_is_read_and_what_is_unknown_is_ignored(path):
    with changed(path) as file:
        file.attrs.modify("keelscope_schema", "1.9")
        file.create_group("overview_16")["x"] = np.ones(3)
        file["gradients"].attrs["novelty"] = np.ones(3)
    assert open_run(path).steps.size == 20


def replace_dataset(file, name, **options):
    attributes = dict(file[name].attrs)
    del file[name]
    dataset = file.create_dataset(name, **options)
    for key in ("units", "long_name", "extra_axes"):
        if key in attributes:
            dataset.attrs[key] = attributes[key]


@pytest.fixture
def secret(tmp_path):
    target = tmp_path / "secret.txt"
    target.write_bytes(SECRET)
    return target


def test_external_storage_is_not_read(path, secret):
    with changed(path) as file:
        replace_dataset(file, "gradients/norm", shape=(20, 6), dtype="f8", external=[(str(secret), 0, 960)])
    refused(path, "/gradients/norm keeps its data outside the file")


def test_virtual_datasets_are_not_read(path, tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.ones((20, 6))
    virtual = h5py.VirtualLayout(shape=(20, 6), dtype="f8")
    virtual[:] = h5py.VirtualSource(tmp_path / "other.h5", "x", shape=(20, 6))
    with changed(path) as file:
        del file["gradients/norm"]
        file.create_virtual_dataset("gradients/norm", virtual)
    refused(path, "/gradients/norm keeps its data outside the file")


@pytest.mark.parametrize(
    "name", ["gradients", "gradients/norm", "gradients/site", "gradients/step", "scalars", "coverage/path"]
)
@pytest.mark.parametrize("kind", ["soft", "external", "dangling", "loop"])
def test_links_are_not_followed(path, tmp_path, name, kind):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.ones((20, 6))
    with changed(path) as file:
        file.move(name, "elsewhere")
        file[name] = {
            "soft": h5py.SoftLink("/elsewhere"),
            "external": h5py.ExternalLink(str(tmp_path / "other.h5"), "/x"),
            "dangling": h5py.SoftLink("/nowhere"),
            "loop": h5py.SoftLink(f"/{name}"),
        }[kind]
    refused(path, f"/{name} is a link to somewhere else")


def test_groups_that_contain_themselves_are_not_walked(path):
    with changed(path) as file:
        file["gradients/loop"] = file["/"]
        file["loop"] = file["gradients"]
    assert open_run(path).steps.size == 20
    with changed(path) as file:
        del file["gradients/norm"]
        file["gradients/norm"] = file["/"]
    refused(path, "/gradients/norm is not a dataset|missing or not a dataset")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gradients/norm", {"shape": (2**40, 6), "maxshape": (None, 6), "chunks": (64, 6), "dtype": "f8"}),
        ("gradients/step", {"shape": (2**50,), "maxshape": (None,), "chunks": (64,), "dtype": "i8"}),
        ("gradients/site", {"shape": (2**40,), "dtype": h5py.string_dtype(), "chunks": (64,)}),
        ("gradients/position", {"shape": (2**40,), "dtype": "i4", "chunks": (64,)}),
        ("gradients/quantile", {"shape": (2**40,), "dtype": "f8", "chunks": (64,)}),
        ("scalars/loss", {"shape": (2**40,), "maxshape": (None,), "chunks": (64,), "dtype": "f8"}),
        ("gradients/norm", {"shape": (20, 6), "chunks": (20, 2**20), "maxshape": (None, None), "dtype": "f8"}),
    ],
)
def test_declared_sizes_are_not_believed(path, name, options):
    with changed(path) as file:
        replace_dataset(file, name, **options)
    refused(path, "declares|stores its|does not fit")


@pytest.mark.parametrize(
    "data",
    [
        np.zeros((20, 6), dtype="i8"),
        np.zeros((20, 6), dtype="c16"),
        np.zeros((20, 6), dtype="V8"),
        np.zeros((20, 6), dtype=[("a", "f8"), ("b", "i4")]),
        np.zeros((20, 6), dtype="S5"),
        np.zeros((20, 6, 2)),
        np.zeros(20),
        np.zeros((20, 5)),
    ],
)
def test_other_kinds_of_data_are_refused(path, data):
    with changed(path) as file:
        replace_dataset(file, "gradients/norm", data=data)
    refused(path, "/gradients/norm has")


def test_references_and_pickles_are_refused(path):
    with changed(path) as file:
        reference = file["gradients"].ref
        replace_dataset(file, "gradients/norm", shape=(20, 6), dtype=h5py.ref_dtype)
        file["gradients/norm"][0, 0] = reference
    refused(path, "/gradients/norm has type")
    with changed(path) as file:
        file.attrs["title"] = np.void(pickle.dumps(print))
    refused(path, "attribute title of / is neither text nor an integer")


def test_plugin_filters_are_refused(path):
    with changed(path) as file:
        replace_dataset(file, "gradients/norm", data=np.zeros((20, 6)), chunks=(4, 6), compression="lzf")
    refused(path, "/gradients/norm uses a filter")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("title", np.ones(2**20), "attribute title of / is neither text nor an integer"),
        ("run_config", "{" * 100_000, "attribute run_config of / is not JSON"),
        ("run_config", "[" * 1_000_000, "attribute run_config of / is not JSON"),
        ("run_config", "x" * (17 * 2**20), "attribute run_config of / is missing or not text"),
        ("stacks", '[{"path": 3}]', "attribute stacks of / does not describe stacks"),
        ("stacks", "{}", "attribute stacks of / is not a list"),
        ("groups", "gradients ../../etc/passwd", "a list of names holds something that is not a name"),
        ("groups", " ".join(f"g{n}" for n in range(20_000)), "a list of names holds something that is not a name"),
        ("groups", "gradients missing", "/missing is missing"),
        ("n_parameters", "many", "attribute n_parameters of / is not an integer"),
        ("keelscope_schema", "one", "keelscope did not write it"),
    ],
)
def test_attributes_that_a_run_file_does_not_have(path, name, value, message):
    with changed(path) as file:
        del file.attrs[name]
        file.attrs[name] = value
    refused(path, message)


def test_many_labels_that_share_one_huge_text_are_refused(path):
    with changed(path) as file:
        replace_dataset(file, "gradients/site", data=["x" * 2**20] + ["y"] * 49, dtype=h5py.string_dtype())
        place = file["gradients/site"].id.get_offset()
    content = bytearray(path.read_bytes())
    content[place : place + 50 * 16] = bytes(content[place : place + 16]) * 50
    path.write_bytes(content)
    refused(path, "the texts of /gradients/site are too long")


@pytest.mark.parametrize("free", [0, 2**64 - 16, 2**20])
def test_a_heap_that_hdf5_would_walk_for_ever_is_refused(path, free):
    content = bytearray(path.read_bytes())
    heap = content.index(b"GCOL\x01")
    content[heap + 16 : heap + 32] = bytes(8) + free.to_bytes(8, "little")
    path.write_bytes(content)
    refused(path, "is damaged")


def test_text_and_numbers_that_look_like_a_heap_are_kept(tmp_path, make_layout):
    layout = make_layout(["GCOL", "GCOL\u0001", "b"])
    number = np.frombuffer(b"GCOL\x01\0\0\0", "f8")[0]
    writer = RunWriter(tmp_path / "heap.h5", layout)
    writer.append(Row(0, 0.0, {"gradients": {"norm": np.full(3, number)}}))
    writer.close()
    run = open_run(writer.path)
    assert run["gradients/norm"].values.tolist() == [[number] * 3]
    assert run["gradients/norm"].paths == ("GCOL", "GCOL\ufffd", "b")


def test_a_stored_end_far_beyond_the_file_is_refused(path):
    content = bytearray(path.read_bytes())
    content[:SIZE] = repaired(bytes(content[:SIZE]), 2**60)
    path.write_bytes(content)
    refused(path, "is cut off")


def test_labels_that_control_a_terminal_are_made_harmless(path):
    with changed(path) as file:
        file["gradients/site"][0] = "\x1b[2J<script>"
        file.attrs.modify("title", "<img src=x>\x1b]0;evil\x07")
    run = open_run(path)
    assert run["gradients/norm"].paths[0] == "\ufffd[2J<script>"
    assert "\x1b" not in repr(run)
    assert "<img" not in run._repr_html_()
    assert "&lt;img src=x&gt;" in run._repr_html_()


@pytest.mark.parametrize("steps", [[5, 4, 6], [0, 0, 1], [-1, 0, 1], [0, 1, -7]])
def test_rows_end_where_the_steps_stop_increasing(path, steps):
    with changed(path) as file:
        file["scalars/step"][:3] = steps
    increasing = {(5, 4, 6): 1, (0, 0, 1): 1, (-1, 0, 1): 0, (0, 1, -7): 2}[tuple(steps)]
    assert len(open_run(path)["scalars/loss"]) == increasing


def test_a_run_that_was_refused_holds_nothing_open(path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    with changed(path) as file:
        file.attrs["stacks"] = "{}"
    for _ in range(5):
        refused(path, "not a list")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
