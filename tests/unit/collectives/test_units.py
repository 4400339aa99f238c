"""Bytes, seconds, bandwidths and counts, as people write and read them."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.shared.units import (
    parse_bandwidth,
    parse_counts,
    parse_seconds,
    parse_size,
    parse_sizes,
    show_counts,
    show_seconds,
)
from collectives.texts import show_bytes


def test_sizes() -> None:
    sizes = [parse_size(text) for text in ("4096", "1KiB", " 1.5 MiB", "2GiB", "7B", "1.2GB", "8MB", "1kB")]
    assert sizes == [4096, 1024, 3 << 19, 2 << 30, 7, 1_200_000_000, 8_000_000, 1000]
    assert parse_sizes("1KiB,3MiB") == [1024, 3 << 20]
    assert parse_sizes("1KiB..64KiB") == [1024, 4096, 16384, 65536]
    assert parse_sizes("1KiB..5000") == [1024, 4096]


def test_times_and_bandwidths() -> None:
    assert [parse_seconds(text) for text in ("5us", "5 µs", "1.5ms", "2s", "300ns", "0s")] == pytest.approx(
        [5e-6, 5e-6, 1.5e-3, 2, 3e-7, 0]
    )
    bandwidths = [parse_bandwidth(text) for text in ("25GB/s", "100Gbit/s", "800 MB/s", "1GiB/s", "1TB/s", "7B/s")]
    assert bandwidths == pytest.approx([25e9, 12.5e9, 8e8, 1 << 30, 1e12, 7])


def test_counts() -> None:
    assert parse_counts("1..4,100,3") == [1, 2, 3, 4, 100]
    assert show_counts([1, 2, 3, 4, 7, 100, 101]) == "1..4, 7, 100..101"
    assert show_counts([]) == ""


@given(st.sets(st.integers(1, 60), min_size=1))
def test_counts_are_read_as_they_are_shown(counts: set[int]) -> None:
    assert parse_counts(show_counts(list(counts)).replace(" ", "")) == sorted(counts)


@pytest.mark.parametrize(
    ("parse", "texts", "error"),
    [
        (
            parse_size,
            ("", "1kb", "KiB", "-1", "1KiB;2KiB", "1e3", "1/s", "0", "0KiB", "0.4"),
            "expected bytes, 1 at least, such as",
        ),
        (parse_sizes, ("0..1KiB", "0", "4,0"), "size '0'; expected bytes, 1 at least"),
        (parse_sizes, ("2KiB..1KiB",), "expected a range that rises"),
        (parse_seconds, ("5", "us", "-5us", "5 usec", "5us/s"), "expected a number and its unit, such as 300ns, 5us"),
        (parse_bandwidth, ("25", "25GB", "0GB/s", "-1GB/s", "25gb/s"), "expected a number above 0 and its unit"),
        (parse_counts, ("", "0", "1,x", "1..", "-1..4", "1.5"), "expected a whole number of at least 1"),
        (parse_counts, ("4..1",), "expected a range that rises"),
    ],
)
def test_what_is_none_is_refused(parse: Callable[[str], Any], texts: tuple[str, ...], error: str) -> None:
    for text in texts:
        with pytest.raises(ValueError, match=error):
            parse(text)


def test_bytes_are_shown_in_the_largest_unit() -> None:
    shown = [show_bytes(n) for n in (0, 1000, 1024, 1536, 64 << 20, 3 << 30)]
    assert shown == ["0 B", "1000 B", "1 KiB", "1.5 KiB", "64 MiB", "3 GiB"]


def test_times_are_shown_with_three_digits() -> None:
    shown = [show_seconds(t) for t in (0, 3e-7, 5e-6, 1.234e-5, 9.999e-4, 0.0015, 0.805, 1, 12.34, 4000)]
    assert shown == ["0 µs", "0.3 µs", "5 µs", "12.3 µs", "1 ms", "1.5 ms", "805 ms", "1 s", "12.3 s", "4000 s"]
