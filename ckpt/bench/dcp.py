"""The peer DCP: torch.distributed.checkpoint, in a process group of Gloo beside MPI. Only here is torch imported."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.bench.contestants import Stored
from ckpt.bench.state import Cut, Memory
from collectives import Communicator
from collectives.bench.gloo import start_process_group

_TIMEOUT_S = 600.0  # of torch.distributed, which waits while the others have their turns


def missing(comm: Communicator) -> str | None:
    """Why DCP cannot take part, the same on all ranks, or None. Collective."""
    if not all(comm.all_gather_object(importlib.util.find_spec("torch") is not None)):
        return "torch is not installed"
    import torch.distributed as dist

    if not all(comm.all_gather_object(dist.is_available() and dist.is_gloo_available())):
        return "this build of torch has no Gloo"
    return None


class Dcp(Stored):
    """torch's, with DTensors over the same memory, cut along their rows. `close` ends its process group. Collective."""

    def __init__(
        self, name: str, path: Path, source: Memory, target: Memory, cuts: list[Cut], comm: Communicator
    ) -> None:
        super().__init__(name, path, source, target)
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # as torchrun does
        self._store = start_process_group(comm, "gloo", timeout_s=_TIMEOUT_S)
        mesh = init_device_mesh("cpu", (comm.size,))

        def as_dtensors(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
            return {key: DTensor.from_local(torch.from_numpy(a), mesh, [Shard(0)]) for key, a in arrays.items()}

        self._tensors, self._wanted = as_dtensors(source.arrays(cuts)), as_dtensors(target.arrays(cuts))

    def save(self) -> None:
        """With fsync."""
        import torch.distributed.checkpoint as dcp

        # torch does not list what it exports.
        writer = dcp.FileSystemWriter(self.path, sync_files=True)  # type: ignore[attr-defined]
        dcp.save(self._tensors, storage_writer=writer)  # type: ignore[attr-defined]

    def loads(self) -> dict[str, Callable[[], Any]]:
        """In place."""
        import torch.distributed.checkpoint as dcp

        return {"load": lambda: dcp.load(self._wanted, checkpoint_id=self.path)}  # type: ignore[attr-defined]

    def close(self) -> None:
        """Collective."""
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()
