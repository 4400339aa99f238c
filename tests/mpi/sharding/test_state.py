"""mpitrain.save and load: what comes back is what was there, bit for bit, in any model and on any number of ranks."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from checkpoints import flip_bit
from sharded_models import shard
from torch import nn
from ways import WAYS, spread

import ckpt
import mpitrain
from collectives import Communicator, Table
from collectives.selection.table import TableEntry
from mpitrain.job.elastic.copies.restoring import find_state
from mpitrain.job.elastic.copies.taking import StateCopies
from mpitrain.sharding import MixedPrecisionPolicy, fully_shard
from mpitrain.weights import state as weights


class Everything(nn.Module):
    """Tied weights across blocks, a frozen layer, a scalar, vectors of one element, one parameter never used, buffers, sizes that no
    number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 7), nn.Linear(7, 6)) for _ in range(2))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.unused = nn.Linear(3, 1)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        with torch.no_grad():
            self.calls += 1
            self.mean.lerp_(torch.full_like(self.mean, float(self.calls)), 0.5)
        return self.head(self.frozen(x) * self.scale + self.one)


def make(seed: int) -> Everything:
    torch.manual_seed(seed)
    return Everything()


def sharded(seed: int, comm: Communicator, way: str | None = None, **more: Any) -> Everything:
    model = make(seed)
    return shard(model, comm, way, model.blocks, **more)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, others = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.3}, {"params": others}], lr=1e-2, fused=True)


def adam_per_tensor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False, amsgrad=True)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return mpitrain.optim.Muon(model.parameters(), lr=1e-2)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adamw": adamw,
    "adam": adam_per_tensor,
    "muon": muon,
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """The same batch on every rank, so that a step is the same for any number of ranks, but for rounding."""
    tokens = torch.randint(0, 13, (4, 9), generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict, dict]:
    return copy.deepcopy(dict(model.state_dict())), copy.deepcopy(optimizer.state_dict())


def assert_alike(mine: Any, other: Any, where: str = "", **tolerance: float) -> None:
    """Two nests of dicts, lists, tensors and numbers are the same, exactly unless a tolerance is given."""
    assert type(mine) is type(other), where
    if isinstance(mine, dict):
        assert mine.keys() == other.keys(), where
        for key in mine:
            assert_alike(mine[key], other[key], f"{where}/{key}", **tolerance)
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(other), where
        for index, pair in enumerate(zip(mine, other, strict=True)):
            assert_alike(*pair, f"{where}/{index}", **tolerance)
    elif isinstance(mine, torch.Tensor):
        tolerance = tolerance or {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(mine, other, **tolerance, msg=lambda text: f"{where}: {text}")
    else:
        assert mine == other, where


@pytest.mark.rest
@pytest.mark.shared_cases
@pytest.mark.parametrize(("kind", "way"), spread(OPTIMIZERS, WAYS, all_on_2=False))
def test_a_sharded_model_and_its_optimizer_come_back(comm, shared_tmp: Path, kind: str, way: str) -> None:
    model = sharded(0, comm, way)
    optimizer = OPTIMIZERS[kind](model)
    for number in range(3):
        step(model, optimizer, number)
    optimizer.param_groups[0]["lr"] = 0.123
    mpitrain.save(shared_tmp / "saved", model, optimizer, meta={"step": 3, "note": ["a", None]})
    at_save = snapshot(model, optimizer)
    step(model, optimizer, 3)
    expected = snapshot(model, optimizer)

    other = sharded(1, comm, way)
    its_optimizer = OPTIMIZERS[kind](other)
    meta = mpitrain.load(shared_tmp / "saved", other, its_optimizer)
    assert (meta["step"], meta["note"]) == (3, ["a", None])
    assert_alike(snapshot(other, its_optimizer), at_save)
    step(other, its_optimizer, 3)
    assert_alike(snapshot(other, its_optimizer), expected)

    # and into the model that has gone on meanwhile
    mpitrain.load(shared_tmp / "saved", model, optimizer)
    assert_alike(snapshot(model, optimizer), at_save)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_plain_model_comes_back_and_has_the_same_names(comm, tmp_path: Path, kind: str) -> None:
    """A model that is not sharded is this process's alone: each rank saves and loads by itself."""
    model = make(0)
    optimizer = OPTIMIZERS[kind](model)
    for number in range(2):
        step(model, optimizer, number)
    mpitrain.save(tmp_path / "saved", model, optimizer)
    other = make(1)
    its_optimizer = OPTIMIZERS[kind](other)
    mpitrain.load(tmp_path / "saved", other, its_optimizer)
    assert_alike(snapshot(other, its_optimizer), snapshot(model, optimizer))
    names = {name.removeprefix("model/") for name in ckpt.open(tmp_path / "saved") if name.startswith("model/")}
    # tied weights are there once, under the first of their names; what is not persistent is not there
    assert names == set(model.state_dict()) - {"head.weight"}


@pytest.mark.rest
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_saved_by_all_ranks_loaded_by_some_and_by_one(comm, shared_tmp: Path, kind: str) -> None:
    """From N ranks to groups of N - 1 and 1, and to a plain model; from one rank to N."""
    model = sharded(0, comm)
    optimizer = OPTIMIZERS[kind](model)
    for number in range(3):
        step(model, optimizer, number)
    mpitrain.save(shared_tmp / "by-all", model, optimizer)
    full = mpitrain.full_state_dict(model)

    part = comm.split(int(comm.rank == 0))  # rank 0 alone, the others together
    few = sharded(1, part)
    its_optimizer = OPTIMIZERS[kind](few)
    mpitrain.load(shared_tmp / "by-all", few, its_optimizer)
    # a folder each: two jobs that save into one folder at the same time would both write its `latest`
    mpitrain.save(shared_tmp / f"{int(comm.rank == 0)}/saved", few, its_optimizer)
    few_full = mpitrain.full_state_dict(few)
    comm.barrier()

    saved = ckpt.open(shared_tmp / "by-all")
    for group in range(2 if comm.size > 1 else 1):
        other = ckpt.open(shared_tmp / f"{1 - group}/saved")
        assert other.names == saved.names
        assert all(other[name].read().tobytes() == saved[name].read().tobytes() for name in other)
    if comm.rank == 0:
        assert_alike(few_full, full)
        plain = make(2)
        plain_optimizer = OPTIMIZERS[kind](plain)
        mpitrain.load(shared_tmp / "by-all", plain, plain_optimizer)
        assert_alike(dict(plain.state_dict()), full)
        mpitrain.save(shared_tmp / "plain/saved", plain, plain_optimizer)
    comm.barrier()

    again = sharded(3, comm)
    again_optimizer = OPTIMIZERS[kind](again)
    mpitrain.load(shared_tmp / "plain/saved", again, again_optimizer)
    assert_alike(snapshot(again, again_optimizer), snapshot(model, optimizer))
    comm.barrier()
    part.free()


@pytest.mark.parametrize("way", WAYS)
def test_full_state_dict_is_that_of_the_plain_model(comm, way: str) -> None:
    model, plain = sharded(0, comm, way), make(0)
    full = mpitrain.full_state_dict(model)
    if comm.rank == 0:
        assert_alike(full, dict(plain.state_dict()))
        fresh = make(5)
        fresh.load_state_dict(full)
        assert_alike(dict(fresh.state_dict()), dict(plain.state_dict()))
    else:
        assert full == {}
    assert_alike(mpitrain.full_state_dict(plain), dict(plain.state_dict()))


def test_masters_of_a_model_that_computes_in_bf16(comm, shared_tmp: Path) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(0, comm, mp_policy=policy)
    optimizer = adamw(model)
    step(model, optimizer, 0)
    mpitrain.save(shared_tmp / "saved", model, optimizer)
    assert ckpt.open(shared_tmp / "saved")["model/embedding.weight"].dtype == "float32"
    other = sharded(1, comm, mp_policy=policy)
    its_optimizer = adamw(other)
    mpitrain.load(shared_tmp / "saved", other, its_optimizer)
    for number in (1, 2):
        step(model, optimizer, number)
        step(other, its_optimizer, number)
    assert_alike(snapshot(other, its_optimizer), snapshot(model, optimizer))


def test_weights_alone_and_settings_of_ones_own(comm, shared_tmp: Path) -> None:
    model = sharded(0, comm)
    optimizer = adamw(model)
    step(model, optimizer, 0)
    mpitrain.save(shared_tmp / "saved", model, optimizer)
    other = sharded(1, comm)
    mpitrain.load(shared_tmp / "saved", other)
    assert_alike(dict(other.state_dict()), dict(model.state_dict()))
    its_optimizer = adamw(other)
    its_optimizer.param_groups[0]["lr"] = 7.0
    mpitrain.load(shared_tmp / "saved", other, its_optimizer, hyperparameters=False)
    assert its_optimizer.param_groups[0]["lr"] == 7.0
    assert_alike(its_optimizer.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_new_head_keeps_its_values(comm, shared_tmp: Path) -> None:
    class Old(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 6)

    class New(Old):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 5)

    old = fully_shard(Old(), comm)
    mpitrain.save(shared_tmp / "saved", old)
    torch.manual_seed(1)
    new = fully_shard(New(), comm)
    head = new.head.weight.detach().clone()
    with pytest.raises(ckpt.CheckpointError, match=r"it does not hold 'model/head\.bias'"):
        mpitrain.load(shared_tmp / "saved", new)
    own = torch.full((2,), 7.0)
    mpitrain.load(shared_tmp / "saved", new, strict=False, tensors={"own/x": own})
    assert torch.equal(new.head.weight, head) and own.tolist() == [7.0, 7.0]
    there, here = mpitrain.full_state_dict(old), mpitrain.full_state_dict(new)  # on rank 0
    assert_alike(there, {name: value for name, value in here.items() if name in there})


def test_another_dtype_only_when_asked_for(comm, shared_tmp: Path) -> None:
    model = fully_shard(nn.Linear(6, 5), comm)
    mpitrain.save(shared_tmp / "saved", model)
    half = fully_shard(nn.Linear(6, 5, dtype=torch.bfloat16), comm)
    with pytest.raises(ckpt.CheckpointError, match=r"cast=True"):
        mpitrain.load(shared_tmp / "saved", half)
    mpitrain.load(shared_tmp / "saved", half, cast=True)
    assert torch.equal(half.weight, model.weight.to(torch.bfloat16))


def test_a_model_that_is_not_sharded(comm, shared_tmp: Path) -> None:
    model = make(0)
    optimizer = adamw(model)
    step(model, optimizer, 0)
    mpitrain.save(shared_tmp / "saved", model, optimizer, comm=comm, overwrite=True)
    assert len(list((shared_tmp / "saved").glob("rank-*.h5"))) == comm.size  # each rank writes some of it
    other = make(1)
    its_optimizer = adamw(other)
    mpitrain.load(shared_tmp / "saved", other, its_optimizer, comm=comm)
    assert_alike(dict(other.state_dict()), dict(model.state_dict()))
    assert_alike(its_optimizer.state_dict()["state"], optimizer.state_dict()["state"])


def test_what_is_damaged_comes_from_a_copy(comm, shared_tmp: Path) -> None:
    model = sharded(0, comm)
    optimizer = adamw(model)
    step(model, optimizer, 0)
    copies = [shared_tmp / "copies"]
    mpitrain.save(shared_tmp / "saved", model, optimizer, copies=copies)
    comm.barrier()
    for file in ("rank-00000.h5", "manifest.jsonl"):
        if comm.rank == 0:
            flip_bit(shared_tmp / "saved" / file, -2)
        other = sharded(1, comm)
        its_optimizer = adamw(other)
        with pytest.warns(RuntimeWarning, match="going on with the copy") if comm.rank == 0 else nullcontext():
            mpitrain.load(shared_tmp / "saved", other, its_optimizer, copies=copies)
        assert_alike(snapshot(other, its_optimizer), snapshot(model, optimizer))


def test_what_does_not_fit_is_refused_before_anything_is_touched(comm, shared_tmp: Path) -> None:
    early = make(0)
    optimizer = adamw(early)
    model = shard(early, comm, blocks=early.blocks)
    with pytest.raises(ValueError, match="make the optimizer after fully_shard"):
        mpitrain.save(shared_tmp / "saved", model, optimizer)
    with pytest.raises(ValueError, match="make the optimizer after fully_shard"):
        mpitrain.load(shared_tmp / "saved", model, optimizer)

    mpitrain.save(shared_tmp / "weights", model)
    other = sharded(1, comm)
    before = copy.deepcopy(dict(other.state_dict()))
    with pytest.raises(ckpt.CheckpointError, match="was saved without an optimizer"):
        mpitrain.load(shared_tmp / "weights", other, adamw(other))
    mpitrain.save(shared_tmp / "one-group", model, sgd(model))
    with pytest.raises(ckpt.CheckpointError, match="the optimizer is SGD there, AdamW here; make the same"):
        mpitrain.load(shared_tmp / "one-group", other, adamw(other))
    mpitrain.save(shared_tmp / "two-groups", model, adamw(model))
    trained = [param for param in other.parameters() if param.requires_grad]
    with pytest.raises(ckpt.CheckpointError, match="are in one parameter group here, in 2 there; make the same groups"):
        mpitrain.load(shared_tmp / "two-groups", other, torch.optim.AdamW(trained))
    with pytest.raises(
        ckpt.CheckpointError, match=r"the optimizer there does not have frozen.weight, frozen.bias; make"
    ):
        mpitrain.load(shared_tmp / "two-groups", other, torch.optim.AdamW(other.parameters()))
    with pytest.raises(
        ckpt.CheckpointError, match=r"the optimizer here does not have embedding.weight, .* the one there has"
    ):
        mpitrain.load(shared_tmp / "two-groups", other, torch.optim.AdamW(other.unused.parameters()))
    with pytest.raises(ckpt.CheckpointError, match="does not exist"):
        mpitrain.load(shared_tmp / "nowhere", other, adamw(other))
    with pytest.raises(ckpt.CheckpointError, match=r"model/weight"):
        mpitrain.load(shared_tmp / "weights", fully_shard(nn.Linear(2, 2), comm))
    assert_alike(dict(other.state_dict()), before)


@pytest.mark.ranks(2)
def test_an_error_of_one_rank_is_one_of_all(comm, shared_tmp: Path) -> None:
    """Also if a rank passes fewer arguments. The ranks go on alike: the next case would end the job."""

    class Odd(nn.Linear):
        def get_extra_state(self) -> Any:
            if comm.rank:
                raise LookupError("no extra state today")

        def set_extra_state(self, state: Any) -> None: ...

    def odd(*, group: Any = None, state: Any = None) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.param_groups[0]["mine"] = group if comm.rank else None
        optimizer.state[model.one]["mine"] = state if comm.rank else torch.ones(2)
        return optimizer

    def on_last(value: Any, other: Any = None) -> Any:
        return value if comm.rank else other

    model = sharded(0, comm)
    optimizer, ema = adamw(model), mpitrain.EMA(model, 0.5)
    mpitrain.save(shared_tmp / "there", model, optimizer, ema=ema)
    foreign = torch.optim.SGD(nn.Linear(2, 2).parameters())
    cases: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        (mpitrain.save, (model, odd(group=object())), {}, TypeError, "'mine' of the optimizer's group 0 is a object"),
        (
            mpitrain.save,
            (model, odd(state=object())),
            {},
            TypeError,
            "'mine' of the optimizer's state of one is a object",
        ),
        (
            mpitrain.save,
            (model, odd(state=torch.ones(2).to_sparse())),
            {},
            TypeError,
            "is a tensor that is torch.sparse_coo",
        ),
        (mpitrain.save, (fully_shard(Odd(4, 4), comm),), {}, LookupError, "no extra state today"),
        (mpitrain.save, (model, optimizer), {"meta": on_last([3])}, TypeError, "meta is a list; expected a dict"),
    ]
    for call in (mpitrain.save, mpitrain.load):
        cases += [
            (call, (model, on_last([optimizer], optimizer)), {}, TypeError, "optimizer is a list; expected one"),
            (call, (model, on_last(foreign, optimizer)), {}, ValueError, "that the model does not have"),
            (
                call,
                (model, on_last(optimizer)),
                {},
                ValueError,
                "optimizer is None on rank 0 alone; pass it on all ranks",
            ),
            (
                call,
                (model,),
                {"ema": on_last(None, ema)},
                ValueError,
                "ema is None on rank 1 alone; pass it on all ranks",
            ),
            (
                call,
                (model,),
                {"only": on_last("*bias")},
                ValueError,
                "only is None on rank 0 alone; pass it on all ranks",
            ),
            (call, (model,), {"only": on_last([], ["*bias"])}, ValueError, "only is empty"),
        ]
    for call, args, options, error, message in cases:
        with pytest.raises(error, match=message):
            call(shared_tmp / ("saved" if call is mpitrain.save else "there"), *args, **options)
    mpitrain.load(shared_tmp / "there", model, optimizer, ema=ema)


SCALARS: dict[str, tuple[int, Callable[[Any], torch.optim.Optimizer]]] = {
    "lbfgs": (0, lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)),
    "nadam": (3, lambda model: torch.optim.NAdam([model.scale])),
    "asgd": (3, lambda model: torch.optim.ASGD([model.scale], t0=1)),
    "adam": (3, lambda model: torch.optim.Adam(model.parameters(), lr=0.1)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", SCALARS)
def test_the_state_of_a_scalar_parameter(comm, shared_tmp: Path, kind: str) -> None:
    """It is the first one, which has all of LBFGS's state; or the only one. From a plain model, too."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.layer = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.scale

    stage, optimizer_of = SCALARS[kind]

    def made(*, is_plain: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Scaled() if is_plain else fully_shard(Scaled(), comm, stage=stage)
        return model, optimizer_of(model)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.arange(12.0).view(4, 3).sin()).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    first, plain = made(), made(is_plain=True)
    for pair in (first, plain):
        train(*pair)
    mpitrain.save(shared_tmp / "a", *first)
    mpitrain.save(shared_tmp / "plain", *plain, comm=comm)
    at_save = snapshot(*first)
    train(*first)
    for path in ("a", "plain"):
        other = made()
        mpitrain.load(shared_tmp / path, *other)
        tolerance = {} if path == "a" else {"rtol": 1e-5, "atol": 1e-6}
        assert_alike(snapshot(*other), at_save, **tolerance)
        train(*other)
        assert_alike(snapshot(*other)[0], snapshot(*first)[0], **tolerance)


def test_an_optimizer_that_has_not_stepped_yet(comm, shared_tmp: Path) -> None:
    model = sharded(0, comm)
    mpitrain.save(shared_tmp / "saved", model, adamw(model))
    other = sharded(1, comm)
    its_optimizer = adamw(other)
    mpitrain.load(shared_tmp / "saved", other, its_optimizer)
    assert its_optimizer.state_dict()["state"] == {}
    assert_alike(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.ranks(2)
def test_settings_and_state_are_those_of_the_save(comm, shared_tmp: Path) -> None:
    """A learning rate that is a tensor, groups in another order, and a way back to before the first step, from two kinds of sources."""

    def made(model: nn.Module, order: int) -> torch.optim.Optimizer:
        trained = [param for param in model.parameters() if param.requires_grad]
        groups = [
            {"params": [param for param in trained if param is model.one or param is model.scale], "weight_decay": 0.3},
            {"params": [param for param in trained if param is not model.one and param is not model.scale]},
        ]
        for group in groups:
            group["plan"] = {"warmup": [order]}
        return mpitrain.optim.AdamW(groups[::order], lr=torch.tensor(0.1 * abs(order)))

    def described(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        names = {param: name for name, param in model.named_parameters()}
        settings = {
            names[param]: {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
            for param in group["params"]
        }
        return copy.deepcopy((settings, {names[param]: its for param, its in optimizer.state.items()}))

    run = comm.broadcast_object(f"test{uuid4().hex[:8]}")
    model = sharded(0, comm)
    optimizer = made(model, 1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    copies = StateCopies(comm, run, 1)
    for number in range(2):
        for _ in range(number):
            step(model, optimizer, 0)
            scheduler.step()
        mpitrain.save(shared_tmp / f"{number}", model, optimizer)
        collected = weights.collect(model, optimizer)
        copies.take(number, collected.tensors, collected.meta)
        expected = described(model, optimizer)
        for _ in range(2 - number):
            step(model, optimizer, 7)
            scheduler.step()
        found = find_state(comm, run)
        for source in (shared_tmp / f"{number}", found):
            for target, its in ((model, optimizer), ((other := sharded(1, comm)), made(other, -1))):
                step(target, its, 8)
                mpitrain.load(source, target, its)
                assert_alike(described(target, its), expected)
    comm.barrier()
    copies.close(remove=True)
    comm.barrier()


def test_tensors_of_ones_own_travel_along(comm, shared_tmp: Path) -> None:
    model = sharded(0, comm)
    mine = torch.full((2, 3), float(comm.rank))
    shape, offset = (2 * comm.size, 3), (2 * comm.rank, 0)
    mpitrain.save(shared_tmp / "saved", model, tensors={"ema/x": ckpt.Shard(mine, shape, offset)})
    back = torch.empty(2, 3)
    mpitrain.load(shared_tmp / "saved", model, tensors={"ema/x": ckpt.Shard(back, shape, offset)})
    assert torch.equal(back, mine)


def test_several_boxes_of_a_tensor_of_ones_own_travel_along(comm, shared_tmp: Path) -> None:
    model = sharded(0, comm)
    whole = torch.arange(24.0 * comm.size).view(6, 4 * comm.size)
    columns = [4 * comm.rank, 4 * comm.rank + 1]

    def boxes(of: torch.Tensor) -> list[ckpt.Shard]:  # the one is not contiguous, the other of another order in memory
        wide = of[:3, columns[1] :][:, :3]
        return [
            ckpt.Shard(of[:3, columns[0]][:, None], whole.shape, (0, columns[0])),
            ckpt.Shard(wide, whole.shape, (0, columns[1])),
            ckpt.Shard(of[3:].T.contiguous().T[:, 4 * comm.rank :][:, :4], whole.shape, (3, columns[0])),
        ]

    mpitrain.save(shared_tmp / "saved", model, tensors={"own/x": boxes(whole)})
    back = boxes(torch.zeros_like(whole))
    mpitrain.load(shared_tmp / "saved", model, tensors={"own/x": back})
    for got, want in zip(back, boxes(whole), strict=True):
        assert torch.equal(got.data, want.data)


def test_a_run_keeps_the_table_of_algorithms(comm: Communicator) -> None:
    from mpitrain.job.train.checkpoints.saving import _take_table

    group, other = comm.split(0), comm.split(0)
    table = Table((TableEntry("all_reduce", "native", "private", comm.size, 1, ((None, "ring"),)),))
    group.use_table(table)
    assert _take_table(group.table.to_dict(), other) == []
    assert other.table == table
    assert _take_table(None, other) == [], "saved before tables were kept"
    (remark,) = _take_table({"version": 0}, other)
    assert remark.startswith("collectives are chosen again, so last digits may differ: use_table: table: version 0")
    assert other.table == table
    group.free()
    other.free()
