"""The same checkpoint in other files: bit for bit, evenly cut, in its place among the others; and the cutting by itself."""

import json
import os
from math import prod

import numpy as np
import pytest
from checkpoints import flip_bit, printed
from hypothesis import given
from hypothesis import strategies as st
from some_tensors import equal, everything, forget_peak, peak_bytes
from thread_ranks import on_ranks

import ckpt
from ckpt.cli import main
from ckpt.format.boxes import Box, cover_error
from ckpt.format.manifest import FILE_NAME
from ckpt.reading import sources
from ckpt.saving.placement import cut_evenly

TENSORS = st.lists(
    st.tuples(st.lists(st.integers(0, 7), max_size=3).map(tuple), st.sampled_from([1, 2, 8])), max_size=6
)


@given(TENSORS)
def test_one_part_is_everything(tensors):
    assert cut_evenly(tensors, 1) == [{i: Box.full(shape) for i, (shape, _) in enumerate(tensors) if prod(shape)}]


@given(TENSORS, st.integers(1, 9))
def test_parts_cover_each_tensor_once_and_are_even(tensors, parts):
    cut = cut_evenly(tensors, parts)
    assert len(cut) == parts
    for index, (shape, _) in enumerate(tensors):
        owners = [part for part in range(parts) if index in cut[part]]
        boxes = [cut[part][index] for part in owners]
        assert all(box.size for box in boxes)
        assert cover_error(shape, boxes, str) is None
    # No part misses its share by more than half of the row at each of its two ends.
    total = sum(prod(shape) * itemsize for shape, itemsize in tensors)
    longest_row = max(
        (prod(shape) // next((n for n in shape if n > 1), 1) * itemsize for shape, itemsize in tensors), default=0
    )
    for part in cut:
        nbytes = sum(box.size * tensors[index][1] for index, box in part.items())
        assert abs(nbytes - total / parts) <= longest_row + 1


def saved(folder, size=3):
    """By `size` ranks: everything whole, and two tensors in shards with named axes."""
    rows = np.arange(size * 40, dtype="f4").reshape(size * 4, 10)

    def save(comm):
        mine = slice(4 * comm.rank, 4 * comm.rank + 4)
        shards = {
            "rows": ckpt.Shard(rows[mine], rows.shape, (mine.start, 0), axes=("dp", None)),
            "columns": ckpt.Shard(np.ascontiguousarray(rows.T[:, mine]), rows.T.shape, (0, mine.start)),
        }
        ckpt.save(folder, everything() | shards, comm=comm, meta={"step": 5, "x": [1, None]})

    on_ranks(size, save)
    return everything() | {"rows": rows, "columns": rows.T.copy()}


@pytest.mark.rest
@pytest.mark.parametrize("files", ["one", 2, 5, 1000])
def test_bit_for_bit_in_so_many_files(tmp_path, files):
    tensors = saved(tmp_path / "step-5")
    path = ckpt.reshard(tmp_path / "step-5", tmp_path / "new", files=files)
    assert path == tmp_path / "new"
    checkpoint = ckpt.open(path)
    assert checkpoint.names == sorted(tensors)
    assert all(equal(checkpoint[name].read(), array) for name, array in tensors.items())
    assert checkpoint.meta == {"step": 5, "x": [1, None]}
    assert checkpoint["rows"].axes == ("dp", None) and checkpoint["columns"].axes is None
    data = [name for name in checkpoint.files if name != "index.h5"]
    assert data == [f"part-{i:05d}.h5" for i in range(len(data))]
    assert len(data) == (1 if files == "one" else files) or (files == 1000 and len(data) > 50)
    assert ckpt.verify(path) == []
    if files == "one":
        assert all(len(entry.blocks) <= 1 for entry in checkpoint.values())


def test_an_old_checkpoint_stays_old(tmp_path):
    for step in (1, 2):
        ckpt.save(tmp_path / f"step-{step}", {"x": np.full(100, step)}, comm=None)
    ckpt.reshard(tmp_path / "step-1", tmp_path / "new-1", files=2)
    assert ckpt.latest(tmp_path) == tmp_path / "step-2"
    assert (tmp_path / "latest").read_text() == "step-2\n"
    assert [c.name for c in ckpt.list_checkpoints(tmp_path)] == ["step-1", "new-1", "step-2"]
    # elsewhere it is the newest, since it is the last that came
    ckpt.reshard(tmp_path / "step-1", tmp_path / "other" / "a", files=2)
    ckpt.reshard(tmp_path / "step-1", tmp_path / "other" / "b", files=2)
    assert ckpt.latest(tmp_path / "other") == tmp_path / "other" / "b"


def test_in_its_own_place(tmp_path):
    path = ckpt.save(tmp_path / "a", {"x": np.arange(100)}, comm=None)
    with pytest.raises(FileExistsError):
        ckpt.reshard(path, path, files=4)
    assert ckpt.reshard(path, path, files=4, overwrite=True) == path
    assert len(ckpt.open(path).files) == 5 and np.array_equal(ckpt.open(path)["x"], np.arange(100))
    assert sorted(os.listdir(tmp_path)) == ["a", "latest"]


def test_damage_is_not_carried_on(tmp_path):
    path = ckpt.save(tmp_path / "a", {"x": np.arange(100)}, comm=None)
    flip_bit(path / "rank-00000.h5", np.arange(100).tobytes())
    with pytest.raises(ckpt.CheckpointError, match="tensor 'x'"):
        ckpt.reshard(path, tmp_path / "b", files="one")
    assert sorted(os.listdir(tmp_path)) == ["a", "latest"]


def test_what_does_not_read_back_is_no_checkpoint(tmp_path):
    """Bytes that turn after they were written: here by the one who is told of the progress."""
    x = np.arange(1000)
    path = ckpt.save(tmp_path / "a", {"x": x, "y": x + 1}, comm=None)
    told = 0

    def disturb(nbytes):
        nonlocal told
        told += 1
        if told == 2:  # x is written, y is read
            with (tmp_path / ".b.staging" / "part-00000.h5").open("r+b") as part:
                at = part.read().index(x.tobytes())
                part.seek(at + 5)
                part.write(b"!")

    with pytest.raises(ckpt.CheckpointError, match=r"does not read back as it was written: part-00000\.h5.*'x'"):
        ckpt.reshard(path, tmp_path / "b", files="one", progress=disturb)
    assert sorted(os.listdir(tmp_path)) == ["a", "latest"]


@pytest.mark.parametrize("files", [0, -1, "rank", 1.5, True])
def test_numbers_of_files_that_cannot_be(tmp_path, files):
    path = ckpt.save(tmp_path / "a", {"x": np.arange(100)}, comm=None)
    with pytest.raises(ValueError, match="expected 'one', or a number of at least 1"):
        ckpt.reshard(path, tmp_path / "b", files=files)


def test_memory_is_bounded(tmp_path):
    big = np.zeros((32, 1 << 20), "f4")  # 128 MiB
    path = ckpt.save(tmp_path / "a", {"big": big, "small": np.ones(3)}, comm=None)
    del big
    before = forget_peak()
    ckpt.reshard(path, tmp_path / "b", files=2)
    assert peak_bytes() - before < 2 * sources.PIECE_BYTES


def test_the_command(tmp_path, capsys):
    saved(tmp_path / "step-5")
    args = ["reshard", str(tmp_path), str(tmp_path / "new")]
    assert "in 2 data files; read back and whole" in printed(capsys, *args, "--files", 2)
    assert main([*args, "--files", "2"]) == 2 and "exists" in capsys.readouterr().err
    found = json.loads(printed(capsys, *args, "--files", "one", "--overwrite", "--json"))
    assert list(found["files"]) == ["part-00000.h5", "index.h5"] and found["meta"]["step"] == 5
    assert main(["diff", str(tmp_path / "step-5"), str(tmp_path / "new")]) == 0
    with pytest.raises(SystemExit):
        main([*args, "--files", "0"])
    (tmp_path / "new" / FILE_NAME).unlink()
    assert main(["reshard", str(tmp_path / "new"), str(tmp_path / "x"), "--files", "1"]) == 2
