"""An optimizer after `load` is as the one that was saved, or the save says what it cannot keep. Sharded ones: tests/mpi/sharding."""

import copy
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

import ckpt
import mpitrain
from ckpt.saving import save as saving
from mpitrain.weights.meta.plain_values import decoded, encoded, small_tensor

Made = tuple[nn.Module, torch.optim.Optimizer]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(optim.SGD, lr=np.float32(0.1), momentum=0.9, nesterov=True),
    "adam": partial(optim.Adam, lr=torch.tensor(0.1), amsgrad=True),
    "adamw, fused": partial(optim.AdamW, lr=torch.tensor(0.1), fused=True, betas=[0.8, 0.99]),
    "adamw, betas": partial(optim.AdamW, betas=(torch.tensor(0.8), torch.tensor(0.9)), lr=torch.tensor([0.1])),
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "adagrad": partial(optim.Adagrad, initial_accumulator_value=0.5),
    "adadelta": optim.Adadelta,
    "rmsprop": partial(optim.RMSprop, centered=True, momentum=0.5),
    "rprop": optim.Rprop,
    "asgd": optim.ASGD,
    "adamax": optim.Adamax,
    "adafactor": optim.Adafactor,
    "lbfgs": partial(optim.LBFGS, lr=0.1, max_iter=3, history_size=3),
}


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    x = torch.linspace(-1, 1, 12).view(4, 3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


def assert_same(here: Any, there: Any) -> None:
    """Two nests of values are the same, with their types."""
    assert type(here) is type(there)
    if isinstance(here, dict):
        assert here.keys() == there.keys()
        for key in here:
            assert_same(here[key], there[key])
    elif isinstance(here, list | tuple):
        assert len(here) == len(there)
        for pair in zip(here, there, strict=True):
            assert_same(*pair)
    elif isinstance(here, torch.Tensor | np.ndarray | np.generic):
        assert (here.dtype, here.shape) == (there.dtype, there.shape)
        assert here.tolist() == there.tolist() or math.isnan(here)
    else:
        assert here == there or math.isnan(here)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_optimizer_of_torch_goes_on_as_before(tmp_path: Path, kind: str) -> None:
    """Forwards, and back to a state from before the first step."""
    made = OPTIMIZERS[kind]
    model = model_of()
    optimizer = made(model.parameters())
    scheduler = None if kind == "lbfgs" else optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    states = []
    for steps in (0, 2, 2):
        train(model, optimizer, steps)
        if scheduler is not None and steps:
            scheduler.step()
        mpitrain.save(tmp_path / f"{len(states)}", model, optimizer)
        states.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    for number in (1, 0, 2):
        mpitrain.load(tmp_path / f"{number}", model, optimizer)
        assert_same((model.state_dict(), optimizer.state_dict()), states[number])
    resumed = model_of(1)
    its_optimizer = made(resumed.parameters())
    mpitrain.load(tmp_path / "1", resumed, its_optimizer)
    train(resumed, its_optimizer, 2)
    assert_same(resumed.state_dict(), states[2][0])


VALUES = [
    None, True, 7, 1 << 80, 0.1, math.inf, -math.inf, math.nan, 1 + 2j, complex(math.inf, 0.5), "text", (), (0.9, (1, "x")), [1, [2.5]],
    {"warmup": 5, 3: None, (1, "a"): [{"b": math.inf}]}, Counter({3: 2}), OrderedDict({"b": (1,), 2: []}),
    torch.bfloat16, np.float32(0.25), np.float64(0.1), np.int64(-(1 << 63)),
    np.uint64((1 << 64) - 1), np.bool_(True), np.complex64(1 - 2j), np.arange(6, dtype=np.int16).reshape(2, 3), np.array(0.5),
    np.zeros((0, 2)),
    torch.tensor(0.001), torch.tensor([[1.5, math.inf]], dtype=torch.bfloat16), torch.tensor(3), torch.tensor(True), torch.zeros(0, 3),
    torch.tensor([1j, 2], dtype=torch.complex128), torch.tensor(0.1, dtype=torch.float64), torch.tensor(1e-7, dtype=torch.float16),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_with_its_type(value: Any) -> None:
    plain = encoded(value, "it")
    line = ckpt.format.manifest.encode_meta({"it": plain})
    there = ckpt.format.manifest.json.loads(line)["it"]
    cpu = torch.device("cpu")
    assert_same(decoded(there, lambda each: small_tensor(each, cpu)), value)
    assert "Infinity" not in line and "NaN" not in line  # JSON has none, and copies in node memory would lose them


class Odd(optim.SGD):
    """Has something of its own in its state_dict."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seed": 3}


def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    model = model_of()
    several = [optim.Adam(part.parameters()) for part in (model[0], model[2])]
    for call in (mpitrain.save, mpitrain.load):
        with pytest.raises(TypeError, match=r"optimizer is a list; expected one torch\.optim\.Optimizer"):
            call(tmp_path / "c", model, several)
    for number, optimizer in enumerate(several):  # as the error says
        mpitrain.save(tmp_path / f"{number}", model[2 * number], optimizer)
        mpitrain.load(tmp_path / f"{number}", model[2 * number], optimizer)


def test_what_cannot_be_kept_is_an_error_of_the_save(tmp_path: Path) -> None:
    model = model_of()
    for key, value, error in (
        ("rule", print, r"'rule' of the optimizer's group 0 is a builtin_function_or_method, which a checkpoint cannot keep"),
        ("plan", {"a": [{1, 2}]}, r"'plan' of the optimizer's group 0\['a'\]\[0\] is a set"),
        ("mask", torch.zeros(5000), r"'mask' of the optimizer's group 0 has shape \(5000,\), and .* at most 4096 elements"),
        (7, 1, "the optimizer's group 0 has the key 7"),
    ):  # fmt: skip
        optimizer = optim.SGD([{"params": model.parameters(), key: value}], lr=0.1)
        with pytest.raises(TypeError, match=error):
            mpitrain.save(tmp_path / "c", model, optimizer)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].bias]["rule"] = print
    with pytest.raises(TypeError, match=r"'rule' of the optimizer's state of 0.bias is a builtin_function_or_method"):
        mpitrain.save(tmp_path / "c", model, optimizer)
    with pytest.raises(TypeError, match=r"the state_dict\(\) of Odd has seed, which a checkpoint does not keep"):
        mpitrain.save(tmp_path / "c", model, Odd(model.parameters(), lr=0.1))
    del optimizer.state[model[0].bias]["rule"]
    for value, error in ((torch.ones(4).to_sparse(), "torch.sparse_coo"), ([[], 1], "nested more than 100 deep")):
        if isinstance(value, list):
            value[0] = value  # type: ignore[assignment]
        optimizer.state[model[0].bias]["kept"] = value
        with pytest.raises(TypeError, match=r"'kept' of the optimizer's state of 0.bias.*" + error):
            mpitrain.save(tmp_path / "c", model, optimizer)
    assert not list(tmp_path.iterdir())


def in_groups(order: str, **settings: Any) -> Made:
    """Weights (w) and biases (b) in the groups of this order, "+" between two groups."""
    model = model_of()
    named = [(name, param) for name, param in model.named_parameters()]
    groups = [
        {"params": [param for name, param in named if any(name.split(".")[1][0] == kind for kind in kinds)], **settings}
        for kinds in order.split("+")
    ]
    for number, group in enumerate(groups):
        group["weight_decay"] = number / 8
    return model, optim.AdamW(groups, lr=0.1)


def decays(made: Made) -> dict[str, float]:
    names = {param: name for name, param in made[0].named_parameters()}
    return {names[param]: group["weight_decay"] for group in made[1].param_groups for param in group["params"]}


def test_groups_are_found_by_the_names_of_their_parameters(tmp_path: Path) -> None:
    saved = in_groups("w+b")
    train(*saved, 1)
    mpitrain.save(tmp_path / "c", *saved)
    other = in_groups("b+w")
    mpitrain.load(tmp_path / "c", *other)
    assert decays(other) == decays(saved) == {"0.weight": 0, "0.bias": 1 / 8, "2.weight": 0, "2.bias": 1 / 8}
    for _ in range(2):
        train(*saved, 1)
        train(*other, 1)
    assert_same(dict(other[0].state_dict()), dict(saved[0].state_dict()))
    for order, error in (
        ("wb", "in one parameter group here, in 2 there"),
        ("w", "the optimizer here does not have 0.bias"),
    ):
        another = in_groups(order)
        before = copy.deepcopy(another[0].state_dict())
        with pytest.raises(ckpt.CheckpointError, match=error):
            mpitrain.load(tmp_path / "c", *another)
        assert_same(another[0].state_dict(), before)
    mpitrain.save(tmp_path / "one", *in_groups("wb"))
    with pytest.raises(
        ckpt.CheckpointError, match=r"0.weight, 0.bias, 2.weight and 1 more are in one parameter group there"
    ):
        mpitrain.load(tmp_path / "one", *in_groups("b+w"))


def test_groups_with_equal_settings_may_become_one(tmp_path: Path) -> None:
    saved = in_groups("w+b")
    for group in saved[1].param_groups:
        group["weight_decay"] = 0.5
    mpitrain.save(tmp_path / "c", *saved)
    other = in_groups("wb")
    mpitrain.load(tmp_path / "c", *other)
    assert decays(other) == decays(saved)


@pytest.mark.parametrize("saved_only", [None, "*weight"])
@pytest.mark.parametrize("order", ["w+b", "b+w"])
def test_a_group_of_which_nothing_is_loaded_keeps_its_settings(
    tmp_path: Path, order: str, saved_only: str | None
) -> None:
    saved = in_groups("w+b", own="there")
    mpitrain.save(tmp_path / "c", *saved, only=saved_only)
    other = in_groups(order)
    before = decays(other)
    mpitrain.load(tmp_path / "c", *other, only="*weight")
    assert decays(other) == {"0.weight": 0, "2.weight": 0, **{name: before[name] for name in ("0.bias", "2.bias")}}
    has_own = [group.get("own") for group in other[1].param_groups]
    assert has_own == ["there" if kind == "w" else None for kind in order.split("+")]


def test_a_group_without_parameters_takes_the_settings_of_one(tmp_path: Path) -> None:
    saved = in_groups("w+x+b+x")
    mpitrain.save(tmp_path / "c", *saved)
    other = in_groups("x+b+w+x")
    mpitrain.load(tmp_path / "c", *other)
    assert [group["weight_decay"] for group in other[1].param_groups] == [1 / 8, 2 / 8, 0, 3 / 8]
    fewer = in_groups("x+b+w")
    mpitrain.load(tmp_path / "c", *fewer)
    assert [group["weight_decay"] for group in fewer[1].param_groups] == [0, 2 / 8, 0], "not which one it is"


def test_settings_that_the_checkpoint_does_not_have_go(tmp_path: Path) -> None:
    model, optimizer = in_groups("w+b")
    mpitrain.save(tmp_path / "c", model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)  # adds initial_lr
    train(model, optimizer, 1)
    scheduler.step()
    optimizer.state["all"] = {"steps": 3, "mean": torch.tensor(0.5)}
    with_more = copy.deepcopy(optimizer.state_dict())
    mpitrain.save(tmp_path / "more", model, optimizer)
    mpitrain.load(tmp_path / "c", model, optimizer)
    assert_same(optimizer.state_dict(), before)
    mpitrain.load(tmp_path / "more", model, optimizer)
    assert_same(optimizer.state_dict(), with_more)


def test_a_save_in_the_background_has_the_state_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is no tensor, if the training goes on before the thread has begun."""
    changed, original = threading.Event(), saving.write_index

    def write_index(*args: Any) -> None:
        assert changed.wait(20)
        original(*args)

    monkeypatch.setattr(saving, "write_index", write_index)
    model, optimizer = in_groups("w+b", plan={"warmup": [5]})
    train(model, optimizer, 1)
    group = optimizer.param_groups[0]
    group |= {"lr": torch.tensor(0.1), "rates": np.ones(2)}
    optimizer.state[model[0].weight]["seen"] = [1]
    expected = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    mpitrain.save(tmp_path / "c", model, optimizer, background=True)
    group["lr"].fill_(7)
    group["rates"][0] = 7
    group["plan"]["warmup"].append(7)
    optimizer.state[model[0].weight]["seen"].append(7)
    train(model, optimizer, 1)
    changed.set()
    ckpt.wait()
    mpitrain.load(tmp_path / "c", model, optimizer)
    assert_same((model.state_dict(), optimizer.state_dict()), expected)


def test_a_tensor_that_groups_share_stays_one(tmp_path: Path) -> None:
    model = model_of()
    optimizer = optim.AdamW([{"params": layer.parameters()} for layer in (model[0], model[2])], lr=torch.tensor(0.1))
    mpitrain.save(tmp_path / "c", model, optimizer)
    mpitrain.load(tmp_path / "c", model, optimizer)
    first, second = optimizer.param_groups
    assert first["lr"] is second["lr"] and first["lr"] is not optimizer.defaults["lr"]


def test_a_load_that_is_not_strict_replaces_what_it_covers(tmp_path: Path) -> None:
    """What the checkpoint lacks keeps its values and state; what it has without state loses its own."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    mpitrain.save(tmp_path / "c", model, optim.AdamW(model.parameters(), lr=0.25))
    larger = model_of()
    groups = [{"params": layer.parameters(), "lr": 0.5} for layer in (larger[2], larger[0])]
    optimizer = optim.AdamW(groups)
    train(larger, optimizer, 2)
    kept = copy.deepcopy(optimizer.state[larger[2].weight])
    with pytest.raises(ckpt.CheckpointError, match=r"does not have 2.weight, 2.bias; make the optimizer for the same"):
        mpitrain.load(tmp_path / "c", larger, optimizer)
    mpitrain.load(tmp_path / "c", larger, optimizer, strict=False)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert set(optimizer.state) == set(larger[2].parameters())
    assert_same(optimizer.state[larger[2].weight], kept)
    train(larger, optimizer, 2)


def test_state_in_the_dtype_of_its_parameter_follows_it(tmp_path: Path) -> None:
    model = model_of()
    optimizer = optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    mpitrain.save(tmp_path / "c", model, optimizer)
    half = model_of().double()
    its_optimizer = optim.AdamW(half.parameters())
    mpitrain.load(tmp_path / "c", half, its_optimizer, cast=True)
    state = its_optimizer.state[half[0].weight]
    assert (state["exp_avg"].dtype, state["step"].dtype) == (torch.float64, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_is_not_read_while_the_model_has_it(tmp_path: Path, dtype: torch.dtype) -> None:
    model = model_of().to(dtype)
    ema = mpitrain.EMA(model, 0.5)
    ones = {name: torch.ones_like(param) for name, param in model.named_parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(2)
    for average in ema.tensors.values():
        average.fill_(1)
    mpitrain.save(tmp_path / "c", model, ema=ema)
    with ema.swapped():
        for call in (
            lambda: mpitrain.save(tmp_path / "d", model, ema=ema),
            lambda: mpitrain.load(tmp_path / "c", model, ema=ema),
            ema.update,
            lambda: ema.swapped().__enter__(),
        ):
            with pytest.raises(RuntimeError, match=r"within ema\.swapped\(\); expected a call after the block"):
                call()
        mpitrain.save(tmp_path / "average", model)
    assert all((param == 2).all() for param in model.parameters())
    mpitrain.load(tmp_path / "average", model)
    assert all(torch.equal(param, ones[name]) for name, param in model.named_parameters())
