"""Parses bytes, seconds and bytes per second from a command line, and formats them for a table."""

import re
from fractions import Fraction

# Fractions, so that 5us is exactly the float 5e-6.
_BYTES = {
    **{unit: Fraction(n) for unit, n in {"B": 1, "": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}.items()},
    **{f"{prefix}B": Fraction(1000**i) for i, prefix in enumerate(("k", "M", "G"), 1)},
}
_SECONDS = {unit: Fraction(n) for unit, n in {"s": "1", "ms": "1e-3", "us": "1e-6", "µs": "1e-6", "ns": "1e-9"}.items()}
_BANDWIDTHS = {
    **{f"{prefix}B/s": Fraction(1000**i) for i, prefix in enumerate(("", "k", "M", "G", "T"))},
    **{f"{prefix}B/s": Fraction(1024**i) for i, prefix in enumerate(("", "Ki", "Mi", "Gi"))},
    **{f"{prefix}bit/s": Fraction(1000**i, 8) for i, prefix in enumerate(("", "k", "M", "G", "T"))},
}


def _parsed(text: str, units: dict[str, Fraction], error: str) -> Fraction:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-zµ/]*)", text.strip())
    if not match or match[2] not in units:
        raise ValueError(error.format(repr(text.strip())))
    return Fraction(match[1]) * units[match[2]]


def parse_size(text: str) -> int:
    """The number of bytes of a text such as '64KiB'; ValueError for other texts, and for less than 1."""
    error = "size {}; expected bytes, 1 at least, such as 4096, 64KiB, 1.5MiB or 1.2GB"
    nbytes = int(_parsed(text, _BYTES, error))
    if nbytes < 1:
        raise ValueError(error.format(repr(text.strip())))
    return nbytes


def parse_sizes(text: str) -> list[int]:
    """The numbers of bytes of a text such as '1KiB..64MiB' (in factors of 4) or '1KiB,3MiB'; ValueError for other texts."""
    if ".." not in text:
        return [parse_size(part) for part in text.split(",")]
    first, last = (parse_size(part) for part in text.split("..", 1))
    if first > last:
        raise ValueError(f"sizes {text!r}; expected a range that rises")
    sizes = []
    while first <= last:
        sizes.append(first)
        first *= 4
    return sizes


def parse_seconds(text: str) -> float:
    """The seconds of a text such as '5us'; ValueError for other texts."""
    error = "time {}; expected a number and its unit, such as 300ns, 5us, 1.5ms or 2s"
    return float(_parsed(text, _SECONDS, error))


def parse_bandwidth(text: str) -> float:
    """The bytes per second of a text such as '25GB/s'; ValueError for other texts, and for 0."""
    error = "bandwidth {}; expected a number above 0 and its unit, such as 800MB/s, 25GB/s or 100Gbit/s"
    bandwidth = _parsed(text, _BANDWIDTHS, error)
    if not bandwidth:
        raise ValueError(error.format(repr(text.strip())))
    return float(bandwidth)


def parse_counts(text: str) -> list[int]:
    """The integers of a text such as '1..64,100', sorted, without duplicates; ValueError for other texts, and for 0."""
    counts: set[int] = set()
    for part in text.split(","):
        ends = part.split("..", 1)
        for end in ends:
            if not end.isdecimal() or int(end) < 1:
                raise ValueError(f"{end!r}; expected a whole number of at least 1")
        first, last = int(ends[0]), int(ends[-1])
        if first > last:
            raise ValueError(f"{part!r}; expected a range that rises")
        counts.update(range(first, last + 1))
    return sorted(counts)


def show_counts(counts: list[int]) -> str:
    """[1, 2, 3, 7] as '1..3, 7'."""
    runs: list[list[int]] = []
    for count in sorted(counts):
        if runs and count == runs[-1][-1] + 1:
            runs[-1][1:] = [count]
        else:
            runs.append([count])
    return ", ".join("..".join(map(str, run)) for run in runs)


def show_seconds(seconds: float) -> str:
    """0.0000125 as '12.5 µs'."""
    shown = {unit: float(f"{seconds * scale:.3g}") for unit, scale in (("µs", 1e6), ("ms", 1e3), ("s", 1.0))}
    unit = next((unit for unit, value in shown.items() if value < 1000), "s")
    return f"{shown[unit]:g} {unit}"
