"""`reduce_by`: a reduce-scatter with the caller's own reduction."""

import numpy as np
import pytest
import torch

from collectives import Communicator


@pytest.mark.parametrize("memory", ["node", "private"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_gets_its_part_of_all_arrays_in_order_of_rank(
    comm: Communicator, memory: str, dtype: torch.dtype
) -> None:
    size, rank = comm.size, comm.rank
    bounds = [(3 * n, 3 * n + n % 3) for n in range(size)]  # the first part is empty, and the parts leave elements out
    x = comm.node.empty(3 * size, dtype) if memory == "node" else torch.empty(3 * size, dtype=dtype)
    for round_ in range(6):  # more than the posts that may be unfinished at a time
        x.copy_(torch.arange(3 * size) + 16 * rank + round_)
        seen: list[list[float]] = []
        work = comm.reduce_by(x, lambda parts, seen=seen: seen.extend(part.tolist() for part in parts), bounds=bounds)  # type: ignore[misc]
        work.wait()
        assert seen == [[i + 16 * peer + round_ for i in range(*bounds[rank])] for peer in range(size)]
    comm.barrier()


def test_numpy_arrays_and_arguments(comm: Communicator) -> None:
    x = np.full((2, comm.size), comm.rank, np.int64)
    bounds = [(n, n + 1) for n in range(comm.size)]
    seen: list[np.ndarray] = []
    comm.reduce_by(x, lambda parts: seen.extend(part.copy() for part in parts), bounds=bounds).wait()
    assert [part.tolist() for part in seen] == [[peer] for peer in range(comm.size)]
    with pytest.raises(ValueError, match=r"reduce_by: bounds is .* expected \d pairs, one for each rank"):
        comm.reduce_by(x, print, bounds=[(0, 99)] * comm.size)
    with pytest.raises(TypeError, match=r"expected .begin, end. of each rank's part"):
        comm.reduce_by(x, print, bounds=[1] * comm.size)  # type: ignore[list-item]


def test_checked_mode(comm: Communicator) -> None:
    checked = Communicator(comm.mpi.Dup(), checked=True)
    x, seen = checked.node.empty(4, torch.float32), list[int]()
    checked.reduce_by(x, lambda parts: seen.append(len(parts)), bounds=[(0, 4)] * comm.size).wait()
    assert seen == [comm.size]
    checked.free()
