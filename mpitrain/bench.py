"""`mpirun -np N python -m mpitrain bench`: the time of a training step beside its peers, in one launch, step by step in turn.

All train the same GPT in fp32 on the same tokens with AdamW(fused=True), one batch a rank. Peers:
- none: every rank alone on its own copy, no communication: what a step costs without any sharding.
- ddp: torch's DistributedDataParallel on Gloo.
- fsdp: torch's FSDP2 (`fully_shard`) on Gloo.
"""

import argparse
import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from collectives import Communicator, is_live_terminal
from mpitrain.config import ParallelConfig
from mpitrain.init import initialize
from mpitrain.models import GPT, GPTConfig, num_parameters
from mpitrain.sharding import communication_s, fully_shard
from mpitrain.train.placement import place

PEERS = ("none", "ddp", "fsdp")


class Contestant(NamedTuple):
    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, tokens: torch.Tensor) -> None:
        self.model(tokens[:, :-1], tokens[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_bytes(self) -> int:
        """Bytes of this rank's parameters, their gradients (as many) and optimizer state, between two steps."""
        total = 0
        for param in self.model.parameters():
            held = [
                param.data,
                param.data,
                *(v for v in self.optimizer.state.get(param, {}).values() if torch.is_tensor(v)),
            ]
            total += sum(_local(tensor).nbytes for tensor in held)
        return total


class Row(NamedTuple):
    """One contestant's figures; times in seconds, the slowest rank's."""

    name: str
    step_s: float
    fastest_s: float
    slowest_s: float
    comm_s: float | None
    state_bytes: int


def main(argv: Sequence[str], comm: Communicator) -> None:
    """Run the comparison and print it on rank 0. ValueError on all ranks for wrong arguments."""
    with comm.together():
        options = _parse(argv)
    place(comm, ParallelConfig(threads=options.threads, bind=False))
    config = GPTConfig(
        vocab=256, context=options.context, width=options.width, layers=options.layers, heads=options.heads, tied=False
    )
    if set(options.peers) & {"ddp", "fsdp"}:
        _start_gloo(comm)
    contestants = [_make(name, config, comm) for name in ("mpitrain", *options.peers)]
    rows = _measure(contestants, config, comm, batch=options.batch, steps=options.steps)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if comm.rank == 0:
        _report(rows, config, comm, options)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mpitrain bench", description=__doc__.split("\n\n")[0], exit_on_error=False
    )
    parser.add_argument("--peers", default=",".join(PEERS), help="of none, ddp, fsdp, separated by commas")
    for name, default in {
        "width": 1024,
        "layers": 8,
        "heads": 8,
        "context": 128,
        "batch": 1,
        "steps": 8,
        "threads": 1,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    try:
        options, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ValueError(f"bench: {error}") from None
    options.peers = [name for name in options.peers.split(",") if name]
    wrong = [name for name in options.peers if name not in PEERS]
    if unknown or wrong:
        raise ValueError(
            f"bench: unknown {', '.join(unknown + wrong)}; expected --peers of {', '.join(PEERS)}, or see --help"
        )
    return options


def _make(name: str, config: GPTConfig, comm: Communicator) -> Contestant:
    model: nn.Module
    if name == "mpitrain":
        with torch.device("meta"):
            model = GPT(config)
        for module in (*model.blocks, model):
            fully_shard(module, comm)
    else:
        model = GPT(config)
    initialize(model)
    if name == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif name == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard as torch_fully_shard

        mesh = init_device_mesh("cpu", (comm.size,))
        for module in (*model.blocks, model):
            torch_fully_shard(module, mesh=mesh)
    return Contestant(name, model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


def _measure(
    contestants: Sequence[Contestant], config: GPTConfig, comm: Communicator, *, batch: int, steps: int
) -> list[Row]:
    generator = torch.Generator().manual_seed(comm.rank)
    times: dict[str, list[float]] = {c.name: [] for c in contestants}
    comm_s: list[float] = []
    warm_up = 2  # the first step allocates, the second settles
    for _ in range(warm_up + steps):
        tokens = torch.randint(0, config.vocab, (batch, config.context + 1), generator=generator)
        for contestant in contestants:
            before = communication_s(contestant.model)
            seconds = _timed_step(contestant, tokens, comm)
            times[contestant.name].append(seconds)
            if contestant.name == "mpitrain":
                comm_s.append(communication_s(contestant.model) - before)
    rows = []
    for contestant in contestants:
        of_steps = times[contestant.name][warm_up:]
        share = median(comm_s[warm_up:]) if contestant.name == "mpitrain" else None
        rows.append(
            Row(contestant.name, median(of_steps), min(of_steps), max(of_steps), share, contestant.state_bytes())
        )
    return rows


def _timed_step(contestant: Contestant, tokens: torch.Tensor, comm: Communicator) -> float:
    """Seconds until the last rank is through."""
    comm.barrier()
    start = time.perf_counter()
    contestant.step(tokens)
    return float(comm.all_reduce(np.array([time.perf_counter() - start]), "max")[0])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _start_gloo(comm: Communicator) -> None:
    port = None
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
    address = comm.broadcast_object((socket.gethostname() if comm.num_nodes > 1 else "127.0.0.1", port))
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{address[0]}:{address[1]}", rank=comm.rank, world_size=comm.size
    )


def _report(rows: Sequence[Row], config: GPTConfig, comm: Communicator, options: Any) -> None:
    ours = rows[0]
    table = Table(
        title=f"{num_parameters(config) / 1e6:.1f} M parameters, fp32, {comm.size} ranks x {options.threads} thread, "
        f"batch {options.batch} x {config.context} a rank, median of {options.steps} steps"
    )
    for heading in ("", "step", "fastest .. slowest", "mpitrain / this", "comm", "state a rank"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.step_s:.3f} s",
            f"{row.fastest_s:.3f} .. {row.slowest_s:.3f} s",
            f"{ours.step_s / row.step_s:.2f}",
            "" if row.comm_s is None else f"{row.comm_s / row.step_s:.0%}",
            f"{row.state_bytes / 1e6:,.0f} MB",
        )
    Console(width=100, force_terminal=is_live_terminal()).print(table)
    if options.json:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
