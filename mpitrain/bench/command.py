"""`python -m mpitrain bench`: measures, prints, and writes the files; `--report` puts files together, without MPI."""

import gc
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from collectives import Communicator, is_live_terminal
from collectives.bench.plot import need_matplotlib
from collectives.commands.measuring import writable
from mpitrain.bench.options import OURS, Options, parse
from mpitrain.bench.plot import plot
from mpitrain.bench.report import groups, tables
from mpitrain.bench.results import Case, Launch, Measured, Row

if TYPE_CHECKING:
    from mpitrain.bench.contestant import Place

_FILE_WIDTH = 240  # of what goes to a file or a pipe: no column is cut
_TIMEOUT_S = 600.0  # of torch.distributed, which waits while the other contestants are at work

_NO_DEEPSPEED = "it is not installed (pip install deepspeed)"


def main(words: Sequence[str], comm: Communicator) -> None:
    """Measure, and print on rank 0. An error of all ranks for what cannot be done."""
    with comm.together():
        options = parse(words)
        if options.plot:
            need_matplotlib()
        if options.contestants == ("deepspeed",) and not _has_deepspeed():
            raise ValueError(f"bench: --only deepspeed: {_NO_DEEPSPEED}")
    writable(comm, options.json, options.plot)
    launch = _measure(options, comm)
    with comm.together():
        if comm.rank == 0:
            if options.json:
                launch.write(options.json)
            _show([launch], options.plot)


def report(words: Sequence[str]) -> None:
    """Print the tables of several launches. ValueError, OSError, NoMatplotlibError."""
    options = parse(words)
    _show([Launch.read(file) for file in options.report], options.plot)


def _show(launches: Sequence[Launch], picture: str | None) -> None:
    live = is_live_terminal()
    Console(width=None if live else _FILE_WIDTH, force_terminal=live, highlight=False).print(
        *tables(launches), sep="\n"
    )
    if picture and groups(launches)[1:]:
        raise ValueError("bench: --plot draws launches on one kind of machine and ranks; these are on several")
    if picture and any(launch.measured for launch in launches):
        plot(picture, launches)


def _measure(options: Options, comm: Communicator) -> Launch:
    import torch  # takes seconds: wrong arguments are known by now

    from mpitrain.bench.contestant import Place
    from mpitrain.bench.overhead import overhead
    from mpitrain.config import ParallelConfig
    from mpitrain.train.placement import matmul_flops_per_s, place

    taken = place(comm, ParallelConfig(threads=options.threads, bind=False))
    on_gpu = taken.device.type == "cuda"
    here = Place(comm, taken.device, torch.bfloat16 if on_gpu else torch.float32)
    launch = Launch(
        machine=comm.machine(),
        ranks=comm.size,
        nodes=comm.num_nodes,
        threads=taken.threads,
        device=torch.cuda.get_device_name(taken.device) if on_gpu else "cpu",
        dtype=str(here.dtype).removeprefix("torch."),
        steps=options.steps,
    )
    if options.overhead:
        return replace(launch, overhead=overhead(here, steps=options.steps))
    names, skipped = _taking_part(options, here)
    store = _start_torch_distributed(here) if set(names) - {OURS, "none"} else None
    comm.barrier()
    flops_per_s = sum(comm.all_gather_object(matmul_flops_per_s(here.device, here.dtype))) / comm.size
    measured = []
    for case in options.cases:
        rows = _rows(names, case, here, steps=options.steps, flops_per_s=flops_per_s)
        measured.append(Measured(case, rows, skipped))
    if store is not None:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return replace(launch, measured=measured)


def _rows(names: Sequence[str], case: Case, here: "Place", *, steps: int, flops_per_s: float) -> list[Row]:
    """Make the contestants, measure them, and let go of them."""
    from mpitrain.bench.contestants import contestant
    from mpitrain.bench.memory import peak_of, pss
    from mpitrain.bench.timing import largest, measure, sampled_steps

    before = pss()
    contestants = [contestant(name, case.config(), here) for name in names]
    alone = len(contestants) == 1
    sampler = sampled_steps(contestants[0], case, here) if alone else None
    rows = measure(contestants, case, here, steps=steps, flops_per_s=flops_per_s)
    if sampler is not None:
        rows = [replace(rows[0], **largest(peak_of(sampler, before, here.device), here.comm))]
    for one in contestants:
        one.close()
    contestants.clear()
    gc.collect()  # hooks and models refer to each other
    return rows


def _taking_part(options: Options, here: "Place") -> tuple[list[str], dict[str, str]]:
    """The contestants, and who cannot be one and why. ValueError on all ranks if that is the only one."""
    import torch

    comm = here.comm
    reasons: dict[str, str] = {}
    if not all(comm.all_gather_object(_has_deepspeed())):
        reasons["deepspeed"] = _NO_DEEPSPEED
    if here.device.type == "cuda" and not all(comm.all_gather_object(comm.node.size <= torch.cuda.device_count())):
        reasons |= dict.fromkeys(("ddp", "fsdp", "deepspeed"), "NCCL needs a GPU for each rank")
    skipped = {name: reasons[name] for name in options.contestants if name in reasons}
    names = [name for name in options.contestants if name not in skipped]
    with comm.together():
        if not names:
            raise ValueError(f"bench: {options.contestants[0]} cannot be measured: {reasons[options.contestants[0]]}")
    return names, skipped


def _has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def _start_torch_distributed(here: "Place") -> Any:
    from collectives.bench.gloo import start_process_group

    if here.device.type == "cuda":
        return start_process_group(here.comm, "nccl", here.device, timeout_s=_TIMEOUT_S)
    return start_process_group(here.comm, "gloo", timeout_s=_TIMEOUT_S)
