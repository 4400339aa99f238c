"""Plans of Hugging Face transformers models: those that the library ships, and ours for models without one.

The library's plan of a model gives names of modules and parameters a style (`transformers.distributed.tensor_parallel`). This module
translates them. Layers are not translated alone: a region is a module around column and row layers (see `mpitrain.tensor`), and within
it each rank's gradient of whatever is not cut is a part of a sum anyway. So styles that say this need nothing more.
"""

from typing import Any

import torch
from torch import nn

from mpitrain.tensor.plan import Plan, Style, is_within, parent_of
from mpitrain.tensor.transformers.loss import computes_loss
from mpitrain.tensor.transformers.tables import OUR_PLANS, missing_styles

COLUMN_STYLES = frozenset({"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise", "embedding_colwise"})
ROW_STYLES = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise"})
OTHER_STYLES = {
    "embedding_rowwise": Style("vocabulary"),
    "moe_tp_experts": Style("region"),
    "all_reduce": Style("region"),
    "moe_identity_expert": Style("once"),
}
UNCUT_STYLES = frozenset(
    {"replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "sequence_parallel", "local_params"}
)
_PACKED = ("packed_colwise", "packed_rowwise")
_WHOLE_OUTPUT = ("colwise_gather_output", "colwise_rep", "embedding_colwise")
_WHOLE_INPUT = ("rowwise_split_input", "rowwise_rep")


def plan_of_transformers(model: Any, size: int) -> Plan | None:
    """The plan of a transformers model for `size` ranks; None for any other model, or one without a plan.

    ValueError for an unknown style, and for one that does not fit the module.
    """
    if not any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__):
        return None
    ours = OUR_PLANS.get(model.config.model_type)
    plan = _shipped(model, size) if ours is None else ours(model)
    return {**plan, **_ends(model)} if plan else None


def _ends(model: Any) -> dict[str, Style]:
    """The styles of the embedding and the head, and of the loss that the model computes."""
    tokens, head = model.get_input_embeddings(), model.get_output_embeddings()
    found: dict[str, Style] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.weight is tokens.weight:  # several modules in T5
            found[name] = Style("vocabulary")
        elif module is head:
            found[name] = Style("column", gathers=True)
            if computes_loss(model):
                found[""] = Style("loss", names=(name,))
    return found


def _shipped(model: Any, size: int) -> dict[str, Style]:
    """The library's own plan. Its patterns may match nothing, such as those of experts in a model without them."""
    prefix = model.base_model_prefix + "." if model.base_model is not model else ""
    rules = {prefix + name: style for name, style in missing_styles(model.config).items()} | (model.tp_plan or {})
    found: dict[str, Style] = {}
    modules = dict(model.named_modules())
    for names, is_module in ((modules, True), (dict(model.named_parameters()), False)):
        for name, module in names.items():
            style = rules.get(_pattern(name))
            if style is None or style in UNCUT_STYLES:
                continue
            if style not in COLUMN_STYLES | ROW_STYLES | OTHER_STYLES.keys():
                raise ValueError(
                    f"{type(model).__name__}'s plan has the unknown style {style!r} for {name}; pass plan= with a plan of your own"
                )
            owner = modules[parent_of(name)]
            if style in OTHER_STYLES:
                found[name] = OTHER_STYLES[style]
            elif is_module:
                found[name] = _layer(owner, name, module, style)
            else:
                is_expert = rules.get(_pattern(parent_of(name))) == "moe_tp_experts"
                found[name] = _parameter(owner, name, module, style, size, is_expert=is_expert)
    _check_rows(model, found)
    return _leave_out(model, found)


def _pattern(name: str) -> str:
    """A name in the way of the library's plans, where `*` stands for a number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _layer(owner: nn.Module, name: str, layer: Any, style: str) -> Style:
    """The style of a linear layer or an embedding."""
    kind, parts = "row" if style in ROW_STYLES else "column", 2 if style in _PACKED else 1
    if style in _WHOLE_OUTPUT or style in _WHOLE_INPUT:
        return Style(kind, gathers=style in _WHOLE_OUTPUT, splits=style in _WHOLE_INPUT)  # type: ignore[arg-type]
    key = name.rpartition(".")[2]
    features = getattr(layer, "in_features" if kind == "row" else "out_features", 0)
    blocks = _heads(owner, name, key, features)
    return Style(kind, parts=parts, blocks=blocks, is_shared=key in _KEYS_AND_VALUES)  # type: ignore[arg-type]


def _parameter(owner: Any, name: str, param: nn.Parameter, style: str, size: int, *, is_expert: bool) -> Style:
    """The style of a parameter that its module uses itself."""
    dim = param.ndim - 1 if style in ROW_STYLES else max(param.ndim - 2, 0)
    if not is_expert:
        parts = 2 if style in _PACKED and param.ndim > 1 else 1
        return Style("parameter", dim=dim, parts=parts, blocks=_heads(owner, name, name, param.shape[dim]))
    # Two matrices in one parameter lie end to end, or their rows alternate. The library's style does not always tell it.
    is_double = "gate_up" in name
    parts = 2 if is_double and getattr(owner, "is_concatenated", True) else 1
    length = param.shape[dim] // (2 if is_double else 1)
    return Style(
        "parameter", dim=dim, parts=parts, blocks=_aligned(owner, name, length, param.dtype, size), is_even=False
    )


_KEYS_AND_VALUES = ("k_proj", "v_proj")
_HEAD_LENGTHS = ("head_dim", "head_size", "v_head_dim", "qk_head_dim")
_OUTPUTS_OF_ATTENTION = ("o_proj", "dense", "out_proj", "c_proj")


def _heads(owner: Any, name: str, key: str, features: int) -> int | None:
    """The attention heads that a matrix of an attention module consists of; None in other modules."""
    length = next((getattr(owner, key) for key in _HEAD_LENGTHS if isinstance(getattr(owner, key, None), int)), None)
    output = next((getattr(owner, key) for key in _OUTPUTS_OF_ATTENTION if hasattr(owner, key)), None)
    if length is None or not isinstance(output, nn.Linear):
        return None
    of_value = getattr(owner, "v_head_dim", length)
    if key in _KEYS_AND_VALUES:
        heads = features // (of_value if key == "v_proj" else length)
    else:
        heads = output.in_features // of_value
    if not heads or features % heads:
        raise ValueError(f"{name} has {features} features, which are not {heads} equal heads")
    return heads


def _aligned(owner: Any, name: str, length: int, dtype: torch.dtype, size: int) -> int | None:
    """The number of blocks in which to cut the inner features of experts, so that torch's grouped product takes each rank's part.

    It needs rows of a multiple of 16 bytes. Blocks of 8 features suit every dtype from 2 bytes.
    """
    for features in (8, max(16 // dtype.itemsize, 1)):
        if length % features == 0 and length // features >= size:
            return length // features
    if getattr(getattr(owner, "config", None), "_experts_implementation", None) == "grouped_mm":
        raise ValueError(
            f"{name} has {length} inner features; on {size} ranks torch's grouped product needs a multiple of "
            f"{16 // dtype.itemsize} features on each rank. Use fewer ranks, or model.set_experts_implementation('eager')"
        )
    return None


def _leave_out(model: Any, plan: dict[str, Style]) -> dict[str, Style]:
    """A plan without the modules that have a row layer and an uncut parameter of their own.

    A forward may use such a parameter before the sum over the ranks, or after it, where its gradient is no part of a sum.
    """
    owners = {parent_of(name) for name, style in plan.items() if style.kind == "row"}
    modules = dict(model.named_modules())
    left = [
        owner
        for owner in owners
        if any(
            f"{owner}.{key}" not in plan
            for key in modules[owner]._parameters
            if modules[owner]._parameters[key] is not None
        )
    ]
    return {name: style for name, style in plan.items() if not any(is_within(name, owner) for owner in left)}


def _check_rows(model: Any, plan: dict[str, Style]) -> None:
    """ValueError if the plan cuts two layers of one module by rows, so that the first sum over the ranks is in the middle."""
    rows: dict[str, list[str]] = {}
    for name, style in plan.items():
        if style.kind == "row" and not style.splits:
            rows.setdefault(parent_of(name), []).append(name)
    for module, names in rows.items():
        if len(names) > 1:
            raise ValueError(
                f"{type(model).__name__}'s plan cuts {' and '.join(names)} by rows, but {module} can have only one sum over ranks; "
                "pass plan= with a plan of your own"
            )
