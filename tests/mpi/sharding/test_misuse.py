"""What would compute something wrong, or crash, raises; what plain torch does with gradients and hooks holds for shards too."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from sharded_models import shard
from torch import nn
from ways import WAYS

import mpitrain
from collectives import Communicator, Mesh
from mpitrain.sharding import fully_shard

pytestmark = pytest.mark.ranks(1, 2)


class Blocks(nn.Module):
    """Three blocks, run in any order."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))
        self.order = [0, 1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return x


X = torch.linspace(-1, 1, 20).reshape(4, 5)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(X).square().mean()


def step(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def swap(model: nn.Module) -> None:
    with mpitrain.EMA(model, 0.5).swapped():
        pass


def write(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)


@pytest.mark.parametrize("between", [step, swap, write])
@pytest.mark.parametrize("way", WAYS)
def test_writing_between_a_forward_and_its_backward_raises(
    comm: Communicator, way: str, between: Callable[[nn.Module], None]
) -> None:
    model = shard(Blocks(), comm, way)
    loss_of(model).backward()
    loss = loss_of(model)
    between(model)
    with pytest.raises(RuntimeError, match="parameters were written between a forward"):
        loss.backward()
    comm.barrier()
    loss_of(model).backward()  # and on it goes


@pytest.mark.parametrize("way", WAYS)
def test_writing_within_a_backward_raises(comm: Communicator, way: str) -> None:
    """As in plain torch: a hook on an activation writes to a parameter before or after the backward has passed it."""
    model = shard(Blocks(), comm, way)
    written = [block[0].weight for block in model.blocks]  # type: ignore[index]

    def backward(at: int, hooked: int) -> None:
        def write(grad: torch.Tensor) -> None:
            with torch.no_grad():
                written[at].mul_(2)

        output: list[torch.Tensor] = []
        keep = model.blocks[hooked].register_forward_hook(lambda module, args, out: output.append(out))
        loss = model(torch.ones(2, 5)).square().sum()
        keep.remove()
        output[0].register_hook(write)
        loss.backward()

    backward(at=2, hooked=0)
    model.zero_grad()
    with pytest.raises(
        RuntimeError, match=r"blocks.0.0.weight was written within a backward|were written between a forward"
    ):
        backward(at=0, hooked=1)
    model.zero_grad()
    backward(at=2, hooked=0)


@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_ranks_that_run_other_modules_are_told(comm: Communicator, trains: bool, replicas: bool) -> None:
    if comm.size < (4 if replicas else 2) or comm.size % 2:
        pytest.skip("needs two ranks that shard")
    mesh = Mesh(comm, {"dp_replicate": 2, "dp_shard": -1}) if replicas else comm
    model = fully_shard(Blocks(), mesh=mesh, storage="private", reshard_after_forward=False)
    if comm.rank % 2:
        model.order = [1, 0, 2]

    def run() -> None:
        with torch.set_grad_enabled(trains):
            loss_of(model).backward()

    with pytest.raises(RuntimeError, match="the ranks ran different sharded modules"):
        run()
    comm.barrier()
    model.order = [0, 1, 2]
    loss_of(model).backward()
    if replicas:
        mesh.free()


def test_copies_of_shards_may_run_other_modules(comm: Communicator) -> None:
    if comm.size % 2:
        pytest.skip("two copies")
    mesh = Mesh(comm, {"dp_replicate": 2, "dp_shard": -1})
    model = fully_shard(Blocks(), mesh=mesh, storage="private")
    if mesh["dp_replicate"].rank:
        model.order = [2, 1, 0]
    for trains in (True, False, True):
        with torch.set_grad_enabled(trains):
            loss = loss_of(model)
        if trains:
            loss.backward()
    mesh.free()


@dataclass
class Kept:
    tensor: torch.Tensor


class Shows(nn.Module):
    """Returns its parameter, or a view of it, as it is, in a dict or in an object."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.weight, self.what = nn.Parameter(torch.ones(64, 5)), what

    def forward(self, x: torch.Tensor) -> object:
        views = {"itself": self.weight, "view": self.weight[:2], "within": {"w": [self.weight.t()]}}
        views["object"] = SimpleNamespace(found=Kept(self.weight))
        return views[self.what] if self.what in views else self.weight.clone()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("what", ["itself", "view", "within", "object"])
def test_a_module_cannot_return_what_is_given_back(comm: Communicator, what: str, grad: bool) -> None:
    model = fully_shard(Shows(what), comm, storage="private")
    with torch.set_grad_enabled(grad):
        if comm.size == 1:
            model(X)  # nothing is given back
        else:
            with pytest.raises(RuntimeError, match=r"returned one of its parameters \(weight, ...\) or a view"):
                model(X)
    copies = fully_shard(Shows("copy"), comm, storage="private")
    copies(X).sum().backward()
    assert all((param.grad == 1).all() for param in copies.parameters())


class Keeper(nn.Module):
    """A block keeps a view of its parameter, which the parent reads, or only the block itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.block, self.how, self.kept = nn.Linear(32, 32), how, []
        self.block.register_forward_hook(self.keep)

    def keep(self, block: nn.Module, *_: object) -> None:
        view = block.weight.t()
        if self.how == "list":
            self.kept.append({"w": view})
        elif self.how == "closure":
            self.kept.append(lambda: view)
        else:
            block.view = view
            block.norm = block.view.norm().detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.block(x)
        if self.how == "by the block":
            return out * self.block.norm + torch.zeros_like(self.block.view).size(0)
        kept = {"list": lambda: self.kept[-1]["w"], "closure": lambda: self.kept[-1]()}
        return out + (kept.get(self.how, lambda: self.block.view)() * 2).sum()


@pytest.mark.parametrize("how", ["attribute", "list", "closure", "by the block"])
def test_a_view_of_a_parameter_is_not_read_when_its_memory_is_freed(comm: Communicator, how: str) -> None:
    torch.manual_seed(0)
    plain = Keeper(how)
    model = Keeper(how)
    model.load_state_dict(plain.state_dict())
    fully_shard(model.block, comm, storage="private")
    fully_shard(model, comm, storage="private")
    x = torch.ones(2, 32)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            if comm.size == 1 or how == "by the block":
                torch.testing.assert_close(model(x), plain(x))
            else:
                with pytest.raises(
                    RuntimeError, match=r"parameter block.weight, or a view of it, was kept after the forward of block"
                ):
                    model(x)


class Momentum(nn.Module):
    """The forward writes an average of the weights, or another parameter, and a buffer."""

    def __init__(self, how: str) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.query, self.key = nn.Linear(5, 5), nn.Linear(5, 5).requires_grad_(False)
        self.register_buffer("count", torch.zeros(()))
        self.how, self.writes = how, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        with torch.no_grad():
            for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True) if self.writes else ():
                if self.how == "in place":
                    key.mul_(0.5).add_(query, alpha=0.5)
                elif self.how == "data in place":
                    torch._foreach_mul_([key.data], 0.5)
                else:
                    key.data = key.data * 0.5 + query.data * 0.5
        return (self.query(x) - self.key(x)).square().mean()


@pytest.mark.parametrize("how", ["in place", "data in place", "data"])
@pytest.mark.parametrize("way", ["stage 0", "stage 2, private", "stage 3", "stage 3, private"])
def test_a_forward_must_not_write_parameters(comm: Communicator, way: str, how: str) -> None:
    model, plain = shard(Momentum(how), comm, way), Momentum(how)
    plain.writes = False
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(RuntimeError, match=r"key\.weight.* not damaged.*\(register_buffer\)"),
        ):
            model(X)
        comm.barrier()
    model.writes = False
    for _ in range(2):
        torch.testing.assert_close(model(X), plain(X))
    found = mpitrain.full_state_dict(model)
    assert comm.rank or all(torch.equal(found[f"key.{name}"], value) for name, value in plain.key.state_dict().items())
    if how != "data in place":  # begins later: values of in-place writes may be damaged, which the message says
        model.writes = True
        with pytest.raises(RuntimeError, match=r"key\.weight(, key\.bias)?: (not )?damaged"):
            model(X)
        comm.barrier()


@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_somebody_keeps_stay_as_they_are(comm: Communicator, way: str) -> None:
    model = shard(Blocks(), comm, way)
    kept, views = [], []
    for number in range(4):
        (model(X + number)).square().mean().backward()
        grads = [param.grad for param in model.parameters()]
        if number == 1:
            kept, views = [(grad, grad.clone()) for grad in grads], []
        elif number == 2:
            views = [(grad.view(-1), grad.clone().view(-1)) for grad in grads]
        del grads
        model.zero_grad()
    assert all(torch.equal(*pair) for pair in (*kept, *views))


@pytest.mark.parametrize("way", ["stage 1", "stage 3", "stage 3, private"])
def test_what_no_sync_leaves_is_not_overlooked(comm: Communicator, way: str) -> None:
    model = shard(Blocks(), comm, way)
    other = shard(Blocks(), comm, way)
    loss_of(other).backward()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    with model.no_sync():
        (loss_of(model) * float("nan")).backward()
    if comm.size == 1 and all(param.grad is not None for param in model.parameters()):
        return  # one rank has nothing to reduce
    with pytest.raises(RuntimeError, match="wait to be reduced"):
        optimizers[0].step()
    params = list(model.parameters())
    for read in (
        lambda: mpitrain.clip_grad_norm_(model, 1.0),
        lambda: mpitrain.grad_norms(model),
        lambda: mpitrain.GradScaler(model).unscale_(),
        lambda: torch.nn.utils.clip_grad_norm_(params, 1.0),
        lambda: torch.amp.GradScaler("cpu")._unscale_grads_(optimizers[0], torch.ones(1), torch.zeros(1), False),
    ):
        with pytest.raises(RuntimeError, match="wait to be reduced"):
            read()
    optimizers[1].step()  # another model's
    model.zero_grad()
    loss_of(model).backward()
    assert mpitrain.clip_grad_norm_(model, 1.0).isfinite()
    optimizers[0].step()


@pytest.mark.parametrize("way", WAYS)
def test_hooks_on_shards(comm: Communicator, way: str) -> None:
    model = shard(Blocks(), comm, way)
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
    before = [param.detach().clone() for param in model.parameters()]

    def optimize(param: torch.Tensor) -> None:
        optimizers[param].step()  # type: ignore[index]
        optimizers[param].zero_grad()  # type: ignore[index]

    handles = [param.register_post_accumulate_grad_hook(optimize) for param in model.parameters()]
    loss_of(model).backward()
    reference = shard(Blocks(), comm, way)
    loss_of(reference).backward()
    for param, old, other in zip(model.parameters(), before, reference.parameters(), strict=True):
        assert param.grad is None
        torch.testing.assert_close(param.detach(), old - 0.1 * other.grad)
    for handle in handles:
        handle.remove()
    handle = next(model.parameters()).register_hook(lambda grad: grad)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.0\.weight|0\.weight"), torch.no_grad():
        model(X)
    handle.remove()
    comm.barrier()
    loss_of(model).backward()


def test_hooks_on_shards_run_for_the_gradients_of_their_backward(comm: Communicator) -> None:
    """Not for those of earlier backwards, and not for `autograd.grad` of an input."""
    counts: list[list[str]] = []
    for model in (nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))):
        called: list[str] = []
        if counts:
            model = fully_shard(model, comm)
        model.forward = lambda x, part: model[part](x)  # type: ignore[method-assign]  # noqa: B023
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))  # noqa: B023
        for part in (0, 1):
            model(X, part).sum().backward()
        x = X.clone().requires_grad_()
        torch.autograd.grad(model(x, 0).sum(), x)
        counts.append(sorted(called))
    assert counts[0] == counts[1]


def test_a_slice_of_a_sharded_sequential_is_a_plain_one(comm: Communicator) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)))
    fully_shard(model, comm)
    expected = model(X)
    part = model[1:]
    assert type(part) is nn.Sequential and part[0] is model[1]
    with mpitrain.unshard(model):
        torch.testing.assert_close(part(model[0](X)), expected)
