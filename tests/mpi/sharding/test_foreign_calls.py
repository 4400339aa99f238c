"""What torch and other libraries do with a model that they take for a plain one: one line says what is sharded and how to proceed.

Of libraries that are not installed, a class or a module of the same names does the same.
"""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import mpitrain
from collectives import Communicator
from mpitrain.sharding import fully_shard

pytestmark = pytest.mark.ranks(1, 2)


class Adapted(nn.Module):
    """As peft's models: an adapter is added to the layer's own weight, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.up, self.down = nn.Parameter(torch.ones(6, 2)), nn.Parameter(torch.ones(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ (self.up @ self.down).t()

    def merge_and_unload(self, safe_merge: bool = False) -> nn.Module:
        self.layer.weight.data += self.up @ self.down
        return self.layer


X = torch.ones(3, 4)


def test_an_adapter_is_not_merged_into_shards(comm: Communicator) -> None:
    model = nn.Sequential(Adapted())
    plain = copy.deepcopy(model[0])
    fully_shard(model, comm)
    expected = model(X)
    if comm.size == 1:  # whole, so right
        merged = model[0].merge_and_unload()
        with mpitrain.unshard(model):  # a part of a sharded model
            torch.testing.assert_close(merged(X), plain.merge_and_unload()(X))
        return
    for around in (nn.Module(), model):  # shards, and whole parameters
        with (
            mpitrain.unshard(around),
            pytest.raises(TypeError, match=r"^merge_and_unload: 0\.\S+ is sharded.*unsharded"),
        ):
            model[0].merge_and_unload(safe_merge=True)
    torch.testing.assert_close(model(X), expected)
    copies = fully_shard(Adapted(), comm, stage=0)
    copies.merge_and_unload()


def test_embeddings_are_resized_before_sharding(comm: Communicator) -> None:
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 4)

        def resize_token_embeddings(self, count: int) -> None:
            self.embed = nn.Embedding(count, 4)

    model = nn.Sequential(Embeds())
    model[0].resize_token_embeddings(8)
    fully_shard(model, comm)
    with pytest.raises(TypeError, match=r"resize_token_embeddings: 0\.embed\.weight is sharded.*before fully_shard"):
        model[0].resize_token_embeddings(10)


def test_sparse_gradients(comm: Communicator) -> None:
    for kind in (nn.Embedding, nn.EmbeddingBag):
        frozen = nn.Sequential(kind(6, 4, sparse=True).requires_grad_(False), nn.Linear(4, 2))
        if comm.size > 1:
            with pytest.raises(ValueError, match=r"of 0\.weight is sparse"):  # it may be thawed
                fully_shard(frozen, comm)
        model = nn.Sequential(kind(6, 4, sparse=True), nn.Linear(4, 2))
        if comm.size > 1:
            with pytest.raises(
                ValueError, match=rf"of 0\.weight is sparse \({kind.__name__}.*sparse=False.*ignored_params"
            ):
                fully_shard(model, comm)
            fully_shard(model, comm, ignored_params=model[0].parameters())
        else:
            fully_shard(model, comm)
        model(torch.tensor([[1, 2]])).sum().backward()
        assert model[0].weight.grad.is_sparse


def test_lazy_modules(comm: Communicator) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"1\.weight has no shape yet.*run the model once before fully_shard"):
        fully_shard(model, comm)
    model(X)
    fully_shard(model, comm)(X).sum().backward()


def test_gradients_are_not_asked_of_shards(comm: Communicator) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), comm)
    params = list(model.parameters())
    x = X.clone().requires_grad_()
    for ask in (
        lambda loss: torch.autograd.grad(loss, params),
        lambda loss: torch.autograd.grad(loss, [x, params[2]], allow_unused=True),
        lambda loss: loss.backward(inputs=params),
    ):
        with pytest.raises(
            RuntimeError, match=r"autograd\.grad.*[01]\.(weight|bias) is sharded.*call loss\.backward\(\)"
        ):
            ask(model(x).sum())
    (grad,) = torch.autograd.grad(model(x).sum(), x)
    with mpitrain.unshard(model):
        torch.testing.assert_close(grad, (model[1].weight @ model[0].weight).sum(0).expand(3, 4).detach())
    model(x).sum().backward()
    assert all(param.grad is not None for param in params)


def test_averages_and_wrappers(comm: Communicator) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), comm)
    with pytest.raises(TypeError, match=r"cannot be copied.*AveragedModel.*mpitrain\.EMA\(model, decay\)"):
        torch.optim.swa_utils.AveragedModel(model)
    assert dict(inspect.getmembers(model))["training"], "who looks at all attributes is no DistributedDataParallel"
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(TypeError, match=r"DistributedDataParallel: 0\.weight is sharded.*your own loop"):
            nn.parallel.DistributedDataParallel(model)
    finally:
        torch.distributed.destroy_process_group()
    # `transformers.Trainer` needs a package more, and is known by the module whose functions step the optimizer.
    trainer: dict[str, Any] = {"__name__": "transformers.trainer"}
    exec("def train(optimizer):\n    optimizer.step()", trainer)
    optimizer = torch.optim.AdamW(model.parameters())
    model(X).sum().backward()
    if comm.size > 1:
        with pytest.raises(TypeError, match=r"transformers\.Trainer does not know that \S+ is sharded.*your own loop"):
            trainer["train"](optimizer)
    else:
        trainer["train"](optimizer)
    optimizer.step()
