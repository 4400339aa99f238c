"""The time of a step in each sink, and in torch's writer of event files."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from collectives.bench.kit.turns import drawn_order
from mpitrain.job.record.files.lines import LinesFile
from mpitrain.job.record.sinks import About, make_sinks
from mpitrain.job.record.sinks.sink import tag

_OTHER_BYTES = 32 << 20
"""Memory that is written before each step, so that caches hold nothing of the sink, as after a step of training."""
_FIGURES = (
    "loss", "lr", "grad_norm", "tokens_per_s", "step_s", "data_s", "forward_s", "backward_s", "optimizer_s", "comm_s", "comm_hidden_s",
    "memory_bytes", "mfu", "check_s", "loss_scale",
)  # fmt: skip

Write = Callable[[int, Mapping[str, float]], object]


def measured(room: Path, *, rounds: int, steps: int) -> dict[tuple[str, bool], float]:
    """The median microseconds of a step of 15 figures, by contestant and by whether other memory was written before."""
    rng, other = np.random.default_rng(0), np.zeros(_OTHER_BYTES, np.uint8)
    figures = [dict(zip(_FIGURES, rng.random(len(_FIGURES)).tolist(), strict=True)) for _ in range(steps)]
    taken: dict[tuple[str, bool], list[float]] = {}
    with ExitStack() as opened:
        writers = dict(_writers(room, opened))
        names = [(name, is_cold) for name in writers for is_cold in (False, True)]
        step = 0
        for number in range(rounds):
            for i in drawn_order(number, len(names)):
                name, is_cold = names[i]
                times = []
                for each in figures:
                    step += 1
                    if is_cold:
                        other += 1
                    began = time.perf_counter()
                    writers[name](step, each)
                    times.append(time.perf_counter() - began)
                taken.setdefault(names[i], []).append(median(times) * 1e6)
    return {name: median(times) for name, times in taken.items()}


def _writers(room: Path, opened: ExitStack) -> dict[str, Write]:
    """What is compared: the record of the run, each sink that is installed, and torch's writer if TensorBoard is."""
    record = LinesFile(room / "metrics.jsonl", steps_done=0)
    opened.callback(record.close)
    writers: dict[str, Write] = {"metrics.jsonl": lambda step, figures: record.write({"step": step, **figures})}
    for name in ("csv", "tensorboard"):
        (sink,) = make_sinks([name])
        (room / name).mkdir()
        opened.callback(sink.close)
        sink.open(About(room / name, 0, {}, "bench"))
        writers[name] = sink.step
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return writers
    theirs: Any = SummaryWriter(str(room / "torch"))
    opened.callback(theirs.close)

    def write(step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            theirs.add_scalar(tag(name), value, step)

    writers["torch.utils.tensorboard"] = write
    return writers
