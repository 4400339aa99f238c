"""The losses of tokens, the entropy of logits, and the names of layers."""

import pytest
import torch
from torch import nn

from mpitrain.models import build, resolve
from mpitrain.models.loss import IGNORED, make_loss, observed
from mpitrain.tensor import vocabulary


def test_the_loss_has_the_bits_of_torchs_with_and_without_an_observer() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, 37, generator=generator)
    targets = torch.randint(0, 37, (1000,), generator=generator).index_fill_(0, torch.arange(0, 1000, 7), IGNORED)
    model = nn.ModuleDict({"loss": make_loss()})
    seen: list[tuple[torch.Tensor, ...]] = []

    def loss_and_grad(loss: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        x = logits.clone().requires_grad_()
        total = loss(x, targets)
        (total * 0.1).backward()
        assert x.grad is not None
        return total.detach(), x.grad

    expected = loss_and_grad(nn.CrossEntropyLoss(ignore_index=IGNORED, reduction="sum"))
    with observed(model, lambda *tensors: seen.append(tensors)):
        shown = loss_and_grad(model["loss"])
    hidden = loss_and_grad(model["loss"])
    for found in (shown, hidden):
        assert all(map(torch.equal, found, expected))
    ((of_logits, of_targets, losses),) = seen
    assert torch.equal(of_logits, logits) and torch.equal(of_targets, targets) and not losses.requires_grad
    assert torch.equal(losses == 0, targets == IGNORED)
    assert losses.sum() == pytest.approx(expected[0].item(), rel=1e-6)
    with observed(nn.Module(), print):
        pass  # a stage without the loss


def test_the_entropy_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_CHUNK_ELEMENTS", 300)  # several chunks
    logits = 30 * torch.randn(50, 37, generator=torch.Generator().manual_seed(0))
    logits[0] = 5.0
    expected = torch.distributions.Categorical(logits=logits.double()).entropy()
    torch.testing.assert_close(vocabulary.entropy(logits).double(), expected, rtol=1e-5, atol=1e-6)
    assert vocabulary.entropy(logits)[0] == pytest.approx(torch.tensor(37.0).log().item())


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_each_parameter_is_of_a_layer(family: str, tied: bool) -> None:
    with torch.device("meta"):
        model = build(resolve("tiny", family, layers=2, tied=tied))
    layers = {name: model.stage_plan.layer_of(name) for name, _ in model.named_parameters()}
    assert set(layers.values()) == {"embedding", "blocks.0", "blocks.1", "head"}
    assert layers["wte.weight"] == "embedding" and layers.get("head.weight") == (None if tied else "head")
    with pytest.raises(ValueError, match=r"names no module of the parameter adapter\.weight"):
        model.stage_plan.layer_of("adapter.weight")
