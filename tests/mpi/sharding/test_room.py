"""Resident storage is chosen only where all nodes have room, before a shard is made; what lacks memory later does without."""

import pytest
import torch
from pretended_hosts import on_hosts
from torch import nn

from collectives import Communicator
from collectives.transports.node.memory import NodeMemory
from mpitrain import fully_shard
from mpitrain.sharding.setup import room as room_of_nodes
from mpitrain.sharding.unit.registry import units_of

WIDTH = 128
FULL_BYTES = 2 * 4 * (WIDTH * WIDTH + WIDTH)


def trained(comm: Communicator, stage: int, storage: str = "auto") -> tuple[set[str], torch.Tensor]:
    """The kinds of storage, and an output after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    fully_shard(model[0], comm, stage=stage, storage=storage)  # type: ignore[arg-type]
    fully_shard(model, comm, stage=stage, storage=storage)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.full((2, WIDTH), 1.0 + comm.rank + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        out = model(torch.ones(1, WIDTH))
    return {flat.storage.kind for unit in units_of(model) for flat in unit.flats}, out


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 3])
def test_one_small_node_makes_all_private(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = on_hosts(comm.mpi, [0, *[1] * (comm.size - 1)])
    kinds, expected = trained(hosts, stage)
    assert kinds == {"resident"}
    monkeypatch.setattr("collectives.transports.node.memory._said", set())
    monkeypatch.setattr(room_of_nodes, "room", lambda: FULL_BYTES // 4 if hosts.rank == comm.size - 1 else 1 << 40)
    kinds, out = trained(hosts, stage)
    assert kinds == {"gathered" if stage == 3 else "kept"} and torch.equal(out, expected)
    lines = [
        each.message for each in caplog.records if "MPITRAIN_SHM_DIR" in each.message and each.levelname == "WARNING"
    ]
    assert len(lines) == (comm.rank == 0), lines
    hosts.free()


@pytest.mark.ranks(2)
def test_gradient_buffers_are_counted_and_may_be_private(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected = trained(comm, 3)
    rings = 2 * room_of_nodes.ring_bytes(2)
    monkeypatch.setattr(room_of_nodes, "room", lambda: rings + FULL_BYTES)  # for the parameters alone
    assert trained(comm, 3)[0] == {"gathered"}
    # For both: each rank has two buffers for the larger unit.
    monkeypatch.setattr(room_of_nodes, "room", lambda: rings + 3 * FULL_BYTES)
    assert trained(comm, 3)[0] == {"resident"}
    reserve = NodeMemory._reserve

    def short(fd: int, start: int, length: int) -> None:
        if (
            start + length > FULL_BYTES // 2
        ):  # another job has taken the memory: one unit fits, two ranks' buffers do not
            raise OSError("No space left on device")
        reserve(fd, start, length)

    monkeypatch.setattr(NodeMemory, "_reserve", staticmethod(short))
    kinds, out = trained(comm, 3)
    assert kinds == {"resident"} and torch.equal(out, expected)
