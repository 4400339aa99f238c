"""Models and calls that a pipeline cannot compute as the plain model does: an error on all ranks, or the plain model's numbers."""

import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

import mpitrain
from collectives import Communicator
from mpitrain.stages import StagePlan, pipeline
from tests.mpi.stages.test_parity import FEW, MICRO, adamw, batches, gpt, targets, tied_llama

PLAN = StagePlan(first=("embed",), blocks="blocks", last=("head",), stream="x")


class Layers(nn.Module):
    """A model whose forward is given."""

    def __init__(self, run: Callable[["Layers", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = run
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: torch.Tensor | None = None, x: torch.Tensor | None = None) -> torch.Tensor:
        if tokens is not None:
            x = self.embed(tokens)
        assert x is not None
        return self.head(self.run(self, x)).square().mean()


class WithFirst(nn.Module):
    """A block that takes one more tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return x + self.linear(first)


def plainly(model: Layers, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def with_residual_outside(model: Layers, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = x + block(x)
    return x


def with_first(model: Layers, x: torch.Tensor) -> torch.Tensor:
    first = x
    for block in model.blocks:
        x = block(x, first)
    return x


def few() -> list[torch.Tensor]:
    return [torch.randint(0, 20, (2, 4), generator=torch.Generator().manual_seed(at)) for at in range(4)]


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("run", "message"), [(with_residual_outside, "between two blocks"), (with_first, "one more argument")]
)
def test_code_between_the_blocks_of_two_stages(
    comm: Communicator, run: Callable[..., torch.Tensor], message: str
) -> None:
    """On one rank with two stages, where an error leaves no other rank waiting."""
    model = Layers(run)
    if run is with_first:
        model.blocks = nn.ModuleList(WithFirst() for _ in range(4))
    pipe = pipeline(model, comm, "interleaved", micro_batches=4, plan=PLAN)
    with pytest.raises(ValueError, match=message):
        pipe.step(few())


@pytest.mark.ranks(2)
def test_what_is_refused(comm: Communicator) -> None:
    twice = Layers(plainly)
    twice.blocks = nn.ModuleList([*twice.blocks, twice.blocks[0]])
    with pytest.raises(ValueError, match="blocks has a block twice"):
        pipeline(twice, comm, micro_batches=4, plan=PLAN)
    with pytest.raises(ValueError, match=r"stream is 'y', which is no argument of Layers\.forward"):
        pipeline(Layers(plainly), comm, micro_batches=4, plan=StagePlan(("embed",), "blocks", ("head",), "y"))
    empty = Layers(plainly)
    empty.head = nn.Identity()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="rank 1 of the pipeline would have no parameters"):
        pipeline(empty, comm, micro_batches=4, plan=PLAN, division=[4, 0])
    model = Layers(plainly)
    pipe = pipeline(model, comm, micro_batches=4, plan=PLAN)
    with pytest.raises(ValueError, match="expected one positional argument of a micro-batch, got 2"):
        pipe.step([(each, each) for each in few()])
    with pytest.raises(
        ValueError, match="inputs of micro-batch 1 differ between ranks 0 and 1 of the pipeline: other values"
    ):
        pipe.step([each + (at == 1) * comm.rank for at, each in enumerate(few())])
    with pytest.raises(ValueError, match="expected a sequence of micro-batches"):
        pipe.step(torch.stack(few()))
    with pytest.raises(RuntimeError, match="this Layers is in stages, of which this rank has some"):
        model(few()[0])
    with pytest.raises(TypeError, match=r"this rank has the parameters of its stages, and a file of it would lack"):
        torch.save(model.state_dict(), io.BytesIO())
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradients are disabled"):
        pipe.step(few())


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_gradients_are_reduced_if_the_last_action_computes_none(comm: Communicator, schedule: str) -> None:
    """Under autocast no gradient of a weight is left for later."""
    mesh, plain, model = mpitrain.mesh(comm, pp=2), gpt(FEW), gpt(FEW)
    pipe = pipeline(model, mesh["pp"], schedule, micro_batches=MICRO)
    mpitrain.fully_shard(model, mesh, stage=2)
    optimizer, tokens = adamw(model), batches(0)
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(tokens, last=targets(tokens))
        for rows in tokens:
            plain(rows, rows.roll(-1, 1)).backward()
    norm = nn.utils.get_total_norm([param.grad for param in plain.parameters() if param.grad is not None]).item()
    assert mpitrain.clip_grad_norm_(model, 1.0).item() == pytest.approx(norm, rel=2e-2)
    optimizer.step()
    mesh.free()


@pytest.mark.ranks(2)
def test_torch_s_scaler_and_gradients_within_the_loss(comm: Communicator) -> None:
    plain, model = tied_llama(FEW), tied_llama(FEW)
    pipe = pipeline(model, comm, "zb-h1", micro_batches=MICRO)
    optimizer, scaler, tokens = adamw(model), torch.amp.GradScaler("cpu", init_scale=256.0), batches(0)

    def loss_of(loss: torch.Tensor, micro: int) -> torch.Tensor:
        (grad,) = torch.autograd.grad(loss, model.get_parameter("head.weight"), retain_graph=True)
        return loss + 0 * grad.norm()

    pipe.step(tokens, loss_of, last=targets(tokens), scale=scaler.scale)
    scaler.unscale_(optimizer)
    for rows in tokens:
        plain(rows, rows.roll(-1, 1)).backward()
    norm = nn.utils.get_total_norm([param.grad for param in plain.parameters() if param.grad is not None]).item()
    assert mpitrain.clip_grad_norm_(model, 1.0).item() == pytest.approx(norm, rel=1e-5)
    scaler.step(optimizer)
