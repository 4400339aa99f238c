"""How each contestant is started, for each size of the model."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from collectives.programs import python
from mpitrain.tools.bench.jobs import checkout
from mpitrain.tools.bench.jobs.job import BenchJob

RANKS, EVERY, STEPS = 2, 10, 200
TORCHRUN, TORCHFT = "torchrun", "torchft"
NAMES: Mapping[str, str] = {
    "in-place": "the other rank goes on from the copies in node memory",
    "relaunch": "the supervisor starts the job again, from the checkpoint of step 10 k",
    "relaunch-copies": "the same from copies in node memory (--train.elastic true --train.min_ranks 2)",
    TORCHRUN: "torchrun --max-restarts, FSDP2 and DCP on Gloo",
    TORCHFT: "the other replica of torchft's DDP goes on, from no earlier step; then the time until both train",
}


class Size(NamedTuple):
    """The numbers of a model, and the global batch."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int


SIZES: Mapping[str, Size] = {"tiny": Size(192, 3, 3, 128, 12), "101m": Size(768, 14, 12, 128, 2)}


def start(name: str, size: Size, run: Path) -> BenchJob:
    """Start the job of a contestant in the folder `run`."""
    mpirun, env = checkout.mpirun(RANKS)
    # A restart of a contestant finds its modules compiled, as a user's does.
    env = {variable: value for variable, value in env.items() if variable != "PYTHONDONTWRITEBYTECODE"}
    if name == TORCHFT:
        words = [word for of, number in size._asdict().items() for word in (f"--{of}", str(number))]
        words += ["--steps", str(STEPS), "--replicas", str(RANKS)]
        return BenchJob((), env, words, run, module="benchmarks.recovery.torchft_ddp")
    if name == TORCHRUN:
        torchrun = (
            *python("torch.distributed.run"),
            "--nproc-per-node",
            str(RANKS),
            "--max-restarts",
            "3",
        )
        words = [word for of, number in size._asdict().items() for word in (f"--{of}", str(number))]
        words += ["--steps", str(STEPS), "--every", str(EVERY)]
        # Else restarted ranks may find the addresses of the ended ones, and use up the restarts (pytorch issue 135712).
        env = {**env, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return BenchJob(
            (*torchrun, "--standalone", "--no-python", "--"),
            env,
            words,
            run,
            module="benchmarks.recovery.fsdp2",
        )
    words = [word for of in size._fields[:4] for word in (f"--model.{of}", str(getattr(size, of)))]
    words += ["--train.batch", str(size.batch), "--train.steps", str(STEPS), "--train.eval_batches", "0"]
    words += ["--train.sample_bytes", "0", "--parallel.threads", "1"]
    supervisor = (*python("mpitrain"), "elastic", "--")
    copies = ["--train.elastic", "true", "--train.copy_every", str(EVERY), "--checkpoint.every", "0"]
    if name == "in-place":
        return BenchJob(mpirun, env, [*words, *copies], run)
    if name == "relaunch":
        plain = (mpirun[0], "-np", str(RANKS))
        return BenchJob((*supervisor, *plain), env, [*words, "--checkpoint.every", str(EVERY)], run)
    return BenchJob((*supervisor, *mpirun), env, [*words, *copies, "--train.min_ranks", str(RANKS)], run)


def ranks_of(name: str, job: BenchJob) -> dict[int, int]:
    """The process id of each rank."""
    if name not in (TORCHRUN, TORCHFT):
        return job.ranks()
    return {int(file.suffix[1:]): int(file.read_text()) for file in job.run.glob("pid.*")}
