"""State dicts of the modules of a cut model. They have this rank's parts, which nothing may take for whole tensors."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from mpitrain.part_tensor import PartTensor
from mpitrain.parts import Part, part_of


def watch(module: nn.Module) -> None:
    """Mark the parts in the state dicts of a module, and let it refuse whole tensors with advice."""
    parts = {key: part_of(param) for key, param in module._parameters.items()}
    cut = {key: part for key, part in parts.items() if part is not None and part.is_cut}
    if cut:
        module.register_state_dict_post_hook(partial(_mark, cut))
        module.register_load_state_dict_pre_hook(partial(_advise, cut))


def _mark(
    cut: Mapping[str, Part], module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    for key, part in cut.items():
        value = state_dict.get(prefix + key)
        if value is not None and not isinstance(value, nn.Parameter):
            state_dict[prefix + key] = PartTensor.of(value, prefix + key, part.full_shape)


def _advise(
    cut: Mapping[str, Part],
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Add advice to the error that torch raises for tensors of another shape."""
    for key, part in cut.items():
        if part.shape != part.full_shape and getattr(state_dict.get(prefix + key), "shape", None) == part.full_shape:
            errors.append(
                f"{prefix}{key} is a whole tensor, and this rank has only a part of it, {part.shape}; load whole tensors by "
                "mpitrain.load_full_state_dict, from rank 0"
            )
            return
