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
        RuntimeError,
        match=rf"^\w.* - tensor_parallel: the plan does not name {named}, where .*\(6 of 12 on this rank\)",
    ):
        model(torch.ones(2, 6))
    mesh.free()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[None], x[None], x[None])[0][0]  # type: ignore[no-any-return]


def with_buffer() -> nn.Module:
    module = nn.Identity()
    module.register_buffer("mask", torch.ones(12))
    return module


def masked(mlp: nn.Module, x: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    return features * mlp.other.mask  # type: ignore[no-any-return, operator, union-attr]


def by_heads(mlp: nn.Module, x: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    return features.view(2, 3, 4).flatten(1)


def by_unflatten(mlp: nn.Module, x: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    return features.unflatten(-1, (3, 4)).flatten(1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("other", "between", "kind", "said"),
    [
        (Attention, through, AssertionError, "embedding dimension of 12, but got 6 .* does not name mlp.other.inner"),
        (lambda: nn.LSTM(12, 12), through, RuntimeError, "Expected 12, got 6 .* does not name mlp.other"),
        (with_buffer, masked, RuntimeError, "mlp has the buffer mlp.other.mask with 12 features, and the plan cuts"),
        (nn.Identity, by_heads, RuntimeError, r"shape '\[2, 3, 4\]' is invalid .* mlp computes with 12 features"),
        (nn.Identity, by_unflatten, RuntimeError, "unflatten: .* mlp computes with 12 features"),
    ],
)
def test_other_errors_of_shapes(
    comm: Communicator,
    other: Callable[[], nn.Module],
    between: Callable[..., torch.Tensor],
    kind: type[Exception],
    said: str,
) -> None:
    """The error keeps its type and its text."""
    model = nn.Sequential()
    model.mlp = Mlp({"other": other()}, between)
    mpitrain.tensor_parallel(model, comm, CUT)
    with pytest.raises(kind, match=said + r".*\(6 of 12 on this rank\)"):
        model(torch.ones(2, 6))


class ByHeads(nn.Module):
    """Attention with heads of 2 features. `core`: from the heads of q, k and v."""

    def __init__(self, core: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 8) for _ in range(3))
        self.o = nn.Linear(8, 6)
        self.core = core

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(self.core(*heads).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def by_einsum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)


def of_other_lengths(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return q + k[:, :, 1:]


def fails(*heads: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no heads today")


def heads_plan(forgotten: str) -> dict[str, Style]:
    return {f"*.{key}": Style("row" if key == "o" else "column", blocks=4) for key in "qkvo" if key not in forgotten}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("core", [nn.functional.scaled_dot_product_attention, by_einsum], ids=["torch", "einsum"])
@pytest.mark.parametrize("forgotten", ["q", "k", "v", "qk"])
def test_heads_of_a_forgotten_layer_meet_those_of_cut_ones(
    comm: Communicator, core: Callable[..., torch.Tensor], forgotten: str
) -> None:
    """torch's error tells numbers of heads, which no layer has as a length."""
    mesh = mpitrain.mesh(comm, tp=2)
    model = nn.Sequential(nn.LayerNorm(6), ByHeads(core), ByHeads(core))
    mpitrain.tensor_parallel(model, mesh["tp"], heads_plan(forgotten))
    mpitrain.fully_shard(model, mesh, storage="private")
    names = " or ".join(f"1.{name}" for name in forgotten)
    with pytest.raises(RuntimeError, match=f"size.* - tensor_parallel: .* layers of 1, .* not name {names};") as caught:
        model(torch.ones(2, 3, 6))
    assert getattr(caught.value, "__notes__", []) == [], "no rules of regions, which it has not broken"
    mesh.free()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("core", [of_other_lengths, fails], ids=["shapes", "no shapes"])
def test_errors_that_have_nothing_to_do_with_the_plan(comm: Communicator, core: Callable[..., torch.Tensor]) -> None:
    model = nn.Sequential(ByHeads(core))
    mpitrain.tensor_parallel(model, comm, heads_plan(""))
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 4, 6))
    assert "tensor_parallel" not in str(caught.value) and not hasattr(caught.value, "__notes__")


@pytest.mark.ranks(2)
def test_other_errors_stay_as_they_are(comm: Communicator) -> None:
    model = nn.Sequential()
    model.mlp = Mlp({}, unchanged)
    mpitrain.tensor_parallel(model, comm, CUT)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 5))
    assert str(caught.value) == "mat1 and mat2 shapes cannot be multiplied (2x5 and 6x6)"


def view_of_others(mlp: nn.Module, x: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    return features.view(6, 12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 12.00 GiB, and the size of the free memory is 6 GiB"
        ),
        RuntimeError("data loader: expected shape 12, got 6"),
        AssertionError("expected size 12, got 6"),
        ValueError("expected size 12, got 6"),
        None,
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_something_else_with_the_same_numbers(comm: Communicator, error: Exception | None) -> None:
    def fails(mlp: nn.Module, x: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        raise error  # type: ignore[misc]

    model = nn.Sequential()
    model.mlp = Mlp({"norm": nn.LayerNorm(12)}, view_of_others if error is None else fails)
    mpitrain.tensor_parallel(model, comm, CUT)
    said = "shape '[6, 12]' is invalid for input of size 12" if error is None else str(error)
    with pytest.raises(RuntimeError if error is None else type(error)) as caught:
        model(torch.ones(2, 6))
    assert str(caught.value) == said and (error is None or caught.value is error)
