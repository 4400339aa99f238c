"""torch.distributed within an MPI job, for the peers that are built on it. Only here is torch imported."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from socket import gethostname
from typing import Any

from collectives.bench.kit.turns import CannotTakePart
from collectives.communicator.communicator import Communicator

TIMEOUT_S = 60


@contextmanager
def torch_group(
    comm: Communicator, backend: str = "gloo", *, device: Any = None, timeout_s: float = TIMEOUT_S
) -> Iterator[None]:
    """torch.distributed over the ranks of `comm` in this block. Collective. RuntimeError on all ranks if it does not start.

    Rank 0 keeps the store by which the ranks find each other, at a port that the system chooses and MPI passes on. On several nodes its
    address is MASTER_ADDR or the host's name. `device`: the GPU of this rank, for NCCL.
    """
    import torch.distributed as dist

    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch does not list it
    timeout = timedelta(seconds=timeout_s)
    if comm.num_nodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name may lead nowhere
    host = "127.0.0.1" if comm.num_nodes == 1 else os.environ.get("MASTER_ADDR") or gethostname()
    store: Any = None
    with comm.together(backend):
        if comm.rank == 0:
            store = make_store(host, 0, comm.size, True, timeout, wait_for_workers=False)
    host, port = comm.broadcast_object((host, store.port if store is not None else None))
    with comm.together(backend):
        if store is None:
            store = make_store(host, port, comm.size, False, timeout)
        dist.init_process_group(
            backend, store=store, rank=comm.rank, world_size=comm.size, timeout=timeout, device_id=device
        )
    yield
    # Not after an error, which may be of this rank alone: the barrier is collective.
    dist.barrier()
    dist.destroy_process_group()


def need_torch(comm: Communicator) -> None:
    """CannotTakePart on all ranks where torch or its Gloo is missing. Collective."""
    with comm.together():
        if find_spec("torch") is None:
            raise CannotTakePart("torch is not installed")
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_gloo_available():
            raise CannotTakePart("this build of torch has no Gloo")
