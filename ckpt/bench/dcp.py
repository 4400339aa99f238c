"""The peer DCP: torch.distributed.checkpoint, in a process group of Gloo beside MPI. Only this module imports torch."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ckpt.bench.state import Cut
from ckpt.bench.stored import Stored
from ckpt.bench.testbed import Testbed
from collectives.bench.kit.torch_group import torch_group


class Dcp(Stored):
    """torch's DCP, with DTensors over the same memory, cut along their rows."""

    def __init__(self, name: str, bed: Testbed, cuts: list[Cut]) -> None:
        super().__init__(name, bed)
        bed.ended.enter_context(torch_group(bed.comm))
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # like torchrun
        mesh = init_device_mesh("cpu", (bed.comm.size,))

        def as_dtensors(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
            return {key: DTensor.from_local(torch.from_numpy(a), mesh, [Shard(0)]) for key, a in arrays.items()}

        self._tensors, self._wanted = as_dtensors(bed.source.arrays(cuts)), as_dtensors(bed.target.arrays(cuts))

    def save(self) -> None:
        """Save with fsync."""
        import torch.distributed.checkpoint as dcp

        # torch does not declare its exports.
        writer = dcp.FileSystemWriter(self.path, sync_files=True)  # type: ignore[attr-defined]
        dcp.save(self._tensors, storage_writer=writer)  # type: ignore[attr-defined]

    def loads(self) -> Mapping[str, Callable[[], Any]]:
        """A load in place."""
        import torch.distributed.checkpoint as dcp

        return {"load": lambda: dcp.load(self._wanted, checkpoint_id=self.path)}  # type: ignore[attr-defined]
