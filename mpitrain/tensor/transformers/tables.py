"""Plans for transformers models for which the library has none."""

from collections.abc import Callable
from typing import Any

from torch import nn

from mpitrain.tensor.plan import Style


def _gpt2(model: Any) -> dict[str, Style]:
    prefix = "transformer." if model.base_model is not model else ""
    heads = model.config.n_head
    return {
        f"{prefix}h.*.attn.c_attn": Style("column", parts=3, blocks=heads),
        f"{prefix}h.*.attn.c_proj": Style("row", blocks=heads),
        f"{prefix}h.*.attn": Style("divide", names=("split_size", "num_heads")),
        f"{prefix}h.*.mlp.c_fc": Style("column"),
        f"{prefix}h.*.mlp.c_proj": Style("row"),
    }


def _t5(model: Any) -> dict[str, Style]:
    """The relative bias is cut by heads; blocks pass it on."""
    heads = model.config.num_heads
    found: dict[str, Style] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind == "T5Attention":
            found |= {f"{name}.{key}": Style("column", blocks=heads) for key in ("q", "k", "v")}
            found |= {f"{name}.o": Style("row", blocks=heads), name: Style("divide", names=("n_heads", "inner_dim"))}
            if module.has_relative_attention_bias:
                found[f"{name}.relative_attention_bias"] = Style("column", blocks=heads)
        elif kind in ("T5DenseActDense", "T5DenseGatedActDense"):
            inner = [key for key, child in module.named_children() if isinstance(child, nn.Linear)]
            found |= {f"{name}.{key}": Style("row" if key == "wo" else "column") for key in inner}
    return found


def _stablelm(model: Any) -> dict[str, Style]:
    """The attention counts its heads itself. With `qk_layernorm` each head has a norm of its own, so heads are not cut."""
    prefix = "model." if model.base_model is not model else ""
    heads, key_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    attention = {
        "q_proj": Style("column", blocks=heads),
        "k_proj": Style("column", blocks=key_heads),
        "v_proj": Style("column", blocks=key_heads),
        "o_proj": Style("row", blocks=heads),
    }
    found = {
        f"{prefix}layers.*.mlp.{key}_proj": Style("row" if key == "down" else "column")
        for key in ("gate", "up", "down")
    }
    if not model.config.qk_layernorm:
        found |= {f"{prefix}layers.*.self_attn.{key}": style for key, style in attention.items()}
        counts = ("num_heads", "num_key_value_heads", "hidden_size")
        found[f"{prefix}layers.*.self_attn"] = Style("divide", names=counts)
    return found


OUR_PLANS: dict[str, Callable[[Any], dict[str, Style]]] = {"gpt2": _gpt2, "t5": _t5, "stablelm": _stablelm}
"""By `model_type`."""

_ATTENTION = {
    **dict.fromkeys((f"layers.*.self_attn.{key}_proj" for key in "qkv"), "colwise"),
    "layers.*.self_attn.o_proj": "rowwise",
}
_LAYERS: dict[str, dict[str, str]] = {
    "gpt_oss": {
        **_ATTENTION,
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.experts.gate_up_proj": "rowwise",  # its matrices are stored with the inner features last
        "layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
        "layers.*.mlp.experts.down_proj": "colwise",
        "layers.*.mlp.experts.down_proj_bias": "moe_identity_expert",
    },
    "hunyuan_v1_dense": {
        **_ATTENTION,
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    },
}


def missing_styles(config: Any) -> dict[str, str]:
    """Styles of the library for the layers of a model whose configuration has none, in the form of `base_model_tp_plan`."""
    return _LAYERS.get(config.model_type, {})
