"""The contract of the collectives: every operation, by every algorithm, on every dtype of both libraries and all kinds of sizes.

Inputs are small integers given by a formula of element and rank, so that expected values are exact in every dtype, bf16 too.
Cases run in loops: starting a test costs the ranks more than a collective does.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from closed_forms import inputs, reduced
from extent import FULL

from collectives import Communicator
from collectives.arrays.buffer import as_numpy
from collectives.arrays.dtypes import MOVED, TABLE, DType
from collectives.arrays.reduction import BLOCK_BYTES
from collectives.selection import selector
from collectives.transports.node import meeting

FLOATS = ("float64", "float32", "float16", "bfloat16")
LARGE = 1031  # a prime


def sizes(n: int) -> list[int]:
    return sorted({0, 1, n - 1, n, n + 1, 7, LARGE})


def ops_and_sizes(row: DType, n: int) -> list[tuple[str, int]]:
    """Sums of every size, and every other operation on some elements for each rank and one more."""
    return [*(("sum", size) for size in sizes(n)), *((op, n + 1) for op in sorted(row.ops - {"sum"}))]


class Maker:
    """Makes arrays of one dtype and library, in private memory or, for the algorithm "shared", in the node's."""

    def __init__(self, comm: Communicator, row: DType, library: str, *, length: int = 0, kind: str = "") -> None:
        self.row = row
        self.dtype = getattr(torch, row.name) if library == "torch" else row.numpy
        self.make: Callable[[int], Any]
        if kind == "mixed":
            memory = comm.empty(length, self.dtype)
            kind = "empty" if comm.rank % 2 else ""
        elif kind:
            memory = getattr(comm, kind)(length, self.dtype)
        if kind:  # one array for all cases, of which each takes the beginning
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
    """Each dtype of both libraries on two ranks and in a full run. Else every second one, of one library; one rank more: the rest."""
    for index, row in enumerate(TABLE.values()):
        for number, library in enumerate(("numpy", "torch")):
            if FULL or comm.size == 2 or ((index + comm.size) % 2 and (index // 2 + number) % 2):
                yield row, lambda row=row, library=library, **options: Maker(comm, row, library, **options)


def sizes_and_roots(group: Communicator, sizes: list[int], turn: int) -> list[tuple[int, int]]:
    """Each size with each root on two ranks and in a full run; else one of N of them, others at each `turn`."""
    places = itertools.product(enumerate(sizes), range(group.size))
    return [
        (size, root) for (i, size), root in places if FULL or group.size == 2 or (turn + i + root) % group.size == 0
    ]


def same(x: Any, expected: np.ndarray) -> bool:
    view = as_numpy(x)
    return view.dtype == expected.dtype and view.shape == expected.shape and view.tobytes() == expected.tobytes()


@pytest.fixture(scope="module", params=["as it is", "two nodes", "stores in any order, no peer reads"])
def group(request: pytest.FixtureRequest, comm: Communicator) -> Communicator:
    """All ranks, by other ways to each other: as they are here, on two nodes, as where stores are reordered and peers not readable."""
    if request.param == "two nodes":
        if comm.num_nodes > 1:
            pytest.skip("the ranks are on several nodes in truth")
        return request.getfixturevalue("two_nodes")
    if request.param == "stores in any order, no peer reads":
        if comm.size > 3:
            pytest.skip("slow, and three ranks show as much")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(meeting, "IN_ORDER", False)
            patch.setenv("MPITRAIN_PEER_READS", "0")
            return Communicator(comm.mpi.Dup())
    return comm


def algorithms(group: Communicator, operation: str) -> tuple[str, ...]:
    return ("auto", *group.algorithms(operation))


def kinds(group: Communicator, algorithm: str, kind: str) -> tuple[str, ...]:
    """Where arrays lie: private memory, and the node's where an algorithm cares; "mixed": half of the ranks' in either."""
    if group.num_nodes > 1 or algorithm not in ("auto", "shared", "staged"):
        return ("",)
    return ("", kind) if algorithm == "auto" else ("", kind, "mixed")  # "auto" goes by it: all ranks need the same


@pytest.mark.rest
def test_all_reduce(group: Communicator) -> None:
    for algorithm in algorithms(group, "all_reduce"):
        for kind in kinds(group, algorithm, "empty"):
            for row, maker in makers(group):
                make = maker(length=LARGE, kind=kind)
                for op, size in ops_and_sizes(row, group.size):
                    x = make(inputs(op, row, size, group.rank))
                    assert group.all_reduce(x, op, algorithm=algorithm) is x
                    assert same(x, reduced(op, row, size, group.size)), (row.name, op, size, algorithm, kind)


@pytest.mark.rest
def test_reduce_scatter(group: Communicator) -> None:
    n, rank = group.size, group.rank
    for algorithm in algorithms(group, "reduce_scatter"):
        for kind in kinds(group, algorithm, "empty"):
            for row, maker in makers(group):
                plain, make = maker(), maker(length=LARGE * n, kind=kind)
                for op, size in ops_and_sizes(row, n):
                    x, out = make(inputs(op, row, size * n, rank)), plain(size)
                    assert group.reduce_scatter(out, x, op, algorithm=algorithm) is out
                    expected = reduced(op, row, size * n, n)[rank * size :][:size]
                    assert same(out, expected), (row.name, op, size, algorithm, kind)
                    assert same(x, inputs(op, row, size * n, rank)), "x is left as it was"


@pytest.mark.rest
def test_all_gather(group: Communicator) -> None:
    for algorithm in algorithms(group, "all_gather"):
        for kind in kinds(group, algorithm, "shared")[:2]:
            for row, maker in makers(group):
                plain, make = maker(), maker(length=LARGE * group.size, kind=kind)
                for size in sizes(group.size):
                    parts = [inputs("sum", row, size, rank) for rank in range(group.size)]
                    for in_place in (False, True):
                        group.barrier()  # `out` may be one array for all
                        out = make(size * group.size)
                        group.barrier()
                        x = out[group.rank * size :][:size] if in_place else plain(size)
                        as_numpy(x)[...] = parts[group.rank]
                        assert group.all_gather(out, x, algorithm=algorithm) is out
                        assert same(out, np.concatenate(parts)), (row.name, size, in_place, algorithm, kind)


def uneven(n: int) -> list[list[int]]:
    """Elements of each rank: a rising number, one rank without any, one rank with all, none at all."""
    return [
        list(range(1, n + 1)),
        [0 if rank == n // 2 else 3 + rank for rank in range(n)],
        [LARGE if rank == n - 1 else 0 for rank in range(n)],
        [0] * n,
    ]


@pytest.mark.rest
def test_uneven_counts(group: Communicator) -> None:
    n, rank = group.size, group.rank
    for counts in uneven(n):
        mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        for row, maker in makers(group):
            for algorithm in algorithms(group, "all_gather"):
                for kind in kinds(group, algorithm, "shared")[:2]:
                    whole = inputs("sum", row, sum(counts), 0)
                    out = maker(length=sum(counts), kind=kind)(sum(counts))
                    group.barrier()
                    group.all_gather(out, maker()(whole[mine]), counts=counts, algorithm=algorithm)
                    assert same(out, whole), (counts, row.name, algorithm, kind)
            for algorithm in algorithms(group, "reduce_scatter"):
                for kind in kinds(group, algorithm, "empty"):
                    x = maker(length=sum(counts), kind=kind)(inputs("sum", row, sum(counts), rank))
                    out = maker()(counts[rank])
                    group.reduce_scatter(out, x, counts=counts, algorithm=algorithm)
                    assert same(out, reduced("sum", row, sum(counts), n)[mine]), (counts, row.name, algorithm, kind)


def test_reduce_scatter_into_its_own_place(group: Communicator) -> None:
    n, rank = group.size, group.rank
    for algorithm in algorithms(group, "reduce_scatter"):
        for kind in kinds(group, algorithm, "empty"):
            for row in (TABLE["float32"], TABLE["bfloat16"], TABLE["int8"]):
                x = Maker(group, row, "torch", length=5 * n, kind=kind)(inputs("sum", row, 5 * n, rank))
                out = x[5 * rank :][:5]
                group.reduce_scatter(out, x, algorithm=algorithm)
                assert same(out, reduced("sum", row, 5 * n, n)[5 * rank :][:5]), (algorithm, kind)


@pytest.mark.rest
def test_broadcast_and_reduce_for_every_root(group: Communicator) -> None:
    n, rank = group.size, group.rank
    for turn, (row, maker) in enumerate(makers(group)):
        make = maker()
        for size, root in sizes_and_roots(group, [0, 1, 7, LARGE], turn):
            for algorithm in algorithms(group, "broadcast"):
                x = make(inputs("sum", row, size, rank))
                assert group.broadcast(x, root, algorithm=algorithm) is x
                assert same(x, inputs("sum", row, size, root)), (row.name, root, size, algorithm)
            for algorithm in algorithms(group, "reduce"):
                for op in sorted(row.ops) if size == 7 else ["sum"]:
                    x = make(inputs(op, row, size, rank))
                    assert group.reduce(x, root, op, algorithm=algorithm) is x
                    expected = reduced(op, row, size, n) if rank == root else inputs(op, row, size, rank)
                    assert same(x, expected), (row.name, root, size, algorithm, op)


@pytest.mark.rest
def test_gather_and_scatter(group: Communicator) -> None:
    n, rank = group.size, group.rank
    for turn, (row, maker) in enumerate(makers(group)):
        make = maker()
        for size, root in sizes_and_roots(group, sizes(n), turn):
            whole = inputs("sum", row, size * n, root)
            mine = whole[size * rank :][:size]
            for in_place in (False, True):
                for algorithm in algorithms(group, "gather"):
                    at_root = make(size * n) if rank == root else None
                    x = at_root[size * rank :][:size] if in_place and at_root is not None else make(size)
                    as_numpy(x)[...] = mine
                    assert group.gather(at_root, x, root, algorithm=algorithm) is at_root
                    assert at_root is None or same(at_root, whole), (row.name, size, root, algorithm)
                for algorithm in algorithms(group, "scatter"):
                    at_root = make(whole) if rank == root else None
                    out = at_root[size * rank :][:size] if in_place and at_root is not None else make(size)
                    assert group.scatter(out, at_root, root, algorithm=algorithm) is out
                    assert same(out, mine), (row.name, size, root, algorithm)


def test_all_to_all(group: Communicator) -> None:
    """Part p of rank r's array goes to part r of rank p's."""
    n, rank = group.size, group.rank
    for row, maker in makers(group):
        make = maker()
        for size in sizes(n):
            whole = inputs("sum", row, size * n * n, 0).reshape(n, n, size)
            for algorithm in algorithms(group, "all_to_all"):
                out = make(size * n)
                assert group.all_to_all(out, make(whole[rank].reshape(-1)), algorithm=algorithm) is out
                assert same(out, whole[:, rank].reshape(-1)), (row.name, size, algorithm)


def test_all_to_all_of_parts_of_any_sizes(group: Communicator) -> None:
    """Rank r sends `sent[r, p]` elements to rank p: none, one, or more than a message has segments."""
    n, rank = group.size, group.rank
    sent = np.random.default_rng(n).choice([0, 1, 7, 50_001], (n, n))
    for whole in (sent, np.zeros_like(sent)):
        send, recv = whole[rank].tolist(), whole[:, rank].tolist()
        x = np.concatenate([np.full(count, 100 * rank + peer) for peer, count in enumerate(send)]).astype(np.float32)
        expected = np.concatenate([np.full(count, 100 * peer + rank) for peer, count in enumerate(recv)])
        for algorithm in ("auto", *algorithms(group, "all_to_all")):
            for _ in range(2):  # the second call may use what the first one has prepared
                out = np.full(sum(recv), -1, np.float32)
                how = {"send_counts": send, "recv_counts": recv, "algorithm": algorithm}
                assert group.all_to_all(out, x, **how) is out
                assert same(out, expected.astype(np.float32)), algorithm
        work = group.all_to_all(
            out := np.empty(sum(recv), np.float32), x, send_counts=send, recv_counts=recv, async_op=True
        )
        assert work.wait() is out and same(out, expected.astype(np.float32))
    if n > 1 and group.num_nodes == 1:
        send, recv = [int(rank == 0)] * n, [0] * n
        with pytest.raises(ValueError, match="rank 0 sends 1 elements to rank 0, which expects 0"):
            group.all_to_all(np.empty(0), np.ones(sum(send)), send_counts=send, recv_counts=recv, algorithm="shared")


def random_bits(row: DType, size: int, rank: int) -> np.ndarray:
    """Any pattern, also those of NaN: what is moved arrives bit by bit."""
    return np.random.default_rng([rank, size]).integers(0, 256, size * row.itemsize, np.uint8).view(row.numpy)


def test_an_all_gather_into_one_array_of_the_node(group: Communicator) -> None:
    """Also with several ranks on several nodes, where each rank writes a part of every node."""
    counts = [1000 + 16 * rank for rank in range(group.size)]
    first, num = sum(counts[: group.rank]), sum(counts)
    expected = np.arange(num, dtype=np.float32)
    for algorithm in ("auto", *algorithms(group, "all_gather")):
        for is_in_place in (True, False):
            out = group.node.shared(num, np.float32)
            mine = out[first : first + counts[group.rank]] if is_in_place else np.empty(counts[group.rank], np.float32)
            mine[:] = expected[first : first + counts[group.rank]]
            group.barrier()
            group.all_gather(out, mine, counts=counts, algorithm=algorithm)
            group.barrier()
            assert np.array_equal(out, expected), (algorithm, is_in_place)


@pytest.mark.rest
def test_what_is_only_moved(group: Communicator) -> None:
    n, rank = group.size, group.rank
    makers = [(row, lambda row=row, **options: Maker(group, row, "numpy", **options)) for row in MOVED.values()]
    makers += [
        (row, lambda row=row, **options: Maker(group, row, "torch", **options))
        for row in MOVED.values()
        if hasattr(torch, row.name)
    ]
    assert len(makers) > len(MOVED) > 2
    for row, maker in makers:
        make = maker()
        for size in (1, 7, LARGE):
            parts = [random_bits(row, size, r) for r in range(n)]
            mine, whole = parts[rank], np.concatenate(parts)
            for algorithm in algorithms(group, "all_gather"):
                for kind in kinds(group, algorithm, "shared")[:2]:
                    out = maker(length=size * n, kind=kind)(size * n)
                    group.barrier()  # `out` may be one array for all
                    for _ in range(2):  # the second time by its plan, where it has one
                        assert same(group.all_gather(out, make(mine), algorithm=algorithm), whole), (
                            row.name,
                            algorithm,
                        )
            for algorithm in algorithms(group, "broadcast"):
                assert same(group.broadcast(make(mine), n - 1, algorithm=algorithm), parts[-1]), (row.name, algorithm)
            for algorithm in algorithms(group, "gather"):
                gathered = group.gather(make(size * n) if rank == 0 else None, make(mine), algorithm=algorithm)
                assert gathered is None or same(gathered, whole), (row.name, algorithm)
            for algorithm in algorithms(group, "scatter"):
                x = make(whole) if rank == 0 else None
                assert same(group.scatter(make(size), x, algorithm=algorithm), mine), (row.name, algorithm)
            for algorithm in algorithms(group, "all_to_all"):
                out = group.all_to_all(make(size * n), make(np.tile(mine, n)), algorithm=algorithm)
                assert same(out, whole), (row.name, algorithm)
            left, right = (rank - 1) % n, (rank + 1) % n
            incoming, flags, copied = make(size), np.array([rank == 0]), make(mine)
            with group.group():
                group.send(make(mine), right)
                group.recv(incoming, left)
                group.broadcast(flags)
                group.broadcast(copied)
            assert same(incoming, parts[left]) and same(copied, parts[0]) and flags.tolist() == [True]
            work = group.irecv(incoming, rank)
            group.send(make(mine), rank)
            assert same(work.wait(), mine)
        for reduce in (group.all_reduce, group.reduce, lambda x: group.reduce_scatter(x, x)):
            with pytest.raises(TypeError, match=f"{row.name} is only moved, never reduced; reductions take float64, "):
                reduce(make(n))


def test_the_conjugate_of_a_tensor_is_not_taken_for_the_tensor(group: Communicator) -> None:
    """It lies at the same address, with a mark that the signs are others."""
    x, out = torch.full((3,), 1 + 2j), torch.zeros(3 * group.size, dtype=torch.complex64)
    for _ in range(2):
        assert (group.all_gather(out, x, algorithm="mpi") == 1 + 2j).all()
    with pytest.raises(TypeError, match=r"x is a tensor that NumPy cannot view: .*resolve_conj"):
        group.all_gather(out, x.conj(), algorithm="mpi")
    assert (group.all_gather(out, x.conj().resolve_conj(), algorithm="mpi") == 1 - 2j).all()


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


@pytest.mark.rest
def test_random_data_is_reduced_to_the_same_bits_on_all_ranks_and_every_time(group: Communicator) -> None:
    for row in (TABLE[name] for name in FLOATS):
        for size in (LARGE, BLOCK_BYTES // 2 + 77):
            parts = [random_data(row, size, rank) for rank in range(group.size)]
            in_order = parts[0].astype(row.accumulate)
            for part in parts[1:]:
                in_order = in_order + part.astype(row.accumulate)
            exact = np.sum([part.astype(np.float64) for part in parts], axis=0)
            scale = np.sum([np.abs(part.astype(np.float64)) for part in parts], axis=0)
            # Each of N - 1 additions rounds once by half a step of its result; so does the reference, for float64.
            step = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[row.name]
            for algorithm in algorithms(group, "all_reduce"):
                make = Maker(group, row, "torch")
                results = []
                for _ in range(2):
                    x = make(parts[group.rank])
                    group.all_reduce(x, algorithm=algorithm)
                    results.append(as_numpy(x).copy())
                digests = [hashlib.sha256(result.tobytes()).hexdigest() for result in results]
                everyone = {digest for each in group.all_gather_object(digests) for digest in each}
                assert len(everyone) == 1, (row.name, size, algorithm)
                error = np.abs(results[0].astype(np.float64) - exact)
                assert (error <= 2 * step * scale * group.size).all(), (row.name, size, algorithm)
                if algorithm == "shared":  # in order of rank, rounded once
                    assert same(results[0], in_order.astype(row.numpy)), (row.name, size)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "int64"])
def test_integer_sums_wrap_around(group: Communicator, dtype: str) -> None:
    # Open MPI's vectorised sums of short integers end at the largest one, in all but an array's last few elements.
    largest = np.iinfo(dtype).max
    with np.errstate(over="ignore"):
        expected = np.full(group.size, largest, dtype).sum(dtype=dtype)
    for size in (1, 64, 5003):
        x = np.full(size, largest, dtype)
        for algorithm in algorithms(group, "all_reduce"):
            total = group.all_reduce(x.copy(), algorithm=algorithm)
            assert (total == expected).all(), (size, algorithm)
        y, part = np.full(size * group.size, largest, dtype), np.empty(size, dtype)
        for algorithm in algorithms(group, "reduce_scatter"):
            assert (group.reduce_scatter(part, y, algorithm=algorithm) == expected).all(), (size, algorithm)


def test_zeros_of_both_signs_have_the_same_bits_on_all_ranks(group: Communicator) -> None:
    for row in (TABLE[name] for name in FLOATS):
        for size in (1, 64, 5000):
            x = np.full(size, -0.0 if group.rank % 2 else 0.0).astype(row.numpy)
            for algorithm in algorithms(group, "all_reduce"):
                for op in ("sum", "max", "min", "prod"):
                    bits = group.all_reduce(x.copy(), op, algorithm=algorithm).tobytes()
                    assert len(set(group.all_gather_object(bits))) == 1, (row.name, size, algorithm, op)


def test_halves_overflow_to_infinity_without_a_warning(group: Communicator) -> None:
    for algorithm in algorithms(group, "all_reduce"):
        for size in (3, 5000):  # by NumPy's kernels and by torch's
            x = np.full(size, 60000, np.float16)
            group.all_reduce(x, algorithm=algorithm)
            assert np.isinf(x).all() == (group.size > 1)


def test_halves_added_in_fp32_on_the_wire_are_rounded_once(group: Communicator) -> None:
    n, rank = group.size, group.rank
    for row in (TABLE["bfloat16"], TABLE["float16"]):
        # 1 + N tiny numbers, each of which is lost if it is added to the 1 in this precision.
        tiny = 2.0**-9 if row.name == "bfloat16" else 2.0**-12
        values = np.full(n, 1.0 if rank == 0 else tiny).astype(row.numpy)
        expected = np.full(n, np.float32(1 + (n - 1) * tiny)).astype(row.numpy)
        for algorithm in algorithms(group, "all_reduce"):
            x = values.copy()
            assert same(group.all_reduce(x, algorithm=algorithm, accumulate="fp32"), expected), algorithm
        for algorithm in algorithms(group, "reduce_scatter"):
            out = group.reduce_scatter(values[:1].copy(), values, algorithm=algorithm, accumulate="fp32")
            assert same(out, expected[:1]), algorithm
        for algorithm in algorithms(group, "reduce"):
            x = values.copy()
            group.reduce(x, n - 1, algorithm=algorithm, accumulate="fp32")
            assert same(x, expected if rank == n - 1 else values), algorithm
    with pytest.raises(ValueError, match="all_reduce: accumulate 'fp64'; expected 'fp32' or None"):
        group.all_reduce(np.zeros(2), accumulate="fp64")


def test_arrays_that_come_and_go_at_the_same_addresses(group: Communicator) -> None:
    """What a schedule does to an address is kept: another array there, of another type or size, must not be mistaken for it."""
    n, rank = group.size, group.rank
    memory = np.zeros(1 << 12, np.uint8)
    for turn in range(60):
        dtype = (np.float32, np.float64, np.int16)[turn % 3]
        x = memory.view(dtype)[: 16 + 16 * (turn % 4)]
        x[...] = np.arange(x.size) % 5 + rank
        group.all_reduce(x, algorithm=("ring", "tree")[turn % 2])
        assert (x == np.arange(x.size) % 5 * n + sum(range(n))).all(), turn


def test_long_arrays_go_in_segments_and_windows(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if segments, windows of the staging area and blocks held a hundred bytes."""
    from collectives.arrays import reduction
    from collectives.transports import executor, scheduled
    from collectives.transports.node import shared, staged

    for module, name in (
        (executor, "SEGMENT_BYTES"),
        (scheduled, "_PIPELINE_BYTES"),
        (scheduled, "_COPY_BYTES"),
        (staged, "_RING_BYTES"),
        (shared, "_SCRATCH_BYTES"),
    ):
        monkeypatch.setattr(module, name, 96)
    monkeypatch.setattr(reduction, "BLOCK_BYTES", 96)
    n, rank = comm.size, comm.rank
    for add_all in (0, 1 << 30):
        monkeypatch.setattr(staged, "_ADD_ALL_BYTES", add_all)
        group = Communicator(comm.mpi.Dup())
        counts = [LARGE + 7 * r for r in range(n)]
        mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        for row in (TABLE["float32"], TABLE["bfloat16"], TABLE["int8"]):
            whole = inputs("sum", row, sum(counts), 0)
            for algorithm in algorithms(group, "all_reduce"):
                x = inputs("sum", row, LARGE, rank)
                assert same(group.all_reduce(x, algorithm=algorithm), reduced("sum", row, LARGE, n)), algorithm
            for algorithm in algorithms(group, "all_gather"):
                out = np.empty(sum(counts), row.numpy)
                group.all_gather(out, whole[mine].copy(), counts=counts, algorithm=algorithm)
                assert same(out, whole), algorithm
            for algorithm in algorithms(group, "reduce_scatter"):
                x, out = inputs("sum", row, sum(counts), rank), np.empty(counts[rank], row.numpy)
                group.reduce_scatter(out, x, counts=counts, algorithm=algorithm)
                assert same(out, reduced("sum", row, sum(counts), n)[mine]), algorithm
            for algorithm in algorithms(group, "broadcast"):
                x = inputs("sum", row, LARGE, rank)
                assert same(group.broadcast(x, n - 1, algorithm=algorithm), inputs("sum", row, LARGE, n - 1)), algorithm
            for algorithm in algorithms(group, "all_to_all"):
                x = np.concatenate([inputs("sum", row, LARGE, rank + n * r) for r in range(n)])
                expected = np.concatenate([inputs("sum", row, LARGE, r + n * rank) for r in range(n)])
                assert same(group.all_to_all(np.empty_like(x), x, algorithm=algorithm), expected), algorithm
        group.free()


def test_messages_of_more_elements_than_mpi_can_count(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if MPI could count to 100, in rows of 8: the same path as beyond 2**31 elements, without the memory."""
    from collectives.transports import mpi

    monkeypatch.setattr(selector, "MAX_COUNT", 100)
    monkeypatch.setattr(mpi, "_ROW", 8)
    mpi._block.cache_clear()
    comm.use_table(comm.table)  # forgets the choices made with the true number
    n, rank = comm.size, comm.rank
    for row, maker in [*makers(comm), (MOVED["complex128"], lambda: Maker(comm, MOVED["complex128"], "numpy"))]:
        make = maker()
        for size in (100, 101, 104, LARGE):
            mine = inputs("sum", row, size, rank)
            whole = np.concatenate([inputs("sum", row, size, r) for r in range(n)])
            for algorithm in ("auto", "ring", "tree") if row.ops else ():
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
    monkeypatch.undo()
    comm.use_table(comm.table)


def test_max_and_min_hand_on_nan(group: Communicator) -> None:
    """Whichever rank has it, on all ranks and by all algorithms: MPI libraries' own lose it."""
    n = group.size
    for row in (TABLE[name] for name in FLOATS):
        for size in (n, 5000):
            values = (np.arange(size) % 7 + group.rank).astype(row.numpy)
            values[group.rank :: n] = np.nan  # every place has it on one rank, and none on all
            for op in ("max", "min"):
                for algorithm in algorithms(group, "all_reduce"):
                    x = values.copy()
                    assert np.isnan(group.all_reduce(x, op, algorithm=algorithm).astype(np.float32)).all(), (
                        row.name,
                        op,
                        algorithm,
                    )
                for algorithm in algorithms(group, "reduce_scatter"):
                    out = np.zeros(3, row.numpy)
                    group.reduce_scatter(out, np.resize(values, 3 * n), op, algorithm=algorithm)
                    assert np.isnan(out.astype(np.float32)).any() or size % n, (row.name, op, algorithm)
                for algorithm in algorithms(group, "reduce"):
                    x = values.copy()
                    group.reduce(x, n - 1, op, algorithm=algorithm)
                    assert group.rank < n - 1 or np.isnan(x.astype(np.float32)).all(), (row.name, op, algorithm)
