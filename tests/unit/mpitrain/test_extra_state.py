"""The extra state of modules, which torch has in a state dict, comes back with a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import ckpt
import mpitrain


class Counting(nn.Linear):
    """Has a number, a list and a tensor that are no buffers."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(2, 2)
        self.kept: Any = {"number": number, "rows": [1.5], "scale": torch.tensor([number / 8], dtype=torch.bfloat16)}

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def model_of(number: int) -> nn.Module:
    return nn.Sequential(Counting(number), nn.Linear(2, 2), Counting(number + 1))


def test_it_comes_back(tmp_path: Path) -> None:
    model, other = model_of(3), model_of(6)
    model[2].kept = torch.tensor(7)
    mpitrain.save(tmp_path / "c", model)
    mpitrain.load(tmp_path / "c", other)
    assert other[0].kept == {"number": 3, "rows": [1.5], "scale": torch.tensor([0.375], dtype=torch.bfloat16)}
    assert torch.equal(other[2].kept, torch.tensor(7))
    assert mpitrain.full_state_dict(other)["0._extra_state"] is other[0].kept

    third = model_of(9)
    mpitrain.save(tmp_path / "part", model, only="2.*")
    mpitrain.load(tmp_path / "part", third, only="2.*")
    assert third[0].kept["number"] == 9 and torch.equal(third[2].kept, torch.tensor(7))

    model[0].kept = {"file": open}
    with pytest.raises(
        TypeError, match=r"0._extra_state\['file'\] is a builtin_function_or_method, which a checkpoint"
    ):
        mpitrain.save(tmp_path / "d", model)


def test_large_tensors_in_it(tmp_path: Path) -> None:
    """They are tensors of the checkpoint, beside small ones in its meta."""
    model, other = model_of(3), model_of(6)
    model[0].kept = {"history": [torch.arange(5000.0), torch.ones(2)], "more": (torch.arange(4097) > 7, 1)}
    model[2].kept = torch.arange(6000, dtype=torch.uint8).view(2, 3000)
    kept = (model[0].kept, model[2].kept)
    mpitrain.save(tmp_path / "c", model)
    names = [name for name in ckpt.open(tmp_path / "c") if not name.startswith("model/")]
    assert names == ["extra_state/0/0._extra_state", "extra_state/0/2._extra_state", "extra_state/1/0._extra_state"]
    mpitrain.load(tmp_path / "c", other)
    for module, its in zip((other[0], other[2]), kept, strict=True):
        for here, there in zip(tree_leaves(module.kept), tree_leaves(its), strict=True):
            assert type(here) is type(there)
            torch.testing.assert_close(here, there, rtol=0, atol=0)
    third = model_of(9)
    mpitrain.load(tmp_path / "c", third, only="2.*")
    assert third[0].kept["number"] == 9 and torch.equal(third[2].kept, kept[1])
    mpitrain.save(tmp_path / "part", model, only="2.weight")
    assert list(ckpt.open(tmp_path / "part")) == ["extra_state/0/2._extra_state", "model/2.weight"]


def test_a_checkpoint_of_an_older_version(tmp_path: Path) -> None:
    """It has a tensor among those of the model, and nothing in the meta."""
    model = model_of(3)
    tensors = {"model/0._extra_state": torch.tensor(7), "model/2._extra_state": torch.tensor(8)}
    plain = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    mpitrain.save(tmp_path / "c", plain, tensors=tensors)
    mpitrain.load(tmp_path / "c", model)
    assert torch.equal(model[2].weight, plain[2].weight) and model[0].kept["number"] == 3
