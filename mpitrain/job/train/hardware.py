"""The hardware that a rank computes on: a GPU, or cores and threads."""

import os
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from collectives import Communicator
from collectives.launcher import launcher_name
from collectives.selection.table_cache import cpu_model
from collectives.transports.mpi import library_version
from mpitrain.job.config import Config, ParallelConfig
from mpitrain.job.record.machine.memory import node_bytes
from mpitrain.torch_glue.products import product


class Hardware(NamedTuple):
    """The hardware of this rank."""

    device: torch.device
    threads: int
    cores: tuple[int, ...]

    def described(self) -> dict[str, Any]:
        """What can change the bits of a run on this rank, in the form of the event `begin`."""
        is_gpu = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.device) if is_gpu else "cpu",
            "threads": self.threads,
            "environment": environment(),
        }


def share_out(allowed: list[set[int]], rank: int) -> tuple[int, ...]:
    """The cores of local rank `rank`. `allowed`: for each local rank the cores that it may run on.

    If the launcher bound each rank to its own cores, these cores stay. Otherwise every rank gets the same number of neighbouring cores.
    With fewer cores than ranks the result is empty.
    """
    everything = sorted(set.union(*allowed))
    if sum(map(len, allowed)) == len(everything):
        return tuple(sorted(allowed[rank]))
    each = len(everything) // len(allowed)
    return tuple(everything[rank * each : (rank + 1) * each])


def of_job(
    allowed: list[set[int]], rank: int, asked: int, on_host: int, *, by_srun: bool
) -> tuple[tuple[int, ...], int, str]:
    """The cores of local rank `rank`, its number of threads, and one line about a job whose ranks have too few cores, else "".

    `asked`: the cores that the job has for each task, 0 if that is not known. `on_host`: the cores of the node. `by_srun`: whether srun
    has started the ranks. Ranks that nobody has bound may run on the cores of other jobs as well: then the result has no cores, and no
    more threads than `asked`.
    """
    cores, everything = share_out(allowed, rank), set.union(*allowed)
    is_bound = sum(map(len, allowed)) == len(everything) and (len(allowed) > 1 or len(everything) < on_host)
    if asked and not is_bound and len(everything) > asked * len(allowed):
        return (), asked, ""
    threads = max(len(cores), 1)
    if asked <= threads:
        return cores, threads, ""
    reason = "there are more ranks on the node than tasks of the job, or what has started them has fewer cores, or has bound them"
    if by_srun:
        reason = (
            "since Slurm 22.05 srun must be told: export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK in the batch script; "
            "see also --cpu-bind"
        )
    said = f"the job has {asked} cores for each task (SLURM_CPUS_PER_TASK), and a rank may run on {threads}: {reason}"
    return cores, threads, said


def cores_of_task(environ: Mapping[str, str] = os.environ) -> int:
    """The cores that a job of Slurm has for each task; 0 if Slurm has not said so."""
    said = environ.get("SLURM_CPUS_PER_TASK", "")
    return int(said) if said.isdecimal() else 0


def with_threads(config: Config) -> ParallelConfig:
    """With slices the number of threads must not follow from the number of ranks, because kernels may divide sums by threads."""
    parallel = config.parallel
    return replace(parallel, threads=1) if config.train.slices and parallel.threads is None else parallel


def take_hardware(comm: Communicator, config: ParallelConfig) -> Hardware:
    """Choose this rank's hardware on its node, and use it from now on. Collective.

    The rank's number within the node selects the GPU. The number of threads comes from the settings, else from OMP_NUM_THREADS, else
    from the number of the rank's cores. If a job's ranks have fewer cores than the job, one rank says so.
    """
    allowed = comm.node.all_gather_object(os.sched_getaffinity(0))
    on_host, by_srun = os.cpu_count() or 1, launcher_name() == "srun"
    cores, most, problem = of_job(allowed, comm.node.rank, cores_of_task(), on_host, by_srun=by_srun)
    problems = comm.all_gather_object(problem)
    if any(problems) and comm.rank == next(rank for rank, each in enumerate(problems) if each):
        print(f"mpitrain: notice: {problem}", file=sys.stderr, flush=True)
    if config.bind and cores:
        os.sched_setaffinity(0, cores)
    threads = config.threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or most
    torch.set_num_threads(threads)
    num_gpus = torch.cuda.device_count()
    if config.device == "cpu" or not num_gpus:
        return Hardware(torch.device("cpu"), threads, cores)
    device = torch.device("cuda", comm.node.rank % num_gpus)
    torch.cuda.set_device(device)
    return Hardware(device, threads, cores)


@cache
def environment() -> dict[str, str]:
    """What can change the bits of a run on this rank, and is no setting: the processor, and versions of libraries."""
    return {
        "cpu": cpu_model(),
        "instructions": torch.backends.cpu.get_cpu_capability(),  # of torch's kernels, such as AVX512
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "mpi": library_version(),
    }


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """The FLOP/s of a large matrix product on this rank while all ranks compute: the reference for the `mfu` of a step.

    Of fp32 on CPUs it is that of the faster library in torch. The layers of a plain model use torch's choice, and those of a
    model that is cut use `mpitrain.torch_glue.products`, which takes oneDNN on some processors.
    """
    # Most CPUs have no instruction for fp16 products, which then take forty times as long.
    n = 8192 if device.type == "cuda" else 256 if dtype is torch.float16 else 1024
    # A separate generator: the measurement must not change the generators that a checkpoint stores. GPUs multiply constants faster.
    a = torch.randn(n, n, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    times = []
    # On CPUs a product takes long enough that few agree, and a relaunch waits for them.
    for multiply in (torch.mm, product) * (10 if device.type == "cuda" else 3):
        start = _now(device)
        multiply(a, a.t())  # as in a linear layer; oneDNN takes 1.04 times as long for a @ a
        times.append(_now(device) - start)
    if device.type == "cuda":
        del a
        torch.cuda.reset_peak_memory_stats(device)  # the products may need more memory than a small model
    return 2 * n**3 / min(times)


def memory_bytes(device: torch.device) -> int:
    """The memory that this rank has now, with shared pages; on a GPU torch's peak."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return int(os.pread(_statm(), 256, 0).split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_of_rank(device: torch.device, comm: Communicator) -> int:
    """The bytes that this rank can have: its GPU's memory, or its share of the node's."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else node_bytes() // comm.node.size


@cache
def _statm() -> int:
    """The file of this process's memory: to open it takes ten times as long as to read it."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
