"""A check that all ranks shard the same model in the same way. Otherwise they would wait for each other, or mix two models."""

import hashlib

from torch import nn

from collectives import Communicator
from mpitrain.sharding.setup.options import Options
from mpitrain.sharding.unit.marks import box_of
from mpitrain.sharding.unit.registry import kind_of


def check_alike(module: nn.Module, options: Options, comm: Communicator) -> None:
    """ValueError on all ranks, with the first difference, if models or arguments differ. Collective: 16 bytes per rank."""
    if comm.size == 1:
        return
    mine = _described(module, options)
    digests = comm.all_gather_object(hashlib.blake2b("\n".join(mine).encode(), digest_size=16).digest())
    if len(set(digests)) == 1:
        return
    theirs = comm.all_gather_object(mine)
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    first, other = theirs[0], theirs[rank]
    at = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
    said = [lines[at] if at < len(lines) else "nothing more" for lines in (first, other)]
    raise ValueError(
        f"fully_shard: the ranks differ: {said[0]} on rank 0, {said[1]} on rank {rank}; build the same model on all ranks and "
        "shard it with the same arguments in the same order"
    )


def _described(module: nn.Module, options: Options) -> list[str]:
    """One line for each argument, parameter and buffer that must be the same on all ranks."""
    lines = [f"a module {kind_of(module).__name__}", *options.described()]
    ignored = options.ignored
    names: dict[int, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        tied = names.setdefault(id(param), name)
        if tied != name:
            lines.append(f"parameter {name}, tied to {tied}")
        elif box_of(param) is not None:
            lines.append(f"parameter {name}, sharded already")
        else:
            how = ", ignored" if id(param) in ignored else "" if param.requires_grad else ", frozen"
            dtype = str(param.dtype).removeprefix("torch.")
            lines.append(f"parameter {name} of shape {tuple(param.shape)}, {dtype}, on {param.device.type}{how}")
    for name, buffer in module.named_buffers():
        dtype = str(buffer.dtype).removeprefix("torch.")
        lines.append(f"buffer {name} of shape {tuple(buffer.shape)}, {dtype}, on {buffer.device.type}")
    return lines
