"""The memory of a rank by kind, in bytes. Nothing here is collective.

The kinds of `python -m mpitrain memory`, put together: "parameters" is its parameters and full parameters in private memory,
"gradients" and "optimizer" are its own, "shared" is its full parameters and gradient buffers in node memory, its shared activations and
its data, and "other" is the rest: activations and what the allocator keeps of them, and the process.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from collectives.transports.node.mappings import mapped_share_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn


class MemoryGauges:
    """The memory of this rank. Walks through the model once: a walk takes longer than all the rest of a sample.

    Args:
        model: by `fully_shard`.
        optimizer: of the model.
        device: on which this rank computes.
    """

    def __init__(self, model: "nn.Module", optimizer: "torch.optim.Optimizer", device: "torch.device") -> None:
        from mpitrain.sharding.unit.unit import units_of

        self._params, self._optimizer, self._device = list(model.parameters()), optimizer, device
        self._flats = [flat for unit in units_of(model) for flat in unit.flats]

    def sample(self) -> dict[str, float]:
        """memory/parameters_bytes, memory/gradients_bytes, memory/optimizer_bytes, memory/shared_bytes, memory/other_bytes.

        Call it between an optimizer's step and the next `zero_grad`: then the gradients of the shards are there. Full gradients and
        activations live only within a step.

        On CPUs: "shared" is this rank's share of all node memory of its communicators, 1/N of memory that N ranks map, so the sum over
        the ranks of a node is what the node uses. "other" is the rest of the resident memory that is not in shared memory. The copies
        of an elastic run (`train.elastic`) are in neither, because files of their own have them.

        On a GPU: "other" is torch's peak on the device less the kinds that are there, so the device's kinds add up to `memory_bytes`.
        """
        import torch

        states = self._optimizer.state.values()
        kinds = {
            "parameters": list(self._parameters()),
            "gradients": [param.grad for param in self._params if param.grad is not None],
            "optimizer": [value for state in states for value in state.values() if isinstance(value, torch.Tensor)],
        }
        figures = {f"memory/{kind}_bytes": float(sum(each.nbytes for each in its)) for kind, its in kinds.items()}
        if self._device.type == "cuda":
            held = torch.cuda.max_memory_allocated(self._device)
            known = sum(each.nbytes for its in kinds.values() for each in its if each.device.type == "cuda")
        else:
            held, known = private_bytes(), int(sum(figures.values()))
        figures["memory/shared_bytes"] = float(mapped_share_bytes())
        return figures | {"memory/other_bytes": float(max(held - known, 0))}

    def _parameters(self) -> "Iterator[torch.Tensor]":
        """Shards, and full parameters that have memory now, in private memory. No two of them are in the same memory."""
        for flat in self._flats:
            storage = flat.storage
            if storage.kind != "resident" and storage.full_buffer.untyped_storage().nbytes():
                yield storage.full_buffer
            if not storage.in_place:  # else the shards are rows of the full parameters
                yield from (param.shard for param in flat.params)


def private_bytes() -> int:
    """The resident memory of this process without shared memory; 0 where the system does not tell (/proc/self/status)."""
    try:
        with open("/proc/self/status") as file:
            found = dict(line.split(":", 1) for line in file)
        return sum(int(found[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
    except (OSError, KeyError):
        return 0
