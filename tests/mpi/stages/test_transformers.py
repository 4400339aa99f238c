"""Models of the transformers library in stages: the losses, gradients and weights are those of a plain model."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from extent import extent
from tiny_transformers import SPECIAL, batch, tiny

import mpitrain
from collectives import Communicator
from mpitrain.placement.fills import Normal
from mpitrain.stages import pipeline

transformers = pytest.importorskip("transformers", minversion="5")

MICRO = 4
SHORT = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen2", {}),
    ("gemma2", {}),  # the kind of attention differs by the number of a block; the logits are limited; tied
    (
        "granite",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0},
    ),  # factors before and after the blocks, without a module
    ("gpt_neox", {}),  # dropout before the blocks
    ("gpt2", {}),  # a plan of ours: the embedding of positions is added to any stream
]
DOCS = (Path(__file__).parents[3] / "docs" / "parallel.md").read_text()
ALL = re.findall(r"```text\n(afmoe .*?)```", DOCS, re.DOTALL)[-1].split()
CASES = extent(SHORT, [*SHORT, *((name, {}) for name in ALL)])


def made(name: str, more: dict[str, Any]) -> Any:
    has_kinds = any(key.endswith("layer_types") for key in SPECIAL.get(name, {}))  # of two blocks
    sizes = {} if has_kinds else {"n_layer": 4} if name == "gpt2" else {"num_hidden_layers": 4}
    return tiny(name, **sizes, **more)


def batches(step: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    tokens = [torch.randint(3, 100, (2, 8 + micro % 2), generator=generator) for micro in range(MICRO)]
    return [{"input_ids": rows, "attention_mask": torch.ones_like(rows)} for rows in tokens]


def labels(inputs: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    return [{"labels": each["input_ids"]} for each in inputs]


@pytest.mark.rest
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("name", "more"), CASES)
def test_steps_beside_the_plain_model(comm: Communicator, name: str, more: dict[str, Any]) -> None:
    for schedule in ("1f1b", "zb-h1") if comm.size > 1 else ("interleaved",):
        plain, model = made(name, more), made(name, more)
        pipe = pipeline(model, comm, schedule, micro_batches=MICRO)
        whole = dict(plain.named_parameters(remove_duplicate=False))
        optimizers = [torch.optim.AdamW(each.parameters(), lr=3e-3, eps=1e-4) for each in (plain, model)]
        for step in range(3 if (name, more) in SHORT else 1):  # rounding grows fast in some of the others
            inputs, expected = batches(step), 0.0
            for each, more_of in zip(inputs, labels(inputs), strict=True):
                loss = plain(**each, **more_of).loss
                loss.backward()
                expected += loss.item()
            assert pipe.step(inputs, last=labels(inputs)).sum().item() == pytest.approx(expected, rel=1e-6)
            for key, param in model.named_parameters():
                grad = whole[key].grad
                if grad is not None and grad.abs().max() > 0:
                    assert param.grad is not None, key
                    assert (param.grad - grad).abs().max() <= 1e-9 + 1e-4 * grad.abs().max(), key
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for key, param in model.named_parameters():
            torch.testing.assert_close(param, whole[key], rtol=0, atol=2e-5)


@pytest.mark.ranks(2)
def test_the_loss_and_the_head_are_computed_in_the_last_stage(comm: Communicator) -> None:
    model = tiny("llama", num_hidden_layers=4)
    pipe = pipeline(model, comm, micro_batches=MICRO)
    calls = []
    model.loss_function = lambda **given: calls.append(given["labels"]) or given["logits"].sum()
    inputs = batches(0)
    pipe.step(inputs, last=labels(inputs))
    is_last = comm.rank == comm.size - 1
    assert len(calls) == (MICRO if is_last else 0)
    assert hasattr(model, "lm_head") == is_last
    assert hasattr(model.model, "norm") == is_last
    assert hasattr(model.model, "embed_tokens") == (comm.rank == 0)
    assert hasattr(model.model, "rotary_emb")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [None, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_each_rank_makes_its_own_modules_alone(comm: Communicator, stage: int | None, tied: bool) -> None:
    plain = tiny("llama", num_hidden_layers=4, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(plain.config)
    mesh = mpitrain.mesh(comm, pp=comm.size)
    pipe = pipeline(model, mesh["pp"], micro_batches=MICRO)
    if stage is not None:
        for block in model.model.layers:
            mpitrain.fully_shard(block, mesh, stage=stage)
        mpitrain.fully_shard(model, mesh, stage=stage)
    for each in (plain, model):
        mpitrain.initialize(each, lambda name: Normal(0.05), seed=3)
    plain.model.rotary_emb.__init__(config=plain.config)
    model.model.rotary_emb.__init__(config=plain.config)
    count = sum(param.numel() for param in model.parameters())
    assert comm.size == 1 or count < 0.6 * sum(param.numel() for param in plain.parameters())
    assert not any(param.is_meta for param in model.parameters())
    inputs = batches(0)
    expected = sum(plain(**each, **more_of).loss.item() for each, more_of in zip(inputs, labels(inputs), strict=True))
    assert pipe.step(inputs, last=labels(inputs)).sum().item() == pytest.approx(expected, rel=1e-6)
    mesh.free()


@pytest.mark.ranks(1)
def test_what_is_refused(comm: Communicator) -> None:
    if comm.size > 1:
        pytest.skip("the first stage alone sees what a block returns, so this error ends a job of several ranks")

    def refused(error: type[Exception], text: str, model: Any) -> None:
        with pytest.raises(error, match=text):
            pipeline(model, comm, "interleaved", micro_batches=1).step([batch()])

    refused(ValueError, "transformers has no plan of stages for BloomForCausalLM", tiny("bloom"))
    refused(ValueError, "computes with model.embed_tokens_per_layer.weight, .* does not name", tiny("gemma3n_text"))
    refused(ValueError, "output_router_logits = False", tiny("mixtral", output_router_logits=True))
    refused(TypeError, "GlmMoeDsaDecoderLayer returns tuple", tiny("glm_moe_dsa", num_hidden_layers=4))
