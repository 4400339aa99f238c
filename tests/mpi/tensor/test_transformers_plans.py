"""Each style of the library's plans: the loss, all gradients and the logits of a cut model are those of a plain one."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extent import extent
from tiny_transformers import LENGTH, batch, tiny

import mpitrain
from collectives import Communicator
from mpitrain.placement.parts import part_of

transformers = pytest.importorskip("transformers", minversion="5")

SHORT = [
    ("deepseek_v2", False),  # mla_kv_a_proj; experts beside shared experts
    ("gemma2", True),  # an embedding with a scale; the logits are capped
    ("gpt_oss", True),  # a plan of ours: sinks, and experts with biases
    ("granite_swa", False),  # local_params: sinks
    ("inkling_text", True),  # all_reduce: shared experts in stacked matrices; a second size of the vocabulary
    ("llama4_text", True),  # packed_rowwise: experts whose matrices are stored transposed
    ("longcat_flash", False),  # moe_identity_expert
    ("phi3", True),  # colwise_gather_output and rowwise_split_input in one region
    ("qwen3_next", True),  # modules without a region, which mix tokens
    ("qwen4_exp_text", False),  # embedding_colwise; a row layer alone
    ("t5gemma", True),  # a loss of unshifted labels
]
DOCS = (Path(__file__).parents[3] / "docs" / "parallel.md").read_text()
ALL = re.findall(r"```text\n(afmoe .*?)```", DOCS, re.DOTALL)[0].split()
CASES = extent(SHORT, [(name, sequence) for name in ALL for sequence in (False, True)])


def same(comm: Communicator, make: Callable[[], Any], *, sequence: bool, **inputs: Any) -> Any:
    """Compare one step of a cut model with a plain one; returns the cut one."""
    reference, model = make(), make()
    mpitrain.tensor_parallel(model, comm, sequence=sequence)
    expected, found = (each(**batch(), **inputs) for each in (reference, model))
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    expected.loss.backward()
    found.loss.backward()
    num_cut = 0
    for (name, whole), mine in zip(reference.named_parameters(), model.parameters(), strict=True):
        part = part_of(mine)
        assert part is not None
        if whole.grad is None or mine.grad is None:
            assert whole.grad is None and mine.grad is None, name
            continue
        num_cut += whole.shape != mine.shape
        assert (part.take(whole.grad) - mine.grad).abs().max() <= 1e-4 * whole.grad.abs().max() + 1e-7, name
    assert num_cut >= 3
    tokens = {"input_ids": batch()["input_ids"][:, :7]}
    if model.config.is_encoder_decoder:
        tokens["decoder_input_ids"] = tokens["input_ids"][:, :5]
    with torch.no_grad():
        torch.testing.assert_close(model(**tokens).logits, reference(**tokens).logits, rtol=1e-4, atol=1e-5)
    return model


@pytest.mark.rest
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "sequence"), CASES)
def test_a_style(comm: Communicator, name: str, sequence: bool) -> None:
    same(comm, lambda: tiny(name), sequence=sequence)


@pytest.mark.ranks(*extent([2], [2, 4]))
def test_by_messages(two_nodes: Communicator) -> None:
    """Between nodes. The experts are in the block itself, so each rank routes its own tokens."""
    same(two_nodes, lambda: tiny("gemma4_text"), sequence=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", extent(["gpt_oss"], ["gpt_oss", "llama", "llama4_text", "phi3", "qwen3_next"]))
def test_one_head_of_keys_for_all_ranks(comm: Communicator, name: str) -> None:
    same(comm, lambda: tiny(name, num_key_value_heads=1), sequence=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence", [False, True])
def test_the_loss_that_balances_experts(comm: Communicator, sequence: bool) -> None:
    """It is computed from the router's outputs for all tokens."""
    model = same(comm, lambda: tiny("mixtral", router_aux_loss_coef=0.5), sequence=sequence, output_router_logits=True)
    plain = model(**batch()).loss.item()
    assert model(**batch(), output_router_logits=True).loss.item() > plain + 0.1


@pytest.mark.ranks(2, 3)
def test_inner_features_of_experts_that_do_not_divide(comm: Communicator) -> None:
    """Each rank has rows of a multiple of 16 bytes, which torch's grouped product needs."""
    sizes = {"intermediate_size": 20, "num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}
    same(comm, lambda: tiny("mixtral", **sizes), sequence=True)


@pytest.mark.ranks(2)
def test_the_loss_is_the_library_s(comm: Communicator) -> None:
    reference, model = tiny("llama"), mpitrain.tensor_parallel(tiny("llama"), comm)
    tokens, labels = batch().values()
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    for more in ({}, {"num_items_in_batch": 5}, {"num_items_in_batch": torch.tensor(7)}, {"ignore_index": 9}):
        given = {"labels": labels.clamp(min=0), **more} if "ignore_index" in more else {"labels": labels, **more}
        expected = reference(input_ids=tokens, **given)
        found = model(input_ids=tokens, **given)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
        assert found.logits is None and expected.logits is not None
    found = model(input_ids=tokens, labels=labels, shift_labels=shifted.roll(1, 0))
    torch.testing.assert_close(
        found.loss,
        reference(input_ids=tokens, labels=labels, shift_labels=shifted.roll(1, 0)).loss,
        rtol=1e-5,
        atol=1e-6,
    )
    loss, logits = model(tokens, labels=labels, return_dict=False)
    assert logits is None and loss.ndim == 0
    assert model(tokens).logits.shape == (2, LENGTH, model.config.vocab_size)  # after labels, too
    model.loss_function = lambda logits, **_: logits.square().mean()
    torch.testing.assert_close(model(tokens, labels=labels).loss, reference(tokens).logits.square().mean())


@pytest.mark.ranks(2)
def test_text_is_the_plain_model_s(comm: Communicator) -> None:
    reference, model = tiny("gemma3_text").eval(), mpitrain.tensor_parallel(tiny("gemma3_text"), comm).eval()
    tokens = batch()["input_ids"]
    each = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    assert torch.equal(model.generate(tokens, **each), reference.generate(tokens, **each))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "features of a grouped product": (
        "mixtral", {"intermediate_size": 4},
        r"layers\.0\.mlp\.experts\.gate_up_proj has 4 inner features; on 2 ranks torch's grouped product needs a multiple of 4",
    ),
    "heads": (
        "llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24},
        r"2 ranks cannot share the 3 blocks \(heads\) of model\.layers\.0\.self_attn\.q_proj\.weight equally",
    ),
    "two sums": ("doge", {}, r"dt_proj and model\.layers\.0\.self_attn\.o_proj by rows, but .* can have only one sum"),
    "no plan": ("bloom", {"n_layer": 1}, "BloomForCausalLM brings no plan along"),
}  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit(comm: Communicator, case: str) -> None:
    name, more, message = REFUSED[case]
    model = tiny(name, **more)
    with pytest.raises(ValueError, match=message):
        mpitrain.tensor_parallel(model, comm)
    assert all(part_of(param) is None for param in model.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "message"), [
    ("gemma3n_text", r"needs a stream of the shape \(batch, tokens, features\) .* pass sequence=False"),
    ("inkling2_text", r"has a second one, block_states of shape \(2, 12, 0, 32\); pass sequence=False"),
])  # fmt: skip
def test_a_model_that_needs_whole_sequences(comm: Communicator, name: str, message: str) -> None:
    same(comm, lambda: tiny(name), sequence=False)
    model = mpitrain.tensor_parallel(tiny(name), comm)
    with pytest.raises(ValueError, match=message):
        model(**batch())


@pytest.mark.ranks(2)
def test_small_experts_without_the_grouped_product(comm: Communicator) -> None:
    def make() -> Any:
        model = tiny("mixtral", intermediate_size=6)
        model.set_experts_implementation("eager")
        return model

    same(comm, make, sequence=True)


@pytest.mark.ranks(2)
def test_a_head_alone(comm: Communicator) -> None:
    """The library has a plan for the head of some models, and none for their layers."""
    if comm.rank == 0:
        with pytest.warns(UserWarning, match="no plan for the layers of Lfm2ForCausalLM"):
            mpitrain.tensor_parallel(tiny("lfm2"), comm)
    else:
        mpitrain.tensor_parallel(tiny("lfm2"), comm)
