"""A common view of arrays of NumPy, torch, JAX and CuPy, and of every object with DLPack or the buffer protocol.

Arrays in host memory are not copied. Arrays in GPU memory are described (devices.py), and copied only if a caller asks for a host view.
This module never imports torch, JAX or CuPy: a caller with an array of these libraries has imported the library.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from typing import Any, Literal

import numpy as np

from collectives.arrays import devices
from collectives.arrays.devices import DeviceArray
from collectives.arrays.dtypes import BFLOAT16, NATIVE, DType, dtype_of

_ALIGN = 64  # bytes: JAX takes over memory with this alignment without a copy

Library = Literal["numpy", "torch", "jax", "cuda", "dlpack", "buffer", "none"]


def is_torch(x: object) -> bool:
    """Whether `x` is a torch tensor, without importing torch."""
    return _library(x) == "torch"


def is_jax(x: object) -> bool:
    """Whether `x` is a JAX array or a jax.ShapeDtypeStruct, without importing JAX."""
    return _library(x) == "jax"


def as_numpy(x: Any, *, writable: bool = False, name: str = "x") -> np.ndarray:
    """A NumPy view, of the same shape and without a copy, of a contiguous array in host memory.

    `x`: a NumPy array, a torch CPU tensor, a JAX array (immutable, so the view is read-only; JAX copies an array on a GPU), or another
    object with DLPack or the buffer protocol, of a dtype in `collectives.arrays.dtypes` (bf16 and float8 become those of ml_dtypes).
    TypeError for other objects, ValueError if `x` is not contiguous, or is read-only although `writable` is true.
    """
    view = x if type(x) is np.ndarray else _OPEN[_library(x)](x, name)
    _check(view, x, name, writable)
    return view


class Buffer:
    """An array that a collective reads or writes: a view of it in host memory, or its place on a GPU.

    `flat`: 1-D NumPy view in host memory. For an array in GPU memory the first access makes a copy in pinned memory, which the log
    mentions once. `dtype`: the row of the dtype table. `device`: None for host memory, else a `DeviceArray`.

    `writable`: the operation writes to `flat` and returns `result()` to its caller. JAX arrays are immutable, so `flat` is then a
    copy and `result()` a new array. `write_only`: the operation writes and does not read `x`, so its contents are not copied; `x` may
    be a jax.ShapeDtypeStruct, or a JAX array that only gives dtype, shape and device. `writes`: `writable` or `write_only`.
    """

    __slots__ = ("_array", "_finish", "_reads", "device", "dtype", "flat", "writes")

    flat: np.ndarray
    dtype: DType
    device: DeviceArray | None

    def __init__(self, x: Any, name: str, *, writable: bool = False, write_only: bool = False) -> None:
        self._array, self.writes = x, writable or write_only
        self._finish: Callable[[Any, np.ndarray], Any] | None = None  # None: the result is `x` as it is
        self.device = None
        if type(x) is np.ndarray:
            view = x
        else:
            library = _libraries.get(type(x)) or _library(x)
            if library == "cuda" or (library == "torch" and x.is_cuda):
                self._reads = not write_only
                self.device, self.dtype = devices.describe(x, name, writable=self.writes)
                return
            if library == "jax" and self.writes:
                self.flat = _jax_copy(x, name, contents=not write_only)
                self.dtype = NATIVE[self.flat.dtype]
                self._finish = _jax_array
                return
            view = _OPEN[library](x, name)
        self.dtype = _check(view, x, name, self.writes)
        self.flat = view if view.ndim == 1 else view.reshape(-1)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.flat.size if self.device is None else self.device.nbytes // self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.flat.nbytes if self.device is None else self.device.nbytes

    @property
    def address(self) -> int:
        """The address of the first element, in host or GPU memory. For an empty array it has no meaning."""
        return address_of(self.flat) if self.device is None else self.device.address

    def current_stream(self) -> int | None:
        """The current stream of the array's library, for an array in GPU memory; None if the array gives no stream."""
        return devices.describe(self._array, "x", writable=False)[0].stream

    def result(self) -> Any:
        """`x` with the contents of `flat`; for JAX a new array on the same device, without another copy."""
        return self._array if self._finish is None else self._finish(self._array, self.flat)

    def __getattr__(self, attribute: str) -> Any:
        # Python calls this for a slot that is not set: the `flat` of an array in GPU memory.
        if attribute != "flat":
            raise AttributeError(attribute)
        self.flat = devices.to_host(self._array, self.dtype, contents=self._reads)
        self._finish = devices.to_device if self.writes else None
        return self.flat


def address_of(flat: np.ndarray) -> int:
    """The address of the first element of a flat host array; for an empty array it has no meaning."""
    mpi = sys.modules.get("mpi4py.MPI")  # mpi4py is faster: `flat.ctypes` takes a microsecond
    return mpi.memory(flat.view(np.uint8)).address if mpi is not None else flat.ctypes.data


def unowned(flat: np.ndarray) -> np.ndarray:
    """A view of the same elements that does not keep their memory alive. The caller must keep it alive."""
    memory = sys.modules["mpi4py.MPI"].memory.fromaddress(address_of(flat), flat.nbytes)
    return np.frombuffer(memory, np.uint8).view(flat.dtype)


def like(flat: np.ndarray, dtype: object) -> Any:
    """`flat` as an array of the library of `dtype`, without a copy: a torch tensor for a torch dtype, else `flat` itself."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(dtype, torch.dtype):
        return flat
    return torch.from_numpy(devices.bits(flat)).view(dtype)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array without values in memory that a JAX array can take over without a copy."""
    nbytes = prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGN, np.uint8)
    start = -raw.ctypes.data % _ALIGN
    return raw[start : start + nbytes].view(dtype).reshape(shape)


# The library of each type of array, found once for each type.
_libraries: dict[type, Library] = {}


def _library(x: object) -> Library:
    known = _libraries.get(type(x))
    if known is None:
        known = _libraries[type(x)] = _find_library(x)
    return known


def _find_library(x: object) -> Library:
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if isinstance(x, np.ndarray):
        return "numpy"
    if torch is not None and isinstance(x, torch.Tensor):
        return "torch"
    if jax is not None and isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return "jax"
    if hasattr(x, "__cuda_array_interface__"):
        return "cuda"
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return "dlpack"
    try:
        memoryview(x)  # type: ignore[arg-type]
    except TypeError:
        return "none"
    return "none" if isinstance(x, np.generic) else "buffer"


# For each library: a view of an array in host memory, and the library's errors. `_check` has the common errors.


def _open_numpy(x: Any, name: str) -> np.ndarray:
    if isinstance(x, np.ma.MaskedArray):
        raise ValueError(f"{name} is masked; pass its data and its mask as two arrays")
    return np.asarray(x)


def _open_torch(x: Any, name: str) -> np.ndarray:
    torch = sys.modules["torch"]
    if x.requires_grad:
        x = x.detach()
    try:
        if x.dtype is torch.bfloat16:  # NumPy cannot take bf16 from torch
            return x.view(torch.int16).numpy().view(BFLOAT16)
        return x.numpy()
    except (TypeError, RuntimeError) as error:
        if x.layout != torch.strided:
            raise TypeError(f"{name} is a {x.layout} tensor; expected a dense one") from None
        if not x.is_cpu:
            raise TypeError(f"{name} is on {x.device}; expected host memory") from None
        row = dtype_of(x.dtype)
        if row.numpy.isbuiltin != 1:  # float8, which NumPy cannot take from torch either
            return x.view(torch.uint8).numpy().view(row.numpy)
        raise TypeError(f"{name} is a tensor that NumPy cannot view: {error}") from None


def _open_jax(x: Any, name: str) -> np.ndarray:
    _jax_check(x, name)
    view = np.asarray(x)
    return view if view.flags.c_contiguous else np.ascontiguousarray(view)  # JAX may choose another layout


def _open_dlpack(x: Any, name: str) -> np.ndarray:
    if (device := tuple(x.__dlpack_device__()))[0] not in (1, 3):  # kDLCPU, kDLCUDAHost
        raise TypeError(f"{name} is a {_kind(x)} on DLPack's device {device}; expected host memory")
    try:
        return np.from_dlpack(x)
    except (TypeError, RuntimeError, BufferError, ValueError) as error:
        raise TypeError(f"{name} is a {_kind(x)} that cannot be viewed in host memory: {error}") from None


def _refuse(x: Any, name: str) -> np.ndarray:
    if _library(x) == "cuda":
        raise TypeError(f"{name} is in GPU memory; expected host memory")
    raise TypeError(f"{name} is a {_kind(x)}; expected an array of NumPy, torch, CuPy or JAX")


_OPEN: dict[Library, Callable[[Any, str], np.ndarray]] = {
    "numpy": _open_numpy,
    "torch": _open_torch,
    "jax": _open_jax,
    "cuda": _refuse,
    "dlpack": _open_dlpack,
    "buffer": lambda x, name: np.asarray(memoryview(x)),
    "none": _refuse,
}


def _check(view: np.ndarray, x: Any, name: str, writable: bool) -> DType:
    """The dtype of `view`, which shows the elements of `x`; TypeError or ValueError if it cannot be sent or written as it is."""
    row = NATIVE.get(view.dtype)
    flags = view.flags
    if row is not None and flags.c_contiguous and (flags.writeable or not writable):
        return row
    row = dtype_of(getattr(x, "dtype", view.dtype))
    if not flags.c_contiguous:
        tensor = _library(x) == "torch"
        shape, strides = (tuple(x.shape), x.stride()) if tensor else (view.shape, view.strides)
        advice = f"pass {name}.contiguous()" if tensor else f"pass numpy.ascontiguousarray({name})"
        if writable:  # .contiguous() would make a copy, and the operation would not change this array
            advice = "an operation writes to this array only if it is contiguous: pass a contiguous array and copy the result"
        raise ValueError(f"{name} is not contiguous (shape {shape}, strides {strides}); {advice}")
    if not view.dtype.isnative:
        raise TypeError(f"{name} has byte order {view.dtype.byteorder!r}; expected the machine's own")
    raise ValueError(f"{name} is read-only; pass a writable array")


def _kind(x: object) -> str:
    return f"{type(x).__module__}.{type(x).__name__}"


# JAX: immutable arrays


def _jax_check(x: Any, name: str, *, contents: bool = True) -> DType:
    """The dtype of a JAX array on one device; TypeError or ValueError for any other array."""
    jax = sys.modules["jax"]
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{name} is traced by JAX (jit, grad, vmap, ...) and has no values yet; "
            "inside such functions use all_reduce, all_gather, reduce_scatter of collectives.jax"
        )
    if isinstance(x, jax.ShapeDtypeStruct) and contents:
        raise TypeError(
            f"{name} is a jax.ShapeDtypeStruct, which has no values; expected an array (a description is enough only for a result)"
        )
    sharding = getattr(x, "sharding", None)
    if sharding is not None and len(sharding.device_set) > 1:
        raise ValueError(
            f"{name} is a JAX array on {len(sharding.device_set)} devices ({sharding}); expected one device: pass the parts, "
            f"shard.data for shard in {name}.addressable_shards, or jax.device_put({name}, jax.local_devices()[0])"
        )
    if sharding is not None and (platform := next(iter(sharding.device_set)).platform) != "cpu":
        devices.say_once(f"JAX arrays on {platform} go through host memory")
    return dtype_of(x.dtype)


def _jax_copy(x: Any, name: str, *, contents: bool) -> np.ndarray:
    """A flat array to write to, with the elements of `x` if `contents`."""
    row = _jax_check(x, name, contents=contents)
    copy = aligned_empty(x.shape, row.numpy)
    if contents:
        copy[...] = np.asarray(x)
    return copy.reshape(-1)


def _jax_array(x: Any, flat: np.ndarray) -> Any:
    """`flat`, which must not be written to any more, as a JAX array of the dtype, shape and device of `x`."""
    jax = sys.modules["jax"]
    # The result is committed to a device only if `x` is: JAX may move uncommitted arrays.
    place = x.sharding if getattr(x, "committed", True) else None
    wide = flat.dtype.itemsize >= 8  # `x` was made with 64-bit types enabled; without them the result has 32
    with jax.enable_x64(True) if wide else nullcontext():
        return jax.device_put(flat.reshape(x.shape), place, may_alias=True)
