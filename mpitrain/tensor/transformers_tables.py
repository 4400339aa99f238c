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


OUR_PLANS: dict[str, Callable[[Any], dict[str, Style]]] = {"gpt2": _gpt2, "t5": _t5}
"""By `model_type`."""
