"""All gauges of a rank in one sample."""

from typing import TYPE_CHECKING

from mpitrain.job.record.gauges.host import HostGauges
from mpitrain.job.record.gauges.memory import MemoryGauges
from mpitrain.job.record.gauges.nvml import GpuGauges, id_of

if TYPE_CHECKING:
    import torch
    from torch import nn


class Gauges:
    """What a rank reads about its memory, its GPU and its node. Nothing is collective.

    A sample takes less than a millisecond, so the caller samples only every few seconds.

    Args:
        model: by `fully_shard`.
        optimizer: of the model.
        device: on which this rank computes.
    """

    def __init__(self, model: "nn.Module", optimizer: "torch.optim.Optimizer", device: "torch.device") -> None:
        self._memory = MemoryGauges(model, optimizer, device)
        self._host = HostGauges()
        self._gpu = GpuGauges(id_of(device)) if device.type == "cuda" else None

    def sample(self) -> dict[str, float]:
        """The figures that are known here, by name. Rates are of the time since the last sample. Call it after an optimizer's step."""
        figures = self._memory.sample() | self._host.sample()
        return figures if self._gpu is None else figures | self._gpu.sample()
