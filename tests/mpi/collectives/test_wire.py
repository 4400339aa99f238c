"""Collectives that send a wire format between nodes: values, bits, bytes, errors. The ranks say that they are on several hosts."""

import hashlib
import logging
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from pretended_hosts import on_hosts

from collectives import Communicator, network_bytes
from collectives.codec.formats import FORMATS
from collectives.transports.transport import even_parts, parts

pytestmark = pytest.mark.one_node  # the hosts are only pretended

# The hosts of the ranks. In the last case the ranks of a host do not follow each other.
HOSTS = {1: ["0"], 2: ["01"], 3: ["012"], 4: ["0123", "0011", "0110"]}
BELOW = [name for name, fmt in FORMATS.items() if not fmt.is_exact]
# The largest error of a format, as a ratio to the largest element of a block: half of a step.
ERROR = {"bf16": 2**-9, "fp16": 2**-11, "int8": 1 / 254, "fp8": 1 / 28}
SIZES, LONG = [0, 1, 257, 1031], 700_001  # the last one is sent in several chunks
ALGORITHM = {"algorithm": "encoded"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Communicator]]:
    """A communicator for each placement on several hosts."""
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    made = [on_hosts(MPI.COMM_WORLD, [int(host) for host in hosts]) for hosts in HOSTS[size] if size > 1]
    yield made
    for comm in made:
        comm.free()


@pytest.fixture(scope="module")
def wired(ranks: list[Communicator]) -> list[dict[str, Communicator]]:
    """For each placement the communicators of all formats, by name; "fp32" sends elements as they are."""
    return [{"fp32": comm} | {name: comm.with_wire({"network": name}) for name in BELOW} for comm in ranks]


def formats_and_sizes() -> Iterator[tuple[str, int]]:
    yield from ((name, size) for name in BELOW for size in SIZES)
    yield "int8", LONG


def values(comm: Communicator, size: int) -> np.ndarray:
    """All ranks' arrays of `size` elements from -1 to 1, in rows."""
    return np.random.default_rng(size).uniform(-1, 1, (comm.size, size)).astype(np.float32)


def uneven(comm: Communicator, size: int) -> list[int]:
    """Counts that add up to `size`, of which one is 0."""
    if comm.size == 2:
        return [0, size]
    return [0, *(end - begin for begin, end in even_parts(size, comm.size - 1))]


def hashes(comm: Communicator, x: np.ndarray) -> set[str]:
    return set(comm.all_gather_object(hashlib.sha256(x.tobytes()).hexdigest()))


def sent(comm: Communicator, call: Any) -> int:
    """The bytes that all ranks together send to other hosts in `call()`."""
    before = network_bytes()
    call()
    return sum(comm.all_gather_object(network_bytes() - before))


def test_all_reduce(wired: list[dict[str, Communicator]]) -> None:
    for comms in wired:
        for name, size in formats_and_sizes():
            comm, fmt = comms[name], FORMATS[name]
            assert comm.wire == {"node": "fp32", "network": name}
            given = values(comm, size)
            for op, divisor in (("sum", 1), ("avg", comm.size)):
                x = given[comm.rank].copy()
                nbytes = sent(comm, lambda: comm.all_reduce(x, op, **ALGORITHM))  # noqa: B023
                error = np.abs(x - given.sum(0, dtype=np.float64) / divisor).max(initial=0)
                # Half of a step for each node's sum, and half of one for their sum.
                assert error <= 2 * comm.size / divisor * ERROR[name] * 1.01, (name, size, op, error)
                assert len(hashes(comm, x)) == 1, (name, size, op)
                slices = even_parts(size, comm.node.size)
                assert nbytes == 2 * (comm.num_nodes - 1) * sum(fmt.nbytes(end - begin) for begin, end in slices)


def test_reduce_scatter_and_all_gather(wired: list[dict[str, Communicator]]) -> None:
    for comms in wired:
        for name, size in formats_and_sizes():
            comm, fmt = comms[name], FORMATS[name]
            counts = uneven(comm, size)
            mine = slice(*parts(counts)[comm.rank])
            expected_bytes = (comm.num_nodes - 1) * sum(fmt.nbytes(count) for count in counts)
            given = values(comm, size)

            out = np.empty(counts[comm.rank], np.float32)
            x = given[comm.rank].copy()
            nbytes = sent(comm, lambda: comm.reduce_scatter(out, x, "avg", counts=counts, **ALGORITHM))  # noqa: B023
            np.testing.assert_array_equal(x, given[comm.rank])
            np.testing.assert_allclose(out, given.mean(0)[mine], rtol=0, atol=ERROR[name] * 1.01)
            assert nbytes == expected_bytes
            comm.reduce_scatter(x[mine], x, "avg", counts=counts, **ALGORITHM)
            np.testing.assert_array_equal(x[mine], out, err_msg="in place")

            whole = np.empty(size, np.float32)
            nbytes = sent(comm, lambda: comm.all_gather(whole, given[0][mine], counts=counts, **ALGORITHM))  # noqa: B023
            np.testing.assert_allclose(whole, given[0], rtol=0, atol=ERROR[name] * 1.01)
            assert len(hashes(comm, whole)) == 1, "a rank's own part is decoded too"
            assert nbytes == expected_bytes
            again = np.zeros(size, np.float32)
            again[mine] = given[0][mine]
            comm.all_gather(again, again[mine], counts=counts, **ALGORITHM)
            np.testing.assert_array_equal(again, whole, err_msg="in place")


def test_the_exact_two_levels_on_hosts_in_any_order(ranks: list[Communicator]) -> None:
    for comm in ranks:
        if "two_level" in comm.algorithms("reduce_scatter"):
            given, counts = values(comm, 1031), uneven(comm, 1031)
            mine = slice(*parts(counts)[comm.rank])
            out, whole = np.empty(counts[comm.rank], np.float32), np.empty(1031, np.float32)
            comm.reduce_scatter(out, given[comm.rank], counts=counts, algorithm="two_level")
            np.testing.assert_allclose(out, given.sum(0)[mine], rtol=0, atol=1e-6)
            comm.all_gather(whole, given[0][mine], counts=counts, algorithm="two_level")
            np.testing.assert_array_equal(whole, given[0])


def test_half_types_are_added_in_fp32_and_rounded_once(wired: list[dict[str, Communicator]]) -> None:
    for comms in wired:
        comm = comms["int8"]
        for dtype in (np.float16, ml_dtypes.bfloat16):
            x = values(comm, 5000)[comm.rank].astype(dtype)
            wide = x.astype(np.float32)
            comm.all_reduce(x)
            comm.all_reduce(wide)
            np.testing.assert_array_equal(x, wide.astype(dtype))
            whole, of_wide = np.empty(comm.size * 1100, dtype), np.empty(comm.size * 1100, np.float32)
            comm.all_gather(whole, x[:1100])
            comm.all_gather(of_wide, x[:1100].astype(np.float32))
            np.testing.assert_array_equal(whole, of_wide.astype(dtype))
            # Two bytes in another format of two bytes would lose precision for nothing.
            comms["bf16"].all_gather(whole, x[:1100])
            np.testing.assert_array_equal(whole[comm.rank * 1100 :][:1100], x[:1100])


def test_nan_and_infinity_reach_all_ranks(wired: list[dict[str, Communicator]]) -> None:
    for comms in wired:
        for name in BELOW:
            comm = comms[name]
            for wrong in (np.nan, np.inf):
                x = np.ones(2000, np.float32)
                if comm.rank == comm.size - 1:
                    x[700] = wrong
                comm.all_reduce(x, **ALGORITHM)
                assert not np.isfinite(x[700]), (name, wrong)
                assert (x[:512] == comm.size).all() and (x[1500:] == comm.size).all(), "other blocks"


def test_averages_do_not_overflow_where_they_fit(wired: list[dict[str, Communicator]]) -> None:
    for comms in wired:
        x = np.full(1031, 40_000, np.float32)
        comms["fp16"].all_reduce(x, "avg", **ALGORITHM)
        np.testing.assert_allclose(x, 40_000, rtol=2**-10)


def test_what_is_not_encoded(wired: list[dict[str, Communicator]]) -> None:
    """Other dtypes, operations and algorithms, and short arrays."""
    for comms in wired:
        comm, exact = comms["int8"], comms["fp32"]
        given = values(comm, 5000)[comm.rank]
        for options in ({"op": "max"}, {"algorithm": "ring"}):
            x, y = given.copy(), given.copy()
            comm.all_reduce(x, **options)
            exact.all_reduce(y, **options)
            np.testing.assert_array_equal(x, y)
        for x in (given.astype(np.float64), np.arange(5000), given[: 1024 * comm.size].copy()):
            y = x.copy()
            comm.all_reduce(x)
            exact.all_reduce(y)
            np.testing.assert_array_equal(x, y)
        for x, op, why in ((np.arange(300), "sum", "int64"), (given.copy(), "max", "max")):
            with pytest.raises(ValueError, match=f"'encoded' .* not {why}; use auto or "):
                comm.all_reduce(x, op, algorithm="encoded")
        with pytest.raises(ValueError, match=r"needs a wire format below fp32: call comm.with_wire"):
            exact.all_reduce(given.copy(), algorithm="encoded")
        # The messages of the exact algorithms are counted too.
        x = np.ones(5000 * comm.size, np.float32)
        host = {rank: k for k, ranks in enumerate(comm.nodes) for rank in ranks}
        crossings = sum(host[rank] != host[(rank + 1) % comm.size] for rank in range(comm.size))
        nbytes = sent(exact, lambda: exact.all_reduce(x, algorithm="ring"))  # noqa: B023
        assert nbytes == crossings * 2 * (comm.size - 1) * x.nbytes // comm.size


def test_async_operations_groups_and_repeated_calls(wired: list[dict[str, Communicator]]) -> None:
    for comms in wired:
        comm = comms["int8"]
        given = [values(comm, size)[comm.rank] * scale for size, scale in ((5000, 1), (5001, 1e-6), (100_003, 1))]
        expected = [comm.all_reduce(x.copy()) for x in given]
        in_group = [x.copy() for x in given]
        with comm.group():
            for x in in_group:
                comm.all_reduce(x)
        tensors = [torch.from_numpy(x.copy()) for x in given]
        works = [comm.all_reduce(x, async_op=True) for x in tensors]
        for work in works:
            work.wait()
        for one, other, tensor in zip(expected, in_group, tensors, strict=True):
            np.testing.assert_array_equal(one, other)
            np.testing.assert_array_equal(one, tensor.numpy())


def test_short_arrays_of_a_group_are_packed_as_they_are(wired: list[dict[str, Communicator]]) -> None:
    """Together they are long, but they would share the scales of blocks."""
    for comms in wired:
        comm = comms["int8"]
        given = [values(comm, 1000 * comm.size)[comm.rank] * 10.0**k for k in range(4)]
        in_group = [x.astype(np.float32) for x in given]
        expected = [comm.all_reduce(x.copy()) for x in in_group]
        with comm.group():
            for x in in_group:
                comm.all_reduce(x)
        for one, other in zip(expected, in_group, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6 * np.abs(one).max())


def test_checked_mode_and_freeing(comm: Communicator) -> None:
    checked = on_hosts(comm.mpi, range(comm.size), checked=True)
    small = checked.with_wire({"node": "fp32", "network": "fp8"})
    x = comm.all_reduce(np.full(5000, comm.rank + 1.0, np.float32))
    np.testing.assert_allclose(small.all_reduce(np.full(5000, comm.rank + 1.0, np.float32)), x, rtol=2**-3)
    if comm.size > 1:
        with pytest.raises(ValueError, match="differ"):
            small.all_reduce(np.ones(1000 + comm.rank, np.float32))
    part = small.split(0)
    assert part.wire == small.wire
    part.free()
    checked.free()
    assert small.is_freed


def test_on_one_host_nothing_changes(comm: Communicator) -> None:
    small = comm.with_wire({"network": "int8"})
    x = values(comm, 5000)[comm.rank]
    y = x.copy()
    assert sent(comm, lambda: small.all_reduce(x)) == 0
    np.testing.assert_array_equal(x, comm.all_reduce(y))
    assert comm.with_wire({"network": "auto"}).wire["network"] == "fp32"


def test_hosts_of_unequal_sizes_send_elements_as_they_are(comm: Communicator, caplog: pytest.LogCaptureFixture) -> None:
    if comm.size < 3:
        pytest.skip("needs three ranks")
    ranks = on_hosts(comm.mpi, [0] * (comm.size - 1) + [1])
    with caplog.at_level(logging.WARNING, "collectives"):
        small = ranks.with_wire({"network": "int8"})
    assert len(caplog.records) == (comm.rank == 0)
    x = values(comm, 5000)[comm.rank]
    y = x.copy()
    np.testing.assert_array_equal(small.all_reduce(x), ranks.all_reduce(y))
    with pytest.raises(ValueError, match=r"'encoded' needs the same number of ranks on each node; here 1 to "):
        small.all_reduce(x, algorithm="encoded")
    assert ranks.with_wire({"network": "auto"}).wire["network"] == "fp32"
    ranks.free()


def test_auto_is_measured_once_and_the_same_on_all_ranks(
    ranks: list[Communicator], caplog: pytest.LogCaptureFixture
) -> None:
    for comm in ranks[-1:]:
        with caplog.at_level(logging.INFO, "collectives"):
            chosen = [comm.with_wire("auto").wire["network"] for _ in range(2)]
        assert len({name for names in comm.all_gather_object(chosen) for name in names}) == 1
        said = [text for text in caplog.messages if "processor time" in text]
        assert len(said) == (comm.rank == 0)
        assert all(text.startswith(f"wire 'auto' is {chosen[0]}: an all-reduce of ") for text in said)


def test_wrong_formats_are_errors_on_all_ranks(comm: Communicator) -> None:
    for wire, why in (
        ({"network": "int4"}, "network 'int4'; expected one of fp32, bf16, fp16, int8, fp8, auto"),
        ({"node": "int8"}, "node 'int8'; expected 'fp32'"),
        ("int4", "network 'int4'; expected one of fp32"),
        (
            {"link": "int8"},
            "expected one of fp32, bf16, fp16, int8, fp8, auto, or {'node': 'fp32', 'network': one of them}",
        ),
        ({"network": "fp8" if comm.rank else "int9"}, "network 'int9'"),
    ):
        with pytest.raises(ValueError, match=why):
            comm.with_wire(wire)
    if comm.size > 1:
        with pytest.raises(ValueError, match="not on all ranks; ask for the same"):
            comm.with_wire({"network": "fp8" if comm.rank else "int8"})
