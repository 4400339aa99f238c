"""`generate` of sharded models of the transformers library."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded_models import STORAGES
from torch import nn

import mpitrain
from collectives import Communicator

pytestmark = [pytest.mark.rest, pytest.mark.ranks(2)]

_TOKENS = torch.arange(40, 48).reshape(1, 8)
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 2, "eos_token_id": 63}


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, **_SPECIAL)
    return T5ForConditionalGeneration(config)


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=64, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=16, max_target_positions=32, **_SPECIAL,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    model.generation_config.max_length = None
    return model


def tokens_of_t5(model: Any) -> torch.Tensor:
    return model.generate(_TOKENS, max_new_tokens=4, num_beams=2)


def tokens_of_whisper(model: Any) -> torch.Tensor:
    return model.generate(torch.linspace(-1, 1, 8 * 32).reshape(1, 8, 32), max_new_tokens=4)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("make", "use"), [(t5, tokens_of_t5), (whisper, tokens_of_whisper)])
def test_generate_gives_the_tokens_of_the_plain_model(
    comm: Communicator, make: Callable[[], nn.Module], use: Callable[[Any], torch.Tensor], storage: str
) -> None:
    torch.manual_seed(0)
    plain = make().eval()
    assert plain.config.use_cache
    model = mpitrain.fully_shard(copy.deepcopy(plain), comm, storage=storage)
    expected = use(plain)
    for _ in range(2):
        found = use(model)
        assert torch.equal(found, expected) and not found.requires_grad
