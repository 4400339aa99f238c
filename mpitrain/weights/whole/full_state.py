"""A sharded model's unsharded state dict: whole tensors on one rank, as in the state dict of a plain model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mpitrain.placement.rank0 import on_rank0
from mpitrain.sharding.buffers import with_memory
from mpitrain.weights.buffers import persistent_buffers, warn_of_differences
from mpitrain.weights.extra_state import extra_states, is_extra_state, modules_with_extra_state
from mpitrain.weights.targets import Target, begin, chunks_on_rank0, fill, ranks_of_model, targets_of, weights_of
from mpitrain.weights.whole.files import some


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The unsharded state dict of a sharded model: in host memory on rank 0, an empty dict on the other ranks. Collective.

    Tensors come in chunks, one after the other: a rank other than 0 needs memory for 16 MiB only. The values are those of the masters,
    which the optimizer updates, and not those that `param_dtype` or `wire_weights` of `fully_shard` makes of them. Between two outer
    steps of `DiLoCo` they are the outer parameters. Buffers, and modules' extra states, are those of data rank 0.
    """
    comm = ranks_of_model(model)
    if comm is None:
        found = model.state_dict().items()
        return {name: value.detach().cpu() if torch.is_tensor(value) else value for name, value in found}
    warn_of_differences(persistent_buffers(model), comm, "full_state_dict", stacklevel=3)
    extra = extra_states(model, comm, "full_state_dict")
    targets = [target for target in weights_of(model) if target.names[0] not in extra]
    chunks = chunks_on_rank0(targets, [target.tensor.dtype for target in targets], comm)
    full: dict[str, Any] = {}
    for target in targets if comm.rank == 0 else ():
        whole = torch.empty(target.shape, dtype=target.tensor.dtype)
        filled, flat = 0, whole.view(-1)
        while filled < whole.numel():
            chunk = next(chunks).reshape(-1)
            flat[filled : filled + chunk.numel()] = chunk
            filled += chunk.numel()
        full |= dict.fromkeys(target.names, whole)
    for _ in chunks:
        raise AssertionError("rank 0 has read all chunks, and other ranks get none")
    return full | extra if comm.rank == 0 else full


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
    """Fill a model, sharded or not, from an unsharded state dict on rank 0. The argument of other ranks is not used. Collective.

    Tensors are broadcast one after the other: a rank other than 0 needs memory for the largest tensor only. Values are cast to the
    dtypes of the model. `strict`: names that only the model or only the dict has are an error.
    Raises, on all ranks and before any change: ValueError for wrong names or shapes, RuntimeError in the middle of a step.
    """
    comm = begin(model, "load_full_state_dict")
    over = ranks_of_model(model)
    if over is None:
        for name, buffer in list(model.named_buffers()):
            if not buffer.is_meta:
                with_memory(model, name)  # torch refuses to fill an expanded buffer
        model.load_state_dict(state_dict, strict=strict)
        return
    targets = {name: target for target in targets_of(model) for name in target.names if not is_extra_state(name)}
    extra = extra_states(model, over, "load_full_state_dict", take=lambda state, name: None)
    found = on_rank0(comm, lambda: _found(targets, list(extra), state_dict, strict), "load_full_state_dict")
    for name, dtype in found.items():
        target = targets[name]
        whole = torch.empty(target.shape, dtype=dtype)
        if comm.rank == 0:
            whole.copy_(state_dict[name])
        over.broadcast(whole)
        fill(model, target, lambda place, whole=whole: whole[place])  # type: ignore[misc]
    given = over.broadcast_object(
        {name: state_dict[name] for name in extra if name in state_dict} if comm.rank == 0 else {}
    )
    with comm.together("load_full_state_dict"):
        for name, module in modules_with_extra_state(model).items():
            if name in given:
                module.set_extra_state(given[name])


def _found(
    targets: Mapping[str, Target], extra: Sequence[str], given: Mapping[str, Any], strict: bool
) -> dict[str, torch.dtype]:
    """The dtypes of the tensors of `given` that the model has, by name. ValueError for tensors that do not fit the model.

    `extra`: the names of the model's extra states.
    """
    known = {*targets, *extra}
    missing = [name for name in (*targets, *extra) if name not in given]
    unknown = [name for name in given if name not in known]
    if strict and (missing or unknown):
        raise ValueError(
            f"the state dict lacks {some(missing)} and has {some(unknown)} that the model does not have; "
            "strict=False loads the others"
        )
    for name, target in targets.items():
        if name in given and tuple(given[name].shape) != target.shape:
            raise ValueError(f"{name} has shape {tuple(given[name].shape)} in the state dict; expected {target.shape}")
    return {name: given[name].dtype for name in targets if name in given}
