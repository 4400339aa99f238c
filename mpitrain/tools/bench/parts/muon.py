"""`python -m mpitrain bench muon`: the optimizer's step alone, on the matrices of a transformer that is sharded over all ranks."""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collectives import Communicator
from collectives.bench.kit.turns import slowest, spread, take_turns
from collectives.shared.tables import markdown_table
from collectives.shared.terminal import positive
from mpitrain.tools.bench.options import Parser
from mpitrain.tools.bench.parts.timed_call import TimedCall

OWNERS, EVERY, ADAMW = "Muon, each matrix on one rank", "Muon, each matrix on every rank", "AdamW, fused"
WARM_UP = 2


def main(words: Sequence[str], comm: Communicator) -> None:
    """Measure, and print on rank 0. Errors are raised on all ranks."""
    with comm.together():
        options = _parse(words)
    import torch  # takes seconds, so it follows the check of the arguments

    from mpitrain.job.config import ParallelConfig
    from mpitrain.job.train.hardware import take_hardware
    from mpitrain.optim.newton_schulz import fast_dtype

    taken = take_hardware(comm, ParallelConfig(threads=options.threads, bind=False))
    dtype = fast_dtype(taken.device.type) if options.ns_dtype == "auto" else getattr(torch, options.ns_dtype)
    shapes = [(3 * options.width, options.width), (options.width,) * 2, (4 * options.width, options.width)]
    shapes = [*shapes, (options.width, 4 * options.width)] * options.layers
    makers = {OWNERS: _owners, EVERY: _every_rank, ADAMW: _adamw}
    contestants = {name: make(comm, shapes, dtype, taken.device) for name, make in makers.items()}
    series = slowest(comm, take_turns(contestants, rounds=options.steps, warm_up=WARM_UP))
    rows = [
        {"name": name, "ranks": comm.size, "width": options.width, "layers": options.layers, "ns_dtype": str(dtype)[6:],
         "threads": taken.threads, "step_s": spread(series[name, "step"])}
        for name in makers
    ]  # fmt: skip
    with comm.together():
        if comm.rank == 0:
            if options.json:
                with options.json.open("a") as file:
                    file.writelines(json.dumps({"time": time.time(), **row}) + "\n" for row in rows)
            print(_table(rows), flush=True)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m mpitrain bench muon",
        description="Times the step of the optimizer alone, in turn, on the matrices of a transformer that is sharded over all ranks "
        "(under mpirun).\nContestants:\n"
        "  mpitrain.optim.Muon, where one rank does the work of a matrix\n"
        "  a Muon in which all ranks gather all matrices, and do the work of each\n"
        "  torch's fused AdamW on the same shards",
    )
    parser.add_argument("--width", type=positive, default=384, help="of the transformer (default: %(default)s)")
    parser.add_argument("--layers", type=positive, default=4, help="of the transformer (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=20, help="timed steps of each (default: %(default)s)")
    parser.add_argument("--threads", type=positive, help="of each rank (default: the cores, divided)")
    parser.add_argument(
        "--ns-dtype",
        choices=["auto", "float32", "bfloat16"],
        default="auto",
        help="of Newton-Schulz; auto: bfloat16 on GPUs and on CPUs with units for it, else float32 (default: auto)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures to FILE, one JSON object a line")
    return parser.parse_args(words)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    base = next(row for row in rows if row["name"] == EVERY)["step_s"][0]
    head = rows[0]
    cells = [
        [row["name"], *(f"{seconds * 1e3:.2f}" for seconds in row["step_s"]), f"{row['step_s'][0] / base:.2f}"]
        for row in rows
    ]
    size = 12 * head["width"] ** 2 * head["layers"] / 1e6
    return (
        f"{head['ranks']} ranks, {head['threads']} threads each, {size:.1f} M elements ({head['width']} x {head['layers']}), "
        f"Newton-Schulz in {head['ns_dtype']}\n"
        + markdown_table(["step, slowest rank", "median, ms", "least", "most", "to every rank"], cells)
    )


def _sharded(comm: Communicator, shapes: Sequence[tuple[int, int]], device: Any) -> list[Any]:
    """This rank's rows of matrices with random gradients. Their values do not matter to the time."""
    import torch
    from torch import nn

    from mpitrain.sharding import fully_shard

    torch.manual_seed(0)
    model = nn.ParameterList(nn.Parameter(torch.randn(shape, device=device)) for shape in shapes)
    params = list(fully_shard(model, comm, units="one").parameters())
    for param in params:
        param.grad = torch.randn_like(param)
    return [model, params]


def _owners(comm: Communicator, shapes: Sequence[tuple[int, int]], dtype: Any, device: Any) -> TimedCall:
    from mpitrain.optim import Muon

    model, params = _sharded(comm, shapes, device)
    optimizer = Muon(params, ns_dtype=dtype)
    optimizer.model = model  # type: ignore[attr-defined]  # the shards live as long as their model
    return TimedCall(comm, optimizer.step)


def _adamw(comm: Communicator, shapes: Sequence[tuple[int, int]], dtype: Any, device: Any) -> TimedCall:
    import torch

    model, params = _sharded(comm, shapes, device)
    optimizer = torch.optim.AdamW(params, fused=True)
    optimizer.model = model  # type: ignore[attr-defined]
    return TimedCall(comm, optimizer.step)


def _every_rank(comm: Communicator, shapes: Sequence[tuple[int, int]], dtype: Any, device: Any) -> TimedCall:
    """All ranks gather all rows, and orthogonalize every matrix."""
    import torch

    from mpitrain.optim.newton_schulz import newton_schulz
    from mpitrain.placement.marks import pieces_of

    model, params = _sharded(comm, shapes, device)
    momenta = [torch.zeros_like(param) for param in params]
    mine = [[piece.box for piece in pieces_of(param)] for param in params]
    held = comm.all_gather_object(mine)
    counts = [sum(box.numel for boxes in theirs for box in boxes) for theirs in held]

    @torch.no_grad()
    def step() -> None:
        updates = [
            param.grad.lerp(momentum.lerp_(param.grad, 0.05), 0.95)
            for param, momentum in zip(params, momenta, strict=True)
        ]
        flat = torch.cat([update.to(dtype).reshape(-1) for update in updates])
        gathered = torch.empty(sum(counts), dtype=dtype, device=device)
        comm.all_gather(gathered, flat, counts=counts)
        wholes = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        at = 0
        for theirs in held:
            for whole, boxes in zip(wholes, theirs, strict=True):
                for box in boxes:
                    begin = box.offset[0]
                    whole[begin : begin + box.shape[0]] = gathered[at : at + box.numel].view(box.shape)
                    at += box.numel
        for whole, param, boxes in zip(wholes, params, mine, strict=True):
            result = newton_schulz(whole, 5, dtype)
            param.mul_(1 - 1e-4)
            for box in boxes:
                param.add_(result[box.offset[0] :][: box.shape[0]], alpha=-1e-3)

    step.model = model  # type: ignore[attr-defined]
    return TimedCall(comm, step)
