"""The `meta` of a program comes back from `mpitrain.load` with the same values, such as the state of a scheduler."""

import copy
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler as lrs

import ckpt
import mpitrain
from tests.unit.mpitrain.test_optimizer_state import VALUES, assert_same, model_of

SCHEDULERS: dict[str, Any] = {
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0),
    "multi-step": lambda o: lrs.MultiStepLR(o, [1, 2, 2], 0.5),
    "one cycle": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=10),
    "sequential": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o), lrs.MultiStepLR(o, [1])], [2]),
    "chained": lambda o: lrs.ChainedScheduler([lrs.LinearLR(o), lrs.ExponentialLR(o, 0.9)]),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.1, 0.2, mode="exp_range"),
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 0.5**step),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "swa": lambda o: optim.swa_utils.SWALR(o, 0.01),
}


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_goes_on_by_the_meta(tmp_path: Path, kind: str, lr: Any) -> None:
    model = model_of()

    def made() -> tuple[optim.Optimizer, Any]:
        optimizer = optim.SGD(model.parameters(), lr=copy.deepcopy(lr), momentum=0.9)
        return optimizer, SCHEDULERS[kind](optimizer)

    def rates(optimizer: optim.Optimizer, scheduler: Any) -> list[float]:
        found = []
        for _ in range(3):
            optimizer.step()
            scheduler.step(*([1.0] if kind == "plateau" else []))
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    optimizer, scheduler = made()
    rates(optimizer, scheduler)
    saved = copy.deepcopy(scheduler.state_dict())
    mpitrain.save(tmp_path / "c", model, optimizer, meta={"scheduler": scheduler.state_dict()})
    expected = rates(optimizer, scheduler)
    optimizer, scheduler = made()
    meta = mpitrain.load(tmp_path / "c", model, optimizer)
    assert_same(meta, {"scheduler": saved})
    scheduler.load_state_dict(meta["scheduler"])
    assert rates(optimizer, scheduler) == expected


def test_the_meta_comes_back(tmp_path: Path) -> None:
    """In the file it has the values of JSON as they are."""
    model = model_of()
    plain = {"step": 3, "note": ["a", None, {"x": [0.5, True]}], "best": math.inf, "type": {"type": "list"}}
    mpitrain.save(tmp_path / "c", model, meta=plain)
    assert_same(ckpt.open(tmp_path / "c").meta, plain)
    more = {
        **plain,
        **{f"{number}": [value] for number, value in enumerate(VALUES) if not isinstance(value, np.float64 | tuple)},
    }
    more |= {"mark": {"mpitrain.value": 3}, "mpitrain.value": 4}
    optimizer = optim.Adam(model.parameters())
    mpitrain.save(tmp_path / "more", model, optimizer, meta=more)
    meta = mpitrain.load(tmp_path / "more", model, optimizer)
    assert_same(meta, more)
    mpitrain.save(tmp_path / "again", model, optimizer, meta=meta)

    class Own(OrderedDict):
        """JSON takes it for a dict."""

    classes = {"own": Own(a=np.float64(0.5)), "size": torch.Size([2]), "pair": (1, (2.0, torch.ones(1)))}
    mpitrain.save(tmp_path / "classes", model, meta=classes)
    assert_same(
        mpitrain.load(tmp_path / "classes", model), {"own": {"a": 0.5}, "size": [2], "pair": [1, [2.0, torch.ones(1)]]}
    )


def test_meta_that_is_refused(tmp_path: Path) -> None:
    model, loop, deep = model_of(), [], ()
    loop.append(loop)
    for _ in range(500):
        deep = (deep,)
    for key in ("optimizer", "extra_state", "diloco", "compression", "saved_only"):
        with pytest.raises(ValueError, match=rf"meta has \['{key}'\], which mpitrain has there itself"):
            mpitrain.save(tmp_path / "c", model, meta={"step": 3, key: True})
    for value, error in (
        ({3}, r"meta\['x'\] is a set, which a checkpoint cannot keep"),
        (torch.ones(5000), r"meta\['x'\] has shape \(5000,\)"),
        (torch.ones(2).to_sparse(), r"meta\['x'\] is a tensor that is torch.sparse_coo"),
        (loop, "nested more than 400 deep, or holds itself"),
        ({1: deep}, "nested more than 100 deep, or holds itself"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            mpitrain.save(tmp_path / "c", model, meta={"x": value})
    with pytest.raises(ckpt.CheckpointError, match="the path is None"):
        mpitrain.load(None, model)  # type: ignore[arg-type]


HOSTILE: list[Any] = [
    {"type": "numpy", "dtype": "U1000000000", "shape": [1], "value": ["x"]},
    {"type": "numpy", "dtype": "V100000000000", "shape": [0], "value": []},
    {"type": "numpy", "dtype": "O", "shape": [1], "value": [1]},
    {"type": "numpy", "dtype": "int8", "shape": [1 << 40], "value": [1]},
    {"type": "numpy", "dtype": "int8", "shape": None, "value": []},
    {"type": "tensor", "dtype": "nn", "shape": [1], "device": "cpu", "value": [1]},
    {"type": "tensor", "dtype": "float32", "shape": ["x"], "device": "cpu", "value": [1]},
    {"type": "tensor", "dtype": "float32", "shape": [1], "value": [1]},
    {"type": "torch.dtype", "value": "load"},
    {"type": "complex", "value": [1, 2, 3]},
    {"type": "int", "value": "9" * 5000},
    {"type": "int"},
    {"type": "dict", "value": [[{"type": "list", "value": []}, 1]]},
    {"type": "dict", "value": 5},
    {"type": "list", "value": None},
    {"type": []},
    {"value": 1},
    {},
]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: str(value)[:60])
def test_a_value_of_a_stranger_is_refused(tmp_path: Path, value: Any) -> None:
    """None of them is made, however large it says that it is."""
    model = model_of()
    for meta in ({"a": {"mpitrain.value": value}}, {"a": [{"b": {"mpitrain.value": [value, 1]}}]}):
        tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
        ckpt.save(tmp_path / "a", tensors, comm=None, meta=meta, overwrite=True)
        with pytest.raises(ckpt.CheckpointError, match="has a value that no save writes"):
            mpitrain.load(tmp_path / "a", model)


def test_a_state_that_the_optimizer_does_not_take(tmp_path: Path) -> None:
    """NAdam looks for a number that the checkpoint lacks."""
    model = model_of()
    tensors: dict[str, Any] = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    tensors |= {f"optimizer/step/{name}": np.ones((), np.float32) for name in names}
    meta = {"optimizer": {"kind": "NAdam", "groups": [{"lr": 0.5}], "names": [names], "state": {}}}
    ckpt.save(tmp_path / "a", tensors, comm=None, meta=meta)
    with pytest.raises(ckpt.CheckpointError, match="NAdam does not take the state there: KeyError: 'mu_product'"):
        mpitrain.load(tmp_path / "a", model, optim.NAdam(model.parameters()))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("optimizer", []),
        ("optimizer", {"groups": [{"lr": {"type": "torch.dtype", "value": 5}}], "state": {}}),
        ("optimizer", {"groups": [{}], "state": {}, "names": []}),
        ("optimizer", {"groups": [{}], "state": {}, "others": [[1]]}),
        ("optimizer", {"groups": [{}], "state": {}, "cut": {"x": "y"}}),
        ("extra_state", 5),
        ("saved_only", 5),
        ("saved_only", [5]),
    ],
)
def test_a_part_of_the_meta_of_a_stranger(tmp_path: Path, part: str, value: Any) -> None:
    model = model_of()
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    ckpt.save(tmp_path / "a", tensors, comm=None, meta={part: value})
    if part == "optimizer":  # which a load without one passes over
        assert mpitrain.load(tmp_path / "a", model) == {}
    if part != "extra_state":
        with pytest.raises(ckpt.CheckpointError, match=f"its meta has under '{part}'|a value that no save writes"):
            mpitrain.load(tmp_path / "a", model, optim.SGD(model.parameters(), lr=0.5))
