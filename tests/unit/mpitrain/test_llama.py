"""The Llama: names, numbers, rotary positions, and equality with transformers' Llama."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mpitrain.models import Llama, LlamaConfig, num_parameters, resolve
from mpitrain.models.llama import Rotation
from mpitrain.weights.initial_values import initialize

LENGTH = 24


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    # Models of this size gain nothing from threads, and lose much on a busy machine by waiting for one another.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(kv_heads: int = 0, *, tied: bool = False, theta: float = 10000.0) -> Llama:
    model = Llama(
        LlamaConfig(
            vocab=101,
            context=LENGTH,
            width=48,
            layers=2,
            heads=4,
            kv_heads=kv_heads,
            inner=80,
            theta=theta,
            tied=tied,
        )
    )
    initialize(model)
    return model


def test_names_of_parameters() -> None:
    block = ["norm1", "attn.q", "attn.kv", "attn.proj", "norm2", "mlp.gate_up", "mlp.proj"]
    expected = ["wte", *(f"blocks.{i}.{name}" for i in range(2) for name in block), "norm"]
    for tied in (False, True):
        names = [name for name, _ in make(tied=tied).named_parameters()]
        assert names == [f"{name}.weight" for name in [*expected, *["head"] * (not tied)]]


def test_shapes_of_grouped_queries() -> None:
    assert make(1).get_parameter("blocks.0.attn.kv.weight").shape == (2 * 12, 48)
    assert make().get_parameter("blocks.0.attn.kv.weight").shape == (2 * 48, 48)


def test_the_named_sizes_are_the_published_ones() -> None:
    """Numbers of parameters of the weights that Meta published."""
    counts = {size: num_parameters(resolve(size, "llama")) for size in ("1b", "7b", "8b", "70b")}
    assert counts == {"1b": 1_235_814_400, "7b": 6_738_415_616, "8b": 8_030_261_248, "70b": 70_553_706_496}
    # as many as the GPT's tiny
    assert num_parameters(resolve("tiny", "llama")) == pytest.approx(num_parameters(resolve("tiny")), rel=0.02)


@pytest.mark.parametrize(("width", "inner"), [(192, 512), (768, 2048), (1024, 2752), (4096, 10944)])
def test_the_usual_inner_width_and_heads(width: int, inner: int) -> None:
    config = resolve("tiny", "llama", width=width, heads=8)
    assert isinstance(config, LlamaConfig)
    assert (config.inner, config.kv_heads) == (inner, 8)


def hugging_face(model: Llama) -> Any:
    """transformers' Llama with the same numbers and weights."""
    transformers = pytest.importorskip("transformers", minversion="5")
    numbers = model.config
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=numbers.vocab,
            max_position_embeddings=numbers.context,
            hidden_size=numbers.width,
            num_hidden_layers=numbers.layers,
            num_attention_heads=numbers.heads,
            num_key_value_heads=numbers.kv_heads,
            intermediate_size=numbers.inner,
            rope_parameters={"rope_type": "default", "rope_theta": numbers.theta},
            rms_norm_eps=1e-5,
            tie_word_embeddings=numbers.tied,
            attn_implementation="eager",
        )
    )
    theirs.load_state_dict(renamed({name: param.detach() for name, param in model.named_parameters()}), strict=False)
    return theirs


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By transformers' names: query, key and value, and gate and up, are matrices of their own there."""
    found = {}
    for name, tensor in tensors.items():
        name = name.removesuffix(".weight")
        if name.startswith("blocks."):
            _, number, *names = name.split(".")
            theirs = {
                "norm1": ["input_layernorm"],
                "norm2": ["post_attention_layernorm"],
                "attn.q": ["self_attn.q_proj"],
                "attn.kv": ["self_attn.k_proj", "self_attn.v_proj"],
                "attn.proj": ["self_attn.o_proj"],
                "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
                "mlp.proj": ["mlp.down_proj"],
            }[".".join(names)]
            theirs = [f"model.layers.{number}.{each}" for each in theirs]
        else:
            theirs = [{"wte": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}[name]]
        found |= {f"{each}.weight": piece for each, piece in zip(theirs, tensor.chunk(len(theirs)), strict=True)}
    return found


@pytest.mark.rest
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kv_heads", "theta"), [(1, 10000.0), (2, 500000.0), (4, 10000.0)])
def test_transformers_llama_has_the_same_logits_and_gradients(kv_heads: int, theta: float, tied: bool) -> None:
    model = make(kv_heads, tied=tied, theta=theta)
    theirs = hugging_face(model)
    x = torch.randint(101, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x[:, :-1]), theirs(x[:, :-1]).logits, rtol=1e-5, atol=1e-5)
    loss = model(x[:, :-1], x[:, 1:])
    expected = theirs(x, labels=x).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    loss.backward()
    expected.backward()
    grads = renamed({name: param.grad for name, param in model.named_parameters() if param.grad is not None})
    for name, param in theirs.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_products_of_rotated_vectors_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0))
    length = 100
    rotation = Rotation(torch.arange(length), 16, 10000.0)
    scores = (rotation(q.expand(1, 1, length, 16)) @ rotation(k.expand(1, 1, length, 16)).transpose(2, 3))[0, 0]
    for distance in (0, 1, 7, 60):
        found = scores.diagonal(-distance)
        torch.testing.assert_close(found, found[:1].expand_as(found), rtol=0, atol=1e-4)
    # In closed form, with a pair as a complex number: the real part of (a + ib) conj(c + id) exp(7i f), summed over the frequencies f.
    (a, b), (c, d) = q.flatten().double().chunk(2), k.flatten().double().chunk(2)
    angles = 7 * 10000.0 ** -(torch.arange(0, 16, 2) / 16).double()
    expected = ((a * c + b * d) * angles.cos() + (a * d - b * c) * angles.sin()).sum()
    assert scores[7, 0].item() == pytest.approx(expected.item(), abs=1e-4)
    assert (scores.diagonal(-60)[0] - scores.diagonal(-7)[0]).abs() > 0.1


def test_positions_are_exact_to_float32_in_bfloat16() -> None:
    rotation = Rotation(torch.arange(1000), 16, 10000.0)
    x = torch.randn(1, 2, 1000, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert rotation(x).dtype == torch.bfloat16
    assert torch.equal(rotation(x), rotation(x.float()).bfloat16())


def test_initial_values() -> None:
    model = Llama(LlamaConfig(vocab=256, context=64, width=96, layers=3, heads=4, kv_heads=2))
    initialize(model)
    for name, value in model.named_parameters():
        if "norm" in name:
            assert (value == 1).all(), name
        else:
            std = 0.02 / math.sqrt(6) if ".proj." in name else 0.02
            # At least 9216 draws: the deviation of the measured standard deviation is below 1 %; 5 of it.
            assert value.std().item() == pytest.approx(std, rel=0.05), name
    x = torch.randint(256, (8, 64), generator=torch.Generator().manual_seed(0))
    # Near-uniform predictions: ln 256 = 5.55, plus the logits' small variance.
    assert model(x, x.roll(1, 1)).item() == pytest.approx(math.log(256), abs=0.1)
