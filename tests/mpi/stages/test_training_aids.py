"""What accompanies the training of a model in stages: loss scaling, mixed precision, activation checkpointing, frozen parameters."""

from contextlib import nullcontext

import pytest
import torch

import mpitrain
from collectives import Communicator
from mpitrain.models import GPT, GPTConfig
from mpitrain.stages import pipeline
from tests.mpi.stages.test_parity import FEW, MICRO, adamw, batches, gpt, targets, tied_llama


@pytest.mark.rest
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_activations_that_are_computed_again_give_the_same_bits(comm: Communicator, schedule: str) -> None:
    mesh = mpitrain.mesh(comm, pp=2)
    found = []
    for what in (None, "block", "attention"):
        model = tied_llama(FEW)
        pipe = pipeline(model, mesh["pp"], schedule, micro_batches=MICRO)
        mpitrain.fully_shard(model, mesh, stage=2)
        if what is not None:
            mpitrain.checkpoint_activations(model, model.blocks, what=what)  # type: ignore[arg-type]
        tokens = batches(0, mesh["dp_shard"].rank)
        loss = pipe.step(tokens, last=targets(tokens))
        found.append([loss, *(param.grad for param in model.parameters())])
    for others in found[1:]:
        for first, other in zip(found[0], others, strict=True):
            assert torch.equal(first, other)  # type: ignore[arg-type]
    mesh.free()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("division", "is_sharded_first"), [([1, 1], False), ([2, 0], True), ([1, 1, 0, 2], False)], ids=str
)
def test_blocks_are_found_in_stages_that_have_one_or_none(
    comm: Communicator, division: list[int], is_sharded_first: bool
) -> None:
    mesh = mpitrain.mesh(comm, pp=2)
    found = []
    for what in (None, "block", "attention"):
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab=50, context=16, width=24, layers=sum(division), heads=2))
        schedule = "1f1b" if len(division) == 2 else "interleaved"
        pipe = pipeline(model, mesh["pp"], schedule, micro_batches=2, division=division)
        if is_sharded_first:
            mpitrain.fully_shard(model, mesh)
        if what is not None:
            mpitrain.checkpoint_activations(model, what=what)  # type: ignore[arg-type]
            # The attribute `forward` of a block computes its activations again. Where modules show shards, all have one.
            with mpitrain.unshard(model) if is_sharded_first else nullcontext():
                marked = [part for block in model.blocks for part in block.modules() if "forward" in vars(part)]
            assert len(marked) == len(list(model.blocks.children()))
        if not is_sharded_first:
            mpitrain.fully_shard(model, mesh)
        tokens = batches(0)[:2]
        loss = pipe.step(tokens, last=targets(tokens))
        found.append([loss, *(param.grad for param in model.parameters())])
    for others in found[1:]:
        for first, other in zip(found[0], others, strict=True):
            assert torch.equal(first, other)  # type: ignore[arg-type]
    mesh.free()


@pytest.mark.ranks(2, 4)
def test_an_overflow_in_one_stage_skips_the_step_of_all(comm: Communicator) -> None:
    mesh, plain, model = mpitrain.mesh(comm, pp=2), gpt(FEW), gpt(FEW)
    pipe = pipeline(model, mesh["pp"], "zb-h1", micro_batches=MICRO)
    mpitrain.fully_shard(model, mesh)
    optimizer, reference = adamw(model), adamw(plain)
    scaler = mpitrain.GradScaler(model, scale=2.0**10)
    for step in range(3):
        tokens = batches(0)
        pipe.step(tokens, last=targets(tokens), scale=scaler.scale)
        if step == 1:  # on the first stage alone
            for name, param in model.named_parameters():
                if name.startswith("blocks.0.") and param.grad is not None and param.numel():
                    param.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.value == 2.0 ** (10 - (step > 0))
        if step != 1:
            for rows in tokens:
                plain(rows, rows.roll(-1, 1)).backward()
            reference.step()
            reference.zero_grad()
    whole = mpitrain.full_state_dict(model)
    for name, value in plain.state_dict().items() if comm.rank == 0 else ():
        torch.testing.assert_close(whole[name], value, rtol=0, atol=2e-5)
    mesh.free()


@pytest.mark.ranks(2, 4)
def test_bf16_with_fp32_masters(comm: Communicator) -> None:
    mesh, plain, model = mpitrain.mesh(comm, pp=2), tied_llama(FEW), tied_llama(FEW)
    pipe = pipeline(model, mesh["pp"], "1f1b", micro_batches=MICRO)
    mpitrain.fully_shard(model, mesh, mp_policy=mpitrain.MixedPrecisionPolicy(torch.bfloat16))
    tokens = batches(0)
    expected = sum(plain(rows, rows.roll(-1, 1)).item() for rows in tokens)
    assert pipe.step(tokens, last=targets(tokens)).sum().item() == pytest.approx(expected, rel=5e-3)
    assert all(param.dtype == torch.float32 for param in model.parameters())
    mesh.free()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("num_frozen", [1, 3])
def test_frozen_parameters(comm: Communicator, num_frozen: int) -> None:
    """Some blocks, or the whole first stage."""
    plain, model = tied_llama(FEW), tied_llama(FEW)
    for each in (plain, model):
        each.wte.requires_grad_(False)
        each.blocks[:num_frozen].requires_grad_(False)
    pipe = pipeline(model, comm, "zb-h1", micro_batches=MICRO)
    tokens = batches(0)
    for rows in tokens:
        plain(rows, rows.roll(-1, 1)).backward()
    pipe.step(tokens, last=targets(tokens))
    whole = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        expected = whole[name].grad
        assert (param.grad is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(param.grad, expected, rtol=1e-4, atol=1e-6)
