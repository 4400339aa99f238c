"""Sharded models beside plain ones: how both are made, which rows of a batch a rank computes, and how their values are compared."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from ways import options_of

import mpitrain
from collectives import Communicator
from mpitrain.sharding import fully_shard
from mpitrain.sharding.unit.layout import rows_of

STORAGES = ["resident", "private"]
BATCH = 12  # rows; 1, 2, 3 and 4 ranks divide it


class Parted(mpitrain.CPUOffloadPolicy):
    """As if the CPU's memory were a GPU's: what the tests of CPUs can prove."""

    def parts(self, device: torch.device) -> bool:
        return True


M = TypeVar("M", bound=nn.Module)


def mine(comm: Communicator) -> slice:
    """The rows of a batch that this rank computes."""
    each = BATCH // comm.size
    return slice(each * comm.rank, each * (comm.rank + 1))


def floats(step: int, *shape: int) -> torch.Tensor:
    """The batch of a step: random numbers, the same on every rank."""
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int = 0, rows: slice = slice(None), *, width: int = 5) -> torch.Tensor:
    """The mean square of what a model of this many inputs makes of those rows of a step's batch."""
    return model(floats(step, width)[rows]).float().square().mean()


def shard(model: M, comm: Communicator, way: str | None = None, blocks: Iterable[nn.Module] = (), **more: Any) -> M:
    """The model after fully_shard of each of `blocks` and of the whole: in one of WAYS, without one by fully_shard's defaults."""
    options = {**({} if way is None else options_of(comm, way)), **more}
    mesh = options.pop("mesh", comm)
    for block in blocks:
        fully_shard(block, mesh, **options)
    return fully_shard(model, mesh, **options)


def no_blocks(model: nn.Module) -> Iterable[nn.Module]:
    return ()


def pair_of(
    make: Callable[[], M],
    comm: Communicator,
    way: str | None = None,
    blocks: Callable[[M], Iterable[nn.Module]] = no_blocks,
    **more: Any,
) -> tuple[M, M]:
    """A sharded model, and a plain one with the values that rank 0 drew for the sharded one: the other ranks draw others."""
    torch.manual_seed(comm.rank)
    model = make()
    torch.manual_seed(0)
    plain = make()
    return shard(model, comm, way, blocks(model), **more), plain


def small_model() -> nn.Sequential:
    """A model of 5 inputs, with a norm among its layers."""
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 3))


def pair_with_a_part_on_every_rank(
    comm: Communicator, way: str | None = None, **more: Any
) -> tuple[nn.Sequential, nn.Sequential]:
    """A model with a sharded block and a last part that every rank has whole, and a plain one with the same values."""
    torch.manual_seed(0)
    model = small_model()
    torch.manual_seed(0)
    plain = small_model()
    shard(model[0], comm, way, **more)
    return shard(model, comm, way, ignored_params=model[4].parameters(), **more), plain


def assert_same(model: nn.Module, plain: nn.Module, *, grads: bool, rtol: float, atol: float) -> None:
    """Each shard holds its rows of the plain model's parameter, or of its gradient; what is not sharded holds all of it."""
    reference = dict(plain.named_parameters())
    params = dict(model.named_parameters())
    assert params.keys() == reference.keys()
    for name, param in params.items():
        full = reference[name]
        got, want = (param.grad, full.grad) if grads else (param.detach(), full.detach())
        if got is None or want is None:
            assert got is want, f"{name} has a gradient in {'the sharded' if want is None else 'the plain'} model alone"
            continue
        box = getattr(param, "shard_box", None)
        want = want if box is None else rows_of(want, box)
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")
