"""Local steps beside a simulation in one process: plain models as the copies, and torch's SGD as the outer optimizer."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_hosts import on_hosts
from sharded_models import floats, pair_of, small_model
from torch import nn

import ckpt
import mpitrain
from collectives import Communicator, Mesh, network_bytes
from mpitrain.sharding import sharded_over
from mpitrain.sharding.unit.layout import rows_of

EVERY, EXACT, STEPS = 3, 2, 10
ROWS = 12

WAYS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 2, private": {"stage": 2, "storage": "private"},
    "stage 3": {},
    "stage 3, private": {"storage": "private"},
}


COLLECTIVES = [
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "barrier",
    "all_to_all",
    "all_gather_object",
    "broadcast_object",
]


class Simulated:
    """Copies of a plain model in one process. Each takes its rows of the batch, averaged over all copies in exact steps."""

    def __init__(self, plain: nn.Module, num: int, *, outer: str = "nesterov", exact: int = EXACT) -> None:
        self.copies = [copy.deepcopy(plain) for _ in range(num)]
        self.optimizers = [adam(each) for each in self.copies]
        self.outer = copy.deepcopy(plain)
        settings: dict[str, Any] = (
            {"lr": 0.7, "momentum": 0.9, "nesterov": True} if outer == "nesterov" else {"lr": 1.0}
        )
        self.outer_optimizer = torch.optim.SGD(self.outer.parameters(), **settings)
        self.step_number, self.exact = 0, exact

    def step(self, *, skips: bool = False) -> None:
        for number, model in enumerate(self.copies):
            loss_of(model, self.step_number, *share(number, len(self.copies))).backward()
        if self.step_number < self.exact:
            for params in zip(*(model.parameters() for model in self.copies), strict=True):
                mean = torch.stack([p.grad for p in params]).mean(0)  # type: ignore[misc]
                for p in params:
                    p.grad = mean.clone()
        for optimizer in self.optimizers:
            if not skips:
                optimizer.step()
            optimizer.zero_grad()
        self.step_number += 1
        if self.step_number <= self.exact:
            self.outer.load_state_dict(self.copies[0].state_dict())
        elif (self.step_number - self.exact) % EVERY == 0:
            self.outer_step()

    def outer_step(self) -> None:
        for param, *inner in zip(*(m.parameters() for m in (self.outer, *self.copies)), strict=True):
            param.grad = param.detach() - torch.stack([p.detach() for p in inner]).mean(0)
        self.outer_optimizer.step()
        for model in self.copies:
            model.load_state_dict(self.outer.state_dict())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def loss_of(model: nn.Module, step: int, first: int, last: int) -> torch.Tensor:
    return model(floats(step, 5)[first:last]).square().mean()


def share(number: int, size: int) -> tuple[int, int]:
    return ROWS * number // size, ROWS * (number + 1) // size


@pytest.fixture
def mesh(comm: Communicator) -> Iterator[Mesh]:
    """Two copies if the ranks make two, else as many copies as ranks."""
    made = mpitrain.mesh(comm, dp_replicate=2 if comm.size % 2 == 0 else comm.size)
    yield made
    made.free()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, diloco: mpitrain.DiLoCo, comm: Communicator) -> bool:
    loss_of(model, diloco.num_steps, *share(comm.rank, comm.size)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return diloco.step()


def assert_near(model: nn.Module, plain: nn.Module) -> None:
    """This rank's shards are its rows of a plain model, but for rounding, which Adam enlarges."""
    want = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.detach(), rows_of(want[name].detach(), param.shard_box), rtol=2e-4, atol=2e-5)


def bits(values: Any) -> list[bytes]:
    return [value.detach().numpy().tobytes() for value in values]


@pytest.mark.rest
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("outer", ["nesterov", "mean"])
def test_steps_are_those_of_the_simulation(comm: Communicator, mesh: Mesh, way: str, outer: Any) -> None:
    model, plain = pair_of(small_model, comm, blocks=lambda m: [m[0]], mesh=mesh, **WAYS[way])
    optimizer = adam(model)
    settings = {"lr": 0.7, "momentum": 0.9} if outer == "nesterov" else {}
    diloco = mpitrain.DiLoCo(model, every=EVERY, outer=outer, exact_steps=EXACT, **settings)
    ranks, simulated = sharded_over(model), Simulated(plain, diloco.num_copies, outer=outer)
    assert ranks is not None and diloco.num_copies == mesh.axes["dp_replicate"]
    for step in range(1, STEPS + 1):
        has_met = train(model, optimizer, diloco, comm)
        simulated.step()
        is_same = step <= EXACT or (step - EXACT) % EVERY == 0
        assert has_met == is_same
        assert_near(model, simulated.copies[diloco.copy])
        everyones = ranks.across.all_gather_object(bits(model.parameters()))
        numel = sum(param.numel() for param in model.parameters())
        assert (len(set(map(tuple, everyones))) == 1) == (is_same or numel == 0)
        if step <= EXACT:
            assert bits(diloco.outer.values()) == bits(diloco.params.values())
        else:
            state = [*diloco.outer.values(), *diloco.momentum.values()]
            assert len(set(map(tuple, ranks.across.all_gather_object(bits(state))))) == 1
        with diloco.swapped():
            assert_near(model, simulated.outer)
    diloco.outer_step()  # as after the last step of a run
    simulated.outer_step()
    assert_near(model, simulated.outer)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("way", WAYS)
def test_a_local_step_sends_nothing_to_another_copy(
    comm: Communicator, mesh: Mesh, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where all collectives pass: each call of one on a communicator that has ranks of several copies."""

    def partly_frozen() -> nn.Sequential:  # ranks agree on frozen parameters at each forward
        made = small_model()
        made[3].bias.requires_grad_(False)
        return made

    model, _ = pair_of(partly_frozen, comm, blocks=lambda m: [m[0]], mesh=mesh, **WAYS[way])
    # Muon divides its work over the ranks that have the same values.
    optimizer, diloco = mpitrain.optim.Muon(model.parameters()), mpitrain.DiLoCo(model, every=EVERY)
    train(model, optimizer, diloco, comm)  # the first forward makes the step, and gives all ranks the same buffers
    calls: list[int] = []
    within = mesh["dp_shard", "cp", "tp"].size
    for name in COLLECTIVES:
        original = getattr(Communicator, name)

        def counted(self: Communicator, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            calls.append(self.size if self.size > within or self is mesh["dp_replicate"] else 0)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(Communicator, name, counted)
    assert not train(model, optimizer, diloco, comm)
    assert sum(calls) == 0, f"of the calls {calls}, these reach another copy"
    assert len(calls) > 0 and train(model, optimizer, diloco, comm)
    assert sum(calls) > 0


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("way", ["stage 0", "stage 3"])
def test_a_checkpoint_between_outer_steps_goes_on_with_the_same_bits(
    comm: Communicator, mesh: Mesh, shared_tmp: Path, way: str
) -> None:
    """From each step on. A model without local steps takes the outer parameters, and other numbers of copies go on, too."""

    def made(mesh: Mesh | None = mesh) -> tuple[nn.Module, torch.optim.Optimizer, mpitrain.DiLoCo]:
        model, _ = pair_of(small_model, comm, blocks=lambda m: [m[0]], mesh=mesh, **WAYS[way])
        return model, adam(model), mpitrain.DiLoCo(model, every=EVERY, lr=0.7, momentum=0.9, exact_steps=1)

    def end(model: nn.Module, optimizer: torch.optim.Optimizer, diloco: mpitrain.DiLoCo) -> list[bytes]:
        while diloco.num_steps < 6:
            train(model, optimizer, diloco, comm)
        return bits([*model.parameters(), *diloco.outer.values(), *diloco.momentum.values()])

    model, optimizer, diloco = made()
    for step in range(1, 5):
        train(model, optimizer, diloco, comm)
        mpitrain.save(shared_tmp / f"{step}", model, optimizer)
    outer = {name: value.clone() for name, value in diloco.outer.items()}
    expected = end(model, optimizer, diloco)
    for step in range(1, 5):
        again = made()
        mpitrain.load(shared_tmp / f"{step}", again[0], again[1])
        assert end(*again) == expected, f"from step {step}"
    plain = pair_of(small_model, comm, blocks=lambda m: [m[0]], mesh=mesh, **WAYS[way])[0]
    mpitrain.load(shared_tmp / "4", plain, adam(plain))
    assert bits(plain.parameters()) == bits(outer[name] for name, _ in plain.named_parameters())


@pytest.mark.ranks(4)
def test_another_number_of_copies_goes_on(comm: Communicator, mesh: Mesh, shared_tmp: Path) -> None:
    """Fewer copies keep their inner state; more begin with the outer parameters, and the optimizer's state of another copy."""
    model, _ = pair_of(small_model, comm, mesh=mesh)
    optimizer, diloco = adam(model), mpitrain.DiLoCo(model, every=EVERY)
    for _ in range(EVERY + 1):
        train(model, optimizer, diloco, comm)
    mpitrain.save(shared_tmp / "two", model, optimizer)
    stored = ckpt.open(shared_tmp / "two")
    inner = {name: torch.from_numpy(stored[f"copies/model/{name}"][0]) for name in diloco.params}
    four = mpitrain.mesh(comm, dp_replicate=4)
    for through, num in ((four, 4), (comm, 1)):
        other, _ = pair_of(small_model, comm, mesh=through)
        its, of_other = adam(other), mpitrain.DiLoCo(other, every=EVERY)
        mpitrain.load(shared_tmp / "two", other, its)
        assert (of_other.num_copies, of_other.num_steps, of_other.is_apart) == (num, EVERY + 1, True)
        is_outer = bits(other.parameters()) == bits(of_other.outer.values())
        assert is_outer == (of_other.copy >= 2)
        if comm.rank == 0:
            want = {
                name: rows_of(value, dict(other.named_parameters())[name].shard_box) for name, value in inner.items()
            }
            assert bits(other.parameters()) == bits(want[name] for name, _ in other.named_parameters())
        moments = [its.state[param]["exp_avg"] for param in other.parameters()]
        if num == 4:
            everyones = comm.all_gather_object(bits(moments))
            assert everyones[0] == everyones[2] != everyones[1] == everyones[3]
        while not train(other, its, of_other, comm):
            pass
    four.free()


@pytest.mark.ranks(2)
def test_another_diloco_goes_on_where_the_copies_are_the_same(comm: Communicator, mesh: Mesh) -> None:
    """And neither it nor a restart begins with copies that differ: each would take its own parameters as the outer ones."""
    model, _ = pair_of(small_model, comm, mesh=mesh)
    optimizer, diloco = adam(model), mpitrain.DiLoCo(model, every=2)
    while diloco.num_steps < 3:
        train(model, optimizer, diloco, comm)
    with pytest.raises(ValueError, match=r"the copies of this model differ.* call its outer_step\(\) first"):
        mpitrain.DiLoCo(model, every=3)
    with pytest.raises(ValueError, match=r"0.weight, or a parameter beside it, differs between the copies"):
        diloco.restart()
    other, _ = pair_of(small_model, comm, mesh=mesh)
    optimizer, diloco = adam(other), mpitrain.DiLoCo(other, every=2)
    while diloco.num_steps < 3:
        train(other, optimizer, diloco, comm)
    diloco.outer_step()
    again = mpitrain.DiLoCo(other, every=3)
    assert (again.num_steps, bits(again.momentum.values())) == (3, bits(diloco.momentum.values()))
    torch.nn.init.normal_(
        next(p for p in other.parameters() if p.numel()), generator=torch.Generator().manual_seed(comm.rank)
    )
    again = mpitrain.DiLoCo(other, every=3)
    with pytest.raises(ValueError, match="differs between the copies"):
        train(other, optimizer, again, comm)


@pytest.mark.ranks(2)
def test_accumulated_and_scaled_steps_and_their_average(comm: Communicator, mesh: Mesh) -> None:
    """Two backwards for each step, a step that is skipped because one copy overflowed, and an average of the outer parameters."""
    model, plain = pair_of(small_model, comm, mesh=mesh)
    optimizer, scaler, simulated = adam(model), mpitrain.GradScaler(model, scale=256.0), Simulated(plain, 2)
    diloco = mpitrain.DiLoCo(model, every=EVERY, lr=0.7, momentum=0.9, exact_steps=EXACT)
    ema, average = mpitrain.EMA(model, 0.5), copy.deepcopy(plain)
    first, last = share(comm.rank, comm.size)
    for step in range(STEPS):
        for begin in (first, first + 3):
            scaler.scale(loss_of(model, step, begin, begin + 3) / 2).backward()
        if step == 5 and comm.rank == 0:
            next(p for p in model.parameters() if p.numel()).grad.view(-1)[0] = torch.inf  # type: ignore[union-attr]
        assert scaler.step(optimizer) == (step != 5)
        optimizer.zero_grad()
        simulated.step(skips=step == 5)
        if diloco.step():
            ema.update()
            for mean, outer in zip(average.parameters(), simulated.outer.parameters(), strict=True):
                mean.detach().lerp_(outer.detach(), 0.5)
        assert_near(model, simulated.copies[diloco.copy])
    assert last == first + 6 and diloco.is_apart
    with ema.swapped():
        assert_near(model, average)
    for name, value in mpitrain.full_state_dict(model).items():  # rank 0 has them
        torch.testing.assert_close(value, simulated.outer.state_dict()[name], rtol=2e-4, atol=2e-5)


@pytest.mark.ranks(2, 4)
def test_outer_gradients_are_sent_in_the_wire(comm: Communicator) -> None:
    """Between two hosts; all copies get the same bits."""

    def larger_model() -> nn.Sequential:  # arrays of at most 1,024 elements for each rank are exact
        return nn.Sequential(nn.Linear(5, 1001), nn.Tanh(), nn.Linear(1001, 5))

    hosts = on_hosts(comm.mpi, [2 * rank // comm.size for rank in range(comm.size)])
    over = mpitrain.mesh(hosts, dp_replicate=2)
    outer: dict[str, list[torch.Tensor]] = {}
    for wire in ("fp32", "int8"):
        before = network_bytes()
        model, _ = pair_of(larger_model, hosts, mesh=over, wire=wire)
        optimizer, diloco = adam(model), mpitrain.DiLoCo(model, every=EVERY)
        while not train(model, optimizer, diloco, hosts):
            pass
        ranks = sharded_over(model)
        assert ranks is not None
        assert len(set(map(tuple, ranks.across.all_gather_object(bits(diloco.outer.values()))))) == 1
        outer[wire] = [value.clone() for value in diloco.outer.values()]
    for exact, coded in zip(outer["fp32"], outer["int8"], strict=True):
        torch.testing.assert_close(coded, exact, rtol=0, atol=2e-3)
    assert bits(outer["fp32"]) != bits(outer["int8"])
    assert 0 < network_bytes() - before < 1.1 * sum(value.numel() for value in outer["int8"])
    over.free()
    hosts.free()


@pytest.mark.ranks(2)
def test_a_checkpoint_has_trained_parameters_that_are_not_sharded(
    comm: Communicator, mesh: Mesh, shared_tmp: Path
) -> None:
    """Each rank trains them for itself, so the checkpoint has those of one rank."""

    def made() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = small_model()
        mpitrain.fully_shard(model, mesh, ignored_params=[model[4].bias])
        mpitrain.DiLoCo(model, every=EVERY)
        return model, adam(model)

    model, optimizer = made()
    loss_of(model, 0, *share(comm.rank, comm.size)).backward()
    optimizer.step()
    mpitrain.save(shared_tmp / "ignored", model, optimizer)
    saved = comm.all_gather_object(bits([optimizer.state[model[4].bias]["exp_avg"]]))
    model, optimizer = made()
    mpitrain.load(shared_tmp / "ignored", model, optimizer)
    loaded = comm.all_gather_object(bits([optimizer.state[model[4].bias]["exp_avg"]]))
    assert loaded[0] == loaded[1] and loaded[0] in saved


@pytest.mark.ranks(2)
def test_mistakes(comm: Communicator, mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TypeError, match="is not sharded; call fully_shard"):
        mpitrain.DiLoCo(small_model(), every=2)
    model, _ = pair_of(small_model, comm, mesh=mesh)
    with pytest.raises(ValueError, match=r"every 0, .*expected every from 1"):
        mpitrain.DiLoCo(model, every=0)
    with pytest.raises(ValueError, match=r"lr nan, .*expected .* a finite lr"):
        mpitrain.DiLoCo(model, every=2, lr=float("nan"))
    for setting in ("lr", "momentum"):
        with pytest.raises(ValueError, match=r"with outer 'mean', which has neither"):
            mpitrain.DiLoCo(model, every=2, outer="mean", **{setting: 0.5})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"every is 2.5; expected an int"):
        mpitrain.DiLoCo(model, every=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"every 2, .* on rank 0, every 3, .* on rank 1"):
        mpitrain.DiLoCo(model, every=2 + comm.rank)
    compressed, _ = pair_of(small_model, comm, mesh=mesh, stage=0)
    mpitrain.compress_gradients(compressed, mpitrain.power_sgd(1))
    with pytest.raises(ValueError, match=r"compress_gradients averages .* expected one of the two"):
        mpitrain.DiLoCo(compressed, every=2)
    frozen, _ = pair_of(lambda: nn.Sequential(nn.Linear(5, 3).requires_grad_(False), nn.Linear(3, 3)), comm, mesh=mesh)
    diloco = mpitrain.DiLoCo(frozen, every=2)
    frozen.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"0.weight, or a parameter beside it, was frozen when DiLoCo was made"):
        diloco.step()
    alone, _ = pair_of(small_model, comm)
    mpitrain.DiLoCo(alone, every=2)
    assert ("the model has one copy" in caplog.text) == (comm.rank == 0)
