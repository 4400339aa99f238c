"""The memory of a contestant, and the peaks of its process."""

import resource
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch

from collectives import Communicator

SAMPLES_EVERY_S = 0.01


def state_bytes(held: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors; of a DTensor this rank's part. Memory shared by two tensors counts once; each meta tensor counts."""
    total, seen = 0, set()
    parts = [local(tensor) for tensor in held]  # a list keeps all alive, so no address is used twice
    for part in parts:
        key = None if part.is_meta else (part.data_ptr(), part.numel())
        if key is None or key not in seen:
            seen.add(key)
            total += part.nbytes
    return total


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor unchanged."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def pss() -> int | None:
    """Bytes of this process now. A page that N processes share counts 1/N."""
    try:
        with open("/proc/self/smaps_rollup") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")), None)
    except OSError:
        return None


class PssSampler:
    """`with PssSampler() as sampler:` - then read `sampler.peak`. Each sample walks over all pages of the process: not while timing."""

    def __init__(self, read: Callable[[], int | None] = pss) -> None:
        self.peak: int | None = None
        self._read = read
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "PssSampler":
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            now = self._read()
            if now is None:
                return
            self.peak = max(now, self.peak or 0)
            if self._done.wait(SAMPLES_EVERY_S):
                return


def peaks(sampler: PssSampler, before: int | None, device: torch.device, comm: Communicator) -> dict[str, Any]:
    """The memory fields of a `StepRow`, for the rank that needs most. Collective.

    `before`: the PSS before the model was made.
    """
    of_rank: dict[str, int | None] = {
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_pss_bytes": sampler.peak,
        "added_pss_bytes": None if before is None or sampler.peak is None else sampler.peak - before,
        "peak_gpu_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }
    ranks = comm.all_gather_object(of_rank)
    return {
        name: max((rank[name] for rank in ranks), key=lambda value: (value is None, value or 0)) for name in of_rank
    }
