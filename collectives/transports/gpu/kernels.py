"""Arithmetic on arrays in GPU memory by kernels of torch or CuPy, as `collectives.arrays.reduction` does it in host memory.

Arrays are results of `cuda.view`: NumPy arrays with an address, a length and a dtype, whose elements the host cannot read. Both
libraries give the same bits as the host: fp16 and bf16 are added in fp32 and rounded once, to nearest even; max and min propagate NaN;
a division is not a multiplication by the reciprocal.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from collectives.arrays.buffer import address_of
from collectives.arrays.devices import DeviceArray
from collectives.arrays.dtypes import TABLE, DType
from collectives.arrays.reduction import TORCH_UFUNCS, UFUNCS

_BYTES = TABLE["uint8"]


class Kernels(ABC):
    """`collectives.arrays.reduction.Arithmetic` on one device. When a method returns, its work on the device has ended."""

    def __init__(self, library: Any, index: int) -> None:
        self._library, self._index = library, index

    def reduce_into(self, out: np.ndarray, parts: Sequence[np.ndarray], op: str, dtype: DType) -> None:
        """out = parts[0] op parts[1]; `out` may be one of them."""
        one, other = parts

        def reduce() -> None:
            self._reduce(self._open(out, dtype), self._open(one, dtype), self._open(other, dtype), op, dtype)

        self._run(reduce, out)

    def divide(self, flat: np.ndarray, divisor: int, dtype: DType) -> None:
        """flat /= divisor, for a floating-point `dtype`."""
        self._run(lambda: self._divide(self._open(flat, dtype), divisor, dtype), flat)

    def move(self, target: np.ndarray, source: np.ndarray) -> None:
        """target = source, of the same dtype."""

        def copy() -> None:
            self._open(target.view(np.uint8), _BYTES)[...] = self._open(source.view(np.uint8), _BYTES)

        self._run(copy, target)

    def empty(self, size: int, dtype: np.dtype) -> np.ndarray:
        """Memory for `size` elements, which stays allocated as long as an array uses it."""
        nbytes = size * dtype.itemsize
        with self._on_device():
            memory = self._array(max(nbytes, 1))
            return place(memory, self._address(memory), nbytes, dtype)

    def array(self, values: list[int]) -> tuple[Any, DeviceArray]:
        """An array of these bytes, and its place."""
        with self._on_device():
            array = self._array(values)
            return array, DeviceArray(self._address(array), len(values), self._index, self._stream())

    def reduces(self, dtype: DType, op: str) -> bool:
        """Whether `reduce_into` supports this operation on this type."""
        return True

    def _run(self, start: Any, written: np.ndarray) -> None:
        if written.size:
            with self._on_device():
                start()
                self._synchronize()

    # A library's own arrays on the same addresses, and its operations

    @abstractmethod
    def _open(self, x: np.ndarray, dtype: DType) -> Any: ...
    @abstractmethod
    def _reduce(self, out: Any, one: Any, other: Any, op: str, dtype: DType) -> None: ...
    @abstractmethod
    def _divide(self, x: Any, divisor: int, dtype: DType) -> None: ...
    @abstractmethod
    def _array(self, values: list[int] | int) -> Any:
        """An array of these bytes; for an int, an array of that many bytes without values."""

    @abstractmethod
    def _address(self, array: Any) -> int: ...
    @abstractmethod
    def _stream(self) -> int: ...
    @abstractmethod
    def _on_device(self) -> AbstractContextManager[Any]: ...
    @abstractmethod
    def _synchronize(self) -> None: ...


class TorchKernels(Kernels):
    """Kernels of torch, on its current stream."""

    def reduces(self, dtype: DType, op: str) -> bool:
        # torch has no kernels for wide unsigned types. Sums and products of signed types have the same bits.
        return dtype.numpy.kind != "u" or dtype.itemsize == 1 or op in ("sum", "prod")

    def _open(self, x: np.ndarray, dtype: DType) -> Any:
        kind = getattr(self._library, "uint8" if dtype.itemsize == 1 else f"int{8 * dtype.itemsize}")
        if dtype.numpy.kind == "f" or dtype.is_half or dtype.name == "int8":
            kind = getattr(self._library, dtype.name)
        return self._bytes(x).view(kind)

    def _bytes(self, x: np.ndarray) -> Any:
        return self._library.as_tensor(_Interface(x), device=self._where())

    def _reduce(self, out: Any, one: Any, other: Any, op: str, dtype: DType) -> None:
        getattr(self._library, TORCH_UFUNCS[op])(one, other, out=out)

    def _divide(self, x: Any, divisor: int, dtype: DType) -> None:
        # The divisor is a tensor: by a Python number torch would multiply with the reciprocal.
        wide = getattr(self._library, dtype.accumulate.name)
        x.copy_(x.to(wide) / self._library.full((), divisor, dtype=wide, device=x.device))

    def _array(self, values: list[int] | int) -> Any:
        make = self._library.empty if isinstance(values, int) else self._library.tensor
        return make(values, dtype=self._library.uint8, device=self._where())

    def _address(self, array: Any) -> int:
        return array.data_ptr()

    def _stream(self) -> int:
        return self._library.cuda.current_stream(self._index).cuda_stream

    def _where(self) -> str:
        return f"cuda:{self._index}"

    def _on_device(self) -> AbstractContextManager[Any]:
        return self._library.cuda.device(self._index)

    def _synchronize(self) -> None:
        self._library.cuda.current_stream(self._index).synchronize()


class CupyKernels(Kernels):
    """Kernels of CuPy, on its current stream. bf16 is handled as its bits: only CuPy 14 has the type."""

    def queue_divide(self, flat: np.ndarray, divisor: int, dtype: DType) -> None:
        """`divide` queued on the current stream: the division may end after the return."""
        with self._on_device():
            self._divide(self._open(flat, dtype), divisor, dtype)

    def _open(self, x: np.ndarray, dtype: DType) -> Any:
        kind = {"bool": np.dtype(np.uint8), "bfloat16": np.dtype(np.uint16)}.get(dtype.name, dtype.numpy)
        return self._bytes(x).view(kind)

    def _bytes(self, x: np.ndarray) -> Any:
        return self._library.asarray(_Interface(x))

    def _reduce(self, out: Any, one: Any, other: Any, op: str, dtype: DType) -> None:
        ufunc = getattr(self._library, UFUNCS[op].__name__)
        if dtype.is_half:
            out[...] = self._narrow(ufunc(self._widen(one, dtype), self._widen(other, dtype)), dtype)
        else:
            ufunc(one, other, out=out)

    def _divide(self, x: Any, divisor: int, dtype: DType) -> None:
        if dtype.is_half:
            x[...] = self._narrow(self._widen(x, dtype) / dtype.accumulate.type(divisor), dtype)
        else:
            self._library.divide(x, divisor, out=x)

    def _widen(self, x: Any, dtype: DType) -> Any:
        """The same values in fp32."""
        if dtype.name == "bfloat16":
            return (x.astype(np.uint32) << 16).view(np.float32)
        return x.astype(np.float32)

    def _narrow(self, wide: Any, dtype: DType) -> Any:
        """fp32 rounded to nearest even."""
        if dtype.name != "bfloat16":
            return wide.astype(dtype.numpy)
        bits = wide.view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return self._library.where(self._library.isnan(wide), np.uint16(0x7FC0), rounded)

    def _array(self, values: list[int] | int) -> Any:
        return (self._library.empty if isinstance(values, int) else self._library.array)(values, np.uint8)

    def _address(self, array: Any) -> int:
        return array.data.ptr

    def _stream(self) -> int:
        return self._library.cuda.get_current_stream().ptr

    def _on_device(self) -> AbstractContextManager[Any]:
        return self._library.cuda.Device(self._index)

    def _synchronize(self) -> None:
        self._library.cuda.get_current_stream().synchronize()


def kernels_of(index: int) -> Kernels | None:
    """The kernels of device `index`: torch's if torch uses the GPU, else CuPy's if CuPy is loaded, else None."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_initialized():
        return TorchKernels(torch, index)
    return None if cupy is None else CupyKernels(cupy, index)


class _Interface:
    """The bytes of an array in GPU memory, for torch and CuPy, which view them without a copy."""

    def __init__(self, x: np.ndarray) -> None:
        self.__cuda_array_interface__ = {
            "shape": (x.nbytes,),
            "typestr": "|u1",
            "data": (address_of(x), False),
            "version": 2,  # has no stream: the caller has already waited for the stream of `x`
        }


class _Owned:
    """Memory at an address, for NumPy, which does not read it here. Keeps `owner` alive."""

    def __init__(self, owner: Any, address: int, nbytes: int) -> None:
        self.owner = owner
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def place(owner: Any, address: int, nbytes: int, dtype: np.dtype) -> np.ndarray:
    """A NumPy array that represents `nbytes` bytes in GPU memory. It keeps `owner` alive."""
    return np.asarray(_Owned(owner, address, nbytes)).view(dtype) if nbytes else np.empty(0, dtype)
