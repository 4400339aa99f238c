"""Python objects between ranks: one that cannot be pickled or unpickled is one error on all ranks, and the next operation works."""

import marshal
import pickle
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import Communicator

HERE: dict[str, int] = {}
"""`rank`: of this process."""


class Picky:
    """Fails to be unpickled on some ranks; `ranks`: which, None for all."""

    def __init__(self, ranks: list[int] | None) -> None:
        self.ranks = ranks

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["ranks"] is None or HERE["rank"] in state["ranks"]:
            raise ValueError("no room")


class Unwilling:
    def __reduce__(self) -> Any:
        raise LookupError("not this one")


class WordlessError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Unspeakable:
    def __reduce__(self) -> Any:
        raise WordlessError


def deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(100_000):
        made = [made]
    return made


def raised_everywhere(comm: Communicator, kind: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=message) as caught:
        call()
    assert collectives.on_all_ranks(caught.value)
    assert len(set(comm.all_gather_object(str(caught.value)))) == 1
    x = np.full(3, float(comm.rank + 1))
    assert comm.all_reduce(x)[0] == comm.size * (comm.size + 1) / 2


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (threading.Lock, TypeError, "cannot be pickled: cannot pickle '_thread.lock' object"),
        (Unwilling, LookupError, "cannot be pickled: .*not this one"),
        (lambda: lambda: 0, Exception, "cannot be pickled: "),
        (deep, RecursionError, "cannot be pickled: "),
    ],
)
def test_an_object_that_cannot_be_pickled(
    comm: Communicator, make: Callable[[], Any], kind: type[Exception], message: str
) -> None:
    last = comm.size - 1
    mine = make() if comm.rank == last else "text"
    which = rf" \[rank {last} of {comm.size}\]" if comm.size > 1 else ""
    raised_everywhere(
        comm, kind, f"^all_gather_object: the object {message}.*{which}$", lambda: comm.all_gather_object(mine)
    )
    raised_everywhere(comm, kind, f"^broadcast_object: the object {message}", lambda: comm.broadcast_object(mine, last))
    raised_everywhere(comm, kind, "cannot be pickled", lambda: comm.all_gather_object(make()))
    if comm.size > 1:  # only the root's object is sent
        assert comm.broadcast_object(mine, 0) == "text"


def test_an_error_without_a_text(comm: Communicator) -> None:
    message = r"^WordlessError: {}an error without a text, whose __str__ raises ValueError"
    pickled = message.format("all_gather_object: the object cannot be pickled: ")
    raised_everywhere(comm, RuntimeError, pickled, lambda: comm.all_gather_object(Unspeakable()))

    def fail() -> None:
        with comm.together("reading"):
            if comm.rank == 0:
                raise WordlessError

    raised_everywhere(comm, RuntimeError, message.format("reading: "), fail)


def test_an_object_that_cannot_be_unpickled(comm: Communicator) -> None:
    HERE["rank"] = comm.rank
    last = comm.size - 1
    for ranks in (None, [0], [last]):
        mine = Picky(ranks) if comm.rank == last else ("text", np.float32(1))
        message = f"the object of rank {last} cannot be unpickled: no room"
        raised_everywhere(
            comm, ValueError, f"^all_gather_object: {message}", lambda mine=mine: comm.all_gather_object(mine)
        )
        raised_everywhere(
            comm, ValueError, f"^broadcast_object: {message}", lambda mine=mine: comm.broadcast_object(mine, last)
        )
    assert len(comm.all_gather_object(Picky([-1]))) == comm.size


def test_objects_arrive_as_copies(comm: Communicator) -> None:
    mine = {"rank": comm.rank, "list": [1, (2, None)], "array": np.arange(3), "kind": int, "error": ValueError("x")}
    gathered = comm.all_gather_object(mine)
    assert [each["rank"] for each in gathered] == list(range(comm.size))
    assert gathered[comm.rank]["list"] == mine["list"] and gathered[comm.rank]["list"] is not mine["list"]
    assert all(each["kind"] is int and each["array"].tolist() == [0, 1, 2] for each in gathered)
    assert comm.broadcast_object({"from": comm.rank}, comm.size - 1) == {"from": comm.size - 1}
    assert comm.all_gather_object(None) == [None] * comm.size


def test_the_functions_that_the_program_has_given_mpi4py(comm: Communicator) -> None:
    """As cloudpickle's, they may send what pickle cannot, and fail on one rank."""

    def dumps(obj: Any, protocol: int | None = None) -> bytes:
        is_function = isinstance(obj, types.LambdaType)
        return pickle.dumps((is_function, marshal.dumps(obj.__code__) if is_function else obj), protocol)

    def loads(data: bytes) -> Any:
        is_function, what = pickle.loads(data)
        if what == f"not on {comm.rank}":
            raise ValueError("no room")
        return types.FunctionType(marshal.loads(what), {}) if is_function else what

    last = comm.size - 1
    MPI.pickle.__init__(dumps, loads)
    try:
        added = comm.rank + 1
        assert comm.broadcast_object((lambda x: x + 1) if comm.rank == last else None, last)(1) == 2
        assert [each(1) for each in comm.all_gather_object(lambda x: x + 1)] == [2] * comm.size
        assert comm.all_gather_object(added) == list(range(1, comm.size + 1))
        raised_everywhere(comm, ValueError, "no room", lambda: comm.broadcast_object(f"not on {last}", 0))
    finally:
        MPI.pickle.__init__()
    raised_everywhere(comm, Exception, "cannot be pickled", lambda: comm.broadcast_object(lambda x: x, last))
