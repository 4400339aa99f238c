"""`reshard_after_forward` as a number: what ranks hold after forward, whom they gather from, and that no number changes."""

from typing import Any

import pytest
import torch
from sharded_models import shard
from torch import nn
from torch.utils.checkpoint import checkpoint
from ways import spread

from collectives import Communicator
from collectives.progress.deferred import Deferred
from collectives.progress.on_thread import Thread
from collectives.progress.progress import Progress
from mpitrain.sharding import MixedPrecisionPolicy, fully_shard
from mpitrain.sharding.unit.storage import Gathered


class Net(nn.Module):
    """Blocks, of which one runs twice; recomputed in backward if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 6)) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.recomputes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number in (0, 1, 0, 2):
            block = self.blocks[number]
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x))
        return x * self.scale


def sharded(comm: Communicator, reshard_after_forward: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net()
    options |= {"storage": "private", "reshard_after_forward": reshard_after_forward}
    return shard(model, comm, blocks=model.blocks, **options)


def train(model: Any, steps: int = 4) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for number in range(steps):
        seed = 10 * number + model._unit.ranks.data_parallel.rank
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        model(x)  # a forward whose backward never comes
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model(x).square().mean().item())
    return [losses, *(param.detach().tolist() for param in model.parameters())]


def inner(model: Any) -> list[Gathered]:
    return [flat.storage for block in model.blocks for flat in block._unit.flats]


def factors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


@pytest.mark.rest
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("progress", "dtype", "recomputes"), spread([Deferred, Thread], [torch.float32, torch.bfloat16], [False, True])
)
def test_all_sizes_compute_the_same(
    comm: Communicator, progress: type[Progress], dtype: torch.dtype, recomputes: bool
) -> None:
    flying = Communicator(comm.mpi.Dup(), progress=progress())
    results = []
    for asked in (True, False, *factors(comm.size)):
        model = sharded(flying, asked, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        model.recomputes = recomputes
        results.append(train(model))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_what_ranks_hold_and_whom_they_gather_from(
    comm: Communicator, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.size == 1 or comm.size % num_ranks:
        pytest.skip("needs a number that divides that of the ranks, of which there are several")
    still = Communicator(comm.mpi.Dup(), progress=Deferred())
    model = sharded(still, num_ranks)
    train(model, 1)
    sizes: list[int] = []
    gather = Gathered._all_gather

    def counted(self: Gathered, through: Communicator, *args: Any, **options: Any) -> None:
        sizes.append(through.size)
        gather(self, through, *args, **options)

    monkeypatch.setattr(Gathered, "_all_gather", counted)
    loss = model(torch.ones(2, 5)).sum()
    again = 1 if 1 < num_ranks < comm.size else 0  # block 0's second forward, from the smaller group already
    first = 5 if num_ranks > 1 else 4  # the rest, and the blocks
    assert sizes == ([comm.size] * 3 + [num_ranks] + [comm.size] if num_ranks > 1 else [comm.size] * first)
    for storage in inner(model):
        full = storage.full_buffer.untyped_storage().size()
        if num_ranks == 1:
            assert full == storage.nbytes, "1 is False: kept"
        else:
            assert full == 0
            held = 0 if storage._piece is None else storage._piece.numel()
            pieces = comm.all_gather_object(held)
            assert sum(pieces) == (comm.size // num_ranks * storage.full_buffer.numel() if again else 0)
            assert max(pieces) - min(pieces) <= 1
    sizes.clear()
    loss.backward()
    assert sizes == ([] if num_ranks == 1 else [num_ranks] * len(sizes))
    assert num_ranks == 1 or len(sizes) >= 3
    assert all(not storage.is_full and storage._piece is None for storage in inner(model))
    with torch.no_grad():
        model(torch.ones(2, 5))
    assert num_ranks == 1 or all(not storage.is_full and storage._piece is None for storage in inner(model))


def test_wrong_numbers(comm: Communicator) -> None:
    for asked in (0, -2, 1.5, None, "2"):
        with pytest.raises(
            ValueError, match=r"reshard_after_forward is .*expected True, False, or a number of ranks from 1"
        ):
            sharded(comm, asked)
    with pytest.raises(ValueError, match=rf"is {comm.size + 1}, which does not divide the {comm.size} ranks that hold"):
        sharded(comm, comm.size + 1)
    for asked in (-1, True, 1.0):
        with pytest.raises(ValueError, match=r"prefetch_bytes is .*; expected a number of bytes from 0, or None"):
            fully_shard(Net(), comm, prefetch_bytes=asked)
    resident = fully_shard(Net(), comm, storage="resident", reshard_after_forward=comm.size)  # changes nothing there
    resident(torch.ones(2, 5)).sum().backward()
