"""Mutations of bytes and of JSON-like values, decided by a seeded generator."""

import copy
import re
from collections.abc import Iterator
from random import Random
from typing import Any

NUMBERS = [
    *(0, 1, -1, 2, 3, 63, 64, 65, 255, 4096, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 53, (1 << 62) - 1, 1 << 62),
    *((1 << 63) - 1, 1 << 63, 1 << 64, 10**30, 10**400),
]
VALUES = [
    *NUMBERS,
    *(0.0, -0.0, 0.5, 1e308, float("inf"), float("nan"), True, False, None),
    *(
        "",
        ".",
        "..",
        "/",
        "a/b",
        "../x",
        "/dev/zero",
        "\x1b[0m",
        "\x00",
        "\ud800",
        "ü",
        "float32",
        "int8",
        "0" * 16,
        "f" * 32,
    ),
    *([], {}, [0], [0, 0], [[]], [1 << 62] * 3, [1] * 33, {"name": "a"}, ["a"] * 3),
]
"""What takes the place of another value."""

TOKENS = [
    *(
        b"",
        b"\0",
        b"\xff",
        b"\xff" * 8,
        b"\0" * 64,
        b"\n",
        b"\r\n",
        b"\n\n",
        b"\t",
        b" ",
        b",",
        b":",
        b'"',
        b"\\",
        b"'",
        b"#",
        b"=",
    ),
    *(b"[", b"]", b"{", b"}", b"[]", b"{}", b"null", b"true", b"NaN", b"Infinity", b"-1", b"1e999", b"0x7f", b"1_000"),
    *(
        b"[" * 2000,
        b"[" * 100_000,
        b'{"a":' * 2000,
        b"9" * 5000,
        b'"a":1,"a":2,',
        b'"\\ud800"',
        b"\\u0000",
        b"\x1b[31m",
    ),
    *(b"\xef\xbb\xbf", b"\xff\xfe", b"\xc3\x28", b"../", b"/dev/zero", b"A" * 300, b"%s%n", b"${HOME}"),
]
"""What is put between other bytes: what text formats take for special, and beginnings of what is nested too deeply."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all values in JSON."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from places(item, (*path, key))


def mutate_value(rng: Random, root: list[Any]) -> None:
    """Change something in `root`, JSON-like values: remove, repeat, move or copy a value, or put another one in its place."""
    everywhere = [path for path in places(root) if path]
    if not everywhere:
        root.append(copy.deepcopy(rng.choice(VALUES)))
        return
    *parents, key = rng.choice(everywhere)
    at: Any = root
    for parent in parents:
        at = at[parent]
    kind = rng.randrange(6)
    if kind == 0 and len(parents) > 0:
        del at[key]
    elif kind == 1 and isinstance(at, list):
        at.insert(rng.randrange(len(at) + 1), copy.deepcopy(at[key]))
    elif kind == 1:
        at[str(rng.choice(VALUES))] = copy.deepcopy(at[key])
    elif kind == 2:
        other: Any = root
        for step in rng.choice(everywhere):
            other = other[step]
        at[key] = copy.deepcopy(other)
    elif kind == 3 and isinstance(at, list):
        rng.shuffle(at)
    elif type(at[key]) is int:
        at[key] = rng.choice(
            [at[key] + 1, at[key] - 1, at[key] * 2, at[key] ^ 1 << rng.randrange(40), -at[key], rng.choice(NUMBERS)]
        )
    else:
        at[key] = copy.deepcopy(rng.choice(VALUES))


def mutate_bytes(rng: Random, data: bytes) -> bytes:
    """`data` with one change: of a bit, a byte, a number (binary or as text), or of a piece that is removed, repeated or moved."""
    if not data:
        return rng.choice(TOKENS)
    at = rng.randrange(len(data))
    end = min(len(data), at + rng.choice([1, 2, 4, 8, 16, 64, 512, 4096]))
    kind = rng.randrange(11)
    if kind == 0:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + bytes([rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])]) + data[at + 1 :]
    if kind == 2:
        return data[:at]
    if kind == 3:
        return data[:at] + data[end:]
    if kind == 4:
        return data[:end] + data[at:end] * rng.choice([1, 1, 2, 100]) + data[end:]
    if kind == 5:
        return data[:at] + rng.choice(TOKENS) + data[at:]
    if kind == 6:
        number, size = rng.choice(NUMBERS), rng.choice([1, 2, 4, 8])
        packed = (number % (1 << 8 * size)).to_bytes(size, rng.choice(["little", "big"]))
        return data[:at] + packed + data[at + size :]
    if kind == 7 and (numbers := list(re.finditer(rb"\d+", data))):
        found = rng.choice(numbers)
        return data[: found.start()] + str(rng.choice(NUMBERS)).encode() + data[found.end() :]
    if kind == 8:
        to = rng.randrange(len(data))
        return data[:to] + data[at:end] + data[to + end - at :]
    if kind == 9 and (marks := [found.start() for found in re.finditer(rb"[,\n]", data)]):
        first = rng.choice(marks)  # an entry or a line twice
        last = next((mark for mark in marks if mark > first), len(data))
        return data[:last] + data[first:last] + data[last:]
    return data[:at] + rng.choice([bytes(end - at), rng.randbytes(end - at)]) + data[end:]
