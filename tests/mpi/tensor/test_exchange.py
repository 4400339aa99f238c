"""All-gathers and sums of activations: in the memory of a node, and by messages."""

import time

import numpy as np
import pytest
import torch
from torch import nn

import mpitrain
from collectives import Communicator
from mpitrain.tensor import Style, communication_s
from mpitrain.tensor.exchange import Exchange, own_part
from mpitrain.tensor.node_arrays import NodeArrays

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def of_all(comm: Communicator, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """What each rank has."""
    return [torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(comm.size)]


@pytest.fixture(params=["node", "messages"])
def ranks(request: pytest.FixtureRequest, comm: Communicator) -> Communicator:
    """The ranks as they are, or as if the odd ones were on another node."""
    found: Communicator = comm if request.param == "node" else request.getfixturevalue("two_nodes")
    return found


@pytest.mark.rest
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 7, 5), (1, 8, 3), (4, 6)], ids=str)
@pytest.mark.parametrize("dim", [-1, -2])
def test_gathers_and_sums(ranks: Communicator, dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> None:
    exchange, every = Exchange(ranks), of_all(ranks, shape, dtype)
    expected = sum(x.double() for x in every).to(dtype)  # type: ignore[union-attr]
    tolerance = {torch.bfloat16: 0.05, torch.float32: 1e-6, torch.float64: 1e-15}[dtype]
    for _ in range(3):
        whole = exchange.gather(own_part(every[0], ranks, dim), dim, shape[dim])
        assert torch.equal(whole, every[0])
        own = exchange.own_sum(exchange.room_with(every[ranks.rank]), dim)
        torch.testing.assert_close(own, own_part(expected, ranks, dim), rtol=0, atol=tolerance)
        total = exchange.whole_sum(exchange.room_with(every[ranks.rank]))
        torch.testing.assert_close(total, expected, rtol=0, atol=tolerance)
        assert len(set(ranks.all_gather_object(total.double().numpy().tobytes()))) == 1, "the same bits on all ranks"
        own += 1  # the caller's own memory: no other rank sees this
        total += 1
        assert torch.equal(whole, every[0])


@pytest.mark.ranks(2, 3, 4)
def test_a_posted_room_is_the_one_that_is_added(ranks: Communicator) -> None:
    exchange, every = Exchange(ranks), of_all(ranks, (4, 3), torch.float64)
    expected = torch.stack(every).sum(0)
    room = exchange.room((4, 3), every[0])
    room.own.copy_(every[ranks.rank])
    exchange.post(room)
    assert exchange.room_with(room.own) is room
    torch.testing.assert_close(exchange.own_sum(room, -2), own_part(expected, ranks, -2))
    room = exchange.room((4, 3), every[0])
    room.own.copy_(every[ranks.rank])
    exchange.post(room)
    other = exchange.room_with(2 * room.own)  # autograd has added something to the gradient that was posted
    assert other is not room
    torch.testing.assert_close(exchange.whole_sum(other), 2 * expected)


@pytest.mark.one_node
@pytest.mark.ranks(2, 3, 4)
def test_a_gather_is_one_array_of_all_ranks(comm: Communicator) -> None:
    exchange = Exchange(comm)
    whole = exchange.gather(torch.full((1, 3), float(comm.rank)), -2, comm.size)
    comm.barrier()
    whole[comm.rank] += 10
    comm.barrier()
    assert whole[:, 0].tolist() == [rank + 10 for rank in range(comm.size)]


@pytest.mark.one_node
@pytest.mark.ranks(2, 3, 4)
def test_an_array_is_used_again_when_no_rank_has_it(comm: Communicator) -> None:
    """Ranks keep tensors for different times, and no tensor ever changes under one of them."""
    arrays, order = NodeArrays(comm), np.random.default_rng(0)
    mine, held = np.random.default_rng(comm.rank + 1), []
    made: set[int] = set()
    for turn in range(300):
        length = int(order.integers(1, 2000))
        array = arrays.take((comm.size, length), torch.int64)
        assert array is not None
        made.add(array.data_ptr())
        array[comm.rank] = turn
        arrays.fence().wait()
        held.append((turn, array))
        del array
        while len(held) > 8 or (held and mine.random() < 0.4):
            held.pop(int(mine.integers(len(held))))
        for since, kept in held:
            assert bool((kept == since).all()), (turn, since)
    assert len(arrays._arrays) <= 8 * comm.size + 2
    assert len(made) < 150


@pytest.mark.one_node
@pytest.mark.ranks(2)
def test_too_much_memory_is_none_on_all_ranks(comm: Communicator) -> None:
    arrays = NodeArrays(comm)
    assert arrays.take((1 << 45,), torch.float32) is None
    array = arrays.take((8,), torch.float32)
    assert array is not None
    arrays.fence().wait()


class InPlace(nn.Module):
    """A region that writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.up(x.mul_(2)))
        return result


@pytest.mark.one_node
@pytest.mark.ranks(2)
@pytest.mark.parametrize("trains", [False, True])
def test_a_region_that_writes_to_its_input_is_refused(comm: Communicator, trains: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([InPlace(), InPlace()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    plan = {"blocks.*.up": Style("column"), "blocks.*.down": Style("row")}
    cut = mpitrain.tensor_parallel(Model(), comm, plan)
    with torch.set_grad_enabled(trains), pytest.raises(ValueError, match="writes to its input in place"):
        cut(torch.ones(1, 4, 8))
    comm.barrier()
    whole = mpitrain.tensor_parallel(Model(), comm, plan, sequence=False)
    with torch.no_grad():
        whole(torch.ones(1, 4, 8))


@pytest.mark.rest
@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_seconds_of_the_loss_and_of_sums_of_gradients(comm: Communicator, is_sharded: bool) -> None:
    """Rank 0 waits for rank 1 in the exchange of the loss, and in the sum of the gradients of a norm between regions."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            mlp = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
            self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(4), mlp)])
            self.head, self.loss = nn.Linear(4, 6), nn.CrossEntropyLoss()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.blocks[0](x))
            wait()
            loss: torch.Tensor = self.loss(logits.flatten(0, 1), torch.zeros(4, dtype=torch.long))
            return loss

    def wait(*_: object) -> None:
        if comm.rank == 1:
            time.sleep(0.2)

    def wait_in_backward(module: nn.Module, args: object, output: torch.Tensor) -> None:
        output.register_hook(wait)

    styles = {"blocks.*.1.0": "column", "blocks.*.1.1": "row", "head": "column", "loss": "loss"}
    mesh = mpitrain.mesh(comm, tp=2)
    model = mpitrain.tensor_parallel(Model(), mesh["tp"], {name: Style(kind) for name, kind in styles.items()})  # type: ignore[arg-type]
    model.blocks[0][0].register_forward_hook(wait_in_backward)  # type: ignore[index]
    if is_sharded:
        mpitrain.fully_shard(model, mesh)
    loss = model(torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(0)))
    in_forward = communication_s(model)
    loss.backward()
    in_backward = communication_s(model) - in_forward
    if comm.rank == 0:
        assert in_forward > 0.15 and in_backward > 0.15, (in_forward, in_backward)
    mesh.free()
