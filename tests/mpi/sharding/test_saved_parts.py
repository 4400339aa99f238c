"""Checkpoints of a part of a model: `mpitrain.save(..., only=...)`, and a load with `only=`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
import mpitrain
from collectives import Communicator
from mpitrain.models import LanguageModel
from tests.mpi.stages.test_parity import MICRO, batches, targets, tied_llama


class Adapted(nn.Module):
    """A layer with a frozen base, a trained adapter, and statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.base(x) + self.lora_b(self.lora_a(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted(8) for _ in range(2))
        self.head = nn.Linear(8, 8, bias=False)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.head.weight
        self.register_buffer("mask", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.tied(self.head(x))


LORA = "*lora_*"
Made = tuple[Model, torch.optim.Optimizer, mpitrain.EMA]


def made(comm: Communicator, seed: int, **options: Any) -> Made:
    """With a base of one seed, and everything else of another."""
    torch.manual_seed(0)
    model = Model()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if ".base." not in name and value.is_floating_point():
                value.uniform_(0.5, 1)
    for layer in model.layers:
        mpitrain.fully_shard(layer, comm, **options)
    mpitrain.fully_shard(model, comm, **options)
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": trained[:2], "lr": 0.1 + seed}, {"params": trained[2:], "lr": 0.2 + seed}]
    return model, torch.optim.AdamW(groups), mpitrain.EMA(model, 0.5)


def train(model: Model, optimizer: torch.optim.Optimizer, ema: mpitrain.EMA, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(32.0).view(4, 8).sin()).square().mean().backward()
        optimizer.step()
        ema.update()


def values(model: Model, optimizer: torch.optim.Optimizer, ema: mpitrain.EMA) -> dict[str, Any]:
    """Of the model, by the names in a checkpoint."""
    found = {f"model/{name}": value.clone() for name, value in model.state_dict().items()}
    found |= {f"ema/{name}": value.clone() for name, value in ema.tensors.items()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            found[f"optimizer/{key}/{name}"] = value.clone()
    return found


def is_lora(path: str) -> bool:
    return "lora_" in path


@pytest.mark.rest
@pytest.mark.parametrize("options", [{}, {"storage": "private"}, {"stage": 0}], ids=str)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.ranks(1, 2)
def test_an_adapter_goes_on_with_its_base(
    comm: Communicator, shared_tmp: Path, options: dict[str, Any], background: bool
) -> None:
    if background and options:
        pytest.skip("one storage shows it")
    first = made(comm, 1, **options)
    train(*first)
    mpitrain.save(shared_tmp / "a", *first[:2], ema=first[2], only=LORA, meta={"step": 3}, background=background)
    saved = values(*first)
    train(*first, 1)
    ckpt.wait()
    whole = Model()
    lora = sorted(name for name in dict(whole.named_parameters()) if is_lora(name))
    kinds = ("model", "ema", "optimizer/step", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    assert sorted(ckpt.open(shared_tmp / "a")) == sorted(f"{kind}/{name}" for kind in kinds for name in lora)

    ways: list[dict[str, Any]] = [{"strict": False}, {"only": LORA}, {"only": lora}]
    for way in ways:
        other = made(comm, 2)
        train(*other, 1)
        before = values(*other)
        assert mpitrain.load(shared_tmp / "a", *other[:2], ema=other[2], **way)["step"] == 3
        after = values(*other)
        for path, value in after.items():
            assert torch.equal(
                value, (saved if is_lora(path) and not options else after if is_lora(path) else before)[path]
            ), path
        assert [group["lr"] for group in other[1].param_groups] == [1.1, 1.2], "all groups have a part of the adapter"
    other = made(comm, 1, **options)
    mpitrain.load(shared_tmp / "a", *other[:2], ema=other[2], only=LORA)
    for path, value in values(*other).items():
        assert not is_lora(path) or torch.equal(value, saved[path]), path


@pytest.mark.ranks(2)
def test_a_load_without_patterns_says_that_a_part_is_there(comm: Communicator, shared_tmp: Path) -> None:
    first, other = made(comm, 1), made(comm, 2)
    train(*first)
    mpitrain.save(shared_tmp / "a", *first[:2], only=[LORA, "head.*"])
    before = values(*other)
    message = (
        r"/a was saved with only=\['\*lora_\*', 'head\.\*'\]; mask, .* and \d+ more of the model keep their values"
    )
    if comm.rank == 0:
        with pytest.warns(RuntimeWarning, match=message):
            mpitrain.load(shared_tmp / "a", *other[:2])
    else:
        mpitrain.load(shared_tmp / "a", *other[:2])
    for path, value in values(*other).items():
        if path.startswith("model/"):
            expected = values(*first) if is_lora(path) or "head" in path or "tied" in path else before
            assert torch.equal(value, expected[path]), path
    for layer in other[0].layers:  # a layer that is not in the checkpoint, although the patterns choose it
        layer.register_parameter("lora_c", nn.Parameter(torch.zeros(2)))
    with pytest.raises(ckpt.CheckpointError, match=r"it does not hold 'model/layers\.0\.lora_c'"):
        mpitrain.load(shared_tmp / "a", other[0], only=LORA)
    mpitrain.load(shared_tmp / "a", other[0], only=LORA, strict=False)


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("tied.weight", ["head.weight"]),  # under the first of its names
        (["layers.1.norm.weight"], [f"layers.1.norm.{key}" for key in
            ("num_batches_tracked", "running_mean", "running_var", "weight")]),
        (["mask", "*.base.bias"], ["layers.0.base.bias", "layers.1.base.bias", "mask"]),
    ],
)  # fmt: skip
@pytest.mark.ranks(2)
def test_what_patterns_choose(comm: Communicator, shared_tmp: Path, only: Any, expected: list[str]) -> None:
    first, other = made(comm, 1), made(comm, 2)
    mpitrain.save(shared_tmp / "a", *first[:2], only=only, tensors={"mine": torch.ones(2)})
    assert sorted(ckpt.open(shared_tmp / "a")) == ["mine", *(f"model/{name}" for name in expected)]
    mine = torch.zeros(2)
    mpitrain.load(shared_tmp / "a", *other[:2], only=only, tensors={"mine": mine})
    assert mine.sum() == 2
    for name in expected:
        assert torch.equal(other[0].state_dict()[name], first[0].state_dict()[name]), name


@pytest.mark.ranks(2)
def test_a_part_of_a_whole_checkpoint(comm: Communicator, shared_tmp: Path) -> None:
    first, other = made(comm, 1), made(comm, 2)
    train(*first)
    train(*other, 1)
    mpitrain.save(shared_tmp / "a", *first[:2], ema=first[2])
    before, there = values(*other), values(*first)
    mpitrain.load(shared_tmp / "a", *other[:2], ema=other[2], only="layers.0.*")
    for path, value in values(*other).items():
        assert torch.equal(value, (there if "layers.0." in path else before)[path]), path
    fresh = made(comm, 2)
    mpitrain.load(shared_tmp / "a", *fresh[:2], only="head.weight")
    assert {name for name, param in fresh[0].named_parameters() if param in fresh[1].state} == {"head.weight"}


@pytest.mark.parametrize(
    ("only", "error", "message"),
    [
        ("lora_*", ValueError, r"only: in the model no tensor's name matches 'lora_\*'; .*there are '"),
        ([LORA, "heat.weight"], ValueError, r"no tensor's name matches 'heat\.weight'; nearest: 'head\.weight'"),
        ([], ValueError, "only is empty"),
        (3, TypeError, "only is 3; expected a pattern"),
    ],
)
@pytest.mark.ranks(2)
def test_patterns_that_match_nothing(
    comm: Communicator, shared_tmp: Path, only: Any, error: type[Exception], message: str
) -> None:
    model, optimizer, _ = made(comm, 1)
    mpitrain.save(shared_tmp / "there", model, only=LORA)
    calls: list[Callable[[], Any]] = [
        lambda: mpitrain.save(shared_tmp / "a", model, optimizer, only=only),
        lambda: mpitrain.load(shared_tmp / "there", model, only=only, strict=False),
    ]
    for call in calls:
        with pytest.raises(error, match=message):
            call()
    assert not (shared_tmp / "a").exists()
    with pytest.raises(ValueError, match=r"only: in .*there no tensor's name matches 'mask'"):
        mpitrain.load(shared_tmp / "there", model, only=["mask", LORA], strict=False)


def a_llama(comm: Communicator, way: str) -> tuple[LanguageModel, Any]:
    model = tied_llama()
    mesh = mpitrain.mesh(comm, **{way: 2})
    pipe = None
    if way == "pp":
        pipe = mpitrain.pipeline(model, mesh["pp"], micro_batches=MICRO)
    else:
        mpitrain.tensor_parallel(model, mesh["tp"], sequence=False)
    mpitrain.fully_shard(model, mesh)
    return model, pipe


@pytest.mark.rest
@pytest.mark.parametrize(("way", "other_way"), [("pp", "tp"), ("tp", "pp")])
@pytest.mark.ranks(2)
def test_models_that_are_divided(comm: Communicator, shared_tmp: Path, way: str, other_way: str) -> None:
    """The norms and the tied embedding, which the first and the last stage have."""
    only = ["*norm*", "wte.weight"]
    first, pipe = a_llama(comm, way)
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.01)
    tokens = batches(0)
    if pipe is not None:
        pipe.step(tokens, last=targets(tokens))
    else:
        for rows in tokens:
            first(rows, rows.roll(-1, 1)).backward()
    optimizer.step()
    mpitrain.save(shared_tmp / "a", first, optimizer, only=only)
    other, _ = a_llama(comm, other_way)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    mpitrain.load(shared_tmp / "a", other, torch.optim.AdamW(other.parameters()), only=only)
    expected, found = mpitrain.full_state_dict(first), mpitrain.full_state_dict(other)
    for name, value in found.items():
        is_there = "norm" in name or name in ("wte.weight", "head.weight")
        assert torch.equal(value, expected[name] if is_there else torch.zeros_like(value)), name
    with pytest.raises(ValueError, match="no tensor's name matches 'norms'"):
        mpitrain.save(shared_tmp / "b", first, only="norms")


@pytest.mark.ranks(2)
def test_each_stage_passes_the_names_that_it_has(comm: Communicator, shared_tmp: Path) -> None:
    """Those of all stages are recorded, so a load without them takes the whole part."""
    first, _ = a_llama(comm, "pp")
    names = [name for name, _ in first.named_parameters() if "mlp" in name]
    mpitrain.save(shared_tmp / "a", first, only=names)
    other, _ = a_llama(comm, "pp")
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    mpitrain.load(shared_tmp / "a", other, strict=False)
    assert (
        set(ckpt.open(shared_tmp / "a").meta["saved_only"])
        == {name for name in tied_llama().state_dict() if "mlp" in name}
        > set(names)
    )
    for name, param in other.named_parameters():
        expected = dict(first.named_parameters())[name] if "mlp" in name else torch.zeros_like(param)
        assert torch.equal(param, expected), name


@pytest.mark.ranks(2)
def test_a_part_in_local_steps(comm: Communicator, shared_tmp: Path) -> None:
    """What is not loaded keeps its inner and outer values, its momentum, and the phase of its steps."""

    def made(exact_steps: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, mpitrain.DiLoCo]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        mpitrain.fully_shard(model, comm, stage=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, mpitrain.DiLoCo(model, every=2, exact_steps=exact_steps)

    def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, diloco: mpitrain.DiLoCo, num: int) -> None:
        for _ in range(num):
            model(torch.randn(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()

    def values(diloco: mpitrain.DiLoCo, part: str) -> list[list[torch.Tensor]]:
        kinds = (diloco.inner, diloco.outer, diloco.momentum)
        return [[value.clone() for name, value in its.items() if name.startswith(part)] for its in kinds]

    def same(here: list[list[torch.Tensor]], there: list[list[torch.Tensor]]) -> bool:
        return all(torch.equal(*pair) for pairs in zip(here, there, strict=True) for pair in zip(*pairs, strict=True))

    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mpitrain.save(shared_tmp / "plain", plain, comm=comm)
    local = made()
    torch.manual_seed(comm.rank)
    go_on(*local, 3)
    mpitrain.save(shared_tmp / "local", *local[:2])
    part = values(local[2], "1.")
    for exact_steps, steps in ((0, 3), (0, 4), (5, 2)):  # copies that differ, that do not, and in exact steps
        made_here = model, _, diloco = made(exact_steps)
        go_on(*made_here, steps)
        kept, was_apart = values(diloco, "0."), diloco.is_apart
        mpitrain.load(shared_tmp / "plain", model, only="1.*")
        assert same(values(diloco, "0."), kept) and (diloco.num_steps, diloco.is_apart) == (steps, was_apart)
        loaded = values(diloco, "1.")
        assert same([loaded[0]], [loaded[1]]) and not any(each.any() for each in loaded[2])
        if exact_steps == 0:
            mpitrain.load(shared_tmp / "local", model, only="1.*")
            assert same(values(diloco, "0."), kept) and same(values(diloco, "1."), part)
            assert (diloco.num_steps, diloco.is_apart) == (3, True)
        go_on(*made_here, 4)
        assert len(set(map(str, comm.all_gather_object(values(diloco, "")[1])))) == 1
    made_here = model, _, diloco = made(exact_steps=2)
    go_on(*made_here, 1)
    mpitrain.save(shared_tmp / "exact", model)
    kept = values(diloco, "0.")
    mpitrain.load(shared_tmp / "local", model, only="1.*")  # its steps are local ones here
    assert same(values(diloco, "0."), kept) and diloco.is_apart
    with pytest.raises(ValueError, match=r"from step 1, which is an exact one, and the copies of the rest differ"):
        mpitrain.load(shared_tmp / "exact", model, only="1.*")
    mpitrain.load(shared_tmp / "exact", model)
    assert diloco.num_steps == 1 and not diloco.is_apart
