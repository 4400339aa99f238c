"""A model in stages with slices has the bits of one process without a pipeline. Rank 0 computes them by itself, with plain torch."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
import mpitrain
from collectives import Communicator
from mpitrain.models import GPT, GPTConfig, LanguageModel
from mpitrain.models.gpt import Block
from mpitrain.models.llama import Llama
from mpitrain.models.sizes import LlamaConfig
from mpitrain.placement.axes import group_of
from mpitrain.stages import pipeline
from tests.helpers.checkpoints import tensors
from tests.helpers.main_job import metrics, outcome
from tests.helpers.small_trainers import maker

COUNT, STEPS = 8, 3
# The head's product is large enough for the other library of products.py, whose bits differ from those of torch's own layers.
SIZES = {"vocab": 8192, "context": 16, "width": 64, "layers": 3, "heads": 2}


def gpt() -> LanguageModel:
    torch.manual_seed(0)
    return GPT(GPTConfig(**SIZES, tied=False))


def tied_gpt() -> LanguageModel:
    torch.manual_seed(0)
    return GPT(GPTConfig(**SIZES, tied=True))


def llama() -> LanguageModel:
    torch.manual_seed(0)
    return Llama(LlamaConfig(**SIZES, tied=False))


def tied_llama() -> LanguageModel:
    torch.manual_seed(0)
    return Llama(LlamaConfig(**SIZES, tied=True))


def batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        yield torch.randint(0, SIZES["vocab"], (COUNT, 2, SIZES["context"]), generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)


def expected(model: LanguageModel, *, bf16: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of all slices of all steps, and the parameters after them."""
    optimizer, params, losses = sgd(model), list(model.parameters()), []
    for tokens in batches():
        of_slices = []
        for rows in tokens:
            values = {name: param.detach().bfloat16() if bf16 else param for name, param in model.named_parameters()}
            of_model = {name: value.requires_grad_() for name, value in values.items()}
            loss = torch.func.functional_call(model, of_model, (rows, rows.roll(-1, 1)))
            of_slices.append([grad.float() for grad in torch.autograd.grad(loss, list(of_model.values()))])
            losses.append(loss.item())
        for param, *nodes in zip(params, *of_slices, strict=True):
            while len(nodes) > 1:
                nodes = [left + right for left, right in zip(nodes[::2], nodes[1::2], strict=True)]
            param.grad = nodes[0] / COUNT
        optimizer.step()
    return losses, {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.rest
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("make", "schedule", "stage", "storage", "bf16"),
    [
        (gpt, "gpipe", 1, "resident", False),
        (tied_llama, "1f1b", 3, "private", True),
        (llama, "interleaved", 0, "auto", False),
        (tied_gpt, "interleaved", 3, "private", False),
        (tied_gpt, "zb-h1", 3, "resident", False),
        (tied_llama, "zb-v", 3, "private", True),
        (tied_gpt, "dualpipe-v", 0, "auto", False),
    ],
)
def test_bits_of_one_process(
    comm: Communicator, make: Callable[[], LanguageModel], schedule: str, stage: int, storage: str, bf16: bool
) -> None:
    model, mesh = make(), mpitrain.mesh(comm, pp=2)
    data = mesh["dp_shard"]
    pipe = pipeline(model, mesh["pp"], schedule, micro_batches=COUNT // data.size)
    policy = mpitrain.MixedPrecisionPolicy(torch.bfloat16) if bf16 else None
    for module in (*model.blocks.children(), model):
        mpitrain.fully_shard(module, mesh, stage=stage, storage=storage, slices=COUNT, mp_policy=policy)  # type: ignore[arg-type]
    optimizer, losses = sgd(model), torch.zeros(STEPS, COUNT, dtype=torch.float64)
    for step, tokens in enumerate(batches()):
        mine = [number for number, _ in mpitrain.rounds(model)]
        optimizer.zero_grad()
        losses[step, mine] = pipe.step(
            [tokens[number] for number in mine],
            last=[{"targets_BL": tokens[number].roll(-1, 1)} for number in mine],
        )
        optimizer.step()
    data.all_reduce(losses)
    found = mpitrain.full_state_dict(model)
    mesh.free()
    if comm.rank == 0:
        of_one, params = expected(make(), bf16=bf16)
        assert losses.flatten().tolist() == of_one
        for name, value in params.items():
            assert torch.equal(found[name], value), name


def with_draws() -> LanguageModel:
    """The embedding, each block and the head draw numbers; some blocks draw them twice. Batch norms keep running statistics."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**SIZES, "vocab": 64}, tied=False))  # a short head, so that each stage has blocks
    for block in model.blocks.children():
        block.norm = nn.BatchNorm1d(SIZES["width"])
        block.forward = partial(drawing, block, block.forward)  # type: ignore[method-assign]
    for name in ("wte", "ln_f"):
        model.get_submodule(name).register_forward_hook(lambda module, x, out: nn.functional.dropout(out, 0.2))
    mpitrain.checkpoint_activations(model, [model.blocks[0], model.blocks[2]])
    return model


def drawing(block: Any, forward: Callable[..., torch.Tensor], x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    x = forward(nn.functional.dropout(x, 0.2), **kwargs)
    # Between stages activations are contiguous. Other strides could take other kernels.
    return block.norm(x.flatten(0, 1)).view(x.shape)  # type: ignore[no-any-return]


@pytest.mark.rest
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-v"])
def test_dropout_and_running_statistics(comm: Communicator, schedule: str) -> None:
    """Forwards of several rounds and stages wait for their backward."""
    alone = mpitrain.fully_shard(with_draws(), group_of(comm, 1), slices=COUNT)
    model, mesh = with_draws(), mpitrain.mesh(comm, pp=2)
    data = mesh["dp_shard"]
    pipe = pipeline(model, mesh["pp"], schedule, micro_batches=COUNT // data.size)
    mpitrain.fully_shard(model, mesh, slices=COUNT)
    optimizer, optimizer_alone = sgd(model), sgd(alone)
    for step, tokens in enumerate(each % 64 for each in batches()):
        mine = [number for number, _ in mpitrain.rounds(model)]
        losses, expected = torch.zeros(2, COUNT, dtype=torch.float64)
        optimizer.zero_grad()
        losses[mine] = pipe.step(
            [tokens[number] for number in mine],
            last=[{"targets_BL": tokens[number].roll(-1, 1)} for number in mine],
            seeds=[(7, step, number) for number in mine],
        )
        norm = mpitrain.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer_alone.zero_grad()
        for number, _ in mpitrain.rounds(alone):
            mpitrain.seed_all(7, step, number)
            loss = alone(tokens[number], tokens[number].roll(-1, 1))
            loss.backward()
            expected[number] = loss.item()
        assert norm == mpitrain.clip_grad_norm_(alone, 1.0)
        optimizer_alone.step()
        assert data.all_reduce(losses).tolist() == expected.tolist()
    found, values = mpitrain.full_state_dict(model), mpitrain.full_state_dict(alone)
    if comm.rank == 0:
        assert all(torch.equal(found[name], value) for name, value in values.items() if "running" not in name)
    expected_buffers, trained = dict(alone.named_buffers()), 0
    for name, buffer in model.named_buffers():
        if name.endswith("num_batches_tracked") and buffer == STEPS:
            trained += 1
        if "running" in name and not torch.equal(buffer, torch.full_like(buffer, float(name.endswith("var")))):
            assert torch.equal(buffer, expected_buffers[name]), name
    assert trained, "of the stages of this rank"
    mesh.free()


def figures(folder: Path) -> list[tuple[str, float]]:
    """Those of layers in a run."""
    kinds = ("grad_norm/", "param_norm/", "update_ratio/", "zeros/", "logit_entropy")
    return [(name, value) for line in metrics(folder) for name, value in line.items() if name.startswith(kinds)]


@pytest.mark.rest
@pytest.mark.ranks(2, 4)
def test_a_run_of_the_main_job(comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tied head, dropout, clipping, evaluations and figures of layers."""
    forward = Block.forward

    def dropped(block: Block, x: torch.Tensor, segments: Any) -> torch.Tensor:
        return nn.functional.dropout(forward(block, x, segments), training=torch.is_grad_enabled())

    monkeypatch.setattr(Block, "forward", dropped)
    settings = {
        "model.layers": 2,
        "train.slices": 4,
        "train.eval-batches": 2,
        "train.eval-every": 2,
        "log.layers-every": 2,
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    alone, found = comm.split(comm.rank), []
    for name, ranks, stages in (("stages", comm, "2"), ("alone", alone, "1"))[: 1 if comm.rank else 2]:
        folder = shared_tmp / name
        folder.mkdir(exist_ok=True)
        maker(ranks, folder, monkeypatch)("run", 4, *words, "--parallel.pipeline", stages).fit()
        saved = tensors(ckpt.latest(folder / "run" / "checkpoints"))
        of_training = {key: value for key, value in saved.items() if not key.startswith("random/")}
        found.append((outcome(folder / "run"), figures(folder / "run"), of_training))
    assert len(found[0][0]) == 6 and len(found[0][1]) == 2 * 17
    assert found[0] == found[-1]


@pytest.mark.ranks(2)
def test_what_does_not_fit(comm: Communicator) -> None:
    def shared() -> LanguageModel:
        model = gpt()
        model.blocks[1].mlp.fc.weight = model.blocks[2].mlp.fc.weight
        return model

    tokens = list(next(batches()))
    for make, schedule, seeds, message in (
        (
            gpt,
            "1f1b",
            None,
            "expected a pipeline of 8 micro-batches, one for each .* with 8 slices and 1 data ranks, got 4",
        ),
        (gpt, "1f1b", [(1,)], r"expected 8 micro-batches, got 1 \(seeds\)"),
        (shared, "interleaved", None, r"mlp.fc.weight is in the stages \[1, 2\] on ranks \[1, 0\]"),
    ):
        mesh, model = mpitrain.mesh(comm, pp=2), make()
        num = 4 if "got 4" in message else COUNT
        pipe = pipeline(model, mesh["pp"], schedule, micro_batches=num)
        mpitrain.fully_shard(model, mesh, slices=COUNT)
        with pytest.raises(ValueError, match=message):
            pipe.step(tokens[:num], last=[{"targets_BL": rows} for rows in tokens[:num]], seeds=seeds)
        mesh.free()
