"""This rank's part of a parameter in a state dict: no file may have it in place of the whole parameter.

`PartTensor` computes, copies and loads like any tensor. It cannot be pickled, and does not return its storage, which safetensors reads
first. A result of the same shape (`cpu()`, `half()`, `clone()`, a sum) is a `PartTensor`, too. `ckpt.save` calls its method
`refuse_as_whole`. The error names the functions that write all parts.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from mpitrain.placement.parts import ParameterPart, part_of
from mpitrain.torch_glue.torch_internals import without_overrides


class PartTensor(torch.Tensor):
    """This rank's part of a parameter, or of an optimizer's tensor for this parameter, in a state dict.

    `part.as_subclass(torch.Tensor)` is a plain tensor of the same memory.
    """

    _name: str
    _full_shape: tuple[int, ...] | None
    _remedy: str

    @staticmethod
    def of(part: torch.Tensor, name: str, full_shape: Sequence[int] | None, remedy: str = "") -> "PartTensor":
        """The same memory as a part of the parameter `name`, which has the shape `full_shape`. None, and `remedy`: see `refuse`."""
        made = part.as_subclass(PartTensor)
        made._name, made._full_shape = name, None if full_shape is None else tuple(full_shape)
        made._remedy = remedy
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = (*args, *(kwargs or {}).values())
        with without_overrides():
            result = func(*args, **(kwargs or {}))
            part = next((value for value in given if isinstance(value, PartTensor)), None)
            is_new = type(result) is torch.Tensor and not any(result is value for value in given)
            if part is not None and is_new and result.shape == part.shape and func is not torch.Tensor.as_subclass:
                return PartTensor.of(result, part._name, part._full_shape, part._remedy)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> "PartTensor":
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone()
        return memo[id(self)]

    def refuse_as_whole(self, *args: Any) -> NoReturn:
        """Raise TypeError, because a file would lack the parts of the other ranks."""
        refuse(self._name, self.shape, self._full_shape, self._remedy)

    __reduce_ex__ = storage = untyped_storage = refuse_as_whole


def refuse(name: str, shape: Sequence[int], full_shape: Sequence[int] | None, remedy: str = "") -> NoReturn:
    """TypeError: this rank has a part of `shape` of the parameter `name`, and a file needs the whole. None: it has the whole, and other
    ranks have other parameters. `remedy`: a further one."""
    has = "the parameters of its stages" if full_shape is None else f"{tuple(shape)} of {tuple(full_shape)}"
    raise TypeError(
        f"{name} is divided over ranks: this rank has {has}, and a file of it would lack the parts of the other ranks; "
        "write the whole model by mpitrain.save or mpitrain.export_weights, or take whole parameters from "
        "mpitrain.full_state_dict(model)" + remedy
    )


IN_UNSHARD = (
    "; write a part, such as an adapter, by mpitrain.save(..., only=...), or on all ranks `with mpitrain.unshard(model):` and in it on "
    "rank 0 `model.save_pretrained(folder)`"
)
"""A further remedy, for parameters that `unshard` makes whole."""


def refuse_whole(name: str, shape: Sequence[int], full_shape: Sequence[int]) -> NoReturn:
    """RuntimeError: `load_state_dict` got the whole parameter `name` of `full_shape`, and this rank has a part of `shape`."""
    raise RuntimeError(
        f"load_state_dict: {name} is a whole tensor, of shape {tuple(full_shape)}, and this rank has only a part of it, "
        f"{tuple(shape)}; {LOAD_WHOLE}"
    )


LOAD_WHOLE = (
    "load whole tensors by mpitrain.load_full_state_dict(model, state_dict) on all ranks, with the state dict on rank 0; from "
    "safetensors files by mpitrain.load_weights(model, folder); from a checkpoint by mpitrain.load(path, model, optimizer)"
)


def watch_state_dicts(module: nn.Module) -> None:
    """Mark the parts in the state dicts of a module whose parameters are cut or in stages. It refuses whole tensors with advice."""
    parts = {key: part_of(param) for key, param in module._parameters.items()}
    cut = {key: part for key, part in parts.items() if part is not None and (part.is_cut or part.is_in_stages)}
    if cut:
        module.register_state_dict_post_hook(partial(_mark, cut))
        module.register_load_state_dict_pre_hook(partial(_advise, cut))


def _mark(
    cut: Mapping[str, ParameterPart], module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    for key, part in cut.items():
        value = state_dict.get(prefix + key)
        if value is not None and not isinstance(value, nn.Parameter):
            state_dict[prefix + key] = PartTensor.of(value, prefix + key, part.full_shape if part.is_cut else None)


def _advise(
    cut: Mapping[str, ParameterPart],
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """RuntimeError with advice in place of a line of torch's for each tensor of another shape."""
    for key, part in cut.items():
        if part.shape != part.full_shape and getattr(state_dict.get(prefix + key), "shape", None) == part.full_shape:
            refuse_whole(prefix + key, part.shape, part.full_shape)
