"""Arrays in GPU memory: where they lie, and the way through pinned host memory for a transport that cannot read them there.

CUDA tensors of torch, and whatever offers `__cuda_array_interface__`: CuPy arrays, Numba's and others
(https://nvidia.github.io/numba-cuda/user/cuda_array_interface.html). torch and CuPy are never imported here.
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
    """An array in GPU memory, as a transport that reads it there needs it.

    `address`: of the first element. `index`: the device's number in this process; None where the array does not tell.
    `stream`: the pointer of the CUDA stream that is to be waited for before the array is read or written; None: nothing to wait for.
    """

    address: int
    nbytes: int
    index: int | None
    stream: int | None


def say_once(text: str, about: str = "") -> None:
    """Log `text` the first time: as a warning on the first rank, for information on the others. `about`: said once, in any words."""
    if (about or text) not in _said:
        _said.add(about or text)
        _log.log(logging.WARNING if launched_rank() <= 0 else logging.INFO, text)


def describe(x: Any, name: str, *, writable: bool) -> tuple[DeviceArray, DType]:
    """Where an array in GPU memory lies, and its dtype. ValueError if it is not contiguous, or masked, or read-only if `writable`."""
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
    # The array's own dtype where it has one: a type string has no word for bf16.
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
    # Before version 3 an array could not tell its stream.
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

    The copy runs on the current stream, so after the kernels in it that produce `x`, and has ended on return.
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
    return pinned.view(torch.uint8).numpy().view(row.numpy)  # as bytes: NumPy has no word for bf16


def to_device(x: Any, flat: np.ndarray) -> Any:
    """Copy what `to_host` gave back to `x`, on the current stream; it has ended on return. Returns `x`."""
    given, x = x, _of_a_library(x)
    if not _is_tensor(x):
        with x.device:
            x.set(flat.reshape(x.shape))
            sys.modules["cupy"].cuda.get_current_stream().synchronize()
        return given
    torch = sys.modules["torch"]
    x.detach().view(-1).copy_(torch.from_numpy(bits(flat)).view(x.dtype))
    return given


def bits(flat: np.ndarray) -> np.ndarray:
    """`flat` as torch can take it over: as integers if it is of bf16 or float8, which NumPy has no word for."""
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
