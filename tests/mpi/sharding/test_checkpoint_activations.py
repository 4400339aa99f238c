"""Blocks whose activations are computed again: the same bits as without, for any way to shard, and less memory."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from extent import extent
from parity_models import CASES
from sharded_models import mine, shard
from torch import nn
from ways import WAYS, spread

import mpitrain
from collectives import Communicator
from mpitrain.sharding import MixedPrecisionPolicy
from mpitrain.tools.plan.memory.step import Tracker

pytestmark = pytest.mark.ranks(1, 2)

WIDTH, VOCAB = 12, 11


class Block(nn.Module):
    """Takes a keyword, draws from the generator, and has parts that may be sharded by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Dropout(0.3), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, *, gate: torch.Tensor, use_reentrant: bool) -> dict[str, torch.Tensor]:
        """torch's checkpoint has a keyword of the same name."""
        assert not use_reentrant
        return {"x": x + gate * self.body(self.norm(x)).tanh().sin()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.gate = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, gate=self.gate.to(x.dtype), use_reentrant=False)["x"]
        return self.head(x)


def loss_of(model: nn.Module, seed: int, length: int = 5) -> torch.Tensor:
    torch.manual_seed(seed)
    x = torch.randint(0, VOCAB, (3, length))
    return nn.functional.cross_entropy(model(x).float().flatten(0, 1), x.roll(1, 1).flatten())


def sharded(comm: Communicator, way: str, order: str, **more: Any) -> Model:
    """`order`: when its blocks are checkpointed: "before" or "after" it is sharded, or "never"."""
    torch.manual_seed(0)
    model = Model()
    if order == "before":
        mpitrain.checkpoint_activations(model)
    within = model.blocks[0].body[3]
    shard(model, comm, way, [within, *model.blocks], **more)
    if order == "after":
        mpitrain.checkpoint_activations(model)
    return model


def train(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    """Losses, gradients and parameters of some steps, one with two micro-batches; and an evaluation."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(steps):
        for micro in range(2 if step == 1 else 1):
            loss = loss_of(model, 10 * step + micro)
            loss.backward()
            seen.append(loss.detach())
        seen += [param.grad.clone() for param in model.parameters() if param.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append(loss_of(model, 99))
    return [*seen, *(param.detach().clone() for param in model.parameters())]


@pytest.mark.rest
@pytest.mark.parametrize(
    ("way", "low"), spread(WAYS, [False, True]), ids=lambda value: {False: "fp32", True: "bf16"}.get(value, value)
)
def test_the_same_bits(comm: Communicator, way: str, low: bool) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, keep_fp32=("LayerNorm",)) if low else None
    plain = sharded(comm, way, "never", mp_policy=policy)
    names, expected = list(plain.state_dict()), train(plain)
    for order in ("before", "after"):
        model = sharded(comm, way, order, mp_policy=policy)
        got = train(model)
        assert list(model.state_dict()) == names == list(dict(model.named_parameters())) + ["head.weight"]
        assert len(got) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), order


KINDS = ["mlp", "gpt, tied", "gpt, untied", "encoder and decoder", "low rank", "twice", "Llama", "T5"]
IN_TURN = [(name, ["stage 3", "stage 3, private"][i % 2]) for i, name in enumerate(KINDS)]


@pytest.mark.rest
@pytest.mark.parametrize(("name", "way"), extent(IN_TURN, [*itertools.product(KINDS, ["stage 3", "stage 3, private"])]))
def test_models_of_many_kinds(comm: Communicator, name: str, way: str) -> None:
    case = CASES[name]
    seen = []
    for blocks in (None, "itself", "named"):
        torch.manual_seed(0)
        model = case.make()
        if name == "T5":
            model.decoder.config.use_cache = False  # it would be written twice
        if blocks == "named":
            mpitrain.checkpoint_activations(
                model, [block for block in case.blocks(model) if next(block.children(), None)]
            )
        shard(model, comm, way)
        if blocks == "itself":
            mpitrain.checkpoint_activations(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        of_model = []
        for step in range(2):
            loss = case.loss(model, step, mine(comm))
            loss.backward()
            of_model += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
        seen.append(of_model)
    for got in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, seen[0], strict=True))


@pytest.mark.rest
@pytest.mark.parametrize("way", WAYS)
def test_less_is_held(comm: Communicator, way: str) -> None:
    peaks = {}
    for order in ("never", "before", "after"):
        model = sharded(comm, way, order)
        loss_of(model, 0, 400).backward()  # buffers of later ones are there
        model.zero_grad()
        tracker = Tracker()
        with tracker:
            loss_of(model, 0, 400).backward()
        peaks[order] = tracker.peak["activations"]
    # Four blocks of twelve activations of WIDTH each, more or less, beside the logits.
    assert peaks["before"] == peaks["after"] < 0.6 * peaks["never"]


@pytest.mark.parametrize("way", ["stage 3", "stage 3, private"])
def test_an_exception_in_a_backward_leaves_a_model_that_works(comm: Communicator, way: str) -> None:
    expected = train(sharded(comm, way, "never"))
    model = sharded(comm, way, "before")
    logits = model(torch.zeros(1, 2, dtype=torch.int64))
    logits.register_hook(_raise)
    with pytest.raises(ArithmeticError):
        logits.sum().backward()
    assert all(hasattr(param, "shard_box") for param in model.parameters())
    got = train(model)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def _raise(grad: torch.Tensor) -> None:
    raise ArithmeticError("on all ranks")


def test_hooks_run_once_and_without_gradients_nothing_is_kept(comm: Communicator) -> None:
    model = sharded(comm, "stage 3", "before")
    calls = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    loss_of(model, 0).backward()
    with torch.no_grad():
        loss_of(model, 0)
    assert calls == [True] * 4 + [False] * 4


def test_attention_alone(comm: Communicator) -> None:
    def results(first: int) -> tuple[int, list[torch.Tensor]]:
        """The bytes between forward and backward, and loss and gradients. `first`: of the layers whose attention is checkpointed."""
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.3, batch_first=True)
        model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        mpitrain.fully_shard(model, comm)
        if first < 3:
            mpitrain.checkpoint_activations(model, model.layers[first:] if first else None, what="attention")
        with Tracker() as tracker:
            loss = model(torch.randn(2, 50, WIDTH)).square().mean()
            held = tracker.now["activations"]
        loss.backward()
        return held, [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    (none, expected), (all_three, got), (two, others) = results(3), results(0), results(1)
    assert len(expected) > 1
    for each in (got, others):
        assert all(torch.equal(a, b) for a, b in zip(each, expected, strict=True))
    assert all_three < 0.5 * none  # with dropout, an attention keeps the weights of each token for each
    assert 2 * (none - all_three) == 3 * (none - two)


def test_a_copy_of_a_model_runs_its_own_parameters() -> None:
    model = mpitrain.checkpoint_activations(Model())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    loss_of(twin, 0).backward()
    assert all(param.grad is None for param in model.parameters())
    assert twin.blocks[0].body[0].weight.grad is not None
    with torch.no_grad():
        assert twin(torch.zeros(1, 1, dtype=torch.int64)).abs().max() == 0


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda: mpitrain.checkpoint_activations(nn.Linear(2, 2)), "this Linear has no stack of blocks"),
        (lambda: mpitrain.checkpoint_activations(Model(), []), "this Model has no stack of blocks"),
        (lambda: mpitrain.checkpoint_activations(Model(), [nn.Linear(2, 2)]), "this Linear is not part of the model"),
        (
            lambda: mpitrain.checkpoint_activations(mpitrain.checkpoint_activations(Model())),
            "this Block is checkpointed already",
        ),
        (
            lambda: mpitrain.checkpoint_activations(Model(), what="attention"),
            "this Block has no module whose class name ends with Attention",
        ),
        (
            lambda: mpitrain.checkpoint_activations(Model(), what="attn"),
            "expected what='block' or 'attention', got 'attn'",
        ),
    ],
)
def test_wrong_arguments(comm: Communicator, wrong: Callable[[], None], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        wrong()
