"""Compressed gradients: what is applied and what is kept is always the mean of the gradients, on one node and on several.

Gradients of a plain copy of the model on each rank's rows are the reference. Tolerances are of fp32 sums of some ten terms.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from sharded_models import BATCH, mine
from torch import nn

import ckpt
import mpitrain
from collectives import Communicator, Mesh
from mpitrain.models import GPT, GPTConfig
from mpitrain.sharding import GradScaler, MixedPrecisionPolicy, fully_shard
from mpitrain.sharding.compression.power_sgd import PowerSGD
from mpitrain.sharding.compression.top_k import TopK
from mpitrain.sharding.unit.unit import compression_of
from mpitrain.weights.initial_values import initialize

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

CLIP = 0.05
M = TypeVar("M", bound=nn.Module)
HOOKS = [
    mpitrain.power_sgd(2),
    mpitrain.top_k(0.1),
    mpitrain.power_sgd(1, exact_steps=2),
    mpitrain.top_k(0.03, exact_steps=1),
]


class Odd(nn.Module):
    """Matrices of odd shapes, a convolution, vectors, a matrix that is too small, a tied one, a scalar, one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(11, 19), nn.Tanh(), nn.Linear(19, 11)) for _ in range(2))
        self.conv = nn.Conv2d(3, 5, 3)
        self.small = nn.Linear(2, 11)
        self.tied = nn.Linear(11, 11, bias=False)
        self.tied.weight = nn.Parameter(self.tied.weight.detach().clone())
        self.last = nn.Linear(11, 11, bias=False)
        self.last.weight = self.tied.weight
        self.unused = nn.Linear(13, 9)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        image = self.conv(x[:, :9].view(-1, 1, 3, 3).expand(-1, 3, -1, -1)).flatten(1)
        x = self.tied(x + self.small(image[:, :2])) * self.scale
        return self.last(x).square().mean()


def odd_model() -> Odd:
    torch.manual_seed(0)
    return Odd()


def batch(step: int, rows: slice) -> torch.Tensor:
    return torch.randn(BATCH, 11, generator=torch.Generator().manual_seed(step))[rows]


def compressed(comm: Any, hook: PowerSGD | TopK, *, make: Callable[[], M] = odd_model, **more: Any) -> M:
    model = make()
    fully_shard(model, comm, stage=0, **more)
    mpitrain.compress_gradients(model, hook)
    return model


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    # The shard of a scalar has one dimension.
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {name: grad.clone() if grad.ndim else grad.clone().view(1) for name, grad in grads.items()}


def mean_of(comm: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    return comm.all_reduce(tensor.double().clone(), "avg")


def residuals(comm: Communicator, model: nn.Module) -> dict[str, torch.Tensor]:
    """The mean of the contributors' residuals. The same on all ranks."""
    compression = compression_of(model)
    assert compression is not None
    found = {}
    for state in compression.states.values():
        if state.shape is not None:
            mine = torch.zeros(state.param.full.shape) if state.residual is None else state.residual
            share = comm.size / compression.num_contributors
            found[state.name] = mean_of(comm, mine) * share
    return found


def contributors(ranks: Communicator) -> int:
    return ranks.size if ranks.num_nodes == 1 else ranks.num_nodes


def norm_of_contributor(ranks: Communicator, grads: list[torch.Tensor]) -> float:
    """The norm of what a rank, or on several nodes its node, contributes."""
    flat = torch.cat([grad.double().view(-1) for grad in grads])
    if ranks.num_nodes > 1:
        ranks.node.all_reduce(flat)
    return flat.norm().item() * contributors(ranks) / ranks.size


@pytest.fixture(params=["one node", "two nodes"])
def ranks(request: pytest.FixtureRequest, comm: Communicator) -> Communicator:
    """All ranks, as they are or as if the odd ones were on another node. With 3 ranks the nodes have 2 and 1."""
    if request.param == "one node":
        return comm
    if comm.size < 3:
        pytest.skip("needs a node with several ranks")
    two_nodes: Communicator = request.getfixturevalue("two_nodes")
    return two_nodes


@pytest.mark.parametrize("hook", HOOKS, ids=str)
def test_what_is_applied_and_what_is_kept_is_the_mean(ranks: Communicator, hook: PowerSGD | TopK) -> None:
    model, plain = compressed(ranks, hook), odd_model()
    before = residuals(ranks, model)
    for step in range(4):
        x = batch(step, mine(ranks))
        model(x).backward()
        plain(x).backward()
        applied, own = grads_of(model), grads_of(plain)
        after = residuals(ranks, model)
        assert applied.keys() == own.keys()
        assert len(before) == 8 - (hook == HOOKS[0])  # whose rank is too high for the small matrix
        is_exact = step < hook.exact_steps or ranks.size == 1
        factor = 1.0
        if hook.clip_norm is not None and ranks.size > 1:
            factor = CLIP * contributors(ranks) ** 0.5 / norm_of_contributor(ranks, list(own.values()))
            assert factor < 1
        for name, grad in own.items():
            wanted = mean_of(ranks, grad * factor) + before.get(name, 0)
            kept = after.get(name, torch.zeros(1)).double()
            torch.testing.assert_close(applied[name] + kept, wanted, rtol=1e-4, atol=2e-6, msg=f"{name}, step {step}")
            assert (kept.norm() > 0) == (name in before and not is_exact), name
            everyone = ranks.all_gather_object(applied[name])
            assert all(torch.equal(each, applied[name]) for each in everyone), f"{name} differs between ranks"
        before = after
        model.zero_grad()
        plain.zero_grad()
    assert not before["unused.weight"].any()


def test_power_sgd_of_a_low_rank_is_exact(ranks: Communicator) -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(17, 23, bias=False), ranks, stage=0)
    mpitrain.compress_gradients(model, mpitrain.power_sgd(4))
    left = torch.randn(23, 3, generator=torch.Generator().manual_seed(1))
    for step in range(2):
        right = torch.randn(17, 3, generator=torch.Generator().manual_seed(10 * step + ranks.rank))
        grad = left @ right.t()  # of all ranks together of rank 3, in the same space of columns
        model(torch.eye(17)).mul(grad.t()).sum().backward()
        torch.testing.assert_close(model.weight.grad, mean_of(ranks, grad).float(), rtol=1e-4, atol=1e-5)
        model.zero_grad()


@pytest.mark.parametrize("hook", [mpitrain.power_sgd(2), mpitrain.top_k(0.1)], ids=str)
def test_a_gradient_that_is_not_finite_reaches_all_ranks_and_no_residual(
    ranks: Communicator, hook: PowerSGD | TopK
) -> None:
    model = compressed(ranks, hook)
    model(batch(0, mine(ranks))).backward()
    model.zero_grad()
    compression = compression_of(model)
    assert compression is not None
    before = copy.deepcopy([(state.residual, state.basis) for state in compression.states.values()])
    with torch.no_grad():
        bad = batch(1, mine(ranks))
        if ranks.rank == ranks.size - 1:
            bad[0] = torch.inf
    model(bad).backward()
    assert not mpitrain.clip_grad_norm_(model, 1.0).isfinite()
    grad = model.blocks[1][2].weight.grad
    assert not grad.isfinite().all()
    for (residual, basis), state in zip(before, compression.states.values(), strict=True):
        for old, new in ((residual, state.residual), (basis, state.basis)):
            assert (old is None) == (new is None) and (old is None or torch.equal(old, new)), state.name


def test_a_sum_of_backwards_is_one_reduction(comm: Communicator) -> None:
    """Under no_sync; and the second of two backwards outside of it adds its own."""
    model, plain = compressed(comm, mpitrain.power_sgd(2)), odd_model()
    x = [batch(step, mine(comm)) for step in range(3)]
    before = residuals(comm, model)
    with model.no_sync():
        model(x[0]).backward()
    for step in (1, 2):
        model(x[step]).backward()
    for each in x:
        plain(each).backward()
    compression = compression_of(model)
    assert compression is not None and compression.count == 2
    after = residuals(comm, model)
    for name, grad in grads_of(plain).items():
        total = grads_of(model)[name].double() + after.get(name, 0) - before.get(name, 0)
        torch.testing.assert_close(total, mean_of(comm, grad), rtol=1e-4, atol=2e-6, msg=name)


def test_frozen_parameters_and_parameters_of_some_ranks(comm: Communicator) -> None:
    model, plain = odd_model(), odd_model()
    model.blocks[1].requires_grad_(False)
    fully_shard(model, comm, stage=0)
    mpitrain.compress_gradients(model, mpitrain.top_k(0.1))
    first = model.blocks[0][0].weight
    for step in range(4):
        model.blocks[1].requires_grad_(step > 0)  # thawed
        first.requires_grad_(step != 2)  # frozen on all ranks for one step
        before = residuals(comm, model)
        with only_on_rank_0(model, comm), only_on_rank_0(plain, comm):
            for each in (model, plain):
                each(batch(step, mine(comm))).backward()
        after = residuals(comm, model)
        for name, param in model.named_parameters():
            want = dict(plain.named_parameters())[name].grad
            if want is None and name.startswith("conv"):
                want = torch.zeros_like(param)
            is_frozen = (step == 0 and name.startswith("blocks.1")) or (step == 2 and param is first)
            if want is None or is_frozen:
                assert param.grad is None and (name not in after or torch.equal(after[name], before[name])), name
            else:
                wanted = mean_of(comm, want).view(param.shape) + before.get(name, 0) - after.get(name, 0)
                torch.testing.assert_close(param.grad.double(), wanted, rtol=1e-4, atol=2e-6, msg=name)
        model.zero_grad()
        plain.zero_grad()


@contextmanager
def only_on_rank_0(model: nn.Module, comm: Communicator) -> Iterator[None]:
    """The other ranks do not use the convolution."""
    conv = model.conv
    if comm.rank:
        model.conv = Zeros()
    yield
    model.conv = conv


class Zeros(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(len(x), 5, 1, 1)


def test_the_residual_follows_the_scale_of_the_loss(comm: Communicator) -> None:
    ends = []
    for scale in (1.0, 8.0):
        model = compressed(comm, mpitrain.power_sgd(2))
        scaler = GradScaler(model, scale=scale, interval=2)  # the scale doubles on the way
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            scaler.scale(model(batch(step, mine(comm)))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        ends.append([param.detach().clone() for param in model.parameters()])
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)  # powers of two: the same bits


def test_gradients_of_a_model_in_bf16(comm: Communicator) -> None:
    """The bits of bf16 are lost in the passes, and none in the compression."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, plain = compressed(comm, mpitrain.power_sgd(2), mp_policy=policy), odd_model()
    fully_shard(plain, comm, stage=0, mp_policy=policy)
    before = residuals(comm, model)
    for step in range(2):
        x = batch(step, mine(comm)).bfloat16()
        model(x).backward()
        plain(x).backward()
    wanted, after = grads_of(plain), residuals(comm, model)
    for name, grad in grads_of(model).items():
        assert grad.dtype == torch.float32
        total = grad.double() + after.get(name, 0) - before.get(name, 0)
        torch.testing.assert_close(total, wanted[name].double(), rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("hook", [mpitrain.power_sgd(2), mpitrain.top_k(0.1)], ids=str)
def test_a_checkpoint_goes_on_with_the_same_bits(ranks: Communicator, shared_tmp: Path, hook: PowerSGD | TopK) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for step in numbers:
            model(batch(step, mine(ranks))).backward()
            optimizer.step()
            optimizer.zero_grad()

    def made() -> tuple[Odd, torch.optim.Optimizer]:
        model = compressed(ranks, hook)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    straight, resumed = made(), made()
    steps(*straight, range(2))
    mpitrain.save(shared_tmp / "two", *straight)
    mpitrain.load(shared_tmp / "two", *resumed)
    for pair in (straight, resumed):
        steps(*pair, range(2, 4))
    for one, other in zip(straight[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(one, other)

    # On another number of ranks the mean of the residuals stays. Each rank loads alone, as in a job of one.
    alone = ranks.split(ranks.rank)
    other = compressed(alone, hook)
    kept = residuals(ranks, straight[0])
    mpitrain.save(shared_tmp / "four", straight[0])
    mpitrain.load(shared_tmp / "four", other)
    for name, want in kept.items():
        torch.testing.assert_close(residuals(alone, other)[name], want, rtol=1e-6, atol=1e-9)
    own, x = odd_model(), batch(5, mine(ranks))
    own.load_state_dict({name: value.detach() for name, value in other.state_dict().items()})
    for each in (other, own):  # one contributor sends nothing: it applies the rest of the residual at once
        each(x).backward()
    for name, grad in grads_of(own).items():
        torch.testing.assert_close(
            grads_of(other)[name].double(), grad.double() + kept.get(name, 0), rtol=1e-4, atol=2e-6
        )
    assert all(not each.any() for each in residuals(alone, other).values())
    # A checkpoint without compression: it begins anew.
    plain = fully_shard(odd_model(), ranks, stage=0)
    mpitrain.save(shared_tmp / "plain", plain)
    mpitrain.load(shared_tmp / "plain", resumed[0])
    assert not any(each.any() for each in residuals(ranks, resumed[0]).values())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("storage", ["resident", "private"])
def test_copies_of_shards_that_are_cut_between_parameters(comm: Communicator, shared_tmp: Path, storage: str) -> None:
    """HSDP: two copies on two ranks each."""
    mesh = Mesh(comm, {"dp_replicate": 2, "dp_shard": 2})

    def made(where: Any, **more: Any) -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(9), nn.Linear(9, 9, bias=False), nn.Linear(9, 20, bias=False))
        return fully_shard(model, where, units="one", **more)

    model, plain = made(mesh, storage=storage, cut="parameters"), made(comm, stage=0)
    assert model[1].weight.numel() in (0, 81), "whole, or on the other rank"
    mpitrain.compress_gradients(model, mpitrain.top_k(0.2))
    compression = compression_of(model)
    assert compression is not None
    kept: dict[str, torch.Tensor] = {}
    for step in range(3):
        x = torch.randn(4, 9, generator=torch.Generator().manual_seed(step + 10 * comm.rank))
        for each in (model, plain):
            each(x).square().mean().backward()
        for state in compression.states.values():
            if not state.param.box.numel:
                continue
            mean, grad = dict(plain.named_parameters())[state.name].grad, state.param.shard.grad
            now = torch.zeros(()) if state.residual is None else mean_of(mesh["dp_replicate"], state.residual)
            torch.testing.assert_close(
                grad + now, mean + kept.get(state.name, 0), rtol=1e-4, atol=1e-6, check_dtype=False
            )
            assert now.any() == (grad.ndim == 2)
            kept[state.name] = now
        model.zero_grad()
        plain.zero_grad()
    # One rank alone sends the residuals at once, also if the rank that wrote the numbers had none.
    mpitrain.save(shared_tmp / "saved", model)
    alone = made(comm.split(comm.rank), stage=0)
    mpitrain.compress_gradients(alone, mpitrain.top_k(0.2))
    mpitrain.load(shared_tmp / "saved", alone)
    alone(torch.zeros(1, 9)).sum().mul(0).backward()
    for name, want in kept.items():
        torch.testing.assert_close(
            dict(alone.named_parameters())[name].grad, want.float().expand_as(dict(alone.named_parameters())[name])
        )


@pytest.mark.ranks(4)
@pytest.mark.parametrize("division", ["tensors", "shards"])
def test_a_part_of_the_model_that_is_not_finite_changes_no_residual(comm: Communicator, division: str) -> None:
    """The bad gradient is one of a matrix that only one rank of a copy has."""
    mesh = mpitrain.mesh(comm, dp_replicate=2, **({"tp": 2} if division == "tensors" else {"dp_shard": 2}))
    model = plain_gpt()
    initialize(model, seed=1)
    if division == "tensors":
        mpitrain.tensor_parallel(model, mesh["tp"])
    fully_shard(model, mesh, stage=0 if division == "tensors" else 2, cut="parameters", storage="private")
    mpitrain.compress_gradients(model, mpitrain.power_sgd(2))
    compression = compression_of(model)
    assert compression is not None
    tokens = torch.randint(0, 51, (2, 9), generator=torch.Generator().manual_seed(mesh["dp_replicate"].rank))
    for is_bad in (False, True):
        before = copy.deepcopy([(state.residual, state.basis) for state in compression.states.values()])
        if is_bad:
            bad = next(each.param for each in compression.states.values() if each.name.endswith("mlp.fc.weight"))
            if comm.rank == 1 or division == "shards":
                bad.full.register_hook(lambda grad: grad * torch.nan)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        model.zero_grad()
        changed = [
            one is not None and not torch.equal(one, other)
            for old, state in zip(before, compression.states.values(), strict=True)
            for one, other in zip(old, (state.residual, state.basis), strict=True)
        ]
        assert any(changed) != is_bad


@pytest.mark.ranks(4)
@pytest.mark.parametrize("division", ["tensors", "stages"])
def test_with_tensor_parallelism_and_pipelines_a_checkpoint_goes_on(
    comm: Communicator, shared_tmp: Path, division: str
) -> None:
    """Each rank compresses its own part of a matrix; with pipelines, that of its stage. The model is tied: stages share a matrix."""
    axes = {"tp": 2} if division == "tensors" else {"pp": 2}
    mesh = mpitrain.mesh(comm, dp_shard=1, dp_replicate=2, **axes)

    def made() -> tuple[nn.Module, Any, torch.optim.Optimizer]:
        model, pipe = plain_gpt(), None
        initialize(model, seed=1)
        if division == "tensors":
            mpitrain.tensor_parallel(model, mesh["tp"])
        else:
            pipe = mpitrain.pipeline(model, mesh["pp"], micro_batches=2)
        fully_shard(model, mesh, stage=0)
        mpitrain.compress_gradients(model, mpitrain.power_sgd(2))
        return model, pipe, torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(model: nn.Module, pipe: Any, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for step in numbers:
            seed = 2 * step + mesh["dp_replicate"].rank
            tokens = torch.randint(0, 51, (2, 9), generator=torch.Generator().manual_seed(seed))
            if pipe is None:
                model(tokens[:, :-1], tokens[:, 1:]).backward()
            else:
                last = [{"targets_BL": row[:, 1:]} for row in tokens.split(1)]
                pipe.step([row[:, :-1] for row in tokens.split(1)], last=last)
            optimizer.step()
            optimizer.zero_grad()

    straight, resumed = made(), made()
    steps(*straight, range(2))
    mpitrain.save(shared_tmp / "two", straight[0], straight[2])
    mpitrain.load(shared_tmp / "two", resumed[0], resumed[2])
    for each in (straight, resumed):
        steps(*each, range(2, 4))
    for one, other in zip(straight[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(one, other)
        copies = mesh["dp_replicate"].all_gather_object(one.detach())
        assert torch.equal(copies[0], copies[1])
    compression = compression_of(straight[0])
    assert compression is not None
    assert any(state.residual is not None and state.residual.any() for state in compression.states.values())
    # One rank alone gets the whole residuals of all parts.
    alone = compressed(comm.split(comm.rank), mpitrain.power_sgd(2), make=plain_gpt)
    mpitrain.load(shared_tmp / "two", alone)
    its = compression_of(alone)
    assert its is not None
    stored = ckpt.open(shared_tmp / "two")
    for state in its.states.values():
        if (name := f"compression/residual/{state.name}") in stored:
            assert state.residual is not None
            torch.testing.assert_close(state.residual, torch.from_numpy(stored[name][:]).double().mean(0).float())
            assert state.has_residual


def plain_gpt() -> GPT:
    return GPT(GPTConfig(vocab=51, context=8, width=20, layers=2, heads=2, tied=True))


def test_mistakes_have_one_line_on_all_ranks(comm: Communicator) -> None:
    with pytest.raises(ValueError, match="the model is not sharded"):
        mpitrain.compress_gradients(odd_model(), mpitrain.power_sgd())
    model = compressed(comm, mpitrain.top_k())
    with pytest.raises(ValueError, match="has a hook already"):
        mpitrain.compress_gradients(model, mpitrain.top_k())
    with pytest.raises(TypeError, match=r"expected mpitrain.power_sgd"):
        mpitrain.compress_gradients(model, "power_sgd")  # type: ignore[arg-type]
    other = fully_shard(odd_model(), comm, stage=0)
    if comm.size > 1:
        with pytest.raises(ValueError, match=r"the ranks differ: PowerSGD\(rank=1, .* on rank 0"):
            mpitrain.compress_gradients(other, mpitrain.power_sgd(1 + comm.rank))
        apart = fully_shard(odd_model(), comm, stage=0)
        mpitrain.DiLoCo(apart, every=2)
        with pytest.raises(ValueError, match=r"the model's steps are local \(DiLoCo\)"):
            mpitrain.compress_gradients(apart, mpitrain.power_sgd())
    other(batch(0, mine(comm))).backward()
    with pytest.raises(RuntimeError, match="expected a call before its first forward"):
        mpitrain.compress_gradients(other, mpitrain.power_sgd())
