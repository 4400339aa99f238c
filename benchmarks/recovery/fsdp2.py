"""torch's FSDP2 under torchrun, which saves by torch's distributed checkpoints (DCP) and goes on from the newest after a restart.

It leaves RUN/metrics.jsonl as the main job does, and RUN/pid.RANK. The tokens are drawn, so it reads no data.
"""

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mpitrain.models import GPT
from mpitrain.models.sizes import resolve


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    for name in ("width", "layers", "heads", "context", "batch", "steps", "every"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    given.run.mkdir(parents=True, exist_ok=True)
    (given.run / f"pid.{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    numbers = {name: getattr(given, name) for name in ("width", "layers", "heads", "context")}
    # Of a small model the values take less time than the first use of the meta device.
    by_load = given.width >= 512 and (given.run / "latest").exists()
    with torch.device("meta" if by_load else "cpu"):  # a load gives the values
        model = GPT(resolve("tiny", "gpt", **numbers))  # type: ignore[arg-type]
    mesh = init_device_mesh("cpu", (size,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    if by_load:
        model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = _load(given.run, model, optimizer)
    generator = torch.Generator().manual_seed(rank)
    with open(given.run / "metrics.jsonl", "ab", buffering=0) as metrics:
        while step < given.steps:
            tokens = torch.randint(0, 256, (given.batch // size, given.context + 1), generator=generator)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)  # the mean of the ranks, as in the main job; and no rank is ahead of rank 0's line
            step += 1
            if rank == 0:
                metrics.write(json.dumps({"step": step, "loss": float(total) / size}).encode() + b"\n")
            if step % given.every == 0:
                _save(given.run, step, model, optimizer, rank)
    dist.destroy_process_group()


def _save(run: Path, step: int, model: GPT, optimizer: torch.optim.Optimizer, rank: int) -> None:
    weights, moments = get_state_dict(model, optimizer)
    writer = FileSystemWriter(run / f"step-{step}", sync_files=False)
    save({"model": weights, "optimizer": moments}, storage_writer=writer)
    if rank == 0:
        latest = run / "latest.tmp"
        latest.write_text(str(step))
        latest.rename(run / "latest")
        for old in run.glob("step-*"):
            if int(old.name.partition("-")[2]) < step:
                shutil.rmtree(old)
    dist.barrier()


def _load(run: Path, model: GPT, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint; returns its step, or 0."""
    if not (run / "latest").exists():
        return 0
    step = int((run / "latest").read_text())
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    load(state, checkpoint_id=run / f"step-{step}")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return step


if __name__ == "__main__":
    main()
