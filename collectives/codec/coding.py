"""Encoding and decoding by the implementation that runs here, with a check of the arrays."""

import numpy as np

from collectives.codec.choice import chosen
from collectives.codec.formats import Format


def encode(fmt: Format, x: np.ndarray, out: np.ndarray) -> None:
    """out = `x` in the format. `x`: 1-D, contiguous, float32; `out`: 1-D, contiguous, uint8, of fmt.nbytes(x.size) bytes.

    ValueError for other arrays; they need not be aligned. The numbers are rounded to nearest even. In int8 and fp8 (OCP's e4m3) the
    largest magnitude of a block becomes 127 or 448, and a block with a NaN or an infinity decodes to NaN, all of it.
    """
    _check(fmt, x, out)
    _check_writable(out)
    chosen().codec.encode(fmt, x, out)


def decode(fmt: Format, data: np.ndarray, out: np.ndarray) -> None:
    """out = the elements of `data`, which `encode` has written. `out`: 1-D, contiguous, float32. ValueError for other arrays."""
    _check(fmt, out, data)
    _check_writable(out)
    chosen().codec.decode(fmt, data, out)


def decode_add(fmt: Format, data: np.ndarray, total: np.ndarray) -> None:
    """total += the elements of `data`, in float32, with one rounding for each element. Arrays as for `decode`."""
    _check(fmt, total, data)
    _check_writable(total)
    chosen().codec.decode_add(fmt, data, total)


def _check(fmt: Format, x: np.ndarray, data: np.ndarray) -> None:
    for what, array, dtype, size in (
        ("elements", x, np.float32, x.size),
        ("data", data, np.uint8, fmt.nbytes(x.size)),
    ):
        if array.dtype != dtype or array.shape != (size,) or not array.flags.c_contiguous:
            kind = "contiguous" if array.flags.c_contiguous else "strided"
            raise ValueError(
                f"{what} in {fmt.name}: {kind} {array.dtype} of shape {array.shape}; "
                f"expected contiguous {np.dtype(dtype).name} of shape ({size},)"
            )


def _check_writable(out: np.ndarray) -> None:
    if not out.flags.writeable:
        raise ValueError("the result is a read-only array; expected one that can be written to")
