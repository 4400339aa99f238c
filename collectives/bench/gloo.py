"""The peer Gloo: torch.distributed's backend for host memory, started inside the same MPI job. Only here is torch imported."""

import os
from collections.abc import Callable
from datetime import timedelta
from socket import gethostname
from typing import TYPE_CHECKING, Any

from collectives.arrays.buffer import is_torch, like
from collectives.arrays.dtypes import dtype_of
from collectives.communicator.communicator import Communicator

if TYPE_CHECKING:
    from collectives.bench.arrays import Arrays

TIMEOUT_S = 60


class Gloo:
    """A process group of Gloo over the ranks of `comm`, one thread each. Collective. `close()` ends it.

    Rank 0 keeps the store by which the ranks find each other, at a port that the system chooses and MPI passes on. On several nodes its
    address is MASTER_ADDR or the host's name. RuntimeError on all ranks if torch is missing or Gloo does not start.
    """

    def __init__(self, comm: Communicator) -> None:
        with comm.together("gloo"):
            try:
                import torch
                import torch.distributed as dist
            except ImportError as error:
                raise RuntimeError(f"torch is missing ({error})") from None
            if not dist.is_available() or not dist.is_gloo_available():
                raise RuntimeError("this build of torch has no Gloo")
        torch.set_num_threads(1)
        store = start_process_group(comm, "gloo")
        self._torch, self._dist, self._store = torch, dist, store
        self._refused: dict[tuple[str, str], str] = {}

    def close(self) -> None:
        """End the process group. Collective."""
        self._dist.barrier()
        self._dist.destroy_process_group()

    def call(self, comm: Communicator, operation: str, arrays: "Arrays") -> Callable[[], Any] | str:
        """A call of `operation` on the memory of `arrays`, or why Gloo has none such. Collective."""
        dtype = dtype_of(arrays.whole.dtype).name
        key = (operation, dtype)
        if key not in self._refused:
            small = [self._torch.zeros(n, dtype=getattr(self._torch, dtype)) for n in (comm.size, 1, comm.size)]
            try:
                with comm.together():
                    self._make(operation, *small)()
                self._refused[key] = ""
            except Exception as error:
                self._refused[key] = f"gloo has no {operation} of {dtype}: {str(error).splitlines()[0]}"
        return self._refused[key] or self._make(operation, *(self._tensor(array) for array in arrays))

    def _tensor(self, array: Any) -> Any:
        if is_torch(array):
            return array
        return like(array, getattr(self._torch, dtype_of(array.dtype).name))

    def _make(self, operation: str, whole: Any, part: Any, other: Any) -> Callable[[], Any]:
        dist = self._dist
        is_root, size = dist.get_rank() == 0, dist.get_world_size()
        parts = list(whole.chunk(size)) if is_root else None
        # torch 2.13 renamed two, and warns of the old names
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return {
            "all_reduce": lambda: dist.all_reduce(whole),
            "all_gather": lambda: gather(whole, part),
            "reduce_scatter": lambda: reduce_scatter(part, whole),
            "broadcast": lambda: dist.broadcast(whole, 0),
            "reduce": lambda: dist.reduce(whole, 0),
            "gather": lambda: dist.gather(part, parts, 0),
            "scatter": lambda: dist.scatter(part, parts, 0),
            "all_to_all": lambda: dist.all_to_all_single(other, whole),
        }[operation]


def start_process_group(comm: Communicator, backend: str, device: Any = None, timeout_s: float = TIMEOUT_S) -> Any:
    """Start torch.distributed with `backend` over the ranks of `comm`. Collective. RuntimeError on all ranks if it does not start.

    Returns the store by which the ranks find each other; keep it as long as the group. `device`: the GPU of this rank, for NCCL.
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
    return store
