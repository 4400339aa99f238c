"""The models, and the cases in which they are trained. No import of torch or MPI."""

from collections.abc import Mapping
from typing import NamedTuple

SLICES = 8
SETTINGS = (
    *("--train.slices", str(SLICES), "--train.batch", str(SLICES), "--train.eval-batches", "1", "--train.sample-bytes", "0"),
    *("--checkpoint.every", "0", "--resume", "never", "--parallel.bind", "false", "--log.every", "1000000"),
    *("--model.layers", "3", "--model.width", "60", "--model.heads", "4", "--model.context", "64"),
)  # fmt: skip
"""Of all runs. Rows of 60 elements are no multiple of a vector, so tails of shards are in the middle of parameters."""

GPT, LLAMA, BF16 = "gpt", "llama", "bf16"
FAMILIES, OPTIMIZERS = (GPT, LLAMA), ("muon", "lamb", "lars", "sgd")
MODELS: Mapping[str, str] = {
    GPT: "",
    LLAMA: "--model.family llama --model.width 72",
    **{name: f"--optim.name {name}" for name in OPTIMIZERS},
    BF16: "--parallel.param-dtype bfloat16",
}
"""The settings that decide the bits; AdamW and float32 unless they say otherwise. Each model has a run on one rank."""


class BitsCase(NamedTuple):
    """Runs of some models, each on some numbers of ranks. `multiple`: what the layout needs of a number of ranks."""

    words: str
    models: tuple[str, ...]
    ranks: tuple[int, ...]
    settings: str = ""
    multiple: int = 1


RANKS, RESUMED, KILLED, HOSTS = "ranks", "resumed", "killed", "hosts"
CASES: Mapping[str, BitsCase] = {
    RANKS: BitsCase("other numbers of ranks, stage 3 of ZeRO", FAMILIES, (2, 3, 4, 8)),
    **{f"stage-{n}": BitsCase(f"stage {n} of ZeRO", FAMILIES, (3,), f"--parallel.stage {n}") for n in range(3)},
    "private": BitsCase("private storage", FAMILIES, (3,), "--parallel.storage private"),
    "copies": BitsCase("2 copies of the shards (HSDP)", FAMILIES, (4,), "--parallel.copies 2", 2),
    "1f1b": BitsCase("a pipeline of 2, 1f1b", FAMILIES, (2,), "--parallel.pipeline 2", 2),
    "gpipe": BitsCase("a pipeline of 2, gpipe", FAMILIES, (4,), "--parallel.pipeline 2 --parallel.schedule gpipe", 2),
    **{
        name: BitsCase(f"a pipeline of 2, {name}", (GPT,), (2,), f"--parallel.pipeline 2 --parallel.schedule {name}", 2)
        for name in ("interleaved", "zb-h1", "zb-v", "dualpipe-v")
    },
    "optimizers": BitsCase("Muon, LAMB, LARS and SGD", OPTIMIZERS, (2, 4)),
    BF16: BitsCase("bfloat16 with fp32 masters", (BF16,), (2, 3)),
    RESUMED: BitsCase(
        "a run that saves each step, on the first of the numbers of ranks, and one for each stop that goes on, on the next ones",
        (GPT,), (3, 1, 4, 2),
    ),
    KILLED: BitsCase("the last rank is killed halfway, and the others go on in place", (GPT,), (4,), "--train.elastic true"),
    HOSTS: BitsCase("2 hosts, which ./mpirun/cluster makes on this machine", (GPT,), (4,), multiple=2),
}  # fmt: skip
