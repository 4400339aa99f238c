"""`reduce_by`: a reduce-scatter with the caller's own reduction."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pretended_hosts import on_hosts

from collectives import Communicator, Runs, network_bytes


@pytest.mark.parametrize("memory", ["node", "private"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_gets_its_part_of_all_arrays_in_order_of_rank(
    comm: Communicator, memory: str, dtype: torch.dtype
) -> None:
    size, rank = comm.size, comm.rank
    bounds = [(3 * n, 3 * n + n % 3) for n in range(size)]  # the first part is empty, and the parts leave elements out
    length = 3 * size + rank * (memory == "private")  # arrays may be longer than the parts need
    x = comm.node.empty(3 * size, dtype) if memory == "node" else torch.empty(length, dtype=dtype)
    for round_ in range(6):  # more than the posts that may be unfinished at a time
        x.copy_(torch.arange(len(x)) + 16 * rank + round_)
        seen: list[list[float]] = []
        work = comm.reduce_by(x, lambda parts, seen=seen: seen.extend(part.tolist() for part in parts), bounds=bounds)  # type: ignore[misc]
        assert work.wait() is x
        assert seen == [[i + 16 * peer + round_ for i in range(*bounds[rank])] for peer in range(size)]
    comm.barrier()


HOSTS = {
    1: ["0"],
    2: ["00", "01"],
    3: ["000", "001", "010", "012"],  # hosts of unequal sizes, neighbours on other hosts, one rank on a host
    4: ["0011", "0001", "0101", "0123"],
}


def _runs(hosts: str) -> list[tuple[int, int]]:
    """Neighbours on one host are a run. The last rank is in no run if there are several."""
    runs: list[tuple[int, int]] = []
    for rank, host in enumerate(hosts[:-1] or hosts):
        if runs and runs[-1][1] == rank and hosts[rank - 1] == host:
            runs[-1] = (runs[-1][0], rank + 1)
        else:
            runs.append((rank, rank + 1))
    return runs


@pytest.mark.parametrize("memory", ["node", "private"])
def test_the_ranks_of_a_host_combine_their_parts_before_they_send_them(comm: Communicator, memory: str) -> None:
    for hosts in HOSTS[comm.size]:
        ranks = on_hosts(comm.mpi, [int(host) for host in hosts])
        bounds, runs = [(5 * n, 5 * n + 4 + n % 2 - 4 * (n == 2)) for n in range(comm.size)], _runs(hosts)
        x = ranks.node.empty(5 * comm.size, torch.float32) if memory == "node" else torch.empty(5 * comm.size)
        x.copy_(torch.arange(len(x)) * 10.0**comm.rank)
        seen: list[list[torch.Tensor]] = []

        def combine(out: torch.Tensor, parts: list[torch.Tensor]) -> None:
            out.copy_(sum(part.double() for part in parts))

        def keep(parts: list[torch.Tensor], seen: list[list[torch.Tensor]] = seen) -> None:
            seen.append([part.clone() for part in parts])

        ranks.reduce_by(x, keep, bounds=bounds).wait()
        ranks.reduce_by(x, keep, bounds=bounds, runs=Runs(runs, combine, torch.float64)).wait()
        own = torch.arange(*bounds[comm.rank]).double()
        plain, combined = seen
        assert [part.tolist() for part in plain] == [(own * 10.0**n).tolist() for n in range(comm.size)], hosts
        assert [part.tolist() for part in combined] == [
            (own * sum(10.0**n for n in range(*run))).tolist() for run in runs
        ]
        assert [part.dtype for part in combined] == [
            torch.float64 if end - begin > 1 else torch.float32 for begin, end in runs
        ]
        ranks.free()


def test_a_host_sends_one_array_for_each_run(comm: Communicator) -> None:
    if comm.size != 4:
        pytest.skip("two hosts of two ranks")
    ranks = on_hosts(comm.mpi, [0, 0, 1, 1])
    length = 4000
    x, bounds = ranks.node.empty(4 * length, torch.float32), [(n * length, (n + 1) * length) for n in range(4)]

    def sent(runs: Runs | None) -> int:
        before = network_bytes()
        ranks.reduce_by(x, lambda parts: None, bounds=bounds, runs=runs).wait()
        return network_bytes() - before

    def add(out: torch.Tensor, parts: list[torch.Tensor]) -> None:
        torch.add(*parts, out=out)

    assert sent(None) == 2 * 4 * length, "of both ranks of this host, to one rank of the other host"
    assert sent(Runs([(0, 2), (2, 4)], add, torch.float32)) == 4 * length
    ranks.free()


def test_numpy_arrays(comm: Communicator) -> None:
    x = np.full((2, comm.size), comm.rank, np.int64)
    seen: list[Any] = []
    for given in (x, memoryview(x)):
        comm.reduce_by(given, seen.append, bounds=[(n, n + 1) for n in range(comm.size)]).wait()
        assert [part.tolist() for part in seen.pop()] == [[peer] for peer in range(comm.size)]
    comm.reduce_by(x, seen.append, bounds=[(0, 0)] * comm.size, runs=Runs([], print, np.int64)).wait()
    assert seen == [[]], "no elements, and no ranks"


def test_arguments(comm: Communicator) -> None:
    x, bounds = np.zeros(4, np.float32), [(0, 4)] * comm.size

    def call(bounds: Any = bounds, runs: Any = None, x: Any = x) -> None:
        comm.reduce_by(x, print, bounds=bounds, runs=runs and Runs(runs, print, np.float32))

    wrong: list[tuple[type[Exception], str, Callable[[], None]]] = [
        (ValueError, r"bounds is .* expected \d pairs, one for each rank", lambda: call([(0, 99)] * comm.size)),
        (TypeError, r"expected .begin, end. of each rank's part", lambda: call([1] * comm.size)),
        (TypeError, r"expected .begin, end. of each run of ranks", lambda: call(runs=[1])),
        (ValueError, r"expected runs of at least one of the \d ranks, in order", lambda: call(runs=[(0, 1), (0, 1)])),
        (ValueError, "in order", lambda: call(runs=[(0, 5)])),
        (ValueError, r"pass x.contiguous", lambda: call(x=torch.zeros(4, 4).t())),
    ]
    for kind, said, attempt in wrong:
        with pytest.raises(kind, match=said):
            attempt()
    with pytest.raises(ValueError, match="reduce_by cannot be part of a group"), comm.group():
        call()
    if comm.size > 1:
        hosts = on_hosts(comm.mpi, range(comm.size))
        with pytest.raises(ValueError, match=r"the ranks of .0, 2. are on several nodes"):
            hosts.reduce_by(x, print, bounds=bounds, runs=Runs([(0, 2)], print, np.float32))
        hosts.free()


@pytest.mark.parametrize("memory", ["node", "private"])
def test_an_error_of_one_rank_s_reduction_leaves_the_others_alone(comm: Communicator, memory: str) -> None:
    x = comm.node.empty(4, np.float32) if memory == "node" else np.zeros(4, np.float32)
    seen: list[int] = []

    def reduce(parts: list[np.ndarray]) -> None:
        if comm.rank == 0:
            raise KeyError("of the caller")
        seen.append(len(parts))

    work = comm.reduce_by(x, reduce, bounds=[(0, 4)] * comm.size) if comm.size > 1 else None
    if work is not None and comm.rank == 0:
        with pytest.raises(KeyError, match="of the caller"):
            work.wait()
    elif work is not None:
        work.wait()
        assert seen == [comm.size]
    assert comm.all_reduce(np.ones(1)) == comm.size


def test_checked_mode(comm: Communicator) -> None:
    checked = Communicator(comm.mpi.Dup(), checked=True)
    x, seen = checked.node.empty(4, torch.float32), list[int]()
    checked.reduce_by(x, lambda parts: seen.append(len(parts)), bounds=[(0, 4)] * comm.size).wait()
    assert seen == [comm.size]
    if comm.size > 1:
        work = checked.reduce_by(x, print, bounds=[(0, 3 + (comm.rank == 1))] * comm.size)
        with pytest.raises(ValueError, match=r"counts=.0, 4"):
            work.wait()
    checked.free()
