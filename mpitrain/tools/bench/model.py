"""The interface of a model with its optimizer in the comparison of training steps."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from collectives import Communicator
from mpitrain.tools.bench.memory import local

LEARNING_RATE = 1e-3


class TrainingSetup(NamedTuple):
    """The ranks, this rank's device and dtype, and its sequences in a step. `ended` ends resources after the measurement."""

    comm: Communicator
    device: torch.device
    dtype: torch.dtype
    ended: ExitStack
    batch: int = 1


class TrainedModel:
    """A model with its optimizer. A step calls `forward`, `backward`, `update` and `clear` in this order."""

    takes_whole_batch = False
    """Whether each rank takes the sequences of all ranks."""

    def __init__(self, model: nn.Module, *, autocast: AbstractContextManager[Any] | None = None) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        self._autocast = autocast or nullcontext()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        with self._autocast:
            loss: torch.Tensor = self.model(tokens[:, :-1], tokens[:, 1:])
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()

    def clear(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad()

    def communication_s(self) -> float | None:
        """Seconds of communication, including waits, since the beginning; None if they are not measured."""
        return None

    def planned_s(self) -> float | None:
        """Seconds of forwards and backwards by the plan of a pipeline; None for other models. Collective."""
        return None

    def held(self) -> Iterator[torch.Tensor]:
        """The tensors of a rank between two steps. For gradients, which have the size of the parameters, it yields meta tensors."""
        for param in (param for group in self.optimizer.param_groups for param in group["params"]):
            yield param.data
            yield torch.empty_like(local(param.data), device="meta")
            yield from (value for value in self.optimizer.state.get(param, {}).values() if torch.is_tensor(value))

    def close(self) -> None:
        """End the processes and groups that the constructor has started. Collective."""
