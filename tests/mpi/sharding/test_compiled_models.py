"""`torch.compile` of a whole sharded model, and of code that calls one: it leaves the code around each forward of a unit alone."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sharded_models import assert_same, floats, mine
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics
from torch.nn.attention import flex_attention as attention

import mpitrain
from collectives import Communicator
from mpitrain.sharding import fully_shard

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute:UserWarning"
    ),  # torch's compiler looks at it, and hides that
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """More blocks than torch's compiler compiles one function for (`recompile_limit`)."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(9))
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def whole(model: nn.Module, counter: Callable[..., object]) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(model, backend=counter)


def in_place(model: nn.Module, counter: Callable[..., object]) -> Callable[[torch.Tensor], torch.Tensor]:
    model.compile(backend=counter)
    return model


def function(model: nn.Module, counter: Callable[..., object]) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(lambda x: model(x * 1.0), backend=counter)


@pytest.mark.rest
@pytest.mark.parametrize(("compiled", "storage"), [(whole, "private"), (in_place, "resident"), (function, "resident")])
def test_a_compiled_model_trains_as_plain_torch_does(comm: Communicator, compiled: Callable, storage: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    plain = Model()
    model = fully_shard(copy.deepcopy(plain), comm, storage=storage)
    calls = plain, compiled(model, counter)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    frames = []
    for step in range(3):
        losses = []
        for call, optimizer, rows in zip(calls, optimizers, (slice(None), mine(comm)), strict=True):
            loss = call(floats(step, 5)[rows]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach() / comm.size)
        comm.all_reduce(losses[1])
        torch.testing.assert_close(losses[1], losses[0] * comm.size, rtol=1e-5, atol=1e-6)
        frames.append(counter.frame_count)
    assert frames[0] > 0 and frames[1] == frames[2]


@pytest.mark.rest
@pytest.mark.parametrize("storage", ["resident", "private"])
def test_a_compiled_step_with_its_backward(comm: Communicator, storage: str) -> None:
    torch._dynamo.reset()
    plain = Model()
    model = fully_shard(copy.deepcopy(plain), comm, storage=storage)

    def step(net: nn.Module, x: torch.Tensor) -> None:
        net(x * 1.0).square().sum().backward()

    compiled = torch.compile(step, backend="eager")
    for number in range(2):
        for net, call in ((plain, step), (model, compiled)):
            call(net, floats(number, 5))
            torch.optim.SGD(net.parameters(), lr=1e-3).step()
            net.zero_grad()
    assert_same(model, plain, grads=False, rtol=1e-5, atol=1e-6)


def compiled_frames(folder: Path) -> list[str]:
    """Functions of this folder that torch's compiler has compiled or tried to."""
    return [
        f"{each.co_filename}: {each.co_name}" for each in get_compilation_metrics() if str(folder) in each.co_filename
    ]


def of_torch(model: nn.Module) -> Callable[[torch.Tensor], None]:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, eps=1e-3
    )  # BatchNorm leaves biases before it rounding errors

    def step(x: torch.Tensor) -> None:
        model(x).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def of_mpitrain(model: nn.Module) -> Callable[[torch.Tensor], None]:
    optimizer, average = mpitrain.optim.LAMB(model.parameters(), lr=1e-2), mpitrain.EMA(model, 0.9)

    def step(x: torch.Tensor) -> None:
        with model.no_sync():  # type: ignore[operator]
            model(x).square().sum().backward()
        model(x).square().sum().backward()
        mpitrain.clip_grad_norm_(model, 1.0)
        optimizer.step()
        average.update()
        model.zero_grad()

    return step


def alone(model: nn.Module) -> Callable[[torch.Tensor], None]:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, eps=1e-3
    )  # BatchNorm leaves biases before it rounding errors
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")

    def step(x: torch.Tensor) -> None:
        model(x).square().sum().backward()
        compiled()
        model.zero_grad()

    return step


@pytest.mark.rest
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method`:DeprecationWarning"
)  # a module that torch imports to compile AdamW
@pytest.mark.parametrize(("make", "storage"), [(of_torch, "resident"), (of_mpitrain, "private"), (alone, "resident")])
def test_the_compiler_leaves_this_library_alone(
    comm: Communicator, make: Callable[[nn.Module], Callable[[torch.Tensor], None]], storage: str
) -> None:
    """It would compile a function again for each parameter, and log that it has reached its limit."""
    found = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        clear_compilation_metrics()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), *(nn.Sequential(Block(), nn.BatchNorm1d(5)) for _ in range(3)))
        mpitrain.convert_sync_batchnorm(model, comm)
        fully_shard(model, comm, storage=storage)
        step = make(model)
        call = torch.compile(step, backend="eager") if is_compiled and make is not alone else step
        for number in range(3):
            call(floats(number, 5)[mine(comm)])
        found.append(mpitrain.full_state_dict(model))
    assert compiled_frames(Path(__file__).parent), "the model's forwards"
    assert compiled_frames(Path(mpitrain.__file__).parent.parent / "mpitrain") == []
    assert compiled_frames(Path(mpitrain.__file__).parent.parent / "collectives") == []
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)


def test_one_graph_of_a_whole_model_is_refused(comm: Communicator) -> None:
    torch._dynamo.reset()
    model = fully_shard(Model(), comm)
    call = torch.compile(lambda x: model(x), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"block\.compile\(\)"):
        call(floats(0, 5))
    assert model(floats(0, 5)).shape == (12, 3)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_operations_of_a_higher_order(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first forward in private storage is watched for reads of freed memory."""
    monkeypatch.setattr(attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(5, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.q(x).view(1, 12, 3, 16).transpose(1, 2).chunk(3, 1)
            return attention.flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (i - j) * 0.1)

    model = nn.Sequential(Attention(), nn.ReLU())
    with torch.no_grad():
        expected = model(floats(0, 5))
        fully_shard(model[0], comm, storage="private")
        fully_shard(model, comm, storage="private")
        torch.testing.assert_close(model(floats(0, 5)), expected)
