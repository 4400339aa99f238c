"""One flat view of any array: torch and NumPy in host memory without a copy, torch on a GPU through a host copy.

torch is never imported here: a tensor can only be handed in by somebody who did.
"""

import sys
from typing import Any

import numpy as np

from collectives.dtypes import DType, dtype_of


def is_torch(x: object) -> bool:
    """Whether `x` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def as_numpy(x: Any, *, writable: bool = False, name: str = "x") -> np.ndarray:
    """A NumPy view, of the same shape and without a copy, of a contiguous array in host memory.

    `x`: a NumPy array or a torch CPU tensor of a dtype in `collectives.dtypes.TABLE` (torch.bfloat16 becomes ml_dtypes.bfloat16).
    Raises TypeError for anything else, ValueError if it is not contiguous or, where `writable` is asked for, read-only.
    """
    if isinstance(x, np.ndarray):
        view = x
        dtype_of(view.dtype)
        if not view.flags.c_contiguous:
            raise ValueError(
                f"{name} is not contiguous (shape {x.shape}, strides {x.strides}); pass numpy.ascontiguousarray({name})"
            )
        if not view.dtype.isnative:
            raise TypeError(f"{name} has byte order {view.dtype.byteorder!r}; expected the machine's own")
    elif is_torch(x):
        if x.layout != sys.modules["torch"].strided:
            raise TypeError(f"{name} is a {x.layout} tensor; expected a dense one")
        if not x.is_cpu:
            raise TypeError(f"{name} is on {x.device}; expected host memory")
        dtype = dtype_of(x.dtype)
        if not x.is_contiguous():
            raise ValueError(
                f"{name} is not contiguous (shape {tuple(x.shape)}, strides {x.stride()}); pass {name}.contiguous()"
            )
        if x.requires_grad:
            x = x.detach()
        if dtype.name == "bfloat16":
            view = x.view(sys.modules["torch"].int16).numpy().view(dtype.numpy)
        else:
            view = x.numpy()
    else:
        raise TypeError(
            f"{name} is a {type(x).__module__}.{type(x).__name__}; expected a NumPy array or a torch tensor"
        )
    if writable and not view.flags.writeable:
        raise ValueError(f"{name} is read-only; pass a writable array")
    return view


class Buffer:
    """The flat host view `flat` (1-D NumPy) of an array that a collective reads or writes, and its row `dtype` of the dtype table.

    A tensor on a GPU is copied to the host; `flush()` copies it back after a collective wrote to `flat`. Host arrays need neither.
    """

    __slots__ = ("_device_tensor", "_x", "dtype", "flat")

    def __init__(self, x: Any, name: str, *, writable: bool = False) -> None:
        self._device_tensor, self._x = None, x
        if not isinstance(x, np.ndarray) and is_torch(x) and x.is_cuda:
            if not x.is_contiguous():
                raise ValueError(f"{name} is not contiguous (shape {tuple(x.shape)}); pass {name}.contiguous()")
            self._device_tensor = x.detach() if writable else None
            x = x.detach().cpu()  # also waits for the kernels that produce x on the current stream
        self.flat = as_numpy(x, writable=writable, name=name).reshape(-1)
        self.dtype: DType = dtype_of(self.flat.dtype)

    def result(self) -> Any:
        """The array, once `flat` was written: what was written is copied back to the device it came from."""
        self.flush()
        return self._x

    def flush(self) -> None:
        """Copy what was written to `flat` back to the device it came from."""
        if self._device_tensor is not None:
            target = self._device_tensor
            target.copy_(like(self.flat, target.dtype).view(target.shape))


def like(flat: np.ndarray, dtype: object) -> Any:
    """`flat` as an array of the library that `dtype` belongs to, without a copy: a torch tensor for a torch dtype, else itself."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(dtype, torch.dtype):
        return flat
    if dtype == torch.bfloat16:
        return torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(flat)
