"""Models of the transformers library, cut by the library's plans or ours, train as in one plain process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from extent import extent
from ways import spread

import mpitrain
from collectives import Communicator
from mpitrain.placement.parts import part_of

pytestmark = pytest.mark.rest

transformers = pytest.importorskip("transformers", minversion="5")

LENGTH, VOCAB, STEPS = 24, 101, extent(5, 10)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 12,
    "num_key_value_heads": 12, "max_position_embeddings": LENGTH, "attention_dropout": 0.0,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}


def _gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=LENGTH,
            n_embd=48,
            n_layer=2,
            n_head=12,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def _t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCAB,
            d_model=48,
            d_kv=4,
            d_ff=72,
            num_layers=2,
            num_heads=12,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def _causal(name: str, sizes: dict[str, Any], **more: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes, **more))


MODELS: dict[str, Callable[[], Any]] = {
    "Llama": _causal("Llama", SIZES),
    "Llama, grouped queries": _causal("Llama", GROUPED),
    "Llama, tied": _causal("Llama", GROUPED, tie_word_embeddings=True),
    "Qwen2": _causal("Qwen2", GROUPED),
    "Qwen3": _causal("Qwen3", GROUPED, head_dim=4),
    "Mistral": _causal("Mistral", GROUPED, sliding_window=None),
    "Olmo2": _causal("Olmo2", SIZES),
    "Mixtral": _causal("Mixtral", GROUPED, num_local_experts=3, num_experts_per_tok=2),
    "T5": _t5,
    "GPT-2": _gpt2,
}


def made(name: str) -> Any:
    torch.manual_seed(1)
    return MODELS[name]().train()


def losses(model: Any, data: Communicator | None, steps: int = STEPS) -> tuple[list[float], list[float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    generator = torch.Generator().manual_seed(0)
    found: tuple[list[float], list[float]] = [], []
    for _ in range(steps):
        tokens = torch.randint(0, VOCAB, (4, LENGTH), generator=generator)
        if data is not None:
            tokens = tokens.chunk(data.size)[data.rank]
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        found[1].append(mpitrain.clip_grad_norm_(model, 1.0).item())
        optimizer.step()
        mean = loss.detach().double().reshape(1)
        if data is not None:
            data.all_reduce(mean, "avg")
        found[0].append(mean.item())
    return found


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.shared_cases
@pytest.mark.parametrize(("name", "sequence"), spread(MODELS, [False, True], all_on_2=False))
def test_steps_beside_the_plain_model(comm: Communicator, name: str, sequence: bool) -> None:
    reference = made(name)
    if comm.size == 3 and getattr(reference.config, "num_key_value_heads", 3) == 2:
        pytest.skip("3 ranks cannot share 2 heads of keys")
    start = {key: value.clone() for key, value in reference.state_dict().items()}
    expected, norms = losses(reference, None)
    tp = 2 if comm.size == 4 else comm.size
    for size in {tp, comm.size}:
        mesh = mpitrain.mesh(comm, tp=size)
        model = made(name)
        mpitrain.tensor_parallel(model, mesh["tp"], sequence=sequence)
        for key, param in model.named_parameters():
            part = part_of(param)
            assert part is not None and torch.equal(part.take(start[key]), param), key
            if param.ndim > 1 and not any(word in key for word in ("gate.weight", "wpe")):  # the router, and positions
                heads = 2 if ("k_proj" in key or "v_proj" in key) else size  # of keys, which several ranks may have
                assert param.numel() <= start[key].numel() / min(size, heads) + 48, key  # 101 tokens are not divisible
        if size < comm.size:
            mpitrain.fully_shard(model, mesh)
        found, found_norms = losses(model, mesh["dp_shard"] if size < comm.size else None)
        assert found == pytest.approx(expected, rel=1e-6)
        assert found_norms == pytest.approx(norms, rel=1e-5)
        mesh.free()
