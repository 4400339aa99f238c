"""What the families of models have in common: sizes, causality, loss, weight decay, learning and sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from mpitrain.job.config import OptimConfig
from mpitrain.job.train.model import make_optimizer
from mpitrain.models import (
    SIZES,
    GPTConfig,
    LanguageModel,
    LlamaConfig,
    Segments,
    TransformerConfig,
    build,
    decay_groups,
    flops_per_token,
    generate,
    num_parameters,
    resolve,
    sample_tokens,
)
from mpitrain.weights.initial_values import initialize

SMALL: dict[str, Any] = {"vocab": 11, "context": 8, "width": 24, "layers": 2}
CONFIGS = {
    "gpt": GPTConfig(**SMALL, heads=3),
    "llama": LlamaConfig(**SMALL, heads=4, kv_heads=2),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    # Models of this size gain nothing from threads, and lose much on a busy machine by waiting for one another.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> TransformerConfig:
    return CONFIGS[request.param]


def make(config: TransformerConfig, seed: int = 0) -> LanguageModel:
    model = build(config)
    initialize(model, seed=seed)
    return model


def tokens(*shape: int, vocab: int = 11) -> torch.Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("family", "size"), [(family, size) for family in SIZES for size in SIZES[family]])
def test_number_of_parameters_on_the_meta_device(family: str, size: str, tied: bool) -> None:
    config = resolve(size, family, tied=tied)
    with torch.device("meta"):
        model = build(config)
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == num_parameters(config)
    assert (model.head.weight is model.wte.weight) == tied


def test_a_tied_model_is_all_on_the_device_it_is_made_on(config: TransformerConfig) -> None:
    model = make(type(config)(**{**vars(config), "tied": True}))
    assert not any(p.is_meta for p in model.parameters())
    assert "head.weight" in model.state_dict()


@pytest.mark.parametrize(
    ("family", "size", "numbers", "message"),
    [
        ("gpt", "huge", {}, "model.size: expected one of tiny, small, medium, large, xl, got 'huge'"),
        ("gpt", "8b", {}, "xl, got '8b'; --model.family llama has this size"),
        ("llama", "xl", {}, "model.size: expected one of tiny, 1b, 7b, 8b, 70b, got 'xl'; --model.family gpt has this size"),
        ("lama", "tiny", {}, "model.family: expected one of gpt, llama, got 'lama'"),
        ("gpt", "tiny", {"width": 50, "heads": 4}, "got 50; nearest: 48 or 52"),
        ("llama", "tiny", {"width": 50}, "got 50; nearest: 48 or 52"),
        ("gpt", "tiny", {"layers": 0}, "model.layers: expected at least 1, got 0"),
        ("gpt", "tiny", {"kv_heads": 1}, "a GPT has as many key and value heads as heads, expected 3 or no number, got 1"),
        ("llama", "tiny", {"kv_heads": 3}, "model.kv_heads: expected a divisor of model.heads = 4, got 3"),
        ("llama", "tiny", {"kv_heads": 8}, "model.kv_heads: expected a divisor of model.heads = 4, got 8"),
        ("llama", "tiny", {"width": 12}, "model.width: expected a multiple of 2 x model.heads = 8"),
    ],
)  # fmt: skip
def test_numbers_that_do_not_fit(family: str, size: str, numbers: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve(size, family, **numbers)
    assert message in str(caught.value)


def test_no_token_sees_a_later_one(config: TransformerConfig) -> None:
    model, x = make(config), tokens(2, 8)
    changed = x.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % config.vocab
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-6)
    assert (before[:, 5:] - after[:, 5:]).abs().amax() > 1e-3


def test_each_document_of_a_row_is_computed_as_if_it_were_alone(config: TransformerConfig) -> None:
    """Logits, and the gradients of their sum with weights. 1e-5 is float32's rounding over two layers."""
    model, x = make(config), tokens(3, 8)
    numbers = np.array([[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, -1, -1, -1, -1, -1], [0] * 8])  # -1: padding
    lengths = [3, 5, 1, 2, 5, 8]
    weights = torch.randn(24, config.vocab, generator=torch.Generator().manual_seed(1))

    def grads(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((logits * weights).sum(), list(model.parameters()))

    packed = model(x, segments=Segments.of(numbers)).flatten(0, 1)
    alone = torch.cat([model(document[None])[0] for document in x.flatten().split(lengths)])
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads(packed), grads(alone), rtol=1e-5, atol=1e-5)
    assert (packed - model(x).flatten(0, 1)).abs().amax() > 1e-2
    assert torch.equal(model(x, segments=Segments.of(numbers * 0)), model(x))
    with pytest.raises(ValueError, match=r"segments: expected those of rows of shape \(3, 7\), got \(3, 8\)"):
        model(x[:, :7], segments=Segments.of(numbers))


def test_loss_is_the_mean_over_the_targets_that_count(config: TransformerConfig) -> None:
    model, x, y = make(config), tokens(2, 8), tokens(8, 2).T.clone()
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


def test_bfloat16_gives_a_float32_loss(config: TransformerConfig) -> None:
    model = make(config).bfloat16()
    assert model(tokens(2, 8)).dtype == torch.bfloat16
    assert model(tokens(2, 8), tokens(2, 8)).dtype == torch.float32


def test_more_tokens_than_the_context_are_refused(config: TransformerConfig) -> None:
    with pytest.raises(ValueError, match=r"expected at most model\.context = 8 tokens, got 9"):
        make(config)(tokens(1, 9))


@pytest.mark.parametrize("family", CONFIGS)
def test_it_learns(family: str) -> None:
    model = make(resolve("tiny", family, context=32, width=48, layers=2))
    x = tokens(4, 33, vocab=256)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(x[:, :-1], x[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5


@pytest.mark.parametrize(
    ("family", "num_matrices", "num_vectors"), [("gpt", 1 + 4 * 2, 8 * 2 + 2), ("llama", 1 + 5 * 2, 2 * 2 + 1)]
)
def test_decay_groups(family: str, num_matrices: int, num_vectors: int) -> None:
    """The embedding of positions, or the head, is frozen."""
    model = make(CONFIGS[family])
    frozen = model.get_parameter("wpe.weight" if family == "gpt" else "head.weight")
    frozen.requires_grad_(False)
    matrices, vectors = decay_groups(model, 0.3)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert all(p.ndim == 2 for p in matrices["params"]) and all(p.ndim == 1 for p in vectors["params"])
    assert (len(matrices["params"]), len(vectors["params"])) == (num_matrices, num_vectors)


def test_decay_groups_without_matrices() -> None:
    torch.optim.AdamW(decay_groups(torch.nn.LayerNorm(4), 0.1))


@pytest.mark.parametrize("family", CONFIGS)
def test_the_rate_of_a_layer(family: str) -> None:
    """The settings' optimizers give each parameter its share of the learning rate, once."""
    model = make(resolve("tiny", family, layers=2, tied=False))
    names = {param: name for name, param in model.named_parameters()}
    for name, matrix_lr in (("adamw", None), ("lamb", None), ("muon", 0.5)):
        optim = OptimConfig(name=name, lr=0.25, layer_decay=0.5, matrix_lr=matrix_lr)  # type: ignore[arg-type]
        factors = {}
        for group in make_optimizer(model, optim).param_groups:
            for param in group["params"]:
                assert param not in factors
                factors[param] = group["lr_factor"]
                assert group["weight_decay"] == (0.1 if param.ndim > 1 else 0.0)
        assert len(factors) == len(names)
        for param, factor in factors.items():
            expected = {"embedding": 1 / 8, "blocks.0": 1 / 4, "blocks.1": 1 / 2, "head": 1.0}
            layer = model.stage_plan.layer_of(names[param])
            is_matrix = param.ndim > 1 and layer.startswith("blocks")
            assert factor == expected[layer] * (2.0 if matrix_lr and is_matrix else 1.0)


@pytest.mark.parametrize(("family", "size"), [("gpt", "small"), ("llama", "8b")])
def test_flops_per_token(family: str, size: str) -> None:
    """The same from the matrix products themselves: 2 x in x out forward, twice that backward."""
    config = resolve(size, family)
    c, n = config.width, config.context
    matrices = 12 * c * c
    if isinstance(config, LlamaConfig):
        matrices = 2 * c * c + 2 * c * c * config.kv_heads // config.heads + 3 * c * config.inner
    block = 2 * matrices + 2 * 2 * c * n  # scores and weighted sum over a full context
    forward = config.layers * block + 2 * c * config.vocab
    # Norms and biases, which 6N counts as products too, are the small rest.
    assert flops_per_token(config) == pytest.approx(3 * forward, rel=1e-3)
    for tied in (False, True):
        assert flops_per_token(resolve(size, family, tied=tied)) == flops_per_token(config)


def test_sampling_repeats_with_its_generator(config: TransformerConfig) -> None:
    model, prompt = make(config), tokens(3)

    def draw(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return generate(model, prompt, num=40, context=8, temperature=1.0, generator=generator).tolist()

    assert draw(0) == draw(0) != draw(1)
    assert len(draw(0)) == 40 and set(draw(0)) <= set(range(config.vocab))


def test_sampling_at_temperature_0_takes_the_likeliest_of_the_last_tokens(config: TransformerConfig) -> None:
    model, prompt = make(config), tokens(12)
    text = prompt.tolist()
    for token in sample_tokens(model, prompt, num=10, context=8, temperature=0):
        assert token == int(model(torch.tensor([text[-8:]]))[0, -1].argmax())
        text.append(token)
    assert len(text) == 22


def test_sampling_refuses_nonsense() -> None:
    model = make(CONFIGS["gpt"])
    with pytest.raises(ValueError, match="prompt: expected at least one token"):
        generate(model, tokens(0), num=1, context=8)
    with pytest.raises(ValueError, match="temperature: expected 0 or more, got -1"):
        generate(model, tokens(1), num=1, context=8, temperature=-1)
    assert generate(model, tokens(1), num=0, context=8).shape == (0,)
