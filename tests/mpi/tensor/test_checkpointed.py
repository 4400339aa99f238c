"""Activation checkpointing of a model that is cut over ranks: the same bits, and inputs of which each rank keeps a part."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import mpitrain
from collectives import Communicator, Mesh
from mpitrain.job.config import parse
from mpitrain.job.train.model import make_model
from mpitrain.models import GPT, Segments
from mpitrain.placement.parts import ranks_with_input
from mpitrain.tensor import Style
from mpitrain.tools.plan.memory.step import Tracker

pytestmark = pytest.mark.ranks(2, 3)

LAYERS, ROWS, LENGTH, WIDTH = 3, 2, 12, 24
INPUT_BYTES = ROWS * LENGTH * WIDTH * 4
MODEL = [
    "--model.layers",
    "3",
    "--model.width",
    "24",
    "--model.heads",
    "6",
    "--model.context",
    "12",
    "--model.vocab",
    "256",
]
BLOCK, ATTENTION = ["--parallel.checkpoint-activations", "block"], ["--parallel.checkpoint-activations", "attention"]
PARTITION, OFFLOAD = ["--parallel.partition-activations"], ["--parallel.offload-activations"]


@pytest.fixture
def mesh(comm: Communicator) -> Iterator[Mesh]:
    mesh = mpitrain.mesh(comm, tp=comm.size)
    yield mesh
    mesh.free()


@pytest.fixture(params=[False, True], ids=["whole", "sequence"])
def sequence(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def made(mesh: Mesh, sequence: bool, *settings: str, device: str = "cpu") -> GPT:
    """The main job's model."""
    config = parse(
        [*MODEL, "--parallel.tensor", str(mesh["tp"].size), "--parallel.sequence", str(sequence).lower(), *settings]
    )
    model, _ = make_model(config, mesh, torch.device(device))
    return model


def step(model: GPT) -> tuple[int, list[torch.Tensor]]:
    """The bytes between forward and backward, and loss and gradients. A row has two documents."""
    tokens = torch.randint(0, 256, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    segments = Segments.of(torch.arange(LENGTH).expand(ROWS, LENGTH) < 5)
    model.zero_grad()
    with Tracker() as tracker:
        loss = model(tokens[:, :-1], tokens[:, 1:], segments=segments)
        held = tracker.now["activations"]
    loss.backward()
    return held, [loss.detach(), *(param.grad.clone() for param in model.parameters() if param.grad is not None)]


@pytest.mark.rest
def test_the_settings_of_the_main_job(mesh: Mesh, sequence: bool) -> None:
    """The same bits with all of them, and where the ranks have the same input, each keeps 1/N of it."""
    most, expected = step(made(mesh, sequence))
    kept = {}
    for what in (BLOCK, ATTENTION):
        for more in ([], PARTITION, OFFLOAD, [*PARTITION, *OFFLOAD]):
            kept[what[-1], *more], got = step(made(mesh, sequence, *what, *more))
            assert len(got) == len(expected)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), (what, more)
    saved = LAYERS * (INPUT_BYTES - INPUT_BYTES // mesh["tp"].size)
    for what in ("block", "attention"):
        alone = kept[(what,)]
        assert alone < most
        assert kept[(what, *OFFLOAD)] == alone  # on CPUs it changes nothing
        is_own = sequence and what == "block"  # then the input is this rank's own tokens
        assert kept[(what, *PARTITION)] == kept[(what, *PARTITION, *OFFLOAD)] == (alone if is_own else alone - saved), (
            what
        )


class Block(nn.Module):
    """Takes a mask before its stream, and remembers the strides of both."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 12), nn.Linear(12, 5)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, mask: torch.Tensor, *, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.seen += [mask.stride(), x.stride(), scale.stride()]
        return torch.where(mask, self.down(torch.relu(self.up(x)) * scale), 0.0)


class Model(nn.Module):
    factor = 1.0  # of this rank

    def __init__(self) -> None:
        super().__init__()
        self.start, self.blocks = nn.Linear(5, 5), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            # 7 x 3 x 5 elements, which 2 ranks cannot share equally, in an order of their own
            x = x + block(x.detach() > 0, x=x.permute(2, 0, 1).contiguous().permute(1, 2, 0), scale=scale * self.factor)
        return x


def test_any_input_comes_back_as_it_was(comm: Communicator) -> None:
    """In the order of its elements, with its gradient. Other inputs of a block may differ between the ranks."""
    seen: list[list[torch.Tensor]] = []
    for partition in (None, False, True):
        torch.manual_seed(0)
        model = Model()
        if partition is not None:
            mpitrain.checkpoint_activations(model, partition=partition)  # before tensor_parallel, too
        plan = {"blocks.*.up": Style("column"), "blocks.*.down": Style("row")}
        mpitrain.tensor_parallel(model, comm, plan, sequence=False)
        model.factor += comm.rank
        scale = torch.ones(3, 1, requires_grad=True)
        y = model(torch.randn(7, 3, 5), scale)
        assert all(block.seen[1] == (3, 1, 21) and len(block.seen) == 3 for block in model.blocks)
        y.square().sum().backward()
        assert all(block.seen[3:] == (block.seen[:3] if partition is not None else []) for block in model.blocks)
        assert scale.grad is not None
        seen.append([y.detach(), scale.grad, *(param.grad for param in model.parameters() if param.grad is not None)])
    for each in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(each, seen[0], strict=True))


def test_inputs_that_the_ranks_share_are_known(mesh: Mesh, sequence: bool) -> None:
    model = made(mesh, sequence)
    shared = {name for name, module in model.named_modules() if ranks_with_input(module) is not None}
    blocks = {f"blocks.{i}" for i in range(LAYERS)}
    regions = {f"{block}.{part}" for block in blocks for part in ("attn", "mlp")}
    assert shared == {"", "blocks", *regions, *(() if sequence else blocks)}


@pytest.mark.gpu
@pytest.mark.parametrize("more", [OFFLOAD, [*PARTITION, *OFFLOAD]])
def test_inputs_are_kept_on_the_host_of_a_gpu(comm: Communicator, mesh: Mesh, sequence: bool, more: list[str]) -> None:
    device = f"cuda:{comm.node.rank % torch.cuda.device_count()}"

    def results(*settings: str) -> tuple[int, list[torch.Tensor]]:
        """The bytes on the GPU that a forward leaves, and loss and gradients."""
        model = made(mesh, sequence, *settings, device=device)
        tokens = torch.randint(0, 256, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0)).to(device)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        model.zero_grad()
        gc.collect()  # models of earlier tests
        before = torch.cuda.memory_allocated(device)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        held = torch.cuda.memory_allocated(device) - before
        loss.backward()
        return held, [loss.detach(), *(param.grad.clone() for param in model.parameters() if param.grad is not None)]

    (held, expected), (less, got) = results(*BLOCK), results(*BLOCK, *more)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    inputs = LAYERS * INPUT_BYTES // (comm.size if sequence else 1)
    assert held - less >= 0.9 * inputs  # torch's allocator rounds up to 512 bytes
