"""Models with slices: the same bits at any number of ranks. Rank 0 computes the expected bits by itself, with plain torch."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_hosts import on_hosts
from torch import nn

import mpitrain
from collectives import Communicator
from mpitrain.placement.axes import group_of

COUNT = 8  # slices


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(17, 33), nn.Linear(33, 17)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 17), Block(), Block(), nn.Linear(17, 3))
    model.unused = nn.Parameter(torch.ones(3))  # type: ignore[assignment]
    return model


def _batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        yield torch.randn(COUNT, 4, 5, generator=generator), torch.randn(COUNT, 4, 3, generator=generator)


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x).float() - y).square().mean()
    return loss


def _penalized(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """With the gradient of the inputs in the loss."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return _loss(model, x, y) + slope.square().mean()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)


Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def _expected(loss: Loss = _loss, *, bf16: bool = False) -> dict[str, torch.Tensor]:
    """One process, with the additions of the tree written out."""
    model = _model()
    optimizer, params = _optimizer(model), list(model.parameters())
    for x, y in _batches():
        of_slices: list[list[torch.Tensor | None]] = []
        for number in range(COUNT):
            short = _model().bfloat16() if bf16 else model
            if bf16:
                short.load_state_dict(model.state_dict())
            inputs = x[number].bfloat16() if bf16 else x[number]
            grads = torch.autograd.grad(loss(short, inputs, y[number]), list(short.parameters()), allow_unused=True)
            of_slices.append([None if grad is None else grad.float() for grad in grads])
        for param, *leaves in zip(params, *of_slices, strict=True):
            nodes = [leaf for leaf in leaves if leaf is not None]
            while len(nodes) > 1:
                nodes = [left + right for left, right in zip(nodes[::2], nodes[1::2], strict=True)]
            param.grad = nodes[0] / COUNT if nodes else None
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def _train(model: nn.Module, loss: Loss = _loss, *, set_to_none: bool = True) -> None:
    optimizer = _optimizer(model)
    for x, y in _batches():
        optimizer.zero_grad(set_to_none)
        for number, _ in mpitrain.rounds(model):
            loss(model, x[number], y[number]).backward()
        optimizer.step()


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["stage 0", "stage 1", "stage 3", "private", "copies", "copies of stage 0", "bf16"])
def test_parameters_have_the_bits_of_one_process(comm: Communicator, kind: str) -> None:
    if "copies" in kind and comm.size % 2:
        pytest.skip("copies need an even number of ranks")
    model = _model()
    mesh = mpitrain.mesh(comm, dp_replicate=2) if "copies" in kind else comm
    stage = {"stage 0": 0, "copies of stage 0": 0, "stage 1": 1}.get(kind, 3)
    policy = mpitrain.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16) if kind == "bf16" else None
    storage = "private" if kind == "private" else "auto"
    mpitrain.fully_shard(model, mesh, stage=stage, storage=storage, slices=COUNT, mp_policy=policy)  # type: ignore[arg-type]
    _train(model)
    found = mpitrain.full_state_dict(model)
    if comm.rank == 0:
        for name, expected in _expected(bf16=kind == "bf16").items():
            assert torch.equal(found[name], expected), name
    assert model.unused.grad is None, "no slice has used it"


@pytest.mark.parametrize("kind", ["stage 3", "bf16"])
def test_hosts_add_whole_subtrees_before_they_send(comm: Communicator, kind: str) -> None:
    if comm.size == 1:
        pytest.skip("one rank is on one host")
    hosts = {2: [0, 1], 3: [0, 0, 1], 4: [0, 0, 0, 1]}[comm.size]  # of three neighbours two are a subtree
    ranks, model = on_hosts(comm.mpi, hosts), _model()
    policy = mpitrain.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16) if kind == "bf16" else None
    mpitrain.fully_shard(model, ranks, slices=COUNT, mp_policy=policy)  # type: ignore[arg-type]
    _train(model)
    found = mpitrain.full_state_dict(model)
    if comm.rank == 0:
        for name, expected in _expected(bf16=kind == "bf16").items():
            assert torch.equal(found[name], expected), name
    ranks.free()


def test_a_step_that_is_not_complete(comm: Communicator) -> None:
    model = mpitrain.fully_shard(_model(), comm, slices=COUNT)
    optimizer = _optimizer(model)
    x, y = next(_batches())
    first, *_ = mpitrain.rounds(model)
    _loss(model, x[first.number], y[first.number]).backward()
    if comm.size < COUNT:
        with pytest.raises(RuntimeError, match=r"only 1 of the . rounds of a step had a backward"):
            optimizer.step()
    model.zero_grad()
    _train(model)
    found = mpitrain.full_state_dict(model)
    if comm.rank == 0:
        assert all(torch.equal(found[name], expected) for name, expected in _expected().items()), "begun again"
    with pytest.raises(ValueError, match="added up slice by slice"), model.no_sync():
        pass


def test_the_mean_of_a_number_of_each_slice(comm: Communicator) -> None:
    model = mpitrain.fully_shard(_model(), comm, slices=COUNT)
    generator = torch.Generator().manual_seed(2)
    losses = torch.randn(COUNT, generator=generator).double() * 10.0 ** torch.arange(COUNT)
    nodes = losses.tolist()
    while len(nodes) > 1:
        nodes = [left + right for left, right in zip(nodes[::2], nodes[1::2], strict=True)]
    mine = [losses[number] if counts else losses[number] * 9 for number, counts in mpitrain.rounds(model)]
    assert mpitrain.slice_mean(model, mine) == nodes[0] / COUNT
    with pytest.raises(ValueError, match=rf"a number for each of {len(mine)} rounds, got {len(mine) + 1}"):
        mpitrain.slice_mean(model, [*mine, 0.0] if comm.rank == comm.size - 1 else mine)


PAGE = Path(__file__).parents[3] / "docs" / "reproducibility.md"


def test_the_program_in_the_docs(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code = compile(program + "    means.append((mean, norm.item()))\n", PAGE.name, "exec")
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # of the tests
    found = []
    for world in (comm, group_of(comm, 1)):
        monkeypatch.setattr("collectives.world", lambda world=world: world)
        names: dict[str, Any] = {"means": []}
        exec(code, names)
        found.append((names["means"], mpitrain.full_state_dict(names["model"])))
    (means, state), (alone, state_alone) = found
    assert means == alone and len(means) == 10 and means[-1][0] < means[0][0]
    assert state.keys() == (state_alone.keys() if comm.rank == 0 else set())
    assert all(torch.equal(state[name], state_alone[name]) for name in state)


@pytest.mark.parametrize("storage", ["resident", "private"])
def test_gradients_of_inputs_are_no_round(comm: Communicator, storage: str) -> None:
    model = mpitrain.fully_shard(_model(), comm, slices=COUNT, storage=storage)  # type: ignore[arg-type]
    calls = 0

    def count(shard: torch.Tensor) -> None:
        nonlocal calls
        calls += 1

    model[0].weight.register_post_accumulate_grad_hook(count)
    _train(model, _penalized, set_to_none=False)
    found = mpitrain.full_state_dict(model)
    if comm.rank == 0:
        assert all(torch.equal(found[name], expected) for name, expected in _expected(_penalized).items())
    assert calls == 3, "once a step, not once a round"


@pytest.mark.rest
def test_a_round_has_one_backward(comm: Communicator) -> None:
    model = mpitrain.fully_shard(_model(), comm, slices=COUNT)

    def twice(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        _loss(model, x, y).backward()
        return _loss(model, x, y)

    with pytest.raises(RuntimeError, match=r"rounds: 2 backwards in 1 round, .* expected one in each round"):
        _train(model, twice)
    model.zero_grad()
    numbers = [number for number, _ in mpitrain.rounds(model)]  # of the slices to read
    assert numbers[0] == comm.rank
    _train(model)
    found = mpitrain.full_state_dict(model)
    if comm.rank == 0:
        assert all(torch.equal(found[name], expected) for name, expected in _expected().items()), "begun again"


def test_inputs_at_other_addresses(comm: Communicator) -> None:
    """Each rank has its own slices alone, one after the other: slice i begins at another address than in the whole batch."""
    batch = torch.randn(COUNT, 3, 65, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def grads(comm: Communicator) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        model = mpitrain.fully_shard(nn.Linear(65, 43).double(), comm, stage=0, slices=COUNT)
        numbers = [number for number, _ in mpitrain.rounds(model)]
        mine = batch[numbers]
        for index, _ in enumerate(mpitrain.rounds(model)):
            model(mine[index]).square().mean().backward()
        return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}

    alone = grads(group_of(comm, 1))
    for name, grad in grads(comm).items():
        assert torch.equal(grad, alone[name]), name


def test_arguments(comm: Communicator) -> None:
    with pytest.raises(ValueError, match="expected a power of two"):
        mpitrain.fully_shard(_model(), comm, slices=3)
    with pytest.raises(ValueError, match="encode between nodes"):
        mpitrain.fully_shard(_model(), comm, slices=4, wire="int8")
    if comm.size > 2:
        with pytest.raises(ValueError, match=f"slices is 2, and {comm.size} ranks have different data"):
            mpitrain.fully_shard(_model(), comm, slices=2)
    with pytest.raises(ValueError, match="the model has no slices"):
        mpitrain.rounds(mpitrain.fully_shard(_model(), comm))
    model = mpitrain.fully_shard(_model(), comm, stage=0, slices=COUNT)
    with pytest.raises(ValueError, match="has slices"):
        mpitrain.compress_gradients(model, mpitrain.power_sgd())
    with pytest.raises(ValueError, match="has slices"):
        mpitrain.DiLoCo(model, every=2)
