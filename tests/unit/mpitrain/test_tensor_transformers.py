"""The library's plans: every style of the installed version is known, and how each is translated."""

import copy
from typing import Any

import pytest
from tiny_transformers import tiny

from mpitrain.tensor.plan import Style
from mpitrain.tensor.transformers import plans
from mpitrain.tensor.transformers.loss import computes_loss
from mpitrain.tensor.transformers.plans import plan_of_transformers

pytest.importorskip("transformers", minversion="5")


def plan(name: str, size: int = 2, **more: Any) -> dict[str, Style]:
    found = plan_of_transformers(tiny(name, **more), size)
    assert found is not None
    return dict(found)


def test_every_style_of_tensor_parallelism_is_known() -> None:
    from transformers.distributed.expert_parallel import ExpertParallelLayer
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    expected = {name for name, style in ALL_PARALLEL_STYLES.items() if not isinstance(style, ExpertParallelLayer)}
    known = [
        plans.COLUMN_STYLES,
        plans.ROW_STYLES,
        plans.OTHER_STYLES,
        plans.UNCUT_STYLES,
    ]
    assert expected
    assert set().union(*known) == expected
    assert sum(map(len, known)) == len(expected)


@pytest.mark.parametrize("style", ["colwise_of_tomorrow", "grouped_gemm"])
def test_an_unknown_style_is_an_error(style: str) -> None:
    model = tiny("llama")
    model._tp_plan["model.layers.*.mlp.up_proj"] = style
    with pytest.raises(
        ValueError, match=rf"LlamaForCausalLM's plan has the unknown style '{style}' for model\.layers\.0\.mlp\.up_proj"
    ):
        plan_of_transformers(model, 2)


def test_heads_of_an_attention() -> None:
    found = plan("llama", num_attention_heads=8, head_dim=4)
    layer = "model.layers.1.self_attn"
    assert found[f"{layer}.q_proj"] == Style("column", blocks=8)
    assert found[f"{layer}.k_proj"] == Style("column", blocks=2, is_shared=True)
    assert found[f"{layer}.o_proj"] == Style("row", blocks=8)
    assert found["model.layers.1.mlp.up_proj"] == Style("column")
    assert found["lm_head"] == Style("column", gathers=True)
    assert found["model.embed_tokens"] == Style("vocabulary")
    assert found[""] == Style("loss", names=("lm_head",))


def test_matrices_in_one_parameter() -> None:
    """End to end; with alternate rows; stored transposed."""
    experts = "layers.1.mlp.experts"
    assert plan("qwen3_moe")[f"model.{experts}.gate_up_proj"] == Style(
        "parameter", dim=1, parts=2, blocks=4, is_even=False
    )
    assert plan("qwen3_moe")[f"model.{experts}.down_proj"] == Style("parameter", dim=2, blocks=4, is_even=False)
    found = plan("gpt_oss")
    assert found[f"model.{experts}.gate_up_proj"] == Style("parameter", dim=2, blocks=8, is_even=False)
    assert found[f"model.{experts}.down_proj_bias"] == Style("once")
    transposed = plan("llama4_text")["model.layers.1.feed_forward.experts.gate_up_proj"]
    assert transposed == Style("parameter", dim=2, parts=2, blocks=8, is_even=False)


def test_a_module_whose_own_parameter_may_follow_the_sum_stays_whole() -> None:
    found = plan("inkling_text")
    assert not any(name.startswith("model.layers.0.mlp") for name in found)
    assert found["model.layers.1.mlp.shared_experts"] == Style("region")


@pytest.mark.parametrize(
    ("name", "expected"), [("llama", True), ("gemma2", True), ("t5gemma", True), ("t5", False), ("inkling_text", False)]
)
def test_which_losses_are_computed_from_parts_of_the_logits(name: str, expected: bool) -> None:
    model = tiny(name, decoder_start_token_id=0)
    assert computes_loss(model) is expected
    model = copy.copy(model)
    model.loss_function = lambda **kwargs: None
    assert not computes_loss(model)


def test_a_model_without_a_plan() -> None:
    assert plan_of_transformers(tiny("bloom", n_layer=1), 2) is None
