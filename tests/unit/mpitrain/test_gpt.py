"""The GPT: names, numbers, the textbook's forward, initial values."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from mpitrain.models import GPT, GPTConfig, num_parameters, resolve
from mpitrain.weights.initial_values import initialize

CONFIG = GPTConfig(vocab=11, context=8, width=12, layers=2, heads=3)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    # Models of this size gain nothing from threads, and lose much on a busy machine by waiting for one another.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(config: GPTConfig = CONFIG, seed: int = 0) -> GPT:
    model = GPT(config)
    initialize(model, seed=seed)
    return model


def tokens(*shape: int, vocab: int = CONFIG.vocab) -> torch.Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(0))


def test_names_of_parameters() -> None:
    block = [
        f"{module}.{kind}"
        for module in ("ln1", "attn.qkv", "attn.proj", "ln2", "mlp.fc", "mlp.proj")
        for kind in ("weight", "bias")
    ]
    expected = [
        "wte.weight",
        "wpe.weight",
        *(f"blocks.{i}.{name}" for i in range(2) for name in block),
        "ln_f.weight",
        "ln_f.bias",
    ]
    assert [name for name, _ in make().named_parameters()] == expected
    untied = GPT(GPTConfig(vocab=11, context=8, width=12, layers=2, heads=3, tied=False))
    assert [name for name, _ in untied.named_parameters()] == [*expected, "head.weight"]


def test_the_named_sizes_are_gpt2s() -> None:
    counts = {size: num_parameters(resolve(size)) for size in ("small", "medium", "large", "xl")}
    assert counts == {"small": 124_439_808, "medium": 354_823_168, "large": 774_030_080, "xl": 1_557_611_200}


def test_forward_against_the_textbook() -> None:
    """Same logits as the formulas written out, in float64; 1e-5 is float32's rounding over two layers."""
    model = make()
    x = tokens(3, 8)
    state = {name: value.double() for name, value in model.state_dict().items()}

    def linear(h: torch.Tensor, name: str) -> torch.Tensor:
        return h @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(h: torch.Tensor, name: str) -> torch.Tensor:
        centred = h - h.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]

    h = state["wte.weight"][x] + state["wpe.weight"][:8]
    for i in range(CONFIG.layers):
        q, k, v = linear(norm(h, f"blocks.{i}.ln1"), f"blocks.{i}.attn.qkv").split(CONFIG.width, dim=-1)
        heads = []
        for part in range(CONFIG.heads):
            d = CONFIG.width // CONFIG.heads
            mine = slice(part * d, (part + 1) * d)
            scores = q[..., mine] @ k[..., mine].transpose(1, 2) / math.sqrt(d)
            scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf)
            heads.append(scores.softmax(-1) @ v[..., mine])
        h = h + linear(torch.cat(heads, -1), f"blocks.{i}.attn.proj")
        inner = linear(norm(h, f"blocks.{i}.ln2"), f"blocks.{i}.mlp.fc")
        inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        h = h + linear(inner, f"blocks.{i}.mlp.proj")
    expected = norm(h, "ln_f") @ state["wte.weight"].T
    torch.testing.assert_close(model(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_initial_values_are_gpt2s() -> None:
    config = GPTConfig(vocab=256, context=64, width=96, layers=3, heads=3, tied=False)
    model = make(config)
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            assert (value == 0).all(), name
        elif "ln" in name:
            assert (value == 1).all(), name
        else:
            std = 0.02 / math.sqrt(6) if ".proj." in name else 0.02
            # At least 6144 draws: the deviation of the measured standard deviation is below 1 %; 5 of it.
            assert value.std().item() == pytest.approx(std, rel=0.05), name
    x = tokens(8, 64, vocab=256)
    # Near-uniform predictions: ln 256 = 5.55, plus the logits' small variance.
    assert model(x, x.roll(1, 1)).item() == pytest.approx(math.log(256), abs=0.1)
