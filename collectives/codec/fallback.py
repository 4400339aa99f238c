"""The codec in NumPy: its definition, bit for bit, and what runs where no C compiler is installed."""

from collections.abc import Callable

import ml_dtypes
import numpy as np

from collectives.codec.formats import BLOCK, Format

# The largest encoded number, to which a block's largest element is scaled, and the least such element. A block of smaller elements has
# the scale of this one. Then no scale, and no product of a scale and a number, is denormal: a step is at least 2^-126.
LARGEST = {"int8": np.float32(127), "fp8": np.float32(448)}
LEAST = {"int8": np.float32(127 * 2.0**-126), "fp8": np.float32(448 * 2.0**-117)}
# The largest scale: with the scale of float32's largest number, 127 would decode to infinity.
LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))

_INFINITY_BITS = 0x7F800000
_FP8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_CHUNK = 64 * BLOCK  # elements whose temporary arrays stay in the core's cache


def encode(fmt: Format, x: np.ndarray, out: np.ndarray) -> None:
    _in_chunks(fmt, x, out, lambda x, data: _encode_chunk(fmt, x, data))


def decode(fmt: Format, data: np.ndarray, out: np.ndarray) -> None:
    _in_chunks(fmt, out, data, lambda out, data: np.copyto(out, _decoded(fmt, data, out.size)))


def decode_add(fmt: Format, data: np.ndarray, total: np.ndarray) -> None:
    _in_chunks(fmt, total, data, lambda total, data: np.add(total, _decoded(fmt, data, total.size), out=total))


def _in_chunks(fmt: Format, x: np.ndarray, data: np.ndarray, work: Callable[[np.ndarray, np.ndarray], object]) -> None:
    """Calls work(elements, their encoded data) for a chunk at a time; a short last block is a chunk of its own."""
    whole = x.size - x.size % BLOCK
    starts = [*range(0, whole, _CHUNK), *([whole] if whole < x.size else [])]
    with np.errstate(all="ignore"):
        for start in starts:
            stop = min(start + _CHUNK, whole) if start < whole else x.size
            work(x[start:stop], data[fmt.nbytes(start) : fmt.nbytes(stop)])


def _encode_chunk(fmt: Format, x: np.ndarray, data: np.ndarray) -> None:
    if fmt.name == "fp32":
        data[:] = x.view(np.uint8)
    elif fmt.name == "bf16":
        data[:] = _to_bf16(x.view(np.uint32)).view(np.uint8)
    elif fmt.name == "fp16":
        data[:] = _to_fp16(x).view(np.uint8)
    else:
        _encode_blocks(fmt, *_blocks(x, data))


def _encode_blocks(fmt: Format, x: np.ndarray, data: np.ndarray) -> None:
    # As integers the bits of magnitudes compare like the numbers, but infinity and NaN are the largest.
    largest_bits = (x.view(np.int32) & 0x7FFFFFFF).max(axis=1, keepdims=True)
    finite = largest_bits < _INFINITY_BITS
    largest = np.maximum(largest_bits.view(np.float32), LEAST[fmt.name])
    scales = np.minimum(largest / LARGEST[fmt.name], LARGEST_SCALE)
    data[:, :4] = np.where(finite, scales, np.float32(np.nan)).view(np.uint8)
    scaled = x * (LARGEST[fmt.name] / largest)
    if not finite.all():
        scaled[~finite[:, 0]] = 0
    if fmt.name == "int8":
        data[:, 4:] = np.rint(scaled, out=scaled).astype(np.int8).view(np.uint8)
    else:
        data[:, 4:] = _to_fp8(scaled)


def _decoded(fmt: Format, data: np.ndarray, count: int) -> np.ndarray:
    if fmt.name == "fp32":
        return data.view(np.float32)
    if fmt.name == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if fmt.name == "fp16":
        return data.view(np.float16).astype(np.float32)
    _, blocks = _blocks(np.empty(count, np.float32), data)
    scales = np.ascontiguousarray(blocks[:, :4]).view(np.float32)
    numbers = blocks[:, 4:].view(np.int8) if fmt.name == "int8" else _FP8_VALUES[blocks[:, 4:]]
    return (numbers * scales).reshape(-1)


def _blocks(x: np.ndarray, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A chunk by rows: (blocks, elements), and (blocks, bytes of the scale and of the elements)."""
    length = min(x.size, BLOCK)
    return x.reshape(-1, length), data.reshape(-1, 4 + length)


def _to_fp8(scaled: np.ndarray) -> np.ndarray:
    """The codes of e4m3, rounded to nearest even; vector_kernels.h explains the arithmetic. `scaled` is overwritten."""
    bits = scaled.view(np.int32)
    signs = bits >> 24 & -128
    bits &= 0x7FFFFFFF
    normal = bits >> 20 & 1
    normal += bits
    normal += np.int32(0x7FFFF - (120 << 23))
    normal >>= 20
    np.minimum(scaled, np.float32(2.0**-6), out=scaled)
    scaled += np.float32(2.0**14)
    bits -= np.float32(2.0**14).view(np.int32)  # now the codes of subnormal numbers
    np.maximum(normal, bits, out=normal)
    normal |= signs
    return normal.astype(np.uint8)


def _to_bf16(bits: np.ndarray) -> np.ndarray:
    """The upper halves, rounded to nearest even; of a NaN they are kept, and the bit of a quiet NaN is set."""
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))
    quiet = bits | 0x00400000
    return (np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded) >> 16).astype(np.uint16)


def _to_fp16(x: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, beyond 65519 to infinity. A NaN keeps its upper bits, and becomes quiet, as in hardware."""
    half = x.astype(np.float16).view(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        bits = x[nan].view(np.uint32)
        half[nan] = (bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x3FF)
    return half
