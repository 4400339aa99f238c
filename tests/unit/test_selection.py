"""Which algorithm runs."""

import pytest

from collectives.dtypes import TABLE
from collectives.schedules import BUILDERS
from collectives.selection import ALGORITHMS, MAX_COUNT, SHORT_BYTES, choose


def chosen(
    operation: str, algorithm: str = "auto", dtype: str = "float32", nbytes: int = 4096, node: bool = False
) -> str:
    return choose(operation, algorithm, dtype=TABLE[dtype], nbytes=nbytes, in_node_memory=node)


def test_every_schedule_can_be_asked_for() -> None:
    for operation, builders in BUILDERS.items():
        assert set(builders) <= set(ALGORITHMS[operation])
    for operation, algorithms in ALGORITHMS.items():
        for algorithm in algorithms:
            assert chosen(operation, algorithm, node=True) == algorithm


def test_auto_chooses_something_that_exists() -> None:
    for operation, algorithms in ALGORITHMS.items():
        for dtype in TABLE:
            for nbytes in (0, 1, SHORT_BYTES, SHORT_BYTES + 1, 1 << 30):
                for node in (False, True):
                    assert chosen(operation, "auto", dtype, nbytes, node) in algorithms


def test_auto_uses_node_memory_where_it_can() -> None:
    for operation in ("all_reduce", "all_gather", "reduce_scatter"):
        assert chosen(operation, node=True) == "shared"
        assert chosen(operation, dtype="bfloat16", node=True) == "shared"
    assert chosen("broadcast", node=True) == "mpi"


def test_auto_reduces_halves_by_our_own_algorithms() -> None:
    for dtype in ("float16", "bfloat16"):
        assert chosen("all_reduce", dtype=dtype, nbytes=SHORT_BYTES) == "tree"
        assert chosen("all_reduce", dtype=dtype, nbytes=SHORT_BYTES + 2) == "ring"
        assert chosen("reduce_scatter", dtype=dtype) == "ring"
        assert chosen("reduce", dtype=dtype, nbytes=1 << 30) == "tree"
        assert chosen("all_gather", dtype=dtype) == chosen("broadcast", dtype=dtype) == "mpi"


def test_shared_needs_node_memory() -> None:
    with pytest.raises(ValueError, match=r"all_reduce: algorithm 'shared' works on arrays made by this communicator's"):
        chosen("all_reduce", "shared")
    # an empty array lies nowhere, and nothing is to be moved
    assert chosen("all_reduce", "shared", nbytes=0) == "mpi"


def test_unknown_algorithms_are_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"broadcast: algorithm 'ring' is unknown; expected auto, mpi, tree"):
        chosen("broadcast", "ring")
    with pytest.raises(ValueError, match=r"gather: algorithm 'shared' is unknown; expected auto, mpi"):
        chosen("gather", "shared", node=True)


def test_what_mpi_cannot_count_goes_by_our_own_algorithms() -> None:
    for dtype in ("uint8", "float32", "bfloat16"):
        largest = MAX_COUNT * TABLE[dtype].itemsize
        for operation, other in (
            ("all_reduce", "ring"),
            ("reduce_scatter", "ring"),
            ("all_gather", "ring"),
            ("reduce", "tree"),
        ):
            assert chosen(operation, "mpi", dtype, largest) == "mpi"
            assert chosen(operation, "auto", dtype, largest + TABLE[dtype].itemsize) == other
            with pytest.raises(
                ValueError,
                match=rf"takes up to 2147483647 elements, not 2147483648; use auto or {ALGORITHMS[operation][-1]}",
            ):
                chosen(operation, "mpi", dtype, largest + TABLE[dtype].itemsize)
        assert chosen("broadcast", "mpi", dtype, 10 * largest) == "mpi"  # only moved: one large datatype does
