"""`python -m mpitrain bench batch-norm`: SyncBatchNorm beside the same module whose two messages go over Gloo's all-reduce."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from collectives import Communicator
from collectives.bench.gloo import Gloo
from collectives.bench.kit.turns import slowest, spread, take_turns
from collectives.shared.terminal import positive
from mpitrain.placement.batch_norm import SyncBatchNorm
from mpitrain.tools.bench.options import Parser
from mpitrain.tools.bench.parts.timed_call import TimedCall

SHAPES = ((8, 64, 16, 16), (16, 128, 8, 8), (32, 64, 28, 28))
"""(N, C, H, W) on each rank."""


def main(words: Sequence[str], comm: Communicator) -> None:
    """Measure, and print on rank 0. Collective."""
    with comm.together():
        options = _parse(words)
    torch.set_num_threads(1)
    with ExitStack() as ended:
        over: dict[str, Any] = {"mpitrain": comm, "gloo": Gloo(comm, ended)}
        for shape in SHAPES:
            contestants = {name: TimedCall(comm, _step(shape, each)) for name, each in over.items()}
            series = slowest(comm, take_turns(contestants, rounds=options.rounds, warm_up=5))
            ours, theirs = (spread(series[name, "step"])[0] for name in over)
            if comm.rank == 0:
                print(
                    f"input {' x '.join(map(str, shape))} on each of {comm.size} ranks, forward and backward: "
                    f"{ours * 1e3:.2f} ms, over Gloo {theirs * 1e3:.2f} ms, ratio {ours / theirs:.2f}",
                    flush=True,
                )


def _step(shape: tuple[int, ...], over: Any) -> Callable[[], None]:
    """A forward and a backward of one layer."""
    layer = SyncBatchNorm(nn.BatchNorm2d(shape[1]), over)
    x, grad = torch.randn(shape, requires_grad=True), torch.randn(shape)

    def step() -> None:
        layer(x).backward(grad)
        x.grad = None

    return step


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m mpitrain bench batch-norm",
        description="Times the forward and the backward of SyncBatchNorm, in turn with the same module whose two messages go over "
        "Gloo's all-reduce (under mpirun). It is not torch's SyncBatchNorm, which needs GPUs.",
    )
    parser.add_argument("--rounds", type=positive, default=50, help="steps of each layer (default: %(default)d)")
    return parser.parse_args(words)
