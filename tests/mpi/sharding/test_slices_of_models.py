"""Models that draw random numbers or have running statistics, with slices: the same bits at any number of ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tensors
from sharded_models import shard
from small_trainers import maker
from tiny_transformers import VOCAB, tiny
from torch import nn

import ckpt
import mpitrain
from collectives import Communicator
from mpitrain.job.train.trainer import Trainer
from mpitrain.placement.axes import group_of

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

COUNT, STEPS, SEED = 8, 3, 7  # slices; steps of a run; of the random numbers


class Net(nn.Module):
    """Layers whose running statistics are averaged, cumulative, of no affine layer, and frozen; dropout; and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(7, 5, 3),
            nn.BatchNorm2d(5, momentum=None), nn.InstanceNorm2d(5, track_running_stats=True),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False))
        self.frozen = nn.BatchNorm1d(4).eval()
        self.register_buffer("most", torch.zeros((), dtype=torch.bfloat16))
        self.register_buffer("rows", torch.zeros(2, dtype=torch.int32))

    def train(self, mode: bool = True) -> "Net":
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = self.rows + len(x)  # another tensor, as some modules do
        out: torch.Tensor = self.frozen(self.head(self.body(x).relu().mean((2, 3))))
        with torch.no_grad():
            self.most.copy_(torch.maximum(self.most, out.max()))
        return out


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def images(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(slices, rows, ...): the inputs and the targets of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(COUNT, 2, 3, 7, 7, generator=generator), torch.randn(COUNT, 2, 4, generator=generator)


def loss_of_net(model: nn.Module, step: int, number: int) -> torch.Tensor:
    x, y = images(step)
    loss: torch.Tensor = (model(x[number]) - y[number]).square().mean()
    return loss


def loss_in_two_modes(model: nn.Module, step: int, number: int) -> torch.Tensor:
    """The second forward changes no running statistics."""
    loss = loss_of_net(model, step, number)
    model.eval()
    loss = loss + loss_of_net(model, step + 1, number)
    model.train()
    return loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


Loss = Callable[[Any, int, int], torch.Tensor]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Loss,
    *,
    begin: int = 0,
    end: int = STEPS,
    seed: int = SEED,
    clips: bool = False,
) -> None:
    for step in range(begin, end):
        optimizer.zero_grad()
        for number, _ in mpitrain.rounds(model):
            mpitrain.seed_all(seed, step, number)
            loss_of(model, step, number).backward()
        if clips:
            mpitrain.clip_grad_norm_(model, 0.1)
        optimizer.step()


def expected(loss_of: Callable[[Any, int, int], torch.Tensor] = loss_of_net) -> dict[str, torch.Tensor]:
    """The state of one process after the run, with plain torch and the additions of the tree written out."""

    def tree(nodes: list[torch.Tensor]) -> torch.Tensor:
        while len(nodes) > 1:
            nodes = [left + right for left, right in zip(nodes[::2], nodes[1::2], strict=True)]
        return nodes[0] / COUNT

    model = net()
    optimizer, params = optimizer_of(model), list(model.parameters())
    for step in range(STEPS):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        grads, after = [], []
        for number in range(COUNT):
            model.load_state_dict(before, strict=False)
            mpitrain.seed_all(SEED, step, number)
            grads.append(torch.autograd.grad(loss_of(model, step, number), params))
            after.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        for param, *of_slices in zip(params, *grads, strict=True):
            param.grad = tree(of_slices)
        means = {
            name: tree([each[name].double() for each in after]) if buffer.is_floating_point() else after[0][name]
            for name, buffer in before.items()
        }
        model.load_state_dict(means, strict=False)
        optimizer.step()
    return model.state_dict()


def assert_bits(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), f"{name}: {found[name]} instead of {value}"


@pytest.mark.rest
@pytest.mark.parametrize("way", ["stage 0", "stage 3", "stage 3, private", "checkpointed"])
@pytest.mark.parametrize("is_sync", [False, True])
def test_running_statistics_have_the_bits_of_one_process(comm: Communicator, way: str, is_sync: bool) -> None:
    model = net()
    if is_sync:
        mpitrain.convert_sync_batchnorm(model, comm)
    if way == "checkpointed":  # its second forward must not count
        mpitrain.checkpoint_activations(model, [model.body, model.head])
    shard(model, comm, "stage 3" if way == "checkpointed" else way, slices=COUNT)
    train(model, optimizer_of(model), loss_of_net)
    of_ranks = comm.all_gather_object({name: buffer.clone() for name, buffer in model.named_buffers()})
    for other in of_ranks:
        assert_bits(other, of_ranks[0])
    mpitrain.sync_buffers(model)  # changes no bit
    found = mpitrain.full_state_dict(model)
    if comm.rank == 0:
        assert_bits(found, expected())


def test_batch_norm_in_bfloat16(comm: Communicator) -> None:
    """Parameters are in bfloat16 in a forward, and running statistics are not."""

    def state(comm: Communicator) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.Flatten(), nn.Linear(175, 4))
        mpitrain.convert_sync_batchnorm(model, comm)
        policy = mpitrain.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        mpitrain.fully_shard(model, comm, slices=COUNT, mp_policy=policy)
        train(model, optimizer_of(model), loss_of_net)
        assert model.eval()(images(0)[0][0]).isfinite().all()
        return mpitrain.full_state_dict(model)

    found, alone = state(comm), state(group_of(comm, 1))
    if comm.rank == 0:
        assert_bits(found, alone)


def test_the_last_forward_of_a_round_may_leave_buffers_alone(comm: Communicator) -> None:
    model = shard(net(), comm, slices=COUNT)
    train(model, optimizer_of(model), loss_in_two_modes)
    found = mpitrain.full_state_dict(model)
    if comm.rank == 0:
        assert_bits(found, expected(loss_in_two_modes))


def test_a_run_goes_on_at_another_number_of_ranks(comm: Communicator, shared_tmp: Path) -> None:
    model = shard(net(), comm, slices=COUNT)
    optimizer = optimizer_of(model)
    train(model, optimizer, loss_of_net, end=2)
    mpitrain.save(shared_tmp / "two-steps", model, optimizer)
    alone = shard(net(), group_of(comm, 1), slices=COUNT)
    optimizer = optimizer_of(alone)
    images_of_0, _ = images(0)
    alone(images_of_0[0])  # a forward without a backward, before the values are loaded
    mpitrain.load(shared_tmp / "two-steps", alone, optimizer)
    train(alone, optimizer, loss_of_net, begin=2)
    assert_bits(mpitrain.full_state_dict(alone), expected())


def test_a_step_that_begins_again(comm: Communicator) -> None:
    model = shard(net(), comm, slices=COUNT)
    optimizer = optimizer_of(model)
    first, *_ = mpitrain.rounds(model)
    before = [buffer.clone() for buffer in model.buffers()]
    loss_of_net(model, 0, first.number).backward()
    if comm.size < COUNT:  # between the rounds of a step
        assert all(torch.equal(buffer, old) for buffer, old in zip(model.buffers(), before, strict=True))
    model.zero_grad()

    def fail(*args: object) -> None:
        raise ArithmeticError("on purpose")

    hook = model.head.register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        loss_of_net(model, 0, first.number)
    hook.remove()
    train(model, optimizer, loss_of_net)
    found = mpitrain.full_state_dict(model)
    if comm.rank == 0:
        assert_bits(found, expected())


def loss_of_llama(model: Any, step: int, number: int) -> torch.Tensor:
    tokens = torch.randint(3, VOCAB, (COUNT, 2, 12), generator=torch.Generator().manual_seed(step))[number]
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def trained_llama(
    comm: Communicator, *, is_checkpointed: bool = False, seed: int = SEED
) -> list[dict[str, torch.Tensor]]:
    """The parameters and the gradients after the run, on rank 0."""
    model = tiny("llama", attention_dropout=0.1)
    if is_checkpointed:
        mpitrain.checkpoint_activations(model)
    shard(model, comm, slices=COUNT)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True), loss_of_llama, seed=seed, clips=True)
    parameters = mpitrain.full_state_dict(model)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.grad)
    return [parameters, mpitrain.full_state_dict(model)]


@pytest.mark.rest
def test_a_llama_of_transformers_with_dropout(comm: Communicator) -> None:
    pytest.importorskip("transformers", minversion="5")
    alone = trained_llama(group_of(comm, 1))
    of_all = [trained_llama(comm, is_checkpointed=is_checkpointed) for is_checkpointed in (False, True)]
    others = trained_llama(comm, seed=SEED + 1)
    if comm.rank == 0:
        for found in of_all:
            for values, wanted in zip(found, alone, strict=True):
                assert_bits(values, wanted)
        name = "lm_head.weight"
        assert not torch.equal(others[0][name], alone[0][name]), "the seed decides what is dropped"


@pytest.mark.rest
def test_the_main_job_draws_by_step_and_slice(
    comm: Communicator, shared_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(ranks: Communicator, folder: Path, *more: str) -> Trainer:
        folder.mkdir(exist_ok=True)
        settings = ["--train.batch", "8", "--train.slices", "4", "--checkpoint.every", "2"]
        trainer = maker(ranks, folder, monkeypatch)("run", 4, *settings, *more)

        def drop(block: nn.Module, args: object, out: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(out, 0.2, block.training and torch.is_grad_enabled())

        trainer.model.blocks[0].register_forward_hook(drop)  # type: ignore[index, union-attr]
        return trainer

    trainer = made(comm, shared_tmp)
    trainer.fit()
    ckpt.wait()
    comm.barrier()
    alone = made(group_of(comm, 1), tmp_path / "alone", "--resume", str(trainer.run.checkpoint(2)))
    remarks = alone.load(trainer.run.checkpoint(2))
    assert not [line for line in remarks if "random" in line or "bits" in line]
    other = made(group_of(comm, 1), tmp_path / "other", "--train.slices", "8", "--parallel.threads", "2")
    torch.set_num_threads(1)
    assert other.load(trainer.run.checkpoint(2))[-1] == (
        "from here on the bits may differ from those of a run without this stop (train.slices), because of threads 1 -> 2, "
        "train.slices 4 -> 8"
    )
    alone.fit()
    ckpt.wait()
    found = tensors(trainer.run.checkpoint(4))
    assert found == tensors(alone.run.checkpoint(4))
    assert "random/states" not in found
