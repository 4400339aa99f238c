"""The bandwidths of `python -m collectives bench`."""

from collectives.bench import bus_factor


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert [bus_factor("all_reduce", n) for n in (2, 4)] == [1.0, 1.5]
    assert bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == 0.75
    assert bus_factor("broadcast", 4) == 1.0
