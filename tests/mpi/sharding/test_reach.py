"""A parent that reaches into a sharded module, in private storage: an error, not one rank's rows in place of the whole parameter."""

from collections.abc import Callable

import pytest
import torch
from sharded_models import STORAGES
from torch import nn

from collectives import Communicator
from mpitrain.sharding import fully_shard

pytestmark = pytest.mark.ranks(1, 2, 3)


class Parent(nn.Module):
    def __init__(self, use: Callable[["Parent", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Embedding(8, 4))
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, x)


def with_a_shape_that_does_not_fit(parent: Parent, x: torch.Tensor) -> torch.Tensor:
    return parent.block[0](x)


def with_one_that_fits(parent: Parent, x: torch.Tensor) -> torch.Tensor:
    return x + parent.block[1].weight.sum()


def by_no_parameter(parent: Parent, x: torch.Tensor) -> torch.Tensor:
    raise KeyError(f"a mistake in the model, beside {parent.block[0].weight.dtype}")


def interrupted(parent: Parent, x: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


@pytest.mark.parametrize("use", [with_a_shape_that_does_not_fit, with_one_that_fits])
def test_what_is_used_outside_the_forward_around_which_it_is_gathered(comm: Communicator, use: Callable) -> None:
    for storage in STORAGES:
        torch.manual_seed(0)
        model, plain = Parent(use), Parent(use)
        model.load_state_dict(plain.state_dict())
        fully_shard(model.block, comm, storage=storage)
        fully_shard(model, comm, storage=storage)
        x = torch.ones(2, 4)
        if storage == "private" and comm.size > 1:
            for _ in range(2):
                with pytest.raises(
                    RuntimeError, match=r"block\.\d\.weight was used outside the forward of block \(a Sequential\)"
                ):
                    model(x)
                comm.barrier()
        else:
            torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("is_training", [True, False])
def test_attention_of_torch_does_not_call_its_projection(comm: Communicator, is_training: bool) -> None:
    """It reads the parameters of `out_proj`, with gradients and without. With fp32 parameters there is no other error."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    torch.manual_seed(0)
    x = torch.randn(2, 3, 8)
    for storage in STORAGES:
        model, plain = Attends().train(is_training), Attends()
        model.load_state_dict(plain.state_dict())
        fully_shard(model.attention.out_proj, comm, storage=storage)
        fully_shard(model, comm, storage=storage)
        with torch.set_grad_enabled(is_training):
            if storage == "private" and comm.size > 1:
                for _ in range(2):
                    with pytest.raises(RuntimeError, match=r"out_proj\.\w+ was used outside the forward of attention"):
                        model(x)
                    comm.barrier()
            else:
                torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)


def test_without_gradients_too(comm: Communicator) -> None:
    """A use that fits by chance has no graph to look at."""
    model = Parent(with_one_that_fits)
    fully_shard(model.block, comm, storage="private")
    fully_shard(model, comm, storage="private")
    with torch.no_grad():
        if comm.size > 1:
            with pytest.raises(RuntimeError, match=r"block\.1\.weight was used outside the forward of block"):
                model(torch.ones(2, 4))
        else:
            model(torch.ones(2, 4))


def test_other_errors_stay_as_they_are(comm: Communicator) -> None:
    model = Parent(by_no_parameter)
    fully_shard(model.block, comm, storage="private")
    fully_shard(model, comm, storage="private")
    with pytest.raises(KeyError, match="a mistake in the model"):
        model(torch.ones(2, 4))


def test_an_interrupted_forward_is_not_taken_for_one_that_was_looked_at(comm: Communicator) -> None:
    model = Parent(interrupted)
    fully_shard(model.block, comm, storage="private")
    fully_shard(model, comm, storage="private")
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 4))
    model.use = with_one_that_fits
    if comm.size > 1:
        with pytest.raises(RuntimeError, match="was used outside the forward of block"):
            model(torch.ones(2, 4))
