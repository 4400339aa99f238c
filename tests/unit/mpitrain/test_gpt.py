"""The GPT: names, numbers, causality, loss, initial values, weight decay and sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from mpitrain.init import initialize
from mpitrain.models import (
    GPT,
    SIZES,
    GPTConfig,
    decay_groups,
    flops_per_token,
    generate,
    num_parameters,
    resolve,
    sample_tokens,
)

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


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", ["tiny", "small", "xl"])
def test_number_of_parameters_on_the_meta_device(size: str, tied: bool) -> None:
    config = resolve(size, tied=tied)
    with torch.device("meta"):
        model = GPT(config)
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == num_parameters(config)
    assert (model.head.weight is model.wte.weight) == tied


def test_the_named_sizes_are_gpt2s() -> None:
    counts = {size: num_parameters(SIZES[size]) for size in ("small", "medium", "large", "xl")}
    assert counts == {"small": 124_439_808, "medium": 354_823_168, "large": 774_030_080, "xl": 1_557_611_200}


def test_a_tied_model_is_all_on_the_device_it_is_made_on() -> None:
    assert not any(p.is_meta for p in make().parameters())
    assert "head.weight" in make().state_dict()


@pytest.mark.parametrize(
    ("size", "numbers", "message"),
    [
        ("huge", {}, "model.size: expected one of tiny, small, medium, large, xl, got 'huge'"),
        ("tiny", {"width": 50, "heads": 4}, "got 50; nearest: 48 or 52"),
        ("tiny", {"layers": 0}, "model.layers: expected at least 1, got 0"),
    ],
)
def test_numbers_that_do_not_fit(size: str, numbers: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve(size, **numbers)
    assert message in str(caught.value)


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


def test_no_token_sees_a_later_one() -> None:
    model, x = make(), tokens(2, 8)
    changed = x.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % CONFIG.vocab
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-6)
    assert (before[:, 5:] - after[:, 5:]).abs().amax() > 1e-3


def test_loss_is_the_mean_over_the_targets_that_count() -> None:
    model, x, y = make(), tokens(2, 8), tokens(8, 2).T.clone()
    y[0, 3:] = -100
    kept = y != -100
    expected = F.cross_entropy(model(x)[kept], y[kept])
    torch.testing.assert_close(model(x, y), expected, rtol=1e-6, atol=0)
    total = model(x, y, reduction="sum")
    torch.testing.assert_close(total, expected * kept.sum(), rtol=1e-6, atol=0)
    of_mean, of_sum = (torch.autograd.grad(loss, model.wte.weight)[0] for loss in (model(x, y), total))
    torch.testing.assert_close(of_sum, of_mean * kept.sum(), rtol=1e-5, atol=1e-7)
    nothing = torch.full_like(y, -100)
    assert model(x, nothing).isnan() and model(x, nothing, reduction="sum") == 0
    with pytest.raises(ValueError, match="reduction: expected 'mean' or 'sum', got 'none'"):
        model(x, y, reduction="none")  # type: ignore[arg-type]


def test_bfloat16_gives_a_float32_loss() -> None:
    model = make().bfloat16()
    assert model(tokens(2, 8)).dtype == torch.bfloat16
    assert model(tokens(2, 8), tokens(2, 8)).dtype == torch.float32


def test_more_tokens_than_the_context_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected at most model\.context = 8 tokens, got 9"):
        make()(tokens(1, 9))


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


def test_it_learns() -> None:
    config = GPTConfig(vocab=256, context=32, width=48, layers=2, heads=3)
    model = make(config)
    x = tokens(4, 33, vocab=256)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(x[:, :-1], x[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5


def test_decay_groups() -> None:
    model = make()
    model.wpe.weight.requires_grad_(False)
    matrices, vectors = decay_groups(model, 0.3)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert all(p.ndim == 2 for p in matrices["params"]) and all(p.ndim == 1 for p in vectors["params"])
    assert len(matrices["params"]) == 1 + 4 * CONFIG.layers
    assert len(vectors["params"]) == 8 * CONFIG.layers + 2
    torch.optim.AdamW(decay_groups(torch.nn.LayerNorm(4), 0.1))  # the first group empty


def test_flops_per_token() -> None:
    """The same from the matrix products themselves: 2 x in x out forward, twice that backward."""
    config = SIZES["small"]
    c, n = config.width, config.context
    block = 2 * (3 * c * c + c * c + 8 * c * c) + 2 * 2 * c * n  # scores and weighted sum over a full context
    forward = config.layers * block + 2 * c * config.vocab
    # Norms and biases, which 6N counts as products too, are the small rest.
    assert flops_per_token(config) == pytest.approx(3 * forward, rel=1e-3)
    untied = resolve("small", tied=False)
    assert flops_per_token(untied) == flops_per_token(config)


def test_sampling_repeats_with_its_generator() -> None:
    model, prompt = make(), tokens(3)

    def draw(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return generate(model, prompt, num=40, context=8, temperature=1.0, generator=generator).tolist()

    assert draw(0) == draw(0) != draw(1)
    assert len(draw(0)) == 40 and set(draw(0)) <= set(range(CONFIG.vocab))


def test_sampling_at_temperature_0_takes_the_likeliest_of_the_last_tokens() -> None:
    model, prompt = make(), tokens(12)
    text = prompt.tolist()
    for token in sample_tokens(model, prompt, num=10, context=8, temperature=0):
        assert token == int(model(torch.tensor([text[-8:]]))[0, -1].argmax())
        text.append(token)
    assert len(text) == 22


def test_sampling_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="prompt: expected at least one token"):
        generate(make(), tokens(0), num=1, context=8)
    with pytest.raises(ValueError, match="temperature: expected 0 or more, got -1"):
        generate(make(), tokens(1), num=1, context=8, temperature=-1)
    assert generate(make(), tokens(1), num=0, context=8).shape == (0,)
