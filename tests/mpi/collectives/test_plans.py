"""Calls with the same arrays again: what is kept of them, and what must not be mistaken for them."""

from typing import Any

import numpy as np
import pytest
import torch

from collectives import Communicator
from collectives.communicator.plans import MAX_PLANS


@pytest.fixture
def group(comm: Communicator) -> Any:
    group = comm.split(0)
    yield group
    group.free()


def num_plans(group: Communicator) -> int:
    return len(group._plans)


def call_all(group: Communicator, arrays: tuple[Any, ...], rank_value: int) -> None:
    x, part, whole, out = arrays
    n = group.size
    for array in arrays:
        array[...] = rank_value
    total = sum(range(1, n + 1)) if rank_value == group.rank + 1 else n * rank_value
    assert group.all_reduce(x, algorithm="mpi") is x
    assert (x == total).all()
    assert group.all_gather(whole, part, algorithm="mpi") is whole
    assert whole.reshape(n, -1)[:, 0].tolist() == list(range(1, n + 1))
    whole[...] = rank_value
    assert group.reduce_scatter(out, whole, algorithm="mpi") is out
    assert (out == total).all()
    x[...] = rank_value
    assert group.broadcast(x, n - 1, algorithm="mpi") is x
    assert (x == n).all()


@pytest.mark.parametrize("library", [np, torch])
def test_the_second_call_with_the_same_arrays_has_a_plan(group: Communicator, library: Any) -> None:
    n = group.size
    arrays = tuple(library.zeros(length, dtype=library.float32) for length in (5, 3, 3 * n, 3))
    for turn in range(3):
        call_all(group, arrays, group.rank + 1)
        assert num_plans(group) == 4, turn


def test_other_arrays_at_the_same_address(group: Communicator) -> None:
    memory = np.zeros(64, np.uint8)
    for turn in range(40):
        dtype = (np.float32, np.int32, np.float64, np.int16)[turn % 4]
        x = memory.view(dtype)[: 1 + turn % 3]
        x[...] = group.rank + 1
        op = ("sum", "max")[turn % 2]
        group.all_reduce(x, op)
        assert (x == (group.size if op == "max" else sum(range(1, group.size + 1)))).all(), turn
    x = memory[:8].view(np.float64)
    group.all_reduce(x)
    with pytest.raises(TypeError, match="byte order"):
        group.all_reduce(x.view(x.dtype.newbyteorder()))
    x.flags.writeable = False
    with pytest.raises(ValueError, match="x is read-only"):
        group.all_reduce(x)
    t = torch.zeros(6)
    group.all_reduce(t)
    with pytest.raises(ValueError, match="x is not contiguous"):
        group.all_reduce(t.view(2, 3).t().expand(3, 2))
    with pytest.raises(TypeError, match=r"torch\.sparse_coo tensor; expected a dense one"):
        group.all_reduce(t.to_sparse())
    with pytest.raises(TypeError, match="x is a tensor that NumPy cannot view"):
        group.all_reduce(torch._neg_view(t))


def test_plans_keep_no_array_alive_and_are_limited(group: Communicator) -> None:
    import weakref

    x = np.zeros(3)
    gone = weakref.ref(x)
    group.all_reduce(x)
    del x
    assert gone() is None
    arrays = [np.zeros(1) for _ in range(MAX_PLANS + 10)]
    for array in arrays:
        group.all_reduce(array, algorithm="mpi")
    assert num_plans(group) == MAX_PLANS


def test_what_changes_the_choice_forgets_the_plans(group: Communicator) -> None:
    x = np.zeros(3)
    group.all_reduce(x)
    assert num_plans(group) == 1
    group.use_table(group.table)
    assert num_plans(group) == 0
    group.all_reduce(x)
    memory = group.empty(3, np.float64)
    assert num_plans(group) == 0, "another array may come to lie where this one was"
    group.all_reduce(x)
    kept = 0 if group.num_nodes == 1 else 1
    of_node = group.node.shared(3, np.float64)
    assert num_plans(group) == kept, "also one of the node's, where all ranks are on it"
    group.all_reduce(memory)
    assert num_plans(group) == kept + 1, "node memory has plans, too"
    del of_node
    assert num_plans(group) == (0 if group.num_nodes == 1 else 2), "a private array may come to lie where it was"


def test_private_memory_where_node_memory_was(group: Communicator) -> None:
    """The address is the same on a rank, the memory is not. A plan of the other kind would take another algorithm than the peers do."""
    if group.num_nodes > 1:
        pytest.skip("on several nodes there is no node memory")
    for turn in range(20):
        x = (group.empty(1 << 18, np.uint8) if turn % 2 else np.zeros(1 << 18, np.uint8)).view(np.float32)
        for _ in range(2):
            x[...] = group.rank + 1
            group.all_reduce(x)
            assert (x == sum(range(1, group.size + 1))).all(), turn
        del x


def test_checked_mode_compares_every_call(comm: Communicator) -> None:
    checked = Communicator(comm.mpi.Dup(), checked=True)
    x = np.zeros(3)
    for _ in range(2):
        checked.all_reduce(x)
    assert num_plans(checked) == 0
    if comm.size > 1:
        with pytest.raises(ValueError, match="different collectives"):
            checked.all_reduce(x, "sum" if comm.rank else "max")
    checked.free()
