"""The formats in which float32 elements can be sent, their sizes, and what an implementation of the codec does."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

BLOCK = 256  # elements that share a scale


@dataclass(frozen=True)
class Format:
    """A format of float32 elements on a link.

    `is_exact`: decoding returns the bits that were encoded. `has_scales`: a block of 256 elements is a float32 scale and a byte for
    each element; the last block may be shorter. So the encoded data of a slice that starts at a multiple of 256 elements is a slice of
    the encoded data.
    """

    name: str
    itemsize: int
    has_scales: bool = False

    @property
    def is_exact(self) -> bool:
        return self.itemsize == 4

    def nbytes(self, count: int) -> int:
        """The encoded size of `count` elements."""
        return count * self.itemsize + (4 * -(-count // BLOCK) if self.has_scales else 0)


FORMATS = {
    each.name: each
    for each in (
        Format("fp32", 4),
        Format("bf16", 2),
        Format("fp16", 2),
        Format("int8", 1, has_scales=True),
        Format("fp8", 1, has_scales=True),
    )
}


class Codec(Protocol):
    """An implementation. Arguments as in collectives/codec/__init__.py, which checks them."""

    def encode(self, fmt: Format, x: np.ndarray, data: np.ndarray) -> None: ...
    def decode(self, fmt: Format, data: np.ndarray, x: np.ndarray) -> None: ...
    def decode_add(self, fmt: Format, data: np.ndarray, total: np.ndarray) -> None: ...
