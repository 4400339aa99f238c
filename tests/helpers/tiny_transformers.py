"""Models of the transformers library with few and narrow layers, and random values in every parameter."""

from typing import Any

import torch

VOCAB, LENGTH = 104, 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "intermediate_size_mlp": 64, "num_hidden_layers": 2,
    "num_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 64, "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "zero_expert_num": 2, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "sliding_window": 8, "mamba_d_state": 8,
    "attention_dropout": 0.0, "residual_dropout": 0.0, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0, "dropout_rate": 0.0,
    "use_cache": False, "pad_token_id": 0, "eos_token_id": 2,
    "unpadded_vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4,
}  # fmt: skip
"""By the names of the fields of configurations, which differ."""

_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
_KEYS_OF_EACH_HEAD = {"num_key_value_heads": 4}
SPECIAL: dict[str, dict[str, Any]] = {
    "axk2": _KEYS_OF_EACH_HEAD,
    "deepseek_v32": _KEYS_OF_EACH_HEAD,
    "dots3_note_text": _KEYS_OF_EACH_HEAD,
    "ernie4_5_moe": {"moe_k": 2, "moe_layer_start_index": 1},
    "glm_moe_dsa": _KEYS_OF_EACH_HEAD,
    "gpt2": {"n_head": 4, "n_embd": 32, "n_layer": 2, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "kimi_linear": {**_MIXED, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe", "attention"], "num_hidden_layers": 4, "mamba_num_heads": 4,
        "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "moe_shared_expert_intermediate_size": 32,
    },
    "t5": {"decoder_start_token_id": 0},
    "deepseek_v2": {"topk_method": "greedy"},
    "gemma3n_text": {
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0, "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 2, "intermediate_size": [64] * 2, "altup_num_inputs": 2,
    },
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0, "global_head_dim": 8},
    "inkling_text": {"mlp_layer_types": ["dense", "sparse"]},
    "inkling2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "llama4_text": {"interleave_moe_layer_step": 2, "num_experts_per_tok": 1, "attention_chunk_size": 8},
    "longcat_flash": {"num_key_value_heads": 4, "head_dim": 4, "moe_topk": 2},
    "phi3": {"rope_scaling": None, "sliding_window": None},
    "qwen3_5_text": _MIXED,
    "qwen3_next": _MIXED,
    "qwen4_exp_text": {
        **_MIXED, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "hc_lowrank": 8,
        "indexer_compress_ratio": 2, "ple_layer_ids": [1], "ngram_vocab_size_base": 50, "heads_per_ngram": 2, "ple_embed_dim": 32,
        "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 1,
    },
}  # fmt: skip


def tiny(model_type: str, **more: Any) -> Any:
    """The language model of a type in training mode, the same on all ranks. `more`: fields of the configuration, if it has them."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = CONFIG_MAPPING[model_type]
    special = SPECIAL.get(model_type, {})
    sizes = {**SIZES, **special, **more}
    inner = getattr(kind, "sub_configs", {})
    if "encoder" in inner:
        config = kind(**{key: _fields(inner[key], sizes) for key in ("encoder", "decoder")})
    else:
        config = kind(**{**special, **_fields(kind, sizes)})
    auto = AutoModelForCausalLM if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForSeq2SeqLM
    torch.manual_seed(0)
    model = auto.from_config(config).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():  # without zeros and ones, which hide errors
            noise = torch.randn(param.shape, generator=generator).to(param.dtype)
            if param.ndim < 2:
                param += 0.1 * noise
            else:
                param.copy_(0.06 * noise)
    return model


def batch() -> dict[str, torch.Tensor]:
    """Two sequences of tokens, and labels of which some do not count."""
    tokens = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    labels = tokens.clone()
    labels[0, :3] = -100
    return {"input_ids": tokens, "labels": labels}


def _fields(kind: type, sizes: dict[str, Any]) -> dict[str, Any]:
    known = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
    return {name: value for name, value in sizes.items() if name in known}
