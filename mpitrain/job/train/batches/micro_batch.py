"""The sequences of one forward, and their way to a GPU."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from mpitrain.models.loss import IGNORED, num_counted
from mpitrain.models.segments import Segments


class MicroBatch(NamedTuple):
    """Sequences of one forward: (B, L) int64 each, in host memory. Targets with -100 (`models.loss.IGNORED`) do not count.

    `segments`: the documents of the rows; None if attention goes over whole rows. `num_padding`: the tokens that only fill rows up.
    `copy`: on a GPU, if it is on its way. `sources`: (B,), the number of each row's source of data; None if it is not known. `slice`:
    the number of the slice of the global batch that the sequences are; None without slices. `seed`: the numbers for `seed_all` before
    the forward in training; None: the random generators go on.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    segments: Segments | None = None
    num_padding: int = 0
    copy: "_Copy | None" = None
    sources: np.ndarray | None = None
    slice: int | None = None
    seed: tuple[int, ...] | None = None

    @property
    def num_counted(self) -> int:
        """The number of targets that count."""
        return int(num_counted(self.targets))

    @property
    def counted_by_row(self) -> torch.Tensor:
        """The number of targets that count in each row: (B,) int64."""
        return (self.targets != IGNORED).sum(1)

    def to(self, device: torch.device) -> "MicroBatch":
        """The same sequences on a device."""
        if self.copy is not None:
            return self.copy.arrived()
        return self.each(lambda tensor: tensor.to(device))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        """The same with other tensors."""
        segments = self.segments and self.segments.each(change)
        return self._replace(tokens=change(self.tokens), targets=change(self.targets), segments=segments, copy=None)


class _Copy(NamedTuple):
    """A copy on a GPU, which is there after the event."""

    batch: MicroBatch
    event: torch.cuda.Event

    def arrived(self) -> MicroBatch:
        """The copy, for kernels on the current stream."""
        stream = torch.cuda.current_stream(self.batch.tokens.device)
        stream.wait_event(self.event)

        def used(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(
                stream
            )  # else its memory is free for the stream of the copies as soon as Python drops it
            return tensor

        return self.batch.each(used)


class GpuCopies:
    """Copies to a GPU, from pinned memory and on a stream of their own: so they travel while the GPU computes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def begun(self, batch: MicroBatch) -> MicroBatch:
        """The same micro-batch, with a copy that is on its way."""
        with torch.cuda.stream(self._stream):
            copy = batch.each(lambda tensor: tensor.pin_memory().to(self._device, non_blocking=True))
            return batch._replace(copy=_Copy(copy, self._stream.record_event()))
