"""Indexing the tensors of a checkpoint: what NumPy gives, or one clear error; and what a step costs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from some_tensors import equal, random_array

import ckpt
import ckpt.reading.entry
import ckpt.reading.reader
from ckpt.reading.indexing import select


@pytest.mark.parametrize(
    "index",
    [
        np.s_[2], np.s_[-1], np.s_[1:3], np.s_[:, 2], np.s_[..., 1], np.s_[1, ..., 2:], np.s_[-3:, 1:100],
        np.s_[3:1], np.s_[...], np.s_[1, 2, 3], np.s_[()], np.s_[1, 2, ..., 3], np.s_[::2], np.s_[1::3, :, ::5], np.s_[::-1],
        np.s_[4:0:-2, 2, -1::-4], np.s_[3:1:2], np.s_[1:3:-1], np.s_[:, 3::9], np.s_[::100, ::-100], np.s_[np.int8(2)],
    ],
)  # fmt: skip
def test_entries_index_as_numpy_does(tmp_path, index):
    array = np.arange(5 * 4 * 6).reshape(5, 4, 6)
    entry = ckpt.open(ckpt.save(tmp_path / "a", {"x": array}, comm=None))["x"]
    assert equal(entry[index], np.asarray(array[index]))


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (5, IndexError, "index 5 is out of range for a dimension of 5"),
        ((0, 0, 0, 0), IndexError, "4 indices for a tensor of shape"),
        (np.s_[..., 0, ...], IndexError, "only one"),
        (np.s_[::0], ValueError, "step cannot be zero"),
        (np.s_[:, None], TypeError, "an index has a NoneType; expected integers, slices"),
        *((i, TypeError, "index the array") for i in (None, True, np.False_, "x", 1.5, [1, 2], np.ones(5, bool))),
    ],
)
def test_bad_indices(tmp_path, index, error, message):
    entry = ckpt.open(ckpt.save(tmp_path / "a", {"x": np.zeros((5, 4, 6))}, comm=None))["x"]
    with pytest.raises(error, match=message):
        entry[index]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_what_an_index_selects_is_cut_into_parts(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
    index = tuple(data.draw(st.one_of(st.slices(n), *([st.integers(-n, n - 1)] if n else []))) for n in shape)
    limit = data.draw(st.integers(1, 50))
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    selection = select(index, shape)
    out = np.full(selection.counts, -1)
    for part in selection.parts(limit):
        box = selection.covering(part)
        assert box.inside(shape) and (box.size <= limit or part.size == 1)
        out[part.slices] = array[box.slices][selection.strides]
    assert equal(out.reshape(selection.shape), np.asarray(array[index]))


def test_entries_have_what_arrays_have(tmp_path):
    tensors = {"x": np.arange(6).reshape(3, 2), "empty": np.zeros((0, 4)), "scalar": np.array(7)}
    entries = ckpt.open(ckpt.save(tmp_path / "a", tensors, comm=None))
    assert [(e.ndim, e.size) for e in entries.values()] == [(2, 0), (0, 1), (2, 6)]
    assert (len(entries["x"]), len(entries["empty"])) == (3, 0)
    assert [row.tolist() for row in entries["x"]] == [[0, 1], [2, 3], [4, 5]]
    for ask in (len, list):
        with pytest.raises(TypeError, match="'scalar' is a scalar"):
            ask(entries["scalar"])
    assert all(entries.values())  # all are there


def test_a_step_reads_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(ckpt.reading.entry, "PIECE_BYTES", 1 << 16)
    array = random_array("float32", (4096, 64), seed=2)  # 1 MiB
    entry = ckpt.open(ckpt.save(tmp_path / "a", {"x": array}, comm=None))["x"]
    asked = []
    plain = ckpt.reading.reader.Reader.fill
    monkeypatch.setattr(
        ckpt.reading.reader.Reader,
        "fill",
        lambda reader, out, *args: asked.append(out.nbytes) or plain(reader, out, *args),
    )
    assert equal(entry[5::100, ::3], array[5::100, ::3])
    assert 16 <= len(asked) < 50 and max(asked) <= 1 << 16
