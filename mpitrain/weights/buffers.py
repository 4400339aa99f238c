"""The buffers of a model, such as BatchNorm's statistics, in what is saved and exported: those of data rank 0.

Each rank has its own values until a call of `sync_buffers`. All buffers of a file are of one rank, because the mean of one rank and the
variance of another fit no data. It is the first rank that has these stages of the model: its data rank, and its rank of tensor
parallelism, are 0 (`targets.is_first_holder`). Ignored parameters are saved and exported in the same way, with their state in
the optimizer.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ckpt.convert.formats.safetensors import some
from collectives import Communicator
from mpitrain.placement.agreement import digest
from mpitrain.placement.marks import is_ignored


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model's state dict that are no parameters, by name."""
    params = dict(model.named_parameters(remove_duplicate=False))
    found = model.state_dict(keep_vars=True)
    return {name: value for name, value in found.items() if name not in params and isinstance(value, torch.Tensor)}


def as_on_first_holder(
    model: nn.Module, tensors: Mapping[str, Any], holders: Communicator | None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The tensors of a save with the same names on all `holders`, and those that each of them has whole, with values of its own.

    Nothing keeps these the same: buffers, extra state, and what belongs to ignored parameters. What the first holder lacks, such as the
    state of a parameter without a gradient, is left out. A rank that lacks what the first one has gets no box of it. Collective.
    """
    params = dict(model.named_parameters(remove_duplicate=False))

    def is_own(path: str) -> bool:
        kind, *_, name = path.split("/", 2 if path.startswith("optimizer/") else 1)
        return is_ignored(params[name]) if name in params else kind in ("model", "extra_state")

    mine = {path: None for path in tensors if is_own(path)}
    names = mine if holders is None else holders.broadcast_object(mine)
    found = {path: value for path, value in tensors.items() if path not in mine or path in names}
    found |= {path: [] for path in names if path not in found}
    return found, {path: found[path] for path in names if isinstance(found[path], torch.Tensor)}


def warn_of_differences(
    tensors: Mapping[str, torch.Tensor], comm: Communicator | None, doing: str, *, stacklevel: int
) -> None:
    """In checked mode name the buffers and ignored parameters that differ between ranks, by a RuntimeWarning on rank 0.

    Then it is collective over `comm`.

    `stacklevel`: of the line that the warning shows.
    """
    if comm is None or comm.size == 1 or not comm.checked:
        return
    digests = {name: digest(tensor) for name, tensor in tensors.items() if not tensor.is_meta}
    of_ranks: dict[str, set[str]] = {}
    for theirs in comm.all_gather_object(digests):
        for name, its in theirs.items():
            of_ranks.setdefault(name, set()).add(its)
    different = [name for name, found in of_ranks.items() if len(found) > 1]
    with comm.together(doing):  # a program may make errors of warnings
        if comm.rank == 0 and different:
            warnings.warn(
                f"{doing}: buffers or ignored parameters differ between the ranks: {some(different)}; those of data rank 0 are taken. "
                "mpitrain.sync_buffers(model) makes buffers the same, comm.broadcast a parameter",
                RuntimeWarning,
                stacklevel=stacklevel,
            )
