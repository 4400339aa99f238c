"""Several boxes of a tensor on each rank, cut unevenly, between real ranks: every driver, number of files, copies, the background."""

import h5py
import ml_dtypes
import numpy as np
import pytest
from checkpoints import flip_bit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from some_boxes import dealt, shards_of

import ckpt
import collectives
from ckpt import Box, Shard

SHAPES = {"long": (37,), "cube": (5, 4, 6), "one": (1, 1), "scalar": ()}


def full(name):
    """The same on all ranks."""
    size = int(np.prod(SHAPES[name]))
    return np.random.default_rng(size).normal(size=size).astype(ml_dtypes.bfloat16).reshape(SHAPES[name])


@pytest.mark.rest
@pytest.mark.parametrize(
    "options",
    [
        {"files": "rank"},
        {"files": "one", "background": True},
        {"files": 2, "driver": "mpio"},
        {"files": "one", "driver": "mpio-collective"},
    ],
    ids=str,
)
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8)
def test_any_ranks_load_any_boxes_of_what_any_others_saved(comm, shared_tmp, options, data):
    if "mpio" in options.get("driver", "") and not h5py.get_config().mpi:
        pytest.skip("needs h5py on parallel HDF5")
    cuts = [{name: data.draw(dealt(shape, comm.size)) for name, shape in SHAPES.items()} for _ in range(2)]
    mine = {name: shards_of(full(name), boxes[comm.rank]) for name, boxes in cuts[0].items()}
    path = ckpt.save(shared_tmp / "a", mine, comm=comm, overwrite=True, **options)
    ckpt.wait()
    out = {name: shards_of(np.zeros_like(full(name)), boxes[comm.rank]) for name, boxes in cuts[1].items()}
    ckpt.load(path, out, comm=comm)
    for name, shards in out.items():
        expected = shards_of(full(name), cuts[1][name][comm.rank])
        assert [shard.data.tobytes() for shard in shards] == [shard.data.tobytes() for shard in expected]
    with comm.together():
        assert ckpt.verify(path, threads=1) == []
        with h5py.File(path / "index.h5") as index:
            for name in SHAPES:
                assert ckpt.open(path)[name].read().tobytes() == full(name).tobytes()
                assert np.array_equal(index[name][()], full(name).astype("f4"))


@pytest.mark.parametrize("background", [False, True])
def test_copies_hold_all_boxes(comm, shared_tmp, background):
    """Each rank has rows of q, k and v, which are one matrix, and only the last has anything of the experts."""
    qkv, experts = np.arange(12.0 * comm.size).reshape(6 * comm.size, 2), np.arange(10, dtype="f4")
    rows = [Box((2 * comm.size * part + 2 * comm.rank, 0), (2, 2)) for part in range(3)]
    last = comm.rank == comm.size - 1
    mine = {
        "qkv": shards_of(qkv, rows),
        "experts": shards_of(experts, [Box((5,), (5,)), Box((0,), (5,))] if last else []),
    }
    copies = [shared_tmp / "copy"]
    path = ckpt.save(shared_tmp / "home" / "a", mine, comm=comm, background=background, copies=copies)
    ckpt.wait()
    comm.barrier()
    if comm.rank == 0:
        flip_bit(path / "rank-00000.h5", qkv[:2].tobytes())
    comm.barrier()
    out = {"qkv": shards_of(np.zeros_like(qkv), rows), "experts": shards_of(np.zeros_like(experts), [Box((3,), (4,))])}
    if comm.rank == 0:
        with pytest.warns(RuntimeWarning, match="going on with the copy"):
            ckpt.load(path, out, comm=comm, copies=copies)
    else:
        ckpt.load(path, out, comm=comm, copies=copies)
    assert all(np.array_equal(shard.data, qkv[box.slices]) for shard, box in zip(out["qkv"], rows, strict=True))
    assert np.array_equal(out["experts"][0].data, experts[3:7])


def test_boxes_that_do_not_fit_each_other_are_an_error_on_all(comm, shared_tmp):
    shape = (2 * comm.size, 2)
    rows = [Shard(np.zeros((1, 2)), shape, (row, 0)) for row in (2 * comm.rank, 2 * comm.rank + 1)]
    last = comm.rank == comm.size - 1
    cases = [
        (rows[:1] if last else rows, rf"tensor 'x': no rank holds element \({shape[0] - 1}, 0\)"),
        (
            [*rows, rows[0]] if last else rows,
            f"rank {comm.size - 1}'s box .* and rank {comm.size - 1}'s box .* overlap",
        ),
        ([], "tensor 'x' is an empty list on all ranks"),
    ]
    if comm.size > 1:
        other = Shard(np.zeros((1, 2)), (1, 2), (0, 0))
        cases += [
            ([rows[0], other] if last else rows, "a list with shards of .* expected shards of one tensor"),
            (
                [other] if last else rows,
                rf"in shards on rank 0, but float64 \(1, 2\) in shards on rank {comm.size - 1}",
            ),
            ([] if last else np.zeros(shape), f"on rank 0, but an empty list of shards on rank {comm.size - 1}"),
        ]
    for value, text in cases:
        with pytest.raises(ValueError, match=text) as caught:
            ckpt.save(shared_tmp / "a", {"x": value}, comm=comm)
        assert collectives.on_all_ranks(caught.value) or comm.size == 1
        assert len(set(comm.all_gather_object(str(caught.value)))) == 1
    assert list(shared_tmp.iterdir()) == []
