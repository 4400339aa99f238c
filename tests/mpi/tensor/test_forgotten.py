"""A plan that forgets a layer is an error that names the layer."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import mpitrain
from collectives import Communicator
from mpitrain.tensor import Style

CUT = {"mlp.up": Style("column"), "mlp.down": Style("row")}


class Mlp(nn.Module):
    """`between`: what happens to the features that a plan cuts, from the input and these features."""

    def __init__(self, more: dict[str, nn.Module], between: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        for name, module in more.items():
            setattr(self, name, module)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self, x, self.up(x)))  # type: ignore[no-any-return]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def unchanged(mlp: nn.Module, x: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    return features


def through(mlp: nn.Module, x: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    return mlp.other(features)  # type: ignore[no-any-return, operator]


def gated(mlp: nn.Module, x: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    return features * mlp.other(x).sigmoid()  # type: ignore[operator]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("more", "between", "plan", "named"),
    [
        ({"other": lambda: nn.Linear(12, 12)}, through, CUT, "mlp.other"),
        ({"other": lambda: nn.Sequential(nn.Linear(12, 12), nn.ReLU())}, through, CUT, "mlp.other.0"),
        ({"other": lambda: nn.LayerNorm(12, elementwise_affine=False)}, through, CUT, "mlp.other"),
        ({"other": Scale}, through, CUT, "mlp.other"),
        ({"other": lambda: nn.Linear(6, 12)}, gated, CUT, "mlp.other"),
        ({}, unchanged, {"mlp.up": Style("column")}, "mlp.down"),
        ({}, unchanged, {"mlp.down": Style("row")}, "mlp.up"),
    ],
    ids=["a layer", "in a container", "norm", "scale", "gate", "row", "column"],
)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_the_error_names_the_layer(
    comm: Communicator,
    more: dict[str, Callable[[], nn.Module]],
    between: Callable[..., torch.Tensor],
    plan: dict[str, Style],
    named: str,
    is_sharded: bool,
) -> None:
    mesh = mpitrain.mesh(comm, tp=2)
    model = nn.Sequential()
    model.mlp = Mlp({name: make() for name, make in more.items()}, between)
    mpitrain.tensor_parallel(model, mesh["tp"], plan)
    if is_sharded:
        mpitrain.fully_shard(model, mesh)
    with pytest.raises(
        RuntimeError, match=rf"plan does not name {named}, where .* 6 of 12 on this rank; .* torch says: \w+"
    ):
        model(torch.ones(2, 6))
    mesh.free()


@pytest.mark.ranks(2)
def test_other_errors_stay_as_they_are(comm: Communicator) -> None:
    model = nn.Sequential()
    model.mlp = Mlp({}, unchanged)
    mpitrain.tensor_parallel(model, comm, CUT)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 5))
    assert str(caught.value) == "mat1 and mat2 shapes cannot be multiplied (2x5 and 6x6)"
