"""Our own reading of compressed chunks gives what HDF5 gives, and stops where HDF5 would fill the memory."""

from __future__ import annotations

import io
import zlib

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keelscope.store.chunks import read_block, unpacked_chunks
from keelscope.store.texts import text_lengths

FILTERS = [
    {},
    {"compression": "gzip"},
    {"compression": "gzip", "compression_opts": 1, "shuffle": True, "fletcher32": True},
    {"compression": "gzip", "fletcher32": True},
    {"shuffle": True},
]


def peeker(buffer):
    return lambda place, size: buffer.getvalue()[place : place + size]


@st.composite
def blocks(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    chunks = tuple(draw(st.integers(1, size + 2)) for size in shape)
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    leading = draw(st.integers(1, len(shape)))
    return shape, chunks, tuple(slice(*end) for end in ends[:leading])


@settings(max_examples=150, deadline=None)
@given(
    block=blocks(),
    options=st.sampled_from(FILTERS),
    dtype=st.sampled_from(["f8", "f4", "i8", "u1", ">f8"]),
    written=st.integers(0, 9),
)
def test_a_block_is_what_hdf5_reads(block, options, dtype, written):
    shape, chunks, place = block
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", libver=("v110", "v110")) as file:
        fill = 7 if dtype in {"i8", "u1"} else np.nan
        limits = (None,) * len(shape)
        dataset = file.create_dataset("x", shape, dtype, chunks=chunks, maxshape=limits, fillvalue=fill, **options)
        rows = min(written, shape[0])
        dataset[:rows] = np.arange(rows * int(np.prod(shape[1:]))).reshape(rows, *shape[1:])
        file.flush()
        found = read_block(dataset, place, peeker(buffer))
        assert found.dtype == dataset.dtype
        np.testing.assert_array_equal(found, dataset[place])


@pytest.mark.parametrize("options", [one for one in FILTERS if "fletcher32" not in one])  # HDF5 sums no texts
def test_lengths_of_texts(options):
    texts = ["a", "", "층", "x" * 300, "b.c"] * 7
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", libver=("v110", "v110")) as file:
        chunks = (8,) if options else None
        dataset = file.create_dataset("x", data=texts, dtype=h5py.string_dtype(), chunks=chunks, **options)
        file.flush()
        lengths = text_lengths(dataset, peeker(buffer))
    assert lengths[:35].tolist() == [len(text.encode()) for text in texts]
    assert lengths[35:].sum() == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (zlib.compress(bytes(2**28), 1), "does not unpack to 32 bytes|takes .* bytes to hold 32"),
        (zlib.compress(bytes(2**20)), "does not unpack to 32 bytes"),
        (zlib.compress(bytes(31)), "does not unpack to 32 bytes"),
        (zlib.compress(bytes(32))[:-6], "ends too early"),
        (b"no deflate", "does not unpack"),
    ],
)
def test_a_chunk_that_unpacks_to_something_else_is_an_error(content, message):
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", libver=("v110", "v110")) as file:
        dataset = file.create_dataset("x", (4,), "f8", chunks=(4,), compression="gzip")
        dataset.id.write_direct_chunk((0,), content)
        file.flush()
        with pytest.raises(ValueError, match=message):
            read_block(dataset, (slice(None),), peeker(buffer))
        with pytest.raises(ValueError, match=message):
            list(unpacked_chunks(dataset, 8, peeker(buffer)))
