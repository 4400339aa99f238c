"""Plans of Hugging Face transformers models: those that the library ships, and ours for models without one."""

from typing import Any

from torch import nn

from mpitrain.plans.stage_plan import StagePlan

_OURS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "gpt2": (("wte", "wpe", "drop"), "h", ("ln_f",)),
}
"""By the type of a model: the modules of its base model before the blocks, the blocks, and the modules after them."""


def stage_plan_of_transformers(model: Any) -> StagePlan | None:
    """The plan of a transformers model with a list of blocks; None for any other model.

    The library's own plan is `base_model_pp_plan` of a configuration. What a class has beside its base model, such as the head, is in
    the last stage. ValueError for a model without a plan, and for one whose loss needs numbers of all blocks.
    """
    if not any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__):
        return None
    name, config, base = type(model).__name__, model.config, model.base_model
    if config.model_type in _OURS:
        first, blocks, last = _OURS[config.model_type]
    else:
        children = [key for key in config.base_model_pp_plan or {} if hasattr(base, key)]
        lists = [key for key in children if isinstance(getattr(base, key), nn.ModuleList)]
        if len(lists) != 1:
            raise ValueError(
                f"transformers has no plan of stages for {name} (base_model_pp_plan of {type(config).__name__}); pass "
                "plan=, a mpitrain.stages.StagePlan"
            )
        blocks, at = lists[0], children.index(lists[0])
        first, last = tuple(children[:at]), tuple(children[at + 1 :])
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            f"the loss of {name} needs the router logits of all blocks; set model.config.output_router_logits = False"
        )
    prefix = "" if base is model else model.base_model_prefix + "."
    heads = () if base is model else tuple(key for key in model._modules if key != model.base_model_prefix)
    plan = StagePlan(
        first=tuple(prefix + key for key in first),
        blocks=prefix + blocks,
        last=(*(prefix + key for key in last), *heads),
        stream="inputs_embeds",
        input="input_ids",
        options={"use_cache": False},
    )
    names = (*plan.first, plan.blocks, *plan.last)
    named = {param for each in names for param in model.get_submodule(each).parameters()}
    if left := [each for each, param in model.named_parameters() if param not in named]:
        raise ValueError(
            f"{name} computes with {', '.join(left[:3])} outside of its blocks, and transformers' plan of stages does not "
            "name them; a pipeline cannot divide this model"
        )
    return plan
