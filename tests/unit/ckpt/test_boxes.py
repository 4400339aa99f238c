"""Tensors of which a rank holds several boxes, or none: saved by any number of ranks, loaded by any other, bit for bit."""

from itertools import chain

import h5py
import numpy as np
import pytest
from checkpoints import printed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from some_boxes import boxes_in, dealt, shapes, shards_of
from some_tensors import equal, random_array
from thread_ranks import on_ranks

import ckpt
from ckpt import Box, Shard

SETTINGS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
FEW = st.integers(1, 4)
NOTHING = np.zeros((0, 2))


@pytest.mark.rest
@given(st.data(), FEW, FEW)
@SETTINGS
def test_any_ranks_load_any_boxes_of_what_any_others_saved(tmp_path, data, num_writers, num_readers):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    dtypes = st.sampled_from(["float32", "bfloat16", "uint8", "complex64"])
    tensors = {name: random_array(data.draw(dtypes), data.draw(shapes), seed=ord(name)) for name in "abc"}
    tensors["scalar"], tensors["none"] = np.array(2.5), np.zeros((3, 0), "f4")
    cut = {name: data.draw(dealt(array.shape, num_writers)) for name, array in tensors.items()}
    cut["none"] = [[Box((0, 0), (3, 0))] if rank == num_writers - 1 else [] for rank in range(num_writers)]
    options = {
        "files": data.draw(st.sampled_from(["rank", "node", "one", 2])),
        "background": data.draw(st.booleans()),
    }

    def save(comm):
        mine = {name: shards_of(array, cut[name][comm.rank]) for name, array in tensors.items()}
        ckpt.save(folder / "a", mine | {"whole": tensors["a"]}, comm=comm, **options)
        for shard in chain.from_iterable(mine.values()):
            shard.data[...] = 0  # a save in the background has copied them
        ckpt.wait()

    on_ranks(num_writers, save)
    assert ckpt.verify(folder / "a") == []
    wanted = {
        name: [data.draw(st.lists(boxes_in(array.shape), max_size=3)) for _ in range(num_readers)]
        for name, array in tensors.items()
        if array.size
    }

    def load(comm):
        out = {name: shards_of(np.zeros_like(tensors[name]), boxes[comm.rank]) for name, boxes in wanted.items()}
        ckpt.load(folder / "a", out | {"none": [], "whole": np.zeros_like(tensors["a"])}, comm=comm)
        for name, boxes in wanted.items():
            for shard, box in zip(out[name], boxes[comm.rank], strict=True):
                assert equal(shard.data, np.asarray(tensors[name][box.slices])), (name, box)

    on_ranks(num_readers, load)
    checkpoint = ckpt.open(folder / "a")
    with h5py.File(folder / "a" / "index.h5") as index:
        for name, array in tensors.items():
            assert equal(checkpoint[name].read(), array)
            assert sorted(box for _, box in checkpoint[name].blocks) == sorted(
                box for boxes in cut[name] for box in boxes if box.size
            )
            assert np.array_equal(index[name][()], array.astype(index[name].dtype), equal_nan=array.dtype.kind != "u")


@given(st.data(), FEW)
@SETTINGS
def test_covers_that_are_not_exact_name_the_tensor_and_the_ranks(tmp_path, data, num_ranks):
    array = random_array("float32", data.draw(shapes))
    cut = data.draw(dealt(array.shape, num_ranks))
    rank, box = data.draw(st.sampled_from([(rank, box) for rank, boxes in enumerate(cut) for box in boxes]))
    twice, other = data.draw(st.booleans()), data.draw(st.integers(0, num_ranks - 1))
    if twice:
        cut[other].append(box)
    else:
        cut[rank].remove(box)

    def save(comm):
        with pytest.raises(ValueError, match=r"^ckpt.save: tensor 'x'") as caught:
            ckpt.save(tmp_path / "a", {"x": shards_of(array, cut[comm.rank])}, comm=comm)
        return str(caught.value)

    (text,) = set(on_ranks(num_ranks, save))
    if twice:
        pairs = {f"rank {a}'s box {box} and rank {b}'s box {box} overlap" for a, b in ((rank, other), (other, rank))}
        assert any(pair in text for pair in pairs)
    elif any(cut):
        assert "no rank holds element" in text
    else:
        assert "is an empty list on all ranks, without a shape; expected a Shard of it on one of them" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("of_last", "text"),
    [
        (
            [Shard(np.ones((1, 2)), (3, 2), (1, 0))],
            r"float64 \(2, 2\) in shards on rank 0, but float64 \(3, 2\) in shards on",
        ),
        ([Shard(np.ones((1, 2), "f4"), (2, 2), (1, 0))], r"float64 \(2, 2\) in shards on rank 0, but float32 \(2, 2\)"),
        (np.ones((2, 2)), r"float64 \(2, 2\) in shards on rank 0, but float64 \(2, 2\) on rank 2"),
        (
            [Shard(np.ones((1, 2)), (2, 2), (1, 0)), Shard(NOTHING, (3, 2), (0, 0))],
            r"tensor 'x': a list with shards of float64 \(2, 2\) in shards and of float64 \(3, 2\) in shards; expected .*rank 2",
        ),
        (
            [Shard(np.ones((1, 2)), (2, 2), (1, 0)), np.ones(2)],
            "tensor 'x' is a list of Shards with a ndarray in it; expected Shards alone .*rank 2 of 3",
        ),
        (
            [Shard(np.ones((2, 2)), (2, 2), (1, 0))],
            r"tensor 'x': a shard of shape \(2, 2\) at offset \(1, 0\) does not lie",
        ),
    ],
)
def test_ranks_whose_boxes_are_of_other_tensors(tmp_path, of_last, text):
    """The middle rank has an empty list, which fits all; every rank hears of what is wrong with the last."""
    of_ranks = [[Shard(np.ones((1, 2)), (2, 2), (0, 0))], [], of_last]

    def save(comm):
        with pytest.raises((ValueError, TypeError), match=text):
            ckpt.save(tmp_path / "a", {"x": of_ranks[comm.rank]}, comm=comm)

    on_ranks(3, save)
    assert list(tmp_path.iterdir()) == []


def test_an_array_on_one_rank_and_an_empty_list_on_another(tmp_path):
    def save(comm):
        with pytest.raises(ValueError, match=r"float64 \(3,\) on rank 1, but an empty list of shards on rank 0"):
            ckpt.save(tmp_path / "a", {"x": np.ones(3) if comm.rank else []}, comm=comm)

    on_ranks(2, save)


def test_slices_of_one_matrix_on_each_rank(tmp_path, capsys):
    """The rows of q, k and v are parts of one matrix, and each of two ranks has some of all three."""
    qkv = np.arange(72, dtype="f4").reshape(12, 6)
    cut = [[Box((4 * part + 2 * rank, 0), (2, 6)) for part in range(3)] for rank in range(2)]

    def save(comm):
        mine = qkv.reshape(3, 2, 2, 6)[:, comm.rank].copy()  # one array in memory: q, k, v
        shards = [
            Shard(rows, qkv.shape, box.offset, ("tp", None)) for rows, box in zip(mine, cut[comm.rank], strict=True)
        ]
        ckpt.save(tmp_path / "step-1", {"qkv": shards}, comm=comm)
        mine[...] = 0
        ckpt.load(tmp_path / "step-1", {"qkv": shards}, comm=comm)
        assert equal(mine, qkv.reshape(3, 2, 2, 6)[:, comm.rank].copy())

    on_ranks(2, save)
    assert "qkv" in printed(capsys, "show", tmp_path / "step-1")
    shown = printed(capsys, "show", tmp_path / "step-1", "qkv")
    assert "mesh axes: tp, -" in shown
    for rank, boxes in enumerate(cut):
        assert all(f"rank-{rank:05d}.h5: {box}\n" in shown for box in boxes)
    assert "complete" in printed(capsys, "ls", tmp_path)
    assert "whole" in printed(capsys, "verify", tmp_path / "step-1", "--hdf5")
    ckpt.reshard(tmp_path / "step-1", tmp_path / "one", files="one")
    assert "no difference" in printed(capsys, "diff", tmp_path / "step-1", tmp_path / "one")


def test_a_scalar_that_one_rank_holds(tmp_path):
    """The index has its value in itself: rank 0 writes it, which need not hold it. Elsewhere an empty array stands for nothing."""

    def act(comm):
        held = np.array(2.5) if comm.rank == 1 else np.zeros(0)
        ckpt.save(tmp_path / "a", {"x": Shard(held, (), ()), "y": [Shard(held, (), ())]}, comm=comm)
        held[...] = 0
        ckpt.load(tmp_path / "a", {"x": Shard(held, (), ()), "y": [Shard(held, (), ())]}, comm=comm)
        assert held.tolist() == (2.5 if comm.rank == 1 else [])
        with pytest.raises(
            ValueError, match=r"a shard of shape \(1,\) at offset \(\) does not lie inside .* shape \(\)"
        ):
            ckpt.save(tmp_path / "b", {"x": Shard(np.ones(1), (), ())}, comm=comm)
        with pytest.raises(ValueError, match=r"tensor 'x': no rank holds element \(\) of the shape \(\)"):
            ckpt.save(tmp_path / "b", {"x": Shard(np.zeros(0), (), ())}, comm=comm)

    on_ranks(3, act)
    with h5py.File(tmp_path / "a" / "index.h5") as index:
        assert index["x"][()] == index["y"][()] == 2.5


def test_an_empty_list_asks_for_a_name_and_nothing_of_it(tmp_path):
    path = ckpt.save(tmp_path / "a", {"x": np.ones(3), "y": np.ones(2)}, comm=None)
    ckpt.load(path, {"x": [], "y": []})
    with pytest.raises(ckpt.CheckpointError, match="it does not hold 'z'"):
        ckpt.load(path, {"x": [], "y": [], "z": []})
    with pytest.raises(ckpt.CheckpointError, match=r"tensor 'x' is float64 \(3,\) there; expected float64 \(4,\)"):
        ckpt.load(path, {"x": [Shard(np.zeros(1), (4,), (0,))], "y": []})
    halves = [Shard(np.zeros(2, "f4"), (3,), (0,)), Shard(np.zeros(2, "f4"), (3,), (1,))]  # they may overlap
    ckpt.load(path, {"x": halves}, cast=True, only="x")
    assert all((half.data == 1).all() for half in halves)
