"""Plans of Hugging Face transformers models: those that the library ships, and ours for models without one.

The library's plans name the matrices of the layers. The embedding and the head are added here. In a region (see `mpitrain.tensor`) each
rank's gradient of an uncut parameter is a part of a sum anyway, so the library's styles that say this need nothing more.
"""

from typing import Any

from torch import nn

from mpitrain.tensor.plan import Plan, Style, region_of

_IN_REGION = frozenset({"replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "sequence_parallel"})
"""Styles of modules that stay whole within a region."""


def plan_of_transformers(model: Any) -> Plan | None:
    """The plan of a transformers model; None for any other model, or one without a plan. ValueError for an unknown style."""
    if not any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__):
        return None
    ours = {"gpt2": _gpt2, "t5": _t5}.get(model.config.model_type)
    plan = ours(model) if ours is not None else _shipped(model)
    return None if plan is None else {**plan, **_ends(model)}


def _ends(model: Any) -> dict[str, Style]:
    """The styles of the embedding and the head. The head's logits are whole: the model computes its own loss."""
    tokens, head = model.get_input_embeddings(), model.get_output_embeddings()
    found: dict[str, Style] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.weight is tokens.weight:  # several modules in T5
            found[name] = Style("vocabulary")
        elif module is head:
            found[name] = Style("column", gathers=True)
    return found


def _shipped(model: Any) -> dict[str, Style] | None:
    """The library's own plan."""
    prefix = model.base_model_prefix + "." if model.base_model is not model else ""
    shipped = {prefix + name: style for name, style in (model.config.base_model_tp_plan or {}).items()}
    shipped |= getattr(type(model), "_tp_plan", None) or {}
    if not shipped:
        return None
    found: dict[str, Style] = {}
    for pattern, style in shipped.items():
        key = pattern.rpartition(".")[2]
        if style == "moe_tp_experts":
            found[pattern] = Style("experts", parts=2, names=("gate_up_proj", "down_proj"))
        elif f"{region_of(pattern)}" in shipped or style in _IN_REGION:
            continue  # a parameter of the experts; or whole
        elif style in ("colwise", "colwise_gather_output", "colwise_rep"):
            blocks = _heads(model, key)
            gathers = style != "colwise"
            found[pattern] = Style(
                "column", blocks=None if gathers else blocks, is_shared=key in ("k_proj", "v_proj"), gathers=gathers
            )
        elif style == "packed_colwise":
            found[pattern] = Style("column", parts=2)
        elif style in ("rowwise", "rowwise_split_input", "rowwise_rep"):
            found[pattern] = Style(
                "row", splits=style != "rowwise", blocks=_heads(model, key) if style == "rowwise" else None
            )
        elif style == "embedding_rowwise":
            found[pattern] = Style("vocabulary")
        else:
            raise ValueError(
                f"{type(model).__name__}'s plan has the unknown style {style!r} for {pattern}; pass a plan of your own"
            )
    return found


def _heads(model: Any, key: str) -> int | None:
    """The attention heads that a matrix of this name consists of; None for other matrices."""
    config = model.config
    return {
        "q_proj": config.num_attention_heads,
        "o_proj": config.num_attention_heads,
        "k_proj": getattr(config, "num_key_value_heads", config.num_attention_heads),
        "v_proj": getattr(config, "num_key_value_heads", config.num_attention_heads),
    }.get(key)


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
