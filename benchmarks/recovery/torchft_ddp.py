"""torchft's DDP on Gloo with a lighthouse and a process for each of the replica groups, which have one rank each.

The command starts the lighthouse and the replicas, and starts a replica again that has ended. A survivor goes on without going back; a
replica that returns gets the state from it. RUN/pid.RANK and RUN/metrics.jsonl are as fsdp2.py leaves them. A line has the number of
replicas that took part in its step. Replica 0 writes the lines.
"""

import argparse
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from collectives.programs import python
from mpitrain.models import GPT
from mpitrain.models.sizes import resolve

_QUORUM_MS, _BEAT_MS, _LOST_MS = 50, 100, 1000
"""Of the lighthouse: the wait for further replicas, the heartbeats, and the silence after which a replica is lost (default: 5 s)."""
_MODULE = "benchmarks.recovery.torchft_ddp"


def main() -> None:
    """Start all, or train as one replica."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    for name in ("width", "layers", "heads", "context", "batch", "steps", "replicas"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--replica", type=int)
    given = parser.parse_args()
    given.run.mkdir(parents=True, exist_ok=True)
    if given.replica is None:
        _supervise(given)
    else:
        _train(given)


def _supervise(given: argparse.Namespace) -> None:
    from torchft._torchft import LighthouseServer  # type: ignore[import-not-found, unused-ignore]

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=_QUORUM_MS,
        quorum_tick_ms=_QUORUM_MS,
        heartbeat_timeout_ms=_LOST_MS,
    )
    env = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address()}

    def start(replica: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*python(_MODULE), *sys.argv[1:], "--replica", str(replica)], env=env)

    running = {replica: start(replica) for replica in range(given.replicas)}
    while running:
        pid, status = os.wait()
        replica = next(number for number, process in running.items() if process.pid == pid)
        running.pop(replica)
        if status:
            running[replica] = start(replica)


def _train(given: argparse.Namespace) -> None:
    from torchft import (  # type: ignore[import-not-found, unused-ignore]
        DistributedDataParallel,
        Manager,
        Optimizer,
        ProcessGroupGloo,
    )

    torch.set_num_threads(1)
    torch.manual_seed(0)
    (given.run / f"pid.{given.replica}").write_text(str(os.getpid()))
    numbers = {name: getattr(given, name) for name in ("width", "layers", "heads", "context")}
    model = GPT(resolve("tiny", "gpt", **numbers))  # type: ignore[arg-type]
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"replica-{given.replica}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        heartbeat_interval=timedelta(milliseconds=_BEAT_MS),
        hostname="127.0.0.1",
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    generator = torch.Generator().manual_seed(given.replica)
    rows = given.batch // given.replicas
    with open(given.run / "metrics.jsonl", "ab", buffering=0) as metrics:
        while manager.current_step() < given.steps:
            before = manager.current_step()
            optimizer.zero_grad()  # begins a quorum
            tokens = torch.randint(0, 256, (rows, given.context + 1), generator=generator)
            loss = wrapped(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()  # unless a replica was lost meanwhile
            step = manager.current_step()
            if given.replica == 0 and step > before:
                line = {"step": step, "loss": float(loss), "replicas": manager.num_participants()}
                metrics.write(json.dumps(line).encode() + b"\n")
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
