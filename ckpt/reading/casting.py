"""Conversions between dtypes of floating-point numbers, with the values that torch's own conversions give."""

import numpy as np

from collectives.arrays.dtypes import DTYPES


def cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`values`, of a floating or complex dtype, as numbers of `dtype`.

    To float8 as in torch: by way of float32, and what is too large for a type becomes its largest number in `float8_e4m3fn`, infinity
    in `float8_e5m2`, and NaN in the other types, which have no infinity. In `float8_e8m0fnu`, which has no sign, absolute values.
    """
    if values.itemsize == 1:  # NumPy cannot convert between some kinds of float8; float32 has the values of all
        values = values.astype(np.float32)
    if dtype.itemsize > 1:
        return values.astype(dtype)
    values = values.astype(np.float32)
    if dtype == DTYPES["float8_e4m3fn"].numpy:
        most = np.float32(448)
        values = np.clip(values, -most, most)  # NaN stays NaN
    elif dtype == DTYPES["float8_e8m0fnu"].numpy:
        return _exponents(values).view(dtype)
    return values.astype(dtype)


def _exponents(values: np.ndarray) -> np.ndarray:
    """float32 as float8_e8m0fnu, the bits of its exponent, uint8: rounded to the nearest power of 2, from the middle up."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    exponents, rest = bits >> 23 & 0xFF, bits & 0x7FFFFF
    is_up = (rest > 0x400000) | ((rest == 0x400000) & (exponents > 0))
    return np.where(exponents == 0xFF, exponents, exponents + is_up).astype(np.uint8)
