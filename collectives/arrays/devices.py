"""Arrays in GPU memory: their addresses, and copies in pinned host memory for a transport that cannot read GPU memory.

These are CUDA tensors of torch and objects with `__cuda_array_interface__`: arrays of CuPy, Numba and others
(https://nvidia.github.io/numba-cuda/user/cuda_array_interface.html). This module never imports torch or CuPy.
"""

import logging
import sys
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from collectives.arrays.dtypes import DType, dtype_of
from collectives.launcher import launched_rank

_log = logging.getLogger("collectives")
_said: set[str] = set()
LEGACY_STREAM = 1  # CUDA's handle of the default stream, for which all blocking streams wait


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """The description of an array in GPU memory for a transport that reads it there.

    `address`: of the first element. `index`: the device's number in this process; None if the array does not give it. `stream`: the
    handle of the CUDA stream for which a transport waits before it reads or writes the array; None if it need not wait.
    """

    address: int
    nbytes: int
    index: int | None
    stream: int | None


def say_once(text: str, about: str = "") -> None:
    """Log `text` once: a warning on rank 0, information on other ranks. `about`: of texts with the same `about` only one is logged."""
    if (about or text) not in _said:
        _said.add(about or text)
        _log.log(logging.WARNING if launched_rank() <= 0 else logging.INFO, text)


def describe(x: Any, name: str, *, writable: bool) -> tuple[DeviceArray, DType]:
    """The place of an array in GPU memory, and its dtype. ValueError if `x` is not contiguous, is masked, or cannot be `writable`."""
    return _describe_tensor(x, name) if _is_tensor(x) else _describe_interface(x, name, writable)


def _describe_tensor(x: Any, name: str) -> tuple[DeviceArray, DType]:
    row = dtype_of(x.dtype)
    if not x.is_contiguous():
        raise ValueError(
            f"{name} is not contiguous (shape {tuple(x.shape)}, strides {x.stride()}); pass {name}.contiguous()"
        )
    stream = sys.modules["torch"].cuda.current_stream(x.device).cuda_stream
    return DeviceArray(x.data_ptr(), x.numel() * row.itemsize, x.device.index, stream), row


def _describe_interface(x: Any, name: str, writable: bool) -> tuple[DeviceArray, DType]:
    said = x.__cuda_array_interface__
    # The array's own dtype if it has one, because a type string cannot express bf16.
    dtype = np.dtype(getattr(x, "dtype", None) or said["typestr"])
    row = dtype_of(dtype)
    if not dtype.isnative:
        raise TypeError(f"{name} has byte order {dtype.byteorder!r}; expected the machine's own")
    shape, strides = tuple(said["shape"]), said.get("strides")
    if said.get("mask") is not None:
        raise ValueError(f"{name} is masked; pass its data and its mask as two arrays")
    if strides is not None and not _is_contiguous(shape, strides, row.itemsize):
        raise ValueError(
            f"{name} is not contiguous (shape {shape}, strides {tuple(strides)}); pass cupy.ascontiguousarray({name})"
        )
    address, read_only = said["data"]
    if writable and read_only:
        raise ValueError(f"{name} is read-only; pass a writable array")
    # The interface has a stream from version 3 on.
    stream = said.get("stream") if said.get("version", 0) >= 3 else LEGACY_STREAM
    index = getattr(getattr(x, "device", None), "id", None)
    return DeviceArray(address or 0, prod(shape) * row.itemsize, index, stream), row


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    if 0 in shape:
        return True
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def to_host(x: Any, row: DType, *, contents: bool) -> np.ndarray:
    """A flat array in pinned host memory for the elements of `x`, with a copy of them if `contents`.

    The copy runs on the current stream, so it follows the kernels there that write `x`. It has ended on return.
    """
    say_once(f"{type(x).__module__}.{type(x).__name__} in GPU memory goes through pinned host memory")
    x = _of_a_library(x)
    if not _is_tensor(x):
        cupy = sys.modules["cupy"]
        with x.device:
            flat = np.frombuffer(cupy.cuda.alloc_pinned_memory(max(x.nbytes, 1)), np.uint8, x.nbytes).view(row.numpy)
            if contents:
                x.get(out=flat.reshape(x.shape))
                cupy.cuda.get_current_stream().synchronize()
        return flat
    torch = sys.modules["torch"]
    pinned = torch.empty(x.numel(), dtype=x.dtype, pin_memory=True)
    if contents:
        pinned.copy_(x.detach().view(-1))
    return pinned.view(torch.uint8).numpy().view(row.numpy)  # as bytes: NumPy cannot take bf16 from torch


def to_device(x: Any, flat: np.ndarray) -> Any:
    """Copy `flat`, an array that `to_host` returned, back to `x` on the current stream. The copy has ended on return. Returns `x`."""
    given, x = x, _of_a_library(x)
    if not _is_tensor(x):
        with x.device:
            x.set(flat.reshape(x.shape))
            sys.modules["cupy"].cuda.get_current_stream().synchronize()
        return given
    torch = sys.modules["torch"]
    x.detach().view(-1).copy_(torch.from_numpy(bits(flat)).view(x.dtype))
    return given


def flat_of(x: Any) -> Any:
    """An array in GPU memory as a 1-D array of torch or CuPy, without a copy."""
    x = _of_a_library(x)
    return (x.detach() if _is_tensor(x) else x).reshape(-1)


def empty_beside(flat: Any, length: int, row: DType) -> Any:
    """A 1-D array of the library and on the device of `flat`, which `flat_of` returned."""
    if _is_tensor(flat):
        return flat.new_empty(length, dtype=getattr(sys.modules["torch"], row.name))
    with flat.device:
        return sys.modules["cupy"].empty(length, row.numpy)


def bits(flat: np.ndarray) -> np.ndarray:
    """`flat` for `torch.from_numpy`: a view as integers if its dtype is bf16 or float8, which torch cannot take from NumPy."""
    return flat if flat.dtype.isbuiltin == 1 else flat.view(f"i{flat.itemsize}")


def _is_tensor(x: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _of_a_library(x: Any) -> Any:
    """`x`, or the same memory as an array of a library that can copy it to the host and back."""
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if _is_tensor(x) or (cupy is not None and isinstance(x, cupy.ndarray)):
        return x
    if cupy is not None:
        return cupy.asarray(x)
    if torch is not None and torch.cuda.is_available():
        return torch.as_tensor(x, device="cuda")
    raise TypeError(
        f"a {type(x).__module__}.{type(x).__name__} in GPU memory cannot be copied to the host here; "
        "import cupy, or a torch that was built with CUDA"
    )
