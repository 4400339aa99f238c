"""Full parameters outside of forward and backward: unshard, full state dicts, the summary."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from parity_models import Residual
from sharded_models import loss_of, mine, shard
from torch import nn
from torch.multiprocessing.reductions import reduce_storage
from ways import WAYS

import mpitrain
from collectives import Communicator
from mpitrain.sharding import fully_shard, unshard

pytestmark = pytest.mark.ranks(1, 2, 3)


class Model(nn.Module):
    """A stack of layers, a scalar, a buffer, a frozen part."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(6, 5).requires_grad_(False)
        self.register_buffer("shift", torch.arange(5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.frozen(x * self.scale) + self.shift


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("way", WAYS)
def test_unshard_shows_full_parameters_before_and_after_a_step(comm: Communicator, way: str) -> None:
    model, plain = shard(Model(0), comm, way), Model(0)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, plain)]
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        shards = list(model.parameters())
        with unshard(model):
            full = {name: param.detach().clone() for name, param in model.named_parameters()}
            with torch.no_grad():
                inside = model(x)
                model(x)
            for write in (False, True):
                with pytest.raises(RuntimeError, match=r"inside another `with mp.* block"), unshard(model, write=write):
                    pass
            with pytest.raises(RuntimeError, match="in the middle of a step"):
                mpitrain.load_full_state_dict(model, plain.state_dict())
        assert all(a is b for a, b in zip(model.parameters(), shards, strict=True))
        for name, value in plain.named_parameters():
            torch.testing.assert_close(full[name], value.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(inside, plain(x), rtol=1e-5, atol=1e-6)
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            m(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with unshard(plain):
        pass


class Noted(Residual):
    """A layer that keeps NumPy arrays of its weights, as code that draws or counts them does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes = {name: param.detach().numpy() for name, param in self.named_parameters()}
        return super().forward(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["stage 1, private", "stage 3", "stage 3, private"])
@pytest.mark.parametrize("kept", [False, True, 1])
def test_numpy_arrays_of_full_parameters(comm: Communicator, way: str, kept: bool | int) -> None:
    """torch frees no memory that it has handed out as an array. The arrays of gathered parameters keep the values of their forward."""
    torch.manual_seed(0)
    plain, model = (nn.Sequential(*(layer() for _ in range(2))) for layer in (Residual, Noted))
    model.load_state_dict(plain.state_dict())
    shard(model, comm, way, blocks=model, reshard_after_forward=kept)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    for step in range(3):
        before = {name: value.detach().clone() for name, value in plain.named_parameters()}
        for m, rows in ((model, mine(comm)), (plain, slice(None))):
            loss_of(m, step, rows, width=6).backward()
        notes = {f"{i}.{name}": note for i, layer in enumerate(model) for name, note in layer.notes.items()}
        for name, value in before.items():
            torch.testing.assert_close(torch.from_numpy(notes[name]), value, rtol=1e-5, atol=1e-6)
        with unshard(model):
            assert model[0].body[1].weight.numpy(force=True).shape == (7, 6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found, expected = mpitrain.full_state_dict(model), plain.state_dict()
    assert len(found) == (len(expected) if comm.rank == 0 else 0)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["stage 3", "stage 3, private"])
def test_what_hands_full_parameters_to_other_code(comm: Communicator, way: str, shared_tmp: Path) -> None:
    """The model is of use afterwards, also if the code gets an error."""
    torch.manual_seed(0)
    model, plain = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    shard(model, comm, way)
    whole = plain[0].weight.detach()

    def check(values: object) -> None:
        torch.testing.assert_close(torch.as_tensor(values), whole.expand(values.shape))  # type: ignore[attr-defined]

    def moved(weight: torch.Tensor) -> None:
        for share in (weight.share_memory_, lambda: reduce_storage(weight.untyped_storage())):
            with pytest.raises(RuntimeError, match=r"^share_memory_, .* memory of 0\.weight .* share a copy \(.*\)$"):
                share()
        check(weight.detach().clone().share_memory_())

    for use in (
        moved,
        lambda weight: check(comm.all_gather(torch.empty(comm.size, 4, 4), weight)),
        lambda weight: check(comm.broadcast(weight).detach()),
        lambda weight: check(np.from_dlpack(weight.detach())),
        lambda weight: mpitrain.save(shared_tmp / "saved", model),
    ):
        with unshard(model):
            use(model[0].weight)
        model(torch.ones(1, 4)).sum().backward()
        found = mpitrain.full_state_dict(model)
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in found.items())
    mpitrain.load(shared_tmp / "saved", model)


@pytest.mark.parametrize("way", WAYS)
def test_a_full_state_dict_goes_in_and_comes_out(comm: Communicator, way: str) -> None:
    model, other = shard(Model(1), comm, way), Model(2)
    mpitrain.load_full_state_dict(model, other.state_dict() if comm.rank == 0 else {})
    assert_equal(mpitrain.full_state_dict(model), dict(other.state_dict()) if comm.rank == 0 else {})
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(x), other(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_what_a_forward_left_full_is_not_taken_for_the_new_weights(
    comm: Communicator, reshard_after_forward: bool
) -> None:
    model, other = Model(1), Model(2)
    fully_shard(model, comm, storage="private", reshard_after_forward=reshard_after_forward)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    model(x)  # its backward never comes
    mpitrain.load_full_state_dict(model, other.state_dict())
    torch.testing.assert_close(model(x), other(x), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        model(x)
        mpitrain.load_full_state_dict(model, Model(1).state_dict())
        torch.testing.assert_close(model(x), Model(1)(x), rtol=1e-5, atol=1e-6)


def test_a_state_dict_that_does_not_fit_changes_nothing(comm: Communicator) -> None:
    model = shard(Model(1), comm, "stage 3")
    before = mpitrain.full_state_dict(model)
    given = dict(Model(2).state_dict())
    given["new"] = given.pop("scale")
    with pytest.raises(ValueError, match="lacks scale and has new that the model does not have"):
        mpitrain.load_full_state_dict(model, given)
    wrong = dict(Model(2).state_dict()) | {"frozen.weight": torch.zeros(6, 5)}
    with pytest.raises(
        ValueError, match=re.escape("frozen.weight has shape (6, 5) in the state dict; expected (5, 6)")
    ):
        mpitrain.load_full_state_dict(model, wrong)
    assert_equal(mpitrain.full_state_dict(model), before)
    mpitrain.load_full_state_dict(model, given, strict=False)
    after = mpitrain.full_state_dict(model)
    if comm.rank == 0:
        assert after["scale"] == before["scale"]
        torch.testing.assert_close(after["frozen.weight"], given["frozen.weight"])


@pytest.mark.parametrize("way", WAYS)
def test_the_summary_names_every_unit(comm: Communicator, way: str) -> None:
    model, plain = shard(Model(0), comm, way), Model(0)
    count = sum(param.numel() for param in plain.parameters())
    assert mpitrain.num_parameters(model) == mpitrain.num_parameters(plain) == count
    trained = count - sum(param.numel() for param in plain.frozen.parameters())
    assert mpitrain.num_parameters(model, trained_only=True) == trained
    text = mpitrain.summary(model)
    rows = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in rows] == ["(root)", "(root)", "layers.0", "layers.1", "layers.2"]
    assert sum(int(row[1].replace(",", "")) for row in rows) == count
    held = sum(param.numel() for param in model.parameters())
    assert sum(int(row[2].replace(",", "")) for row in rows) == held
    assert ("frozen" in text) and f"{count:,} parameters" in text
