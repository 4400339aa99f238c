"""Resident storage is chosen only where all nodes have room, before a shard is made; what lacks memory later does without."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from pretended_hosts import on_hosts
from torch import nn

import mpitrain
from benchmarks.chaos.disk import small_disk
from collectives import Communicator, on_all_ranks
from collectives.transports.node import anonymous, noted_room
from collectives.transports.node.memory import NodeMemory
from collectives.transports.node.noted_room import Room
from mpitrain import fully_shard
from mpitrain.job.config import parse
from mpitrain.job.train.model import make_model
from mpitrain.sharding.setup import room as room_of_nodes
from mpitrain.sharding.unit.unit import units_of
from mpitrain.stages import StagePlan, pipeline

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
    return kinds_of(model), out


def kinds_of(model: nn.Module) -> set[str]:
    return {flat.storage.kind for unit in units_of(model) for flat in unit.flats}


def have_room(monkeypatch: pytest.MonkeyPatch, in_folder: int) -> None:
    """A folder of node memory with so many bytes."""
    monkeypatch.setattr(room_of_nodes, "room_now", lambda: Room(in_folder, 1 << 60))


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("stage", "how"), [(1, "small"), (3, "small"), (3, "missing"), (3, "the limit of memory")])
def test_one_small_node_makes_all_private(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, stage: int, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = on_hosts(comm.mpi, [0, *[1] * (comm.size - 1)])
    kinds, expected = trained(hosts, stage)
    assert kinds == {"resident"}
    monkeypatch.setattr("collectives.transports.node.memory._said", set())
    if how == "missing" and hosts.rank:
        monkeypatch.setenv("MPITRAIN_SHM_DIR", "/not-there")
    if how == "the limit of memory" and hosts.rank:
        monkeypatch.setattr(anonymous, "within_limits", lambda: FULL_BYTES // 4)
    if how == "small":
        have_room(monkeypatch, FULL_BYTES // 4 if hosts.rank == 2 else 1 << 40)
    kinds, out = trained(hosts, stage)
    assert kinds == {"gathered" if stage == 3 else "kept"} and torch.equal(out, expected)
    lines = [each.message for each in caplog.records if "fully_shard: " in each.message and each.levelname == "WARNING"]
    assert len(lines) == (comm.rank == 0), lines
    short = how if "limit" in how else "/not-there" if how == "missing" else "/dev/shm"
    assert all(line.partition("in private memory: ")[2].startswith(short) for line in lines), lines
    assert all(("MPITRAIN_SHM_DIR" if "limit" not in how else "ask for more memory") in line for line in lines)
    hosts.free()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("stage", "has"), [(1, "a limit"), (2, "a limit"), (1, "a full machine"), (3, "a full machine")]
)
def test_a_lack_of_memory_does_not_choose_what_needs_more_or_other_bits(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, stage: int, has: str
) -> None:
    """In stages 1 and 2 private storage needs more memory. What a machine has free is another number in each run."""
    name = "within_limits" if has == "a limit" else "available_bytes"
    monkeypatch.setattr(anonymous, name, lambda *_: FULL_BYTES // 4)
    assert trained(comm, stage)[0] == {"resident"}
    # Of a large array the memory is looked for first.
    monkeypatch.setattr(anonymous, "available_bytes", lambda: FULL_BYTES // 4)
    check = staticmethod(lambda length: anonymous.check(length) if length == FULL_BYTES // 2 else None)
    monkeypatch.setattr(NodeMemory, "_check", check)
    with pytest.raises(OSError, match=r"cannot share .* of memory are available; ask for more memory") as caught:
        trained(comm, stage)
    assert on_all_ranks(caught.value) and ("or choose storage='private'" in str(caught.value)) == (stage == 3)


@pytest.mark.ranks(3)
def test_gradient_buffers_are_counted_and_find_other_memory(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = trained(comm, 3)
    rings = 3 * room_of_nodes.ring_bytes(3)
    have_room(monkeypatch, rings + FULL_BYTES)  # for the parameters alone
    assert trained(comm, 3)[0] == {"gathered"}
    # For both: each rank has two buffers for the larger unit.
    have_room(monkeypatch, rings + 4 * FULL_BYTES)
    assert trained(comm, 3)[0] == {"resident"}
    reserve = NodeMemory._reserve

    most = FULL_BYTES // 2  # another job has taken the memory: one unit fits, the ranks' buffers do not

    def short(fd: int, start: int, length: int) -> None:
        if start + length > most:
            raise OSError("No space left on device")
        reserve(fd, start, length)

    def refuse(place: anonymous.FilePlace) -> int:
        raise PermissionError(f"Permission denied: {place.path}")

    monkeypatch.setattr(NodeMemory, "_reserve", staticmethod(short))
    for is_private in (False, True):
        if is_private:
            monkeypatch.setattr(anonymous, "open_at", refuse)
        kinds, out = trained(comm, 3)
        assert kinds == {"resident"} and torch.equal(out, expected), is_private
    monkeypatch.undo()
    monkeypatch.setattr(NodeMemory, "_reserve", staticmethod(short))
    most = FULL_BYTES // 4  # no unit fits, after the decision
    kinds, out = trained(comm, 3)
    assert kinds == {"resident"} and torch.equal(out, expected)
    with pytest.raises(OSError, match=r"cannot share .* of node memory"):
        trained(comm, 3, "resident")


@pytest.mark.ranks(2)
def test_a_rank_alone_on_its_node_needs_no_folder(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = on_hosts(comm.mpi, [0, 1])
    _, expected = trained(hosts, 1)
    monkeypatch.setenv("MPITRAIN_SHM_DIR", "/not-there")
    kinds, out = trained(hosts, 1)
    assert kinds == {"resident"} and torch.equal(out, expected)
    hosts.free()
    mesh = mpitrain.mesh(comm, dp_replicate=2)  # no two ranks have shards of one copy
    assert kinds_of(fully_shard(nn.Linear(WIDTH, WIDTH), mesh)) == {"resident"}
    mesh.free()


@pytest.mark.ranks(2)
def test_one_decision_for_the_whole_model_of_the_main_job(
    comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks alone would fit into this file system."""
    folder, why = shared_tmp / "shm", ""
    with ExitStack() as mounted:
        if comm.rank == 0:
            try:
                mounted.enter_context(small_disk(folder, 5500 << 10))
            except PermissionError as error:
                why = str(error)
        if why := comm.broadcast_object(why):
            pytest.skip(f"a small file system cannot be mounted here: {why}")
        monkeypatch.setenv("MPITRAIN_SHM_DIR", str(folder))
        words = (
            "--model.width 64 --model.layers 8 --model.heads 2 --model.context 32 --train.batch 4 --parallel.bind false"
        )
        model, _ = make_model(parse(words.split()), mpitrain.mesh(comm), torch.device("cpu"))
        assert len(units_of(model)) == 9 and kinds_of(model) == {"gathered"}
        comm.barrier()


class Stacked(nn.Module):
    """Two blocks for a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("num_bytes", "stage", "kinds"),
    [(4, 1, {"resident"}), (4, 3, {"resident"}), (3, 3, {"gathered", "resident"}), (2, 1, {"kept"})],
)
def test_stages_of_a_pipeline_see_one_room(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, num_bytes: int, stage: int, kinds: set[str]
) -> None:
    """Whatever an earlier stage has taken: the room counts from before the model was sharded. Of two calls the second sees the rest."""
    mesh = mpitrain.mesh(comm, pp=2)
    # A call is for half of each stage: its parameters are one FULL_BYTES, its gradients on four ranks two.
    room = 4 * room_of_nodes.ring_bytes(4) + num_bytes * FULL_BYTES
    monkeypatch.setattr(noted_room, "room_now", lambda: Room(room, 1 << 60))
    model = Stacked()
    pipeline(model, mesh["pp"], micro_batches=2, plan=StagePlan((), "blocks", (), "x"), division=[1, 1])
    have_room(monkeypatch, 0)
    (block,) = (block for block in model.blocks if next(block.parameters(), None) is not None)
    for module in (*block, model):
        fully_shard(module, mesh, stage=stage)
    assert kinds_of(model) == kinds
    mesh.free()
