"""The buffers of a model with slices, such as BatchNorm's running statistics: the same bits at any number of ranks.

A rank may run several slices in a step. What one slice has left in a buffer must not reach the next one, because the slices of a rank
depend on the number of ranks. So each round begins with the values that the step began with. After the last round a floating-point
buffer is the mean over the slices of what each has made of it, in the order of the tree (tree.py) and in float64; any other buffer is
what slice 0 has made of it. This is the rule of `sync_buffers`, once a step.

BatchNorm's running statistics become (1 - m) r + m x, with the statistics x of a batch. This is linear in x, so with slices x is the
mean of the slices' statistics, and a step counts as one batch. Each slice is normalised with its own statistics, which is ghost batch
normalisation (Hoffer, Hubara and Soudry, "Train longer, generalize better", 2017, 1705.08741).
"""

from typing import TypeGuard

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from collectives import Communicator
from mpitrain.placement.batch_norm import SyncBatchNorm
from mpitrain.placement.parts import stage_of
from mpitrain.sharding.slices.rounds import Slices
from mpitrain.sharding.slices.tree import TreeSum
from mpitrain.torch_glue.torch_internals import count_writes, with_own_counter


class SliceBuffers:
    """The buffers under `root`, a model with slices. They are copied once, for the values of the step's begin.

    `comm`: the ranks with different data. In the stages of a pipeline forwards of later rounds come before the backward of a round, and
    a round has one forward of each stage. Otherwise a round may have several forwards, of which the last one that changes a buffer
    decides.
    """

    def __init__(self, root: nn.Module, slices: Slices, comm: Communicator) -> None:
        self._slices, self._comm = slices, comm
        self.stage = stage_of(root)
        """The stage of a pipeline of which the next forward is; None: the model is not in stages."""
        found: dict[int, _Buffer] = {}  # a buffer that two modules share is one
        for module in root.modules():
            if isinstance(module, SyncBatchNorm):
                module.comm = None
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    found.setdefault(id(buffer), _Buffer(module, name))
        self._buffers = list(found.values())
        self._num_done = 0  # rounds of the step
        self._is_under_way = False  # a step, from its first forward on

    def begin_forward(self) -> None:
        """Called before the outermost forward with gradients."""
        for buffer in self._buffers:
            if self.stage is not None and self._is_under_way:
                buffer.restore()
            buffer.begin_forward(is_first=not self._is_under_way)
        self._is_under_way = True

    def end_forward(self) -> None:
        """Called after it."""
        for buffer in self._buffers:
            if buffer.stage == self.stage:
                buffer.end_forward()
                if self.stage is not None:
                    buffer.end_round()

    def end_round(self) -> None:
        """Called at the end of a backward. Collective after the last round of a step of a model that is not in stages.

        Forwards that activation checkpointing repeats in the backward change nothing.
        """
        if self.stage is not None:
            return
        for buffer in self._buffers:
            buffer.end_round()
            buffer.restore()
        self._num_done += 1
        if self._num_done == self._slices.num_rounds:
            self.end_step()

    def reset(self) -> None:
        """Begin the step again."""
        for buffer in self._buffers:
            buffer.reset()
        self._num_done, self._is_under_way = 0, False

    def abandon(self) -> None:
        """Begin the step again after an exception in a forward or a backward, with the values that the step began with."""
        if self._is_under_way:
            for buffer in self._buffers:
                buffer.restore()
        self.reset()

    @torch.no_grad()
    def end_step(self) -> None:
        """Merge what the rounds have made of the buffers. Collective."""
        if self._buffers:
            changed = torch.tensor([buffer.is_changed for buffer in self._buffers], dtype=torch.uint8)
            self._comm.all_reduce(changed, "max")  # a rank may have skipped modules
            chosen = [buffer for buffer, is_changed in zip(self._buffers, changed.tolist(), strict=True) if is_changed]
            averaged = [buffer for buffer in chosen if buffer.begun.is_floating_point() or buffer.begun.is_complex()]
            self._take_means(averaged)
            self._take_first([buffer for buffer in chosen if buffer not in averaged])
        self.reset()

    def _take_means(self, buffers: "list[_Buffer]") -> None:
        if not buffers:
            return
        device = buffers[0].begun.device
        rounds = [
            torch.cat([_numbers(buffer.of_round(number)).to(device, torch.float64) for buffer in buffers])
            for number in range(self._slices.num_rounds)
        ]
        mine = torch.stack(rounds)
        everyone = torch.empty((self._comm.size, *mine.shape), dtype=mine.dtype, device=device)
        self._comm.all_gather(everyone, mine)
        of_slices = everyone.transpose(0, 1).flatten(0, 1)[: self._slices.count]  # (slices, numbers)
        tree = TreeSum(mine.shape[1], mine.dtype, device)
        tree.add(list(of_slices))
        mean = tree.take(1.0 / self._slices.count)
        for buffer, part in zip(buffers, mean.split([_numbers(each.begun).numel() for each in buffers]), strict=True):
            begun = buffer.begun
            part = part.to(begun.device, begun.dtype.to_real())
            buffer.end_step(torch.view_as_complex(part.view(-1, 2)) if begun.is_complex() else part)

    def _take_first(self, buffers: "list[_Buffer]") -> None:
        """The values of slice 0, the first one of rank 0."""
        if not buffers:
            return
        device = buffers[0].begun.device
        values = torch.cat(
            [buffer.of_round(0).reshape(-1).contiguous().view(torch.uint8).to(device) for buffer in buffers]
        )
        self._comm.broadcast(values)
        for buffer, part in zip(buffers, values.split([each.begun.nbytes for each in buffers]), strict=True):
            buffer.end_step(part.to(buffer.begun.device).clone().view(buffer.begun.dtype))


class _Buffer:
    """One buffer of a module. A tensor of another dtype or shape in its place, such as a cache that grows, is left alone."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name, self.stage = module, name, stage_of(module)
        self._is_of_norm = isinstance(module, _NormBase)
        self.begun = torch.empty(0)
        """The values that the step began with, from its first forward on."""
        # The tensor when this object last used it, and its count of writes.
        self._seen: tuple[torch.Tensor | None, int] | None = None
        self._is_changed = False  # by a forward, since the values were written here
        # The values after the round's last forward that changed them, and after the rounds of the step; None if none did.
        self._of_forward: torch.Tensor | None = None
        self._of_rounds: list[torch.Tensor | None] = []

    def begin_forward(self, *, is_first: bool) -> None:
        """Take the values as those that the step begins with, if this is its first forward, or if a load has written them."""
        if self._is_written or (is_first and self._is_of_norm):
            now = self._now
            self.begun = torch.empty(0) if now is None else now.detach().clone()
            self._of_forward = None
        self._look()

    def end_forward(self) -> None:
        """Keep the values if the forward may have changed them."""
        now = self._now
        if (self._may_change_unseen or self._is_written) and self._is_followed(now):
            self._of_forward, self._is_changed = now.detach().clone(), True
        self._look()

    def end_round(self) -> None:
        """Keep the values after the last forward that changed them as those of a round."""
        self._of_rounds.append(self._of_forward)
        self._of_forward = None

    def restore(self) -> None:
        """Restore the values that the step began with."""
        if self._is_changed or self._may_change_unseen or self._is_written:
            self._write(self.begun)

    def reset(self) -> None:
        """Begin again without forwards and rounds."""
        self._of_forward, self._of_rounds = None, []

    @property
    def is_changed(self) -> bool:
        """Whether some round of this rank may have changed the values."""
        return any(each is not None for each in self._of_rounds)

    def of_round(self, number: int) -> torch.Tensor:
        """The values after a round of the step."""
        found = self._of_rounds[number]
        return self.begun if found is None else found

    def end_step(self, values: torch.Tensor) -> None:
        """Take the values after the step, 1-D."""
        self.begun = values.view(self.begun.shape)
        self._write(self.begun)

    @property
    def _now(self) -> torch.Tensor | None:
        return self._module._buffers.get(self._name)

    def _state(self) -> tuple[torch.Tensor | None, int]:
        now = self._now
        return now, 0 if now is None or now.is_inference() else count_writes([now])

    def _look(self) -> None:
        self._seen = self._state()

    @property
    def _may_change_unseen(self) -> bool:
        """Whether torch's kernels write running statistics, for which the count of writes does not grow."""
        return self._is_of_norm and self._module.training

    @property
    def _is_written(self) -> bool:
        now, num_writes = self._state()
        return self._seen is None or now is not self._seen[0] or num_writes != self._seen[1]

    def _is_followed(self, now: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
        begun = self.begun
        return now is not None and (now.shape, now.dtype, now.device) == (begun.shape, begun.dtype, begun.device)

    @torch.no_grad()
    def _write(self, values: torch.Tensor) -> None:
        now = self._now
        if self._is_followed(now):
            # Forwards of a pipeline wait for their backward, which does not read the running statistics of a layer in training.
            (with_own_counter(now) if self._is_of_norm else now).copy_(values)
        self._is_changed = False
        self._look()


def _numbers(values: torch.Tensor) -> torch.Tensor:
    """The values as real numbers, 1-D."""
    return (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).reshape(-1)
