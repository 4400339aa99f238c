"""`python -m mpitrain bench`: measures, prints, and writes the files; `--report` combines files, without MPI."""

import argparse
import gc
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from collectives import Communicator
from collectives.bench.kit.running import measure_and_show
from collectives.bench.kit.turns import make_each
from collectives.shared.terminal import console
from mpitrain.tools.bench.bench_report import tables
from mpitrain.tools.bench.options import parse
from mpitrain.tools.bench.plot import plot
from mpitrain.tools.bench.results import BenchCase, MeasuredCase, TrainingLaunch

if TYPE_CHECKING:
    from mpitrain.tools.bench.model import TrainingSetup


def main(words: Sequence[str], comm: Communicator) -> None:
    """Measure, and print on rank 0. Errors are raised on all ranks."""
    with comm.together():
        options = parse(words)
    measure_and_show(comm, lambda: _measure(options, comm), tables, json=options.json, plot=options.plot, draw=plot)


def report(words: Sequence[str]) -> None:
    """Print the tables of several launches. Raises ValueError, OSError or UsageError."""
    options = parse(words)
    launches = [TrainingLaunch.read(file) for file in options.report]
    console().print(*tables(launches), sep="\n")
    if options.plot:
        plot(options.plot, launches)


def _measure(options: argparse.Namespace, comm: Communicator) -> TrainingLaunch:
    import torch  # takes seconds, so it follows the check of the arguments

    from mpitrain.job.config import ParallelConfig
    from mpitrain.job.train.hardware import matmul_flops_per_s, take_hardware
    from mpitrain.tools.bench.model import TrainingSetup
    from mpitrain.tools.bench.overhead import overhead

    taken = take_hardware(comm, ParallelConfig(threads=options.threads, bind=False))
    on_gpu = taken.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    launch = TrainingLaunch.of(
        comm,
        threads=taken.threads,
        device=torch.cuda.get_device_name(taken.device) if on_gpu else "cpu",
        dtype=str(dtype).removeprefix("torch."),
        steps=options.steps,
    )
    with ExitStack() as ended:
        setup = TrainingSetup(comm, taken.device, dtype, ended)
        if options.overhead:
            return replace(launch, overhead=overhead(setup, steps=options.steps))
        comm.barrier()
        flops_per_s = sum(comm.all_gather_object(matmul_flops_per_s(setup.device, dtype))) / comm.size
        return replace(launch, measured=[_measured(options, case, setup, flops_per_s) for case in options.cases])


def _measured(options: argparse.Namespace, case: BenchCase, setup: "TrainingSetup", flops_per_s: float) -> MeasuredCase:
    """Make the contestants of a case, measure and free them. ValueError on all ranks if there is only one and it cannot be made."""
    from mpitrain.tools.bench.memory import peaks, pss
    from mpitrain.tools.bench.models import MAKERS
    from mpitrain.tools.bench.timing import measure, sampled_steps

    before, setup = pss(), setup._replace(batch=case.batch)
    models, skipped = make_each({name: partial(MAKERS[name], case.config(), setup) for name in options.contestants})
    with setup.comm.together():
        for name in options.contestants if not models else ():
            raise ValueError(f"bench: {name} cannot be measured: {skipped[name]}")
    sampler = sampled_steps(next(iter(models.values())), case, setup) if len(models) == 1 else None
    rows = measure(models, case, setup, steps=options.steps, flops_per_s=flops_per_s)
    if sampler is not None:
        rows = [replace(rows[0], **peaks(sampler, before, setup.device, setup.comm))]
    for model in models.values():
        model.close()
    models.clear()
    gc.collect()  # hooks and models refer to each other
    return MeasuredCase(case, rows, skipped)
