"""Sizes and bandwidths of `python -m collectives bench`."""

import pytest

from collectives.bench import bus_factor, parse_size, parse_sizes, show_bytes


def test_sizes() -> None:
    assert [parse_size(text) for text in ("4096", "1KiB", " 1.5 MiB", "2GiB", "7B")] == [
        4096,
        1024,
        3 << 19,
        2 << 30,
        7,
    ]
    assert parse_sizes("1KiB,3MiB") == [1024, 3 << 20]
    assert parse_sizes("1KiB..64KiB") == [1024, 4096, 16384, 65536]
    assert parse_sizes("1KiB..5000") == [1024, 4096]
    for text in ("", "1kb", "KiB", "-1", "1KiB;2KiB", "1e3"):
        with pytest.raises(ValueError, match="expected bytes, such as"):
            parse_size(text)
    for text in ("0..1KiB", "2KiB..1KiB"):
        with pytest.raises(ValueError, match="expected a range that rises"):
            parse_sizes(text)


def test_bytes_are_shown_in_the_largest_unit() -> None:
    assert [show_bytes(n) for n in (0, 1000, 1024, 1536, 64 << 20, 3 << 30)] == [
        "0 B", "1000 B", "1 KiB", "1.5 KiB", "64 MiB", "3 GiB",
    ]  # fmt: skip


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert [bus_factor("all_reduce", n) for n in (2, 4)] == [1.0, 1.5]
    assert bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == 0.75
    assert bus_factor("broadcast", 4) == 1.0
