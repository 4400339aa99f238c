"""Values of an optimizer's groups and state as JSON, and back: exactly the same values, or an error.

A value of a class made from bool, int, float or text, such as an IntEnum, comes back as the equal bool, int, float or text.

None, bool, int, float and text are as in JSON, and a list of JSON is a tuple. Everything else is an object with its type:

    {"type": "list", "value": [...]}                  {"type": "dict", "value": [[key, value], ...]}    also "Counter", "OrderedDict"
    {"type": "float", "value": "inf"}                 {"type": "int", "value": "99999999999999999999"}
    {"type": "complex", "value": [real, imaginary]}   {"type": "torch.dtype", "value": "bfloat16"}
    {"type": "numpy", "dtype": "float32", "shape": null, "value": [0.25]}    "shape": null for a NumPy scalar
    {"type": "tensor", "dtype": "float32", "shape": [], "device": "cpu", "value": [0.001]}
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import ckpt
from ckpt.storage.local import in_a_line

_MAX_ELEMENTS = 4096
"""Of an array or a tensor as JSON. Larger ones would make the meta of a checkpoint long."""

_MAX_DEPTH = 100
"""Of lists, tuples and dicts in each other. It must fit Python's stack, and the depth that `ckpt` allows."""

_DICTS: dict[str, type] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
_INT64 = 1 << 63
_KEPT = "None, numbers, text, tuples, lists, dicts, dtypes, NumPy arrays and tensors"


def encoded(
    value: Any, where: str, keep: Callable[[torch.Tensor], dict[str, Any]] | None = None, depth: int = 0
) -> Any:
    """`value` as JSON. TypeError that names `where` if it, or something in it, cannot come back the same.

    `keep(tensor)`: stores a tensor elsewhere, and returns the object that stands for it; None: tensors are small, and are in the JSON.
    """

    def each(item: Any, place: str) -> Any:
        return encoded(item, f"{where}{place}", keep, depth + 1)

    if depth > _MAX_DEPTH:
        raise TypeError(f"{where[:80]}... is nested more than {_MAX_DEPTH} deep, or holds itself; expected less depth")
    if isinstance(value, torch.Tensor):
        check_dense(value, where)
        return _of_tensor(value, where) if keep is None else keep(value)
    if isinstance(value, np.ndarray | np.generic):
        return _of_numpy(value, where)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if -_INT64 <= value < _INT64 else {"type": "int", "value": str(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"type": "float", "value": repr(float(value))}
    if isinstance(value, complex):
        return {"type": "complex", "value": [encoded(part, where) for part in (value.real, value.imag)]}
    if isinstance(value, torch.dtype):
        return {"type": "torch.dtype", "value": str(value).removeprefix("torch.")}
    if type(value) is tuple:
        return [each(item, f"[{i}]") for i, item in enumerate(value)]
    if type(value) is list:
        return {"type": "list", "value": [each(item, f"[{i}]") for i, item in enumerate(value)]}
    kind = type(value).__name__
    if isinstance(value, dict) and type(value) is _DICTS.get(kind):
        items = [[encoded(key, where), each(item, f"[{key!r}]")] for key, item in value.items()]
        return {"type": kind, "value": items}
    raise TypeError(
        f"{where} is a {kind}, which a checkpoint cannot keep; expected {_KEPT}: change it, or keep it elsewhere"
    )


def decoded(value: Any, tensor: Callable[[dict[str, Any]], torch.Tensor]) -> Any:
    """The value of `encoded`. `tensor`: makes the tensor of an object that is none of those above but "tensor", or stands for one.

    ckpt.CheckpointError for what `encoded` does not make. Nothing is larger than its JSON.
    """
    try:
        return _decoded(value, tensor)
    except _DAMAGES as error:
        raise ckpt.CheckpointError(
            f"the checkpoint's meta has a value that no save writes: {type(error).__name__}: {in_a_line(error)}"
        ) from None


_DAMAGES = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError)


def _decoded(value: Any, tensor: Callable[[dict[str, Any]], torch.Tensor]) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_decoded(item, tensor) for item in value)
    if not isinstance(value, dict):
        return value
    kind: str = value["type"]
    content: Any = value.get("value")
    if kind == "list":
        return [_decoded(item, tensor) for item in content]
    if kind in _DICTS:
        return _DICTS[kind]({_decoded(key, tensor): _decoded(item, tensor) for key, item in content})
    if kind in ("int", "float"):
        return {"int": int, "float": float}[kind](content)
    if kind == "complex":
        return complex(*_decoded(content, tensor))
    if kind == "torch.dtype":
        return torch_dtype(content)
    if kind == "numpy":
        if (dtype := np.dtype(value["dtype"])).kind not in "biufc":  # texts would have any length
            raise TypeError(f"the dtype {dtype}")
        flat = np.array(_decoded(content, tensor), dtype)
        return flat[0] if value["shape"] is None else flat.reshape(value["shape"])
    return tensor(value)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of torch with this name. ckpt.CheckpointError if torch has none."""
    if not isinstance(dtype := getattr(torch, name, None), torch.dtype):
        raise ckpt.CheckpointError(f"the checkpoint has the dtype {name!r:.200}, which torch does not know")
    return dtype


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor may be in the JSON."""
    return tensor.numel() <= _MAX_ELEMENTS


def small_tensor(value: dict[str, Any], device: torch.device) -> torch.Tensor:
    """The tensor of {"type": "tensor"}: in host memory if it was there, else on `device`."""
    flat = torch.tensor(_decoded(value["value"], _no_tensor), dtype=torch_dtype(value["dtype"]))
    made = flat.reshape(value["shape"]).to("cpu" if value["device"] == "cpu" else device)
    return made.requires_grad_(value.get("requires_grad", False))


def _no_tensor(value: dict[str, Any]) -> torch.Tensor:
    raise ValueError(f"{value} is of an unknown type")


def check_dense(value: torch.Tensor, where: str) -> None:
    """TypeError for a tensor that is no plain array of numbers in memory."""
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        kind = "quantized" if value.is_quantized else "on the meta device" if value.is_meta else str(value.layout)
        raise TypeError(
            f"{where} is a tensor that is {kind}, which a checkpoint cannot keep; expected a dense tensor with memory"
        )


def _of_tensor(value: torch.Tensor, where: str) -> dict[str, Any]:
    _check_size(value.numel(), tuple(value.shape), where)
    flat = value.detach().cpu().reshape(-1)
    found = {
        "type": "tensor",
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "device": value.device.type,
        "value": [encoded(item, where) for item in flat.tolist()],
    }
    return {**found, "requires_grad": True} if value.requires_grad else found


def _of_numpy(value: Any, where: str) -> dict[str, Any]:
    _check_size(value.size, value.shape, where)
    if value.dtype.kind not in "biufc" or value.dtype.itemsize > (16 if value.dtype.kind == "c" else 8):
        raise TypeError(f"{where} has NumPy's dtype {value.dtype}, which a checkpoint cannot keep; expected numbers")
    shape = list(value.shape) if isinstance(value, np.ndarray) else None
    items = [encoded(item, where) for item in np.asarray(value).reshape(-1).tolist()]
    return {"type": "numpy", "dtype": value.dtype.name, "shape": shape, "value": items}


def _check_size(num: int, shape: tuple[int, ...], where: str) -> None:
    if num > _MAX_ELEMENTS:
        raise TypeError(
            f"{where} has shape {shape}, and a checkpoint keeps at most {_MAX_ELEMENTS} elements there; save it with tensors= of "
            "mpitrain.save, and not there"
        )
