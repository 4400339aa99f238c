"""Checked mode: an array of an unfinished operation that is given to another one is an error with both call sites."""

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from collectives import Communicator
from collectives.communicator.unfinished import _uses, refuse
from collectives.progress.deferred import Deferred
from collectives.progress.on_thread import Thread

FILE = re.escape(__file__)
LENGTH = 12


@pytest.fixture(params=[Deferred, Thread], ids=["deferred", "thread"])
def checked(comm: Communicator, request: pytest.FixtureRequest) -> Iterator[Communicator]:
    progress = request.param()
    checked = Communicator(comm.mpi.Dup(), progress=progress, checked=True)
    yield checked
    checked.free()
    progress.close()


def refused(second: str, verb: str, first: str, still: str) -> Any:
    """The error of `second`, which writes or reads what `first` still does."""
    words = (
        rf"^{second} at {FILE}:\d+ in \S+ {verb} an array that {first} at {FILE}:\d+ in \S+ still {still}; expected "
    )
    return pytest.raises(ValueError, match=words)


# Each begins an operation on x, of LENGTH elements a rank, and gives its Work. Another array it uses is its own.
WRITING: dict[str, Callable[[Communicator, Any], Any]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x, async_op=True),
    "all_gather": lambda comm, x: comm.all_gather(x, np.ones(LENGTH // comm.size), async_op=True),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x, np.ones(LENGTH * comm.size), async_op=True),
    "all_to_all": lambda comm, x: comm.all_to_all(x, np.ones(LENGTH), async_op=True),
    "scatter": lambda comm, x: comm.scatter(x, np.ones(LENGTH * comm.size) if comm.rank == 0 else None, async_op=True),
    "irecv": lambda comm, x: comm.irecv(x, comm.rank, 7),
}
READING: dict[str, Callable[[Communicator, Any], Any]] = {
    "all_gather": lambda comm, x: comm.all_gather(np.empty(LENGTH * comm.size), x, async_op=True),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(np.empty(LENGTH // comm.size), x, async_op=True),
    "all_to_all": lambda comm, x: comm.all_to_all(np.empty(LENGTH), x, async_op=True),
    "gather": lambda comm, x: comm.gather(np.empty(LENGTH * comm.size) if comm.rank == 0 else None, x, async_op=True),
    "isend": lambda comm, x: comm.isend(x, comm.rank, 7),
}


def end(comm: Communicator, name: str, work: Any) -> None:
    """The other end of a message, and the end of the operation."""
    if name == "irecv":
        comm.isend(np.ones(LENGTH), comm.rank, 7).wait()
    if name == "isend":
        comm.recv(np.empty(LENGTH), comm.rank, 7)
    work.wait()


@pytest.mark.parametrize("name", WRITING)
def test_an_array_that_an_unfinished_operation_writes(checked: Communicator, name: str) -> None:
    x = np.ones(LENGTH)
    work = WRITING[name](checked, x)
    with refused("all_reduce", "writes", name, "writes"):
        checked.all_reduce(x)
    with refused("all_reduce", "writes", name, "writes"):
        checked.all_reduce(x, async_op=True)
    with refused("all_gather", "reads", name, "writes"):
        checked.all_gather(np.empty(LENGTH * checked.size), x)
    with refused("send", "reads", name, "writes"):
        checked.send(x, checked.rank, 8)
    with refused("isend", "reads", name, "writes"):
        checked.isend(x, checked.rank, 8)
    with refused("recv", "writes", name, "writes"):
        checked.recv(x, checked.rank, 8)
    end(checked, name, work)
    checked.all_reduce(x)  # it has ended


@pytest.mark.parametrize("name", READING)
def test_an_array_that_an_unfinished_operation_reads(checked: Communicator, name: str) -> None:
    x = np.ones(LENGTH)
    work = READING[name](checked, x)
    with refused("all_reduce", "writes", name, "reads"):
        checked.all_reduce(x)
    with refused("irecv", "writes", name, "reads"):
        checked.irecv(x, checked.rank, 8)
    both = [READING[name](checked, x) for name in READING if name != "isend"]  # which only read it, too
    for each in both:
        each.wait()
    end(checked, name, work)
    checked.all_reduce(x)


@pytest.mark.parametrize("name", ["broadcast", "reduce"])
def test_what_only_the_root_reads_or_writes(checked: Communicator, name: str) -> None:
    x = np.ones(LENGTH)
    work = getattr(checked, name)(x, async_op=True)
    if (checked.rank == 0) == (name == "reduce"):
        with refused("isend", "reads", name, "writes"):
            checked.isend(x, checked.rank, 8)
    else:
        sent = checked.isend(x, checked.rank, 8)
        checked.recv(np.empty(LENGTH), checked.rank, 8)
        sent.wait()
    with refused("all_reduce", "writes", name, "(reads|writes)"):
        checked.all_reduce(x)
    work.wait()


def test_stretches_of_one_array(checked: Communicator) -> None:
    memory = np.ones(4 * LENGTH)
    work = checked.irecv(memory[LENGTH : 2 * LENGTH], checked.rank, 7)
    for begin, stop in ((0, LENGTH), (2 * LENGTH, 4 * LENGTH), (LENGTH, LENGTH)):
        checked.all_reduce(memory[begin:stop])  # shares no element
    for begin, stop in ((0, LENGTH + 1), (2 * LENGTH - 1, 3 * LENGTH), (LENGTH + 3, LENGTH + 4), (0, 4 * LENGTH)):
        with refused("all_reduce", "writes", "irecv", "writes"):
            checked.all_reduce(memory[begin:stop])
    with refused("all_reduce", "writes", "irecv", "writes"):
        checked.all_reduce(torch.from_numpy(memory).view(4, LENGTH)[1])
    end(checked, "irecv", work)


def test_another_communicator_knows_it_too(checked: Communicator) -> None:
    x = np.ones(LENGTH)
    work = checked.irecv(x, checked.rank, 7)
    with refused("all_reduce", "writes", "irecv", "writes"):
        checked.node.all_reduce(x)
    end(checked, "irecv", work)


def test_a_group(checked: Communicator) -> None:
    """Its operations may share arrays, which it orders, but not with what is unfinished outside."""
    x, y = np.ones(LENGTH), np.ones(LENGTH)
    work = checked.irecv(x, checked.rank, 7)
    for operation in (
        checked.all_reduce,
        lambda x: checked.send(x, checked.rank),
        lambda x: checked.recv(x, checked.rank),
    ):
        with pytest.raises(ValueError, match="still writes"), checked.group():
            operation(x)
    end(checked, "irecv", work)
    with checked.group():
        checked.all_reduce(y)
        checked.send(y, checked.rank)
        checked.recv(y, checked.rank)
        checked.all_reduce(y)


def test_the_end_of_a_work_that_nobody_holds(checked: Communicator) -> None:
    x = np.ones(LENGTH)
    checked.all_reduce(x, async_op=True)
    checked.barrier()  # carries it out where no thread does
    deadline = time.monotonic() + 30
    while _uses and time.monotonic() < deadline:
        time.sleep(0.001)
        refuse("a look", ())
    assert (checked.all_reduce(x) == checked.size**2).all()


def test_the_end_that_done_tells(checked: Communicator) -> None:
    x = np.ones(LENGTH)
    work = checked.all_reduce(x, async_op=True)
    while not work.done():
        pass
    checked.all_reduce(x)
