"""A model in stages, each of which is cut over ranks, trains as the plain model does, by every schedule."""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import mpitrain
from collectives import Communicator, Mesh
from mpitrain.models import GPT, GPTConfig, LanguageModel, Segments
from mpitrain.models.gpt import MLP, Block
from mpitrain.models.llama import Llama
from mpitrain.models.sizes import LlamaConfig
from mpitrain.placement.parts import part_of
from mpitrain.sharding.unit.unit import params_by_shard
from mpitrain.stages import Pipeline, pipeline
from mpitrain.stages.executor import PipelineRun
from mpitrain.tensor.exchange import Exchange
from tests.helpers.extent import extent

pytestmark = pytest.mark.ranks(4)

STEPS, MICRO = extent(3, 10), 4
SIZES: dict[str, Any] = {"vocab": 51, "context": 16, "width": 24, "layers": 4, "heads": 4}  # 2 ranks share 51 unequally

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
    pipe = pipeline(model, mesh["pp"], schedule, micro_batches=micro, **options)
    mpitrain.fully_shard(model, mesh, stage=0)
    return pipe, mesh


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
        losses.append(pipe.step(tokens, last=targets(tokens)).sum().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


# In a short run each schedule, each model with and without sequence parallelism, and the split backward of each kind of layer.
CASES = extent(
    [
        *((kind, schedule, True) for kind, schedule in zip([*MODELS, *MODELS], SCHEDULES, strict=False)),
        ("tied GPT", "zb-h1", False),
        ("tied Llama", "1f1b", False),
        ("Llama", "zb-v", False),
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


@pytest.mark.parametrize(
    ("kind", "schedule", "sequence"), [("tied GPT", "1f1b", True), ("Llama", "zb-v", True), ("Llama", "1f1b", False)]
)
def test_documents_of_a_row_beside_the_plain_model(
    comm: Communicator, kind: str, schedule: str, sequence: bool
) -> None:
    """Each stage takes the segments from its own inputs. Also in an evaluation."""
    plain, model = make(kind), make(kind)
    pipe, mesh = divided(comm, model, schedule, sequence)
    tokens = batches(0)
    segments = [Segments.of(torch.arange(x.shape[1]).expand_as(x) // (3 + micro)) for micro, x in enumerate(tokens)]
    given = [{"tokens_BL": rows, "segments": of} for rows, of in zip(tokens, segments, strict=True)]
    losses = [plain(rows, rows.roll(-1, 1), segments=of) for rows, of in zip(tokens, segments, strict=True)]
    total = torch.stack(losses).sum()
    total.backward()
    assert pipe.step(given, last=targets(tokens)).sum().item() == pytest.approx(total.item(), rel=1e-6)
    assert pipe.evaluate(given, last=targets(tokens)).sum().item() == pytest.approx(total.item(), rel=1e-6)
    whole = dict(plain.named_parameters(remove_duplicate=False))
    for name, param in model.named_parameters():
        part, grad = part_of(param), whole[name].grad
        assert part is not None and param.grad is not None and grad is not None
        torch.testing.assert_close(param.grad, part.take(grad), rtol=0, atol=1e-5 * grad.abs().max().item())
    mesh.free()


@pytest.mark.parametrize("division", [[4, 0], [1, 0, 3, 0]])
def test_stages_without_blocks(comm: Communicator, division: list[int]) -> None:
    """Where the stream passes outside of the blocks, and through a stage that has none."""
    model = make("Llama")
    pipe, mesh = divided(comm, model, "1f1b" if len(division) == 2 else "interleaved", division=division)
    assert steps(pipe, model) == pytest.approx(plain("Llama").losses, rel=1e-6)
    check_weights(model, plain("Llama").weights)
    mesh.free()


@pytest.mark.parametrize("sequence", [True, False])
def test_each_rank_passes_its_own_tokens_on(
    comm: Communicator, sequence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_products_for_weights_wait(comm: Communicator, sequence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half of a backward gives no gradient of a cut matrix. The second half gives each, and exchanges nothing."""
    model = make("GPT")
    pipe, mesh = divided(comm, model, "zb-h1", sequence)
    matrices = [param for name, param in model.named_parameters() if param.ndim == 2 and name != "wpe.weight"]
    layers = [param for param in matrices if len(param) != len(model.wte.weight)] if hasattr(model, "wte") else matrices
    fulls = [params_by_shard(model)[param].full for param in layers]
    take, changed, exchanges = PipelineRun.take, [], 0

    def grads() -> list[float]:
        # The gradient of a full parameter becomes that of its shard at the end of the step.
        both = zip(fulls, layers, strict=True)
        found = [full.grad if full.grad is not None else shard.grad for full, shard in both]
        return [0.0 if grad is None else grad.double().norm().item() for grad in found]

    def counted(self: Exchange, *args: Any, method: Any, **kwargs: Any) -> Any:
        nonlocal exchanges
        exchanges += 1
        return method(self, *args, **kwargs)

    for name in ("gather", "own_sum", "whole_sum"):
        monkeypatch.setattr(Exchange, name, functools.partialmethod(counted, method=getattr(Exchange, name)))

    def watched(self: PipelineRun, at: int) -> None:
        before, so_far, action = grads(), exchanges, self.program[at]
        take(self, at)
        changed.append((action.kind, sum(a != b for a, b in zip(before, grads(), strict=True)), exchanges > so_far))

    monkeypatch.setattr(PipelineRun, "take", watched)
    tokens = batches(0)
    pipe.step(tokens, last=targets(tokens))
    assert set(changed) == {("F", 0, True), ("I", 0, True), ("W", len(layers), False)}
    mesh.free()


class DroppingMLP(MLP):
    """A region with dropout of the features of a rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(F.dropout(F.gelu(self.fc(x)), 0.3))


class DroppingBlock(Block):
    """A block with dropout between the regions, of own tokens with sequence parallelism."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.mlp = DroppingMLP(config)

    def forward(self, x: torch.Tensor, segments: Segments | None = None) -> torch.Tensor:
        x = x + F.dropout(self.attn(self.ln1(x), segments), 0.3)
        return x + F.dropout(self.mlp(self.ln2(x)), 0.3)


def dropping() -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(**SIZES, tied=False)
    model = GPT(config)
    model.blocks = nn.ModuleList(DroppingBlock(config) for _ in model.blocks)
    return model


@pytest.mark.parametrize("sequence", [True, False])
def test_random_numbers_of_a_stage(comm: Communicator, sequence: bool) -> None:
    """A stage draws what its modules draw without a pipeline, from a generator of its own."""
    model, whole = dropping(), dropping()
    pipe, mesh = divided(comm, model, "1f1b", sequence)
    mpitrain.tensor_parallel(whole, mesh["tp"], sequence=sequence)
    tokens = batches(0)

    torch.manual_seed(5)
    others = torch.get_rng_state()  # of the stage that does not run

    def exchange_states(*args: Any) -> None:
        nonlocal others
        mine = torch.get_rng_state()
        torch.set_rng_state(others)
        others = mine

    whole.blocks[pipe.division[1][0]].register_forward_pre_hook(exchange_states, prepend=True)
    whole.register_forward_hook(exchange_states)
    expected = 0.0
    for rows in tokens:
        loss = whole(rows, rows.roll(-1, 1))
        loss.backward()
        expected += loss.item()

    torch.manual_seed(5)
    assert pipe.step(tokens, last=targets(tokens)).sum().item() == pytest.approx(expected, rel=1e-6)
    states = [whole_state.tobytes() for whole_state in mesh["tp"].all_gather_object(torch.get_rng_state().numpy())]
    assert states[0] == states[1]
    weights = dict(whole.named_parameters())
    for name, param in model.named_parameters():
        grad = weights[name].grad
        assert param.grad is not None and grad is not None
        assert (param.grad - grad).abs().max() <= 1e-5 * grad.abs().max(), name
    mesh.free()


def test_evaluation_between_steps(comm: Communicator) -> None:
    """Without gradients all tokens of the same batches pass between the stages, and also numbers that the ranks cannot share."""
    model, reference = make("Llama"), make("Llama")
    pipe, mesh = divided(comm, model, "1f1b")
    even, odd = batches(0), [rows[:, :7] for rows in batches(1)[:3]]
    for run, tokens in ((pipe.step, even), (pipe.evaluate, even), (pipe.evaluate, odd), (pipe.step, even)):
        expected = sum(reference(rows, rows.roll(-1, 1)).item() for rows in tokens)
        assert run(tokens, last=targets(tokens)).sum().item() == pytest.approx(expected, rel=1e-6)
    for rows in (even[0], odd[0]):
        torch.testing.assert_close(pipe.next_logits(rows), reference(rows)[:, -1:].detach(), rtol=0, atol=1e-5)
    mesh.free()


def test_stages_of_other_ranks_are_freed(comm: Communicator) -> None:
    model = make("GPT")
    blocks = [weakref.ref(block) for block in model.blocks]
    pipe, mesh = divided(comm, model, "1f1b")
    gc.collect()
    assert [block() is not None for block in blocks] == [
        at in pipe.division[pipe.comm.rank] for at in range(SIZES["layers"])
    ]
    mesh.free()


def test_what_does_not_fit(comm: Communicator) -> None:
    mesh = mpitrain.mesh(comm, tp=2, pp=2)
    model = make("GPT")
    pipeline(model, mesh["pp"], micro_batches=MICRO)
    with pytest.raises(ValueError, match="divided into stages already; call tensor_parallel before pipeline"):
        mpitrain.tensor_parallel(model, mesh["tp"])
    mesh.free()
