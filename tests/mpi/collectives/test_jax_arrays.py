"""The Communicator's operations on JAX arrays: a new array comes back, what was passed stays as it was, and nothing is pickled."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from collectives import Communicator, Work
from collectives.arrays.dtypes import TABLE, DType

jax = pytest.importorskip("jax", reason="JAX is not installed (pip install 'mpitrain[jax]')")
import jax.numpy as jnp  # noqa: E402

SIZES = (0, 1, 1031)


@pytest.fixture(autouse=True)
def no_pickling(comm: Communicator) -> Iterator[None]:
    """Whatever goes through pickle, which no data may, fails."""
    from mpi4py import MPI

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("pickled on a data path")

    # The progress thread's communicator and the memory between ranks are made at the first use, with a few control messages.
    for algorithm in comm.algorithms("all_reduce"):
        comm.all_reduce(np.zeros(1), algorithm=algorithm)
        comm.all_reduce(np.zeros(1), algorithm=algorithm, async_op=True).wait()
    MPI.pickle.__init__(refuse, refuse)
    try:
        with pytest.raises(AssertionError):
            MPI.COMM_SELF.bcast(1)
        yield
    finally:
        MPI.pickle.__init__()


def values(row: DType, size: int, rank: int) -> np.ndarray:
    i = np.arange(size)
    return ((i + rank) % 3 == 0) if row.name == "bool" else ((i * (rank + 1)) % 5 + rank + 1).astype(row.numpy)


def rows() -> Iterator[DType]:
    """All dtypes, those of 64 bits with JAX's switch for them on, the others with and without."""
    for wide in (False, True):
        with jax.enable_x64(wide):
            yield from (row for row in TABLE.values() if wide or row.itemsize < 8)


def reduced(row: DType, parts: list[np.ndarray], op: str) -> np.ndarray:
    wide = np.stack(parts).astype(np.float64)
    total = {"sum": wide.max(0) if row.name == "bool" else wide.sum(0), "max": wide.max(0), "min": wide.min(0)}[op]
    return total.astype(row.numpy)


def check(result: Any, expected: np.ndarray, case: Any) -> None:
    """`result` is a JAX array of exactly these elements."""
    assert isinstance(result, jax.Array), case
    assert result.dtype == expected.dtype and result.shape == expected.shape, case
    assert np.asarray(result).tobytes() == expected.tobytes(), case


@pytest.mark.rest
@pytest.mark.ranks(1, 2)
def test_reductions(comm: Communicator) -> None:
    n, rank = comm.size, comm.rank
    for row in rows():
        for size in SIZES:
            parts = [values(row, size * n, r) for r in range(n)]
            x, out = jnp.asarray(parts[rank]), jax.ShapeDtypeStruct((size,), row.numpy)
            for op in ("sum", "max", "min"):
                total, case = reduced(row, parts, op), (row.name, size, op)
                check(comm.all_reduce(x, op), total, case)
                check(comm.reduce_scatter(out, x, op), total[rank * size :][:size], case)
                at_root = comm.reduce(x, n - 1, op)
                check(at_root, total if rank == n - 1 else parts[rank], case)
                assert at_root is x or rank == n - 1
                check(x, parts[rank], "x is left as it was")
    average = comm.all_reduce(jnp.full((2, 3), rank, jnp.bfloat16), "avg")
    check(average, np.full((2, 3), (n - 1) / 2).astype(average.dtype), "avg, and the shape is kept")


@pytest.mark.rest
@pytest.mark.ranks(1, 2)
def test_moves(comm: Communicator) -> None:
    n, rank = comm.size, comm.rank
    for row in rows():
        for size in SIZES:
            parts = [values(row, size, r) for r in range(n)]
            x, whole, case = jnp.asarray(parts[rank]), np.concatenate(parts), (row.name, size)
            out = jax.ShapeDtypeStruct((size * n,), row.numpy)  # a description will do where a result goes
            check(comm.all_gather(out, x), whole, case)
            check(comm.broadcast(x, n - 1), parts[n - 1], case)
            gathered = comm.gather(out if rank == 0 else None, x)
            assert gathered is None if rank else check(gathered, whole, case) is None
            check(comm.scatter(x, jnp.asarray(whole) if rank == 0 else None), parts[rank], case)
            check(comm.all_to_all(out, jnp.asarray(np.tile(parts[rank], n))), whole, case)
            check(x, parts[rank], "x is left as it was")
            if n > 1 and rank == 0:
                comm.send(x, 1)
            elif rank == 1:
                check(comm.recv(x, 0), parts[0], case)


def test_uneven_and_every_algorithm(comm: Communicator) -> None:
    n, rank = comm.size, comm.rank
    counts = [2 * r + 1 for r in range(n)]
    mine = jnp.full(counts[rank], rank, jnp.float32)
    whole = np.repeat(np.arange(n), counts).astype(np.float32)
    template = jnp.zeros(len(whole))
    for algorithm in ("mpi", "ring"):
        check(comm.all_gather(template, mine, counts=counts, algorithm=algorithm), whole, algorithm)
        part = comm.reduce_scatter(mine, jnp.asarray(whole), counts=counts, algorithm=algorithm)
        check(part, np.full(counts[rank], rank * n, np.float32), algorithm)
        check(comm.all_reduce(jnp.asarray(whole), algorithm=algorithm), whole * n, algorithm)


def test_async_op_gives_the_new_array_at_wait(comm: Communicator) -> None:
    x = jnp.arange(5.0)
    work = comm.all_reduce(x, async_op=True)
    assert isinstance(work, Work)
    total = work.wait()
    check(total, np.arange(5, dtype=np.float32) * comm.size, "async")
    assert work.wait() is total
    gathered = comm.all_gather(jax.ShapeDtypeStruct((comm.size, 5), x.dtype), x, async_op=True).wait()
    check(gathered, np.tile(np.arange(5, dtype=np.float32), (comm.size, 1)), "async")


def test_libraries_mix(comm: Communicator) -> None:
    out = np.empty(3 * comm.size, np.float32)
    assert comm.all_gather(out, jnp.ones(3) * comm.rank) is out
    check(comm.all_gather(jnp.zeros(3 * comm.size), out[:3] * 0 + comm.rank), out, "NumPy in, JAX out")


def test_no_place_for_a_new_array_in_a_group(comm: Communicator) -> None:
    x, out = jnp.ones(3), np.zeros(3 * comm.size, np.float32)
    with comm.group():
        for operation, call in {
            "all_reduce": lambda: comm.all_reduce(x),
            "broadcast": lambda: comm.broadcast(x),
            "all_gather": lambda: comm.all_gather(jax.ShapeDtypeStruct((3 * comm.size,), x.dtype), x),
            "recv": lambda: comm.recv(x, 0),
        }.items():
            with pytest.raises(ValueError, match=f"group: {operation} of a JAX array returns a new array; call"):
                call()
        comm.all_gather(out, x)  # only read
    assert out.tolist() == [1] * 3 * comm.size


def test_what_is_only_moved(comm: Communicator) -> None:
    for dtype in ("complex64", "float8_e4m3fn"):
        x = jnp.full(3, comm.rank, dtype)
        out = comm.all_gather(jax.ShapeDtypeStruct((comm.size, 3), x.dtype), x)
        assert isinstance(out, jax.Array) and out.dtype == x.dtype
        assert out.astype(np.complex64).real.tolist() == [[rank] * 3 for rank in range(comm.size)]
        with pytest.raises(TypeError, match=f"{dtype} is only moved, never reduced"):
            comm.all_reduce(x)
