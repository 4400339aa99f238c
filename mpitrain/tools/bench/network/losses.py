"""`python -m mpitrain bench losses`: what fewer bytes on the network cost in held-out loss.

Each run is one of the main job, in this process. Runs with the same seed have the same initial values and the same batches, so that
the differences of their losses are much smaller than the spread over the seeds.
"""

import argparse
import gc
import io
import json
import shutil
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import collectives
from collectives import Communicator
from collectives.shared.arguments import names_of
from collectives.shared.terminal import console, positive
from mpitrain.job.config import Config, ConfigError, parse
from mpitrain.placement.rank0 import on_rank0
from mpitrain.tools.bench.network.cards import sent_bytes
from mpitrain.tools.bench.network.results import LossesLaunch, LossRun, loss_tables, settings_of
from mpitrain.tools.bench.options import Parser

EXACT = "exact"
SETTINGS = (
    *("--train.eval-every", "0", "--train.sample-bytes", "0", "--checkpoint.every", "0", "--resume", "never"),
    *("--log.every", "1000000", "--train.check-every", "0"),
    *("--parallel.threads", "1", "--parallel.bind", "false"),  # simulated hosts share the cores
)
"""Of all runs: the default GPT, evaluated after its last step alone."""


class _Case(NamedTuple):
    meaning: str
    settings: str
    """RANKS stands for the number of ranks."""


_WHOLE = "--parallel.stage 0"
_COPIES = "--parallel.stage 0 --parallel.copies RANKS --parallel.exact-steps 50"
CASES = {
    EXACT: _Case("all elements, in fp32; the other cases are compared with this one", ""),
    "other-order": _Case(
        "the same in stage 0, where sums have another order: how far rounding alone moves a loss", _WHOLE
    ),
    "bf16": _Case("gradients in bf16", "--parallel.wire bf16"),
    "int8": _Case("gradients in int8", "--parallel.wire int8"),
    "fp8": _Case("gradients in fp8", "--parallel.wire fp8"),
    "bf16-weights": _Case("gradients and weights in bf16", "--parallel.wire bf16 --parallel.wire-weights bf16"),
    "int8-weights": _Case("gradients and weights in int8", "--parallel.wire int8 --parallel.wire-weights int8"),
    "power-sgd-4": _Case(
        "PowerSGD of rank 4 after 50 exact steps, with feedback",
        f"{_WHOLE} --parallel.compress power_sgd --parallel.compress-rank 4 --parallel.exact-steps 50",
    ),
    "diloco-10": _Case(
        "each rank is a copy; after 50 exact steps one outer step (DiLoCo) every 10 steps, momentum 0.5",
        f"{_COPIES} --parallel.local-steps 10 --parallel.outer-lr 1.0 --parallel.outer-momentum 0.5",
    ),
    "diloco-50": _Case(
        "the same every 50 steps, momentum 0.3",
        f"{_COPIES} --parallel.local-steps 50 --parallel.outer-lr 1.0 --parallel.outer-momentum 0.3",
    ),
    "top-k-1": _Case(
        "the largest 1 % of the elements of each matrix, with feedback",
        f"{_WHOLE} --parallel.compress top_k --parallel.compress-share 0.01",
    ),
    "top-k-1-alone": _Case(
        "the same without feedback",
        f"{_WHOLE} --parallel.compress top_k --parallel.compress-share 0.01 --parallel.no-compress-feedback",
    ),
    "top-k-10": _Case(
        "the largest 10 % of the elements of each matrix, with feedback",
        f"{_WHOLE} --parallel.compress top_k --parallel.compress-share 0.1",
    ),
    "top-k-10-alone": _Case(
        "the same without feedback",
        f"{_WHOLE} --parallel.compress top_k --parallel.compress-share 0.1 --parallel.no-compress-feedback",
    ),
}


def main(words: Sequence[str], comm: Communicator) -> None:
    """Train the runs that the file lacks, and print on rank 0. Errors are raised on all ranks."""
    with comm.together():
        options = _parse(words)
    cases = {case: tuple(CASES[case].settings.replace("RANKS", str(comm.size)).split()) for case in options.cases}
    common = (*SETTINGS, "--train.steps", str(options.steps), *options.settings)
    with comm.together():
        for case, its in cases.items():
            _check(case, _config(common, its), comm)
    launch = LossesLaunch.of(comm, settings=common, cases=cases)
    launch = on_rank0(comm, lambda: _with_earlier(launch, options.json))
    for seed in range(options.seeds):
        for case in cases:
            if seed in launch.runs_of(case):
                continue
            folder = Path(f"{options.json}.runs") / f"{case}-{seed}"
            run = _run(_config(common, (*cases[case], "--train.seed", str(seed), "--run", str(folder))), comm, case)
            launch = replace(launch, runs=[*launch.runs, run])
            on_rank0(comm, lambda now=launch, its=run: _keep(now, its, options.json))  # type: ignore[misc]
    with comm.together():
        if comm.rank == 0:
            shutil.rmtree(f"{options.json}.runs", ignore_errors=True)
            console().print(*loss_tables(launch, reference=EXACT), sep="\n")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m mpitrain bench losses",
        description="Trains the default GPT with each way to send fewer bytes, with the same seeds, and compares the held-out losses "
        "(under mpirun, on several nodes). A run of 250 steps takes about a minute on two cores, and all cases with three seeds "
        "take about 40 minutes. An interrupted bench goes on from its file.",
        epilog="\n".join(
            ["cases, by what is sent:", *(f"  {name:<15} {case.meaning}" for name, case in CASES.items())]
        ),
    )
    parser.add_argument(
        "--cases", type=names_of(list(CASES), or_all=True), default=list(CASES), metavar="NAME,..",
        help=f"names of the list below (default: all); differences are to {EXACT}",
    )  # fmt: skip
    parser.add_argument("--steps", type=positive, default=250, help="of each run (default: %(default)s)")
    parser.add_argument("--seeds", type=positive, default=3, help="number of seeds (default: %(default)s)")
    parser.add_argument(
        "--settings", type=str.split, default=[], metavar="TEXT",
        help="further settings of all runs in one text, such as '--model.width 64'",
    )  # fmt: skip
    parser.add_argument(
        "--json", metavar="FILE", default="losses.json",
        help="the file of the figures, written after each run; runs that it has are not done again (default: %(default)s in the "
        "current folder). The runs in progress are in the folder FILE.runs, which is removed at the end",
    )  # fmt: skip
    return parser.parse_args(list(words))


def _config(common: Sequence[str], own: Sequence[str]) -> Config:
    return parse([*common, *own])


def _check(case: str, config: Config, comm: Communicator) -> None:
    """ConfigError if a case would send what EXACT sends."""
    parallel = config.parallel
    if comm.num_nodes == 1 and (parallel.wire, parallel.wire_weights) != ("fp32", "fp32"):
        raise ConfigError(
            f"bench losses: case {case} encodes between nodes alone, and these ranks are on one; expected several nodes, as in "
            "./mpirun/cluster run -H 4x1 -- python -m mpitrain bench losses, or other --cases"
        )


def _with_earlier(launch: LossesLaunch, file: str) -> LossesLaunch:
    """`launch` with the runs of an earlier job in `file`, which must be comparable; the file is made if there is none."""
    if not Path(file).exists():
        launch.write(file)
        return launch
    earlier = LossesLaunch.read(file)
    if settings_of(earlier) != settings_of(launch):
        raise ValueError(
            f"bench losses: {file} has runs of {earlier.ranks_on_nodes} with {' '.join(earlier.settings)}; expected "
            f"{launch.ranks_on_nodes} with {' '.join(launch.settings)}; pass another --json"
        )
    for case in earlier.cases.keys() & launch.cases.keys():
        if list(earlier.cases[case]) != list(launch.cases[case]):
            raise ValueError(
                f"bench losses: {file} has runs of {case} with {' '.join(earlier.cases[case])}; expected "
                f"{' '.join(launch.cases[case])}; pass another --json"
            )
    return replace(launch, cases={**earlier.cases, **launch.cases}, runs=earlier.runs)


def _run(config: Config, comm: Communicator, case: str) -> LossRun:
    """Train one run, and remove its folder. RuntimeError on all ranks if it was asked to stop."""
    from mpitrain.job.train.trainer import Trainer

    began, sent = time.perf_counter(), sent_bytes(comm)
    said = io.StringIO()
    try:
        with redirect_stdout(said):  # a few lines for each run, which say nothing here
            trainer = Trainer(config, comm)
            trainer.fit()
    except BaseException:
        print(said.getvalue(), end="", flush=True)
        raise
    folder = Path(config.run)
    if trainer.step < config.train.steps:
        with comm.together():
            raise RuntimeError(
                f"bench losses: stopped in {folder}; the same command goes on with the run that it was in"
            )
    loss = on_rank0(comm, lambda: _last_heldout_loss(folder / "metrics.jsonl"))
    collectives.set_record_folder(None)
    collectives.set_failure_file(None)
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)
    del trainer
    gc.collect()  # hooks and models refer to each other
    total = sum(comm.all_gather_object(sent_bytes(comm) - sent))
    return LossRun(case, config.train.seed, loss, total, round(time.perf_counter() - began, 1))


def _last_heldout_loss(metrics: Path) -> float:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [float(line["heldout_loss"]) for line in lines if "heldout_loss" in line][-1]


def _keep(launch: LossesLaunch, run: LossRun, file: str) -> None:
    launch.write(file)
    print(f"seed {run.seed}  {run.case}: held-out {run.loss:.4f} nats, {run.seconds:.0f} s", flush=True)
