"""The contract of the collectives: every operation, by every algorithm, on every dtype of both libraries and all kinds of sizes.

Inputs are small integers given by a formula of element and rank, so that expected values are exact in every dtype, bf16 too.
Cases run in loops: starting a test costs the ranks more than a collective does.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from collectives import Communicator, selection
from collectives.arrays import as_numpy
from collectives.dtypes import TABLE, DType
from collectives.reduction import BLOCK
from collectives.selection import ALGORITHMS

FLOATS = ("float64", "float32", "float16", "bfloat16")
LARGE = 1031  # a prime


def sizes(n: int) -> list[int]:
    return sorted({0, 1, n - 1, n, n + 1, 7, LARGE})


def inputs(op: str, row: DType, size: int, rank: int) -> np.ndarray:
    """What `rank` contributes: element i by a formula of i and rank."""
    i = np.arange(size)
    if row.name == "bool":
        return (i + rank) % 3 > 0 if op in ("prod", "min") else (i + rank) % 5 == 0
    if op == "prod":
        return (1 + (i + rank) % 2).astype(row.numpy)
    return ((i * (rank + 1)) % 5 + rank + 1).astype(row.numpy)


def reduced(op: str, row: DType, size: int, n: int) -> np.ndarray:
    """The reduction of all ranks' `inputs`, in fp64, where each partial result is exact."""
    parts = np.stack([inputs(op, row, size, rank).astype(np.float64) for rank in range(n)])
    match op:
        case "sum":
            total = parts.max(0) if row.name == "bool" else parts.sum(0)
        case "avg":
            # One division in the type that the reduction adds in, and one rounding.
            return (parts.sum(0).astype(row.accumulate) / row.accumulate.type(n)).astype(row.numpy)
        case "prod":
            total = parts.prod(0)
        case "max":
            total = parts.max(0)
        case "min":
            total = parts.min(0)
    return total.astype(row.numpy)


class Maker:
    """Makes arrays of one dtype and library, in private memory or, for the algorithm "shared", in the node's."""

    def __init__(self, comm: Communicator, row: DType, library: str, *, length: int = 0, kind: str = "") -> None:
        self.row = row
        self.dtype = getattr(torch, row.name) if library == "torch" else row.numpy
        self.make: Callable[[int], Any]
        if kind:  # one array for all cases, of which each takes the beginning
            memory = getattr(comm, kind)(length, self.dtype)
            self.make = lambda size: memory[:size]
        elif library == "torch":
            self.make = lambda size: torch.empty(size, dtype=self.dtype)
        else:
            self.make = lambda size: np.empty(size, self.dtype)

    def __call__(self, values: np.ndarray | int) -> Any:
        """An array of these values, or of this size and without meaning."""
        if isinstance(values, int):
            x = self.make(values)
            if values:
                as_numpy(x).reshape(-1).view(np.uint8)[...] = 0x3B % (2 if self.row.name == "bool" else 256)
            return x
        x = self.make(len(values))
        as_numpy(x)[...] = values
        return x


def makers(comm: Communicator) -> Iterator[tuple[DType, Callable[..., Maker]]]:
    """Each dtype of each library."""
    for row in TABLE.values():
        for library in ("numpy", "torch"):
            yield row, lambda row=row, library=library, **options: Maker(comm, row, library, **options)


def same(x: Any, expected: np.ndarray) -> bool:
    view = as_numpy(x)
    return view.dtype == expected.dtype and view.shape == expected.shape and view.tobytes() == expected.tobytes()


def algorithms(operation: str) -> tuple[str, ...]:
    return ("auto", *ALGORITHMS[operation])


def needs_node(comm: Communicator, algorithm: str) -> bool:
    if algorithm != "shared":
        return False
    assert comm.num_nodes == 1, "these tests run on one node"
    return True


@pytest.mark.parametrize("algorithm", algorithms("all_reduce"))
def test_all_reduce(comm: Communicator, algorithm: str) -> None:
    kind = "empty" if needs_node(comm, algorithm) else ""
    for row, maker in makers(comm):
        make = maker(length=LARGE, kind=kind)
        for op in sorted(row.ops):
            for size in sizes(comm.size):
                x = make(inputs(op, row, size, comm.rank))
                assert comm.all_reduce(x, op, algorithm=algorithm) is x
                assert same(x, reduced(op, row, size, comm.size)), (row.name, op, size)


@pytest.mark.parametrize("algorithm", algorithms("reduce_scatter"))
def test_reduce_scatter(comm: Communicator, algorithm: str) -> None:
    kind = "empty" if needs_node(comm, algorithm) else ""
    for row, maker in makers(comm):
        plain, make = maker(), maker(length=LARGE * comm.size, kind=kind)
        for op in sorted(row.ops):
            for size in sizes(comm.size):
                x, out = make(inputs(op, row, size * comm.size, comm.rank)), plain(size)
                assert comm.reduce_scatter(out, x, op, algorithm=algorithm) is out
                expected = reduced(op, row, size * comm.size, comm.size)
                assert same(out, expected[comm.rank * size :][:size]), (row.name, op, size)
                assert same(x, inputs(op, row, size * comm.size, comm.rank)), "x is left as it was"


@pytest.mark.parametrize("algorithm", algorithms("all_gather"))
def test_all_gather(comm: Communicator, algorithm: str) -> None:
    kind = "shared" if needs_node(comm, algorithm) else ""
    for row, maker in makers(comm):
        plain, make = maker(), maker(length=LARGE * comm.size, kind=kind)
        for size in sizes(comm.size):
            parts = [inputs("sum", row, size, rank) for rank in range(comm.size)]
            for in_place in (False, True):
                comm.barrier()  # `out` may be one array for all
                out = make(size * comm.size)
                comm.barrier()
                x = out[comm.rank * size :][:size] if in_place else plain(size)
                as_numpy(x)[...] = parts[comm.rank]
                assert comm.all_gather(out, x, algorithm=algorithm) is out
                assert same(out, np.concatenate(parts)), (row.name, size, in_place)


def uneven(n: int) -> list[list[int]]:
    """Elements of each rank: a rising number, one rank without any, one rank with all, none at all."""
    return [
        list(range(1, n + 1)),
        [0 if rank == n // 2 else 3 + rank for rank in range(n)],
        [LARGE if rank == n - 1 else 0 for rank in range(n)],
        [0] * n,
    ]


def test_uneven_counts(comm: Communicator) -> None:
    for counts in uneven(comm.size):
        mine = slice(sum(counts[: comm.rank]), sum(counts[: comm.rank + 1]))
        for row, maker in makers(comm):
            for algorithm in algorithms("all_gather"):
                kind = "shared" if needs_node(comm, algorithm) else ""
                whole = inputs("sum", row, sum(counts), 0)
                out = maker(length=sum(counts), kind=kind)(sum(counts))
                comm.barrier()
                comm.all_gather(out, maker()(whole[mine]), counts=counts, algorithm=algorithm)
                assert same(out, whole), (counts, row.name, algorithm)
            for algorithm in algorithms("reduce_scatter"):
                kind = "empty" if needs_node(comm, algorithm) else ""
                x = maker(length=sum(counts), kind=kind)(inputs("sum", row, sum(counts), comm.rank))
                out = maker()(counts[comm.rank])
                comm.reduce_scatter(out, x, counts=counts, algorithm=algorithm)
                assert same(out, reduced("sum", row, sum(counts), comm.size)[mine]), (counts, row.name, algorithm)


def test_reduce_scatter_into_its_own_place(comm: Communicator) -> None:
    for algorithm in algorithms("reduce_scatter"):
        for row in (TABLE["float32"], TABLE["bfloat16"], TABLE["int8"]):
            kind = "empty" if needs_node(comm, algorithm) else ""
            x = Maker(comm, row, "torch", length=5 * comm.size, kind=kind)(inputs("sum", row, 5 * comm.size, comm.rank))
            out = x[5 * comm.rank :][:5]
            comm.reduce_scatter(out, x, algorithm=algorithm)
            assert same(out, reduced("sum", row, 5 * comm.size, comm.size)[5 * comm.rank :][:5]), algorithm


def test_broadcast_and_reduce_for_every_root(comm: Communicator) -> None:
    for row, maker in makers(comm):
        make = maker()
        for root in range(comm.size):
            for size in (0, 1, 7, LARGE):
                for algorithm in algorithms("broadcast"):
                    x = make(inputs("sum", row, size, comm.rank))
                    assert comm.broadcast(x, root, algorithm=algorithm) is x
                    assert same(x, inputs("sum", row, size, root)), (row.name, root, size, algorithm)
                for algorithm in algorithms("reduce"):
                    for op in sorted(row.ops) if size == 7 else ["sum"]:
                        x = make(inputs(op, row, size, comm.rank))
                        assert comm.reduce(x, root, op, algorithm=algorithm) is x
                        at_root = comm.rank == root
                        expected = reduced(op, row, size, comm.size) if at_root else inputs(op, row, size, comm.rank)
                        assert same(x, expected), (row.name, root, size, algorithm, op)


def test_gather_scatter_and_all_to_all(comm: Communicator) -> None:
    n, rank = comm.size, comm.rank
    for row, maker in makers(comm):
        make = maker()
        for size in sizes(n):
            for root in range(n):
                whole = inputs("sum", row, size * n, root)
                mine = whole[size * rank :][:size]
                for in_place in (False, True):
                    at_root = make(size * n) if rank == root else None
                    x = at_root[size * rank :][:size] if in_place and at_root is not None else make(size)
                    as_numpy(x)[...] = mine
                    assert comm.gather(at_root, x, root) is at_root
                    assert at_root is None or same(at_root, whole), (row.name, size, root)

                    at_root = make(whole) if rank == root else None
                    out = at_root[size * rank :][:size] if in_place and at_root is not None else make(size)
                    assert comm.scatter(out, at_root, root) is out
                    assert same(out, mine), (row.name, size, root)
            # part p of rank r's array goes to part r of rank p's
            whole = inputs("sum", row, size * n * n, 0).reshape(n, n, size)
            out = make(size * n)
            assert comm.all_to_all(out, make(whole[rank].reshape(-1))) is out
            assert same(out, whole[:, rank].reshape(-1)), (row.name, size)


def test_arrays_of_any_shape_keep_it(comm: Communicator) -> None:
    for make in (np.zeros, torch.zeros):
        for shape in ((), (2, 3), (2, 0, 3)):
            x = make(shape)
            x += comm.rank
            comm.all_reduce(x)
            assert tuple(x.shape) == shape
            assert (x == sum(range(comm.size))).all()
        out, part = make((comm.size, 2, 3)), make((2, 3))
        part += comm.rank
        comm.all_gather(out, part)
        assert [float(out[rank].sum()) for rank in range(comm.size)] == [6.0 * rank for rank in range(comm.size)]


def random_data(row: DType, size: int, rank: int) -> np.ndarray:
    return np.random.default_rng([rank, size]).standard_normal(size).astype(row.numpy)


def test_random_data_is_reduced_to_the_same_bits_on_all_ranks_and_every_time(comm: Communicator) -> None:
    for row in (TABLE[name] for name in FLOATS):
        for size in (LARGE, 2 * BLOCK + 77):
            parts = [random_data(row, size, rank) for rank in range(comm.size)]
            in_order = parts[0].astype(row.accumulate)
            for part in parts[1:]:
                in_order = in_order + part.astype(row.accumulate)
            exact = np.sum([part.astype(np.float64) for part in parts], axis=0)
            scale = np.sum([np.abs(part.astype(np.float64)) for part in parts], axis=0)
            # Each of N - 1 additions rounds once by half a step of its result; so does the reference, for float64.
            step = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[row.name]
            for algorithm in algorithms("all_reduce"):
                make = Maker(comm, row, "torch", length=size, kind="empty" if needs_node(comm, algorithm) else "")
                results = []
                for _ in range(2):
                    x = make(parts[comm.rank])
                    comm.all_reduce(x, algorithm=algorithm)
                    results.append(as_numpy(x).copy())
                digests = [hashlib.sha256(result.tobytes()).hexdigest() for result in results]
                everyone = {digest for each in comm.all_gather_object(digests) for digest in each}
                assert len(everyone) == 1, (row.name, size, algorithm)
                error = np.abs(results[0].astype(np.float64) - exact)
                assert (error <= 2 * step * scale * comm.size).all(), (row.name, size, algorithm)
                if algorithm == "shared":  # in order of rank, rounded once
                    assert same(results[0], in_order.astype(row.numpy)), (row.name, size)


def test_asynchronous_calls_end_in_the_same_results(comm: Communicator) -> None:
    n, rank = comm.size, comm.rank
    for row in (TABLE["float32"], TABLE["bfloat16"], TABLE["bool"]):
        for library in ("numpy", "torch"):
            plain = Maker(comm, row, library)
            for algorithm in algorithms("all_reduce"):
                kind = "empty" if needs_node(comm, algorithm) else ""
                make = Maker(comm, row, library, length=LARGE * n, kind=kind)
                x = make(inputs("max", row, LARGE, rank))
                work = comm.all_reduce(x, "max", algorithm=algorithm, async_op=True)
                assert work.wait() is x
                assert work.done()
                assert work.wait() is x, "waiting twice is no error"
                assert same(x, reduced("max", row, LARGE, n)), (row.name, algorithm)
                if algorithm in ALGORITHMS["reduce_scatter"]:
                    out, x = plain(LARGE), make(inputs("sum", row, LARGE * n, rank))
                    assert comm.reduce_scatter(out, x, algorithm=algorithm, async_op=True).wait() is out
                    assert same(out, reduced("sum", row, LARGE * n, n)[LARGE * rank :][:LARGE]), algorithm
            # Several in flight at once, ended in another order than begun.
            whole = [inputs("sum", row, 6, r) for r in range(n)]
            a, b, c = plain(whole[rank]), plain(6 * n), plain(whole[rank])
            d, e, f = plain(6 * n) if rank == 0 else None, plain(6), plain(6 * n)
            works = [
                comm.broadcast(a, n - 1, async_op=True),
                comm.all_gather(b, whole[rank], async_op=True),
                comm.reduce(c, 0, "max", async_op=True),
                comm.gather(d, whole[rank], async_op=True),
                comm.scatter(e, np.concatenate(whole) if rank == 0 else None, async_op=True),
                comm.all_to_all(f, np.concatenate(whole), async_op=True),
            ]
            for work in reversed(works):
                while not work.done():
                    pass
                work.wait()
            assert same(a, whole[n - 1])
            assert same(b, np.concatenate(whole))
            assert same(c, reduced("max", row, 6, n) if rank == 0 else whole[rank])
            assert d is None or same(d, np.concatenate(whole))
            assert same(e, whole[rank])
            assert same(f, np.concatenate([whole[rank]] * n))


def test_a_work_that_nobody_holds_keeps_its_arrays(comm: Communicator) -> None:
    x = np.full(1 << 16, comm.rank + 1.0)
    comm.all_reduce(np.full(1 << 16, 1.0), async_op=True)  # dropped at once, and its array with it
    works = [comm.all_reduce(x, async_op=True)]
    garbage = [np.full(1 << 16, -1.0) for _ in range(4)]
    works[0].wait()
    comm.barrier()
    assert (x == sum(range(1, comm.size + 1))).all()
    assert all((array == -1.0).all() for array in garbage)


def test_halves_overflow_to_infinity_without_a_warning(comm: Communicator) -> None:
    for algorithm in ("mpi", "ring", "tree"):
        x = np.full(3, 60000, np.float16)
        comm.all_reduce(x, algorithm=algorithm)
        assert np.isinf(x).all() == (comm.size > 1)


def test_messages_of_more_elements_than_mpi_can_count(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if MPI could count to 100, in rows of 8: the same path as beyond 2**31 elements, without the memory."""
    from collectives.transports import mpi

    monkeypatch.setattr(selection, "MAX_COUNT", 100)
    monkeypatch.setattr(mpi, "_ROW", 8)
    mpi._block.cache_clear()
    n, rank = comm.size, comm.rank
    for row, maker in makers(comm):
        make = maker()
        for size in (100, 101, 104, LARGE):
            mine = inputs("sum", row, size, rank)
            whole = np.concatenate([inputs("sum", row, size, r) for r in range(n)])
            for algorithm in ("auto", "ring", "tree"):
                x = comm.all_reduce(make(mine), algorithm=algorithm)
                assert same(x, reduced("sum", row, size, n)), (row.name, size, algorithm)
            assert same(comm.all_gather(make(size * n), make(mine)), whole)
            assert same(comm.broadcast(make(mine), n - 1), inputs("sum", row, size, n - 1))
            gathered = comm.gather(make(size * n) if rank == 0 else None, make(mine))
            assert gathered is None or same(gathered, whole)
            assert same(comm.scatter(make(size), make(whole) if rank == 0 else None), whole[rank * size :][:size])
            assert same(comm.all_to_all(make(size * n), make(np.tile(mine, n))), whole)
            if n > 1 and rank < 2:
                if rank == 0:
                    comm.send(make(mine), 1)
                else:
                    assert same(comm.recv(make(size), 0), inputs("sum", row, size, 0))
    mpi._block.cache_clear()
