"""The arrays that the contestants of a benchmark share."""

from typing import Any, NamedTuple


class Arrays(NamedTuple):
    """What an operation works on: the whole array, one rank's part, and a second whole array for all_to_all (else empty)."""

    whole: Any
    part: Any
    other: Any
