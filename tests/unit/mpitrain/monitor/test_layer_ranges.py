"""The ranges of layers, in forward and backward."""

import pytest
import torch
from torch import nn

from mpitrain.job.record.layer_ranges import layer_ranges
from mpitrain.models import build
from mpitrain.models.sizes import resolve
from mpitrain.sharding import checkpoint_activations
from mpitrain.weights.initial_values import initialize


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("what", ["none", "block"])
def test_ranges_are_in_the_order_of_the_step_and_change_no_bit(family: str, what: str) -> None:
    model = build(resolve("tiny", family, layers=2, context=16))
    initialize(model, seed=0)
    if what == "block":
        checkpoint_activations(model, model.blocks)
    rows = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(0))

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        return [loss.detach(), *(param.grad for param in model.parameters() if param.grad is not None)]

    plain = step()
    marks: list[tuple[str, str, str]] = []
    with layer_ranges(
        model, lambda name, kind: marks.append(("enter", name, kind)), lambda *of: marks.append(("leave", *of))
    ):
        watched = step()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True)) and len(plain) > 10
    entered, left = marks[::2], marks[1::2]
    assert [mark[1:] for mark in entered] == [mark[1:] for mark in left]
    assert {mark[0] for mark in entered} == {"enter"} and {mark[0] for mark in left} == {"leave"}
    forward = ["embedding", "blocks.0", "blocks.1", "head"]
    order = list(dict.fromkeys(mark[1:] for mark in entered))
    assert order == [*((name, "forward") for name in forward), *((name, "backward") for name in reversed(forward))]
    marks.clear()
    step()
    assert not marks


def test_a_layer_that_masks_its_output_in_place() -> None:
    model = build(resolve("tiny", "gpt", layers=1, context=16))
    initialize(model, seed=0)
    first = model.blocks[0]
    inner, first.forward = first.forward, lambda x, **others: masked(inner(x, **others))

    def masked(x: torch.Tensor) -> torch.Tensor:
        y = nn.Linear(x.shape[-1], x.shape[-1])(x)  # a view
        y[..., 1:] = 0.0
        return y

    entered: list[tuple[str, str]] = []
    rows = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(0))
    with layer_ranges(model, lambda *of: entered.append(of), lambda *of: None):
        model(rows[:, :-1], rows[:, 1:]).backward()
    assert ("blocks.0", "backward") in entered


def test_a_model_without_known_layers_is_refused() -> None:
    nothing = lambda name, kind: None  # noqa: E731
    with pytest.raises(ValueError, match=r"stage_plan.*Linear"), layer_ranges(nn.Linear(1, 1), nothing, nothing):
        pass
