"""LAMB and LARS on parameters that are spread over ranks: the numbers of one process, by one message a step.

The gradients are given, and not computed: they are the same at any number of ranks, so that only the optimizer differs.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainers import maker
from torch import nn
from ways import WAYS, options_of, spread

import mpitrain
from collectives import Communicator
from collectives.diagnosis.record import last_operations
from mpitrain.job.config import ConfigError
from mpitrain.models import GPT, GPTConfig, LanguageModel, decay_groups, muon_groups
from mpitrain.models.llama import Llama
from mpitrain.models.sizes import LlamaConfig
from mpitrain.optim.elementwise import SGD
from mpitrain.optim.whole_norms import WholeNorms
from mpitrain.placement.marks import box_of, spread_of
from mpitrain.placement.parts import part_of
from mpitrain.sharding.unit.layout import rows_of
from mpitrain.stages import pipeline
from mpitrain.weights.initial_values import initialize

Make = Callable[[nn.Module], torch.optim.Optimizer]
MAKES: dict[str, Make] = {
    "lamb": lambda model: mpitrain.optim.LAMB(decay_groups(model, 0.1), lr=0.02),
    "lars": lambda model: mpitrain.optim.LARS(decay_groups(model, 0.1), lr=10.0),
    "lamb, always": lambda model: mpitrain.optim.LAMB(model.parameters(), lr=0.02, weight_decay=0.0, always_adapt=True),
}
STEPS = 4


class Odd(nn.Module):
    """Sizes that no number of ranks divides, so that cuts fall within matrices, and parameters of one element and of none dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 7), nn.LayerNorm(7)) for _ in range(2)
        )
        self.filters = nn.Conv2d(3, 5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1, 1))


def part_on_this_rank(param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a whole tensor of the shape of the plain model's parameter."""
    part, box = part_of(param), box_of(param)
    if part is not None:
        whole = part.take(whole)
    return whole if box is None else rows_of(whole, box)


def given(model: nn.Module, shapes: dict[str, torch.Size], step: int) -> None:
    """Give the parameters the gradients of a step."""
    generator = torch.Generator().manual_seed(step)
    grads = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, param in model.named_parameters():
        param.grad = part_on_this_rank(param, grads[name]).clone()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, plain: nn.Module, number: int) -> Counter[str]:
    """A step with given gradients. The collectives that the flight record shows for it."""
    given(model, {name: param.shape for name, param in plain.named_parameters()}, number)
    before = max((operation.number for operation in last_operations()), default=-1)
    optimizer.step()
    return Counter(operation.name for operation in last_operations() if operation.number > before)


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    """The parts of this rank are those of the plain model, within 1e-6 of the largest element."""
    whole = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        expected = part_on_this_rank(param, whole[name].detach())
        largest = whole[name].detach().abs().max().item()
        torch.testing.assert_close(
            param.detach(), expected, rtol=0, atol=1e-6 * largest, msg=lambda t, n=name: f"{n}: {t}"
        )


def trained_alike(
    model: nn.Module, plain: nn.Module, make: Make
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Train both, and compare them. Each step has one message more than one of SGD, and one for what two stages have.

    The first step has a check besides.
    """
    mine, its = make(model), make(plain)
    usual = step(model, SGD(model.parameters(), lr=0.0), plain, 0)
    marks = [found for param in model.parameters() if (found := spread_of(param)) is not None]
    over, compared = {found.holders for found in marks}, {found.alike for found in marks}
    over |= {
        part.tied for param in model.parameters() if (part := part_of(param)) is not None and part.tied is not None
    }
    for number in range(STEPS):
        more = step(model, mine, plain, number) - usual
        step(plain, its, plain, number)
        of_checks = more.pop("all_gather_object", 0)
        assert of_checks == (number == 0) * sum(comm.size > 1 for comm in compared)
        assert more.total() == more["all_reduce"] == sum(comm.size > 1 for comm in over)
    assert_same(model, plain)
    # A factor of both norms would cancel in a trust ratio.
    params, whole = dict(model.named_parameters()), dict(plain.named_parameters())
    (norms,) = WholeNorms(list(params.values())).of(list(params.values()))
    assert norms == pytest.approx([whole[name].norm().item() for name in params], rel=1e-5)
    return mine, its


@pytest.fixture
def plain() -> Odd:
    torch.manual_seed(0)
    return Odd()


@pytest.mark.shared_cases
@pytest.mark.parametrize(("kind", "way"), spread(MAKES, WAYS, all_on_2=False))
def test_on_shards(comm: Communicator, plain: Odd, kind: str, way: str) -> None:
    torch.manual_seed(0)
    model, options = Odd(), options_of(comm, way)
    mesh = options.pop("mesh", comm)
    for module in (*model.blocks, model):
        mpitrain.fully_shard(module, mesh, **options)
    trained_alike(model, plain, MAKES[kind])


@pytest.mark.parametrize("kind", ["lamb", "lars"])
def test_a_checkpoint_goes_on_at_another_number_of_ranks(
    comm: Communicator, shared_tmp: Path, plain: Odd, kind: str
) -> None:
    """From all ranks to one, and from one to all."""
    torch.manual_seed(0)
    model = mpitrain.fully_shard(Odd(), comm)
    mine, its = trained_alike(model, plain, MAKES[kind])
    mpitrain.save(shared_tmp / "sharded", model, mine)
    if comm.rank == 0:
        mpitrain.save(shared_tmp / "plain", plain, its)
    comm.barrier()
    alone, cut = Odd(), mpitrain.fully_shard(Odd(), comm)
    of_alone, of_cut = MAKES[kind](alone), MAKES[kind](cut)
    mpitrain.load(shared_tmp / "sharded", alone, of_alone)
    mpitrain.load(shared_tmp / "plain", cut, of_cut)
    for number in range(STEPS, STEPS + 2):
        for some, optimizer in ((plain, its), (alone, of_alone), (cut, of_cut)):
            step(some, optimizer, plain, number)
    assert_same(alone, plain)
    assert_same(cut, plain)


def gpt() -> LanguageModel:
    """Heads and a vocabulary that two ranks cannot share equally."""
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab=51, context=8, width=24, layers=3, heads=3))


def llama() -> LanguageModel:
    """One head of keys and values, which two ranks both hold."""
    torch.manual_seed(0)
    return Llama(LlamaConfig(vocab=51, context=8, width=24, layers=3, heads=2, kv_heads=1, tied=True))


@pytest.fixture
def free() -> Iterator[list[Any]]:
    """Meshes that are freed after the test."""
    meshes: list[Any] = []
    yield meshes
    for each in meshes:
        each.free()


@pytest.mark.rest
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", ["lamb", "lars"])
@pytest.mark.parametrize("make", [gpt, llama])
def test_with_tensor_parallelism(
    comm: Communicator, make: Callable[[], LanguageModel], kind: str, free: list[Any]
) -> None:
    """Not sharded on two ranks, sharded on four. Parameters that all ranks of a layer hold count once."""
    model, mesh = make(), mpitrain.mesh(comm, tp=2)
    free.append(mesh)
    mpitrain.tensor_parallel(model, mesh["tp"])
    if comm.size > 2:
        for module in (*model.blocks, model):
            mpitrain.fully_shard(module, mesh)
    trained_alike(model, make(), MAKES[kind])


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("tp", "schedule"), [(1, "1f1b"), (1, "interleaved"), (2, "1f1b")])
@pytest.mark.parametrize("make", [gpt, llama])
def test_in_stages(
    comm: Communicator, make: Callable[[], LanguageModel], schedule: str, tp: int, free: list[Any]
) -> None:
    """The stages have different parameters, but a tied one, of which both keep the same bits."""
    if comm.size % (2 * tp):
        pytest.skip("two stages of two ranks each need four")
    model, mesh = make(), mpitrain.mesh(comm, pp=2, tp=tp)
    free.append(mesh)
    mpitrain.tensor_parallel(model, mesh["tp"])
    pipeline(model, mesh["pp"], schedule, micro_batches=4)
    mpitrain.fully_shard(model, mesh)
    trained_alike(model, make(), MAKES["lamb"])
    bits = mesh["pp"].all_gather_object(model.wte.weight.detach().view(torch.int32).sum().item())
    assert bits[0] == bits[1]


@pytest.mark.rest
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_the_main_job_resumes_bit_for_bit(
    comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """And refuses to go on with another optimizer."""
    make = maker(comm, shared_tmp, monkeypatch)
    words = ["--optim.name", name, "--checkpoint.every", "2", "--optim.schedule", "wsd", "--optim.layer-decay", "0.8"]
    whole = make("whole", 4, *words)
    whole.fit()
    middle = str(whole.run.checkpoint(2))
    again = make("again", 4, *words, "--resume", middle)
    again.fit()
    assert again.step == 4
    for mine, its in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, its)
    other = make("other", 4, "--resume", middle)
    with pytest.raises(
        ConfigError, match=f"has the state of optim.name {name}, here adamw; continue with its optimizer"
    ):
        other.fit()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["lamb", "muon"])
@pytest.mark.parametrize("in_optimizer", [False, True])
def test_a_stage_that_trains_nothing(comm: Communicator, name: str, in_optimizer: bool, free: list[Any]) -> None:
    """Stage 0 is frozen: its rank's optimizer has no parameters, or parameters without gradients. Stage 1 trains as in one process."""
    config = GPTConfig(vocab=51, context=8, width=24, layers=2, heads=2, tied=False)
    plain, model = (GPT(config) for _ in range(2))
    initialize(plain, seed=1)
    model.load_state_dict(plain.state_dict())
    mesh = mpitrain.mesh(comm, pp=2)
    free.append(mesh)
    pipeline(model, mesh["pp"], "1f1b", micro_batches=2)
    trained = set(comm.broadcast_object([name for name, _ in model.named_parameters()], root=1))

    def freeze(each: nn.Module) -> None:
        for name, param in each.named_parameters():
            param.requires_grad_(name in trained)

    if not in_optimizer:
        freeze(model)
        freeze(plain)
    mpitrain.fully_shard(model, mesh)
    make = MAKES.get(name, lambda each: mpitrain.optim.Muon(muon_groups(each, 0.1), ns_dtype=torch.float32))
    mine, its = make(model), make(plain)
    freeze(model)
    freeze(plain)
    shapes = {name: param.shape for name, param in plain.named_parameters()}
    for number in range(2):
        for each, optimizer in ((model, mine), (plain, its)):
            given(each, shapes, number)
            for param in each.parameters():
                if not param.requires_grad:
                    param.grad = None
            if each is model:
                assert mpitrain.grad_norms(model).keys() == trained
            optimizer.step()
    assert_same(model, plain)


Pass = Callable[[list[nn.Parameter], bool], torch.optim.Optimizer]
DIFFERENT: dict[str, tuple[Pass, str]] = {
    "order": (
        lambda params, odd: mpitrain.optim.LAMB([*params[1::-1], *params[2:]] if odd else params),
        r"LAMB: the ranks differ: 0.weight of shape \(3, 3\) on rank 0, 1.weight of shape \(3, 3\) on rank 1; pass the same param",
    ),
    "number": (
        lambda params, odd: mpitrain.optim.LARS(params[: 1 if odd else 2]),
        r"LARS: the ranks differ: 1.weight of shape \(3, 3\) on rank 0, nothing more on rank 1",
    ),
    "a setting": (
        lambda params, odd: mpitrain.optim.LAMB(params, lr=0.1 + odd, trust_clip=odd),
        r"LAMB: the ranks differ: group 0 with betas .* trust_clip False, .* trust_clip True",
    ),
    "the dtype of Muon": (
        lambda params, odd: mpitrain.optim.Muon(params, ns_dtype="bfloat16" if odd else "float32"),
        r"Muon: the ranks differ: .*ns_dtype float32.* ns_dtype bfloat16",
    ),
    "what Muon updates": (
        lambda params, odd: mpitrain.optim.Muon([{"params": params, "use_muon": odd}]),
        r"Muon: the ranks differ: .*use_muon False .*use_muon True",
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ(comm: Communicator, what: str) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    for block in model[:2]:
        mpitrain.fully_shard(block, comm)  # each is the parameter "weight", until the whole model is sharded
    params = list(mpitrain.fully_shard(model, comm).parameters())
    make, text = DIFFERENT[what]
    optimizer = make(params, comm.rank == 1)
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=text):
        optimizer.step()
