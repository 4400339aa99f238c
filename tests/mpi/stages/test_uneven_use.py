"""Data ranks that use different blocks in a pipeline, as with layer dropout: each counts with zeros for what it skips."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpitrain
from collectives import Communicator
from mpitrain.placement.parts import part_of
from mpitrain.stages.api import Pipeline
from mpitrain.tensor import Style

MICRO = 4
PLAN = mpitrain.StagePlan(first=("embed",), blocks="blocks", last=("head",), stream="x", input="tokens")
Skips = Callable[[int, int, int], bool]
"""Whether a data rank leaves out a micro-batch in a block."""


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(8, 8, bias=number % 2 == 0)
        self.skips: Callable[[int, int], bool] = lambda micro, number: False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        micro = x.shape[1] - 2  # the first micro-batch has two tokens, and each has one more than that before it
        return x * 1.0 if self.skips(micro, self.number) else x + self.linear(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(map(Block, range(4)))

    def forward(self, tokens: torch.Tensor | None = None, x: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens) if x is None else x
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def skip(self, skips: Skips, rank: int) -> None:
        for block in self.blocks.children():
            block.skips = lambda micro, number: skips(rank, micro, number)


def tokens_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(0, 16, (2, 2 + micro), generator=generator) for micro in range(MICRO)]


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


SKIPS: dict[str, Skips] = {
    "one rank skips all": lambda rank, micro, number: rank == 1,
    "other micro-batches": lambda rank, micro, number: (rank + micro) % 2 == 0,
    "other blocks": lambda rank, micro, number: (7 * rank + 3 * micro + 5 * number) % 3 == 0,
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("schedule", "which"),
    [*(("zb-h1", which) for which in SKIPS), *((name, "other blocks") for name in ("1f1b", "zb-v", "dualpipe-v"))],
)
def test_the_gradients_are_those_of_the_plain_model(comm: Communicator, schedule: str, which: str) -> None:
    skips = SKIPS[which]
    ways: list[dict[str, Any]] = [{}]
    if which == "other blocks":
        ways += [{"slices": 2 * MICRO}, {"storage": "private"}]  # a rank may skip parts of a unit
    mesh = mpitrain.mesh(comm, pp=2)
    plain = Model()
    models = [copy.deepcopy(plain) for _ in ways]
    for rank in range(2):
        plain.skip(skips, rank)
        for tokens in tokens_of(rank):
            (loss_of(plain(tokens), tokens) / MICRO / 2).backward()
    expected = {name: param.grad.norm().item() for name, param in plain.named_parameters() if param.grad is not None}
    own = tokens_of(mesh["dp_shard"].rank)
    for model, options in zip(models, ways, strict=True):
        pipe = mpitrain.pipeline(model, mesh["pp"], schedule, micro_batches=MICRO, plan=PLAN)
        mpitrain.fully_shard(model, mesh, **options)
        model.skip(skips, mesh["dp_shard"].rank)
        if "slices" in options:
            list(mpitrain.rounds(model))
        scale = (lambda loss: loss) if "slices" in options else (lambda loss: loss / MICRO)
        pipe.step(own, lambda logits, micro: loss_of(logits, own[micro]), scale=scale)
        assert mpitrain.grad_norms(model) == pytest.approx(expected, rel=1e-5)
    mesh.free()


class Leaping(Model):
    """Its forward leaves out blocks without a call, so no block is sure to be called where a stream enters or leaves a stage."""

    left_out: tuple[int, ...] = ()

    def forward(self, tokens: torch.Tensor | None = None, x: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens) if x is None else x
        for number, block in enumerate(self.blocks):
            if number not in self.left_out:
                x = block(x)
        return self.head(x * 2)  # type: ignore[no-any-return]


class Factors(Leaping):
    """It computes with the stream before its blocks, and keeps no activations of a block."""

    def forward(self, tokens: torch.Tensor | None = None, x: torch.Tensor | None = None) -> torch.Tensor:
        x = (self.embed(tokens) if x is None else x) * 3 + 0.1
        for number, block in enumerate(self.blocks):
            if number not in self.left_out:
                x = checkpoint(block, x, use_reentrant=False)
        return self.head(x * 2)  # type: ignore[no-any-return]


def check_leaps(model: Leaping, plain: Leaping, pipe: Pipeline) -> None:
    """The gradients and losses of a model in stages are those of the plain one, the losses also with odd numbers of tokens."""
    tokens = [each.repeat(1, 2) for each in tokens_of(0)]
    pipe.step(tokens, lambda logits, micro: loss_of(logits, tokens[micro]), scale=lambda loss: loss / MICRO)
    torch.stack([loss_of(plain(each), each) for each in tokens]).mean().backward()
    expected = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        whole = expected[name].grad
        assert (param.grad is None) == (whole is None), name
        if param.grad is not None and whole is not None:
            part = part_of(param)
            whole = whole if part is None else part.take(whole)
            torch.testing.assert_close(param.grad, whole, msg=lambda text, name=name: f"{name}: {text}")
    odd = tokens_of(0)
    losses = torch.stack([loss_of(plain(each), each) for each in odd]).detach().double()
    found = pipe.evaluate(odd, lambda logits, micro: loss_of(logits, odd[micro]))
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("left_out", [(2,), (0, 1), (1, 2), (0, 1, 2), (1, 2, 3)])
@pytest.mark.parametrize(
    ("schedule", "division", "kind"),
    [
        ("1f1b", [2, 2], Leaping),
        ("zb-v", [1, 1, 1, 1], Leaping),
        ("zb-v", [1, 1, 1, 1], Factors),
        ("interleaved", [2, 0, 2, 0], Factors),
    ],
)
def test_a_forward_that_leaves_out_blocks(
    comm: Communicator, schedule: str, division: list[int], kind: type[Leaping], left_out: tuple[int, ...]
) -> None:
    """Of a stage, of all stages before one, or of all behind one."""
    mesh = mpitrain.mesh(comm, pp=2)
    plain, model = kind(), kind()
    plain.left_out = model.left_out = left_out
    pipe = mpitrain.pipeline(model, mesh["pp"], schedule, micro_batches=MICRO, plan=PLAN, division=division)
    check_leaps(model, plain, pipe)
    mesh.free()


class Cut(Factors):
    """Its blocks are regions of `tensor_parallel`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(4))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)  # type: ignore[no-any-return]


CUTS = {"blocks.*.mlp.0": Style("column"), "blocks.*.mlp.2": Style("row")}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("schedule", "division", "left_out"),
    [
        ("1f1b", [2, 2], (1,)),
        ("1f1b", [2, 2], (1, 2)),
        ("zb-v", [1, 1, 1, 1], (1,)),
        ("zb-v", [1, 1, 1, 1], (1, 2)),
        ("dualpipe-v", [2, 1, 1, 0], (1, 2)),
    ],
)
def test_tokens_that_are_split_with_blocks_left_out(
    comm: Communicator, schedule: str, division: list[int], left_out: tuple[int, ...]
) -> None:
    mesh = mpitrain.mesh(comm, pp=2, tp=2)
    plain, model = Cut(), Cut()
    plain.left_out = model.left_out = left_out
    mpitrain.tensor_parallel(model, mesh["tp"], CUTS, sequence=True)
    pipe = mpitrain.pipeline(model, mesh["pp"], schedule, micro_batches=MICRO, plan=PLAN, division=division)
    mpitrain.fully_shard(model, mesh, stage=0)
    if schedule == "zb-v":
        mpitrain.checkpoint_activations(model)
    check_leaps(model, plain, pipe)
    mesh.free()


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("left_out", "named"), [((0,), "before blocks.0"), ((0, 1), "before blocks.0"), ((3,), "after blocks.3")]
)
def test_tokens_that_are_split_without_the_first_or_last_block(
    comm: Communicator, left_out: tuple[int, ...], named: str
) -> None:
    mesh = mpitrain.mesh(comm, pp=2, tp=2)
    model = Cut()
    model.left_out = left_out
    mpitrain.tensor_parallel(model, mesh["tp"], CUTS, sequence=True)
    pipe = mpitrain.pipeline(model, mesh["pp"], "gpipe", micro_batches=MICRO, plan=PLAN, division=[1, 3])
    stage, x = (0, None) if mesh["pp"].rank == 0 else (1, torch.ones(2, 2, 8))
    if stage == 0 and left_out == (3,):
        return  # the first stage cannot see it
    with torch.no_grad(), pytest.raises(ValueError, match=named):
        pipe.stages(stage, x, (tokens_of(0)[0],), {})
    mesh.free()


class Rounds(Model):
    """Its forward calls the blocks twice."""

    def forward(self, tokens: torch.Tensor | None = None, x: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens) if x is None else x
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.ranks(2)
def test_a_second_round_over_the_blocks(comm: Communicator) -> None:
    mesh = mpitrain.mesh(comm, pp=2)
    pipe = mpitrain.pipeline(Rounds(), mesh["pp"], "gpipe", micro_batches=MICRO, plan=PLAN)
    stage, x = (0, None) if comm.rank == 0 else (1, torch.ones(2, 2, 8))
    with pytest.raises(ValueError, match="runs through its stages once"):
        pipe.stages(stage, x, (tokens_of(0)[0],), {})
    mesh.free()


@pytest.mark.ranks(2)
def test_a_forward_that_leaves_out_all_blocks(comm: Communicator) -> None:
    mesh = mpitrain.mesh(comm, pp=2)
    model = Leaping()
    model.left_out = (0, 1, 2, 3)
    pipe = mpitrain.pipeline(model, mesh["pp"], "gpipe", micro_batches=MICRO, plan=PLAN)
    tokens = tokens_of(0)
    stage, x = (0, None) if comm.rank == 0 else (1, torch.ones(2, 2, 8))
    with pytest.raises(ValueError, match="skips all blocks"):
        pipe.stages(stage, x, (tokens[0],), {})
    mesh.free()
