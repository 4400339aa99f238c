"""Checkpoints of trained models for `sample` and `mpitrain.load`: their meta and their settings say anything, and the checksum fits."""

import json
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from forging import signed
from fuzzing.mutation import mutate_bytes, mutate_value
from fuzzing.target import Files, Parts, Target, command

import ckpt
import mpitrain
from ckpt.format.manifest import FILE_NAME
from mpitrain.cli import main
from mpitrain.job.config import parse, to_toml
from mpitrain.models import build

_CONFIG = parse(["--model.width", "8", "--model.layers", "1", "--model.heads", "2", "--model.context", "8"])
_OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], tuple[str, ...], tuple[str, ...]]] = [
    (torch.optim.AdamW, ("step",), ("exp_avg", "exp_avg_sq")),
    (torch.optim.NAdam, ("step", "mu_product"), ("exp_avg", "exp_avg_sq")),
    (torch.optim.SGD, (), ("momentum_buffer",)),
]
"""With the state that a step gives them: numbers, and tensors like the parameter. torch's first step imports for seconds."""


def _trained(number: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model as after a step, and its optimizer."""
    kind, numbers, tensors = _OPTIMIZERS[number]
    model = build(_CONFIG.model.resolve())
    optimizer = kind([{"params": [param], "lr": 0.5} for param in model.parameters()], lr=0.1)  # type: ignore[call-arg]
    for param in model.parameters():
        state = {name: torch.ones(()) for name in numbers} | {name: torch.ones_like(param) for name in tensors}
        optimizer.state[param] = state
    return model, optimizer


@cache
def saved(number: int) -> dict[str, bytes]:
    """The files of a checkpoint."""
    model, optimizer = _trained(number)
    meta: dict[str, Any] = {
        "step": 1, "config": to_toml(_CONFIG), "data": {"fingerprint": "x", "next_sample": 12}, "num_ranks": 1,
        "stepper": {"skipped": 1, "scaler": {"scale": 2.0, "good_steps": 1, "skipped_steps": 0}},
        "health": {"left_out": [[0, 12]], "windows": [[0, 0.5], []]}, "hardware": {"ranks": 1},
        "scheduler": {1: torch.ones(2), "counts": (1, 2.5j), "dtype": torch.float16},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        mpitrain.save(f"{folder}/a", model, optimizer, meta=meta)
        return {part.name: part.read_bytes() for part in Path(folder, "a").iterdir()}


class Trained(Target):
    errors = (ValueError,)

    def __init__(self) -> None:
        self._models: dict[int, tuple[torch.nn.Module, torch.optim.Optimizer]] = {}

    def make(self, rng: Random) -> Parts:
        number = rng.randrange(len(_OPTIMIZERS))
        files = saved(number)
        return {
            **files,
            FILE_NAME: [json.loads(line) for line in files[FILE_NAME].splitlines()[:-1]],
            f"kind-{number}": Path.touch,
        }

    def mutate(self, rng: Random, parts: Parts) -> Parts:
        lines = parts[FILE_NAME]
        if rng.random() < 0.1:
            mutate_value(rng, lines)
            return parts
        meta = lines[1]
        if rng.random() < 0.3 and isinstance(meta, dict) and isinstance(meta.get("config"), str):
            meta["config"] = mutate_bytes(rng, meta["config"].encode()).decode(errors="replace")
            return parts
        holder = [meta]
        mutate_value(rng, holder)
        lines[1] = holder[0] if holder and isinstance(holder[0], dict) else meta
        return parts

    def wrap(self, rng: Random, parts: Parts) -> Files:
        files: Files = {f"a/{name}": part for name, part in parts.items() if isinstance(part, bytes)}
        lines = [json.dumps(line).encode() for line in parts[FILE_NAME]]
        return {
            **files,
            f"a/{FILE_NAME}": signed(lines),
            **{name: part for name, part in parts.items() if callable(part)},
        }

    def passes(self, files: Files) -> bool:
        data = files[f"a/{FILE_NAME}"]
        assert isinstance(data, bytes)
        return data == signed(data.splitlines()[:-1])

    def read(self, folder: Path) -> None:
        number = int(next(folder.glob("kind-*")).name[-1])
        if number not in self._models:
            self._models[number] = _trained(number)
        path = folder / "a"
        loaded = mpitrain.load(path, *self._models[number], strict=False)
        assert isinstance(loaded, dict) and not any(entry.nbytes > 1 << 20 for entry in ckpt.open(path).values())
        command(main, ["sample", "--checkpoint", path, "--bytes", 0])


TARGET = Trained()
