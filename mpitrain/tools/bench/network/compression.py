"""`python -m mpitrain bench compression`: the reduction of a step's gradients by PowerSGD, ours and torch's DDP hook on Gloo.

The gradients are given, so that only their reduction takes time: each contestant's forward is the sum of its parameters times fixed
tensors. The parameters are those of a GPT, the same for both, and both copy none of the fixed tensors. Both begin with a warm start,
have error feedback, and compress from the first timed step. The exact average is measured beside them.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
from torch import nn

from collectives import Communicator
from collectives.bench.kit.torch_group import torch_group
from collectives.bench.kit.turns import CannotTakePart, Seconds, make_each, slowest, spread, take_turns, timed
from collectives.shared.tables import markdown_table
from collectives.shared.terminal import positive
from mpitrain.job.config import ParallelConfig
from mpitrain.job.train.hardware import take_hardware
from mpitrain.models import GPT, GPTConfig
from mpitrain.sharding import fully_shard
from mpitrain.sharding.compression import compress_gradients, power_sgd, top_k
from mpitrain.sharding.compression.power_sgd import PowerSGD
from mpitrain.sharding.compression.top_k import TopK
from mpitrain.tools.bench.options import Parser

WARM_UP = 3
_BEFORE_HOOK = 2  # torch's smallest number of exact steps with error feedback


class _Given(nn.Module):
    """The parameters of a GPT, with a forward whose gradients are fixed tensors."""

    def __init__(self, config: GPTConfig, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        with torch.device("meta"):
            shapes = [param.shape for param in GPT(config).parameters()]
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.grads = [torch.randn(shape, generator=generator) for shape in shapes]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(_Product.apply(weight, grad) for weight, grad in zip(self.weights, self.grads, strict=True))


class _Product(torch.autograd.Function):
    """0 * weight, whose gradient is a copy of a given tensor. A true product would read both once more."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.grad = grad
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, of_output: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[no-untyped-def]
        return ctx.grad.clone(), None


class _Backwards:
    """A contestant (see collectives/bench/kit/turns.py): backwards of a model."""

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self.model, self._comm = model, comm

    def turn(self, round_: int) -> Seconds:
        loss = self.model(torch.zeros(()))
        seconds = timed(self._comm, loss.backward)
        self.model.zero_grad(set_to_none=True)
        return {"reduction": seconds}


def main(words: Sequence[str], comm: Communicator) -> None:
    """Measure, and print on rank 0. Errors are raised on all ranks."""
    with comm.together():
        options = _parse(words)
    take_hardware(comm, ParallelConfig(threads=options.threads, bind=False, device="cpu"))
    config = GPTConfig(vocab=256, context=128, width=options.width, layers=options.layers, heads=8, tied=False)
    hooks: dict[str, PowerSGD | TopK | None] = {"exact": None, "power_sgd": power_sgd(options.rank)}
    if options.top_k:
        hooks["top_k"] = top_k(options.top_k)
    with ExitStack() as ended:
        makers: dict[str, Callable[[], nn.Module]] = {
            name: partial(_ours, config, comm, hook) for name, hook in hooks.items()
        }
        makers["torch's"] = partial(_torchs, config, comm, options.rank, ended)
        models, skipped = make_each(makers)
        contestants = {name: _Backwards(model, comm) for name, model in models.items()}
        series = slowest(comm, take_turns(contestants, rounds=options.rounds, warm_up=WARM_UP))
        if comm.rank == 0:
            numel = sum(param.numel() for param in contestants["exact"].model.parameters())
            print(f"{numel / 1e6:.1f} M parameters, rank {options.rank}, {comm.size} ranks on {comm.num_nodes} hosts")
            print(_table({name: series[name, "reduction"] for name in contestants}))
            for name, why in skipped.items():
                print(f"{name} cannot take part: {why}")
        contestants.clear()
        models.clear()


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m mpitrain bench compression",
        description="Times the average of a step's gradients over the ranks (under mpirun): exact, by our PowerSGD, and by torch's DDP "
        "hook with PowerSGD on Gloo. So it tells whether compression saves time on these links; bench losses tells what it "
        "costs in loss. On one node each rank compresses, and the exact average is faster.\n\n"
        "The contestants take turns in one launch, and the slowest rank counts. The gradients of a GPT's parameters are given, so "
        "that only their average takes time. Both PowerSGDs have feedback and a warm start, and compress from the first timed turn.",
    )
    parser.add_argument("--width", type=positive, default=512, help="of the GPT (default: %(default)s)")
    parser.add_argument("--layers", type=positive, default=6, help="of the GPT (default: %(default)s)")
    parser.add_argument("--rank", type=positive, default=4, help="of both PowerSGDs (default: %(default)s)")
    parser.add_argument(
        "--top-k", type=float, default=0.0, metavar="SHARE",
        help="measure our top_k with this share of the elements, such as 0.01, too (default: not)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=10, help="turns of each contestant (default: %(default)s)")
    parser.add_argument("--threads", type=positive, help="torch's threads of a rank (default: cores / ranks of a host)")
    return parser.parse_args(words)


def _ours(config: GPTConfig, comm: Communicator, hook: PowerSGD | TopK | None) -> nn.Module:
    model = _Given(config, comm.rank)
    fully_shard(model, comm, stage=0)
    if hook is not None:
        compress_gradients(model, hook)
    return model


def _torchs(config: GPTConfig, comm: Communicator, rank: int, ended: ExitStack) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    if not torch.distributed.is_available():
        raise CannotTakePart("this build of torch has no torch.distributed")
    ended.enter_context(torch_group(comm))
    # One bucket: with several, ranks send the messages of the hook's later stages in different orders, and Gloo ends the process.
    model = nn.parallel.DistributedDataParallel(_Given(config, comm.rank), bucket_cap_mb=1 << 20)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=_BEFORE_HOOK, min_compression_rate=1,
        use_error_feedback=True, warm_start=True,
    )  # fmt: skip
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def _table(seconds: Mapping[str, np.ndarray]) -> str:
    torchs = seconds.get("torch's")
    rows = []
    for name, taken in seconds.items():
        median, fastest, longest = spread(taken)
        ratio = "" if torchs is None else f"{median / float(np.median(torchs)):.2f}"
        rows.append([name, f"{median * 1e3:.1f} ms", f"{fastest * 1e3:.1f} - {longest * 1e3:.1f} ms", ratio])
    return markdown_table(["reduction", "median", "range", "/ torch's"], rows)
