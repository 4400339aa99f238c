"""The main job, small: what the tests of it share. A run of it takes as long as its ranks need to import torch."""

import json
from pathlib import Path
from typing import Any

from checkpoints import tensors
from launching import Result, launch

import ckpt

STEPS, BATCH, CONTEXT = 60, 12, 32

SETTINGS = (
    *("--model.width", "32", "--model.layers", "2", "--model.heads", "2", "--model.context", str(CONTEXT)),
    *(
        "--train.steps",
        str(STEPS),
        "--train.batch",
        str(BATCH),
        "--train.eval-every",
        "25",
        "--train.eval-batches",
        "2",
    ),
    *("--train.sample-bytes", "8", "--optim.warmup-steps", "10", "--checkpoint.every", "20", "--checkpoint.keep", "9"),
    *("--log.every", "1"),
)


def train(num_ranks: int, folder: Path, corpus: Path, *args: str, **options: Any) -> Result:
    """The main job in run `folder`; `args` replace the small settings."""
    return launch(num_ranks, *command(folder, corpus, *args), **{"timeout_s": 100, **options})


def command(folder: Path, corpus: Path, *args: str) -> list[str]:
    return ["-m", "mpitrain", "--run", str(folder), "--data.path", str(corpus), *SETTINGS, *args]


def trained(num_ranks: int, folder: Path, corpus: Path, *args: str, **options: Any) -> Result:
    """`train`, which is to succeed."""
    result = train(num_ranks, folder, corpus, *args, **options)
    assert result.returncode == 0, str(result)
    return result


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    """The loss of steps 1, 2, ... of a run, each once and in order."""
    lines = [line for line in metrics(folder) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def heldout_losses(folder: Path) -> list[float]:
    """The loss of each evaluation of a run, in order."""
    return [line["heldout_loss"] for line in metrics(folder) if "heldout_loss" in line]


def outcome(folder: Path) -> list[tuple[Any, ...]]:
    """What of metrics.jsonl depends on the computation alone, not on the clock."""
    kept = ("step", "loss", "lr", "grad_norm", "heldout_loss")
    return [tuple(line.get(key) for key in kept) for line in metrics(folder)]


def assert_same_end(folder: Path, other: Path) -> None:
    """Two runs came to the same end bit for bit: every loss and every tensor of the last checkpoint."""
    assert outcome(folder) == outcome(other)
    mine, theirs = (tensors(ckpt.latest(run / "checkpoints")) for run in (folder, other))
    assert mine.keys() == theirs.keys()
    assert {name for name in mine if mine[name] != theirs[name]} == set()
    assert any(name.startswith("optimizer/") for name in mine) and "random/states" in mine


def error_line(result: Result) -> str:
    """The one line of a run that was refused."""
    assert result.returncode != 0, str(result)
    assert "Traceback" not in result.stdout + result.stderr, str(result)
    lines = [line for line in (result.stdout + result.stderr).splitlines() if "mpitrain: error:" in line]
    assert len(lines) == 1 and lines[0].startswith("mpitrain: error: "), str(result)
    assert "MPI_ABORT" not in result.stderr, "the ranks did not leave by themselves"
    assert result.seconds < 30.0, str(result)  # on a free machine 3 s
    return lines[0].strip()
