"""Where a rank computes: its GPU, or its cores and how many threads on them."""

import os
import time
from typing import NamedTuple

import torch

from collectives import Communicator
from mpitrain.config import ParallelConfig


class Placement(NamedTuple):
    device: torch.device
    threads: int
    cores: tuple[int, ...]


def share_out(allowed: list[set[int]], rank: int) -> tuple[int, ...]:
    """The cores of local rank `rank`, where each rank may run on `allowed`.

    A launcher that bound the ranks to cores of their own has decided already. Otherwise all cores are dealt out evenly, in runs of
    neighbours; with fewer cores than ranks nobody gets any of its own.
    """
    everything = sorted(set.union(*allowed))
    if sum(map(len, allowed)) == len(everything):
        return tuple(sorted(allowed[rank]))
    each = len(everything) // len(allowed)
    return tuple(everything[rank * each : (rank + 1) * each])


def place(comm: Communicator, config: ParallelConfig) -> Placement:
    """Choose and take this rank's place on its node. Collective.

    A GPU by the rank's number within the node. Threads: as set, else OMP_NUM_THREADS, else one for each of the rank's cores.
    """
    cores = share_out(comm.node.all_gather_object(os.sched_getaffinity(0)), comm.node.rank)
    if config.bind and cores:
        os.sched_setaffinity(0, cores)
    threads = config.threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or max(len(cores), 1)
    torch.set_num_threads(threads)
    num_gpus = torch.cuda.device_count()
    if config.device == "cpu" or not num_gpus:
        return Placement(torch.device("cpu"), threads, cores)
    device = torch.device("cuda", comm.node.rank % num_gpus)
    torch.cuda.set_device(device)
    return Placement(device, threads, cores)


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """What a large matrix product reaches on this rank, all ranks at once: the yardstick for a step (its `mfu`)."""
    # Most CPUs have no instruction for products of fp16, and take forty times as long for them.
    n = 8192 if device.type == "cuda" else 256 if dtype is torch.float16 else 1024
    # A generator of its own: measuring must not move those that the checkpoint keeps. Not constants, which GPUs multiply faster.
    a = torch.randn(n, n, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    times = []
    for _ in range(20):
        start = _now(device)
        torch.mm(a, a)
        times.append(_now(device) - start)
    return 2 * n**3 / min(times)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
