"""torch.distributed within an MPI job, for the peers that use it. Only this file and these peers import torch.distributed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from socket import gethostname
from typing import Any

from collectives.bench.kit.turns import CannotTakePart
from collectives.communicator.communicator import Communicator
from collectives.diagnosis import on_all_ranks

START_S = 60  # for the ranks to connect
TIMEOUT_S = 600  # of an operation, which may wait for the turns of other contestants


@contextmanager
def torch_group(comm: Communicator, backend: str = "gloo", device: Any = None) -> Iterator[None]:
    """Start torch.distributed on the ranks of `comm` for this block. Collective. CannotTakePart on all ranks if it does not start.

    `device`: the GPU of this rank, for NCCL.
    """
    try:
        store = _start(comm, backend, device)
    except Exception as error:
        if not on_all_ranks(error):
            raise
        raise CannotTakePart(str(error)) from None
    import torch.distributed as dist

    yield
    # Not after an error, which may be on this rank only, because the barrier is collective.
    dist.barrier()
    dist.destroy_process_group()
    del store


def _start(comm: Communicator, backend: str, device: Any) -> Any:
    """Start torch.distributed. Returns the store through which the ranks connect; the caller keeps it as long as the group.

    The store is on rank 0, at a port that the system chooses and MPI sends to the other ranks. On several nodes its address is
    MASTER_ADDR or the host's name.
    """
    with comm.together():
        if find_spec("torch") is None:
            raise RuntimeError("torch is not installed")
        import torch.distributed as dist

        if backend == "gloo" and not (dist.is_available() and dist.is_gloo_available()):
            raise RuntimeError("this build of torch has no Gloo")
    start, timeout = timedelta(seconds=START_S), timedelta(seconds=TIMEOUT_S)
    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch does not list it
    if comm.num_nodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name may have no address
    host = "127.0.0.1" if comm.num_nodes == 1 else os.environ.get("MASTER_ADDR") or gethostname()
    store: Any = None
    with comm.together(backend):
        if comm.rank == 0:
            store = make_store(host, 0, comm.size, True, start, wait_for_workers=False)
    host, port = comm.broadcast_object((host, store.port if store is not None else None))
    with comm.together(backend):
        if store is None:
            store = make_store(host, port, comm.size, False, start)
        dist.init_process_group(
            backend, store=store, rank=comm.rank, world_size=comm.size, timeout=timeout, device_id=device
        )
    return store
