"""A model in stages, each of which is cut over ranks, trains as the plain model does, by every schedule."""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import mpitrain
from collectives import Communicator, Mesh
from mpitrain.models import GPT, GPTConfig, LanguageModel
from mpitrain.models.llama import Llama
from mpitrain.models.sizes import LlamaConfig
from mpitrain.parts import part_of
from mpitrain.stages import Pipeline, pipeline
from tests.helpers.extent import extent

pytestmark = pytest.mark.ranks(4)

STEPS, MICRO = extent(3, 10), 6
SIZES: dict[str, Any] = {"vocab": 51, "context": 16, "width": 24, "layers": 6, "heads": 4}  # 2 ranks share 51 unequally

MODELS: dict[str, Callable[[], LanguageModel]] = {
    "GPT": lambda: GPT(GPTConfig(**SIZES, tied=False)),
    "tied GPT": lambda: GPT(GPTConfig(**SIZES, tied=True)),
    "Llama": lambda: Llama(LlamaConfig(**SIZES, kv_heads=1, tied=False)),  # 2 ranks have each matrix of keys and values
    "tied Llama": lambda: Llama(LlamaConfig(**SIZES, tied=True)),
}
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]


def make(kind: str) -> LanguageModel:
    torch.manual_seed(0)
    return MODELS[kind]()


def batches(step: int) -> list[torch.Tensor]:
    """Micro-batches of different sizes."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, 51, (2, 8 + 2 * (micro % 3)), generator=generator) for micro in range(MICRO)]


def targets(tokens: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{"targets_BL": rows.roll(-1, 1)} for rows in tokens]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)


class Trained(NamedTuple):
    losses: list[float]
    weights: dict[str, torch.Tensor]


@functools.cache
def plain(kind: str) -> Trained:
    """One plain process."""
    model, losses = make(kind), []
    optimizer = adamw(model)
    for step in range(STEPS):
        total = 0.0
        for rows in batches(step):
            loss = model(rows, rows.roll(-1, 1))
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, {name: param.detach() for name, param in model.named_parameters(remove_duplicate=False)})


def divided(
    comm: Communicator, model: nn.Module, schedule: str, sequence: bool = True, micro: int = MICRO, **options: Any
) -> tuple[Pipeline, Mesh]:
    mesh = mpitrain.mesh(comm, tp=2, pp=2)
    mpitrain.tensor_parallel(model, mesh["tp"], sequence=sequence)
    return pipeline(model, mesh["pp"], schedule, micro_batches=micro, **options), mesh


def check_weights(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, param in model.named_parameters():
        part = part_of(param)
        assert part is not None
        torch.testing.assert_close(
            param.detach(), part.take(expected[name]), rtol=0, atol=2e-5, msg=lambda said, at=name: f"{at}: {said}"
        )


def steps(pipe: Pipeline, model: nn.Module) -> list[float]:
    optimizer, losses = adamw(model), []
    for step in range(STEPS):
        tokens = batches(step)
        losses.append(pipe.step(tokens, last=targets(tokens)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


# In a short run each schedule, each model with and without sequence parallelism, and the split backward of each kind of layer.
CASES = extent(
    [
        *((kind, schedule, True) for kind, schedule in zip([*MODELS, *MODELS], SCHEDULES, strict=False)),
        ("tied GPT", "zb-h1", False),
        ("tied Llama", "1f1b", False),
        ("GPT", "dualpipe-v", False),
        ("Llama", "zb-v", False),
        ("Llama", "zb-h1", True),
    ],
    [(kind, schedule, sequence) for kind in MODELS for schedule in SCHEDULES for sequence in (True, False)],
)


@pytest.mark.parametrize(("kind", "schedule", "sequence"), CASES)
def test_steps_beside_the_plain_model(comm: Communicator, kind: str, schedule: str, sequence: bool) -> None:
    model = make(kind)
    pipe, mesh = divided(comm, model, schedule, sequence)
    assert steps(pipe, model) == pytest.approx(plain(kind).losses, rel=1e-6)
    check_weights(model, plain(kind).weights)
    mesh.free()


@pytest.mark.parametrize("division", [[0, 6], [6, 0], [0, 2, 0, 4]])
def test_stages_without_blocks(comm: Communicator, division: list[int]) -> None:
    """Where the stream passes outside of the blocks, and through a stage that has none."""
    model = make("Llama")
    pipe, mesh = divided(comm, model, "1f1b" if len(division) == 2 else "interleaved", division=division)
    assert steps(pipe, model) == pytest.approx(plain("Llama").losses, rel=1e-6)
    check_weights(model, plain("Llama").weights)
    mesh.free()


@pytest.mark.parametrize("sequence", [True, False])
def test_each_rank_passes_its_own_tokens_on(comm: Communicator, sequence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("GPT")
    pipe, mesh = divided(comm, model, "1f1b", sequence)
    sent: list[tuple[int, ...]] = []
    isend = type(pipe.comm).isend

    def counted(self: Communicator, x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.is_floating_point():
            sent.append(tuple(x.shape))
        return isend(self, x, *args, **kwargs)

    monkeypatch.setattr(type(pipe.comm), "isend", counted)
    tokens = batches(0)
    pipe.step(tokens, last=targets(tokens))
    own = 2 if sequence else 1
    assert sent == [(*rows.shape[:1], rows.shape[1] // own, SIZES["width"]) for rows in tokens]
    mesh.free()


@pytest.mark.parametrize("sequence", [True, False])
def test_weight_gradients_wait(comm: Communicator, sequence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each cut matrix: the first half of a backward gives no gradient of it, and the second half gives it without an exchange."""
    model = make("GPT")
    pipe, mesh = divided(comm, model, "zb-h1", sequence)
    matrices = [param for name, param in model.named_parameters() if name.startswith("blocks") and param.ndim == 2]
    seen: list[tuple[str, int]] = []
    take = Run.take

    def watched(self: Run, action: Action) -> None:
        with CommDebug() as exchanges:
            take(self, action)
    monkeypatch.setattr(Run, "take", watched)
    mesh.free()
