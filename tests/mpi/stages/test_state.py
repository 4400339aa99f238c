"""Checkpoints, weights and initial values of a model in stages: those of the plain model, at any other layout."""

from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt
import mpitrain
from collectives import Communicator
from mpitrain.models import LanguageModel
from mpitrain.stages import Pipeline, pipeline
from tests.mpi.stages.test_parity import MICRO, adamw, batches, gpt, targets, tied_llama


class Counted(nn.Module):
    """A plain module with buffers, some of them views, a scalar parameter and one without elements, in the place of a block's second
    norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("expanded", torch.ones(1).expand(width))
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).T)
        self.register_buffer("negated", torch.polar(torch.ones(3), torch.arange(3.0)).conj().imag)
        self.register_buffer("nothing", torch.empty(2, 0))
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.none = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.number += 1  # type: ignore[operator]
            self.mean += x.detach().mean((0, 1))  # type: ignore[operator]
        return self.gain * x + self.none.sum()


def counted() -> LanguageModel:
    model = tied_llama()
    for block in model.blocks:
        block.norm2 = Counted(24)
    return model


def in_layout(comm: Communicator, model: LanguageModel, layout: tuple[int, int, str]) -> Pipeline | None:
    """Divide and shard a model: (stages, ZeRO stage, schedule)."""
    num_stages, zero, schedule = layout
    mesh = mpitrain.mesh(comm, pp=num_stages)
    pipe = None if num_stages == 1 else pipeline(model, mesh["pp"], schedule, micro_batches=MICRO)
    mpitrain.fully_shard(model, mesh, stage=zero)
    return pipe


def step(comm: Communicator, model: LanguageModel, pipe: Pipeline | None, number: int) -> None:
    """A step on the same batch on each rank."""
    tokens = batches(number)
    if pipe is not None:
        pipe.step(tokens, last=targets(tokens))
        return
    for rows in tokens:
        model(rows, rows.roll(-1, 1)).backward()


LAYOUTS = [((2, 2, "1f1b"), (1, 3, "")), ((4, 1, "zb-v"), (2, 3, "interleaved")), ((1, 3, ""), (4, 0, "zb-h1"))]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("saved", "loaded"), LAYOUTS)
def test_a_checkpoint_goes_on_in_another_layout(
    comm: Communicator, shared_tmp: Path, saved: tuple[int, int, str], loaded: tuple[int, int, str]
) -> None:
    plain, first, second = counted(), counted(), counted()
    pipe = in_layout(comm, first, saved)
    optimizers, ema = (adamw(plain), adamw(first)), mpitrain.EMA(first, 0.5)
    for model, its, optimizer in zip((plain, first), (None, pipe), optimizers, strict=True):
        step(comm, model, its, 0)
        optimizer.step()
        optimizer.zero_grad()
    ema.update()
    mpitrain.save(shared_tmp / "state", first, optimizers[1], ema=ema)
    pipe, optimizer = in_layout(comm, second, loaded), adamw(second)
    with torch.no_grad():
        for param in second.parameters():
            param.zero_()
    average = mpitrain.EMA(second, 0.5)
    mpitrain.load(shared_tmp / "state", second, optimizer, ema=average)
    for model, its, stepped in zip((plain, second), (None, pipe), (optimizers[0], optimizer), strict=True):
        step(comm, model, its, 1)
        stepped.step()
    whole = mpitrain.full_state_dict(second)
    for name, value in plain.state_dict().items() if comm.rank == 0 else ():
        torch.testing.assert_close(whole.pop(name), value, rtol=0, atol=2e-5)
    assert not whole


@pytest.mark.rest
@pytest.mark.ranks(2)
@pytest.mark.parametrize("to", [(1, 0, ""), (2, 3, "zb-v")])
def test_each_stage_finds_its_settings(comm: Communicator, shared_tmp: Path, to: tuple[int, int, str]) -> None:
    """The stages have other groups, with other settings, in another order than the model that takes them over."""

    def rate(name: str) -> float:
        return 0.5 if "norm" in name else 0.25 if "head" in name or "embed" in name else 0.125

    def optimizer_of(model: LanguageModel, order: int, factor: float) -> torch.optim.Optimizer:
        of_rates: dict[float, list[nn.Parameter]] = {}
        for name, param in model.named_parameters():
            of_rates.setdefault(rate(name), []).append(param)
        groups = [{"params": its, "lr": torch.tensor(lr * factor)} for lr, its in sorted(of_rates.items())]
        return mpitrain.optim.AdamW(groups[::order])

    first, second = counted(), counted()
    pipe = in_layout(comm, first, (2, 3, "1f1b"))
    optimizer = optimizer_of(first, 1, 1)
    step(comm, first, pipe, 0)
    optimizer.step()
    mpitrain.save(shared_tmp / "state", first, optimizer)
    in_layout(comm, second, to)
    its_optimizer = optimizer_of(second, -1, 3)
    mpitrain.load(shared_tmp / "state", second, its_optimizer)
    names = {param: name for name, param in second.named_parameters()}
    for group in its_optimizer.param_groups:
        assert {rate(names[param]) for param in group["params"]} == {group["lr"].item()}
    lacking = mpitrain.optim.AdamW(its_optimizer.param_groups[-1]["params"], lr=torch.tensor(0.1))
    with pytest.raises(ckpt.CheckpointError, match=r"the optimizer here does not have .* which the one there has"):
        mpitrain.load(shared_tmp / "state", second, lacking)
    optimizer.param_groups[0]["rule"] = print if comm.rank else None
    with pytest.raises(TypeError, match="'rule' of the optimizer's group 0 is a builtin_function"):
        mpitrain.save(shared_tmp / "other", first, optimizer)


@pytest.mark.rest
@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_same", [False, True])
def test_a_stage_may_number_its_groups_in_its_own_way(comm: Communicator, shared_tmp: Path, is_same: bool) -> None:
    """A stage without an embedding leaves its group out. With the same settings for all, as at the first step of a warm-up, too."""

    def made(division: list[int] | None, *, has_empty: bool = False) -> tuple[LanguageModel, torch.optim.Optimizer]:
        model = gpt()
        mesh = mpitrain.mesh(comm, pp=1 if division is None else 2)
        if division is not None:
            pipeline(model, mesh["pp"], micro_batches=MICRO, division=division)
        mpitrain.fully_shard(model, mesh)
        params: list[list[nn.Parameter]] = [[], [], []]
        for name, param in model.named_parameters():
            params[0 if name[:2] in ("wt", "wp") else 1 if param.ndim > 1 else 2].append(param)
        groups = [{"params": its, "lr": 1.0 if is_same else 1.0 + number} for number, its in enumerate(params)]
        return model, torch.optim.AdamW([group for group in groups if group["params"] or has_empty])

    rates = [1.0, 1.0, 1.0] if is_same else [1.0, 2.0, 3.0]
    num_layers = len(gpt().blocks)
    mpitrain.save(shared_tmp / "state", *made([2, num_layers - 2]))
    for division, has_empty in (([1, num_layers - 1], False), (None, False), ([2, num_layers - 2], True)):
        model, optimizer = made(division, has_empty=has_empty)
        for group in optimizer.param_groups:
            group["lr"] = 9.0
        mpitrain.load(shared_tmp / "state", model, optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == rates[-len(optimizer.param_groups) :]


@pytest.mark.rest
@pytest.mark.ranks(2)
def test_a_stage_that_trains_nothing(comm: Communicator, shared_tmp: Path) -> None:
    """It has no optimizer, and no name to pass as `only`."""

    def made(num_stages: int, factor: float) -> tuple[LanguageModel, torch.optim.Optimizer | None, list[str]]:
        model = gpt()
        for name, param in model.named_parameters():
            param.data *= factor
            param.requires_grad_("head" in name)
        in_layout(comm, model, (num_stages, 3, "1f1b"))
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        optimizer = torch.optim.SGD(trained.values(), lr=0.1 * factor, momentum=0.5) if trained else None
        for param in trained.values():
            param.grad = torch.ones_like(param)
        return model, optimizer, list(trained)

    model, optimizer, names = made(2, 1)
    assert (optimizer is None) == (not names) == (comm.rank == 0)
    if optimizer is not None:
        optimizer.step()
    for path, only in (("all", None), ("part", names)):
        mpitrain.save(shared_tmp / path, model, optimizer, only=only)
    assert "optimizer/momentum_buffer/head.weight" in ckpt.open(shared_tmp / "part")
    expected = mpitrain.full_state_dict(model)
    for num_stages, path in ((2, "all"), (2, "part"), (1, "all")):
        other, its_optimizer, its_names = made(num_stages, 2)
        mpitrain.load(shared_tmp / path, other, its_optimizer, only=its_names if path == "part" else None)
        for name, value in mpitrain.full_state_dict(other).items():
            assert torch.equal(value, expected[name] if path == "all" or "head" in name else 2 * expected[name]), name
        if its_optimizer is not None:
            assert its_optimizer.param_groups[0]["lr"] == 0.1
            assert {tuple(its) for its in its_optimizer.state.values()} == {("momentum_buffer",)}


@pytest.mark.ranks(2, 4)
def test_without_sharding(comm: Communicator, shared_tmp: Path) -> None:
    plain, model, other = counted(), counted(), counted()
    early = adamw(model)
    pipe = pipeline(model, comm, micro_batches=MICRO)
    with pytest.raises(RuntimeError, match=r"AdamW holds .* from before pipeline, so it would train nothing"):
        early.step()
    optimizer = adamw(model)
    step(comm, plain, None, 0)
    step(comm, model, pipe, 0)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e-2).item()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1e-2).item() == pytest.approx(norm, rel=1e-6)
    optimizer.step()
    mpitrain.save(shared_tmp / "state", model, optimizer)
    mpitrain.load(shared_tmp / "state", other, comm=comm)
    plain_step = adamw(plain)
    plain_step.step()
    for (name, value), expected in zip(other.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=2e-5, msg=name)


@pytest.mark.ranks(4)
def test_weights_in_and_out(comm: Communicator, shared_tmp: Path) -> None:
    model, plain = counted(), counted()
    in_layout(comm, model, (2, 3, "zb-v"))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    mpitrain.load_full_state_dict(model, plain.state_dict())
    mpitrain.export_weights(model, shared_tmp / "weights")
    other = counted()
    in_layout(comm, other, (4, 2, "1f1b"))
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    assert mpitrain.load_weights(other, shared_tmp / "weights") == ([], [])
    whole = mpitrain.full_state_dict(other)
    for name, value in plain.state_dict().items() if comm.rank == 0 else ():
        assert torch.equal(whole.pop(name), value), name
    for block in other.blocks:
        block.register_buffer("extra", torch.zeros(2))
    with pytest.raises(ValueError, match=r"the files lack .*blocks\.0\.extra"):
        mpitrain.load_weights(other, shared_tmp / "weights")


@pytest.mark.ranks(2, 4)
def test_initial_values_on_the_meta_device(comm: Communicator) -> None:
    whole = gpt()
    mpitrain.initialize(whole, seed=3)
    with torch.device("meta"):
        model, sharded = gpt(), gpt()
    pipeline(model, comm, micro_batches=MICRO)
    mesh = mpitrain.mesh(comm, pp=2)
    pipeline(sharded, mesh["pp"], micro_batches=MICRO)
    mpitrain.fully_shard(sharded, mesh)
    for made in (model, sharded):
        mpitrain.initialize(made, seed=3)
        values = mpitrain.full_state_dict(made)
        for name, value in whole.state_dict().items() if comm.rank == 0 else ():
            assert torch.equal(values.pop(name), value), name
        assert not values


@pytest.mark.ranks(4)
def test_meshes_that_do_not_fit(comm: Communicator) -> None:
    mesh = mpitrain.mesh(comm, pp=2)
    with pytest.raises(ValueError, match=r"wte\.weight is in no stage, but the mesh has pp=2 stages"):
        mpitrain.fully_shard(gpt(), mesh)
    model = gpt()
    pipeline(model, mesh["pp"], micro_batches=MICRO)
    with pytest.raises(
        ValueError, match=r"is in a stage over 2 ranks, which do not hold one copy .* mesh = mpitrain\.mesh"
    ):
        mpitrain.fully_shard(model, mesh["dp_shard"])
    with pytest.raises(ValueError, match="the model is in stages already"):
        pipeline(model, mesh["pp"], micro_batches=MICRO)
