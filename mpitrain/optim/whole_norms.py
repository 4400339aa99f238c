"""Norms of many whole tensors of which ranks hold parts, by one message."""

import math
from collections.abc import Sequence

import torch

from collectives import Communicator
from mpitrain.optim.exact_sums import block_sums, to_digits, to_float
from mpitrain.optim.norms import reduce
from mpitrain.placement.marks import counts_in_norms, is_ordered, rows_of, spread_of
from mpitrain.placement.parts import part_of

_CHUNK = 1 << 15
"""Elements whose squares are added in float32. On CPUs torch's own norm adds all in float32: 8 M elements are off by 2e-4."""


class WholeNorms:
    """Adds up squares over the ranks that hold a parameter: for all parameters of an optimizer by one message.

    Parts that several ranks hold count once. The stages of a pipeline have different parameters, so no message goes between them, and a
    stage may have none. Only a tied parameter, which several stages have, counts in the first of them, and a message of its own then
    gives the others the same bits. If a parameter is marked as ordered, the norms have the same bits at any number of ranks.

    Args:
        params: the parameters of the optimizer, in the same order on all ranks that hold them.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        self._is_ordered = any(is_ordered(param) for param in params)
        self._counts = torch.tensor([[counts_in_norms(param)] for param in params], dtype=torch.float64)
        held: dict[Communicator, list[int]] = {}
        tied: dict[Communicator, list[int]] = {}
        for index, param in enumerate(params):
            if (spread := spread_of(param)) is not None and spread.holders.size > 1:
                held.setdefault(spread.holders, []).append(index)
            if (part := part_of(param)) is not None and part.tied is not None:
                tied.setdefault(part.tied, []).append(index)
        self._messages = [*held.items(), *tied.items()]

    def of(self, *kinds: Sequence[torch.Tensor | None]) -> list[list[float]]:
        """The 2-norms of whole tensors: for each kind (parameters, updates) those of all parameters. Collective.

        A tensor of a kind is this rank's part, in the shape of the parameter's part, and None is zeros. All ranks get the same norms.
        """
        squares = torch.stack([self._squares(kind) for kind in kinds]) * self._counts
        for comm, indices in self._messages:
            sent = squares[:, indices]
            reduce(comm, sent)
            squares[:, indices] = sent
        return [[math.sqrt(to_float(message)) for message in of_kind] for of_kind in squares.tolist()]

    def _squares(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The sum of the squares of each tensor, as a message for `to_float`."""
        if not self._is_ordered:
            return _squares(tensors).unsqueeze(1)
        rows = [
            None if each is None else rows_of(param, each) for param, each in zip(self._params, tensors, strict=True)
        ]
        return torch.stack([to_digits(sums) for sums in block_sums(rows)])


def _squares(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The sum of the squares of each tensor: float64, on the host. The host waits once for each device other than the CPU."""
    sums = torch.zeros(len(tensors), dtype=torch.float64)
    elsewhere: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor is None or not tensor.numel():
            continue
        if tensor.device.type == "cpu":
            sums[index] = sum(torch.dot(chunk, chunk).item() for chunk in _in_real(tensor).view(-1).split(_CHUNK))
        else:
            elsewhere.setdefault(tensor.device, []).append(index)
    for indices in elsewhere.values():
        found = [tensor for index in indices if (tensor := tensors[index]) is not None]
        norms = torch.stack(torch._foreach_norm([_in_real(tensor) for tensor in found], dtype=torch.float64))
        sums[indices] = norms.square().cpu()
    return sums


def _in_real(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor in float32 or float64, contiguous."""
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return real.to(torch.promote_types(real.dtype, torch.float32)).contiguous()
